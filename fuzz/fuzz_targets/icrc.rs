//! An IP packet: three ways to its ICRC agree, damage of it is noticed, and the IPv4 id that a
//! UDP socket hides is recovered from it.
#![no_main]

use ferroce_wire::{Datagram, IdRecovery, Network, icrc};
use libfuzzer_sys::fuzz_target;

/// CRC-32 bit by bit, over parts.
fn crc32(parts: &[&[u8]]) -> u32 {
    let mut crc = u32::MAX;
    for &byte in parts.iter().copied().flatten() {
        crc ^= u32::from(byte);
        for _ in 0..8 {
            crc = crc >> 1 ^ if crc & 1 != 0 { 0xedb8_8320 } else { 0 };
        }
    }
    !crc
}

fuzz_target!(|bytes: &[u8]| {
    let computed = icrc::compute(bytes);
    let verified = icrc::verify(bytes);
    let Ok(datagram) = Datagram::parse(bytes) else {
        // An ICRC needs fewer headers than a packet.
        assert!(computed.is_ok() || verified.is_err());
        return;
    };
    let computed = computed.expect("a datagram has an ICRC");
    assert_eq!(verified.is_ok(), computed == datagram.packet.icrc());

    // Masked by hand, bit by bit.
    let outer_len = datagram.network.header_len();
    let mut masked = datagram.bytes()[..datagram.bytes().len() - 4].to_vec();
    match datagram.network {
        Network::Ipv4 { .. } => {
            for at in [1, 8, 10, 11] {
                masked[at] = 0xff;
            }
        }
        Network::Ipv6 { .. } | Network::Grh(_) => {
            masked[0] |= 0x0f;
            for at in [1, 2, 3, 7] {
                masked[at] = 0xff;
            }
        }
    }
    if datagram.network.udp().is_some() {
        masked[outer_len - 2..outer_len].fill(0xff);
    }
    masked[outer_len + 4] = 0xff;
    assert_eq!(computed, crc32(&[&[0xff; 8], &masked]));

    // From the decoded headers, unless they have a bit set that has no field.
    let len = (datagram.bytes().len() - outer_len) as u16;
    let mut parts = datagram.network.icrc(len);
    parts.update_packet(datagram.packet.covered());
    let reserved_flag = matches!(datagram.network, Network::Ipv4 { .. }) && bytes[6] & 0x80 != 0;
    assert_eq!(parts.finish() == computed, !reserved_flag);

    if let Network::Ipv4 { id, .. } = datagram.network {
        let mut without_id = bytes.to_vec();
        without_id[4..6].fill(0);
        let zero = icrc::compute(&without_id).expect("the id changes no length");
        let recovery = IdRecovery::for_total_len(datagram.bytes().len() as u16);
        assert_eq!(recovery.recover(computed, zero), Some(id));
    }
});
