//! Acknowledge extended transport header, its syndromes, credits and RNR timers
//! (reference sections 3, 6, 7 and 8; IBTA 9.3.4, 9.7.5.2, tables 45 and 46).

use crate::ParseError;
use crate::header::{emit, take};

/// Why a responder refuses a request; the low five bits of a NAK syndrome.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum NakCode {
    /// 0: the packet's PSN is after the expected one.
    PsnSequence,
    /// 1: the request is not allowed in this state or of this form.
    InvalidRequest,
    /// 2: the memory named is not there, or access to it is not granted.
    RemoteAccess,
    /// 3: the responder failed to carry out the request.
    RemoteOperational,
    /// 4: invalid RD request.
    InvalidRdRequest,
    /// 5 to 31: reserved.
    Reserved(u8),
}

impl NakCode {
    /// The code of the low five bits of `bits`.
    pub const fn from_bits(bits: u8) -> Self {
        match bits & 0x1f {
            0 => Self::PsnSequence,
            1 => Self::InvalidRequest,
            2 => Self::RemoteAccess,
            3 => Self::RemoteOperational,
            4 => Self::InvalidRdRequest,
            other => Self::Reserved(other),
        }
    }

    /// The five bits on the wire.
    pub const fn bits(self) -> u8 {
        match self {
            Self::PsnSequence => 0,
            Self::InvalidRequest => 1,
            Self::RemoteAccess => 2,
            Self::RemoteOperational => 3,
            Self::InvalidRdRequest => 4,
            Self::Reserved(bits) => bits & 0x1f,
        }
    }
}

/// The syndrome byte of an AETH.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Syndrome {
    /// 0x00-0x1f: acknowledged, with a credit code for [`credits`].
    Ack {
        /// Credit code, 0 to 31; [`NO_CREDIT_LIMIT`] gives no information.
        credit: u8,
    },
    /// 0x20-0x3f: no receive was posted; send again after the time of [`rnr_timer_us`].
    RnrNak {
        /// Timer code, 0 to 31.
        timer: u8,
    },
    /// 0x60-0x7f: refused.
    Nak(NakCode),
    /// Any other value: the whole byte.
    Reserved(u8),
}

impl Syndrome {
    /// The syndrome of a byte from the wire. Bit 7 set is reserved.
    #[inline]
    pub const fn from_u8(value: u8) -> Self {
        let code = value & 0x1f;
        match value >> 5 {
            0 => Self::Ack { credit: code },
            1 => Self::RnrNak { timer: code },
            3 => Self::Nak(NakCode::from_bits(code)),
            _ => Self::Reserved(value),
        }
    }

    /// The byte on the wire. Codes are cut to five bits.
    #[inline]
    pub const fn value(self) -> u8 {
        match self {
            Self::Ack { credit } => credit & 0x1f,
            Self::RnrNak { timer } => 0x20 | timer & 0x1f,
            Self::Nak(code) => 0x60 | code.bits(),
            Self::Reserved(value) => value,
        }
    }
}

/// Acknowledge extended transport header.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Aeth {
    /// Byte 0: acknowledged or not, and how.
    pub syndrome: Syndrome,
    /// Bytes 1-3: messages that the responder has completed, mod 2^24.
    pub msn: u32,
}

impl Default for Aeth {
    /// An acknowledgement without credit limit, MSN 0.
    fn default() -> Self {
        Self {
            syndrome: Syndrome::Ack {
                credit: NO_CREDIT_LIMIT,
            },
            msn: 0,
        }
    }
}

impl Aeth {
    /// Bytes of the header.
    pub const LEN: usize = 4;

    /// Reads the header at the start of `bytes`.
    #[inline]
    pub fn parse(bytes: &[u8]) -> Result<Self, ParseError> {
        let &[s, a, b, c] = take::<{ Self::LEN }>("AETH", bytes)?;
        Ok(Self {
            syndrome: Syndrome::from_u8(s),
            msn: u32::from_be_bytes([0, a, b, c]),
        })
    }

