//! One interface in XDP mode: its program, its port, and who has a seat.

use std::collections::BTreeMap;
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use ferroce_engine::control::protocol::{XdpOptions, XdpStatus};
use ferroce_engine::control::{DAEMON_SLOT, MAX_SLOT, Refusal, XdpInfo};
use ferroce_engine::link::xdp::port::Port;
use tracing::warn;

use super::heirloom::{self, Inheritance, Record};
use super::ledger::Ledger;
use super::plan;
use super::steering::{Attach, Drops, SlotUse, Steering};
use crate::daemon::slots::FreeSlots;
use crate::daemon::sys;
use crate::netlink::Interface;

/// An interface in XDP mode. What was done to it is undone when the value is dropped, and no program holds the heirloom.
pub struct XdpDevice {
    record: Record,
    steering: Steering,
    port: Arc<Port>,
    /// Seats that nobody has, counted from 1.
    free: FreeSlots,
    /// By slot.
    seats: BTreeMap<u8, u16>,
    ledger: Ledger,
    heirloom: OwnedFd,
}

impl XdpDevice {
    /// Puts an interface into XDP mode. The program passes everything on until it is told of slots and addresses. Gives
    /// what the user should know of it as well.
    pub fn create(
        name: &str,
        ifindex: u32,
        interface: &Interface,
        options: &XdpOptions,
    ) -> Result<(Self, Vec<String>), Refusal> {
        let netdev = interface.name.as_str();
        plan::check_kernel(netdev)?;
        let queues = plan::queues(netdev, ifindex);
        let geometry = plan::geometry(options, interface, queues.usable())?;
        let mut notes = Vec::new();
        let (steering, attach) = attach(ifindex, netdev, geometry.queues, &mut notes)?;
        let port = Port::create(ifindex, geometry, options.zerocopy)
            .map_err(|error| plan::refuse_port(&error, netdev, &geometry, options.zerocopy))?;
        let info = XdpInfo {
            geometry,
            driver: attach == Attach::Driver,
            features: port.features(),
        };
        notes.extend(plan::notes(&info, interface, queues));
        let failed = |error: io::Error| Refusal::Failed(format!("XDP mode on {netdev}: {error}"));
        let record = Record {
            name: name.to_owned(),
            netns: sys::network_namespace().map_err(failed)?,
            ifindex,
            info,
        };
        let ledger = Ledger::new().map_err(failed)?;
        let heirloom = make_heirloom(&record, &steering, &port, &ledger).map_err(failed)?;
        let device = Self {
            record,
            steering,
            port: Arc::new(port),
            free: FreeSlots::new(seats_of(&info), |_| false),
            seats: BTreeMap::new(),
            ledger,
            heirloom,
        };
        Ok((device, notes))
    }

    /// Goes on with that of an earlier daemon, which a program shows. Its programs go on meanwhile.
    pub fn inherit(heirloom: OwnedFd) -> io::Result<Self> {
        let invalid = |what| io::Error::new(io::ErrorKind::InvalidData, what);
        let Inheritance {
            record,
            steering,
            control,
            umem,
            ledger,
            sockets,
        } = heirloom::open(heirloom.as_fd())?;
        let steering = Steering::inherit(steering)?;
        if steering.ifindex()? != Some(record.ifindex) {
            return Err(invalid("the XDP program is on no interface any more"));
        }
        let XdpInfo {
            geometry, features, ..
        } = record.info;
        if steering.queues() < geometry.queues {
            return Err(invalid("the XDP program is of another port"));
        }
        let port = Port::inherit(geometry, features, control, umem, sockets).map_err(io::Error::other)?;
        let mut seats = BTreeMap::new();
        for (seat, slot) in (0..).zip(ledger.read(geometry.seats)?) {
            if (1..=MAX_SLOT).contains(&slot) {
                seats.entry(slot).or_insert(seat);
            }
        }
        let taken = |number: u8| seats.values().any(|seat| *seat == u16::from(number) - 1);
        Ok(Self {
            free: FreeSlots::new(seats_of(&record.info), taken),
            record,
            steering,
            port: Arc::new(port),
            seats,
            ledger,
            heirloom,
        })
    }

