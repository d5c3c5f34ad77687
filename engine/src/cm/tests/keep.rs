//! A later `Cm` that goes on.

use super::*;

impl Pair {
    /// One side dies; the next has what was kept.
    fn restart(&mut self, side: Side) {
        let number = if side == A { 11 } else { 12 };
        let now = self.now;
        let end = self.end(side);
        let kept: Vec<_> = end
            .cm
            .status()
            .iter()
            .filter_map(|status| end.cm.export(now, status.comm_id))
            .collect();
        let mut next = End::new(number);
        for bytes in &kept {
            assert!(next.cm.import(now, bytes).is_some());
        }
        end.cm = next.cm;
        end.cm.table.check();
    }
}

#[test]
fn a_handshake_goes_on_at_every_step() {
    for step in 0..12 {
        for side in [A, B] {
            let mut pair = Pair::new();
            let request = pair.request_parameters();
            let mut steps = (0..12).map(|it| it == step);
            let mut maybe = |pair: &mut Pair| {
                if steps.next() == Some(true) {
                    pair.restart(side);
                }
            };
            let a = pair.a.cm.request(pair.now, &request).unwrap();
            maybe(&mut pair);
            // What was sent is lost with the process, and sent again.
            pair.lose(A);
            pair.wait(A);
            pair.bring(A);
            let b = pair.b.event().comm_id;
            maybe(&mut pair);
            pair.b.cm.delay_when_asked(b, 24).unwrap();
            maybe(&mut pair);
            let reply = pair.reply_parameters();
            pair.b.cm.reply(pair.now, b, &reply).unwrap();
            maybe(&mut pair);
            pair.lose(B);
            pair.wait(B);
            assert_eq!(pair.bring(B), ["REP"]);
            assert!(matches!(only(pair.a.events()), EventKind::Reply(_)));
            maybe(&mut pair);
            pair.a.cm.ready(pair.now, a, b"go").unwrap();
            maybe(&mut pair);
            pair.lose(A);
            pair.wait(B);
            pair.bring(B);
            assert_eq!(pair.bring(A), ["RTU"]);
            assert!(
                matches!(&only(pair.b.events()), EventKind::Ready { private_data } if private_data[..2] == *b"go")
            );
            maybe(&mut pair);
            let established = Some(State::Established);
            assert_eq!(pair.states(a, b), (established, established));
            assert_eq!(pair.a.cm.attributes(a).unwrap().sq_psn, 0x222);
            pair.a.cm.disconnect(pair.now, a, &[]).unwrap();
            maybe(&mut pair);
            pair.lose(A);
            pair.wait(A);
            pair.bring(A);
            assert!(matches!(
                only(pair.b.events()),
                EventKind::DisconnectRequested { .. }
            ));
            maybe(&mut pair);
            pair.b.cm.answer_disconnect(pair.now, b, b"ok").unwrap();
            maybe(&mut pair);
            pair.lose(B);
            pair.wait(A);
            assert_eq!(pair.bring(A), ["DREQ"]);
            assert_eq!(pair.bring(B), ["DREP"]);
            assert!(
                matches!(&only(pair.a.events()), EventKind::Disconnected { private_data } if private_data[..2] == *b"ok")
            );
            maybe(&mut pair);
            for side in [A, B] {
                pair.wait(side);
                assert_eq!(only(pair.end(side).events()), EventKind::TimewaitExit);
            }
            maybe(&mut pair);
            pair.ends_empty();
        }
    }
}

#[test]
fn what_was_left_of_the_time_is_left() {
    let mut pair = Pair::new();
    let (a, _) = pair.request();
    let second = Duration::from_secs(1);
    let bytes = pair.a.cm.export(pair.now + second, a).unwrap();
    pair.a.cm.forget(a);
    let later = pair.now + second * 1000;
    assert_eq!(pair.a.cm.import(later, &bytes), Some(a));
    assert_eq!(
        pair.a.cm.deadline().unwrap().since(later),
        Duration::from_millis(5144)
    );
}

#[test]
fn what_is_kept_is_small() {
    let mut pair = Pair::new();
    let (a, b) = pair.connect();
    for (end, comm_id) in [(&pair.a, a), (&pair.b, b)] {
        let len = end.cm.export(pair.now, comm_id).unwrap().len();
        assert!(len < 160, "{len}");
    }
}

