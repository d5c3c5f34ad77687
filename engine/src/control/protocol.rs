//! Messages between processes and `ferroced`: one SEQPACKET datagram each.
//!
//! The first datagram of both sides is the hello, whose layout never changes: 4 bytes `FRRC`, the
//! protocol version (u16, little endian), then the release as UTF-8. All later ones are postcard of
//! [`Request`] (to the daemon) or [`Reply`] (from it), each at most [`MAX_MESSAGE`] bytes.
//! Descriptors travel as SCM_RIGHTS beside [`Reply::Leased`] and [`Request::Resume`].
//!
//! **The heirloom** lets the sockets of all slots outlive a daemon: it is a SEQPACKET socket whose
//! receive queue holds one message with all of them, never taken out. Every process that has a lease
//! and the daemon's user keeps it open; to the next daemon they show it, and that looks the message
//! up (MSG_PEEK) and has the same sockets. A device in XDP mode has a heirloom of its own, with its program, maps, memory
//! and sockets; there every process that has a lease keeps both.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, recv, recvmsg, sendmsg,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::{DeviceInfo, Refusal, Report};
use crate::link::xdp::port::Zerocopy;
use crate::rdma_cm::{self, Answer, Command, Id, IdStatus, Keepsake};

/// Version of the messages; both sides must have the same.
pub const VERSION: u16 = 5;
/// Release of this build, shown when versions differ.
pub const RELEASE: &str = env!("CARGO_PKG_VERSION");
/// Name of the daemon's socket in the abstract namespace, which the kernel keeps per network namespace.
pub const SOCKET_NAME: &[u8] = b"ferroced";
/// Most bytes of one message; fits the default send buffer of a unix socket (208 KiB).
pub const MAX_MESSAGE: usize = 128 * 1024;
/// Most queue pairs that one report carries.
pub const MAX_REPORTED_QPS: usize = 1024;
/// Most counters that one report carries.
pub const MAX_REPORTED_COUNTERS: usize = 256;
/// Most ids of RDMA CM that one message lists.
pub const MAX_REPORTED_IDS: usize = 256;
/// Most descriptors of one message (the kernel's own bound is 253).
const MAX_FDS: usize = 253;

const MAGIC: [u8; 4] = *b"FRRC";

/// From a process or the command line to the daemon.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Request {
    /// Lease a slot of the device; answered by [`Reply::Leased`] with the slot's socket.
    Lease {
        /// Name of the device.
        device: String,
    },
    /// Go on with a lease of an earlier daemon; answered by [`Reply::Resumed`]. Descriptors come along: the heirloom, the
    /// socket of the slot, by which the daemon knows the slot, and for a device in XDP mode the port's heirloom.
    Resume {
        /// The device as the process knows it.
        device: DeviceInfo,
    },
    /// Answer to [`Reply::ReportWanted`].
    Report {
        /// The id that came with it.
        id: u32,
        /// What the process has.
        report: Report,
    },
    /// Stay as long as the process behind this connection lives, even when it closes the connection.
    Hold,
    /// List the devices; answered by [`Reply::Links`].
    Links,
    /// Add a device; answered by [`Reply::Added`].
    LinkAdd {
        /// Name of the new device.
        name: String,
        /// Its network interface.
        netdev: String,
        /// XDP mode, and how; `None`: UDP sockets.
        xdp: Option<XdpOptions>,
    },
    /// Find out where frames to `dest` go, and write it to the port's table of next hops. Not answered. Of those only who
    /// leases a device in XDP mode may ask.
    NextHop {
        /// Own address.
        source: IpAddr,
        /// The peer's.
        dest: IpAddr,
    },
    /// Remove a device; answered by [`Reply::Done`].
    LinkDel {
        /// Name of the device.
        name: String,
    },
    /// List leases and ids; answered by one [`Reply::Process`] for each lease, [`Reply::CmProcess`] for the ids of each
    /// process, and [`Reply::StatusEnd`].
    Status,
    /// A command of RDMA CM; answered by [`CmAnswer`]. The ids of a connection are destroyed when it is closed.
    Cm {
        /// To be repeated in the answer.
        sequence: u32,
        /// The command.
        command: Command,
    },
    /// Go on with the ids of an earlier daemon; answered by [`Reply::CmRestored`].
    CmRestore(Vec<Keepsake>),
}

/// How an interface is put into XDP mode; `None` leaves it to the daemon.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct XdpOptions {
    /// Receive queues to serve.
    pub queues: Option<u16>,
    /// Whether the driver is to read and write the frames itself.
    pub zerocopy: Zerocopy,
    /// Bytes of a frame: 2048 or 4096.
    pub chunk: Option<u32>,
    /// Programs that can use the device at once.
    pub programs: Option<u16>,
}

