//! What RDMA CM adds to IB CM: a header in the private data that names IP addresses and ports,
//! and service ids made of ports (reference section 13; IBTA A11).

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::ParseError;
use crate::header::{at, emit, put, take};

/// The Q_Key of RDMA CM's datagram queue pairs.
pub const UDP_QKEY: u32 = 0x0123_4567;

/// A pair of IP addresses of one family.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum IpPair {
    /// IPv4: source, destination.
    V4(Ipv4Addr, Ipv4Addr),
    /// IPv6: source, destination.
    V6(Ipv6Addr, Ipv6Addr),
}

impl IpPair {
    /// The pair of a source and a destination; `None` when they are of two families.
    pub const fn new(src: IpAddr, dst: IpAddr) -> Option<Self> {
        match (src, dst) {
            (IpAddr::V4(src), IpAddr::V4(dst)) => Some(Self::V4(src, dst)),
            (IpAddr::V6(src), IpAddr::V6(dst)) => Some(Self::V6(src, dst)),
            _ => None,
        }
    }

    /// The source.
    pub const fn src(&self) -> IpAddr {
        match self {
            Self::V4(src, _) => IpAddr::V4(*src),
            Self::V6(src, _) => IpAddr::V6(*src),
        }
    }

    /// The destination.
    pub const fn dst(&self) -> IpAddr {
        match self {
            Self::V4(_, dst) => IpAddr::V4(*dst),
            Self::V6(_, dst) => IpAddr::V6(*dst),
        }
    }
}

/// The first 36 bytes of the private data of REQ and SIDR_REQ.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct IpHeader {
    /// Bytes 2-3: the port of the sender; that of the receiver is in the service id.
    pub src_port: u16,
    /// Byte 1 bits 7..4: 4 or 6. Bytes 4-19 the source, 20-35 the destination, IPv4 in the last
    /// four of each.
    pub addrs: IpPair,
}

impl IpHeader {
    /// Bytes of the header; the program's own private data follows.
    pub const LEN: usize = 36;

    /// Reads the header at the start of private data. The version (byte 0) must be 0.
    pub fn parse(bytes: &[u8]) -> Result<Self, ParseError> {
        let b: &[u8; Self::LEN] = take("RDMA IP CM header", bytes)?;
        if b[0] != 0 {
            return Err(ParseError::Field {
                what: "RDMA IP CM version",
                value: b[0].into(),
            });
        }
        let addrs = match b[1] >> 4 {
            4 => IpPair::V4(at::<16, 4, _>(b).into(), at::<32, 4, _>(b).into()),
            6 => IpPair::V6(at::<4, 16, _>(b).into(), at::<20, 16, _>(b).into()),
            other => {
                return Err(ParseError::Field {
                    what: "RDMA IP CM IP version",
                    value: other.into(),
                });
            }
        };
        Ok(Self {
            src_port: u16::from_be_bytes(at::<2, 2, _>(b)),
            addrs,
        })
    }

    /// The bytes of the header.
    pub const fn to_bytes(&self) -> [u8; Self::LEN] {
        let mut b = [0; Self::LEN];
        put::<2, _, _>(&mut b, self.src_port.to_be_bytes());
        match &self.addrs {
            IpPair::V4(src, dst) => {
                b[1] = 0x40;
                put::<16, _, _>(&mut b, src.octets());
                put::<32, _, _>(&mut b, dst.octets());
            }
            IpPair::V6(src, dst) => {
                b[1] = 0x60;
                put::<4, _, _>(&mut b, src.octets());
                put::<20, _, _>(&mut b, dst.octets());
            }
        }
        b
    }
}

emit!(IpHeader);

/// A port space of RDMA CM; the number is the middle of its service ids.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u16)]
pub enum PortSpace {
    /// Connections, `RDMA_PS_TCP`.
    Tcp = 0x0106,
    /// Datagrams, `RDMA_PS_UDP`.
    Udp = 0x0111,
    /// Any queue pair type, `RDMA_PS_IB`.
    Ib = 0x013f,
}

/// The service id of a port: 0x0000000001, two digits of the port space, the port.
pub const fn service_id(space: PortSpace, port: u16) -> u64 {
    (space as u64) << 16 | port as u64
}

/// The port space and port of a service id, if RDMA CM made it.
pub const fn port_of_service(service_id: u64) -> Option<(PortSpace, u16)> {
    let space = match service_id >> 16 {
        0x0106 => PortSpace::Tcp,
        0x0111 => PortSpace::Udp,
        0x013f => PortSpace::Ib,
        _ => return None,
    };
    Some((space, service_id as u16))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_families() {
        for (src, dst, version) in [("10.0.0.1", "10.0.0.2", 0x40), ("fe80::1", "fd77::2", 0x60)] {
            let addrs = IpPair::new(src.parse().unwrap(), dst.parse().unwrap()).unwrap();
            let header = IpHeader {
                src_port: 0x9c40,
                addrs,
            };
            let bytes = header.to_bytes();
            assert_eq!(bytes[..4], [0, version, 0x9c, 0x40]);
            assert_eq!(IpHeader::parse(&bytes), Ok(header));
            assert_eq!(
                (addrs.src().to_string(), addrs.dst().to_string()),
                (src.into(), dst.into())
            );
        }
        assert_eq!(
            IpPair::new("::1".parse().unwrap(), "127.0.0.1".parse().unwrap()),
            None
        );
    }

    #[test]
    fn refuses_other_versions() {
        let mut bytes = [0; IpHeader::LEN];
        assert!(IpHeader::parse(&bytes).is_err());
        bytes[1] = 0x40;
        assert!(IpHeader::parse(&bytes).is_ok());
        bytes[0] = 0x10;
        assert!(IpHeader::parse(&bytes).is_err());
        assert!(IpHeader::parse(&bytes[..35]).is_err());
    }

    #[test]
    fn service_ids() {
        assert_eq!(service_id(PortSpace::Tcp, 0x1234), 0x0000_0000_0106_1234);
        assert_eq!(service_id(PortSpace::Udp, 7174), 0x0000_0000_0111_1c06);
        for space in [PortSpace::Tcp, PortSpace::Udp, PortSpace::Ib] {
            assert_eq!(port_of_service(service_id(space, 4791)), Some((space, 4791)));
        }
        assert_eq!(port_of_service(0x1_0106_1234), None);
    }
}