#[test]
fn what_can_not_be_is_refused() {
    let mut pair = Pair::new();
    let (a, b) = pair.connect();
    let now = pair.now;
    let bytes = pair.a.cm.export(now, a).unwrap();
    // In use: by number, and by the peer's queue pair.
    assert_eq!(pair.a.cm.import(now, &bytes), None);
    let mut other = pair.a.cm.table.get(a).unwrap().clone();
    other.comm_id ^= 1;
    pair.a.cm.forget(a);
    let mut next = End::new(3);
    assert_eq!(next.cm.import(now, &bytes), Some(a));
    next.cm.table.check();
    next.cm.table.take(a).unwrap();
    assert_eq!(pair.a.cm.import(now, &bytes), Some(a));
    assert!(!pair.a.cm.table.list_again(&other));
    // Nonsense, of any length.
    assert_eq!(pair.b.cm.import(now, &[]), None);
    pair.b.cm.forget(b);
    for len in 0..bytes.len() {
        assert_eq!(pair.b.cm.import(now, &bytes[..len]), None);
    }
    let mut longer = bytes.clone();
    longer.push(0);
    assert_eq!(pair.b.cm.import(now, &longer), None);
    // Whatever the bytes, nothing breaks.
    for at in 0..bytes.len() {
        for bit in 0..8 {
            let mut bytes = bytes.clone();
            bytes[at] ^= 1 << bit;
            let mut next = End::new(3);
            if let Some(comm_id) = next.cm.import(now, &bytes) {
                next.cm.destroy(now, comm_id);
                while let Some(deadline) = next.cm.deadline() {
                    next.cm.timeout(deadline);
                }
                next.cm.table.check();
            }
        }
    }
}

#[test]
fn nobody_keeps_what_is_destroyed() {
    let mut pair = Pair::new();
    let (a, _) = pair.connect();
    pair.a.cm.destroy(pair.now, a);
    assert_eq!(pair.a.cm.export(pair.now, a), None);
    assert_eq!(pair.a.cm.export(pair.now, 12345), None);
}

#[test]
fn datagram_services_go_on() {
    let mut pair = Pair::new();
    let parameters = SidrParameters {
        way: pair.a.way_to(pair.b.address),
        service_id: 7,
        pkey: 0xffff,
        timeout_ms: 4096,
        max_cm_retries: 15,
        private_data: Vec::new(),
    };
    pair.a.cm.sidr_request(pair.now, &parameters).unwrap();
    pair.lose(A);
    pair.restart(A);
    pair.wait(A);
    pair.bring(A);
    let b = pair.b.event().comm_id;
    pair.restart(B);
    pair.b
        .cm
        .sidr_reply(pair.now, b, &SidrReplyParameters::default())
        .unwrap();
    pair.lose(B);
    pair.restart(B);
    pair.wait(A);
    pair.bring(A);
    assert_eq!(pair.bring(B), ["SIDR_REP"]);
    assert!(matches!(only(pair.a.events()), EventKind::SidrReply(_)));
    pair.ends_empty();
}

#[test]
fn messages_wait_for_the_connections_that_they_are_of() {
    let mut pair = Pair::new();
    let (a, b) = pair.reply();
    pair.a.cm.ready(pair.now, a, &[]).unwrap();
    let rtu = only(pair.sent(A));
    let kept = pair.b.cm.export(pair.now, b).unwrap();
    let request = pair.request_parameters();
    pair.a
        .cm
        .request(pair.now, &RequestParameters { qpn: 0x99, ..request })
        .unwrap();
    let req = only(pair.sent(A));
    // The next one is there before what it is to know.
    pair.b.cm = End::new(12).cm;
    let until = pair.now + Duration::from_secs(2);
    pair.b.cm.expect_imports(until);
    pair.give(B, &rtu);
    pair.give(B, &req);
    assert!(pair.sent(B).is_empty() && pair.b.events().is_empty());
    assert_eq!(pair.b.cm.deadline(), Some(until));
    assert_eq!(pair.b.cm.import(pair.now, &kept), Some(b));
    // What is known goes on meanwhile.
    pair.give(B, &rtu);
    assert!(matches!(only(pair.b.events()), EventKind::Ready { .. }));
    pair.b.cm.timeout(until);
    assert!(matches!(only(pair.b.events()), EventKind::Request(_)));
    assert!(pair.sent(B).is_empty());
    assert_eq!(pair.b.cm.deadline(), None);
    // No more are held than may be.
    pair.b.cm.expect_imports(until + Duration::from_secs(2));
    pair.now = until;
    let mut other = message!(rtu, Rtu);
    other.remote_comm_id ^= 1;
    let other = CmMad {
        message: other.into(),
        ..rtu
    };
    for _ in 0..super::MAX_EARLY + 5 {
        pair.give(B, &other);
    }
    assert_eq!(pair.b.counter("cm_drop_early"), 5);
    pair.wait(B);
    assert_eq!(pair.sent(B).len(), super::MAX_EARLY);
}
