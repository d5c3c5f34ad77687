//! The invariant CRC of RoCE (reference section 5; IBTA 7.8.1, A17.3.3): made packet by packet
//! from parts, or over a whole IP packet.
//!
//! It is CRC-32 as Ethernet has it, over eight bytes of ones and then everything from the IP
//! header (RoCEv1: the GRH) to the padding, with the fields that routers may change replaced by
//! ones. On the wire it is little-endian.

use crc32fast::Hasher;

use crate::header::put;
use crate::packet::ICRC_LEN;
use crate::udp_port::ROCE_V2_PORT;
use crate::{Bth, Grh, Network, ParseError};

/// CRC of the eight bytes of ones that come first.
const SEED: u32 = !0xdebb_20e3;

/// Bytes of an IPv4 header without options, the only one allowed.
const IPV4_LEN: usize = 20;
/// Bytes of an IPv6 header, and of a GRH.
const IPV6_LEN: usize = 40;
/// Bytes of a UDP header.
const UDP_LEN: usize = 8;
/// Bytes of the longest headers before the BTH.
const MAX_OUTER_LEN: usize = IPV6_LEN + UDP_LEN;
/// The protocol number of UDP.
const PROTOCOL_UDP: u8 = 17;

/// What the ICRC covers of the IPv4 and UDP headers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ipv4Pseudo {
    /// Source address.
    pub src: [u8; 4],
    /// Destination address.
    pub dst: [u8; 4],
    /// Identification.
    pub id: u16,
    /// Bytes of the whole IP packet, ICRC included.
    pub total_len: u16,
    /// The "don't fragment" flag; the other flags and the fragment offset are 0.
    pub dont_fragment: bool,
    /// UDP source port; the destination port is always 4791.
    pub src_port: u16,
}

/// What the ICRC covers of the IPv6 and UDP headers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ipv6Pseudo {
    /// Source address.
    pub src: [u8; 16],
    /// Destination address.
    pub dst: [u8; 16],
    /// Bytes after the IPv6 header, ICRC included; also the UDP length.
    pub payload_len: u16,
    /// UDP source port; the destination port is always 4791.
    pub src_port: u16,
}

impl Ipv4Pseudo {
    /// The headers, with ones in the fields that the ICRC leaves out.
    #[rustfmt::skip]
    fn masked(&self) -> [u8; IPV4_LEN + UDP_LEN] {
        let [len_hi, len_lo] = self.total_len.to_be_bytes();
        let [id_hi, id_lo] = self.id.to_be_bytes();
        let df = u8::from(self.dont_fragment) << 6;
        let [s0, s1, s2, s3] = self.src;
        let [d0, d1, d2, d3] = self.dst;
        let [sp0, sp1] = self.src_port.to_be_bytes();
        let [dp0, dp1] = ROCE_V2_PORT.to_be_bytes();
        let [ul0, ul1] = self.total_len.saturating_sub(IPV4_LEN as u16).to_be_bytes();
        [
            0x45, 0xff, len_hi, len_lo, id_hi, id_lo, df, 0,
            0xff, PROTOCOL_UDP, 0xff, 0xff, s0, s1, s2, s3, d0, d1, d2, d3,
            sp0, sp1, dp0, dp1, ul0, ul1, 0xff, 0xff,
        ]
    }
}

impl Ipv6Pseudo {
    /// The headers, with ones in the fields that the ICRC leaves out.
    fn masked(&self) -> [u8; IPV6_LEN + UDP_LEN] {
        let mut bytes = [0xff; MAX_OUTER_LEN];
        bytes[0] = 0x6f;
        bytes[4..6].copy_from_slice(&self.payload_len.to_be_bytes());
        bytes[6] = PROTOCOL_UDP;
        bytes[8..24].copy_from_slice(&self.src);
        bytes[24..40].copy_from_slice(&self.dst);
        bytes[40..42].copy_from_slice(&self.src_port.to_be_bytes());
        bytes[42..44].copy_from_slice(&ROCE_V2_PORT.to_be_bytes());
        bytes[44..46].copy_from_slice(&self.payload_len.to_be_bytes());
        bytes
    }
}

/// An ICRC being computed: start with the outer headers, feed the BTH, then the rest in order.
#[derive(Clone, Debug)]
pub struct Icrc(Hasher);

impl Icrc {
    /// Starts with IPv4 and UDP headers.
    pub fn ipv4(ip: &Ipv4Pseudo) -> Self {
        Self::start(&ip.masked())
    }

