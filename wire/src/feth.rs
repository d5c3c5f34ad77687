//! FLUSH extended transport header, 4 bytes (reference section 3; IBTA A19.4.1).

use crate::ParseError;
use crate::header::{emit, take};

/// FLUSH extended transport header: how far and for what range earlier WRITEs are flushed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Feth {
    /// Bits 3..0 of the word: placement type; see the constants.
    pub placement: u8,
    /// Bits 5..4 of the word: selectivity; see the constants.
    pub selectivity: u8,
}

impl Feth {
    /// Bytes of the header.
    pub const LEN: usize = 4;

    /// Placement bit: the data is visible to every observer of the responder's memory.
    pub const GLOBAL_VISIBILITY: u8 = 1;
    /// Placement bit: the data is persistent.
    pub const PERSISTENCE: u8 = 2;
    /// Selectivity: the range that the RETH names.
    pub const RANGE: u8 = 0;
    /// Selectivity: the whole memory region of the RETH's key.
    pub const MEMORY_REGION: u8 = 1;

    /// Reads the header at the start of `bytes`; the upper 26 bits are reserved and ignored.
    #[inline]
    pub fn parse(bytes: &[u8]) -> Result<Self, ParseError> {
        let &[_, _, _, low] = take::<{ Self::LEN }>("FETH", bytes)?;
        Ok(Self {
            placement: low & 0xf,
            selectivity: low >> 4 & 3,
        })
    }

    /// The bytes of the header. Bits beyond a field's width are cut off.
    #[inline]
    pub const fn to_bytes(&self) -> [u8; Self::LEN] {
        [0, 0, 0, (self.selectivity & 3) << 4 | self.placement & 0xf]
    }
}

emit!(Feth);
