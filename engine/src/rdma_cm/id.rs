//! An id (`rdma_cm_id`): its state, and all that is known of it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{Address, Id, MembershipId, PathRecord, PortSpace, QpKind};
use crate::cm::{CommId, MAX_WAITING};

/// Most ids and memberships of a process.
pub(super) const MAX_IDS_OF_SESSION: usize = 32_768;
/// Most ids and memberships of a user: others always find room.
pub(super) const MAX_IDS_OF_USER: usize = MAX_IDS / 2;
/// Most ids and memberships of all processes.
pub(super) const MAX_IDS: usize = 131_072;
/// Requests that one program does not answer use up its own ids before the room of all.
const _: () = assert!(MAX_WAITING >= MAX_IDS);
/// Highest number of an id: librdmacm has a table of all handles below 65,536, and checks no bounds.
pub(super) const MAX_NUMBER: u32 = 65_535;

/// What an id does (`enum rdma_cm_state`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum State {
    /// New.
    Idle,
    /// Has an address, maybe that of any.
    Bound,
    /// Looks for the way to the peer's address.
    AddressQuery,
    /// Knows it.
    AddressResolved,
    /// Has a path record.
    RouteResolved,
    /// Takes requests.
    Listen,
    /// From the request on, made or received, until the end of the connection.
    Connect,
    /// The connection has ended.
    Disconnect,
    /// Its device is gone: all that it may do is to be destroyed.
    Removed,
}

/// The device that an id is bound to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Bound {
    /// Its name.
    pub device: String,
    /// Its node GUID: a device of the same name may be another one.
    pub guid: u64,
}

/// A multicast group that an id has joined.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Membership {
    /// The group as the program named it.
    pub address: Address,
    /// Only to send.
    pub send_only: bool,
}

/// What is known of an id, and survives the daemon.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Kept {
    pub port_space: PortSpace,
    pub qp_kind: QpKind,
    pub state: State,
    /// Own end.
    pub source: Option<Address>,
    /// The peer's.
    pub dest: Option<Address>,
    pub bound: Option<Bound>,
    /// The interface that addresses are of; 0 while it does not matter.
    pub ifindex: u32,
    /// The port space in which it owns the port of its source.
    pub owns_port: Option<PortSpace>,
    pub reuse_address: bool,
    pub family_only: bool,
    /// The program has set `family_only` itself.
    pub family_only_set: bool,
    pub type_of_service: Option<u8>,
    pub ack_timeout: Option<u8>,
    pub path: Option<PathRecord>,
    /// How long an address may take to be resolved.
    pub resolve_ms: u32,
    /// The first PSN that the own queue pair expects.
    pub psn: u32,
    /// Own queue pair, 0 while unknown.
    pub qpn: u32,
    /// Q_Key of a datagram queue pair, 0 while it has none.
    pub qkey: u32,
    /// The peer's queue pair, 0 while unknown.
    pub remote_qpn: u32,
    /// Requests that may still come before one is taken.
    pub backlog: u32,
    /// The listener, of a request that the program has not got yet.
    pub listener: Option<Id>,
    /// The program knows the id: it made it, or accepted it. Events of others would say nothing to it.
    pub known: bool,
    pub memberships: BTreeMap<MembershipId, Membership>,
}

/// An id.
#[derive(Debug)]
pub(super) struct Identifier {
    pub kept: Kept,
    /// The connection, once there is one.
    pub comm: Option<CommId>,
    /// The question that waits for an answer.
    pub token: Option<u64>,
    /// The keepsake that its process has, hashed.
    pub kept_as: Option<u64>,
}

impl Kept {
    pub fn new(port_space: PortSpace, qp_kind: QpKind, psn: u32) -> Kept {
        Kept {
            port_space,
            qp_kind,
            state: State::Idle,
            source: None,
            dest: None,
            bound: None,
            ifindex: 0,
            owns_port: None,
            reuse_address: false,
            family_only: false,
            family_only_set: false,
            type_of_service: None,
            ack_timeout: None,
            path: None,
            resolve_ms: 0,
            psn,
            qpn: 0,
            qkey: 0,
            remote_qpn: 0,
            backlog: 0,
            listener: None,
            known: true,
            memberships: BTreeMap::new(),
        }
    }

    pub fn is_datagram(&self) -> bool {
        self.qp_kind == QpKind::Ud
    }
}
