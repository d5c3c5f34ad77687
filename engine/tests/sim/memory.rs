//! The nodes' memory: message and receive buffers in pieces, with guard bytes between them.

use std::sync::Arc;

use ferroce_engine::link::random::Prng;
use ferroce_engine::memory::sim::SimMemory;
use ferroce_engine::verbs::Sge;

use crate::program::{Program, Slot};

/// Where the arenas begin; any address does.
const BASE: u64 = 0x7f00_0000_0000;
/// Fills what belongs to no buffer.
const GUARD: u8 = 0xa5;
/// Fills receive buffers before use.
pub const UNTOUCHED: u8 = 0xee;
/// Fills send buffers after use.
const SPENT: u8 = 0x5c;

/// A buffer of one or more pieces.
#[derive(Clone, Debug)]
pub struct Buffer {
    /// The pieces; the keys are filled in once the arena is registered.
    pub sges: Vec<Sge>,
}

/// Lays out an arena before it exists.
pub struct Layout {
    next: u64,
    rng: Prng,
    ranges: Vec<(u64, u32)>,
}

impl Layout {
    /// An empty arena.
    pub fn new(rng: Prng) -> Layout {
        Layout {
            next: BASE + 16,
            rng,
            ranges: Vec::new(),
        }
    }

    /// A buffer of `len` bytes in `pieces` pieces, some perhaps empty, at odd addresses.
    pub fn buffer(&mut self, len: u32, pieces: u32) -> Buffer {
        let mut left = len;
        let mut sges = Vec::new();
        for i in 0..pieces {
            let length = if i + 1 == pieces {
                left
            } else {
                self.rng.below(u64::from(left) + 1) as u32
            };
            left -= length;
            self.next += self.rng.between(1, 9);
            self.ranges.push((self.next, length));
            sges.push(Sge {
                addr: self.next,
                length,
                lkey: 0,
            });
            self.next += u64::from(length);
        }
        Buffer { sges }
    }

    /// A buffer of one piece, at an address that is a multiple of eight.
    pub fn slot(&mut self, len: u32) -> Buffer {
        self.next = (self.next + 1).next_multiple_of(8);
        self.ranges.push((self.next, len));
        let sge = Sge {
            addr: self.next,
            length: len,
            lkey: 0,
        };
        self.next += u64::from(len);
        Buffer { sges: vec![sge] }
    }

    /// Makes the arena.
    pub fn build(self) -> Arena {
        let len = (self.next + 16 - BASE) as usize;
        let memory = Arc::new(SimMemory::new(BASE, len));
        memory.with(BASE, len, |bytes| bytes.fill(GUARD));
        Arena {
            memory,
            len,
            ranges: self.ranges,
        }
    }
}

/// A node's memory.
pub struct Arena {
    /// What the device reaches.
    pub memory: Arc<SimMemory>,
    /// Bytes, from [`Arena::base`] on.
    pub len: usize,
    ranges: Vec<(u64, u32)>,
}

impl Arena {
    /// The first address.
    pub fn base(&self) -> u64 {
        BASE
    }

    /// Puts `bytes` into a buffer.
    pub fn fill(&self, buffer: &Buffer, bytes: &[u8]) {
        let mut rest = bytes;
        for sge in &buffer.sges {
            let (piece, tail) = rest.split_at(sge.length as usize);
            self.memory
                .with(sge.addr, piece.len(), |to| to.copy_from_slice(piece));
            rest = tail;
        }
    }

    /// The bytes of a buffer.
    pub fn take(&self, buffer: &Buffer) -> Vec<u8> {
        let mut out = Vec::new();
        for sge in &buffer.sges {
            self.memory
                .with(sge.addr, sge.length as usize, |from| out.extend_from_slice(from));
        }
        out
    }

    /// Overwrites a buffer, as an application may once its request has completed.
    pub fn spend(&self, buffer: &Buffer) {
        self.set(buffer, SPENT);
    }

    /// Marks a receive buffer as untouched.
    pub fn prepare(&self, buffer: &Buffer) {
        self.set(buffer, UNTOUCHED);
    }

    fn set(&self, buffer: &Buffer, value: u8) {
        for sge in &buffer.sges {
            self.memory
                .with(sge.addr, sge.length as usize, |to| to.fill(value));
        }
    }

    /// Checks that nothing was written outside the buffers.
    pub fn check_guards(&self) -> Result<(), String> {
        let mut ranges = self.ranges.clone();
        ranges.sort_unstable();
        ranges.push((BASE + self.len as u64, 0));
        let mut at = BASE;
        for (start, len) in ranges {
            let gap = (start - at) as usize;
            let clean = self
                .memory
                .with(at, gap, |bytes| bytes.iter().all(|&b| b == GUARD));
            if !clean {
                return Err(format!(
                    "bytes outside every buffer were written, between {at:#x} and {start:#x}"
                ));
            }
            at = start + u64::from(len);
        }
        Ok(())
    }
}

/// The bytes of message `index` that node `side` sends over `connection`.
pub fn content(seed: u64, connection: usize, side: usize, index: usize, len: u32) -> Vec<u8> {
    let key = (connection as u64) << 48 ^ (side as u64) << 40 ^ index as u64;
    let mut prng =
        Prng::new(seed.wrapping_mul(0x2545_f491_4f6c_dd1d) ^ key.wrapping_mul(0x9e6c_63d0_876a_68ff));
    let mut out = vec![0; len as usize];
    for chunk in out.chunks_mut(8) {
        chunk.copy_from_slice(&prng.next_u64().to_le_bytes()[..chunk.len()]);
    }
    out
}

/// The bytes that a slot holds before the first operation: counters begin at zero. `side` sends the stream.
pub fn initial_slot(program: &Program, connection: usize, side: usize, slot: usize) -> Vec<u8> {
    let Slot { len, counter } = program.connections[connection].streams[side].slots[slot];
    if counter {
        vec![0; len as usize]
    } else {
        content(program.seed, connection, side + 2, slot, len)
    }
}
