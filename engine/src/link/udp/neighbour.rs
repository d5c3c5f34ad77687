//! Receive queues of other processes on this host, as full as the kernel says they are.
//!
//! Over loopback a packet is in the receiver's queue when the send returns, or lost because there was no room. So a
//! sender looks first: a process that does not get to its queue is waited for, as a lossless network would.

use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use super::{counted, socket};
use crate::link::Path;

/// Gives the receive socket of a slot of this host, if it may be had.
pub type Neighbours = Box<dyn Fn(u8) -> Option<OwnedFd> + Send>;

/// How long a queue that only grows is waited for. Whoever has not run for so long is stopped, and what was lost
/// then is its own loss.
const PATIENCE: Duration = Duration::from_secs(1);
/// What goes at a time to one who is not waited for, in bytes.
const UNCHECKED: usize = 1 << 16;

/// The receive queue of a process.
pub(super) struct Queue {
    socket: OwnedFd,
    /// Bytes that we fill it with at most, as the kernel counts: half of it, for we are not the only ones.
    capacity: usize,
    /// Bytes to send before the next look.
    room: usize,
    /// What the last look found, and since when it has found no less.
    found: usize,
    since: Duration,
}

impl Queue {
    /// The queue of the process that has `slot`, where packets of a path go to; `None` if they leave the host, or
    /// nothing is known.
    pub fn at_end_of(path: &Path, slot: u8, neighbours: &Neighbours) -> Option<Queue> {
        if path.source != path.dest {
            return None;
        }
        let socket = neighbours(slot)?;
        let [buffer] = socket::get(socket.as_fd(), libc::SOL_SOCKET, libc::SO_RCVBUF).ok()?;
        Some(Queue {
            socket,
            capacity: usize::try_from(buffer).ok()? / 2,
            room: 0,
            found: 0,
            since: Duration::ZERO,
        })
    }

    /// Whether a packet of so many bytes may go without another look.
    #[inline]
    pub fn takes(&mut self, len: usize) -> bool {
        let left = self.room.checked_sub(counted(len));
        self.room = left.unwrap_or(self.room);
        left.is_some()
    }

    /// Looks at the queue, which holds all that was sent before. Says whether there is room for a packet.
    pub fn look(&mut self, now: Duration, len: usize) -> bool {
        let [used, ..] = socket::meminfo(self.socket.as_fd());
        let used = usize::try_from(used).unwrap_or(0);
        if used < self.found || self.capacity.saturating_sub(used) >= counted(len) {
            self.since = now;
        }
        self.found = used;
        self.room = self.capacity.saturating_sub(used);
        if used == 0 {
            self.room = self.room.max(counted(len));
        }
        if now.saturating_sub(self.since) > PATIENCE {
            self.room = UNCHECKED;
        }
        self.takes(len)
    }
}
