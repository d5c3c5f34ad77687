//! What clients ask of the daemon, and what it tells them.

mod leases;
mod rdma;
mod status;
mod xdp;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use ferroce_engine::control::protocol::{LinkStatus, Reply, Request, Welcome};
use ferroce_engine::control::{DeviceInfo, Refusal};
use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with};
use tracing::{debug, error, info, warn};

use super::cm::ConnectionManager;
use super::connection::{Connection, End, Incoming, ReceiveBuffer};
use super::devices::{Change, Devices};
use super::inherit::Early;
use super::slots::FreeSlots;
use super::sockets::SlotSockets;
use super::tree::Tree;
use super::xdp::device::XdpDevice;
use super::xdp::hops::Hops;
use super::{Options, PollSet, Source};
use crate::netlink::Interfaces;
use status::Query;

/// Connections at once: every slot, RDMA CM of as many processes, and some for the command line.
const MAX_CONNECTIONS: usize = 640;
/// Messages read from one client before the others have their turn.
const MAX_MESSAGES: u32 = 16;
/// Time to let descriptors come free when none is left for a connection.
const BREATH: Duration = Duration::from_millis(10);
/// Processes at once that only want the daemon to stay.
const MAX_HOLDS: usize = 4096;

/// Time for programs of an earlier daemon to come, before it is asked whether they live.
const FIRST_SEARCH: Duration = Duration::from_secs(2);
/// Time between later such questions: a stopped program may come late.
const SEARCH_INTERVAL: Duration = Duration::from_secs(10);

/// The state of the daemon.
pub struct Server {
    poll: PollSet,
    sockets: SlotSockets,
    slots: u8,
    free: FreeSlots,
    /// Slots whose programs may live, but have not come to us: leased by an earlier daemon, or on connections that we
    /// gave up.
    presumed: BTreeSet<u8>,
    /// Time to look which of these programs are dead.
    next_search: Instant,
    devices: Devices,
    /// Those in XDP mode, by name.
    xdp: BTreeMap<String, XdpDevice>,
    /// Their tables of next hops.
    hops: Hops,
    connections: BTreeMap<u32, Connection>,
    buffer: ReceiveBuffer,
    /// Processes that want the daemon to stay though they may close their connection.
    holds: BTreeMap<u32, Hold>,
    /// Given up for a moment to refuse a connection when no descriptor is left.
    spare: Option<OwnedFd>,
    queries: Vec<Query>,
    cm: ConnectionManager,
    /// MADs are not received until then.
    mads_paused: Option<Instant>,
    next_id: u32,
    group: Option<u32>,
    idle_exit: Option<Duration>,
    idle_since: Instant,
    tree: Tree,
}

/// A process that wants the daemon to stay.
struct Hold {
    pid: u32,
    /// Becomes readable when the process ends.
    process: OwnedFd,
}

impl Server {
    /// A server without devices and clients. Slots that are open already are an earlier daemon's.
    pub fn new(
        options: &Options,
        poll: PollSet,
        sockets: SlotSockets,
        netns: u64,
        tree: Tree,
        cm: ConnectionManager,
    ) -> io::Result<Self> {
        let slots = sockets.count() - 1;
        let presumed: BTreeSet<u8> = (1..=slots).filter(|slot| sockets.is_open(*slot)).collect();
        if let Some(own) = sockets.own() {
            poll.add(own, Source::Mads)?;
        }
        poll.add(cm.neighbours_fd(), Source::Neighbours)?;
        let hops = Hops::new()?;
        poll.add(&hops, Source::Hops)?;
        let mut devices = Devices::new(netns);
        devices.leave_xdp(!presumed.is_empty());
        Ok(Self {
            poll,
            sockets,
            slots,
            free: FreeSlots::new(slots, |slot| presumed.contains(&slot)),
            presumed,
            next_search: Instant::now() + FIRST_SEARCH,
            devices,
            xdp: BTreeMap::new(),
            hops,
            connections: BTreeMap::new(),
            buffer: ReceiveBuffer::new(),
            holds: BTreeMap::new(),
            spare: spare_descriptor(),
            queries: Vec::new(),
            cm,
            mads_paused: None,
            next_id: 0,
            group: options.group,
            idle_exit: options.idle_exit,
            idle_since: Instant::now(),
            tree,
        })
    }

