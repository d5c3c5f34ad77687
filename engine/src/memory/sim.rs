//! Simulated memory: an arena of bytes with holes, for tests of the transport without an address space.
#![deny(unsafe_code)]

use std::ops::Range;

use parking_lot::Mutex;

use super::{AtomicOp, Fault, Memory};

/// An arena that stands at an address of its own; ranges of it can be unmapped and mapped again.
pub struct SimMemory {
    base: u64,
    state: Mutex<State>,
}

struct State {
    bytes: Vec<u8>,
    /// Offsets that fault, in no order.
    holes: Vec<Range<usize>>,
}

impl SimMemory {
    /// `len` zero bytes at address `base`.
    pub fn new(base: u64, len: usize) -> SimMemory {
        SimMemory {
            base,
            state: Mutex::new(State {
                bytes: vec![0; len],
                holes: Vec::new(),
            }),
        }
    }

    /// The address of the first byte.
    pub fn base(&self) -> u64 {
        self.base
    }

    /// Makes the range fault from now on.
    pub fn unmap(&self, addr: u64, len: usize) {
        let offset = addr.saturating_sub(self.base) as usize;
        self.state.lock().holes.push(offset..offset.saturating_add(len));
    }

    /// Takes back every [`SimMemory::unmap`].
    pub fn map_all(&self) {
        self.state.lock().holes.clear();
    }

    /// Runs `f` on the bytes of a range, holes or not; panics if it lies outside the arena (a mistake of the test).
    pub fn with<R>(&self, addr: u64, len: usize, f: impl FnOnce(&mut [u8]) -> R) -> R {
        let offset = (addr - self.base) as usize;
        f(&mut self.state.lock().bytes[offset..offset + len])
    }

    /// The offsets of an access cut short at the first hole, and the fault if it was.
    fn reach(&self, state: &State, addr: u64, len: usize) -> (Range<usize>, Result<(), Fault>) {
        let fault = Err(Fault { addr });
        let Some(offset) = addr.checked_sub(self.base).and_then(|o| usize::try_from(o).ok()) else {
            return (0..0, fault);
        };
        if offset >= state.bytes.len() {
            return (
                0..0,
                if len == 0 && offset == state.bytes.len() {
                    Ok(())
                } else {
                    fault
                },
            );
        }
        let wanted = offset.saturating_add(len);
        let mut end = wanted.min(state.bytes.len());
        for hole in &state.holes {
            if hole.start < end && hole.end > offset {
                end = hole.start.max(offset);
            }
        }
        (offset..end, if end == wanted { Ok(()) } else { fault })
    }
}

impl Memory for SimMemory {
    fn read(&self, addr: u64, into: &mut [u8]) -> Result<(), Fault> {
        let state = self.state.lock();
        let (range, outcome) = self.reach(&state, addr, into.len());
        into[..range.len()].copy_from_slice(&state.bytes[range]);
        outcome
    }

    fn write(&self, addr: u64, from: &[u8]) -> Result<(), Fault> {
        let mut state = self.state.lock();
        let (range, outcome) = self.reach(&state, addr, from.len());
        let from = &from[..range.len()];
        state.bytes[range].copy_from_slice(from);
        outcome
    }

    fn atomic(&self, addr: u64, op: AtomicOp) -> Result<u64, Fault> {
        let mut state = self.state.lock();
        let (range, outcome) = self.reach(&state, addr, 8);
        outcome?;
        let word = state.bytes[range].first_chunk_mut::<8>().ok_or(Fault { addr })?;
        let old = u64::from_ne_bytes(*word);
        let new = match op {
            AtomicOp::CompareSwap { compare, swap } if old == compare => swap,
            AtomicOp::CompareSwap { .. } => old,
            AtomicOp::FetchAdd { add } => old.wrapping_add(add),
            AtomicOp::Store { value } => value,
        };
        *word = new.to_ne_bytes();
        Ok(old)
    }

    fn populate(&self, addr: u64, len: u64, _writable: bool) -> Result<(), Fault> {
        let len = usize::try_from(len).map_err(|_| Fault { addr })?;
        self.reach(&self.state.lock(), addr, len).1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn holes_cut_accesses_short() {
        let memory = SimMemory::new(0x1000, 64);
        memory.unmap(0x1020, 8);
        assert_eq!(memory.write(0x101c, &[7; 8]), Err(Fault { addr: 0x101c }));
        let mut got = [0; 4];
        assert_eq!(memory.read(0x101c, &mut got), Ok(()));
        assert_eq!(got, [7; 4], "what precedes the hole is written");
        assert!(memory.read(0x1024, &mut [0; 1]).is_err());
        assert!(memory.read(0x1028, &mut [0; 24]).is_ok());
        assert!(memory.populate(0x1000, 64, true).is_err());
        memory.map_all();
        assert!(memory.populate(0x1000, 64, true).is_ok());
    }

    #[test]
    fn what_lies_outside_faults() {
        let memory = SimMemory::new(0x1000, 64);
        for addr in [0, 0xfff, 0x1040, u64::MAX] {
            assert!(memory.read(addr, &mut [0; 1]).is_err(), "{addr:#x}");
            assert!(memory.write(addr, &[0; 1]).is_err(), "{addr:#x}");
        }
        assert!(memory.read(0x1030, &mut [0; 17]).is_err());
        assert!(memory.populate(0x1000, u64::MAX, false).is_err());
        assert!(memory.atomic(0x103c, AtomicOp::FetchAdd { add: 1 }).is_err());
    }

    #[test]
    fn atomics_give_the_old_value() {
        let memory = SimMemory::new(0, 8);
        assert_eq!(memory.atomic(0, AtomicOp::FetchAdd { add: 5 }), Ok(0));
        assert_eq!(
            memory.atomic(0, AtomicOp::CompareSwap { compare: 4, swap: 9 }),
            Ok(5)
        );
        assert_eq!(
            memory.atomic(0, AtomicOp::CompareSwap { compare: 5, swap: 9 }),
            Ok(5)
        );
        assert_eq!(memory.atomic(0, AtomicOp::Store { value: 3 }), Ok(9));
        assert_eq!(memory.atomic(0, AtomicOp::FetchAdd { add: 0 }), Ok(3));
    }
}
