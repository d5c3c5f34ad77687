//! The link of an interface in XDP mode: Ethernet frames to and from AF_XDP sockets, which a privileged daemon made.
//!
//! All programs of a [`port`] share its memory: frames ([`layout`]), the rings that give the kernel frames and take them
//! back, and the table of next hops ([`hops`]). What belongs to one program alone is its [`seat`].
//!
//! The link has two halves. Frames go by the seat where the next hop is known. All else is the kernel's, by the UDP
//! socket of the slot: packets to the host itself or out of other interfaces, multicast, and what is sent before the next
//! hop is known.

mod circulation;
pub mod hops;
pub mod layout;
mod memory;
mod place;
pub mod port;
pub mod receive;
mod ring;
pub mod seat;
mod socket;
mod transmit;

#[cfg(test)]
mod tests;

use std::cell::Cell;
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};

use rustix::event::epoll;

pub use layout::Geometry;
pub use port::{Features, Zerocopy};

use self::hops::Hop;
use self::place::Place;
use self::receive::{Drop, Exact};
use self::seat::Seat;
use self::transmit::{Asked, ETHERNET, Flow, Flows};
use super::udp::coarse_now;
use super::{ICRC_LEN, Link, Path, Qpns, Reach, RxPacket, Transmit, TransmitError};
use crate::memory::Fault;

/// Rounds between looks at a UDP socket where nothing happens: a look is a system call, a round in vain is next to nothing.
const UDP_REST: u32 = 512;
/// Rounds with a look each, once something happened there.
const UDP_ACTIVE: u32 = 8192;

/// Asks for the next hop from an own address to another; false if that has to be tried again.
pub type Ask = Box<dyn Fn(IpAddr, IpAddr) -> bool + Send>;

/// What a link has to know of its interface and its lease.
pub struct Config {
    /// The slot leased.
    pub slot: u8,
    /// The interface.
    pub ifindex: u32,
    /// Its MTU.
    pub mtu: u32,
    /// How the port is divided.
    pub geometry: Geometry,
    /// Asks the daemon.
    pub ask: Ask,
}

/// Counters of the XDP half.
#[derive(Default)]
struct Counters {
    rx_packets: u64,
    rx_bytes: u64,
    rx_truncated: u64,
    rx_not_roce: u64,
    rx_vlan: u64,
    rx_malformed: u64,
    rx_misdirected: u64,
    tx_packets: u64,
    tx_bytes: u64,
    tx_waits: u64,
    tx_lost_mtu: u64,
    tx_lost_down: u64,
    tx_lost_other: u64,
}

/// The link of a program to an interface in XDP mode.
pub struct XdpLink<P: Place = Seat> {
    seat: P,
    udp: Box<dyn Link>,
    config: Config,
    flows: Flows<P::Known>,
    /// Where the flow of the last packet is.
    last: usize,
    asked: Asked,
    /// Frames were submitted since the last kick.
    queued: bool,
    /// The last kick could not hand over everything.
    seat_full: bool,
    /// The UDP half holds packets since the last flush.
    udp_full: bool,
    /// Packets went to the UDP half since the last flush.
    udp_queued: bool,
    /// Rounds until the next look at the UDP half.
    rest: u32,
    /// Rounds in which it is looked at each time.
    active: u32,
    /// Somebody may have slept on the descriptors: the next round looks at both.
    awaited: Cell<bool>,
    /// Readable when there is room for what is held.
    room: OwnedFd,
    counters: Counters,
}

impl<P: Place> XdpLink<P> {
    /// Makes the link of a seat, and of the UDP link of the same slot.
    ///
    /// # Errors
    /// Those of epoll.
    pub fn new(seat: P, udp: Box<dyn Link>, config: Config) -> io::Result<XdpLink<P>> {
        let room = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        Ok(XdpLink {
            seat,
            udp,
            config,
            flows: Flows::new(),
            last: 0,
            asked: Asked::default(),
            queued: false,
            seat_full: false,
            udp_full: false,
            udp_queued: false,
            rest: 0,
            active: 0,
            awaited: Cell::new(false),
            room,
            counters: Counters::default(),
        })
    }

    /// Where the flow of a packet is; `None` if the kernel sends it.
    #[inline]
    fn route(&mut self, path: &Path, qpns: Qpns) -> Option<usize> {
        let known = |place: usize| {
            let (flow, seat) = (self.flows.get(place), &self.seat);
            flow.is_some_and(|flow| flow.is(path, qpns) && seat.is_current(&flow.known))
        };
        if known(self.last) {
            return Some(self.last);
        }
        let place = self.flows.place(path, qpns);
        if !known(place) {
            self.find(place, path, qpns)?;
        }
        self.last = place;
        Some(place)
    }

    /// Looks up the way of a flow, and puts it in its place; `None` if it is not known.
    fn find(&mut self, place: usize, path: &Path, qpns: Qpns) -> Option<()> {
        if path.dest.is_multicast() {
            return None;
        }
        let Some((hop, known)) = self.seat.find(path.dest) else {
            self.ask(path);
            return None;
        };
        *self.flows.at(place) = Some(Flow::new(path, qpns, hop, known));
        Some(())
    }

