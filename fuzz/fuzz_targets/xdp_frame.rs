//! A frame from an AF_XDP socket: the link's own parser takes what the reference parser takes, and reads the same.
#![no_main]

use ferroce_engine::link::xdp::receive::{Exact, parse};
use ferroce_engine::link::{IcrcCheck, RxPacket};
use ferroce_wire::frame::{Ethernet, ether_type_of};
use ferroce_wire::{Frame, Gid, Network};
use libfuzzer_sys::fuzz_target;

struct Never;

impl IcrcCheck for Never {
    fn valid(&self, _: &RxPacket<'_>) -> bool {
        unreachable!("the check under test is the other")
    }
}

/// Network headers and what they carry, as the reference parser has them.
fn reference(bytes: &[u8]) -> Option<(Network, &[u8])> {
    let (ethernet, ether_type, packet) = Ethernet::parse(bytes).ok()?;
    if ethernet.vlan.is_some_and(|vlan| vlan.id != 0) {
        return None;
    }
    let (network, end) = Network::parse(packet).ok()?;
    let data = packet.get(network.header_len()..end)?;
    (ether_type_of(&network) == ether_type).then_some((network, data))
}

fuzz_target!(|bytes: &[u8]| {
    let (ours, theirs) = (parse(bytes).ok(), reference(bytes));
    assert_eq!(ours.map(|it| it.data), theirs.map(|it| it.1));
    let (Some(ours), Some((network, _))) = (ours, theirs) else {
        return;
    };
    // An IPv4 address in an IPv6 header is none of IPv4, but the same GID.
    assert_eq!(Gid::from_ip(ours.source), network.src());
    assert_eq!(Gid::from_ip(ours.dest), network.dst());
    assert_eq!(ours.traffic_class, network.traffic_class());
    assert_eq!(ours.source_port, network.udp().map_or(0, |udp| udp.src_port));
    let icrc = Exact {
        network: ours.network,
    };
    let valid = icrc.valid(&ours.packet(1, &Never));
    if let Ok(frame) = Frame::parse(bytes) {
        assert_eq!(valid, frame.datagram.verify().is_ok());
    }
});
