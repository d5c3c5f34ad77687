//! Completion queue: filled by the transport, polled by the application without the engine's lock.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;

use crate::verbs::{VerbsError, Wc, WcStatus};

/// What wakes the reader of a completion channel.
pub trait CqNotify: Send + Sync {
    /// The armed CQ got a completion. Called at most once per [`Cq::arm`], without the CQ's lock, but with the
    /// engine's: it must not call the engine.
    fn completion(&self);
}

/// Which completion raises the next event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Armed {
    No,
    Solicited,
    Any,
}

/// What the lock guards.
struct Ring {
    entries: VecDeque<Wc>,
    capacity: usize,
    armed: Armed,
    overrun: bool,
}

/// A completion queue.
pub struct Cq {
    id: u64,
    vector: u32,
    notify: Option<Box<dyn CqNotify>>,
    /// Entries in `ring`, readable without the lock.
    len: AtomicUsize,
    ring: Mutex<Ring>,
}

/// A completion did not fit, and no [`Overrun`] has been reported since the CQ last had room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Overrun;

impl Cq {
    /// A CQ for `capacity` entries. Memory is touched only as entries are used.
    pub(crate) fn new(id: u64, capacity: usize, vector: u32, notify: Option<Box<dyn CqNotify>>) -> Cq {
        Cq {
            id,
            vector,
            notify,
            len: AtomicUsize::new(0),
            ring: Mutex::new(Ring {
                entries: VecDeque::with_capacity(capacity),
                capacity,
                armed: Armed::No,
                overrun: false,
            }),
        }
    }

    /// The number by which events name this CQ; never used twice in a process and device.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// The completion vector it was made for.
    pub fn vector(&self) -> u32 {
        self.vector
    }

    /// Entries that fit.
    pub fn capacity(&self) -> usize {
        self.ring.lock().capacity
    }

    /// Entries waiting, as of now.
    pub fn len(&self) -> usize {
        self.len.load(Ordering::Acquire)
    }

    /// Whether nothing waits, as of now.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Moves the oldest completions to `out`; gives how many. An empty CQ costs one load.
    pub fn poll(&self, out: &mut [Wc]) -> usize {
        if self.is_empty() {
            return 0;
        }
        let mut ring = self.ring.lock();
        let n = out.len().min(ring.entries.len());
        for (slot, wc) in out.iter_mut().zip(ring.entries.drain(..n)) {
            *slot = wc;
        }
        if ring.entries.is_empty() {
            // Start over at the front: a large CQ with few entries stays in the cache.
            ring.entries.clear();
        }
        self.len.store(ring.entries.len(), Ordering::Release);
        n
    }

    /// Asks for one event at the next completion, or the next that is solicited or an error.
    pub fn arm(&self, solicited_only: bool) {
        let mut ring = self.ring.lock();
        if !solicited_only {
            ring.armed = Armed::Any;
        } else if ring.armed == Armed::No {
            ring.armed = Armed::Solicited;
        }
    }

    /// Whether an event is asked for.
    pub fn is_armed(&self) -> bool {
        self.ring.lock().armed != Armed::No
    }

    /// Appends a completion. `solicited`: the sender asked for an event. [`Overrun`] once when it does not fit.
    pub(crate) fn push(&self, wc: Wc, solicited: bool) -> Result<(), Overrun> {
        let mut ring = self.ring.lock();
        let room = ring.entries.len() < ring.capacity;
        let first_overrun = !room && !ring.overrun;
        ring.overrun = !room;
        if room {
            ring.entries.push_back(wc);
            self.len.store(ring.entries.len(), Ordering::Release);
        }
        let fire = match ring.armed {
            Armed::No => false,
            Armed::Solicited => solicited || wc.status != WcStatus::Success,
            Armed::Any => true,
        };
        if fire {
            ring.armed = Armed::No;
        }
        drop(ring);
        if let (true, Some(notify)) = (fire, &self.notify) {
            notify.completion();
        }
        if first_overrun { Err(Overrun) } else { Ok(()) }
    }

