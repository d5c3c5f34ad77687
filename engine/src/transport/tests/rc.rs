//! Reliable connection.

use ferroce_wire::{NakCode, Opcode, Syndrome};

use super::pair::*;
use crate::verbs::*;

const OK: WcStatus = WcStatus::Success;

#[test]
fn messages_of_all_lengths() {
    let mut pair = Pair::new(&Setup::default());
    for (i, len) in [0, 1, 2, 3, 4, 255, 256, 257, 512, 1000, 5000]
        .into_iter()
        .enumerate()
    {
        pair.b.memory.with(RECV, 8192, |bytes| bytes.fill(0));
        pair.b.recv(i as u64, 8192);
        pair.a.send(i as u64, len);
        pair.run();
        assert_eq!(pair.a.send_wcs(), [(i as u64, OK)]);
        let wc = pair.b.recv_full()[0];
        assert_eq!((wc.wr_id, wc.status, wc.byte_len), (i as u64, OK, len));
        assert_eq!((wc.qp_num, wc.opcode), (pair.b.qpn, WcOpcode::Recv));
        assert_eq!(pair.b.target(len as usize), pair.a.source(len as usize));
        assert_eq!(
            pair.b.target(len as usize + 1)[len as usize],
            0,
            "nothing behind the message"
        );
    }
}

#[test]
fn opcodes_psns_and_flags() {
    let mut pair = Pair::new(&Setup::default());
    pair.b.recv(1, 1024);
    let sges = [pair.a.sge(BASE, 300), pair.a.sge(BASE + 1000, 301)];
    let wr = SendWr {
        wr_id: 1,
        operation: Operation::SendImm(0x1234_5678),
        flags: SendFlags::SOLICITED,
        sges: &sges,
        ..SendWr::default()
    };
    pair.a.post(&wr).unwrap();
    let sent = pair.a.sent();
    let seen: Vec<_> = sent
        .iter()
        .map(|p| {
            let bth = *p.roce().bth();
            (
                p.opcode(),
                p.psn(),
                bth.ack_request,
                bth.solicited,
                bth.pad,
                p.roce().payload().len(),
            )
        })
        .collect();
    assert_eq!(
        seen,
        [
            (Opcode::RcSendFirst, 0xff_fffe, false, false, 0, 256),
            (Opcode::RcSendMiddle, 0xff_ffff, false, false, 0, 256),
            (Opcode::RcSendLastImm, 0, true, true, 3, 89),
        ]
    );
    pair.b.receive_all(&sent);
    let wc = pair.b.recv_full()[0];
    assert_eq!((wc.imm, wc.flags), (0x1234_5678, WcFlags::WITH_IMM));
    assert_eq!(pair.b.target(300), pair.a.source(300));
    assert_eq!(pair.b.target(601)[300..], pair.a.source(1301)[1000..]);
    let acks = pair.b.sent();
    assert_eq!(acks.iter().map(Packet::ack).collect::<Vec<_>>(), [(0x1f, 0, 1)]);
}

#[test]
fn inline_data_needs_no_key() {
    let mut pair = Pair::new(&Setup::default());
    pair.b.recv(1, 100);
    let sges = [
        Sge {
            addr: BASE,
            length: 20,
            lkey: 0,
        },
        Sge {
            addr: BASE + 20,
            length: 5,
            lkey: 0,
        },
    ];
    let wr = SendWr {
        wr_id: 1,
        operation: Operation::Send,
        flags: SendFlags::INLINE,
        sges: &sges,
        ..SendWr::default()
    };
    pair.a.post(&wr).unwrap();
    let source = pair.a.source(25);
    pair.a.memory.with(BASE, 25, |bytes| bytes.fill(0));
    pair.run();
    assert_eq!(pair.b.target(25), source);
    let long = [Sge {
        addr: BASE,
        length: 65,
        lkey: 0,
    }];
    assert_eq!(
        pair.a.post(&SendWr { sges: &long, ..wr }),
        Err(VerbsError::Invalid)
    );
}

#[test]
fn acknowledgements_coalesce_and_cover_all_before() {
    let mut pair = Pair::new(&Setup::default());
    for i in 0..10 {
        pair.b.recv(i, 100);
        pair.a.send(i, 10);
    }
    pair.b.receive_all(&pair.a.sent());
    let acks = pair.b.sent();
    assert_eq!(acks.len(), 1, "one for the batch");
    assert_eq!(acks[0].ack(), (0x1f, 7, 10));
    pair.a.receive_all(&acks);
    assert_eq!(pair.a.send_wcs(), (0..10).map(|i| (i, OK)).collect::<Vec<_>>());
    assert!(pair.a.sent().is_empty());
}