/// From the daemon.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reply {
    /// First message after the hello.
    Welcome(Welcome),
    /// The slot is yours; its descriptors come along: its socket; for a seat the memory files `control` and `umem`, the
    /// seat's sockets by queue, and the port's heirloom; and the heirloom, if the process may have it.
    Leased {
        /// Number of the slot, the high byte of all its QPNs.
        slot: u8,
        /// The seat, on a device in XDP mode.
        seat: Option<u16>,
        /// The device.
        device: DeviceInfo,
    },
    /// The lease goes on.
    Resumed {
        /// The device as it is now.
        device: DeviceInfo,
    },
    /// Interface, addresses or state of the leased device changed.
    DeviceChanged(DeviceInfo),
    /// The leased device is gone (its interface was removed).
    DeviceRemoved,
    /// Answer with [`Request::Report`] at once.
    ReportWanted {
        /// To be repeated in the answer.
        id: u32,
    },
    /// All devices.
    Links(Vec<LinkStatus>),
    /// One lease.
    Process(Box<ProcessStatus>),
    /// Ids of RDMA CM of one process; one with many has several of these.
    CmProcess(Box<CmProcessStatus>),
    /// No more leases and ids follow.
    StatusEnd(DaemonStatus),
    /// Done as asked.
    Done,
    /// The device is there.
    Added {
        /// What the user should know of it, each one line.
        notes: Vec<String>,
    },
    /// What is new of ids of RDMA CM.
    CmNews(CmNews),
    /// The ids of [`Request::CmRestore`] go on, but for these.
    CmRestored {
        /// Ids that are lost.
        lost: Vec<Id>,
    },
    /// Not done.
    Refused(Refusal),
}

/// What is new of ids of RDMA CM. One message, as a daemon may die at any moment: a state that is kept without the event
/// that it led to would never be told of again.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CmNews {
    /// To be kept from now on.
    pub keepsakes: Vec<Keepsake>,
    /// A command was done, or failed.
    pub answer: Option<CmAnswer>,
    /// What happened since, the oldest first.
    pub events: Vec<rdma_cm::Event>,
}

/// What a command of RDMA CM gives.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CmAnswer {
    /// The number that came with it.
    pub sequence: u32,
    /// What it gives.
    pub result: Result<Answer, rdma_cm::Errno>,
}

/// One device in `ferroce link show`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LinkStatus {
    /// The device.
    pub device: DeviceInfo,
    /// Of a device in XDP mode.
    pub xdp: Option<XdpStatus>,
}

/// What goes on at a device in XDP mode.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct XdpStatus {
    /// Somebody has taken the XDP program off the interface: nothing goes to programs by frames any more.
    pub detached: bool,
    /// Programs that use it.
    pub programs: u16,
    /// Packets that the XDP program dropped, by reason.
    pub drops: Vec<(String, u64)>,
}

/// What a new connection learns of the daemon.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Welcome {
    /// Process id of the daemon.
    pub pid: u32,
    /// The directory that pictures sysfs and `/dev`.
    pub tree: String,
}

/// One lease in `ferroce status`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessStatus {
    /// Its slot.
    pub slot: u8,
    /// Device leased.
    pub device: String,
    /// Process id, 0 if it is not visible from the daemon's pid namespace.
    pub pid: u32,
    /// Command name (`/proc/PID/comm`).
    pub command: String,
    /// User.
    pub uid: u32,
    /// What it reported; `None` if it did not answer in time.
    pub report: Option<Report>,
}

/// Ids of RDMA CM in `ferroce status`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CmProcessStatus {
    /// Process id, 0 if it is not visible from the daemon's pid namespace, or ended.
    pub pid: u32,
    /// Command name (`/proc/PID/comm`).
    pub command: String,
    /// User; `None` of what a process that ended has left, as connections in timewait.
    pub uid: Option<u32>,
    /// Ids, at most [`MAX_REPORTED_IDS`].
    pub ids: Vec<IdStatus>,
}

/// The daemon's own lines in `ferroce status`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DaemonStatus {
    /// Process id.
    pub pid: u32,
    /// User.
    pub uid: u32,
    /// Release.
    pub release: String,
    /// Slots that can be leased.
    pub slots: u32,
    /// Slots leased now.
    pub leased: u32,
    /// Receive buffer of each slot's socket in bytes, as the kernel granted it.
    pub receive_buffer: u32,
    /// Named counters of queue pair 1 and RDMA CM.
    pub counters: Vec<(String, u64)>,
}

/// A hello as received.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    /// Protocol version of the sender.
    pub version: u16,
    /// Release of the sender.
    pub release: String,
}

impl Hello {
    /// The hello of this build.
    pub fn ours() -> Self {
        Self {
            version: VERSION,
            release: RELEASE.to_owned(),
        }
    }

    /// The bytes of this hello.
    pub fn emit(&self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend_from_slice(&self.version.to_le_bytes());
        bytes.extend_from_slice(self.release.as_bytes());
        bytes
    }

    /// Reads a hello; `None` if the bytes are none.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let (version, release) = bytes.strip_prefix(&MAGIC)?.split_first_chunk::<2>()?;
        let release = String::from_utf8_lossy(release.get(..32).unwrap_or(release)).into_owned();
        Some(Self {
            version: u16::from_le_bytes(*version),
            release,
        })
    }
}

