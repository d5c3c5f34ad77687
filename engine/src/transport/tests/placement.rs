//! FLUSH and ATOMIC WRITE.

use ferroce_wire::{Feth, Opcode, Syndrome};

use super::pair::*;
use crate::verbs::*;

const OK: WcStatus = WcStatus::Success;

fn post(side: &mut Side, wr_id: u64, operation: Operation, flags: SendFlags, addr: u64, len: u32) {
    let sges = [side.sge(addr, len)];
    let wr = SendWr {
        wr_id,
        operation,
        flags,
        sges: if len > 0 { &sges } else { &[] },
        ..SendWr::default()
    };
    side.post(&wr).unwrap();
}

fn flush(pair: &Pair, addr: u64, length: u32, selectivity: Selectivity) -> Operation {
    Operation::Flush {
        addr,
        rkey: pair.b.mr.rkey,
        length,
        placement: Placement::GLOBAL,
        selectivity,
    }
}

fn atomic_write(pair: &Pair, addr: u64) -> Operation {
    Operation::AtomicWrite {
        addr,
        rkey: pair.b.mr.rkey,
    }
}

fn opcodes(packets: &[Packet]) -> Vec<Opcode> {
    packets.iter().map(Packet::opcode).collect()
}

const NONE: SendFlags = SendFlags::empty();

#[test]
fn what_goes_over_the_wire() {
    let mut pair = Pair::new(&Setup::default());
    let (addr, rkey) = (RECV, pair.b.mr.rkey);
    post(&mut pair.a, 1, Operation::Write { addr, rkey }, NONE, BASE, 300);
    let operation = flush(&pair, RECV, 300, Selectivity::Range);
    post(&mut pair.a, 2, operation, SendFlags::SOLICITED, 0, 0);
    let operation = atomic_write(&pair, RECV + 512);
    post(&mut pair.a, 3, operation, NONE, BASE + 8, 8);
    let sent = pair.a.sent();
    use Opcode::{RcAtomicWrite, RcFlush, RcReadResponseOnly, RcWriteFirst, RcWriteLast};
    assert_eq!(
        opcodes(&sent),
        [RcWriteFirst, RcWriteLast, RcFlush, RcAtomicWrite]
    );
    assert_eq!([0, 1, 2, 3].map(|i| sent[i].psn()), [0xff_fffe, 0xff_ffff, 0, 1]);
    let roce = sent[2].roce();
    let feth = roce.feth().unwrap();
    assert_eq!(
        (feth.placement, feth.selectivity),
        (Feth::GLOBAL_VISIBILITY, Feth::RANGE)
    );
    let reth = roce.reth().unwrap();
    assert_eq!((reth.va, reth.rkey, reth.dma_len), (RECV, rkey, 300));
    assert!(roce.payload().is_empty() && !roce.bth().solicited);
    let roce = sent[3].roce();
    let reth = roce.reth().unwrap();
    assert_eq!((reth.va, reth.rkey, reth.dma_len), (RECV + 512, rkey, 8));
    assert_eq!(roce.payload(), &pair.a.source(16)[8..]);
    // Each is answered by a READ response without data.
    pair.b.receive_all(&sent);
    let answers = pair.b.sent();
    assert_eq!(opcodes(&answers), [RcReadResponseOnly; 2]);
    for (i, answer) in answers.iter().enumerate() {
        assert_eq!((answer.psn(), answer.aeth().msn), (i as u32, i as u32 + 2));
        assert!(answer.roce().payload().is_empty());
    }
    pair.a.receive_all(&answers);
    let mut wcs = [Wc::default(); 4];
    assert_eq!(pair.a.send_cq.poll(&mut wcs), 3);
    let opcodes = [WcOpcode::RdmaWrite, WcOpcode::Flush, WcOpcode::AtomicWrite];
    for (wc, opcode) in wcs.iter().zip(opcodes) {
        assert_eq!((wc.status, wc.opcode), (OK, opcode));
    }
    assert_eq!(pair.b.target(520)[512..], pair.a.source(16)[8..]);
}

