//! Receive queue: a preallocated ring of receive work requests, of one QP or shared.

use super::filled;
use crate::verbs::{RecvWr, Sge, VerbsError};

/// A ring of receive WQEs with room for `max_sge` scatter entries each.
pub(crate) struct RecvQueue {
    /// Cookie and number of scatter entries of each slot.
    wqes: Vec<(u64, u32)>,
    sges: Vec<Sge>,
    max_sge: usize,
    /// WQEs that may be posted; the ring itself is the next power of two.
    capacity: u32,
    mask: usize,
    /// Slot of the oldest posted WQE.
    head: usize,
    posted: u32,
    /// Taken by a message that is not complete: they still count against the capacity.
    taken: u32,
}

/// The receive WQE of the message being received, taken out of its queue.
#[derive(Default)]
pub(crate) struct ActiveRecv {
    pub wr_id: u64,
    /// Room for the most scatter entries the queue allows; the first `count` are in use.
    sges: Vec<Sge>,
    count: usize,
}

impl ActiveRecv {
    /// Room for `max_sge` entries.
    pub fn new(max_sge: usize) -> ActiveRecv {
        ActiveRecv {
            wr_id: 0,
            sges: vec![Sge::default(); max_sge],
            count: 0,
        }
    }

    /// The scatter list.
    pub fn sges(&self) -> &[Sge] {
        self.sges.get(..self.count).unwrap_or_default()
    }
}

impl RecvQueue {
    /// A queue of `capacity` WQEs. ENOMEM.
    pub fn new(capacity: u32, max_sge: u32) -> Result<RecvQueue, VerbsError> {
        let slots = (capacity as usize).max(1).next_power_of_two();
        let max_sge = max_sge as usize;
        Ok(RecvQueue {
            wqes: filled(slots, (0, 0))?,
            sges: filled(slots * max_sge, Sge::default())?,
            max_sge,
            capacity,
            mask: slots - 1,
            head: 0,
            posted: 0,
            taken: 0,
        })
    }

    /// WQEs that wait for a message.
    pub fn len(&self) -> u32 {
        self.posted
    }

    /// WQEs that fit.
    pub fn capacity(&self) -> u32 {
        self.capacity
    }

    /// WQEs that still fit.
    pub fn room(&self) -> usize {
        self.capacity.saturating_sub(self.posted + self.taken) as usize
    }

    /// Scatter entries of a WQE.
    pub fn max_sge(&self) -> u32 {
        self.max_sge as u32
    }

    /// Appends a work request. EINVAL: too many scatter entries; ENOMEM: full.
    pub fn post(&mut self, wr: &RecvWr<'_>) -> Result<(), VerbsError> {
        if wr.sges.len() > self.max_sge {
            return Err(VerbsError::Invalid);
        }
        if self.posted + self.taken >= self.capacity {
            return Err(VerbsError::NoMemory);
        }
        let slot = (self.head + self.posted as usize) & self.mask;
        let at = slot * self.max_sge;
        let room = self
            .sges
            .get_mut(at..at + wr.sges.len())
            .ok_or(VerbsError::Invalid)?;
        room.copy_from_slice(wr.sges);
        *self.wqes.get_mut(slot).ok_or(VerbsError::Invalid)? = (wr.wr_id, wr.sges.len() as u32);
        self.posted += 1;
        Ok(())
    }

    /// Moves the oldest WQE to `active`; false if there is none. [`RecvQueue::done`] frees its place.
    pub fn take(&mut self, active: &mut ActiveRecv) -> bool {
        if self.posted == 0 {
            return false;
        }
        let slot = self.head;
        let at = slot * self.max_sge;
        let (wr_id, count) = self.wqes.get(slot).copied().unwrap_or_default();
        let count = count as usize;
        let from = self.sges.get(at..at + count).unwrap_or_default();
        if active.sges.len() < count {
            active.sges.resize(self.max_sge, Sge::default());
        }
        for (to, sge) in active.sges.iter_mut().zip(from) {
            *to = *sge;
        }
        active.wr_id = wr_id;
        active.count = count;
        self.head = (self.head + 1) & self.mask;
        self.posted -= 1;
        self.taken += 1;
        true
    }

