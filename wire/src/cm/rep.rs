//! CM REP: accepts a connection (reference section 13; IBTA 12.6.8).

use super::{CM_DATA_LEN, message};
use crate::Psn;
use crate::header::{at, put, put24, u24};

/// Reply to a request for communication.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rep {
    /// Bytes 0-3: the sender's communication id.
    pub local_comm_id: u32,
    /// Bytes 4-7: the receiver's communication id.
    pub remote_comm_id: u32,
    /// Bytes 8-11: Q_Key, RD only.
    pub local_qkey: u32,
    /// Bytes 12-14: the sender's queue pair.
    pub local_qpn: u32,
    /// Bytes 15, 19 and 23, high to low: vendor of the enhanced connection option.
    pub vendor_id: u32,
    /// Bytes 16-18: end-to-end context, RD only.
    pub local_eecn: u32,
    /// Bytes 20-22: the first PSN that the receiver of this message is to send, so the one the
    /// sender expects.
    pub starting_psn: Psn,
    /// Byte 24: READs and atomics that the sender takes at once.
    pub responder_resources: u8,
    /// Byte 25: READs and atomics that the sender has outstanding at most.
    pub initiator_depth: u8,
    /// Byte 26 bits 7..3: time from a packet to its acknowledgement, 4.096 us x 2^t.
    pub target_ack_delay: u8,
    /// Byte 26 bits 2..1: 0 when the alternate path is accepted, 1 unsupported, 2 rejected.
    pub failover_accepted: u8,
    /// Byte 26 bit 0: the sender uses end-to-end credits.
    pub end_to_end_flow_control: bool,
    /// Byte 27 bits 7..5: retries on RNR NAKs that the receiver is to make; 7 is for ever.
    pub rnr_retry_count: u8,
    /// Byte 27 bit 4: the sender's queue pair has a shared receive queue.
    pub srq: bool,
    /// Bytes 28-35: the sender's device.
    pub local_ca_guid: u64,
    /// Bytes 36-231: private data of the two programs.
    pub private_data: [u8; 196],
}

impl Rep {
    /// The message of the bytes after the MAD header; there is a value for all of them.
    pub const fn from_bytes(b: &[u8; CM_DATA_LEN]) -> Self {
        Self {
            local_comm_id: u32::from_be_bytes(at::<0, 4, _>(b)),
            remote_comm_id: u32::from_be_bytes(at::<4, 4, _>(b)),
            local_qkey: u32::from_be_bytes(at::<8, 4, _>(b)),
            local_qpn: u24::<12, _>(b),
            vendor_id: u32::from_be_bytes([0, b[15], b[19], b[23]]),
            local_eecn: u24::<16, _>(b),
            starting_psn: Psn::from_be_bytes(at::<20, 3, _>(b)),
            responder_resources: b[24],
            initiator_depth: b[25],
            target_ack_delay: b[26] >> 3,
            failover_accepted: b[26] >> 1 & 0x3,
            end_to_end_flow_control: b[26] & 0x1 != 0,
            rnr_retry_count: b[27] >> 5,
            srq: b[27] & 0x10 != 0,
            local_ca_guid: u64::from_be_bytes(at::<28, 8, _>(b)),
            private_data: at::<36, 196, _>(b),
        }
    }

    /// The bytes after the MAD header. Numbers are cut to the width of their fields.
    pub const fn to_bytes(&self) -> [u8; CM_DATA_LEN] {
        let mut b = [0; CM_DATA_LEN];
        put::<0, _, _>(&mut b, self.local_comm_id.to_be_bytes());
        put::<4, _, _>(&mut b, self.remote_comm_id.to_be_bytes());
        put::<8, _, _>(&mut b, self.local_qkey.to_be_bytes());
        put24::<12, _>(&mut b, self.local_qpn);
        [_, b[15], b[19], b[23]] = self.vendor_id.to_be_bytes();
        put24::<16, _>(&mut b, self.local_eecn);
        put::<20, _, _>(&mut b, self.starting_psn.to_be_bytes());
        b[24] = self.responder_resources;
        b[25] = self.initiator_depth;
        put::<28, _, _>(&mut b, self.local_ca_guid.to_be_bytes());
        put::<36, _, _>(&mut b, self.private_data);
        b[26] = (self.target_ack_delay & 0x1f) << 3
            | (self.failover_accepted & 0x3) << 1
            | (self.end_to_end_flow_control as u8);
        b[27] = (self.rnr_retry_count & 0x7) << 5 | (self.srq as u8) << 4;
        b
    }
}

message!(Rep, 0x13, "CM REP");
