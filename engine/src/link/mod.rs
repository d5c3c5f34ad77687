//! Links: what carries RoCE packets between engines, in batches both ways.
//!
//! A packet here is what lies in the UDP payload: BTH, extension headers, payload, pad and ICRC.
//! The link owns what is below: addresses, ports, IP identification, and so the ICRC, which covers them.

pub mod fault;
mod headers;
pub mod pcap;
pub mod random;
pub mod sim;
pub mod udp;
pub mod wrap;
pub mod xdp;

use std::io;
use std::net::IpAddr;
use std::os::fd::RawFd;

use serde::{Deserialize, Serialize};

use crate::memory::Fault;

/// Bytes of the ICRC, the end of every packet.
const ICRC_LEN: usize = ferroce_wire::packet::ICRC_LEN;

/// How RoCE travels: the type of a GID.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum RoceVersion {
    /// Ethertype 0x8915, and a GRH.
    V1,
    /// IP and UDP, port 4791.
    #[default]
    V2,
}

/// Where a QP's packets go, and what their IP header says: an address handle, resolved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Path {
    /// How its packets travel: the type of the local GID. Where only UDP leads, v1 travels as v2.
    pub version: RoceVersion,
    /// The source address: that of the local GID (`sgid_index`).
    pub source: IpAddr,
    /// The peer's address (unicast or multicast).
    pub dest: IpAddr,
    /// The interface index that scopes link-local and multicast addresses.
    pub ifindex: u32,
    /// Index of the local GID.
    pub sgid_index: u8,
    /// Traffic class (IPv6) or type of service (IPv4), ECN bits included.
    pub traffic_class: u8,
    /// Hop limit or TTL; 0 stands for 64.
    pub hop_limit: u8,
    /// Flow label (IPv6, GRH) and source of the UDP source port's entropy, 20 bits.
    pub flow_label: u32,
    /// Service level, as the application gave it; not on the wire.
    pub service_level: u8,
}

impl Path {
    /// The plain path from one address to another: RoCE v2, hop limit 64, no interface, all else 0.
    pub const fn between(source: IpAddr, dest: IpAddr) -> Path {
        Path {
            version: RoceVersion::V2,
            source,
            dest,
            ifindex: 0,
            sgid_index: 0,
            traffic_class: 0,
            hop_limit: 64,
            flow_label: 0,
            service_level: 0,
        }
    }

    /// The hop limit that packets get: 64 where the application gave none.
    pub fn hop_limit_on_wire(&self) -> u8 {
        if self.hop_limit == 0 { 64 } else { self.hop_limit }
    }
}

/// How packets of a path leave, as far as a link knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// They leave as this link's packets do.
    Own,
    /// The kernel sends them in its own way.
    Kernel,
    /// It is being looked for. The kernel sends them until it is known; then those that follow can overtake them.
    Unknown,
}

/// The two queue pairs of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Qpns {
    /// The one that sends it.
    pub local: u32,
    /// The one that it is for.
    pub dest: u32,
}

#[cfg(test)]
impl Qpns {
    /// To a queue pair, from any.
    pub fn to(dest: u32) -> Qpns {
        Qpns { local: 1, dest }
    }
}

/// Why a packet was not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TransmitError {
    /// The link has no room now: stop, and go on when it has flushed. Nothing of this packet was sent.
    Full,
    /// There is no room where this packet goes: try again a little later. Others may go. Nothing of this one was sent.
    Busy,
    /// `fill` met memory that can't be read. Nothing of this packet was sent.
    Fault(Fault),
}

/// The sending half of a link, as the transport sees it.
pub trait Transmit {
    /// Takes one packet of `len` bytes (BTH to pad; the link appends the ICRC) from one QP to another, at the end of `path`.
    ///
    /// `fill` writes all `len` bytes. Packets to one destination that follow each other with equal lengths travel
    /// together where the link can (GSO). Nothing need leave before [`Link::flush`].
    fn packet(
        &mut self,
        path: &Path,
        qpns: Qpns,
        len: usize,
        fill: &mut dyn FnMut(&mut [u8]) -> Result<(), Fault>,
    ) -> Result<(), TransmitError>;
}

