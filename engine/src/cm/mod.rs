//! The connection manager's protocol: messages, retries, time-wait (IBTA 12; reference section 13).
//!
//! Sans-I/O and deterministic. One [`Cm`] has the connections of a host. It knows comm ids, GUIDs, QPNs, PSNs and
//! private data; ports, IP addresses and what programs see are [`crate::rdma_cm`]'s. It has no listeners: each new REQ
//! and SIDR_REQ is an event with a comm id of its own, and who does not want it refuses it.
//!
//! After each call, [`Cm::poll_transmit`] and [`Cm::poll_event`] give what there is to send and to know, and
//! [`Cm::deadline`] when [`Cm::timeout`] is due. A comm id lives until [`Cm::destroy`], whatever happened to its
//! connection, and gives no events from then on.
#![deny(unsafe_code)]

mod interface;

use ferroce_wire::cm::RejReason;

use crate::time::Time;

pub use interface::*;

/// The connections and SIDR exchanges of a host.
pub struct Cm {}

impl Cm {
    /// One without connections. `random` gives unguessable numbers.
    pub fn new(random: Box<dyn FnMut() -> u64 + Send>) -> Cm {
        let _ = random;
        todo!()
    }

    /// Takes a MAD that came to QP 1. `way` is the way back: its source is the address that the MAD was sent to, its
    /// destination the sender's. What is not CM's, and what makes no sense, is counted and dropped.
    pub fn receive(&mut self, now: Time, way: &Way, mad: &[u8]) {
        let _ = (now, way, mad);
        todo!()
    }

    /// Does what is due: sends again, gives up, ends timewaits.
    pub fn timeout(&mut self, now: Time) {
        let _ = now;
        todo!()
    }

    /// When [`Cm::timeout`] is to be called next.
    pub fn deadline(&self) -> Option<Time> {
        todo!()
    }

    /// The next MAD to be sent.
    pub fn poll_transmit(&mut self) -> Option<Transmit> {
        todo!()
    }

    /// The next event.
    pub fn poll_event(&mut self) -> Option<Event> {
        todo!()
    }

    /// Asks for a connection: sends REQ.
    ///
    /// # Errors
    /// EINVAL: private data too long, or a number does not fit its field.
    pub fn request(&mut self, now: Time, parameters: &RequestParameters) -> Result<CommId, Errno> {
        let _ = (now, parameters);
        todo!()
    }

    /// Accepts a [`EventKind::Request`]: sends REP. [`EventKind::Ready`] follows.
    ///
    /// # Errors
    /// EINVAL: the state is another, private data too long, or a number does not fit its field.
    pub fn reply(&mut self, now: Time, comm_id: CommId, parameters: &ReplyParameters) -> Result<(), Errno> {
        let _ = (now, comm_id, parameters);
        todo!()
    }

