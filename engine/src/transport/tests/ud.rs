//! Unreliable datagram.

use std::net::IpAddr;

use ferroce_wire::{Opcode, PathMtu};

use super::pair::*;
use crate::device::Others;
use crate::link::{Path, RoceVersion};
use crate::verbs::*;

const OK: WcStatus = WcStatus::Success;

fn pair() -> Pair {
    Pair::new(&Setup {
        qp_type: QpType::Ud,
        mtu: PathMtu::Mtu4096,
        ..Setup::default()
    })
}

fn datagram(side: &mut Side, wr_id: u64, len: u32, to: (u32, IpAddr), qkey: u32) -> Result<(), VerbsError> {
    let sges = [side.sge(BASE, len)];
    let ud = Some(UdDest {
        path: side.path_to(to.1),
        qpn: to.0,
        qkey,
    });
    let wr = SendWr {
        wr_id,
        operation: Operation::SendImm(7),
        flags: SendFlags::empty(),
        sges: &sges,
        ud,
        ..SendWr::default()
    };
    side.post(&wr)
}

#[test]
fn datagrams_carry_their_network_header() {
    let mut pair = pair();
    let to = (pair.b.qpn, pair.b.addr);
    pair.b.recv(1, 5000);
    datagram(&mut pair.a, 1, 11, to, QKEY).unwrap();
    let sent = pair.a.sent();
    assert_eq!(
        (sent[0].opcode(), sent[0].psn()),
        (Opcode::UdSendOnlyImm, 0xff_fffe)
    );
    assert_eq!(pair.a.send_wcs(), [(1, OK)]);
    pair.b.receive_all(&sent);
    let wc = pair.b.recv_full()[0];
    assert_eq!(
        (wc.opcode, wc.byte_len, wc.src_qp, wc.imm),
        (WcOpcode::Recv, 51, pair.a.qpn, 7)
    );
    assert_eq!(wc.flags, WcFlags::GRH | WcFlags::WITH_IMM);
    assert_eq!(wc.service_level, 0b1010, "UDP over IPv4");
    let got = pair.b.target(51);
    assert_eq!(got[40..], pair.a.source(11));
    // IPv4, 20 + 8 + BTH 12 + DETH 8 + ImmDt 4 + 11 + pad 1 + ICRC 4 = 68 bytes, DF, TTL 64, UDP.
    assert_eq!(got[20..30], [0x45, 0, 0, 68, 0, 0, 0x40, 0, 64, 17]);
    assert_eq!(got[32..40], [10, 0, 0, 1, 10, 0, 0, 2]);
}

#[test]
fn ipv6_header_in_front() {
    let mut pair = pair();
    let to = (pair.b.qpn, "fe80::2".parse().unwrap());
    pair.a.addr = "fe80::1".parse().unwrap();
    pair.b.recv(1, 5000);
    datagram(&mut pair.a, 1, 4, to, QKEY).unwrap();
    pair.run();
    assert_eq!(pair.b.recv_full()[0].service_level, 0b1001, "UDP over IPv6");
    let got = pair.b.target(44);
    assert_eq!(got[..8], [0x60, 0, 0, 0, 0, 40, 17, 64]);
    assert_eq!((got[8], got[23], got[24], got[39]), (0xfe, 1, 0xfe, 2));
    assert_eq!(got[40..], pair.a.source(4));
}

#[test]
fn rocev1_has_its_grh_in_front() {
    let mut pair = pair();
    pair.b.recv(1, 5000);
    let sges = [pair.a.sge(BASE, 11)];
    let path = Path {
        version: RoceVersion::V1,
        traffic_class: 0x68,
        hop_limit: 3,
        flow_label: 0x1_2345,
        ..pair.a.path_to(pair.b.addr)
    };
    let ud = Some(UdDest {
        path,
        qpn: pair.b.qpn,
        qkey: QKEY,
    });
    let wr = SendWr {
        wr_id: 1,
        operation: Operation::Send,
        flags: SendFlags::empty(),
        sges: &sges,
        ud,
        ..SendWr::default()
    };
    pair.a.post(&wr).unwrap();
    let sent = pair.a.sent();
    assert_eq!(sent[0].path, path);
    pair.b.receive_all(&sent);
    let wc = pair.b.recv_full()[0];
    assert_eq!((wc.byte_len, wc.flags, wc.service_level), (51, WcFlags::GRH, 0));
    let got = pair.b.target(51);
    // Behind the GRH: BTH 12 + DETH 8 + 11 + pad 1 + ICRC 4 = 36 bytes; next header IBA, hop limit 3.
    assert_eq!(got[..8], [0x66, 0x81, 0x23, 0x45, 0, 36, 0x1b, 3]);
    let mapped = |last| [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, last];
    assert_eq!(got[8..40], [mapped(1), mapped(2)].concat());
    assert_eq!(got[40..], pair.a.source(11));
}

