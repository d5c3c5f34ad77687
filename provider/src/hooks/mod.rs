//! What libibverbs says to the kernel, answered here.
//!
//! A few calls of libibverbs have no op in the provider: they write to the command descriptor, or ask it by ioctl.
//! The provider redirects libibverbs' own calls of `write`, `ioctl` and `close` to the functions below, which look
//! whether the descriptor is one of [`descriptors`], and otherwise do what the C library does. Those of librdmacm are
//! in [`rdmacm`].

pub mod command;
pub mod descriptors;
pub mod rdmacm;

use std::ffi::{c_int, c_ulong, c_void};
use std::io;

use ferroce_engine::runtime::Guest;

use crate::elf::Object;
use crate::guard::guard;

/// Redirects the calls of a libibverbs.
pub fn install(library: &Object) -> io::Result<()> {
    let hooks: [(_, *const c_void); 3] = [
        (c"write", write as *const c_void),
        (c"ioctl", ioctl as *const c_void),
        (c"close", close as *const c_void),
    ];
    for (symbol, function) in hooks {
        // SAFETY: the functions have the types of those that they stand for, and the provider is never unloaded.
        // A release that does not call one of them at all needs no hook there.
        unsafe { library.redirect(symbol, function)? };
    }
    Ok(())
}

/// Sets `errno`, as calls that fail do.
pub fn set_errno(errno: c_int) {
    // SAFETY: the location is valid in every thread.
    unsafe { *libc::__errno_location() = errno };
}

/// `write(2)` for libibverbs.
unsafe extern "C" fn write(fd: c_int, bytes: *const c_void, len: usize) -> isize {
    let answer = guard(Some(Err(libc::EIO)), || {
        // SAFETY: the caller passes `len` readable bytes, as for the system call.
        descriptors::get(fd)?.write(unsafe { std::slice::from_raw_parts(bytes.cast::<u8>(), len) })
    });
    match answer {
        Some(Ok(())) => len as isize,
        Some(Err(errno)) => {
            set_errno(errno);
            -1
        }
        // Outside the guard: who is cancelled here must not be held up.
        // SAFETY: as the caller's call.
        None => unsafe { libc::write(fd, bytes, len) },
    }
}

/// `ioctl(2)` for libibverbs; all of its requests have one pointer.
unsafe extern "C" fn ioctl(fd: c_int, request: c_ulong, argument: *mut c_void) -> c_int {
    let answer = guard(Some(Err(libc::EIO)), || {
        // SAFETY: the caller passes what the request asks for.
        unsafe { descriptors::get(fd)?.ioctl(request, argument) }
    });
    match answer {
        Some(Ok(())) => 0,
        Some(Err(errno)) => {
            set_errno(errno);
            -1
        }
        // SAFETY: as the caller's call.
        None => unsafe { libc::ioctl(fd, request, argument) },
    }
}

/// `close(2)` for libibverbs and librdmacm: frees what belongs to the descriptor.
unsafe extern "C" fn close(fd: c_int) -> c_int {
    guard((), || {
        let _guest = Guest::enter();
        // First: the number may be used again as soon as it is closed.
        if let Some(descriptor) = descriptors::remove(fd) {
            descriptor.closed();
        }
    });
    // SAFETY: as the caller's call.
    unsafe { libc::close(fd) }
}
