//! CM REQ: asks for a connection (reference section 13; IBTA 12.6.5).

use super::ServiceType;
use super::path::Path;
use super::{CM_DATA_LEN, message};
use crate::Psn;
use crate::header::{at, put, put24, u24};

/// Request for communication.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Req {
    /// Bytes 0-3: the sender's communication id.
    pub local_comm_id: u32,
    /// Bytes 5-7: vendor of the enhanced connection option, 24 bits; 0 when there is none.
    pub vendor_id: u32,
    /// Bytes 8-15: the service asked for; RDMA CM's are of [`super::ip_header::service_id`].
    pub service_id: u64,
    /// Bytes 16-23: the sender's device.
    pub local_ca_guid: u64,
    /// Bytes 28-31: Q_Key, RD only.
    pub local_qkey: u32,
    /// Bytes 32-34: the sender's queue pair.
    pub local_qpn: u32,
    /// Byte 35: READs and atomics that the sender takes at once.
    pub responder_resources: u8,
    /// Bytes 36-38: end-to-end context, RD only.
    pub local_eecn: u32,
    /// Byte 39: READs and atomics that the sender has outstanding at most.
    pub initiator_depth: u8,
    /// Bytes 40-42: end-to-end context, RD only.
    pub remote_eecn: u32,
    /// Byte 43 bits 7..3: time within which the receiver is to answer, 4.096 us x 2^t.
    pub remote_cm_response_timeout: u8,
    /// Byte 43 bits 2..1: transport service.
    pub transport: ServiceType,
    /// Byte 43 bit 0: the sender uses end-to-end credits.
    pub end_to_end_flow_control: bool,
    /// Bytes 44-46: the first PSN that the receiver of this message is to send, so the one the
    /// sender expects.
    pub starting_psn: Psn,
    /// Byte 47 bits 7..3: time within which the sender will answer, 4.096 us x 2^t.
    pub local_cm_response_timeout: u8,
    /// Byte 47 bits 2..0: retries on timeout and sequence errors that the receiver is to make.
    pub retry_count: u8,
    /// Bytes 48-49: partition key.
    pub pkey: u16,
    /// Byte 50 bits 7..4: path MTU code, see [`crate::PathMtu::from_code`].
    pub path_mtu: u8,
    /// Byte 50 bit 3: an RD channel exists.
    pub rdc_exists: bool,
    /// Byte 50 bits 2..0: retries on RNR NAKs that the receiver is to make; 7 is for ever.
    pub rnr_retry_count: u8,
    /// Byte 51 bits 7..4: retries of CM messages.
    pub max_cm_retries: u8,
    /// Byte 51 bit 3: the sender's queue pair has a shared receive queue.
    pub srq: bool,
    /// Byte 51 bits 2..0: 1 is XRC, when the transport is [`ServiceType::Extended`].
    pub extended_transport: u8,
    /// Bytes 52-95: the path to use.
    pub primary: Path,
    /// Bytes 96-139: a second path, zeros when there is none.
    pub alternate: Path,
    /// Bytes 140-231: private data of the two programs. RDMA CM's
    /// begins with an [`super::IpHeader`].
    pub private_data: [u8; 92],
}

impl Req {
    /// The message of the bytes after the MAD header; there is a value for all of them.
    pub const fn from_bytes(b: &[u8; CM_DATA_LEN]) -> Self {
        Self {
            local_comm_id: u32::from_be_bytes(at::<0, 4, _>(b)),
            vendor_id: u24::<5, _>(b),
            service_id: u64::from_be_bytes(at::<8, 8, _>(b)),
            local_ca_guid: u64::from_be_bytes(at::<16, 8, _>(b)),
            local_qkey: u32::from_be_bytes(at::<28, 4, _>(b)),
            local_qpn: u24::<32, _>(b),
            responder_resources: b[35],
            local_eecn: u24::<36, _>(b),
            initiator_depth: b[39],
            remote_eecn: u24::<40, _>(b),
            remote_cm_response_timeout: b[43] >> 3,
            transport: ServiceType::from_bits(b[43] >> 1),
            end_to_end_flow_control: b[43] & 0x1 != 0,
            starting_psn: Psn::from_be_bytes(at::<44, 3, _>(b)),
            local_cm_response_timeout: b[47] >> 3,
            retry_count: b[47] & 0x7,
            pkey: u16::from_be_bytes(at::<48, 2, _>(b)),
            path_mtu: b[50] >> 4,
            rdc_exists: b[50] & 0x8 != 0,
            rnr_retry_count: b[50] & 0x7,
            max_cm_retries: b[51] >> 4,
            srq: b[51] & 0x8 != 0,
            extended_transport: b[51] & 0x7,
            primary: Path::from_req(&at::<52, { Path::LEN }, _>(b)),
            alternate: Path::from_req(&at::<96, { Path::LEN }, _>(b)),
            private_data: at::<140, 92, _>(b),
        }
    }

    /// The bytes after the MAD header. Numbers are cut to the width of their fields.
    pub const fn to_bytes(&self) -> [u8; CM_DATA_LEN] {
        let mut b = [0; CM_DATA_LEN];
        put::<0, _, _>(&mut b, self.local_comm_id.to_be_bytes());
        put24::<5, _>(&mut b, self.vendor_id);
        put::<8, _, _>(&mut b, self.service_id.to_be_bytes());
        put::<16, _, _>(&mut b, self.local_ca_guid.to_be_bytes());
        put::<28, _, _>(&mut b, self.local_qkey.to_be_bytes());
        put24::<32, _>(&mut b, self.local_qpn);
        b[35] = self.responder_resources;
        put24::<36, _>(&mut b, self.local_eecn);
        b[39] = self.initiator_depth;
        put24::<40, _>(&mut b, self.remote_eecn);
        put::<44, _, _>(&mut b, self.starting_psn.to_be_bytes());
        put::<48, _, _>(&mut b, self.pkey.to_be_bytes());
        put::<52, _, _>(&mut b, self.primary.to_req());
        put::<96, _, _>(&mut b, self.alternate.to_req());
        put::<140, _, _>(&mut b, self.private_data);
        b[43] = (self.remote_cm_response_timeout & 0x1f) << 3
            | (self.transport as u8) << 1
            | (self.end_to_end_flow_control as u8);
        b[47] = (self.local_cm_response_timeout & 0x1f) << 3 | (self.retry_count & 0x7);
        b[50] = (self.path_mtu & 0xf) << 4 | (self.rdc_exists as u8) << 3 | (self.rnr_retry_count & 0x7);
        b[51] = (self.max_cm_retries & 0xf) << 4 | (self.srq as u8) << 3 | (self.extended_transport & 0x7);
        b
    }
}

message!(Req, 0x10, "CM REQ");
