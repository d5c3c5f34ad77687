//! One RoCE packet as a line of text.

use std::fmt::{self, Display, Formatter};
use std::net::IpAddr;

use ferroce_wire::aeth;
use ferroce_wire::bth::DEFAULT_PKEY;
use ferroce_wire::cm::CmMad;
use ferroce_wire::frame::{ETHERTYPE_ROCE_V1, Ethernet, Vlan};
use ferroce_wire::mad::GSI_QPN;
use ferroce_wire::packet::ICRC_LEN;
use ferroce_wire::{Bth, Datagram, NakCode, Network, ParseError, RocePacket, Syndrome};
use pcap_file::DataLink;

use super::capture::Captured;

/// EtherTypes of IPv4 and IPv6.
const ETHERTYPE_IP: [u16; 2] = [0x0800, 0x86dd];
/// Longest frame: an IP packet of 64 KiB behind link headers.
const MAX_FRAME: usize = 66_000;
/// Longest segment of a GSO send: path MTU 4096, all headers and the ICRC.
const MAX_SEGMENT: usize = 4096 + 100;

/// What is known of a packet's ICRC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Icrc {
    /// It fits.
    Ok,
    /// It does not, or the packet is malformed.
    Bad,
    /// It was not captured, with this many bytes of so many.
    Truncated(usize, usize),
}

/// The text of a packet.
#[derive(Debug, PartialEq, Eq)]
pub struct Line {
    text: String,
    /// What is known of the ICRC.
    pub icrc: Icrc,
}

impl Display for Line {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self.icrc {
            Icrc::Ok => write!(f, "{} icrc ok", self.text),
            Icrc::Bad => write!(f, "{} icrc BAD", self.text),
            Icrc::Truncated(have, of) => write!(f, "{} truncated, {have} of {of} bytes captured", self.text),
        }
    }
}

/// The RoCE packets of a captured frame: none if it carries something else, several if it was
/// captured before the network stack cut it into segments.
pub fn packets(captured: &Captured) -> Vec<Line> {
    let have = captured.bytes.len();
    let mut bytes = captured.bytes.clone();
    // With zeros for what is missing all lengths are right; what is shown was captured.
    bytes.resize(have.max(captured.original_len.min(MAX_FRAME)), 0);
    let Some((vlan, ip_packet)) = ip_packet(captured.link, &bytes) else {
        return Vec::new();
    };
    let outside = bytes.len() - ip_packet.len();
    let datagram = match Datagram::parse(ip_packet) {
        Ok(datagram) => datagram,
        Err(error) => {
            return malformed(ip_packet, &error, have, bytes.len())
                .into_iter()
                .collect();
        }
    };
    let end = outside + datagram.bytes().len();
    if have < end {
        let network = outside + datagram.network.header_len();
        let text = if have < network {
            "RoCE".to_owned()
        } else if have < network + datagram.packet.header_bytes().len() {
            addresses(&datagram.network, vlan)
        } else {
            describe(&datagram.network, &datagram.packet, vlan, false)
        };
        return vec![Line {
            text,
            icrc: Icrc::Truncated(have, captured.original_len),
        }];
    }
    if datagram.verify().is_ok() {
        return vec![Line {
            text: describe(&datagram.network, &datagram.packet, vlan, true),
            icrc: Icrc::Ok,
        }];
    }
    segments(&datagram, vlan).unwrap_or_else(|| {
        vec![Line {
            text: describe(&datagram.network, &datagram.packet, vlan, true),
            icrc: Icrc::Bad,
        }]
    })
}

/// What follows the link header, if it can be RoCE.
fn ip_packet(link: DataLink, frame: &[u8]) -> Option<(Option<Vlan>, &[u8])> {
    let is_ours = |ether_type: u16| ETHERTYPE_IP.contains(&ether_type) || ether_type == ETHERTYPE_ROCE_V1;
    let cooked = |protocol_at: usize, header_len: usize| {
        let protocol = u16::from_be_bytes(*frame.get(protocol_at..)?.first_chunk()?);
        is_ours(protocol).then(|| frame.get(header_len..))?
    };
    match link {
        DataLink::ETHERNET => {
            let (ethernet, ether_type, rest) = Ethernet::parse(frame).ok()?;
            is_ours(ether_type).then_some((ethernet.vlan, rest))
        }
        // What `tcpdump -i any` writes: a cooked header with the EtherType at its end or start.
        DataLink::LINUX_SLL => Some((None, cooked(14, 16)?)),
        DataLink::LINUX_SLL2 => Some((None, cooked(0, 20)?)),
        DataLink::RAW | DataLink::IPV4 | DataLink::IPV6 => Some((None, frame)),
        _ => None,
    }
}

/// A packet that claims to be RoCE and can't be read; nothing for one that does not.
fn malformed(ip_packet: &[u8], error: &ParseError, have: usize, of: usize) -> Option<Line> {
    if matches!(error, ParseError::NotRoce(_)) {
        return None;
    }
    let start = Network::parse(ip_packet)
        .map_or_else(|_| "RoCE".to_owned(), |(network, _)| addresses(&network, None));
    let icrc = if have < of {
        Icrc::Truncated(have, of)
    } else {
        Icrc::Bad
    };
    Some(Line {
        text: format!("{start} malformed: {error}"),
        icrc,
    })
}

