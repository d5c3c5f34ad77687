//! Unreliable datagram: single packets to and from anybody who knows the Q_Key.

use std::net::{IpAddr, Ipv4Addr};

use ferroce_wire::grh::GrhIpv4;
use ferroce_wire::{Gid, Grh, GrhArea, RocePacket};

use super::receive::Refusal;
use crate::link::{Path, RxPacket};
use crate::qp::{Qp, Shared};
use crate::verbs::{UdDest, Wc, WcFlags, WcOpcode, WcStatus};

/// What stands in the place of a destination before one is posted.
pub(crate) const NOWHERE: UdDest = UdDest {
    path: Path {
        version: crate::link::RoceVersion::V2,
        source: IpAddr::V4(Ipv4Addr::UNSPECIFIED),
        dest: IpAddr::V4(Ipv4Addr::UNSPECIFIED),
        ifindex: 0,
        sgid_index: 0,
        traffic_class: 0,
        hop_limit: 0,
        flow_label: 0,
        service_level: 0,
    },
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
                    service_level: packet_type(&header),
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
/// the network header, 1 IPv6 or 2 IPv4. UCX knows only by that what the first 40 bytes hold.
fn packet_type(header: &GrhArea) -> u8 {
    match header {
        GrhArea::V6(_) => 0b1001,
        GrhArea::V4(_) => 0b1010,
    }
}

/// The network header that a packet came with, as far as the link tells: IPv4 identification and IPv6 flow label are
/// given as 0.
fn network_header(packet: &RxPacket<'_>) -> GrhArea {
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
    GrhArea::V6(Grh {
        traffic_class: packet.traffic_class,
        flow_label: 0,
        payload_len: datagram as u16,
        next_header: UDP,
        hop_limit: packet.hop_limit,
        sgid: Gid::from(packet.source),
        dgid: Gid::from(packet.dest),
    })
}
