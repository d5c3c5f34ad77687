//! XRC: requests name a shared receive queue at the target.

use std::time::Duration;

use ferroce_wire::{Opcode, PathMtu};

use super::pair::*;
use crate::device::{QpInit, SrqId};
use crate::verbs::*;

const OK: WcStatus = WcStatus::Success;

fn xrc() -> Pair {
    Pair::new(&Setup {
        qp_type: QpType::XrcSend,
        ..Setup::default()
    })
}

/// The SRQs of the target.
fn srqs(pair: &Pair) -> [SrqId; 2] {
    pair.b.xrc.unwrap().1
}

fn post(pair: &mut Pair, wr_id: u64, srq: SrqId, operation: Operation, addr: u64, len: u32) {
    let sges = [pair.a.sge(addr, len)];
    let wr = SendWr {
        wr_id,
        operation,
        sges: &sges,
        srqn: srq.0,
        ..SendWr::default()
    };
    pair.a.post(&wr).unwrap();
}

/// Posts a receive to an SRQ of the target.
fn recv(pair: &mut Pair, wr_id: u64, srq: SrqId, len: u32) {
    let sges = [pair.b.sge(RECV, len)];
    let wr = RecvWr { wr_id, sges: &sges };
    pair.b.dev.post_srq_recv(srq, &wr).unwrap();
}

fn opcodes(packets: &[Packet]) -> Vec<Opcode> {
    packets.iter().map(Packet::opcode).collect()
}

#[test]
fn each_message_takes_a_receive_of_the_queue_it_names() {
    let mut pair = xrc();
    let [one, two] = srqs(&pair);
    recv(&mut pair, 10, one, 700);
    recv(&mut pair, 20, two, 700);
    post(&mut pair, 1, two, Operation::Send, BASE, 600);
    post(&mut pair, 2, one, Operation::SendImm(7), BASE, 5);
    let sent = pair.a.sent();
    use Opcode::{XrcSendFirst, XrcSendLast, XrcSendMiddle, XrcSendOnlyImm};
    assert_eq!(
        opcodes(&sent),
        [XrcSendFirst, XrcSendMiddle, XrcSendLast, XrcSendOnlyImm]
    );
    let named: Vec<u32> = sent.iter().map(|p| p.roce().xrceth().unwrap().srqn).collect();
    assert_eq!(named, [two.0, two.0, two.0, one.0]);
    pair.b.receive_all(&sent);
    let answers = pair.b.sent();
    assert_eq!(opcodes(&answers), [Opcode::XrcAcknowledge]);
    pair.a.receive_all(&answers);
    assert_eq!(pair.a.send_wcs(), [(1, OK), (2, OK)]);
    let wcs = pair.b.recv_full();
    assert_eq!((wcs[0].wr_id, wcs[0].byte_len, wcs[0].srqn), (20, 600, two.0));
    assert_eq!((wcs[1].wr_id, wcs[1].imm, wcs[1].srqn), (10, 7, one.0));
    assert!(
        wcs.iter()
            .all(|wc| wc.qp_num == pair.b.qpn && wc.src_qp == pair.a.qpn)
    );
    assert_eq!(pair.b.target(600)[5..], pair.a.source(600)[5..]);
}

#[test]
fn every_operation() {
    let mut pair = xrc();
    let [one, two] = srqs(&pair);
    let rkey = pair.b.mr.rkey;
    let addr = RECV;
    recv(&mut pair, 10, two, 0);
    post(&mut pair, 1, one, Operation::Write { addr, rkey }, BASE, 600);
    post(
        &mut pair,
        2,
        two,
        Operation::WriteImm { addr, rkey, imm: 9 },
        BASE,
        700,
    );
    let answer = RECV + 8192;
    post(&mut pair, 3, one, Operation::Read { addr, rkey }, answer, 700);
    post(
        &mut pair,
        4,
        one,
        Operation::FetchAdd { addr, rkey, add: 5 },
        answer + 1000,
        8,
    );
    let compare_swap = Operation::CompareSwap {
        addr,
        rkey,
        compare: 0,
        swap: 1,
    };
    post(&mut pair, 5, two, compare_swap, answer + 1008, 8);
    pair.run();
    assert_eq!(pair.a.send_wcs(), [1, 2, 3, 4, 5].map(|id| (id, OK)));
    assert_eq!(pair.b.recv_wcs(), [(10, OK)]);
    let word = |bytes: &[u8]| u64::from_ne_bytes(*bytes.first_chunk().unwrap());
    let before = word(&pair.a.source(8));
    pair.a.memory.with(answer, 1016, |got| {
        assert_eq!(got[8..700], pair.b.target(700)[8..]);
        assert_eq!(word(&got[1000..]), before);
        assert_eq!(word(&got[1008..]), before.wrapping_add(5));
    });
}

