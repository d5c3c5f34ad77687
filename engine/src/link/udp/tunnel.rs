//! IPv6 multicast on the loopback interface: Linux has no route for it there, so it travels in IPv4 multicast, each
//! packet behind the GRH that says where it comes from and goes to. Outside the host nobody meets it.
#![deny(unsafe_code)]

use std::net::{IpAddr, Ipv4Addr};

use ferroce_wire::{Gid, Grh};

use crate::link::{Path, RxPacket};

/// The IPv4 group that stands for every IPv6 group: administratively scoped, and named by the RoCE port.
pub(super) const GROUP: IpAddr = IpAddr::V4(Ipv4Addr::new(239, 18, 183, 6));

/// Whether packets to an address need the tunnel, on an interface that is the loopback or not.
pub(super) fn takes(loopback: bool, dest: IpAddr) -> bool {
    loopback && dest.is_ipv6() && dest.is_multicast()
}

/// The path that carries a tunnelled one.
pub(super) fn carrier(path: &Path) -> Path {
    Path {
        source: IpAddr::V4(Ipv4Addr::LOCALHOST),
        dest: GROUP,
        ..*path
    }
}

/// Bytes in front of a tunnelled packet.
pub(super) const FRONT: usize = Grh::LEN;

/// Writes what stands in front of a packet of `len` bytes.
pub(super) fn enter(path: &Path, len: usize, front: &mut [u8]) {
    let grh = Grh {
        traffic_class: path.traffic_class,
        flow_label: 0,
        payload_len: len as u16,
        next_header: Grh::NEXT_HEADER_IBA,
        hop_limit: path.hop_limit_on_wire(),
        sgid: Gid::from_ip(path.source),
        dgid: Gid::from_ip(path.dest),
    };
    grh.emit(front);
}

/// The packet that a tunnelled one carries; `None` if it carries none.
pub(super) fn leave<'a>(outer: &RxPacket<'a>) -> Option<RxPacket<'a>> {
    let grh = Grh::parse(outer.data).ok()?;
    let (source, dest) = (grh.sgid.to_ip(), grh.dgid.to_ip());
    let genuine = grh.next_header == Grh::NEXT_HEADER_IBA && source.is_ipv6() && takes(true, dest);
    Some(RxPacket {
        source,
        dest,
        traffic_class: grh.traffic_class,
        hop_limit: grh.hop_limit,
        flow_label: grh.flow_label,
        data: outer.data.get(FRONT..)?,
        ..*outer
    })
    .filter(|_| genuine)
}
