//! Keeps the table of next hops of every port true: routes and neighbours, as rtnetlink tells them.
//!
//! A program that finds no way in the table leaves its packets to the kernel and asks. [`Keeper`] knows what was asked
//! for and what to do when; here are the connections to rtnetlink. Nothing waits: the kernel answers questions at once,
//! news wake the daemon's loop, and much work is done in slices.

mod keeper;
#[cfg(test)]
mod tests;

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Instant;

use ferroce_engine::link::xdp::hops::HopTable;
use ferroce_engine::link::xdp::port::Port;
use tracing::{debug, warn};

use crate::netlink::Interfaces;
use crate::netlink::route::{Neighbour, News, Query, Route, Routes, WayWatch};
use keeper::{Keeper, Ways};

/// Who has a table of next hops.
pub trait HasHops {
    /// The table.
    fn hops(&self) -> &HopTable;
}

impl HasHops for Arc<Port> {
    fn hops(&self) -> &HopTable {
        Port::hops(self)
    }
}

/// The next hops of all ports.
pub struct Hops {
    keeper: Keeper,
    kernel: Kernel,
    watch: WayWatch,
}

impl Hops {
    /// Of no port yet.
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            keeper: Keeper::new(),
            kernel: Kernel(Routes::new()?),
            watch: WayWatch::of_neighbours_and_routes()?,
        })
    }

    /// Takes over the present interfaces; to be told whenever they change.
    pub fn follow(&mut self, interfaces: &Interfaces) {
        self.keeper.follow(interfaces, Instant::now());
    }

    /// Keeps the table of an interface's port true from now on. What an earlier daemon left in it is looked up again.
    pub fn add(&mut self, ifindex: u32, port: impl HasHops + 'static) {
        // Before the first look: what happens after it is told.
        if let Err(error) = self.watch.want(true) {
            warn!(%error, "neighbours and routes can't be followed: changes take some seconds");
        }
        self.keeper.add(ifindex, Box::new(port), Instant::now());
    }

    /// Empties the table of an interface's port, and cares for it no longer.
    pub fn remove(&mut self, ifindex: u32) {
        self.keeper.remove(ifindex);
        if self.keeper.is_empty()
            && let Err(error) = self.watch.want(false)
        {
            warn!(%error, "neighbours and routes are followed on");
        }
    }

    /// Finds the way from an address of the interface's to `dest` for a program, by the id that it has here, and writes it
    /// to the table.
    pub fn ask(&mut self, ifindex: u32, source: IpAddr, dest: IpAddr, asker: u32) {
        let now = Instant::now();
        self.keeper
            .ask(&mut self.kernel, ifindex, source, dest, asker, now);
    }

    /// Takes the news that [`AsFd`] has told of.
    pub fn news(&mut self) -> io::Result<()> {
        let now = Instant::now();
        let Self { keeper, watch, .. } = self;
        let whole = watch.drain(|news| match news {
            News::Neighbour { ifindex, ip, state } => keeper.told(ifindex, ip, state),
            News::Routes => keeper.changed(now),
        })?;
        if !whole {
            debug!("news of neighbours or routes were lost");
            keeper.changed(now);
        }
        Ok(())
    }

    /// When [`Hops::expire`] has something to do.
    pub fn deadline(&self) -> Option<Instant> {
        self.keeper.deadline()
    }

    /// Does what is to be done by now, or the next slice of it.
    pub fn expire(&mut self, now: Instant) {
        self.keeper.expire(&mut self.kernel, now);
    }
}

impl AsFd for Hops {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.watch.as_fd()
    }
}

/// Routes and neighbours of this network namespace.
struct Kernel(Routes);

impl Ways for Kernel {
    fn route(&mut self, query: &Query) -> io::Result<Route> {
        self.0.find(query)
    }

    fn neighbour(&mut self, ifindex: u32, ip: IpAddr) -> io::Result<Neighbour> {
        self.0.neighbour(ifindex, ip)
    }

    fn probe(&mut self, ifindex: u32, ip: IpAddr) {
        if let Err(error) = self.0.probe(ifindex, ip) {
            debug!(%error, ifindex, %ip, "neighbour can't be asked for");
        }
    }
}
