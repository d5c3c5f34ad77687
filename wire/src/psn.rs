//! Packet sequence numbers: 24-bit serial arithmetic (reference section 2; IBTA 9.7.1).

/// Mask of the 24 bits that a PSN has on the wire.
pub const PSN_MASK: u32 = 0x00ff_ffff;

/// A 24-bit packet sequence number.
///
/// PSNs wrap, so they have no total order: compare them with [`Psn::is_after`],
/// [`Psn::is_before`] or [`Psn::distance`], which are right as long as the two
/// are less than 2^23 apart, the limit of the window.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Psn(u32);

impl Psn {
    /// The PSN of the low 24 bits of `value`.
    pub const fn new(value: u32) -> Self {
        Self(value & PSN_MASK)
    }

    /// The number, 0 to 2^24 - 1.
    pub const fn value(self) -> u32 {
        self.0
    }

    /// The PSN of the following packet.
    #[must_use]
    pub const fn next(self) -> Self {
        self.add(1)
    }

    /// The PSN `count` packets later.
    #[must_use]
    #[allow(clippy::should_implement_trait)] // the operand is a count of packets, not a PSN
    pub const fn add(self, count: u32) -> Self {
        Self::new(self.0.wrapping_add(count))
    }

    /// The PSN `count` packets earlier.
    #[must_use]
    #[allow(clippy::should_implement_trait)]
    pub const fn sub(self, count: u32) -> Self {
        Self::new(self.0.wrapping_sub(count))
    }

    /// Packets from `from` to `self`: negative when `self` lies before `from`.
    ///
    /// The difference read as a signed 24-bit number, -2^23 to 2^23 - 1.
    pub const fn distance(self, from: Psn) -> i32 {
        (self.0.wrapping_sub(from.0) << 8) as i32 >> 8
    }

    /// Whether `self` comes after `other`.
    pub const fn is_after(self, other: Psn) -> bool {
        self.distance(other) > 0
    }

    /// Whether `self` comes before `other`.
    pub const fn is_before(self, other: Psn) -> bool {
        self.distance(other) < 0
    }

    /// The three bytes on the wire, most significant first.
    pub const fn to_be_bytes(self) -> [u8; 3] {
        let [_, a, b, c] = self.0.to_be_bytes();
        [a, b, c]
    }

    /// The PSN of three bytes from the wire.
    pub const fn from_be_bytes(bytes: [u8; 3]) -> Self {
        let [a, b, c] = bytes;
        Self(u32::from_be_bytes([0, a, b, c]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wraps_both_ways() {
        let last = Psn::new(PSN_MASK);
        assert_eq!(last.next(), Psn::new(0));
        assert_eq!(Psn::new(0).sub(1), last);
        assert_eq!(Psn::new(0x0100_0005).value(), 5);
        assert_eq!(last.add(PSN_MASK), Psn::new(0xff_fffe));
    }

    #[test]
    fn orders_across_the_wrap() {
        let (before, after) = (Psn::new(0xff_fff0), Psn::new(0x10));
        assert!(after.is_after(before) && before.is_before(after));
        assert!(!before.is_after(after) && !after.is_before(before));
        assert_eq!(after.distance(before), 0x20);
        assert_eq!(before.distance(after), -0x20);
        assert!(!after.is_after(after) && !after.is_before(after));
    }

    #[test]
    fn distance_covers_the_signed_range() {
        let zero = Psn::new(0);
        assert_eq!(Psn::new(0x7f_ffff).distance(zero), 0x7f_ffff);
        assert_eq!(Psn::new(0x80_0000).distance(zero), -0x80_0000);
    }
}
