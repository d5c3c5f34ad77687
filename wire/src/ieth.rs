//! Invalidate extended transport header, 4 bytes (reference section 3; IBTA 9.3.7).

use crate::ParseError;
use crate::header::{emit, take};

/// Invalidate extended transport header: SEND with invalidate.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Ieth {
    /// Bytes 0-3: the responder's remote key to invalidate.
    pub rkey: u32,
}

impl Ieth {
    /// Bytes of the header.
    pub const LEN: usize = 4;

    /// Reads the header at the start of `bytes`.
    #[inline]
    pub fn parse(bytes: &[u8]) -> Result<Self, ParseError> {
        Ok(Self {
            rkey: u32::from_be_bytes(*take("IETH", bytes)?),
        })
    }

    /// The bytes of the header.
    #[inline]
    pub const fn to_bytes(&self) -> [u8; Self::LEN] {
        self.rkey.to_be_bytes()
    }
}

emit!(Ieth);
