//! The end of the process: what the transport still has to say (an ACK, above all) leaves before the sockets do.

use std::sync::Once;

use super::registry;

extern "C" fn at_exit() {
    // Unwinding into C is undefined: whatever goes wrong here, the process is ending.
    let _ = std::panic::catch_unwind(|| {
        for engine in registry::all_at_exit() {
            engine.last_words();
        }
    });
}

/// Sees to the last packets at exit; only the first call does anything.
pub(super) fn watch() {
    static WATCH: Once = Once::new();
    WATCH.call_once(|| {
        // SAFETY: `at_exit` never unwinds, and this library is never unloaded (RTLD_NODELETE).
        if unsafe { libc::atexit(at_exit) } != 0 {
            tracing::warn!("atexit failed: a peer may have to wait for its last acknowledgement");
        }
    });
}
