//! `ferroced`: owner of the devices, QPN slots and the RoCE port of one network namespace.
//!
//! One thread and one poll loop. [`sockets`] and [`slots`] hold what is leased, [`devices`] and
//! [`gid`] what the interfaces make of it, [`tree`] and [`picture`] what programs see of it,
//! [`connection`] one client, [`server`] what clients ask, [`inherit`] what an earlier daemon left; [`xdp`] has the
//! interfaces in XDP mode; [`cm`] is RDMA CM, over queue pair 1 ([`gsi`]) and the routes of the host ([`resolve`]), and
//! [`news`] what it tells a program.

mod cm;
mod connection;
pub mod detach;
mod devices;
mod gid;
mod groups;
mod gsi;
mod inherit;
mod news;
mod picture;
mod port;
pub mod resolve;
mod server;
mod slots;
mod sockets;
pub(crate) mod sys;
mod tree;
pub mod xdp;

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use ferroce_engine::control::{MAX_SLOT, protocol};
use rustix::event::Timespec;
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::fs::Mode;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, listen, socket_with};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tracing::{debug, info, warn};

use crate::netlink::{self, Watch};
use cm::ConnectionManager;
use inherit::Early;
use server::Server;
use sockets::SlotSockets;
use tree::Tree;

/// How the daemon is to run.
#[derive(Clone, Debug)]
pub struct Options {
    /// Slots that processes can lease, 1 to 251.
    pub slots: u8,
    /// Leave that long after the last client; `None` is to stay.
    pub idle_exit: Option<Duration>,
    /// Members of this group are admitted besides root and the daemon's own user.
    pub group: Option<u32>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            slots: MAX_SLOT,
            idle_exit: None,
            group: None,
        }
    }
}

/// Why the daemon can't run.
#[derive(Debug, thiserror::Error)]
pub enum DaemonError {
    /// Another daemon has the name.
    #[error(
        "a ferroced runs already in this network namespace: use it, or end it first (`ferroce status` shows its pid)"
    )]
    Running,
    /// Another program has the RoCE port.
    #[error("UDP port 4791 is taken by {0}: end that program, or run ferroced in another network namespace")]
    PortTaken(String),
    /// A system call failed.
    #[error("can't start: {what}: {source}")]
    Io {
        /// What was tried.
        what: &'static str,
        /// Its error.
        source: io::Error,
    },
    /// The file for the log can't be opened.
    #[error("can't write the log {}: {source}: give a file that may be written", .path.display())]
    Log {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

impl DaemonError {
    /// For `map_err`: an error of that step.
    pub fn io(what: &'static str) -> impl Fn(io::Error) -> Self {
        move |source| Self::Io { what, source }
    }
}

/// What a descriptor in the poll set belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Source {
    Listener,
    Interfaces,
    Signals,
    /// Datagrams for queue pair 1.
    Mads,
    /// News of neighbours that RDMA CM waits for.
    Neighbours,
    /// News for the tables of next hops.
    Hops,
    /// Connection with this id.
    Connection(u32),
    /// The process behind the connection with this id.
    Process(u32),
    /// The process that asked by this hold to stay.
    Hold(u32),
}

impl Source {
    fn to_data(self) -> EventData {
        let (kind, id) = match self {
            Self::Listener => (0u32, 0),
            Self::Interfaces => (1, 0),
            Self::Signals => (2, 0),
            Self::Connection(id) => (3, id),
            Self::Process(id) => (4, id),
            Self::Hold(id) => (5, id),
            Self::Mads => (6, 0),
            Self::Neighbours => (7, 0),
            Self::Hops => (8, 0),
        };
        EventData::new_u64(u64::from(kind) << 32 | u64::from(id))
    }

    fn from_data(data: EventData) -> Self {
        let id = data.u64() as u32;
        match data.u64() >> 32 {
            0 => Self::Listener,
            1 => Self::Interfaces,
            2 => Self::Signals,
            3 => Self::Connection(id),
            4 => Self::Process(id),
            5 => Self::Hold(id),
            6 => Self::Mads,
            7 => Self::Neighbours,
            _ => Self::Hops,
        }
    }
}

