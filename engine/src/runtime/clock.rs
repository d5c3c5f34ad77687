//! The monotonic clock that drives the transport of a real device.

use crate::time::Time;

/// Now, by CLOCK_MONOTONIC (read through the vDSO: no system call).
pub fn now() -> Time {
    let ts = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    Time::from_nanos(ts.tv_sec as u64 * 1_000_000_000 + ts.tv_nsec as u64)
}
