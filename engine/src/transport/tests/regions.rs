//! Regions of every kind under work: null, zero-based, of all addresses, and registered again while in use.

use super::pair::*;
use crate::device::MrChange;
use crate::verbs::*;

const OK: WcStatus = WcStatus::Success;

fn post(side: &mut Side, operation: Operation, sges: &[Sge]) {
    let wr = SendWr {
        wr_id: 1,
        operation,
        flags: SendFlags::empty(),
        sges,
        ud: None,
        srqn: 0,
    };
    side.post(&wr).unwrap();
}

fn entry(lkey: u32, addr: u64, length: u32) -> Sge {
    Sge { addr, length, lkey }
}

#[test]
fn a_null_region_gives_zeros() {
    for qp_type in [QpType::Rc, QpType::Uc, QpType::Ud] {
        let mut pair = Pair::new(&Setup {
            qp_type,
            ..Setup::default()
        });
        let null = pair.a.dev.alloc_null_mr(pair.a.pd).unwrap();
        assert_eq!(null.rkey, 0);
        let grh = if qp_type == QpType::Ud { 40 } else { 0 };
        pair.b.recv(1, 30 + grh);
        let sges = [
            pair.a.sge(BASE, 10),
            entry(null.lkey, 0xdead_beef, 10),
            pair.a.sge(BASE + 10, 10),
        ];
        let wr = SendWr {
            wr_id: 1,
            operation: Operation::Send,
            flags: SendFlags::empty(),
            sges: &sges,
            ud: (qp_type == QpType::Ud).then(|| UdDest {
                path: pair.a.path_to(pair.b.addr),
                qpn: pair.b.qpn,
                qkey: QKEY,
            }),
            srqn: 0,
        };
        pair.a.post(&wr).unwrap();
        pair.run();
        assert_eq!(pair.b.recv_wcs(), [(1, OK)]);
        let (source, target) = (pair.a.source(20), pair.b.target((30 + grh) as usize));
        assert_eq!(
            target[grh as usize..],
            [&source[..10], &[0; 10], &source[10..]].concat()
        );
    }
}

#[test]
fn a_null_region_forgets() {
    let mut pair = Pair::new(&Setup::default());
    let null = pair.b.dev.alloc_null_mr(pair.b.pd).unwrap();
    let sges = [
        pair.b.sge(RECV, 10),
        entry(null.lkey, 1 << 60, 500),
        pair.b.sge(RECV + 10, 10),
    ];
    let wr = RecvWr {
        wr_id: 5,
        sges: &sges,
    };
    pair.b.dev.post_recv(pair.b.qpn, &wr).unwrap();
    pair.a.send(1, 520);
    pair.run();
    assert_eq!(pair.b.recv_wcs(), [(5, OK)]);
    let source = pair.a.source(520);
    assert_eq!(pair.b.target(20), [&source[..10], &source[510..]].concat());
    assert_eq!(pair.b.target(600)[20..], [0; 580]);

    // What a READ and an atomic bring back.
    let null = pair.a.dev.alloc_null_mr(pair.a.pd).unwrap();
    let rkey = pair.b.mr.rkey;
    post(
        &mut pair.a,
        Operation::Read { addr: BASE, rkey },
        &[entry(null.lkey, 0, 1000)],
    );
    let add = Operation::FetchAdd {
        addr: RECV + 1024,
        rkey,
        add: 3,
    };
    post(&mut pair.a, add, &[entry(null.lkey, 7, 8)]);
    pair.run();
    assert_eq!(pair.a.send_wcs(), [(1, OK), (1, OK), (1, OK)]);
    assert_eq!(pair.b.target(1032)[1024..], 3u64.to_ne_bytes());
}

#[test]
fn no_peer_reaches_a_null_region() {
    let mut pair = Pair::new(&Setup::default());
    let null = pair.b.dev.alloc_null_mr(pair.b.pd).unwrap();
    let sges = [pair.a.sge(BASE, 8)];
    post(
        &mut pair.a,
        Operation::Write {
            addr: 0,
            rkey: null.lkey,
        },
        &sges,
    );
    pair.run();
    assert_eq!(pair.a.send_wcs(), [(1, WcStatus::RemAccessErr)]);
}

