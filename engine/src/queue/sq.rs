//! Send queue: a preallocated ring of send work requests, with their data sources and PSN ranges.

use super::filled;
use crate::memory::Fault;
use crate::verbs::{Operation, SendFlags, SendWr, Sge, UdDest, VerbsError};

/// A posted send work request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SendWqe {
    pub wr_id: u64,
    pub operation: Operation,
    pub flags: SendFlags,
    /// Bytes of local data: the message of a SEND or WRITE, the result of a READ or atomic.
    pub length: u32,
    /// It has a length that can't be sent.
    pub misfit: bool,
    /// Scatter/gather entries in use.
    count: u32,
    /// Sequence number of its first packet (see `Requester`).
    pub first: u64,
    /// Sequence numbers it takes: packets of the request, or of the response of a READ.
    pub packets: u32,
    /// Send sequence number: messages up to and with this one since RTS; what the peer's credits count.
    pub ssn: u64,
    /// XRC only: the SRQ at the peer.
    pub srqn: u32,
}

impl SendWqe {
    /// The sequence number after its last packet.
    pub fn end(&self) -> u64 {
        self.first + u64::from(self.packets)
    }
}

/// A ring of send WQEs. WQEs are named by their index since the queue was made or cleared.
pub(crate) struct SendQueue {
    wqes: Vec<SendWqe>,
    sges: Vec<Sge>,
    inline: Vec<u8>,
    /// Destinations, on a UD QP only.
    uds: Vec<UdDest>,
    max_sge: usize,
    max_inline: usize,
    /// WQEs that may be posted; the ring itself is the next power of two.
    capacity: u32,
    mask: u64,
    head: u64,
    tail: u64,
}

impl SendQueue {
    /// A queue of `capacity` WQEs; `ud`: with room for their destinations. ENOMEM.
    pub fn new(
        capacity: u32,
        max_sge: u32,
        max_inline: u32,
        ud: Option<UdDest>,
    ) -> Result<SendQueue, VerbsError> {
        let slots = (capacity as usize).max(1).next_power_of_two();
        let (max_sge, max_inline) = (max_sge as usize, max_inline as usize);
        let empty = SendWqe {
            wr_id: 0,
            operation: Operation::Send,
            flags: SendFlags::empty(),
            length: 0,
            misfit: false,
            count: 0,
            first: 0,
            packets: 0,
            ssn: 0,
            srqn: 0,
        };
        Ok(SendQueue {
            wqes: filled(slots, empty)?,
            sges: filled(slots * max_sge, Sge::default())?,
            inline: filled(slots * max_inline, 0)?,
            uds: ud.map_or(Ok(Vec::new()), |none| filled(slots, none))?,
            max_sge,
            max_inline,
            capacity,
            mask: slots as u64 - 1,
            head: 0,
            tail: 0,
        })
    }

    /// WQEs that are posted and not complete.
    pub fn len(&self) -> usize {
        (self.tail - self.head) as usize
    }

    /// Index of the oldest WQE.
    pub fn head(&self) -> u64 {
        self.head
    }

    /// Bytes of inline data that a WQE has room for.
    pub fn max_inline(&self) -> usize {
        self.max_inline
    }

    /// WQEs that still fit.
    pub fn room(&self) -> usize {
        (self.capacity as usize).saturating_sub(self.len())
    }

    /// Whether `count` scatter/gather entries fit (EINVAL) and there is a place (ENOMEM).
    pub fn check(&self, count: usize) -> Result<(), VerbsError> {
        if count > self.max_sge {
            Err(VerbsError::Invalid)
        } else if self.len() >= self.capacity as usize {
            Err(VerbsError::NoMemory)
        } else {
            Ok(())
        }
    }

    /// Appends a WQE that [`SendQueue::check`] found to fit. `length`: `None` if it can't be sent for its length.
    /// `first`, `packets`, `ssn`: see [`SendWqe`].
    /// `read` copies inline data out of the application's memory.
    pub fn post(
        &mut self,
        wr: &SendWr<'_>,
        length: Option<u32>,
        (first, packets, ssn): (u64, u32, u64),
        mut read: impl FnMut(u64, &mut [u8]) -> Result<(), Fault>,
    ) -> Result<(), VerbsError> {
        let slot = self.slot(self.tail);
        let (length, misfit) = (length.unwrap_or(0), length.is_none());
        let inline = wr.flags.contains(SendFlags::INLINE);
        if inline && !misfit {
            let at = slot * self.max_inline;
            let room = self
                .inline
                .get_mut(at..at + length as usize)
                .ok_or(VerbsError::Invalid)?;
            let mut filled = 0;
            for sge in wr.sges {
                let part = room
                    .get_mut(filled..filled + sge.length as usize)
                    .ok_or(VerbsError::Invalid)?;
                read(sge.addr, part).map_err(|_| VerbsError::Fault)?;
                filled += sge.length as usize;
            }
        } else {
            let at = slot * self.max_sge;
            let room = self
                .sges
                .get_mut(at..at + wr.sges.len())
                .ok_or(VerbsError::Invalid)?;
            room.copy_from_slice(wr.sges);
        }
        if let (Some(dest), Some(room)) = (wr.ud, self.uds.get_mut(slot)) {
            *room = dest;
        }
        let wqe = SendWqe {
            wr_id: wr.wr_id,
            operation: wr.operation,
            flags: wr.flags,
            length,
            misfit,
            count: if inline { 0 } else { wr.sges.len() as u32 },
            first,
            packets,
            ssn,
            srqn: wr.srqn,
        };
        *self.wqes.get_mut(slot).ok_or(VerbsError::Invalid)? = wqe;
        self.tail += 1;
        Ok(())
    }

