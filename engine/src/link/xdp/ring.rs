//! The rings between the kernel and programs. Each is a power of two of entries in shared memory, and two counters that
//! only grow: the producer's and the consumer's.
//!
//! Receive and transmit rings have one program at their end. The fill and the completion ring of a queue have all
//! programs of the port, any of which may stop or be killed at any instruction: they are lock-free.

use std::io;
use std::ptr::NonNull;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicU32, AtomicU64, fence};

use super::memory::Mapping;

/// The low bits of a fill ring's entries, which the kernel masks out (the smallest chunk is 2048 bytes).
const TAG: u64 = 0x7ff;
/// How often an entry is tried to be put in or taken out. Only rings that were overwritten by nonsense need so many.
const TRIES: usize = 1 << 16;

/// Where the parts of a ring lie in its mapping.
#[derive(Clone, Copy, Debug)]
pub(super) struct Offsets {
    pub producer: usize,
    pub consumer: usize,
    pub flags: usize,
    pub entries: usize,
}

/// A frame or a part of it, as in receive and transmit rings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Descriptor {
    pub address: u64,
    pub len: u32,
    pub options: u32,
}

/// What no kernel sends: it is nowhere, has no bytes, and options that there are not. But it is the end of a packet, or the
/// kernel would refuse what comes behind as well.
const REFUSED: Descriptor = Descriptor {
    address: u64::MAX,
    len: 0,
    options: !libc::XDP_PKT_CONTD,
};

/// An entry of receive and transmit rings: address, then length and options.
#[repr(C)]
struct Slot {
    address: AtomicU64,
    len: AtomicU32,
    options: AtomicU32,
}

/// The memory of a ring.
struct Ring<T> {
    producer: NonNull<AtomicU32>,
    consumer: NonNull<AtomicU32>,
    flags: NonNull<AtomicU32>,
    entries: NonNull<T>,
    size: u32,
    _mapping: Mapping,
}

// SAFETY: all it points to are atomics in the mapping that it owns.
unsafe impl<T> Send for Ring<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Ring<T> {}

impl<T> Ring<T> {
    fn new(mapping: Mapping, offsets: Offsets, size: u32) -> io::Result<Ring<T>> {
        if !size.is_power_of_two() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        Ok(Ring {
            producer: mapping.at(offsets.producer, 1)?,
            consumer: mapping.at(offsets.consumer, 1)?,
            flags: mapping.at(offsets.flags, 1)?,
            entries: mapping.at(offsets.entries, size as usize)?,
            size,
            _mapping: mapping,
        })
    }

    #[inline]
    fn producer(&self) -> &AtomicU32 {
        // SAFETY: within the mapping; an atomic.
        unsafe { self.producer.as_ref() }
    }

    #[inline]
    fn consumer(&self) -> &AtomicU32 {
        // SAFETY: as above.
        unsafe { self.consumer.as_ref() }
    }

    #[inline]
    fn entry(&self, position: u32) -> &T {
        // SAFETY: the masked position is below the size, and that many entries, made of atomics, lie in the mapping.
        unsafe { self.entries.add((position & (self.size - 1)) as usize).as_ref() }
    }

    /// Whether the kernel goes on only when it is called.
    #[inline]
    fn needs_wakeup(&self) -> bool {
        // SAFETY: within the mapping; an atomic.
        let flags = unsafe { self.flags.as_ref() };
        flags.load(Relaxed) & libc::XDP_RING_NEED_WAKEUP != 0
    }
}

/// Bytes of the mapping of a ring of descriptors.
pub(super) fn descriptors_len(offsets: Offsets, size: u32) -> usize {
    offsets.entries + size as usize * size_of::<Slot>()
}

/// Bytes of the mapping of a ring of addresses.
pub(super) fn addresses_len(offsets: Offsets, size: u32) -> usize {
    offsets.entries + size as usize * size_of::<AtomicU64>()
}

/// A receive ring, at the program's end: entries are first seen, later released.
pub(super) struct RxRing {
    ring: Ring<Slot>,
    /// Entries were released up to here, and seen up to there; the kernel has put more up to the last.
    released: u32,
    seen: u32,
    produced: u32,
}

