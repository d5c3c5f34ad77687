//! Atomic extended transport header, 28 bytes (reference section 3; IBTA 9.3.5).

use crate::ParseError;
use crate::header::{at, emit, take};

/// Atomic extended transport header: COMPARE_SWAP and FETCH_ADD.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct AtomicEth {
    /// Bytes 0-7: virtual address of the 8-byte operand, a multiple of 8.
    pub va: u64,
    /// Bytes 8-11: the memory region's remote key.
    pub rkey: u32,
    /// Bytes 12-19: the value to store (COMPARE_SWAP) or to add (FETCH_ADD).
    pub swap_add: u64,
    /// Bytes 20-27: the value to compare with (COMPARE_SWAP).
    pub compare: u64,
}

impl AtomicEth {
    /// Bytes of the header.
    pub const LEN: usize = 28;

    /// Reads the header at the start of `bytes`.
    #[inline]
    pub fn parse(bytes: &[u8]) -> Result<Self, ParseError> {
        let b: &[u8; Self::LEN] = take("AtomicETH", bytes)?;
        Ok(Self {
            va: u64::from_be_bytes(at::<0, 8, _>(b)),
            rkey: u32::from_be_bytes(at::<8, 4, _>(b)),
            swap_add: u64::from_be_bytes(at::<12, 8, _>(b)),
            compare: u64::from_be_bytes(at::<20, 8, _>(b)),
        })
    }

    /// The bytes of the header.
    #[inline]
    pub fn to_bytes(&self) -> [u8; Self::LEN] {
        let mut b = [0; Self::LEN];
        b[..8].copy_from_slice(&self.va.to_be_bytes());
        b[8..12].copy_from_slice(&self.rkey.to_be_bytes());
        b[12..20].copy_from_slice(&self.swap_add.to_be_bytes());
        b[20..].copy_from_slice(&self.compare.to_be_bytes());
        b
    }
}

emit!(AtomicEth);
