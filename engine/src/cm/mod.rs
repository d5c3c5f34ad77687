//! The connection manager's protocol: messages, retries, time-wait (IBTA 12; reference section 13).
//!
//! Sans-I/O and deterministic. One [`Cm`] has the connections of a host. It knows comm ids, GUIDs, QPNs, PSNs and
//! private data; ports, IP addresses and what programs see are [`crate::rdma_cm`]'s. It has no listeners: each new REQ
//! and SIDR_REQ is an event with a comm id of its own, and who does not want it refuses it.
//!
//! After each call, [`Cm::poll_transmit`] and [`Cm::poll_event`] give what there is to send and to know, and
//! [`Cm::deadline`] when [`Cm::timeout`] is due. A comm id lives until [`Cm::destroy`], whatever happened to its
//! connection, and gives no events from then on.
//!
//! Where Linux's `ib_cm` leaves a peer waiting, this does not: a REQ that comes again draws the REP again, a refusal is
//! repeated for a while, who gives up says so, REP and RTU of no connection are refused, and DREQ is repeated even when its
//! program is gone.
#![deny(unsafe_code)]

mod connection;
mod counters;
mod disconnect;
mod handshake;
mod interface;
mod keep;
mod refuse;
mod sidr;
mod tables;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;

use ferroce_wire::cm::{CmMad, CmMessage};

use crate::time::Time;
use connection::{Connection, Mad, Sending};
use counters::Counters;
use sidr::Exchanges;
use tables::{Deadlines, Table};

pub use interface::*;
pub(crate) use tables::MAX_WAITING;

/// The connections and SIDR exchanges of a host.
pub struct Cm {
    random: Box<dyn FnMut() -> u64 + Send>,
    table: Table,
    exchanges: Exchanges,
    deadlines: Deadlines,
    transmits: VecDeque<Transmit>,
    events: VecDeque<Event>,
    counters: Counters,
    early: Early,
}

/// Messages of connections that may be on their way from an earlier `Cm`.
#[derive(Default)]
struct Early {
    /// Until when.
    until: Time,
    held: VecDeque<(Way, Vec<u8>)>,
}

/// Most messages that are held so.
const MAX_EARLY: usize = 1024;

impl Cm {
    /// One without connections. `random` gives unguessable numbers.
    pub fn new(random: Box<dyn FnMut() -> u64 + Send>) -> Cm {
        Cm {
            random,
            table: Table::default(),
            exchanges: Exchanges::default(),
            deadlines: Deadlines::default(),
            transmits: VecDeque::new(),
            events: VecDeque::new(),
            counters: Counters::default(),
            early: Early::default(),
        }
    }

    /// Connections of an earlier `Cm` are going to come by [`Cm::import`]. Until then, messages of connections that are
    /// not known wait: they must neither be refused nor make new ones.
    pub fn expect_imports(&mut self, until: Time) {
        self.early.until = until;
    }

    /// Takes a MAD that came to QP 1. `way` is the way back: its source is the address that the MAD was sent to, its
    /// destination the sender's. What is not CM's, and what makes no sense, is counted and dropped.
    pub fn receive(&mut self, now: Time, way: &Way, mad: &[u8]) {
        self.counters.cm_rx += 1;
        let Ok(parsed) = CmMad::parse(mad) else {
            self.counters.cm_drop_malformed += 1;
            return;
        };
        if now >= self.early.until || self.may_act(way, &parsed.message) {
            self.act(now, way, &parsed);
        } else if self.early.held.len() < MAX_EARLY {
            self.early.held.push_back((way.clone(), mad.to_vec()));
        } else {
            self.counters.cm_drop_early += 1;
        }
    }

    /// Whether a message is of what is known, or draws no answer if it is not.
    fn may_act(&self, way: &Way, message: &CmMessage) -> bool {
        match message {
            CmMessage::Req(req) => {
                let key = (way.path.dest, req.local_ca_guid, req.local_comm_id);
                self.table.with_remote_id(key).is_some()
            }
            CmMessage::SidrReq(req) => self.exchanges.is_asked(way, req.request_id),
            CmMessage::Rep(rep) => self.is_known(rep.remote_comm_id),
            CmMessage::Rtu(rtu) => self.is_known(rtu.remote_comm_id),
            CmMessage::Dreq(dreq) => self.is_known(dreq.remote_comm_id),
            _ => true,
        }
    }