#[test]
fn a_flush_of_a_region_or_of_nothing() {
    let mut pair = Pair::new(&Setup::default());
    // Where the whole region is meant, the range is not looked at.
    let whole = flush(&pair, 0, u32::MAX, Selectivity::Region);
    post(&mut pair.a, 1, whole, NONE, 0, 0);
    let empty = flush(&pair, BASE + MEMORY as u64, 0, Selectivity::Range);
    post(&mut pair.a, 2, empty, NONE, 0, 0);
    pair.run();
    assert_eq!(pair.a.send_wcs(), [(1, OK), (2, OK)]);
}

#[test]
fn an_atomic_write_is_done_once() {
    let mut pair = Pair::new(&Setup::default());
    let operation = atomic_write(&pair, RECV);
    post(&mut pair.a, 1, operation, SendFlags::INLINE, BASE, 8);
    let operation = flush(&pair, RECV, 8, Selectivity::Range);
    post(&mut pair.a, 2, operation, NONE, 0, 0);
    let sent = pair.a.sent();
    pair.b.receive_all(&sent);
    let answers = pair.b.sent();
    assert_eq!(pair.b.target(8), pair.a.source(8));
    // The answers are lost; meanwhile the word has changed.
    pair.b.memory.with(RECV, 8, |word| word.fill(7));
    pair.a.wait(TIMEOUT);
    let again = pair.a.sent();
    assert_eq!(again, sent);
    pair.b.receive_all(&again);
    assert_eq!(pair.b.sent(), answers);
    assert_eq!(pair.b.target(8), [7; 8]);
    pair.a.receive_all(&answers);
    assert_eq!(pair.a.send_wcs(), [(1, OK), (2, OK)]);
    assert_eq!(pair.b.counter("duplicates"), 2);
}

#[test]
fn an_acknowledgement_is_no_answer() {
    let mut pair = Pair::new(&Setup::default());
    let operation = flush(&pair, RECV, 8, Selectivity::Range);
    post(&mut pair.a, 1, operation, NONE, 0, 0);
    pair.a.send(2, 10);
    let sent = pair.a.sent();
    let (addr, psn) = (pair.b.addr, sent[1].psn());
    pair.a.answer(addr, psn, Syndrome::Ack { credit: 31 }, 2);
    assert!(pair.a.send_wcs().is_empty());
    assert_eq!(opcodes(&pair.a.sent()), opcodes(&sent), "it is asked for again");
}

#[test]
fn answers_with_data_are_bad() {
    let mut pair = Pair::new(&Setup::default());
    let (addr, rkey) = (BASE, pair.b.mr.rkey);
    let operation = flush(&pair, RECV, 8, Selectivity::Range);
    post(&mut pair.a, 1, operation, NONE, 0, 0);
    let flushes = pair.a.sent();
    let mut read = flushes[0].clone();
    // A READ of 8 bytes in its place.
    read.bytes[0] = Opcode::RcReadRequest.value();
    read.bytes.drain(12..16);
    read.bytes[12..20].copy_from_slice(&addr.to_be_bytes());
    read.bytes[20..24].copy_from_slice(&rkey.to_be_bytes());
    pair.b.receive(&read);
    let answers = pair.b.sent();
    pair.a.receive_all(&answers);
    assert_eq!(pair.a.send_wcs(), [(1, WcStatus::BadRespErr)]);
}

#[test]
fn a_fence_and_the_depth_wait_for_them() {
    let mut pair = Pair::new(&Setup::default());
    for wr_id in 0..5 {
        let operation = flush(&pair, RECV, 8, Selectivity::Range);
        post(&mut pair.a, wr_id, operation, NONE, 0, 0);
    }
    let operation = atomic_write(&pair, RECV);
    post(&mut pair.a, 5, operation, SendFlags::FENCE, BASE, 8);
    pair.b.recv(6, 10);
    post(&mut pair.a, 6, Operation::Send, SendFlags::FENCE, BASE, 8);
    let sent = pair.a.sent();
    assert_eq!(opcodes(&sent), [Opcode::RcFlush; 4], "max_rd_atomic is 4");
    pair.b.receive_all(&sent);
    let answers = pair.b.sent();
    pair.a.receive_all(&answers[..1]);
    let fifth = pair.a.sent();
    assert_eq!(opcodes(&fifth), [Opcode::RcFlush]);
    pair.a.receive_all(&answers[1..]);
    assert!(pair.a.sent().is_empty(), "fenced");
    pair.b.receive_all(&fifth);
    pair.run();
    assert_eq!(pair.a.send_wcs().len(), 7);
}

