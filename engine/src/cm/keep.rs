//! Connections as bytes: what a later `Cm` must know to go on with them.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::Cm;
use super::connection::{Connection, MAX_LINGER, Sending, duration_of};
use super::interface::*;
use super::sidr::Exchange;
use crate::time::Time;

/// Most times that a message is sent again: the field has 4 bits.
const MAX_RETRIES: u8 = 15;

/// Longest time that a program or a peer can ask for, which is that of SIDR: 2^32 ms.
pub(super) const MAX_INTERVAL: Duration = Duration::from_millis(1 << 32);

/// What is exported, with the time that is left until its deadline.
#[derive(Serialize, Deserialize)]
enum Keepsake {
    Connection(Box<Connection>, Option<Duration>),
    Exchange(Box<Exchange>, Option<Duration>),
}

impl Cm {
    /// All that a later `Cm` must know to go on with a comm id; `None` of one that is not known.
    pub fn export(&self, now: Time, comm_id: CommId) -> Option<Vec<u8>> {
        let left = |deadline: Option<Time>| deadline.map(|time| time.since(now));
        let connection = self.table.get(comm_id).filter(|it| !it.destroyed);
        let exchange = self.exchanges.get(comm_id).filter(|it| !it.destroyed);
        let keepsake = match (connection, exchange) {
            (Some(it), _) => Keepsake::Connection(Box::new(it.clone()), left(it.deadline)),
            (_, Some(it)) => Keepsake::Exchange(Box::new(it.clone()), left(it.deadline)),
            (None, None) => return None,
        };
        postcard::to_allocvec(&keepsake).ok()
    }

    /// Takes over what an earlier `Cm` has exported, with the same comm id. `None` if the bytes make no sense, or a
    /// comm id is in use.
    pub fn import(&mut self, now: Time, state: &[u8]) -> Option<CommId> {
        let (keepsake, rest) = postcard::take_from_bytes::<Keepsake>(state).ok()?;
        if !rest.is_empty() {
            return None;
        }
        let deadline = |left: Option<Duration>| left.map(|left| now + left);
        match keepsake {
            Keepsake::Connection(mut it, left) => {
                let longest = match it.state {
                    State::Idle => MAX_LINGER,
                    _ => duration_of(31),
                };
                it.deadline = deadline(left.map(|left| left.min(longest)));
                let comm_id = it.comm_id;
                let fits = comm_id != 0 && !self.is_known(comm_id) && makes_sense(&it, left);
                if !fits || !self.table.list_again(&it) {
                    return None;
                }
                self.put(it);
                Some(comm_id)
            }
            Keepsake::Exchange(mut it, left) => {
                it.deadline = deadline(left);
                let comm_id = it.comm_id;
                let fits = comm_id != 0 && !self.is_known(comm_id);
                (fits && self.add_exchange(it, left)).then_some(comm_id)
            }
        }
    }
}

/// Whether a connection can be as it says: it comes from a process, which might say anything.
fn makes_sense(connection: &Connection, left: Option<Duration>) -> bool {
    let waits = matches!(
        connection.state,
        State::ReqSent | State::MraReqReceived | State::RepSent | State::MraRepReceived | State::DreqSent
    );
    let is_sidr = matches!(connection.state, State::SidrReqSent | State::SidrReqReceived);
    let ends = connection.state == State::Timewait || waits;
    !is_sidr
        && !connection.destroyed
        && waits == connection.sending.is_some()
        && (!ends || connection.deadline.is_some())
        && connection.ack_timeout <= 31
        && connection.linger <= MAX_LINGER
        && (connection.state != State::Idle || connection.answer.is_none() || connection.deadline.is_some())
        && connection.max_retries <= MAX_RETRIES
        && !connection.interval.is_zero()
        && connection.interval <= MAX_INTERVAL
        && connection.sending.as_ref().is_none_or(is_possible)
        && left.is_none_or(|left| left <= MAX_INTERVAL)
}

/// Whether a message can wait for its answer so.
pub(super) fn is_possible(sending: &Sending) -> bool {
    sending.retries <= MAX_RETRIES && !sending.interval.is_zero() && sending.interval <= MAX_INTERVAL
}