    /// Ends XDP mode, even if a program that is not ours any more still has what it once got.
    pub fn end_mode(self) {
        if let Err(error) = self.steering.detach() {
            warn!(device = self.record.name, %error, "the XDP program stays as long as any program has the device");
        }
    }

    /// What it is.
    pub fn record(&self) -> &Record {
        &self.record
    }

    /// Its memory and sockets.
    pub fn port(&self) -> &Arc<Port> {
        &self.port
    }

    /// Whether that slot has a seat here.
    pub fn has_seat(&self, slot: u8) -> bool {
        self.seats.contains_key(&slot)
    }

    /// Tells the program of all slots: those in use are seats of this device, or the kernel's. Seats of slots that are
    /// not in use are taken back, as are the frames of all free ones.
    pub fn set_slots(&mut self, is_used: impl Fn(u8) -> bool) -> io::Result<()> {
        let dead: Vec<u8> = self
            .seats
            .keys()
            .copied()
            .filter(|slot| !is_used(*slot))
            .collect();
        for slot in dead {
            self.end(slot);
        }
        self.steering.set_slot(DAEMON_SLOT, SlotUse::Kernel)?;
        for slot in 1..=MAX_SLOT {
            match self.seats.get(&slot) {
                Some(seat) => self.steer_to(slot, *seat)?,
                None if is_used(slot) => self.steering.set_slot(slot, SlotUse::Kernel)?,
                None => self.steer_to_nobody(slot)?,
            }
        }
        let taken: Vec<u16> = self.seats.values().copied().collect();
        for seat in (0..self.record.info.geometry.seats).filter(|seat| !taken.contains(seat)) {
            self.port.reclaim(seat);
        }
        Ok(())
    }

    /// Tells the program of the device's addresses.
    pub fn set_addresses(&mut self, addresses: &[IpAddr]) -> io::Result<()> {
        self.steering.set_addresses(addresses)
    }

    /// A slot was leased on another device.
    pub fn leave_to_kernel(&mut self, slot: u8) {
        if let Err(error) = self.steering.set_slot(slot, SlotUse::Kernel) {
            warn!(device = self.record.name, slot, %error, "packets for the slot are dropped");
        }
    }

    /// Takes a seat for a slot, which gets its packets from now on.
    pub fn lease(&mut self, slot: u8) -> Result<u16, Refusal> {
        let seat = loop {
            let number = self.free.take().ok_or_else(|| Refusal::SeatsTaken {
                name: self.record.name.clone(),
                programs: self.record.info.geometry.seats,
            })?;
            let seat = u16::from(number) - 1;
            // What was on its way to the last who had it has come after all.
            if self.port.reclaim(seat) {
                break seat;
            }
            warn!(
                device = self.record.name,
                seat,
                "a program has spoilt the transmit ring of its seat, which is not leased again: remove the device and add it again"
            );
        };
        self.port.serve(self.seats.len() as u16 + 1);
        self.seats.insert(slot, seat);
        let done = self
            .ledger
            .write(seat, Some(slot))
            .and_then(|()| self.steer_to(slot, seat));
        if let Err(error) = done {
            self.end(slot);
            return Err(Refusal::Failed(format!("seat {seat}: {error}")));
        }
        Ok(seat)
    }

