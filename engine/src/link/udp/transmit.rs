//! The sending half: packets gathered in one buffer, equal ones to one flow as one segmented send.

use std::io;
use std::mem;
use std::net::IpAddr;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};

use libc::{c_int, iovec, mmsghdr};
use rustix::event::epoll;

use super::cmsg;
use super::flows::{Flow, Flows};
use super::neighbour::Neighbours;
use super::receive::coarse_now;
use super::socket;
use super::tunnel;
use crate::link::headers::Addressing;
use crate::link::{ICRC_LEN, Path, RoceVersion, TransmitError};
use crate::memory::Fault;

/// Bytes of packets gathered before they must be sent.
const BUFFER: usize = 1 << 18;
/// Messages gathered.
const MAX_MESSAGES: usize = 64;
/// Messages handed over by one system call.
const BATCH: usize = 16;
/// Segments of one send that every kernel with segmentation takes.
const MAX_SEGMENTS: u16 = 64;
/// Bytes of one send: 65,535 less the headers of IPv6 and UDP.
const MAX_SEND: usize = 65_535 - 48;

/// Counters of the sending half.
#[derive(Default)]
pub(super) struct Counters {
    pub packets: u64,
    pub bytes: u64,
    pub sends: u64,
    pub blocked: u64,
    pub waits: u64,
    pub lost_mtu: u64,
    pub lost_unreachable: u64,
    pub lost_refused: u64,
    pub lost_other: u64,
}

/// Packets that leave as one: of `segment` bytes each, ICRC included, but the last may be shorter.
#[derive(Clone, Copy)]
struct Message {
    flow: usize,
    start: usize,
    len: usize,
    segment: usize,
    segments: u16,
    /// The last packet was shorter: nothing may follow.
    closed: bool,
    traffic_class: u8,
    hop_limit: u8,
}

impl Message {
    fn end(&self) -> usize {
        self.start + self.len
    }
}

/// The sending sockets and what waits to be sent.
pub(super) struct Transmitter {
    pub(super) flows: Flows,
    buffer: Box<[u8]>,
    messages: Vec<Message>,
    /// The control messages of one system call.
    controls: Box<[cmsg::Buffer; BATCH]>,
    /// Whether the kernel segments.
    segmentation: bool,
    /// Watches the sockets that are full.
    full: OwnedFd,
    pub counters: Counters,
}

impl Transmitter {
    /// `like` is any UDP socket, to ask the kernel what it can.
    /// `loopback`: all paths are of the loopback interface.
    pub fn new(like: BorrowedFd<'_>, loopback: bool, neighbours: Neighbours) -> io::Result<Transmitter> {
        Ok(Transmitter {
            flows: Flows::new(loopback, neighbours),
            buffer: vec![0; BUFFER].into_boxed_slice(),
            messages: Vec::with_capacity(MAX_MESSAGES),
            controls: Box::new([cmsg::Buffer::EMPTY; BATCH]),
            segmentation: socket::segments(like),
            full: epoll::create(epoll::CreateFlags::CLOEXEC)?,
            counters: Counters::default(),
        })
    }

    /// Readable when a socket that was full at the last flush has room again; `None` if none was.
    pub fn full_fd(&self) -> Option<RawFd> {
        (!self.messages.is_empty()).then(|| self.full.as_raw_fd())
    }

