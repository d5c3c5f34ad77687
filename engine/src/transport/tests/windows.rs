//! Memory windows and invalidation: local work in the order of the send queue, and keys that come and go.

use ferroce_wire::{Opcode, Syndrome};

use super::pair::*;
use crate::device::MwId;
use crate::verbs::*;

const OK: WcStatus = WcStatus::Success;
const FLUSH: WcStatus = WcStatus::WrFlushErr;

fn window(side: &mut Side, mw_type: MwType) -> (MwId, u32) {
    side.dev.alloc_mw(side.pd, mw_type).unwrap()
}

/// Of 4096 bytes from RECV on, for WRITE and READ.
fn bind(side: &Side, window: MwId, rkey: u32) -> Operation {
    Operation::BindMw(MwBind {
        window,
        rkey,
        lkey: side.mr.lkey,
        addr: RECV,
        len: 4096,
        access: Access::REMOTE_WRITE | Access::REMOTE_READ,
    })
}

fn post(side: &mut Side, wr_id: u64, operation: Operation, flags: SendFlags) {
    let sges = match operation.is_local() {
        true => vec![],
        false => vec![side.sge(BASE, 600)],
    };
    let wr = SendWr {
        wr_id,
        operation,
        flags,
        sges: &sges,
        ..SendWr::default()
    };
    side.post(&wr).unwrap();
}

const NO_FLAGS: SendFlags = SendFlags::empty();

fn write(rkey: u32) -> Operation {
    Operation::Write { addr: RECV, rkey }
}

/// A pair whose side b has a window of type 2 that is bound, with its key.
fn bound() -> (Pair, MwId, u32) {
    let mut pair = Pair::new(&Setup::default());
    let (window, key) = window(&mut pair.b, MwType::Type2);
    let operation = bind(&pair.b, window, key + 1);
    post(&mut pair.b, 90, operation, NO_FLAGS);
    pair.run();
    assert_eq!(pair.b.send_wcs(), [(90, OK)]);
    let key = key & !0xff | (key + 1) & 0xff;
    (pair, window, key)
}

#[test]
fn binds_open_windows_to_peers() {
    for (qp_type, mw_type) in [
        (QpType::Rc, MwType::Type1),
        (QpType::Rc, MwType::Type2),
        (QpType::Uc, MwType::Type1),
        (QpType::Uc, MwType::Type2),
    ] {
        let setup = Setup {
            qp_type,
            ..Setup::default()
        };
        let mut pair = Pair::new(&setup);
        let (window, key) = window(&mut pair.b, mw_type);
        let operation = bind(&pair.b, window, 5);
        post(&mut pair.b, 1, operation, NO_FLAGS);
        assert!(pair.b.sent().is_empty(), "no packet is sent");
        let wc = pair.b.send_full()[0];
        assert_eq!(
            (wc.wr_id, wc.status, wc.opcode, wc.byte_len),
            (1, OK, WcOpcode::BindMw, 0)
        );
        post(&mut pair.a, 2, write(key & !0xff | 5), NO_FLAGS);
        pair.run();
        assert_eq!(pair.a.send_wcs(), [(2, OK)]);
        assert_eq!(pair.b.target(600), pair.a.source(600));
    }
}

/// Two SENDs of `b`, 1 and 3, and between them the bind 2 of a window with this key; nothing has left yet.
fn bind_between_sends() -> (Pair, u32) {
    let mut pair = Pair::new(&Setup::default());
    let (window, key) = window(&mut pair.b, MwType::Type2);
    pair.a.recv(1, 10);
    pair.a.recv(2, 10);
    pair.b.send(1, 10);
    let operation = bind(&pair.b, window, key);
    post(&mut pair.b, 2, operation, NO_FLAGS);
    pair.b.send(3, 10);
    (pair, key)
}

