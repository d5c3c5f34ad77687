//! One connection to the daemon: who is behind it, and what waits to be sent.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use ferroce_engine::control::protocol::{self, Hello, Reply, Request};
use ferroce_engine::control::{DeviceInfo, Peer, Refusal};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, Shutdown, shutdown};
use rustix::process::{Pid, PidfdFlags, geteuid, pidfd_open};

use super::sys;

/// Bytes of messages that may wait for a client that does not read: more than an answer to `status` has, and than the
/// events of all connections of a program that was stopped for a while.
const MAX_WAITING: usize = 16 << 20;

/// One client.
pub struct Connection {
    socket: OwnedFd,
    /// Becomes readable when the process ends, even if a forked child still has the connection.
    pub process: Option<OwnedFd>,
    /// The process, as it was when it connected.
    pub peer: Peer,
    /// What it leases.
    pub lease: Option<LeaseState>,
    greeted: bool,
    waiting: VecDeque<Vec<u8>>,
    /// Bytes of these.
    waiting_bytes: usize,
    /// The latest news of the leased device, if the client has not read the one before.
    news: Option<Vec<u8>>,
}

/// A lease as the daemon keeps it.
pub struct LeaseState {
    /// The slot.
    pub slot: u8,
    /// The device's name.
    pub device: String,
}

/// Room for one message.
pub struct ReceiveBuffer(Box<[u8]>);

impl ReceiveBuffer {
    /// For any message.
    pub fn new() -> Self {
        Self(vec![0; protocol::MAX_MESSAGE].into_boxed_slice())
    }
}

/// What came from a client.
pub enum Incoming {
    /// Nothing more now.
    Nothing,
    /// Its hello fits.
    Greeted,
    /// A request, with the descriptors that came along.
    Request(Request, Vec<OwnedFd>),
    /// The connection is to be dropped, for this reason.
    Over(End),
}

/// Why a connection is dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The client closed it.
    Closed,
    /// The process ended.
    ProcessEnded,
    /// It is no client of ours, or one of another version.
    NoHello,
    /// The lease could not be sent, so that the client has nothing of it.
    LeaseNotTaken,
    /// It sent something that is no request.
    NoRequest,
    /// It sent more than any message has.
    MessageTooLong,
    /// It does not read what it is sent.
    DoesNotRead,
    /// It can't be waited for.
    Unwatched,
}

impl End {
    /// Whether the program may go on with its lease: it was us who gave the connection up.
    pub fn may_go_on(self) -> bool {
        matches!(
            self,
            Self::NoRequest | Self::MessageTooLong | Self::DoesNotRead | Self::Unwatched
        )
    }
}

impl Connection {
    /// Takes a fresh connection.
    pub fn new(socket: OwnedFd) -> io::Result<Self> {
        let peer = Peer::of(socket.as_fd())?;
        // A process of another pid namespace is not seen here: then only its connection tells its end.
        let pid = peer.pid.and_then(|pid| Pid::from_raw(pid.cast_signed()));
        let process = pid.and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
        Ok(Self {
            socket,
            process,
            peer,
            lease: None,
            greeted: false,
            waiting: VecDeque::new(),
            waiting_bytes: 0,
            news: None,
        })
    }

    /// The socket.
    pub fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Process id of the peer; 0 for one of another pid namespace, as the kernel says it.
    pub fn pid(&self) -> u32 {
        self.peer.pid.unwrap_or(0)
    }

    /// Root, the daemon's own user and members of the group are admitted.
    pub fn check_permission(&self, group: Option<u32>) -> Result<(), Refusal> {
        let in_group = |group: u32| {
            self.peer.gid == group || sys::peer_groups(self.socket()).is_ok_and(|all| all.contains(&group))
        };
        if self.is_owner() || group.is_some_and(in_group) {
            return Ok(());
        }
        Err(Refusal::NotPermitted {
            uid: self.peer.uid,
            daemon_uid: geteuid().as_raw(),
        })
    }

    /// Whether the peer is root or the daemon's own user. Members of the group may use devices, no more: not change
    /// them for all, nor have the heirloom, which gives access to the sockets of every slot.
    pub fn is_owner(&self) -> bool {
        self.peer.uid == 0 || self.peer.uid == geteuid().as_raw()
    }

    /// Refuses what only an owner may do.
    pub fn check_owner(&self) -> Result<(), Refusal> {
        if self.is_owner() {
            return Ok(());
        }
        Err(Refusal::NotOwner {
            uid: self.peer.uid,
            daemon_uid: geteuid().as_raw(),
        })
    }

    /// Says no to a client that is not admitted, and closes.
    ///
    /// A close with unread data would reset the connection, and the client would not see why.
    pub fn refuse(self, refusal: Refusal) {
        let sent =
            protocol::send(self.socket(), &Hello::ours().emit(), &[], SendFlags::DONTWAIT).and_then(|()| {
                protocol::send_message(&self.socket, &Reply::Refused(refusal), SendFlags::DONTWAIT)
            });
        if sent.is_ok() && shutdown(&self.socket, Shutdown::Read).is_ok() {
            while protocol::receive(self.socket(), RecvFlags::DONTWAIT)
                .is_ok_and(|datagram| !datagram.bytes.is_empty())
            {}
        }
    }

