//! Which connections there are, how they are found, and how many may be kept for peers' sake.
//!
//! A peer's connection is known by its address, GUID and comm id, and its queue pair by its address, GUID and QPN: the
//! address counts, so that nobody meddles with the connections of others by naming their numbers.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use super::connection::Connection;
use super::interface::*;
use crate::time::Time;

/// Most requests of peers that wait for an answer; more are dropped, and come again. As many as there can be ids of
/// RDMA CM, which bounds them by program: one that lets its requests wait must not use up the room of all.
pub(crate) const MAX_WAITING: usize = 131_072;

/// Most refusals that are kept to be repeated.
pub(super) const MAX_REFUSALS: usize = 4096;

/// Most ended connections that are kept without a user: those that repeat DREQ, and those in timewait.
pub(super) const MAX_ENDINGS: usize = 65_536;

/// A peer's address and GUID, and its comm id or QPN.
pub(super) type PeerKey = (IpAddr, u64, u32);

/// For whose sake a connection without a user is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Remains {
    Refusal,
    Ending,
}

/// The connections.
#[derive(Default)]
pub(super) struct Table {
    connections: BTreeMap<CommId, Box<Connection>>,
    by_id: BTreeMap<PeerKey, CommId>,
    by_qpn: BTreeMap<PeerKey, CommId>,
    /// Connections without users, oldest first.
    remains: [BTreeMap<u64, CommId>; 2],
    /// What each of them is, and its age.
    ages: BTreeMap<CommId, (Remains, u64)>,
    next_age: u64,
    /// Requests of peers without an answer yet.
    waiting: usize,
}

impl Table {
    pub fn get(&self, comm_id: CommId) -> Option<&Connection> {
        self.connections.get(&comm_id).map(|connection| &**connection)
    }

    pub fn iter(&self) -> impl Iterator<Item = &Connection> {
        self.connections.values().map(|connection| &**connection)
    }

    /// Takes a connection out, to work on it; it stays listed.
    pub fn take(&mut self, comm_id: CommId) -> Option<Box<Connection>> {
        let connection = self.connections.remove(&comm_id)?;
        self.waiting -= usize::from(is_waiting(&connection));
        Some(connection)
    }

    /// Puts it back, or in. Gives one that is too many now.
    pub fn put(&mut self, connection: Box<Connection>) -> Option<CommId> {
        self.waiting += usize::from(is_waiting(&connection));
        let comm_id = connection.comm_id;
        let what = remains(&connection);
        self.connections.insert(comm_id, connection);
        self.remember(comm_id, what)
    }

    /// Takes it off all lists; it must have been taken out.
    pub fn forget(&mut self, connection: &mut Connection) {
        self.unlist_id(connection);
        self.unlist_qpn(connection);
        self.remember(connection.comm_id, None);
    }

    /// Whether there is room for one more request of a peer.
    pub fn has_room(&self) -> bool {
        self.waiting < MAX_WAITING
    }

    /// The connection of a peer's comm id.
    pub fn with_remote_id(&self, key: PeerKey) -> Option<CommId> {
        self.by_id.get(&key).copied()
    }

    /// The connection of a peer's queue pair.
    pub fn with_remote_qpn(&self, key: PeerKey) -> Option<CommId> {
        self.by_qpn.get(&key).copied()
    }

    /// Lists it by the peer's comm id and queue pair. Nothing happens, and it is false, if either is listed.
    pub fn list(&mut self, connection: &mut Connection) -> bool {
        let (by_id, by_qpn) = (id_key(connection), qpn_key(connection));
        if self.by_id.contains_key(&by_id) || self.by_qpn.contains_key(&by_qpn) {
            return false;
        }
        self.by_id.insert(by_id, connection.comm_id);
        self.by_qpn.insert(by_qpn, connection.comm_id);
        connection.listed_by_id = true;
        connection.listed_by_qpn = true;
        true
    }

    /// Lists a connection of an earlier `Cm` as it was listed there; false if that is not possible.
    pub fn list_again(&mut self, connection: &Connection) -> bool {
        let (by_id, by_qpn) = (id_key(connection), qpn_key(connection));
        if connection.listed_by_id && self.by_id.contains_key(&by_id)
            || connection.listed_by_qpn && self.by_qpn.contains_key(&by_qpn)
        {
            return false;
        }
        if connection.listed_by_id {
            self.by_id.insert(by_id, connection.comm_id);
        }
        if connection.listed_by_qpn {
            self.by_qpn.insert(by_qpn, connection.comm_id);
        }
        true
    }

