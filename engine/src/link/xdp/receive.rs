//! Received frames: what they carry, or why they are dropped.
#![deny(unsafe_code)]

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ferroce_wire::frame::ETHERTYPE_ROCE_V1;
use ferroce_wire::udp_port::ROCE_V2_PORT;
use ferroce_wire::{Gid, Grh, Icrc};

use crate::link::{ICRC_LEN, IcrcCheck, RoceVersion, RxPacket};

/// Bytes of an Ethernet header, and of an 802.1Q tag.
const ETHERNET: usize = 14;
const TAG: usize = 4;
/// Bytes of an IPv4 header without options, the only one allowed; an IPv6 header or GRH; and a UDP header.
pub(super) const IPV4: usize = 20;
pub(super) const IPV6: usize = 40;
pub(super) const UDP: usize = 8;

pub(super) const ETHERTYPE_IPV4: u16 = 0x0800;
pub(super) const ETHERTYPE_IPV6: u16 = 0x86dd;
const ETHERTYPE_TAG: u16 = 0x8100;
const PROTOCOL_UDP: u8 = 17;
/// "More fragments" and the fragment's offset.
const FRAGMENT: u16 = 0x3fff;

/// Why a frame is not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Drop {
    /// It ends within its headers, or before the end that they name.
    Truncated,
    /// It carries something else.
    NotRoce,
    /// It is of a VLAN.
    Vlan,
    /// Headers contradict each other, or have what is not allowed: IP options, fragments.
    Malformed,
}

/// What a frame carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Carried<'a> {
    /// How it travelled.
    pub version: RoceVersion,
    /// The sender.
    pub source: IpAddr,
    /// Its UDP port; 0 in RoCE v1.
    pub source_port: u16,
    /// The receiver.
    pub dest: IpAddr,
    /// Traffic class or type of service.
    pub traffic_class: u8,
    /// Hop limit or TTL.
    pub hop_limit: u8,
    /// Flow label; 0 in IPv4.
    pub flow_label: u32,
    /// The network headers: IPv4 or IPv6 with UDP, or the GRH.
    pub network: &'a [u8],
    /// What they carry, BTH to ICRC, of any length.
    pub data: &'a [u8],
}

/// Reads an Ethernet frame, untagged or with a priority tag. What follows the end that the headers name is left out.
///
/// # Errors
/// Why it is to be dropped.
pub fn parse(frame: &[u8]) -> Result<Carried<'_>, Drop> {
    let (ethernet, rest) = frame.split_first_chunk::<ETHERNET>().ok_or(Drop::Truncated)?;
    let ether_type = u16::from_be_bytes([ethernet[12], ethernet[13]]);
    if ether_type != ETHERTYPE_TAG {
        return carried(ether_type, rest);
    }
    let (tag, rest) = rest.split_first_chunk::<TAG>().ok_or(Drop::Truncated)?;
    if u16::from_be_bytes([tag[0], tag[1]]) & 0xfff != 0 {
        return Err(Drop::Vlan);
    }
    carried(u16::from_be_bytes([tag[2], tag[3]]), rest)
}

#[inline]
fn carried(ether_type: u16, packet: &[u8]) -> Result<Carried<'_>, Drop> {
    match ether_type {
        ETHERTYPE_IPV4 => ipv4(packet),
        ETHERTYPE_IPV6 => ipv6(packet),
        ETHERTYPE_ROCE_V1 => grh(packet),
        _ => Err(Drop::NotRoce),
    }
}

#[inline]
fn ipv4(packet: &[u8]) -> Result<Carried<'_>, Drop> {
    let head = packet.first_chunk::<{ IPV4 + UDP }>().ok_or(Drop::Truncated)?;
    if head[0] != 0x45 {
        return Err(Drop::Malformed);
    }
    if head[9] != PROTOCOL_UDP {
        return Err(Drop::NotRoce);
    }
    if be16(head, 6) & FRAGMENT != 0 {
        return Err(Drop::Malformed);
    }
    let end = usize::from(be16(head, 2));
    let source_port = udp(head, IPV4, end)?;
    let (network, data) = cut(packet, IPV4 + UDP, end)?;
    let address = |at: usize| Ipv4Addr::new(head[at], head[at + 1], head[at + 2], head[at + 3]).into();
    Ok(Carried {
        version: RoceVersion::V2,
        source: address(12),
        source_port,
        dest: address(16),
        traffic_class: head[1],
        hop_limit: head[8],
        flow_label: 0,
        network,
        data,
    })
}