    /// Takes one message, by way of the buffer.
    pub fn receive(&mut self, buffer: &mut ReceiveBuffer) -> Incoming {
        let received =
            protocol::receive_with_descriptors(self.socket.as_fd(), &mut buffer.0, RecvFlags::DONTWAIT);
        let (bytes, fds) = match received {
            Ok((0, _)) => return Incoming::Over(End::Closed),
            Ok((length, fds)) => (buffer.0.get(..length).unwrap_or_default(), fds),
            Err(Errno::AGAIN) => return Incoming::Nothing,
            Err(Errno::MSGSIZE) => return Incoming::Over(End::MessageTooLong),
            Err(_) => return Incoming::Over(End::Closed),
        };
        if self.greeted {
            return match protocol::decode(bytes) {
                Some(request) => Incoming::Request(request, fds),
                None => Incoming::Over(End::NoRequest),
            };
        }
        self.greeted = true;
        let Some(hello) = Hello::parse(bytes) else {
            return Incoming::Over(End::NoHello);
        };
        self.push(Hello::ours().emit());
        if hello.version == protocol::VERSION {
            Incoming::Greeted
        } else {
            Incoming::Over(End::NoHello)
        }
    }

    /// Sends a message, now or when there is room; [`Connection::flush`] is to follow.
    pub fn send(&mut self, reply: &Reply) {
        self.push(protocol::encode(reply));
    }

    fn push(&mut self, bytes: Vec<u8>) {
        self.waiting_bytes += bytes.len();
        self.waiting.push_back(bytes);
    }

    /// Tells news of the leased device, in place of earlier news: a client that is stopped for long
    /// is to find the last, and to keep its lease.
    pub fn tell(&mut self, news: &Reply) {
        self.news = Some(protocol::encode(news));
    }

    /// Sends a message only if nothing waits: for what is useless when late.
    pub fn send_if_idle(&mut self, reply: &Reply) -> bool {
        let idle = self.waiting.is_empty() && self.news.is_none();
        if idle {
            self.send(reply);
        }
        idle
    }

    /// Sends the lease with its descriptors; false if there was no room.
    pub fn send_lease(
        &mut self,
        lease: LeaseState,
        seat: Option<u16>,
        device: DeviceInfo,
        fds: &[BorrowedFd<'_>],
    ) -> bool {
        // A client that asked before it was welcomed gets the answers in their order.
        if self.flush() != Ok(false) {
            return false;
        }
        let reply = Reply::Leased {
            seat,
            slot: lease.slot,
            device,
        };
        self.lease = Some(lease);
        protocol::send(self.socket(), &protocol::encode(&reply), fds, SendFlags::DONTWAIT).is_ok()
    }

    /// Sends what waits. `Ok(true)` means that some still waits; an error, that the client is lost. What waits is never
    /// thinned out: a client that missed an event or an answer could not go on.
    pub fn flush(&mut self) -> Result<bool, End> {
        while let Some(bytes) = self.waiting.front().or(self.news.as_ref()) {
            match protocol::send(self.socket.as_fd(), bytes, &[], SendFlags::DONTWAIT) {
                Ok(()) if self.waiting.is_empty() => self.news = None,
                Ok(()) => self.waiting_bytes -= self.waiting.pop_front().map_or(0, |sent| sent.len()),
                Err(Errno::AGAIN) if self.waiting_bytes > MAX_WAITING => return Err(End::DoesNotRead),
                Err(Errno::AGAIN) => return Ok(true),
                Err(_) => return Err(End::Closed),
            }
        }
        Ok(false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    #[test]
    fn client_that_reads_late_finds_the_last_news() {
        let (ours, theirs) = socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )
        .unwrap();
        let mut connection = Connection::new(ours).unwrap();
        const LAST: u32 = 20_000;
        let mut waits = false;
        for id in 0..=LAST {
            // Any message will do for news.
            connection.tell(&Reply::ReportWanted { id });
            waits = connection.flush().expect("the client is not lost");
        }
        assert!(waits, "the socket took all of it: the test needs more");
        assert!(!connection.send_if_idle(&Reply::Done));
        let mut received = Vec::new();
        while let Ok(datagram) = protocol::receive(theirs.as_fd(), RecvFlags::DONTWAIT) {
            received.push(protocol::decode::<Reply>(&datagram.bytes).unwrap());
            connection.flush().unwrap();
        }
        assert_eq!(received.last(), Some(&Reply::ReportWanted { id: LAST }));
        assert!(received.len() < LAST as usize);
        assert_eq!(connection.flush(), Ok(false));
    }
}
