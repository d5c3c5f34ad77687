//! How a connection ends: DREQ, DREP, timewait, and its user letting go.

use std::time::Duration;

use ferroce_wire::cm::{Drep, Dreq, Lap, RejReason};

use super::Cm;
use super::connection::{Connection, MAX_LINGER, Mad, duration_of};
use super::interface::*;
use crate::time::Time;

/// Longest time from one try to the next of a DREQ whose program is gone: the peer's own choice may be hours.
const MAX_INTERVAL_ALONE: Duration = Duration::from_millis(8192);

impl Cm {
    /// Ends an established connection: sends DREQ. [`EventKind::Disconnected`] or [`EventKind::DisconnectTimeout`]
    /// follows, and [`EventKind::TimewaitExit`].
    ///
    /// # Errors
    /// EINVAL: the state is another, or more than 220 bytes of private data.
    pub fn disconnect(&mut self, now: Time, comm_id: CommId, private_data: &[u8]) -> Result<(), Errno> {
        self.with_users(comm_id, |cm, it| {
            if it.state != State::Established {
                return Err(libc::EINVAL);
            }
            cm.begin_disconnect(now, it, private_data)
        })
    }

    /// Goes along with an [`EventKind::DisconnectRequested`]: sends DREP. [`EventKind::TimewaitExit`] follows.
    ///
    /// # Errors
    /// EINVAL: the state is another, or more than 224 bytes of private data.
    pub fn answer_disconnect(
        &mut self,
        now: Time,
        comm_id: CommId,
        private_data: &[u8],
    ) -> Result<(), Errno> {
        self.with_users(comm_id, |cm, it| {
            if it.state != State::DreqReceived {
                return Err(libc::EINVAL);
            }
            let drep = it.drep(private_data)?;
            cm.send_drep(now, it, drep);
            Ok(())
        })
    }

    /// Lets go of a comm id: the peer is told what the state demands (REJ, DREQ, DREP, SIDR_REP). DREQ is repeated and
    /// timewait is kept in the background. Nothing happens to a comm id that is not known.
    pub fn destroy(&mut self, now: Time, comm_id: CommId) {
        let known = self.with(comm_id, |cm, it| {
            if !it.destroyed {
                it.destroyed = true;
                cm.abandon(now, it);
            }
        });
        if known.is_none() {
            self.destroy_exchange(now, comm_id);
        }
    }

    /// Lets go of a comm id without a word to the peer: its device is gone.
    pub fn forget(&mut self, comm_id: CommId) {
        if self.with(comm_id, |_, it| it.gone = true).is_none() {
            self.forget_exchange(comm_id);
        }
    }

    /// Does what is to be done when the user has let go.
    fn abandon(&mut self, now: Time, connection: &mut Connection) {
        let done = match connection.state {
            // A refusal goes on being repeated.
            State::Idle => {
                connection.gone = connection.answer.is_none();
                Ok(())
            }
            State::ReqSent | State::MraReqReceived => {
                let rej = connection.rej_timeout();
                self.send_rej(now, connection, rej);
                Ok(())
            }
            State::ReqReceived
            | State::MraReqSent
            | State::RepReceived
            | State::MraRepSent
            | State::RepSent
            | State::MraRepReceived => connection
                .rej(RejReason::CONSUMER_DEFINED, &[], &[])
                .map(|rej| self.send_rej(now, connection, rej)),
            // An XRC target may outlive the program that made it.
            State::Established if connection.transport == Transport::Xrc && !connection.active => {
                self.reset(connection);
                Ok(())
            }
            State::Established => {
                connection.interval = connection.interval.min(MAX_INTERVAL_ALONE);
                self.begin_disconnect(now, connection, &[])
            }
            State::DreqSent => {
                if let Some(sending) = &mut connection.sending {
                    sending.interval = sending.interval.min(MAX_INTERVAL_ALONE);
                    let latest = now + sending.interval;
                    connection.deadline = connection.deadline.map(|time| time.min(latest));
                }
                Ok(())
            }
            State::DreqReceived => connection
                .drep(&[])
                .map(|drep| self.send_drep(now, connection, drep)),
            State::Timewait => {
                let latest = now + MAX_LINGER;
                connection.deadline = connection.deadline.map(|time| time.min(latest));
                Ok(())
            }
            State::SidrReqSent | State::SidrReqReceived => Ok(()),
        };
        debug_assert!(done.is_ok(), "messages without private data have room for it");
    }

