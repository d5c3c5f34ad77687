//! Next hops: where frames to an address go. The daemon finds them and writes them to a table in the port's memory;
//! programs read it, and ask the daemon for what is not there.

use std::net::IpAddr;

/// Entries of the table.
pub const HOPS: usize = 1024;

/// Where frames to an address go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hop {
    /// Out of this interface, between these MAC addresses.
    Frame {
        /// Our own.
        source: [u8; 6],
        /// The next hop's.
        dest: [u8; 6],
    },
    /// The kernel sends them: to this host itself, by another interface, or to a neighbour that is not known (yet).
    Kernel,
}

/// The table, as it lies in the memory that all processes of a port share.
pub struct HopTable {}

/// A hop as it was when it was looked up, and how to see that it still is.
#[derive(Clone, Copy, Debug)]
pub struct Known {
    /// What it is.
    pub hop: Hop,
    /// The entry, and its version.
    entry: u32,
    version: u32,
}

impl HopTable {
    /// What is known of the way to `dest`. Tells the daemon, by a mark in the entry, that it is in use.
    pub fn find(&self, _dest: IpAddr) -> Option<Known> {
        todo!()
    }

    /// Whether nothing has changed since.
    pub fn is_current(&self, _known: &Known) -> bool {
        todo!()
    }

    /// Writes an entry (the daemon). False if the table is full.
    pub fn set(&self, _dest: IpAddr, _hop: Hop) -> bool {
        todo!()
    }

    /// Takes an entry away (the daemon).
    pub fn remove(&self, _dest: IpAddr) {
        todo!()
    }

    /// Whether a program has used the entry since this was asked last (the daemon).
    pub fn take_used(&self, _dest: IpAddr) -> bool {
        todo!()
    }
}
