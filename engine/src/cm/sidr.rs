//! SIDR: asking for the queue pair of a datagram service.

use std::collections::{BTreeMap, VecDeque};
use std::net::IpAddr;
use std::time::Duration;

use ferroce_wire::cm::{CmMad, SidrRep, SidrReq, SidrStatus};
use serde::{Deserialize, Serialize};

use super::Cm;
use super::connection::{Mad, Sending, fit, is_same_way, padded};
use super::interface::*;
use super::keep::{MAX_INTERVAL, is_possible};
use super::tables::MAX_WAITING;
use crate::time::Time;

/// How long an answer is kept, to be repeated: RDMA CM asks again after 4.1 s.
const LINGER: Duration = Duration::from_millis(3 * 4096);

/// Most answers that are kept so.
pub(super) const MAX_ANSWERS: usize = 4096;

/// A request for a service, ours or a peer's.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Exchange {
    pub comm_id: CommId,
    pub state: State,
    /// Its user has let go of it.
    pub destroyed: bool,
    pub way: Way,
    /// We sent the SIDR_REQ.
    active: bool,
    /// It is found by the peer's number.
    listed: bool,
    /// The number that who asks has given it.
    request_id: u32,
    service_id: u64,
    tid: u64,
    /// The SIDR_REQ that waits for its answer.
    sending: Option<Sending>,
    /// What the same request is answered with.
    answer: Option<Mad>,
    /// When to send again, or when the answer is forgotten.
    #[serde(skip)]
    pub deadline: Option<Time>,
}

/// All of them.
#[derive(Default)]
pub(super) struct Exchanges {
    all: BTreeMap<CommId, Box<Exchange>>,
    /// Those of peers, by their address and number.
    by_peer: BTreeMap<(IpAddr, u32), CommId>,
    /// Answers that are kept without a user, oldest first; some may be gone.
    answered: VecDeque<CommId>,
    /// Those of peers that have no answer yet.
    waiting: usize,
}

impl Exchanges {
    pub fn get(&self, comm_id: CommId) -> Option<&Exchange> {
        self.all.get(&comm_id).map(|exchange| &**exchange)
    }

    /// Whether a peer's request of that number is known.
    pub fn is_asked(&self, way: &Way, request_id: u32) -> bool {
        self.by_peer.contains_key(&(way.path.dest, request_id))
    }

    pub fn status(&self) -> impl Iterator<Item = Status> {
        self.all.values().map(|it| Status {
            comm_id: it.comm_id,
            remote_comm_id: if it.active { 0 } else { it.request_id },
            state: it.state,
            destroyed: it.destroyed,
            way: it.way.clone(),
            local_qpn: 0,
            remote_qpn: 0,
        })
    }

    fn take(&mut self, comm_id: CommId) -> Option<Box<Exchange>> {
        let exchange = self.all.remove(&comm_id)?;
        self.waiting -= usize::from(exchange.state == State::SidrReqReceived);
        if exchange.listed {
            self.by_peer.remove(&peer_key(&exchange));
        }
        Some(exchange)
    }

    fn put(&mut self, exchange: Box<Exchange>) {
        self.waiting += usize::from(exchange.state == State::SidrReqReceived);
        if exchange.listed {
            self.by_peer.insert(peer_key(&exchange), exchange.comm_id);
        }
        self.all.insert(exchange.comm_id, exchange);
    }
}

fn peer_key(exchange: &Exchange) -> (IpAddr, u32) {
    (exchange.way.path.dest, exchange.request_id)
}

impl Cm {
    /// Asks for a datagram service: sends SIDR_REQ.
    ///
    /// # Errors
    /// EINVAL: private data too long.
    pub fn sidr_request(&mut self, now: Time, parameters: &SidrParameters) -> Result<CommId, Errno> {
        fit(&[(parameters.max_cm_retries.into(), 4)])?;
        let comm_id = self.new_comm_id();
        let req = SidrReq {
            request_id: comm_id,
            pkey: parameters.pkey,
            service_id: parameters.service_id,
            private_data: padded(&parameters.private_data)?,
        };
        let tid = self.new_tid();
        let mad = Mad::new(tid, 0, req);
        self.send(&parameters.way, &mad);
        let interval = Duration::from_millis(parameters.timeout_ms.max(1).into());
        let exchange = Exchange {
            comm_id,
            state: State::SidrReqSent,
            destroyed: false,
            way: parameters.way.clone(),
            active: true,
            listed: false,
            request_id: comm_id,
            service_id: parameters.service_id,
            tid,
            sending: Some(Sending {
                mad,
                interval,
                retries: parameters.max_cm_retries,
            }),
            answer: None,
            deadline: Some(now + interval),
        };
        self.put_exchange(Box::new(exchange));
        Ok(comm_id)
    }

