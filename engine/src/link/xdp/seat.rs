//! A program's place at a port: its sockets, its frames to send, and the rings that it shares with the other programs.

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

use rustix::event::epoll;
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};

use super::hops::HopTable;
use super::layout::PEER_WINDOW;
use super::memory::{Control, Umem};
use super::ring::{CompletionRing, Descriptor, FillRing, RxRing, TxRing};
use super::socket::{self, Layout};
use super::{Geometry, circulation};

/// Entries of a receive ring that are handled at once.
const BATCH: u32 = 32;
/// Entries that may be seen and not yet given back while more arrive.
const HELD: u32 = 16;
/// Bytes of the longest packet that is sent or received: more than any RoCE packet has.
const LONGEST: usize = 8192;
/// Entries of a receive ring beyond which more than one peer's window waits: then many may come at any time.
const BURST: u32 = PEER_WINDOW + 16;
/// Frames to send that are used again and again while few are under way, so that the processor's caches have them.
const WINDOW: u32 = 64;
/// Of these, how many must be free to begin anew after each kick.
const WARM: u32 = 16;
/// How often a kernel that takes nothing is asked in one call.
const TRIES: u32 = 3;
/// When a kernel is asked again that takes nothing although the ring has room: nothing tells when it will.
const AGAIN: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 250_000,
};
/// After so long without any frame, all that were given to the kernel are taken for lost.
const RESCUE: Duration = Duration::from_secs(1);

/// A program's place at a port.
pub struct Seat {
    /// First of all, so that nothing waits behind it.
    queues: Vec<RxQueue>,
    transmitter: Transmitter,
    geometry: Geometry,
    control: Control,
    umem: Umem,
    /// Entries of a receive ring with which a burst begins; none any more, once there are frames for bursts.
    burst: u32,
    overlong: u64,
    invalid: u64,
}

/// The seat's socket on one queue, as far as it receives.
struct RxQueue {
    ring: RxRing,
    fill: FillRing,
    /// Frames for receiving on this queue.
    frames: Range<u32>,
    /// The seat, as owner of frames.
    owner: u8,
    /// Frames of entries that were seen: they are the program's until they are given back.
    held: Vec<u32>,
    /// Entries that were seen and not given back; of nonsense too, for which no frame is held.
    seen: u32,
    /// How many there may be before a batch ends.
    may_hold: u32,
    /// A copy of the packet, and how much of it is there.
    packet: Box<[u8]>,
    len: usize,
    /// A piece of the packet is missing.
    broken: bool,
    socket: OwnedFd,
}

/// What became of an entry of a receive ring.
enum Piece {
    Last,
    More,
    Overlong,
    Invalid,
}

/// The seat's socket that sends.
struct Transmitter {
    ring: TxRing,
    completions: CompletionRing,
    /// Its frames to send.
    frames: Range<u32>,
    /// Where the next packet is looked for, and where it is asked whether the first frames are free again.
    next: u32,
    turn: u32,
    /// The packet, until it is copied to its frames.
    draft: Box<[u8]>,
    chunk: usize,
    /// The kernel was not called for all that is in the ring.
    queued: bool,
    /// Calls that it takes for the kernel to refuse what the ring had already, one entry with each: its counter goes on
    /// with the last only.
    spoilt: u32,
    /// Since when there has been no frame.
    stuck: Option<Instant>,
    /// Readable when the kernel may take more, while that is watched: a watch costs time with every packet, both ways.
    room: OwnedFd,
    watched: Watched,
    timer: OwnedFd,
    kicks: u64,
    blocked: u64,
    dropped: u64,
    rescued: u64,
    queue: usize,
}

/// What tells when the kernel may take more.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Watched {
    Nothing,
    Ring,
    Timer,
}

/// Frames that were reserved to send one packet: one, or some that lie one behind the other.
#[derive(Debug)]
pub struct Frames {
    /// Number of the first.
    first: u32,
    /// Bytes of room.
    pub len: usize,
}

