//! The global route header, 40 bytes: in front of RoCEv1 packets, and at the start of every
//! UD receive (reference section 11; IBTA 8.3, A17.4.5).

use core::net::{IpAddr, Ipv4Addr};

use etherparse::{IpDscp, IpEcn, IpNumber, Ipv4Header};

use crate::header::{at, emit, take};
use crate::{Gid, ParseError};

/// Global route header; an IPv6 header has the same fields at the same bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Grh {
    /// Byte 0 bits 3..0 and byte 1 bits 7..4: traffic class.
    pub traffic_class: u8,
    /// Byte 1 bits 3..0 and bytes 2-3: flow label, 20 bits.
    pub flow_label: u32,
    /// Bytes 4-5: bytes after this header, ICRC included.
    pub payload_len: u16,
    /// Byte 6: [`Grh::NEXT_HEADER_IBA`] in a GRH, 17 in the IPv6 header of RoCEv2.
    pub next_header: u8,
    /// Byte 7: hop limit.
    pub hop_limit: u8,
    /// Bytes 8-23: source.
    pub sgid: Gid,
    /// Bytes 24-39: destination.
    pub dgid: Gid,
}

impl Grh {
    /// Bytes of the header.
    pub const LEN: usize = 40;

    /// The next header of a GRH: a BTH follows.
    pub const NEXT_HEADER_IBA: u8 = 0x1b;

    /// Reads the header at the start of `bytes`. The version (byte 0 bits 7..4) must be 6.
    pub fn parse(bytes: &[u8]) -> Result<Self, ParseError> {
        let b: &[u8; Self::LEN] = take("GRH", bytes)?;
        let word = u32::from_be_bytes(at::<0, 4, _>(b));
        if word >> 28 != 6 {
            return Err(ParseError::Field {
                what: "GRH version",
                value: word >> 28,
            });
        }
        Ok(Self {
            traffic_class: (word >> 20) as u8,
            flow_label: word & 0xf_ffff,
            payload_len: u16::from_be_bytes(at::<4, 2, _>(b)),
            next_header: b[6],
            hop_limit: b[7],
            sgid: Gid(at::<8, 16, _>(b)),
            dgid: Gid(at::<24, 16, _>(b)),
        })
    }

    /// The bytes of the header. The flow label is cut to 20 bits.
    pub fn to_bytes(&self) -> [u8; Self::LEN] {
        let word = 6 << 28 | u32::from(self.traffic_class) << 20 | self.flow_label & 0xf_ffff;
        let mut b = [0; Self::LEN];
        b[..4].copy_from_slice(&word.to_be_bytes());
        b[4..6].copy_from_slice(&self.payload_len.to_be_bytes());
        b[6] = self.next_header;
        b[7] = self.hop_limit;
        b[8..24].copy_from_slice(&self.sgid.0);
        b[24..].copy_from_slice(&self.dgid.0);
        b
    }
}

emit!(Grh);

/// The IPv4 header in the GRH area of a UD receive.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GrhIpv4 {
    /// Area byte 21: type of service.
    pub tos: u8,
    /// Area bytes 22-23: bytes of the IP packet, ICRC included.
    pub total_len: u16,
    /// Area bytes 24-25: identification.
    pub id: u16,
    /// Area byte 26 bit 6: don't fragment; the rest of bytes 26-27 is 0.
    pub dont_fragment: bool,
    /// Area byte 28: time to live.
    pub ttl: u8,
    /// Area bytes 32-35: source address. Bytes 30-31 are the header checksum.
    pub src: Ipv4Addr,
    /// Area bytes 36-39: destination address.
    pub dst: Ipv4Addr,
}

impl GrhIpv4 {
    /// The IPv4 header that carries UDP with these fields, checksum included.
    pub(crate) fn header(&self) -> Ipv4Header {
        let mut header = Ipv4Header {
            dscp: IpDscp::try_new(self.tos >> 2).unwrap_or_default(),
            ecn: IpEcn::try_new(self.tos & 3).unwrap_or_default(),
            total_len: self.total_len,
            identification: self.id,
            dont_fragment: self.dont_fragment,
            time_to_live: self.ttl,
            protocol: IpNumber::UDP,
            source: self.src.octets(),
            destination: self.dst.octets(),
            ..Ipv4Header::default()
        };
        header.header_checksum = header.calc_header_checksum();
        header
    }
}

