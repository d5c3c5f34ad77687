//! Several QPs towards one process, which has one receive buffer.

use ferroce_wire::{Aeth, Bth, Opcode, PathMtu, Psn, Syndrome};

use super::pair::*;
use crate::link::Path;
use crate::verbs::*;

/// A pair whose buffers hold four packets.
fn pair(timeout: u8) -> (Pair, Setup) {
    let setup = Setup {
        mtu: PathMtu::Mtu256,
        window: 64,
        timeout,
        psn: 0,
        ..Setup::default()
    };
    (Pair::new(&setup), setup)
}

/// Another QP of side a towards the same process as its first.
fn another(pair: &mut Pair, setup: &Setup) -> u32 {
    let side = &mut pair.a;
    let (_, init) = side.dev.query_qp(side.qpn).unwrap();
    let first = side.qpn;
    (side.qpn, _) = side.dev.create_qp(init).unwrap();
    side.ready_to_receive(pair.b.qpn, pair.b.addr, setup);
    side.ready_to_send(setup);
    std::mem::replace(&mut side.qpn, first)
}

/// Sends from a QP of side a.
fn send(pair: &mut Pair, qpn: u32, len: u32) {
    let first = std::mem::replace(&mut pair.a.qpn, qpn);
    pair.a.send(1, len);
    pair.a.qpn = first;
}

/// PSNs of what side a sends now.
fn sent(pair: &mut Pair) -> Vec<u32> {
    pair.a.sent().iter().map(Packet::psn).collect()
}

/// The peer acknowledges to a QP of side a.
fn acknowledge(pair: &mut Pair, qpn: u32, psn: u32) {
    let first = std::mem::replace(&mut pair.a.qpn, qpn);
    let peer = pair.b.addr;
    pair.a.answer(peer, psn, Syndrome::Ack { credit: 31 }, 1);
    pair.a.qpn = first;
}

#[test]
fn the_buffer_is_shared_and_each_has_its_turn() {
    let (mut pair, setup) = pair(14);
    let (first, second, third) = (pair.a.qpn, another(&mut pair, &setup), another(&mut pair, &setup));
    send(&mut pair, first, 6 * 256);
    let packets = pair.a.sent();
    assert_eq!(packets.iter().map(Packet::psn).collect::<Vec<_>>(), [0, 1, 2, 3]);
    assert!(
        packets[3].roce().bth().ack_request,
        "nothing else would tell that there is room again"
    );
    send(&mut pair, second, 256);
    send(&mut pair, third, 2 * 256);
    assert_eq!(sent(&mut pair), []);
    acknowledge(&mut pair, first, 1);
    assert_eq!(
        sent(&mut pair),
        [0, 0],
        "the second and the third have waited longer"
    );
    acknowledge(&mut pair, second, 0);
    assert_eq!(sent(&mut pair), [4]);
    acknowledge(&mut pair, first, 3);
    assert_eq!(sent(&mut pair), [1, 5], "of the third and the first");
    for (qpn, psn) in [(first, 5), (third, 1)] {
        acknowledge(&mut pair, qpn, psn);
    }
    assert_eq!(pair.a.send_wcs().len(), 3);
}

#[test]
fn a_qp_that_goes_leaves_its_room_to_the_others() {
    let (mut pair, setup) = pair(14);
    let (first, second) = (pair.a.qpn, another(&mut pair, &setup));
    send(&mut pair, first, 8 * 256);
    assert_eq!(sent(&mut pair).len(), 4);
    send(&mut pair, second, 4 * 256);
    assert_eq!(sent(&mut pair), []);
    let third = another(&mut pair, &setup);
    send(&mut pair, third, 256);
    let now = pair.a.now;
    pair.a.dev.destroy_qp(now, first).unwrap();
    assert_eq!(sent(&mut pair), [0, 1, 2, 3]);
    pair.a.qpn = second;
    pair.a.go_to(QpState::Err);
    assert_eq!(sent(&mut pair), [0]);
}

#[test]
fn a_peer_that_is_silent_for_ever_does_not_stop_the_others() {
    let (mut pair, setup) = pair(0);
    let (first, second) = (pair.a.qpn, another(&mut pair, &setup));
    send(&mut pair, first, 8 * 256);
    assert_eq!(sent(&mut pair).len(), 4);
    send(&mut pair, second, 256);
    assert_eq!(sent(&mut pair), []);
    while sent(&mut pair).is_empty() {
        let deadline = pair.a.dev.next_deadline().expect("a look at the peer");
        assert!(deadline.as_nanos() < 1_000_000_000);
        let wait = deadline.since(pair.a.now);
        pair.a.wait(wait);
    }
}

#[test]
fn what_reads_bring_shares_our_own_buffer() {
    let (mut pair, setup) = pair(14);
    let qpns: Vec<u32> = (0..5).map(|_| another(&mut pair, &setup)).collect();
    let sges = [pair.a.sge(RECV, 4 * 256)];
    let wr = SendWr {
        wr_id: 1,
        operation: Operation::Read {
            addr: BASE,
            rkey: pair.b.mr.rkey,
        },
        flags: SendFlags::empty(),
        sges: &sges,
        ud: None,
        srqn: 0,
    };
    let now = pair.a.now;
    for &qpn in &qpns {
        pair.a.dev.post_send(now, qpn, &wr).unwrap();
    }
    // Each asks for a part of its own to begin with.
    assert_eq!(sent(&mut pair), [0, 0, 0, 0], "the fifth has no room");
    let mut bytes = vec![0; 12 + 4 + 256 + 4];
    Bth::new(Opcode::RcReadResponseOnly, qpns[0], Psn::new(0)).emit(&mut bytes);
    Aeth {
        syndrome: Syndrome::Ack { credit: 31 },
        msn: 1,
    }
    .emit(&mut bytes[12..]);
    let path = Path {
        source: pair.b.addr,
        dest: pair.a.addr,
        ..pair.a.path_to(pair.b.addr)
    };
    pair.a.receive(&Packet { path, bytes });
    assert_eq!(sent(&mut pair), [0], "but before the first goes on");
}