#[inline]
fn ipv6(packet: &[u8]) -> Result<Carried<'_>, Drop> {
    let head = packet.first_chunk::<{ IPV6 + UDP }>().ok_or(Drop::Truncated)?;
    if head[0] >> 4 != 6 {
        return Err(Drop::Malformed);
    }
    if head[6] != PROTOCOL_UDP {
        return Err(Drop::NotRoce);
    }
    let end = IPV6 + usize::from(be16(head, 4));
    let source_port = udp(head, IPV6, end)?;
    let (network, data) = cut(packet, IPV6 + UDP, end)?;
    let address = |at| Ipv6Addr::from(sixteen(head, at)).into();
    Ok(Carried {
        version: RoceVersion::V2,
        source: address(8),
        source_port,
        dest: address(24),
        traffic_class: head[0] << 4 | head[1] >> 4,
        hop_limit: head[7],
        flow_label: label(head),
        network,
        data,
    })
}

#[inline]
fn grh(packet: &[u8]) -> Result<Carried<'_>, Drop> {
    let head = packet.first_chunk::<{ Grh::LEN }>().ok_or(Drop::Truncated)?;
    if head[0] >> 4 != 6 {
        return Err(Drop::Malformed);
    }
    if head[6] != Grh::NEXT_HEADER_IBA {
        return Err(Drop::NotRoce);
    }
    let (network, data) = cut(packet, Grh::LEN, Grh::LEN + usize::from(be16(head, 4)))?;
    Ok(Carried {
        version: RoceVersion::V1,
        source: Gid(sixteen(head, 8)).to_ip(),
        source_port: 0,
        dest: Gid(sixteen(head, 24)).to_ip(),
        traffic_class: head[0] << 4 | head[1] >> 4,
        hop_limit: head[7],
        flow_label: label(head),
        network,
        data,
    })
}

/// Checks the UDP header at `at` of a packet that ends at `end`, and gives its source port.
#[inline]
fn udp(head: &[u8], at: usize, end: usize) -> Result<u16, Drop> {
    if be16(head, at + 2) != ROCE_V2_PORT {
        return Err(Drop::NotRoce);
    }
    if at + usize::from(be16(head, at + 4)) != end {
        return Err(Drop::Malformed);
    }
    Ok(be16(head, at))
}

/// Cuts a packet into the headers of `at` bytes and what follows until `end`.
#[inline]
fn cut(packet: &[u8], at: usize, end: usize) -> Result<(&[u8], &[u8]), Drop> {
    if end < at {
        return Err(Drop::Malformed);
    }
    let whole = packet.get(..end).ok_or(Drop::Truncated)?;
    Ok(whole.split_at(at))
}

#[inline]
fn be16(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

/// The flow label of an IPv6 header or GRH.
#[inline]
fn label(head: &[u8]) -> u32 {
    u32::from_be_bytes([0, head[1] & 0xf, head[2], head[3]])
}

#[inline]
fn sixteen(bytes: &[u8], at: usize) -> [u8; 16] {
    let mut out = [0; 16];
    out.copy_from_slice(&bytes[at..at + 16]);
    out
}

impl<'a> Carried<'a> {
    /// The packet, as it came by the interface `ifindex`.
    pub fn packet(&self, ifindex: u32, icrc: &'a dyn IcrcCheck) -> RxPacket<'a> {
        RxPacket {
            version: self.version,
            source: self.source,
            source_port: self.source_port,
            dest: self.dest,
            ifindex,
            traffic_class: self.traffic_class,
            hop_limit: self.hop_limit,
            flow_label: self.flow_label,
            data: self.data,
            icrc,
        }
    }
}

/// The ICRC check of a packet whose network headers are at hand: no bit of it is guessed.
pub struct Exact<'a> {
    /// As [`Carried::network`].
    pub network: &'a [u8],
}

impl IcrcCheck for Exact<'_> {
    fn valid(&self, packet: &RxPacket<'_>) -> bool {
        let Some((covered, received)) = packet.data.split_last_chunk::<ICRC_LEN>() else {
            return false;
        };
        let Some((bth, rest)) = covered.split_first_chunk() else {
            return false;
        };
        Icrc::on_the_wire(self.network, bth).is_some_and(|mut icrc| {
            icrc.update(rest);
            icrc.finish() == u32::from_le_bytes(*received)
        })
    }
}

#[cfg(test)]
mod tests {
    use ferroce_wire::frame::Ethernet;
    use ferroce_wire::{Frame, Network};
    use proptest::prelude::*;

    use super::*;
    use crate::link::xdp::tests::golden;

