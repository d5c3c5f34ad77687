//! Atomic acknowledge extended transport header, 8 bytes (reference section 3; IBTA 9.5.3).

use crate::ParseError;
use crate::header::{emit, take};

/// Atomic acknowledge extended transport header: the result of an atomic operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct AtomicAckEth {
    /// Bytes 0-7: the value that the remote operand had before.
    pub original: u64,
}

impl AtomicAckEth {
    /// Bytes of the header.
    pub const LEN: usize = 8;

    /// Reads the header at the start of `bytes`.
    #[inline]
    pub fn parse(bytes: &[u8]) -> Result<Self, ParseError> {
        Ok(Self {
            original: u64::from_be_bytes(*take("AtomicAckETH", bytes)?),
        })
    }

    /// The bytes of the header.
    #[inline]
    pub const fn to_bytes(&self) -> [u8; Self::LEN] {
        self.original.to_be_bytes()
    }
}

emit!(AtomicAckEth);
