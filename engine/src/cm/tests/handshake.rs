//! REQ, REP, RTU, MRA, REJ.

use ferroce_wire::Gid;
use ferroce_wire::cm::{Answered, Rej, RejReason, ServiceType};

use super::*;

const MS: Duration = Duration::from_millis(1);

#[test]
fn a_connection_has_what_both_sides_said() {
    let mut pair = Pair::new();
    let request = pair.request_parameters();
    let a = pair.a.cm.request(pair.now, &request).unwrap();
    pair.bring(A);
    let Event {
        comm_id: b,
        kind: EventKind::Request(got),
    } = pair.b.event()
    else {
        panic!("no request");
    };
    assert_eq!(got.transport, Transport::Rc);
    assert_eq!(got.ece, request.ece);
    assert_eq!(got.way, pair.b.way_to(pair.a.address));
    let req = got.message;
    assert_eq!(req.service_id, request.service_id);
    assert_eq!(req.local_ca_guid, pair.a.guid);
    assert_eq!(req.private_data[..5], *b"for b");
    assert_eq!(req.private_data[5..], [0; 87]);
    assert_eq!(req.primary.local_ack_timeout, 19);
    assert!(!req.primary.subnet_local && req.end_to_end_flow_control);

    let reply = pair.reply_parameters();
    pair.b.cm.reply(pair.now, b, &reply).unwrap();
    pair.bring(B);
    let EventKind::Reply(got) = pair.a.event().kind else {
        panic!("no reply");
    };
    assert_eq!((got.qpn, got.ece), (0x22, reply.ece));
    assert_eq!(got.message.private_data[..5], *b"for a");
    assert_eq!(got.message.local_ca_guid, pair.b.guid);
    assert!(got.message.srq && got.message.end_to_end_flow_control);

    let expected = Attributes {
        transport: Transport::Rc,
        active: true,
        pkey: 0xffff,
        path_mtu: 3,
        dest_qpn: 0x22,
        rq_psn: 0x111,
        sq_psn: 0x222,
        responder_resources: 2,
        initiator_depth: 4,
        timeout: 19,
        retry_count: 7,
        rnr_retry_count: 5,
        packet_rate: 5,
    };
    assert_eq!(pair.a.cm.attributes(a), Some(expected));
    let expected = Attributes {
        active: false,
        dest_qpn: 0x11,
        rq_psn: 0x222,
        sq_psn: 0x111,
        responder_resources: 4,
        initiator_depth: 2,
        rnr_retry_count: 6,
        ..expected
    };
    assert_eq!(pair.b.cm.attributes(b), Some(expected));

    pair.a.cm.ready(pair.now, a, b"go").unwrap();
    pair.bring(A);
    let EventKind::Ready { private_data } = pair.b.event().kind else {
        panic!("not ready");
    };
    assert_eq!(private_data[..2], *b"go");
    assert_eq!(
        pair.states(a, b),
        (Some(State::Established), Some(State::Established))
    );
    assert_eq!((pair.a.cm.deadline(), pair.b.cm.deadline()), (None, None));
    let status = only(pair.b.cm.status());
    assert_eq!(
        (status.local_qpn, status.remote_qpn, status.remote_comm_id),
        (0x22, 0x11, a)
    );
    pair.ends_empty();
}

#[test]
fn before_a_reply_the_asked_side_has_what_the_asking_one_offers() {
    let mut pair = Pair::new();
    let (a, b) = pair.request();
    assert_eq!(pair.a.cm.attributes(a), None);
    let attributes = pair.b.cm.attributes(b).unwrap();
    assert_eq!(
        (attributes.responder_resources, attributes.initiator_depth),
        (5, 3)
    );
    assert_eq!((attributes.sq_psn, attributes.dest_qpn), (0x111, 0x11));
}