    /// As [`crate::link::Transmit::packet`].
    pub fn packet(
        &mut self,
        path: &Path,
        dest_qpn: u32,
        len: usize,
        fill: &mut dyn FnMut(&mut [u8]) -> Result<(), Fault>,
    ) -> Result<(), TransmitError> {
        let flow = match self.find(path, dest_qpn) {
            Ok(Some(flow)) => flow,
            Ok(None) => return Err(TransmitError::Full),
            Err(error) => {
                self.lose(&error, 1);
                return Ok(());
            }
        };
        let (front, header) = match self.flows.get(flow) {
            // In the tunnel the packet itself says it.
            Flow {
                tunnelled: true,
                default_header,
                ..
            } => (tunnel::FRONT, *default_header),
            _ => (0, (path.traffic_class, path.hop_limit_on_wire())),
        };
        let whole = front + len + ICRC_LEN;
        if whole > MAX_SEND {
            self.counters.lost_mtu += 1;
            return Ok(());
        }
        if !self.has_room(whole) {
            // What is not sent then waits for its own socket, and what is wrong with the link its owner will hear.
            _ = self.flush();
        }
        if self.flows.get(flow).full || !self.is_awaited(flow, whole) {
            self.counters.waits += 1;
            return Err(TransmitError::Busy);
        }
        if !self.has_room(whole) {
            return Err(TransmitError::Full);
        }
        let start = self.used();
        let (id, first) = match self.messages.last() {
            Some(last) if self.joins(flow, header, whole) => (last.segments, false),
            _ => (0, true),
        };
        let (head, bytes) = self.buffer[start..start + whole].split_at_mut(front);
        fill(&mut bytes[..len]).map_err(TransmitError::Fault)?;
        if front > 0 {
            tunnel::enter(path, bytes.len(), head);
        }
        seal(self.flows.get(flow), id, bytes);
        if first {
            self.messages.push(Message {
                flow,
                start,
                len: 0,
                segment: whole,
                segments: 0,
                closed: !self.segmentation,
                traffic_class: header.0,
                hop_limit: header.1,
            });
        }
        if let Some(last) = self.messages.last_mut() {
            last.len += whole;
            last.segments += 1;
            last.closed |= whole < last.segment;
        }
        Ok(())
    }

    /// The flow for a packet; `None` if all flows that there may be have something to send.
    fn find(&mut self, path: &Path, dest_qpn: u32) -> io::Result<Option<usize>> {
        let messages = &self.messages;
        let busy = |flow| messages.iter().any(|message| message.flow == flow);
        if let Some(flow) = self.flows.find(path, dest_qpn, busy)? {
            return Ok(Some(flow));
        }
        _ = self.flush();
        let messages = &self.messages;
        let busy = |flow| messages.iter().any(|message| message.flow == flow);
        self.flows.find(path, dest_qpn, busy)
    }

    /// Whether a packet of `whole` bytes can be gathered.
    fn has_room(&self, whole: usize) -> bool {
        self.messages.len() < MAX_MESSAGES && self.used() + whole <= BUFFER
    }

    /// Whether there is room for a packet of `whole` bytes where the flow ends, as far as that is known.
    fn is_awaited(&mut self, flow: usize, whole: usize) -> bool {
        let queue = self.flows.get_mut(flow).queue.as_mut();
        if queue.is_none_or(|queue| queue.takes(whole)) {
            return true;
        }
        // Only what has left can be seen there.
        _ = self.flush();
        let queue = self.flows.get_mut(flow).queue.as_mut();
        queue.is_none_or(|queue| queue.look(coarse_now(), whole))
    }

    /// Whether a packet of `whole` bytes may follow in the last message.
    fn joins(&self, flow: usize, header: (u8, u8), whole: usize) -> bool {
        self.messages.last().is_some_and(|last| {
            last.flow == flow
                && !last.closed
                && whole <= last.segment
                && last.segments < MAX_SEGMENTS
                && last.len + whole <= MAX_SEND
                && header == (last.traffic_class, last.hop_limit)
        })
    }

    /// Bytes of the buffer in use.
    fn used(&self) -> usize {
        self.messages.last().map_or(0, Message::end)
    }

