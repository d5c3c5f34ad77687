//! What the link needs of a seat, so that tests can have one of plain memory.
#![deny(unsafe_code)]

use std::io;
use std::net::IpAddr;
use std::os::fd::RawFd;

use super::hops::{Hop, Known};
use super::seat::{Frames, Seat};

/// A [`Seat`], or what stands for one; its methods are those of the seat.
pub trait Place: Send {
    /// How a next hop is known.
    type Known: Copy + Send;
    /// What was reserved for one packet.
    type Frames;
    fn receive(&mut self, sink: &mut dyn FnMut(&[u8])) -> usize;
    fn reserve(&mut self, len: usize) -> Option<Self::Frames>;
    fn bytes(&mut self, frames: &Self::Frames) -> &mut [u8];
    fn submit(&mut self, frames: Self::Frames);
    fn give_back(&mut self, frames: Self::Frames);
    fn kick(&mut self) -> io::Result<bool>;
    fn receive_fds(&self, fds: &mut Vec<RawFd>);
    fn transmit_fd(&self) -> RawFd;
    fn find(&self, dest: IpAddr) -> Option<(Hop, Self::Known)>;
    fn is_current(&self, known: &Self::Known) -> bool;
    fn expect_bursts(&mut self);
    fn counters(&self, out: &mut dyn FnMut(&'static str, u64));
}

impl Place for Seat {
    type Known = Known;
    type Frames = Frames;
    #[inline]
    fn receive(&mut self, sink: &mut dyn FnMut(&[u8])) -> usize {
        Seat::receive(self, sink)
    }
    #[inline]
    fn reserve(&mut self, len: usize) -> Option<Frames> {
        Seat::reserve(self, len)
    }
    #[inline]
    fn bytes(&mut self, frames: &Frames) -> &mut [u8] {
        Seat::bytes(self, frames)
    }
    #[inline]
    fn submit(&mut self, frames: Frames) {
        Seat::submit(self, frames);
    }
    fn give_back(&mut self, frames: Frames) {
        Seat::give_back(self, frames);
    }
    #[inline]
    fn kick(&mut self) -> io::Result<bool> {
        Seat::kick(self)
    }
    fn receive_fds(&self, fds: &mut Vec<RawFd>) {
        fds.extend(Seat::receive_fds(self));
    }
    fn transmit_fd(&self) -> RawFd {
        Seat::transmit_fd(self)
    }
    fn find(&self, dest: IpAddr) -> Option<(Hop, Known)> {
        self.hops().find(dest).map(|known| (known.hop, known))
    }
    #[inline]
    fn is_current(&self, known: &Known) -> bool {
        self.hops().is_current(known)
    }
    fn expect_bursts(&mut self) {
        Seat::expect_bursts(self);
    }
    fn counters(&self, out: &mut dyn FnMut(&'static str, u64)) {
        Seat::counters(self, out);
    }
}