#[test]
fn xrc_has_the_fields_of_a_target() {
    let mut pair = Pair::new();
    let mut request = pair.request_parameters();
    request.transport = Transport::Xrc;
    let a = pair.a.cm.request(pair.now, &request).unwrap();
    let mad = only(pair.sent(A));
    let req = message!(mad, Req);
    assert_eq!(
        (req.transport, req.extended_transport),
        (ServiceType::Extended, 1)
    );
    assert_eq!(
        (req.responder_resources, req.retry_count, req.rnr_retry_count),
        (0, 0, 0)
    );
    pair.give(B, &mad);
    let b = pair.b.event().comm_id;
    let reply = pair.reply_parameters();
    pair.b.cm.reply(pair.now, b, &reply).unwrap();
    let mad = only(pair.sent(B));
    let rep = message!(mad, Rep);
    assert_eq!((rep.local_qpn, rep.local_eecn, rep.initiator_depth), (0, 0x22, 0));
    assert!(rep.srq);
    pair.give(A, &mad);
    assert_eq!(pair.a.cm.attributes(a).unwrap().dest_qpn, 0x22);
    // The target outlives its id: nothing is said.
    pair.a.cm.ready(pair.now, a, &[]).unwrap();
    pair.bring(A);
    pair.b.cm.destroy(pair.now, b);
    assert!(pair.sent(B).is_empty() && pair.b.cm.status().is_empty());
}

#[test]
fn a_request_is_repeated_as_linux_does_it() {
    let mut pair = Pair::new();
    let request = pair.request_parameters();
    let a = pair.a.cm.request(pair.now, &request).unwrap();
    for _ in 0..15 {
        assert_eq!(pair.lose(A), ["REQ"]);
        assert_eq!(pair.wait(A), MS * 6144);
    }
    assert_eq!(pair.lose(A), ["REQ"]);
    assert_eq!(pair.wait(A), MS * 6144);
    let rej = message!(only(pair.sent(A)), Rej);
    assert_eq!((rej.reason, rej.remote_comm_id), (RejReason::TIMEOUT, 0));
    assert_eq!(pair.a.events(), [EventKind::RequestTimeout]);
    assert_eq!(pair.a.cm.state(a), Some(State::Idle));
    pair.ends_empty();
}

#[test]
fn a_reply_is_repeated_until_the_peer_is_ready() {
    let mut pair = Pair::new();
    let (a, b) = pair.reply();
    pair.a.cm.ready(pair.now, a, b"go").unwrap();
    assert_eq!(pair.lose(A), ["RTU"]);
    assert_eq!(pair.wait(B), MS * 4096);
    assert_eq!(pair.bring(B), ["REP"]);
    assert_eq!(pair.a.events(), []);
    assert_eq!(pair.bring(A), ["RTU"]);
    assert!(
        matches!(&pair.b.events()[..], [EventKind::Ready { private_data }] if private_data[..2] == *b"go")
    );
    assert_eq!(
        pair.states(a, b),
        (Some(State::Established), Some(State::Established))
    );
}

#[test]
fn a_reply_that_nobody_answers_ends_the_peer_too() {
    let mut pair = Pair::new();
    let (a, b) = pair.reply();
    pair.a.cm.ready(pair.now, a, &[]).unwrap();
    pair.lose(A);
    for _ in 0..15 {
        pair.wait(B);
        assert_eq!(pair.lose(B), ["REP"]);
    }
    pair.wait(B);
    assert_eq!(pair.b.events(), [EventKind::ReplyTimeout]);
    assert_eq!(pair.bring(B), ["REJ"]);
    assert!(
        matches!(&pair.a.events()[..], [EventKind::Rejected(rejection)] if rejection.reason == RejReason::TIMEOUT)
    );
    assert_eq!(pair.states(a, b), (Some(State::Timewait), Some(State::Idle)));
    pair.ends_empty();
}

#[test]
fn data_stands_for_the_message_that_the_peer_is_ready() {
    let mut pair = Pair::new();
    let (a, b) = pair.reply();
    pair.a.cm.ready(pair.now, a, &[]).unwrap();
    let rtu = only(pair.sent(A));
    pair.b.cm.establish(pair.now, b).unwrap();
    assert_eq!(pair.b.events(), [EventKind::Established]);
    assert_eq!(pair.b.cm.deadline(), None);
    pair.give(B, &rtu);
    assert_eq!(pair.b.events(), []);
    assert_eq!(pair.b.cm.establish(pair.now, b), Err(libc::EISCONN));
    assert_eq!(pair.a.cm.establish(pair.now, b), Err(libc::EINVAL));
}

