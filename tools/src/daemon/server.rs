//! What clients ask of the daemon, and what it tells them.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use ferroce_engine::control::protocol::{
    DaemonStatus, ProcessStatus, RELEASE, Reply, Request, Token, Welcome,
};
use ferroce_engine::control::{Refusal, Report};
use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with};
use tracing::{debug, error, info, warn};

use super::connection::{Connection, Incoming, LeaseState};
use super::devices::{Change, Devices};
use super::port::command_name;
use super::slots::FreeSlots;
use super::sockets::SlotSockets;
use super::tree::Tree;
use super::{Options, PollSet, Source, sys};
use crate::netlink::Interfaces;

/// Connections at once: every slot, and some for the command line.
const MAX_CONNECTIONS: usize = 320;
/// How long a process has to report for `ferroce status`.
const REPORT_TIME: Duration = Duration::from_millis(200);

/// The state of the daemon.
pub struct Server {
    poll: PollSet,
    sockets: SlotSockets,
    slots: u8,
    free: FreeSlots,
    devices: Devices,
    connections: BTreeMap<u32, Connection>,
    /// Processes (their pidfd) that want the daemon to stay though they may close their connection.
    holds: BTreeMap<u32, OwnedFd>,
    queries: Vec<Query>,
    next_id: u32,
    group: Option<u32>,
    idle_exit: Option<Duration>,
    idle_since: Instant,
    tree: Tree,
}

/// A `ferroce status` that waits for reports.
struct Query {
    id: u32,
    asker: u32,
    deadline: Instant,
    missing: BTreeSet<u32>,
    reports: BTreeMap<u32, Report>,
}

impl Server {
    /// A server without devices and clients.
    pub fn new(options: &Options, poll: PollSet, sockets: SlotSockets, netns: u64, tree: Tree) -> Self {
        Self {
            poll,
            sockets,
            slots: options.slots,
            free: FreeSlots::new(options.slots),
            devices: Devices::new(netns),
            connections: BTreeMap::new(),
            holds: BTreeMap::new(),
            queries: Vec::new(),
            next_id: 0,
            group: options.group,
            idle_exit: options.idle_exit,
            idle_since: Instant::now(),
            tree,
        }
    }

    /// Waits for something to do, at most until the next deadline.
    pub fn wait(&self) -> io::Result<Vec<(Source, EventFlags)>> {
        let idle = self
            .idle_exit
            .filter(|_| self.is_idle())
            .map(|patience| self.idle_since + patience);
        let deadline = self.queries.iter().map(|query| query.deadline).chain(idle).min();
        self.poll.wait(deadline)
    }

    /// True if nobody has needed the daemon for as long as it is to wait.
    pub fn idle_for_good(&self) -> bool {
        self.idle_exit
            .is_some_and(|patience| self.is_idle() && self.idle_since.elapsed() >= patience)
    }

    /// True if nobody would miss the daemon: no client, and no device made by the user.
    fn is_idle(&self) -> bool {
        self.connections.is_empty() && self.holds.is_empty() && !self.devices.are_configured()
    }

    /// Takes over the present interfaces and tells who leases a device that changed.
    pub fn follow(&mut self, interfaces: Interfaces) {
        for change in self.devices.follow(interfaces) {
            self.announce(&change);
        }
    }

    /// Shows a change in the tree, and tells who leases the device.
    fn announce(&mut self, change: &Change) {
        let (info, shown, told) = match change {
            Change::Added(info) => (info, self.tree.add(info), None),
            Change::Changed(info) => (
                info,
                self.tree.change(info),
                Some(Reply::DeviceChanged(info.clone())),
            ),
            Change::Removed(info) => (info, self.tree.remove(info), Some(Reply::DeviceRemoved)),
        };
        info!(?change, "device");
        if let Err(error) = shown {
            error!(device = info.name, %error, "the device tree is not up to date");
        }
        if let Some(reply) = told {
            self.tell_holders(&info.name, &reply);
        }
    }

    fn tell_holders(&mut self, device: &str, reply: &Reply) {
        for id in self.holders(device) {
            if let Some(connection) = self.connections.get_mut(&id) {
                connection.send(reply);
                self.flush(id);
            }
        }
    }

    /// Connections that lease the device.
    fn holders(&self, device: &str) -> Vec<u32> {
        let leases = |(_, connection): &(&u32, &Connection)| {
            connection
                .lease
                .as_ref()
                .is_some_and(|lease| lease.device == device)
        };
        self.connections
            .iter()
            .filter(leases)
            .map(|(id, _)| *id)
            .collect()
    }

