//! Immediate data, 4 bytes (reference section 3; IBTA 9.3.6).

use crate::ParseError;
use crate::header::{emit, take};

/// Immediate data: four bytes that the sending program gave, opaque to the transport.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ImmDt {
    /// Bytes 0-3, in the order of the wire, which is that of `imm_data` in the verbs structures.
    pub data: [u8; 4],
}

impl ImmDt {
    /// Bytes of the header.
    pub const LEN: usize = 4;

    /// Reads the header at the start of `bytes`.
    #[inline]
    pub fn parse(bytes: &[u8]) -> Result<Self, ParseError> {
        Ok(Self {
            data: *take("ImmDt", bytes)?,
        })
    }

    /// The bytes of the header.
    #[inline]
    pub const fn to_bytes(&self) -> [u8; Self::LEN] {
        self.data
    }
}

emit!(ImmDt);
