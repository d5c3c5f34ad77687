//! Base transport header, 12 bytes (reference section 2; IBTA 9.2).

use crate::header::{emit, take};
use crate::{Opcode, ParseError, Psn};

/// The P_Key of the default partition, full member.
pub const DEFAULT_PKEY: u16 = 0xffff;

/// The destination QPN of multicast packets.
pub const MULTICAST_QPN: u32 = 0x00ff_ffff;

/// Base transport header.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Bth {
    /// Byte 0.
    pub opcode: Opcode,
    /// Byte 1 bit 7: the receiver is to raise a solicited event.
    pub solicited: bool,
    /// Byte 1 bit 6: path migration state; hardware sends 1, rxe 0, receivers accept both.
    pub migration: bool,
    /// Byte 1 bits 5..4: bytes of padding after the payload, 0 to 3.
    pub pad: u8,
    /// Byte 1 bits 3..0: transport header version, 0.
    pub version: u8,
    /// Bytes 2-3: partition key; bit 15 means full member.
    pub pkey: u16,
    /// Byte 4 bit 7: forward congestion notification.
    pub fecn: bool,
    /// Byte 4 bit 6: backward congestion notification; set in a CNP.
    pub becn: bool,
    /// Byte 4 bits 5..0: reserved, sent as 0 and ignored (C9-6); hardware has been seen to set it.
    pub reserved: u8,
    /// Bytes 5-7: destination queue pair, 24 bits.
    pub dest_qpn: u32,
    /// Byte 8 bit 7: the responder is to acknowledge this packet. RC and XRC only.
    pub ack_request: bool,
    /// Byte 8 bits 6..0: reserved, sent as 0 and ignored.
    pub reserved_psn: u8,
    /// Bytes 9-11: packet sequence number.
    pub psn: Psn,
}

impl Bth {
    /// Bytes of the header.
    pub const LEN: usize = 12;

    /// A header with the default P_Key and no flag set.
    pub const fn new(opcode: Opcode, dest_qpn: u32, psn: Psn) -> Self {
        Self {
            opcode,
            solicited: false,
            migration: false,
            pad: 0,
            version: 0,
            pkey: DEFAULT_PKEY,
            fecn: false,
            becn: false,
            reserved: 0,
            dest_qpn,
            ack_request: false,
            reserved_psn: 0,
            psn,
        }
    }

    /// Reads the header at the start of `bytes`. An unknown opcode is an error; any version
    /// and any reserved bit pass.
    #[inline]
    pub fn parse(bytes: &[u8]) -> Result<Self, ParseError> {
        let b: &[u8; Self::LEN] = take("BTH", bytes)?;
        Ok(Self {
            opcode: Opcode::from_u8(b[0]).ok_or(ParseError::UnknownOpcode(b[0]))?,
            solicited: b[1] & 0x80 != 0,
            migration: b[1] & 0x40 != 0,
            pad: b[1] >> 4 & 3,
            version: b[1] & 0xf,
            pkey: u16::from_be_bytes([b[2], b[3]]),
            fecn: b[4] & 0x80 != 0,
            becn: b[4] & 0x40 != 0,
            reserved: b[4] & 0x3f,
            dest_qpn: u32::from_be_bytes([0, b[5], b[6], b[7]]),
            ack_request: b[8] & 0x80 != 0,
            reserved_psn: b[8] & 0x7f,
            psn: Psn::from_be_bytes([b[9], b[10], b[11]]),
        })
    }

    /// The bytes of the header. Bits beyond a field's width are cut off.
    #[inline]
    pub const fn to_bytes(&self) -> [u8; Self::LEN] {
        let pkey = self.pkey.to_be_bytes();
        let qpn = self.dest_qpn.to_be_bytes();
        let psn = self.psn.to_be_bytes();
        [
            self.opcode.value(),
            (self.solicited as u8) << 7
                | (self.migration as u8) << 6
                | (self.pad & 3) << 4
                | self.version & 0xf,
            pkey[0],
            pkey[1],
            (self.fecn as u8) << 7 | (self.becn as u8) << 6 | self.reserved & 0x3f,
            qpn[1],
            qpn[2],
            qpn[3],
            (self.ack_request as u8) << 7 | self.reserved_psn & 0x7f,
            psn[0],
            psn[1],
            psn[2],
        ]
    }
}

emit!(Bth);

#[cfg(test)]
mod tests {
    use super::*;

    const BYTES: [u8; 12] = [
        0x11, 0xf0, 0x12, 0x34, 0xd0, 0xab, 0xcd, 0xef, 0x81, 0xfe, 0xdc, 0xba,
    ];

    #[test]
    fn deconstruct_and_construct() {
        let bth = Bth::parse(&BYTES).unwrap();
        assert_eq!(
            bth,
            Bth {
                opcode: Opcode::RcAcknowledge,
                solicited: true,
                migration: true,
                pad: 3,
                version: 0,
                pkey: 0x1234,
                fecn: true,
                becn: true,
                reserved: 0x10,
                dest_qpn: 0xab_cdef,
                ack_request: true,
                reserved_psn: 1,
                psn: Psn::new(0xfe_dcba),
            }
        );
        let mut out = [0xaa; 12];
        bth.emit(&mut out);
        assert_eq!(out, BYTES);
    }

    #[test]
    fn refuses_short_and_unknown() {
        assert_eq!(
            Bth::parse(&BYTES[..11]),
            Err(ParseError::Truncated {
                what: "BTH",
                need: 12,
                have: 11
            })
        );
        let mut bytes = BYTES;
        bytes[0] = 0x15;
        assert_eq!(Bth::parse(&bytes), Err(ParseError::UnknownOpcode(0x15)));
    }
}