    /// Answers a [`EventKind::SidrRequest`]: sends SIDR_REP. Only [`Cm::destroy`] is left.
    ///
    /// # Errors
    /// EINVAL: the state is another, or `info` or private data too long.
    pub fn sidr_reply(
        &mut self,
        now: Time,
        comm_id: CommId,
        parameters: &SidrReplyParameters,
    ) -> Result<(), Errno> {
        let asked = |it: &Exchange| it.state == State::SidrReqReceived && !it.destroyed;
        if !self.exchanges.get(comm_id).is_some_and(asked) {
            return Err(libc::EINVAL);
        }
        fit(&[(parameters.qpn, 24), (parameters.ece.vendor_id, 24)])?;
        let mut rep = SidrRep {
            status: parameters.status,
            info_len: u8::try_from(parameters.info.len()).map_err(|_| libc::EINVAL)?,
            vendor_id: parameters.ece.vendor_id,
            qpn: parameters.qpn,
            qkey: parameters.qkey,
            info: padded(&parameters.info)?,
            private_data: padded(&parameters.private_data)?,
            ..SidrRep::default()
        };
        let mut exchange = self.take_exchange(comm_id).ok_or(libc::EINVAL)?;
        rep.request_id = exchange.request_id;
        rep.service_id = exchange.service_id;
        let mad = Mad::new(exchange.tid, parameters.ece.attribute_modifier, rep);
        self.send(&exchange.way, &mad);
        exchange.state = State::Idle;
        exchange.answer = Some(mad);
        exchange.deadline = Some(now + LINGER);
        self.put_exchange(exchange);
        Ok(())
    }

    pub(super) fn receive_sidr_req(&mut self, way: &Way, tid: u64, req: &SidrReq) {
        let key = (way.path.dest, req.request_id);
        if let Some(mut known) = self
            .exchanges
            .by_peer
            .get(&key)
            .copied()
            .and_then(|known| self.take_exchange(known))
        {
            let is_same = known.tid == tid && known.service_id == req.service_id;
            let is_over = known.state == State::Idle && !is_same;
            if !is_over {
                self.counters.cm_duplicates += 1;
                if let Some(answer) = &known.answer {
                    self.send(&known.way, answer);
                }
                self.put_exchange(known);
                return;
            }
            if !known.destroyed {
                // Its user keeps our number; the peer's is another request's now.
                known.listed = false;
                known.answer = None;
                known.deadline = None;
                self.put_exchange(known);
            }
        }
        if self.exchanges.waiting >= MAX_WAITING {
            self.counters.cm_drop_sidr_requests += 1;
            return;
        }
        let comm_id = self.new_comm_id();
        self.put_exchange(Box::new(Exchange {
            comm_id,
            state: State::SidrReqReceived,
            destroyed: false,
            way: way.clone(),
            active: false,
            listed: true,
            request_id: req.request_id,
            service_id: req.service_id,
            tid,
            sending: None,
            answer: None,
            deadline: None,
        }));
        let request = SidrRequest {
            way: way.clone(),
            message: *req,
        };
        self.events.push_back(Event {
            comm_id,
            kind: EventKind::SidrRequest(Box::new(request)),
        });
    }

    pub(super) fn receive_sidr_rep(&mut self, way: &Way, mad: &CmMad, rep: &SidrRep) {
        let comm_id = rep.request_id;
        match self.exchanges.get(comm_id) {
            Some(it) if it.active && !is_same_way(&it.way, way) => self.counters.cm_drop_peer += 1,
            Some(it) if it.active && it.state == State::SidrReqSent => {
                self.end_request(comm_id);
                let reply = SidrReply {
                    ece: Ece {
                        vendor_id: rep.vendor_id,
                        attribute_modifier: mad.attribute_modifier,
                    },
                    message: *rep,
                };
                self.events.push_back(Event {
                    comm_id,
                    kind: EventKind::SidrReply(Box::new(reply)),
                });
            }
            Some(it) if it.active => self.counters.cm_duplicates += 1,
            _ => self.counters.cm_drop_unknown += 1,
        }
    }