    /// A WQE that was taken has completed.
    pub fn done(&mut self) {
        self.taken = self.taken.saturating_sub(1);
    }

    /// Removes the oldest WQE and gives its cookie (flush).
    pub fn pop(&mut self) -> Option<u64> {
        if self.posted == 0 {
            return None;
        }
        let (wr_id, _) = self.wqes.get(self.head).copied().unwrap_or_default();
        self.head = (self.head + 1) & self.mask;
        self.posted -= 1;
        Some(wr_id)
    }

    /// Forgets everything (RESET).
    pub fn clear(&mut self) {
        self.head = 0;
        self.posted = 0;
        self.taken = 0;
    }

    /// Changes the capacity. EINVAL: more is in use; ENOMEM.
    pub fn resize(&mut self, capacity: u32) -> Result<(), VerbsError> {
        if capacity < self.posted + self.taken || capacity == 0 {
            return Err(VerbsError::Invalid);
        }
        let mut larger = RecvQueue::new(capacity, self.max_sge as u32)?;
        for i in 0..self.posted {
            let slot = (self.head + i as usize) & self.mask;
            let (wr_id, count) = self.wqes.get(slot).copied().unwrap_or_default();
            let at = slot * self.max_sge;
            let sges = self.sges.get(at..at + count as usize).unwrap_or_default();
            larger.post(&RecvWr { wr_id, sges })?;
        }
        larger.taken = self.taken;
        *self = larger;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn post(rq: &mut RecvQueue, wr_id: u64, lens: &[u32]) -> Result<(), VerbsError> {
        let sges: Vec<Sge> = lens
            .iter()
            .map(|&length| Sge {
                addr: wr_id,
                length,
                lkey: 9,
            })
            .collect();
        rq.post(&RecvWr { wr_id, sges: &sges })
    }

    #[test]
    fn order_capacity_and_wrap() {
        let mut rq = RecvQueue::new(3, 2).unwrap();
        let mut active = ActiveRecv::new(2);
        for round in 0..10 {
            for i in 0..3 {
                post(&mut rq, round * 3 + i, &[1, 2]).unwrap();
            }
            assert_eq!(post(&mut rq, 99, &[]), Err(VerbsError::NoMemory));
            assert!(rq.take(&mut active));
            assert_eq!((active.wr_id, active.sges().len()), (round * 3, 2));
            assert_eq!(
                post(&mut rq, 99, &[]),
                Err(VerbsError::NoMemory),
                "taken is not free"
            );
            rq.done();
            assert_eq!(rq.pop(), Some(round * 3 + 1));
            assert_eq!(rq.pop(), Some(round * 3 + 2));
            assert_eq!(rq.pop(), None);
            assert!(!rq.take(&mut active));
        }
    }

    #[test]
    fn refuses_long_lists_and_resizes() {
        let mut rq = RecvQueue::new(2, 1).unwrap();
        assert_eq!(post(&mut rq, 0, &[1, 1]), Err(VerbsError::Invalid));
        post(&mut rq, 1, &[1]).unwrap();
        rq.pop();
        post(&mut rq, 2, &[1]).unwrap();
        post(&mut rq, 3, &[]).unwrap();
        assert_eq!(rq.resize(1), Err(VerbsError::Invalid));
        rq.resize(5).unwrap();
        post(&mut rq, 4, &[1]).unwrap();
        let mut active = ActiveRecv::default();
        for want in 2..=4 {
            assert!(rq.take(&mut active));
            assert_eq!(active.wr_id, want);
        }
    }

    #[test]
    fn queue_without_room() {
        let mut rq = RecvQueue::new(0, 0).unwrap();
        assert_eq!(post(&mut rq, 0, &[]), Err(VerbsError::NoMemory));
        assert_eq!(rq.pop(), None);
    }
}
