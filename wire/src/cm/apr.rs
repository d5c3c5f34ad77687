//! CM APR: answers a LAP (reference section 13; IBTA 12.8.2).

use super::{CM_DATA_LEN, message};
use crate::header::{at, put};

/// Alternate path response.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Apr {
    /// Bytes 0-3: the sender's communication id.
    pub local_comm_id: u32,
    /// Bytes 4-7: the receiver's communication id.
    pub remote_comm_id: u32,
    /// Byte 8: bytes of `info` that count, 0 to 72.
    pub info_len: u8,
    /// Byte 9: 0 accepted, 1 invalid comm id, 2 unsupported, 3 rejected, 4 redirected, 5 is the current
    /// path, 6 wrong QPN, 7 LID, 8 GID, 9 flow label, 10 traffic class, 11 hop limit, 12 rate, 13 SL.
    pub status: u8,
    /// Bytes 12-83: more about the status.
    pub info: [u8; 72],
    /// Bytes 84-231: private data of the two programs.
    pub private_data: [u8; 148],
}

impl Apr {
    /// The message of the bytes after the MAD header; there is a value for all of them.
    pub const fn from_bytes(b: &[u8; CM_DATA_LEN]) -> Self {
        Self {
            local_comm_id: u32::from_be_bytes(at::<0, 4, _>(b)),
            remote_comm_id: u32::from_be_bytes(at::<4, 4, _>(b)),
            info_len: b[8],
            status: b[9],
            info: at::<12, 72, _>(b),
            private_data: at::<84, 148, _>(b),
        }
    }

    /// The bytes after the MAD header. Numbers are cut to the width of their fields.
    pub const fn to_bytes(&self) -> [u8; CM_DATA_LEN] {
        let mut b = [0; CM_DATA_LEN];
        put::<0, _, _>(&mut b, self.local_comm_id.to_be_bytes());
        put::<4, _, _>(&mut b, self.remote_comm_id.to_be_bytes());
        b[8] = self.info_len;
        b[9] = self.status;
        put::<12, _, _>(&mut b, self.info);
        put::<84, _, _>(&mut b, self.private_data);
        b
    }
}

message!(Apr, 0x1a, "CM APR");
