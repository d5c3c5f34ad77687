//! Objects, limits and misuse.

use std::sync::Arc;

use ferroce_wire::PathMtu;

use super::*;
use crate::memory::sim::SimMemory;
use crate::verbs::*;

fn device(limits: Limits) -> Device {
    Device::new(DeviceConfig {
        slot: 3,
        memory: Arc::new(SimMemory::new(4096, 1 << 16)),
        seed: [7; 32],
        mtu: PathMtu::Mtu1024,
        limits,
        window: Box::new(|_| 1 << 20),
    })
}

fn init(pd: PdId, cq: &Arc<Cq>, qp_type: QpType) -> QpInit {
    let cap = QpCap {
        max_send_wr: 2,
        max_recv_wr: 2,
        max_send_sge: 2,
        max_recv_sge: 2,
        max_inline_data: 64,
    };
    QpInit {
        pd: Some(pd),
        qp_type,
        cap,
        send_cq: Some(cq.clone()),
        recv_cq: Some(cq.clone()),
        srq: None,
        xrcd: None,
        sq_sig_all: false,
    }
}

#[test]
fn objects_in_use_are_busy() {
    let mut dev = device(Limits::default());
    let pd = dev.alloc_pd().unwrap();
    let cq = dev.create_cq(8, 0, None).unwrap();
    let srq = dev.create_srq(pd, 4, 1, 0).unwrap();
    let mr = dev.reg_mr(pd, 4096, 4096, 0, Access::LOCAL_WRITE).unwrap();
    let (qpn, _) = dev
        .create_qp(QpInit {
            srq: Some(srq),
            ..init(pd, &cq, QpType::Rc)
        })
        .unwrap();
    assert_eq!(qpn >> 16, 3);
    assert_eq!(dev.dealloc_pd(pd), Err(VerbsError::Busy));
    assert_eq!(dev.destroy_cq(&cq), Err(VerbsError::Busy));
    assert_eq!(dev.destroy_srq(srq), Err(VerbsError::Busy));
    dev.destroy_qp(Time::ZERO, qpn).unwrap();
    assert_eq!(dev.destroy_qp(Time::ZERO, qpn), Err(VerbsError::NotFound));
    dev.destroy_cq(&cq).unwrap();
    assert_eq!(dev.destroy_cq(&cq), Err(VerbsError::NotFound));
    dev.destroy_srq(srq).unwrap();
    assert_eq!(dev.dealloc_pd(pd), Err(VerbsError::Busy), "the region is left");
    dev.dereg_mr(mr.lkey).unwrap();
    let (window, key) = dev.alloc_mw(pd, MwType::Type1).unwrap();
    assert_eq!(dev.dereg_mr(key), Err(VerbsError::NotFound), "no region");
    assert_eq!(dev.dealloc_pd(pd), Err(VerbsError::Busy), "the window is left");
    dev.dealloc_mw(window).unwrap();
    assert_eq!(dev.dealloc_mw(window), Err(VerbsError::NotFound));
    dev.dealloc_pd(pd).unwrap();
    assert_eq!(dev.alloc_mw(pd, MwType::Type1), Err(VerbsError::Invalid));
    assert_eq!(dev.reg_mr(pd, 0, 1, 0, Access::empty()), Err(VerbsError::Invalid));
}

#[test]
fn limits_are_enforced() {
    let mut dev = device(Limits {
        max_qp: 1,
        max_pd: 1,
        max_mr: 1,
        max_mw: 1,
        max_cq: 1,
        max_cqe: 8,
        ..Limits::default()
    });
    let pd = dev.alloc_pd().unwrap();
    assert_eq!(dev.alloc_pd(), Err(VerbsError::NoMemory));
    assert!(matches!(dev.create_cq(0, 0, None), Err(VerbsError::Invalid)));
    assert!(matches!(dev.create_cq(9, 0, None), Err(VerbsError::Invalid)));
    let cq = dev.create_cq(8, 0, None).unwrap();
    assert!(matches!(dev.create_cq(8, 0, None), Err(VerbsError::NoMemory)));
    let mut too_many = init(pd, &cq, QpType::Rc);
    too_many.cap.max_send_sge = dev.limits().max_sge + 1;
    assert_eq!(dev.create_qp(too_many), Err(VerbsError::Invalid));
    dev.create_qp(init(pd, &cq, QpType::Ud)).unwrap();
    assert_eq!(
        dev.create_qp(init(pd, &cq, QpType::Ud)),
        Err(VerbsError::NoMemory)
    );
    dev.reg_mr(pd, 0, 1, 0, Access::empty()).unwrap();
    assert_eq!(
        dev.reg_mr(pd, 0, 1, 0, Access::empty()),
        Err(VerbsError::NoMemory)
    );
    let (window, _) = dev.alloc_mw(pd, MwType::Type1).unwrap();
    assert_eq!(dev.alloc_mw(pd, MwType::Type2), Err(VerbsError::NoMemory));
    dev.dealloc_mw(window).unwrap();
    dev.alloc_mw(pd, MwType::Type2).unwrap();
}

