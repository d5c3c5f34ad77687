//! The responder's resources: READs, atomics, ATOMIC WRITEs and FLUSHes that were carried out, kept so that they can be
//! answered, and answered again when the peer asks again.

use std::collections::VecDeque;

use ferroce_wire::{Psn, Reth};

use crate::device::PdId;

/// What a resource answers with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    /// The memory of a READ, as it is when the response leaves.
    Memory(Reth),
    /// What an atomic found: it is done once, however often it is asked for.
    Original(u64),
    /// Nothing but that an ATOMIC WRITE is done, once too.
    Stored,
    /// Nothing but that a FLUSH is done.
    Flushed,
}

/// A READ or atomic, and how much of its answer is due.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Resource {
    /// PSN of the request.
    pub psn: Psn,
    /// PSNs that it takes.
    packets: u32,
    /// MSN that its responses carry.
    pub msn: u32,
    /// The domain of the memory that it reads.
    pub pd: PdId,
    pub answer: Answer,
    /// The packet with which the answer that is under way began.
    start: u32,
    /// The packet to send next.
    pub next: u32,
    /// The packet after the last one to send.
    end: u32,
    /// The packet after the last one that was ever sent.
    sent: u32,
}

impl Resource {
    /// A request that has just been carried out, with its whole answer due.
    pub fn new(psn: Psn, packets: u32, msn: u32, pd: PdId, answer: Answer) -> Resource {
        Resource {
            psn,
            packets,
            msn,
            pd,
            answer,
            start: 0,
            next: 0,
            end: packets,
            sent: 0,
        }
    }

    /// Whether it is a FLUSH.
    fn is_flush(&self) -> bool {
        self.answer == Answer::Flushed
    }

    /// Whether some of the answer is to be sent.
    pub fn is_due(&self) -> bool {
        self.next < self.end
    }

    /// The next packet has been sent.
    pub fn advance(&mut self) {
        self.next += 1;
        self.sent = self.sent.max(self.next);
    }

    /// Whether the whole answer has left once: the peer may have it, although it asked again.
    pub fn was_answered(&self) -> bool {
        self.sent >= self.packets
    }

    /// What is due of the answer is not sent.
    pub fn stop(&mut self) {
        self.end = self.next;
    }

    /// Whether the next packet is the first of the answer.
    pub fn begins(&self) -> bool {
        self.next == self.start
    }

    /// Whether the next packet is the last of the answer.
    pub fn ends(&self) -> bool {
        self.next + 1 == self.end
    }

    /// The request came again with this PSN: answers from that packet on. For a READ the part asked for, `reth`, must
    /// lie in the original. False if it does not.
    pub fn again(&mut self, psn: Psn, reth: Option<Reth>, mtu: u32) -> bool {
        let index = psn.value().wrapping_sub(self.psn.value()) & 0xff_ffff;
        let packets = match (self.answer, reth) {
            (Answer::Original(_) | Answer::Stored | Answer::Flushed, None) => 1,
            (Answer::Memory(whole), Some(part)) => {
                let offset = u64::from(index) * u64::from(mtu);
                let inside = part.rkey == whole.rkey
                    && part.va == whole.va.wrapping_add(offset)
                    && offset + u64::from(part.dma_len) <= u64::from(whole.dma_len);
                if !inside {
                    return false;
                }
                part.dma_len.div_ceil(mtu).max(1)
            }
            _ => return false,
        };
        let end = index + packets;
        if !self.is_due() {
            (self.start, self.next, self.end) = (index, index, end);
        } else {
            if index < self.next {
                (self.start, self.next) = (index, index);
            }
            self.end = self.end.max(end);
        }
        true
    }

    /// Whether the PSN is one of this request's.
    fn covers(&self, psn: Psn) -> bool {
        u32::try_from(psn.distance(self.psn)).is_ok_and(|index| index < self.packets)
    }
}

/// FLUSHes that may wait for their answers at once. Linux's requester does not count them as it counts the others, but
/// has no more packets than this under way.
const FLUSHES: usize = 128;

/// The newest READs, atomics and ATOMIC WRITEs of a QP, as many as it promised to take at once, and FLUSHes.
#[derive(Default)]
pub(crate) struct Resources {
    ring: VecDeque<Resource>,
    capacity: usize,
}

impl Resources {
    /// From now on `promised` (max_dest_rd_atomic) at most, or the next power of two: requesters, ConnectX and rxe, go
    /// up to that.
    pub fn resize(&mut self, promised: u8) {
        self.capacity = match promised {
            0 => 0,
            some => usize::from(some).next_power_of_two(),
        };
        self.ring.reserve(self.capacity.saturating_sub(self.ring.len()));
    }

