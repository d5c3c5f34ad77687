//! How a connection begins: REQ, REP, RTU.

use ferroce_wire::Gid;
use ferroce_wire::cm::{Answered, CmMad, Rej, RejReason, Rep, Req, Rtu};

use super::Cm;
use super::connection::{Connection, Mad};
use super::interface::*;
use super::tables::{id_key, qpn_key};
use crate::time::Time;

impl Cm {
    /// Asks for a connection: sends REQ.
    ///
    /// # Errors
    /// EINVAL: private data too long, or a number does not fit its field.
    pub fn request(&mut self, now: Time, parameters: &RequestParameters) -> Result<CommId, Errno> {
        let comm_id = self.new_comm_id();
        let req = parameters.message(comm_id)?;
        let tid = self.new_tid();
        let mut connection = Box::new(Connection::requested(comm_id, tid, parameters));
        let mad = Mad::new(tid, parameters.ece.attribute_modifier, req);
        self.ask(now, &mut connection, mad);
        self.put(connection);
        Ok(comm_id)
    }

    /// Accepts a [`EventKind::Request`]: sends REP. [`EventKind::Ready`] follows.
    ///
    /// # Errors
    /// EINVAL: the state is another, private data too long, or a number does not fit its field.
    pub fn reply(&mut self, now: Time, comm_id: CommId, parameters: &ReplyParameters) -> Result<(), Errno> {
        self.with_users(comm_id, |cm, it| {
            if !matches!(it.state, State::ReqReceived | State::MraReqSent) {
                return Err(libc::EINVAL);
            }
            let rep = it.rep(parameters)?;
            it.local_ca_guid = parameters.local_ca_guid;
            it.local_qpn = parameters.qpn;
            it.rq_psn = parameters.starting_psn;
            it.responder_resources = parameters.responder_resources;
            it.initiator_depth = parameters.initiator_depth;
            it.state = State::RepSent;
            it.answer = None;
            let mad = Mad::new(it.tid, parameters.ece.attribute_modifier, rep);
            cm.ask(now, it, mad);
            Ok(())
        })
    }

    /// Goes along with a [`EventKind::Reply`]: sends RTU. The connection is established.
    ///
    /// # Errors
    /// EINVAL: the state is another, or more than 224 bytes of private data.
    pub fn ready(&mut self, _now: Time, comm_id: CommId, private_data: &[u8]) -> Result<(), Errno> {
        self.with_users(comm_id, |cm, it| {
            if !matches!(it.state, State::RepReceived | State::MraRepSent) {
                return Err(libc::EINVAL);
            }
            let rtu = it.rtu(private_data)?;
            it.state = State::Established;
            cm.send(&it.way, &rtu);
            it.answer = Some(rtu);
            Ok(())
        })
    }

    /// The peer's data has come, so it is ready, whatever became of its RTU. [`EventKind::Established`] follows.
    ///
    /// # Errors
    /// EISCONN: it is established. EINVAL: the state is another.
    pub fn establish(&mut self, _now: Time, comm_id: CommId) -> Result<(), Errno> {
        self.with_users(comm_id, |cm, it| match it.state {
            State::RepSent | State::MraRepReceived => {
                establish(it);
                cm.tell(it, EventKind::Established);
                Ok(())
            }
            State::Established => Err(libc::EISCONN),
            _ => Err(libc::EINVAL),
        })
    }

    pub(super) fn receive_req(&mut self, now: Time, way: &Way, mad: &CmMad, req: &Req) {
        if req.local_comm_id == 0 {
            // It could not be told from no number.
            self.counters.cm_drop_malformed += 1;
            return;
        }
        let key = (way.path.dest, req.local_ca_guid, req.local_comm_id);
        if let Some(known) = self.table.with_remote_id(key) {
            let is_over = self.with(known, |cm, it| cm.receive_req_again(it, mad.tid));
            if is_over != Some(true) {
                return;
            }
        }
        if let Err((reason, info)) = check(way, req) {
            self.counters.cm_refused += 1;
            self.refuse_message(way, mad.tid, (0, req.local_comm_id), Answered::Req, reason, &info);
            return;
        }
        if self.refuse_stale(now, (way.path.dest, req.local_ca_guid, req.local_qpn)) {
            let ids = (0, req.local_comm_id);
            self.refuse_message(way, mad.tid, ids, Answered::Req, RejReason::STALE_CONNECTION, &[]);
            return;
        }
        if !self.table.has_room() {
            self.counters.cm_drop_requests += 1;
            return;
        }
        let Some(transport) = Transport::of(req) else {
            return;
        };
        let mut way = way.clone();
        way.path.traffic_class = req.primary.traffic_class;
        way.path.flow_label = req.primary.flow_label;
        way.path.service_level = req.primary.sl;
        let comm_id = self.new_comm_id();
        let mut connection = Box::new(Connection::received(
            comm_id,
            mad.tid,
            way.clone(),
            transport,
            req,
        ));
        self.table.list(&mut connection);
        let request = Request {
            way,
            transport,
            ece: Ece {
                vendor_id: req.vendor_id,
                attribute_modifier: mad.attribute_modifier,
            },
            message: *req,
        };
        self.tell(&connection, EventKind::Request(Box::new(request)));
        self.put(connection);
    }

