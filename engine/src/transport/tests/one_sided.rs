//! WRITE, READ and atomics.

use ferroce_wire::{Opcode, PathMtu};

use super::pair::*;
use crate::verbs::*;

const OK: WcStatus = WcStatus::Success;

fn post(side: &mut Side, wr_id: u64, operation: Operation, addr: u64, len: u32) {
    let sges = [side.sge(addr, len)];
    let wr = SendWr {
        wr_id,
        operation,
        flags: SendFlags::empty(),
        sges: &sges,
        ..SendWr::default()
    };
    side.post(&wr).unwrap();
}

fn write(pair: &Pair) -> Operation {
    Operation::Write {
        addr: RECV,
        rkey: pair.b.mr.rkey,
    }
}

fn write_imm(pair: &Pair) -> Operation {
    Operation::WriteImm {
        addr: RECV,
        rkey: pair.b.mr.rkey,
        imm: 77,
    }
}

fn read(pair: &Pair) -> Operation {
    Operation::Read {
        addr: BASE,
        rkey: pair.b.mr.rkey,
    }
}

fn opcodes(packets: &[Packet]) -> Vec<Opcode> {
    packets.iter().map(Packet::opcode).collect()
}

#[test]
fn writes_of_all_lengths() {
    for qp_type in [QpType::Rc, QpType::Uc] {
        let mut pair = Pair::new(&Setup {
            qp_type,
            ..Setup::default()
        });
        for len in [0, 1, 3, 256, 257, 1000, 5000] {
            pair.b.memory.with(RECV, 8192, |bytes| bytes.fill(0));
            let operation = write(&pair);
            post(&mut pair.a, 1, operation, BASE, len);
            pair.run();
            assert_eq!(pair.a.send_wcs(), [(1, OK)]);
            assert_eq!(pair.b.target(len as usize), pair.a.source(len as usize));
            assert_eq!(pair.b.target(len as usize + 1)[len as usize], 0);
        }
        assert!(pair.b.recv_wcs().is_empty());
    }
}

#[test]
fn write_with_immediate_takes_a_receive() {
    for (qp_type, len) in [
        (QpType::Rc, 600),
        (QpType::Rc, 0),
        (QpType::Uc, 600),
        (QpType::Uc, 10),
    ] {
        let mut pair = Pair::new(&Setup {
            qp_type,
            ..Setup::default()
        });
        pair.b.recv(5, 0);
        let operation = write_imm(&pair);
        post(&mut pair.a, 1, operation, BASE, len);
        pair.run();
        let wc = pair.b.recv_full()[0];
        assert_eq!(
            (wc.wr_id, wc.opcode, wc.byte_len),
            (5, WcOpcode::RecvRdmaWithImm, len)
        );
        assert_eq!((wc.imm, wc.flags), (77, WcFlags::WITH_IMM));
        assert_eq!(pair.b.target(len as usize), pair.a.source(len as usize));
    }
}

#[test]
fn write_with_immediate_and_no_receive() {
    let mut pair = Pair::new(&Setup::default());
    let operation = write_imm(&pair);
    post(&mut pair.a, 1, operation, BASE, 600);
    let sent = pair.a.sent();
    assert_eq!(opcodes(&sent)[2], Opcode::RcWriteLastImm);
    pair.b.receive_all(&sent);
    let naks = pair.b.sent();
    assert_eq!(
        naks[0].ack(),
        (0x2c, 0, 0),
        "the last packet is refused, not the message"
    );
    pair.a.receive_all(&naks);
    pair.b.recv(5, 0);
    pair.a.wait(std::time::Duration::from_micros(640));
    let again = pair.a.sent();
    assert_eq!(again[..], sent[2..]);
    pair.b.receive_all(&again);
    pair.run();
    assert_eq!(pair.b.recv_wcs(), [(5, OK)]);
    assert_eq!(pair.a.send_wcs(), [(1, OK)]);
}

#[test]
fn reads_of_all_lengths() {
    let mut pair = Pair::new(&Setup::default());
    for len in [0, 1, 3, 256, 257, 1000, 5000] {
        pair.a.memory.with(RECV, 8192, |bytes| bytes.fill(0));
        let operation = read(&pair);
        post(&mut pair.a, 1, operation, RECV, len);
        pair.run();
        assert_eq!(pair.a.send_wcs(), [(1, OK)]);
        assert_eq!(pair.a.target(len as usize), pair.b.source(len as usize));
        assert_eq!(pair.a.target(len as usize + 1)[len as usize], 0);
    }
}

