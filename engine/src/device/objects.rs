//! Verbs on protection domains, completion queues and shared receive queues.

use std::sync::Arc;

use super::{Device, PdId, SrqAttr, SrqId};
use crate::queue::rq::RecvQueue;
use crate::queue::srq::{Srq, XrcPart};
use crate::queue::{Cq, CqNotify, Moderation};
use crate::verbs::{RecvWr, VerbsError};

impl Device {
    /// Makes a protection domain.
    pub fn alloc_pd(&mut self) -> Result<PdId, VerbsError> {
        self.alive()?;
        room(self.pds.len(), self.limits.max_pd)?;
        let pd = PdId(self.new_id() as u32);
        self.pds.insert(pd, 0);
        Ok(pd)
    }

    /// Ends a protection domain. EBUSY while it has regions, windows, SRQs or QPs.
    pub fn dealloc_pd(&mut self, pd: PdId) -> Result<(), VerbsError> {
        match self.pds.get(&pd) {
            None => Err(VerbsError::NotFound),
            Some(0) => {
                self.pds.remove(&pd);
                Ok(())
            }
            Some(_) => Err(VerbsError::Busy),
        }
    }

    /// Counts an object into its PD.
    pub(super) fn enter_pd(&mut self, pd: PdId) -> Result<(), VerbsError> {
        *self.pds.get_mut(&pd).ok_or(VerbsError::Invalid)? += 1;
        Ok(())
    }

    /// Counts an object out of its PD.
    pub(super) fn leave_pd(&mut self, pd: PdId) {
        if let Some(objects) = self.pds.get_mut(&pd) {
            *objects = objects.saturating_sub(1);
        }
    }

    /// Makes a completion queue for `capacity` completions; `notify` is called when it is armed.
    pub fn create_cq(
        &mut self,
        capacity: u32,
        vector: u32,
        notify: Option<Box<dyn CqNotify>>,
    ) -> Result<Arc<Cq>, VerbsError> {
        self.alive()?;
        room(self.cqs.len(), self.limits.max_cq)?;
        if capacity == 0 || capacity > self.limits.max_cqe {
            return Err(VerbsError::Invalid);
        }
        let id = self.new_id();
        let cq = Arc::new(Cq::new(id, capacity as usize, vector, notify)?);
        self.cqs.insert(id, (cq.clone(), 0));
        Ok(cq)
    }

    /// Changes how many completions fit. EINVAL: more wait, or more than a CQ can have.
    pub fn resize_cq(&mut self, cq: &Cq, capacity: u32) -> Result<(), VerbsError> {
        if capacity == 0 || capacity > self.limits.max_cqe {
            return Err(VerbsError::Invalid);
        }
        cq.resize(capacity as usize)
    }

    /// Changes how a CQ's events are held back. EINVAL: for longer than is possible.
    pub fn moderate_cq(&mut self, cq: &Cq, moderation: Moderation) -> Result<(), VerbsError> {
        if moderation.period > self.limits.max_cq_period {
            return Err(VerbsError::Invalid);
        }
        cq.moderate(moderation);
        Ok(())
    }

    /// Ends a completion queue. EBUSY while QPs use it.
    pub fn destroy_cq(&mut self, cq: &Arc<Cq>) -> Result<(), VerbsError> {
        match self.cqs.get(&cq.id()) {
            None => Err(VerbsError::NotFound),
            Some((_, 0)) => {
                self.cqs.remove(&cq.id());
                Ok(())
            }
            Some(_) => Err(VerbsError::Busy),
        }
    }

    /// Counts a user of a CQ in (`true`) or out.
    pub(super) fn use_cq(&mut self, cq: &Cq, used: bool) {
        if let Some((_, users)) = self.cqs.get_mut(&cq.id()) {
            *users = if used { *users + 1 } else { users.saturating_sub(1) };
        }
    }

    /// Whether the CQ is one of this device's that was not destroyed.
    pub(super) fn has_cq(&self, cq: &Arc<Cq>) -> bool {
        self.cqs
            .get(&cq.id())
            .is_some_and(|(known, _)| Arc::ptr_eq(known, cq))
    }

    /// Makes a shared receive queue; `limit` as in [`Device::modify_srq`].
    pub fn create_srq(
        &mut self,
        pd: PdId,
        max_wr: u32,
        max_sge: u32,
        limit: u32,
    ) -> Result<SrqId, VerbsError> {
        self.alive()?;
        room(self.srqs.len(), self.limits.max_srq)?;
        if max_wr == 0 || max_wr > self.limits.max_srq_wr || max_sge > self.limits.max_sge || limit > max_wr {
            return Err(VerbsError::Invalid);
        }
        let queue = RecvQueue::new(max_wr, max_sge)?;
        self.enter_pd(pd)?;
        let id = self.new_srq_id();
        self.srqs.insert(
            id,
            Srq {
                pd,
                queue,
                limit,
                users: 0,
                xrc: None,
            },
        );
        Ok(id)
    }

    /// Changes the size of an SRQ, or its limit: an event when fewer receives than that remain, once.
    pub fn modify_srq(
        &mut self,
        id: SrqId,
        max_wr: Option<u32>,
        limit: Option<u32>,
    ) -> Result<(), VerbsError> {
        self.alive()?;
        let most = self.limits.max_srq_wr;
        let srq = self.srqs.get_mut(&id).ok_or(VerbsError::NotFound)?;
        let capacity = max_wr.unwrap_or(srq.queue.capacity());
        if capacity > most || limit.unwrap_or(srq.limit) > capacity {
            return Err(VerbsError::Invalid);
        }
        if capacity != srq.queue.capacity() {
            srq.queue.resize(capacity)?;
        }
        if let Some(limit) = limit {
            srq.limit = limit;
        }
        Ok(())
    }

    /// The attributes of an SRQ.
    pub fn query_srq(&self, id: SrqId) -> Result<SrqAttr, VerbsError> {
        let srq = self.srqs.get(&id).ok_or(VerbsError::NotFound)?;
        Ok(SrqAttr {
            max_wr: srq.queue.capacity(),
            max_sge: srq.queue.max_sge(),
            limit: srq.limit,
        })
    }

    /// Ends an SRQ, and takes an XRC SRQ's completions out of its CQ. EBUSY while QPs were made with it.
    pub fn destroy_srq(&mut self, id: SrqId) -> Result<(), VerbsError> {
        let srq = self.srqs.get(&id).ok_or(VerbsError::NotFound)?;
        if srq.users > 0 {
            return Err(VerbsError::Busy);
        }
        let srq = self.srqs.remove(&id).ok_or(VerbsError::NotFound)?;
        if let Some(XrcPart { xrcd, cq, .. }) = srq.xrc {
            cq.remove_srq(id.0);
            self.use_cq(&cq, false);
            self.use_xrcd(xrcd, false);
        }
        self.leave_pd(srq.pd);
        Ok(())
    }

    /// Posts a receive to an SRQ. EINVAL: too many scatter entries; ENOMEM: full; EIO: the device is gone.
    pub fn post_srq_recv(&mut self, id: SrqId, wr: &RecvWr<'_>) -> Result<(), VerbsError> {
        self.alive()?;
        self.srqs.get_mut(&id).ok_or(VerbsError::NotFound)?.queue.post(wr)
    }
}

/// ENOMEM when as many objects exist as there may be.
pub(super) fn room(objects: usize, most: u32) -> Result<(), VerbsError> {
    if objects < most as usize {
        Ok(())
    } else {
        Err(VerbsError::NoMemory)
    }
}
