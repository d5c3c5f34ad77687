//! How the memory of a port is divided: two memory files, one of frames and one of what processes tell each other.
#![deny(unsafe_code)]

use std::ops::Range;

use serde::{Deserialize, Serialize};

/// Bytes before a received frame, which XDP programs may write to (`XDP_PACKET_HEADROOM`).
pub const HEADROOM: usize = 256;
/// Frames for receiving on each queue beyond those that the seats can hold: what lies in the fill ring at least.
const SPARE: u32 = 512;
/// Of these, what circulates on each queue beyond what the programs can hold.
const MARGIN: u32 = 128;
/// Frames that one peer has under way at most, where it awaits acknowledgements; as many answers to READs may come besides.
pub const PEER_WINDOW: u32 = 256;
/// Queues that a port can have.
pub const MAX_QUEUES: usize = 64;
/// Frames of each seat that are on their way from its ring to the fill ring.
const RETURNING: u32 = 64;

/// What a port was made of; the same for the daemon and all programs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Geometry {
    /// Bytes of a frame: 2048 or 4096.
    pub chunk: u32,
    /// Receive queues of the interface that are served.
    pub queues: u16,
    /// Programs that can use the port at once.
    pub seats: u16,
    /// Entries of each receive ring; each seat has one on each queue. A power of two.
    pub rx_ring: u32,
    /// Entries of each transmit ring, and frames to send that each seat has. A power of two.
    pub tx_ring: u32,
}

impl Geometry {
    /// True if every number is one that a port can have: what comes from elsewhere is to be asked before it is used.
    pub fn is_sound(&self) -> bool {
        matches!(self.chunk, 2048 | 4096)
            && (1..=MAX_QUEUES).contains(&usize::from(self.queues))
            && (1..=251).contains(&self.seats)
            && self.rx_ring.is_power_of_two()
            && self.tx_ring.is_power_of_two()
            && (16..=4096).contains(&self.rx_ring)
            && (16..=4096).contains(&self.tx_ring)
    }

    /// Frames for receiving on each queue: what all seats hold when their rings are full and they are giving some back,
    /// and some more. So programs that stop never starve the others.
    pub fn rx_frames(&self) -> u32 {
        u32::from(self.seats) * (self.rx_ring + RETURNING) + SPARE
    }

    /// Frames of each queue that suffice while no more than so many programs have a seat: what all of them can hold, and
    /// some more. One alone takes nobody's: it begins with what a peer has under way, as few that are used again soon are
    /// better than many that lie in no cache, and has [`Geometry::for_bursts`] circulate when it needs them.
    pub fn circulating(&self, programs: u16) -> u32 {
        match programs {
            0 | 1 => (PEER_WINDOW + RETURNING).min(self.for_bursts()),
            _ => self.held_by(programs.into()),
        }
    }

    /// Frames of each queue with which the receive ring of one program can be full.
    pub fn for_bursts(&self) -> u32 {
        self.held_by(1)
    }

    fn held_by(&self, programs: u32) -> u32 {
        (programs * (self.rx_ring + RETURNING) + MARGIN).min(self.rx_frames())
    }

    /// All frames. Those for receiving come first, queue by queue; then those for sending, seat by seat.
    pub fn frames(&self) -> u32 {
        u32::from(self.queues) * self.rx_frames() + u32::from(self.seats) * self.tx_ring
    }

    /// Numbers of the frames for receiving on a queue.
    pub fn frames_of_queue(&self, queue: u16) -> Range<u32> {
        let start = u32::from(queue) * self.rx_frames();
        start..start + self.rx_frames()
    }

    /// Numbers of the frames for sending of a seat.
    pub fn frames_of_seat(&self, seat: u16) -> Range<u32> {
        let start = u32::from(self.queues) * self.rx_frames() + u32::from(seat) * self.tx_ring;
        start..start + self.tx_ring
    }

    /// The queue on which a seat sends.
    pub fn tx_queue(&self, seat: u16) -> u16 {
        seat % self.queues
    }

    /// Entries of a queue's fill ring: room for all its frames, so that it is never full.
    pub fn fill_ring(&self) -> u32 {
        (self.rx_frames() + 1).next_power_of_two()
    }

    /// Entries of a queue's completion ring: room for all frames that are sent on it.
    pub fn completion_ring(&self) -> u32 {
        let seats = u32::from(self.seats).div_ceil(self.queues.into());
        (seats * self.tx_ring).next_power_of_two()
    }

    /// Bytes of the memory file of frames.
    pub fn umem_len(&self) -> usize {
        self.frames() as usize * self.chunk as usize
    }

    /// The longest frame that is received in one piece, in bytes.
    pub fn piece(&self) -> usize {
        self.chunk as usize - HEADROOM
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_divided_without_gaps() {
        let geometry = Geometry {
            chunk: 4096,
            queues: 3,
            seats: 5,
            rx_ring: 64,
            tx_ring: 32,
        };
        assert!(geometry.is_sound());
        let mut next = 0;
        let queues = (0..3).map(|queue| geometry.frames_of_queue(queue));
        for range in queues.chain((0..5).map(|seat| geometry.frames_of_seat(seat))) {
            assert_eq!(range.start, next);
            next = range.end;
        }
        assert_eq!(next, geometry.frames());
        assert!(geometry.fill_ring() > geometry.rx_frames());
        // All seats can be full, and one receives still.
        assert!(geometry.circulating(5) > 5 * geometry.rx_ring);
        assert!(geometry.circulating(5) <= geometry.rx_frames());
        // One alone begins with less where its ring is long.
        assert_eq!(geometry.circulating(1), geometry.for_bursts());
        let long = Geometry {
            rx_ring: 2048,
            ..geometry
        };
        assert!(long.circulating(1) > PEER_WINDOW && long.circulating(1) < 2 * PEER_WINDOW);
        assert!(long.for_bursts() > long.rx_ring && long.circulating(2) > 2 * long.rx_ring);
        // Seats 0 and 3 send on queue 0.
        assert!(geometry.completion_ring() >= 2 * geometry.tx_ring);
    }
}
