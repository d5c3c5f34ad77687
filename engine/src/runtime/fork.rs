//! Fork detection: a child has neither the helper thread nor the right to touch its parent's sockets.
//!
//! A generation counter grows in the child of every fork, so that each check is one load and no system call.

use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering};

static GENERATION: AtomicU32 = AtomicU32::new(0);

extern "C" fn in_child() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
}

/// The number of forks between the first process that watched and this one.
///
/// Two equal values mean: the same process.
pub fn generation() -> u32 {
    GENERATION.load(Ordering::Relaxed)
}

/// Starts to watch for forks; only the first call does anything.
pub fn watch() {
    static WATCH: Once = Once::new();
    WATCH.call_once(|| {
        // SAFETY: `in_child` only does an atomic add, which is safe in the child of a threaded process. It fails
        // only for want of memory; then a child would merely not be told apart, as before the call.
        let result = unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
        if result != 0 {
            tracing::warn!("forks can't be watched (error {result}): do not use RDMA in a forked child");
        }
    });
}
