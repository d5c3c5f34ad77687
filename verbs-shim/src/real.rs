//! The functions behind the hooks: those of the next library in the search order.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};

use crate::path::{self, TreePath};

/// A function of the C library, looked up when first needed.
pub struct Real {
    name: &'static CStr,
    address: AtomicPtr<c_void>,
}

impl Real {
    /// The function of that name.
    pub const fn new(name: &'static CStr) -> Self {
        Self {
            name,
            address: AtomicPtr::new(null_mut()),
        }
    }

    /// Its address; `None`, and `errno` ENOSYS, if no other library has it.
    pub fn address(&self) -> Option<*mut c_void> {
        let mut address = self.address.load(Ordering::Relaxed);
        if address.is_null() {
            // SAFETY: the name is zero-terminated. Of two threads here both find the same.
            address = unsafe { libc::dlsym(libc::RTLD_NEXT, self.name.as_ptr()) };
            self.address.store(address, Ordering::Relaxed);
        }
        if address.is_null() {
            set_errno(libc::ENOSYS);
            return None;
        }
        Some(address)
    }

    /// Its address in a library that is loaded already, whether in the search order or not.
    pub fn address_in(&self, library: &CStr) -> Option<*mut c_void> {
        // SAFETY: the name is zero-terminated. The handle is not closed, so the library stays.
        let handle = unsafe { libc::dlopen(library.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
        if handle.is_null() {
            return None;
        }
        // SAFETY: the handle is live, the name zero-terminated.
        let address = unsafe { libc::dlsym(handle, self.name.as_ptr()) };
        self.address.store(address, Ordering::Relaxed);
        (!address.is_null()).then_some(address)
    }
}

/// What a C function returns when it fails.
pub trait Failure {
    /// The value.
    const FAILURE: Self;
}

impl Failure for c_int {
    const FAILURE: Self = -1;
}

impl Failure for isize {
    const FAILURE: Self = -1;
}

impl<T> Failure for *mut T {
    const FAILURE: Self = null_mut();
}

/// Calls `function` with the path, or with the path in the tree if that exists.
///
/// # Safety
/// The path is null or zero-terminated.
#[inline]
pub unsafe fn with_path<R>(path: *const c_char, function: impl FnOnce(*const c_char) -> R) -> R {
    if let Some(tree) = path::tree()
        && !path.is_null()
    {
        // SAFETY: the caller says that it is zero-terminated.
        let bytes = unsafe { CStr::from_ptr(path) }.to_bytes();
        if path::is_ours(bytes) {
            return redirect(tree, path, bytes, function);
        }
    }
    function(path)
}

/// Not inlined: only a path of ours is to cost stack.
#[inline(never)]
fn redirect<R>(
    tree: &[u8],
    path: *const c_char,
    bytes: &[u8],
    function: impl FnOnce(*const c_char) -> R,
) -> R {
    match TreePath::new(tree, bytes) {
        Some(ours) if exists(ours.as_ptr()) => function(ours.as_ptr()),
        _ => function(path),
    }
}

fn exists(path: *const c_char) -> bool {
    let errno = errno();
    // SAFETY: the path is that of a live `TreePath`, zero-terminated. The bare system call is used
    // because the C function of that name is one of the hooks.
    let result = unsafe { libc::syscall(libc::SYS_faccessat, libc::AT_FDCWD, path, libc::F_OK) };
    set_errno(errno);
    result == 0
}

pub fn errno() -> c_int {
    // SAFETY: gives the address of this thread's own errno.
    unsafe { *libc::__errno_location() }
}

pub fn set_errno(value: c_int) {
    // SAFETY: gives the address of this thread's own errno.
    unsafe { *libc::__errno_location() = value }
}