    /// Waits for something to do, at most until the next deadline.
    pub fn wait(&self) -> io::Result<Vec<(Source, EventFlags)>> {
        let idle = self
            .idle_exit
            .filter(|_| self.is_idle())
            .map(|patience| self.idle_since + patience);
        let search = (!self.presumed.is_empty()).then_some(self.next_search);
        let deadline = self
            .queries
            .iter()
            .map(|query| query.deadline)
            .chain(idle)
            .chain(search)
            .chain(self.cm.deadline())
            .chain(self.hops.deadline())
            .chain(self.mads_paused)
            .min();
        self.poll.wait(deadline)
    }

    /// True if nobody has needed the daemon for as long as it is to wait.
    pub fn idle_for_good(&self) -> bool {
        self.idle_exit
            .is_some_and(|patience| self.is_idle() && self.idle_since.elapsed() >= patience)
    }

    /// True if nobody would miss the daemon: no client, no peer that may still ask, and no device made by the user.
    fn is_idle(&self) -> bool {
        self.connections.is_empty()
            && self.holds.is_empty()
            && self.presumed.is_empty()
            && !self.cm.is_busy()
            && !self.devices.are_configured()
    }

    /// Takes over the present interfaces and tells who leases a device that changed.
    pub fn follow(&mut self, interfaces: Interfaces) {
        self.cm.follow(&interfaces);
        self.hops.follow(&interfaces);
        for change in self.devices.follow(interfaces) {
            self.announce(&change);
        }
    }

    /// Shows a change in the tree, and tells who leases the device.
    fn announce(&mut self, change: &Change) {
        let (what, info, shown, told) = match change {
            Change::Added(info) => ("device added", info, self.tree.add(info), None),
            Change::Changed(info) => (
                "device changed",
                info,
                self.tree.change(info),
                Some(Reply::DeviceChanged(info.clone())),
            ),
            Change::Removed(info) => (
                "device removed",
                info,
                self.tree.remove(info),
                Some(Reply::DeviceRemoved),
            ),
        };
        let addresses: Vec<_> = info.gids.iter().map(|gid| gid.map(|gid| gid.addr)).collect();
        info!(
            device = info.name,
            netdev = info.netdev,
            up = info.up,
            mtu = info.mtu,
            ?addresses,
            "{what}"
        );
        if let Err(error) = shown {
            error!(device = info.name, %error, "the device tree is not up to date");
        }
        self.follow_xdp(change);
        if let Some(reply) = told {
            self.tell_holders(&info.name, &reply);
        }
        self.tell_cm_of_devices();
    }

    fn tell_holders(&mut self, device: &str, reply: &Reply) {
        for id in self.holders(device) {
            if let Some(connection) = self.connections.get_mut(&id) {
                connection.tell(reply);
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
                // Whether or not one waits. It would wait, and wake us, for ever.
                Err(Errno::MFILE) if self.turn_away(listener) => continue,
                Err(Errno::MFILE) => return,
                Err(error) => {
                    warn!(%error, "can't accept a connection");
                    std::thread::sleep(BREATH);
                    return;
                }
            };
            match Connection::new(socket).and_then(|connection| self.admit(connection)) {
                Ok(_) => {}
                Err(error) => warn!(%error, "connection lost at its start"),
            }
        }
    }

