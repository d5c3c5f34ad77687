//! The XDP program of an interface and its maps: which packets go to which seat, which are dropped, which the kernel gets.

use std::io;
use std::net::IpAddr;
use std::os::fd::{BorrowedFd, OwnedFd};

/// How the program is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attach {
    /// By the driver.
    Driver,
    /// By the kernel, for every driver (SKB mode).
    Generic,
}

/// What becomes of packets for a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SlotUse {
    /// Nobody has it: they are dropped and counted.
    Nobody,
    /// It receives by UDP: the kernel gets them.
    Kernel,
    /// It receives by the sockets of [`Steering::set_socket`].
    Seat,
}

/// Packets that the program dropped, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Drops {
    /// For a slot that nobody has.
    pub unowned: u64,
    /// Too short for a RoCE packet, or of lengths that disagree.
    pub length: u64,
    /// For a seat that has no socket on the queue by which they came, or whose ring was full.
    pub no_socket: u64,
}

/// The program on an interface, and its maps.
pub struct Steering {}

impl Steering {
    /// Loads the program and attaches it. It passes everything on until it is told of slots and addresses.
    ///
    /// # Errors
    /// EPERM without privilege; EBUSY or EEXIST where another program is attached; EOPNOTSUPP where this kind of attachment can't be had.
    pub fn attach(_ifindex: u32, _queues: u16, _attach: Attach) -> io::Result<Self> {
        todo!()
    }

    /// Goes on with that of an earlier daemon: descriptors in the order of [`Steering::fds`].
    pub fn inherit(_fds: Vec<OwnedFd>) -> io::Result<Self> {
        todo!()
    }

    /// What a successor needs.
    pub fn fds(&self) -> Vec<BorrowedFd<'_>> {
        todo!()
    }

    /// Number of [`Steering::fds`].
    pub const FDS: usize = 5;

    /// Says what becomes of packets for a slot.
    pub fn set_slot(&self, _slot: u8, _used: SlotUse) -> io::Result<()> {
        todo!()
    }

    /// Sets the socket that gets packets for a slot that come by a queue, or none.
    pub fn set_socket(&self, _queue: u16, _slot: u8, _socket: Option<BorrowedFd<'_>>) -> io::Result<()> {
        todo!()
    }

    /// Sets the addresses of the device: packets to others are the kernel's.
    pub fn set_addresses(&mut self, _addresses: &[IpAddr]) -> io::Result<()> {
        todo!()
    }

    /// What was dropped so far.
    pub fn drops(&self) -> io::Result<Drops> {
        todo!()
    }
}