#[test]
fn keys_lengths_and_destinations() {
    let mut pair = pair();
    let to = (pair.b.qpn, pair.b.addr);
    for (wr_id, qkey) in [(1, QKEY), (2, QKEY + 1), (3, 0x8000_0000)] {
        pair.b.recv(wr_id, 4136);
        datagram(&mut pair.a, wr_id, 4096, to, qkey).unwrap();
        pair.run();
    }
    assert_eq!(
        pair.b.recv_wcs(),
        [(1, OK), (2, OK)],
        "bit 31 stands for the QP's own key"
    );
    assert_eq!(pair.b.counter("drop_qkey"), 1);
    let wr = SendWr {
        wr_id: 4,
        operation: Operation::Send,
        flags: SendFlags::empty(),
        sges: &[],
        ..SendWr::default()
    };
    assert_eq!(pair.a.post(&wr), Err(VerbsError::Invalid));
}

#[test]
fn what_finds_no_receive_is_dropped() {
    let mut pair = pair();
    let to = (pair.b.qpn, pair.b.addr);
    datagram(&mut pair.a, 1, 10, to, QKEY).unwrap();
    pair.run();
    pair.b.recv(1, 49);
    datagram(&mut pair.a, 3, 9, to, QKEY).unwrap();
    pair.run();
    assert_eq!(pair.b.recv_wcs(), [(1, OK)]);
    assert_eq!(pair.b.counter("drop_no_receive"), 1);
    assert_eq!(pair.b.state(), QpState::Rts);
}

/// Another UD QP of a side, ready to receive, with `receives` posted.
fn another(side: &mut Side, qkey: u32, receives: u64) -> u32 {
    let (_, init) = side.dev.query_qp(side.qpn).unwrap();
    let (qpn, _) = side.dev.create_qp(init).unwrap();
    let attr = QpAttr {
        state: QpState::Init,
        port: 1,
        qkey,
        ..QpAttr::default()
    };
    let mask = QpAttrMask::STATE | QpAttrMask::PKEY_INDEX | QpAttrMask::PORT | QpAttrMask::QKEY;
    side.dev.modify_qp(side.now, qpn, &attr, mask).unwrap();
    let attr = QpAttr {
        state: QpState::Rtr,
        ..attr
    };
    side.dev
        .modify_qp(side.now, qpn, &attr, QpAttrMask::STATE)
        .unwrap();
    for wr_id in 0..receives {
        let sges = [side.sge(RECV + 8192 * (wr_id + 1), 4136)];
        side.dev.post_recv(qpn, &RecvWr { wr_id, sges: &sges }).unwrap();
    }
    qpn
}

const MULTICAST: u32 = 0xff_ffff;

fn group(n: u8) -> IpAddr {
    IpAddr::from([239, 1, 2, n])
}

#[test]
fn every_qp_that_is_attached_gets_a_copy() {
    let mut pair = pair();
    let [twin, other_key, outsider] =
        [(QKEY, 2), (QKEY + 1, 2), (QKEY, 2)].map(|(qkey, n)| another(&mut pair.b, qkey, n));
    pair.b.recv(10, 4136);
    let dev = &mut pair.b.dev;
    assert_eq!(dev.attach_multicast(pair.b.qpn, group(1)), Ok(Others::None));
    assert_eq!(dev.attach_multicast(twin, group(1)), Ok(Others::Some));
    assert_eq!(
        dev.attach_multicast(twin, group(1)),
        Ok(Others::Some),
        "again is nothing"
    );
    assert_eq!(dev.attach_multicast(other_key, group(1)), Ok(Others::Some));
    assert_eq!(dev.attach_multicast(outsider, group(2)), Ok(Others::None));
    datagram(&mut pair.a, 1, 100, (MULTICAST, group(1)), QKEY).unwrap();
    pair.run();
    let got = pair.b.recv_full();
    let mut qpns: Vec<u32> = got.iter().map(|wc| wc.qp_num).collect();
    qpns.sort_unstable();
    let mut expected = [pair.b.qpn, twin];
    expected.sort_unstable();
    assert_eq!(qpns, expected);
    assert!(got.iter().all(|wc| wc.byte_len == 140 && wc.src_qp == pair.a.qpn));
    assert_eq!(pair.b.counter("drop_qkey"), 1);
    assert_eq!(
        pair.b.target(140)[36..40],
        [239, 1, 2, 1],
        "the GRH names the group"
    );
    assert_eq!(pair.b.target(140)[40..], pair.a.source(100));

    // One has no receive left: the other still gets its copy.
    datagram(&mut pair.a, 2, 100, (MULTICAST, group(1)), QKEY).unwrap();
    pair.run();
    assert_eq!(
        pair.b.recv_full().iter().map(|wc| wc.qp_num).collect::<Vec<_>>(),
        [twin]
    );
    assert_eq!(pair.b.counter("drop_no_receive"), 1);
}

