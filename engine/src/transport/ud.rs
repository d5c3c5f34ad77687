//! Unreliable datagram.

use std::net::{IpAddr, Ipv4Addr};

use crate::link::Path;
use crate::verbs::UdDest;

/// What stands in the place of a destination before one is posted.
pub(crate) const NOWHERE: UdDest = UdDest {
    path: Path {
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
