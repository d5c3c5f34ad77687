//! The process's side of the control connection: asking for a lease, and keeping it.

use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, IntoRawFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use rustix::event::{Timespec, epoll};
use rustix::io::{Errno, FdFlags};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, connect, socket_with, sockopt,
};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, timerfd_create, timerfd_settime,
};

use super::protocol::{self, Datagram, Hello, Reply, Request, Welcome};
use super::{ControlError, DeviceInfo, LinkMode, Peer, Refusal, Report, XdpInfo};

/// Time from the end of a daemon to the first look for the next; doubled with each look.
pub(super) const FIRST_PATIENCE: Duration = Duration::from_millis(50);
/// Longest time between looks; a new daemon waits longer than that for its inheritance.
pub(super) const LAST_PATIENCE: Duration = Duration::from_secs(1);
/// How long an answer of the daemon may take.
pub(super) const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// A connection to the daemon of this network namespace, for requests that are answered at once.
#[derive(Debug)]
pub struct Client {
    socket: OwnedFd,
    welcome: Welcome,
}

impl Client {
    /// Connects, and checks that the daemon is trusted and of this version.
    pub fn connect() -> Result<Self, ControlError> {
        let socket = open_connection(SocketFlags::empty())?;
        for direction in [sockopt::Timeout::Recv, sockopt::Timeout::Send] {
            sockopt::set_socket_timeout(&socket, direction, Some(ANSWER_TIMEOUT))
                .map_err(io("SO_RCVTIMEO"))?;
        }
        // A daemon that refuses this user may have hung up already: what it said before is still to be read.
        match protocol::send(socket.as_fd(), &Hello::ours().emit(), &[], SendFlags::empty()) {
            Ok(()) | Err(Errno::PIPE) => {}
            Err(error) => return Err(io("send")(error)),
        }
        let hello = Hello::parse(&receive(&socket)?.bytes).ok_or(ControlError::Malformed("no hello"))?;
        if hello.version != protocol::VERSION {
            return Err(ControlError::Version {
                theirs: hello.version,
                release: hello.release,
            });
        }
        match decode(&receive(&socket)?)? {
            Reply::Welcome(welcome) => Ok(Self { socket, welcome }),
            Reply::Refused(refusal) => Err(refusal.into()),
            _ => Err(ControlError::Malformed("no welcome")),
        }
    }

    /// What the daemon said of itself.
    pub fn welcome(&self) -> &Welcome {
        &self.welcome
    }

    /// The connection itself, which has been welcomed. Receiving and sending end after [`ANSWER_TIMEOUT`].
    pub(super) fn into_socket(self) -> OwnedFd {
        self.socket
    }

    /// Keeps the connection open in a program that this process becomes.
    pub fn keep_across_exec(self) -> Result<(), ControlError> {
        rustix::io::fcntl_setfd(&self.socket, FdFlags::empty()).map_err(io("fcntl"))?;
        // The descriptor is that program's from now on.
        let _ = self.socket.into_raw_fd();
        Ok(())
    }

    /// Sends a request and gives the first message that answers it.
    pub fn ask(&self, request: &Request) -> Result<Reply, ControlError> {
        protocol::send_message(&self.socket, request, SendFlags::empty()).map_err(gone("send"))?;
        self.next_reply()
    }

    /// Gives the next message of an answer that has several; a refusal is an error.
    pub fn next_reply(&self) -> Result<Reply, ControlError> {
        match decode(&receive(&self.socket)?)? {
            Reply::Refused(refusal) => Err(refusal.into()),
            reply => Ok(reply),
        }
    }
}

/// What the daemon tells the holder of a lease.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The device is now like this.
    DeviceChanged(DeviceInfo),
    /// The interface of the device is gone: the port is down for good.
    DeviceRemoved,
    /// Call [`Lease::report`] with this id soon (200 ms).
    ReportWanted(u32),
    /// The daemon ended. The slot and its socket stay usable, and the next daemon takes the lease
    /// over by itself; then [`Event::DeviceChanged`] comes.
    DaemonGone,
}

