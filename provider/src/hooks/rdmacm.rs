//! What librdmacm says to the kernel: it opens `rdma_cm`, and writes commands to it.
//!
//! A thread may be cancelled while it waits for an event, as in the kernel's call: nothing is held then, and the
//! functions on its stack have nothing to free (`C-unwind`).

use std::ffi::{CStr, OsStr, c_char, c_int, c_uint, c_void};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::OnceLock;

use ferroce_engine::runtime::Guest;
use libc::mode_t;

use super::set_errno;
use crate::elf::Object;
use crate::guard::guard;
use crate::ucma::{self, Step, Wanted};

unsafe extern "C-unwind" {
    // Cancellation points, which end the thread by unwinding.
    fn read(fd: c_int, bytes: *mut c_void, len: usize) -> isize;
    #[link_name = "write"]
    fn native_write(fd: c_int, bytes: *const c_void, len: usize) -> isize;
}

/// Whether the object is a librdmacm, by its symbol versions: the file may have any name.
pub fn is_librdmacm(object: &Object) -> bool {
    object
        .versions()
        .iter()
        .any(|version| version.starts_with("RDMACM_1."))
}

/// Redirects the calls of a librdmacm, unless another file of the provider has done it. `own` is this file.
pub fn install(library: &Object, own: Option<&Path>) -> io::Result<()> {
    if library
        .target(c"write")
        .is_some_and(|target| is_of_another(target, own))
    {
        return Ok(());
    }
    let hooks: [(&CStr, *const c_void); 12] = [
        (c"open", open as *const c_void),
        (c"open64", open as *const c_void),
        (c"openat", openat as *const c_void),
        (c"openat64", openat as *const c_void),
        (c"__open_2", open_2 as *const c_void),
        (c"__open64_2", open_2 as *const c_void),
        (c"fstat", fstat as *const c_void),
        (c"fstat64", fstat as *const c_void),
        (c"__fxstat", fxstat as *const c_void),
        (c"__fxstat64", fxstat as *const c_void),
        (c"write", write as *const c_void),
        (c"close", super::close as *const c_void),
    ];
    for (symbol, function) in hooks {
        // SAFETY: the functions have the types of those that they stand for (on 64-bit machines those with and without
        // 64 in their names are the same), and the provider is never unloaded.
        unsafe { library.redirect(symbol, function)? };
    }
    tracing::debug!("{} is hooked", library.path.display());
    Ok(())
}

/// Whether a function is one of another file of the provider.
fn is_of_another(function: *const c_void, own: Option<&Path>) -> bool {
    let mut info = std::mem::MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: there is room for the answer; null is a valid name in it.
    let info = unsafe {
        if libc::dladdr(function, info.as_mut_ptr()) == 0 {
            return false;
        }
        info.assume_init()
    };
    if info.dli_fname.is_null() {
        return false;
    }
    // SAFETY: the name is zero-terminated, and stays as long as the library.
    let file = Path::new(OsStr::from_bytes(
        unsafe { CStr::from_ptr(info.dli_fname) }.to_bytes(),
    ));
    own != Some(file)
        && file
            .file_name()
            .is_some_and(|name| name.as_bytes().starts_with(b"libferroce-rdmav"))
}

/// Whether a path is that of RDMA CM's device file.
fn is_device(path: &[u8]) -> bool {
    let parts = path
        .split(|byte| *byte == b'/')
        .filter(|part| !part.is_empty() && *part != b".");
    path.first() == Some(&b'/') && parts.eq([&b"dev"[..], b"infiniband", b"rdma_cm"])
}

/// Opens a channel, if that is what the path stands for.
///
/// # Safety
/// The path must be null or zero-terminated.
unsafe fn opened(path: *const c_char, flags: c_int) -> Option<c_int> {
    let answer = guard(Some(Err(libc::EIO)), || {
        let _guest = Guest::enter();
        // SAFETY: the caller says that it is zero-terminated.
        let ours = !path.is_null() && is_device(unsafe { CStr::from_ptr(path) }.to_bytes());
        (ours && ucma::is_ours()).then(|| ucma::open(flags))
    });
    answer.map(|answer| {
        answer.unwrap_or_else(|errno| {
            set_errno(errno);
            -1
        })
    })
}

/// `open(2)` for librdmacm.
unsafe extern "C" fn open(path: *const c_char, flags: c_int, mode: mode_t) -> c_int {
    // SAFETY: as the caller's call; without O_CREAT and O_TMPFILE the mode is not looked at.
    unsafe { opened(path, flags).unwrap_or_else(|| libc::open(path, flags, c_uint::from(mode))) }
}