#[test]
fn no_acknowledgement_names_a_read_or_atomic() {
    for atomic in [false, true] {
        let mut pair = Pair::new(&Setup::default());
        pair.b.recv(1, 10);
        pair.a.send(1, 10);
        let (operation, len) = match atomic {
            false => (read(&pair), 600),
            true => {
                let (addr, rkey) = (RECV, pair.b.mr.rkey);
                (Operation::FetchAdd { addr, rkey, add: 1 }, 8)
            }
        };
        post(&mut pair.a, 2, operation, RECV, len);
        let sent = pair.a.sent();
        pair.b.receive_all(&sent);
        // All is answered, and lost. The SEND comes again, and the other does not.
        assert!(!pair.b.sent().is_empty());
        pair.b.receive(&sent[0]);
        let acks = pair.b.sent();
        assert_eq!(
            acks.iter().map(Packet::ack).collect::<Vec<_>>(),
            [(0x1f, 0xff_fffe, 2)]
        );
        pair.a.receive_all(&acks);
        assert_eq!(pair.a.send_wcs(), [(1, OK)]);
        pair.a.wait(TIMEOUT);
        pair.run();
        assert_eq!(pair.a.send_wcs(), [(2, OK)]);
    }
}

#[test]
fn read_packets() {
    let mut pair = Pair::new(&Setup::default());
    let operation = read(&pair);
    post(&mut pair.a, 1, operation, RECV, 601);
    pair.a.send(2, 10);
    pair.b.recv(2, 10);
    let sent = pair.a.sent();
    assert_eq!(opcodes(&sent), [Opcode::RcReadRequest, Opcode::RcSendOnly]);
    assert_eq!((sent[0].psn(), sent[1].psn()), (0xff_fffe, 1));
    let reth = sent[0].roce().reth().unwrap();
    assert_eq!((reth.va, reth.dma_len), (BASE, 601));
    pair.b.receive_all(&sent);
    let answers = pair.b.sent();
    assert_eq!(
        opcodes(&answers),
        [
            Opcode::RcReadResponseFirst,
            Opcode::RcReadResponseMiddle,
            Opcode::RcReadResponseLast,
            Opcode::RcAcknowledge
        ]
    );
    assert_eq!(
        answers.iter().map(Packet::psn).collect::<Vec<_>>(),
        [0xff_fffe, 0xff_ffff, 0, 1]
    );
    assert_eq!((answers[0].aeth().msn, answers[3].aeth().msn), (1, 2));
    pair.a.receive_all(&answers);
    assert_eq!(pair.a.send_wcs(), [(1, OK), (2, OK)]);
}

#[test]
fn a_lost_response_is_asked_for_again() {
    for lost in 0..4 {
        let mut pair = Pair::new(&Setup::default());
        let operation = read(&pair);
        post(&mut pair.a, 1, operation, RECV, 1000);
        pair.a.send(2, 10);
        pair.b.recv(2, 10);
        pair.b.receive_all(&pair.a.sent());
        let mut answers = pair.b.sent();
        answers.remove(lost);
        pair.a.receive_all(&answers);
        assert!(pair.a.send_wcs().is_empty());
        // What follows shows the loss at once, and only once.
        let again = pair.a.sent();
        assert_eq!(
            opcodes(&again),
            [Opcode::RcReadRequest, Opcode::RcSendOnly],
            "{lost}"
        );
        let reth = again[0].roce().reth().unwrap();
        let offset = lost as u32 * 256;
        assert_eq!((reth.va, reth.dma_len), (BASE + u64::from(offset), 1000 - offset));
        assert_eq!(again[0].psn(), (0xff_fffe + lost as u32) & 0xff_ffff);
        pair.b.receive_all(&again);
        pair.run();
        assert_eq!(pair.a.send_wcs(), [(1, OK), (2, OK)]);
        assert_eq!(pair.a.target(1000), pair.b.source(1000));
        assert_eq!(pair.b.recv_wcs(), [(2, OK)]);
        assert_eq!(pair.a.counter("timeouts"), 0);
    }
}

#[test]
fn a_lost_request_is_sent_again_after_the_timeout() {
    let mut pair = Pair::new(&Setup::default());
    let operation = read(&pair);
    post(&mut pair.a, 1, operation, RECV, 1000);
    assert_eq!(pair.a.sent().len(), 1);
    pair.a.wait(TIMEOUT);
    pair.run();
    assert_eq!(pair.a.send_wcs(), [(1, OK)]);
}

