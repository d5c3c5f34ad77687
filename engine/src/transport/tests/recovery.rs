//! Reliable connection: losses, repetitions, refusals and timers.

use std::time::Duration;

use ferroce_wire::{NakCode, Opcode, Syndrome};

use super::pair::*;
use crate::verbs::*;

const OK: WcStatus = WcStatus::Success;

#[test]
fn an_acknowledgement_may_cover_part_of_a_message() {
    let mut pair = Pair::new(&Setup::default());
    let peer = pair.b.addr;
    pair.a.send(1, 1000);
    assert_eq!(pair.a.sent().len(), 4);
    pair.a.answer(peer, 0xff_ffff, Syndrome::Ack { credit: 31 }, 0);
    assert!(pair.a.send_wcs().is_empty());
    pair.a.wait(TIMEOUT);
    let again: Vec<_> = pair.a.sent().iter().map(|p| (p.opcode(), p.psn())).collect();
    assert_eq!(again, [(Opcode::RcSendMiddle, 0), (Opcode::RcSendLast, 1)]);
    pair.a.answer(peer, 1, Syndrome::Ack { credit: 31 }, 1);
    assert_eq!(pair.a.send_wcs(), [(1, OK)]);
}

#[test]
fn one_nak_per_gap_and_back_to_it() {
    let mut pair = Pair::new(&Setup::default());
    pair.b.recv(1, 2000);
    pair.b.recv(2, 2000);
    pair.a.send(1, 1000);
    pair.a.send(2, 100);
    let sent = pair.a.sent();
    assert_eq!(sent.len(), 5);
    pair.b.receive(&sent[0]);
    pair.b.receive(&sent[2]);
    let naks = pair.b.sent();
    assert_eq!(
        naks.iter().map(Packet::ack).collect::<Vec<_>>(),
        [(0x60, 0xff_ffff, 0)]
    );
    pair.b.receive(&sent[3]);
    pair.b.receive(&sent[4]);
    assert!(pair.b.sent().is_empty(), "once until the expected PSN arrives");
    pair.a.receive_all(&naks);
    let again = pair.a.sent();
    assert_eq!(again[..], sent[1..]);
    pair.a.receive_all(&naks);
    assert!(pair.a.sent().is_empty(), "a copy of the NAK changes nothing");
    pair.b.receive_all(&again);
    pair.run();
    assert_eq!(pair.a.send_wcs(), [(1, OK), (2, OK)]);
    assert_eq!(pair.b.recv_wcs(), [(1, OK), (2, OK)]);
    assert_eq!(pair.b.target(100), pair.a.source(100));
    assert_eq!(pair.a.counter("retransmits"), 4);
    assert_eq!(pair.a.counter("timeouts"), 0);
}

#[test]
fn reordering_within_a_batch() {
    let mut pair = Pair::new(&Setup::default());
    for i in 0..3 {
        pair.b.recv(i, 100);
        pair.a.send(i, 10);
    }
    let sent = pair.a.sent();
    // The gap closes before the NAK leaves, but what came early was dropped.
    for i in [1, 0] {
        pair.b.receive(&sent[i]);
    }
    let naks = pair.b.sent();
    assert_eq!(
        naks.iter().map(Packet::ack).collect::<Vec<_>>(),
        [(0x60, 0xff_ffff, 1)]
    );
    pair.a.receive_all(&naks);
    assert_eq!(pair.a.send_wcs(), [(0, OK)]);
    assert_eq!(pair.a.sent(), sent[1..]);
    // It closes wholly: an acknowledgement is what is left.
    pair.b.receive(&sent[2]);
    assert!(pair.b.sent().is_empty());
    for i in [1, 2] {
        pair.b.receive(&sent[i]);
    }
    assert_eq!(pair.b.sent()[0].ack(), (0x1f, 0, 3));
}

