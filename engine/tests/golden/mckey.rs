//! The capture of `mckey`: three datagrams to a group, each with what its sender had in memory and, as immediate data,
//! the number of its QP.

use ferroce_engine::verbs::*;

use super::capture::{Packet, read};
use super::node::{Node, Peer, Role};
use super::script::{self, Options};

pub const CAPTURE: &str = "ud-multicast-v4-mckey";
const LEN: usize = 100;
const GRH_LEN: usize = 40;

/// What librdmacm sets up for a group.
fn options() -> Options {
    let (options, _) = script::parse("-t ud -P 0");
    Options {
        qkey: 0x0123_4567,
        ..options
    }
}

fn imm(packet: &Packet) -> u32 {
    u32::from_ne_bytes(packet.headers.immdt.data)
}

#[test]
fn a_member_receives_them() {
    let captured = read(CAPTURE);
    let mut node = Node::new(Role::Server, &options(), Peer::of(&captured[0], true, 0));
    node.device.attach_multicast(node.qpn, captured[0].dest).unwrap();
    for captured in &captured {
        let packet = &captured.packet;
        node.fill(&[]);
        node.post_receive(7, GRH_LEN + LEN);
        node.receive(captured, packet);
        let completions = node.completions();
        assert_eq!(completions.len(), 1);
        let wc = completions[0];
        assert_eq!(
            (wc.status, wc.opcode, wc.byte_len as usize),
            (WcStatus::Success, WcOpcode::Recv, GRH_LEN + LEN)
        );
        assert_eq!(wc.flags, WcFlags::GRH | WcFlags::WITH_IMM);
        assert_eq!((wc.imm, wc.src_qp), (imm(packet), packet.headers.deth.src_qpn));
        assert_eq!(node.bytes(GRH_LEN + LEN)[GRH_LEN..], packet.payload);
    }
    assert!(node.transmit().is_empty());
}

#[test]
fn ours_sends_the_same() {
    let captured = read(CAPTURE);
    let group = captured[0].packet.headers.bth.dest_qpn;
    let mut node = Node::new(Role::Client, &options(), Peer::of(&captured[0], false, group));
    for captured in &captured {
        let mut expected = captured.packet.clone();
        node.fill(&expected.payload);
        let operation = Operation::SendImm(imm(&expected));
        node.post_send(3, operation, SendFlags::SIGNALED, expected.payload.len(), true);
        expected.headers.deth.src_qpn = node.qpn;
        assert_eq!(node.transmit(), [expected]);
        let statuses: Vec<WcStatus> = node.completions().iter().map(|wc| wc.status).collect();
        assert_eq!(statuses, [WcStatus::Success]);
    }
}