    /// A REQ with the number of a known connection. Gives whether that is over, and this is about another.
    fn receive_req_again(&mut self, connection: &mut Connection, tid: u64) -> bool {
        match connection.state {
            State::MraReqSent => self.answer_again(connection),
            State::RepSent | State::MraRepReceived => {
                self.counters.cm_duplicates += 1;
                if let Some(sending) = &connection.sending {
                    let rep = sending.mad.clone();
                    self.send(&connection.way, &rep);
                }
            }
            State::Timewait if is_refused(connection) => self.answer_again(connection),
            State::Timewait => {
                self.counters.cm_stale += 1;
                let ids = (connection.comm_id, connection.remote_comm_id);
                let reason = RejReason::STALE_CONNECTION;
                let way = connection.way.clone();
                self.refuse_message(&way, tid, ids, Answered::Req, reason, &[]);
            }
            State::Idle if connection.tid == tid => self.answer_again(connection),
            State::Idle => {
                self.reset(connection);
                return true;
            }
            _ => self.counters.cm_duplicates += 1,
        }
        false
    }

    pub(super) fn receive_rep(&mut self, now: Time, way: &Way, mad: &CmMad, rep: &Rep) {
        // The same as before, once it is known who answers.
        let is_meant = |it: &Connection| it.active && [0, rep.local_comm_id].contains(&it.remote_comm_id);
        if !self.table.get(rep.remote_comm_id).is_some_and(is_meant) {
            let ids = (rep.remote_comm_id, rep.local_comm_id);
            self.refuse_unknown(way, mad.tid, ids, Answered::Rep);
            return;
        }
        self.with_peers(rep.remote_comm_id, way, is_meant, |cm, it| match it.state {
            State::ReqSent | State::MraReqReceived => cm.take_rep(now, it, mad, rep),
            State::MraRepSent | State::Established | State::Idle => cm.answer_again(it),
            _ => cm.counters.cm_duplicates += 1,
        });
    }

    /// The first REP to our REQ.
    fn take_rep(&mut self, now: Time, connection: &mut Connection, mad: &CmMad, rep: &Rep) {
        let mut replied = connection.clone();
        replied.replied(rep);
        if rep.local_comm_id == 0 || self.table.with_remote_id(id_key(&replied)).is_some() {
            self.counters.cm_drop_malformed += 1;
            return;
        }
        if self.refuse_stale(now, qpn_key(&replied)) {
            let ids = (connection.comm_id, rep.local_comm_id);
            let reason = RejReason::STALE_CONNECTION;
            self.refuse_message(&connection.way, mad.tid, ids, Answered::Rep, reason, &[]);
            return;
        }
        *connection = replied;
        self.table.list(connection);
        connection.state = State::RepReceived;
        connection.sending = None;
        connection.deadline = None;
        let reply = Reply {
            qpn: connection.remote_qpn,
            ece: Ece {
                vendor_id: rep.vendor_id,
                attribute_modifier: mad.attribute_modifier,
            },
            message: *rep,
        };
        self.tell(connection, EventKind::Reply(Box::new(reply)));
    }

    pub(super) fn receive_rtu(&mut self, way: &Way, tid: u64, rtu: &Rtu) {
        let is_meant = |it: &Connection| !it.active && it.remote_comm_id == rtu.local_comm_id;
        if !self.table.get(rtu.remote_comm_id).is_some_and(is_meant) {
            let ids = (rtu.remote_comm_id, rtu.local_comm_id);
            self.refuse_unknown(way, tid, ids, Answered::Other);
            return;
        }
        self.with_peers(rtu.remote_comm_id, way, is_meant, |cm, it| match it.state {
            State::RepSent | State::MraRepReceived => {
                establish(it);
                let private_data = rtu.private_data.to_vec();
                cm.tell(it, EventKind::Ready { private_data });
            }
            // We have refused after all, and the peer has not heard it.
            State::Timewait if is_refused(it) => cm.answer_again(it),
            State::Established => cm.counters.cm_duplicates += 1,
            _ => cm.counters.cm_drop_state += 1,
        });
    }

    /// Whether the peer's queue pair has a connection already: then the peer does not know of it any more, and it is
    /// ended.
    fn refuse_stale(&mut self, now: Time, key: super::tables::PeerKey) -> bool {
        let Some(stale) = self.table.with_remote_qpn(key) else {
            return false;
        };
        self.counters.cm_stale += 1;
        self.with(stale, |cm, it| {
            if it.state == State::Established && cm.begin_disconnect(now, it, &[]).is_ok() {
                cm.tell(it, EventKind::Stale);
            }
        });
        true
    }
}

/// The peer is ready, by its word or its deeds.
fn establish(connection: &mut Connection) {
    connection.state = State::Established;
    connection.sending = None;
    connection.deadline = None;
}

/// Whether it ended by a REJ of ours.
fn is_refused(connection: &Connection) -> bool {
    let answer = connection.answer.as_ref();
    answer.is_some_and(|it| it.is(Rej::ATTRIBUTE_ID))
}

/// Whether a REQ names the addresses that it has come from and to, and a known transport; or why it is refused.
fn check(way: &Way, req: &Req) -> Result<(), (RejReason, Vec<u8>)> {
    let local = Gid::from_ip(way.path.source);
    if req.primary.remote_gid != local || req.primary.local_gid != Gid::from_ip(way.path.dest) {
        return Err((RejReason::INVALID_GID, local.0.to_vec()));
    }
    match Transport::of(req) {
        Some(_) => Ok(()),
        None => Err((RejReason::INVALID_TRANSPORT_TYPE, Vec::new())),
    }
}