    /// The descriptors of a seat, in the order of [`ferroce_engine::control::protocol::Reply::Leased`].
    pub fn fds(&self, seat: u16) -> Vec<BorrowedFd<'_>> {
        let queues = 0..self.record.info.geometry.queues;
        let sockets = queues.map(|queue| self.port.socket(queue, seat));
        [self.port.control(), self.port.umem()]
            .into_iter()
            .chain(sockets)
            .chain([self.heirloom.as_fd()])
            .collect()
    }

    /// The slot is nobody's any more, here or on another device.
    pub fn end(&mut self, slot: u8) {
        if let Err(error) = self.steer_to_nobody(slot) {
            warn!(device = self.record.name, slot, %error, "packets for the slot can't be stopped");
            // A seat that still gets packets is not leased again.
            return;
        }
        let Some(seat) = self.seats.remove(&slot) else {
            return;
        };
        self.port.reclaim(seat);
        match self.ledger.write(seat, None) {
            Ok(()) => self.free.give_back(seat as u8 + 1),
            Err(error) => warn!(device = self.record.name, seat, %error, "seat can't be taken back"),
        }
    }

    fn steer_to(&self, slot: u8, seat: u16) -> io::Result<()> {
        for queue in 0..self.record.info.geometry.queues {
            self.steering
                .set_socket(queue, slot, Some(self.port.socket(queue, seat)))?;
        }
        self.steering.set_slot(slot, SlotUse::Seat)
    }

    fn steer_to_nobody(&self, slot: u8) -> io::Result<()> {
        self.steering.set_slot(slot, SlotUse::Nobody)?;
        if !self.seats.contains_key(&slot) {
            return Ok(());
        }
        (0..self.record.info.geometry.queues)
            .try_for_each(|queue| self.steering.set_socket(queue, slot, None))
    }

    /// For `ferroce link show`.
    pub fn status(&self) -> XdpStatus {
        let drops = self.drops().unwrap_or_else(|error| {
            warn!(device = self.record.name, %error, "drops can't be read");
            Vec::new()
        });
        XdpStatus {
            // One that can't be asked has not said so.
            detached: matches!(self.steering.ifindex(), Ok(None)),
            programs: self.seats.len() as u16,
            drops,
        }
    }

    /// What the program dropped, and what the sockets of all seats had no room for.
    fn drops(&self) -> io::Result<Vec<(String, u64)>> {
        let Drops {
            unowned,
            length,
            no_socket,
        } = self.steering.drops()?;
        let (mut ring_full, mut no_frame) = (0, 0);
        let geometry = self.record.info.geometry;
        for queue in 0..geometry.queues {
            for seat in 0..geometry.seats {
                let of_socket = sys::xdp_statistics(self.port.socket(queue, seat))?;
                ring_full += of_socket.ring_full;
                no_frame += of_socket.no_frame;
            }
        }
        let named = [
            ("unowned", unowned),
            ("length", length),
            ("no_socket", no_socket),
            ("ring_full", ring_full),
            ("no_frame", no_frame),
        ];
        Ok(named.map(|(reason, count)| (reason.to_owned(), count)).into())
    }
}

fn seats_of(info: &XdpInfo) -> u8 {
    u8::try_from(info.geometry.seats).unwrap_or(u8::MAX)
}

/// Attaches the program by the driver, or else by the kernel.
fn attach(
    ifindex: u32,
    netdev: &str,
    queues: u16,
    notes: &mut Vec<String>,
) -> Result<(Steering, Attach), Refusal> {
    let refused = |error: io::Error| plan::refuse_attachment(&error, netdev);
    let by_driver = match Steering::attach(ifindex, queues, Attach::Driver) {
        Ok(steering) => return Ok((steering, Attach::Driver)),
        Err(error) if plan::is_of_the_driver(&error) => error,
        Err(error) => return Err(refused(error)),
    };
    let steering = Steering::attach(ifindex, queues, Attach::Generic).map_err(refused)?;
    notes.push(format!(
        "the driver of {netdev} runs no XDP program as it is set up now ({by_driver}): the kernel does (SKB mode), which is slower"
    ));
    Ok((steering, Attach::Generic))
}

fn make_heirloom(record: &Record, steering: &Steering, port: &Port, ledger: &Ledger) -> io::Result<OwnedFd> {
    let mut fixed = steering.fds();
    fixed.extend([port.control(), port.umem(), ledger.as_fd()]);
    let geometry = record.info.geometry;
    let sockets: Vec<BorrowedFd<'_>> = (0..geometry.queues)
        .flat_map(|queue| (0..geometry.seats).map(move |seat| port.socket(queue, seat)))
        .collect();
    heirloom::make(record, &fixed, &sockets)
}