#[test]
fn regions_that_are_refused() {
    let mut dev = device(Limits::default());
    let pd = dev.alloc_pd().unwrap();
    let too_long = dev.limits().max_mr_size + 1;
    let (write, all) = (Access::LOCAL_WRITE, u64::MAX);
    use VerbsError::{Invalid, NotSupported};
    for (addr, len, iova, access, error) in [
        (all, 2, 0, write, Invalid),
        (0, 2, all, write, Invalid),
        (0, too_long, 0, write, Invalid),
        (0, all, 0, write, Invalid),
        (4096, all, 0, write | Access::ON_DEMAND, Invalid),
        (0, all, 4096, write | Access::ON_DEMAND, Invalid),
        (0, 8, 0, Access::REMOTE_WRITE, Invalid),
        (0, 8, 0, Access::REMOTE_ATOMIC | Access::REMOTE_READ, Invalid),
        (0, 8, 0, write | Access::FLUSH_PERSISTENT, NotSupported),
    ] {
        let refused = dev.reg_mr(pd, addr, len, iova, access);
        assert_eq!(refused, Err(error), "{addr:#x} {len:#x} {iova:#x} {access:?}");
    }
    assert_eq!(dev.dereg_mr(1), Err(VerbsError::NotFound));
    let optional = Access::REMOTE_READ | Access::MW_BIND | Access::HUGETLB | Access::RELAXED_ORDERING;
    for access in [optional, optional | Access::ON_DEMAND] {
        let mr = dev.reg_mr(pd, 4096, 8, 4096, access).unwrap();
        assert_eq!(dev.query_mr(mr.lkey), Ok((4096, 8, access)));
    }
}

#[test]
fn a_region_is_registered_again() {
    let mut dev = device(Limits::default());
    let (pd, other) = (dev.alloc_pd().unwrap(), dev.alloc_pd().unwrap());
    let mr = dev.reg_mr(pd, 4096, 64, 0, Access::LOCAL_WRITE).unwrap();
    let rereg = |dev: &mut Device, change: MrChange| dev.rereg_mr(mr.lkey, &change);
    let nothing = MrChange::default();
    let wrong = [
        MrChange {
            access: Some(Access::REMOTE_WRITE),
            ..nothing
        },
        MrChange {
            translation: Some((u64::MAX, 2, 0)),
            ..nothing
        },
        MrChange {
            pd: Some(PdId(99)),
            ..nothing
        },
    ];
    for change in wrong {
        assert_eq!(rereg(&mut dev, change), Err(VerbsError::Invalid));
        assert_eq!(dev.query_mr(mr.lkey), Ok((4096, 64, Access::LOCAL_WRITE)));
    }
    let moved = MrChange {
        translation: Some((8192, 128, 8192)),
        pd: Some(other),
        access: Some(Access::REMOTE_READ),
    };
    rereg(&mut dev, moved).unwrap();
    assert_eq!(dev.query_mr(mr.lkey), Ok((8192, 128, Access::REMOTE_READ)));
    dev.dealloc_pd(pd).unwrap();
    assert_eq!(dev.dealloc_pd(other), Err(VerbsError::Busy));
    assert_eq!(dev.rereg_mr(mr.lkey ^ 1, &nothing), Err(VerbsError::NotFound));
    dev.dereg_mr(mr.lkey).unwrap();
    assert_eq!(rereg(&mut dev, nothing), Err(VerbsError::NotFound));
    dev.dealloc_pd(other).unwrap();
}

