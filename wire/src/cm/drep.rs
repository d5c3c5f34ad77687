//! CM DREP: answers a disconnection (reference section 13; IBTA 12.6.11).

use super::{CM_DATA_LEN, message};
use crate::header::{at, put};

/// Reply to a request for communication release.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Drep {
    /// Bytes 0-3: the sender's communication id.
    pub local_comm_id: u32,
    /// Bytes 4-7: the receiver's communication id.
    pub remote_comm_id: u32,
    /// Bytes 8-231: private data of the two programs.
    pub private_data: [u8; 224],
}

impl Drep {
    /// The message of the bytes after the MAD header; there is a value for all of them.
    pub const fn from_bytes(b: &[u8; CM_DATA_LEN]) -> Self {
        Self {
            local_comm_id: u32::from_be_bytes(at::<0, 4, _>(b)),
            remote_comm_id: u32::from_be_bytes(at::<4, 4, _>(b)),
            private_data: at::<8, 224, _>(b),
        }
    }

    /// The bytes after the MAD header. Numbers are cut to the width of their fields.
    pub const fn to_bytes(&self) -> [u8; CM_DATA_LEN] {
        let mut b = [0; CM_DATA_LEN];
        put::<0, _, _>(&mut b, self.local_comm_id.to_be_bytes());
        put::<4, _, _>(&mut b, self.remote_comm_id.to_be_bytes());
        put::<8, _, _>(&mut b, self.private_data);
        b
    }
}

message!(Drep, 0x16, "CM DREP");