/// One slot of one device, leased to this process until the value is dropped or the process dies.
///
/// Its descriptors are close-on-exec. A forked child must not use them.
#[derive(Debug)]
pub struct Lease {
    slot: u8,
    rx: OwnedFd,
    heirloom: Option<OwnedFd>,
    /// That of the port, on a device in XDP mode.
    port_heirloom: Option<OwnedFd>,
    /// Until the link takes it.
    seat: Mutex<Option<SeatFiles>>,
    info: DeviceInfo,
    /// An epoll descriptor: it stays the same while connections come and go.
    control: OwnedFd,
    /// Expires when it is time to look for a new daemon.
    timer: OwnedFd,
    state: Arc<Mutex<State>>,
}

/// A seat at the port of a device in XDP mode, as it was leased.
#[derive(Debug)]
pub struct SeatFiles {
    /// Its number.
    pub seat: u16,
    /// The port.
    pub port: XdpInfo,
    /// The memory file of what processes tell each other.
    pub control: OwnedFd,
    /// The memory file of the frames.
    pub umem: OwnedFd,
    /// Its sockets, by queue.
    pub sockets: Vec<OwnedFd>,
}

/// Takes the descriptors of a seat from those that came with a lease, and the port's heirloom.
fn take_seat(
    seat: Option<u16>,
    mode: LinkMode,
    fds: &mut impl Iterator<Item = OwnedFd>,
) -> Result<Option<(SeatFiles, OwnedFd)>, ControlError> {
    let (seat, port) = match (seat, mode) {
        (Some(seat), LinkMode::Xdp(port)) => (seat, port),
        (None, LinkMode::Udp) => return Ok(None),
        _ => return Err(ControlError::Malformed("a seat where there is no port, or none")),
    };
    if !port.geometry.is_sound() || seat >= port.geometry.seats {
        return Err(ControlError::Malformed("no sound port"));
    }
    let missing = ControlError::Malformed("not all files of a seat");
    let (Some(control), Some(umem)) = (fds.next(), fds.next()) else {
        return Err(missing);
    };
    let queues = usize::from(port.geometry.queues);
    let sockets: Vec<_> = fds.take(queues).collect();
    let Some(heirloom) = fds.next().filter(|_| sockets.len() == queues) else {
        return Err(missing);
    };
    let files = SeatFiles {
        seat,
        port,
        control,
        umem,
        sockets,
    };
    Ok(Some((files, heirloom)))
}

#[derive(Debug)]
struct State {
    daemon: Daemon,
    /// The device as last told.
    info: DeviceInfo,
    /// Time until the next look for a daemon.
    patience: Duration,
}

/// How we stand with the daemon.
#[derive(Debug)]
enum Daemon {
    /// It knows our lease.
    Connected(OwnedFd),
    /// There is none.
    Gone,
    /// A new one was shown our lease.
    Asked(OwnedFd),
    /// It does not go on with our lease, or we can't show it.
    Lost,
}

impl Lease {
    /// Leases a slot of the device of that name.
    pub fn acquire(device: &str) -> Result<Self, ControlError> {
        let Client { socket, .. } = Client::connect()?;
        let request = Request::Lease {
            device: device.to_owned(),
        };
        protocol::send_message(&socket, &request, SendFlags::empty()).map_err(gone("send"))?;
        let datagram = receive(&socket)?;
        let (slot, seat, info) = match decode(&datagram)? {
            Reply::Leased { slot, seat, device } => (slot, seat, device),
            Reply::Refused(refusal) => return Err(refusal.into()),
            _ => return Err(ControlError::Malformed("no lease")),
        };
        let mut fds = datagram.fds.into_iter();
        let rx = fds.next().ok_or(ControlError::Malformed("no socket"))?;
        let (seat, port_heirloom) = take_seat(seat, info.mode, &mut fds)?.unzip();
        let control = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(io("epoll_create"))?;
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        let timer = timerfd_create(TimerfdClockId::Monotonic, flags).map_err(io("timerfd_create"))?;
        for fd in [&socket, &timer] {
            watch(&control, fd).map_err(io("epoll_ctl"))?;
        }
        let daemon = Daemon::Connected(socket);
        let state = Arc::new(Mutex::new(State {
            daemon,
            info: info.clone(),
            patience: FIRST_PATIENCE,
        }));
        Ok(Self {
            slot,
            rx,
            heirloom: fds.next(),
            port_heirloom,
            seat: Mutex::new(seat),
            info,
            control,
            timer,
            state,
        })
    }

    /// Number of the slot: the high byte of every QPN of this process on this device.
    pub fn slot(&self) -> u8 {
        self.slot
    }