#[test]
fn local_work_completes_in_order_and_later_requests_see_it() {
    let (mut pair, key) = bind_between_sends();
    let sent = pair.b.sent();
    assert_eq!(sent.len(), 2);
    assert!(pair.b.send_wcs().is_empty(), "not before the SEND before it");
    // The peer, told by the second SEND, may use the key, though nothing is acknowledged.
    post(&mut pair.a, 7, write(key), NO_FLAGS);
    for packet in pair.a.sent() {
        pair.b.receive(&packet);
    }
    for packet in pair.b.sent() {
        pair.a.receive(&packet);
    }
    assert_eq!(pair.a.send_wcs(), [(7, OK)]);
    pair.a.receive_all(&sent);
    pair.run();
    assert_eq!(pair.b.send_wcs(), [(1, OK), (2, OK), (3, OK)]);
}

#[test]
fn local_work_is_done_once_however_often_packets_are() {
    let (mut pair, _) = bind_between_sends();
    let first = pair.b.sent();
    // Both are lost. A second bind of a bound window would fail.
    pair.b.wait(TIMEOUT);
    assert_eq!(pair.b.sent(), first);
    pair.a.receive(&first[0]);
    // The ACK of the first: the bind is complete, and behind it the other is sent again.
    let ack = pair.a.sent();
    pair.b.receive_all(&ack);
    assert_eq!(pair.b.send_wcs(), [(1, OK), (2, OK)]);
    pair.b.wait(TIMEOUT * 4);
    assert_eq!(pair.b.sent()[..], first[1..]);
    pair.a.receive(&first[1]);
    pair.run();
    assert_eq!(pair.b.send_wcs(), [(3, OK)]);
}

#[test]
fn an_ack_of_what_went_back_passes_local_work_that_is_to_be_done() {
    let mut pair = Pair::new(&Setup::default());
    let (window, key) = window(&mut pair.b, MwType::Type2);
    pair.a.recv(1, 10);
    pair.b.send(1, 10);
    let sent = pair.b.sent();
    pair.a.receive_all(&sent);
    let ack = pair.a.sent();
    // It times out; then, before it is sent again, the ACK comes. The bind was posted in between.
    pair.b.wait(TIMEOUT);
    let operation = bind(&pair.b, window, key);
    post(&mut pair.b, 2, operation, NO_FLAGS);
    pair.b.receive_all(&ack);
    assert_eq!(pair.b.send_wcs(), [(1, OK)]);
    assert!(pair.b.sent().is_empty());
    assert_eq!(pair.b.send_wcs(), [(2, OK)]);
}

#[test]
fn a_fenced_bind_waits_for_reads_only() {
    let mut pair = Pair::new(&Setup::default());
    let (window, key) = window(&mut pair.b, MwType::Type2);
    let read = Operation::Read {
        addr: BASE,
        rkey: pair.a.mr.rkey,
    };
    let operation = bind(&pair.b, window, key);
    post(&mut pair.b, 1, read, NO_FLAGS);
    post(&mut pair.b, 2, operation, SendFlags::FENCE);
    let request = pair.b.sent();
    post(&mut pair.a, 7, write(key), NO_FLAGS);
    let writes = pair.a.sent();
    pair.a.receive_all(&request);
    let responses = pair.a.sent();
    pair.b.receive_all(&responses);
    assert_eq!(pair.b.send_wcs(), [(1, OK)], "the bind has yet to be done");
    assert!(pair.b.sent().is_empty());
    assert_eq!(pair.b.send_wcs(), [(2, OK)]);
    pair.b.receive_all(&writes);
    pair.run();
    assert_eq!(pair.a.send_wcs(), [(7, OK)]);
    // Of a SEND it does not wait.
    let (mut pair, window, key) = bound();
    pair.b.send(1, 10);
    post(&mut pair.b, 2, Operation::LocalInvalidate(key), NO_FLAGS);
    let operation = bind(&pair.b, window, key);
    post(&mut pair.b, 3, operation, SendFlags::FENCE);
    pair.a.recv(1, 10);
    pair.run();
    assert_eq!(pair.b.send_wcs(), [(1, OK), (2, OK), (3, OK)]);
}

