//! CM DREQ: ends a connection (reference section 13; IBTA 12.6.10).

use super::{CM_DATA_LEN, message};
use crate::header::{at, put, put24, u24};

/// Request for communication release.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Dreq {
    /// Bytes 0-3: the sender's communication id.
    pub local_comm_id: u32,
    /// Bytes 4-7: the receiver's communication id.
    pub remote_comm_id: u32,
    /// Bytes 8-10: the receiver's queue pair (RD: end-to-end context).
    pub remote_qpn: u32,
    /// Bytes 12-231: private data of the two programs.
    pub private_data: [u8; 220],
}

impl Dreq {
    /// The message of the bytes after the MAD header; there is a value for all of them.
    pub const fn from_bytes(b: &[u8; CM_DATA_LEN]) -> Self {
        Self {
            local_comm_id: u32::from_be_bytes(at::<0, 4, _>(b)),
            remote_comm_id: u32::from_be_bytes(at::<4, 4, _>(b)),
            remote_qpn: u24::<8, _>(b),
            private_data: at::<12, 220, _>(b),
        }
    }

    /// The bytes after the MAD header. Numbers are cut to the width of their fields.
    pub const fn to_bytes(&self) -> [u8; CM_DATA_LEN] {
        let mut b = [0; CM_DATA_LEN];
        put::<0, _, _>(&mut b, self.local_comm_id.to_be_bytes());
        put::<4, _, _>(&mut b, self.remote_comm_id.to_be_bytes());
        put24::<8, _>(&mut b, self.remote_qpn);
        put::<12, _, _>(&mut b, self.private_data);
        b
    }
}

message!(Dreq, 0x15, "CM DREQ");
