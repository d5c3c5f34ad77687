//! A RoCE packet with the network headers that carry it: IPv4 and UDP, IPv6 and UDP, or the GRH
//! of RoCEv1 (reference section 1).

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use etherparse::{IpNumber, Ipv4Header, Ipv6FlowLabel, Ipv6Header, UdpHeader};

use crate::grh::GrhIpv4;
use crate::icrc::{self, Ipv4Pseudo, Ipv6Pseudo};
use crate::packet::ICRC_LEN;
use crate::udp_port::ROCE_V2_PORT;
use crate::{Bth, BuildError, Gid, Grh, Headers, Icrc, ParseError, RocePacket};

/// The network headers of a packet, without what follows from the packet itself (lengths,
/// protocol numbers, the IPv4 checksum).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Network {
    /// RoCEv2 over IPv4.
    Ipv4 {
        /// Type of service: DSCP and, in bits 1..0, ECN.
        tos: u8,
        /// Identification, which the ICRC covers.
        id: u16,
        /// Don't fragment.
        dont_fragment: bool,
        /// Time to live.
        ttl: u8,
        /// Source address.
        src: Ipv4Addr,
        /// Destination address.
        dst: Ipv4Addr,
        /// The UDP header.
        udp: Udp,
    },
    /// RoCEv2 over IPv6.
    Ipv6 {
        /// Traffic class: DSCP and, in bits 1..0, ECN.
        traffic_class: u8,
        /// Flow label, 20 bits.
        flow_label: u32,
        /// Hop limit.
        hop_limit: u8,
        /// Source address.
        src: Ipv6Addr,
        /// Destination address.
        dst: Ipv6Addr,
        /// The UDP header.
        udp: Udp,
    },
    /// RoCEv1; the length and the next header are set when a packet is built.
    Grh(Grh),
}

/// The UDP header of RoCEv2; its destination port is always 4791.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Udp {
    /// Source port; any is valid.
    pub src_port: u16,
    /// Checksum; 0 is none, as most senders have it.
    pub checksum: u16,
}

impl Network {
    /// Bytes of the headers.
    pub const fn header_len(&self) -> usize {
        match self {
            Self::Ipv4 { .. } => Ipv4Header::MIN_LEN + UdpHeader::LEN,
            Self::Ipv6 { .. } => Ipv6Header::LEN + UdpHeader::LEN,
            Self::Grh(_) => Grh::LEN,
        }
    }

    /// The sender.
    pub fn src(&self) -> Gid {
        match *self {
            Self::Ipv4 { src, .. } => Gid::from_ip(IpAddr::V4(src)),
            Self::Ipv6 { src, .. } => Gid(src.octets()),
            Self::Grh(grh) => grh.sgid,
        }
    }

    /// The receiver.
    pub fn dst(&self) -> Gid {
        match *self {
            Self::Ipv4 { dst, .. } => Gid::from_ip(IpAddr::V4(dst)),
            Self::Ipv6 { dst, .. } => Gid(dst.octets()),
            Self::Grh(grh) => grh.dgid,
        }
    }

    /// Traffic class or type of service; bits 1..0 are ECN, 3 when congestion was met.
    pub const fn traffic_class(&self) -> u8 {
        match self {
            Self::Ipv4 { tos, .. } => *tos,
            Self::Ipv6 { traffic_class, .. } => *traffic_class,
            Self::Grh(grh) => grh.traffic_class,
        }
    }

    /// The UDP header; none in RoCEv1.
    pub const fn udp(&self) -> Option<Udp> {
        match self {
            Self::Ipv4 { udp, .. } | Self::Ipv6 { udp, .. } => Some(*udp),
            Self::Grh(_) => None,
        }
    }