    fn act(&mut self, now: Time, way: &Way, mad: &CmMad) {
        match &mad.message {
            CmMessage::Req(req) => self.receive_req(now, way, mad, req),
            CmMessage::Mra(mra) => self.receive_mra(now, way, mra),
            CmMessage::Rej(rej) => self.receive_rej(now, way, rej),
            CmMessage::Rep(rep) => self.receive_rep(now, way, mad, rep),
            CmMessage::Rtu(rtu) => self.receive_rtu(way, mad.tid, rtu),
            CmMessage::Dreq(dreq) => self.receive_dreq(now, way, mad.tid, dreq),
            CmMessage::Drep(drep) => self.receive_drep(now, way, drep),
            CmMessage::SidrReq(req) => self.receive_sidr_req(way, mad.tid, req),
            CmMessage::SidrRep(rep) => self.receive_sidr_rep(way, mad, rep),
            CmMessage::Lap(lap) => self.receive_lap(way, mad.tid, lap),
            // We send no LAP.
            CmMessage::Apr(_) => self.counters.cm_drop_state += 1,
        }
    }

    /// Does what is due: sends again, gives up, ends timewaits.
    pub fn timeout(&mut self, now: Time) {
        if now >= self.early.until {
            for (way, mad) in std::mem::take(&mut self.early.held) {
                if let Ok(mad) = CmMad::parse(&mad) {
                    self.act(now, &way, &mad);
                }
            }
        }
        while let Some(comm_id) = self.deadlines.due(now) {
            if self.with(comm_id, |cm, it| cm.due(now, it)).is_none() {
                self.exchange_due(now, comm_id);
            }
        }
    }

    /// When [`Cm::timeout`] is to be called next.
    pub fn deadline(&self) -> Option<Time> {
        let early = (!self.early.held.is_empty()).then_some(self.early.until);
        self.deadlines.first().into_iter().chain(early).min()
    }

    /// The next MAD to be sent.
    pub fn poll_transmit(&mut self) -> Option<Transmit> {
        self.transmits.pop_front()
    }

    /// The next event.
    pub fn poll_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// What the queue pair is to be set to. `None` in a state in which the peer's part is not known.
    pub fn attributes(&self, comm_id: CommId) -> Option<Attributes> {
        self.table.get(comm_id).and_then(Connection::attributes)
    }

    /// The state; `None` of a comm id that is not known.
    pub fn state(&self, comm_id: CommId) -> Option<State> {
        let connection = self.table.get(comm_id).map(|it| (it.state, it.destroyed));
        let exchange = || self.exchanges.get(comm_id).map(|it| (it.state, it.destroyed));
        connection
            .or_else(exchange)
            .and_then(|(state, destroyed)| (!destroyed).then_some(state))
    }

    /// Where the peer is; `None` of a comm id that is not known.
    pub fn way(&self, comm_id: CommId) -> Option<&Way> {
        let exchange = || self.exchanges.get(comm_id).map(|it| &it.way);
        self.table.get(comm_id).map(|it| &it.way).or_else(exchange)
    }

    /// All connections and exchanges, by comm id.
    pub fn status(&self) -> Vec<Status> {
        let mut all: Vec<Status> = self.table.iter().map(Connection::status).collect();
        all.extend(self.exchanges.status());
        all.sort_by_key(|status| status.comm_id);
        all
    }