#[test]
fn unsignaled_sends_leave_in_silence() {
    let mut pair = Pair::new(&Setup {
        sig_all: false,
        ..Setup::default()
    });
    for i in 0..6 {
        pair.b.recv(i, 100);
        let sges = [pair.a.sge(BASE, 10)];
        let flags = if i % 3 == 2 {
            SendFlags::SIGNALED
        } else {
            SendFlags::empty()
        };
        let wr = SendWr {
            wr_id: i,
            operation: Operation::Send,
            flags,
            sges: &sges,
            ..SendWr::default()
        };
        pair.a.post(&wr).unwrap();
    }
    pair.run();
    assert_eq!(pair.a.send_wcs(), [(2, OK), (5, OK)]);
}

#[test]
fn error_naks_fail_the_send_they_name() {
    for (code, status) in [
        (NakCode::InvalidRequest, WcStatus::RemInvReqErr),
        (NakCode::RemoteAccess, WcStatus::RemAccessErr),
        (NakCode::RemoteOperational, WcStatus::RemOpErr),
    ] {
        let mut pair = Pair::new(&Setup::default());
        let peer = pair.b.addr;
        pair.a.send(1, 10);
        pair.a.send(2, 600);
        pair.a.send(3, 10);
        pair.a.sent();
        pair.a.answer(peer, 0, Syndrome::Nak(code), 1);
        assert_eq!(
            pair.a.send_wcs(),
            [(1, OK), (2, status), (3, WcStatus::WrFlushErr)]
        );
        assert_eq!(pair.a.state(), QpState::Err);
    }
}

#[test]
fn too_long_for_the_receive() {
    let mut pair = Pair::new(&Setup::default());
    pair.b.recv(1, 300);
    pair.b.recv(2, 300);
    pair.a.send(1, 1000);
    pair.a.send(2, 10);
    let sent = pair.a.sent();
    pair.b.receive_all(&sent);
    assert_eq!(pair.b.state(), QpState::Err);
    assert_eq!(
        pair.b.recv_wcs(),
        [(1, WcStatus::LocLenErr), (2, WcStatus::WrFlushErr)]
    );
    pair.run();
    assert_eq!(
        pair.a.send_wcs(),
        [(1, WcStatus::RemInvReqErr), (2, WcStatus::WrFlushErr)]
    );
}

#[test]
fn memory_that_is_gone() {
    // At the sender: what is before it completes, it fails, the rest flushes.
    let mut pair = Pair::new(&Setup::default());
    for i in 0..4 {
        pair.b.recv(i, 2000);
    }
    pair.a.send(0, 100);
    pair.a.memory.unmap(BASE + 500, 8);
    pair.a.send(1, 1000);
    pair.a.send(2, 10);
    pair.run();
    assert_eq!(
        pair.a.send_wcs(),
        [(0, OK), (1, WcStatus::LocProtErr), (2, WcStatus::WrFlushErr)]
    );
    // At the receiver.
    let mut pair = Pair::new(&Setup::default());
    pair.b.recv(1, 2000);
    pair.b.memory.unmap(RECV + 500, 8);
    pair.a.send(1, 1000);
    pair.run();
    assert_eq!(pair.b.recv_wcs(), [(1, WcStatus::LocProtErr)]);
    assert_eq!(pair.a.send_wcs(), [(1, WcStatus::RemOpErr)]);
    // Keys that do not exist count as memory that is not there.
    let mut pair = Pair::new(&Setup::default());
    pair.a.mr.lkey ^= 1;
    pair.a.send(1, 10);
    pair.run();
    assert_eq!(pair.a.send_wcs(), [(1, WcStatus::LocProtErr)]);
}

#[test]
fn memory_that_is_gone_once_it_has_arrived() {
    // The answer to the first try comes when the second has failed for want of its memory.
    let mut pair = Pair::new(&Setup::default());
    let peer = pair.b.addr;
    pair.a.send(1, 0);
    pair.a.send(2, 100);
    pair.a.send(3, 0);
    assert_eq!(pair.a.sent().len(), 3);
    pair.a.memory.unmap(BASE, 8);
    pair.a.wait(TIMEOUT);
    assert_eq!(pair.a.sent().len(), 1);
    pair.a.answer(peer, 0xff_ffff, Syndrome::Ack { credit: 31 }, 2);
    assert_eq!(pair.a.sent().len(), 1, "the one behind it");
    pair.a.answer(peer, 0, Syndrome::Ack { credit: 31 }, 3);
    assert_eq!(pair.a.send_wcs(), [(1, OK), (2, OK), (3, OK)]);
}