    /// Starts with IPv4 and UDP headers and the BTH; faster than feeding it by itself.
    pub fn ipv4_bth(ip: &Ipv4Pseudo, bth: &[u8; Bth::LEN]) -> Self {
        let mut bytes = [0; IPV4_LEN + UDP_LEN + Bth::LEN];
        put::<0, _, _>(&mut bytes, ip.masked());
        put::<{ IPV4_LEN + UDP_LEN }, _, _>(&mut bytes, masked_bth(bth));
        Self::start(&bytes)
    }

    /// Starts with IPv6 and UDP headers.
    pub fn ipv6(ip: &Ipv6Pseudo) -> Self {
        Self::start(&ip.masked())
    }

    /// Starts with IPv6 and UDP headers and the BTH; faster than feeding it by itself.
    pub fn ipv6_bth(ip: &Ipv6Pseudo, bth: &[u8; Bth::LEN]) -> Self {
        let mut bytes = [0; IPV6_LEN + UDP_LEN + Bth::LEN];
        put::<0, _, _>(&mut bytes, ip.masked());
        put::<{ IPV6_LEN + UDP_LEN }, _, _>(&mut bytes, masked_bth(bth));
        Self::start(&bytes)
    }

    /// Starts with the GRH of RoCEv1.
    pub fn grh(grh: &Grh) -> Self {
        let mut bytes = grh.to_bytes();
        mask_ipv6(&mut bytes);
        Self::start(&bytes)
    }

    /// Starts with network headers and the BTH as they are on the wire: `outer` is an IPv4 or IPv6 header with UDP, or
    /// the GRH of RoCEv1. `None` if it has the length of none of these.
    pub fn on_the_wire(outer: &[u8], bth: &[u8; Bth::LEN]) -> Option<Self> {
        let mut bytes = [0; MAX_OUTER_LEN + Bth::LEN];
        let masked = bytes.get_mut(..outer.len() + Bth::LEN)?;
        let (head, end) = masked.split_at_mut(outer.len());
        head.copy_from_slice(outer);
        mask_outer(head)?;
        end.copy_from_slice(&masked_bth(bth));
        Some(Self::start(masked))
    }

    /// Goes on where another ended: `state` is what its [`Icrc::finish`] gave.
    #[inline]
    pub fn resume(state: u32) -> Self {
        Self(Hasher::new_with_initial(state))
    }

    fn start(masked: &[u8]) -> Self {
        let mut hasher = Hasher::new_with_initial(SEED);
        hasher.update(masked);
        Self(hasher)
    }

    /// Feeds the BTH, masking its byte 4 (FECN, BECN, reserved).
    pub fn update_bth(&mut self, bth: &[u8; Bth::LEN]) {
        self.0.update(&masked_bth(bth));
    }

    /// Feeds what follows the BTH: extension headers, payload, padding, in order.
    #[inline]
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// Feeds a packet from its BTH to its padding, as [`crate::RocePacket::covered`] gives it.
    pub fn update_packet(&mut self, covered: &[u8]) {
        if let Some((bth, rest)) = covered.split_first_chunk() {
            self.update_bth(bth);
            self.update(rest);
        }
    }

    /// The ICRC; `to_le_bytes` of it goes on the wire.
    pub fn finish(self) -> u32 {
        self.0.finalize()
    }
}

/// The BTH with ones in byte 4: FECN, BECN, reserved.
fn masked_bth(bth: &[u8; Bth::LEN]) -> [u8; Bth::LEN] {
    let mut masked = *bth;
    masked[4] = 0xff;
    masked
}

/// Sets the fields of an IPv6 header or GRH that the ICRC leaves out: traffic class, flow label
/// and hop limit.
fn mask_ipv6(header: &mut [u8]) {
    header[0] |= 0x0f;
    header[1..4].fill(0xff);
    header[7] = 0xff;
}

/// Sets what the ICRC leaves out of network headers, which are told apart by their length; `None` if it is that of none.
fn mask_outer(header: &mut [u8]) -> Option<()> {
    match header.len() {
        len if len == IPV4_LEN + UDP_LEN => {
            header[1] = 0xff;
            header[8] = 0xff;
            header[10..12].fill(0xff);
            header[len - 2..].fill(0xff);
        }
        len if len == IPV6_LEN + UDP_LEN => {
            mask_ipv6(header);
            header[len - 2..].fill(0xff);
        }
        IPV6_LEN => mask_ipv6(header),
        _ => return None,
    }
    Some(())
}

