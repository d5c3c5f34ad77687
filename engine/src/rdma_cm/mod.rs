//! RDMA CM: ids, port spaces, addresses and events, as the kernel's `rdma_cm` and `rdma_ucm` have them.
//!
//! Sans-I/O like the transport. One [`RdmaCm`] serves all processes of a host: it takes their [`Command`]s, MADs that
//! came to QP 1, answers about routes, and the time; it gives [`Output`]s and the next deadline. The messages between
//! the peers are [`crate::cm`]'s.
#![deny(unsafe_code)]

mod address;
mod attributes;
mod bind;
mod connect;
mod datagram;
mod devices;
mod id;
mod interface;
mod keepsake;
mod listen;
mod lobby;
mod multicast;
mod ports;
mod resolve;
mod status;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::IpAddr;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::cm::{Cm, CommId, Way};
use crate::control::DeviceInfo;
use crate::link::Path;
use crate::time::Time;
use id::{Identifier, Kept, MAX_IDS, MAX_IDS_OF_SESSION, MAX_IDS_OF_USER, MAX_NUMBER, State};
use lobby::Lobby;
use ports::Ports;

pub use interface::*;

/// Number of a process's connection to the daemon.
pub type Session = u32;

/// An id or a membership, with the process that has it. A process's numbers are its own: they come back with it to another
/// daemon, whatever that has given out by then.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Handle {
    session: Session,
    number: u32,
}

impl Handle {
    fn new(session: Session, number: u32) -> Handle {
        Handle { session, number }
    }

    /// All that a process may have.
    fn all_of(session: Session) -> std::ops::RangeInclusive<Handle> {
        Handle::new(session, 0)..=Handle::new(session, u32::MAX)
    }
}

/// A source of unguessable numbers.
type Random = Arc<Mutex<Box<dyn FnMut() -> u64 + Send>>>;

/// Ids, ports and connections of all processes of a host.
pub struct RdmaCm {
    random: Random,
    cm: Cm,
    devices: Vec<DeviceInfo>,
    /// All addresses of the host.
    addresses: BTreeSet<IpAddr>,
    sessions: BTreeMap<Session, Process>,
    /// How many ids and memberships the users have who have any.
    users: BTreeMap<u32, usize>,
    ids: BTreeMap<Handle, Identifier>,
    comms: BTreeMap<CommId, Handle>,
    memberships: BTreeMap<Handle, Handle>,
    /// The requests that programs have not got: (listener, new id).
    requests: BTreeSet<(Handle, Handle)>,
    lobby: Lobby,
    ports: Ports,
    /// The number that the next question about an address gets.
    next_token: u64,
    /// The questions without an answer: of which id, and until when.
    resolves: BTreeMap<u64, (Handle, Time)>,
    resolve_deadlines: BTreeSet<(Time, u64)>,
    /// Ids that have changed in this call.
    dirty: BTreeSet<Handle>,
    /// Ids that have gone in this call.
    gone: Vec<Handle>,
    /// What this call gives, but for keepsakes and MADs, which go first.
    outputs: VecDeque<Output>,
    /// What is to be polled.
    ready: VecDeque<Output>,
    /// MADs that came to a device that is not there.
    misdirected: u64,
    /// Requests of peers that found no room at their listener.
    backlog_full: u64,
}

/// A process.
#[derive(Debug, Default)]
struct Process {
    uid: u32,
    /// The number that was given out last.
    last_number: u32,
    /// How many ids and memberships it has.
    held: usize,
}

/// What [`RdmaCm::poll`] gives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Output {
    /// A MAD to be sent from QP 1 of the device to QP 1 at the end of the path (UD SEND_ONLY, Q_Key of the GSI).
    Send {
        /// Name of the device.
        device: String,
        /// Where to, and from which address.
        path: Path,
        /// 256 bytes.
        mad: Box<[u8; 256]>,
    },
    /// Tell a process.
    Event {
        /// The process.
        session: Session,
        /// What.
        event: Event,
    },
    /// What a process is to keep from now on. Comes before the event or the answer that goes with it.
    Keepsake {
        /// The process.
        session: Session,
        /// What.
        keepsake: Keepsake,
    },
    /// Find a way; [`RdmaCm::resolved`] is to be called with the token.
    Resolve {
        /// To be repeated.
        token: u64,
        /// Own address, if the program names one.
        source: Option<IpAddr>,
        /// The peer's or the group's address.
        dest: IpAddr,
        /// Interface that the program names: scope id of either, or that of the bound device; 0 for any.
        ifindex: u32,
        /// Type of service.
        type_of_service: u8,
    },
    /// The answer is not wanted any more, or comes too late.
    ResolveCancel {
        /// The token.
        token: u64,
    },
}

