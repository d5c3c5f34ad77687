//! Starting programs: one that is given another `LD_PRELOAD` gets the shim as well.
//!
//! Programs that preload a library into another one often replace the variable (`env LD_PRELOAD=librspreload.so CMD`).
//! Who removes it means to be without preloads, and is. As these functions run in the child of a `vfork`, the
//! environment is corrected in a copy on the stack.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::mem::transmute;
use std::ptr::null;
use std::sync::OnceLock;

use crate::path::{self, TREE_VARIABLE};
use crate::real::Real;

/// Most variables, and most bytes of the corrected one; with more the environment stays as it is.
const MAX_VARIABLES: usize = 1024;
const MAX_VALUE: usize = 2048;

const PRELOAD: &[u8] = b"LD_PRELOAD=";

/// The file of this library, by which the dynamic linker found it.
static OWN: OnceLock<Vec<u8>> = OnceLock::new();

type Strings = *const *const c_char;

unsafe extern "C" {
    static environ: Strings;
}

/// Finds out where this library is; at load, as later memory may not be allocated.
pub fn load_own() {
    let mut info = std::mem::MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: there is room for the answer, which is only read if there is one; null is a valid name in it.
    let info = unsafe {
        if libc::dladdr(load_own as *const c_void, info.as_mut_ptr()) == 0 {
            return;
        }
        info.assume_init()
    };
    if !info.dli_fname.is_null() {
        // SAFETY: the name is zero-terminated.
        let name = unsafe { CStr::from_ptr(info.dli_fname) };
        let _ = OWN.set(name.to_bytes().to_vec());
    }
}

/// What is wrong with an environment.
struct Wrong<'a> {
    /// Number of its variables.
    count: usize,
    /// Which of them is LD_PRELOAD.
    index: usize,
    /// Its value.
    value: &'a [u8],
    /// The file that is missing in it.
    own: &'a [u8],
}

/// Looks whether an environment has another preload, but not this one, although its program is to see the tree.
///
/// # Safety
/// `environment` must be null or a list of zero-terminated strings that ends with null.
unsafe fn look<'a>(environment: Strings) -> Option<Wrong<'a>> {
    path::tree()?;
    let own = OWN.get()?;
    let (mut found, mut tree, mut count) = (None, false, 0);
    if environment.is_null() {
        return None;
    }
    loop {
        // SAFETY: the caller says so.
        let variable = unsafe { *environment.add(count) };
        if variable.is_null() {
            break;
        }
        // SAFETY: the caller says so.
        let variable = unsafe { CStr::from_ptr(variable) }.to_bytes();
        tree |= variable
            .strip_prefix(TREE_VARIABLE)
            .is_some_and(|rest| rest.starts_with(b"="));
        if let Some(value) = variable.strip_prefix(PRELOAD) {
            found = Some((count, value));
        }
        count += 1;
    }
    let (index, value) = found.filter(|(_, value)| tree && !value.is_empty())?;
    let has_own = value
        .split(|byte| b": ".contains(byte))
        .any(|entry| entry == own.as_slice());
    (!has_own).then_some(Wrong {
        count,
        index,
        value,
        own,
    })
}

/// Calls `function` with the environment as it should be.
///
/// # Safety
/// As for [`look`].
unsafe fn with<R>(environment: Strings, function: impl FnOnce(Strings) -> R) -> R {
    // SAFETY: the caller says so.
    match unsafe { look(environment) } {
        // SAFETY: as above.
        Some(wrong) => unsafe { corrected(environment, &wrong, function) },
        None => function(environment),
    }
}

/// Not inlined: only an environment that is wrong is to cost stack.
///
/// # Safety
/// As for [`look`], which must have given `wrong`.
#[inline(never)]
unsafe fn corrected<R>(environment: Strings, wrong: &Wrong<'_>, function: impl FnOnce(Strings) -> R) -> R {
    let mut text = [0u8; MAX_VALUE];
    let mut variables = [null::<c_char>(); MAX_VARIABLES];
    let length: usize = [PRELOAD, wrong.own, b":", wrong.value]
        .iter()
        .map(|part| part.len())
        .sum();
    if wrong.count >= MAX_VARIABLES || length >= MAX_VALUE {
        return function(environment);
    }
    let mut at = 0;
    for part in [PRELOAD, wrong.own, b":", wrong.value] {
        text[at..at + part.len()].copy_from_slice(part);
        at += part.len();
    }
    for (index, variable) in variables[..wrong.count].iter_mut().enumerate() {
        // SAFETY: the list has so many.
        *variable = unsafe { *environment.add(index) };
    }
    variables[wrong.index] = text.as_ptr().cast();
    function(variables.as_ptr())
}

type Execve = unsafe extern "C" fn(*const c_char, Strings, Strings) -> c_int;
type Spawn = unsafe extern "C" fn(
    *mut libc::pid_t,
    *const c_char,
    *const c_void,
    *const c_void,
    Strings,
    Strings,
) -> c_int;

/// The C library's function of this name, with the environment corrected.
///
/// # Safety
/// As for the real function.
unsafe fn exec(real: &Real, path: *const c_char, arguments: Strings, environment: Strings) -> c_int {
    let Some(address) = real.address() else {
        return -1;
    };
    // SAFETY: the address is that of the C library's function of this type; the caller passes what that wants.
    unsafe {
        let function = transmute::<*mut c_void, Execve>(address);
        with(environment, |environment| function(path, arguments, environment))
    }
}

/// `execve` of the C library.
///
/// # Safety
/// As for the real function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn execve(path: *const c_char, arguments: Strings, environment: Strings) -> c_int {
    static REAL: Real = Real::new(c"execve");
    // SAFETY: as the caller's call.
    unsafe { exec(&REAL, path, arguments, environment) }
}

/// `execvpe` of the C library.
///
/// # Safety
/// As for the real function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn execvpe(path: *const c_char, arguments: Strings, environment: Strings) -> c_int {
    static REAL: Real = Real::new(c"execvpe");
    // SAFETY: as the caller's call.
    unsafe { exec(&REAL, path, arguments, environment) }
}

/// `execv` of the C library.
///
/// # Safety
/// As for the real function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn execv(path: *const c_char, arguments: Strings) -> c_int {
    // SAFETY: as the caller's call; this is the environment that it means.
    unsafe { execve(path, arguments, environ) }
}

/// `execvp` of the C library.
///
/// # Safety
/// As for the real function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn execvp(path: *const c_char, arguments: Strings) -> c_int {
    // SAFETY: as the caller's call; this is the environment that it means.
    unsafe { execvpe(path, arguments, environ) }
}

/// Defines functions that start a program beside the caller.
macro_rules! spawn {
    ($($name:ident $symbol:literal)*) => {
        $(
            /// The C library's function of this name, with the environment corrected.
            ///
            /// # Safety
            /// As for the real function.
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name(
                pid: *mut libc::pid_t,
                path: *const c_char,
                actions: *const c_void,
                attributes: *const c_void,
                arguments: Strings,
                environment: Strings,
            ) -> c_int {
                static REAL: Real = Real::new($symbol);
                let Some(address) = REAL.address() else {
                    return libc::ENOSYS;
                };
                // SAFETY: the address is that of the C library's function of this type; the caller passes what that
                // wants.
                unsafe {
                    let function = transmute::<*mut c_void, Spawn>(address);
                    with(environment, |environment| {
                        function(pid, path, actions, attributes, arguments, environment)
                    })
                }
            }
        )*
    };
}

spawn! {
    posix_spawn c"posix_spawn"
    posix_spawnp c"posix_spawnp"
}
