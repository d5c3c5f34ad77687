//! Unreliable datagram.

use std::net::IpAddr;

use ferroce_wire::{Opcode, PathMtu};

use super::pair::*;
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
    let got = pair.b.target(44);
    assert_eq!(got[..8], [0x60, 0, 0, 0, 0, 40, 17, 64]);
    assert_eq!((got[8], got[23], got[24], got[39]), (0xfe, 1, 0xfe, 2));
    assert_eq!(got[40..], pair.a.source(4));
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
    assert_eq!(datagram(&mut pair.a, 4, 4097, to, QKEY), Err(VerbsError::Invalid));
    let wr = SendWr {
        wr_id: 4,
        operation: Operation::Send,
        flags: SendFlags::empty(),
        sges: &[],
        ud: None,
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
    datagram(&mut pair.a, 2, 10, to, QKEY).unwrap();
    datagram(&mut pair.a, 3, 9, to, QKEY).unwrap();
    pair.run();
    assert_eq!(pair.b.recv_wcs(), [(1, OK)]);
    assert_eq!(pair.b.counter("drop_no_receive"), 2);
    assert_eq!(pair.b.state(), QpState::Rts);
}