#[test]
fn malformed_requests_are_invalid() {
    let setup = Setup::default();
    // A LAST without a FIRST, a FIRST that is not full, an ONLY that is too long for the path MTU.
    let cases = [
        (Opcode::RcSendLast, 10),
        (Opcode::RcSendMiddle, 256),
        (Opcode::RcSendFirst, 252),
        (Opcode::RcSendOnly, 260),
    ];
    for (opcode, len) in cases {
        let mut pair = Pair::new(&setup);
        pair.b.recv(1, 2000);
        pair.a.send(1, 10);
        let mut packet = pair.a.sent().remove(0);
        packet.bytes[0] = opcode.value();
        packet.bytes[1] &= !0x30;
        packet.bytes.resize(opcode.header_len() + len + 4, 0);
        pair.b.receive(&packet);
        assert_eq!(pair.b.sent()[0].ack(), (0x61, 0xff_fffe, 0), "{}", opcode.name());
        assert_eq!(pair.b.state(), QpState::Err);
        assert_eq!(pair.b.recv_wcs(), [(1, WcStatus::WrFlushErr)]);
    }
}

#[test]
fn packets_that_are_not_for_us() {
    let mut pair = Pair::new(&Setup::default());
    pair.b.recv(1, 100);
    pair.a.send(1, 10);
    let good = pair.a.sent().remove(0);
    let stranger = "10.0.0.77".parse().unwrap();
    pair.b.receive_as(&good, stranger, &Verdict(true));
    pair.b.receive_as(&good, pair.a.addr, &Verdict(false));
    let change = |at: usize, to: u8| {
        let mut bad = good.clone();
        bad.bytes[at] = to;
        bad
    };
    let mut short = good.clone();
    short.bytes.truncate(15);
    let bad = [
        (change(0, 0x24), "drop_opcode"),
        (change(0, 0x1f), "drop_opcode"),
        (short, "drop_length"),
        (change(1, 1), "drop_version"),
        (change(2, 0x12), "drop_pkey"),
        (change(7, good.bytes[7] ^ 1), "drop_qpn"),
        (change(5, good.bytes[5] ^ 1), "drop_qpn"),
    ];
    for (packet, counter) in &bad {
        let before = pair.b.counter(counter);
        pair.b.receive(packet);
        assert_eq!(pair.b.counter(counter), before + 1, "{counter}");
    }
    assert_eq!(pair.b.counter("drop_source"), 1);
    assert_eq!(pair.b.counter("drop_icrc"), 1);
    assert!(pair.b.sent().is_empty() && pair.b.recv_wcs().is_empty());
    pair.b.receive(&good);
    assert_eq!(pair.b.recv_wcs(), [(1, OK)]);
}

#[test]
fn the_window_limits_what_is_in_flight_and_asks_for_acknowledgements() {
    let mut pair = Pair::new(&Setup {
        // A quarter of what the peer's buffer holds, to begin with.
        window: 256 * 64,
        ..Setup::default()
    });
    pair.b.recv(1, 100_000);
    pair.a.send(1, 100_000);
    let sent = pair.a.sent();
    assert!((14..=16).contains(&sent.len()), "{}", sent.len());
    let asks = sent.iter().filter(|p| p.roce().bth().ack_request).count();
    assert!((3..=6).contains(&asks), "{asks}");
    assert!(sent.last().unwrap().roce().bth().ack_request);
    pair.b.receive_all(&sent);
    pair.run();
    assert_eq!(pair.a.send_wcs(), [(1, OK)]);
    assert_eq!(pair.b.target(100_000), pair.a.source(100_000));
}

#[test]
fn credits_of_the_peer_are_kept() {
    let mut pair = Pair::new(&Setup::default());
    let peer = pair.b.addr;
    pair.a.send(0, 10);
    pair.a.sent();
    // One message done, one more receive: message 2 is granted, and message 3 may try.
    pair.a.answer(peer, 0xff_fffe, Syndrome::Ack { credit: 1 }, 1);
    for i in 1..5 {
        pair.a.send(i, 600);
    }
    let sent = pair.a.sent();
    assert_eq!(sent.len(), 4, "three of the granted message, one beyond");
    assert!(sent[3].roce().bth().ack_request);
    pair.a.answer(peer, 2, Syndrome::Ack { credit: 0 }, 2);
    assert_eq!(
        pair.a.sent().len(),
        2,
        "the first of message 3 was taken: it may go on"
    );
    pair.a.answer(peer, 4, Syndrome::Ack { credit: 31 }, 3);
    assert_eq!(pair.a.sent().len(), 6, "no limit");
}

