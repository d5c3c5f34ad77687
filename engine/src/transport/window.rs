//! How much may be in flight: the peer's socket buffer, which every packet fills by its true size, and less after
//! losses.

use std::time::Duration;

use super::budget::Buffer;

/// What the whole buffer of a peer holds, in the units of [`PacketCost`].
pub(crate) const BUDGET: u64 = 1 << 24;

/// Packets that may always be under way.
const FEW: u64 = 4;

/// The window never shrinks below this.
const SMALLEST: u64 = BUDGET / 1024;

/// What the window begins with: many QPs may begin at once, towards a peer that is slow.
const FIRST: u64 = BUDGET / 64;

/// What the window grows by in a round trip, once it is near to where it lost.
const STEADY: u64 = BUDGET / 64;

/// Packet lengths are rounded up to this many bytes in the table.
const STEP: usize = 64;

/// The largest packet: 4096 bytes of payload and the longest headers.
const LARGEST: usize = 4096 + 128;

/// The share of a peer's buffer that a packet of each length takes.
pub(crate) struct PacketCost {
    table: Vec<u64>,
}

impl PacketCost {
    /// `window(len)`: how many bytes of packets of `len` bytes a peer's buffer holds.
    pub fn new(window: &dyn Fn(usize) -> u32) -> PacketCost {
        let cost = |step: usize| {
            let len = step.max(1) * STEP;
            (len as u64 * BUDGET / u64::from(window(len)).max(1)).clamp(1, BUDGET)
        };
        PacketCost {
            table: (0..=LARGEST / STEP).map(cost).collect(),
        }
    }

    /// The share of a packet of `len` bytes.
    #[inline]
    pub fn of(&self, len: usize) -> u64 {
        self.table.get(len.div_ceil(STEP)).copied().unwrap_or(BUDGET)
    }
}

/// The congestion window of one requester: doubles each round trip up to half of where it last lost, then grows
/// steadily.
pub(crate) struct Window {
    size: u64,
    /// Up to here it doubles.
    threshold: u64,
    in_flight: u64,
    /// How much of that comes to our own buffer.
    fetched: u64,
    /// Sent since the last packet that asked for an acknowledgement.
    unasked: u64,
}

impl Default for Window {
    fn default() -> Window {
        Window {
            size: FIRST,
            threshold: BUDGET,
            in_flight: 0,
            fetched: 0,
            unasked: 0,
        }
    }
}

impl Window {
    /// Whether a packet of this cost may go out. A few always may: with less under way, each loss costs a timeout.
    #[inline]
    pub fn allows(&self, cost: u64) -> bool {
        self.in_flight < FEW * cost || self.has_room(cost)
    }

    /// Whether nothing is in flight.
    pub fn is_empty(&self) -> bool {
        self.in_flight == 0
    }

    /// Whether packets of this cost altogether fit.
    #[inline]
    pub fn has_room(&self, cost: u64) -> bool {
        self.in_flight + cost <= self.size
    }

    /// How many packets of this cost to ask for at once: `None` while less than a quarter of the window is free, for
    /// many small requests cost more than few large ones.
    pub fn packets(&self, cost: u64) -> Option<u32> {
        let free = self.size.saturating_sub(self.in_flight);
        if self.in_flight == 0 {
            return Some((free / cost).max(1) as u32);
        }
        (free >= self.size / 4 && free >= cost).then_some((free / cost) as u32)
    }

    /// Whether a packet of this cost should ask for an acknowledgement although it ends no message: a quarter of
    /// the window went without, or the next one won't fit.
    #[inline]
    pub fn ask(&self, cost: u64) -> bool {
        self.unasked + cost >= self.size / 4 || self.in_flight + 2 * cost > self.size
    }

    /// A packet asked for an acknowledgement.
    #[inline]
    pub fn asked(&mut self) {
        self.unasked = 0;
    }

    /// A packet went out, or a request for packets that come back.
    #[inline]
    pub fn sent(&mut self, cost: u64, buffer: Buffer) {
        self.in_flight += cost;
        self.unasked += cost;
        if buffer == Buffer::Ours {
            self.fetched += cost;
        }
    }