    /// The deadline of an exchange has come.
    pub(super) fn exchange_due(&mut self, now: Time, comm_id: CommId) {
        let Some(mut exchange) = self.take_exchange(comm_id) else {
            return;
        };
        exchange.deadline = None;
        match &mut exchange.sending {
            Some(sending) if sending.retries > 0 => {
                sending.retries -= 1;
                exchange.deadline = Some(now + sending.interval);
                let mad = sending.mad.clone();
                self.counters.cm_retries += 1;
                self.send(&exchange.way, &mad);
                self.put_exchange(exchange);
            }
            Some(_) => {
                self.counters.cm_timeouts += 1;
                self.put_exchange(exchange);
                self.end_request(comm_id);
                self.events.push_back(Event {
                    comm_id,
                    kind: EventKind::SidrTimeout,
                });
            }
            None => {
                exchange.answer = None;
                if !exchange.destroyed {
                    self.put_exchange(exchange);
                }
            }
        }
    }

    /// Our request is over, one way or the other.
    fn end_request(&mut self, comm_id: CommId) {
        if let Some(mut exchange) = self.take_exchange(comm_id) {
            exchange.state = State::Idle;
            exchange.sending = None;
            exchange.deadline = None;
            self.put_exchange(exchange);
        }
    }

    /// Tells that there is no such service, and forgets that it was asked for.
    pub(super) fn refuse_exchange(&mut self, comm_id: CommId) {
        let asked = |it: &Exchange| it.state == State::SidrReqReceived;
        if self.exchanges.get(comm_id).is_some_and(asked)
            && let Some(exchange) = self.take_exchange(comm_id)
        {
            let rep = SidrRep {
                request_id: exchange.request_id,
                status: SidrStatus::UNSUPPORTED,
                service_id: exchange.service_id,
                ..SidrRep::default()
            };
            self.send(&exchange.way, &Mad::new(exchange.tid, 0, rep));
        }
    }

    pub(super) fn destroy_exchange(&mut self, now: Time, comm_id: CommId) {
        let rejected = SidrReplyParameters {
            status: SidrStatus::REJECTED,
            ..SidrReplyParameters::default()
        };
        // What does not wait for an answer gets none.
        let _ = self.sidr_reply(now, comm_id, &rejected);
        let Some(mut exchange) = self.take_exchange(comm_id) else {
            return;
        };
        let lingers = exchange.answer.is_some();
        let latest = now + LINGER;
        exchange.deadline = Some(exchange.deadline.map_or(latest, |time| time.min(latest)));
        let is_new = !std::mem::replace(&mut exchange.destroyed, true);
        if lingers {
            self.put_exchange(exchange);
        }
        if !lingers || !is_new {
            return;
        }
        self.exchanges.answered.push_back(comm_id);
        if self.exchanges.answered.len() > MAX_ANSWERS
            && let Some(oldest) = self.exchanges.answered.pop_front()
            && self.exchanges.get(oldest).is_some_and(|it| it.destroyed)
        {
            self.counters.cm_forgotten += 1;
            self.forget_exchange(oldest);
        }
    }

    pub(super) fn forget_exchange(&mut self, comm_id: CommId) {
        self.take_exchange(comm_id);
    }

    /// Adds one that an earlier `Cm` has exported; false if that is not possible.
    pub(super) fn add_exchange(&mut self, exchange: Box<Exchange>, left: Option<Duration>) -> bool {
        let waits = exchange.state == State::SidrReqSent;
        let is_sidr = matches!(
            exchange.state,
            State::Idle | State::SidrReqSent | State::SidrReqReceived
        );
        let makes_sense = is_sidr
            && !exchange.destroyed
            && waits == exchange.sending.is_some()
            && (!waits || exchange.active && exchange.deadline.is_some())
            && !(exchange.active && exchange.listed)
            && exchange.sending.as_ref().is_none_or(is_possible)
            && left.is_none_or(|left| left <= MAX_INTERVAL);
        let is_taken = exchange.listed && self.exchanges.by_peer.contains_key(&peer_key(&exchange));
        if makes_sense && !is_taken {
            self.put_exchange(exchange);
        }
        makes_sense && !is_taken
    }

    fn take_exchange(&mut self, comm_id: CommId) -> Option<Box<Exchange>> {
        let exchange = self.exchanges.take(comm_id)?;
        self.deadlines.remove(comm_id, exchange.deadline);
        Some(exchange)
    }

    fn put_exchange(&mut self, exchange: Box<Exchange>) {
        self.deadlines.add(exchange.comm_id, exchange.deadline);
        self.exchanges.put(exchange);
    }
}
