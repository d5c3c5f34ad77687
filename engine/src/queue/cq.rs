//! Completion queue: filled by the transport, polled by the application without the engine's lock.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use crate::time::Time;
use crate::verbs::{VerbsError, Wc, WcStatus};

/// What wakes the reader of a completion channel.
pub trait CqNotify: Send + Sync {
    /// The armed CQ has completions. Called at most once per [`Cq::arm`], without the CQ's lock, but maybe with the
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

/// How events are held back so that one stands for many completions (`struct ibv_moderate_cq`). Zeros hold nothing back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moderation {
    /// The event comes with the completion of this number at the latest; 0: at no number.
    pub count: u16,
    /// The event comes this long after the first completion at the latest; 0: at no time.
    pub period: Duration,
}

/// What a CQ does with a completion that finds no room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Overflow {
    /// It is an error, after which the CQ takes nothing any more.
    Fails,
    /// It takes the place of the oldest.
    Overwrites,
    /// It was one.
    Failed,
}

/// A completion that waits.
struct Entry {
    /// Completions that were pushed before it, and itself.
    number: u64,
    wc: Wc,
}

/// What the lock guards.
struct Ring {
    entries: VecDeque<Entry>,
    capacity: usize,
    overflow: Overflow,
    armed: Armed,
    moderation: Moderation,
    /// Completions that the next event stands for, so far.
    held: u32,
    /// When the event comes that these wait for.
    event_at: Option<Time>,
    /// Completions pushed so far: the number of the newest.
    newest: u64,
    /// The newest that is solicited or an error.
    solicited: u64,
    /// The newest of which an event has told.
    told: u64,
}

impl Ring {
    /// The number of the oldest completion that waits; of the next to come, if none does.
    fn oldest(&self) -> u64 {
        self.entries.front().map_or(self.newest + 1, |entry| entry.number)
    }

    /// Whether a completion waits of which no event has told, and that is worth one to who armed it so.
    fn untold(&self, armed: Armed) -> bool {
        let known = self.told.max(self.oldest() - 1);
        match armed {
            Armed::No => false,
            Armed::Solicited => self.solicited > known,
            Armed::Any => self.newest > known,
        }
    }

    /// Whether the event is due now that a completion came which asks for it.
    fn is_event_due(&mut self, now: Time) -> bool {
        let Moderation { count, period } = self.moderation;
        self.held += 1;
        if period > Duration::ZERO {
            self.event_at.get_or_insert(now + period);
        }
        self.held >= u32::from(count) && count > 0 || self.moderation == Moderation::default()
    }

    /// Ends what [`Cq::arm`] began, for its event comes.
    fn disarm(&mut self) {
        self.armed = Armed::No;
        self.held = 0;
        self.event_at = None;
        self.told = self.newest;
    }
}

/// A completion queue.
pub struct Cq {
    id: u64,
    vector: u32,
    notify: Option<Box<dyn CqNotify>>,
    /// Entries in `ring`, readable without the lock.
    len: AtomicUsize,
    /// [`Ring::oldest`], readable without the lock.
    oldest: AtomicU64,
    ring: Mutex<Ring>,
}

/// A completion was appended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pushed {
    /// Completions that were pushed before it, and itself.
    pub number: u64,
    /// When [`Cq::expire`] is to be called, if its event is held back until then.
    pub alarm: Option<Time>,
}

/// A completion is lost: the CQ is full, or was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Overrun {
    /// The CQ failed with this one.
    pub first: bool,
}

impl Cq {
    /// A CQ for `capacity` entries. Memory is touched only as entries are used. ENOMEM if there is none.
    pub(crate) fn new(
        id: u64,
        capacity: usize,
        vector: u32,
        notify: Option<Box<dyn CqNotify>>,
    ) -> Result<Cq, VerbsError> {
        let mut entries = VecDeque::new();
        entries
            .try_reserve_exact(capacity)
            .map_err(|_| VerbsError::NoMemory)?;
        Ok(Cq {
            id,
            vector,
            notify,
            len: AtomicUsize::new(0),
            oldest: AtomicU64::new(1),
            ring: Mutex::new(Ring {
                entries,
                capacity,
                overflow: Overflow::Fails,
                armed: Armed::No,
                moderation: Moderation::default(),
                held: 0,
                event_at: None,
                newest: 0,
                solicited: 0,
                told: 0,
            }),
        })
    }

    /// From now on a completion that finds no room takes the place of the oldest.
    pub fn ignore_overrun(&self) {
        self.ring.lock().overflow = Overflow::Overwrites;
    }

