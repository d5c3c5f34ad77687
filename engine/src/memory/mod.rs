//! Memory that work requests and remote keys name: how it is reached, and (in `keys`) who may.

pub mod device;
pub(crate) mod keys;
pub mod process;
pub mod sim;

/// The part of a range that could not be reached: it is not mapped, or not with the access wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("memory at {addr:#x} can't be reached")]
pub struct Fault {
    /// The first address of the access that failed (not necessarily the byte).
    pub addr: u64,
}

/// A 64-bit atomic operation: of an AtomicETH, or an ATOMIC WRITE (reference section 3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AtomicOp {
    /// Store `swap` if the value equals `compare`.
    CompareSwap {
        /// The expected value.
        compare: u64,
        /// The value stored on a match.
        swap: u64,
    },
    /// Add, wrapping.
    FetchAdd {
        /// The addend.
        add: u64,
    },
    /// Store.
    Store {
        /// The value.
        value: u64,
    },
}

/// Access to the address space that the application registered.
///
/// Every access is fault-safe: memory that was unmapped since gives [`Fault`], never a signal.
pub trait Memory: Send + Sync {
    /// Copies `into.len()` bytes at `addr` out of the application's memory.
    fn read(&self, addr: u64, into: &mut [u8]) -> Result<(), Fault>;

    /// Copies `from` to `addr`: in order, and the last bytes become visible last.
    fn write(&self, addr: u64, from: &[u8]) -> Result<(), Fault>;

    /// Runs `op` on the 8-byte aligned, host-order word at `addr`, atomic towards the CPUs; gives the old value.
    fn atomic(&self, addr: u64, op: AtomicOp) -> Result<u64, Fault>;

    /// Checks that the whole range is mapped (and writable, if `writable`), and faults it in: once, at registration.
    fn populate(&self, addr: u64, len: u64, writable: bool) -> Result<(), Fault>;
}
