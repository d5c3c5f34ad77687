//! Next hops: where frames to an address go. The daemon finds them and writes them to a table in the port's memory;
//! programs read it, and ask the daemon for what is not there.
//!
//! Open addressing with linear probing over a bounded stretch. Every entry is a seqlock with the daemon as its only
//! writer: a version that is odd while it writes. What a daemon that was killed left odd reads as nothing.
#![deny(unsafe_code)]

use std::net::{IpAddr, Ipv6Addr};
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicU32, AtomicU64, fence};

/// Entries of the table.
pub const HOPS: usize = 1024;
/// Entries behind the place of an address in which it may lie.
const PROBES: usize = 64;
/// How often a reader looks again at an entry that is being written.
const TRIES: usize = 64;

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

/// The table, as it lies in the memory that all processes of a port share. All zeros is an empty one.
#[repr(C)]
pub struct HopTable {
    entries: [Entry; HOPS],
}

/// One entry, in a cache line of its own.
#[repr(C, align(64))]
#[derive(Default)]
struct Entry {
    /// Odd while it is written.
    version: AtomicU32,
    /// Set by programs that use it.
    used: AtomicU32,
    address: [AtomicU64; 2],
    /// The kind and a MAC address: kind in the upper 16 bits.
    source: AtomicU64,
    dest: AtomicU64,
}

/// Kinds of entries. Behind one that was never used no probe need look.
mod kind {
    pub const NEVER: u64 = 0;
    pub const REMOVED: u64 = 1;
    pub const FRAME: u64 = 2;
    pub const KERNEL: u64 = 3;
}

/// An entry's contents.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
struct Content {
    address: [u64; 2],
    source: u64,
    dest: u64,
}

/// A hop as it was when it was looked up, and how to see that it still is.
#[derive(Clone, Copy, Debug)]
pub struct Known {
    /// What it is.
    pub hop: Hop,
    /// The entry, and its version.
    entry: u32,
    version: u32,
}

impl Content {
    /// An entry that stands for nothing.
    fn none(kind: u64) -> Content {
        Content {
            source: kind << 48,
            ..Content::default()
        }
    }

    fn new(address: [u64; 2], hop: Hop) -> Content {
        let (kind, source, dest) = match hop {
            Hop::Frame { source, dest } => (kind::FRAME, source, dest),
            Hop::Kernel => (kind::KERNEL, [0; 6], [0; 6]),
        };
        Content {
            address,
            source: kind << 48 | pack(source),
            dest: pack(dest),
        }
    }

    fn kind(&self) -> u64 {
        self.source >> 48
    }

    fn hop(&self) -> Option<Hop> {
        match self.kind() {
            kind::FRAME => Some(Hop::Frame {
                source: unpack(self.source),
                dest: unpack(self.dest),
            }),
            kind::KERNEL => Some(Hop::Kernel),
            _ => None,
        }
    }

    /// Whether it tells the way to an address.
    fn is_of(&self, address: [u64; 2]) -> bool {
        matches!(self.kind(), kind::FRAME | kind::KERNEL) && self.address == address
    }
}

impl Entry {
    /// Contents and version, if they can be had: not while it is written.
    fn read(&self) -> Option<(Content, u32)> {
        for _ in 0..TRIES {
            let version = self.version.load(Acquire);
            let content = self.peek();
            fence(Acquire);
            if version & 1 == 0 && self.version.load(Relaxed) == version {
                return Some((content, version));
            }
            std::hint::spin_loop();
        }
        None
    }

    /// The contents, as only its writer may see them.
    fn peek(&self) -> Content {
        Content {
            address: [self.address[0].load(Relaxed), self.address[1].load(Relaxed)],
            source: self.source.load(Relaxed),
            dest: self.dest.load(Relaxed),
        }
    }

    fn write(&self, content: Content) {
        let version = self.version.load(Relaxed) | 1;
        self.version.store(version, Relaxed);
        fence(Release);
        self.address[0].store(content.address[0], Relaxed);
        self.address[1].store(content.address[1], Relaxed);
        self.source.store(content.source, Relaxed);
        self.dest.store(content.dest, Relaxed);
        self.version.store(version.wrapping_add(1), Release);
    }

    /// Says that a program uses it. Written only when it is not said already, so that readers share the cache line.
    fn mark(&self) {
        if self.used.load(Relaxed) == 0 {
            self.used.store(1, Relaxed);
        }
    }
}

