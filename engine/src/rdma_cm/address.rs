//! Questions about addresses: families, ports, wildcards, the GIDs and service ids that they stand for.

use std::net::{IpAddr, Ipv6Addr};

use ferroce_wire::gid::Gid;

use super::{Address, PortSpace};

/// The middle of a service id that says which port space it is of (`RDMA_IB_IP_PS_MASK`).
pub(super) const SPACE_MASK: u64 = 0xffff_ffff_ffff_0000;

/// Address family, as far as it matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Family {
    V4,
    V6,
    Ib,
}

impl Address {
    pub(super) fn family(&self) -> Family {
        match self {
            Address::Ip(address) if address.is_ipv4() => Family::V4,
            Address::Ip(_) => Family::V6,
            Address::Ib(_) => Family::Ib,
        }
    }

    /// The IP address, if it is one.
    pub(super) fn ip(&self) -> Option<IpAddr> {
        match self {
            Address::Ip(address) => Some(address.ip()),
            Address::Ib(_) => None,
        }
    }

    /// All zero: any address.
    pub(super) fn is_unspecified(&self) -> bool {
        match self {
            Address::Ip(address) => address.ip().is_unspecified(),
            Address::Ib(address) => address.gid == [0; 16],
        }
    }

    /// 127.0.0.0/8, or `::1`.
    pub(super) fn is_loopback(&self) -> bool {
        match self {
            Address::Ip(address) => address.ip().is_loopback(),
            Address::Ib(address) => Ipv6Addr::from(address.gid).is_loopback(),
        }
    }

    /// The interface that a link-local address or group needs, 0 if it names none; `None` where the address needs none.
    pub(super) fn link_local_scope(&self) -> Option<u32> {
        match self {
            Address::Ip(std::net::SocketAddr::V6(address)) if is_link_local(*address.ip()) => {
                Some(address.scope_id())
            }
            _ => None,
        }
    }

    /// The port; 0 stands for any.
    pub(super) fn port(&self) -> u16 {
        match self {
            Address::Ip(address) => address.port(),
            Address::Ib(address) => (address.service_id & address.service_mask) as u16,
        }
    }

    /// Gives it a port that was taken.
    pub(super) fn set_port(&mut self, port: u16) {
        match self {
            Address::Ip(address) => address.set_port(port),
            Address::Ib(address) => {
                address.service_id = (address.service_id & address.service_mask) | u64::from(port);
                address.service_mask = u64::MAX;
            }
        }
    }

    /// Whether it names the same end, ports aside; link-local ones must be of one interface.
    pub(super) fn same_host(&self, other: &Address) -> bool {
        match (self, other) {
            (Address::Ip(a), Address::Ip(b)) => {
                a.ip() == b.ip() && self.link_local_scope() == other.link_local_scope()
            }
            (Address::Ib(a), Address::Ib(b)) => a.gid == b.gid,
            _ => false,
        }
    }

    /// The GID that it stands for on RoCE.
    pub(super) fn gid(&self) -> [u8; 16] {
        match self {
            Address::Ip(address) => Gid::from_ip(address.ip()).0,
            Address::Ib(address) => address.gid,
        }
    }

    /// The service id at which it is reached.
    pub(super) fn service_id(&self, space: PortSpace) -> u64 {
        match self {
            Address::Ip(address) => ((space as u64) << 16) + u64::from(address.port()),
            Address::Ib(address) => address.service_id,
        }
    }

    /// The address that means any, of the same family and with the port; it keeps scope and partition.
    pub(super) fn any_like(&self) -> Address {
        match *self {
            Address::Ip(std::net::SocketAddr::V4(_)) => {
                Address::Ip((IpAddr::V4(std::net::Ipv4Addr::UNSPECIFIED), 0).into())
            }
            Address::Ip(std::net::SocketAddr::V6(v6)) => {
                Address::Ip(std::net::SocketAddrV6::new(Ipv6Addr::UNSPECIFIED, 0, 0, v6.scope_id()).into())
            }
            Address::Ib(ib) => Address::Ib(super::IbAddress {
                pkey: ib.pkey,
                ..super::IbAddress::default()
            }),
        }
    }
}

/// `fe80::/10`, and the groups of a link.
fn is_link_local(ip: Ipv6Addr) -> bool {
    ip.is_unicast_link_local() || ip.segments()[0] & 0xff0f == 0xff02
}

/// The port space in which a service id is, of those that an id of `space` may use; with the whole upper part of the
/// service id.
pub(super) fn space_of_service(space: PortSpace, service_id: u64, mask: u64) -> Option<(PortSpace, u64)> {
    let mask = mask & SPACE_MASK;
    let asked = service_id & mask;
    [
        (PortSpace::Ib, space == PortSpace::Ib),
        (PortSpace::Tcp, matches!(space, PortSpace::Ib | PortSpace::Tcp)),
        (PortSpace::Udp, matches!(space, PortSpace::Ib | PortSpace::Udp)),
    ]
    .into_iter()
    .map(|(candidate, allowed)| (candidate, allowed, (candidate as u64) << 16))
    .find(|(_, allowed, upper)| *allowed && asked == upper & mask)
    .map(|(candidate, _, upper)| (candidate, upper))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rdma_cm::IbAddress;

    fn ip(text: &str) -> Address {
        Address::Ip(text.parse().unwrap())
    }

    #[test]
    fn hosts_are_compared_without_ports_and_with_scopes() {
        assert!(ip("10.0.0.1:1").same_host(&ip("10.0.0.1:2")));
        assert!(!ip("10.0.0.1:1").same_host(&ip("10.0.0.2:1")));
        assert!(ip("[fd00::1%3]:1").same_host(&ip("[fd00::1%4]:1")));
        assert!(ip("[fe80::1%3]:1").same_host(&ip("[fe80::1%3]:1")));
        assert!(!ip("[fe80::1%3]:1").same_host(&ip("[fe80::1%4]:1")));
        assert!(!ip("10.0.0.1:1").same_host(&ip("[::ffff:10.0.0.1]:1")));
        assert!(!ip("10.0.0.1:1").same_host(&Address::Ib(IbAddress::default())));
    }

    #[test]
    fn service_ids() {
        assert_eq!(ip("10.0.0.1:7174").service_id(PortSpace::Tcp), 0x0106_1c06);
        assert_eq!(ip("[::1]:1").service_id(PortSpace::Ib), 0x013f_0001);
        let mut ib = Address::Ib(IbAddress {
            service_id: 0x0106_0000,
            service_mask: SPACE_MASK,
            ..IbAddress::default()
        });
        assert_eq!(ib.port(), 0);
        ib.set_port(77);
        assert_eq!(ib.port(), 77);
        assert_eq!(ib.service_id(PortSpace::Ib), 0x0106_004d);
    }

    #[test]
    fn port_spaces_of_service_ids() {
        let of = |space, id, mask| space_of_service(space, id, mask).map(|(space, _)| space);
        assert_eq!(of(PortSpace::Ib, 0, 0), Some(PortSpace::Ib));
        assert_eq!(of(PortSpace::Tcp, 0, 0), Some(PortSpace::Tcp));
        assert_eq!(of(PortSpace::Udp, 0, 0), Some(PortSpace::Udp));
        assert_eq!(of(PortSpace::Ipoib, 0, 0), None);
        assert_eq!(of(PortSpace::Ib, 0x0106_0001, u64::MAX), Some(PortSpace::Tcp));
        assert_eq!(of(PortSpace::Udp, 0x0106_0001, u64::MAX), None);
        assert_eq!(of(PortSpace::Ib, 0x1_0106_0001, u64::MAX), None);
    }
}