#[test]
fn only_multicast_goes_to_groups() {
    let mut pair = pair();
    pair.b.recv(1, 4136);
    let qpn = pair.b.qpn;
    pair.b.dev.attach_multicast(qpn, group(1)).unwrap();
    // A group that nobody is attached to, a single QP of the group, the multicast QPN at a host's address.
    for to in [(MULTICAST, group(2)), (qpn, group(1)), (MULTICAST, pair.b.addr)] {
        datagram(&mut pair.a, 1, 10, to, QKEY).unwrap();
        pair.run();
    }
    assert_eq!(pair.b.recv_wcs(), []);
    assert_eq!(pair.b.counter("drop_group"), 3);
}

#[test]
fn attaching_and_detaching() {
    let mut pair = pair();
    let (qpn, twin) = (pair.b.qpn, another(&mut pair.b, QKEY, 0));
    let (dev, now) = (&mut pair.b.dev, pair.b.now);
    assert_eq!(dev.detach_multicast(qpn, group(1)), Err(VerbsError::Invalid));
    assert_eq!(
        dev.attach_multicast(qpn, IpAddr::from([10, 0, 0, 9])),
        Err(VerbsError::Invalid)
    );
    dev.attach_multicast(qpn, group(1)).unwrap();
    dev.attach_multicast(qpn, group(2)).unwrap();
    dev.attach_multicast(twin, group(1)).unwrap();
    assert_eq!(dev.detach_multicast(twin, group(2)), Err(VerbsError::Invalid));
    assert_eq!(dev.destroy_qp(now, qpn), Err(VerbsError::Busy));
    assert_eq!(dev.detach_multicast(qpn, group(1)), Ok(Others::Some));
    assert_eq!(dev.detach_multicast(twin, group(1)), Ok(Others::None));
    assert_eq!(dev.destroy_qp(now, qpn), Err(VerbsError::Busy));
    assert_eq!(dev.detach_multicast(qpn, group(2)), Ok(Others::None));
    dev.destroy_qp(now, qpn).unwrap();
    assert_eq!(dev.attach_multicast(qpn, group(1)), Err(VerbsError::NotFound));

    for n in 0..dev.limits().max_mcast_grp as u8 {
        dev.attach_multicast(twin, group(n)).unwrap();
    }
    assert_eq!(dev.attach_multicast(twin, group(200)), Err(VerbsError::NoMemory));
    dev.detach_multicast(twin, group(0)).unwrap();
    dev.attach_multicast(twin, group(200)).unwrap();

    let mut connected = Pair::new(&Setup::default());
    let qpn = connected.a.qpn;
    assert_eq!(
        connected.a.dev.attach_multicast(qpn, group(1)),
        Err(VerbsError::Invalid),
        "RC has no multicast"
    );
}

#[test]
fn a_receive_that_is_too_short_fails_and_the_qp_with_it() {
    for room in [39, 49] {
        let mut pair = pair();
        let to = (pair.b.qpn, pair.b.addr);
        pair.b.recv(1, room);
        pair.b.recv(2, 50);
        datagram(&mut pair.a, 1, 10, to, QKEY).unwrap();
        pair.run();
        assert_eq!(
            pair.b.recv_wcs(),
            [(1, WcStatus::LocLenErr), (2, WcStatus::WrFlushErr)]
        );
        assert_eq!(pair.b.state(), QpState::Err);
    }
}
