//! The descriptors that the provider answers for.

use std::any::Any;
use std::collections::BTreeMap;
use std::ffi::{c_int, c_ulong, c_void};
use std::os::fd::RawFd;
use std::sync::Arc;

use parking_lot::Mutex;

/// What answers the calls on a descriptor; `None` leaves the call to the kernel, an error is an errno.
pub trait Descriptor: Any + Send + Sync {
    /// `write`, which takes all bytes or fails.
    fn write(&self, _bytes: &[u8]) -> Option<Result<(), c_int>> {
        None
    }

    /// `ioctl`.
    ///
    /// # Safety
    /// `argument` must be what the request asks for.
    unsafe fn ioctl(&self, _request: c_ulong, _argument: *mut c_void) -> Option<Result<(), c_int>> {
        None
    }

    /// The program has closed it: nothing answers for it any more.
    fn closed(&self) {}
}

static DESCRIPTORS: Mutex<BTreeMap<RawFd, Arc<dyn Descriptor>>> = Mutex::new(BTreeMap::new());

/// Makes `descriptor` answer for `fd`, until the library that has it closes it.
pub fn insert(fd: RawFd, descriptor: Arc<dyn Descriptor>) {
    let old = DESCRIPTORS.lock().insert(fd, descriptor);
    // Outside of the lock, as it may close descriptors. The program must have closed it behind the library's back.
    if let Some(old) = old {
        old.closed();
    }
}

/// What answers for `fd`.
pub fn get(fd: RawFd) -> Option<Arc<dyn Descriptor>> {
    DESCRIPTORS.lock().get(&fd).cloned()
}

/// What answers for `fd`, if it is a `T`.
pub fn get_as<T: Descriptor>(fd: RawFd) -> Option<Arc<T>> {
    let descriptor: Arc<dyn Any + Send + Sync> = get(fd)?;
    descriptor.downcast().ok()
}

/// Ends that something answers for `fd`.
pub fn remove(fd: RawFd) -> Option<Arc<dyn Descriptor>> {
    DESCRIPTORS.lock().remove(&fd)
}

/// Keeps the table locked for the time of every fork from now on: a child must not inherit it locked by another thread.
///
/// The child can close what it has inherited, and open devices itself. What its parent has opened fails there, for
/// the engine of a device knows its process.
pub fn watch_forks() {
    extern "C" fn before() {
        std::mem::forget(DESCRIPTORS.lock());
    }
    extern "C" fn after() {
        // SAFETY: `before` locked it, in this thread or in the one that this thread is the copy of.
        unsafe { DESCRIPTORS.force_unlock() };
    }
    // SAFETY: the handlers only lock and unlock, and are never unloaded.
    let result = unsafe { libc::pthread_atfork(Some(before), Some(after), Some(after)) };
    if result != 0 {
        crate::report::say(format_args!(
            "forks can't be watched (error {result}): don't fork while a device is open"
        ));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Refuses;
    impl Descriptor for Refuses {
        fn write(&self, _: &[u8]) -> Option<Result<(), c_int>> {
            Some(Err(libc::EIO))
        }
    }
    struct Other;
    impl Descriptor for Other {}

    #[test]
    fn a_descriptor_is_found_by_number_and_kind() {
        let fd = 1_000_000;
        insert(fd, Arc::new(Refuses));
        assert_eq!(get(fd).unwrap().write(b"x"), Some(Err(libc::EIO)));
        assert!(get_as::<Refuses>(fd).is_some());
        assert!(get_as::<Other>(fd).is_none());
        assert!(remove(fd).is_some());
        assert!(get(fd).is_none());
        assert!(remove(fd).is_none());
    }
}