    /// Whether another request may come, but a FLUSH: not while as many as may be wait for their answers. One that has
    /// been answered makes room even when it is to be answered again, for a copy of a request that came late.
    pub fn has_room(&self) -> bool {
        self.waiting(false) < self.capacity
    }

    /// Whether a FLUSH may come.
    pub fn has_room_to_flush(&self) -> bool {
        self.waiting(true) < FLUSHES
    }

    /// FLUSHes, or others, that wait for their answers.
    fn waiting(&self, flushes: bool) -> usize {
        let counts = |resource: &&Resource| resource.is_flush() == flushes && !resource.was_answered();
        self.ring.iter().filter(counts).count()
    }

    /// Adds a request for which there is room; forgets the oldest of its sort that was answered, if need be.
    pub fn push(&mut self, resource: Resource) {
        let flush = resource.is_flush();
        let most = if flush { FLUSHES } else { self.capacity };
        let same = |kept: &Resource| kept.is_flush() == flush;
        if self.ring.iter().filter(|kept| same(kept)).count() >= most
            && let Some(oldest) = self
                .ring
                .iter()
                .position(|kept| same(kept) && kept.was_answered())
        {
            self.ring.remove(oldest);
        }
        self.ring.push_back(resource);
    }

    /// The oldest request with an answer due.
    pub fn due(&mut self) -> Option<&mut Resource> {
        self.ring.iter_mut().find(|resource| resource.is_due())
    }

    /// Whether any answer is due.
    pub fn any_due(&self) -> bool {
        self.ring.iter().any(Resource::is_due)
    }

    /// The request that a PSN belongs to.
    pub fn find(&mut self, psn: Psn) -> Option<&mut Resource> {
        self.ring.iter_mut().rev().find(|resource| resource.covers(psn))
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        self.ring.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(psn: u32, len: u32) -> Resource {
        let reth = Reth {
            va: 0x1000,
            rkey: 7,
            dma_len: len,
        };
        let packets = len.div_ceil(256).max(1);
        Resource::new(Psn::new(psn), packets, 1, PdId(1), Answer::Memory(reth))
    }

    fn part(offset: u64, dma_len: u32) -> Option<Reth> {
        Some(Reth {
            va: 0x1000 + offset,
            rkey: 7,
            dma_len,
        })
    }

    fn span(resource: &Resource) -> (u32, u32, u32) {
        (resource.start, resource.next, resource.end)
    }

    #[test]
    fn a_read_asked_for_again() {
        let psn = |n| Psn::new(0xff_fffe).add(n);
        let mut resource = read(0xff_fffe, 1000);
        assert!(resource.begins() && !resource.ends());
        resource.next = 2;
        assert!(resource.again(psn(3), part(768, 232), 256));
        assert_eq!(span(&resource), (0, 2, 4), "not yet sent: nothing changes");
        assert!(resource.again(psn(1), part(256, 744), 256));
        assert_eq!(span(&resource), (1, 1, 4));
        resource.next = 4;
        assert!(!resource.is_due());
        assert!(resource.again(psn(2), part(512, 256), 256));
        assert_eq!(span(&resource), (2, 2, 3));
        // Not inside the original: longer, elsewhere, of another key.
        assert!(!resource.again(psn(2), part(512, 489), 256));
        assert!(!resource.again(psn(2), part(513, 10), 256));
        let other = Reth {
            rkey: 8,
            ..part(512, 10).unwrap()
        };
        assert!(!resource.again(psn(2), Some(other), 256));
        assert!(!resource.again(psn(2), None, 256));
    }

    #[test]
    fn as_many_as_promised() {
        let mut resources = Resources::default();
        assert!(!resources.has_room());
        resources.resize(2);
        for psn in [10, 20] {
            assert!(resources.has_room());
            resources.push(read(psn, 256));
        }
        assert!(!resources.has_room());
        resources.due().unwrap().advance();
        assert!(resources.has_room());
        // The request comes again, late: the peer has the answer, and may ask for more.
        assert!(
            resources
                .find(Psn::new(10))
                .unwrap()
                .again(Psn::new(10), part(0, 256), 256)
        );
        assert!(resources.has_room());
        resources.push(read(30, 256));
        assert!(resources.find(Psn::new(10)).is_none());
        assert!(resources.find(Psn::new(20)).is_some());
        assert!(resources.find(Psn::new(21)).is_none());
        assert_eq!(resources.due().unwrap().psn, Psn::new(20));
    }

    #[test]
    fn a_promise_is_rounded_up() {
        for (promised, taken) in [(0, 0), (1, 1), (2, 2), (3, 4), (5, 8), (16, 16)] {
            let mut resources = Resources::default();
            resources.resize(promised);
            let fit = (0..20).take_while(|&i| {
                let room = resources.has_room();
                resources.push(read(i, 256));
                room
            });
            assert_eq!(fit.count(), taken, "of {promised}");
        }
    }
}
