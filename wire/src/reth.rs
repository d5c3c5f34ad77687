//! RDMA extended transport header, 16 bytes (reference section 3; IBTA 9.3.3).

use crate::ParseError;
use crate::header::{at, emit, take};

/// RDMA extended transport header: the target of a WRITE, READ, FLUSH or ATOMIC_WRITE.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Reth {
    /// Bytes 0-7: virtual address in the responder's process.
    pub va: u64,
    /// Bytes 8-11: the memory region's remote key.
    pub rkey: u32,
    /// Bytes 12-15: length of the whole transfer, in bytes.
    pub dma_len: u32,
}

impl Reth {
    /// Bytes of the header.
    pub const LEN: usize = 16;

    /// Reads the header at the start of `bytes`.
    #[inline]
    pub fn parse(bytes: &[u8]) -> Result<Self, ParseError> {
        let b: &[u8; Self::LEN] = take("RETH", bytes)?;
        Ok(Self {
            va: u64::from_be_bytes(at::<0, 8, _>(b)),
            rkey: u32::from_be_bytes(at::<8, 4, _>(b)),
            dma_len: u32::from_be_bytes(at::<12, 4, _>(b)),
        })
    }

    /// The bytes of the header.
    #[inline]
    pub fn to_bytes(&self) -> [u8; Self::LEN] {
        let mut b = [0; Self::LEN];
        b[..8].copy_from_slice(&self.va.to_be_bytes());
        b[8..12].copy_from_slice(&self.rkey.to_be_bytes());
        b[12..].copy_from_slice(&self.dma_len.to_be_bytes());
        b
    }
}

emit!(Reth);