impl HopTable {
    /// A table in memory of one's own.
    pub fn new() -> Box<HopTable> {
        Box::new(HopTable {
            entries: std::array::from_fn(|_| Entry::default()),
        })
    }

    /// What is known of the way to `dest`. Tells the daemon, by a mark in the entry, that it is in use.
    pub fn find(&self, dest: IpAddr) -> Option<Known> {
        let address = key(dest);
        for at in probes(address) {
            let entry = &self.entries[at];
            // One that is being written may be the one: it is then asked for again.
            let Some((content, version)) = entry.read() else {
                continue;
            };
            if content.kind() == kind::NEVER {
                return None;
            }
            if content.is_of(address) {
                entry.mark();
                let (hop, entry) = (content.hop()?, at as u32);
                return Some(Known { hop, entry, version });
            }
        }
        None
    }

    /// Whether nothing has changed since. Tells the daemon that it is in use, as [`HopTable::find`] does.
    #[inline]
    pub fn is_current(&self, known: &Known) -> bool {
        let entry = &self.entries[known.entry as usize % HOPS];
        let current = entry.version.load(Acquire) == known.version;
        if current {
            entry.mark();
        }
        current
    }

    /// Writes an entry (the daemon). False if there is no room where it would have to be.
    pub fn set(&self, dest: IpAddr, hop: Hop) -> bool {
        let address = key(dest);
        let content = Content::new(address, hop);
        if let Some(at) = self.position(address) {
            if self.entries[at].peek() != content {
                self.entries[at].write(content);
            }
            return true;
        }
        let free = |&at: &usize| self.entries[at].peek().hop().is_none();
        let Some(at) = probes(address).find(free) else {
            return false;
        };
        self.entries[at].used.store(0, Relaxed);
        self.entries[at].write(content);
        true
    }

    /// Takes an entry away (the daemon).
    pub fn remove(&self, dest: IpAddr) {
        let Some(mut at) = self.position(key(dest)) else {
            return;
        };
        self.entries[at].write(Content::none(kind::REMOVED));
        // Probes may end here where they would end behind it anyway.
        for _ in 0..HOPS {
            let next = self.entries[(at + 1) % HOPS].peek().kind();
            if self.entries[at].peek().kind() != kind::REMOVED || next != kind::NEVER {
                break;
            }
            self.entries[at].write(Content::none(kind::NEVER));
            at = (at + HOPS - 1) % HOPS;
        }
    }

    /// Whether a program has used the entry since this was asked last (the daemon).
    pub fn take_used(&self, dest: IpAddr) -> bool {
        self.position(key(dest))
            .is_some_and(|at| self.entries[at].used.swap(0, AcqRel) != 0)
    }

    /// The addresses in the table, and their hops (the daemon).
    pub fn list(&self) -> Vec<(IpAddr, Hop)> {
        let hop = |content: Content| Some((address(content.address), content.hop()?));
        self.entries
            .iter()
            .filter_map(|entry| hop(entry.peek()))
            .collect()
    }

    /// Takes away what a daemon had begun to write when it was killed (its successor).
    pub fn repair(&self) {
        for entry in &self.entries {
            if entry.version.load(Relaxed) & 1 != 0 {
                entry.write(Content::none(kind::REMOVED));
            }
        }
    }

    /// Where an address lies, for its only writer.
    fn position(&self, address: [u64; 2]) -> Option<usize> {
        probes(address)
            .take_while(|&at| self.entries[at].peek().kind() != kind::NEVER)
            .find(|&at| self.entries[at].peek().is_of(address))
    }
}