#[test]
fn duplicates_draw_the_last_answer() {
    let mut pair = Pair::new();
    let request = pair.request_parameters();
    let a = pair.a.cm.request(pair.now, &request).unwrap();
    let req = only(pair.sent(A));
    pair.give(B, &req);
    let b = pair.b.event().comm_id;
    // Nothing is to say yet.
    pair.give(B, &req);
    assert!(pair.sent(B).is_empty() && pair.b.events().is_empty());
    pair.b.cm.delay_when_asked(b, 24).unwrap();
    assert!(pair.sent(B).is_empty());
    pair.give(B, &req);
    let mra = message!(only(pair.sent(B)), Mra);
    assert_eq!(
        (mra.message, mra.service_timeout, mra.local_comm_id),
        (Answered::Req, 24, b)
    );
    let reply = pair.reply_parameters();
    pair.b.cm.reply(pair.now, b, &reply).unwrap();
    let rep = only(pair.sent(B));
    pair.give(B, &req);
    assert_eq!(only(pair.sent(B)), rep);
    pair.give(A, &rep);
    assert_eq!(pair.a.events().len(), 1);
    pair.give(A, &rep);
    assert!(pair.sent(A).is_empty());
    pair.a.cm.delay_when_asked(a, 20).unwrap();
    pair.give(A, &rep);
    assert_eq!(message!(only(pair.sent(A)), Mra).message, Answered::Rep);
    pair.a.cm.ready(pair.now, a, b"go").unwrap();
    let rtu = only(pair.sent(A));
    pair.give(A, &rep);
    assert_eq!(only(pair.sent(A)), rtu);
    pair.give(B, &rtu);
    pair.give(B, &rtu);
    pair.give(B, &req);
    assert_eq!(pair.b.events().len(), 1);
    assert!(pair.sent(B).is_empty() && pair.a.events().is_empty());
    assert_eq!(
        pair.states(a, b),
        (Some(State::Established), Some(State::Established))
    );
    pair.ends_empty();
}

#[test]
fn patience_is_prolonged_by_who_takes_time() {
    let mut pair = Pair::new();
    let (a, b) = pair.request();
    pair.b.cm.delay(pair.now, b, 24, b"wait").unwrap();
    assert_eq!(pair.bring(B), ["MRA"]);
    assert!(
        matches!(&pair.a.events()[..], [EventKind::Delayed { service_timeout: 24, private_data }] if private_data[..4] == *b"wait")
    );
    assert_eq!(pair.a.cm.state(a), Some(State::MraReqReceived));
    // 2^(24-8) ms and those of the ACK timeout.
    assert_eq!(pair.wait(A), MS * (65_536 + 2048));
    assert_eq!(pair.bring(A), ["REQ"]);
    assert_eq!(pair.bring(B), ["MRA"]);
    assert_eq!(pair.a.events(), []);
    let reply = pair.reply_parameters();
    pair.b.cm.reply(pair.now, b, &reply).unwrap();
    pair.bring(B);
    assert!(matches!(&pair.a.events()[..], [EventKind::Reply(_)]));
    pair.a.cm.delay(pair.now, a, 22, &[]).unwrap();
    pair.bring(A);
    assert_eq!(
        pair.states(a, b),
        (Some(State::MraRepSent), Some(State::MraRepReceived))
    );
    assert_eq!(pair.wait(B), MS * (16_384 + 2048));
    pair.lose(B);
    pair.a.cm.ready(pair.now, a, &[]).unwrap();
    pair.bring(A);
    assert_eq!(
        pair.states(a, b),
        (Some(State::Established), Some(State::Established))
    );
}

#[test]
fn a_refusal_says_why_and_is_said_again() {
    let mut pair = Pair::new();
    let request = pair.request_parameters();
    let a = pair.a.cm.request(pair.now, &request).unwrap();
    let req = only(pair.sent(A));
    pair.give(B, &req);
    let b = pair.b.event().comm_id;
    let reason = RejReason::CONSUMER_DEFINED;
    pair.b.cm.reject(pair.now, b, reason, b"info", b"sorry").unwrap();
    let rej = only(pair.sent(B));
    let message = message!(rej, Rej);
    assert_eq!(
        (message.local_comm_id, message.remote_comm_id, message.message),
        (0, a, Answered::Req)
    );
    // The REJ is lost, and the program is gone.
    pair.b.cm.destroy(pair.now, b);
    pair.give(B, &req);
    assert_eq!(only(pair.sent(B)), rej);
    pair.give(A, &rej);
    let EventKind::Rejected(rejection) = only(pair.a.events()) else {
        panic!("not rejected");
    };
    assert_eq!(rejection.reason, reason);
    assert_eq!(
        (rejection.message.info_len, &rejection.message.info[..4]),
        (4, &b"info"[..])
    );
    assert_eq!(rejection.message.private_data[..5], *b"sorry");
    assert_eq!(pair.a.cm.state(a), Some(State::Idle));
    pair.give(A, &rej);
    assert_eq!(pair.a.events(), []);
    // Another request by the same number is another request.
    let mut again = req;
    again.tid += 1;
    pair.give(B, &again);
    assert!(matches!(pair.b.event().kind, EventKind::Request(_)));
    pair.ends_empty();
}