impl Seat {
    /// Takes the seat: `control` and `umem` are the port's memory files, `sockets` the seat's own, by queue.
    ///
    /// # Errors
    /// `InvalidData`, or what the kernel says, if these are not what they should be.
    pub fn open(
        geometry: Geometry,
        seat: u16,
        control: OwnedFd,
        umem: OwnedFd,
        sockets: Vec<OwnedFd>,
    ) -> io::Result<Seat> {
        if !geometry.is_sound() || seat >= geometry.seats || sockets.len() != usize::from(geometry.queues) {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let control = Control::map(&control, &geometry)?;
        let umem = Umem::map(&umem, &geometry)?;
        let transmitter = Transmitter::new(&geometry, seat, &sockets)?;
        let queues = (0..).zip(sockets);
        let queues = queues.map(|(queue, socket)| RxQueue::new(&geometry, seat, queue, socket));
        Ok(Seat {
            queues: queues.collect::<io::Result<_>>()?,
            transmitter,
            geometry,
            control,
            umem,
            burst: BURST,
            overlong: 0,
            invalid: 0,
        })
    }

    /// Hands every frame that has arrived to `sink`, whole, up to one batch of each queue. Its memory goes back to the
    /// kernel when some have come together, or nothing more arrives: so call until 0 is given before waiting.
    /// Gives the number handed over.
    #[inline]
    pub fn receive(&mut self, sink: &mut dyn FnMut(&[u8])) -> usize {
        let mut count = 0;
        let mut most = 0;
        for queue in &mut self.queues {
            let available = queue.ring.available();
            most = most.max(available);
            let waiting = available.min(BATCH);
            if waiting == 0 {
                if queue.seen > 0 {
                    queue.give_back(&self.control, &self.umem);
                }
                continue;
            }
            for ahead in 1..=waiting {
                if ahead < waiting {
                    self.umem.prefetch(queue.ring.peek(1).address);
                }
                match queue.next(&self.umem) {
                    Piece::Last => {
                        count += 1;
                        sink(&queue.packet[..queue.len]);
                        queue.len = 0;
                    }
                    Piece::More => {}
                    Piece::Overlong => self.overlong += 1,
                    Piece::Invalid => self.invalid += 1,
                }
            }
            if queue.seen >= queue.may_hold {
                queue.give_back(&self.control, &self.umem);
            }
        }
        if most > self.burst {
            self.expect_bursts();
        }
        count
    }

    /// Has so many frames circulate that the receive rings can be full: for packets of peers that wait for no
    /// acknowledgement, or of many.
    #[cold]
    pub fn expect_bursts(&mut self) {
        self.burst = u32::MAX;
        let wanted = self.geometry.for_bursts();
        for (number, queue) in (0..).zip(&self.queues) {
            circulation::raise(&self.control, &queue.fill, &self.geometry, number, wanted);
            if queue.fill.needs_wakeup() {
                socket::kick_fill(&queue.socket);
            }
        }
    }

    /// Room for a frame of `len` bytes, if there is any; [`Seat::kick`] may make some, or a little time: frames come
    /// back when the kernel has sent them. One at a time: submit it or give it back before the next.
    #[inline]
    pub fn reserve(&mut self, len: usize) -> Option<Frames> {
        self.transmitter.reserve(&self.control, len)
    }

    /// The room, to write to: a draft, which [`Seat::submit`] copies to the frames, because other programs could write
    /// to those. What it held before is still there.
    #[inline]
    pub fn bytes(&mut self, frames: &Frames) -> &mut [u8] {
        &mut self.transmitter.draft[..frames.len]
    }

    /// Queues the frame: [`Seat::kick`] hands it to the kernel.
    #[inline]
    pub fn submit(&mut self, frames: Frames) {
        self.transmitter.submit(&self.control, &self.umem, &frames);
    }

    /// Does not send it. (Nothing was noted yet.)
    pub fn give_back(&mut self, _frames: Frames) {}

    /// Hands what is queued to the kernel; false if it did not take all now. Costs nothing if nothing is queued.
    ///
    /// # Errors
    /// ENETDOWN: the interface is down; what is queued stays queued. ENXIO: it is gone, or has fewer queues now.
    #[inline]
    pub fn kick(&mut self) -> io::Result<bool> {
        if !self.transmitter.queued {
            return Ok(true);
        }
        let socket = &self.queues[self.transmitter.queue].socket;
        let taken = self.transmitter.kick(&self.control, socket);
        self.transmitter.begin_anew(&self.control);
        let full = matches!(taken, Ok(false));
        if full || self.transmitter.watched != Watched::Nothing {
            self.transmitter.watch(socket, full);
        }
        taken
    }

    /// Readable when frames have arrived, one of each queue.
    pub fn receive_fds(&self) -> impl Iterator<Item = RawFd> {
        self.queues.iter().map(|queue| queue.socket.as_raw_fd())
    }

    /// Readable when the kernel may take what [`Seat::kick`] could not hand over: the transmit ring is not more than
    /// half full, or it was not and some time has gone by. It says nothing of free frames: those come back in a short while without anything becoming readable,
    /// so try again shortly when [`Seat::reserve`] gives none though all was handed over.
    pub fn transmit_fd(&self) -> RawFd {
        self.transmitter.room.as_raw_fd()
    }

    /// The port's table of next hops.
    pub fn hops(&self) -> &HopTable {
        self.control.hops()
    }

    /// Counters by name, added to `out`.
    pub fn counters(&self, out: &mut dyn FnMut(&'static str, u64)) {
        let statistics = || self.queues.iter().map(|queue| socket::statistics(&queue.socket));
        let transmitter = &self.transmitter;
        out("xdp_rx_overlong", self.overlong);
        out("xdp_rx_invalid", self.invalid);
        out("xdp_rx_ring_full", statistics().map(|it| it.rx_ring_full).sum());
        out("xdp_rx_refused", statistics().map(|it| it.rx_dropped).sum());
        out("xdp_tx_kicks", transmitter.kicks);
        out("xdp_tx_blocked", transmitter.blocked);
        out("xdp_tx_dropped", transmitter.dropped);
        out("xdp_tx_rescued", transmitter.rescued);
        out("xdp_tx_invalid", statistics().map(|it| it.tx_invalid_descs).sum());
    }
}

impl RxQueue {
    fn new(geometry: &Geometry, seat: u16, queue: u16, socket: OwnedFd) -> io::Result<RxQueue> {
        let layout = Layout::of(socket.as_fd())?;
        let may_hold = HELD.min(geometry.rx_ring / 4);
        Ok(RxQueue {
            ring: layout.rx(socket.as_fd(), geometry.rx_ring)?,
            fill: layout.fill(socket.as_fd(), geometry.fill_ring())?,
            frames: geometry.frames_of_queue(queue),
            owner: owner(seat),
            held: Vec::with_capacity((may_hold + BATCH) as usize),
            seen: 0,
            may_hold,
            packet: vec![0; LONGEST].into_boxed_slice(),
            len: 0,
            broken: false,
            socket,
        })
    }

    /// Sees the next entry of the ring, and copies what it stands for.
    ///
    /// A copy, because other programs could write to the frame: what was checked in a packet must stay so.
    #[inline]
    fn next(&mut self, umem: &Umem) -> Piece {
        let piece = self.ring.peek(0);
        self.ring.advance();
        self.seen += 1;
        let len = piece.len as usize;
        let (frame, _) = umem.locate(piece.address);
        let known = u32::try_from(frame).is_ok_and(|frame| self.frames.contains(&frame));
        if known {
            self.held.push(frame as u32);
        }
        let fits = self.len + len <= self.packet.len();
        if !self.broken {
            let whole = known && fits && umem.copy_out(piece.address, &mut self.packet[self.len..][..len]);
            self.broken = !whole;
            self.len += len;
        }
        let more = piece.options & libc::XDP_PKT_CONTD != 0;
        match (self.broken, more) {
            (_, true) => Piece::More,
            (false, false) => Piece::Last,
            (true, false) => {
                let overlong = self.len > self.packet.len();
                (self.len, self.broken) = (0, false);
                if overlong { Piece::Overlong } else { Piece::Invalid }
            }
        }
    }

    /// Gives the kernel the frames of all entries that were seen.
    ///
    /// First they are marked as the program's, then the ring's entries are released, then each frame is given to the
    /// kernel by whoever takes the mark away. So a program can be killed anywhere in here, and who tidies up after it
    /// finds each frame in the ring or marked; one that is killed between mark and fill ring costs one frame.
    fn give_back(&mut self, control: &Control, umem: &Umem) {
        for &frame in &self.held {
            control.own(frame, self.owner);
        }
        self.ring.release();
        self.seen = 0;
        for &frame in &self.held {
            if control.disown(frame, self.owner) {
                self.fill.push(umem.address_of(frame));
            }
        }
        self.held.clear();
        if self.fill.needs_wakeup() {
            socket::kick_fill(&self.socket);
        }
    }
}

impl Transmitter {
    fn new(geometry: &Geometry, seat: u16, sockets: &[OwnedFd]) -> io::Result<Transmitter> {
        let queue = usize::from(geometry.tx_queue(seat));
        let socket = &sockets[queue];
        let layout = Layout::of(socket.as_fd())?;
        let room = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let chunk = geometry.chunk as usize;
        let mut ring = layout.tx(socket.as_fd(), geometry.tx_ring)?;
        let left = ring.waiting();
        Ok(Transmitter {
            queued: left > 0,
            spoilt: if left > 0 { left + 1 } else { 0 },
            ring,
            completions: layout.completion(socket.as_fd(), geometry.completion_ring())?,
            frames: geometry.frames_of_seat(seat),
            next: 0,
            turn: WINDOW.min(geometry.tx_ring),
            draft: vec![0; LONGEST].into_boxed_slice(),
            chunk,
            stuck: None,
            room,
            watched: Watched::Nothing,
            timer: timerfd_create(
                TimerfdClockId::Monotonic,
                TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK,
            )?,
            kicks: 0,
            blocked: 0,
            dropped: 0,
            rescued: 0,
            queue,
        })
    }

    #[inline]
    fn reserve(&mut self, control: &Control, len: usize) -> Option<Frames> {
        if len > self.draft.len() {
            return None;
        }
        let count = self.pieces(len);
        if !self.ring.has_room(count) {
            return None;
        }
        if self.next >= self.turn {
            self.turn_back(control);
        }
        if !self.are_free(control, self.next, count) && !self.search(control, count) {
            return None;
        }
        self.stuck = None;
        let first = self.frames.start + self.next;
        Some(Frames { first, len })
    }

    /// Frames that a packet takes.
    #[inline]
    fn pieces(&self, len: usize) -> u32 {
        if len <= self.chunk {
            return 1;
        }
        // No more than `LONGEST` has.
        len.div_ceil(self.chunk) as u32
    }

    #[inline]
    fn are_free(&self, control: &Control, at: u32, count: u32) -> bool {
        let frame = self.frames.start + at;
        frame + count <= self.frames.end && (frame..frame + count).all(|frame| !control.is_busy(frame))
    }

    /// Begins again with the first frames where what was just sent is done with them: they are in the cache still.
    #[inline]
    fn begin_anew(&mut self, control: &Control) {
        self.drain(control);
        if self.are_free(control, 0, self.next.clamp(1, WARM)) {
            (self.next, self.turn) = (0, WINDOW.min(self.frames.len() as u32));
        }
    }

    /// Begins again with the first frames, if they are free or there are no more.
    #[cold]
    fn turn_back(&mut self, control: &Control) {
        self.drain(control);
        let count = self.frames.len() as u32;
        let window = WINDOW.min(count);
        if self.next >= count || self.are_free(control, 0, window) {
            (self.next, self.turn) = (0, window);
        } else {
            self.turn = (self.next + window).min(count);
        }
    }

    /// Looks for free frames everywhere.
    #[cold]
    fn search(&mut self, control: &Control, count: u32) -> bool {
        let all = self.frames.len() as u32;
        self.drain(control);
        let start = self.next;
        let mut places = (0..all).map(|step| (start + step) % all);
        if let Some(at) = places.find(|&at| self.are_free(control, at, count)) {
            (self.next, self.turn) = (at, (at - at % WINDOW + WINDOW).min(all));
            return true;
        }
        let now = Instant::now();
        let since = *self.stuck.get_or_insert(now);
        if now.duration_since(since) < RESCUE || self.ring.waiting() > 0 {
            return false;
        }
        // Another program took them from the completion ring, and was killed before it could say so.
        for frame in self.frames.clone() {
            control.set_busy(frame, false);
        }
        self.rescued += u64::from(all);
        (self.next, self.turn) = (0, WINDOW.min(all));
        true
    }

    #[inline]
    fn submit(&mut self, control: &Control, umem: &Umem, frames: &Frames) {
        let len = frames.len.min(self.draft.len());
        if !umem.copy_in(frames.first, &self.draft[..len]) {
            return;
        }
        let count = self.pieces(len);
        let mut left = len;
        for piece in 0..count {
            let last = piece + 1 == count;
            let here = left.min(self.chunk);
            left -= here;
            let frame = frames.first + piece;
            control.set_busy(frame, true);
            self.ring.write(
                piece,
                Descriptor {
                    address: umem.address_of(frame),
                    len: here as u32,
                    options: if last { 0 } else { libc::XDP_PKT_CONTD },
                },
            );
        }
        self.ring.publish(count);
        self.next += count;
        self.queued = true;
    }

    fn kick(&mut self, control: &Control, socket: &OwnedFd) -> io::Result<bool> {
        if !self.ring.needs_wakeup() {
            self.queued = false;
            return Ok(true);
        }
        let mut left = u32::MAX;
        let mut tries = 0;
        loop {
            self.kicks += 1;
            let Err(error) = socket::kick_transmit(socket) else {
                if self.spoilt > 0 && self.goes_on() {
                    continue;
                }
                // Nothing is left, or the driver goes on by itself.
                self.queued = false;
                return Ok(true);
            };
            match error.raw_os_error() {
                Some(libc::EINTR) => continue,
                Some(libc::EAGAIN | libc::ENOBUFS) => {}
                // The driver has dropped one: it must not lose more.
                Some(libc::EBUSY) => {
                    self.dropped += 1;
                    tries = TRIES;
                }
                _ => return Err(error),
            }
            let waiting = self.ring.waiting();
            if waiting == 0 {
                self.queued = false;
                return Ok(true);
            }
            if waiting >= left {
                tries += 1;
            }
            if tries >= TRIES {
                self.blocked += 1;
                return Ok(false);
            }
            left = waiting;
            self.drain(control);
        }
    }

    /// Whether the kernel is to be called again, as it refuses what an earlier program left.
    #[cold]
    fn goes_on(&mut self) -> bool {
        let waits = self.ring.waiting() > 0;
        self.spoilt = if waits { self.spoilt - 1 } else { 0 };
        waits
    }

    /// Has `room` watch the ring, or the time where the ring has room already, or nothing.
    #[cold]
    fn watch(&mut self, socket: &OwnedFd, full: bool) {
        let watched = match full {
            false => Watched::Nothing,
            true if self.ring.is_writable() => Watched::Timer,
            true => Watched::Ring,
        };
        if let Err(error) = self.try_watch(socket, watched) {
            // It is tried again with the next kick.
            tracing::debug!(%error, "a transmit ring can't be watched");
        }
    }

    fn try_watch(&mut self, socket: &OwnedFd, watched: Watched) -> rustix::io::Result<()> {
        if watched == Watched::Timer {
            let once = Itimerspec {
                it_interval: Timespec::default(),
                it_value: AGAIN,
            };
            timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &once)?;
        }
        if watched == self.watched {
            return Ok(());
        }
        match self.watched {
            Watched::Nothing => {}
            Watched::Ring => epoll::delete(&self.room, socket)?,
            Watched::Timer => epoll::delete(&self.room, &self.timer)?,
        }
        self.watched = Watched::Nothing;
        let data = epoll::EventData::new_u64(0);
        match watched {
            Watched::Nothing => {}
            Watched::Ring => epoll::add(&self.room, socket, data, epoll::EventFlags::OUT)?,
            Watched::Timer => epoll::add(&self.room, &self.timer, data, epoll::EventFlags::IN)?,
        }
        self.watched = watched;
        Ok(())
    }

    /// Takes all frames that were sent from the completion ring, of this program and of others.
    fn drain(&self, control: &Control) {
        self.completions.drain(|address| {
            if let Ok(frame) = u32::try_from(address / self.chunk as u64) {
                control.set_busy(frame, false);
            }
        });
    }
}

/// A seat, as owner of frames.
pub(super) fn owner(seat: u16) -> u8 {
    // There are at most 251.
    seat as u8 + 1
}

#[cfg(test)]
mod tests;