impl RxRing {
    pub fn new(mapping: Mapping, offsets: Offsets, size: u32) -> io::Result<RxRing> {
        let ring = Ring::new(mapping, offsets, size)?;
        let released = ring.consumer().load(Relaxed);
        Ok(RxRing {
            ring,
            released,
            seen: released,
            produced: released,
        })
    }

    /// Entries that have not been seen yet.
    #[inline]
    pub fn available(&mut self) -> u32 {
        if self.produced == self.seen {
            self.produced = self.ring.producer().load(Acquire);
            if self.produced.wrapping_sub(self.released) > self.ring.size {
                // Nonsense: the ring can't hold so many. Who had it before may have left it so: it begins anew.
                self.seen = self.produced;
                self.release();
            }
        }
        self.produced.wrapping_sub(self.seen)
    }

    /// The entry `ahead` of the next; what is not available is some old one.
    #[inline]
    pub fn peek(&self, ahead: u32) -> Descriptor {
        let slot = self.ring.entry(self.seen.wrapping_add(ahead));
        Descriptor {
            address: slot.address.load(Relaxed),
            len: slot.len.load(Relaxed),
            options: slot.options.load(Relaxed),
        }
    }

    /// The next was seen.
    #[inline]
    pub fn advance(&mut self) {
        self.seen = self.seen.wrapping_add(1);
    }

    /// The kernel may write to all entries that were available.
    pub fn release_all(&mut self) {
        self.seen = self.produced;
        self.release();
    }

    /// The kernel may write to the entries that were seen.
    #[inline]
    pub fn release(&mut self) {
        self.released = self.seen;
        self.ring.consumer().store(self.released, Release);
    }
}

/// A transmit ring, at the program's end.
pub(super) struct TxRing {
    ring: Ring<Slot>,
    produced: u32,
    consumed: u32,
}

impl TxRing {
    pub fn new(mapping: Mapping, offsets: Offsets, size: u32) -> io::Result<TxRing> {
        let ring = Ring::new(mapping, offsets, size)?;
        let produced = ring.producer().load(Relaxed);
        let mut ring = TxRing {
            ring,
            produced,
            consumed: produced,
        };
        ring.look();
        Ok(ring)
    }

    /// Sees how far the kernel is.
    fn look(&mut self) {
        let consumed = self.ring.consumer().load(Acquire);
        if self.produced.wrapping_sub(consumed) <= self.ring.size {
            self.consumed = consumed;
        }
    }

    /// Whether there is room for so many entries.
    #[inline]
    pub fn has_room(&mut self, count: u32) -> bool {
        if self.produced.wrapping_sub(self.consumed) + count > self.ring.size {
            self.look();
        }
        self.produced.wrapping_sub(self.consumed) + count <= self.ring.size
    }

    /// Writes an entry `ahead` of the next; there must be room.
    #[inline]
    pub fn write(&mut self, ahead: u32, descriptor: Descriptor) {
        let slot = self.ring.entry(self.produced.wrapping_add(ahead));
        slot.address.store(descriptor.address, Relaxed);
        slot.len.store(descriptor.len, Relaxed);
        slot.options.store(descriptor.options, Relaxed);
    }

    /// Hands over entries that were written, all at once.
    #[inline]
    pub fn publish(&mut self, count: u32) {
        self.produced = self.produced.wrapping_add(count);
        self.ring.producer().store(self.produced, Release);
    }

    /// Entries that the kernel has not taken.
    #[inline]
    pub fn waiting(&mut self) -> u32 {
        self.look();
        self.produced.wrapping_sub(self.consumed)
    }

    /// Whether the kernel calls the socket writable.
    pub fn is_writable(&mut self) -> bool {
        self.waiting() <= self.ring.size / 2
    }

    /// Whether the counters are some that the kernel and a program can have left.
    pub fn is_sound(&self) -> bool {
        let consumed = self.ring.consumer().load(Acquire);
        self.ring.producer().load(Acquire).wrapping_sub(consumed) <= self.ring.size
    }

    /// Has the kernel refuse, instead of send, what it has not taken. (It takes one such entry with every call.)
    pub fn spoil(&mut self) {
        for ahead in 0..self.ring.size {
            self.write(ahead, REFUSED);
        }
        // Before the kernel is called.
        fence(std::sync::atomic::Ordering::SeqCst);
    }