    /// The receive socket of the slot: UDP port 4791, non-blocking, dual stack unless the kernel
    /// has no IPv6, with UDP_GRO, packet info, TOS and TTL messages switched on.
    pub fn socket(&self) -> BorrowedFd<'_> {
        self.rx.as_fd()
    }

    /// Gives the receive socket of any slot of this host, if this process may have them (the heirloom): to look at how
    /// full it is.
    pub fn neighbours(&self) -> impl Fn(u8) -> Option<OwnedFd> + Send + 'static {
        let heirloom = self.heirloom.as_ref().and_then(|fd| fd.try_clone().ok());
        if let Some(heirloom) = &heirloom {
            // The table of descriptors grows now, to what a look needs: beside other threads, in the midst of a send,
            // the kernel would take milliseconds for it. Where the program's limit is lower, that is what happens.
            _ = rustix::io::fcntl_dupfd_cloexec(heirloom, 511);
        }
        move |slot| {
            let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
            let all = protocol::receive(heirloom.as_ref()?.as_fd(), flags).ok()?;
            all.fds.into_iter().nth(usize::from(slot))
        }
    }

    /// The seat of a lease in XDP mode, to whoever asks first: nobody else needs its descriptors.
    pub fn take_seat(&self) -> Option<SeatFiles> {
        self.seat.lock().take()
    }

    /// Asks the daemon for the next hop from an own address to another: it appears in the port's table. Never blocks.
    /// False if that has to be tried again: there is no daemon, or none that listens now.
    pub fn asker(&self) -> impl Fn(IpAddr, IpAddr) -> bool + Send + 'static {
        let state = Arc::clone(&self.state);
        move |source, dest| {
            let Some(state) = state.try_lock() else {
                return false;
            };
            let Daemon::Connected(socket) = &state.daemon else {
                return false;
            };
            let request = Request::NextHop { source, dest };
            protocol::send_message(socket, &request, SendFlags::DONTWAIT).is_ok()
        }
    }

    /// Descriptor to poll: readable means that [`Lease::receive`] has something to do.
    pub fn control_fd(&self) -> BorrowedFd<'_> {
        self.control.as_fd()
    }

    /// The device as it was when the slot was leased.
    pub fn info(&self) -> DeviceInfo {
        self.info.clone()
    }

    /// Takes one event of the daemon, `None` if there is none now. Never blocks. Call it until it
    /// gives `None` whenever `control_fd` is readable, also after [`Event::DaemonGone`]: it looks for
    /// the next daemon, at most once a second.
    pub fn receive(&self) -> Result<Option<Event>, ControlError> {
        let state = &mut *self.state.lock();
        loop {
            let (socket, asked) = match &state.daemon {
                Daemon::Connected(socket) => (socket, false),
                Daemon::Asked(socket) => (socket, true),
                Daemon::Gone if self.timer_expired() => {
                    self.look_for_daemon(state)?;
                    continue;
                }
                Daemon::Gone | Daemon::Lost => return Ok(None),
            };
            let datagram = match protocol::receive(socket.as_fd(), RecvFlags::DONTWAIT) {
                Ok(datagram) if !datagram.bytes.is_empty() => datagram,
                Err(Errno::AGAIN) => return Ok(None),
                // Closed, or not to be understood: either way there is no daemon for us.
                Ok(_) | Err(_) => {
                    self.lose_daemon(state)?;
                    if asked {
                        continue;
                    }
                    return Ok(Some(Event::DaemonGone));
                }
            };
            if asked {
                match self.answer_of_new_daemon(state, &datagram)? {
                    Some(event) => return Ok(Some(event)),
                    None => continue,
                }
            }
            match decode(&datagram) {
                Ok(Reply::DeviceChanged(info)) => {
                    state.info = info.clone();
                    return Ok(Some(Event::DeviceChanged(info)));
                }
                Ok(Reply::DeviceRemoved) => return Ok(Some(Event::DeviceRemoved)),
                Ok(Reply::ReportWanted { id }) => return Ok(Some(Event::ReportWanted(id))),
                Ok(_) | Err(_) => {
                    self.lose_daemon(state)?;
                    return Err(ControlError::Malformed("no event"));
                }
            }
        }
    }

    /// Answers [`Event::ReportWanted`]. Never blocks: if the daemon is busy or gone the report is
    /// dropped, and the daemon shows the process as not answering.
    pub fn report(&self, id: u32, mut report: Report) -> Result<(), ControlError> {
        report.qps.truncate(protocol::MAX_REPORTED_QPS);
        report.counters.truncate(protocol::MAX_REPORTED_COUNTERS);
        let request = Request::Report { id, report };
        let state = self.state.lock();
        let Daemon::Connected(socket) = &state.daemon else {
            return Ok(());
        };
        match protocol::send_message(socket, &request, SendFlags::DONTWAIT) {
            Ok(()) | Err(Errno::AGAIN | Errno::PIPE | Errno::CONNRESET) => Ok(()),
            Err(error) => Err(io("send")(error)),
        }
    }

    /// Closes the connection, and looks for a daemon later.
    fn lose_daemon(&self, state: &mut State) -> Result<(), ControlError> {
        if self.heirloom.is_none() {
            return self.disconnect(state, Daemon::Lost);
        }
        self.disconnect(state, Daemon::Gone)?;
        self.look_later(state)
    }

    /// Closes the connection, if there is one, and takes it out of the epoll set: a forked child may have it too, and
    /// then closing alone would leave it there, readable for ever.
    fn disconnect(&self, state: &mut State, next: Daemon) -> Result<(), ControlError> {
        match std::mem::replace(&mut state.daemon, next) {
            Daemon::Connected(socket) | Daemon::Asked(socket) => {
                epoll::delete(&self.control, &socket).map_err(io("epoll_ctl"))
            }
            Daemon::Gone | Daemon::Lost => Ok(()),
        }
    }

    fn look_later(&self, state: &mut State) -> Result<(), ControlError> {
        let it_value = Timespec {
            tv_sec: state.patience.as_secs() as i64,
            tv_nsec: state.patience.subsec_nanos().into(),
        };
        let once = Itimerspec {
            it_interval: Timespec {
                tv_sec: 0,
                tv_nsec: 0,
            },
            it_value,
        };
        timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &once).map_err(io("timerfd_settime"))?;
        state.patience = (state.patience * 2).min(LAST_PATIENCE);
        Ok(())
    }

    fn timer_expired(&self) -> bool {
        rustix::io::read(&self.timer, &mut [0u8; 8]).is_ok()
    }

    /// Shows the lease to a new daemon, if there is one.
    fn look_for_daemon(&self, state: &mut State) -> Result<(), ControlError> {
        match self.show_lease(&state.info) {
            Ok(socket) => {
                watch(&self.control, &socket).map_err(io("epoll_ctl"))?;
                state.daemon = Daemon::Asked(socket);
                Ok(())
            }
            Err(_) => self.look_later(state),
        }
    }

    fn show_lease(&self, info: &DeviceInfo) -> Result<OwnedFd, ControlError> {
        let heirloom = self.heirloom.as_ref().ok_or(ControlError::NoDaemon)?;
        let socket = open_connection(SocketFlags::NONBLOCK)?;
        let request = protocol::encode(&Request::Resume { device: info.clone() });
        protocol::send(socket.as_fd(), &Hello::ours().emit(), &[], SendFlags::DONTWAIT)
            .map_err(gone("send"))?;
        let mut fds = vec![heirloom.as_fd(), self.rx.as_fd()];
        fds.extend(self.port_heirloom.as_ref().map(AsFd::as_fd));
        protocol::send(socket.as_fd(), &request, &fds, SendFlags::DONTWAIT).map_err(gone("send"))?;
        Ok(socket)
    }

    fn answer_of_new_daemon(
        &self,
        state: &mut State,
        datagram: &Datagram,
    ) -> Result<Option<Event>, ControlError> {
        if let Some(hello) = Hello::parse(&datagram.bytes) {
            if hello.version != protocol::VERSION {
                self.lose_daemon(state)?;
            }
            return Ok(None);
        }
        match decode(datagram) {
            Ok(Reply::Welcome(_)) => Ok(None),
            Ok(Reply::Resumed { device }) => {
                if let Daemon::Asked(socket) = std::mem::replace(&mut state.daemon, Daemon::Gone) {
                    state.daemon = Daemon::Connected(socket);
                }
                state.patience = FIRST_PATIENCE;
                state.info = device.clone();
                Ok(Some(Event::DeviceChanged(device)))
            }
            Ok(Reply::Refused(refusal)) => {
                tracing::warn!("the new ferroced does not go on with our lease: {refusal}");
                self.disconnect(state, Daemon::Lost)?;
                Ok(matches!(refusal, Refusal::UnknownDevice { .. }).then_some(Event::DeviceRemoved))
            }
            Ok(_) | Err(_) => self.lose_daemon(state).map(|()| None),
        }
    }
}

