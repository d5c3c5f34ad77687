//! How much may be in flight: the peer's socket buffer, which every packet fills by its true size, and less after
//! losses.

/// What the whole buffer of a peer holds, in the units of [`PacketCost`].
pub(crate) const BUDGET: u64 = 1 << 24;

/// The window never shrinks below this.
const SMALLEST: u64 = BUDGET / 64;

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

/// The congestion window of one requester.
pub(crate) struct Window {
    size: u64,
    in_flight: u64,
    /// Sent since the last packet that asked for an acknowledgement.
    unasked: u64,
    /// Losses of packets before this sequence number have been reacted to.
    recovered: u64,
}

impl Default for Window {
    fn default() -> Window {
        Window {
            size: BUDGET,
            in_flight: 0,
            unasked: 0,
            recovered: 0,
        }
    }
}

impl Window {
    /// Whether a packet of this cost may go out. One always may.
    #[inline]
    pub fn allows(&self, cost: u64) -> bool {
        self.in_flight == 0 || self.in_flight + cost <= self.size
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

    /// A packet went out.
    #[inline]
    pub fn sent(&mut self, cost: u64) {
        self.in_flight += cost;
        self.unasked += cost;
    }

    /// Packets of this cost arrived: the window grows by a quarter a round trip.
    #[inline]
    pub fn acked(&mut self, cost: u64) {
        self.in_flight = self.in_flight.saturating_sub(cost);
        self.size = (self.size + cost / 4).min(BUDGET);
    }

    /// Something before `sent` was lost: half the window, once per round trip.
    pub fn lost(&mut self, una: u64, sent: u64) {
        if una >= self.recovered {
            self.size = (self.size / 2).max(SMALLEST);
            self.recovered = sent;
        }
    }

    /// Nothing counts as in flight any more.
    pub fn rewind(&mut self) {
        self.in_flight = 0;
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
    fn shrinks_once_per_round_trip_and_grows_again() {
        let mut window = Window::default();
        window.lost(0, 100);
        window.lost(50, 120);
        assert_eq!(window.size, BUDGET / 2);
        window.lost(100, 200);
        assert_eq!(window.size, BUDGET / 4);
        for i in 0..100 {
            window.lost(200 * (i + 1), 200 * (i + 2));
        }
        assert_eq!(window.size, SMALLEST);
        assert!(window.allows(BUDGET), "one packet always may");
        window.sent(BUDGET);
        assert!(!window.allows(1));
        window.acked(4 * BUDGET);
        assert_eq!(window.size, BUDGET);
    }
}
