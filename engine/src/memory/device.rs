//! Device memory, which programs allocate and name by offsets. Here it is memory of the process like all other; only
//! how much of it there is must be known to all that open the device.
#![deny(unsafe_code)]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::verbs::VerbsError;

/// The device memory that is left.
#[derive(Debug)]
pub struct DeviceMemory(Arc<AtomicU64>);

/// Bytes that were taken out of it, until this is dropped.
#[derive(Debug)]
pub struct Taken {
    from: Arc<AtomicU64>,
    bytes: u64,
}

impl DeviceMemory {
    /// `bytes` in all.
    pub fn new(bytes: u64) -> DeviceMemory {
        DeviceMemory(Arc::new(AtomicU64::new(bytes)))
    }

    /// Takes `bytes`. ENOMEM if fewer are left.
    pub fn take(&self, bytes: u64) -> Result<Taken, VerbsError> {
        self.0
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| {
                left.checked_sub(bytes)
            })
            .map_err(|_| VerbsError::NoMemory)?;
        Ok(Taken {
            from: self.0.clone(),
            bytes,
        })
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        self.from.fetch_add(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_dropped_can_be_taken_again() {
        let memory = DeviceMemory::new(100);
        let some = memory.take(60).unwrap();
        assert_eq!(memory.take(41).unwrap_err(), VerbsError::NoMemory);
        let rest = memory.take(40).unwrap();
        assert!(memory.take(1).is_err());
        drop(some);
        assert!(memory.take(60).is_ok());
        drop(rest);
        assert!(memory.take(100).is_ok());
    }
}
