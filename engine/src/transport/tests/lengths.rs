//! Messages of no bytes, of pieces without bytes, inline data of the most bytes, and messages longer than there are.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ferroce_wire::{Opcode, PathMtu};

use super::pair::*;
use crate::memory::{AtomicOp, Fault, Memory};
use crate::verbs::*;

const OK: WcStatus = WcStatus::Success;

/// Every operation that carries a message of any length.
fn operations(pair: &Pair) -> Vec<(Operation, bool)> {
    let (addr, rkey, imm) = (RECV, pair.b.mr.rkey, 7);
    let mut all = vec![
        (Operation::Send, true),
        (Operation::SendImm(imm), true),
        (Operation::Write { addr, rkey }, false),
        (Operation::WriteImm { addr, rkey, imm }, true),
    ];
    if pair.a.qp_type() != QpType::Uc {
        all.push((Operation::Read { addr, rkey }, false));
    }
    all
}

fn pairs() -> impl Iterator<Item = Pair> {
    [QpType::Rc, QpType::Uc, QpType::XrcSend]
        .into_iter()
        .map(|qp_type| {
            let mut setup = Setup {
                qp_type,
                ..Setup::default()
            };
            setup.cap.max_inline_data = 1024;
            Pair::new(&setup)
        })
}

fn post(pair: &mut Pair, operation: Operation, flags: SendFlags, sges: &[Sge]) {
    let wr = SendWr {
        wr_id: 1,
        operation,
        flags,
        sges,
        srqn: pair.b.xrc.map_or(0, |(_, [first, _])| first.0),
        ..SendWr::default()
    };
    pair.a.post(&wr).unwrap();
}

#[test]
fn no_bytes_at_all() {
    for mut pair in pairs() {
        // Without entries; with one, whose key is not looked at; with several.
        let nowhere = Sge {
            addr: 5,
            length: 0,
            lkey: 5,
        };
        for (operation, takes_receive) in operations(&pair) {
            for sges in [&[][..], &[nowhere], &[nowhere; 4]] {
                for flags in [SendFlags::empty(), SendFlags::SOLICITED | SendFlags::FENCE] {
                    if takes_receive {
                        pair.b.recv(2, 0);
                    }
                    post(&mut pair, operation, flags, sges);
                    let sent = pair.a.sent();
                    assert_eq!(sent.len(), 1);
                    let bth = *sent[0].roce().bth();
                    assert_eq!(bth.solicited, takes_receive && !flags.is_empty());
                    pair.b.receive_all(&sent);
                    pair.run();
                    assert_eq!(pair.a.send_wcs(), [(1, OK)], "{operation:?}");
                    let received = pair.b.recv_full();
                    assert_eq!(received.len(), usize::from(takes_receive));
                    assert!(received.iter().all(|wc| wc.status == OK && wc.byte_len == 0));
                }
            }
        }
    }
}

#[test]
fn remote_memory_is_not_looked_at_for_no_bytes() {
    for mut pair in pairs() {
        for (operation, _) in operations(&pair) {
            let (addr, rkey) = (3, 5);
            let wrong = match operation {
                Operation::Write { .. } => Operation::Write { addr, rkey },
                Operation::Read { .. } => Operation::Read { addr, rkey },
                _ => continue,
            };
            post(&mut pair, wrong, SendFlags::empty(), &[]);
            pair.run();
            assert_eq!(pair.a.send_wcs(), [(1, OK)]);
        }
    }
}

#[test]
fn pieces_without_bytes() {
    for mut pair in pairs() {
        let lens = [0, 100, 0, 501];
        let pieces = |side: &Side, start: u64| {
            let mut addr = start;
            lens.map(|len| {
                let sge = side.sge(addr, len);
                addr += u64::from(len);
                sge
            })
        };
        for (operation, takes_receive) in operations(&pair) {
            pair.b.memory.with(RECV, 601, |bytes| bytes.fill(9));
            let local = match operation {
                Operation::Read { .. } => pieces(&pair.a, RECV),
                _ => pieces(&pair.a, BASE),
            };
            if takes_receive {
                let sges = pieces(&pair.b, RECV);
                let wr = RecvWr {
                    wr_id: 2,
                    sges: &sges,
                };
                match pair.b.srq() {
                    Some(srq) => pair.b.dev.post_srq_recv(srq, &wr).unwrap(),
                    None => pair.b.dev.post_recv(pair.b.qpn, &wr).unwrap(),
                }
            }
            post(&mut pair, operation, SendFlags::empty(), &local);
            pair.run();
            assert_eq!(pair.a.send_wcs(), [(1, OK)], "{operation:?}");
            assert_eq!(pair.b.recv_full().len(), usize::from(takes_receive));
            match operation {
                Operation::Read { .. } => assert_eq!(pair.a.target(601), [9; 601]),
                _ => assert_eq!(pair.b.target(601), pair.a.source(601)),
            }
        }
    }
}

