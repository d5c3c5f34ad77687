//! The XDP program of an interface and its maps: which packets go to which seat, which are dropped, which the kernel gets.
//!
//! Nothing is pinned: program and maps live as long as somebody has a descriptor of the link, and the kernel detaches the
//! program with the last of them.

use std::collections::BTreeSet;
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::process::{Resource, Rlimit, setrlimit};
use tracing::debug;

use super::bpf::program::{self, MapFds};
use super::bpf::sys::{self, LoadError, Map, MapKind, Shape};

/// The program's name, as bpftool shows it.
const PROGRAM: &str = "ferroce";
/// Addresses that a device can have.
const ADDRESSES: u32 = 1024;
/// More queues than are ever served.
const MAX_QUEUES: u32 = u16::MAX as u32;
/// Values of the map of addresses: there is nothing to say of one.
const PRESENT: [u8; 4] = [0; 4];

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
    /// For a slot that nobody has, or RoCE v1 for one that receives by UDP.
    pub unowned: u64,
    /// Too short for a RoCE packet, or of lengths that disagree.
    pub length: u64,
    /// For a seat that has no socket on the queue by which they came. What finds a ring full, the kernel counts at the
    /// socket (`XDP_STATISTICS`).
    pub no_socket: u64,
}

/// The program on an interface, and its maps.
#[derive(Debug)]
pub struct Steering {
    link: OwnedFd,
    program: OwnedFd,
    sockets: Map,
    slots: Map,
    addresses: Map,
    first: Map,
    drops: Map,
}

impl Steering {
    /// Number of [`Steering::fds`].
    pub const FDS: usize = 7;

    /// Loads the program and attaches it. It passes everything on until it is told of slots and addresses; packets for
    /// slot 0 are the kernel's.
    ///
    /// # Errors
    /// EPERM without privilege; EBUSY or EEXIST where another program is attached; EINVAL without such an interface;
    /// ENOSYS before Linux 5.18; EOPNOTSUPP where this kind of attachment can't be had. Drivers say other things too: ERANGE for
    /// an MTU that is too large, ENOSPC for too few queues.
    pub fn attach(ifindex: u32, queues: u16, attach: Attach) -> io::Result<Self> {
        raise_memory_limit();
        let (sockets, slots, addresses, first, drops) = (
            Map::create(
                "ferroce_sockets",
                sockets_shape(u32::from(queues) * program::SLOTS),
            )?,
            Map::create("ferroce_slots", SLOTS)?,
            Map::create("ferroce_address", OWN_ADDRESSES)?,
            Map::create("ferroce_first", FIRST_ADDRESSES)?,
            Map::create("ferroce_drops", DROPS)?,
        );
        let fds = MapFds {
            sockets: sockets.as_fd().as_raw_fd(),
            slots: slots.as_fd().as_raw_fd(),
            addresses: addresses.as_fd().as_raw_fd(),
            first: first.as_fd().as_raw_fd(),
            drops: drops.as_fd().as_raw_fd(),
        };
        let program = load(&fds, queues)?;
        slots.set(&0u32.to_ne_bytes(), &program::KERNEL.to_ne_bytes())?;
        set_first(&first, &BTreeSet::new())?;
        let mode = match attach {
            Attach::Driver => sys::XDP_FLAGS_DRV_MODE,
            Attach::Generic => sys::XDP_FLAGS_SKB_MODE,
        };
        let link = sys::attach(program.as_fd(), ifindex, mode)?;
        Ok(Self {
            link,
            program,
            sockets,
            slots,
            addresses,
            first,
            drops,
        })
    }