    /// Goes along with a [`EventKind::Reply`]: sends RTU. The connection is established.
    ///
    /// # Errors
    /// EINVAL: the state is another, or more than 224 bytes of private data.
    pub fn ready(&mut self, now: Time, comm_id: CommId, private_data: &[u8]) -> Result<(), Errno> {
        let _ = (now, comm_id, private_data);
        todo!()
    }

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
        let _ = (now, comm_id, reason, info, private_data);
        todo!()
    }

    /// Refuses an [`EventKind::Request`] or [`EventKind::SidrRequest`] that never was anybody's: sends REJ with that
    /// reason and no comm id of ours, or SIDR_REP with status 1. The comm id is gone with it.
    pub fn refuse(&mut self, now: Time, comm_id: CommId, reason: RejReason) {
        let _ = (now, comm_id, reason);
        todo!()
    }

    /// Like [`Cm::delay`] without private data, but sends nothing until the peer repeats its message: then it learns
    /// that a program is slow, and does not give up.
    ///
    /// # Errors
    /// EINVAL: the state is another.
    pub fn delay_when_asked(&mut self, comm_id: CommId, service_timeout: u8) -> Result<(), Errno> {
        let _ = (comm_id, service_timeout);
        todo!()
    }

    /// Asks the peer for patience: sends MRA. The answer comes within 4.096 us x 2^`service_timeout`.
    ///
    /// # Errors
    /// EINVAL: the state is another, or more than 222 bytes of private data.
    pub fn delay(
        &mut self,
        now: Time,
        comm_id: CommId,
        service_timeout: u8,
        private_data: &[u8],
    ) -> Result<(), Errno> {
        let _ = (now, comm_id, service_timeout, private_data);
        todo!()
    }

    /// Ends an established connection: sends DREQ. [`EventKind::Disconnected`] or [`EventKind::DisconnectTimeout`]
    /// follows, and [`EventKind::TimewaitExit`].
    ///
    /// # Errors
    /// EINVAL: the state is another, or more than 220 bytes of private data.
    pub fn disconnect(&mut self, now: Time, comm_id: CommId, private_data: &[u8]) -> Result<(), Errno> {
        let _ = (now, comm_id, private_data);
        todo!()
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
        let _ = (now, comm_id, private_data);
        todo!()
    }

    /// The peer's data has come, so it is ready, whatever became of its RTU. [`EventKind::Established`] follows.
    ///
    /// # Errors
    /// EISCONN: it is established. EINVAL: the state is another.
    pub fn establish(&mut self, now: Time, comm_id: CommId) -> Result<(), Errno> {
        let _ = (now, comm_id);
        todo!()
    }

    /// Asks for a datagram service: sends SIDR_REQ.
    ///
    /// # Errors
    /// EINVAL: private data too long.
    pub fn sidr_request(&mut self, now: Time, parameters: &SidrParameters) -> Result<CommId, Errno> {
        let _ = (now, parameters);
        todo!()
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
        let _ = (now, comm_id, parameters);
        todo!()
    }

    /// Lets go of a comm id: the peer is told what the state demands (REJ, DREQ, DREP, SIDR_REP). DREQ is repeated and
    /// timewait is kept in the background. Nothing happens to a comm id that is not known.
    pub fn destroy(&mut self, now: Time, comm_id: CommId) {
        let _ = (now, comm_id);
        todo!()
    }

    /// Lets go of a comm id without a word to the peer: its device is gone.
    pub fn forget(&mut self, comm_id: CommId) {
        let _ = comm_id;
        todo!()
    }

    /// What the queue pair is to be set to. `None` in a state in which the peer's part is not known.
    pub fn attributes(&self, comm_id: CommId) -> Option<Attributes> {
        let _ = comm_id;
        todo!()
    }

    /// The state; `None` of a comm id that is not known.
    pub fn state(&self, comm_id: CommId) -> Option<State> {
        let _ = comm_id;
        todo!()
    }

    /// Where the peer is; `None` of a comm id that is not known.
    pub fn way(&self, comm_id: CommId) -> Option<&Way> {
        let _ = comm_id;
        todo!()
    }

    /// All that a later `Cm` must know to go on with a comm id; `None` of one that is not known.
    pub fn export(&self, now: Time, comm_id: CommId) -> Option<Vec<u8>> {
        let _ = (now, comm_id);
        todo!()
    }

    /// Takes over what an earlier `Cm` has exported, with the same comm id. `None` if the bytes make no sense, or a
    /// comm id is in use.
    pub fn import(&mut self, now: Time, state: &[u8]) -> Option<CommId> {
        let _ = (now, state);
        todo!()
    }

    /// All connections and exchanges, by comm id.
    pub fn status(&self) -> Vec<Status> {
        todo!()
    }

    /// Counters of messages and drops by reason, added to `out` as (name, value).
    pub fn counters(&self, out: &mut dyn FnMut(&'static str, u64)) {
        let _ = out;
        todo!()
    }
}
