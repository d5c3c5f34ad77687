//! The receiving half: datagrams in batches, split into the packets that the kernel merged.

use std::cell::RefCell;
use std::io;
use std::mem;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use libc::{c_int, iovec, mmsghdr};

use super::cmsg;
use super::identification::Identification;
use super::membership::Memberships;
use super::socket::{self, Address};
use super::tunnel;
use crate::link::headers::Addressing;
use crate::link::{ICRC_LEN, IcrcCheck, RoceVersion, RxPacket};

/// Datagrams taken by one system call at most.
const BATCH: usize = 16;
/// Bytes of the longest datagram, merged ones included.
const BUFFER: usize = 1 << 16;
/// Bytes of an IPv4 and a UDP header, which the IPv4 total length counts.
const IPV4_UDP_LEN: usize = 28;
/// Where the destination QPN lies in the BTH.
const DEST_QPN: std::ops::Range<usize> = 5..8;
/// High byte of the destination QPN of multicast packets.
const MULTICAST_SLOT: u8 = 0xff;

/// Counters of the receiving half.
#[derive(Default)]
pub(super) struct Counters {
    pub datagrams: u64,
    pub packets: u64,
    pub bytes: u64,
    pub misdirected: u64,
    pub no_address: u64,
    pub other_group: u64,
}

/// The receive socket of one slot, and the buffers it fills.
pub(super) struct Receiver {
    socket: OwnedFd,
    slot: u8,
    /// Datagrams to ask for. The kernel looks for one more than it finds, so who waits for a single one asks for that.
    batch: usize,
    /// `BATCH` buffers; the kernel gives pages where something is received.
    buffers: Box<[u8]>,
    /// Where the kernel writes the senders and the control messages of one batch.
    names: Box<[Address; BATCH]>,
    controls: Box<[cmsg::Buffer; BATCH]>,
    identification: RefCell<Identification>,
    memberships: Memberships,
    pub counters: Counters,
}

/// What the control messages of one datagram say.
#[derive(Default)]
struct Ancillary {
    dest: Option<IpAddr>,
    /// The interface it came by.
    ifindex: u32,
    traffic_class: u8,
    hop_limit: u8,
    /// Length of each merged packet but the last.
    segment: Option<usize>,
}

impl Receiver {
    pub fn new(socket: OwnedFd, slot: u8, loopback: bool) -> io::Result<Receiver> {
        socket::prepare_receiver(socket.as_fd())?;
        Ok(Receiver {
            socket,
            slot,
            batch: 1,
            buffers: vec![0; BATCH * BUFFER].into_boxed_slice(),
            names: Box::new([Address::EMPTY; BATCH]),
            controls: Box::new([cmsg::Buffer::EMPTY; BATCH]),
            identification: RefCell::new(Identification::new()),
            memberships: Memberships::new(loopback),
            counters: Counters::default(),
        })
    }

    pub fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// As [`crate::link::Link::join`].
    pub fn join(&mut self, group: IpAddr, ifindex: u32) -> io::Result<()> {
        self.memberships.join(self.socket.as_fd(), group, ifindex)
    }

    /// As [`crate::link::Link::leave`].
    pub fn leave(&mut self, group: IpAddr) -> io::Result<()> {
        self.memberships.leave(self.socket.as_fd(), group)
    }

    /// Packets accepted with a recovered identification, and refused for their identification.
    pub fn identifications(&self) -> (u64, u64) {
        let identification = self.identification.borrow();
        (identification.recovered, identification.refused)
    }