#[test]
fn refused_by_the_responder() {
    use WcStatus::{RemAccessErr, RemInvReqErr};
    let rkey = Pair::new(&Setup::default()).b.mr.rkey;
    let plain = Operation::Flush {
        addr: RECV,
        rkey,
        length: 8,
        placement: Placement::GLOBAL,
        selectivity: Selectivity::Range,
    };
    let flush = |change: &dyn Fn(&mut u64, &mut u32, &mut u32)| {
        let (mut addr, mut rkey, mut length) = (RECV, rkey, 8);
        change(&mut addr, &mut rkey, &mut length);
        Operation::Flush {
            addr,
            rkey,
            length,
            placement: Placement::GLOBAL,
            selectivity: Selectivity::Range,
        }
    };
    let end = BASE + MEMORY as u64;
    let persistent = Operation::Flush {
        addr: RECV,
        rkey,
        length: 8,
        placement: Placement::all(),
        selectivity: Selectivity::Region,
    };
    let none = Access::empty();
    let crooked = Operation::AtomicWrite { addr: RECV + 4, rkey };
    for (case, (operation, status, taken)) in [
        (flush(&|_, rkey, _| *rkey ^= 1), RemAccessErr, none),
        (flush(&|addr, _, _| *addr = end - 7), RemAccessErr, none),
        (flush(&|_, _, length| *length = MEMORY as u32), RemAccessErr, none),
        (plain, RemInvReqErr, Access::FLUSH_GLOBAL),
        (persistent, RemInvReqErr, none),
        (
            Operation::AtomicWrite {
                addr: RECV,
                rkey: rkey ^ 1,
            },
            RemAccessErr,
            none,
        ),
        (Operation::AtomicWrite { addr: end, rkey }, RemAccessErr, none),
        (crooked, RemInvReqErr, none),
        (
            Operation::AtomicWrite { addr: RECV, rkey },
            RemInvReqErr,
            Access::REMOTE_WRITE,
        ),
    ]
    .into_iter()
    .enumerate()
    {
        let mut pair = Pair::new(&Setup::default());
        assert_eq!(pair.b.mr.rkey, rkey, "keys are the same in each pair");
        let attr = QpAttr {
            access: REMOTE - taken,
            ..QpAttr::default()
        };
        pair.b.modify(&attr, QpAttrMask::ACCESS_FLAGS).unwrap();
        let len = if matches!(operation, Operation::AtomicWrite { .. }) {
            8
        } else {
            0
        };
        post(&mut pair.a, 1, operation, NONE, BASE, len);
        pair.run();
        assert_eq!(pair.a.send_wcs(), [(1, status)], "case {case}");
        assert_eq!(pair.b.target(8), [0; 8]);
        assert_eq!(pair.b.state(), QpState::Err);
    }
}

#[test]
fn memory_that_gives_no_right_to_flush() {
    let mut pair = Pair::new(&Setup::default());
    let (pd, access) = (pair.b.pd, Access::LOCAL_WRITE | Access::REMOTE_WRITE);
    let mr = pair.b.dev.reg_mr(pd, BASE, 4096, BASE, access).unwrap();
    let addr = BASE;
    let write = Operation::AtomicWrite { addr, rkey: mr.rkey };
    post(&mut pair.a, 1, write, NONE, RECV, 8);
    let operation = Operation::Flush {
        addr,
        rkey: mr.rkey,
        length: 8,
        placement: Placement::GLOBAL,
        selectivity: Selectivity::Region,
    };
    post(&mut pair.a, 2, operation, NONE, 0, 0);
    pair.run();
    assert_eq!(pair.a.send_wcs(), [(1, OK), (2, WcStatus::RemAccessErr)]);
    // Nothing here outlasts a loss of power.
    let access = access | Access::FLUSH_PERSISTENT;
    let persistent = pair.b.dev.reg_mr(pd, BASE, 4096, BASE, access);
    assert_eq!(persistent, Err(VerbsError::NotSupported));
}