/// Where the IPv4 header is in the area.
const IPV4_AT: usize = GrhArea::LEN - Ipv4Header::MIN_LEN;

/// What the first 40 bytes of a UD receive hold: the network header the packet came with.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum GrhArea {
    /// Bytes 0-19 undefined (here 0), 20-39 the IPv4 header.
    V4(GrhIpv4),
    /// The IPv6 header.
    V6(Grh),
}

impl GrhArea {
    /// Bytes of the area.
    pub const LEN: usize = Grh::LEN;

    /// The area's bytes.
    pub fn to_bytes(&self) -> [u8; Self::LEN] {
        let ip = match self {
            Self::V6(grh) => return grh.to_bytes(),
            Self::V4(ip) => ip,
        };
        let header = ip.header();
        let mut area = [0; Self::LEN];
        // No options, so the header is exactly the second half.
        area[IPV4_AT..].copy_from_slice(&header.to_bytes());
        area
    }

    /// Reads an area, telling IPv4 from IPv6 as rdma-core and the kernel do: it is IPv6 when
    /// byte 0 says version 6, unless bytes 20-39 are a sound IPv4 header.
    pub fn parse(area: &[u8]) -> Result<Self, ParseError> {
        let b: &[u8; Self::LEN] = take("GRH area", area)?;
        let ipv4 = Ipv4Header::from_slice(&b[IPV4_AT..])
            .ok()
            .map(|(header, _)| header)
            .filter(|header| {
                header.options.is_empty() && header.header_checksum == header.calc_header_checksum()
            });
        match ipv4 {
            Some(header) => Ok(Self::V4(GrhIpv4 {
                tos: header.dscp.value() << 2 | header.ecn.value(),
                total_len: header.total_len,
                id: header.identification,
                dont_fragment: header.dont_fragment,
                ttl: header.time_to_live,
                src: header.source.into(),
                dst: header.destination.into(),
            })),
            None => Grh::parse(b).map(Self::V6),
        }
    }

    /// The GIDs of source and destination.
    pub fn gids(&self) -> (Gid, Gid) {
        match self {
            Self::V4(ip) => (Gid::from_ip(IpAddr::V4(ip.src)), Gid::from_ip(IpAddr::V4(ip.dst))),
            Self::V6(grh) => (grh.sgid, grh.dgid),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ipv4_area() {
        let ip = GrhIpv4 {
            tos: 0xc2,
            total_len: 60,
            id: 0x718c,
            dont_fragment: true,
            ttl: 64,
            src: Ipv4Addr::new(10, 0, 17, 1),
            dst: Ipv4Addr::new(10, 0, 18, 1),
        };
        let area = GrhArea::V4(ip).to_bytes();
        assert_eq!(area[..20], [0; 20]);
        // The IPv4 header of the CNP in reference section 5.
        assert_eq!(
            area[20..],
            [
                0x45, 0xc2, 0, 0x3c, 0x71, 0x8c, 0x40, 0, 0x40, 0x11, 0x91, 0x61, 10, 0, 17, 1, 10, 0, 18, 1
            ]
        );
        assert_eq!(GrhArea::parse(&area), Ok(GrhArea::V4(ip)));
        // The first half is undefined: whatever is there, the header is found.
        let mut dirty = area;
        dirty[0] = 0x60;
        assert_eq!(GrhArea::parse(&dirty), Ok(GrhArea::V4(ip)));
        dirty[20] ^= 1;
        assert!(!matches!(GrhArea::parse(&dirty), Ok(GrhArea::V4(_))));
    }

    #[test]
    fn ipv6_area() {
        let grh = Grh {
            traffic_class: 0xe2,
            flow_label: 0x1_face,
            payload_len: 44,
            next_header: 17,
            hop_limit: 255,
            sgid: Gid([0xfe; 16]),
            dgid: Gid([0x20; 16]),
        };
        let area = GrhArea::V6(grh).to_bytes();
        assert_eq!(area[..8], [0x6e, 0x21, 0xfa, 0xce, 0, 44, 17, 255]);
        assert_eq!(GrhArea::parse(&area), Ok(GrhArea::V6(grh)));
        assert_eq!(GrhArea::parse(&area).unwrap().gids(), (grh.sgid, grh.dgid));
        assert!(GrhArea::parse(&area[..39]).is_err());
        assert!(GrhArea::parse(&[0; 40]).is_err());
    }
}
