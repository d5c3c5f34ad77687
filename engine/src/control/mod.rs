//! The control plane between a process and `ferroced`: what a lease is, and what both sides may say.
//!
//! `ferroced` owns what a host shares (devices, QPN slots, the UDP port 4791); a process leases one
//! slot of one device and is then alone on its data path. [`Lease`] is the side of a process,
//! [`Client`] the side of the command line, [`protocol`] the messages of both.

#![deny(unsafe_code)]

mod client;
mod peer;
pub mod protocol;
mod rate;
mod session;

use std::net::IpAddr;
use std::path::PathBuf;

use ferroce_wire::Gid;
use serde::{Deserialize, Serialize};

use crate::environment;
use crate::link::RoceVersion;
use crate::link::xdp::Geometry;
use crate::link::xdp::port::Features;

pub use client::{Client, Event, Lease, SeatFiles};
pub use peer::Peer;
pub use rate::Rate;
pub use session::{Connect, Listener, Session, Waiting};

/// Number of the slot that belongs to the daemon itself (QP0 and QP1 live there).
pub const DAEMON_SLOT: u8 = 0;
/// Highest slot a process can lease; with the daemon's, all sockets fit one SCM_RIGHTS message (253).
pub const MAX_SLOT: u8 = 251;
/// Entries of a GID table, holes included.
pub const GID_TABLE_LEN: usize = 256;
/// Environment variable that names the tree in programs started by `ferroce run`.
pub const TREE_VARIABLE: &str = "FERROCE_TREE";

/// The tree of this process: the directory of `ferroced` that pictures sysfs and `/dev`, as
/// `ferroce run` announced it; `None` in a program that was not started by it.
pub fn tree() -> Option<PathBuf> {
    environment::variable(TREE_VARIABLE).map(PathBuf::from)
}

/// True if a device of that name is one of `ferroced`'s in the tree of this process. A tree shows
/// the kernel's own devices as well, but as links.
pub fn is_in_tree(device: &str) -> bool {
    tree().is_some_and(|tree| {
        let directory = tree.join("sys/class/infiniband").join(device);
        std::fs::symlink_metadata(directory).is_ok_and(|metadata| metadata.is_dir())
    })
}

/// One used entry of a GID table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GidEntry {
    /// The 16 bytes in network order; an IPv4 address is mapped (`::ffff:a.b.c.d`).
    pub gid: [u8; 16],
    /// The interface address behind it.
    pub addr: IpAddr,
    /// The protocol that packets of this entry speak.
    pub version: RoceVersion,
}

impl GidEntry {
    /// The entry of an interface address. The GID is the same for both versions.
    pub fn new(version: RoceVersion, addr: IpAddr) -> Self {
        Self {
            gid: Gid::from_ip(addr).0,
            addr,
            version,
        }
    }

    /// The RoCE v2 entry of an interface address.
    pub fn roce_v2(addr: IpAddr) -> Self {
        Self::new(RoceVersion::V2, addr)
    }
}

/// What carries the packets of a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum LinkMode {
    /// UDP sockets.
    #[default]
    Udp,
    /// AF_XDP sockets; and UDP sockets for packets to the host itself, and multicast.
    Xdp(XdpInfo),
}

impl LinkMode {
    /// Whether the device has GIDs of RoCE v1 too.
    pub fn has_roce_v1(&self) -> bool {
        matches!(self, LinkMode::Xdp(_))
    }
}

/// An interface in XDP mode.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct XdpInfo {
    /// How its memory is divided.
    pub geometry: Geometry,
    /// The driver runs the XDP program; otherwise the kernel does (SKB mode).
    pub driver: bool,
    /// What the kernel could do.
    pub features: Features,
}

/// A device as the daemon sees it now.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceInfo {
    /// Name of the RDMA device, `ferroce_<netdev>` unless given by `ferroce link add`.
    pub name: String,
    /// Name of its network interface.
    pub netdev: String,
    /// Kernel index of the interface.
    pub ifindex: u32,
    /// N of `uverbsN`, unique in this daemon.
    pub uverbs: u32,
    /// Node GUID, unique and stable per device; bytes in network order give the EUI-64.
    pub guid: u64,
    /// MAC address of the interface; zero on loopback.
    pub mac: [u8; 6],
    /// MTU of the interface in bytes (IP packet size).
    pub mtu: u32,
    /// Speed of the interface in Mbit/s; 0 where it does not tell.
    pub speed: u32,
    /// The interface is up and has a carrier: the port is ACTIVE, otherwise DOWN.
    pub up: bool,
    /// The interface is the loopback.
    pub lo: bool,
    /// What carries its packets.
    pub mode: LinkMode,
    /// GID table: the position is the GID index, `None` is a hole; holes at the end are left out.
    pub gids: Vec<Option<GidEntry>>,
}