#[test]
fn long_reads_are_asked_for_in_parts_and_stay_so() {
    // Sixteen packets is the window to begin with.
    let mut pair = Pair::new(&Setup {
        window: 256 * 64,
        ..Setup::default()
    });
    let operation = read(&pair);
    post(&mut pair.a, 1, operation, RECV, 100_000);
    let first = pair.a.sent();
    assert_eq!(first.len(), 1);
    let part = first[0].roce().reth().unwrap().dma_len;
    assert!(part < 20 * 256, "{part}");
    pair.b.receive_all(&first);
    let answers = pair.b.sent();
    // The last response of the part is lost: the request for it ends where the part did.
    pair.a.receive_all(&answers[..answers.len() - 1]);
    let beyond = pair.a.sent();
    pair.a.wait(TIMEOUT);
    let again = pair.a.sent();
    assert!(!beyond.is_empty());
    assert_eq!(again[0].roce().reth().unwrap().dma_len, 256);
    pair.b.receive_all(&again);
    pair.run();
    assert_eq!(pair.a.send_wcs(), [(1, OK)]);
    assert_eq!(pair.a.target(100_000), pair.b.source(100_000));
}

#[test]
fn what_was_asked_for_as_one_is_so_again() {
    let mut pair = Pair::new(&Setup {
        window: 256 * 64,
        ..Setup::default()
    });
    let operation = read(&pair);
    let asked = |packet: &Packet| (packet.psn(), packet.roce().reth().unwrap().dma_len);
    post(&mut pair.a, 1, operation, RECV, 100_000);
    // The request is lost, and with that the window halves.
    let (psn, lost) = asked(&pair.a.sent()[0]);
    pair.a.wait(TIMEOUT);
    let again = pair.a.sent();
    assert_eq!(again.iter().map(asked).collect::<Vec<_>>(), [(psn, lost)]);
    pair.b.receive(&again[0]);
    let mut answers = pair.b.sent();
    // Two responses are lost. All that is missing of the request is asked for at once each time: a responder that has
    // answered a later part again might refuse an earlier one.
    answers.remove(6);
    answers.remove(2);
    pair.a.receive_all(&answers[..4]);
    let rest = pair.a.sent();
    let part = (psn.wrapping_add(2) & 0xff_ffff, lost - 2 * 256);
    assert_eq!(rest.iter().map(asked).collect::<Vec<_>>(), [part]);
    pair.a.receive_all(&answers[4..]);
    assert!(pair.a.sent().is_empty());
    pair.b.receive_all(&rest);
    pair.run();
    assert_eq!(pair.a.send_wcs(), [(1, OK)]);
    assert_eq!(pair.a.target(100_000), pair.b.source(100_000));
}

#[test]
fn as_many_reads_at_once_as_agreed() {
    let mut pair = Pair::new(&Setup::default());
    for i in 0..10 {
        let operation = read(&pair);
        post(&mut pair.a, i, operation, RECV, 300);
    }
    let sent = pair.a.sent();
    assert_eq!(sent.len(), 4);
    pair.b.receive_all(&sent);
    pair.run();
    assert_eq!(pair.a.send_wcs().len(), 10);
    // One more than it agreed to is refused.
    let mut pair = Pair::new(&Setup::default());
    let limit = QpAttr {
        state: QpState::Sqd,
        max_rd_atomic: 8,
        ..QpAttr::default()
    };
    pair.a.go_to(QpState::Sqd);
    pair.a
        .modify(&limit, QpAttrMask::STATE | QpAttrMask::MAX_QP_RD_ATOMIC)
        .unwrap();
    pair.a.go_to(QpState::Rts);
    for i in 0..5 {
        let operation = read(&pair);
        post(&mut pair.a, i, operation, RECV, 300);
    }
    let sent = pair.a.sent();
    pair.b.receive_all(&sent);
    assert_eq!(pair.b.state(), QpState::Err);
    let answers = pair.b.sent();
    assert_eq!(
        answers.last().unwrap().ack().0,
        0x61,
        "after the answers of those before"
    );
    pair.a.receive_all(&answers);
    let wcs = pair.a.send_wcs();
    assert_eq!(wcs[..4], [(0, OK), (1, OK), (2, OK), (3, OK)]);
    assert_eq!(wcs[4], (4, WcStatus::RemInvReqErr));
}