    /// The WQE with this index, if it is posted and not complete.
    #[inline]
    pub fn get(&self, index: u64) -> Option<&SendWqe> {
        if index < self.head || index >= self.tail {
            return None;
        }
        self.wqes.get(self.slot(index))
    }

    /// The oldest WQE.
    #[inline]
    pub fn front(&self) -> Option<&SendWqe> {
        self.get(self.head)
    }

    /// The destination of a WQE of a UD QP.
    pub fn ud(&self, index: u64) -> Option<&UdDest> {
        self.uds.get(self.slot(index))
    }

    /// The inline data of a WQE posted with [`SendFlags::INLINE`].
    pub fn inline(&self, index: u64, wqe: &SendWqe) -> &[u8] {
        let at = self.slot(index) * self.max_inline;
        self.inline.get(at..at + wqe.length as usize).unwrap_or_default()
    }

    /// The scatter/gather list of a WQE.
    #[inline]
    pub fn sges(&self, index: u64, wqe: &SendWqe) -> &[Sge] {
        let at = self.slot(index) * self.max_sge;
        self.sges.get(at..at + wqe.count as usize).unwrap_or_default()
    }

    /// Removes the oldest WQE.
    pub fn pop(&mut self) -> Option<SendWqe> {
        let wqe = *self.front()?;
        self.head += 1;
        Some(wqe)
    }

    /// Index of the WQE that the packet with sequence number `seq` belongs to; the tail if it is yet to be posted.
    pub fn find(&self, seq: u64) -> u64 {
        let (mut low, mut high) = (self.head, self.tail);
        while low < high {
            let middle = low + (high - low) / 2;
            match self.get(middle) {
                Some(wqe) if wqe.end() <= seq => low = middle + 1,
                _ => high = middle,
            }
        }
        low
    }

    /// Forgets everything (RESET).
    pub fn clear(&mut self) {
        self.head = 0;
        self.tail = 0;
    }

    fn slot(&self, index: u64) -> usize {
        (index & self.mask) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn post(sq: &mut SendQueue, wr_id: u64, first: u64, packets: u32) -> Result<(), VerbsError> {
        let wr = SendWr {
            wr_id,
            operation: Operation::Send,
            flags: SendFlags::empty(),
            sges: &[Sge {
                addr: wr_id,
                length: 1,
                lkey: 1,
            }],
            ..SendWr::default()
        };
        sq.check(1)?;
        sq.post(&wr, Some(1), (first, packets, 0), |_, _| Ok(()))
    }

    #[test]
    fn ring_of_any_capacity() {
        let mut sq = SendQueue::new(3, 1, 0, None).unwrap();
        for i in 0..50 {
            let mut next = sq.tail;
            while post(&mut sq, next, 0, 0).is_ok() {
                next += 1;
            }
            assert_eq!(sq.len(), 3);
            let wqe = sq.pop().unwrap();
            assert_eq!(wqe.wr_id, i);
            assert_eq!(sq.sges(sq.head(), sq.front().unwrap())[0].addr, i + 1);
        }
        assert_eq!(sq.check(2), Err(VerbsError::Invalid));
        assert_eq!(
            SendQueue::new(0, 1, 0, None).unwrap().check(0),
            Err(VerbsError::NoMemory)
        );
    }

    #[test]
    fn finds_by_sequence_number() {
        let mut sq = SendQueue::new(8, 1, 0, None).unwrap();
        for (i, (first, packets)) in [(0, 1), (1, 3), (4, 0), (4, 2)].into_iter().enumerate() {
            post(&mut sq, i as u64, first, packets).unwrap();
        }
        let found: Vec<u64> = (0..7).map(|seq| sq.find(seq)).collect();
        assert_eq!(found, [0, 1, 1, 1, 3, 3, 4]);
    }

    #[test]
    fn inline_data_is_copied() {
        let mut sq = SendQueue::new(2, 1, 8, None).unwrap();
        let sges = [
            Sge {
                addr: 10,
                length: 3,
                lkey: 0,
            },
            Sge {
                addr: 20,
                length: 2,
                lkey: 0,
            },
        ];
        let wr = SendWr {
            wr_id: 1,
            operation: Operation::Send,
            flags: SendFlags::INLINE,
            sges: &sges,
            ..SendWr::default()
        };
        let read = |addr: u64, into: &mut [u8]| {
            into.fill(addr as u8);
            Ok(())
        };
        sq.post(&wr, Some(5), (0, 1, 0), read).unwrap();
        let wqe = *sq.front().unwrap();
        assert_eq!(sq.inline(0, &wqe), [10, 10, 10, 20, 20]);
        let fault = |addr, _: &mut [u8]| Err(Fault { addr });
        assert_eq!(sq.post(&wr, Some(5), (0, 1, 0), fault), Err(VerbsError::Fault));
        assert_eq!(sq.len(), 1, "a failed post leaves the queue as it was");
    }
}