/// An initiator binds windows; a target, which binds none, has none that its peer may invalidate.
#[test]
fn windows() {
    let mut pair = xrc();
    let [one, _] = srqs(&pair);
    let pd = pair.a.dev.query_qp(pair.a.qpn).unwrap().1.pd.unwrap();
    for (wr_id, mw_type) in [(1, MwType::Type1), (2, MwType::Type2)] {
        let (window, rkey) = pair.a.dev.alloc_mw(pd, mw_type).unwrap();
        let bind = Operation::BindMw(MwBind {
            window,
            rkey,
            lkey: pair.a.mr.lkey,
            addr: BASE,
            len: 64,
            access: Access::REMOTE_WRITE,
        });
        let wr = |operation| SendWr {
            wr_id,
            operation,
            ..SendWr::default()
        };
        pair.a.post(&wr(bind)).unwrap();
        pair.run();
        assert_eq!(pair.a.send_wcs(), [(wr_id, OK)]);
        if mw_type == MwType::Type2 {
            pair.a.post(&wr(Operation::LocalInvalidate(rkey))).unwrap();
            pair.run();
            assert_eq!(pair.a.send_wcs(), [(wr_id, OK)]);
        }
    }
    let key = pair.b.mr.rkey;
    recv(&mut pair, 10, one, 10);
    post(&mut pair, 3, one, Operation::SendInv(key), BASE, 10);
    let sent = pair.a.sent();
    assert_eq!(opcodes(&sent), [Opcode::XrcSendOnlyInv]);
    let packet = sent[0].roce();
    assert_eq!(
        (packet.xrceth().unwrap().srqn, packet.ieth().unwrap().rkey),
        (one.0, key)
    );
    pair.b.receive_all(&sent);
    pair.run();
    assert_eq!(pair.a.send_wcs(), [(3, WcStatus::RemAccessErr)]);
    assert_eq!(pair.b.recv_wcs(), [(10, WcStatus::RemInvReqErr)]);
}

#[test]
fn an_empty_queue_is_not_ready() {
    let mut pair = xrc();
    let [one, two] = srqs(&pair);
    recv(&mut pair, 10, one, 10);
    post(&mut pair, 1, two, Operation::Send, BASE, 10);
    let sent = pair.a.sent();
    pair.b.receive_all(&sent);
    let naks = pair.b.sent();
    assert_eq!(opcodes(&naks), [Opcode::XrcAcknowledge]);
    assert_eq!(naks[0].aeth().syndrome.value(), 0x2c);
    pair.a.receive_all(&naks);
    recv(&mut pair, 20, two, 10);
    pair.a.wait(Duration::from_micros(640));
    pair.run();
    assert_eq!(pair.a.send_wcs(), [(1, OK)]);
    assert_eq!(pair.b.recv_wcs(), [(20, OK)]);
}

