//! A port: the memory and the sockets of an interface in XDP mode, as the daemon makes, leases and tidies them.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

use serde::{Deserialize, Serialize};

use super::Geometry;
use super::hops::HopTable;

/// Whether the driver is to read and write the frames itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Zerocopy {
    /// Where it can.
    #[default]
    Auto,
    /// Yes, or the port is not made.
    On,
    /// No: the kernel copies.
    Off,
}

/// What the kernel could do when a port was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Features {
    /// The driver reads and writes the frames itself.
    pub zerocopy: bool,
    /// Packets may take several frames (since Linux 6.6).
    pub multi_buffer: bool,
    /// The frames lie in huge pages.
    pub hugepages: bool,
}

/// A step that failed, when a port was made.
#[derive(Debug, thiserror::Error)]
#[error("{what}: {source}")]
pub struct PortError {
    /// What was tried.
    pub what: &'static str,
    /// What the kernel said.
    pub source: io::Error,
}

/// The memory and the sockets of an interface in XDP mode. Its descriptors can be shared with a successor.
pub struct Port {}

impl Port {
    /// Makes the memory files and the sockets of all seats, bound to the queues of an interface, and fills the fill rings.
    pub fn create(_ifindex: u32, _geometry: Geometry, _zerocopy: Zerocopy) -> Result<Port, PortError> {
        todo!()
    }

    /// Goes on with the port of an earlier daemon; `sockets` by queue, then by seat.
    pub fn inherit(
        _geometry: Geometry,
        _features: Features,
        _control: OwnedFd,
        _umem: OwnedFd,
        _sockets: Vec<Vec<OwnedFd>>,
    ) -> Result<Port, PortError> {
        todo!()
    }

    /// What it is made of.
    pub fn geometry(&self) -> Geometry {
        todo!()
    }

    /// What the kernel can do.
    pub fn features(&self) -> Features {
        todo!()
    }

    /// The memory file of what processes tell each other.
    pub fn control(&self) -> BorrowedFd<'_> {
        todo!()
    }

    /// The memory file of the frames.
    pub fn umem(&self) -> BorrowedFd<'_> {
        todo!()
    }

    /// The socket of a seat on a queue.
    pub fn socket(&self, _queue: u16, _seat: u16) -> BorrowedFd<'_> {
        todo!()
    }

    /// Takes back what a program had that is gone: no packet comes to its sockets any more (they are out of the map).
    /// Frames that it received go back to the fill ring; those that it was sending are free when they are sent.
    pub fn reclaim(&self, _seat: u16) {
        todo!()
    }

    /// The table of next hops.
    pub fn hops(&self) -> &HopTable {
        todo!()
    }
}