    /// As [`crate::link::Link::flush`]. A socket that is full holds up its own messages only.
    pub fn flush(&mut self) -> io::Result<bool> {
        let (mut next, mut held) = (0, 0);
        let mut outcome = Ok(());
        while let Some(&message) = self.messages.get(next) {
            // The held messages are those in front, each of a flow that was tried in vain.
            if outcome.is_err() || self.messages[..held].iter().any(|it| it.flow == message.flow) {
                self.messages[held] = message;
                (held, next) = (held + 1, next + 1);
                continue;
            }
            match self.send_some(next) {
                Ok(count) => {
                    for message in &self.messages[next..][..count] {
                        self.counters.sends += 1;
                        self.counters.packets += u64::from(message.segments);
                        self.counters.bytes += message.len as u64;
                    }
                    next += count;
                    self.watch(message.flow, false);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.counters.blocked += 1;
                    self.watch(message.flow, true);
                    self.messages[held] = message;
                    (held, next) = (held + 1, next + 1);
                }
                Err(error) => match self.refused(next, &error) {
                    Ok(lost) => next += lost,
                    Err(error) => outcome = Err(error),
                },
            }
        }
        self.messages.truncate(held);
        let mut end = 0;
        for message in &mut self.messages {
            self.buffer.copy_within(message.start..message.end(), end);
            message.start = end;
            end = message.end();
        }
        outcome.map(|()| held == 0)
    }

    /// Has a socket that is full watched, or no longer.
    fn watch(&mut self, flow: usize, full: bool) {
        let flow = self.flows.get_mut(flow);
        if flow.full == full {
            return;
        }
        flow.full = full;
        let watched = if full {
            epoll::add(
                &self.full,
                &flow.socket,
                epoll::EventData::new_u64(0),
                epoll::EventFlags::OUT,
            )
        } else {
            epoll::delete(&self.full, &flow.socket)
        };
        if let Err(error) = watched {
            // It is tried again with everything that is sent.
            tracing::debug!(%error, "a full socket can't be watched");
        }
    }

    /// Sends the messages from `next` on that are of one flow, as many as one system call takes; gives how many it took.
    fn send_some(&mut self, next: usize) -> io::Result<usize> {
        let waiting = &self.messages[next..];
        let flow = self.flows.get(waiting[0].flow);
        let mut address = flow.address.0;
        let mut pieces = [const {
            iovec {
                iov_base: std::ptr::null_mut(),
                iov_len: 0,
            }
        }; BATCH];
        // SAFETY: all zeros is a valid, empty message header.
        let mut headers: [mmsghdr; BATCH] = unsafe { mem::zeroed() };
        let mut count = 0;
        for (i, message) in waiting
            .iter()
            .take_while(|it| it.flow == waiting[0].flow)
            .take(BATCH)
            .enumerate()
        {
            let bytes = &self.buffer[message.start..message.end()];
            pieces[i] = iovec {
                iov_base: bytes.as_ptr().cast_mut().cast(),
                iov_len: bytes.len(),
            };
            let header = &mut headers[i].msg_hdr;
            header.msg_name = (&raw mut address).cast();
            header.msg_namelen = flow.address.1;
            header.msg_iov = &raw mut pieces[i];
            header.msg_iovlen = 1;
            let used = message.control(flow, &mut self.controls[i]);
            if used > 0 {
                header.msg_control = self.controls[i].as_mut_ptr();
                header.msg_controllen = used as _;
            }
            count = i + 1;
        }
        // SAFETY: every header points at an address, one data buffer and a control buffer that nobody else
        // refers to now, with their true lengths; the kernel only reads them.
        let sent = unsafe {
            libc::sendmmsg(
                flow.socket.as_raw_fd(),
                headers.as_mut_ptr(),
                count as u32,
                (libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) as _,
            )
        };
        if sent > 0 {
            Ok(sent as usize)
        } else {
            Err(io::Error::last_os_error())
        }
    }

