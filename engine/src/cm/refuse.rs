//! How a connection does not begin: REJ, and MRA, which keeps a peer from giving up.

use ferroce_wire::cm::{Answered, Mra, Rej, RejReason};

use super::Cm;
use super::connection::{Connection, Mad, duration_of, padded};
use super::interface::*;
use crate::time::Time;

/// Bytes of a GUID, which a REJ for a timeout tells about.
const GUID_LEN: usize = 8;

impl Cm {
    /// Refuses what is not established yet: sends REJ. `info` is more about the reason, at most 72 bytes.
    /// Only [`Cm::destroy`] is left.
    ///
    /// # Errors
    /// EINVAL: the state is another, or more than 148 bytes of private data.
    pub fn reject(
        &mut self,
        now: Time,
        comm_id: CommId,
        reason: RejReason,
        info: &[u8],
        private_data: &[u8],
    ) -> Result<(), Errno> {
        self.with_users(comm_id, |cm, it| {
            let rej = it.rej(reason, info, private_data)?;
            match it.state {
                State::ReqSent
                | State::MraReqReceived
                | State::ReqReceived
                | State::MraReqSent
                | State::RepReceived
                | State::MraRepSent
                | State::RepSent
                | State::MraRepReceived => cm.send_rej(now, it, rej),
                _ => return Err(libc::EINVAL),
            }
            Ok(())
        })
    }

    /// Refuses an [`EventKind::Request`] or [`EventKind::SidrRequest`] that never was anybody's: sends REJ with that
    /// reason and no comm id of ours, or SIDR_REP with status 1. The comm id is gone with it.
    pub fn refuse(&mut self, _now: Time, comm_id: CommId, reason: RejReason) {
        let known = self.with(comm_id, |cm, it| {
            if it.state == State::ReqReceived {
                let (tid, ids) = (it.tid, (0, it.remote_comm_id));
                cm.refuse_message(&it.way, tid, ids, Answered::Req, reason, &[]);
                it.gone = true;
            }
        });
        if known.is_none() {
            self.refuse_exchange(comm_id);
        }
    }

    /// Asks the peer for patience: sends MRA. The answer comes within 4.096 us x 2^`service_timeout`.
    ///
    /// # Errors
    /// EINVAL: the state is another, or more than 222 bytes of private data.
    pub fn delay(
        &mut self,
        _now: Time,
        comm_id: CommId,
        service_timeout: u8,
        private_data: &[u8],
    ) -> Result<(), Errno> {
        self.with_users(comm_id, |cm, it| {
            let mra = delay(it, service_timeout, private_data)?;
            cm.send(&it.way, &mra);
            Ok(())
        })
    }

    /// Like [`Cm::delay`] without private data, but sends nothing until the peer repeats its message: then it learns
    /// that a program is slow, and does not give up.
    ///
    /// # Errors
    /// EINVAL: the state is another.
    pub fn delay_when_asked(&mut self, comm_id: CommId, service_timeout: u8) -> Result<(), Errno> {
        self.with_users(comm_id, |_, it| delay(it, service_timeout, &[]).map(|_| ()))
    }

    pub(super) fn receive_mra(&mut self, now: Time, way: &Way, mra: &Mra) {
        // The peer's number is not known before its REP.
        let is_meant = |it: &Connection| [0, mra.local_comm_id].contains(&it.remote_comm_id);
        self.with_peers(mra.remote_comm_id, way, is_meant, |cm, it| {
            let state = match (it.state, mra.message) {
                (State::ReqSent, Answered::Req) => State::MraReqReceived,
                (State::RepSent, Answered::Rep) => State::MraRepReceived,
                (State::MraReqReceived | State::MraRepReceived, _) => {
                    cm.counters.cm_duplicates += 1;
                    return;
                }
                _ => {
                    cm.counters.cm_drop_state += 1;
                    return;
                }
            };
            let patience = duration_of(mra.service_timeout) + duration_of(it.ack_timeout);
            if let Some(sending) = &mut it.sending {
                sending.interval = patience;
            }
            it.state = state;
            it.deadline = Some(now + patience);
            let event = EventKind::Delayed {
                service_timeout: mra.service_timeout,
                private_data: mra.private_data.to_vec(),
            };
            cm.tell(it, event);
        });
    }