#[test]
fn an_invalidation_waits_for_all_before_it() {
    let (mut pair, _, key) = bound();
    pair.a.recv(1, 10);
    pair.b.send(1, 10);
    post(&mut pair.b, 2, Operation::LocalInvalidate(key), NO_FLAGS);
    pair.b.send(3, 10);
    let sent = pair.b.sent();
    assert_eq!(sent.len(), 1, "what is behind it waits too");
    post(&mut pair.a, 7, write(key), NO_FLAGS);
    let writes = pair.a.sent();
    pair.b.receive_all(&writes);
    pair.a.receive_all(&pair.b.sent());
    assert_eq!(pair.a.send_wcs(), [(7, OK)], "the key is still good");
    pair.a.recv(2, 10);
    pair.a.receive_all(&sent);
    pair.run();
    let wcs = pair.b.send_full();
    assert_eq!(
        wcs.iter().map(|wc| (wc.wr_id, wc.status)).collect::<Vec<_>>(),
        [(1, OK), (2, OK), (3, OK)]
    );
    assert_eq!(wcs[1].opcode, WcOpcode::LocalInv);
    post(&mut pair.a, 8, write(key), NO_FLAGS);
    pair.run();
    assert_eq!(pair.a.send_wcs(), [(8, WcStatus::RemAccessErr)]);
}

#[test]
fn local_work_that_fails_waits_for_its_turn() {
    let (mut pair, window, key) = bound();
    pair.a.recv(1, 10);
    pair.b.send(1, 10);
    let again = bind(&pair.b, window, key);
    post(&mut pair.b, 2, again, NO_FLAGS);
    pair.b.send(3, 10);
    let sent = pair.b.sent();
    assert_eq!(sent.len(), 1);
    // Lost, and sent again, the bind tried again.
    pair.b.wait(TIMEOUT);
    assert_eq!(pair.b.sent(), sent);
    assert_eq!(pair.b.state(), QpState::Rts);
    pair.a.receive_all(&sent);
    pair.run();
    assert_eq!(pair.b.send_wcs(), [(1, OK), (2, WcStatus::MwBindErr), (3, FLUSH)]);
    assert_eq!(pair.b.state(), QpState::Err);
    for wrong in [key ^ 1, key ^ 0x100, 0] {
        let (mut pair, ..) = bound();
        post(&mut pair.b, 1, Operation::LocalInvalidate(wrong), NO_FLAGS);
        pair.run();
        assert_eq!(pair.b.send_wcs(), [(1, WcStatus::MwBindErr)]);
        assert_eq!(pair.b.state(), QpState::Err);
    }
    // A plain region is not to be invalidated.
    let mut pair = Pair::new(&Setup::default());
    let operation = Operation::LocalInvalidate(pair.b.mr.rkey);
    post(&mut pair.b, 1, operation, NO_FLAGS);
    pair.run();
    assert_eq!(pair.b.send_wcs(), [(1, WcStatus::MwBindErr)]);
    // UC stops its send queue.
    let mut pair = Pair::new(&Setup {
        qp_type: QpType::Uc,
        ..Setup::default()
    });
    post(&mut pair.b, 1, Operation::LocalInvalidate(1), NO_FLAGS);
    pair.run();
    assert_eq!(pair.b.send_wcs(), [(1, WcStatus::MwBindErr)]);
    assert_eq!(pair.b.state(), QpState::Sqe);
    pair.b.go_to(QpState::Rts);
    assert!(pair.b.sent().is_empty());
    let (window, key) = self::window(&mut pair.b, MwType::Type1);
    let operation = bind(&pair.b, window, key);
    post(&mut pair.b, 2, operation, NO_FLAGS);
    pair.b.sent();
    assert_eq!(pair.b.send_wcs(), [(2, OK)]);
}