    /// What is under way to a buffer.
    #[inline]
    pub fn under_way(&self, buffer: Buffer) -> u64 {
        match buffer {
            Buffer::Theirs => self.in_flight - self.fetched,
            Buffer::Ours => self.fetched,
        }
    }

    /// Packets of this cost arrived, at the peer's buffer and at ours.
    #[inline]
    pub fn acked(&mut self, theirs: u64, ours: u64) {
        let cost = theirs + ours;
        self.fetched = self.fetched.saturating_sub(ours);
        self.in_flight = self.in_flight.saturating_sub(cost).max(self.fetched);
        let growth = if self.size < self.threshold {
            cost
        } else {
            cost * STEADY / self.size
        };
        self.size = (self.size + growth).min(BUDGET);
    }

    /// A round trip took so long: fewer packets where it takes longer than `target`, because most of that time they
    /// wait in the peer's queue, and in the end for longer than our timer.
    pub fn keep_below(&mut self, target: Duration, sample: Duration) {
        if sample > target {
            let share = u128::from(self.size) * target.as_nanos() / sample.as_nanos().max(1);
            self.size = (share as u64).max(self.size / 2).max(SMALLEST);
        }
    }

    /// Something was lost, and everything from there on will be sent again: half the window. That happens once a
    /// round trip, because what comes after is of a new flight.
    pub fn lost(&mut self) {
        self.size = (self.size / 2).max(SMALLEST);
        self.threshold = self.size;
        self.rewind();
    }

    /// Nothing counts as in flight any more.
    pub fn rewind(&mut self) {
        self.in_flight = 0;
        self.fetched = 0;
        self.unasked = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_holds_as_many_packets_as_the_link_says() {
        let cost = PacketCost::new(&|len| (len * 100) as u32);
        assert_eq!(cost.of(4096), BUDGET / 100);
        assert_eq!(cost.of(100_000), BUDGET);
        // Small packets cost relatively more.
        let truesize = PacketCost::new(&|len| (200_000 * len / (len + 1000)) as u32);
        assert!(truesize.of(64) * 64 > truesize.of(4096));
        assert_eq!(PacketCost::new(&|_| 0).of(64), BUDGET);
    }

    #[test]
    fn shrinks_by_half_and_grows_again() {
        let mut window = Window::default();
        window.acked(BUDGET, 0);
        assert_eq!(window.size, BUDGET, "doubles until it first loses");
        window.sent(BUDGET, Buffer::Theirs);
        window.lost();
        assert_eq!(window.size, BUDGET / 2);
        assert!(
            window.allows(BUDGET / 2) && window.allows(BUDGET),
            "a few always may"
        );
        window.sent(BUDGET / 2, Buffer::Theirs);
        assert!(!window.allows(1));
        window.acked(BUDGET / 2, 0);
        assert_eq!(window.size, BUDGET / 2 + STEADY, "steadily from there");
        for _ in 0..100 {
            window.lost();
        }
        assert_eq!(window.size, SMALLEST);
        for _ in 0..10_000 {
            window.acked(window.size, 0);
        }
        assert_eq!(window.size, BUDGET);
    }

    #[test]
    fn shrinks_where_packets_wait_long() {
        let ms = Duration::from_millis;
        let mut window = Window::default();
        window.acked(BUDGET, 0);
        window.keep_below(ms(10), ms(10));
        assert_eq!(window.size, BUDGET);
        window.keep_below(ms(10), ms(16));
        assert_eq!(window.size, BUDGET * 10 / 16);
        window.keep_below(ms(10), ms(1000));
        assert_eq!(window.size, BUDGET * 10 / 32, "by half at most");
        window.acked(BUDGET, 0);
        assert_eq!(window.size, BUDGET, "and grows as before");
    }

    #[test]
    fn knows_whose_buffer_is_filled() {
        let mut window = Window::default();
        window.sent(100, Buffer::Theirs);
        window.sent(50, Buffer::Ours);
        let under_way = |window: &Window| [Buffer::Theirs, Buffer::Ours].map(|it| window.under_way(it));
        assert_eq!(under_way(&window), [100, 50]);
        window.acked(60, 20);
        assert_eq!(under_way(&window), [40, 30]);
        window.acked(1000, 0);
        assert_eq!(under_way(&window), [0, 30]);
        window.rewind();
        assert_eq!(under_way(&window), [0, 0]);
    }
}
