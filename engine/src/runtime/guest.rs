//! The engine is a guest in the application's threads: its system calls must not show there.

use std::ffi::c_int;

unsafe extern "C" {
    fn pthread_setcancelstate(state: c_int, old: *mut c_int) -> c_int;
}

/// `PTHREAD_CANCEL_DISABLE`.
const DISABLE: c_int = 1;

/// While it lives the thread is not cancelled, and when it goes `errno` is what it was.
///
/// A cancelled thread unwinds, from within a system call of the C library, with the engine's lock held: Rust must not
/// see that. The cancellation then happens in the application's next such call.
pub struct Guest {
    cancel_state: c_int,
    errno: c_int,
}

impl Guest {
    /// Enters a thread.
    #[inline]
    pub fn enter() -> Guest {
        let mut cancel_state = DISABLE;
        // SAFETY: there is room for the old state; the location of errno is valid in every thread.
        let errno = unsafe {
            pthread_setcancelstate(DISABLE, &raw mut cancel_state);
            *libc::__errno_location()
        };
        Guest { cancel_state, errno }
    }
}

impl Drop for Guest {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: as above; the state is one that the thread had.
        unsafe {
            *libc::__errno_location() = self.errno;
            pthread_setcancelstate(self.cancel_state, std::ptr::null_mut());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    unsafe extern "C" {
        fn pthread_testcancel();
        fn pthread_cancel(thread: libc::pthread_t) -> c_int;
    }

    #[test]
    fn a_thread_is_not_cancelled_while_we_are_in_it() {
        let thread = std::thread::spawn(|| {
            let outer = Guest::enter();
            let mut after = 0;
            // SAFETY: a thread of the test's own, which stays uncancellable until it ends.
            unsafe {
                pthread_cancel(libc::pthread_self());
                {
                    let _inner = Guest::enter();
                    pthread_testcancel();
                }
                pthread_testcancel();
                pthread_setcancelstate(DISABLE, &raw mut after);
            }
            std::mem::forget(outer);
            after
        });
        assert_eq!(
            thread.join().unwrap(),
            DISABLE,
            "the inner one gave back the state that it found"
        );
    }

    #[test]
    fn errno_is_kept() {
        // SAFETY: the location is valid in every thread; the descriptor is none.
        unsafe {
            *libc::__errno_location() = 77;
            let guest = Guest::enter();
            assert_eq!(libc::close(-1), -1);
            assert_eq!(*libc::__errno_location(), libc::EBADF);
            drop(guest);
            assert_eq!(*libc::__errno_location(), 77);
        }
    }
}
