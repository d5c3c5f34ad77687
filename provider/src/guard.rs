//! The edge between C and Rust: a panic must not cross it.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs `f`; a panic in it, which is a bug of Ferroce, gives `failed` with errno EIO instead.
pub fn guard<T>(failed: T, f: impl FnOnce() -> T) -> T {
    catch_unwind(AssertUnwindSafe(f)).unwrap_or_else(|_| {
        crate::report::say(format_args!(
            "a call failed by a bug in Ferroce (see the panic above): please report it"
        ));
        crate::hooks::set_errno(libc::EIO);
        failed
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_becomes_a_failure() {
        assert_eq!(guard(-1, || 3), 3);
        assert_eq!(guard(-1, || -> i32 { panic!("expected by this test") }), -1);
        assert_eq!(std::io::Error::last_os_error().raw_os_error(), Some(libc::EIO));
    }
}