#[test]
fn a_full_link_loses_nothing() {
    let mut pair = Pair::new(&Setup::default());
    pair.b.recv(1, 5000);
    pair.a.send(1, 5000);
    loop {
        let mut sent = Sent {
            room: 3,
            ..Sent::default()
        };
        let progress = pair.a.dev.transmit(pair.a.now, &mut sent);
        pair.b.receive_all(&sent.packets);
        if progress == crate::device::Progress::Idle {
            break;
        }
    }
    let mut none = Sent::default();
    assert_eq!(
        pair.b.dev.transmit(pair.b.now, &mut none),
        crate::device::Progress::Full
    );
    pair.run();
    assert_eq!(pair.a.send_wcs(), [(1, OK)]);
    assert_eq!(pair.a.counter("retransmits"), 0);
}

#[test]
fn draining_ends_the_message_under_way_and_tells() {
    let mut pair = Pair::new(&Setup {
        window: 256 * 4,
        ..Setup::default()
    });
    for i in 0..2 {
        pair.b.recv(i, 5000);
        pair.a.send(i, 2000);
    }
    let sent = pair.a.sent();
    assert!(sent.len() < 8);
    let attr = QpAttr {
        state: QpState::Sqd,
        sqd_async_notify: true,
        ..QpAttr::default()
    };
    pair.a
        .modify(&attr, QpAttrMask::STATE | QpAttrMask::EN_SQD_ASYNC_NOTIFY)
        .unwrap();
    assert!(pair.a.events().is_empty());
    assert!(pair.a.dev.query_qp(pair.a.qpn).unwrap().0.sq_draining);
    pair.b.receive_all(&sent);
    pair.run();
    assert_eq!(pair.a.send_wcs(), [(0, OK)]);
    assert_eq!(pair.a.events(), [AsyncEvent::SqDrained(pair.a.qpn)]);
    pair.a.go_to(QpState::Rts);
    pair.run();
    assert_eq!(pair.a.send_wcs(), [(1, OK)]);
}

#[test]
fn the_first_packet_in_rtr_raises_an_event() {
    let setup = Setup::default();
    let mut pair = Pair::new(&setup);
    pair.b.go_to(QpState::Reset);
    let (peer, addr) = (pair.a.qpn, pair.a.addr);
    pair.b.ready_to_receive(peer, addr, &setup);
    for i in 0..2 {
        pair.b.recv(i, 10);
        pair.a.send(i, 10);
    }
    pair.run();
    assert_eq!(pair.b.events(), [AsyncEvent::CommEstablished(pair.b.qpn)]);
    assert_eq!(pair.a.send_wcs(), [(0, OK), (1, OK)], "RTR answers");
}

#[test]
fn shared_receives_and_their_limit() {
    let mut pair = Pair::new(&Setup {
        srq: Some(2),
        ..Setup::default()
    });
    for i in 0..3 {
        pair.b.recv(i, 1000);
    }
    for i in 0..3 {
        pair.a.send(i, 600);
        pair.run();
    }
    let qpn = pair.b.qpn;
    let srq = pair.b.srq().unwrap();
    assert_eq!(pair.b.events(), [AsyncEvent::SrqLimit(srq.0)]);
    assert_eq!(pair.b.dev.query_srq(srq).unwrap().limit, 0);
    assert_eq!(pair.b.recv_wcs(), [(0, OK), (1, OK), (2, OK)]);
    // A message under way is flushed, what waits in the SRQ is not.
    pair.b.recv(3, 1000);
    pair.b.recv(4, 1000);
    pair.a.send(3, 600);
    pair.b.receive(&pair.a.sent()[0]);
    pair.b.go_to(QpState::Err);
    assert_eq!(pair.b.recv_wcs(), [(3, WcStatus::WrFlushErr)]);
    assert_eq!(pair.b.events(), [AsyncEvent::LastWqeReached(qpn)]);
}

#[test]
fn acknowledgements_outlive_their_qp() {
    let mut pair = Pair::new(&Setup::default());
    pair.b.recv(1, 10);
    pair.a.send(1, 10);
    pair.b.receive_all(&pair.a.sent());
    pair.b.dev.destroy_qp(pair.b.now, pair.b.qpn).unwrap();
    pair.run();
    assert_eq!(pair.a.send_wcs(), [(1, OK)]);
}

