//! Global identifiers, and the addresses they stand for (reference section 11).

use core::fmt;
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// A GID: 16 bytes in the order of the wire. In RoCE it is an IP address: IPv6 as it is, IPv4 as
/// `::ffff:a.b.c.d`.
///
/// Displays as `ibv_devinfo` and the pingpong programs print it (`fe80::1`, `::ffff:10.0.0.1`),
/// and with `{:#}` as sysfs has it (eight groups of four digits).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Gid(pub [u8; 16]);

impl Gid {
    /// The GID of an empty table entry.
    pub const ZERO: Self = Self([0; 16]);

    /// The GID of an IP address.
    pub fn from_ip(ip: IpAddr) -> Self {
        match ip {
            IpAddr::V4(ip) => Self(ip.to_ipv6_mapped().octets()),
            IpAddr::V6(ip) => Self(ip.octets()),
        }
    }

    /// The IP address: IPv4 for `::ffff:a.b.c.d`, IPv6 for all others.
    pub fn to_ip(self) -> IpAddr {
        let ip = Ipv6Addr::from(self.0);
        ip.to_ipv4_mapped().map_or(IpAddr::V6(ip), IpAddr::V4)
    }

    /// The default GID of an interface: `fe80::/64` and the EUI-64 of its MAC address.
    pub const fn link_local_of_mac(mac: [u8; 6]) -> Self {
        let [a, b, c, d, e, f] = mac;
        Self([0xfe, 0x80, 0, 0, 0, 0, 0, 0, a ^ 2, b, c, 0xff, 0xfe, d, e, f])
    }

    /// Whether it is `::`, an empty table entry.
    pub fn is_zero(self) -> bool {
        self == Self::ZERO
    }

    /// Whether it stands for an IPv4 address.
    pub fn is_ipv4(self) -> bool {
        matches!(self.to_ip(), IpAddr::V4(_))
    }

    /// Whether it is in `fe80::/10`: then it says nothing without an interface.
    pub const fn is_link_local(self) -> bool {
        self.0[0] == 0xfe && self.0[1] & 0xc0 == 0x80
    }

    /// Whether it is a multicast address, IPv6 (`ff00::/8`) or mapped IPv4 (`224.0.0.0/4`).
    pub fn is_multicast(self) -> bool {
        self.to_ip().is_multicast()
    }

    /// The Ethernet address of a multicast GID; `None` for a unicast one.
    ///
    /// IPv4: 01:00:5e and the low 23 bits; IPv6: 33:33 and the last four bytes.
    pub fn multicast_mac(self) -> Option<[u8; 6]> {
        match self.to_ip() {
            ip if !ip.is_multicast() => None,
            IpAddr::V4(ip) => {
                let [_, b, c, d] = ip.octets();
                Some([0x01, 0x00, 0x5e, b & 0x7f, c, d])
            }
            IpAddr::V6(ip) => {
                let [.., a, b, c, d] = ip.octets();
                Some([0x33, 0x33, a, b, c, d])
            }
        }
    }

    /// The multicast group it names; `None` for a unicast one. An IPv4 group has two names: that of [`Gid::from_ip`], and
    /// that of [`Gid::rocev1_multicast`].
    pub fn multicast_group(self) -> Option<IpAddr> {
        let [.., a, b, c, d] = self.0;
        let ipv4 = Ipv4Addr::new(a, b, c, d);
        if ipv4.is_multicast() && self == Self::rocev1_multicast(ipv4) {
            Some(IpAddr::V4(ipv4))
        } else {
            Some(self.to_ip()).filter(IpAddr::is_multicast)
        }
    }

    /// The GID under which RDMA CM joins an IPv4 multicast group on RoCEv1, `ff0e::ffff:a.b.c.d`;
    /// on RoCEv2 it is that of [`Gid::from_ip`].
    pub const fn rocev1_multicast(group: Ipv4Addr) -> Self {
        let [a, b, c, d] = group.octets();
        Self([0xff, 0x0e, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, a, b, c, d])
    }
}

impl From<IpAddr> for Gid {
    fn from(ip: IpAddr) -> Self {
        Self::from_ip(ip)
    }
}

impl fmt::Display for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !f.alternate() {
            return fmt::Display::fmt(&Ipv6Addr::from(self.0), f);
        }
        for (i, group) in Ipv6Addr::from(self.0).segments().into_iter().enumerate() {
            let colon = if i == 0 { "" } else { ":" };
            write!(f, "{colon}{group:04x}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Gid({self})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ip_addresses() {
        for text in ["10.77.0.2", "fe80::ff:fe00:2", "fd77::1", "ff0e::4791", "::"] {
            let ip: IpAddr = text.parse().unwrap();
            assert_eq!(Gid::from_ip(ip).to_ip(), ip);
        }
        let gid = Gid::from_ip(IpAddr::V4(Ipv4Addr::new(10, 77, 0, 2)));
        assert_eq!(gid.0, [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 77, 0, 2]);
        assert!(gid.is_ipv4() && !gid.is_link_local() && !gid.is_multicast());
        assert!(Gid::ZERO.is_zero() && !Gid::ZERO.is_ipv4());
    }

    #[test]
    fn display() {
        let v4 = Gid::from_ip("10.77.0.2".parse().unwrap());
        assert_eq!(v4.to_string(), "::ffff:10.77.0.2");
        assert_eq!(format!("{v4:#}"), "0000:0000:0000:0000:0000:ffff:0a4d:0002");
        let ll = Gid::link_local_of_mac([2, 0, 0, 0, 0, 2]);
        assert_eq!(ll.to_string(), "fe80::ff:fe00:2");
        assert!(ll.is_link_local());
    }

    #[test]
    fn multicast() {
        let mac = |text: &str| Gid::from_ip(text.parse().unwrap()).multicast_mac();
        assert_eq!(mac("239.129.2.3"), Some([0x01, 0, 0x5e, 0x01, 2, 3]));
        assert_eq!(mac("ff0e::4791"), Some([0x33, 0x33, 0, 0, 0x47, 0x91]));
        assert_eq!(mac("10.0.0.1"), None);
        assert_eq!(mac("fe80::1"), None);
        assert_eq!(
            Gid::rocev1_multicast(Ipv4Addr::new(224, 1, 2, 3)).to_string(),
            "ff0e::ffff:e001:203"
        );
        let group = |text: &str| {
            let group = Gid(text.parse::<Ipv6Addr>().unwrap().octets()).multicast_group();
            group.map(|ip| ip.to_string())
        };
        for (mgid, ip) in [
            ("::ffff:239.1.2.3", Some("239.1.2.3")),
            ("ff0e::ffff:239.1.2.3", Some("239.1.2.3")),
            ("ff0e::ffff:10.1.2.3", Some("ff0e::ffff:a01:203")),
            ("ff0e::4791", Some("ff0e::4791")),
            ("::ffff:10.1.2.3", None),
            ("fe80::1", None),
        ] {
            assert_eq!(group(mgid).as_deref(), ip);
        }
    }
}