    /// Takes one batch; gives the number of packets handed to `sink`.
    pub fn receive(&mut self, sink: &mut dyn FnMut(&RxPacket<'_>)) -> io::Result<usize> {
        let mut pieces = [const {
            iovec {
                iov_base: std::ptr::null_mut(),
                iov_len: 0,
            }
        }; BATCH];
        // SAFETY: all zeros is a valid, empty message header.
        let mut messages: [mmsghdr; BATCH] = unsafe { mem::zeroed() };
        let buffers = self.buffers.chunks_exact_mut(BUFFER);
        for (i, (message, buffer)) in messages.iter_mut().zip(buffers).take(self.batch).enumerate() {
            pieces[i] = iovec {
                iov_base: buffer.as_mut_ptr().cast(),
                iov_len: buffer.len(),
            };
            let header = &mut message.msg_hdr;
            header.msg_name = (&raw mut self.names[i]).cast();
            header.msg_namelen = Address::MAX_LEN;
            header.msg_iov = &raw mut pieces[i];
            header.msg_iovlen = 1;
            header.msg_control = self.controls[i].as_mut_ptr();
            header.msg_controllen = cmsg::Buffer::LEN as _;
        }
        let count = loop {
            // SAFETY: every message points at a name, a control buffer and one data buffer that nobody else refers to
            // now, with their true lengths.
            let count = unsafe {
                libc::recvmmsg(
                    self.socket.as_raw_fd(),
                    messages.as_mut_ptr(),
                    self.batch as u32,
                    libc::MSG_DONTWAIT as _,
                    std::ptr::null_mut(),
                )
            };
            if count >= 0 {
                break count as usize;
            }
            let error = io::Error::last_os_error();
            match error.raw_os_error() {
                Some(libc::EAGAIN) => {
                    self.batch = 1;
                    return Ok(0);
                }
                Some(libc::EINTR | libc::ECONNREFUSED | libc::EHOSTUNREACH | libc::ENETUNREACH) => {}
                _ => return Err(error),
            }
        };
        self.batch = BATCH;
        let mut packets = 0;
        let filled = messages
            .iter()
            .zip(self.names.iter())
            .zip(self.buffers.chunks_exact(BUFFER))
            .take(count);
        for ((message, name), buffer) in filled {
            self.counters.datagrams += 1;
            // SAFETY: as the system call left it, with its control buffer in `self.controls`.
            let ancillary = unsafe { Ancillary::read(&message.msg_hdr) };
            let data = buffer.get(..message.msg_len as usize).unwrap_or_default();
            let (Some((source, source_port)), Some(dest)) = (name.parse(), ancillary.dest) else {
                self.counters.no_address += 1;
                continue;
            };
            self.counters.bytes += data.len() as u64;
            let segment = ancillary.segment.unwrap_or(data.len()).max(1);
            for (index, data) in data.chunks(segment).enumerate() {
                let mut packet = RxPacket {
                    version: RoceVersion::V2,
                    source,
                    source_port,
                    dest,
                    ifindex: ancillary.ifindex,
                    traffic_class: ancillary.traffic_class,
                    hop_limit: ancillary.hop_limit,
                    flow_label: 0,
                    data,
                    icrc: &Segment {
                        index: index as u16,
                        identification: &self.identification,
                    },
                };
                if self.memberships.tunnels(dest) {
                    let Some(inner) = tunnel::leave(&packet) else {
                        self.counters.no_address += 1;
                        continue;
                    };
                    packet = inner;
                }
                if misdirected(packet.data, self.slot) {
                    self.counters.misdirected += 1;
                } else if !self.memberships.admits(packet.dest, ancillary.ifindex) {
                    self.counters.other_group += 1;
                } else {
                    packets += 1;
                    sink(&packet);
                }
            }
        }
        self.counters.packets += packets as u64;
        Ok(packets)
    }
}

/// Whether a packet is for another process: merged behind one of ours, or hashed to us for want of a slot.
fn misdirected(data: &[u8], slot: u8) -> bool {
    data.get(DEST_QPN)
        .is_some_and(|qpn| qpn[0] != slot && qpn[0] != MULTICAST_SLOT)
}

impl Ancillary {
    /// Reads the control messages of a datagram.
    ///
    /// # Safety
    /// As for [`cmsg::for_each`].
    unsafe fn read(message: &libc::msghdr) -> Ancillary {
        let mut out = Ancillary::default();
        let int = |data: &[u8]| data.first_chunk().map_or(0, |bytes| c_int::from_ne_bytes(*bytes));
        let mut sink = |level: c_int, kind: c_int, data: &[u8]| match (level, kind) {
            // struct in_pktinfo: interface index, local address, address in the header.
            (libc::IPPROTO_IP, libc::IP_PKTINFO) => {
                if let Some(&dest) = data.get(8..).and_then(|rest| rest.first_chunk::<4>()) {
                    out.dest = Some(Ipv4Addr::from(dest).into());
                    out.ifindex = int(data) as u32;
                }
            }
            // struct in6_pktinfo: address in the header, interface index.
            (libc::IPPROTO_IPV6, libc::IPV6_PKTINFO) => {
                if let Some((&dest, ifindex)) = data.split_first_chunk::<16>() {
                    out.dest = Some(Ipv6Addr::from(dest).to_canonical());
                    out.ifindex = int(ifindex) as u32;
                }
            }
            (libc::IPPROTO_IP, libc::IP_TOS) => out.traffic_class = data.first().copied().unwrap_or(0),
            (libc::IPPROTO_IP, libc::IP_TTL) => out.hop_limit = int(data) as u8,
            (libc::IPPROTO_IPV6, libc::IPV6_TCLASS) => out.traffic_class = int(data) as u8,
            (libc::IPPROTO_IPV6, libc::IPV6_HOPLIMIT) => out.hop_limit = int(data) as u8,
            (libc::SOL_UDP, libc::UDP_GRO) => out.segment = usize::try_from(int(data)).ok(),
            _ => {}
        };
        // SAFETY: the caller's promise.
        unsafe { cmsg::for_each(message, &mut sink) };
        out
    }
}

/// The ICRC check of one packet, which knows the packet's place in what the kernel merged.
struct Segment<'a> {
    index: u16,
    identification: &'a RefCell<Identification>,
}

impl IcrcCheck for Segment<'_> {
    fn valid(&self, packet: &RxPacket<'_>) -> bool {
        let Some((covered, received)) = packet.data.split_last_chunk::<ICRC_LEN>() else {
            return false;
        };
        let received = u32::from_le_bytes(*received);
        let addressing = Addressing {
            version: RoceVersion::V2,
            source: packet.source,
            dest: packet.dest,
            source_port: packet.source_port,
            traffic_class: 0,
            hop_limit: 0,
            flow_label: 0,
            id: self.index,
        };
        let Some(computed) = addressing.icrc(covered) else {
            return false;
        };
        if computed == received {
            return true;
        }
        let (true, Ok(total_len)) = (
            packet.source.is_ipv4(),
            u16::try_from(packet.data.len() + IPV4_UDP_LEN),
        ) else {
            return false;
        };
        let flow = (packet.source, packet.source_port, packet.dest);
        let mut identification = self.identification.borrow_mut();
        identification.accepts(flow, total_len, self.index, received, computed, coarse_now)
    }
}

/// A monotonic time that is cheap to ask for, a few milliseconds old at most.
pub(in crate::link) fn coarse_now() -> Duration {
    let mut now = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `now` is valid; on failure, which this clock has not, it stays zero.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC_COARSE, &raw mut now) };
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}