#[test]
fn a_request_for_nobody_leaves_nothing() {
    let mut pair = Pair::new();
    let (a, b) = pair.request();
    pair.b.cm.refuse(pair.now, b, RejReason::INVALID_SERVICE_ID);
    let mad = only(pair.sent(B));
    let rej = message!(mad, Rej);
    let expected = Rej {
        remote_comm_id: a,
        reason: RejReason::INVALID_SERVICE_ID,
        ..Rej::default()
    };
    assert_eq!(rej, expected);
    assert_eq!(pair.b.cm.status(), []);
    pair.give(A, &mad);
    assert!(matches!(only(pair.a.events()), EventKind::Rejected(_)));
}

#[test]
fn the_asking_side_can_refuse_a_reply() {
    let mut pair = Pair::new();
    let (a, b) = pair.reply();
    pair.a
        .cm
        .reject(pair.now, a, RejReason::CONSUMER_DEFINED, &[], &[])
        .unwrap();
    let rej = only(pair.sent(A));
    let message = message!(rej, Rej);
    assert_eq!(
        (message.message, message.local_comm_id, message.remote_comm_id),
        (Answered::Rep, a, b)
    );
    pair.wait(B);
    assert_eq!(pair.bring(B), ["REP"]);
    assert_eq!(only(pair.sent(A)), rej);
    pair.give(B, &rej);
    assert!(matches!(only(pair.b.events()), EventKind::Rejected(_)));
    assert_eq!(pair.b.cm.deadline(), None);
    pair.ends_empty();
}

#[test]
fn a_destroyed_attempt_is_refused() {
    // Before the REP comes: by GUID, as the peer's number is not known.
    let mut pair = Pair::new();
    let (a, b) = pair.request();
    pair.a.cm.destroy(pair.now, a);
    let rej = only(pair.sent(A));
    let message = message!(rej, Rej);
    assert_eq!((message.reason, message.remote_comm_id), (RejReason::TIMEOUT, 0));
    assert_eq!(message.info[..8], pair.a.guid.to_be_bytes());
    let reply = pair.reply_parameters();
    pair.b.cm.reply(pair.now, b, &reply).unwrap();
    assert_eq!(pair.bring(B), ["REP"]);
    assert_eq!(only(pair.sent(A)), rej);
    pair.give(B, &rej);
    assert!(matches!(only(pair.b.events()), EventKind::Rejected(_)));
    assert_eq!(pair.a.events(), []);
    pair.ends_empty();

    // Each side, at each step.
    for (side, step) in [(B, 0), (A, 1), (B, 1)] {
        let mut pair = Pair::new();
        let (a, b) = if step == 0 { pair.request() } else { pair.reply() };
        let now = pair.now;
        pair.end(side).cm.destroy(now, if side == A { a } else { b });
        assert_eq!(pair.bring(side), ["REJ"]);
        let other = if side == A { B } else { A };
        let EventKind::Rejected(rejection) = only(pair.end(other).events()) else {
            panic!("not rejected");
        };
        assert_eq!(rejection.reason, RejReason::CONSUMER_DEFINED);
        assert!(pair.end(side).events().is_empty());
        pair.ends_empty();
    }
}

#[test]
fn who_withdraws_a_reply_tells_a_peer_that_is_ready() {
    let mut pair = Pair::new();
    let (a, b) = pair.reply();
    pair.b.cm.destroy(pair.now, b);
    assert_eq!(pair.lose(B), ["REJ"]);
    pair.a.cm.ready(pair.now, a, &[]).unwrap();
    assert_eq!(pair.bring(A), ["RTU"]);
    assert_eq!(pair.bring(B), ["REJ"]);
    assert!(matches!(only(pair.a.events()), EventKind::Rejected(_)));
    assert_eq!(pair.a.cm.state(a), Some(State::Timewait));
    pair.ends_empty();
}