/// One queue pair, as a process reports it for `ferroce status`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct QpReport {
    /// Queue pair number (24 bits, slot included).
    pub qpn: u32,
    /// Transport, as in `RC`, `UC`, `UD`.
    pub transport: String,
    /// State, as in `RESET`, `INIT`, `RTR`, `RTS`, `SQD`, `SQE`, `ERROR`.
    pub state: String,
    /// Queue pair number of the peer, where connected.
    pub dest_qpn: Option<u32>,
    /// Address of the peer, where connected.
    pub remote: Option<IpAddr>,
}

/// What a process answers to [`Event::ReportWanted`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// The queue pairs; at most [`protocol::MAX_REPORTED_QPS`] are sent.
    pub qps: Vec<QpReport>,
    /// Named counters: drops by reason, packets, retransmissions.
    pub counters: Vec<(String, u64)>,
}

/// Why the daemon does not do what was asked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum Refusal {
    /// No device has that name.
    #[error("no device `{name}`: `ferroce link show` lists the devices of this network namespace")]
    UnknownDevice {
        /// The name asked for.
        name: String,
    },
    /// No interface has that name.
    #[error("no network interface `{netdev}` in this network namespace: `ip link show` lists them")]
    UnknownInterface {
        /// The name asked for.
        netdev: String,
    },
    /// A device of that name, or on that interface, exists.
    #[error(
        "device `{name}` exists already on interface {netdev} (one for each name and interface): use it, or remove it by `ferroce link del {name}`"
    )]
    DeviceExists {
        /// Name of the existing device.
        name: String,
        /// Its interface.
        netdev: String,
    },
    /// The name can't be a device name.
    #[error(
        "`{name}` can't name a device: use 1 to 63 letters, digits, `_`, `-` or `.`, not beginning with `.` or `rxe`"
    )]
    BadDeviceName {
        /// The name asked for.
        name: String,
    },
    /// Processes hold leases of the device.
    #[error("device `{name}` is in use by {leases} process(es): end them first, `ferroce status` lists them")]
    DeviceBusy {
        /// The device.
        name: String,
        /// Leases of it.
        leases: u32,
    },
    /// Every slot is leased.
    #[error(
        "all {slots} slots of ferroced are leased: end a program that uses a device, `ferroce status` lists them"
    )]
    SlotTableFull {
        /// Size of the table.
        slots: u32,
    },
    /// The peer's user is not admitted.
    #[error(
        "uid {uid} may not use the ferroced of uid {daemon_uid}: run as that user, or start ferroced with `--group` of a group that you are in"
    )]
    NotPermitted {
        /// User of the peer.
        uid: u32,
        /// User of the daemon.
        daemon_uid: u32,
    },
    /// A lease of an earlier daemon that this one can't go on with.
    #[error("ferroced does not know this lease: start the program again")]
    UnknownLease,
    /// Too many connections.
    #[error("ferroced has as many connections as it admits: end some programs that use a device")]
    TooManyConnections,
    /// The daemon could not do it.
    #[error("ferroced failed: {0}")]
    Failed(String),
    /// The peer's user may use devices, but not add or remove them.
    #[error(
        "uid {uid} may not add or remove devices: only root and uid {daemon_uid}, which runs ferroced, may"
    )]
    NotOwner {
        /// User of the peer.
        uid: u32,
        /// User of the daemon.
        daemon_uid: u32,
    },
    /// XDP mode needs privilege.
    #[error(
        "ferroced may not put {netdev} into XDP mode: run it as root, or with CAP_NET_ADMIN, CAP_NET_RAW and CAP_BPF of the host (a user namespace has none of these)"
    )]
    XdpNotPermitted {
        /// The interface.
        netdev: String,
    },
    /// An interface that is down has no queues.
    #[error("{netdev} is down: `ip link set {netdev} up`, then add the device")]
    InterfaceDown {
        /// The interface.
        netdev: String,
    },
    /// XDP mode is not for this kind of interface.
    #[error("{netdev} is {what}, which XDP mode does not serve: {instead}")]
    XdpUnsuitable {
        /// The interface.
        netdev: String,
        /// What it is.
        what: String,
        /// What to do.
        instead: String,
    },
    /// No RoCE packet fits the interface.
    #[error("MTU {mtu} of {netdev} is too small for RoCE: `ip link set {netdev} mtu {least}` or more")]
    MtuTooSmall {
        /// The interface.
        netdev: String,
        /// Its MTU in bytes.
        mtu: u32,
        /// The least that will do.
        least: u32,
    },
    /// Another XDP program has the interface.
    #[error(
        "an XDP program{} is on {netdev} already: end its owner, or take it off by `ip link set {netdev} xdp off`, or by `bpftool link detach id ID` if `bpftool link show` lists it",
        .program.map(|id| format!(" (id {id})")).unwrap_or_default()
    )]
    XdpInUse {
        /// The interface.
        netdev: String,
        /// Id of the program, if the kernel tells.
        program: Option<u32>,
    },
    /// An interface above this one has an XDP program: the kernel wants them from below upwards.
    #[error(
        "an interface above {netdev} (a VLAN's, say) has an XDP program already: `ferroce link del` its device, add that of {netdev}, then the other again; `bpftool net` shows the program"
    )]
    XdpAbove {
        /// The interface.
        netdev: String,
    },
    /// Other AF_XDP sockets have a queue of the interface.
    #[error(
        "another program has AF_XDP sockets on {netdev}: end it (`ss --xdp -p` names it), then add the device"
    )]
    XdpQueueInUse {
        /// The interface.
        netdev: String,
    },
    /// The kernel is too old, or built without.
    #[error(
        "this kernel has no {what}: use one with CONFIG_XDP_SOCKETS and CONFIG_BPF_SYSCALL, or add the device by `mode udp`"
    )]
    XdpUnsupported {
        /// What is missing.
        what: String,
    },
    /// Neither the driver nor SKB mode takes the program.
    #[error("{netdev} takes no XDP program ({reason}): add the device by `mode udp`")]
    XdpRefused {
        /// The interface.
        netdev: String,
        /// What the kernel said.
        reason: String,
    },
    /// More queues than the interface has.
    #[error("{netdev} has {queues} receive queue(s): give `queues` 1 to {queues}, or leave it out for all")]
    TooManyQueues {
        /// The interface.
        netdev: String,
        /// Queues that can be served.
        queues: u16,
    },
    /// The driver can't do zero-copy.
    #[error(
        "the driver of {netdev} can't do zero-copy ({reason}): use `zerocopy auto`, which copies where it must"
    )]
    ZerocopyRefused {
        /// The interface.
        netdev: String,
        /// What the kernel said.
        reason: String,
    },
    /// No memory for the port, or none that may be locked.
    #[error(
        "no memory for XDP mode on {netdev}, which would take {mebibytes} MiB ({reason}): give fewer `programs` or `queues`, or raise ferroced's limit of locked memory (`ulimit -l`)"
    )]
    XdpNoMemory {
        /// The interface.
        netdev: String,
        /// Memory of the port.
        mebibytes: u32,
        /// What failed.
        reason: String,
    },
    /// A number that XDP mode can't have.
    #[error("`{word} {value}` can't be: give {allowed}")]
    BadXdpOption {
        /// The option.
        word: String,
        /// What was asked for.
        value: u32,
        /// What it may be.
        allowed: String,
    },
    /// Every program's place at a device in XDP mode is taken.
    #[error(
        "all {programs} places of device `{name}` are taken: end a program that uses it, or add it again with more `programs`"
    )]
    SeatsTaken {
        /// The device.
        name: String,
        /// Places of it.
        programs: u16,
    },
}