#[test]
fn duplicates_are_acknowledged_and_not_delivered() {
    let mut pair = Pair::new(&Setup::default());
    pair.b.recv(1, 1000);
    pair.b.recv(2, 1000);
    pair.a.send(1, 600);
    let sent = pair.a.sent();
    pair.b.receive_all(&sent);
    let lost = pair.b.sent();
    assert_eq!(lost.len(), 1);
    pair.a.wait(TIMEOUT);
    let again = pair.a.sent();
    assert_eq!(again, sent);
    pair.b.receive_all(&again);
    let acks = pair.b.sent();
    assert_eq!(acks.iter().map(Packet::ack).collect::<Vec<_>>(), [(0x1f, 0, 1)]);
    pair.a.receive_all(&acks);
    assert_eq!(pair.a.send_wcs(), [(1, OK)]);
    assert_eq!(pair.b.recv_wcs(), [(1, OK)]);
    assert_eq!(pair.b.counter("duplicates"), 3);
    assert_eq!(pair.a.counter("timeouts"), 1);
}

#[test]
fn old_and_unsent_answers_are_ignored() {
    let mut pair = Pair::new(&Setup::default());
    let peer = pair.b.addr;
    for i in 0..3 {
        pair.a.send(i, 10);
    }
    assert_eq!(pair.a.sent().len(), 3);
    for psn in [1, 2, 0x80_0000, 0xff_fffd, 0xff_0000] {
        pair.a.answer(peer, psn, Syndrome::Ack { credit: 31 }, 9);
        pair.a.answer(peer, psn, Syndrome::Nak(NakCode::PsnSequence), 9);
        pair.a.answer(peer, psn, Syndrome::Nak(NakCode::RemoteAccess), 9);
        pair.a.answer(peer, psn, Syndrome::RnrNak { timer: 1 }, 9);
    }
    assert_eq!(pair.a.counter("drop_psn"), 20);
    assert!(pair.a.send_wcs().is_empty() && pair.a.sent().is_empty());
    assert_eq!(pair.a.state(), QpState::Rts);
    pair.a.answer(peer, 0, Syndrome::Ack { credit: 31 }, 3);
    assert_eq!(pair.a.send_wcs().len(), 3);
    pair.a.answer(peer, 0, Syndrome::Ack { credit: 31 }, 3);
    assert_eq!(pair.a.counter("drop_psn"), 21);
}

#[test]
fn rnr_waits_and_resends_from_the_refused_psn() {
    let mut pair = Pair::new(&Setup::default());
    pair.b.recv(1, 1000);
    pair.a.send(1, 100);
    pair.a.send(2, 600);
    let sent = pair.a.sent();
    pair.b.receive_all(&sent);
    let naks = pair.b.sent();
    // Timer code 12: 640 us. The packets behind the refused one get no NAK of their own.
    assert_eq!(
        naks.iter().map(Packet::ack).collect::<Vec<_>>(),
        [(0x2c, 0xff_ffff, 1)]
    );
    pair.a.receive_all(&naks);
    pair.a.receive_all(&naks);
    assert_eq!(
        pair.a.send_wcs(),
        [(1, OK)],
        "what is before the refused PSN is acknowledged"
    );
    assert!(pair.a.sent().is_empty());
    // Neither a sequence NAK of the same PSN nor an early timer cuts the wait short.
    let peer = pair.b.addr;
    pair.a
        .answer(peer, 0xff_ffff, Syndrome::Nak(NakCode::PsnSequence), 1);
    pair.a.wait(Duration::from_micros(639));
    assert!(pair.a.sent().is_empty());
    pair.b.recv(2, 1000);
    pair.a.wait(Duration::from_micros(1));
    let again = pair.a.sent();
    assert_eq!(again[..], sent[1..]);
    pair.b.receive_all(&again);
    pair.run();
    assert_eq!(pair.a.send_wcs(), [(2, OK)]);
    assert_eq!(pair.b.recv_wcs(), [(1, OK), (2, OK)]);
    assert_eq!(pair.b.target(600), pair.a.source(600));
}