/// Address of the daemon's socket.
pub fn address() -> SocketAddrUnix {
    SocketAddrUnix::new_abstract_name(SOCKET_NAME).expect("the name is shorter than sun_path")
}

/// The bytes of a message.
pub fn encode<M: Serialize>(message: &M) -> Vec<u8> {
    postcard::to_stdvec(message).expect("the messages are plain data")
}

/// Reads a message; `None` if the bytes are none, or more than one.
pub fn decode<M: DeserializeOwned>(bytes: &[u8]) -> Option<M> {
    match postcard::take_from_bytes(bytes) {
        Ok((message, [])) => Some(message),
        _ => None,
    }
}

/// A received datagram.
#[derive(Debug)]
pub struct Datagram {
    /// Its bytes; empty means that the peer closed the connection.
    pub bytes: Vec<u8>,
    /// The descriptors that came along, close-on-exec.
    pub fds: Vec<OwnedFd>,
}

/// Sends one datagram with descriptors; never raises SIGPIPE.
pub fn send(
    socket: BorrowedFd<'_>,
    bytes: &[u8],
    fds: &[BorrowedFd<'_>],
    flags: SendFlags,
) -> Result<(), Errno> {
    if bytes.len() > MAX_MESSAGE {
        return Err(Errno::MSGSIZE);
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(Errno::TOOBIG);
    }
    let flags = flags | SendFlags::NOSIGNAL;
    rustix::io::retry_on_intr(|| sendmsg(socket, &[IoSlice::new(bytes)], &mut ancillary, flags).map(drop))
}

/// Receives one datagram. An over-long one is `EMSGSIZE`.
pub fn receive(socket: BorrowedFd<'_>, flags: RecvFlags) -> Result<Datagram, Errno> {
    let mut bytes = vec![0; MAX_MESSAGE];
    let (length, fds) = receive_with_descriptors(socket, &mut bytes, flags)?;
    bytes.truncate(length);
    bytes.shrink_to_fit();
    Ok(Datagram { bytes, fds })
}

/// As [`receive`], into a buffer of at least [`MAX_MESSAGE`] bytes; gives the length, 0 for a closed connection.
pub fn receive_with_descriptors(
    socket: BorrowedFd<'_>,
    buffer: &mut [u8],
    flags: RecvFlags,
) -> Result<(usize, Vec<OwnedFd>), Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let flags = flags | RecvFlags::CMSG_CLOEXEC;
    let received =
        rustix::io::retry_on_intr(|| recvmsg(socket, &mut [IoSliceMut::new(buffer)], &mut ancillary, flags))?;
    let mut fds = Vec::new();
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    if received.flags.contains(ReturnFlags::TRUNC) {
        return Err(Errno::MSGSIZE);
    }
    Ok((received.bytes, fds))
}

/// Receives one datagram into `buffer`, which has room for [`MAX_MESSAGE`] bytes, and gives its length: 0 if the peer
/// closed the connection. Descriptors that came along are closed. An over-long one is `EMSGSIZE`.
pub fn receive_into(socket: BorrowedFd<'_>, buffer: &mut [u8], flags: RecvFlags) -> Result<usize, Errno> {
    // With TRUNC the true length is told.
    let (_, length) = recv(socket, &mut *buffer, flags | RecvFlags::TRUNC)?;
    if length > buffer.len() {
        return Err(Errno::MSGSIZE);
    }
    Ok(length)
}

/// Sends one message without descriptors.
pub fn send_message<M: Serialize>(socket: impl AsFd, message: &M, flags: SendFlags) -> Result<(), Errno> {
    send(socket.as_fd(), &encode(message), &[], flags)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn hello_layout_is_fixed() {
        let hello = Hello {
            version: 0x0102,
            release: "9.8.7".into(),
        };
        assert_eq!(hello.emit(), b"FRRC\x02\x019.8.7");
        assert_eq!(Hello::parse(&hello.emit()), Some(hello));
        assert_eq!(Hello::parse(b"FRRC\x01"), None);
        assert_eq!(Hello::parse(b"HTTP\x01\x00"), None);
    }

    #[test]
    fn message_with_trailing_bytes_is_refused() {
        let mut bytes = encode(&Request::Lease {
            device: "ferroce_lo".into(),
        });
        assert!(decode::<Request>(&bytes).is_some());
        bytes.push(0);
        assert_eq!(decode::<Request>(&bytes), None);
        bytes.truncate(3);
        assert_eq!(decode::<Request>(&bytes), None);
    }

    proptest! {
        #[test]
        fn any_bytes_decode_without_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = Hello::parse(&bytes);
            if let Some(request) = decode::<Request>(&bytes) {
                prop_assert_eq!(decode::<Request>(&encode(&request)), Some(request));
            }
            if let Some(reply) = decode::<Reply>(&bytes) {
                prop_assert_eq!(decode::<Reply>(&encode(&reply)), Some(reply));
            }
        }
    }
}
