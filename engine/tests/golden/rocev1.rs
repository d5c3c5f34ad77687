//! The RoCE v1 frames of `tests/captures`: a NIC's first WRITE to itself, of five bytes, and the ACK of its fifth. Our
//! responder answers such WRITEs with the very ACK, and our requester sends the very WRITE and completes by that ACK,
//! byte for byte but for what the NIC says and we do not.

use ferroce_engine::link::Path;
use ferroce_engine::verbs::*;
use ferroce_wire::{Aeth, Gid, Grh, Network, Opcode, Psn, Reth, Syndrome, frame};

use super::capture::{Captured, Packet, read};
use super::node::{BUF, Node, Peer, Role};
use super::script::{self, Options};

/// WRITEs that the ACK is for.
const WRITES: u32 = 5;

/// The WRITE and the ACK.
fn captured() -> [Captured; 2] {
    let mut packets = read("../captures/icrc-vectors");
    packets.retain(|captured| matches!(captured.network, Network::Grh(_)));
    packets.try_into().unwrap_or_else(|_| panic!("there are two"))
}

/// A path like the NIC's, for who gets `captured` or, as its sender, sends it.
fn peer(captured: &Captured, sender: bool, qpn: u32) -> Peer {
    let peer = Peer::of(captured, sender, qpn);
    let path = Path {
        traffic_class: captured.network.traffic_class(),
        ..peer.path
    };
    Peer { path, ..peer }
}

fn options(client_psn: u32) -> Options {
    let (options, _) = script::parse("-P 0");
    Options {
        client_psn,
        ..options
    }
}

/// The frame that a link makes of what was sent along a path.
fn frame_of(like: &Captured, path: &Path, packet: &Packet) -> Vec<u8> {
    let network = Network::Grh(Grh {
        traffic_class: path.traffic_class,
        flow_label: path.flow_label,
        payload_len: 0,
        next_header: 0,
        hop_limit: path.hop_limit_on_wire(),
        sgid: Gid::from_ip(path.source),
        dgid: Gid::from_ip(path.dest),
    });
    let mut bytes = vec![0; 200];
    let len = frame::build(
        &like.ethernet,
        &network,
        &packet.headers,
        &packet.payload,
        &mut bytes,
    )
    .unwrap();
    bytes.truncate(len);
    bytes
}

#[test]
fn ours_answers_the_write_as_the_nic_does() {
    let [write, ack] = captured();
    let headers = write.packet.headers;
    let first = headers.bth.psn.value();
    let peer = peer(&write, true, ack.packet.headers.bth.dest_qpn);
    let mut node = Node::new(Role::Server, &options(first), peer);
    node.fill(&[]);
    let mut sent = Vec::new();
    for n in 0..WRITES {
        let mut packet = write.packet.clone();
        packet.headers.bth.psn = Psn::new(first + n);
        packet.headers.bth.dest_qpn = node.qpn;
        packet.headers.reth = Reth {
            va: BUF,
            rkey: node.key.rkey,
            ..headers.reth
        };
        node.receive(&write, &packet);
        sent = node.transmit();
    }
    assert_eq!(node.bytes(5), write.packet.payload);
    assert!(node.untouched_behind(5));

    let [ours] = &mut sent[..] else {
        panic!("one ACK: {sent:?}");
    };
    // We send no credits, and no migration state.
    assert_eq!(ours.headers.aeth.syndrome, Syndrome::Ack { credit: 31 });
    assert!(!ours.headers.bth.migration);
    ours.headers.aeth = Aeth {
        syndrome: Syndrome::Ack { credit: 0 },
        ..ours.headers.aeth
    };
    ours.headers.bth.migration = true;
    let expected = frame_of(&ack, &peer.path, &ack.packet);
    assert_eq!(frame_of(&ack, &peer.path, ours), expected);
    assert_eq!(expected[..], ack.bytes[..expected.len()]);
}

#[test]
fn ours_writes_as_the_nic_does_and_takes_its_ack() {
    let [write, ack] = captured();
    let headers = write.packet.headers;
    let peer = peer(&write, false, headers.bth.dest_qpn);
    let mut node = Node::new(Role::Client, &options(headers.bth.psn.value()), peer);
    node.fill(&write.packet.payload);
    let operation = Operation::Write {
        addr: headers.reth.va,
        rkey: headers.reth.rkey,
    };
    for wr_id in 0..WRITES {
        node.post_send(wr_id.into(), operation, SendFlags::SIGNALED, 5, false);
    }
    let mut sent = node.transmit();
    assert_eq!(sent.len(), WRITES as usize);
    let ours = &mut sent[0];
    assert_eq!(ours.headers.bth.opcode, Opcode::RcWriteOnly);
    ours.headers.bth.migration = true;
    assert_eq!(frame_of(&write, &peer.path, ours), write.bytes);

    let mut answer = ack.packet.clone();
    answer.headers.bth.dest_qpn = node.qpn;
    node.receive(&ack, &answer);
    let completions = node.completions();
    assert_eq!(completions.len(), WRITES as usize);
    assert!(completions.iter().all(|wc| wc.status == WcStatus::Success));
}
