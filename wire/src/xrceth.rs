//! XRC extended transport header, 4 bytes (reference section 3; IBTA annex A14).

use crate::ParseError;
use crate::header::{emit, take};

/// XRC extended transport header: every XRC request.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct XrcEth {
    /// Bytes 1-3: number of the shared receive queue, 24 bits. Byte 0 is reserved, 0.
    pub srqn: u32,
}

impl XrcEth {
    /// Bytes of the header.
    pub const LEN: usize = 4;

    /// Reads the header at the start of `bytes`.
    #[inline]
    pub fn parse(bytes: &[u8]) -> Result<Self, ParseError> {
        let &[_, a, b, c] = take::<{ Self::LEN }>("XRCETH", bytes)?;
        Ok(Self {
            srqn: u32::from_be_bytes([0, a, b, c]),
        })
    }

    /// The bytes of the header.
    #[inline]
    pub const fn to_bytes(&self) -> [u8; Self::LEN] {
        let [_, a, b, c] = self.srqn.to_be_bytes();
        [0, a, b, c]
    }
}

emit!(XrcEth);