    /// Counters of messages and drops by reason, added to `out` as (name, value).
    pub fn counters(&self, out: &mut dyn FnMut(&'static str, u64)) {
        self.counters.each(out);
    }

    /// A number for something new: not 0, and not that of anything that is still there, timewait included.
    fn new_comm_id(&mut self) -> CommId {
        loop {
            let comm_id = (self.random)() as u32;
            if comm_id != 0 && !self.is_known(comm_id) {
                return comm_id;
            }
        }
    }

    fn is_known(&self, comm_id: CommId) -> bool {
        self.table.get(comm_id).is_some() || self.exchanges.get(comm_id).is_some()
    }

    fn new_tid(&mut self) -> u64 {
        (self.random)()
    }

    /// Works on a connection. What it is at the end goes back into the table, unless it is gone.
    fn with<R>(&mut self, comm_id: CommId, work: impl FnOnce(&mut Cm, &mut Connection) -> R) -> Option<R> {
        let mut connection = self.table.take(comm_id)?;
        self.deadlines.remove(comm_id, connection.deadline);
        let result = work(self, &mut connection);
        self.put(connection);
        Some(result)
    }

    /// Works on a connection for its user.
    fn with_users<R>(
        &mut self,
        comm_id: CommId,
        work: impl FnOnce(&mut Cm, &mut Connection) -> Result<R, Errno>,
    ) -> Result<R, Errno> {
        match self.table.get(comm_id) {
            Some(connection) if !connection.destroyed => {}
            _ => return Err(libc::EINVAL),
        }
        self.with(comm_id, work).unwrap_or(Err(libc::EINVAL))
    }

    fn put(&mut self, mut connection: Box<Connection>) {
        if connection.gone {
            self.table.forget(&mut connection);
            return;
        }
        self.deadlines.add(connection.comm_id, connection.deadline);
        if let Some(oldest) = self.table.put(connection) {
            self.counters.cm_forgotten += 1;
            self.forget(oldest);
        }
    }

    /// Works on the connection that a message names, if it is with the one who sent it.
    fn with_peers(
        &mut self,
        comm_id: CommId,
        way: &Way,
        is_meant: impl FnOnce(&Connection) -> bool,
        work: impl FnOnce(&mut Cm, &mut Connection),
    ) {
        match self.table.get(comm_id) {
            Some(it) if !is_meant(it) => self.counters.cm_drop_unknown += 1,
            None => self.counters.cm_drop_unknown += 1,
            Some(it) if !it.is_with(way) => self.counters.cm_drop_peer += 1,
            Some(_) => {
                self.with(comm_id, work);
            }
        }
    }

    fn send(&mut self, way: &Way, mad: &Mad) {
        self.counters.cm_tx += 1;
        self.transmits.push_back(Transmit {
            way: way.clone(),
            mad: mad.0.clone(),
        });
    }

    /// Sends what is to be answered.
    fn ask(&mut self, now: Time, connection: &mut Connection, mad: Mad) {
        self.send(&connection.way, &mad);
        connection.deadline = Some(now + connection.interval);
        connection.sending = Some(Sending {
            mad,
            interval: connection.interval,
            retries: connection.max_retries,
        });
    }

    /// Sends the answer to the peer's last message once more.
    fn answer_again(&mut self, connection: &Connection) {
        self.counters.cm_duplicates += 1;
        if let Some(answer) = &connection.answer {
            self.send(&connection.way, answer);
        }
    }

    fn tell(&mut self, connection: &Connection, kind: EventKind) {
        if !connection.destroyed {
            self.events.push_back(Event {
                comm_id: connection.comm_id,
                kind,
            });
        }
    }

    /// The deadline of a connection has come.
    fn due(&mut self, now: Time, connection: &mut Connection) {
        connection.deadline = None;
        match (connection.state, &mut connection.sending) {
            (State::Timewait, _) => self.end_timewait(connection),
            (State::Idle, _) => self.reset(connection),
            (_, Some(sending)) if sending.retries > 0 => {
                sending.retries -= 1;
                connection.deadline = Some(now + sending.interval);
                let mad = sending.mad.clone();
                self.counters.cm_retries += 1;
                self.send(&connection.way, &mad);
            }
            (_, Some(_)) => self.give_up(now, connection),
            (_, None) => {}
        }
    }

    /// Nobody has answered.
    fn give_up(&mut self, now: Time, connection: &mut Connection) {
        self.counters.cm_timeouts += 1;
        let kind = match connection.state {
            State::ReqSent | State::MraReqReceived => EventKind::RequestTimeout,
            State::RepSent | State::MraRepReceived => EventKind::ReplyTimeout,
            _ => {
                self.enter_timewait(now, connection, None);
                self.tell(connection, EventKind::DisconnectTimeout);
                return;
            }
        };
        // The peer may have heard us and wait; then it should not.
        let rej = connection.rej_timeout();
        self.send(&connection.way, &rej);
        self.linger(now, connection, rej);
        self.tell(connection, kind);
    }
}
