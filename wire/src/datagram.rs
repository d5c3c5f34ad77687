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