/// `openat(2)` for librdmacm.
unsafe extern "C" fn openat(directory: c_int, path: *const c_char, flags: c_int, mode: mode_t) -> c_int {
    // SAFETY: as for `open`.
    unsafe { opened(path, flags).unwrap_or_else(|| libc::openat(directory, path, flags, c_uint::from(mode))) }
}

/// `open(2)` without a mode, as fortified programs call it.
unsafe extern "C" fn open_2(path: *const c_char, flags: c_int) -> c_int {
    // SAFETY: as the caller's call, which says that the flags need no mode.
    unsafe { opened(path, flags).unwrap_or_else(|| libc::open(path, flags)) }
}

/// `fstat(2)` for librdmacm: a channel is the device that it looks for.
unsafe extern "C" fn fstat(fd: c_int, stat: *mut libc::stat) -> c_int {
    // SAFETY: as the caller's call.
    let result = unsafe { libc::fstat(fd, stat) };
    if result == 0 && guard(false, || ucma::is_channel(fd)) {
        // SAFETY: the call has filled it.
        let stat = unsafe { &mut *stat };
        stat.st_mode = libc::S_IFCHR | 0o666;
        stat.st_rdev = device_number();
    }
    result
}

/// `fstat(2)`, as libraries built before glibc 2.33 call it.
unsafe extern "C" fn fxstat(_version: c_int, fd: c_int, stat: *mut libc::stat) -> c_int {
    // SAFETY: as the caller's call: 64-bit machines have one version of the structure.
    unsafe { fstat(fd, stat) }
}

/// The number of RDMA CM's device: the kernel's, if it has one, as librdmacm may have asked it.
fn device_number() -> libc::dev_t {
    static NUMBER: OnceLock<libc::dev_t> = OnceLock::new();
    *NUMBER.get_or_init(|| {
        // Past the redirection of paths.
        match rustix::fs::stat("/dev/infiniband/rdma_cm") {
            Ok(stat) if stat.st_mode & libc::S_IFMT == libc::S_IFCHR => stat.st_rdev,
            _ => libc::makedev(10, 58),
        }
    })
}

/// `write(2)` for librdmacm.
pub(crate) unsafe extern "C-unwind" fn write(fd: c_int, bytes: *const c_void, len: usize) -> isize {
    match begin(fd, bytes, len) {
        // SAFETY: as the caller's call.
        Step::Other => unsafe { native_write(fd, bytes, len) },
        Step::Done(result) => end(result, len),
        // SAFETY: the descriptor is the program's.
        Step::Event(wanted) => unsafe { await_event(fd, &wanted, len) },
    }
}

/// Waits for an event as the descriptor's flags say: blocking, and then restarted after a signal or not, or not.
///
/// # Safety
/// `fd` must be a channel.
unsafe fn await_event(fd: c_int, wanted: &Wanted, len: usize) -> isize {
    loop {
        let mut ticket = 0u64;
        // SAFETY: there is room for a ticket.
        let got = unsafe { read(fd, (&raw mut ticket).cast(), size_of::<u64>()) };
        if got < 0 {
            return -1;
        }
        if let Some(result) = given(fd, wanted) {
            return end(result, len);
        }
    }
}

/// Does the command, as far as that does not wait for an event.
#[inline(never)]
fn begin(fd: c_int, bytes: *const c_void, len: usize) -> Step {
    guard(Step::Done(Err(libc::EIO)), || {
        let _guest = Guest::enter();
        ucma::write(fd, bytes.cast(), len)
    })
}

/// Gives the program the event that it has a ticket for.
#[inline(never)]
fn given(fd: c_int, wanted: &Wanted) -> Option<Result<(), c_int>> {
    guard(Some(Err(libc::EIO)), || {
        let _guest = Guest::enter();
        ucma::take(fd, wanted)
    })
}

/// What `write` returns.
fn end(result: Result<(), c_int>, len: usize) -> isize {
    match result {
        Ok(()) => len as isize,
        Err(errno) => {
            set_errno(errno);
            -1
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_device_by_its_path() {
        for ours in ["/dev/infiniband/rdma_cm", "//dev/./infiniband//rdma_cm"] {
            assert!(is_device(ours.as_bytes()), "{ours}");
        }
        for other in [
            "",
            "dev/infiniband/rdma_cm",
            "/dev/infiniband/rdma_cm2",
            "/dev/infiniband",
        ] {
            assert!(!is_device(other.as_bytes()), "{other}");
        }
    }

    #[test]
    fn the_c_library_is_no_librdmacm() {
        assert!(!crate::elf::loaded().iter().any(is_librdmacm));
    }

    #[test]
    fn functions_of_others() {
        assert!(!is_of_another(libc::getpid as *const c_void, None));
        assert!(!is_of_another(std::ptr::null(), None));
    }
}
