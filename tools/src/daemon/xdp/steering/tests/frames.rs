//! Frames, and what is to become of them.

use super::Verdict::{self, *};
use super::*;

pub fn ethernet(ethertype: u16, tag: Option<u16>) -> Vec<u8> {
    let mut frame = vec![2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1];
    if let Some(tag) = tag {
        frame.extend(0x8100u16.to_be_bytes());
        frame.extend(tag.to_be_bytes());
    }
    frame.extend(ethertype.to_be_bytes());
    frame
}

/// BTH for a slot, payload and ICRC.
pub fn iba(slot: u8) -> Vec<u8> {
    let mut iba = vec![0u8; IBA];
    iba[0] = 4;
    iba[5] = slot;
    iba[7] = 0x11;
    iba
}

pub fn udp(iba: &[u8]) -> Vec<u8> {
    let mut udp = vec![0xc0, 0x21];
    udp.extend(ROCE_PORT.to_be_bytes());
    udp.extend((8 + iba.len() as u16).to_be_bytes());
    udp.extend([0, 0]);
    udp.extend(iba);
    udp
}

pub fn v4(tag: Option<u16>, dest: &str, payload: &[u8]) -> Vec<u8> {
    let mut frame = ethernet(0x0800, tag);
    frame.extend([0x45, 2]);
    frame.extend((20 + payload.len() as u16).to_be_bytes());
    frame.extend([0x12, 0x34, 0x40, 0, 64, 17, 0, 0, 10, 1, 2, 4]);
    frame.extend(dest.parse::<std::net::Ipv4Addr>().unwrap().octets());
    frame.extend(payload);
    frame
}

/// IPv6, or the GRH of RoCE v1.
pub fn v6(ethertype: u16, next_header: u8, dest: &str, payload: &[u8]) -> Vec<u8> {
    let mut frame = ethernet(ethertype, None);
    frame.extend([0x60, 0x20, 0, 0]);
    frame.extend((payload.len() as u16).to_be_bytes());
    frame.extend([next_header, 64]);
    frame.extend("2001:db8::4".parse::<std::net::Ipv6Addr>().unwrap().octets());
    frame.extend(dest.parse::<std::net::Ipv6Addr>().unwrap().octets());
    frame.extend(payload);
    frame
}

pub fn good(slot: u8) -> [Vec<u8>; 4] {
    [
        v4(None, V4, &udp(&iba(slot))),
        // Priority 3, VLAN 0.
        v4(Some(0x6000), V4, &udp(&iba(slot))),
        v6(0x86dd, 17, V6, &udp(&iba(slot))),
        v6(0x8915, 0x1b, V6, &iba(slot)),
    ]
}

/// The frame with some bytes changed.
pub fn with(frame: &[u8], at: usize, bytes: &[u8]) -> Vec<u8> {
    let mut frame = frame.to_vec();
    frame[at..at + bytes.len()].copy_from_slice(bytes);
    frame
}

/// What the program is to do, said in another way: by slices that end where the frame does.
pub fn expected(frame: &[u8]) -> Verdict {
    parse(frame).unwrap_or(Pass)
}

fn parse(frame: &[u8]) -> Option<Verdict> {
    let be16 = |bytes: &[u8], at: usize| Some(u16::from_be_bytes(*bytes.get(at..)?.first_chunk()?));
    let group = frame.first()? & 1 != 0;
    let (mut ethertype, mut rest) = (be16(frame, 12)?, frame.get(14..)?);
    if ethertype == 0x8100 {
        if be16(rest, 0)? & 0xfff != 0 {
            return None;
        }
        (ethertype, rest) = (be16(rest, 2)?, rest.get(4..)?);
    }
    let own: [[u8; 16]; 2] = [V4, V6].map(|ip| key_of(ip.parse().unwrap()));
    let (ip_len, udp_len, dest, header, is_v1) = match ethertype {
        0x0800 => {
            let (ip, udp) = rest.split_at_checked(20)?;
            if ip[0] != 0x45 || ip[9] != 17 || be16(ip, 6)? & 0x3fff != 0 || be16(udp, 2)? != ROCE_PORT {
                return None;
            }
            let dest: [u8; 4] = ip[16..].try_into().ok()?;
            let udp_len = be16(udp.get(..8)?, 4)?;
            let dest = std::net::Ipv4Addr::from(dest).to_ipv6_mapped().octets();
            (
                usize::from(be16(ip, 2)?),
                Some(20 + usize::from(udp_len)),
                dest,
                28,
                false,
            )
        }
        0x86dd | 0x8915 => {
            let is_v1 = ethertype == 0x8915;
            let (ip, udp) = rest.split_at_checked(40)?;
            let dest: [u8; 16] = ip[24..].try_into().ok()?;
            let mapped = std::net::Ipv6Addr::from(dest).to_ipv4_mapped().is_some();
            if ip[0] >> 4 != 6 || ip[6] != if is_v1 { 0x1b } else { 17 } || (mapped && !is_v1) {
                return None;
            }
            let ip_len = 40 + usize::from(be16(ip, 4)?);
            if is_v1 {
                (ip_len, None, dest, 40, true)
            } else {
                if be16(udp, 2)? != ROCE_PORT {
                    return None;
                }
                (
                    ip_len,
                    Some(40 + usize::from(be16(udp.get(..8)?, 4)?)),
                    dest,
                    48,
                    false,
                )
            }
        }
        _ => return None,
    };
    if group || !own.contains(&dest) {
        return None;
    }
    if ip_len > rest.len() || udp_len.is_some_and(|len| len != ip_len) || ip_len < header + 16 {
        return Some(Length);
    }
    let of_socket = !is_v1 && rest[header - 2..header] != [0, 0];
    Some(match rest[header + 5] {
        SEAT | SEAT_WITHOUT_SOCKET if of_socket => Pass,
        SEAT => Redirect,
        SEAT_WITHOUT_SOCKET => NoSocket,
        0 | KERNEL if !is_v1 => Pass,
        _ => Unowned,
    })
}
