//! Blocking signals around the start of a thread, which inherits the mask: they are the application's.

#![allow(unsafe_code)]

use std::mem::MaybeUninit;

/// Blocks all signals in this thread, but those of faults; gives the mask as it was.
pub(crate) fn block_all() -> libc::sigset_t {
    let mut all = MaybeUninit::uninit();
    let mut old = MaybeUninit::uninit();
    // SAFETY: both sets are written before they are read; the calls can't fail with these arguments.
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
        // A fault in our own copies must still reach its handler: a blocked SIGSEGV kills.
        for fault in [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL] {
            libc::sigdelset(all.as_mut_ptr(), fault);
        }
        libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), old.as_mut_ptr());
        old.assume_init()
    }
}

/// Gives the thread the mask again that [`block_all`] found.
pub(crate) fn restore(old: &libc::sigset_t) {
    // SAFETY: `old` is a mask that `block_all` got from the kernel.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, old, std::ptr::null_mut()) };
}
