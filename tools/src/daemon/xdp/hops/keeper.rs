//! What is in the tables of next hops, and when to look at it again. Without I/O: routes and neighbours are [`Ways`].

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use ferroce_engine::link::xdp::hops::{HOPS, Hop};
use tracing::debug;

use super::HasHops;
use crate::netlink::route::{Kind, Neighbour, Query, Route};
use crate::netlink::{Interface, Interfaces};

/// Time between looks at an entry: well below that after which the kernel asks a neighbour again (30 s).
const LOOK: Duration = Duration::from_secs(15);
/// An entry that nobody used for so long is removed.
const UNUSED: Duration = Duration::from_secs(5 * 60);
/// Routes change in bursts: time until all ways are looked up again ...
const SETTLE: Duration = Duration::from_millis(20);
/// ... and the rest after that for each of them, so that a host whose routes change all the time has a daemon left.
const REST: Duration = Duration::from_millis(1);
/// Ways that are looked up before others have their turn.
const SLICE: usize = 32;
/// Ways that are kept: more make the table slow to search.
const LIMIT: usize = HOPS * 3 / 4;
/// Own addresses for which a way is looked up.
const MAX_SOURCES: usize = 16;
/// What nobody asked for: entries of an earlier daemon.
const NOBODY: u32 = u32::MAX;

/// Routes and neighbours, as the kernel has them.
pub trait Ways {
    /// The route of a packet.
    fn route(&mut self, query: &Query) -> io::Result<Route>;
    /// What is known of a neighbour.
    fn neighbour(&mut self, ifindex: u32, ip: IpAddr) -> io::Result<Neighbour>;
    /// Has the kernel ask a neighbour that is unknown or stale.
    fn probe(&mut self, ifindex: u32, ip: IpAddr);
}

/// The tables of all ports.
pub struct Keeper {
    ports: BTreeMap<u32, Port>,
    interfaces: Interfaces,
    /// When to look at each entry again.
    looks: BTreeSet<(Instant, u32, IpAddr)>,
    /// When to begin to look at all entries again.
    sweep: Option<Instant>,
    /// What is left to look at of the last such sweep, and when it was begun.
    pending: VecDeque<(u32, IpAddr)>,
    begun: Option<Instant>,
    /// No sweep begins before.
    rest: Option<Instant>,
}

/// One table.
struct Port {
    table: Box<dyn HasHops>,
    entries: BTreeMap<IpAddr, Entry>,
}

/// A way that is kept.
struct Entry {
    /// Who asked for it first.
    asker: u32,
    /// When it was asked for, or found used.
    last_used: Instant,
    /// When it is looked at again: its place in [`Keeper::looks`].
    look: Instant,
    /// The neighbour, if the way leads out of the port's interface.
    next_hop: Option<IpAddr>,
}

/// A way, as it is now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Way {
    next_hop: Option<IpAddr>,
    hop: Hop,
    /// The kernel is to ask the neighbour.
    probe: bool,
}

impl Keeper {
    /// One that has no tables.
    pub fn new() -> Self {
        Self {
            ports: BTreeMap::new(),
            interfaces: Interfaces::new(),
            looks: BTreeSet::new(),
            sweep: None,
            pending: VecDeque::new(),
            begun: None,
            rest: None,
        }
    }

    /// True if it has no tables.
    pub fn is_empty(&self) -> bool {
        self.ports.is_empty()
    }

    /// Takes over the present interfaces.
    pub fn follow(&mut self, interfaces: &Interfaces, now: Instant) {
        let changed = |ifindex: &u32| {
            let (old, new) = (self.interfaces.get(ifindex), interfaces.get(ifindex));
            old.map(Facts::of) != new.map(Facts::of)
        };
        if self.ports.keys().any(changed) {
            // At once: frames with a wrong address of ours, or out of an interface that is down, are lost.
            self.sweep = Some(now);
        }
        self.interfaces.clone_from(interfaces);
    }

    /// Keeps a table from now on.
    pub fn add(&mut self, ifindex: u32, table: Box<dyn HasHops>, now: Instant) {
        self.remove(ifindex);
        let mut entries = BTreeMap::new();
        for (dest, _) in table.hops().list() {
            self.looks.insert((now, ifindex, dest));
            let entry = Entry {
                asker: NOBODY,
                last_used: now,
                look: now,
                next_hop: None,
            };
            entries.insert(dest, entry);
        }
        self.ports.insert(ifindex, Port { table, entries });
    }

    /// Empties a table, and keeps it no longer.
    pub fn remove(&mut self, ifindex: u32) {
        if let Some(port) = self.ports.remove(&ifindex) {
            for (dest, entry) in port.entries {
                port.table.hops().remove(dest);
                self.looks.remove(&(entry.look, ifindex, dest));
            }
        }
    }

