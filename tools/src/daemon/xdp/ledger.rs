//! Which slot has which seat of a port, in a memory file: a new daemon reads there what the one before had leased.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;

use rustix::fs::{MemfdFlags, memfd_create};

/// Seats that a ledger has room for.
const SEATS: usize = 256;

/// By seat, one byte: the slot that has it, or 0. Programs could write to it; whoever reads checks.
pub struct Ledger(File);

impl Ledger {
    /// Nobody has a seat.
    pub fn new() -> io::Result<Self> {
        let file = File::from(memfd_create("ferroce-ledger", MemfdFlags::CLOEXEC)?);
        file.set_len(SEATS as u64)?;
        Ok(Self(file))
    }

    /// The slots, by seat, of a port with that many seats.
    pub fn read(&self, seats: u16) -> io::Result<Vec<u8>> {
        let mut slots = vec![0; usize::from(seats).min(SEATS)];
        self.0.read_exact_at(&mut slots, 0)?;
        Ok(slots)
    }

    /// The seat is now the slot's, or nobody's.
    pub fn write(&self, seat: u16, slot: Option<u8>) -> io::Result<()> {
        self.0.write_all_at(&[slot.unwrap_or(0)], seat.into())
    }
}

impl From<OwnedFd> for Ledger {
    fn from(file: OwnedFd) -> Self {
        Self(file.into())
    }
}

impl AsFd for Ledger {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_by_another() {
        let ledger = Ledger::new().unwrap();
        ledger.write(2, Some(77)).unwrap();
        ledger.write(3, Some(9)).unwrap();
        ledger.write(3, None).unwrap();
        let other = Ledger::from(ledger.as_fd().try_clone_to_owned().unwrap());
        assert_eq!(other.read(4).unwrap(), [0, 0, 77, 0]);
        // One that was cut off is an error, no end of the daemon.
        let bad = Ledger::from(OwnedFd::from(File::open("/dev/null").unwrap()));
        assert!(bad.read(4).is_err());
    }
}