/// A way to an address, by routes and neighbours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resolution {
    /// Own address.
    pub source: IpAddr,
    /// The interface whose device it is: that of the address, where the destination is the host itself.
    pub ifindex: u32,
}

/// A MAD that came to QP 1. BTH, DETH (Q_Key) and ICRC were checked.
#[derive(Clone, Copy, Debug)]
pub struct Arrival<'a> {
    /// Name of the device that has the destination address.
    pub device: &'a str,
    /// The sender.
    pub source: IpAddr,
    /// Our address.
    pub dest: IpAddr,
    /// The interface, for link-local addresses.
    pub ifindex: u32,
    /// Traffic class as received.
    pub traffic_class: u8,
    /// Flow label, where it is known.
    pub flow_label: u32,
    /// The MAD: anything.
    pub mad: &'a [u8],
}

/// A line of `ferroce status`.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct IdStatus {
    /// The id.
    pub id: Id,
    /// The process.
    pub session: Session,
    /// Device, once bound to one.
    pub device: Option<String>,
    /// Port space.
    pub port_space: PortSpace,
    /// As in `LISTEN`, `CONNECTED`, `CONNECTING`.
    pub state: String,
    /// Own end, once bound.
    pub source: Option<Address>,
    /// The peer's end.
    pub dest: Option<Address>,
    /// Own queue pair, once known.
    pub qpn: Option<u32>,
    /// The peer's queue pair.
    pub remote_qpn: Option<u32>,
}

impl RdmaCm {
    /// One without devices and processes. `random` gives unguessable numbers (comm ids, PSNs, ports).
    pub fn new(random: Box<dyn FnMut() -> u64 + Send>) -> RdmaCm {
        let random: Random = Arc::new(Mutex::new(random));
        let shared = Arc::clone(&random);
        RdmaCm {
            cm: Cm::new(Box::new(move || shared.lock()())),
            random,
            devices: Vec::new(),
            addresses: BTreeSet::new(),
            sessions: BTreeMap::new(),
            users: BTreeMap::new(),
            ids: BTreeMap::new(),
            comms: BTreeMap::new(),
            memberships: BTreeMap::new(),
            requests: BTreeSet::new(),
            lobby: Lobby::default(),
            ports: Ports::default(),
            next_token: 1,
            resolves: BTreeMap::new(),
            resolve_deadlines: BTreeSet::new(),
            dirty: BTreeSet::new(),
            gone: Vec::new(),
            outputs: VecDeque::new(),
            ready: VecDeque::new(),
            misdirected: 0,
            backlog_full: 0,
        }
    }

    /// The devices as they are now. What was bound to one that is missing has its [`EventKind::DeviceRemoval`].
    pub fn set_devices(&mut self, now: Time, devices: &[DeviceInfo]) {
        self.devices_changed(devices);
        self.clear_lobby();
        self.settle(now);
    }

    /// The addresses of the host as they are now, those that no device has too: they tell why one can't be bound.
    pub fn set_addresses(&mut self, addresses: BTreeSet<IpAddr>) {
        self.addresses = addresses;
    }

    /// A process of a user has come, unless it was there. Uid 0 may bind ports below 1024; the ids of each are bounded.
    pub fn open(&mut self, session: Session, uid: u32) {
        let process = Process {
            uid,
            ..Process::default()
        };
        self.sessions.entry(session).or_insert(process);
    }

    /// A process is gone: its ids are destroyed, its connections closed.
    pub fn close(&mut self, now: Time, session: Session) {
        while let Some((&id, _)) = self.ids.range(Handle::all_of(session)).next() {
            self.end(now, id);
        }
        self.sessions.remove(&session);
        self.settle(now);
        self.ready.retain(|output| {
            !matches!(output, Output::Event { session: of, .. } | Output::Keepsake { session: of, .. }
                if *of == session)
        });
    }

    /// Does what a process asks.
    ///
    /// # Errors
    /// The errno that the kernel gives: ENOENT for ids that the process does not have, EIO for those whose device is gone,
    /// EINVAL in the wrong state.
    pub fn command(&mut self, now: Time, session: Session, command: Command) -> Result<Answer, Errno> {
        // Most commands change their id, even where they fail: accept then rejects.
        let id = subject(&command).map(|id| Handle::new(session, id));
        let result = self.carry_out(now, session, command);
        self.dirty.extend(id);
        self.settle(now);
        result
    }

