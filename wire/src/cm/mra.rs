//! CM MRA: a message came, the answer takes time (reference section 13; IBTA 12.6.6).

use super::Answered;
use super::{CM_DATA_LEN, message};
use crate::header::{at, put};

/// Message receipt acknowledgement.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Mra {
    /// Bytes 0-3: the sender's communication id.
    pub local_comm_id: u32,
    /// Bytes 4-7: the receiver's communication id.
    pub remote_comm_id: u32,
    /// Byte 8 bits 7..6: the message received; [`Answered::Other`] is LAP.
    pub message: Answered,
    /// Byte 9 bits 7..3: time until the answer at most, 4.096 us x 2^t.
    pub service_timeout: u8,
    /// Bytes 10-231: private data of the two programs.
    pub private_data: [u8; 222],
}

impl Mra {
    /// The message of the bytes after the MAD header; there is a value for all of them.
    pub const fn from_bytes(b: &[u8; CM_DATA_LEN]) -> Self {
        Self {
            local_comm_id: u32::from_be_bytes(at::<0, 4, _>(b)),
            remote_comm_id: u32::from_be_bytes(at::<4, 4, _>(b)),
            message: Answered::from_bits(b[8] >> 6),
            service_timeout: b[9] >> 3,
            private_data: at::<10, 222, _>(b),
        }
    }

    /// The bytes after the MAD header. Numbers are cut to the width of their fields.
    pub const fn to_bytes(&self) -> [u8; CM_DATA_LEN] {
        let mut b = [0; CM_DATA_LEN];
        put::<0, _, _>(&mut b, self.local_comm_id.to_be_bytes());
        put::<4, _, _>(&mut b, self.remote_comm_id.to_be_bytes());
        put::<10, _, _>(&mut b, self.private_data);
        b[8] = (self.message as u8) << 6;
        b[9] = (self.service_timeout & 0x1f) << 3;
        b
    }
}

message!(Mra, 0x11, "CM MRA");
