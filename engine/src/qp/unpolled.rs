//! Completions that the program has not polled. Their requests count as outstanding until then, as on hardware: a program
//! that posts until its queue is full does not overrun a CQ that is as large.

use std::cell::Cell;

use crate::queue::Cq;

/// An upper bound of how many completions of a queue wait to be polled; made exact only where that matters.
#[derive(Default)]
pub(crate) struct Unpolled {
    count: Cell<usize>,
    /// What [`Cq::taken`] gave when the completions were counted last.
    as_of: Cell<u64>,
}

impl Unpolled {
    /// A completion was added.
    pub fn pushed(&self) {
        self.count.set(self.count.get() + 1);
    }

    /// All were taken out of the CQ.
    pub fn clear(&self) {
        self.count.set(0);
    }

    /// How many more requests than the `free` places of the queue allow can be posted: the places less what waits in
    /// `cq` of the queue of `qpn` that `receives` or sends.
    pub fn room(&self, free: usize, cq: &Cq, qpn: u32, receives: bool) -> usize {
        if self.count.get() >= free {
            // Before the count, so that what is polled meanwhile is noticed the next time.
            let taken = cq.taken();
            if self.as_of.replace(taken) != taken {
                self.count.set(cq.count(qpn, receives));
            }
        }
        free.saturating_sub(self.count.get())
    }
}