    pub(super) fn receive_rej(&mut self, now: Time, way: &Way, rej: &Rej) {
        // Who gave up waiting for us may not know our number, but names its device.
        let by_guid = rej.info.first_chunk::<GUID_LEN>().and_then(|guid| {
            let key = (way.path.dest, u64::from_be_bytes(*guid), rej.local_comm_id);
            self.table.with_remote_id(key)
        });
        let comm_id = by_guid
            .filter(|_| rej.reason == RejReason::TIMEOUT)
            .unwrap_or(rej.remote_comm_id);
        // A REQ is refused by who has no number for it, or one that we do not know.
        let is_meant = |it: &Connection| [0, rej.local_comm_id].contains(&it.remote_comm_id);
        self.with_peers(comm_id, way, is_meant, |cm, it| cm.take_rej(now, it, rej));
    }

    fn take_rej(&mut self, now: Time, connection: &mut Connection, rej: &Rej) {
        match connection.state {
            State::ReqSent
            | State::MraReqReceived
            | State::ReqReceived
            | State::MraReqSent
            | State::RepSent
            | State::MraRepReceived
                if rej.reason != RejReason::STALE_CONNECTION =>
            {
                self.reset(connection);
            }
            State::Idle | State::DreqReceived | State::Timewait => {
                self.counters.cm_drop_state += 1;
                return;
            }
            _ => self.enter_timewait(now, connection, None),
        }
        let rejection = Rejection {
            reason: rej.reason,
            message: *rej,
        };
        self.tell(connection, EventKind::Rejected(Box::new(rejection)));
    }

    /// Sends a REJ, and does what follows from it.
    pub(super) fn send_rej(&mut self, now: Time, connection: &mut Connection, rej: Mad) {
        self.send(&connection.way, &rej);
        if matches!(connection.state, State::RepSent | State::MraRepReceived) {
            // The peer may have established it by now.
            self.enter_timewait(now, connection, Some(rej));
        } else {
            self.linger(now, connection, rej);
        }
    }

    /// The connection is refused. That is kept for a while, to be told again to a peer that has not heard it.
    pub(super) fn linger(&mut self, now: Time, connection: &mut Connection, rej: Mad) {
        self.table.unlist_qpn(connection);
        connection.state = State::Idle;
        connection.sending = None;
        connection.answer = Some(rej);
        connection.deadline = Some(now + connection.linger);
    }

    /// Nothing is left of the connection but its number, if that has a user.
    pub(super) fn reset(&mut self, connection: &mut Connection) {
        self.table.unlist_id(connection);
        self.table.unlist_qpn(connection);
        connection.state = State::Idle;
        connection.sending = None;
        connection.answer = None;
        connection.deadline = None;
        connection.gone = connection.destroyed;
    }

    /// Refuses a message about a connection that is not there: a peer that believes in it learns so.
    pub(super) fn refuse_unknown(&mut self, way: &Way, tid: u64, ids: (u32, u32), message: Answered) {
        self.counters.cm_drop_unknown += 1;
        self.refuse_message(way, tid, ids, message, RejReason::INVALID_COMM_ID, &[]);
    }

    /// Refuses a message on the spot; `ids` are ours and the peer's.
    pub(super) fn refuse_message(
        &mut self,
        way: &Way,
        tid: u64,
        ids: (u32, u32),
        message: Answered,
        reason: RejReason,
        info: &[u8],
    ) {
        let Ok(padded_info) = padded(info) else {
            return;
        };
        let rej = Rej {
            local_comm_id: ids.0,
            remote_comm_id: ids.1,
            message,
            info_len: info.len() as u8,
            reason,
            info: padded_info,
            private_data: [0; 148],
        };
        self.send(way, &Mad::new(tid, 0, rej));
    }
}

/// Goes to the state in which the peer is told to wait; gives the MRA that says so.
fn delay(connection: &mut Connection, service_timeout: u8, private_data: &[u8]) -> Result<Mad, Errno> {
    let (message, state) = match connection.state {
        State::ReqReceived => (Answered::Req, State::MraReqSent),
        State::RepReceived => (Answered::Rep, State::MraRepSent),
        _ => return Err(libc::EINVAL),
    };
    let mra = connection.mra(message, service_timeout, private_data)?;
    connection.state = state;
    connection.answer = Some(mra.clone());
    Ok(mra)
}
