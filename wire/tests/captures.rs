//! Real traffic: every RoCE packet of the captures parses, verifies, and comes out of its decoded
//! parts byte for byte; damaged ones are refused.

mod common;

use std::collections::HashMap;
use std::env;
use std::path::{Path, PathBuf};

use ferroce_wire::frame::Ethernet;
use ferroce_wire::{
    Aeth, Frame, Gid, Grh, Headers, Network, Opcode, ParseError, Psn, Reth, Syndrome, TransportClass, frame,
    udp_port,
};

/// Every frame of every capture in the repository, with the file's name.
fn all_frames() -> Vec<(String, Vec<u8>)> {
    ["golden", "captures"]
        .into_iter()
        .flat_map(|name| common::pcaps(&common::folder(name)))
        .flat_map(|file| {
            let name = file.file_name().unwrap().to_string_lossy().into_owned();
            common::frames(&file)
                .into_iter()
                .map(move |frame| (name.clone(), frame))
        })
        .collect()
}

/// Takes a frame apart, and builds it anew. False when it is not RoCE.
fn survives(name: &str, bytes: &[u8]) -> bool {
    let frame = match Frame::parse(bytes) {
        Ok(frame) => frame,
        Err(ParseError::NotRoce(_)) => return false,
        Err(error) => panic!("{name}: {error}: {bytes:02x?}"),
    };
    frame
        .datagram
        .verify()
        .unwrap_or_else(|error| panic!("{name}: {error}: {bytes:02x?}"));

    let packet = frame.datagram.packet;
    let mut built = vec![0xa5; bytes.len()];
    let len = frame::build(
        &frame.ethernet,
        &frame.datagram.network,
        &packet.headers(),
        packet.payload(),
        &mut built,
    )
    .unwrap();
    assert_eq!(built[..len], bytes[..len], "{name}");
    // What is left is Ethernet's padding.
    assert!(
        len == bytes.len() || len < 60 && bytes.len() == 60,
        "{name}: {len} {}",
        bytes.len()
    );
    true
}

/// How many RoCE packets of these files survive.
fn count(files: &[PathBuf]) -> usize {
    let survivors = |file: &PathBuf| {
        let name = file.display().to_string();
        common::frames(file)
            .iter()
            .filter(|bytes| survives(&name, bytes))
            .count()
    };
    files.iter().map(survivors).sum()
}

#[test]
fn golden_captures_survive() {
    let files = common::pcaps(&common::folder("golden"));
    assert_eq!(files.len(), 76);
    assert_eq!(count(&files), 1220);
}

#[test]
fn other_captures_survive() {
    assert_eq!(count(&common::pcaps(&common::folder("captures"))), 5 + 9);
}

/// The RoCE v1 frames that a NIC sent, from what they say.
#[test]
fn rocev1_frames_are_built_from_their_fields() {
    let mac = [0x7c, 0xfe, 0x90, 0x75, 0x3c, 0xd8];
    let ethernet = Ethernet {
        dst: mac,
        src: mac,
        vlan: None,
    };
    let gid = Gid::from_ip([15, 0, 0, 2].into());
    let network = Network::Grh(Grh {
        traffic_class: 2,
        flow_label: 0,
        payload_len: 0,
        next_header: 0,
        hop_limit: 64,
        sgid: gid,
        dgid: gid,
    });
    let mut write = Headers::new(Opcode::RcWriteOnly, 0x10a, Psn::new(0xa788bc));
    write.bth.ack_request = true;
    write.reth = Reth {
        va: 0x55d4_c072_6000,
        rkey: 0x47b3,
        dma_len: 5,
    };
    let mut ack = Headers::new(Opcode::RcAcknowledge, 0x109, Psn::new(0xa788c0));
    ack.aeth = Aeth {
        syndrome: Syndrome::Ack { credit: 0 },
        msn: 5,
    };
    let mut built = Vec::new();
    for (mut headers, payload) in [(write, &[0, 0, 0, 0, 1][..]), (ack, &[])] {
        headers.bth.migration = true;
        let mut bytes = vec![0xa5; 200];
        let len = frame::build(&ethernet, &network, &headers, payload, &mut bytes).unwrap();
        bytes.truncate(len);
        built.push(bytes);
    }
    let mut captured = common::frames(&common::folder("captures").join("icrc-vectors.pcap"));
    captured.retain(|bytes| bytes[12..14] == [0x89, 0x15]);
    assert_eq!(built, captured);
}

/// Captures that may not be published, in the folder that `FERROCE_EXTRA_CAPTURES` names.
#[test]
fn extra_captures_survive() {
    if let Some(folder) = env::var_os("FERROCE_EXTRA_CAPTURES") {
        let survived = count(&common::pcaps(Path::new(&folder)));
        println!("{survived} packets");
        assert!(survived > 0);
    }
}