    pub fn unlist_id(&mut self, connection: &mut Connection) {
        if std::mem::take(&mut connection.listed_by_id) {
            self.by_id.remove(&id_key(connection));
        }
    }

    pub fn unlist_qpn(&mut self, connection: &mut Connection) {
        if std::mem::take(&mut connection.listed_by_qpn) {
            self.by_qpn.remove(&qpn_key(connection));
        }
    }

    /// Notes for whose sake a connection is kept. Gives the oldest of its kind, if they are too many now.
    fn remember(&mut self, comm_id: CommId, what: Option<Remains>) -> Option<CommId> {
        let known = self.ages.get(&comm_id).copied();
        if known.map(|(what, _)| what) == what {
            return None;
        }
        if let Some((was, age)) = known {
            self.remains[was as usize].remove(&age);
            self.ages.remove(&comm_id);
        }
        let what = what?;
        self.next_age += 1;
        self.ages.insert(comm_id, (what, self.next_age));
        let all = &mut self.remains[what as usize];
        all.insert(self.next_age, comm_id);
        let limit = match what {
            Remains::Refusal => MAX_REFUSALS,
            Remains::Ending => MAX_ENDINGS,
        };
        let too_many = all.len() > limit;
        all.first_key_value()
            .filter(|_| too_many)
            .map(|(_, &oldest)| oldest)
    }

    /// Whether the lists name existing connections only, and each that says it is listed.
    #[cfg(test)]
    pub fn check(&self) {
        let listed = |list: &BTreeMap<PeerKey, CommId>, is: fn(&Connection) -> bool| {
            assert!(list.values().all(|id| self.get(*id).is_some_and(is)), "{list:?}");
            assert_eq!(list.len(), self.iter().filter(|it| is(it)).count());
        };
        listed(&self.by_id, |it| it.listed_by_id);
        listed(&self.by_qpn, |it| it.listed_by_qpn);
        assert_eq!(self.waiting, self.iter().filter(|it| is_waiting(it)).count());
        assert_eq!(
            self.ages.len(),
            self.iter().filter(|it| remains(it).is_some()).count()
        );
        assert_eq!(
            self.ages.len(),
            self.remains.iter().map(BTreeMap::len).sum::<usize>()
        );
    }
}

fn is_waiting(connection: &Connection) -> bool {
    matches!(connection.state, State::ReqReceived | State::MraReqSent)
}

fn remains(connection: &Connection) -> Option<Remains> {
    match (connection.destroyed, connection.state) {
        (false, _) => None,
        (true, State::Idle) => Some(Remains::Refusal),
        (true, _) => Some(Remains::Ending),
    }
}

pub(super) fn id_key(connection: &Connection) -> PeerKey {
    (
        connection.way.path.dest,
        connection.remote_ca_guid,
        connection.remote_comm_id,
    )
}

pub(super) fn qpn_key(connection: &Connection) -> PeerKey {
    (
        connection.way.path.dest,
        connection.remote_ca_guid,
        connection.remote_qpn,
    )
}

/// What is to be done when.
#[derive(Default)]
pub(super) struct Deadlines(BTreeSet<(Time, CommId)>);

impl Deadlines {
    pub fn add(&mut self, comm_id: CommId, deadline: Option<Time>) {
        self.0.extend(deadline.map(|time| (time, comm_id)));
    }

    pub fn remove(&mut self, comm_id: CommId, deadline: Option<Time>) {
        if let Some(time) = deadline {
            self.0.remove(&(time, comm_id));
        }
    }

    pub fn first(&self) -> Option<Time> {
        self.0.first().map(|&(time, _)| time)
    }

    /// Who is due first, if it is by now.
    pub fn due(&self, now: Time) -> Option<CommId> {
        self.0
            .first()
            .filter(|&&(time, _)| time <= now)
            .map(|&(_, comm_id)| comm_id)
    }

    #[cfg(test)]
    pub fn len(&self) -> usize {
        self.0.len()
    }
}