    /// Asks the daemon for the next hop, not too often.
    fn ask(&mut self, path: &Path) {
        let ask = || (self.config.ask)(path.source, path.dest);
        self.asked.ask(path.dest, coarse_now(), ask);
    }

    /// A packet for the kernel to send.
    fn by_udp(
        &mut self,
        path: &Path,
        qpns: Qpns,
        len: usize,
        fill: &mut dyn FnMut(&mut [u8]) -> Result<(), Fault>,
    ) -> Result<(), TransmitError> {
        self.udp_queued = true;
        // Its answer may well come this way.
        self.active = UDP_ACTIVE;
        self.udp.packet(path, qpns, len, fill)
    }

    /// Room for a frame; makes some if there is none. `Ok(None)`: the frame is lost.
    fn reserve(&mut self, len: usize) -> Result<Option<P::Frames>, TransmitError> {
        if let Some(frames) = self.seat.reserve(len) {
            return Ok(Some(frames));
        }
        let taken = self.kick();
        if let Some(frames) = self.seat.reserve(len) {
            return Ok(Some(frames));
        }
        match taken {
            // The interface is down or gone, and keeps what it has: as on a wire that was pulled out, this is lost.
            Err(error) => {
                tracing::debug!(%error, "a frame could not be sent");
                self.counters.tx_lost_down += 1;
                Ok(None)
            }
            Ok(false) => Err(TransmitError::Full),
            // All is with the driver, which gives it back by itself: nothing tells when.
            Ok(true) => {
                self.counters.tx_waits += 1;
                Err(TransmitError::Busy)
            }
        }
    }

    /// Hands what is queued to the kernel; false if it did not take all.
    fn kick(&mut self) -> io::Result<bool> {
        let taken = self.seat.kick();
        // While the interface is down, what is queued stays so.
        self.queued = taken.is_err();
        self.seat_full = matches!(taken, Ok(false));
        taken
    }

    /// Has `room` watch what is full.
    fn watch_room(&self) {
        let full = [
            self.seat_full.then(|| self.seat.transmit_fd()),
            self.udp.transmit_fd().filter(|_| self.udp_full),
        ];
        for fd in full {
            if let Err(error) = watch(&self.room, fd) {
                // It is tried again with everything that is sent.
                tracing::debug!(%error, "what is full can't be watched");
            }
        }
    }
}

/// Adds a descriptor to an epoll set; one that is there already stays.
fn watch(set: &OwnedFd, fd: Option<RawFd>) -> io::Result<()> {
    let Some(fd) = fd else { return Ok(()) };
    // SAFETY: the descriptor belongs to one of the halves, which live as long as the set.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    match epoll::add(set, fd, epoll::EventData::new_u64(0), epoll::EventFlags::IN) {
        Err(rustix::io::Errno::EXIST) => Ok(()),
        other => other.map_err(Into::into),
    }
}

impl<P: Place> Transmit for XdpLink<P> {
    fn packet(
        &mut self,
        path: &Path,
        qpns: Qpns,
        len: usize,
        fill: &mut dyn FnMut(&mut [u8]) -> Result<(), Fault>,
    ) -> Result<(), TransmitError> {
        let Some(place) = self.route(path, qpns) else {
            return self.by_udp(path, qpns, len, fill);
        };
        let head = match self.flows.get(place) {
            Some(flow) if flow.hop != Hop::Kernel => flow.head_len(),
            _ => return self.by_udp(path, qpns, len, fill),
        };
        let whole = head + len + ICRC_LEN;
        if head == ETHERNET {
            // Addresses of two families.
            self.counters.tx_lost_other += 1;
            return Ok(());
        }
        if whole - ETHERNET > self.config.mtu as usize {
            self.counters.tx_lost_mtu += 1;
            return Ok(());
        }
        let Some(frames) = self.reserve(whole)? else {
            return Ok(());
        };
        let (Some(bytes), Some(flow)) = (
            self.seat.bytes(&frames).get_mut(..whole),
            self.flows.at(place).as_mut(),
        ) else {
            self.seat.give_back(frames);
            self.counters.tx_lost_other += 1;
            return Ok(());
        };
        if let Err(fault) = fill(&mut bytes[head..head + len]) {
            self.seat.give_back(frames);
            return Err(TransmitError::Fault(fault));
        }
        flow.wrap(bytes, len);
        self.seat.submit(frames);
        self.queued = true;
        self.counters.tx_packets += 1;
        self.counters.tx_bytes += (len + ICRC_LEN) as u64;
        Ok(())
    }
}

