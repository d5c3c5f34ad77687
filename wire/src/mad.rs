//! Management datagrams: their header, and the numbers of the general services interface
//! (reference section 13; IBTA 13.4).

use crate::ParseError;
use crate::header::{at, emit, put, take};

/// Bytes of every MAD, header included.
pub const MAD_LEN: usize = 256;

/// The queue pair of the general services interface, source and destination of CM messages.
pub const GSI_QPN: u32 = 1;

/// The Q_Key of the general services interface.
pub const GSI_QKEY: u32 = 0x8001_0000;

/// The common header of MADs, 24 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct MadHeader {
    /// Byte 0: version of this header, 1.
    pub base_version: u8,
    /// Byte 1: management class; communication management is 0x07.
    pub class: u8,
    /// Byte 2: version of the class; 2 for communication management.
    pub class_version: u8,
    /// Byte 3: method; bit 7 marks a response. Communication management has only Send, 0x03.
    pub method: u8,
    /// Bytes 4-5: status, 0.
    pub status: u16,
    /// Bytes 6-7: of the class; 0 in communication management.
    pub class_specific: u16,
    /// Bytes 8-15: transaction id, the sender's choice.
    pub tid: u64,
    /// Bytes 16-17: which message follows. Bytes 18-19 are reserved, 0.
    pub attribute_id: u16,
    /// Bytes 20-23: attribute modifier.
    pub attribute_modifier: u32,
}

impl MadHeader {
    /// Bytes of the header.
    pub const LEN: usize = 24;

    /// Reads the header at the start of `bytes`.
    pub fn parse(bytes: &[u8]) -> Result<Self, ParseError> {
        let b: &[u8; Self::LEN] = take("MAD header", bytes)?;
        Ok(Self {
            base_version: b[0],
            class: b[1],
            class_version: b[2],
            method: b[3],
            status: u16::from_be_bytes(at::<4, 2, _>(b)),
            class_specific: u16::from_be_bytes(at::<6, 2, _>(b)),
            tid: u64::from_be_bytes(at::<8, 8, _>(b)),
            attribute_id: u16::from_be_bytes(at::<16, 2, _>(b)),
            attribute_modifier: u32::from_be_bytes(at::<20, 4, _>(b)),
        })
    }

    /// The bytes of the header.
    pub const fn to_bytes(&self) -> [u8; Self::LEN] {
        let mut b = [0; Self::LEN];
        put::<0, _, _>(
            &mut b,
            [self.base_version, self.class, self.class_version, self.method],
        );
        put::<4, _, _>(&mut b, self.status.to_be_bytes());
        put::<6, _, _>(&mut b, self.class_specific.to_be_bytes());
        put::<8, _, _>(&mut b, self.tid.to_be_bytes());
        put::<16, _, _>(&mut b, self.attribute_id.to_be_bytes());
        put::<20, _, _>(&mut b, self.attribute_modifier.to_be_bytes());
        b
    }
}

emit!(MadHeader);
