//! QP states with packets under way: draining, reset, and attributes that are changed or read in between.

use std::time::Duration;

use super::pair::*;
use crate::verbs::QpAttrMask as M;
use crate::verbs::*;

const OK: WcStatus = WcStatus::Success;

fn query(side: &Side) -> QpAttr {
    side.dev.query_qp(side.qpn).unwrap().0
}

fn to(state: QpState) -> QpAttr {
    QpAttr {
        state,
        ..QpAttr::default()
    }
}

#[test]
fn nothing_changes_while_the_queue_drains() {
    let mut pair = Pair::new(&Setup::default());
    pair.b.recv(1, 10);
    pair.a.send(1, 10);
    let sent = pair.a.sent();
    pair.a.go_to(QpState::Sqd);
    assert!(query(&pair.a).sq_draining);
    assert_eq!(
        pair.a.modify(&to(QpState::Rts), M::STATE),
        Err(VerbsError::Invalid)
    );
    let timeout = QpAttr {
        timeout: 9,
        ..QpAttr::default()
    };
    assert_eq!(pair.a.modify(&timeout, M::TIMEOUT), Err(VerbsError::Invalid));
    pair.a.send(2, 10);
    pair.b.receive_all(&sent);
    pair.run();
    assert_eq!(pair.a.send_wcs(), [(1, OK)]);
    assert!(!query(&pair.a).sq_draining);
    assert!(pair.a.events().is_empty(), "nobody asked for the event");
    pair.a.modify(&timeout, M::TIMEOUT).unwrap();
    assert_eq!(query(&pair.a).timeout, 9);
    pair.b.recv(2, 10);
    pair.a.go_to(QpState::Rts);
    pair.run();
    assert_eq!(pair.a.send_wcs(), [(2, OK)], "posted in SQD, sent in RTS");
    // A queue with nothing under way has drained at once; the wish for an event is of each time.
    for notify in [true, false] {
        let attr = QpAttr {
            sqd_async_notify: notify,
            ..to(QpState::Sqd)
        };
        let mask = if notify {
            M::EN_SQD_ASYNC_NOTIFY
        } else {
            M::empty()
        };
        pair.a.modify(&attr, M::STATE | mask).unwrap();
        assert_eq!(pair.a.events().len(), usize::from(notify));
        pair.a.go_to(QpState::Rts);
    }
    pair.a.send(3, 10);
    pair.a.sent();
    pair.a.go_to(QpState::Sqd);
    pair.a.go_to(QpState::Err);
    assert_eq!(
        pair.a.send_wcs(),
        [(3, WcStatus::WrFlushErr)],
        "ERR and RESET need not wait"
    );
}

#[test]
fn an_unreliable_queue_drains_at_once() {
    for qp_type in [QpType::Uc, QpType::Ud] {
        let mut pair = Pair::new(&Setup {
            qp_type,
            ..Setup::default()
        });
        let attr = QpAttr {
            sqd_async_notify: true,
            ..to(QpState::Sqd)
        };
        pair.a.modify(&attr, M::STATE | M::EN_SQD_ASYNC_NOTIFY).unwrap();
        assert_eq!(pair.a.events(), [AsyncEvent::SqDrained(pair.a.qpn)]);
        pair.a.go_to(QpState::Rts);
    }
}

#[test]
fn a_reset_queue_pair_is_as_new() {
    let setup = Setup::default();
    let mut pair = Pair::new(&setup);
    for i in 0..3 {
        pair.b.recv(i, 10);
        pair.a.send(i, 10);
    }
    let stale = pair.a.sent();
    pair.b.receive(&stale[0]);
    let answer = pair.b.sent();
    for side in [&mut pair.a, &mut pair.b] {
        side.go_to(QpState::Reset);
        let attr = query(side);
        assert_eq!((attr.state, attr.dest_qpn, attr.path), (QpState::Reset, 0, None));
        assert_eq!(attr.cap, setup.cap);
        assert!(
            side.send_wcs().is_empty() && side.recv_wcs().is_empty(),
            "taken out of the CQs"
        );
    }
    pair.b.receive_all(&stale);
    pair.a.receive_all(&answer);
    assert_eq!(
        (pair.b.counter("drop_state"), pair.a.counter("drop_state")),
        (3, 1)
    );
    // With other numbers the old packets mean nothing.
    let again = Setup {
        psn: 0x40_0000,
        ..setup
    };
    let (a, b) = ((pair.a.qpn, pair.a.addr), (pair.b.qpn, pair.b.addr));
    pair.a.ready_to_receive(b.0, b.1, &again);
    pair.b.ready_to_receive(a.0, a.1, &again);
    pair.a.ready_to_send(&again);
    pair.b.ready_to_send(&again);
    pair.b.recv(7, 10);
    pair.a.send(8, 10);
    pair.b.receive_all(&stale);
    pair.a.receive_all(&answer);
    pair.run();
    assert_eq!(pair.b.recv_wcs(), [(7, OK)]);
    assert_eq!(pair.a.send_wcs(), [(8, OK)]);
}