/// The entries in which an address may lie.
fn probes(address: [u64; 2]) -> impl Iterator<Item = usize> {
    let mixed = (address[0] ^ address[1].rotate_left(32)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mixed = (mixed ^ mixed >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let start = (mixed >> 40) as usize;
    (0..PROBES).map(move |step| (start + step) % HOPS)
}

/// An address as it lies in the table: IPv4 mapped.
fn key(dest: IpAddr) -> [u64; 2] {
    let bits = match dest {
        IpAddr::V4(address) => address.to_ipv6_mapped().to_bits(),
        IpAddr::V6(address) => address.to_bits(),
    };
    [(bits >> 64) as u64, bits as u64]
}

/// The address of a key.
fn address(key: [u64; 2]) -> IpAddr {
    let bits = u128::from(key[0]) << 64 | u128::from(key[1]);
    IpAddr::V6(Ipv6Addr::from_bits(bits)).to_canonical()
}

fn pack(mac: [u8; 6]) -> u64 {
    let [a, b, c, d, e, f] = mac;
    u64::from_be_bytes([0, 0, a, b, c, d, e, f])
}

fn unpack(value: u64) -> [u8; 6] {
    let [_, _, mac @ ..] = value.to_be_bytes();
    mac
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;
    use std::sync::atomic::AtomicBool;
    use std::thread;

    use super::*;

    fn frame(of: u8) -> Hop {
        Hop::Frame {
            source: [of; 6],
            dest: [of ^ 0xff; 6],
        }
    }

    fn host(of: u32) -> IpAddr {
        IpAddr::V4(Ipv4Addr::from_bits(0x0a00_0000 + of))
    }

    #[test]
    fn what_is_set_is_found_until_it_changes() {
        let table = HopTable::new();
        assert!(table.find(host(1)).is_none());
        assert!(table.set(host(1), frame(1)) && table.set("fe80::1".parse().unwrap(), Hop::Kernel));
        let known = table.find(host(1)).unwrap();
        assert_eq!(known.hop, frame(1));
        assert_eq!(table.find("fe80::1".parse().unwrap()).unwrap().hop, Hop::Kernel);
        assert!(table.set(host(1), frame(1)) && table.is_current(&known));
        assert!(table.set(host(1), frame(2)) && !table.is_current(&known));
        assert_eq!(table.find(host(1)).unwrap().hop, frame(2));
        assert_eq!(table.list().len(), 2);
        table.remove(host(1));
        assert!(table.find(host(1)).is_none());
        assert_eq!(table.list(), [("fe80::1".parse().unwrap(), Hop::Kernel)]);
    }

    #[test]
    fn use_is_told_once_and_by_cached_hops_too() {
        let table = HopTable::new();
        table.set(host(1), frame(1));
        assert!(!table.take_used(host(1)) && !table.take_used(host(2)));
        let known = table.find(host(1)).unwrap();
        assert!(table.take_used(host(1)) && !table.take_used(host(1)));
        assert!(table.is_current(&known));
        assert!(table.take_used(host(1)));
    }

    #[test]
    fn a_table_takes_many_and_forgets_them() {
        let table = HopTable::new();
        for round in 0..20 {
            let hosts: Vec<_> = (0..HOPS as u32).map(|it| host(it + round * 10_000)).collect();
            let taken: Vec<_> = hosts.iter().filter(|&&it| table.set(it, frame(7))).collect();
            assert!(taken.len() > HOPS * 3 / 4, "only {}", taken.len());
            assert!(taken.iter().all(|&&it| table.find(it).is_some()));
            taken.iter().for_each(|&&it| table.remove(it));
            assert!(table.list().is_empty());
        }
        let never = |entry: &Entry| entry.peek().kind() == kind::NEVER;
        assert!(table.entries.iter().filter(|it| never(it)).count() > HOPS / 4);
    }

    #[test]
    fn readers_never_see_half_an_entry() {
        let table = HopTable::new();
        let done = AtomicBool::new(false);
        thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    while !done.load(Relaxed) {
                        if let Some(known) = table.find(host(1)) {
                            let Hop::Frame { source, dest } = known.hop else {
                                panic!("no frame");
                            };
                            assert_eq!(source, [source[0]; 6]);
                            assert_eq!(dest, [source[0] ^ 0xff; 6]);
                        }
                    }
                });
            }
            for round in 0..200_000u32 {
                assert!(table.set(host(1), frame(round as u8)));
                if round % 64 == 0 {
                    table.remove(host(1));
                }
            }
            done.store(true, Relaxed);
        });
    }

    #[test]
    fn what_a_killed_daemon_left_is_no_hop_and_is_repaired() {
        let table = HopTable::new();
        table.set(host(1), frame(1));
        let at = table.position(key(host(1))).unwrap();
        table.entries[at].version.fetch_add(1, Relaxed);
        assert!(table.find(host(1)).is_none());
        table.repair();
        assert!(table.find(host(1)).is_none());
        assert!(table.set(host(1), frame(2)));
        assert_eq!(table.find(host(1)).unwrap().hop, frame(2));
    }
}