/// Puts a descriptor into the epoll set of a lease.
fn watch(control: &OwnedFd, fd: &OwnedFd) -> Result<(), Errno> {
    epoll::add(control, fd, epoll::EventData::new_u64(0), epoll::EventFlags::IN)
}

/// Opens a connection to a daemon that is trusted.
fn open_connection(flags: SocketFlags) -> Result<OwnedFd, ControlError> {
    let flags = flags | SocketFlags::CLOEXEC;
    let socket =
        socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).map_err(io("socket"))?;
    rustix::io::retry_on_intr(|| connect(&socket, &protocol::address())).map_err(|error| match error {
        Errno::CONNREFUSED => ControlError::NoDaemon,
        other => io("connect")(other),
    })?;
    let daemon = Peer::of(socket.as_fd()).map_err(|source| ControlError::Io {
        what: "SO_PEERCRED",
        source,
    })?;
    if daemon.uid != 0 && daemon.uid != rustix::process::geteuid().as_raw() {
        return Err(ControlError::Untrusted {
            uid: daemon.uid,
            pid: daemon.pid,
        });
    }
    Ok(socket)
}

/// Receives one datagram of an answer, within the timeout of the socket.
fn receive(socket: &OwnedFd) -> Result<Datagram, ControlError> {
    let receive = || protocol::receive(socket.as_fd(), RecvFlags::empty());
    // A peer that hung up with something of ours unread shows once as a reset, before what it said.
    let received = match receive() {
        Err(Errno::CONNRESET) => receive(),
        other => other,
    };
    match received {
        Ok(datagram) if datagram.bytes.is_empty() => Err(ControlError::Gone),
        Ok(datagram) => Ok(datagram),
        Err(Errno::AGAIN) => Err(ControlError::Silent),
        Err(error) => Err(gone("receive")(error)),
    }
}

