//! Unreliable datagram: single packets to and from anybody who knows the Q_Key.

use std::net::{IpAddr, Ipv4Addr};

use ferroce_wire::grh::GrhIpv4;
use ferroce_wire::{Gid, Grh, GrhArea, RocePacket};

use super::receive::Refusal;
use crate::link::{Path, RoceVersion, RxPacket};
use crate::qp::{Qp, Shared};
use crate::verbs::{UdDest, Wc, WcFlags, WcOpcode, WcStatus};

/// What stands in the place of a destination before one is posted.
pub(crate) const NOWHERE: UdDest = UdDest {
    path: Path::between(
        IpAddr::V4(Ipv4Addr::UNSPECIFIED),
        IpAddr::V4(Ipv4Addr::UNSPECIFIED),
    ),
    qpn: 0,
    qkey: 0,
};

/// Protocol number of UDP.
const UDP: u8 = 17;
/// Bytes of a UDP header.
const UDP_LEN: usize = 8;
/// Bytes of an IPv4 header without options.
const IPV4_LEN: usize = 20;

impl Qp {
    /// Takes a datagram: the network header goes in front of the payload. Without a receive it is dropped; one that is
    /// too short fails, as on hardware, and the QP with it.
    pub fn receive_datagram(
        &mut self,
        shared: &mut Shared<'_>,
        packet: &RxPacket<'_>,
        roce: &RocePacket<'_>,
    ) {
        let Some(deth) = roce.deth() else { return };
        if roce.payload().len() > self.mtu as usize {
            shared.counters.drop_sequence += 1;
            return;
        }
        let header = network_header(packet);
        let placed = self
            .place(shared, true, &header.to_bytes())
            .and_then(|()| self.place(shared, false, roce.payload()));
        match placed {
            Ok(()) => {
                let wc = Wc {
                    opcode: WcOpcode::Recv,
                    src_qp: deth.src_qpn,
                    flags: WcFlags::GRH,
                    service_level: packet_type(packet.version, &header),
                    ..Wc::default()
                };
                self.complete_recv(shared, roce, wc);
            }
            Err(Refusal::TooLong) => {
                self.fail_recv(shared, WcStatus::LocLenErr);
                self.enter_error(shared);
            }
            Err(Refusal::ReceiveFault) => {
                self.fail_recv(shared, WcStatus::LocProtErr);
                self.enter_error(shared);
            }
            Err(_) => shared.counters.drop_no_receive += 1,
        }
    }
}

/// The kind of packet, which hardware tells in the completion's service level, as RoCE has none: bit 3, UDP; bits 2..0,
/// the network header, 0 GRH, 1 IPv6 or 2 IPv4. UCX knows only by that what the first 40 bytes hold.
fn packet_type(version: RoceVersion, header: &GrhArea) -> u8 {
    match (version, header) {
        (RoceVersion::V1, _) => 0b0000,
        (RoceVersion::V2, GrhArea::V6(_)) => 0b1001,
        (RoceVersion::V2, GrhArea::V4(_)) => 0b1010,
    }
}

/// The network header that a packet came with, as far as the link tells: IPv4 identification is given as 0.
///
/// By its next header libibverbs finds the GID that an answer leaves from, of the type by which the packet came.
fn network_header(packet: &RxPacket<'_>) -> GrhArea {
    if packet.version == RoceVersion::V1 {
        return GrhArea::V6(grh(packet, packet.data.len(), Grh::NEXT_HEADER_IBA));
    }
    let datagram = UDP_LEN + packet.data.len();
    if let (IpAddr::V4(src), IpAddr::V4(dst)) = (packet.source, packet.dest) {
        return GrhArea::V4(GrhIpv4 {
            tos: packet.traffic_class,
            total_len: (IPV4_LEN + datagram) as u16,
            id: 0,
            dont_fragment: true,
            ttl: packet.hop_limit,
            src,
            dst,
        });
    }
    GrhArea::V6(grh(packet, datagram, UDP))
}

/// The GRH of a packet, which is its IPv6 header if it has one; `len` bytes follow.
fn grh(packet: &RxPacket<'_>, len: usize, next_header: u8) -> Grh {
    Grh {
        traffic_class: packet.traffic_class,
        flow_label: packet.flow_label,
        payload_len: len as u16,
        next_header,
        hop_limit: packet.hop_limit,
        sgid: Gid::from(packet.source),
        dgid: Gid::from(packet.dest),
    }
}