#[test]
fn unsignaled_local_work_leaves_without_a_completion() {
    let mut pair = Pair::new(&Setup {
        sig_all: false,
        ..Setup::default()
    });
    let (window, key) = window(&mut pair.b, MwType::Type2);
    let operation = bind(&pair.b, window, key);
    post(&mut pair.b, 1, operation, NO_FLAGS);
    post(&mut pair.b, 2, Operation::LocalInvalidate(key), NO_FLAGS);
    post(&mut pair.b, 3, operation, SendFlags::SIGNALED);
    pair.run();
    assert_eq!(pair.b.send_wcs(), [(3, OK)]);
}

#[test]
fn a_queue_that_drains_begins_no_local_work() {
    let mut pair = Pair::new(&Setup::default());
    let (window, key) = window(&mut pair.b, MwType::Type2);
    pair.b.go_to(QpState::Sqd);
    let operation = bind(&pair.b, window, key);
    post(&mut pair.b, 1, operation, NO_FLAGS);
    assert!(pair.b.sent().is_empty() && pair.b.send_wcs().is_empty());
    pair.b.go_to(QpState::Rts);
    pair.b.sent();
    assert_eq!(pair.b.send_wcs(), [(1, OK)]);
    // What was done before drains with the rest.
    pair.a.recv(1, 10);
    pair.b.send(2, 10);
    post(&mut pair.b, 3, Operation::LocalInvalidate(key), NO_FLAGS);
    let sent = pair.b.sent();
    let attr = QpAttr {
        state: QpState::Sqd,
        sqd_async_notify: true,
        ..QpAttr::default()
    };
    pair.b
        .modify(&attr, QpAttrMask::STATE | QpAttrMask::EN_SQD_ASYNC_NOTIFY)
        .unwrap();
    assert!(pair.b.events().is_empty());
    pair.a.receive_all(&sent);
    pair.run();
    assert_eq!(pair.b.events(), [AsyncEvent::SqDrained(pair.b.qpn)]);
    assert_eq!(pair.b.send_wcs(), [(2, OK)]);
    pair.b.go_to(QpState::Err);
    assert_eq!(pair.b.send_wcs(), [(3, FLUSH)]);
}

#[test]
fn send_with_invalidate() {
    for len in [0, 10, 256, 600] {
        let (mut pair, window, key) = bound();
        pair.b.recv(5, 1000);
        let sges = [pair.a.sge(BASE, len)];
        let wr = SendWr {
            wr_id: 1,
            operation: Operation::SendInv(key),
            flags: NO_FLAGS,
            sges: &sges,
            ..SendWr::default()
        };
        pair.a.post(&wr).unwrap();
        let sent = pair.a.sent();
        let last = sent.last().unwrap();
        let opcode = if len > 256 {
            Opcode::RcSendLastInv
        } else {
            Opcode::RcSendOnlyInv
        };
        assert_eq!(last.opcode(), opcode);
        assert_eq!(last.roce().ieth().unwrap().rkey, key);
        pair.b.receive_all(&sent);
        let wc = pair.b.recv_full()[0];
        assert_eq!(
            (wc.wr_id, wc.status, wc.opcode, wc.byte_len),
            (5, OK, WcOpcode::Recv, len)
        );
        assert_eq!((wc.imm, wc.flags), (key, WcFlags::WITH_INV));
        assert_eq!(
            pair.b.target(len as usize),
            pair.a.source(len as usize),
            "the data came first"
        );
        // It comes again: it is acknowledged, and a window that is bound to the same key since stays.
        let operation = bind(&pair.b, window, key);
        post(&mut pair.b, 2, operation, NO_FLAGS);
        pair.b.receive(last);
        pair.run();
        assert_eq!(pair.a.send_wcs(), [(1, OK)]);
        post(&mut pair.a, 3, write(key), NO_FLAGS);
        pair.run();
        assert_eq!(pair.a.send_wcs(), [(3, OK)]);
    }
}