#[test]
fn queues_that_are_not_of_the_domain() {
    for case in 0..4 {
        let mut pair = xrc();
        let [one, _] = srqs(&pair);
        let (pd, cq) = (pair.b.pd, pair.b.recv_cq.clone());
        let dev = &mut pair.b.dev;
        let named = match case {
            0 => SrqId(0xabcdef),
            1 => dev.create_srq(pd, 4, 1, 0).unwrap(),
            2 => {
                let other = dev.open_xrcd(None, true, false).unwrap();
                dev.create_xrc_srq(pd, other, &cq, 4, 1).unwrap()
            }
            _ => {
                dev.destroy_srq(one).unwrap();
                one
            }
        };
        // Also where no receive is taken.
        let (addr, rkey) = (RECV, pair.b.mr.rkey);
        let operation = match case {
            0 | 3 => Operation::Send,
            _ => Operation::Write { addr, rkey },
        };
        post(&mut pair, 1, named, operation, BASE, 10);
        pair.run();
        assert_eq!(pair.a.send_wcs(), [(1, WcStatus::RemInvReqErr)], "case {case}");
        assert_eq!(pair.b.state(), QpState::Err);
        let qpn = pair.b.qpn;
        let events = [AsyncEvent::QpRequestError(qpn), AsyncEvent::LastWqeReached(qpn)];
        assert_eq!(pair.b.events(), events);
        assert_eq!(pair.b.target(10), [0; 10]);
    }
}

#[test]
fn a_message_stays_with_its_queue() {
    let mut pair = xrc();
    let [one, two] = srqs(&pair);
    recv(&mut pair, 10, one, 700);
    recv(&mut pair, 20, two, 700);
    post(&mut pair, 1, one, Operation::Send, BASE, 600);
    let mut sent = pair.a.sent();
    sent[1].bytes[13..16].copy_from_slice(&two.0.to_be_bytes()[1..]);
    pair.b.receive_all(&sent);
    assert_eq!(pair.b.recv_wcs(), [(10, WcStatus::WrFlushErr)]);
    assert_eq!(pair.b.sent()[0].aeth().syndrome.value(), 0x61);
}

#[test]
fn the_memory_is_of_the_domain_of_the_queue() {
    let mut pair = xrc();
    let (xrcd, [one, _]) = pair.b.xrc.unwrap();
    let (other, cq) = (pair.b.dev.alloc_pd().unwrap(), pair.b.recv_cq.clone());
    let foreign = pair.b.dev.create_xrc_srq(other, xrcd, &cq, 4, 1).unwrap();
    let (addr, rkey) = (RECV, pair.b.mr.rkey);
    post(&mut pair, 1, one, Operation::Write { addr, rkey }, BASE, 10);
    post(&mut pair, 2, foreign, Operation::Write { addr, rkey }, BASE, 10);
    pair.run();
    assert_eq!(pair.a.send_wcs(), [(1, OK), (2, WcStatus::RemAccessErr)]);
    let qpn = pair.b.qpn;
    let events = [AsyncEvent::QpAccessError(qpn), AsyncEvent::LastWqeReached(qpn)];
    assert_eq!(pair.b.events(), events);
}

#[test]
fn a_queue_that_goes_takes_its_receives_with_it() {
    let mut pair = xrc();
    let [one, two] = srqs(&pair);
    for (wr_id, srq) in [(10, one), (20, two), (21, two)] {
        recv(&mut pair, wr_id, srq, 700);
    }
    post(&mut pair, 1, one, Operation::Send, BASE, 10);
    post(&mut pair, 2, two, Operation::Send, BASE, 10);
    pair.run();
    // Completed, and not polled: gone with the SRQ, as those of a QP go with it.
    pair.b.dev.destroy_srq(one).unwrap();
    assert_eq!(pair.b.recv_wcs(), [(20, OK)]);
    // In the middle of a message.
    post(&mut pair, 3, two, Operation::Send, BASE, 600);
    let sent = pair.a.sent();
    pair.b.receive(&sent[0]);
    pair.b.dev.destroy_srq(two).unwrap();
    pair.b.receive_all(&sent[1..]);
    pair.run();
    assert_eq!(pair.a.send_wcs()[2], (3, WcStatus::RemInvReqErr));
    assert!(pair.b.recv_wcs().is_empty());
    let cq = pair.b.recv_cq.clone();
    pair.b.dev.destroy_cq(&cq).unwrap();
}

