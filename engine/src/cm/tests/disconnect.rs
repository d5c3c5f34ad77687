//! DREQ, DREP, timewait.

use super::*;

const MS: Duration = Duration::from_millis(1);

#[test]
fn either_side_can_end_it() {
    for side in [A, B] {
        let mut pair = Pair::new();
        let ids = pair.connect();
        let (other, mine, theirs) = if side == A {
            (B, ids.0, ids.1)
        } else {
            (A, ids.1, ids.0)
        };
        let now = pair.now;
        pair.end(side).cm.disconnect(now, mine, b"bye").unwrap();
        let dreq = only(pair.sent(side));
        let message = message!(dreq, Dreq);
        assert_eq!(message.remote_qpn, if side == A { 0x22 } else { 0x11 });
        pair.give(other, &dreq);
        let EventKind::DisconnectRequested { private_data } = only(pair.end(other).events()) else {
            panic!("not asked");
        };
        assert_eq!(private_data[..3], *b"bye");
        // Nothing happens until the program agrees.
        pair.give(other, &dreq);
        assert!(pair.sent(other).is_empty() && pair.end(other).events().is_empty());
        pair.end(other).cm.answer_disconnect(now, theirs, b"ok").unwrap();
        let drep = only(pair.sent(other));
        assert_eq!(drep.tid, dreq.tid);
        pair.give(other, &dreq);
        assert_eq!(only(pair.sent(other)), drep);
        pair.give(side, &drep);
        let EventKind::Disconnected { private_data } = only(pair.end(side).events()) else {
            panic!("not disconnected");
        };
        assert_eq!(private_data[..2], *b"ok");
        let timewait = Some(State::Timewait);
        assert_eq!(pair.states(ids.0, ids.1), (timewait, timewait));
        for side in [A, B] {
            pair.now = now;
            assert_eq!(pair.wait(side), MS * 2048);
            assert_eq!(pair.end(side).events(), [EventKind::TimewaitExit]);
        }
        pair.ends_empty();
    }
}

#[test]
fn both_may_end_it_at_once() {
    let mut pair = Pair::new();
    let (a, b) = pair.connect();
    pair.a.cm.disconnect(pair.now, a, b"a").unwrap();
    pair.b.cm.disconnect(pair.now, b, b"b").unwrap();
    let (from_a, from_b) = (only(pair.sent(A)), only(pair.sent(B)));
    pair.give(A, &from_b);
    pair.give(B, &from_a);
    for side in [A, B] {
        assert!(matches!(
            only(pair.end(side).events()),
            EventKind::Disconnected { .. }
        ));
        assert_eq!(pair.bring(side), ["DREP"]);
        assert!(pair.end(side).events().is_empty());
    }
    let timewait = Some(State::Timewait);
    assert_eq!(pair.states(a, b), (timewait, timewait));
    pair.ends_empty();
}

#[test]
fn a_peer_that_is_gone_is_waited_for_as_long_as_linux_does() {
    let mut pair = Pair::new();
    let (a, _) = pair.connect();
    pair.a.cm.disconnect(pair.now, a, &[]).unwrap();
    for _ in 0..16 {
        assert_eq!(pair.lose(A), ["DREQ"]);
        assert_eq!(pair.wait(A), MS * 6144);
    }
    assert!(pair.sent(A).is_empty());
    assert_eq!(pair.a.events(), [EventKind::DisconnectTimeout]);
    assert_eq!(pair.wait(A), MS * 2048);
    assert_eq!(pair.a.events(), [EventKind::TimewaitExit]);
    assert_eq!(pair.a.cm.state(a), Some(State::Idle));
    pair.ends_empty();
}

