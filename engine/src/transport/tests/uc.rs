//! Unreliable connection.

use ferroce_wire::Opcode;

use super::pair::*;
use crate::verbs::*;

const OK: WcStatus = WcStatus::Success;

fn pair() -> Pair {
    Pair::new(&Setup {
        qp_type: QpType::Uc,
        ..Setup::default()
    })
}

#[test]
fn sends_complete_when_they_are_sent() {
    let mut pair = pair();
    pair.b.recv(1, 1000);
    pair.b.recv(2, 1000);
    pair.a.send(1, 600);
    pair.a.send(2, 0);
    let sent = pair.a.sent();
    assert_eq!(pair.a.send_wcs(), [(1, OK), (2, OK)]);
    let seen: Vec<_> = sent
        .iter()
        .map(|p| (p.opcode(), p.psn(), p.roce().bth().ack_request))
        .collect();
    assert_eq!(
        seen,
        [
            (Opcode::UcSendFirst, 0xff_fffe, false),
            (Opcode::UcSendMiddle, 0xff_ffff, false),
            (Opcode::UcSendLast, 0, false),
            (Opcode::UcSendOnly, 1, false),
        ]
    );
    pair.b.receive_all(&sent);
    assert_eq!(pair.b.recv_wcs(), [(1, OK), (2, OK)]);
    assert_eq!(pair.b.target(600), pair.a.source(600));
    assert!(pair.b.sent().is_empty(), "no answers");
    assert_eq!(pair.a.dev.next_deadline(), None);
}

#[test]
fn a_loss_drops_the_message_and_its_receive_serves_the_next() {
    for lost in 0..3 {
        let mut pair = pair();
        pair.b.recv(1, 1000);
        pair.a.send(1, 600);
        pair.a.send(2, 500);
        let mut sent = pair.a.sent();
        sent.remove(lost);
        pair.b.receive_all(&sent);
        let wc = pair.b.recv_full();
        assert_eq!(wc.len(), 1);
        assert_eq!((wc[0].wr_id, wc[0].byte_len), (1, 500));
        assert_eq!(pair.b.target(500), pair.a.source(500));
    }
}

#[test]
fn repeated_and_late_packets_are_dropped() {
    let mut pair = pair();
    for i in 0..4 {
        pair.b.recv(i, 1000);
        pair.a.send(i, 300);
    }
    let sent = pair.a.sent();
    // FIRST, FIRST again, LAST, the whole message again; then message 2 before message 1.
    for i in [0, 0, 1, 0, 1, 4, 5, 2, 3, 6, 7] {
        pair.b.receive(&sent[i]);
    }
    assert_eq!(pair.b.recv_wcs(), [(0, OK), (1, OK), (2, OK)]);
    assert_eq!(pair.b.counter("duplicates"), 5);
}

#[test]
fn what_lies_far_behind_is_new() {
    let mut pair = pair();
    pair.b.recv(1, 100);
    pair.a.send(1, 10);
    let mut packet = pair.a.sent().remove(0);
    // As if 2^23 + 2^20 packets had been missed.
    let psn = 0xff_fffe_u32.wrapping_add((1 << 23) + (1 << 20)) & 0xff_ffff;
    packet.bytes[9..12].copy_from_slice(&psn.to_be_bytes()[1..]);
    pair.b.receive(&packet);
    assert_eq!(pair.b.recv_wcs(), [(1, OK)]);
}

#[test]
fn without_a_receive_it_is_dropped() {
    let mut pair = pair();
    pair.a.send(1, 600);
    pair.run();
    pair.b.recv(1, 100);
    pair.a.send(2, 100);
    pair.run();
    assert_eq!(pair.b.recv_wcs(), [(1, OK)]);
    assert_eq!(pair.b.counter("drop_no_receive"), 1);
    assert_eq!(pair.b.state(), QpState::Rts);
}

#[test]
fn local_errors() {
    let mut pair = pair();
    pair.a.memory.unmap(BASE, 8);
    pair.a.send(1, 10);
    pair.a.send(2, 10);
    pair.run();
    assert_eq!(
        pair.a.send_wcs(),
        [(1, WcStatus::LocProtErr), (2, WcStatus::WrFlushErr)]
    );
    assert_eq!(pair.a.state(), QpState::Sqe, "the receive queue goes on");
    pair.a.send(3, 10);
    assert_eq!(pair.a.send_wcs(), [(3, WcStatus::WrFlushErr)]);
    pair.a.recv(7, 100);
    pair.b.send(1, 10);
    pair.run();
    assert_eq!(pair.a.recv_wcs(), [(7, OK)]);
    pair.a.memory.map_all();
    pair.a.go_to(QpState::Rts);
    pair.b.recv(8, 100);
    pair.a.send(4, 10);
    pair.run();
    assert_eq!(pair.b.recv_wcs(), [(8, OK)]);
    // A receive into memory that is gone.
    pair.b.memory.unmap(RECV, 8);
    pair.b.recv(9, 100);
    pair.b.recv(10, 100);
    pair.a.send(5, 10);
    pair.run();
    assert_eq!(
        pair.b.recv_wcs(),
        [(9, WcStatus::LocProtErr), (10, WcStatus::WrFlushErr)]
    );
}