/// The captures show what they are said to show, so that the tests above mean something.
#[test]
fn captures_have_every_opcode_of_rxe() {
    let mut seen: HashMap<Opcode, usize> = HashMap::new();
    for (_, bytes) in all_frames() {
        if let Ok(frame) = Frame::parse(&bytes) {
            *seen.entry(frame.datagram.packet.opcode()).or_default() += 1;
        }
    }
    let missing: Vec<_> = Opcode::ALL
        .iter()
        .filter(|opcode| opcode.transport() != TransportClass::Xrc && !seen.contains_key(opcode))
        .map(|opcode| opcode.name())
        .collect();
    // Not made by rxe of Linux 6.1.
    assert_eq!(missing, ["RC FLUSH", "RC ATOMIC_WRITE"]);
}

/// The bytes from the network header to the ICRC, and which of them the ICRC leaves out (a mask
/// of bits for each).
fn covered(bytes: &[u8]) -> Option<(Vec<u8>, Vec<u8>)> {
    let frame = Frame::parse(bytes).ok()?;
    let packet = frame.datagram.bytes().to_vec();
    let mut free = vec![0u8; packet.len()];
    let outer = frame.datagram.network.header_len();
    match frame.datagram.network {
        Network::Ipv4 { .. } => {
            for at in [1, 8, 10, 11, outer - 2, outer - 1] {
                free[at] = 0xff;
            }
        }
        Network::Ipv6 { .. } | Network::Grh(_) => {
            free[0] = 0x0f;
            for at in [1, 2, 3, 7] {
                free[at] = 0xff;
            }
            if frame.datagram.network.udp().is_some() {
                free[outer - 2..outer].fill(0xff);
            }
        }
    }
    free[outer + 4] = 0xff;
    Some((packet, free))
}

/// Whether a packet is taken, by a receiver that does all that this crate offers.
fn taken(packet: &[u8]) -> bool {
    ferroce_wire::Datagram::parse(packet).is_ok_and(|datagram| datagram.verify().is_ok())
}

#[test]
fn any_single_bit_flipped_is_refused() {
    let mut flips = 0;
    for (name, bytes) in all_frames().iter().step_by(9) {
        let Some((mut packet, free)) = covered(bytes) else {
            continue;
        };
        assert!(taken(&packet));
        for bit in 0..packet.len() * 8 {
            let (at, flip) = (bit / 8, 1 << (bit % 8));
            packet[at] ^= flip;
            assert_eq!(taken(&packet), free[at] & flip != 0, "{name}: bit {bit}");
            packet[at] ^= flip;
            flips += 1;
        }
    }
    assert!(flips > 100_000, "{flips}");
}

#[test]
fn any_single_byte_changed_is_refused() {
    let mut change = 0x9e37_79b9_u32;
    let mut changes = 0;
    for (name, bytes) in all_frames() {
        let Some((mut packet, free)) = covered(&bytes) else {
            continue;
        };
        for at in 0..packet.len() {
            change = change.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let xor = (change >> 24) as u8 & !free[at];
            if xor == 0 {
                continue;
            }
            packet[at] ^= xor;
            assert!(!taken(&packet), "{name}: byte {at} xor {xor:#x}");
            packet[at] ^= xor;
            changes += 1;
        }
    }
    assert!(changes > 500_000, "{changes}");
}

/// Short reads: no packet is taken when its end is missing.
#[test]
fn every_truncation_is_refused() {
    for (name, bytes) in all_frames().iter().step_by(5) {
        let Some((packet, _)) = covered(bytes) else {
            continue;
        };
        for len in 0..packet.len() {
            assert!(!taken(&packet[..len]), "{name}: {len} bytes");
        }
    }
}

/// The source ports of connected queue pairs follow from their numbers, as computed here: rxe
/// does so for QPs whose address handle names no flow label.
#[test]
fn source_ports_follow_from_queue_pairs() {
    let mut checked = 0;
    for file in common::pcaps(&common::folder("golden")) {
        let name = file.file_name().unwrap().to_string_lossy().into_owned();
        if !name.starts_with("rc-send") && !name.starts_with("tool-rc") {
            continue;
        }
        let frames = common::frames(&file);
        let frames: Vec<_> = frames
            .iter()
            .filter_map(|bytes| Frame::parse(bytes).ok())
            .collect();
        let qpns: HashMap<_, _> = frames
            .iter()
            .map(|f| (f.datagram.network.dst(), f.datagram.packet.bth().dest_qpn))
            .collect();
        for frame in &frames {
            let network = frame.datagram.network;
            let (local, remote) = (qpns[&network.src()], qpns[&network.dst()]);
            let expect = udp_port::source_port(udp_port::flow_label(local, remote));
            assert_eq!(
                network.udp().unwrap().src_port,
                expect,
                "{name}: QPs {local} {remote}"
            );
            checked += 1;
        }
    }
    assert!(checked > 50, "{checked}");
}
