//! RDMA CM: ids, port spaces, addresses and events, as the kernel's `rdma_cm` and `rdma_ucm` have them.
//!
//! Sans-I/O like the transport. One [`RdmaCm`] serves all processes of a host: it takes their [`Command`]s, MADs that
//! came to QP 1, answers about routes, and the time; it gives [`Output`]s and the next deadline. The messages between
//! the peers are [`crate::cm`]'s.
#![deny(unsafe_code)]

mod interface;

use std::net::IpAddr;

use crate::control::DeviceInfo;
use crate::link::Path;
use crate::time::Time;

pub use interface::*;

/// Number of a process's connection to the daemon.
pub type Session = u32;

/// Ids, ports and connections of all processes of a host.
pub struct RdmaCm {}

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
        /// The id gives up then.
        deadline: Time,
    },
    /// The answer is not wanted any more.
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
    /// Whether a gateway is on the way: the hop limit of what stays in the subnet is the same 64, as Linux has it.
    pub gateway: bool,
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
        let _ = random;
        todo!()
    }

    /// The devices as they are now. What was bound to one that is missing has its [`EventKind::DeviceRemoval`].
    pub fn set_devices(&mut self, now: Time, devices: &[DeviceInfo]) {
        let _ = (now, devices);
        todo!()
    }

    /// A process has come. `privileged` may bind ports below 1024.
    pub fn open(&mut self, session: Session, privileged: bool) {
        let _ = (session, privileged);
        todo!()
    }

    /// A process is gone: its ids are destroyed, its connections closed.
    pub fn close(&mut self, now: Time, session: Session) {
        let _ = (now, session);
        todo!()
    }

    /// Does what a process asks.
    ///
    /// # Errors
    /// The errno that the kernel gives.
    pub fn command(&mut self, now: Time, session: Session, command: Command) -> Result<Answer, Errno> {
        let _ = (now, session, command);
        todo!()
    }

    /// Takes an id over from an earlier daemon. False if it can not go on: the port is taken, the device is not there, or
    /// the bytes make no sense.
    pub fn restore(&mut self, now: Time, session: Session, keepsake: &Keepsake) -> bool {
        let _ = (now, session, keepsake);
        todo!()
    }

    /// Takes a MAD.
    pub fn receive(&mut self, now: Time, arrival: &Arrival<'_>) {
        let _ = (now, arrival);
        todo!()
    }

    /// Takes the answer to [`Output::Resolve`].
    pub fn resolved(&mut self, now: Time, token: u64, result: Result<Resolution, Errno>) {
        let _ = (now, token, result);
        todo!()
    }

    /// Does what is due.
    pub fn timeout(&mut self, now: Time) {
        let _ = now;
        todo!()
    }

    /// When [`RdmaCm::timeout`] is to be called next.
    pub fn deadline(&self) -> Option<Time> {
        todo!()
    }

    /// The next thing to do; to be called until it gives `None` after each of the other calls.
    pub fn poll(&mut self) -> Option<Output> {
        todo!()
    }

    /// All ids.
    pub fn status(&self) -> Vec<IdStatus> {
        todo!()
    }
}
