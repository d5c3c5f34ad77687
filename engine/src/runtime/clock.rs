//! The monotonic clock that drives the transport of a real device.

use crate::time::Time;

/// Now, by CLOCK_MONOTONIC (read through the vDSO: no system call).
///
/// The C library is asked, and not the vDSO itself: under valgrind there is none, though the kernel names one.
pub fn now() -> Time {
    let mut now = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `now` is valid; on failure, which this clock has not, it stays zero.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
    Time::from_nanos(now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64)
}