#[test]
fn rnr_retries_run_out() {
    let mut pair = Pair::new(&Setup {
        rnr_retry: 2,
        ..Setup::default()
    });
    pair.a.send(1, 10);
    pair.a.send(2, 10);
    pair.a.recv(7, 10);
    let mut tries = 0;
    while pair.a.state() == QpState::Rts {
        pair.run();
        pair.a.wait(Duration::from_micros(640));
        tries += 1;
        assert!(tries < 10);
    }
    assert_eq!(pair.b.counter("tx_rnr_nak"), 3);
    assert_eq!(
        pair.a.send_wcs(),
        [(1, WcStatus::RnrRetryExcErr), (2, WcStatus::WrFlushErr)]
    );
    assert_eq!(pair.a.recv_wcs(), [(7, WcStatus::WrFlushErr)]);
    assert_eq!(pair.a.state(), QpState::Err);
}

#[test]
fn rnr_retry_seven_is_for_ever() {
    let mut pair = Pair::new(&Setup {
        rnr_retry: 7,
        ..Setup::default()
    });
    pair.a.send(1, 10);
    for _ in 0..100 {
        pair.run();
        pair.a.wait(Duration::from_micros(640));
    }
    pair.b.recv(1, 10);
    pair.run();
    assert_eq!(pair.a.send_wcs(), [(1, OK)]);
}

#[test]
fn retries_run_out_after_total_loss() {
    let mut pair = Pair::new(&Setup {
        retry_cnt: 2,
        ..Setup::default()
    });
    for i in 0..3 {
        pair.a.send(i, 600);
    }
    pair.a.recv(9, 10);
    assert_eq!(pair.a.sent().len(), 9);
    for timeouts in [1, 2] {
        pair.a.wait(TIMEOUT * timeouts);
        assert!(pair.a.send_wcs().is_empty());
        assert_eq!(pair.a.sent().len(), 9);
    }
    pair.a.wait(TIMEOUT * 2);
    assert!(pair.a.sent().is_empty() && pair.a.send_wcs().is_empty());
    pair.a.wait(TIMEOUT * 2);
    assert!(pair.a.sent().is_empty());
    assert_eq!(
        pair.a.send_wcs(),
        [
            (0, WcStatus::RetryExcErr),
            (1, WcStatus::WrFlushErr),
            (2, WcStatus::WrFlushErr)
        ]
    );
    assert_eq!(pair.a.recv_wcs(), [(9, WcStatus::WrFlushErr)]);
    assert_eq!(pair.a.dev.next_deadline(), None);
    pair.a.send(5, 1);
    assert_eq!(pair.a.send_wcs(), [(5, WcStatus::WrFlushErr)]);
}

#[test]
fn progress_gives_new_retries() {
    let mut pair = Pair::new(&Setup {
        retry_cnt: 1,
        ..Setup::default()
    });
    let peer = pair.b.addr;
    pair.a.send(1, 256 * 5);
    pair.a.sent();
    for psn in 0..5 {
        pair.a.wait(TIMEOUT);
        assert!(!pair.a.sent().is_empty());
        pair.a
            .answer(peer, 0xff_fffe + psn, Syndrome::Ack { credit: 31 }, 0);
    }
    assert_eq!(pair.a.send_wcs(), [(1, OK)]);
}

#[test]
fn answers_to_duplicates_show_that_the_peer_lives() {
    let mut pair = Pair::new(&Setup {
        retry_cnt: 1,
        ..Setup::default()
    });
    let peer = pair.b.addr;
    pair.a.send(1, 256 * 10);
    assert_eq!(pair.a.sent().len(), 10);
    // Slow: the timer runs out, everything is sent twice.
    pair.a.wait(TIMEOUT);
    assert_eq!(pair.a.sent().len(), 10);
    pair.a.answer(peer, 2, Syndrome::Ack { credit: 31 }, 0);
    // It answers each duplicate by what it has, for longer than all retries would last.
    for _ in 0..10 {
        pair.a.wait(TIMEOUT * 9 / 10);
        assert!(pair.a.sent().is_empty());
        pair.a.answer(peer, 1, Syndrome::Ack { credit: 31 }, 0);
    }
    assert_eq!(pair.a.counter("timeouts"), 1);
    // When that ends, what is missing is sent again.
    pair.a.wait(TIMEOUT);
    assert_eq!(pair.a.sent().len(), 5);
    pair.a.answer(peer, 7, Syndrome::Ack { credit: 31 }, 1);
    assert_eq!(pair.a.send_wcs(), [(1, OK)]);
}