    /// The bytes of the header. The MSN is cut to 24 bits.
    #[inline]
    pub const fn to_bytes(&self) -> [u8; Self::LEN] {
        let [_, a, b, c] = self.msn.to_be_bytes();
        [self.syndrome.value(), a, b, c]
    }
}

emit!(Aeth);

/// The credit code that says "no limit"; a QP on a shared receive queue sends it always.
pub const NO_CREDIT_LIMIT: u8 = 31;

/// Receives per credit code 0 to 30.
const CREDITS: [u16; 31] = [
    0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072,
    4096, 6144, 8192, 12288, 16384, 24576, 32768,
];

/// Receives that a credit code grants; `None` when it sets no limit (31, and any larger number).
///
/// The requester may send messages up to sequence number MSN + credits, mod 2^24.
pub fn credits(code: u8) -> Option<u32> {
    CREDITS.get(usize::from(code)).map(|&n| u32::from(n))
}

/// The largest credit code that grants no more than `receives`; at most 30.
pub fn encode_credits(receives: u32) -> u8 {
    (CREDITS.partition_point(|&n| u32::from(n) <= receives) - 1) as u8
}

/// Microseconds by RNR timer code.
const RNR_TIMER_US: [u32; 32] = [
    655_360, 10, 20, 30, 40, 60, 80, 120, 160, 240, 320, 480, 640, 960, 1280, 1920, 2560, 3840, 5120, 7680,
    10_240, 15_360, 20_480, 30_720, 40_960, 61_440, 81_920, 122_880, 163_840, 245_760, 327_680, 491_520,
];

/// The wait that an RNR timer code asks for, in microseconds. Only the low five bits count.
pub const fn rnr_timer_us(code: u8) -> u32 {
    RNR_TIMER_US[(code & 0x1f) as usize]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_syndrome_byte_survives() {
        for byte in 0..=255 {
            assert_eq!(Syndrome::from_u8(byte).value(), byte);
        }
        assert_eq!(Syndrome::from_u8(0x1f), Syndrome::Ack { credit: 31 });
        assert_eq!(Syndrome::from_u8(0x2c), Syndrome::RnrNak { timer: 12 });
        assert_eq!(Syndrome::from_u8(0x60), Syndrome::Nak(NakCode::PsnSequence));
        assert_eq!(Syndrome::from_u8(0x64), Syndrome::Nak(NakCode::InvalidRdRequest));
        assert_eq!(Syndrome::from_u8(0x65), Syndrome::Nak(NakCode::Reserved(5)));
        assert_eq!(Syndrome::from_u8(0x40), Syndrome::Reserved(0x40));
        assert_eq!(Syndrome::from_u8(0x80), Syndrome::Reserved(0x80));
    }

    #[test]
    fn credit_codes() {
        assert_eq!(credits(0), Some(0));
        assert_eq!(credits(5), Some(6));
        assert_eq!(credits(6), Some(8));
        assert_eq!(credits(30), Some(32768));
        assert_eq!(credits(NO_CREDIT_LIMIT), None);
        assert_eq!(credits(200), None);
        for code in 0..31u8 {
            let n = credits(code).unwrap();
            assert_eq!(encode_credits(n), code);
            assert_eq!(encode_credits(n + 1).max(code), encode_credits(n + 1));
        }
        assert_eq!(encode_credits(5), 4);
        assert_eq!(encode_credits(u32::MAX), 30);
    }

    #[test]
    fn rnr_timers() {
        assert_eq!(rnr_timer_us(0), 655_360);
        assert_eq!(rnr_timer_us(1), 10);
        assert_eq!(rnr_timer_us(12), 640);
        assert_eq!(rnr_timer_us(25), 61_440);
        assert_eq!(rnr_timer_us(31), 491_520);
        assert_eq!(rnr_timer_us(0x21), 10);
        // From 1 on each code waits longer than the one before.
        assert!((2..32).all(|c| rnr_timer_us(c) > rnr_timer_us(c - 1)));
    }
}