    /// Finds a way for a program, and writes it to the table.
    pub fn ask(
        &mut self,
        ways: &mut dyn Ways,
        ifindex: u32,
        source: IpAddr,
        dest: IpAddr,
        asker: u32,
        now: Instant,
    ) {
        let dest = dest.to_canonical();
        let has_source = self.interfaces.get(&ifindex).is_some_and(|interface| {
            let mut addresses = interface.addresses.iter();
            addresses.any(|address| address.ip == source.to_canonical())
        });
        if !has_source || dest.is_multicast() || dest.is_unspecified() {
            return;
        }
        let Some(port) = self.ports.get_mut(&ifindex) else {
            return;
        };
        let is_new = !port.entries.contains_key(&dest);
        if is_new && port.entries.len() >= LIMIT {
            let Some(given_up) = port.least_wanted(asker, now) else {
                debug!(ifindex, %dest, "all next hops are in use: the kernel sends");
                return;
            };
            self.forget(ifindex, given_up);
        }
        let Some(port) = self.ports.get_mut(&ifindex) else {
            return;
        };
        if is_new {
            let look = now + LOOK;
            let entry = Entry {
                asker,
                last_used: now,
                look,
                next_hop: None,
            };
            port.entries.insert(dest, entry);
            self.looks.insert((look, ifindex, dest));
        }
        self.look(ways, ifindex, dest);
    }

    /// News of a neighbour.
    pub fn told(&mut self, ifindex: u32, ip: IpAddr, state: Neighbour) {
        let Some(port) = self.ports.get(&ifindex) else {
            return;
        };
        let Some(source) = self.interfaces.get(&ifindex).and_then(usable_mac) else {
            return;
        };
        let concerned = port.entries.iter().filter(|(_, it)| it.next_hop == Some(ip));
        for (dest, _) in concerned {
            port.table.hops().set(*dest, hop_to(source, state));
        }
    }

    /// Routes may have changed.
    pub fn changed(&mut self, now: Instant) {
        let wanted = self.rest.map_or(now + SETTLE, |rest| rest.max(now + SETTLE));
        let wanted = self.sweep.map_or(wanted, |sweep| sweep.min(wanted));
        self.sweep = Some(wanted);
    }

    /// When there is something to do.
    pub fn deadline(&self) -> Option<Instant> {
        let look = self.looks.first().map(|(look, ..)| *look);
        let sweep = self.sweep.filter(|_| !self.ports.is_empty());
        [look, sweep, self.begun].into_iter().flatten().min()
    }

    /// Does what is to be done by now, or the next slice of it.
    pub fn expire(&mut self, ways: &mut dyn Ways, now: Instant) {
        if self.sweep.is_some_and(|sweep| sweep <= now) {
            self.sweep = None;
            let all = self
                .ports
                .iter()
                .flat_map(|(ifindex, port)| port.entries.keys().map(|dest| (*ifindex, *dest)));
            self.pending = all.collect();
            self.rest = Some(now + REST * self.pending.len() as u32);
            self.begun = Some(now);
        }
        for _ in 0..SLICE {
            let Some((ifindex, dest)) = self.pending.pop_front() else {
                self.begun = None;
                break;
            };
            self.look(ways, ifindex, dest);
        }
        for _ in 0..SLICE {
            match self.looks.first() {
                Some(&(look, ifindex, dest)) if look <= now => self.look_again(ways, ifindex, dest, now),
                _ => break,
            }
        }
    }

    /// The regular look at an entry, whose time has come: is it still used?
    fn look_again(&mut self, ways: &mut dyn Ways, ifindex: u32, dest: IpAddr, now: Instant) {
        let Some(port) = self.ports.get_mut(&ifindex) else {
            return;
        };
        let Some(entry) = port.entries.get_mut(&dest) else {
            return;
        };
        self.looks.remove(&(entry.look, ifindex, dest));
        let is_used = port.table.hops().take_used(dest);
        if is_used {
            entry.last_used = now;
        }
        entry.look = now + LOOK;
        self.looks.insert((entry.look, ifindex, dest));
        if now.saturating_duration_since(entry.last_used) >= UNUSED {
            self.forget(ifindex, dest);
        } else if let Some(way) = self.look(ways, ifindex, dest)
            && let (true, true, Some(next_hop)) = (is_used, way.probe, way.next_hop)
        {
            ways.probe(ifindex, next_hop);
        }
    }

    /// Finds the way of an entry anew, and writes it to the table. New ones get their neighbour asked for.
    fn look(&mut self, ways: &mut dyn Ways, ifindex: u32, dest: IpAddr) -> Option<Way> {
        let interface = self.interfaces.get(&ifindex);
        let port = self.ports.get_mut(&ifindex)?;
        let entry = port.entries.get_mut(&dest)?;
        let way = find_way(ways, ifindex, interface, dest);
        if way.next_hop != entry.next_hop {
            entry.next_hop = way.next_hop;
            if let (true, Some(next_hop)) = (way.probe, way.next_hop) {
                ways.probe(ifindex, next_hop);
            }
        }
        if !port.table.hops().set(dest, way.hop) {
            debug!(ifindex, %dest, "no room for the next hop: the kernel sends");
            self.forget(ifindex, dest);
            return None;
        }
        Some(way)
    }

