//! The network headers a packet has on the wire, for links that make them themselves.
#![deny(unsafe_code)]

use std::net::IpAddr;

use ferroce_wire::datagram::{Network, Udp};
use ferroce_wire::{Gid, Grh};

use super::{Path, RoceVersion};

/// What the IP and UDP headers of a packet, or its GRH, say beyond lengths and checksums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Addressing {
    pub version: RoceVersion,
    pub source: IpAddr,
    pub dest: IpAddr,
    /// RoCE v2 only.
    pub source_port: u16,
    /// Traffic class or type of service.
    pub traffic_class: u8,
    pub hop_limit: u8,
    /// RoCE v1 only: the links over UDP leave that of IPv6 to the kernel.
    pub flow_label: u32,
    /// IPv4 only.
    pub id: u16,
}

impl Addressing {
    /// That of packets on a path. The identification is 0: an atomic datagram needs no other (RFC 6864), and receivers
    /// that can't see it try 0 first.
    pub fn of(path: &Path, source_port: u16) -> Addressing {
        Addressing {
            version: path.version,
            source: path.source,
            dest: path.dest,
            source_port,
            traffic_class: path.traffic_class,
            hop_limit: path.hop_limit_on_wire(),
            flow_label: path.flow_label,
            id: 0,
        }
    }

    /// The headers; `None` if the addresses are of two families.
    pub fn network(&self) -> Option<Network> {
        let udp = Udp {
            src_port: self.source_port,
            checksum: 0,
        };
        Some(match (self.source, self.dest) {
            (source, dest) if self.version == RoceVersion::V1 && source.is_ipv4() == dest.is_ipv4() => {
                Network::Grh(Grh {
                    traffic_class: self.traffic_class,
                    flow_label: self.flow_label,
                    payload_len: 0,
                    next_header: Grh::NEXT_HEADER_IBA,
                    hop_limit: self.hop_limit,
                    sgid: Gid::from_ip(source),
                    dgid: Gid::from_ip(dest),
                })
            }
            (IpAddr::V4(src), IpAddr::V4(dst)) => Network::Ipv4 {
                tos: self.traffic_class,
                id: self.id,
                dont_fragment: true,
                ttl: self.hop_limit,
                src,
                dst,
                udp,
            },
            (IpAddr::V6(src), IpAddr::V6(dst)) => Network::Ipv6 {
                traffic_class: self.traffic_class,
                flow_label: 0,
                hop_limit: self.hop_limit,
                src,
                dst,
                udp,
            },
            _ => return None,
        })
    }

    /// The ICRC of BTH to pad under these headers; `None` if the addresses are of two families.
    pub fn icrc(&self, covered: &[u8]) -> Option<u32> {
        let mut icrc = self.network()?.icrc((covered.len() + super::ICRC_LEN) as u16);
        icrc.update_packet(covered);
        Some(icrc.finish())
    }
}