#[test]
fn offsets_and_all_addresses() {
    let all = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ;
    for kind in [Access::ZERO_BASED, Access::ON_DEMAND] {
        let mut pair = Pair::new(&Setup::default());
        let register = |side: &mut Side| {
            let (addr, len) = if kind == Access::ZERO_BASED {
                (BASE, MEMORY as u64)
            } else {
                (0, u64::MAX)
            };
            side.dev.reg_mr(side.pd, addr, len, addr, all | kind).unwrap()
        };
        let (a, b) = (register(&mut pair.a), register(&mut pair.b));
        let origin = if kind == Access::ZERO_BASED { BASE } else { 0 };
        let local = [entry(a.lkey, BASE - origin, 3000)];
        post(
            &mut pair.a,
            Operation::Write {
                addr: RECV - origin,
                rkey: b.rkey,
            },
            &local,
        );
        pair.run();
        assert_eq!(pair.a.send_wcs(), [(1, OK)]);
        assert_eq!(pair.b.target(3000), pair.a.source(3000));
        // Where nothing is: within the one region, beyond the other.
        let beyond = BASE - origin + MEMORY as u64;
        post(
            &mut pair.a,
            Operation::Read {
                addr: beyond,
                rkey: b.rkey,
            },
            &local,
        );
        pair.run();
        let error = if kind == Access::ZERO_BASED {
            WcStatus::RemAccessErr
        } else {
            WcStatus::RemOpErr
        };
        assert_eq!(pair.a.send_wcs(), [(1, error)]);
    }
}

#[test]
fn rights_and_domain_hold_for_all_addresses_too() {
    let mut pair = Pair::new(&Setup::default());
    let other = pair.b.dev.alloc_pd().unwrap();
    let register = |side: &mut Side, pd, access| {
        let access = Access::ON_DEMAND | access;
        side.dev.reg_mr(pd, 0, u64::MAX, 0, access).unwrap().rkey
    };
    let pd = pair.b.pd;
    let read_only = register(&mut pair.b, pd, Access::REMOTE_READ);
    let elsewhere = register(&mut pair.b, other, Access::LOCAL_WRITE | Access::REMOTE_WRITE);
    for rkey in [read_only, elsewhere] {
        let sges = [pair.a.sge(BASE, 8)];
        post(&mut pair.a, Operation::Write { addr: RECV, rkey }, &sges);
        pair.run();
        assert_eq!(pair.a.send_wcs(), [(1, WcStatus::RemAccessErr)]);
        pair = Pair::new(&Setup::default());
    }
}

#[test]
fn the_old_place_of_a_region_is_out_of_reach_at_once() {
    for what in 0..3 {
        let mut pair = Pair::new(&Setup::default());
        let rkey = pair.b.mr.rkey;
        let sges = [pair.a.sge(BASE, 5000)];
        post(&mut pair.a, Operation::Write { addr: RECV, rkey }, &sges);
        let sent = pair.a.sent();
        assert!(sent.len() > 3);
        pair.b.receive_all(&sent[..2]);
        let other = pair.b.dev.alloc_pd().unwrap();
        let nothing = MrChange::default();
        let change = match what {
            0 => MrChange {
                translation: Some((BASE, 64, BASE)),
                ..nothing
            },
            1 => MrChange {
                pd: Some(other),
                ..nothing
            },
            _ => MrChange {
                access: Some(Access::LOCAL_WRITE | Access::REMOTE_READ),
                ..nothing
            },
        };
        pair.b.dev.rereg_mr(pair.b.mr.lkey, &change).unwrap();
        pair.b.receive_all(&sent[2..]);
        pair.run();
        assert_eq!(pair.a.send_wcs(), [(1, WcStatus::RemAccessErr)], "{what}");
        assert_eq!(pair.b.target(512), pair.a.source(512));
        assert_eq!(pair.b.target(5000)[512..], [0; 4488], "{what}");
    }
}

#[test]
fn work_that_was_posted_finds_the_new_place() {
    // The same names now mean other memory: the half that was not sent yet comes from there.
    let mut pair = Pair::new(&Setup::default());
    pair.b.recv(1, 600);
    pair.a.memory.with(RECV, 600, |bytes| bytes.fill(9));
    let moved = MrChange {
        translation: Some((RECV, 4096, BASE)),
        ..MrChange::default()
    };
    pair.a.send(1, 600);
    pair.a.dev.rereg_mr(pair.a.mr.lkey, &moved).unwrap();
    pair.run();
    assert_eq!(pair.b.recv_wcs(), [(1, OK)]);
    assert_eq!(pair.b.target(600), [9; 600]);
}