    /// Sets how events are held back; one that is, is still as it was.
    pub(crate) fn moderate(&self, moderation: Moderation) {
        self.ring.lock().moderation = moderation;
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
        for (slot, entry) in out.iter_mut().zip(ring.entries.drain(..n)) {
            *slot = entry.wc;
        }
        if ring.entries.is_empty() {
            // Start over at the front: a large CQ with few entries stays in the cache.
            ring.entries.clear();
        }
        self.publish(&ring);
        n
    }

    /// The number ([`Pushed::number`]) of the oldest completion that waits: those below are taken.
    pub(crate) fn oldest(&self) -> u64 {
        self.oldest.load(Ordering::Acquire)
    }

    /// Tells those without the lock what the ring holds now.
    fn publish(&self, ring: &Ring) {
        self.oldest.store(ring.oldest(), Ordering::Release);
        self.len.store(ring.entries.len(), Ordering::Release);
    }

    /// Asks for one event at the next completion, or the next that is solicited or an error.
    ///
    /// One that came since the last event and still waits counts too, as on hardware: programs (UCX) arm, and sleep
    /// without another poll.
    pub fn arm(&self, solicited_only: bool) {
        let mut ring = self.ring.lock();
        if !solicited_only {
            ring.armed = Armed::Any;
        } else if ring.armed == Armed::No {
            ring.armed = Armed::Solicited;
        }
        // Not if an event that is held back will tell of it.
        if ring.held == 0 && ring.untold(ring.armed) {
            ring.disarm();
            drop(ring);
            self.notify();
        }
    }

    /// Whether an event is asked for.
    pub fn is_armed(&self) -> bool {
        self.ring.lock().armed != Armed::No
    }

    /// Appends a completion. `solicited`: the sender asked for an event.
    pub(crate) fn push(&self, wc: Wc, solicited: bool) -> Result<Pushed, Overrun> {
        let mut ring = self.ring.lock();
        if ring.entries.len() >= ring.capacity || ring.overflow == Overflow::Failed {
            if ring.overflow != Overflow::Overwrites {
                let before = std::mem::replace(&mut ring.overflow, Overflow::Failed);
                let first = before != Overflow::Failed;
                return Err(Overrun { first });
            }
            ring.entries.pop_front();
        }
        ring.newest += 1;
        if solicited || wc.status != WcStatus::Success {
            ring.solicited = ring.newest;
        }
        let number = ring.newest;
        ring.entries.push_back(Entry { number, wc });
        self.publish(&ring);
        let asked = match ring.armed {
            Armed::No => false,
            Armed::Solicited => ring.solicited == ring.newest,
            Armed::Any => true,
        };
        let before = ring.event_at;
        if asked && ring.is_event_due(Time::from_nanos(wc.timestamp)) {
            ring.disarm();
            drop(ring);
            self.notify();
            return Ok(Pushed { number, alarm: None });
        }
        let alarm = ring.event_at.filter(|_| before.is_none());
        Ok(Pushed { number, alarm })
    }

    /// Raises an event that was held back until now.
    pub(crate) fn expire(&self, now: Time) {
        let mut ring = self.ring.lock();
        if ring.event_at.is_some_and(|at| at <= now) {
            ring.disarm();
            drop(ring);
            self.notify();
        }
    }

    fn notify(&self) {
        if let Some(notify) = &self.notify {
            notify.completion();
        }
    }

