//! Shared receive queue: a receive queue of many QPs, with a low-water event.

use super::rq::{ActiveRecv, RecvQueue};
use std::sync::Arc;

use crate::device::{DomainId, PdId, XrcdId};
use crate::queue::Cq;

/// A shared receive queue.
pub(crate) struct Srq {
    pub pd: PdId,
    pub queue: RecvQueue,
    /// Raise an event when fewer WQEs than this remain; 0: none. Fires once.
    pub limit: u32,
    /// QPs that were made with it.
    pub users: u32,
    /// Of an XRC SRQ only.
    pub xrc: Option<XrcPart>,
}

/// What an XRC SRQ has beside.
pub(crate) struct XrcPart {
    /// The opened domain that it was made with.
    pub xrcd: XrcdId,
    /// The target QPs of this domain reach it.
    pub domain: DomainId,
    /// Where its receives complete.
    pub cq: Arc<Cq>,
}

/// What [`Srq::take`] found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Taken {
    /// The number of WQEs fell below the limit, for the first time since it was set.
    pub limit_reached: bool,
}

impl Srq {
    /// Moves the oldest WQE to `active`; `None` if there is none.
    pub fn take(&mut self, active: &mut ActiveRecv) -> Option<Taken> {
        if !self.queue.take(active) {
            return None;
        }
        let limit_reached = self.queue.len() < self.limit;
        if limit_reached {
            self.limit = 0;
        }
        Some(Taken { limit_reached })
    }
}
