//! CM LAP: loads an alternate path (reference section 13; IBTA 12.8.1).

use super::path::Path;
use super::{CM_DATA_LEN, message};
use crate::header::{at, put, put24, u24};

/// Load alternate path.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Lap {
    /// Bytes 0-3: the sender's communication id.
    pub local_comm_id: u32,
    /// Bytes 4-7: the receiver's communication id.
    pub remote_comm_id: u32,
    /// Bytes 12-14: the receiver's queue pair.
    pub remote_qpn: u32,
    /// Byte 15 bits 7..3: time within which the receiver is to answer, 4.096 us x 2^t.
    pub remote_cm_response_timeout: u8,
    /// Bytes 20-63: the path.
    pub alternate: Path,
    /// Bytes 64-231: private data of the two programs.
    pub private_data: [u8; 168],
}

impl Lap {
    /// The message of the bytes after the MAD header; there is a value for all of them.
    pub const fn from_bytes(b: &[u8; CM_DATA_LEN]) -> Self {
        Self {
            local_comm_id: u32::from_be_bytes(at::<0, 4, _>(b)),
            remote_comm_id: u32::from_be_bytes(at::<4, 4, _>(b)),
            remote_qpn: u24::<12, _>(b),
            remote_cm_response_timeout: b[15] >> 3,
            alternate: Path::from_lap(&at::<20, { Path::LEN }, _>(b)),
            private_data: at::<64, 168, _>(b),
        }
    }

    /// The bytes after the MAD header. Numbers are cut to the width of their fields.
    pub const fn to_bytes(&self) -> [u8; CM_DATA_LEN] {
        let mut b = [0; CM_DATA_LEN];
        put::<0, _, _>(&mut b, self.local_comm_id.to_be_bytes());
        put::<4, _, _>(&mut b, self.remote_comm_id.to_be_bytes());
        put24::<12, _>(&mut b, self.remote_qpn);
        put::<20, _, _>(&mut b, self.alternate.to_lap());
        put::<64, _, _>(&mut b, self.private_data);
        b[15] = (self.remote_cm_response_timeout & 0x1f) << 3;
        b
    }
}

message!(Lap, 0x19, "CM LAP");
