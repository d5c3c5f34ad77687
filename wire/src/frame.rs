//! Ethernet frames that carry RoCE, with or without an 802.1Q tag (reference section 1).

use etherparse::{EtherType, Ethernet2Header, SingleVlanHeader, VlanId, VlanPcp};

use crate::{BuildError, Datagram, Headers, Network, ParseError, datagram};

/// The EtherType of RoCEv1: a GRH follows.
pub const ETHERTYPE_ROCE_V1: u16 = 0x8915;

/// An 802.1Q tag. The ICRC does not cover it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Vlan {
    /// Bits 15..13: priority code point.
    pub priority: u8,
    /// Bit 12: drop eligible.
    pub drop_eligible: bool,
    /// Bits 11..0: VLAN.
    pub id: u16,
}

/// The Ethernet header, without the EtherType, which follows from the packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ethernet {
    /// Bytes 0-5: destination.
    pub dst: [u8; 6],
    /// Bytes 6-11: source.
    pub src: [u8; 6],
    /// The tag, if there is one.
    pub vlan: Option<Vlan>,
}

impl Ethernet {
    /// Bytes of the header and the tag.
    pub const fn header_len(&self) -> usize {
        Ethernet2Header::LEN
            + if self.vlan.is_some() {
                SingleVlanHeader::LEN
            } else {
                0
            }
    }

    /// Reads the header and one tag (802.1Q, EtherType 0x8100); gives the EtherType of what
    /// follows, and its bytes.
    pub fn parse(frame: &[u8]) -> Result<(Self, u16, &[u8]), ParseError> {
        let truncated = |what, need| ParseError::Truncated {
            what,
            need,
            have: frame.len(),
        };
        let (eth, rest) = Ethernet2Header::from_slice(frame)
            .map_err(|_| truncated("Ethernet header", Ethernet2Header::LEN))?;
        let mut ethernet = Self {
            dst: eth.destination,
            src: eth.source,
            vlan: None,
        };
        if eth.ether_type != EtherType::VLAN_TAGGED_FRAME {
            return Ok((ethernet, eth.ether_type.0, rest));
        }
        let (tag, rest) = SingleVlanHeader::from_slice(rest)
            .map_err(|_| truncated("802.1Q tag", Ethernet2Header::LEN + SingleVlanHeader::LEN))?;
        ethernet.vlan = Some(Vlan {
            priority: tag.pcp.value(),
            drop_eligible: tag.drop_eligible_indicator,
            id: tag.vlan_id.value(),
        });
        Ok((ethernet, tag.ether_type.0, rest))
    }

    /// Writes the header and the tag to the start of `out`. Numbers are cut to their width.
    ///
    /// # Panics
    /// If `out` is shorter than [`Ethernet::header_len`].
    pub fn emit(&self, ether_type: u16, out: &mut [u8]) {
        let ether_type = EtherType(ether_type);
        let outer = if self.vlan.is_some() {
            EtherType::VLAN_TAGGED_FRAME
        } else {
            ether_type
        };
        let eth = Ethernet2Header {
            source: self.src,
            destination: self.dst,
            ether_type: outer,
        };
        out[..Ethernet2Header::LEN].copy_from_slice(&eth.to_bytes());
        if let Some(vlan) = self.vlan {
            let tag = SingleVlanHeader {
                pcp: VlanPcp::try_new(vlan.priority & 7).unwrap_or_default(),
                drop_eligible_indicator: vlan.drop_eligible,
                vlan_id: VlanId::try_new(vlan.id & 0xfff).unwrap_or_default(),
                ether_type,
            };
            out[Ethernet2Header::LEN..self.header_len()].copy_from_slice(&tag.to_bytes());
        }
    }
}

/// An Ethernet frame, without its check sequence, that carries a RoCE packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Frame<'a> {
    /// The Ethernet header.
    pub ethernet: Ethernet,
    /// The packet with its network headers.
    pub datagram: Datagram<'a>,
}

impl<'a> Frame<'a> {
    /// Reads a frame. The ICRC is not checked: see [`Datagram::verify`].
    ///
    /// # Errors
    /// [`ParseError::NotRoce`] when the frame carries something else; others when it claims to
    /// be RoCE and is malformed.
    pub fn parse(frame: &'a [u8]) -> Result<Self, ParseError> {
        let (ethernet, ether_type, rest) = Ethernet::parse(frame)?;
        if ![EtherType::IPV4.0, EtherType::IPV6.0, ETHERTYPE_ROCE_V1].contains(&ether_type) {
            return Err(ParseError::NotRoce("EtherType is neither IP nor RoCEv1"));
        }
        let datagram = Datagram::parse(rest)?;
        if ether_type_of(&datagram.network) != ether_type {
            return Err(ParseError::Field {
                what: "EtherType",
                value: ether_type.into(),
            });
        }
        Ok(Self { ethernet, datagram })
    }
}