    /// What the reference parser says of a frame, in the form of ours: `None` if it is not RoCE, or of a VLAN.
    fn reference(frame: &[u8]) -> Option<(Network, &[u8])> {
        let (ethernet, ether_type, packet) = Ethernet::parse(frame).ok()?;
        if ethernet.vlan.is_some_and(|vlan| vlan.id != 0) {
            return None;
        }
        let (network, end) = Network::parse(packet).ok()?;
        let data = packet.get(network.header_len()..end)?;
        (ferroce_wire::frame::ether_type_of(&network) == ether_type).then_some((network, data))
    }

    fn agrees(frame: &[u8]) {
        let ours = parse(frame).ok();
        let theirs = reference(frame);
        assert_eq!(ours.map(|it| it.data), theirs.map(|it| it.1), "{frame:02x?}");
        let (Some(ours), Some((network, _))) = (ours, theirs) else {
            return;
        };
        assert_eq!(Gid::from_ip(ours.source).to_ip(), network.src().to_ip());
        assert_eq!(Gid::from_ip(ours.dest).to_ip(), network.dst().to_ip());
        assert_eq!(ours.traffic_class, network.traffic_class());
        assert_eq!(ours.source_port, network.udp().map_or(0, |udp| udp.src_port));
        assert_eq!(ours.network.len(), network.header_len());
        let expected = match network {
            Network::Ipv4 { ttl, .. } => (RoceVersion::V2, ttl, 0),
            Network::Ipv6 {
                hop_limit,
                flow_label,
                ..
            } => (RoceVersion::V2, hop_limit, flow_label),
            Network::Grh(grh) => (RoceVersion::V1, grh.hop_limit, grh.flow_label),
        };
        assert_eq!((ours.version, ours.hop_limit, ours.flow_label), expected);
        // Whether the ICRC is right, both say.
        let valid = Exact {
            network: ours.network,
        }
        .valid(&ours.packet(1, &Never));
        if let Ok(frame) = Frame::parse(frame) {
            assert_eq!(valid, frame.datagram.verify().is_ok());
        }
    }

    struct Never;

    impl IcrcCheck for Never {
        fn valid(&self, _: &RxPacket<'_>) -> bool {
            unreachable!("the check under test is the other")
        }
    }

    #[test]
    fn golden_frames_are_taken_and_verify() {
        let mut versions = [0; 3];
        for frame in golden() {
            agrees(&frame);
            let Ok(carried) = parse(&frame) else { continue };
            versions[match (carried.version, carried.source) {
                (RoceVersion::V1, _) => 0,
                (_, IpAddr::V4(_)) => 1,
                (_, IpAddr::V6(_)) => 2,
            }] += 1;
            let check = Exact {
                network: carried.network,
            };
            assert!(check.valid(&carried.packet(1, &Never)));
            let mut damaged = carried.data.to_vec();
            for at in [5, damaged.len() / 2, damaged.len() - 1] {
                damaged[at] ^= 0x10;
                let packet = RxPacket {
                    data: &damaged,
                    ..carried.packet(1, &Never)
                };
                assert!(!check.valid(&packet));
                damaged[at] ^= 0x10;
            }
        }
        assert!(versions.iter().all(|&count| count > 1), "{versions:?}");
    }

    #[test]
    fn priority_tags_are_looked_through() {
        let frame = golden().remove(0);
        let tagged = |tci: u16| {
            let mut bytes = frame.clone();
            let [high, low] = tci.to_be_bytes();
            bytes.splice(12..12, [0x81, 0, high, low]);
            bytes
        };
        assert_eq!(parse(&tagged(0x6000)), parse(&frame));
        assert_eq!(parse(&tagged(0x6001)), Err(Drop::Vlan));
        assert_eq!(parse(&tagged(0)[..16]), Err(Drop::Truncated));
    }

    proptest! {
        #[test]
        fn any_bytes_are_judged_as_by_the_reference(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            agrees(&bytes);
        }

        #[test]
        fn damaged_frames_are_judged_as_by_the_reference(
            index in any::<prop::sample::Index>(),
            changes in proptest::collection::vec((0usize..70, any::<u8>()), 0..4),
            cut in any::<prop::sample::Index>(),
            tag in prop::option::of(any::<u16>()),
        ) {
            let frames = golden();
            let mut frame = index.get(&frames).clone();
            for (at, value) in changes {
                if let Some(byte) = frame.get_mut(at) {
                    *byte = value;
                }
            }
            if let Some(tag) = tag {
                let [high, low] = tag.to_be_bytes();
                frame.splice(12..12, [0x81, 0, high & 0xf0, low & 1]);
            }
            agrees(&frame);
            frame.truncate(cut.index(frame.len() + 1));
            agrees(&frame);
        }
    }
}