#[test]
fn a_fence_waits_for_reads() {
    let mut pair = Pair::new(&Setup::default());
    let operation = read(&pair);
    post(&mut pair.a, 1, operation, RECV, 300);
    let sges = [pair.a.sge(RECV, 300)];
    let operation = write(&pair);
    let wr = SendWr {
        wr_id: 2,
        operation,
        flags: SendFlags::FENCE,
        sges: &sges,
        ..SendWr::default()
    };
    pair.a.post(&wr).unwrap();
    let sent = pair.a.sent();
    assert_eq!(opcodes(&sent), [Opcode::RcReadRequest]);
    pair.b.receive_all(&sent);
    pair.run();
    assert_eq!(pair.a.send_wcs(), [(1, OK), (2, OK)]);
    assert_eq!(
        pair.b.target(300),
        pair.b.source(300),
        "what was read has been written"
    );
}

#[test]
fn atomics_are_done_once() {
    let mut pair = Pair::new(&Setup::default());
    let word = |side: &Side, addr| {
        side.memory
            .with(addr, 8, |bytes| u64::from_ne_bytes(bytes.try_into().unwrap()))
    };
    let put = |side: &Side, addr, value: u64| {
        side.memory
            .with(addr, 8, |bytes| bytes.copy_from_slice(&value.to_ne_bytes()));
    };
    let (addr, rkey) = (RECV, pair.b.mr.rkey);
    put(&pair.b, addr, 40);
    post(
        &mut pair.a,
        1,
        Operation::FetchAdd { addr, rkey, add: 2 },
        BASE,
        8,
    );
    let request = pair.a.sent();
    pair.b.receive_all(&request);
    let lost = pair.b.sent();
    assert_eq!(opcodes(&lost), [Opcode::RcAtomicAcknowledge]);
    pair.a.wait(TIMEOUT);
    pair.run();
    assert_eq!(pair.a.send_wcs(), [(1, OK)]);
    assert_eq!((word(&pair.a, BASE), word(&pair.b, addr)), (40, 42));
    for (compare, swap, after) in [(42, 7, 7), (42, 8, 7)] {
        let before = word(&pair.b, addr);
        post(
            &mut pair.a,
            2,
            Operation::CompareSwap {
                addr,
                rkey,
                compare,
                swap,
            },
            BASE,
            8,
        );
        pair.run();
        assert_eq!(pair.a.send_wcs(), [(2, OK)]);
        assert_eq!((word(&pair.a, BASE), word(&pair.b, addr)), (before, after));
    }
    assert_eq!(pair.b.counter("duplicates"), 1);
}

#[test]
fn what_the_peer_may_not_do() {
    use NakKind::{Invalid, Operational};
    enum NakKind {
        Invalid,
        Access,
        Operational,
    }
    let rkey = |pair: &Pair| pair.b.mr.rkey;
    type Make = fn(u32) -> Operation;
    let cases: [(Make, Access, NakKind); 9] = [
        (
            |k| Operation::Write {
                addr: BASE,
                rkey: k ^ 1,
            },
            Access::all(),
            NakKind::Access,
        ),
        (
            |k| Operation::Write {
                addr: BASE - 1,
                rkey: k,
            },
            Access::all(),
            NakKind::Access,
        ),
        (
            |k| Operation::Read {
                addr: BASE,
                rkey: k ^ 1,
            },
            Access::all(),
            NakKind::Access,
        ),
        (
            |k| Operation::Read {
                addr: BASE - 8,
                rkey: k,
            },
            Access::all(),
            NakKind::Access,
        ),
        (
            |k| Operation::Write { addr: BASE, rkey: k },
            Access::REMOTE_READ,
            Invalid,
        ),
        (
            |k| Operation::Read { addr: BASE, rkey: k },
            Access::REMOTE_WRITE,
            Invalid,
        ),
        (
            |k| Operation::FetchAdd {
                addr: BASE,
                rkey: k,
                add: 1,
            },
            Access::REMOTE_WRITE,
            Invalid,
        ),
        (
            |k| Operation::FetchAdd {
                addr: BASE,
                rkey: k ^ 1,
                add: 1,
            },
            Access::all(),
            NakKind::Access,
        ),
        (
            |k| Operation::Write {
                addr: BASE + 4096,
                rkey: k,
            },
            Access::all(),
            Operational,
        ),
    ];
    for (make, access, kind) in cases {
        let mut pair = Pair::new(&Setup::default());
        let attr = QpAttr {
            state: QpState::Rts,
            access,
            ..QpAttr::default()
        };
        pair.b
            .modify(&attr, QpAttrMask::STATE | QpAttrMask::ACCESS_FLAGS)
            .unwrap();
        pair.b.memory.unmap(BASE + 4096, 8);
        let operation = make(rkey(&pair));
        post(&mut pair.a, 1, operation, BASE, 8);
        pair.run();
        let (status, event) = match kind {
            Invalid => (WcStatus::RemInvReqErr, AsyncEvent::QpRequestError(pair.b.qpn)),
            NakKind::Access => (WcStatus::RemAccessErr, AsyncEvent::QpAccessError(pair.b.qpn)),
            Operational => (WcStatus::RemOpErr, AsyncEvent::QpFatal(pair.b.qpn)),
        };
        assert_eq!(pair.a.send_wcs(), [(1, status)]);
        assert_eq!(pair.b.events(), [event]);
        assert_eq!(pair.b.state(), QpState::Err);
    }
}