    pub(super) fn begin_disconnect(
        &mut self,
        now: Time,
        connection: &mut Connection,
        private_data: &[u8],
    ) -> Result<(), Errno> {
        let tid = if connection.active {
            connection.tid
        } else {
            self.new_tid()
        };
        let dreq = connection.dreq(tid, private_data)?;
        connection.state = State::DreqSent;
        connection.answer = None;
        self.ask(now, connection, dreq);
        Ok(())
    }

    fn send_drep(&mut self, now: Time, connection: &mut Connection, drep: Mad) {
        self.send(&connection.way, &drep);
        self.enter_timewait(now, connection, Some(drep));
    }

    pub(super) fn receive_dreq(&mut self, now: Time, way: &Way, tid: u64, dreq: &Dreq) {
        let is_over = self
            .table
            .get(dreq.remote_comm_id)
            .is_none_or(|it| it.remote_comm_id != dreq.local_comm_id || it.state == State::Idle);
        if is_over {
            // Whatever it was, it is not there: the peer need not ask again.
            self.counters.cm_drop_unknown += 1;
            let drep = Drep {
                local_comm_id: dreq.remote_comm_id,
                remote_comm_id: dreq.local_comm_id,
                private_data: [0; 224],
            };
            self.send(way, &Mad::new(tid, 0, drep));
            return;
        }
        self.with_peers(
            dreq.remote_comm_id,
            way,
            |_| true,
            |cm, it| {
                if it.local_qpn != dreq.remote_qpn {
                    cm.counters.cm_drop_qpn += 1;
                    return;
                }
                cm.take_dreq(now, it, tid, dreq);
            },
        );
    }

    fn take_dreq(&mut self, now: Time, connection: &mut Connection, tid: u64, dreq: &Dreq) {
        let private_data = dreq.private_data.to_vec();
        match connection.state {
            State::RepSent | State::MraRepReceived | State::Established => {
                connection.state = State::DreqReceived;
                connection.tid = tid;
                connection.sending = None;
                connection.deadline = None;
                self.tell(connection, EventKind::DisconnectRequested { private_data });
            }
            // Both have asked: there is nobody left to be asked.
            State::DreqSent => {
                connection.tid = tid;
                match connection.drep(&[]) {
                    Ok(drep) => self.send_drep(now, connection, drep),
                    Err(_) => self.enter_timewait(now, connection, None),
                }
                self.tell(connection, EventKind::Disconnected { private_data });
            }
            State::Timewait => {
                self.counters.cm_duplicates += 1;
                connection.tid = tid;
                if let Ok(drep) = connection.drep(&[]) {
                    // What a DREP said is said again.
                    let said = connection.answer.clone().filter(|it| it.is(Drep::ATTRIBUTE_ID));
                    self.send(&connection.way, &said.unwrap_or(drep));
                }
            }
            State::DreqReceived => self.counters.cm_duplicates += 1,
            _ => self.counters.cm_drop_state += 1,
        }
    }

    pub(super) fn receive_drep(&mut self, now: Time, way: &Way, drep: &Drep) {
        let is_meant = |it: &Connection| it.remote_comm_id == drep.local_comm_id;
        self.with_peers(drep.remote_comm_id, way, is_meant, |cm, it| match it.state {
            State::DreqSent | State::DreqReceived => {
                cm.enter_timewait(now, it, None);
                let private_data = drep.private_data.to_vec();
                cm.tell(it, EventKind::Disconnected { private_data });
            }
            State::Timewait => cm.counters.cm_duplicates += 1,
            _ => cm.counters.cm_drop_state += 1,
        });
    }

    pub(super) fn receive_lap(&mut self, way: &Way, tid: u64, lap: &Lap) {
        let is_meant = |it: &Connection| it.remote_comm_id == lap.local_comm_id;
        self.with_peers(lap.remote_comm_id, way, is_meant, |cm, it| {
            if it.state == State::Established {
                cm.send(&it.way, &it.apr(tid));
            } else {
                cm.counters.cm_drop_state += 1;
            }
        });
    }

    /// The connection is over. Its number and the peer's are not to be used again until packets on the way have died;
    /// the peer's queue pair may have another connection with another number.
    pub(super) fn enter_timewait(&mut self, now: Time, connection: &mut Connection, answer: Option<Mad>) {
        self.table.unlist_qpn(connection);
        connection.state = State::Timewait;
        connection.sending = None;
        connection.answer = answer;
        let mut wait = duration_of(connection.ack_timeout);
        if connection.destroyed {
            // The peer chose the time, and nobody here waits for its end.
            wait = wait.min(MAX_LINGER);
        }
        connection.deadline = Some(now + wait);
    }

    pub(super) fn end_timewait(&mut self, connection: &mut Connection) {
        self.reset(connection);
        self.tell(connection, EventKind::TimewaitExit);
    }
}