#[test]
fn a_queue_pair_with_a_connection_has_forgotten_it() {
    let mut pair = Pair::new();
    let (a, b) = pair.connect();
    // The other host was started anew, and knows nothing.
    pair.a = End::new(1);
    pair.a.cm.new_tid();
    let request = pair.request_parameters();
    let again = pair.a.cm.request(pair.now, &request).unwrap();
    assert_ne!(a, again);
    pair.bring(A);
    let mads = pair.sent(B);
    assert_eq!(mads.len(), 2);
    let rej = message!(mads[1], Rej);
    assert_eq!(
        (rej.reason, rej.remote_comm_id),
        (RejReason::STALE_CONNECTION, again)
    );
    assert_eq!(pair.b.cm.state(b), Some(State::DreqSent));
    assert_eq!(only(pair.b.events()), EventKind::Stale);
    for mad in &mads {
        pair.give(A, mad);
    }
    assert!(
        matches!(&pair.a.events()[..], [EventKind::Rejected(it)] if it.reason == RejReason::STALE_CONNECTION)
    );
    assert_eq!(pair.a.cm.state(again), Some(State::Timewait));
    // What it knows nothing of is answered all the same.
    assert_eq!(pair.bring(A), ["DREP"]);
    assert!(matches!(only(pair.b.events()), EventKind::Disconnected { .. }));
    // Now it is free.
    let request = pair.request_parameters();
    pair.a.cm.request(pair.now, &request).unwrap();
    pair.bring(A);
    assert!(matches!(pair.b.event().kind, EventKind::Request(_)));
    pair.ends_empty();
}

#[test]
fn a_reply_from_a_queue_pair_with_a_connection_is_refused() {
    let mut pair = Pair::new();
    let (first, _) = pair.connect();
    let mut request = pair.request_parameters();
    request.qpn = 0x33;
    let a = pair.a.cm.request(pair.now, &request).unwrap();
    pair.bring(A);
    let b = pair.b.event().comm_id;
    let reply = pair.reply_parameters();
    pair.b.cm.reply(pair.now, b, &reply).unwrap();
    pair.bring(B);
    let event = pair.a.event();
    assert_eq!((event.comm_id, event.kind), (first, EventKind::Stale));
    assert_eq!(pair.states(a, b).0, Some(State::ReqSent));
    assert_eq!(pair.a.cm.state(first), Some(State::DreqSent));
    assert_eq!(pair.bring(A), ["DREQ", "REJ"]);
    assert!(
        pair.b
            .events()
            .iter()
            .any(|it| matches!(it, EventKind::Rejected(it) if it.reason == RejReason::STALE_CONNECTION))
    );
    assert_eq!(pair.b.cm.state(b), Some(State::Timewait));
    pair.ends_empty();
}

#[test]
fn messages_of_others_change_nothing() {
    let mut pair = Pair::new();
    let (a, b) = pair.reply();
    let (now, stranger) = (pair.now, End::new(9));
    let way = pair.b.way_to(stranger.address);
    pair.a.cm.ready(now, a, &[]).unwrap();
    let rtu = only(pair.sent(A));
    pair.b.cm.receive(now, &way, &rtu.to_bytes());
    assert_eq!(pair.b.counter("cm_drop_peer"), 1);
    let mut way = pair.b.way_to(pair.a.address);
    way.device = "fer1".to_string();
    pair.b.cm.receive(now, &way, &rtu.to_bytes());
    assert_eq!(pair.b.counter("cm_drop_peer"), 2);
    // A number is off.
    let mut other = message!(rtu, Rtu);
    other.local_comm_id ^= 1;
    let other = CmMad {
        message: other.into(),
        ..rtu
    };
    pair.give(B, &other);
    assert_eq!(pair.b.counter("cm_drop_unknown"), 1);
    assert_eq!(pair.b.cm.state(b), Some(State::RepSent));
    pair.give(B, &rtu);
    assert_eq!(pair.b.cm.state(b), Some(State::Established));
}

