//! A flood takes no more memory than it may.

use ferroce_wire::cm::{RejReason, SidrReq};

use super::super::sidr::MAX_ANSWERS;
use super::tables::{MAX_REFUSALS, MAX_WAITING};
use super::*;

impl Pair {
    /// A message of A's, changed for a number.
    fn flood(&mut self, mad: &CmMad, number: u32) {
        let mut mad = *mad;
        match &mut mad.message {
            CmMessage::Req(req) => {
                req.local_comm_id = number;
                req.local_qpn = number;
            }
            CmMessage::SidrReq(req) => req.request_id = number,
            other => panic!("{other:?}"),
        }
        let way = self.b.way_to(self.a.address);
        self.b.cm.receive(self.now, &way, &mad.to_bytes());
    }

    fn req(&mut self) -> CmMad {
        let request = self.request_parameters();
        self.a.cm.request(self.now, &request).unwrap();
        only(self.sent(A))
    }
}

#[test]
fn requests_that_nobody_answers_are_bounded() {
    let mut pair = Pair::new();
    let req = pair.req();
    let sidr = CmMad {
        tid: 1,
        attribute_modifier: 0,
        message: SidrReq::default().into(),
    };
    let many = MAX_WAITING as u32 + 100;
    for number in 1..=many {
        pair.flood(&req, number);
        pair.flood(&sidr, number);
    }
    assert_eq!(pair.b.cm.status().len(), 2 * MAX_WAITING);
    assert_eq!(pair.b.counter("cm_drop_requests"), 100);
    assert_eq!(pair.b.counter("cm_drop_sidr_requests"), 100);
    assert_eq!(pair.b.events().len(), 2 * MAX_WAITING);
    // What is answered makes room.
    let first = pair
        .b
        .cm
        .status()
        .into_iter()
        .find(|it| it.state == State::ReqReceived);
    pair.b
        .cm
        .refuse(pair.now, first.unwrap().comm_id, RejReason::INVALID_SERVICE_ID);
    pair.flood(&req, many + 1);
    assert_eq!(pair.b.events().len(), 1);
    pair.b.cm.table.check();
    pair.ends_empty();
}

#[test]
fn refusals_are_bounded() {
    let mut pair = Pair::new();
    let req = pair.req();
    let sidr = CmMad {
        tid: 1,
        attribute_modifier: 0,
        message: SidrReq::default().into(),
    };
    for number in 1..=(MAX_REFUSALS as u32 + 100) {
        pair.flood(&req, number);
        let comm_id = pair.b.event().comm_id;
        pair.b.cm.destroy(pair.now, comm_id);
        pair.flood(&sidr, number);
        let comm_id = pair.b.event().comm_id;
        pair.b.cm.destroy(pair.now, comm_id);
    }
    assert_eq!(pair.b.cm.status().len(), MAX_REFUSALS + MAX_ANSWERS);
    assert_eq!(pair.b.counter("cm_forgotten"), 200);
    pair.sent(B);
    // The newest is still known.
    pair.flood(&req, MAX_REFUSALS as u32 + 100);
    assert_eq!(only(pair.sent(B)).message.name(), "REJ");
    pair.b.cm.table.check();
    pair.ends_empty();
}

#[test]
fn numbers_in_use_are_not_given_again() {
    let mut pair = Pair::new();
    let mut numbers = [0, 7, 1, 7, 0, 8, 1].into_iter();
    pair.a.cm = Cm::new(Box::new(move || numbers.next().unwrap()));
    let mut request = pair.request_parameters();
    // 7 and its tid, then neither 7 nor 0.
    assert_eq!(pair.a.cm.request(pair.now, &request), Ok(7));
    request.qpn += 1;
    assert_eq!(pair.a.cm.request(pair.now, &request), Ok(8));
}