/// The ICRC that a packet should have, and where the packet ends: where its header's length
/// says, so that the padding of short Ethernet frames does no harm.
fn compute_with_end(ip_packet: &[u8]) -> Result<(u32, usize), ParseError> {
    let (network, end) = Network::parse(ip_packet)?;
    let outer_len = network.header_len();
    let truncated = ParseError::Truncated {
        what: "RoCE packet",
        need: outer_len + Bth::LEN + ICRC_LEN,
        have: end.min(ip_packet.len()),
    };
    let covered = end
        .checked_sub(ICRC_LEN)
        .and_then(|end| ip_packet.get(..end))
        .ok_or(truncated)?;
    let (outer, packet) = covered.split_at_checked(outer_len).ok_or(truncated)?;
    let (bth, rest) = packet.split_first_chunk().ok_or(truncated)?;

    let mut icrc = Icrc::on_the_wire(outer, bth).ok_or(truncated)?;
    icrc.update(rest);
    Ok((icrc.finish(), end))
}

/// The ICRC of a whole packet: `ip_packet` starts at the IPv4 or IPv6 header, or at the GRH of
/// RoCEv1, and has four bytes at its end for the ICRC, which are not read.
///
/// # Errors
/// When the headers are not those of a RoCE packet or the bytes end early.
pub fn compute(ip_packet: &[u8]) -> Result<u32, ParseError> {
    compute_with_end(ip_packet).map(|(icrc, _)| icrc)
}

/// Checks the ICRC of a whole packet, as [`compute`] takes it.
///
/// # Errors
/// [`ParseError::BadIcrc`] when it does not match, and those of [`compute`].
pub fn verify(ip_packet: &[u8]) -> Result<(), ParseError> {
    let (computed, end) = compute_with_end(ip_packet)?;
    let bytes = ip_packet.get(..end).and_then(|whole| whole.last_chunk());
    let received = u32::from_le_bytes(bytes.copied().unwrap_or_default());
    if computed == received {
        Ok(())
    } else {
        Err(ParseError::BadIcrc { computed, received })
    }
}

/// The CRC's polynomial, reflected as all polynomials here: bit 31 is the coefficient of x^0.
const POLYNOMIAL: u32 = 0xedb8_8320;

/// Product of two polynomials modulo the CRC's.
const fn multiply(mut a: u32, mut b: u32) -> u32 {
    let mut product = 0;
    let mut power = 0;
    while power < 32 {
        product ^= b & ((a as i32) >> 31) as u32;
        a <<= 1;
        b = b >> 1 ^ POLYNOMIAL & (b & 1).wrapping_neg();
        power += 1;
    }
    product
}

/// x^-(8 * 2^i) modulo the CRC's polynomial, by i.
const INVERSE_BYTES: [u32; 16] = {
    // x^-1: the polynomial that, times x, gives 1.
    let mut inverse = (0x8000_0000 ^ POLYNOMIAL) << 1 | 1;
    let mut i = 0;
    while i < 3 {
        inverse = multiply(inverse, inverse);
        i += 1;
    }
    let mut table = [inverse; 16];
    let mut i = 1;
    while i < table.len() {
        table[i] = multiply(table[i - 1], table[i - 1]);
        i += 1;
    }
    table
};

/// Recovers the IPv4 identification of received packets of one length from their ICRC.
///
/// A UDP socket does not tell the id, which the ICRC covers. CRCs are linear: the ICRC received
/// and the one computed with id 0 differ by the id times a power of x that depends only on the
/// number of bytes from the id to the ICRC. Dividing by it gives 32 bits, of which 16 must be
/// zero: that is what remains of the check, so try the likely ids first.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct IdRecovery {
    /// x^-(8 n + 16).
    inverse: u32,
}

impl IdRecovery {
    /// For packets with `len_after_id` covered bytes after the id: the IPv4 total length less 10
    /// (six bytes up to the id's end, four of ICRC). Takes some 100 ns; keep it per length.
    pub const fn for_len(len_after_id: u16) -> Self {
        let mut inverse = multiply(INVERSE_BYTES[0], INVERSE_BYTES[0]);
        let mut i = 0;
        while i < INVERSE_BYTES.len() {
            if len_after_id >> i & 1 != 0 {
                inverse = multiply(inverse, INVERSE_BYTES[i]);
            }
            i += 1;
        }
        Self { inverse }
    }

    /// For packets of such an IPv4 total length.
    pub const fn for_total_len(total_len: u16) -> Self {
        Self::for_len(total_len.saturating_sub(6 + ICRC_LEN as u16))
    }