#[test]
fn attributes_that_roce_has_not() {
    let mut pair = Pair::new(&Setup::default());
    let attr = QpAttr::default();
    assert_eq!(pair.a.modify(&attr, M::ALT_PATH), Err(VerbsError::Invalid));
    assert_eq!(pair.a.modify(&attr, M::RATE_LIMIT), Err(VerbsError::Invalid));
    pair.a.modify(&attr, M::PATH_MIG_STATE).unwrap();
    for path_mig_state in [MigState::Rearm, MigState::Armed] {
        let attr = QpAttr {
            path_mig_state,
            ..attr
        };
        assert_eq!(pair.a.modify(&attr, M::PATH_MIG_STATE), Err(VerbsError::Invalid));
    }
}

#[test]
fn the_state_that_the_caller_believes_in_must_be_right() {
    let mut pair = Pair::new(&Setup::default());
    for (cur_state, ok) in [(QpState::Rts, true), (QpState::Sqd, false), (QpState::Rtr, false)] {
        let attr = QpAttr {
            cur_state,
            min_rnr_timer: 3,
            ..to(QpState::Rts)
        };
        let done = pair.a.modify(&attr, M::STATE | M::CUR_STATE | M::MIN_RNR_TIMER);
        assert_eq!(done.is_ok(), ok, "{cur_state}");
    }
    let error = to(QpState::Err);
    assert_eq!(
        pair.a.modify(&error, M::STATE | M::CUR_STATE),
        Err(VerbsError::Invalid),
        "not with ERR"
    );
}

#[test]
fn values_at_their_limits() {
    let mut pair = Pair::new(&Setup::default());
    pair.a.go_to(QpState::Sqd);
    type Set = fn(&mut QpAttr, u8);
    let cases: [(M, u8, Set); 7] = [
        (M::TIMEOUT, 31, |attr, n| attr.timeout = n),
        (M::RETRY_CNT, 7, |attr, n| attr.retry_cnt = n),
        (M::RNR_RETRY, 7, |attr, n| attr.rnr_retry = n),
        (M::MIN_RNR_TIMER, 31, |attr, n| attr.min_rnr_timer = n),
        (M::MAX_QP_RD_ATOMIC, 16, |attr, n| attr.max_rd_atomic = n),
        (M::MAX_DEST_RD_ATOMIC, 16, |attr, n| attr.max_dest_rd_atomic = n),
        (M::PORT, 1, |attr, n| attr.port = n),
    ];
    for (mask, most, set) in cases {
        let mut attr = QpAttr::default();
        set(&mut attr, most);
        pair.a.modify(&attr, mask).unwrap();
        set(&mut attr, most + 1);
        assert_eq!(pair.a.modify(&attr, mask), Err(VerbsError::Invalid), "{mask:?}");
    }
    let now = query(&pair.a);
    assert_eq!(
        (now.timeout, now.retry_cnt, now.rnr_retry, now.min_rnr_timer),
        (31, 7, 7, 31)
    );
    assert_eq!((now.max_rd_atomic, now.max_dest_rd_atomic), (16, 16));
}

#[test]
fn reads_are_answered_again_although_their_number_changed() {
    let mut pair = Pair::new(&Setup::default());
    let (addr, rkey) = (BASE, pair.b.mr.rkey);
    let sges = [pair.a.sge(RECV, 8)];
    let wr = SendWr {
        wr_id: 1,
        operation: Operation::Read { addr, rkey },
        flags: SendFlags::empty(),
        sges: &sges,
        ud: None,
        srqn: 0,
    };
    pair.a.post(&wr).unwrap();
    let request = pair.a.sent();
    pair.b.receive_all(&request);
    assert_eq!(pair.b.sent().len(), 1, "and it is lost");
    pair.b.go_to(QpState::Sqd);
    let attr = QpAttr {
        max_dest_rd_atomic: 2,
        ..QpAttr::default()
    };
    pair.b.modify(&attr, M::MAX_DEST_RD_ATOMIC).unwrap();
    pair.a.wait(TIMEOUT + Duration::from_millis(1));
    pair.run();
    assert_eq!(pair.a.send_wcs(), [(1, OK)]);
}