    fn carry_out(&mut self, now: Time, session: Session, command: Command) -> Result<Answer, Errno> {
        let of = |id| Handle::new(session, id);
        match command {
            Command::Create { port_space, qp_kind } => return self.create(session, port_space, qp_kind),
            Command::Destroy { id } => {
                self.own_any(of(id))?;
                self.destroy(now, of(id));
            }
            Command::Bind { id, address } => self.bind(of(id), address)?,
            Command::ResolveAddress {
                id,
                source,
                dest,
                timeout_ms,
            } => self.resolve_address(now, of(id), (source, dest), timeout_ms)?,
            Command::ResolveRoute { id, timeout_ms } => self.resolve_route(of(id), timeout_ms)?,
            Command::Query { id } => {
                let route = self.query(of(id))?;
                return Ok(Answer::Route(Box::new(route)));
            }
            Command::QpAttributes { id, state } => {
                let attributes = self.qp_attributes(of(id), state)?;
                return Ok(Answer::QpAttributes(Box::new(attributes)));
            }
            Command::Connect { id, parameters, ece } => self.connect(now, of(id), &parameters, ece)?,
            Command::Listen { id, backlog } => self.listen(now, of(id), backlog)?,
            Command::Accept { id, parameters, ece } => {
                self.accept(now, of(id), parameters.as_ref(), ece)?;
            }
            Command::Reject {
                id,
                reason,
                private_data,
            } => self.reject(now, of(id), reason, &private_data)?,
            Command::Disconnect { id } => self.disconnect(now, of(id))?,
            Command::Notify { id, event } => self.notify(now, of(id), event)?,
            Command::SetOption { id, option } => self.set_option(of(id), option)?,
            Command::Join {
                id,
                address,
                send_only,
            } => {
                return self
                    .join(of(id), address, send_only)
                    .map(|membership| Answer::Joined(membership.number));
            }
            Command::Leave { membership } => self.leave(of(membership))?,
            Command::Taken { id } => self.taken(of(id))?,
        }
        Ok(Answer::Done)
    }

    /// Programs of an earlier daemon are going to come by [`RdmaCm::restore`]. Until then, messages that nobody knows
    /// wait: they may be theirs.
    pub fn expect_restores(&mut self, until: Time) {
        self.cm.expect_imports(until);
    }

    /// The process has ids of an earlier daemon up to this number, whether they go on or not: new ones follow.
    pub fn skip_numbers(&mut self, session: Session, highest: Id) {
        if let Some(process) = self.sessions.get_mut(&session) {
            process.last_number = process.last_number.max(highest);
        }
    }

    /// Takes an id over from an earlier daemon. False if it can not go on: the port is taken, the device is not there, or
    /// the bytes make no sense.
    pub fn restore(&mut self, now: Time, session: Session, keepsake: &Keepsake) -> bool {
        let restored = self.take_over(now, session, keepsake).is_some();
        self.settle(now);
        restored
    }

    /// Takes a MAD.
    pub fn receive(&mut self, now: Time, arrival: &Arrival<'_>) {
        match self.way_back(arrival) {
            Some(way) => self.cm.receive(now, &way, arrival.mad),
            None => self.misdirected += 1,
        }
        self.settle(now);
    }

    fn way_back(&self, arrival: &Arrival<'_>) -> Option<Way> {
        let device = self.devices.iter().find(|device| device.name == arrival.device)?;
        Some(Way {
            device: device.name.clone(),
            path: Path {
                ifindex: arrival.ifindex,
                sgid_index: bind::gid_index(device, arrival.dest)?,
                traffic_class: arrival.traffic_class,
                hop_limit: resolve::HOP_LIMIT,
                flow_label: arrival.flow_label,
                ..Path::between(arrival.dest, arrival.source)
            },
        })
    }

    /// Takes the answer to [`Output::Resolve`].
    pub fn resolved(&mut self, now: Time, token: u64, result: Result<Resolution, Errno>) {
        self.address_resolved(token, result);
        self.settle(now);
    }

    /// [`Output::Resolve`] failed at once, and the command that asked is not answered yet: it fails, as in the kernel.
    /// Then nothing else tells of it.
    pub fn resolve_failed(&mut self, now: Time, token: u64) {
        if let Some(id) = self.forget_token(token) {
            self.entry_mut(id).kept.state = State::Bound;
            self.touch(id);
        }
        self.settle(now);
    }