    #[inline]
    pub fn needs_wakeup(&self) -> bool {
        // What was published must be seen by a kernel that set the flag before.
        fence(std::sync::atomic::Ordering::SeqCst);
        self.ring.needs_wakeup()
    }
}

/// A fill ring: programs give the kernel frames to receive into.
///
/// The kernel masks the low bits of an address, so there an entry carries a tag of the lap in which it was written. An
/// entry is put in by two steps: it is written, then the producer's counter goes on. Whoever finds an entry of this lap
/// where the counter stands takes the second step for the one who wrote it, who may have stopped.
/// The ring has more entries than there are frames, and so is never full.
pub(super) struct FillRing(Ring<AtomicU64>);

impl FillRing {
    pub fn new(mapping: Mapping, offsets: Offsets, size: u32) -> io::Result<FillRing> {
        Ok(FillRing(Ring::new(mapping, offsets, size)?))
    }

    fn tag(&self, position: u32) -> u64 {
        u64::from((position >> self.0.size.trailing_zeros()) + 1) & TAG
    }

    /// Puts a frame in, by its address. False if that can't be done: the ring was overwritten with nonsense.
    #[inline]
    pub fn push(&self, address: u64) -> bool {
        let address = address & !TAG;
        (0..TRIES).any(|_| self.try_push(address))
    }

    #[inline]
    fn try_push(&self, address: u64) -> bool {
        let Some(position) = self.write(address) else {
            return false;
        };
        self.go_on(position);
        true
    }

    /// The first step, at the position that it gives; `None` if another was there first.
    #[inline]
    fn write(&self, address: u64) -> Option<u32> {
        let position = self.0.producer().load(Acquire);
        let tag = self.tag(position);
        let entry = self.0.entry(position);
        let current = entry.load(Acquire);
        if current & TAG == tag {
            self.go_on(position);
            return None;
        }
        // The counter has gone on meanwhile: the entry may be of a later lap.
        if self.0.producer().load(Acquire) != position {
            return None;
        }
        entry
            .compare_exchange(current, address | tag, AcqRel, Relaxed)
            .is_ok()
            .then_some(position)
    }

    /// The second step, unless somebody has taken it.
    #[inline]
    fn go_on(&self, position: u32) {
        let next = position.wrapping_add(1);
        _ = self
            .0
            .producer()
            .compare_exchange(position, next, AcqRel, Relaxed);
    }

    /// Frames in it, at most as many as it can hold.
    pub fn waiting(&self) -> u32 {
        let consumer = self.0.consumer().load(Acquire);
        let waiting = self.0.producer().load(Acquire).wrapping_sub(consumer);
        waiting.min(self.0.size)
    }

    /// Whether the kernel waits to be called.
    #[inline]
    pub fn needs_wakeup(&self) -> bool {
        fence(std::sync::atomic::Ordering::SeqCst);
        self.0.needs_wakeup()
    }
}

/// A completion ring: the kernel gives back frames that it has sent, and any program takes them for all.
pub(super) struct CompletionRing(Ring<AtomicU64>);

impl CompletionRing {
    pub fn new(mapping: Mapping, offsets: Offsets, size: u32) -> io::Result<CompletionRing> {
        Ok(CompletionRing(Ring::new(mapping, offsets, size)?))
    }

    /// Takes the addresses of all that are there, but no more than it holds: a program that moves the counters on and on
    /// keeps nobody in here.
    #[inline]
    pub fn drain(&self, mut take: impl FnMut(u64)) {
        for address in (0..self.0.size).map_while(|_| self.pop()) {
            take(address);
        }
    }

    /// Takes the address of one, if there is any.
    #[inline]
    pub fn pop(&self) -> Option<u64> {
        let mut position = self.0.consumer().load(Acquire);
        for _ in 0..TRIES {
            let waiting = self.0.producer().load(Acquire).wrapping_sub(position);
            if waiting == 0 {
                return None;
            }
            // Nothing is written over it before the counter goes on.
            let address = self.0.entry(position).load(Relaxed);
            let next = position.wrapping_add(1);
            match self
                .0
                .consumer()
                .compare_exchange(position, next, AcqRel, Acquire)
            {
                // More than the ring holds: nonsense.
                Ok(_) if waiting > self.0.size => return None,
                Ok(_) => return Some(address),
                Err(current) => position = current,
            }
        }
        None
    }
}

#[cfg(test)]
mod tests;
