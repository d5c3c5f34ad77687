//! Whether this process is a forked copy of the one that loaded the provider.
//!
//! A forked child has no helper thread, and its sockets are its parent's: it must not use the device. Its calls fail.

use std::sync::atomic::{AtomicBool, Ordering};

use ferroce_engine::verbs::VerbsError;

use crate::hooks::descriptors;

static CHILD: AtomicBool = AtomicBool::new(false);

/// Whether this is a forked child; then every verb fails with EIO.
#[inline]
pub fn is_child() -> bool {
    CHILD.load(Ordering::Relaxed)
}

/// Fails in a forked child.
#[inline]
pub fn check() -> Result<(), VerbsError> {
    if is_child() { Err(VerbsError::Gone) } else { Ok(()) }
}

/// Begins to watch forks; called once, when the provider is loaded.
pub fn watch() {
    extern "C" fn before() {
        descriptors::before_fork();
    }
    extern "C" fn in_parent() {
        // SAFETY: `before` ran in this thread.
        unsafe { descriptors::after_fork() };
    }
    extern "C" fn in_child() {
        CHILD.store(true, Ordering::Relaxed);
        // SAFETY: `before` ran in the thread that this one is a copy of.
        unsafe { descriptors::after_fork() };
    }
    // SAFETY: the handlers are async-signal-safe but for a lock that is held for moments only, and never unloaded.
    let result = unsafe { libc::pthread_atfork(Some(before), Some(in_parent), Some(in_child)) };
    if result != 0 {
        eprintln!(
            "ferroce: pthread_atfork failed ({result}): a program that forks must not use the device in the child"
        );
    }
}
