//! Datagram extended transport header, 8 bytes (reference section 3; IBTA 9.3.2).

use crate::ParseError;
use crate::header::{emit, take};

/// Datagram extended transport header: UD.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Deth {
    /// Bytes 0-3: the queue key the receiver must hold.
    pub qkey: u32,
    /// Bytes 5-7: the sender's queue pair, 24 bits. Byte 4 is reserved, 0.
    pub src_qpn: u32,
}

impl Deth {
    /// Bytes of the header.
    pub const LEN: usize = 8;

    /// Reads the header at the start of `bytes`.
    #[inline]
    pub fn parse(bytes: &[u8]) -> Result<Self, ParseError> {
        let &[k0, k1, k2, k3, _, s0, s1, s2] = take::<{ Self::LEN }>("DETH", bytes)?;
        Ok(Self {
            qkey: u32::from_be_bytes([k0, k1, k2, k3]),
            src_qpn: u32::from_be_bytes([0, s0, s1, s2]),
        })
    }

    /// The bytes of the header.
    #[inline]
    pub const fn to_bytes(&self) -> [u8; Self::LEN] {
        let [k0, k1, k2, k3] = self.qkey.to_be_bytes();
        let [_, s0, s1, s2] = self.src_qpn.to_be_bytes();
        [k0, k1, k2, k3, 0, s0, s1, s2]
    }
}

emit!(Deth);
