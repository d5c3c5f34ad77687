//! Sending sockets: one for each source, destination address and destination process, in a bounded pool.
//!
//! The socket's port tells flows apart on the way. Packets to two processes must not share one: the receiving kernel
//! may merge packets of one flow, and steers them by the first.

use std::collections::hash_map::Entry;
use std::io;
use std::net::IpAddr;
use std::os::fd::OwnedFd;

use ferroce_wire::udp_port;
use rustc_hash::FxHashMap;

use super::neighbour::{Neighbours, Queue};
use super::socket::{self, Address};
use super::tunnel;
use crate::link::Path;

/// Sockets kept: as many as a host has slots, so that one that talks to every process of a peer does not make and close
/// a socket per packet, and few enough for the usual limit of 1024 descriptors.
const MAX_FLOWS: usize = 256;
/// Ports tried until one is free.
const PORTS_TRIED: u16 = 256;
const PORT_MASK: u16 = 0x3fff;

/// What tells flows apart.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Key {
    source: IpAddr,
    dest: IpAddr,
    ifindex: u32,
    dest_slot: u8,
}

/// A sending socket, and where it sends.
pub(super) struct Flow {
    pub socket: OwnedFd,
    pub source: IpAddr,
    pub dest: IpAddr,
    pub port: u16,
    /// Packets leave through the [`tunnel`].
    pub tunnelled: bool,
    /// The destination as the kernel takes it.
    pub address: (Address, u32),
    /// The receive queue at the other end, if it is on this host.
    pub queue: Option<Queue>,
    /// The socket had no room for the last message, which waits.
    pub full: bool,
    /// Traffic class and hop limit that the socket gives to packets.
    pub default_header: (u8, u8),
    key: Key,
    last_use: u64,
}

impl Flow {
    /// Bytes in front of each packet.
    pub fn front(&self) -> usize {
        if self.tunnelled { tunnel::FRONT } else { 0 }
    }
}

/// The pool.
pub(super) struct Flows {
    /// All paths are of the loopback interface.
    loopback: bool,
    neighbours: Neighbours,
    flows: Vec<Flow>,
    index: FxHashMap<Key, usize>,
    /// The flow of the packet before, usually that of the next.
    last: Option<(Key, usize)>,
    uses: u64,
    next_port: u16,
}

impl Flows {
    pub fn new(loopback: bool, neighbours: Neighbours) -> Flows {
        Flows {
            loopback,
            neighbours,
            flows: Vec::new(),
            index: FxHashMap::default(),
            last: None,
            uses: 0,
            // Processes on one host try different ports first.
            next_port: std::process::id() as u16 ^ (std::process::id() >> 14) as u16,
        }
    }

    pub fn get(&self, index: usize) -> &Flow {
        &self.flows[index]
    }

    pub fn get_mut(&mut self, index: usize) -> &mut Flow {
        &mut self.flows[index]
    }

    /// The flow to a process at the end of `path`. `None` if the pool is full and every flow is `busy`.
    pub fn find(
        &mut self,
        path: &Path,
        dest_qpn: u32,
        busy: impl Fn(usize) -> bool,
    ) -> io::Result<Option<usize>> {
        let dest_slot = (dest_qpn >> 16) as u8;
        let key = Key {
            source: path.source,
            dest: path.dest,
            ifindex: path.ifindex,
            dest_slot,
        };
        if let Some((last, index)) = self.last
            && last == key
        {
            return Ok(Some(index));
        }
        self.uses += 1;
        let index = match self.index.entry(key) {
            Entry::Occupied(entry) => *entry.get(),
            Entry::Vacant(_) => match self.open(key, path, busy)? {
                Some(index) => index,
                None => return Ok(None),
            },
        };
        self.flows[index].last_use = self.uses;
        self.last = Some((key, index));
        Ok(Some(index))
    }

    /// Forgets a flow whose socket is of no use any more: its source address went.
    pub fn forget(&mut self, index: usize) {
        self.index.remove(&self.flows[index].key);
        self.flows[index].last_use = 0;
        self.last = None;
    }

    /// Makes the flow `key`, in the place of an idle one that was not used for longest if the pool is full.
    fn open(&mut self, key: Key, path: &Path, busy: impl Fn(usize) -> bool) -> io::Result<Option<usize>> {
        let place = if self.flows.len() < MAX_FLOWS {
            self.flows.len()
        } else {
            let idle = (0..self.flows.len()).filter(|&index| !busy(index));
            match idle.min_by_key(|&index| self.flows[index].last_use) {
                Some(oldest) => oldest,
                None => return Ok(None),
            }
        };
        let tunnelled = tunnel::takes(self.loopback, path.dest);
        let outer = if tunnelled { tunnel::carrier(path) } else { *path };
        let (socket, port) = self.bind(&outer)?;
        let flow = Flow {
            socket,
            source: path.source,
            dest: path.dest,
            port,
            tunnelled,
            address: Address::new(outer.dest, socket::ROCE_PORT, path.ifindex),
            queue: Queue::at_end_of(path, key.dest_slot, &self.neighbours),
            full: false,
            default_header: (path.traffic_class, path.hop_limit_on_wire()),
            key,
            last_use: 0,
        };
        if place < self.flows.len() {
            let old = std::mem::replace(&mut self.flows[place], flow);
            // A flow that was forgotten may have come back in another place.
            if self.index.get(&old.key) == Some(&place) {
                self.index.remove(&old.key);
            }
        } else {
            self.flows.push(flow);
        }
        self.index.insert(key, place);
        Ok(Some(place))
    }

    /// A socket on a free port: that of the flow label if one is given, else one after the other.
    fn bind(&mut self, path: &Path) -> io::Result<(OwnedFd, u16)> {
        let mut result = Err(io::ErrorKind::AddrInUse.into());
        for attempt in 0..PORTS_TRIED {
            let port = if attempt == 0 && path.flow_label != 0 {
                udp_port::source_port(path.flow_label)
            } else {
                self.next_port = self.next_port.wrapping_add(1);
                udp_port::MIN_SOURCE_PORT | (self.next_port & PORT_MASK)
            };
            result = socket::sender(path, port).map(|socket| (socket, port));
            match &result {
                Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
                _ => break,
            }
        }
        result
    }
}