#[test]
fn the_limit_of_a_queue() {
    let mut pair = xrc();
    let [one, two] = srqs(&pair);
    for wr_id in 0..3 {
        recv(&mut pair, wr_id, one, 10);
        recv(&mut pair, wr_id, two, 10);
    }
    pair.b.dev.modify_srq(one, None, Some(2)).unwrap();
    post(&mut pair, 1, two, Operation::Send, BASE, 10);
    post(&mut pair, 1, two, Operation::Send, BASE, 10);
    post(&mut pair, 1, one, Operation::Send, BASE, 10);
    pair.run();
    assert_eq!(pair.b.events(), []);
    post(&mut pair, 1, one, Operation::Send, BASE, 10);
    pair.run();
    assert_eq!(pair.b.events(), [AsyncEvent::SrqLimit(one.0)]);
}

#[test]
fn each_half_goes_one_way() {
    let mut pair = xrc();
    let wr = RecvWr { wr_id: 1, sges: &[] };
    assert_eq!(pair.a.dev.post_recv(pair.a.qpn, &wr), Err(VerbsError::Invalid));
    assert_eq!(pair.b.dev.post_recv(pair.b.qpn, &wr), Err(VerbsError::Invalid));
    assert_eq!(pair.b.post(&SendWr::default()), Err(VerbsError::Invalid));
    let [one, _] = srqs(&pair);
    recv(&mut pair, 10, one, 10);
    post(&mut pair, 1, one, Operation::Send, BASE, 10);
    let sent = pair.a.sent();
    // A request to the initiator, and an answer to the target.
    let mut request = sent[0].clone();
    (request.path.source, request.path.dest) = (pair.b.addr, pair.a.addr);
    request.bytes[5..8].copy_from_slice(&pair.a.qpn.to_be_bytes()[1..]);
    pair.a.receive(&request);
    assert_eq!(pair.a.counter("drop_opcode"), 1);
    pair.b.receive_all(&sent);
    let mut answer = pair.b.sent().remove(0);
    (answer.path.source, answer.path.dest) = (pair.a.addr, pair.b.addr);
    answer.bytes[5..8].copy_from_slice(&pair.b.qpn.to_be_bytes()[1..]);
    pair.b.receive(&answer);
    assert_eq!(pair.b.counter("drop_opcode"), 1);
    // RC is another transport.
    request.bytes[0] = Opcode::RcSendOnly.value();
    pair.b.receive(&Packet {
        path: sent[0].path,
        ..request
    });
    assert_eq!(pair.b.counter("drop_opcode") + pair.b.counter("drop_qpn"), 2);
}

#[test]
fn errors_flush_what_each_half_has() {
    let mut pair = xrc();
    let [one, _] = srqs(&pair);
    recv(&mut pair, 10, one, 700);
    recv(&mut pair, 11, one, 700);
    post(&mut pair, 1, one, Operation::Send, BASE, 600);
    let sent = pair.a.sent();
    pair.b.receive(&sent[0]);
    pair.b.go_to(QpState::Err);
    assert_eq!(
        pair.b.recv_wcs(),
        [(10, WcStatus::WrFlushErr)],
        "what waits in the SRQ stays"
    );
    assert_eq!(pair.b.events(), [AsyncEvent::LastWqeReached(pair.b.qpn)]);
    pair.a.go_to(QpState::Err);
    assert_eq!(pair.a.send_wcs(), [(1, WcStatus::WrFlushErr)]);
    post(&mut pair, 2, one, Operation::Send, BASE, 600);
    assert_eq!(pair.a.send_wcs(), [(2, WcStatus::WrFlushErr)]);
    assert_eq!(pair.a.events(), []);
}

