//! CM SIDR_REQ: asks for the queue pair of a datagram service (reference section 13; IBTA 12.11.1).

use super::{CM_DATA_LEN, message};
use crate::header::{at, put};

/// Service id resolution request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SidrReq {
    /// Bytes 0-3: the sender's number for this request.
    pub request_id: u32,
    /// Bytes 4-5: partition key.
    pub pkey: u16,
    /// Bytes 8-15: the service asked for.
    pub service_id: u64,
    /// Bytes 16-231: private data of the two programs. RDMA CM's
    /// begins with an [`super::IpHeader`].
    pub private_data: [u8; 216],
}

impl SidrReq {
    /// The message of the bytes after the MAD header; there is a value for all of them.
    pub const fn from_bytes(b: &[u8; CM_DATA_LEN]) -> Self {
        Self {
            request_id: u32::from_be_bytes(at::<0, 4, _>(b)),
            pkey: u16::from_be_bytes(at::<4, 2, _>(b)),
            service_id: u64::from_be_bytes(at::<8, 8, _>(b)),
            private_data: at::<16, 216, _>(b),
        }
    }

    /// The bytes after the MAD header. Numbers are cut to the width of their fields.
    pub const fn to_bytes(&self) -> [u8; CM_DATA_LEN] {
        let mut b = [0; CM_DATA_LEN];
        put::<0, _, _>(&mut b, self.request_id.to_be_bytes());
        put::<4, _, _>(&mut b, self.pkey.to_be_bytes());
        put::<8, _, _>(&mut b, self.service_id.to_be_bytes());
        put::<16, _, _>(&mut b, self.private_data);
        b
    }
}

message!(SidrReq, 0x17, "CM SIDR_REQ");