    /// Reads the headers at the start of an IP packet, and says where the packet ends.
    ///
    /// # Errors
    /// When it is not UDP to port 4791 in one unfragmented packet without IP options or
    /// extension headers, and no GRH; or when lengths disagree.
    pub fn parse(ip_packet: &[u8]) -> Result<(Self, usize), ParseError> {
        match ip_packet.first().map_or(0, |b| b >> 4) {
            4 => Self::parse_ipv4(ip_packet),
            6 => Self::parse_ipv6(ip_packet),
            other => Err(ParseError::Field {
                what: "IP version",
                value: other.into(),
            }),
        }
    }

    fn parse_ipv4(bytes: &[u8]) -> Result<(Self, usize), ParseError> {
        let (ip, rest) =
            Ipv4Header::from_slice(bytes).map_err(|_| ParseError::NotRoce("no sound IPv4 header"))?;
        if ip.protocol != IpNumber::UDP {
            return Err(ParseError::NotRoce("IPv4 protocol is not UDP"));
        }
        if ip.is_fragmenting_payload() {
            return Err(ParseError::NotRoce("a fragment of an IPv4 packet"));
        }
        let end = usize::from(ip.total_len);
        let udp = parse_udp(rest, end.saturating_sub(Ipv4Header::MIN_LEN))?;
        if !ip.options.is_empty() {
            return Err(ParseError::Field {
                what: "IPv4 header length",
                value: ip.ihl().into(),
            });
        }
        let network = Self::Ipv4 {
            tos: ip.dscp.value() << 2 | ip.ecn.value(),
            id: ip.identification,
            dont_fragment: ip.dont_fragment,
            ttl: ip.time_to_live,
            src: ip.source.into(),
            dst: ip.destination.into(),
            udp,
        };
        Ok((network, end))
    }

    fn parse_ipv6(bytes: &[u8]) -> Result<(Self, usize), ParseError> {
        let (ip, rest) =
            Ipv6Header::from_slice(bytes).map_err(|_| ParseError::NotRoce("no sound IPv6 header"))?;
        let payload_len = usize::from(ip.payload_length);
        let end = Ipv6Header::LEN + payload_len;
        match ip.next_header {
            IpNumber::UDP => {}
            IpNumber(Grh::NEXT_HEADER_IBA) => {
                if rest.len() < payload_len {
                    return Err(ParseError::Truncated {
                        what: "RoCEv1 packet",
                        need: payload_len,
                        have: rest.len(),
                    });
                }
                return Ok((Self::Grh(Grh::parse(bytes)?), end));
            }
            _ => return Err(ParseError::NotRoce("IPv6 next header is neither UDP nor IBA")),
        }
        let udp = parse_udp(rest, payload_len)?;
        let network = Self::Ipv6 {
            traffic_class: ip.traffic_class,
            flow_label: ip.flow_label.value(),
            hop_limit: ip.hop_limit,
            src: ip.source_addr(),
            dst: ip.destination_addr(),
            udp,
        };
        Ok((network, end))
    }

    /// The ICRC after these headers, with `len` bytes to follow, ICRC included.
    pub fn icrc(&self, len: u16) -> Icrc {
        let udp_len = len.saturating_add(UdpHeader::LEN as u16);
        match *self {
            Self::Ipv4 {
                id,
                dont_fragment,
                src,
                dst,
                udp,
                ..
            } => Icrc::ipv4(&Ipv4Pseudo {
                src: src.octets(),
                dst: dst.octets(),
                id,
                total_len: udp_len.saturating_add(Ipv4Header::MIN_LEN as u16),
                dont_fragment,
                src_port: udp.src_port,
            }),
            Self::Ipv6 { src, dst, udp, .. } => Icrc::ipv6(&Ipv6Pseudo {
                src: src.octets(),
                dst: dst.octets(),
                payload_len: udp_len,
                src_port: udp.src_port,
            }),
            Self::Grh(grh) => {
                let next_header = Grh::NEXT_HEADER_IBA;
                Icrc::grh(&Grh {
                    payload_len: len,
                    next_header,
                    ..grh
                })
            }
        }
    }