/// Checks a received packet's ICRC, once it is worth it (after the cheap checks of reference section 12).
pub trait IcrcCheck {
    /// Whether the ICRC in the last four bytes of `packet.data` is right for the headers the packet came with.
    fn valid(&self, packet: &RxPacket<'_>) -> bool;
}

/// One received packet.
#[derive(Clone, Copy)]
pub struct RxPacket<'a> {
    /// How it travelled.
    pub version: RoceVersion,
    /// The sender's address (never IPv4-mapped IPv6).
    pub source: IpAddr,
    /// The sender's UDP port; any is legal. 0 in RoCE v1.
    pub source_port: u16,
    /// The address it was sent to.
    pub dest: IpAddr,
    /// Index of the interface it came by: tells equal link-local addresses apart. 0 where there are no interfaces.
    pub ifindex: u32,
    /// Traffic class or type of service; the low two bits are ECN.
    pub traffic_class: u8,
    /// Hop limit or TTL as received.
    pub hop_limit: u8,
    /// Flow label (IPv6, GRH); 0 where the link does not tell.
    pub flow_label: u32,
    /// BTH to ICRC. Nothing is checked yet, not even a length.
    pub data: &'a [u8],
    /// The link's ICRC check.
    pub icrc: &'a dyn IcrcCheck,
}

/// A link: batches of packets in and out, and what to wait for.
pub trait Link: Transmit + Send {
    /// Hands every packet that has arrived to `sink`, up to one batch of the link's own size; never blocks.
    /// Gives the number handed over; 0 means that nothing waits.
    fn receive(&mut self, sink: &mut dyn FnMut(&RxPacket<'_>)) -> io::Result<usize>;

    /// Sends what [`Transmit::packet`] took. `Ok(false)`: a socket is full, some is still held; call again when
    /// [`Link::transmit_fd`] is readable. Errors of single destinations (unreachable, no route) are not errors here:
    /// such packets count as lost, and the transport's timers deal with it.
    fn flush(&mut self) -> io::Result<bool>;

    /// Adds the descriptors to poll for readability to `fds`; who asks is about to wait, and calls [`Link::receive`]
    /// after that.
    fn receive_fds(&self, fds: &mut Vec<RawFd>);

    /// The descriptor to poll for readability while [`Link::flush`] says `false`: then there is room for what it holds.
    fn transmit_fd(&self) -> Option<RawFd>;

    /// How many bytes of packets a peer's socket buffer holds for sure, judged by our own: the transport keeps less
    /// than that in flight to one peer. Counted as the kernel counts (truesize), so ask for each packet length.
    fn window(&self, packet_len: usize) -> u32;

    /// Has packets to a multicast group on an interface arrive too.
    ///
    /// # Errors
    /// As `IP_ADD_MEMBERSHIP`: ENOBUFS where the group is one too many.
    fn join(&mut self, group: IpAddr, ifindex: u32) -> io::Result<()>;

    /// Ends what [`Link::join`] began.
    fn leave(&mut self, group: IpAddr) -> io::Result<()>;

    /// What is known of a path's way. Begins to look for it if nothing is.
    fn reach(&mut self, _path: &Path) -> Reach {
        Reach::Own
    }

    /// The interface has this MTU from now on.
    fn set_mtu(&mut self, _mtu: u32) {}

    /// Many packets may come in a row from now on: there are queue pairs whose peers await no acknowledgement.
    fn expect_bursts(&mut self) {}

    /// Counters of packets and drops by reason, added to `out` as (name, value).
    fn counters(&self, out: &mut dyn FnMut(&'static str, u64));
}

impl<L: Transmit + ?Sized> Transmit for Box<L> {
    fn packet(
        &mut self,
        path: &Path,
        qpns: Qpns,
        len: usize,
        fill: &mut dyn FnMut(&mut [u8]) -> Result<(), Fault>,
    ) -> Result<(), TransmitError> {
        (**self).packet(path, qpns, len, fill)
    }
}

impl<L: Link + ?Sized> Link for Box<L> {
    fn receive(&mut self, sink: &mut dyn FnMut(&RxPacket<'_>)) -> io::Result<usize> {
        (**self).receive(sink)
    }

    fn flush(&mut self) -> io::Result<bool> {
        (**self).flush()
    }

    fn receive_fds(&self, fds: &mut Vec<RawFd>) {
        (**self).receive_fds(fds);
    }

    fn transmit_fd(&self) -> Option<RawFd> {
        (**self).transmit_fd()
    }

    fn window(&self, packet_len: usize) -> u32 {
        (**self).window(packet_len)
    }

    fn join(&mut self, group: IpAddr, ifindex: u32) -> io::Result<()> {
        (**self).join(group, ifindex)
    }

    fn leave(&mut self, group: IpAddr) -> io::Result<()> {
        (**self).leave(group)
    }

    fn reach(&mut self, path: &Path) -> Reach {
        (**self).reach(path)
    }

    fn set_mtu(&mut self, mtu: u32) {
        (**self).set_mtu(mtu);
    }

    fn expect_bursts(&mut self) {
        (**self).expect_bursts();
    }

    fn counters(&self, out: &mut dyn FnMut(&'static str, u64)) {
        (**self).counters(out)
    }
}