fn decode(datagram: &Datagram) -> Result<Reply, ControlError> {
    protocol::decode(&datagram.bytes).ok_or(ControlError::Malformed("not of this protocol"))
}

pub(super) fn io(what: &'static str) -> impl Fn(Errno) -> ControlError {
    move |source| ControlError::Io {
        what,
        source: source.into(),
    }
}

/// As [`io`], where a closed connection means that the daemon ended.
fn gone(what: &'static str) -> impl Fn(Errno) -> ControlError {
    move |error| match error {
        Errno::PIPE | Errno::CONNRESET => ControlError::Gone,
        Errno::AGAIN => ControlError::Silent,
        other => io(what)(other),
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{PollFd, PollFlags, poll};
    use rustix::net::socketpair;

    use super::*;

    #[test]
    fn a_connection_that_a_child_has_too_is_not_readable_once_it_is_lost() {
        let pair = || {
            let flags = SocketFlags::CLOEXEC;
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap()
        };
        let (daemon, socket) = pair();
        let of_the_child = socket.try_clone().unwrap();
        let info = DeviceInfo {
            name: "ferroce_lo".into(),
            netdev: "lo".into(),
            ifindex: 1,
            uverbs: 0,
            guid: 0,
            mac: [0; 6],
            mtu: 65_536,
            speed: 0,
            up: true,
            lo: true,
            mode: crate::control::LinkMode::Udp,
            gids: Vec::new(),
        };
        let control = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
        watch(&control, &socket).unwrap();
        let lease = Lease {
            slot: 1,
            rx: pair().0,
            heirloom: None,
            port_heirloom: None,
            seat: Mutex::new(None),
            info: info.clone(),
            control,
            timer: timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC).unwrap(),
            state: Arc::new(Mutex::new(State {
                daemon: Daemon::Connected(socket),
                info,
                patience: FIRST_PATIENCE,
            })),
        };
        let readable = || {
            let mut fds = [PollFd::from_borrowed_fd(lease.control_fd(), PollFlags::IN)];
            poll(&mut fds, Some(&Timespec::default())).unwrap() == 1
        };
        assert!(!readable());
        drop(daemon);
        assert!(readable());
        assert_eq!(lease.receive().unwrap(), Some(Event::DaemonGone));
        assert_eq!(lease.receive().unwrap(), None);
        assert!(!readable());
        drop(of_the_child);
    }
}