#[test]
fn a_program_that_is_gone_has_its_connection_closed() {
    for side in [A, B] {
        let mut pair = Pair::new();
        let ids = pair.connect();
        let (other, mine, theirs) = if side == A {
            (B, ids.0, ids.1)
        } else {
            (A, ids.1, ids.0)
        };
        let now = pair.now;
        pair.end(side).cm.destroy(now, mine);
        assert_eq!(pair.end(side).cm.state(mine), None);
        let status = only(pair.end(side).cm.status());
        assert!(status.destroyed && status.state == State::DreqSent);
        assert_eq!(pair.lose(side), ["DREQ"]);
        pair.wait(side);
        assert_eq!(pair.bring(side), ["DREQ"]);
        let now = pair.now;
        assert!(matches!(
            only(pair.end(other).events()),
            EventKind::DisconnectRequested { .. }
        ));
        // So does the other program.
        pair.end(other).cm.destroy(now, theirs);
        assert_eq!(pair.bring(other), ["DREP"]);
        for side in [A, B] {
            pair.now = now;
            pair.wait(side);
            assert!(pair.end(side).events().is_empty());
            assert_eq!(pair.end(side).cm.status(), []);
        }
    }
}

#[test]
fn a_program_that_is_gone_does_not_wait_for_hours() {
    let mut pair = Pair::new();
    let mut request = pair.request_parameters();
    request.local_cm_response_timeout = 31;
    request.packet_life_time = 31;
    let a = pair.a.cm.request(pair.now, &request).unwrap();
    pair.bring(A);
    let b = pair.b.event().comm_id;
    let reply = pair.reply_parameters();
    pair.b.cm.reply(pair.now, b, &reply).unwrap();
    pair.bring(B);
    pair.a.cm.ready(pair.now, a, &[]).unwrap();
    pair.bring(A);
    pair.b.cm.destroy(pair.now, b);
    let begin = pair.now;
    while pair.b.cm.deadline().is_some() {
        pair.wait(B);
        pair.lose(B);
    }
    assert!(pair.now.since(begin) < Duration::from_secs(300));
    assert_eq!(pair.b.cm.status(), []);
}

#[test]
fn it_can_end_before_the_peer_is_known_to_be_ready() {
    let mut pair = Pair::new();
    let (a, b) = pair.reply();
    pair.a.cm.ready(pair.now, a, &[]).unwrap();
    pair.lose(A);
    pair.a.cm.disconnect(pair.now, a, &[]).unwrap();
    pair.bring(A);
    assert!(matches!(
        only(pair.b.events()),
        EventKind::DisconnectRequested { .. }
    ));
    assert_eq!(pair.b.cm.state(b), Some(State::DreqReceived));
    pair.b.cm.answer_disconnect(pair.now, b, &[]).unwrap();
    pair.bring(B);
    assert!(matches!(only(pair.a.events()), EventKind::Disconnected { .. }));
    pair.ends_empty();
}

#[test]
fn what_is_not_known_is_disconnected_without_ado() {
    let mut pair = Pair::new();
    let (a, b) = pair.connect();
    pair.b.cm.forget(b);
    assert!(pair.sent(B).is_empty());
    pair.a.cm.disconnect(pair.now, a, &[]).unwrap();
    let dreq = only(pair.sent(A));
    pair.give(B, &dreq);
    let mad = only(pair.sent(B));
    let drep = message!(mad, Drep);
    assert_eq!(
        (mad.tid, drep.local_comm_id, drep.remote_comm_id),
        (dreq.tid, b, a)
    );
    pair.give(A, &mad);
    assert!(matches!(only(pair.a.events()), EventKind::Disconnected { .. }));
}

#[test]
fn the_queue_pair_must_be_the_right_one() {
    let mut pair = Pair::new();
    let (a, b) = pair.connect();
    pair.a.cm.disconnect(pair.now, a, &[]).unwrap();
    let mad = only(pair.sent(A));
    let mut dreq = message!(mad, Dreq);
    dreq.remote_qpn += 1;
    let wrong = CmMad {
        message: dreq.into(),
        ..mad
    };
    pair.give(B, &wrong);
    assert_eq!((pair.b.events(), pair.b.counter("cm_drop_qpn")), (vec![], 1));
    assert_eq!(pair.b.cm.state(b), Some(State::Established));
    // Nor may another host end it.
    let stranger = End::new(9);
    let way = pair.b.way_to(stranger.address);
    pair.b.cm.receive(pair.now, &way, &mad.to_bytes());
    assert_eq!(pair.b.cm.state(b), Some(State::Established));
    pair.give(B, &mad);
    assert_eq!(pair.b.cm.state(b), Some(State::DreqReceived));
}