#[test]
fn malformed_on_the_wire() {
    for case in 0..5 {
        let mut pair = Pair::new(&Setup::default());
        let operation = match case {
            0..3 => flush(&pair, RECV, 8, Selectivity::Range),
            _ => atomic_write(&pair, RECV),
        };
        let len = if case < 3 { 0 } else { 8 };
        post(&mut pair.a, 1, operation, NONE, BASE, len);
        let mut sent = pair.a.sent();
        let bytes = &mut sent[0].bytes;
        match case {
            0 => bytes[15] = 0,          // no placement
            1 => bytes[15] = 1 | 4,      // a placement that does not exist
            2 => bytes[15] = 1 | 2 << 4, // a selectivity that does not exist
            3 => bytes[19] = 4,          // not aligned
            _ => bytes[27] = 4,          // fewer bytes than are there
        }
        pair.b.receive_all(&sent);
        assert_eq!(pair.b.sent()[0].ack().0, 0x61, "case {case}");
        assert_eq!(pair.b.target(8), [0; 8]);
    }
}

#[test]
fn what_can_be_posted() {
    let mut pair = Pair::new(&Setup::default());
    let rkey = pair.b.mr.rkey;
    let eight = [pair.a.sge(BASE, 8)];
    let (somewhere, nowhere) = [Placement::GLOBAL, Placement::empty()]
        .map(|placement| Operation::Flush {
            addr: RECV,
            rkey,
            length: 8,
            placement,
            selectivity: Selectivity::Range,
        })
        .into();
    let word = Operation::AtomicWrite { addr: RECV, rkey };
    for (qp_type, operation, sges) in [
        (QpType::Rc, nowhere, &[][..]),
        (QpType::Rc, somewhere, &eight),
        (QpType::Uc, somewhere, &[]),
        (QpType::Uc, word, &eight),
    ] {
        let setup = Setup {
            qp_type,
            ..Setup::default()
        };
        let wr = SendWr {
            operation,
            sges,
            ..SendWr::default()
        };
        assert_eq!(Pair::new(&setup).a.post(&wr), Err(VerbsError::Invalid), "{wr:?}");
    }
    // As for other atomics, one of another length ends in an error.
    post(&mut pair.a, 1, word, NONE, BASE, 7);
    pair.run();
    assert_eq!(pair.a.send_wcs(), [(1, WcStatus::LocLenErr)]);
}

#[test]
fn more_flushes_than_resources() {
    // A peer that does not count FLUSHes as READs may have many under way.
    let mut pair = Pair::new(&Setup::default());
    let mut packets = Vec::new();
    for psn in 0..200u32 {
        let operation = flush(&pair, RECV, 8, Selectivity::Range);
        post(&mut pair.a, 1, operation, NONE, 0, 0);
        let mut packet = pair.a.sent().remove(0);
        let psn = (0xff_fffe + psn) & 0xff_ffff;
        packet.bytes[9..12].copy_from_slice(&psn.to_be_bytes()[1..]);
        packets.push(packet);
        pair.a.go_to(QpState::Reset);
        let setup = Setup::default();
        pair.a.ready_to_receive(pair.b.qpn, pair.b.addr, &setup);
        pair.a.ready_to_send(&setup);
    }
    pair.b.receive_all(&packets[..100]);
    assert_eq!(opcodes(&pair.b.sent()), [Opcode::RcReadResponseOnly; 100]);
    pair.b.receive_all(&packets[100..]);
    assert_eq!(opcodes(&pair.b.sent()), [Opcode::RcReadResponseOnly; 100]);
    // Those of the last 128 can be answered again.
    pair.b.receive_all(&packets[70..]);
    assert_eq!(pair.b.sent().len(), 128);
}