    /// Goes on with that of an earlier daemon: descriptors in the order of [`Steering::fds`].
    ///
    /// # Errors
    /// EINVAL if they are not those of a program of ours with its maps.
    pub fn inherit(fds: Vec<OwnedFd>) -> io::Result<Self> {
        let wrong = || io::Error::from(io::ErrorKind::InvalidInput);
        let fds: [OwnedFd; Self::FDS] = fds.try_into().map_err(|_| wrong())?;
        let [link, program, sockets, slots, addresses, first, drops] = fds;
        let attached = sys::link_info(link.as_fd())?;
        let loaded = sys::program_info(program.as_fd())?;
        if attached.kind != sys::LINK_TYPE_XDP
            || attached.program != loaded.id
            || loaded.kind != sys::PROG_TYPE_XDP
            || loaded.name != PROGRAM
        {
            return Err(wrong());
        }
        let steering = Self {
            sockets: Map::adopt_any(sockets, sockets_shape)?,
            slots: Map::adopt(slots, SLOTS)?,
            addresses: Map::adopt(addresses, OWN_ADDRESSES)?,
            first: Map::adopt(first, FIRST_ADDRESSES)?,
            drops: Map::adopt(drops, DROPS)?,
            link,
            program,
        };
        let maps = [
            &steering.sockets,
            &steering.slots,
            &steering.addresses,
            &steering.first,
            &steering.drops,
        ];
        let entries = steering.sockets.entries();
        let queues_fit = entries.is_multiple_of(program::SLOTS) && entries / program::SLOTS <= MAX_QUEUES;
        if !queues_fit || maps.iter().any(|map| !loaded.maps.contains(&map.id())) {
            return Err(wrong());
        }
        Ok(steering)
    }

    /// Takes the program off the interface, whoever else holds it.
    pub fn detach(&self) -> io::Result<()> {
        sys::detach(self.link.as_fd())
    }

    /// What a successor needs.
    pub fn fds(&self) -> Vec<BorrowedFd<'_>> {
        vec![
            self.link.as_fd(),
            self.program.as_fd(),
            self.sockets.as_fd(),
            self.slots.as_fd(),
            self.addresses.as_fd(),
            self.first.as_fd(),
            self.drops.as_fd(),
        ]
    }

    /// The interface; `None` if it is gone, or somebody has detached the program.
    pub fn ifindex(&self) -> io::Result<Option<u32>> {
        let ifindex = sys::link_info(self.link.as_fd())?.ifindex;
        Ok((ifindex != 0).then_some(ifindex))
    }

    /// Queues that are served; packets for seats that come by others are the kernel's.
    pub fn queues(&self) -> u16 {
        (self.sockets.entries() / program::SLOTS) as u16
    }

    /// Says what becomes of packets for a slot.
    pub fn set_slot(&self, slot: u8, used: SlotUse) -> io::Result<()> {
        let value = match used {
            SlotUse::Nobody => program::NOBODY,
            SlotUse::Kernel => program::KERNEL,
            SlotUse::Seat => program::SEAT,
        };
        self.slots
            .set(&u32::from(slot).to_ne_bytes(), &value.to_ne_bytes())
    }

    /// Sets the socket that gets packets for a slot that come by a queue, or none.
    ///
    /// # Errors
    /// EINVAL for a queue that is not served; EOPNOTSUPP if it is no AF_XDP socket.
    pub fn set_socket(&self, queue: u16, slot: u8, socket: Option<BorrowedFd<'_>>) -> io::Result<()> {
        if queue >= self.queues() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let key = (u32::from(queue) * program::SLOTS + u32::from(slot)).to_ne_bytes();
        match socket {
            Some(socket) => self.sockets.set(&key, &socket.as_raw_fd().to_ne_bytes()),
            None => self.sockets.remove(&key),
        }
    }

    /// Sets the addresses of the device: packets to others are the kernel's. Those that it had before and still has are
    /// served all the time.
    ///
    /// # Errors
    /// E2BIG if there are too many: then some are not served.
    pub fn set_addresses(&mut self, addresses: &[IpAddr]) -> io::Result<()> {
        let wanted: BTreeSet<[u8; 16]> = addresses
            .iter()
            .filter(|ip| !ip.is_multicast() && !ip.is_unspecified())
            .map(|ip| key_of(*ip))
            .collect();
        set_first(&self.first, &wanted)?;
        let mut present = BTreeSet::new();
        for key in self.addresses.keys()? {
            match <[u8; 16]>::try_from(&key[..]) {
                Ok(address) if wanted.contains(&address) => {
                    present.insert(address);
                }
                _ => self.addresses.remove(&key)?,
            }
        }
        let mut new = wanted.difference(&present);
        new.try_for_each(|address| self.addresses.set(address, &PRESENT))
    }

    /// What was dropped so far.
    pub fn drops(&self) -> io::Result<Drops> {
        let count = |reason: u32| -> io::Result<u64> {
            let values = self.drops.get(&reason.to_ne_bytes())?;
            let values = values.as_chunks::<8>().0.iter();
            Ok(values.map(|value| u64::from_ne_bytes(*value)).sum())
        };
        Ok(Drops {
            unowned: count(program::UNOWNED)?,
            length: count(program::LENGTH)?,
            no_socket: count(program::NO_SOCKET)?,
        })
    }
}