#[test]
fn what_can_be_paged_in() {
    let mut dev = device(Limits::default());
    let (pd, other) = (dev.alloc_pd().unwrap(), dev.alloc_pd().unwrap());
    let entry = |lkey, addr, length| Sge { addr, length, lkey };
    let plain = dev.reg_mr(pd, 4096, 64, 4096, Access::LOCAL_WRITE).unwrap().lkey;
    let demand = Access::ON_DEMAND;
    let read_only = dev.reg_mr(pd, 4096, 64, 0x10_0000, demand).unwrap().lkey;
    let writable = dev
        .reg_mr(pd, 0, u64::MAX, 0, demand | Access::LOCAL_WRITE)
        .unwrap()
        .lkey;
    let pageable = |pd, lkey, addr, length, write| dev.pageable(pd, &entry(lkey, addr, length), write);
    assert_eq!(pageable(pd, read_only, 0x10_0008, 56, false), Ok(4104));
    assert_eq!(
        pageable(pd, read_only, 0x10_0008, 57, false),
        Err(VerbsError::Fault)
    );
    assert_eq!(pageable(pd, read_only, 4096, 8, false), Err(VerbsError::Fault));
    assert_eq!(
        pageable(pd, read_only, 0x10_0000, 8, true),
        Err(VerbsError::NotPermitted)
    );
    assert_eq!(
        pageable(other, read_only, 0x10_0000, 8, false),
        Err(VerbsError::NotPermitted)
    );
    assert_eq!(pageable(pd, writable, 1 << 50, 8, true), Ok(1 << 50));
    assert_eq!(pageable(pd, plain, 4096, 8, false), Err(VerbsError::NotFound));
    assert_eq!(
        pageable(pd, writable ^ 1, 4096, 8, false),
        Err(VerbsError::NotFound)
    );
}

#[test]
fn numbers_and_keys_depend_on_the_seed_and_do_not_come_back_soon() {
    let numbers = |seed| {
        let mut dev = device(Limits::default());
        dev.rng = rand_chacha::ChaCha12Rng::from_seed([seed; 32]);
        let pd = dev.alloc_pd().unwrap();
        let cq = dev.create_cq(8, 0, None).unwrap();
        let mut all = Vec::new();
        for _ in 0..1000 {
            let (qpn, _) = dev.create_qp(init(pd, &cq, QpType::Ud)).unwrap();
            dev.destroy_qp(Time::ZERO, qpn).unwrap();
            all.push(qpn);
        }
        all
    };
    let mut first = numbers(1);
    assert_eq!(first, numbers(1));
    assert_ne!(first, numbers(2));
    first.sort_unstable();
    first.dedup();
    assert_eq!(first.len(), 1000);
}

#[test]
fn posting_by_state() {
    let mut dev = device(Limits::default());
    let pd = dev.alloc_pd().unwrap();
    let cq = dev.create_cq(8, 0, None).unwrap();
    let (qpn, _) = dev.create_qp(init(pd, &cq, QpType::Rc)).unwrap();
    let recv = RecvWr { wr_id: 5, sges: &[] };
    let send = SendWr {
        wr_id: 6,
        operation: Operation::Send,
        flags: SendFlags::empty(),
        sges: &[],
        ..SendWr::default()
    };
    assert_eq!(dev.post_recv(qpn, &recv), Err(VerbsError::Invalid));
    let attr = QpAttr {
        state: QpState::Init,
        port: 1,
        ..QpAttr::default()
    };
    let mask = QpAttrMask::STATE | QpAttrMask::PKEY_INDEX | QpAttrMask::PORT | QpAttrMask::ACCESS_FLAGS;
    let wrong_port = QpAttr { port: 2, ..attr };
    assert_eq!(
        dev.modify_qp(Time::ZERO, qpn, &wrong_port, mask),
        Err(VerbsError::Invalid)
    );
    dev.modify_qp(Time::ZERO, qpn, &attr, mask).unwrap();
    assert_eq!(dev.query_qp(qpn).unwrap().0.state, QpState::Init);
    assert_eq!(dev.post_send(Time::ZERO, qpn, &send), Err(VerbsError::Invalid));
    dev.post_recv(qpn, &recv).unwrap();
    dev.post_recv(qpn, &RecvWr { wr_id: 7, ..recv }).unwrap();
    assert_eq!(dev.post_recv(qpn, &recv), Err(VerbsError::NoMemory));
    let three = [Sge::default(); 3];
    assert_eq!(
        dev.post_recv(
            qpn,
            &RecvWr {
                wr_id: 8,
                sges: &three
            }
        ),
        Err(VerbsError::Invalid)
    );

    let error = QpAttr {
        state: QpState::Err,
        ..QpAttr::default()
    };
    dev.modify_qp(Time::ZERO, qpn, &error, QpAttrMask::STATE).unwrap();
    dev.post_send(Time::ZERO, qpn, &send).unwrap();
    let recv = RecvWr { wr_id: 9, ..recv };
    assert_eq!(
        dev.post_recv(qpn, &recv),
        Err(VerbsError::NoMemory),
        "two are not polled"
    );
    let mut out = [Wc::default(); 8];
    assert_eq!(cq.poll(&mut out[..1]), 1);
    dev.post_recv(qpn, &recv).unwrap();
    let n = cq.poll(&mut out[1..]) + 1;
    let flushed: Vec<_> = out[..n].iter().map(|wc| (wc.wr_id, wc.status)).collect();
    assert_eq!(flushed, [5, 7, 6, 9].map(|id| (id, WcStatus::WrFlushErr)));
}
