//! SIDR_REQ, SIDR_REP.

use ferroce_wire::cm::{RejReason, SidrReq, SidrStatus};

use super::*;

const MS: Duration = Duration::from_millis(1);

impl Pair {
    fn sidr_parameters(&self) -> SidrParameters {
        SidrParameters {
            way: self.a.way_to(self.b.address),
            service_id: 0x0111_1c06,
            pkey: 0xffff,
            timeout_ms: 4096,
            max_cm_retries: 15,
            private_data: b"who".to_vec(),
        }
    }

    /// Sends SIDR_REQ; gives both comm ids, and the message.
    fn ask(&mut self) -> (CommId, CommId, CmMad) {
        let parameters = self.sidr_parameters();
        let a = self.a.cm.sidr_request(self.now, &parameters).unwrap();
        let req = only(self.sent(A));
        self.give(B, &req);
        let Event {
            comm_id: b,
            kind: EventKind::SidrRequest(request),
        } = self.b.event()
        else {
            panic!("no request");
        };
        assert_eq!(request.message.private_data[..3], *b"who");
        assert_eq!(request.message.request_id, a);
        assert_eq!(request.way.path.dest, self.a.address);
        (a, b, req)
    }
}

fn answer() -> SidrReplyParameters {
    SidrReplyParameters {
        status: SidrStatus::SUCCESS,
        qpn: 0x77,
        qkey: 0x0123_4567,
        ece: Ece {
            vendor_id: 0xabcdef,
            attribute_modifier: 7,
        },
        info: b"info".to_vec(),
        private_data: b"me".to_vec(),
    }
}

#[test]
fn a_service_tells_its_queue_pair() {
    let mut pair = Pair::new();
    let (a, b, req) = pair.ask();
    assert_eq!(
        pair.states(a, b),
        (Some(State::SidrReqSent), Some(State::SidrReqReceived))
    );
    // A duplicate changes nothing.
    pair.give(B, &req);
    assert!(pair.b.events().is_empty() && pair.sent(B).is_empty());
    pair.b.cm.sidr_reply(pair.now, b, &answer()).unwrap();
    let rep = only(pair.sent(B));
    assert_eq!(rep.tid, req.tid);
    // Nor one that comes later, when the program is gone.
    pair.b.cm.destroy(pair.now, b);
    pair.give(B, &req);
    assert_eq!(only(pair.sent(B)), rep);
    pair.give(A, &rep);
    let EventKind::SidrReply(reply) = only(pair.a.events()) else {
        panic!("no reply");
    };
    assert_eq!(reply.ece, answer().ece);
    let message = reply.message;
    assert_eq!((message.qpn, message.qkey), (0x77, 0x0123_4567));
    assert_eq!((message.info_len, &message.info[..4]), (4, &b"info"[..]));
    assert_eq!(
        (message.service_id, &message.private_data[..2]),
        (0x0111_1c06, &b"me"[..])
    );
    pair.give(A, &rep);
    assert!(pair.a.events().is_empty());
    assert_eq!(pair.a.cm.deadline(), None);
    assert_eq!(pair.b.cm.sidr_reply(pair.now, b, &answer()), Err(libc::EINVAL));
    pair.ends_empty();
}

#[test]
fn nobody_answers() {
    let mut pair = Pair::new();
    let parameters = pair.sidr_parameters();
    let a = pair.a.cm.sidr_request(pair.now, &parameters).unwrap();
    for _ in 0..16 {
        assert_eq!(pair.lose(A), ["SIDR_REQ"]);
        assert_eq!(pair.wait(A), MS * 4096);
    }
    assert!(pair.sent(A).is_empty());
    assert_eq!(pair.a.events(), [EventKind::SidrTimeout]);
    assert_eq!(pair.a.cm.state(a), Some(State::Idle));
    pair.ends_empty();
}

#[test]
fn there_is_no_such_service_or_it_is_going() {
    for (gone, status) in [(false, SidrStatus::UNSUPPORTED), (true, SidrStatus::REJECTED)] {
        let mut pair = Pair::new();
        let (_, b, _) = pair.ask();
        if gone {
            pair.b.cm.destroy(pair.now, b);
        } else {
            pair.b.cm.refuse(pair.now, b, RejReason::INVALID_SERVICE_ID);
            assert_eq!(pair.b.cm.status(), []);
        }
        assert_eq!(pair.bring(B), ["SIDR_REP"]);
        let EventKind::SidrReply(reply) = only(pair.a.events()) else {
            panic!("no reply");
        };
        assert_eq!(reply.message.status, status);
        assert_eq!(reply.message.service_id, 0x0111_1c06);
        pair.ends_empty();
    }
}

#[test]
fn a_number_that_is_used_again_is_another_request() {
    let mut pair = Pair::new();
    let (_, b, mut req) = pair.ask();
    pair.b.cm.sidr_reply(pair.now, b, &answer()).unwrap();
    pair.sent(B);
    req.tid += 1;
    pair.give(B, &req);
    let again = pair.b.event();
    assert_ne!(again.comm_id, b);
    assert!(matches!(again.kind, EventKind::SidrRequest(_)));
    assert_eq!(pair.b.cm.state(b), Some(State::Idle));
    pair.ends_empty();
}

#[test]
fn answers_of_others_are_not_taken() {
    let mut pair = Pair::new();
    let (a, b, _) = pair.ask();
    pair.b.cm.sidr_reply(pair.now, b, &answer()).unwrap();
    let rep = only(pair.sent(B));
    let stranger = End::new(9);
    let way = pair.a.way_to(stranger.address);
    pair.a.cm.receive(pair.now, &way, &rep.to_bytes());
    assert_eq!(pair.a.counter("cm_drop_peer"), 1);
    assert_eq!(pair.a.cm.state(a), Some(State::SidrReqSent));
    // A request that is destroyed is not known.
    pair.a.cm.destroy(pair.now, a);
    pair.give(A, &rep);
    assert_eq!(pair.a.counter("cm_drop_unknown"), 1);
    assert!(pair.a.events().is_empty());
}

#[test]
fn what_does_not_fit_is_an_error() {
    let mut pair = Pair::new();
    let mut parameters = pair.sidr_parameters();
    parameters.private_data = vec![0; SidrReq::default().private_data.len() + 1];
    assert_eq!(pair.a.cm.sidr_request(pair.now, &parameters), Err(libc::EINVAL));
    let (_, b, _) = pair.ask();
    for change in [
        (|it| it.info = vec![0; 73]) as fn(&mut SidrReplyParameters),
        |it| it.private_data = vec![0; 137],
        |it| it.qpn = 0x100_0000,
    ] {
        let mut parameters = answer();
        change(&mut parameters);
        assert_eq!(pair.b.cm.sidr_reply(pair.now, b, &parameters), Err(libc::EINVAL));
    }
    assert!(pair.sent(B).is_empty());
    assert_eq!(pair.b.cm.state(b), Some(State::SidrReqReceived));
}
