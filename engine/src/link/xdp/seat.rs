//! A program's place at a port: its sockets, its frames to send, and the rings that it shares with the other programs.

use std::io;
use std::os::fd::{OwnedFd, RawFd};

use super::Geometry;
use super::hops::HopTable;

/// A program's place at a port.
pub struct Seat {}

/// Frames that were reserved to send one packet: one, or two that lie one behind the other.
#[derive(Debug)]
pub struct Frames {
    /// Number of the first.
    pub first: u32,
    /// Bytes of room.
    pub len: usize,
}

impl Seat {
    /// Takes the seat: `control` and `umem` are the port's memory files, `sockets` the seat's own, by queue.
    pub fn open(
        _geometry: Geometry,
        _seat: u16,
        _control: OwnedFd,
        _umem: OwnedFd,
        _sockets: Vec<OwnedFd>,
    ) -> io::Result<Seat> {
        todo!()
    }

    /// Hands every frame that has arrived to `sink`, whole, up to one batch, and gives its memory back to the kernel.
    /// Gives the number handed over.
    pub fn receive(&mut self, _sink: &mut dyn FnMut(&[u8])) -> usize {
        todo!()
    }

    /// Room for a frame of `len` bytes, if there is any; [`Seat::kick`] may make some.
    pub fn reserve(&mut self, _len: usize) -> Option<Frames> {
        todo!()
    }

    /// The room, to write to.
    pub fn bytes(&mut self, _frames: &Frames) -> &mut [u8] {
        todo!()
    }

    /// Queues the frame: [`Seat::kick`] hands it to the kernel.
    pub fn submit(&mut self, _frames: Frames) {
        todo!()
    }

    /// Does not send it.
    pub fn give_back(&mut self, _frames: Frames) {
        todo!()
    }

    /// Hands what is queued to the kernel; false if it did not take all now.
    pub fn kick(&mut self) -> io::Result<bool> {
        todo!()
    }

    /// Readable when frames have arrived.
    pub fn receive_fd(&self) -> RawFd {
        todo!()
    }

    /// Readable when the kernel may take what [`Seat::kick`] could not hand over.
    pub fn transmit_fd(&self) -> RawFd {
        todo!()
    }

    /// The port's table of next hops.
    pub fn hops(&self) -> &HopTable {
        todo!()
    }

    /// Counters by name, added to `out`.
    pub fn counters(&self, _out: &mut dyn FnMut(&'static str, u64)) {
        todo!()
    }
}
