//! What error completions and events tell, and what becomes of the QPs.

use std::sync::Arc;

use super::pair::*;
use crate::device::QpInit;
use crate::queue::Cq;
use crate::verbs::*;

const OK: WcStatus = WcStatus::Success;

fn of_type(qp_type: QpType) -> Setup {
    Setup {
        qp_type,
        ..Setup::default()
    }
}

/// The oldest completion of sends: status and `vendor_err`.
fn first(cq: &Cq) -> (WcStatus, u32) {
    let mut wcs = [Wc::default()];
    assert_eq!(cq.poll(&mut wcs), 1);
    (wcs[0].status, wcs[0].vendor_err)
}

fn post(side: &mut Side, operation: Operation, sges: &[Sge]) {
    let ud = (side.dev.query_qp(side.qpn).unwrap().1.qp_type == QpType::Ud).then(|| UdDest {
        path: side.path_to("10.0.0.2".parse().unwrap()),
        qpn: 0x2_0005,
        qkey: QKEY,
    });
    let wr = SendWr {
        wr_id: 1,
        operation,
        flags: SendFlags::empty(),
        sges,
        ud,
        srqn: 0,
    };
    side.post(&wr).unwrap();
}

#[test]
fn lengths_that_cannot_be_sent() {
    let half = |side: &Side| side.sge(BASE, 1 << 31);
    for (qp_type, state) in [
        (QpType::Rc, QpState::Err),
        (QpType::Uc, QpState::Sqe),
        (QpType::Ud, QpState::Sqe),
    ] {
        let mut pair = Pair::new(&of_type(qp_type));
        let sges = match qp_type {
            QpType::Ud => vec![pair.a.sge(BASE, 4097)],
            // More than 32 bits hold.
            _ => vec![half(&pair.a), half(&pair.a), pair.a.sge(BASE, 8)],
        };
        post(&mut pair.a, Operation::Send, &sges);
        post(&mut pair.a, Operation::Send, &[]);
        assert!(pair.a.sent().is_empty());
        let too_long = VendorError::SendTooLong.number();
        assert_eq!(first(&pair.a.send_cq), (WcStatus::LocLenErr, too_long));
        let flushed = VendorError::Flushed.number();
        assert_eq!(first(&pair.a.send_cq), (WcStatus::WrFlushErr, flushed));
        assert_eq!(pair.a.state(), state);
        assert!(pair.a.events().is_empty(), "the completion tells it");
    }
    let mut pair = Pair::new(&Setup::default());
    let sges = [pair.a.sge(BASE, 4)];
    let (addr, rkey) = (BASE, pair.b.mr.rkey);
    post(&mut pair.a, Operation::FetchAdd { addr, rkey, add: 1 }, &sges);
    pair.run();
    assert_eq!(first(&pair.a.send_cq).0, WcStatus::LocLenErr);
    assert_eq!(pair.b.state(), QpState::Rts);
}

#[test]
fn refusals_of_the_peer() {
    // (address, key, access of the QP, status, NAK, event)
    let access = Access::REMOTE_ATOMIC;
    type Case = (u64, u32, Access, WcStatus, u32, fn(u32) -> AsyncEvent);
    let cases: [Case; 3] = [
        (
            4,
            0,
            access,
            WcStatus::RemInvReqErr,
            0x61,
            AsyncEvent::QpAccessError,
        ),
        (
            8,
            0,
            Access::REMOTE_READ,
            WcStatus::RemInvReqErr,
            0x61,
            AsyncEvent::QpRequestError,
        ),
        (
            8,
            1,
            access,
            WcStatus::RemAccessErr,
            0x62,
            AsyncEvent::QpAccessError,
        ),
    ];
    for (offset, key, access, status, nak, event) in cases {
        let mut pair = Pair::new(&Setup::default());
        let attr = QpAttr {
            access,
            ..QpAttr::default()
        };
        pair.b.modify(&attr, QpAttrMask::ACCESS_FLAGS).unwrap();
        pair.b.recv(7, 10);
        let (addr, rkey) = (BASE + offset, pair.b.mr.rkey ^ key);
        let sges = [pair.a.sge(BASE, 8)];
        post(&mut pair.a, Operation::FetchAdd { addr, rkey, add: 1 }, &sges);
        pair.run();
        assert_eq!(first(&pair.a.send_cq), (status, nak));
        assert_eq!(pair.b.events(), [event(pair.b.qpn)]);
        assert_eq!(pair.b.recv_wcs(), [(7, WcStatus::WrFlushErr)]);
        assert_eq!((pair.a.state(), pair.b.state()), (QpState::Err, QpState::Err));
    }
}

#[test]
fn why_retries_ran_out() {
    let mut pair = Pair::new(&Setup {
        retry_cnt: 0,
        rnr_retry: 0,
        ..Setup::default()
    });
    pair.a.send(1, 10);
    pair.a.sent();
    pair.a.wait(TIMEOUT);
    let timeout = VendorError::Timeout.number();
    assert_eq!(first(&pair.a.send_cq), (WcStatus::RetryExcErr, timeout));
    let mut pair = Pair::new(&Setup {
        rnr_retry: 0,
        ..Setup::default()
    });
    pair.a.send(1, 10);
    pair.run();
    assert_eq!(first(&pair.a.send_cq), (WcStatus::RnrRetryExcErr, 0x20 | 12));
}