    /// Changes how many entries fit. EINVAL: more wait, or the CQ has failed; ENOMEM.
    pub fn resize(&self, capacity: usize) -> Result<(), VerbsError> {
        let mut ring = self.ring.lock();
        if capacity < ring.entries.len() || ring.overflow == Overflow::Failed {
            return Err(VerbsError::Invalid);
        }
        let more = capacity.saturating_sub(ring.entries.len());
        ring.entries
            .try_reserve_exact(more)
            .map_err(|_| VerbsError::NoMemory)?;
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
        let solicited = ring.untold(Armed::Solicited);
        ring.entries.retain(|entry| keep(&entry.wc));
        if solicited {
            // Which one it was is not known any more: it may be one that stays.
            ring.solicited = ring.newest;
        }
        self.publish(&ring);
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
        let cq = Cq::new(1, 4, 0, None).unwrap();
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
    fn a_cq_that_overran_takes_nothing_any_more() {
        let cq = Cq::new(1, 1, 0, None).unwrap();
        cq.push(wc(0, 7), false).unwrap();
        assert_eq!(cq.push(wc(1, 7), false), Err(Overrun { first: true }));
        assert_eq!(cq.push(wc(2, 7), false), Err(Overrun { first: false }));
        assert_eq!(cq.resize(4), Err(VerbsError::Invalid));
        let mut out = [Wc::default(); 2];
        assert_eq!(
            (cq.poll(&mut out), out[0].wr_id),
            (1, 0),
            "what it has can be polled"
        );
        assert_eq!(cq.push(wc(3, 7), false), Err(Overrun { first: false }));
    }

    #[test]
    fn overruns_can_be_ignored() {
        let cq = Cq::new(1, 2, 0, None).unwrap();
        cq.ignore_overrun();
        for i in 0..5 {
            cq.push(wc(i, 7), false).unwrap();
        }
        let mut out = [Wc::default(); 3];
        assert_eq!(cq.poll(&mut out), 2);
        assert_eq!((out[0].wr_id, out[1].wr_id), (3, 4));
    }

    #[test]
    fn arming() {
        let count = Count::default();
        let cq = Cq::new(1, 16, 0, Some(Box::new(count.clone()))).unwrap();
        let fired = || count.0.load(Ordering::Relaxed);
        cq.push(wc(0, 7), true).unwrap();
        assert_eq!(fired(), 0, "not armed");
        assert_eq!(cq.poll(&mut [Wc::default()]), 1);
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
    fn moderation() {
        let count = Count::default();
        let cq = Cq::new(1, 64, 0, Some(Box::new(count.clone()))).unwrap();
        let fired = || count.0.load(Ordering::Relaxed);
        let us = Duration::from_micros;
        let at = |time| Time::ZERO + us(time);
        let push = |time: u64| {
            let timestamp = at(time).as_nanos();
            cq.push(
                Wc {
                    timestamp,
                    ..wc(0, 7)
                },
                false,
            )
            .unwrap()
            .alarm
        };
        let arm = || {
            cq.poll(&mut [Wc::default(); 8]);
            cq.arm(false);
        };
        cq.moderate(Moderation {
            count: 3,
            period: us(10),
        });
        assert_eq!(push(0), None, "not armed");
        arm();
        assert_eq!(
            [push(1), push(2), push(3), push(4)],
            [Some(at(11)), None, None, None]
        );
        assert_eq!(fired(), 1, "with the third");
        cq.expire(at(11));
        assert_eq!(fired(), 1, "not armed again");
        arm();
        assert_eq!([push(20), push(21)], [Some(at(30)), None]);
        cq.expire(at(29));
        assert_eq!(fired(), 1);
        cq.expire(at(30));
        cq.expire(at(31));
        assert_eq!(fired(), 2, "in time");
        for (count, period, expected) in [
            (2, us(0), [2, 3]),
            (0, us(5), [3, 3]),
            (0, us(0), [5, 5]),
            (1, us(9), [6, 6]),
        ] {
            cq.moderate(Moderation { count, period });
            arm();
            for fires in expected {
                push(40);
                assert_eq!(fired(), fires, "{count} {period:?}");
            }
            cq.expire(at(45));
        }
    }

    #[test]
    fn arming_sees_what_came_before() {
        let count = Count::default();
        let cq = Cq::new(1, 16, 0, Some(Box::new(count.clone()))).unwrap();
        let fired = || count.0.load(Ordering::Relaxed);
        let mut out = [Wc::default(); 2];
        cq.push(wc(0, 7), false).unwrap();
        cq.arm(true);
        assert_eq!(fired(), 0, "not solicited");
        cq.arm(false);
        assert_eq!(fired(), 1, "it waits untold");
        cq.push(wc(1, 7), true).unwrap();
        cq.push(wc(2, 7), false).unwrap();
        assert_eq!(cq.poll(&mut out), 2);
        cq.arm(true);
        assert_eq!(fired(), 1, "the solicited one is polled");
        cq.arm(false);
        assert_eq!(fired(), 2);
        cq.arm(false);
        assert_eq!(fired(), 2, "an event has told of it");
        assert_eq!(cq.poll(&mut out), 1);
        cq.push(wc(3, 7), true).unwrap();
        assert_eq!(fired(), 3);
        cq.push(wc(4, 7), true).unwrap();
        cq.push(wc(5, 8), false).unwrap();
        cq.remove_qp(8);
        cq.arm(true);
        assert_eq!(fired(), 4, "the solicited one is still there");
    }

    #[test]
    fn forgets_one_qp_and_resizes() {
        let cq = Cq::new(1, 4, 0, None).unwrap();
        for i in 0..4 {
            cq.push(wc(i, (i % 2) as u32), false).unwrap();
        }
        cq.remove_qp(0);
        assert_eq!(cq.len(), 2);
        assert_eq!(cq.resize(1), Err(VerbsError::Invalid));
        cq.resize(2).unwrap();
        cq.resize(8).unwrap();
        cq.push(wc(9, 1), false).unwrap();
        let mut out = [Wc::default(); 8];
        assert_eq!(cq.poll(&mut out), 3);
        assert_eq!(out[2].wr_id, 9);
    }
}
