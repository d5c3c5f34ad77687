//! The description of a path in CM REQ and LAP, 44 bytes (reference section 13).

use crate::Gid;
use crate::header::{at, put, put24, u24};

/// A path between the two ports.
///
/// REQ and LAP have the same fields, some of them at other bytes; both are given.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Path {
    /// Bytes 0-1: LID of the sender; 0xffff in RoCE.
    pub local_lid: u16,
    /// Bytes 2-3: LID of the receiver; 0xffff in RoCE.
    pub remote_lid: u16,
    /// Bytes 4-19: GID of the sender.
    pub local_gid: Gid,
    /// Bytes 20-35: GID of the receiver.
    pub remote_gid: Gid,
    /// Bytes 36-37 and byte 38 bits 7..4: flow label, 20 bits.
    pub flow_label: u32,
    /// Byte 39 (LAP: 41) bits 5..0: packet rate code.
    pub packet_rate: u8,
    /// Byte 40 (LAP: 39): traffic class.
    pub traffic_class: u8,
    /// Byte 41 (LAP: 40): hop limit.
    pub hop_limit: u8,
    /// Byte 42 bits 7..4: service level.
    pub sl: u8,
    /// Byte 42 bit 3: both ports are in one subnet.
    pub subnet_local: bool,
    /// Byte 43 bits 7..3: the sender's ACK timeout, 4.096 us x 2^t.
    pub local_ack_timeout: u8,
}

impl Path {
    /// Bytes of a path.
    pub const LEN: usize = 44;

    /// The path of these bytes in a REQ.
    pub const fn from_req(b: &[u8; Self::LEN]) -> Self {
        Self::from_bytes(b, b[39], b[40], b[41])
    }

    /// The path of these bytes in a LAP.
    pub const fn from_lap(b: &[u8; Self::LEN]) -> Self {
        Self::from_bytes(b, b[41], b[39], b[40])
    }

    /// The bytes in a REQ. Numbers are cut to the width of their fields.
    pub const fn to_req(&self) -> [u8; Self::LEN] {
        self.bytes_with([self.packet_rate & 0x3f, self.traffic_class, self.hop_limit])
    }

    /// The bytes in a LAP. Numbers are cut to the width of their fields.
    pub const fn to_lap(&self) -> [u8; Self::LEN] {
        self.bytes_with([self.traffic_class, self.hop_limit, self.packet_rate & 0x3f])
    }

    const fn from_bytes(b: &[u8; Self::LEN], rate: u8, traffic_class: u8, hop_limit: u8) -> Self {
        Self {
            local_lid: u16::from_be_bytes(at::<0, 2, _>(b)),
            remote_lid: u16::from_be_bytes(at::<2, 2, _>(b)),
            local_gid: Gid(at::<4, 16, _>(b)),
            remote_gid: Gid(at::<20, 16, _>(b)),
            flow_label: u24::<36, _>(b) >> 4,
            packet_rate: rate & 0x3f,
            traffic_class,
            hop_limit,
            sl: b[42] >> 4,
            subnet_local: b[42] & 8 != 0,
            local_ack_timeout: b[43] >> 3,
        }
    }

    const fn bytes_with(&self, at_39: [u8; 3]) -> [u8; Self::LEN] {
        let mut b = [0; Self::LEN];
        put::<0, _, _>(&mut b, self.local_lid.to_be_bytes());
        put::<2, _, _>(&mut b, self.remote_lid.to_be_bytes());
        put::<4, _, _>(&mut b, self.local_gid.0);
        put::<20, _, _>(&mut b, self.remote_gid.0);
        put24::<36, _>(&mut b, self.flow_label << 4);
        put::<39, _, _>(&mut b, at_39);
        b[42] = self.sl << 4 | (self.subnet_local as u8) << 3;
        b[43] = self.local_ack_timeout << 3;
        b
    }
}