    /// Deals with the refusal of a message: it is lost, or sent in another way. Gives how many are lost, or errors of the
    /// link.
    pub(super) fn refused(&mut self, at: usize, error: &io::Error) -> io::Result<usize> {
        let message = self.messages[at];
        let segmented = message.segments > 1;
        match error.raw_os_error() {
            // The way out can't segment (no checksum offload).
            Some(libc::EIO | libc::EOPNOTSUPP) if segmented => {
                self.segmentation = false;
                self.split(at);
                return Ok(0);
            }
            Some(libc::EBADF | libc::ENOTSOCK | libc::EFAULT) => {
                return Err(io::Error::from_raw_os_error(
                    error.raw_os_error().unwrap_or(libc::EBADF),
                ));
            }
            // The address went; if it comes back, a new socket will do.
            Some(libc::EADDRNOTAVAIL | libc::ENODEV) => self.flows.forget(message.flow),
            _ => {}
        }
        // Segments longer than the MTU give EINVAL on older kernels.
        if segmented && error.raw_os_error() == Some(libc::EINVAL) {
            self.counters.lost_mtu += u64::from(message.segments);
        } else {
            self.lose(error, message.segments);
        }
        Ok(1)
    }

    /// Makes the segments of a message single messages, with the identification 0.
    fn split(&mut self, at: usize) {
        let whole = self.messages.remove(at);
        let flow = self.flows.get(whole.flow);
        let mut singles = Vec::with_capacity(usize::from(whole.segments));
        let mut start = whole.start;
        for bytes in self.buffer[whole.start..whole.end()].chunks_mut(whole.segment) {
            seal(flow, 0, bytes.get_mut(flow.front()..).unwrap_or_default());
            let len = bytes.len();
            singles.push(Message {
                start,
                len,
                segment: len,
                segments: 1,
                closed: true,
                ..whole
            });
            start += len;
        }
        self.messages.splice(at..at, singles);
    }

    /// Counts packets that could not be sent.
    fn lose(&mut self, error: &io::Error, packets: u16) {
        let counter = match error.raw_os_error() {
            Some(libc::EMSGSIZE) => &mut self.counters.lost_mtu,
            Some(
                libc::ENETUNREACH | libc::EHOSTUNREACH | libc::ENETDOWN | libc::EADDRNOTAVAIL | libc::ENODEV,
            ) => &mut self.counters.lost_unreachable,
            Some(libc::EPERM | libc::EACCES | libc::ECONNREFUSED) => &mut self.counters.lost_refused,
            _ => &mut self.counters.lost_other,
        };
        *counter += u64::from(packets);
        tracing::debug!(%error, packets, "packets could not be sent");
    }
}

impl Message {
    /// Writes what the send says beyond the socket's defaults; gives the bytes used.
    fn control(&self, flow: &Flow, buffer: &mut cmsg::Buffer) -> usize {
        let mut writer = cmsg::Writer::new(buffer);
        if self.segments > 1 {
            writer.push(libc::SOL_UDP, libc::UDP_SEGMENT, self.segment as u16);
        }
        if flow.default_header != (self.traffic_class, self.hop_limit) {
            let (class, hops) = (c_int::from(self.traffic_class), c_int::from(self.hop_limit));
            match flow.dest {
                IpAddr::V4(_) => {
                    writer.push(libc::IPPROTO_IP, libc::IP_TOS, class);
                    writer.push(libc::IPPROTO_IP, libc::IP_TTL, hops);
                }
                IpAddr::V6(_) => {
                    writer.push(libc::IPPROTO_IPV6, libc::IPV6_TCLASS, class);
                    writer.push(libc::IPPROTO_IPV6, libc::IPV6_HOPLIMIT, hops);
                }
            }
        }
        writer.len()
    }
}

/// Writes the ICRC to the end of a packet.
fn seal(flow: &Flow, id: u16, packet: &mut [u8]) {
    let addressing = Addressing {
        version: RoceVersion::V2,
        source: flow.source,
        dest: flow.dest,
        source_port: flow.port,
        traffic_class: 0,
        hop_limit: 0,
        flow_label: 0,
        id,
    };
    if let Some((covered, icrc)) = packet.split_last_chunk_mut::<ICRC_LEN>() {
        // Addresses of two families: the socket can't send it anyway.
        *icrc = addressing.icrc(covered).unwrap_or_default().to_le_bytes();
    }
}