#[test]
fn illegal_invalidation_by_the_peer() {
    let (_, _, key) = bound();
    for wrong in [key ^ 1, key ^ 0x100, 0] {
        let (mut pair, ..) = bound();
        pair.b.recv(5, 1000);
        pair.b.recv(6, 1000);
        post(&mut pair.a, 1, Operation::SendInv(wrong), NO_FLAGS);
        pair.b.receive_all(&pair.a.sent());
        assert_eq!(pair.b.recv_wcs(), [(5, WcStatus::RemInvReqErr), (6, FLUSH)]);
        assert_eq!(pair.b.state(), QpState::Err);
        assert!(pair.b.events().is_empty(), "the completion says it");
        let nak = pair.b.sent();
        assert_eq!(nak[0].ack(), (0x62, 0, 0));
        pair.a.receive_all(&nak);
        assert_eq!(pair.a.send_wcs(), [(1, WcStatus::RemAccessErr)]);
    }
    // Nor a region's key, nor a window of type 1, nor of another QP.
    let mut pair = Pair::new(&Setup::default());
    pair.b.recv(5, 1000);
    let operation = Operation::SendInv(pair.b.mr.rkey);
    post(&mut pair.a, 1, operation, NO_FLAGS);
    pair.run();
    assert_eq!(pair.a.send_wcs(), [(1, WcStatus::RemAccessErr)]);
    let mut pair = Pair::new(&Setup::default());
    let (window, key) = window(&mut pair.b, MwType::Type1);
    let operation = bind(&pair.b, window, key);
    post(&mut pair.b, 1, operation, NO_FLAGS);
    pair.b.recv(5, 1000);
    pair.run();
    post(&mut pair.a, 1, Operation::SendInv(key), NO_FLAGS);
    pair.run();
    assert_eq!(pair.a.send_wcs(), [(1, WcStatus::RemAccessErr)]);
}

#[test]
fn without_a_receive_nothing_is_invalidated() {
    let (mut pair, _, key) = bound();
    post(&mut pair.a, 1, Operation::SendInv(key), NO_FLAGS);
    let sent = pair.a.sent();
    pair.b.receive_all(&sent);
    let nak = pair.b.sent();
    assert!(matches!(nak[0].aeth().syndrome, Syndrome::RnrNak { .. }));
    pair.b.recv(5, 1000);
    pair.b.receive_all(&sent);
    pair.run();
    assert_eq!(pair.b.recv_wcs(), [(5, OK)]);
}

#[test]
fn a_write_under_way_ends_where_its_key_does() {
    let (mut pair, _, key) = bound();
    post(&mut pair.a, 1, write(key), NO_FLAGS);
    let packets = pair.a.sent();
    pair.b.receive(&packets[0]);
    post(&mut pair.b, 2, Operation::LocalInvalidate(key), NO_FLAGS);
    pair.b.sent();
    assert_eq!(pair.b.send_wcs(), [(2, OK)]);
    pair.b.receive(&packets[1]);
    assert_eq!(pair.b.events(), [AsyncEvent::QpAccessError(pair.b.qpn)]);
    pair.a.receive_all(&pair.b.sent());
    assert_eq!(pair.a.send_wcs(), [(1, WcStatus::RemAccessErr)]);
    assert_eq!(
        pair.b.target(600)[256..],
        [0; 344],
        "nothing was written behind it"
    );
}