#[test]
fn requests_that_make_no_sense_are_refused_or_dropped() {
    let mut pair = Pair::new();
    let parameters = pair.request_parameters();
    pair.a.cm.request(pair.now, &parameters).unwrap();
    let mad = only(pair.sent(A));
    let with = |change: fn(&mut ferroce_wire::cm::Req)| {
        let mut req = message!(mad, Req);
        change(&mut req);
        CmMad {
            message: req.into(),
            ..mad
        }
    };
    pair.give(B, &with(|req| req.local_comm_id = 0));
    assert_eq!(pair.b.counter("cm_drop_malformed"), 1);
    assert!(pair.sent(B).is_empty());
    for (change, reason) in [
        (
            with(|req| req.primary.remote_gid = Gid::ZERO),
            RejReason::INVALID_GID,
        ),
        (
            with(|req| req.primary.local_gid = Gid::ZERO),
            RejReason::INVALID_GID,
        ),
        (
            with(|req| req.transport = ServiceType::Rd),
            RejReason::INVALID_TRANSPORT_TYPE,
        ),
        (
            with(|req| req.transport = ServiceType::Extended),
            RejReason::INVALID_TRANSPORT_TYPE,
        ),
    ] {
        pair.give(B, &change);
        let rej = message!(only(pair.sent(B)), Rej);
        assert_eq!(rej.reason, reason);
        if reason == RejReason::INVALID_GID {
            assert_eq!(rej.info[..16], Gid::from_ip(pair.b.address).0);
        }
    }
    assert_eq!((pair.b.events(), pair.b.counter("cm_refused")), (vec![], 4));
    let way = pair.b.way_to(pair.a.address);
    for bytes in [&[][..], &[0; 256], &mad.to_bytes()[..255]] {
        pair.b.cm.receive(pair.now, &way, bytes);
    }
    assert_eq!(pair.b.counter("cm_drop_malformed"), 4);
}

#[test]
fn what_does_not_fit_is_an_error() {
    let mut pair = Pair::new();
    let changes: [fn(&mut RequestParameters); 6] = [
        |it| it.private_data = vec![0; 93],
        |it| it.qpn = 0x100_0000,
        |it| it.starting_psn = 0x100_0000,
        |it| it.retry_count = 8,
        |it| it.local_cm_response_timeout = 32,
        |it| it.max_cm_retries = 16,
    ];
    for change in changes {
        let mut parameters = pair.request_parameters();
        change(&mut parameters);
        assert_eq!(pair.a.cm.request(pair.now, &parameters), Err(libc::EINVAL));
    }
    assert_eq!(pair.a.cm.status(), []);
    let (a, b) = pair.request();
    let mut reply = pair.reply_parameters();
    reply.private_data = vec![0; 197];
    let now = pair.now;
    assert_eq!(pair.b.cm.reply(now, b, &reply), Err(libc::EINVAL));
    let reason = RejReason::CONSUMER_DEFINED;
    assert_eq!(pair.b.cm.reject(now, b, reason, &[0; 73], &[]), Err(libc::EINVAL));
    assert_eq!(
        pair.b.cm.reject(now, b, reason, &[], &[0; 149]),
        Err(libc::EINVAL)
    );
    assert_eq!(pair.b.cm.delay(now, b, 32, &[]), Err(libc::EINVAL));
    assert_eq!(pair.b.cm.delay(now, b, 20, &[0; 223]), Err(libc::EINVAL));
    assert_eq!(pair.b.cm.state(b), Some(State::ReqReceived));
    // Calls that the state does not allow.
    let reply = pair.reply_parameters();
    for result in [
        pair.a.cm.reply(now, a, &reply),
        pair.a.cm.ready(now, a, &[]),
        pair.a.cm.delay(now, a, 20, &[]),
        pair.a.cm.disconnect(now, a, &[]),
        pair.a.cm.answer_disconnect(now, a, &[]),
        pair.a.cm.establish(now, a),
        pair.b.cm.ready(now, b, &[]),
        pair.b.cm.disconnect(now, b, &[]),
        pair.b.cm.ready(now, 12345, &[]),
    ] {
        assert_eq!(result, Err(libc::EINVAL));
    }
    assert!(pair.sent(A).is_empty() && pair.sent(B).is_empty());
}