    /// Takes all connections that wait.
    pub fn accept(&mut self, listener: BorrowedFd<'_>) {
        loop {
            let socket = match accept_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                Ok(socket) => socket,
                Err(Errno::AGAIN) => return,
                Err(Errno::INTR | Errno::CONNABORTED) => continue,
                Err(error) => {
                    warn!(%error, "can't accept a connection");
                    return;
                }
            };
            match Connection::new(socket).and_then(|connection| self.admit(connection)) {
                Ok(()) => {}
                Err(error) => warn!(%error, "connection lost at its start"),
            }
        }
    }

    fn admit(&mut self, connection: Connection) -> io::Result<()> {
        if let Err(refusal) = self.permit(&connection) {
            info!(pid = connection.pid(), %refusal, "connection refused");
            connection.refuse(refusal);
            return Ok(());
        }
        let id = self.new_id();
        self.poll.add(connection.socket(), Source::Connection(id))?;
        if let Some(process) = &connection.process {
            self.poll.add(process, Source::Process(id))?;
        }
        self.connections.insert(id, connection);
        Ok(())
    }

    fn permit(&self, connection: &Connection) -> Result<(), Refusal> {
        let own = rustix::process::geteuid();
        let peer = &connection.peer;
        let in_group = |group: u32| {
            peer.gid.as_raw() == group
                || sys::peer_groups(connection.socket()).is_ok_and(|all| all.contains(&group))
        };
        if !peer.uid.is_root() && peer.uid != own && !self.group.is_some_and(in_group) {
            return Err(Refusal::NotPermitted {
                uid: peer.uid.as_raw(),
                daemon_uid: own.as_raw(),
            });
        }
        if self.connections.len() >= MAX_CONNECTIONS {
            return Err(Refusal::TooManyConnections);
        }
        Ok(())
    }

    /// Reads what a client sent and sends what waits for it.
    pub fn connection_ready(&mut self, id: u32, flags: EventFlags) {
        if flags.intersects(EventFlags::IN | EventFlags::HUP | EventFlags::ERR) {
            while let Some(connection) = self.connections.get_mut(&id) {
                match connection.receive() {
                    Incoming::Nothing => break,
                    Incoming::Greeted => {
                        let pid = std::process::id();
                        connection.send(&Reply::Welcome(Welcome {
                            pid,
                            tree: self.tree.root().display().to_string(),
                        }));
                    }
                    Incoming::Request(request) => self.serve(id, request),
                    Incoming::Over(reason) => {
                        self.flush(id);
                        self.drop_connection(id, reason);
                    }
                }
            }
        }
        self.flush(id);
    }

    fn serve(&mut self, id: u32, request: Request) {
        debug!(id, ?request, "request");
        let reply = match request {
            Request::Lease { device } => match self.lease(id, &device) {
                Ok(()) => return,
                Err(refusal) => Reply::Refused(refusal),
            },
            Request::Report { id: query, report } => return self.take_report(id, query, report),
            Request::Hold => self.hold(id),
            Request::Links => Reply::Links(self.devices.iter().cloned().collect()),
            Request::LinkAdd { name, netdev } => self.change_devices(|devices| devices.add(&name, &netdev)),
            Request::LinkDel { name } => match self.holders(&name).len() {
                0 => self.change_devices(|devices| devices.remove(&name)),
                leases => Reply::Refused(Refusal::DeviceBusy {
                    name,
                    leases: leases as u32,
                }),
            },
            Request::Status => return self.start_query(id),
        };
        if let Some(connection) = self.connections.get_mut(&id) {
            connection.send(&reply);
        }
    }

    fn change_devices(&mut self, change: impl FnOnce(&mut Devices) -> Result<Change, Refusal>) -> Reply {
        match change(&mut self.devices) {
            Ok(change) => {
                self.announce(&change);
                Reply::Done
            }
            Err(refusal) => Reply::Refused(refusal),
        }
    }

    fn lease(&mut self, id: u32, device: &str) -> Result<(), Refusal> {
        let info = self.devices.get(device).ok_or_else(|| Refusal::UnknownDevice {
            name: device.to_owned(),
        })?;
        let Some(connection) = self.connections.get_mut(&id) else {
            return Ok(());
        };
        if connection.lease.is_some() {
            return Err(Refusal::Failed("one connection holds one lease".to_owned()));
        }
        let mut token = Token::default();
        getrandom::fill(&mut token).map_err(|error| Refusal::Failed(format!("no randomness: {error}")))?;
        let slot = self.free.take().ok_or(Refusal::SlotTableFull {
            slots: u32::from(self.slots),
        })?;
        let rx = match self.sockets.accept_traffic(slot) {
            Ok(rx) => rx,
            Err(error) => {
                self.free.give_back(slot);
                return Err(Refusal::Failed(format!("slot {slot}: {error}")));
            }
        };
        info!(slot, device, pid = connection.pid(), "leased");
        if !connection.send_lease(
            LeaseState {
                slot,
                device: device.to_owned(),
                token,
            },
            info.clone(),
            rx,
        ) {
            self.drop_connection(id, "lease not taken");
        }
        Ok(())
    }

    /// Serves `ferroce run`: a program is about to look for devices.
    fn hold(&mut self, id: u32) -> Reply {
        if let Err(error) = self.tree.mirror_kernel(Path::new("/")) {
            warn!(%error, "the kernel's own devices are not shown");
        }
        let process = self
            .connections
            .get(&id)
            .and_then(|connection| connection.process.as_ref());
        let Some(Ok(process)) = process.map(|process| process.try_clone()) else {
            return Reply::Refused(Refusal::Failed(
                "the process is not visible from ferroced's pid namespace".to_owned(),
            ));
        };
        let hold = self.new_id();
        match self.poll.add(&process, Source::Hold(hold)) {
            Ok(()) => {
                self.holds.insert(hold, process);
                Reply::Done
            }
            Err(error) => Reply::Refused(Refusal::Failed(error.to_string())),
        }
    }

    fn start_query(&mut self, asker: u32) {
        let id = self.new_id();
        let mut missing = BTreeSet::new();
        let leases: Vec<u32> = self
            .connections
            .iter()
            .filter(|(_, connection)| connection.lease.is_some())
            .map(|(id, _)| *id)
            .collect();
        for holder in leases {
            if let Some(connection) = self.connections.get_mut(&holder)
                && connection.send_if_idle(&Reply::ReportWanted { id })
            {
                missing.insert(holder);
                self.flush(holder);
            }
        }
        let deadline = Instant::now() + REPORT_TIME;
        self.queries.push(Query {
            id,
            asker,
            deadline,
            missing,
            reports: BTreeMap::new(),
        });
    }

    fn take_report(&mut self, holder: u32, query: u32, report: Report) {
        // One that comes too late finds no query.
        if let Some(query) = self.queries.iter_mut().find(|open| open.id == query)
            && query.missing.remove(&holder)
        {
            query.reports.insert(holder, report);
        }
    }

    /// Answers every status request that has all its reports or has waited long enough.
    pub fn expire(&mut self, now: Instant) {
        let (over, open) = std::mem::take(&mut self.queries)
            .into_iter()
            .partition(|query| query.missing.is_empty() || query.deadline <= now);
        self.queries = open;
        for query in over {
            self.answer(query);
        }
    }

    fn answer(&mut self, mut query: Query) {
        let mut replies = Vec::new();
        for (id, connection) in &self.connections {
            if let Some(lease) = &connection.lease {
                replies.push(Reply::Process(Box::new(ProcessStatus {
                    slot: lease.slot,
                    device: lease.device.clone(),
                    pid: connection.pid(),
                    command: command_name(connection.pid()),
                    uid: connection.peer.uid.as_raw(),
                    report: query.reports.remove(id),
                })));
            }
        }
        let leased = replies.len() as u32;
        replies.push(Reply::StatusEnd(DaemonStatus {
            pid: std::process::id(),
            uid: rustix::process::geteuid().as_raw(),
            release: RELEASE.to_owned(),
            slots: u32::from(self.slots),
            leased,
            receive_buffer: self.sockets.receive_buffer(),
        }));
        if let Some(connection) = self.connections.get_mut(&query.asker) {
            for reply in &replies {
                connection.send(reply);
            }
            self.flush(query.asker);
        }
    }

    fn flush(&mut self, id: u32) {
        let Some(connection) = self.connections.get_mut(&id) else {
            return;
        };
        let result = match connection.flush() {
            Ok(waits) => self
                .poll
                .want_write(connection.socket(), Source::Connection(id), waits)
                .map_err(|_| "poll set refuses it"),
            Err(reason) => Err(reason),
        };
        if let Err(reason) = result {
            self.drop_connection(id, reason);
        }
    }

    /// The process behind a connection ended.
    pub fn process_ended(&mut self, id: u32) {
        self.drop_connection(id, "process ended");
    }

    /// A process that asked the daemon to stay ended.
    pub fn hold_ended(&mut self, id: u32) {
        self.holds.remove(&id);
        self.idle_since = Instant::now();
    }

    /// Forgets a connection and takes its slot back.
    fn drop_connection(&mut self, id: u32, reason: &str) {
        let Some(connection) = self.connections.remove(&id) else {
            return;
        };
        self.idle_since = Instant::now();
        debug!(id, reason, "connection dropped");
        for query in &mut self.queries {
            query.missing.remove(&id);
        }
        let Some(lease) = connection.lease else { return };
        info!(slot = lease.slot, reason, "lease ended");
        match self.sockets.reject_traffic(lease.slot) {
            Ok(()) => self.free.give_back(lease.slot),
            // A slot that can't be closed is not leased again.
            Err(error) => warn!(slot = lease.slot, %error, "slot can't be taken back"),
        }
    }

    fn new_id(&mut self) -> u32 {
        self.next_id = self.next_id.wrapping_add(1);
        self.next_id
    }
}