#[test]
fn inline_data_of_the_most_bytes() {
    for mut pair in pairs() {
        for (operation, takes_receive) in operations(&pair) {
            if matches!(operation, Operation::Read { .. }) {
                continue;
            }
            pair.b.memory.with(RECV, 1024, |bytes| bytes.fill(0));
            // In more pieces than a WQE has entries; no key is looked at.
            let sges: Vec<Sge> = (0..8)
                .map(|i| Sge {
                    addr: BASE + 128 * i,
                    length: 128,
                    lkey: 0,
                })
                .collect();
            if takes_receive {
                pair.b.recv(2, 1024);
            }
            let flags = SendFlags::INLINE | SendFlags::FENCE | SendFlags::SOLICITED;
            post(&mut pair, operation, flags, &sges);
            let source = pair.a.source(1024);
            // It was copied.
            pair.a.memory.with(BASE, 1024, |bytes| bytes.fill(0xaa));
            let sent = pair.a.sent();
            assert_eq!(sent.len(), 4, "packets of 256 bytes");
            let solicited: Vec<bool> = sent.iter().map(|p| p.roce().bth().solicited).collect();
            assert_eq!(solicited, [false, false, false, takes_receive]);
            pair.b.receive_all(&sent);
            pair.run();
            assert_eq!(pair.a.send_wcs(), [(1, OK)]);
            assert_eq!(pair.b.target(1024), source);
            pair.b.recv_full();
        }
    }
}

#[test]
fn the_longest_message() {
    let pair = Pair::new(&Setup::default());
    let (addr, rkey) = (RECV, pair.b.mr.rkey);
    let sges = |last: u32| [pair.a.sge(BASE, 1 << 30), pair.a.sge(BASE, (1 << 30) + last)];
    let (longest, longer) = (sges(0), sges(1));
    let operations = [
        Operation::Send,
        Operation::Write { addr, rkey },
        Operation::Read { addr, rkey },
    ];
    for operation in operations {
        let mut pair = Pair::new(&Setup::default());
        let wr = SendWr {
            operation,
            sges: &longer,
            ..SendWr::default()
        };
        pair.a.post(&wr).unwrap();
        pair.run();
        assert_eq!(pair.a.send_wcs(), [(0, WcStatus::LocLenErr)]);
        // 2^31 bytes are 2^23 packets of 256: the next message begins where a PSN could mean two packets.
        let mut pair = Pair::new(&Setup::default());
        let wr = SendWr { sges: &longest, ..wr };
        pair.a.post(&wr).unwrap();
        pair.a.post(&wr).unwrap();
        pair.a.go_to(QpState::Err);
        assert_eq!(pair.a.send_wcs().len(), 2);
    }
}

/// Memory of any length, whose bytes say where they are: words that hold their addresses, in both devices.
#[derive(Default)]
struct Endless {
    written: AtomicU64,
}

/// Where messages come from, and where they go.
const FROM: u64 = 1 << 40;
const TO: u64 = 2 << 40;

impl Memory for Endless {
    fn read(&self, addr: u64, into: &mut [u8]) -> Result<(), Fault> {
        into[..8].copy_from_slice(&(addr - FROM).to_ne_bytes());
        Ok(())
    }

    fn write(&self, addr: u64, from: &[u8]) -> Result<(), Fault> {
        assert_eq!(from[..8], (addr - TO).to_ne_bytes());
        let before = self.written.fetch_add(from.len() as u64, Ordering::Relaxed);
        assert_eq!(before, addr - TO, "in order, and once");
        Ok(())
    }

    fn atomic(&self, addr: u64, _: AtomicOp) -> Result<u64, Fault> {
        Err(Fault { addr })
    }

    fn populate(&self, _: u64, _: u64, _: bool) -> Result<(), Fault> {
        Ok(())
    }
}