#[test]
fn a_receive_that_is_too_short() {
    for qp_type in [QpType::Rc, QpType::Uc] {
        let mut pair = Pair::new(&of_type(qp_type));
        pair.b.recv(1, 599);
        pair.b.recv(2, 600);
        pair.a.send(1, 600);
        pair.run();
        let short = VendorError::ReceiveTooShort.number();
        assert_eq!(first(&pair.b.recv_cq), (WcStatus::LocLenErr, short));
        assert_eq!(pair.b.recv_wcs(), [(2, WcStatus::WrFlushErr)]);
        assert_eq!(pair.b.state(), QpState::Err);
        assert!(pair.b.events().is_empty(), "the completion tells it");
        let sender = match qp_type {
            QpType::Rc => WcStatus::RemInvReqErr,
            _ => OK,
        };
        assert_eq!(pair.a.send_wcs(), [(1, sender)]);
    }
}

/// A further QP on `b`, with these CQs, in INIT.
fn another(side: &mut Side, send_cq: &Arc<Cq>, recv_cq: &Arc<Cq>) -> u32 {
    let (_, init) = side.dev.query_qp(side.qpn).unwrap();
    let init = QpInit {
        send_cq: Some(send_cq.clone()),
        recv_cq: Some(recv_cq.clone()),
        ..init
    };
    let (qpn, _) = side.dev.create_qp(init).unwrap();
    let attr = QpAttr {
        state: QpState::Init,
        port: 1,
        ..QpAttr::default()
    };
    let mask = QpAttrMask::STATE | QpAttrMask::PKEY_INDEX | QpAttrMask::PORT | QpAttrMask::ACCESS_FLAGS;
    side.dev.modify_qp(side.now, qpn, &attr, mask).unwrap();
    qpn
}

#[test]
fn an_overrun_cq_takes_its_qps_along() {
    let mut pair = Pair::new(&Setup::default());
    let b = &mut pair.b;
    b.dev.resize_cq(&b.recv_cq, 1).unwrap();
    let other = b.dev.create_cq(8, 0, None).unwrap();
    let (send_cq, recv_cq) = (b.send_cq.clone(), b.recv_cq.clone());
    let attached = another(b, &other, &recv_cq);
    let apart = another(b, &send_cq, &other);
    b.dev
        .post_recv(attached, &RecvWr { wr_id: 3, sges: &[] })
        .unwrap();
    for i in 0..2 {
        pair.b.recv(i, 10);
        pair.a.send(i, 10);
    }
    pair.run();
    let events = pair.b.events();
    assert_eq!(events[0], AsyncEvent::CqError(recv_cq.id()));
    let mut failed = events[1..].to_vec();
    failed.sort_by_key(|event| *event != AsyncEvent::QpFatal(pair.b.qpn));
    assert_eq!(failed, [pair.b.qpn, attached].map(AsyncEvent::QpFatal));
    let state = |qpn| pair.b.dev.query_qp(qpn).unwrap().0.state;
    assert_eq!(
        [pair.b.qpn, attached, apart].map(state),
        [QpState::Err, QpState::Err, QpState::Init]
    );
    assert_eq!(pair.b.recv_wcs(), [(0, OK)], "what came before");
    pair.b
        .dev
        .post_recv(attached, &RecvWr { wr_id: 4, sges: &[] })
        .unwrap();
    assert!(pair.b.recv_wcs().is_empty() && pair.b.events().is_empty());
    // A QP that is reset may fail again.
    pair.b.go_to(QpState::Reset);
    let setup = Setup::default();
    let (peer, addr) = (pair.a.qpn, pair.a.addr);
    pair.b.ready_to_receive(peer, addr, &setup);
    pair.b.go_to(QpState::Err);
    assert!(pair.b.events().is_empty(), "nothing was lost");
    pair.b.recv(5, 1);
    assert_eq!(pair.b.events(), [AsyncEvent::QpFatal(pair.b.qpn)]);
}

#[test]
fn the_device_ends() {
    let mut pair = Pair::new(&Setup::default());
    pair.a.recv(1, 10);
    pair.a.send(1, 10);
    assert_eq!(pair.a.sent().len(), 1);
    pair.a.dev.end(pair.a.now);
    assert_eq!(pair.a.events(), [AsyncEvent::DeviceFatal]);
    assert_eq!(pair.a.send_wcs(), [(1, WcStatus::WrFlushErr)]);
    assert_eq!(pair.a.recv_wcs(), [(1, WcStatus::WrFlushErr)]);
    pair.a.send(2, 10);
    assert_eq!(pair.a.send_wcs(), [(2, WcStatus::WrFlushErr)]);
    assert!(pair.a.sent().is_empty());
    let reset = QpAttr::default();
    assert_eq!(pair.a.modify(&reset, QpAttrMask::STATE), Err(VerbsError::Gone));
    assert_eq!(pair.a.dev.alloc_pd(), Err(VerbsError::Gone));
    let (pd, qpn) = (pair.a.dev.query_qp(pair.a.qpn).unwrap().1.pd, pair.a.qpn);
    pair.a.dev.destroy_qp(pair.a.now, qpn).unwrap();
    for cq in [&pair.a.send_cq, &pair.a.recv_cq] {
        pair.a.dev.destroy_cq(cq).unwrap();
    }
    pair.a.dev.dereg_mr(pair.a.mr.lkey).unwrap();
    pair.a.dev.dealloc_pd(pd.unwrap()).unwrap();
}