#[test]
fn a_late_copy_of_a_read_whose_key_is_gone_harms_nobody() {
    let (mut pair, _, key) = bound();
    let read = Operation::Read {
        addr: RECV,
        rkey: key,
    };
    post(&mut pair.a, 1, read, NO_FLAGS);
    let request = pair.a.sent();
    pair.b.receive_all(&request);
    let responses = pair.b.sent();
    pair.a.receive_all(&responses);
    assert_eq!(pair.a.send_wcs(), [(1, OK)]);
    pair.b.recv(5, 1000);
    post(&mut pair.a, 2, Operation::SendInv(key), NO_FLAGS);
    pair.run();
    pair.b.receive_all(&request);
    pair.run();
    assert_eq!((pair.a.state(), pair.b.state()), (QpState::Rts, QpState::Rts));
    assert_eq!(pair.a.send_wcs(), [(2, OK)]);
    assert!(pair.b.events().is_empty());
    // A peer that lost the answer, and asks again too late, is told.
    let (mut pair, _, key) = bound();
    let read = Operation::Read {
        addr: RECV,
        rkey: key,
    };
    post(&mut pair.a, 1, read, NO_FLAGS);
    let request = pair.a.sent();
    pair.b.receive_all(&request);
    pair.b.sent();
    post(&mut pair.b, 2, Operation::LocalInvalidate(key), NO_FLAGS);
    pair.run();
    pair.a.wait(TIMEOUT);
    pair.run();
    assert_eq!(pair.a.send_wcs(), [(1, WcStatus::RemAccessErr)]);
    assert_eq!(pair.b.state(), QpState::Rts, "its own work can go on");
}

#[test]
fn a_window_ends_with_its_qp_and_keeps_its_region() {
    let (mut pair, window, key) = bound();
    let lkey = pair.b.mr.lkey;
    assert_eq!(pair.b.dev.dereg_mr(lkey), Err(VerbsError::Busy));
    pair.b.dev.destroy_qp(pair.b.now, pair.b.qpn).unwrap();
    pair.b.dev.dereg_mr(lkey).unwrap();
    pair.b.dev.dealloc_mw(window).unwrap();
    assert_eq!(pair.b.dev.dealloc_mw(window), Err(VerbsError::NotFound));
    let (mut pair, window, _) = bound();
    pair.b.dev.dealloc_mw(window).unwrap();
    post(&mut pair.a, 1, write(key), NO_FLAGS);
    pair.run();
    assert_eq!(pair.a.send_wcs(), [(1, WcStatus::RemAccessErr)]);
}

#[test]
fn a_bind_of_what_is_gone_fails() {
    let mut pair = Pair::new(&Setup::default());
    let (window, key) = window(&mut pair.b, MwType::Type2);
    pair.b.go_to(QpState::Sqd);
    let operation = bind(&pair.b, window, key);
    post(&mut pair.b, 1, operation, NO_FLAGS);
    pair.b.dev.dealloc_mw(window).unwrap();
    pair.b.go_to(QpState::Rts);
    pair.b.sent();
    assert_eq!(pair.b.send_wcs(), [(1, WcStatus::MwBindErr)]);
}

#[test]
fn who_may_post_what() {
    for (qp_type, local, send_inv) in [
        (QpType::Rc, true, true),
        (QpType::Uc, true, false),
        (QpType::Ud, false, false),
    ] {
        let mut pair = Pair::new(&Setup {
            qp_type,
            ..Setup::default()
        });
        let (window, key) = window(&mut pair.a, MwType::Type2);
        let operation = bind(&pair.a, window, key);
        let sges = [pair.a.sge(BASE, 1)];
        for (operation, allowed) in [
            (operation, local),
            (Operation::LocalInvalidate(key), local),
            (Operation::SendInv(key), send_inv),
        ] {
            let mut wr = SendWr {
                wr_id: 1,
                operation,
                flags: NO_FLAGS,
                sges: &[],
                ..SendWr::default()
            };
            assert_eq!(pair.a.post(&wr).is_ok(), allowed, "{operation:?} on {qp_type}");
            if operation.is_local() {
                wr.sges = &sges;
                assert_eq!(pair.a.post(&wr), Err(VerbsError::Invalid), "it has no data");
            }
        }
    }
}