/// The EtherType of such network headers.
pub const fn ether_type_of(network: &Network) -> u16 {
    match network {
        Network::Ipv4 { .. } => EtherType::IPV4.0,
        Network::Ipv6 { .. } => EtherType::IPV6.0,
        Network::Grh(_) => ETHERTYPE_ROCE_V1,
    }
}

/// Builds a frame at the start of `out`, and says how many bytes it has: the Ethernet header
/// with the right EtherType, then a packet as [`datagram::build`] makes it. No padding to
/// Ethernet's minimum is added.
pub fn build(
    ethernet: &Ethernet,
    network: &Network,
    headers: &Headers,
    payload: &[u8],
    out: &mut [u8],
) -> Result<usize, BuildError> {
    let have = out.len();
    let need = ethernet.header_len() + Datagram::built_len(network, headers, payload.len());
    let out = out.get_mut(..need).ok_or(BuildError::NoRoom { need, have })?;
    ethernet.emit(ether_type_of(network), out);
    let len = datagram::build(network, headers, payload, &mut out[ethernet.header_len()..])?;
    Ok(ethernet.header_len() + len)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::datagram::Udp;
    use crate::{Gid, Grh, Opcode, Psn};

    const IPV4: Network = Network::Ipv4 {
        tos: 0,
        id: 0,
        dont_fragment: true,
        ttl: 64,
        src: core::net::Ipv4Addr::new(10, 0, 0, 1),
        dst: core::net::Ipv4Addr::new(10, 0, 0, 2),
        udp: Udp {
            src_port: 0xc000,
            checksum: 0,
        },
    };

    fn built(vlan: Option<Vlan>, network: &Network) -> Vec<u8> {
        let ethernet = Ethernet {
            dst: [2, 0, 0, 0, 0, 2],
            src: [2, 0, 0, 0, 0, 1],
            vlan,
        };
        let mut bytes = vec![0; 200];
        let headers = Headers::new(Opcode::RcAcknowledge, 0x11, Psn::new(5));
        let len = build(&ethernet, network, &headers, &[], &mut bytes).unwrap();
        bytes.truncate(len);
        bytes
    }

    #[test]
    fn tagged_and_untagged() {
        let plain = built(None, &IPV4);
        assert_eq!(
            plain[..15],
            [2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1, 0x08, 0x00, 0x45]
        );
        let vlan = Vlan {
            priority: 3,
            drop_eligible: true,
            id: 0x123,
        };
        let tagged = built(Some(vlan), &IPV4);
        assert_eq!(tagged[..12], plain[..12]);
        assert_eq!(tagged[12..18], [0x81, 0x00, 0x71, 0x23, 0x08, 0x00]);
        // The tag is outside the ICRC.
        assert_eq!(tagged[18..], plain[14..]);
        let frame = Frame::parse(&tagged).unwrap();
        assert_eq!(frame.ethernet.vlan, Some(vlan));
        frame.datagram.verify().unwrap();
        for len in 0..tagged.len() {
            assert!(Frame::parse(&tagged[..len]).is_err(), "{len}");
        }
    }

    #[test]
    fn ether_type_must_fit() {
        let grh = Grh {
            traffic_class: 2,
            flow_label: 0,
            payload_len: 0,
            next_header: 0,
            hop_limit: 1,
            sgid: Gid([1; 16]),
            dgid: Gid([2; 16]),
        };
        let rocev1 = built(None, &Network::Grh(grh));
        assert_eq!(rocev1[12..14], [0x89, 0x15]);
        assert_eq!(rocev1[18..21], [0, 20, 0x1b]);
        assert!(Frame::parse(&rocev1).is_ok());
        let with_type = |bytes: &[u8], ether_type: u16| {
            let mut bytes = bytes.to_vec();
            bytes[12..14].copy_from_slice(&ether_type.to_be_bytes());
            Frame::parse(&bytes).map(|_| ())
        };
        let wrong = |value| {
            Err(ParseError::Field {
                what: "EtherType",
                value,
            })
        };
        assert_eq!(with_type(&rocev1, 0x86dd), wrong(0x86dd));
        assert_eq!(with_type(&built(None, &IPV4), 0x8915), wrong(0x8915));
        assert!(matches!(with_type(&rocev1, 0x0806), Err(ParseError::NotRoce(_))));
    }
}