#[test]
fn a_region_that_ends_in_mid_read() {
    let mut pair = Pair::new(&Setup {
        mtu: PathMtu::Mtu256,
        ..Setup::default()
    });
    let operation = read(&pair);
    post(&mut pair.a, 1, operation, RECV, 20_000);
    pair.b.receive_all(&pair.a.sent());
    let mut some = Sent {
        room: 5,
        ..Sent::default()
    };
    pair.b.dev.transmit(pair.b.now, &mut some);
    pair.b.dev.dereg_mr(pair.b.mr.lkey).unwrap();
    pair.a.receive_all(&some.packets);
    pair.run();
    assert_eq!(pair.a.send_wcs(), [(1, WcStatus::RemAccessErr)]);
    assert_eq!(pair.b.state(), QpState::Err);
}

#[test]
fn uc_write_without_right_is_dropped() {
    let mut pair = Pair::new(&Setup {
        qp_type: QpType::Uc,
        ..Setup::default()
    });
    let rkey = pair.b.mr.rkey ^ 1;
    post(&mut pair.a, 1, Operation::Write { addr: RECV, rkey }, BASE, 600);
    let operation = write(&pair);
    post(&mut pair.a, 2, operation, BASE, 300);
    pair.run();
    assert_eq!(pair.b.target(300), pair.a.source(300));
    assert_eq!(pair.b.counter("drop_access"), 1);
    assert_eq!(pair.b.state(), QpState::Rts);
}

#[test]
fn operations_that_are_refused_at_once() {
    let mut pair = Pair::new(&Setup::default());
    let mut refused = |operation, flags, len| {
        let sges = [pair.a.sge(BASE, len)];
        let wr = SendWr {
            wr_id: 1,
            operation,
            flags,
            sges: &sges,
            ..SendWr::default()
        };
        assert_eq!(pair.a.post(&wr), Err(VerbsError::Invalid));
    };
    let none = SendFlags::empty();
    refused(
        Operation::FetchAdd {
            addr: 8,
            rkey: 0,
            add: 1,
        },
        SendFlags::INLINE,
        8,
    );
    refused(Operation::Read { addr: 0, rkey: 0 }, SendFlags::INLINE, 8);
    let mut pair = Pair::new(&Setup {
        qp_type: QpType::Uc,
        ..Setup::default()
    });
    let sges = [pair.a.sge(BASE, 8)];
    let operation = Operation::Read { addr: 0, rkey: 0 };
    let wr = SendWr {
        wr_id: 1,
        operation,
        flags: none,
        sges: &sges,
        ..SendWr::default()
    };
    assert_eq!(pair.a.post(&wr), Err(VerbsError::Invalid));
}

#[test]
fn in_err_no_read_is_answered() {
    let mut pair = Pair::new(&Setup::default());
    pair.b.recv(1, 100);
    let operation = read(&pair);
    post(&mut pair.a, 1, operation, RECV, 1000);
    pair.a.send(2, 10);
    pair.b.receive_all(&pair.a.sent());
    pair.b.go_to(QpState::Err);
    assert!(pair.b.sent().is_empty());
    assert_eq!(pair.b.recv_wcs(), [(1, OK)]);
}