/// Errors of the control plane, each one line that says what to do.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// Nothing listens on the daemon's socket of this network namespace.
    #[error("no ferroced runs in this network namespace: start the program with `ferroce run -- CMD`")]
    NoDaemon,
    /// The daemon belongs to a user who is neither root nor we.
    #[error(
        "the ferroced of this network namespace belongs to uid {uid}{}, and only root's or your own is trusted: end it, or work in another network namespace",
        .pid.map(|pid| format!(" (pid {pid})")).unwrap_or_default()
    )]
    Untrusted {
        /// User of the daemon.
        uid: u32,
        /// Its process, where this pid namespace shows it.
        pid: Option<u32>,
    },
    /// The daemon speaks another version of the protocol.
    #[error(
        "ferroced is of another version ({release}, protocol {theirs}; this program has {}, protocol {}): restart ferroced from the same installation",
        protocol::RELEASE,
        protocol::VERSION
    )]
    Version {
        /// Protocol version of the daemon.
        theirs: u16,
        /// Its release.
        release: String,
    },
    /// The daemon refused.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The daemon accepted the connection but does not answer.
    #[error("ferroced does not answer: is it stopped? end it and start the program again")]
    Silent,
    /// The daemon ended while it was asked.
    #[error("ferroced ended while it was asked: start the program again with `ferroce run -- CMD`")]
    Gone,
    /// A message that makes no sense.
    #[error("ferroced sent a message that makes no sense ({0}): restart ferroced from the same installation")]
    Malformed(&'static str),
    /// A system call failed.
    #[error("can't talk to ferroced: {what}: {source}")]
    Io {
        /// The call.
        what: &'static str,
        /// Its error.
        source: std::io::Error,
    },
}

impl ControlError {
    /// What a call that failed for this reason leaves in `errno`.
    pub fn errno(&self) -> i32 {
        match self {
            ControlError::NoDaemon | ControlError::Refused(Refusal::UnknownDevice { .. }) => libc::ENODEV,
            ControlError::Untrusted { .. } | ControlError::Refused(Refusal::NotPermitted { .. }) => {
                libc::EACCES
            }
            ControlError::Refused(
                Refusal::SlotTableFull { .. } | Refusal::TooManyConnections | Refusal::SeatsTaken { .. },
            ) => libc::ENOSPC,
            ControlError::Io { source, .. } => source.raw_os_error().unwrap_or(libc::EIO),
            _ => libc::EIO,
        }
    }
}