/// The descriptors that the daemon waits for.
struct PollSet(OwnedFd);

impl PollSet {
    fn new() -> io::Result<Self> {
        Ok(Self(epoll::create(epoll::CreateFlags::CLOEXEC)?))
    }

    fn add(&self, fd: impl AsFd, source: Source) -> io::Result<()> {
        Ok(epoll::add(&self.0, fd, source.to_data(), EventFlags::IN)?)
    }

    /// Waits for it no longer: what closing a descriptor does by itself only where it has no duplicate.
    fn remove(&self, fd: impl AsFd) {
        if let Err(error) = epoll::delete(&self.0, fd) {
            debug!(%error, "descriptor was not waited for");
        }
    }

    /// Waits for room to send as well, or no longer.
    fn want_write(&self, fd: impl AsFd, source: Source, wanted: bool) -> io::Result<()> {
        let flags = if wanted {
            EventFlags::IN | EventFlags::OUT
        } else {
            EventFlags::IN
        };
        Ok(epoll::modify(&self.0, fd, source.to_data(), flags)?)
    }

    /// Waits for something to read, or not for now.
    fn want_read(&self, fd: impl AsFd, source: Source, wanted: bool) -> io::Result<()> {
        let flags = if wanted {
            EventFlags::IN
        } else {
            EventFlags::empty()
        };
        Ok(epoll::modify(&self.0, fd, source.to_data(), flags)?)
    }

    fn wait(&self, deadline: Option<Instant>) -> io::Result<Vec<(Source, EventFlags)>> {
        let timeout = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let timeout = timeout.and_then(|left| Timespec::try_from(left).ok());
        let mut events = Vec::with_capacity(64);
        match epoll::wait(
            &self.0,
            rustix::buffer::spare_capacity(&mut events),
            timeout.as_ref(),
        ) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        Ok(events
            .iter()
            .map(|event| (Source::from_data(event.data), event.flags))
            .collect())
    }
}

/// A daemon that has everything it needs and serves when [`Daemon::run`] is called.
pub struct Daemon {
    server: Server,
    listener: OwnedFd,
    watch: Watch,
    /// Kept open for the poll set.
    _signals: OwnedFd,
}

impl Daemon {
    /// Takes the daemon's name, the RoCE port and the devices of this network namespace.
    pub fn new(options: &Options) -> Result<Self, DaemonError> {
        // What the tree shows is for all to read.
        rustix::process::umask(Mode::from_raw_mode(0o022));
        let listener = take_name()?;
        let signals = sys::termination_signals().map_err(DaemonError::io("signalfd"))?;
        // The sockets of all slots, and two descriptors for each connection.
        raise_descriptor_limit();
        let (sockets, early) = take_port(&listener, options)?;
        let mut cm = open_cm(&sockets).map_err(DaemonError::io("open queue pair 1"))?;
        if !early.is_empty() {
            cm.expect_restores();
        }
        let poll = PollSet::new().map_err(DaemonError::io("epoll"))?;
        let watch = Watch::new().map_err(DaemonError::io("rtnetlink"))?;
        for (fd, source) in [
            (listener.as_fd(), Source::Listener),
            (signals.as_fd(), Source::Signals),
            (watch.as_fd(), Source::Interfaces),
        ] {
            poll.add(fd, source).map_err(DaemonError::io("epoll"))?;
        }
        let netns = sys::network_namespace().map_err(DaemonError::io("/proc/self/ns/net"))?;
        let tree =
            Tree::create(netns, options.group.is_some()).map_err(DaemonError::io("make the device tree"))?;
        let mut server =
            Server::new(options, poll, sockets, netns, tree, cm).map_err(DaemonError::io("epoll"))?;
        server.follow(netlink::interfaces().map_err(DaemonError::io("rtnetlink"))?);
        for connection in early {
            server.adopt(connection);
        }
        Ok(Self {
            server,
            listener,
            watch,
            _signals: signals,
        })
    }