/// The packets of one GSO send: equal segments but a shorter last one, each with its own ICRC,
/// which counts the IPv4 identification up.
fn segments(datagram: &Datagram<'_>, vlan: Option<Vlan>) -> Option<Vec<Line>> {
    datagram.network.udp()?;
    let payload = datagram.bytes().get(datagram.network.header_len()..)?;
    let fits = |segment: &[u8], index: usize| {
        let network = numbered(datagram.network, index);
        RocePacket::parse(segment).is_ok_and(|packet| has_icrc(&network, &packet, segment.len()))
    };
    let length = (Bth::LEN + ICRC_LEN..payload.len().min(MAX_SEGMENT))
        .step_by(4)
        .find(|length| payload.get(..*length).is_some_and(|first| fits(first, 0)))?;
    let line = |(index, segment): (usize, &[u8])| {
        let network = numbered(datagram.network, index);
        match RocePacket::parse(segment) {
            Ok(packet) => Line {
                text: describe(&network, &packet, vlan, true),
                icrc: if has_icrc(&network, &packet, segment.len()) {
                    Icrc::Ok
                } else {
                    Icrc::Bad
                },
            },
            Err(error) => Line {
                text: format!("{} malformed: {error}", addresses(&network, vlan)),
                icrc: Icrc::Bad,
            },
        }
    };
    Some(payload.chunks(length).enumerate().map(line).collect())
}

fn has_icrc(network: &Network, packet: &RocePacket<'_>, len: usize) -> bool {
    let mut icrc = network.icrc(len as u16);
    icrc.update_packet(packet.covered());
    icrc.finish() == packet.icrc()
}

/// The network header of the segment with that index.
fn numbered(mut network: Network, index: usize) -> Network {
    if let Network::Ipv4 { id, .. } = &mut network {
        *id = id.wrapping_add(index as u16);
    }
    network
}

fn addresses(network: &Network, vlan: Option<Vlan>) -> String {
    let show = |gid: ferroce_wire::Gid| match (network, gid.to_ip()) {
        (Network::Grh(_), _) => IpAddr::from(gid.0),
        (_, ip) => ip,
    };
    let mut text = String::new();
    if let Some(vlan) = vlan {
        text += &format!("vlan {} ", vlan.id);
    }
    text += &format!("{} > {}", show(network.src()), show(network.dst()));
    match network.udp() {
        Some(udp) => text += &format!(" sport {}", udp.src_port),
        None => text += " rocev1",
    }
    if network.traffic_class() & 3 == 3 {
        text += " ce";
    }
    text
}

/// The fields of a packet; those behind the headers only if they were captured.
fn describe(network: &Network, packet: &RocePacket<'_>, vlan: Option<Vlan>, whole: bool) -> String {
    let bth = packet.bth();
    let mut text = format!(
        "{} {} qp {:#08x} psn {}",
        addresses(network, vlan),
        bth.opcode.name(),
        bth.dest_qpn,
        bth.psn.value()
    );
    let mut add = |field: String| {
        text.push(' ');
        text += &field;
    };
    for (set, name) in [
        (bth.solicited, "solicited"),
        (bth.migration, "migreq"),
        (bth.fecn, "fecn"),
        (bth.becn, "becn"),
        (bth.ack_request, "ackreq"),
    ] {
        if set {
            add(name.to_owned());
        }
    }
    if bth.version != 0 {
        add(format!("version {}", bth.version));
    }
    if bth.pkey != DEFAULT_PKEY {
        add(format!("pkey {:#06x}", bth.pkey));
    }
    if let Some(xrceth) = packet.xrceth() {
        add(format!("srq {:#08x}", xrceth.srqn));
    }
    if let Some(deth) = packet.deth() {
        add(format!("qkey {:#010x} src_qp {:#08x}", deth.qkey, deth.src_qpn));
    }
    if let Some(feth) = packet.feth() {
        add(format!(
            "placement {} selectivity {}",
            feth.placement, feth.selectivity
        ));
    }
    if let Some(reth) = packet.reth() {
        add(format!(
            "va {:#x} rkey {:#010x} dma_len {}",
            reth.va, reth.rkey, reth.dma_len
        ));
    }
    if let Some(atomic) = packet.atomic_eth() {
        add(format!(
            "va {:#x} rkey {:#010x} swap_add {:#x} compare {:#x}",
            atomic.va, atomic.rkey, atomic.swap_add, atomic.compare
        ));
    }
    if let Some(ack) = packet.aeth() {
        add(format!("{} msn {}", syndrome(ack.syndrome), ack.msn));
    }
    if let Some(ack) = packet.atomic_ack_eth() {
        add(format!("original {:#x}", ack.original));
    }
    if let Some(imm) = packet.immdt() {
        add(format!("imm {:#010x}", u32::from_be_bytes(imm.data)));
    }
    if let Some(ieth) = packet.ieth() {
        add(format!("invalidate {:#010x}", ieth.rkey));
    }
    if whole
        && bth.dest_qpn == GSI_QPN
        && let Ok(mad) = CmMad::parse(packet.payload())
    {
        add(format!("cm {} tid {:#x}", mad.message.name(), mad.tid));
    }
    if bth.opcode.has_payload() {
        add(format!("len {}", packet.payload().len()));
    }
    text
}

fn syndrome(syndrome: Syndrome) -> String {
    match syndrome {
        Syndrome::Ack { credit } => match aeth::credits(credit) {
            Some(credits) => format!("ack credits {credits}"),
            None => "ack".to_owned(),
        },
        Syndrome::RnrNak { timer } => format!("rnr_nak {} us", aeth::rnr_timer_us(timer)),
        Syndrome::Nak(code) => match code {
            NakCode::PsnSequence => "nak psn_sequence".to_owned(),
            NakCode::InvalidRequest => "nak invalid_request".to_owned(),
            NakCode::RemoteAccess => "nak remote_access".to_owned(),
            NakCode::RemoteOperational => "nak remote_operational".to_owned(),
            NakCode::InvalidRdRequest => "nak invalid_rd_request".to_owned(),
            NakCode::Reserved(code) => format!("nak {code}"),
        },
        other => format!("syndrome {:#04x}", other.value()),
    }
}