    /// Refuses a connection with the spare descriptor; false if none waits.
    fn turn_away(&mut self, listener: BorrowedFd<'_>) -> bool {
        self.spare = None;
        let socket = accept_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK);
        let came = socket.is_ok();
        if let Ok(connection) = socket.map_err(io::Error::from).and_then(Connection::new) {
            info!(
                pid = connection.pid(),
                "connection refused: no descriptor is left (ulimit -n)"
            );
            connection.refuse(Refusal::TooManyConnections);
        }
        self.spare = spare_descriptor();
        came
    }

    /// Serves a connection that came before we could.
    pub fn adopt(&mut self, early: Early) {
        let id = match self.admit(early.connection) {
            Ok(Some(id)) => id,
            Ok(None) => return,
            Err(error) => return warn!(%error, "connection lost at its start"),
        };
        if early.greeted {
            self.welcome(id);
        }
        for (request, fds) in early.requests {
            self.serve(id, request, fds);
        }
        self.flush(id);
    }

    fn admit(&mut self, connection: Connection) -> io::Result<Option<u32>> {
        let full = self.connections.len() >= MAX_CONNECTIONS;
        let refusal = if full {
            Err(Refusal::TooManyConnections)
        } else {
            connection.check_permission(self.group)
        };
        if let Err(refusal) = refusal {
            info!(pid = connection.pid(), %refusal, "connection refused");
            connection.refuse(refusal);
            return Ok(None);
        }
        let id = self.new_id();
        self.poll.add(connection.socket(), Source::Connection(id))?;
        if let Some(process) = &connection.process {
            self.poll.add(process, Source::Process(id))?;
        }
        self.connections.insert(id, connection);
        Ok(Some(id))
    }

    fn welcome(&mut self, id: u32) {
        let welcome = Welcome {
            pid: std::process::id(),
            tree: self.tree.root().display().to_string(),
        };
        if let Some(connection) = self.connections.get_mut(&id) {
            connection.send(&Reply::Welcome(welcome));
        }
    }

    /// Reads what a client sent and sends what waits for it.
    pub fn connection_ready(&mut self, id: u32, flags: EventFlags) {
        if flags.intersects(EventFlags::IN | EventFlags::HUP | EventFlags::ERR) {
            for _ in 0..MAX_MESSAGES {
                let Some(connection) = self.connections.get_mut(&id) else {
                    return;
                };
                match connection.receive(&mut self.buffer) {
                    Incoming::Nothing => break,
                    Incoming::Greeted => self.welcome(id),
                    Incoming::Request(request, fds) => self.serve(id, request, fds),
                    Incoming::Over(reason) => {
                        self.flush(id);
                        self.drop_connection(id, reason);
                    }
                }
            }
        }
        self.flush(id);
    }

    fn serve(&mut self, id: u32, request: Request, fds: Vec<OwnedFd>) {
        debug!(id, ?request, "request");
        let reply = match request {
            Request::Lease { device } => match self.lease(id, &device) {
                Ok(()) => return,
                Err(refusal) => Reply::Refused(refusal),
            },
            Request::Resume { device } => match self.resume(id, &device, &fds) {
                Ok(device) => Reply::Resumed { device },
                Err(refusal) => Reply::Refused(refusal),
            },
            Request::Report { id: query, report } => return self.take_report(id, query, report),
            Request::Hold => self.hold(id),
            Request::Links => Reply::Links(self.links()),
            Request::LinkAdd {
                name,
                netdev,
                xdp: Some(options),
            } => match self.add_xdp(id, &name, &netdev, &options) {
                Ok(notes) => Reply::Added { notes },
                Err(refusal) => Reply::Refused(refusal),
            },
            Request::LinkAdd {
                name,
                netdev,
                xdp: None,
            } => match self.change_devices(id, |devices| Ok(vec![devices.add(&name, &netdev)?])) {
                Ok(()) => Reply::Added { notes: Vec::new() },
                Err(refusal) => Reply::Refused(refusal),
            },
            Request::LinkDel { name } => match self.holders(&name).len() {
                0 => match self.change_devices(id, |devices| devices.remove(&name)) {
                    Ok(()) => Reply::Done,
                    Err(refusal) => Reply::Refused(refusal),
                },
                leases => Reply::Refused(Refusal::DeviceBusy {
                    name,
                    leases: leases as u32,
                }),
            },
            Request::NextHop { source, dest } => return self.next_hop(id, source, dest),
            Request::Status => return self.start_query(id),
            Request::Cm { sequence, command } => return self.cm_command(id, sequence, command),
            Request::CmRestore(keepsakes) => return self.cm_restore(id, keepsakes),
        };
        if let Some(connection) = self.connections.get_mut(&id) {
            connection.send(&reply);
        }
    }

    fn links(&self) -> Vec<LinkStatus> {
        let link = |device: &DeviceInfo| LinkStatus {
            device: device.clone(),
            xdp: self.xdp.get(&device.name).map(XdpDevice::status),
        };
        self.devices.iter().map(link).collect()
    }

    /// Changes the devices for the client `id`, if it may.
    fn change_devices(
        &mut self,
        id: u32,
        change: impl FnOnce(&mut Devices) -> Result<Vec<Change>, Refusal>,
    ) -> Result<(), Refusal> {
        self.connections
            .get(&id)
            .map_or(Ok(()), Connection::check_owner)?;
        for change in change(&mut self.devices)? {
            self.announce(&change);
        }
        Ok(())
    }

    /// Serves `ferroce run`: a program is about to look for devices.
    fn hold(&mut self, id: u32) -> Reply {
        if let Err(error) = self.tree.restore(self.devices.iter()) {
            return Reply::Refused(Refusal::Failed(format!(
                "the device tree {} can't be made: {error}",
                self.tree.root().display()
            )));
        }
        if let Err(error) = self.tree.mirror_kernel(Path::new("/")) {
            warn!(%error, "the kernel's own devices are not shown");
        }
        let process = self.connections.get(&id).and_then(|connection| {
            let process = connection.process.as_ref()?.try_clone().ok()?;
            let pid = connection.pid();
            Some(Hold { pid, process })
        });
        let Some(hold) = process else {
            return Reply::Refused(Refusal::Failed(
                "the process is not visible from ferroced's pid namespace".to_owned(),
            ));
        };
        // One for each process. An earlier one may be of a dead process with this id.
        let earlier = self.holds.iter().find(|(_, it)| it.pid == hold.pid);
        if let Some(earlier) = earlier.map(|(id, _)| *id) {
            self.hold_ended(earlier);
        }
        if self.holds.len() >= MAX_HOLDS {
            return Reply::Refused(Refusal::TooManyConnections);
        }
        let id = self.new_id();
        match self.poll.add(&hold.process, Source::Hold(id)) {
            Ok(()) => {
                self.holds.insert(id, hold);
                Reply::Done
            }
            Err(error) => Reply::Refused(Refusal::Failed(error.to_string())),
        }
    }

    /// Does what is due: answers every status request that has all its reports or has waited long
    /// enough, and looks for dead programs of an earlier daemon.
    pub fn expire(&mut self, now: Instant) {
        if !self.presumed.is_empty() && self.next_search <= now {
            self.next_search = now + SEARCH_INTERVAL;
            self.search_dead();
            // Who had an interface in XDP mode has come by now.
            for change in self.devices.leave_xdp(false) {
                self.announce(&change);
            }
        }
        let (over, open) = std::mem::take(&mut self.queries)
            .into_iter()
            .partition(|query| query.is_over(now));
        self.queries = open;
        for query in over {
            self.answer(query);
        }
        self.expire_cm(now);
        self.hops.expire(now);
    }

    fn flush(&mut self, id: u32) {
        let Some(connection) = self.connections.get_mut(&id) else {
            return;
        };
        let result = match connection.flush() {
            Ok(waits) => self
                .poll
                .want_write(connection.socket(), Source::Connection(id), waits)
                .map_err(|_| End::Unwatched),
            Err(reason) => Err(reason),
        };
        if let Err(reason) = result {
            self.drop_connection(id, reason);
        }
    }

    /// The process behind a connection ended.
    pub fn process_ended(&mut self, id: u32) {
        self.drop_connection(id, End::ProcessEnded);
    }

    /// A process that asked the daemon to stay ended.
    pub fn hold_ended(&mut self, id: u32) {
        if let Some(hold) = self.holds.remove(&id) {
            self.poll.remove(&hold.process);
        }
        self.idle_since = Instant::now();
    }

    /// Forgets a connection, and takes its slot back unless its program may still use it: then that is found out later.
    fn drop_connection(&mut self, id: u32, reason: End) {
        let Some(connection) = self.connections.remove(&id) else {
            return;
        };
        self.idle_since = Instant::now();
        debug!(id, ?reason, "connection dropped");
        for query in &mut self.queries {
            query.forget(id);
        }
        let letters = self.cm.close(id);
        self.deliver(letters);
        let Some(lease) = connection.lease else { return };
        if reason.may_go_on() {
            warn!(
                slot = lease.slot,
                pid = connection.peer.pid,
                ?reason,
                "connection of a lease given up"
            );
            self.presume(lease.slot);
        } else {
            info!(slot = lease.slot, ?reason, "lease ended");
            self.take_back(lease.slot);
        }
    }

    fn new_id(&mut self) -> u32 {
        self.next_id = self.next_id.wrapping_add(1);
        self.next_id
    }
}

/// A descriptor that serves for nothing.
fn spare_descriptor() -> Option<OwnedFd> {
    std::fs::File::open("/dev/null").map(OwnedFd::from).ok()
}