    /// Writes the headers, with the lengths for `len` bytes after them, to the start of `out`, which has room for
    /// [`Network::header_len`] bytes.
    pub fn emit(&self, len: u16, out: &mut [u8]) {
        let udp_len = len.saturating_add(UdpHeader::LEN as u16);
        match *self {
            Self::Ipv4 {
                tos,
                id,
                dont_fragment,
                ttl,
                src,
                dst,
                ..
            } => {
                let total_len = udp_len.saturating_add(Ipv4Header::MIN_LEN as u16);
                let ip = GrhIpv4 {
                    tos,
                    total_len,
                    id,
                    dont_fragment,
                    ttl,
                    src,
                    dst,
                }
                .header();
                out[..Ipv4Header::MIN_LEN].copy_from_slice(&ip.to_bytes());
            }
            Self::Ipv6 {
                traffic_class,
                flow_label,
                hop_limit,
                src,
                dst,
                ..
            } => {
                let ip = Ipv6Header {
                    traffic_class,
                    flow_label: Ipv6FlowLabel::try_new(flow_label & 0xf_ffff).unwrap_or_default(),
                    payload_length: udp_len,
                    next_header: IpNumber::UDP,
                    hop_limit,
                    source: src.octets(),
                    destination: dst.octets(),
                };
                out[..Ipv6Header::LEN].copy_from_slice(&ip.to_bytes());
            }
            Self::Grh(grh) => {
                Grh {
                    payload_len: len,
                    next_header: Grh::NEXT_HEADER_IBA,
                    ..grh
                }
                .emit(out);
            }
        }
        if let Some(udp) = self.udp() {
            let udp = UdpHeader {
                source_port: udp.src_port,
                destination_port: ROCE_V2_PORT,
                length: udp_len,
                checksum: udp.checksum,
            };
            out[self.header_len() - UdpHeader::LEN..self.header_len()].copy_from_slice(&udp.to_bytes());
        }
    }
}

/// Reads a UDP header that is to have `udp_len` bytes with its payload.
fn parse_udp(bytes: &[u8], udp_len: usize) -> Result<Udp, ParseError> {
    let truncated = |need| ParseError::Truncated {
        what: "UDP packet",
        need,
        have: bytes.len(),
    };
    let (udp, _) = UdpHeader::from_slice(bytes).map_err(|_| truncated(UdpHeader::LEN))?;
    if udp.destination_port != ROCE_V2_PORT {
        return Err(ParseError::NotRoce("UDP destination port is not 4791"));
    }
    if usize::from(udp.length) != udp_len {
        return Err(ParseError::Field {
            what: "UDP length",
            value: udp.length.into(),
        });
    }
    if bytes.len() < udp_len {
        return Err(truncated(udp_len));
    }
    Ok(Udp {
        src_port: udp.source_port,
        checksum: udp.checksum,
    })
}

/// A RoCE packet from the IP header (RoCEv1: GRH) to the ICRC.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Datagram<'a> {
    /// The network headers.
    pub network: Network,
    /// The packet they carry.
    pub packet: RocePacket<'a>,
    bytes: &'a [u8],
}

impl<'a> Datagram<'a> {
    /// Reads an IP packet. Bytes after its end, such as Ethernet's padding, are left out.
    /// The ICRC is not checked: see [`Datagram::verify`].
    pub fn parse(ip_packet: &'a [u8]) -> Result<Self, ParseError> {
        let (network, end) = Network::parse(ip_packet)?;
        let bytes = ip_packet.get(..end).unwrap_or(ip_packet);
        let packet = RocePacket::parse(bytes.get(network.header_len()..).unwrap_or_default())?;
        Ok(Self {
            network,
            packet,
            bytes,
        })
    }

    /// The bytes from the network headers to the ICRC.
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// Checks the ICRC.
    pub fn verify(&self) -> Result<(), ParseError> {
        icrc::verify(self.bytes)
    }