    /// The id with which the packet has the ICRC `received`, when `computed` is its ICRC with
    /// id 0; `None` if there is no such id, so the packet is damaged.
    #[inline]
    pub const fn recover(self, received: u32, computed: u32) -> Option<u16> {
        let id = multiply(self.inverse, received ^ computed);
        // The first byte of the id, the high one, is the lowest here.
        if id >> 16 == 0 {
            Some((id as u16).swap_bytes())
        } else {
            None
        }
    }
}

/// [`IdRecovery::recover`] for a length that is not worth keeping an [`IdRecovery`] for.
pub const fn id_from_icrc(received: u32, computed: u32, len_after_id: u16) -> Option<u16> {
    IdRecovery::for_len(len_after_id).recover(received, computed)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hex(text: &str) -> Vec<u8> {
        (0..text.len())
            .step_by(2)
            .map(|i| u8::from_str_radix(&text[i..i + 2], 16).unwrap())
            .collect()
    }

    /// Frames of hardware and of scapy's tests: reference section 5.
    const VECTORS: [&str; 6] = [
        "e41d2dab2bc27cfe90643b32080045c2003c718c4000401191610a0011010a001201000012b7002800008100ffff40000118000000000000000000000000000000000000000082fd002a",
        "248a07a8fa22248a07a8fa22080045010040047840004011b4d5c0a80007c0a80007c00012b7002caca22460ffff000000d300cf17104630818be28935d90e9a95505401be885e50000078f353f3",
        "248a07a8fa22248a07a8fa2286dd6e21face002c11ff2022000000000000000000000000102320230000000000000000000000001024c00012b7002ce7c52460ffff000000d300cf17104630818be28935d90e9a95505401be885e5000003e5b743b",
        "7cfe90753cd87cfe90753cd889156020000000281b4000000000000000000000ffff0f00000200000000000000000000ffff0f0000020a70ffff0000010a80a788bc000055d4c0726000000047b3000000050000000001000000e3d856bb",
        "7cfe90753cd87cfe90753cd889156020000000141b4000000000000000000000ffff0f00000200000000000000000000ffff0f0000021140ffff0000010900a788c00000000525f0c038",
        "183d5ebf4371183d5ebf51920800450200300000400040112d60c0a84606c0a84604004812b7001c00001140ffff000000450000000006000001259cc216",
    ];

    #[test]
    fn published_vectors() {
        for vector in VECTORS {
            let frame = hex(vector);
            verify(&frame[14..]).unwrap();
            let icrc = compute(&frame[14..]).unwrap().to_le_bytes();
            assert_eq!(icrc, frame[frame.len() - 4..]);
        }
    }

    #[test]
    fn every_bit_counts_or_is_masked() {
        for vector in VECTORS {
            let packet = hex(vector).split_off(14);
            let udp = packet[0] >> 4 == 4 || packet[6] == PROTOCOL_UDP;
            let outer = if packet[0] >> 4 == 4 { IPV4_LEN } else { IPV6_LEN };
            let bth = outer + if udp { UDP_LEN } else { 0 };
            for bit in 0..packet.len() * 8 {
                let mut damaged = packet.clone();
                damaged[bit / 8] ^= 1 << (bit % 8);
                let byte = bit / 8;
                let masked = byte == bth + 4
                    || udp && (outer + 6..outer + 8).contains(&byte)
                    || if outer == IPV4_LEN {
                        matches!(byte, 1 | 8 | 10 | 11)
                    } else {
                        matches!(byte, 1..=3 | 7) || byte == 0 && bit % 8 < 4
                    };
                assert_eq!(verify(&damaged).is_ok(), masked, "bit {bit} of {vector}");
            }
        }
    }

    #[test]
    fn parts_agree_with_the_whole() {
        let frame = hex(VECTORS[1]);
        let covered = &frame[42..frame.len() - 4];
        let bth = covered.first_chunk().unwrap();
        let ip = Ipv4Pseudo {
            src: [192, 168, 0, 7],
            dst: [192, 168, 0, 7],
            id: 0x0478,
            total_len: 64,
            dont_fragment: true,
            src_port: 0xc000,
        };
        let mut icrc = Icrc::ipv4(&ip);
        icrc.update_bth(bth);
        assert_eq!(icrc.clone().finish(), Icrc::ipv4_bth(&ip, bth).finish());
        for part in covered[12..].chunks(5) {
            icrc.update(part);
        }
        assert_eq!(icrc.finish().to_le_bytes(), [0x78, 0xf3, 0x53, 0xf3]);

        let frame = hex(VECTORS[2]);
        let ip = Ipv6Pseudo {
            src: frame[22..38].try_into().unwrap(),
            dst: frame[38..54].try_into().unwrap(),
            payload_len: 44,
            src_port: 0xc000,
        };
        let mut icrc = Icrc::ipv6_bth(&ip, frame[62..].first_chunk().unwrap());
        icrc.update(&frame[74..frame.len() - 4]);
        assert_eq!(icrc.finish().to_le_bytes(), [0x3e, 0x5b, 0x74, 0x3b]);
        let mut icrc = Icrc::ipv6(&ip);
        icrc.update_packet(&frame[62..frame.len() - 4]);
        assert_eq!(icrc.finish().to_le_bytes(), [0x3e, 0x5b, 0x74, 0x3b]);

        let frame = hex(VECTORS[3]);
        let mut icrc = Icrc::grh(&Grh::parse(&frame[14..]).unwrap());
        icrc.update_packet(&frame[54..frame.len() - 4]);
        assert_eq!(icrc.finish().to_le_bytes(), [0xe3, 0xd8, 0x56, 0xbb]);
    }

    #[test]
    fn ignores_ethernet_padding() {
        let mut packet = hex(VECTORS[5]).split_off(14);
        packet.extend([0xee; 6]);
        verify(&packet).unwrap();
    }

    #[test]
    fn short_packets_are_errors() {
        for vector in VECTORS {
            let packet = hex(vector).split_off(14);
            for len in 0..packet.len() {
                assert!(compute(&packet[..len]).is_err());
            }
        }
    }

    /// The ICRC of a packet of `total_len` bytes with that id; other bytes are of no matter.
    fn icrc_with_id(id: u16, total_len: u16, fill: u8) -> u32 {
        let mut icrc = Icrc::ipv4(&Ipv4Pseudo {
            src: [10, 0, 0, 1],
            dst: [10, 0, 0, 2],
            id,
            total_len,
            dont_fragment: true,
            src_port: 0xc123,
        });
        icrc.update_packet(&vec![fill; usize::from(total_len) - 28 - 4]);
        icrc.finish()
    }

    #[test]
    fn recovers_every_id() {
        let recovery = IdRecovery::for_total_len(44);
        let computed = icrc_with_id(0, 44, 0x5a);
        for id in 0..=u16::MAX {
            assert_eq!(recovery.recover(icrc_with_id(id, 44, 0x5a), computed), Some(id));
        }
    }

    #[test]
    fn recovers_at_every_length() {
        for total_len in (44..4200).chain([9000, 65535]) {
            let computed = icrc_with_id(0, total_len, 0x33);
            let received = icrc_with_id(0xbeef, total_len, 0x33);
            assert_eq!(id_from_icrc(received, computed, total_len - 10), Some(0xbeef));
        }
    }

    /// No id explains a packet that differs by one bit, at these lengths and wherever the bit is.
    #[test]
    fn refuses_single_bit_errors() {
        for total_len in [48u16, 300, 1068, 4144] {
            let recovery = IdRecovery::for_total_len(total_len);
            let clean = icrc_with_id(0, total_len, 0);
            for bit in 0..32 {
                let received = icrc_with_id(0x1234, total_len, 0) ^ 1 << bit;
                assert_eq!(recovery.recover(received, clean), None, "ICRC bit {bit}");
            }
            let len = usize::from(total_len) - 32;
            for bit in (0..len * 8).filter(|bit| bit / 8 != 4) {
                let mut payload = vec![0; len];
                payload[bit / 8] ^= 1 << (bit % 8);
                let mut icrc = Icrc::ipv4(&Ipv4Pseudo {
                    src: [10, 0, 0, 1],
                    dst: [10, 0, 0, 2],
                    id: 0,
                    total_len,
                    dont_fragment: true,
                    src_port: 0xc123,
                });
                icrc.update_packet(&payload);
                let received = icrc_with_id(0x1234, total_len, 0);
                assert_eq!(recovery.recover(received, icrc.finish()), None, "bit {bit}");
            }
        }
    }

    /// Of random damage 16 bits' worth is seen: about one in 65,536 passes.
    #[test]
    fn refuses_nearly_all_random_damage() {
        let recovery = IdRecovery::for_total_len(1068);
        let mut x = 0x9e37_79b9u32;
        let passed = (0..1 << 20)
            .filter(|_| {
                x ^= x << 13;
                x ^= x >> 17;
                x ^= x << 5;
                recovery.recover(x, 0).is_some()
            })
            .count();
        assert!((1..64).contains(&passed), "{passed} of 2^20 passed");
    }
}