    fn forget(&mut self, ifindex: u32, dest: IpAddr) {
        let Some(port) = self.ports.get_mut(&ifindex) else {
            return;
        };
        port.table.hops().remove(dest);
        if let Some(entry) = port.entries.remove(&dest) {
            self.looks.remove(&(entry.look, ifindex, dest));
        }
    }
}

impl Port {
    /// The entry to give up for a new one: of the program that has most, the one that was not used for the longest time.
    /// None if that program has no more than who asks now, and uses them all.
    fn least_wanted(&mut self, asker: u32, now: Instant) -> Option<IpAddr> {
        for (dest, entry) in &mut self.entries {
            if self.table.hops().take_used(*dest) {
                entry.last_used = now;
            }
        }
        let mut counts: BTreeMap<u32, usize> = BTreeMap::new();
        for entry in self.entries.values() {
            *counts.entry(entry.asker).or_default() += 1;
        }
        let own = counts.get(&asker).copied().unwrap_or(0);
        let (&biggest, &most) = counts.iter().max_by_key(|(_, count)| **count)?;
        let of_biggest = self.entries.iter().filter(|(_, entry)| entry.asker == biggest);
        let (dest, entry) = of_biggest.min_by_key(|(_, entry)| entry.last_used)?;
        (most > own + 1 || entry.last_used < now).then_some(*dest)
    }
}

/// What of an interface matters for frames.
#[derive(PartialEq, Eq)]
struct Facts<'a> {
    mac: Option<[u8; 6]>,
    addresses: &'a [crate::netlink::Address],
}

impl<'a> Facts<'a> {
    fn of(interface: &'a Interface) -> Self {
        Self {
            mac: usable_mac(interface),
            addresses: &interface.addresses,
        }
    }
}

/// The MAC address, if frames can be sent by the interface now.
fn usable_mac(interface: &Interface) -> Option<[u8; 6]> {
    let usable = interface.up && interface.carrier && interface.ethernet && !interface.noarp && !interface.lo;
    (usable && is_of_one(interface.mac)).then_some(interface.mac)
}

/// True if the MAC address can be that of one host.
fn is_of_one(mac: [u8; 6]) -> bool {
    mac[0] & 1 == 0 && mac != [0; 6]
}

fn hop_to(source: [u8; 6], neighbour: Neighbour) -> Hop {
    match neighbour {
        Neighbour::Known { mac: Some(dest), .. } if is_of_one(dest) => Hop::Frame { source, dest },
        _ => Hop::Kernel,
    }
}

/// The way to an address as it is now. What does not surely leave by this interface the kernel sends, which can do all:
/// packets to the host itself, by other interfaces, to groups, through tunnels, to neighbours that are not known, and to
/// where it refuses to send.
fn find_way(ways: &mut dyn Ways, ifindex: u32, interface: Option<&Interface>, dest: IpAddr) -> Way {
    let kernel = Way {
        next_hop: None,
        hop: Hop::Kernel,
        probe: false,
    };
    let Some((interface, source)) = interface.and_then(|it| Some((it, usable_mac(it)?))) else {
        return kernel;
    };
    let Some(next_hop) = next_hop(ways, ifindex, interface, dest) else {
        return kernel;
    };
    let neighbour = ways.neighbour(ifindex, next_hop).unwrap_or_else(|error| {
        debug!(%error, %next_hop, "the kernel does not tell of the neighbour");
        Neighbour::Unknown
    });
    Way {
        next_hop: Some(next_hop),
        hop: hop_to(source, neighbour),
        probe: !matches!(neighbour, Neighbour::Known { stale: false, .. }),
    }
}

/// The neighbour to which packets go from every address of the interface's that they can have. The table does not tell
/// these apart: where routes do (by rules), the kernel is to send.
fn next_hop(ways: &mut dyn Ways, ifindex: u32, interface: &Interface, dest: IpAddr) -> Option<IpAddr> {
    let is_link_local = |ip: IpAddr| matches!(ip, IpAddr::V6(ip) if ip.is_unicast_link_local());
    let sources = interface.addresses.iter().filter(|address| {
        address.usable
            && address.ip.is_ipv4() == dest.is_ipv4()
            && (is_link_local(dest) || !is_link_local(address.ip))
    });
    let mut found = None;
    for source in sources.take(MAX_SOURCES) {
        let query = Query {
            source: Some(source.ip),
            dest,
            // As of sockets that are bound to their address.
            ifindex: if is_link_local(dest) { ifindex } else { 0 },
            type_of_service: 0,
        };
        let route = match ways.route(&query) {
            Ok(route) => route,
            Err(error) => {
                debug!(?query, %error, "no route");
                return None;
            }
        };
        if route.kind != Kind::Unicast || route.ifindex != ifindex || route.encapsulates {
            return None;
        }
        let next_hop = route.gateway.unwrap_or(dest);
        if found.is_some_and(|found| found != next_hop) {
            return None;
        }
        found = Some(next_hop);
    }
    found
}