    /// Bytes that [`build`] needs.
    pub fn built_len(network: &Network, headers: &Headers, payload_len: usize) -> usize {
        network.header_len() + headers.header_len() + payload_len.next_multiple_of(4) + ICRC_LEN
    }
}

/// Builds a packet at the start of `out`, and says how many bytes it has.
///
/// The padding and its count in the BTH, all lengths, the IPv4 checksum and the ICRC are made
/// here; the rest is taken as it is.
pub fn build(
    network: &Network,
    headers: &Headers,
    payload: &[u8],
    out: &mut [u8],
) -> Result<usize, BuildError> {
    let need = Datagram::built_len(network, headers, payload.len());
    if need > usize::from(u16::MAX) {
        return Err(BuildError::TooLong(need));
    }
    let have = out.len();
    let out = out.get_mut(..need).ok_or(BuildError::NoRoom { need, have })?;
    let (covered, icrc_bytes) = out.split_at_mut(need - ICRC_LEN);
    let (outer, covered) = covered.split_at_mut(network.header_len());
    let len = (covered.len() + ICRC_LEN) as u16;
    network.emit(len, outer);
    let pad = payload.len().next_multiple_of(4) - payload.len();
    let headers = Headers {
        bth: Bth {
            pad: pad as u8,
            ..headers.bth
        },
        ..*headers
    };
    let at = headers.emit(covered);
    covered[at..][..payload.len()].copy_from_slice(payload);
    covered[at + payload.len()..].fill(0);
    let mut icrc = network.icrc(len);
    icrc.update_packet(covered);
    icrc_bytes.copy_from_slice(&icrc.finish().to_le_bytes());
    Ok(need)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Opcode, Psn};

    const UDP: Udp = Udp {
        src_port: 0xc121,
        checksum: 0,
    };

    const IPV4: Network = Network::Ipv4 {
        tos: 2,
        id: 0x1234,
        dont_fragment: true,
        ttl: 64,
        src: Ipv4Addr::new(10, 77, 0, 1),
        dst: Ipv4Addr::new(10, 77, 0, 2),
        udp: UDP,
    };

    const IPV6: Network = Network::Ipv6 {
        traffic_class: 0x68,
        flow_label: 0x1_2345,
        hop_limit: 255,
        src: Ipv6Addr::new(0xfd77, 0, 0, 0, 0, 0, 0, 1),
        dst: Ipv6Addr::new(0xfd77, 0, 0, 0, 0, 0, 0, 2),
        udp: UDP,
    };

    /// A SEND of three bytes, so with a byte of padding.
    fn built(network: &Network) -> Vec<u8> {
        let mut bytes = vec![0xaa; 100];
        let headers = Headers::new(Opcode::RcSendOnly, 0x11, Psn::new(0x100));
        let len = build(network, &headers, b"abc", &mut bytes).unwrap();
        bytes.truncate(len);
        bytes
    }

    #[test]
    fn construct_ipv4() {
        let bytes = built(&IPV4);
        let expect = [
            0x45, 2, 0, 48, 0x12, 0x34, 0x40, 0, 64, 17, 0x13, 0xeb, 10, 77, 0, 1, 10, 77, 0, 2, // IPv4
            0xc1, 0x21, 0x12, 0xb7, 0, 28, 0, 0, // UDP
            0x04, 0x10, 0xff, 0xff, 0, 0, 0, 0x11, 0, 0, 1, 0, // BTH: one byte of padding
            b'a', b'b', b'c', 0,
        ];
        assert_eq!(bytes[..expect.len()], expect);
        assert_eq!(bytes.len(), expect.len() + ICRC_LEN);
        let datagram = Datagram::parse(&bytes).unwrap();
        assert_eq!((datagram.network, datagram.packet.payload()), (IPV4, &b"abc"[..]));
        datagram.verify().unwrap();
    }

    #[test]
    fn construct_ipv6() {
        let bytes = built(&IPV6);
        assert_eq!(bytes[..8], [0x66, 0x81, 0x23, 0x45, 0, 28, 17, 255]);
        assert_eq!(bytes[40..48], [0xc1, 0x21, 0x12, 0xb7, 0, 28, 0, 0]);
        let datagram = Datagram::parse(&bytes).unwrap();
        assert_eq!((datagram.network, datagram.packet.payload()), (IPV6, &b"abc"[..]));
        datagram.verify().unwrap();
    }

    /// What a receiver must not take for RoCE, by the byte that makes it so.
    #[test]
    fn refuses_what_is_not_roce() {
        let not_roce = |network: &Network, at: usize, value: u8| {
            let mut bytes = built(network);
            bytes[at] = value;
            matches!(Datagram::parse(&bytes), Err(ParseError::NotRoce(_)))
        };
        assert!(not_roce(&IPV4, 9, 6), "TCP");
        assert!(not_roce(&IPV4, 6, 0x20), "more fragments");
        assert!(not_roce(&IPV4, 7, 1), "a fragment's offset");
        assert!(not_roce(&IPV4, 22, 0), "another port");
        assert!(not_roce(&IPV6, 6, 44), "a fragment header");
        assert!(not_roce(&IPV6, 6, 0), "hop-by-hop options");
        assert!(not_roce(&IPV6, 42, 0), "another port");
    }

    /// What claims to be RoCE and is malformed.
    #[test]
    fn refuses_wrong_lengths() {
        let refused = |network: &Network, changes: &[(usize, u8)]| {
            let mut bytes = built(network);
            bytes.extend([0; 8]);
            for &(at, value) in changes {
                bytes[at] = value;
            }
            Datagram::parse(&bytes).unwrap_err()
        };
        let udp_len = |value| ParseError::Field {
            what: "UDP length",
            value,
        };
        assert_eq!(refused(&IPV4, &[(25, 29)]), udp_len(29));
        assert_eq!(refused(&IPV4, &[(3, 47)]), udp_len(28));
        assert_eq!(refused(&IPV6, &[(45, 27)]), udp_len(27));
        assert_eq!(refused(&IPV6, &[(5, 24)]), udp_len(28));
        // Both lengths agree, and end within the headers.
        let short = [(3, 20), (25, 0)];
        assert!(matches!(
            refused(&IPV4, &short),
            ParseError::Truncated { what: "BTH", .. }
        ));
        let short = [(3, 43), (25, 23)];
        assert!(matches!(
            refused(&IPV4, &short),
            ParseError::Truncated {
                what: "RC SEND_ONLY",
                ..
            }
        ));
        // Both say more than is there.
        let long = [(3, 60), (25, 40)];
        assert!(matches!(refused(&IPV4, &long), ParseError::Truncated { .. }));
    }

    #[test]
    fn refuses_ip_options() {
        let mut bytes = built(&IPV4);
        bytes.splice(20..20, [1, 1, 1, 0]);
        bytes[0] = 0x46;
        bytes[3] += 4;
        assert!(Datagram::parse(&bytes).is_err());
        assert!(icrc::verify(&bytes).is_err());
    }

    #[test]
    fn does_not_build_what_does_not_fit() {
        let headers = Headers::new(Opcode::RcSendOnly, 0x11, Psn::new(0));
        let mut out = vec![0; 70_000];
        let too_long = build(&IPV4, &headers, &[0; 65_489], &mut out);
        assert_eq!(too_long, Err(BuildError::TooLong(65_536)));
        assert_eq!(build(&IPV4, &headers, &[0; 65_488], &mut out), Ok(65_532));
        icrc::verify(&out).unwrap();
        let no_room = build(&IPV4, &headers, b"abc", &mut out[..47]);
        assert_eq!(no_room, Err(BuildError::NoRoom { need: 48, have: 47 }));
    }
}
