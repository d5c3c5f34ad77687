//! How much may be in flight: the peer's socket buffer, which every packet fills by its true size.

/// What the whole buffer of a peer holds, in the units of [`PacketCost`].
pub(crate) const BUDGET: u64 = 1 << 24;

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
            (len as u64 * BUDGET / u64::from(window(len)).max(1)).max(1)
        };
        PacketCost {
            table: (0..=LARGEST / STEP).map(cost).collect(),
        }
    }

    /// The share of a packet of `len` bytes.
    #[inline]
    pub fn of(&self, len: usize) -> u64 {
        let last = self.table.last().copied().unwrap_or(BUDGET);
        self.table.get(len.div_ceil(STEP)).copied().unwrap_or(last)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_holds_as_many_packets_as_the_link_says() {
        let cost = PacketCost::new(&|len| (len * 100) as u32);
        assert_eq!(cost.of(4096), BUDGET / 100);
        assert_eq!(cost.of(100_000), BUDGET / 100);
        // Small packets cost relatively more.
        let truesize = PacketCost::new(&|len| (200_000 * len / (len + 1000)) as u32);
        assert!(truesize.of(64) * 64 > truesize.of(4096));
        assert_eq!(PacketCost::new(&|_| 0).of(64), 64 * BUDGET);
    }
}