impl<P: Place> Link for XdpLink<P> {
    fn receive(&mut self, sink: &mut dyn FnMut(&RxPacket<'_>)) -> io::Result<usize> {
        let (counters, config) = (&mut self.counters, &self.config);
        let mut packets = 0;
        self.seat.receive(&mut |frame| {
            let carried = match receive::parse(frame) {
                Ok(carried) => carried,
                Err(drop) => {
                    *(match drop {
                        Drop::Truncated => &mut counters.rx_truncated,
                        Drop::NotRoce => &mut counters.rx_not_roce,
                        Drop::Vlan => &mut counters.rx_vlan,
                        Drop::Malformed => &mut counters.rx_malformed,
                    }) += 1;
                    return;
                }
            };
            // The kernel copies multicast to all its members, by UDP.
            if carried.data.get(5) != Some(&config.slot) || carried.dest.is_multicast() {
                counters.rx_misdirected += 1;
                return;
            }
            packets += 1;
            counters.rx_packets += 1;
            counters.rx_bytes += carried.data.len() as u64;
            let icrc = Exact {
                network: carried.network,
            };
            sink(&carried.packet(config.ifindex, &icrc));
        });
        if self.active == 0 && self.rest > 0 && !self.awaited.get() {
            self.rest -= 1;
            return Ok(packets);
        }
        self.awaited.set(false);
        self.rest = UDP_REST;
        self.active = self.active.saturating_sub(1);
        let by_udp = match self.udp.receive(sink) {
            Ok(by_udp) => by_udp,
            // What came by the other half is there.
            Err(error) if packets == 0 => return Err(error),
            Err(error) => {
                tracing::debug!(%error, "the UDP half");
                0
            }
        };
        if by_udp > 0 {
            self.active = UDP_ACTIVE;
        }
        Ok(packets + by_udp)
    }

    fn flush(&mut self) -> io::Result<bool> {
        let mut outcome = Ok(true);
        // First: where a flow has just left it for the other half, its packets keep their order.
        if self.udp_queued || self.udp_full {
            outcome = self.udp.flush();
            self.udp_queued = false;
            self.udp_full = matches!(outcome, Ok(false));
        }
        if self.queued || self.seat_full {
            let taken = self.kick();
            outcome = outcome.and_then(|all| taken.map(|taken| taken && all));
        }
        if self.seat_full || self.udp_full {
            self.watch_room();
            // An error of one half must not hide that the other has not sent all.
            return Ok(false);
        }
        outcome
    }

    fn receive_fds(&self, fds: &mut Vec<RawFd>) {
        self.awaited.set(true);
        self.seat.receive_fds(fds);
        self.udp.receive_fds(fds);
    }

    fn transmit_fd(&self) -> Option<RawFd> {
        match (self.seat_full, self.udp_full) {
            (true, true) => Some(self.room.as_raw_fd()),
            (true, false) => Some(self.seat.transmit_fd()),
            (false, _) => self.udp.transmit_fd(),
        }
    }

    /// Half of what a ring like our own holds, and no more frames than stay in the cache; and no more than by UDP, which a
    /// path may change to.
    fn window(&self, packet_len: usize) -> u32 {
        let Geometry { rx_ring, .. } = self.config.geometry;
        let piece = self.config.geometry.piece();
        let pieces = (packet_len + 64).div_ceil(piece.max(1)) as u32;
        let packets = ((rx_ring / 2).min(layout::PEER_WINDOW) / pieces).max(2);
        let bytes = packets.saturating_mul(u32::try_from(packet_len).unwrap_or(u32::MAX));
        bytes.min(self.udp.window(packet_len))
    }

    fn join(&mut self, group: IpAddr, ifindex: u32) -> io::Result<()> {
        self.udp.join(group, ifindex)
    }

    fn leave(&mut self, group: IpAddr) -> io::Result<()> {
        self.udp.leave(group)
    }

    fn reach(&mut self, path: &Path) -> Reach {
        if path.dest.is_multicast() {
            return Reach::Kernel;
        }
        match self.seat.find(path.dest) {
            Some((Hop::Frame { .. }, _)) => Reach::Own,
            Some((Hop::Kernel, _)) => Reach::Kernel,
            None => {
                self.ask(path);
                Reach::Unknown
            }
        }
    }

    fn set_mtu(&mut self, mtu: u32) {
        self.config.mtu = mtu;
    }

    fn expect_bursts(&mut self) {
        self.seat.expect_bursts();
    }

    fn counters(&self, out: &mut dyn FnMut(&'static str, u64)) {
        let counters = &self.counters;
        for (name, value) in [
            ("xdp_rx_packets", counters.rx_packets),
            ("xdp_rx_bytes", counters.rx_bytes),
            ("xdp_rx_truncated", counters.rx_truncated),
            ("xdp_rx_not_roce", counters.rx_not_roce),
            ("xdp_rx_vlan", counters.rx_vlan),
            ("xdp_rx_malformed", counters.rx_malformed),
            ("xdp_rx_misdirected", counters.rx_misdirected),
            ("xdp_tx_packets", counters.tx_packets),
            ("xdp_tx_bytes", counters.tx_bytes),
            ("xdp_tx_waits", counters.tx_waits),
            ("xdp_tx_lost_mtu", counters.tx_lost_mtu),
            ("xdp_tx_lost_down", counters.tx_lost_down),
            ("xdp_tx_lost_other", counters.tx_lost_other),
        ] {
            out(name, value);
        }
        self.seat.counters(out);
        self.udp.counters(out);
    }
}
