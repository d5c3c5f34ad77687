//! The process's side of the control connection: asking for a lease, and keeping it.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use parking_lot::Mutex;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, connect, socket_with, sockopt,
};

use super::protocol::{self, Datagram, Hello, Reply, Request, Welcome};
use super::{ControlError, DeviceInfo, Report};

/// How long an answer of the daemon may take.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// A connection to the daemon of this network namespace, for requests that are answered at once.
#[derive(Debug)]
pub struct Client {
    socket: OwnedFd,
    welcome: Welcome,
}

impl Client {
    /// Connects, and checks that the daemon is trusted and of this version.
    pub fn connect() -> Result<Self, ControlError> {
        let socket = socket_with(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )
        .map_err(io("socket"))?;
        rustix::io::retry_on_intr(|| connect(&socket, &protocol::address())).map_err(
            |error| match error {
                Errno::CONNREFUSED => ControlError::NoDaemon,
                other => io("connect")(other),
            },
        )?;
        let daemon = sockopt::socket_peercred(&socket).map_err(io("SO_PEERCRED"))?.uid;
        if !daemon.is_root() && daemon != rustix::process::geteuid() {
            return Err(ControlError::Untrusted { uid: daemon.as_raw() });
        }
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
    /// The daemon ended. The slot and its socket stay usable.
    DaemonGone,
}

/// One slot of one device, leased to this process until the value is dropped or the process dies.
///
/// Its descriptors are close-on-exec. A forked child must not use them.
#[derive(Debug)]
pub struct Lease {
    slot: u8,
    rx: OwnedFd,
    info: DeviceInfo,
    control: OwnedFd,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    gone: bool,
    early: VecDeque<Event>,
}

impl Lease {
    /// Leases a slot of the device of that name.
    pub fn acquire(device: &str) -> Result<Self, ControlError> {
        let client = Client::connect()?;
        let request = Request::Lease {
            device: device.to_owned(),
        };
        protocol::send_message(&client.socket, &request, SendFlags::empty()).map_err(gone("send"))?;
        let mut datagram = receive(&client.socket)?;
        match decode(&datagram)? {
            Reply::Leased {
                slot,
                token: _,
                device,
            } => {
                let rx = datagram.fds.pop().ok_or(ControlError::Malformed("no socket"))?;
                let control = client.socket;
                Ok(Self {
                    slot,
                    rx,
                    info: device,
                    control,
                    state: Mutex::default(),
                })
            }
            Reply::Refused(refusal) => Err(refusal.into()),
            _ => Err(ControlError::Malformed("no lease")),
        }
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

    /// Descriptor to poll: readable means that [`Lease::receive`] has something.
    pub fn control_fd(&self) -> BorrowedFd<'_> {
        self.control.as_fd()
    }

    /// The device as it was when the slot was leased.
    pub fn info(&self) -> DeviceInfo {
        self.info.clone()
    }

    /// Takes one event of the daemon, `None` if there is none now. Never blocks.
    /// After [`Event::DaemonGone`] nothing follows, and `control_fd` need not be polled any more.
    pub fn receive(&self) -> Result<Option<Event>, ControlError> {
        let mut state = self.state.lock();
        if let Some(event) = state.early.pop_front() {
            return Ok(Some(event));
        }
        if state.gone {
            return Ok(None);
        }
        let datagram = match protocol::receive(self.control.as_fd(), RecvFlags::DONTWAIT) {
            Ok(datagram) => datagram,
            Err(Errno::AGAIN) => return Ok(None),
            Err(Errno::CONNRESET) => Datagram {
                bytes: Vec::new(),
                fds: Vec::new(),
            },
            Err(error) => return Err(io("receive")(error)),
        };
        if datagram.bytes.is_empty() {
            state.gone = true;
            return Ok(Some(Event::DaemonGone));
        }
        match decode(&datagram)? {
            Reply::DeviceChanged(info) => Ok(Some(Event::DeviceChanged(info))),
            Reply::DeviceRemoved => Ok(Some(Event::DeviceRemoved)),
            Reply::ReportWanted { id } => Ok(Some(Event::ReportWanted(id))),
            _ => Err(ControlError::Malformed("no event")),
        }
    }

    /// Answers [`Event::ReportWanted`]. Never blocks: if the daemon is busy the report is dropped,
    /// and the daemon shows the process as not answering.
    pub fn report(&self, id: u32, mut report: Report) -> Result<(), ControlError> {
        report.qps.truncate(protocol::MAX_REPORTED_QPS);
        report.counters.truncate(protocol::MAX_REPORTED_COUNTERS);
        let request = Request::Report { id, report };
        match protocol::send_message(&self.control, &request, SendFlags::DONTWAIT) {
            Ok(()) | Err(Errno::AGAIN | Errno::PIPE | Errno::CONNRESET) => Ok(()),
            Err(error) => Err(io("send")(error)),
        }
    }
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

fn io(what: &'static str) -> impl Fn(Errno) -> ControlError {
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