#[test]
fn a_loss_is_repaired() {
    let mut pair = Pair::new(&Setup {
        qp_type: QpType::XrcSend,
        mtu: PathMtu::Mtu1024,
        ..Setup::default()
    });
    let [one, two] = srqs(&pair);
    let (addr, rkey) = (BASE, pair.b.mr.rkey);
    recv(&mut pair, 10, one, 5000);
    recv(&mut pair, 20, two, 5000);
    post(&mut pair, 1, one, Operation::Send, BASE, 5000);
    post(&mut pair, 2, one, Operation::Read { addr, rkey }, RECV, 5000);
    post(&mut pair, 3, two, Operation::Send, BASE, 5000);
    let sent = pair.a.sent();
    pair.b.receive_all(&sent[..2]);
    pair.b.receive_all(&sent[3..]);
    let answers = pair.b.sent();
    assert_eq!(answers[0].aeth().syndrome.value(), 0x60);
    pair.a.receive_all(&answers);
    pair.run();
    assert_eq!(pair.a.send_wcs(), [1, 2, 3].map(|id| (id, OK)));
    assert_eq!(pair.b.recv_wcs(), [(10, OK), (20, OK)]);
    assert_eq!(pair.a.target(5000), pair.b.source(5000));
}

#[test]
fn targets_with_many_users() {
    let mut pair = xrc();
    let (xrcd, [one, two]) = pair.b.xrc.unwrap();
    let (qpn, now) = (pair.b.qpn, pair.b.now);
    let dev = &mut pair.b.dev;
    let file = Some((8, 1234));
    assert_eq!(dev.open_xrcd(file, false, false), Err(VerbsError::NoDomain));
    let first = dev.open_xrcd(file, true, true).unwrap();
    assert_eq!(dev.open_xrcd(file, true, true), Err(VerbsError::Invalid));
    let second = dev.open_xrcd(file, false, false).unwrap();
    let stranger = dev.open_xrcd(Some((8, 1235)), true, false).unwrap();
    let init = dev.query_qp(qpn).unwrap().1;
    let (target, cap) = dev
        .create_qp(QpInit {
            xrcd: Some(first),
            ..init.clone()
        })
        .unwrap();
    assert_eq!(cap, QpCap::default(), "a target has no queues");
    assert_eq!(dev.open_qp(stranger, target), Err(VerbsError::Invalid));
    assert_eq!(dev.open_qp(xrcd, target), Err(VerbsError::Invalid));
    assert_eq!(dev.open_qp(second, 0x123456), Err(VerbsError::Invalid));
    dev.open_qp(second, target).unwrap();
    assert_eq!(dev.close_xrcd(first), Err(VerbsError::Busy));
    assert_eq!(dev.close_xrcd(second), Err(VerbsError::Busy));
    dev.close_qp(now, target, first).unwrap();
    assert_eq!(dev.close_qp(now, target, first), Err(VerbsError::Invalid));
    dev.close_xrcd(first).unwrap();
    assert!(dev.query_qp(target).is_ok(), "another has it open");
    dev.close_qp(now, target, second).unwrap();
    assert!(dev.query_qp(target).is_err());
    dev.close_xrcd(second).unwrap();
    assert_eq!(dev.close_xrcd(second), Err(VerbsError::NotFound));
    // The domain is gone with its last user.
    assert_eq!(dev.open_xrcd(file, false, false), Err(VerbsError::NoDomain));
    dev.close_xrcd(stranger).unwrap();
    // SRQs count too; a QP of another type can't take one.
    assert_eq!(dev.close_xrcd(xrcd), Err(VerbsError::Busy));
    dev.destroy_qp(now, qpn).unwrap();
    let cq = pair.b.recv_cq.clone();
    let rc = QpInit {
        pd: Some(pair.b.pd),
        qp_type: QpType::Rc,
        cap: QpCap::default(),
        send_cq: Some(cq.clone()),
        recv_cq: Some(cq.clone()),
        srq: Some(one),
        ..init
    };
    assert_eq!(dev.create_qp(rc).unwrap_err(), VerbsError::Invalid);
    dev.destroy_srq(one).unwrap();
    assert_eq!(dev.close_xrcd(xrcd), Err(VerbsError::Busy));
    dev.destroy_srq(two).unwrap();
    dev.close_xrcd(xrcd).unwrap();
}