    /// Serves until a signal, or until it has been idle for long enough.
    pub fn run(mut self) -> Result<(), DaemonError> {
        self.serve().map_err(DaemonError::io("serve"))
    }

    fn serve(&mut self) -> io::Result<()> {
        loop {
            if self.server.idle_for_good() {
                info!("no client any more");
                return Ok(());
            }
            for (source, flags) in self.server.wait()? {
                match source {
                    Source::Signals => {
                        info!("ended by a signal");
                        return Ok(());
                    }
                    Source::Interfaces => {
                        self.watch.drain()?;
                        match netlink::interfaces() {
                            Ok(interfaces) => self.server.follow(interfaces),
                            Err(error) => warn!(%error, "interfaces can't be read until they change again"),
                        }
                    }
                    Source::Listener => self.server.accept(self.listener.as_fd()),
                    Source::Connection(id) => self.server.connection_ready(id, flags),
                    Source::Process(id) => self.server.process_ended(id),
                    Source::Hold(id) => self.server.hold_ended(id),
                    Source::Mads => self.server.mads(),
                    Source::Neighbours => self.server.neighbours(),
                    Source::Hops => self.server.hops_news(),
                }
            }
            self.server.expire(Instant::now());
        }
    }
}

/// Binds the daemon's socket: who does it first is the daemon of this network namespace. From then
/// on a connection waits for the daemon instead of being refused.
fn take_name() -> Result<OwnedFd, DaemonError> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let listener = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
        .map_err(|error| DaemonError::io("socket")(error.into()))?;
    match bind(&listener, &protocol::address()).and_then(|()| listen(&listener, 128)) {
        Ok(()) => Ok(listener),
        Err(Errno::ADDRINUSE) => Err(DaemonError::Running),
        Err(error) => Err(DaemonError::io("bind")(error.into())),
    }
}

/// Allows as many descriptors as the system lets us have.
fn raise_descriptor_limit() {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        ..limit
    };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        debug!(%error, "descriptor limit stays");
    }
}

/// Makes the sockets of all slots, or takes them over from an earlier daemon whose programs go on.
/// Gives what has connected meanwhile as well.
fn take_port(listener: &OwnedFd, options: &Options) -> Result<(SlotSockets, Vec<Early>), DaemonError> {
    let open = || SlotSockets::open(options.slots.clamp(1, MAX_SLOT) + 1);
    let mut early = Vec::new();
    let mut sockets = open();
    if sockets
        .as_ref()
        .is_err_and(|error| error.kind() == io::ErrorKind::AddrInUse)
        && port::is_left_by_a_daemon()
    {
        let (inherited, connections) = inherit::wait_for_heirloom(listener, options.group)
            .map_err(DaemonError::io("wait for programs"))?;
        early = connections;
        // The last of those programs may have ended meanwhile.
        sockets = inherited.map_or_else(open, Ok);
    }
    match sockets {
        Ok(sockets) => Ok((sockets, early)),
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
            let left = if port::is_left_by_a_daemon() {
                ", left by an earlier ferroced"
            } else {
                ""
            };
            Err(DaemonError::PortTaken(port::owner_of_roce_port() + left))
        }
        Err(error) => Err(DaemonError::io("open UDP port 4791")(error)),
    }
}

/// RDMA CM on the socket of the daemon's own slot.
fn open_cm(sockets: &SlotSockets) -> io::Result<ConnectionManager> {
    let socket = sockets.open_own()?;
    ConnectionManager::new(socket.try_clone_to_owned()?, socket.try_clone_to_owned()?)
}

/// Group id of a number, or of a name in `/etc/group`.
pub fn parse_group(text: &str) -> Result<u32, String> {
    if let Ok(number) = text.parse() {
        return Ok(number);
    }
    let groups = std::fs::read_to_string("/etc/group").unwrap_or_default();
    let id = |line: &str| {
        let mut fields = line.split(':');
        (fields.next()? == text).then(|| fields.nth(1)?.parse().ok())?
    };
    groups
        .lines()
        .find_map(id)
        .ok_or_else(|| format!("no group `{text}` in /etc/group"))
}