    /// Changes how many entries fit; EINVAL if more wait.
    pub fn resize(&self, capacity: usize) -> Result<(), VerbsError> {
        let mut ring = self.ring.lock();
        if capacity < ring.entries.len() {
            return Err(VerbsError::Invalid);
        }
        let more = capacity.saturating_sub(ring.entries.len());
        ring.entries.reserve_exact(more);
        ring.capacity = capacity;
        Ok(())
    }

    /// Forgets the completions of a QP that is destroyed or reset.
    pub fn remove_qp(&self, qpn: u32) {
        self.retain(|wc| wc.qp_num != qpn);
    }

    /// Forgets the completions of an XRC SRQ that is destroyed.
    pub(crate) fn remove_srq(&self, srqn: u32) {
        self.retain(|wc| wc.srqn != srqn);
    }

    fn retain(&self, keep: impl Fn(&Wc) -> bool) {
        let mut ring = self.ring.lock();
        ring.entries.retain(keep);
        self.len.store(ring.entries.len(), Ordering::Release);
    }
}

impl std::fmt::Debug for Cq {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cq")
            .field("id", &self.id)
            .field("len", &self.len())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicU32;

    use super::*;

    #[derive(Clone, Default)]
    struct Count(Arc<AtomicU32>);
    impl CqNotify for Count {
        fn completion(&self) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn wc(wr_id: u64, qp_num: u32) -> Wc {
        Wc {
            wr_id,
            qp_num,
            ..Wc::default()
        }
    }

    #[test]
    fn polls_in_order_and_counts() {
        let cq = Cq::new(1, 4, 0, None);
        let mut out = [Wc::default(); 3];
        assert_eq!(cq.poll(&mut out), 0);
        for i in 0..4 {
            cq.push(wc(i, 7), false).unwrap();
        }
        assert_eq!(cq.len(), 4);
        assert_eq!(cq.poll(&mut out), 3);
        assert_eq!(out.map(|w| w.wr_id), [0, 1, 2]);
        assert_eq!(cq.poll(&mut out), 1);
        assert!(cq.is_empty());
    }

    #[test]
    fn overrun_is_told_once_until_there_is_room() {
        let cq = Cq::new(1, 1, 0, None);
        cq.push(wc(0, 7), false).unwrap();
        assert_eq!(cq.push(wc(1, 7), false), Err(Overrun));
        assert_eq!(cq.push(wc(2, 7), false), Ok(()));
        let mut out = [Wc::default(); 2];
        assert_eq!(cq.poll(&mut out), 1);
        cq.push(wc(3, 7), false).unwrap();
        assert_eq!(cq.push(wc(4, 7), false), Err(Overrun));
    }

    #[test]
    fn arming() {
        let count = Count::default();
        let cq = Cq::new(1, 16, 0, Some(Box::new(count.clone())));
        let fired = || count.0.load(Ordering::Relaxed);
        cq.push(wc(0, 7), true).unwrap();
        assert_eq!(fired(), 0, "not armed");
        cq.arm(true);
        cq.push(wc(1, 7), false).unwrap();
        assert_eq!(fired(), 0, "not solicited");
        cq.push(
            Wc {
                status: WcStatus::WrFlushErr,
                ..wc(2, 7)
            },
            false,
        )
        .unwrap();
        assert_eq!(fired(), 1, "errors count as solicited");
        cq.push(wc(3, 7), true).unwrap();
        assert_eq!(fired(), 1, "one event per arming");
        cq.arm(false);
        cq.arm(true);
        cq.push(wc(4, 7), false).unwrap();
        assert_eq!(fired(), 2, "solicited does not weaken any");
    }

    #[test]
    fn forgets_one_qp_and_resizes() {
        let cq = Cq::new(1, 4, 0, None);
        for i in 0..4 {
            cq.push(wc(i, (i % 2) as u32), false).unwrap();
        }
        cq.remove_qp(0);
        assert_eq!(cq.len(), 2);
        assert_eq!(cq.resize(1), Err(VerbsError::Invalid));
        cq.resize(2).unwrap();
        assert_eq!(cq.push(wc(9, 1), false), Err(Overrun));
        cq.resize(8).unwrap();
        cq.push(wc(9, 1), false).unwrap();
        let mut out = [Wc::default(); 8];
        assert_eq!(cq.poll(&mut out), 3);
        assert_eq!(out[2].wr_id, 9);
    }
}