    /// Does what is due.
    pub fn timeout(&mut self, now: Time) {
        self.cm.timeout(now);
        self.expire_resolves(now);
        self.expire_waiting(now);
        self.settle(now);
    }

    /// When [`RdmaCm::timeout`] is to be called next.
    pub fn deadline(&self) -> Option<Time> {
        let resolve = self.resolve_deadlines.first().map(|(deadline, _)| *deadline);
        [self.cm.deadline(), resolve, self.lobby.deadline()]
            .into_iter()
            .flatten()
            .min()
    }

    /// Whether peers or programs are still to be told something that has begun here: not so with requests that wait for a
    /// listener, which come again.
    pub fn is_busy(&self) -> bool {
        self.cm.deadline().is_some() || !self.resolve_deadlines.is_empty()
    }

    /// The next thing to do; to be called until it gives `None` after each of the other calls.
    pub fn poll(&mut self) -> Option<Output> {
        self.ready.pop_front()
    }

    /// All ids.
    pub fn status(&self) -> Vec<IdStatus> {
        self.ids
            .iter()
            .map(|(id, entry)| self.status_of(*id, entry))
            .collect()
    }

    /// Counters of messages and drops by reason, added to `out` as (name, value).
    pub fn counters(&self, out: &mut dyn FnMut(&'static str, u64)) {
        out("cm_misdirected", self.misdirected);
        out("cm_drop_backlog", self.backlog_full);
        self.cm.counters(out);
    }

    fn create(&mut self, session: Session, port_space: PortSpace, qp_kind: QpKind) -> Result<Answer, Errno> {
        if !self.sessions.contains_key(&session) {
            return Err(libc::ENOENT);
        }
        if !self.has_room(session) {
            return Err(libc::ENOMEM);
        }
        let qp_kind = match port_space {
            PortSpace::Tcp => QpKind::Rc,
            PortSpace::Udp | PortSpace::Ipoib => QpKind::Ud,
            PortSpace::Ib => qp_kind,
        };
        let psn = self.random() as u32 & 0xff_ffff;
        let id = self.add(session, Kept::new(port_space, qp_kind, psn));
        Ok(Answer::Created(id.number))
    }

    /// Ends an id with all that it has, the requests that its program has not got too.
    fn destroy(&mut self, now: Time, id: Handle) {
        if self.entry(id).kept.state == State::Listen {
            for request in self.requests_of(id) {
                self.end(now, request);
            }
        }
        self.end(now, id);
    }

    /// Ends an id alone.
    fn end(&mut self, now: Time, id: Handle) {
        self.release(now, id);
        if let Some(entry) = self.ids.remove(&id)
            && let Some(listener) = entry.kept.listener
        {
            self.requests.remove(&(Handle::new(id.session, listener), id));
        }
        self.hold(id.session, -1);
        self.dirty.remove(&id);
        self.gone.push(id);
    }

    /// Lets go of all that an id has, and tells the peer.
    fn release(&mut self, now: Time, id: Handle) {
        if let Some(comm) = self.entry_mut(id).comm.take() {
            self.comms.remove(&comm);
            self.cm.destroy(now, comm);
        }
        self.lose(id);
    }

    /// Lets go of question, port and groups.
    fn lose(&mut self, id: Handle) {
        self.cancel_resolve(id);
        self.release_port(id);
        for number in std::mem::take(&mut self.entry_mut(id).kept.memberships).into_keys() {
            self.memberships.remove(&Handle::new(id.session, number));
            self.hold(id.session, -1);
        }
    }

    /// The requests of a listener that its program has not got.
    fn requests_of(&self, listener: Handle) -> Vec<Handle> {
        let of_session = Handle::all_of(listener.session);
        self.requests
            .range((listener, *of_session.start())..=(listener, *of_session.end()))
            .map(|(_, request)| *request)
            .collect()
    }

    /// The id, if the process has it and its device is not gone.
    fn own(&self, id: Handle) -> Result<&Identifier, Errno> {
        self.own_any(id)?;
        let entry = self.entry(id);
        if entry.kept.state == State::Removed {
            Err(libc::EIO)
        } else {
            Ok(entry)
        }
    }

    /// The id, if the process has it, and it is bound to a device.
    fn own_bound(&self, id: Handle) -> Result<&Identifier, Errno> {
        let entry = self.own(id)?;
        if entry.kept.bound.is_none() {
            Err(libc::EINVAL)
        } else {
            Ok(entry)
        }
    }

    fn own_any(&self, id: Handle) -> Result<(), Errno> {
        if self.ids.contains_key(&id) {
            Ok(())
        } else {
            Err(libc::ENOENT)
        }
    }

    /// An id that is there.
    fn entry(&self, id: Handle) -> &Identifier {
        self.ids.get(&id).expect("the id is in the table")
    }

    fn entry_mut(&mut self, id: Handle) -> &mut Identifier {
        self.ids.get_mut(&id).expect("the id is in the table")
    }

    fn is_privileged(&self, id: Handle) -> bool {
        self.sessions
            .get(&id.session)
            .is_some_and(|process| process.uid == 0)
    }

    fn has_room(&self, session: Session) -> bool {
        self.ids.len() + self.memberships.len() < MAX_IDS
            && self.sessions.get(&session).is_some_and(|process| {
                let users = self.users.get(&process.uid).copied().unwrap_or(0);
                process.held < MAX_IDS_OF_SESSION && users < MAX_IDS_OF_USER
            })
    }

    /// Counts what a process, and its user, has.
    fn hold(&mut self, session: Session, more: isize) {
        let Some(process) = self.sessions.get_mut(&session) else {
            return;
        };
        process.held = process.held.saturating_add_signed(more);
        let users = self.users.entry(process.uid).or_default();
        *users = users.saturating_add_signed(more);
        if *users == 0 {
            self.users.remove(&process.uid);
        }
    }

    /// Adds an id.
    fn add(&mut self, session: Session, kept: Kept) -> Handle {
        let id = self.new_handle(session);
        self.insert(id, kept);
        self.touch(id);
        id
    }

    fn insert(&mut self, id: Handle, kept: Kept) {
        if let Some(listener) = kept.listener {
            self.requests.insert((Handle::new(id.session, listener), id));
        }
        let entry = Identifier {
            kept,
            comm: None,
            token: None,
            kept_as: None,
        };
        self.ids.insert(id, entry);
        self.hold(id.session, 1);
    }

    /// A new id or membership of a process that has room: its number was not used lately.
    fn new_handle(&mut self, session: Session) -> Handle {
        let mut number = self
            .sessions
            .get(&session)
            .map_or(0, |process| process.last_number);
        let new = loop {
            number = number % MAX_NUMBER + 1;
            let new = Handle::new(session, number);
            if self.is_free(new) {
                break new;
            }
        };
        if let Some(process) = self.sessions.get_mut(&session) {
            process.last_number = number;
        }
        new
    }

    /// Whether the number is one that ids may have, and none has it.
    fn is_free(&self, new: Handle) -> bool {
        (1..=MAX_NUMBER).contains(&new.number)
            && !self.ids.contains_key(&new)
            && !self.memberships.contains_key(&new)
    }

    fn random(&self) -> u64 {
        self.random.lock()()
    }

    /// Notes that an id has changed.
    fn touch(&mut self, id: Handle) {
        self.dirty.insert(id);
    }

    fn push_event(&mut self, session: Session, event: Event) {
        self.outputs.push_back(Output::Event { session, event });
    }

    /// Ends a call: follows what the connections tell, and lines up what is to be polled. Keepsakes go first, so that
    /// nobody knows of a state that would not survive.
    fn settle(&mut self, now: Time) {
        while let Some(event) = self.cm.poll_event() {
            self.comm_event(now, event);
        }
        self.push_keepsakes(now);
        while let Some(transmit) = self.cm.poll_transmit() {
            self.ready.push_back(Output::Send {
                device: transmit.way.device,
                path: transmit.way.path,
                mad: transmit.mad,
            });
        }
        self.ready.append(&mut self.outputs);
    }
}

/// The id that a command may change.
fn subject(command: &Command) -> Option<Id> {
    match *command {
        Command::Create { .. } | Command::Leave { .. } | Command::Query { .. } => None,
        Command::Destroy { id }
        | Command::Bind { id, .. }
        | Command::ResolveAddress { id, .. }
        | Command::ResolveRoute { id, .. }
        | Command::QpAttributes { id, .. }
        | Command::Connect { id, .. }
        | Command::Listen { id, .. }
        | Command::Accept { id, .. }
        | Command::Reject { id, .. }
        | Command::Disconnect { id }
        | Command::Notify { id, .. }
        | Command::SetOption { id, .. }
        | Command::Join { id, .. }
        | Command::Taken { id } => Some(id),
    }
}