#[test]
fn both_may_ask_at_once() {
    let mut pair = Pair::new();
    let request = pair.request_parameters();
    let a = pair.a.cm.request(pair.now, &request).unwrap();
    let back = RequestParameters {
        way: pair.b.way_to(pair.a.address),
        local_ca_guid: pair.b.guid,
        qpn: 0x33,
        ..request
    };
    let b = pair.b.cm.request(pair.now, &back).unwrap();
    assert_eq!((pair.bring(A), pair.bring(B)), (vec!["REQ"], vec!["REQ"]));
    let asked_b = pair.b.event().comm_id;
    let asked_a = pair.a.event().comm_id;
    let mut reply = pair.reply_parameters();
    pair.b.cm.reply(pair.now, asked_b, &reply).unwrap();
    reply.local_ca_guid = pair.a.guid;
    reply.qpn = 0x44;
    pair.a.cm.reply(pair.now, asked_a, &reply).unwrap();
    assert_eq!((pair.bring(A), pair.bring(B)), (vec!["REP"], vec!["REP"]));
    pair.a.cm.ready(pair.now, a, &[]).unwrap();
    pair.b.cm.ready(pair.now, b, &[]).unwrap();
    assert_eq!((pair.bring(A), pair.bring(B)), (vec!["RTU"], vec!["RTU"]));
    let established = Some(State::Established);
    assert_eq!(pair.states(a, b), (established, established));
    assert_eq!(pair.states(asked_a, asked_b), (established, established));
    pair.ends_empty();
}

#[test]
fn alternate_paths_are_declined() {
    let mut pair = Pair::new();
    let (a, b) = pair.connect();
    let lap = ferroce_wire::cm::Lap {
        local_comm_id: a,
        remote_comm_id: b,
        ..Default::default()
    };
    let mad = CmMad {
        tid: 77,
        attribute_modifier: 0,
        message: lap.into(),
    };
    pair.give(B, &mad);
    let mad = only(pair.sent(B));
    let apr = message!(mad, Apr);
    assert_eq!(
        (mad.tid, apr.local_comm_id, apr.remote_comm_id, apr.status),
        (77, b, a, 2)
    );
    pair.give(A, &mad);
    assert_eq!(pair.a.counter("cm_drop_state"), 1);
}

#[test]
fn who_believes_in_a_connection_that_is_not_there_learns_so() {
    let mut pair = Pair::new();
    let (a, _) = pair.reply();
    pair.a.cm.forget(a);
    pair.wait(B);
    assert_eq!(pair.bring(B), ["REP"]);
    assert_eq!(pair.bring(A), ["REJ"]);
    let unknown = |events: Vec<EventKind>| matches!(&events[..], [EventKind::Rejected(it)] if it.reason == RejReason::INVALID_COMM_ID);
    assert!(unknown(pair.b.events()));

    let mut pair = Pair::new();
    let (a, b) = pair.reply();
    pair.b.cm.forget(b);
    pair.a.cm.ready(pair.now, a, &[]).unwrap();
    assert_eq!(pair.bring(A), ["RTU"]);
    assert_eq!(pair.bring(B), ["REJ"]);
    assert!(unknown(pair.a.events()));
    assert_eq!(pair.a.cm.state(a), Some(State::Timewait));
    pair.ends_empty();
}

#[test]
fn a_request_that_comes_too_late_makes_nothing() {
    let mut pair = Pair::new();
    let request = pair.request_parameters();
    let a = pair.a.cm.request(pair.now, &request).unwrap();
    let req = only(pair.sent(A));
    pair.give(B, &req);
    let b = pair.b.event().comm_id;
    let reply = pair.reply_parameters();
    pair.b.cm.reply(pair.now, b, &reply).unwrap();
    pair.bring(B);
    pair.a.cm.ready(pair.now, a, &[]).unwrap();
    pair.bring(A);
    pair.a.cm.disconnect(pair.now, a, &[]).unwrap();
    pair.bring(A);
    pair.b.cm.answer_disconnect(pair.now, b, &[]).unwrap();
    pair.bring(B);
    pair.give(B, &req);
    let rej = message!(only(pair.sent(B)), Rej);
    assert_eq!(rej.reason, RejReason::STALE_CONNECTION);
    pair.a.events();
    pair.b.events();
    // Timewait is over, too.
    pair.wait(A);
    pair.wait(B);
    pair.a.cm.destroy(pair.now, a);
    pair.b.cm.destroy(pair.now, b);
    pair.b.events();
    pair.give(B, &req);
    let b = pair.b.event().comm_id;
    pair.b.cm.reply(pair.now, b, &reply).unwrap();
    pair.bring(B);
    pair.bring(A);
    assert!(matches!(only(pair.b.events()), EventKind::Rejected(_)));
    pair.ends_empty();
}
