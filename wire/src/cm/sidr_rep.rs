//! CM SIDR_REP: names the queue pair of a datagram service (reference section 13; IBTA 12.11.2).

use super::SidrStatus;
use super::{CM_DATA_LEN, message};
use crate::header::{at, put, put24, u24};

/// Service id resolution response.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SidrRep {
    /// Bytes 0-3: the number of the request.
    pub request_id: u32,
    /// Byte 4: whether the service is there.
    pub status: SidrStatus,
    /// Byte 5: bytes of `info` that count, 0 to 72.
    pub info_len: u8,
    /// Bytes 6, 7 and 11, high to low: vendor of the enhanced connection option.
    pub vendor_id: u32,
    /// Bytes 8-10: the service's queue pair.
    pub qpn: u32,
    /// Bytes 12-19: the service.
    pub service_id: u64,
    /// Bytes 20-23: the Q_Key of that queue pair.
    pub qkey: u32,
    /// Bytes 24-95: more about the status.
    pub info: [u8; 72],
    /// Bytes 96-231: private data of the two programs.
    pub private_data: [u8; 136],
}

impl SidrRep {
    /// The message of the bytes after the MAD header; there is a value for all of them.
    pub const fn from_bytes(b: &[u8; CM_DATA_LEN]) -> Self {
        Self {
            request_id: u32::from_be_bytes(at::<0, 4, _>(b)),
            status: SidrStatus(b[4]),
            info_len: b[5],
            vendor_id: u32::from_be_bytes([0, b[6], b[7], b[11]]),
            qpn: u24::<8, _>(b),
            service_id: u64::from_be_bytes(at::<12, 8, _>(b)),
            qkey: u32::from_be_bytes(at::<20, 4, _>(b)),
            info: at::<24, 72, _>(b),
            private_data: at::<96, 136, _>(b),
        }
    }

    /// The bytes after the MAD header. Numbers are cut to the width of their fields.
    pub const fn to_bytes(&self) -> [u8; CM_DATA_LEN] {
        let mut b = [0; CM_DATA_LEN];
        put::<0, _, _>(&mut b, self.request_id.to_be_bytes());
        b[4] = self.status.0;
        b[5] = self.info_len;
        [_, b[6], b[7], b[11]] = self.vendor_id.to_be_bytes();
        put24::<8, _>(&mut b, self.qpn);
        put::<12, _, _>(&mut b, self.service_id.to_be_bytes());
        put::<20, _, _>(&mut b, self.qkey.to_be_bytes());
        put::<24, _, _>(&mut b, self.info);
        put::<96, _, _>(&mut b, self.private_data);
        b
    }
}

message!(SidrRep, 0x18, "CM SIDR_REP");