#[test]
fn the_longest_message_arrives() {
    const LONGEST: u32 = 1 << 31;
    for (qp_type, read) in [(QpType::Uc, false), (QpType::Rc, true)] {
        let memory = Arc::new(Endless::default());
        let mut pair = Pair::new(&Setup {
            qp_type,
            mtu: PathMtu::Mtu4096,
            window: 1 << 20,
            memory: Some(memory.clone()),
            ..Setup::default()
        });
        let register = |side: &mut Side, addr| {
            let len = LONGEST.into();
            let mr = side
                .dev
                .reg_mr(side.pd, addr, len, addr, Access::LOCAL_WRITE | REMOTE);
            mr.unwrap()
        };
        let (local, remote) = if read { (TO, FROM) } else { (FROM, TO) };
        let mr = register(&mut pair.a, local);
        // In pieces, so that the message is where no single one is.
        let piece = |n: u32, length: u32| Sge {
            addr: local + (u64::from(n) << 30),
            length,
            lkey: mr.lkey,
        };
        let sges = [piece(0, 1 << 30), piece(1, 1 << 30)];
        let there = register(&mut pair.b, remote);
        if read {
            let operation = Operation::Read {
                addr: remote,
                rkey: there.rkey,
            };
            post(&mut pair, operation, SendFlags::empty(), &sges);
        } else {
            let whole = [Sge {
                addr: remote,
                length: LONGEST,
                lkey: there.lkey,
            }];
            let wr = RecvWr {
                wr_id: 2,
                sges: &whole,
            };
            pair.b.dev.post_recv(pair.b.qpn, &wr).unwrap();
            post(&mut pair, Operation::Send, SendFlags::empty(), &sges);
        }
        loop {
            let (from_a, from_b) = (pair.a.some(), pair.b.some());
            if from_a.is_empty() && from_b.is_empty() {
                break;
            }
            pair.b.receive_all(&from_a);
            pair.a.receive_all(&from_b);
        }
        assert_eq!(pair.a.send_wcs(), [(1, OK)]);
        assert_eq!(memory.written.load(Ordering::Relaxed), LONGEST.into());
        if !read {
            let wc = pair.b.recv_full()[0];
            assert_eq!((wc.status, wc.byte_len), (OK, LONGEST));
        }
    }
}

#[test]
fn lengths_that_no_message_has() {
    for (opcode, qp_type) in [
        (Opcode::RcWriteFirst, QpType::Rc),
        (Opcode::RcReadRequest, QpType::Rc),
        (Opcode::UcWriteFirst, QpType::Uc),
    ] {
        let mut pair = Pair::new(&Setup {
            qp_type,
            ..Setup::default()
        });
        let (addr, rkey) = (RECV, pair.b.mr.rkey);
        let operation = match opcode {
            Opcode::RcReadRequest => Operation::Read { addr, rkey },
            _ => Operation::Write { addr, rkey },
        };
        let sges = [pair.a.sge(BASE, 300)];
        post(&mut pair, operation, SendFlags::empty(), &sges);
        let mut sent = pair.a.sent();
        assert_eq!(sent[0].opcode(), opcode);
        sent[0].bytes[24..28].copy_from_slice(&((1u32 << 31) + 1).to_be_bytes());
        pair.b.receive_all(&sent);
        let answers = pair.b.sent();
        if qp_type == QpType::Rc {
            assert_eq!(answers[0].ack().0, 0x61);
        } else {
            assert!(answers.is_empty());
            assert_eq!(pair.b.counter("drop_sequence"), 2);
        }
        assert_eq!(pair.b.target(300), [0; 300]);
    }
}

#[test]
fn a_peer_without_resources_refuses_what_takes_one() {
    let mut pair = Pair::new(&Setup::default());
    let attr = QpAttr {
        state: QpState::Sqd,
        ..QpAttr::default()
    };
    pair.b.go_to(QpState::Sqd);
    pair.b
        .modify(&attr, QpAttrMask::STATE | QpAttrMask::MAX_DEST_RD_ATOMIC)
        .unwrap();
    pair.b.go_to(QpState::Rts);
    let (addr, rkey) = (RECV, pair.b.mr.rkey);
    post(&mut pair, Operation::Read { addr, rkey }, SendFlags::empty(), &[]);
    pair.run();
    assert_eq!(pair.a.send_wcs(), [(1, WcStatus::RemInvReqErr)]);
}