#[test]
fn reset_begins_anew() {
    let setup = Setup::default();
    let mut pair = Pair::new(&setup);
    pair.b.recv(1, 10);
    pair.a.send(1, 10);
    pair.a.send(2, 10);
    pair.b.receive(&pair.a.sent()[0]);
    pair.a.go_to(QpState::Reset);
    pair.b.go_to(QpState::Reset);
    assert!(pair.a.send_wcs().is_empty() && pair.b.recv_wcs().is_empty());
    let (a, b) = ((pair.a.qpn, pair.a.addr), (pair.b.qpn, pair.b.addr));
    let again = Setup { psn: 5, ..setup };
    pair.a.ready_to_receive(b.0, b.1, &again);
    pair.b.ready_to_receive(a.0, a.1, &again);
    pair.a.ready_to_send(&again);
    pair.b.recv(3, 10);
    pair.a.send(3, 10);
    pair.run();
    assert_eq!(pair.a.send_wcs(), [(3, OK)]);
    assert_eq!(pair.b.recv_wcs(), [(3, OK)]);
}

#[test]
fn an_acknowledgement_waits_for_company_but_not_long() {
    let mut pair = Pair::new(&Setup::default());
    pair.b.now = pair.b.now + std::time::Duration::from_secs(1);
    for i in 0..8 {
        pair.b.recv(i, 100);
        pair.a.recv(i, 100);
    }
    let acks_of = |pair: &mut Pair, wr_id| {
        pair.a.send(wr_id, 64);
        let sent = pair.a.sent();
        pair.b.receive_all(&sent);
        pair.b.sent_unless_alone()
    };
    // No company is to be expected from one that never sends.
    assert_eq!(acks_of(&mut pair, 0).len(), 1);
    pair.b.send(0, 64);
    pair.run();
    // A reply that is posted meanwhile takes it along, in front.
    assert!(acks_of(&mut pair, 1).is_empty());
    let until = pair.b.dev.next_deadline().unwrap();
    assert!(until.since(pair.b.now) <= std::time::Duration::from_millis(1));
    pair.b.send(1, 64);
    let sent = pair.b.sent_unless_alone();
    assert_eq!(sent[0].opcode(), Opcode::RcSendOnly);
    assert_eq!(sent[1].ack(), (0x1f, sent[1].psn(), 2));
    pair.a.receive_all(&sent);
    pair.run();
    // Nothing comes up: it leaves in a round soon after, one for all that came until then; the next does not wait.
    for i in 2..4 {
        assert!(acks_of(&mut pair, i).is_empty());
    }
    pair.b.now = pair.b.now + std::time::Duration::from_micros(1);
    assert!(pair.b.sent_unless_alone().is_empty());
    pair.b.now = pair.b.now + std::time::Duration::from_micros(4);
    let sent = pair.b.sent_unless_alone();
    assert_eq!(sent.len(), 1);
    assert_eq!(sent[0].ack().2, 4);
    assert!(pair.b.sent().is_empty());
    pair.b.now = pair.b.now + std::time::Duration::from_micros(10);
    assert_eq!(acks_of(&mut pair, 4).len(), 1);
}

#[test]
fn acknowledgements_of_a_stream_stand_for_many() {
    let mut pair = Pair::new(&Setup::default());
    let micros = std::time::Duration::from_micros;
    pair.b.now = pair.b.now + micros(1_000_000);
    for i in 0..40 {
        pair.b.recv(i, 100);
    }
    let acks_after = |pair: &mut Pair, time: u64| {
        pair.b.now = pair.b.now + micros(time);
        pair.a.send(0, 64);
        let sent = pair.a.sent();
        pair.b.receive_all(&sent);
        pair.b.sent_unless_alone()
    };
    // Who waits for each acknowledgement gets it at once.
    assert_eq!(acks_after(&mut pair, 0).len(), 1);
    assert_eq!(acks_after(&mut pair, 10).len(), 1);
    // Who does not, gets one for what comes before it pauses for some microseconds, ...
    for time in [2, 1, 2] {
        assert!(acks_after(&mut pair, time).is_empty());
    }
    pair.b.now = pair.b.now + micros(3);
    assert!(pair.b.sent_unless_alone().is_empty());
    pair.b.now = pair.b.now + micros(1);
    let sent = pair.b.sent_unless_alone();
    assert_eq!((sent.len(), sent[0].ack().2), (1, 5));
    assert_eq!(acks_after(&mut pair, 10).len(), 1);
    // ... or one now and then if it does not pause.
    let sent: Vec<_> = (0..20).flat_map(|_| acks_after(&mut pair, 3)).collect();
    assert_eq!(sent.len(), 1);
    assert_eq!(sent[0].ack().2, 6 + 12);
}