/// The shape of the map of sockets.
fn sockets_shape(entries: u32) -> Shape {
    Shape {
        kind: MapKind::Sockets,
        key: 4,
        value: 4,
        entries,
    }
}

const SLOTS: Shape = Shape {
    kind: MapKind::Array,
    key: 4,
    value: 4,
    entries: program::SLOTS,
};
const OWN_ADDRESSES: Shape = Shape {
    kind: MapKind::Hash,
    key: 16,
    value: PRESENT.len() as u32,
    entries: ADDRESSES,
};
const FIRST_ADDRESSES: Shape = Shape {
    kind: MapKind::Array,
    key: 4,
    value: program::FIRST * program::ADDRESS_LEN,
    entries: 1,
};
const DROPS: Shape = Shape {
    kind: MapKind::PerCpuArray,
    key: 4,
    value: 8,
    entries: program::REASONS,
};

/// Sets the addresses that are looked at first; where there are fewer, some of them twice. The program may see half of a
/// change, for an instant: an address that it misses is in the map of all.
fn set_first(first: &Map, addresses: &BTreeSet<[u8; 16]>) -> io::Result<()> {
    // What is no address of a device: a group.
    const NONE: [u8; 16] = [0xff; 16];
    let known = addresses.iter().cycle().chain(std::iter::repeat(&NONE));
    let value: Vec<u8> = known.take(program::FIRST as usize).flatten().copied().collect();
    first.set(&0u32.to_ne_bytes(), &value)
}

/// Loads the program.
fn load(maps: &MapFds, queues: u16) -> io::Result<OwnedFd> {
    let program = program::assemble(maps, queues).map_err(io::Error::other)?;
    sys::load(PROGRAM, &program, sys::XDP_HAS_FRAGS).map_err(|LoadError { source, log }| {
        if !log.is_empty() {
            debug!(%log, "the kernel's verifier");
        } else if source.raw_os_error() == Some(libc::EINVAL) {
            // The verifier has not even begun: before Linux 5.18 there is no such flag.
            return io::Error::from_raw_os_error(libc::ENOSYS);
        }
        source
    })
}

/// The memory of AF_XDP sockets counts as memory that is locked.
fn raise_memory_limit() {
    let unlimited = Rlimit {
        current: None,
        maximum: None,
    };
    if let Err(error) = setrlimit(Resource::Memlock, unlimited) {
        debug!(%error, "the limit of locked memory stays");
    }
}

/// An address as the program looks it up: IPv4 ones mapped to IPv6.
fn key_of(ip: IpAddr) -> [u8; 16] {
    match ip {
        IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
        IpAddr::V6(ip) => ip.octets(),
    }
}

#[cfg(test)]
mod tests;
