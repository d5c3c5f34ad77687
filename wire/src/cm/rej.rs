//! CM REJ: refuses a message (reference section 13; IBTA 12.6.7).

use super::{Answered, RejReason};
use super::{CM_DATA_LEN, message};
use crate::header::{at, put};

/// Reject.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rej {
    /// Bytes 0-3: the sender's communication id.
    pub local_comm_id: u32,
    /// Bytes 4-7: the receiver's communication id.
    pub remote_comm_id: u32,
    /// Byte 8 bits 7..6: the message refused.
    pub message: Answered,
    /// Byte 9 bits 7..1: bytes of `info` that count, 0 to 72.
    pub info_len: u8,
    /// Bytes 10-11: why.
    pub reason: RejReason,
    /// Bytes 12-83: more about the reason, such as what would be accepted.
    pub info: [u8; 72],
    /// Bytes 84-231: private data of the two programs.
    pub private_data: [u8; 148],
}

impl Rej {
    /// The message of the bytes after the MAD header; there is a value for all of them.
    pub const fn from_bytes(b: &[u8; CM_DATA_LEN]) -> Self {
        Self {
            local_comm_id: u32::from_be_bytes(at::<0, 4, _>(b)),
            remote_comm_id: u32::from_be_bytes(at::<4, 4, _>(b)),
            message: Answered::from_bits(b[8] >> 6),
            info_len: b[9] >> 1,
            reason: RejReason(u16::from_be_bytes(at::<10, 2, _>(b))),
            info: at::<12, 72, _>(b),
            private_data: at::<84, 148, _>(b),
        }
    }

    /// The bytes after the MAD header. Numbers are cut to the width of their fields.
    pub const fn to_bytes(&self) -> [u8; CM_DATA_LEN] {
        let mut b = [0; CM_DATA_LEN];
        put::<0, _, _>(&mut b, self.local_comm_id.to_be_bytes());
        put::<4, _, _>(&mut b, self.remote_comm_id.to_be_bytes());
        put::<10, _, _>(&mut b, self.reason.0.to_be_bytes());
        put::<12, _, _>(&mut b, self.info);
        put::<84, _, _>(&mut b, self.private_data);
        b[8] = (self.message as u8) << 6;
        b[9] = (self.info_len & 0x7f) << 1;
        b
    }
}

message!(Rej, 0x12, "CM REJ");
