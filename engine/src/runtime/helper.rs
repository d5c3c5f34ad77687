//! The helper thread: it does what the application's threads do not, and sleeps otherwise.
//!
//! It is in one of two states. *Listening*, it waits on the socket: the application sleeps, computes, or waits for an
//! event. *Napping*, it leaves the socket to an application that polls by itself, and only looks now and then whether
//! that is still so; packets then cost no wake-up.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use crossbeam_utils::CachePadded;
use parking_lot::Mutex;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};

use crate::control::Event;
use crate::device::Acks;
use crate::time::Time;
use crate::verbs::AsyncEvent;

use super::core::Round;
use super::{Shared, clock};
use crate::signals;

/// How long a nap lasts: the longest that a packet waits when the application stops polling.
const NAP: Duration = Duration::from_millis(1);

/// An application that armed a CQ less than this ago is taken to sleep on events: the helper then always listens.
const EVENT_MODE: Duration = Duration::from_millis(10);

/// Who slept shorter than that looks that long for more before it sleeps again: a wake-up costs whoever sends as much as
/// some packets do.
const PATIENCE: Duration = Duration::from_micros(20);

/// Pauses of the processor between two looks in vain, in which others find the lock free.
const PAUSES: usize = 32;

/// What the application's threads tell the helper, and when it sleeps.
pub(super) struct Pulse {
    /// When the application last polled, in nanoseconds.
    polled_at: CachePadded<AtomicU64>,
    /// When a CQ was last armed, in nanoseconds.
    armed_at: CachePadded<AtomicU64>,
    /// Until when the helper sleeps, in nanoseconds; 0 while it is awake.
    sleeps_until: CachePadded<AtomicU64>,
    /// Whether the helper sleeps without an eye on the socket.
    naps: AtomicBool,
    /// Whether the helper waits for the link to become writable.
    awaits_writable: AtomicBool,
    /// Whether packets wait for the application's next poll.
    owes: AtomicBool,
    /// Whether the helper is at work, or waits for a CPU in the middle of it.
    works: AtomicBool,
    stop: AtomicBool,
    wake: OwnedFd,
}

impl Pulse {
    pub(super) fn new() -> io::Result<Pulse> {
        Ok(Pulse {
            polled_at: CachePadded::default(),
            armed_at: CachePadded::default(),
            sleeps_until: CachePadded::default(),
            naps: AtomicBool::new(false),
            awaits_writable: AtomicBool::new(false),
            owes: AtomicBool::new(false),
            works: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            wake: rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        })
    }

    /// The application polls.
    pub(super) fn driven(&self, now: Time) {
        self.polled_at.store(now.as_nanos(), Ordering::Relaxed);
    }

    /// The application was at work for so long, in which it could not poll.
    pub(super) fn worked(&self, time: Duration) {
        let polled_at = self.polled_at.load(Ordering::Relaxed);
        if polled_at != 0 && !time.is_zero() {
            self.polled_at
                .store(polled_at + time.as_nanos() as u64, Ordering::Relaxed);
        }
    }

    /// Until when an application that polls by itself is left alone; `None` if it does not, or will soon sleep.
    fn nap(&self, now: Time) -> Option<Time> {
        let armed_at = Time::from_nanos(self.armed_at.load(Ordering::SeqCst));
        if armed_at != Time::ZERO && now.since(armed_at) < EVENT_MODE {
            return None;
        }
        let polled_at = Time::from_nanos(self.polled_at.load(Ordering::Relaxed));
        let until = polled_at + NAP;
        (polled_at != Time::ZERO && now < until).then_some(until)
    }

    /// The application will sleep until a completion comes.
    pub(super) fn armed(&self) {
        self.armed_at.store(clock::now().as_nanos(), Ordering::SeqCst);
        if self.naps.load(Ordering::SeqCst) {
            self.wake();
        }
    }

    /// Whether the application polls by itself, so that the helper looks after it now and then only.
    pub(super) fn naps(&self) -> bool {
        self.naps.load(Ordering::SeqCst)
    }

    /// Packets wait for the application's next poll, or none do.
    pub(super) fn owe(&self, owes: bool) {
        self.owes.store(owes, Ordering::Relaxed);
    }

    /// Whether packets wait for the application's next poll.
    pub(super) fn owes(&self) -> bool {
        self.owes.load(Ordering::Relaxed)
    }

    /// Whether the helper is at work: who polls can leave it the CPU, which may be what it waits for.
    pub(super) fn works(&self) -> bool {
        self.works.load(Ordering::Relaxed)
    }

    /// The transport next needs a round at `deadline`, or when the link is writable: wakes a helper that sleeps longer.
    pub(super) fn expect(&self, deadline: Option<Time>, blocked: bool) {
        let sleeps_until = self.sleeps_until.load(Ordering::SeqCst);
        // An application that polls sees to its deadlines itself, and should it stop: the nap is short.
        let left = self.naps.load(Ordering::SeqCst);
        let late = !left && deadline.is_some_and(|deadline| deadline.as_nanos() < sleeps_until);
        if late || (blocked && sleeps_until != 0 && !self.awaits_writable.load(Ordering::Relaxed)) {
            self.wake();
        }
    }

    /// The helper sleeps until then, without an eye on the socket if it naps. The start of time stands for awake.
    fn announce(&self, until: Option<Time>, naps: bool, awaits_writable: bool) {
        self.naps.store(naps, Ordering::SeqCst);
        self.awaits_writable.store(awaits_writable, Ordering::Relaxed);
        self.sleeps_until
            .store(until.map_or(u64::MAX, Time::as_nanos), Ordering::SeqCst);
    }

    fn wake(&self) {
        // A full counter means that a wake-up is already under way.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }
}

/// The thread.
pub(super) struct Helper {
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Helper {
    /// Starts the thread with all signals blocked: they are the application's.
    pub(super) fn start(shared: Arc<Shared>) -> io::Result<Helper> {
        let blocked = signals::block_all();
        let thread = std::thread::Builder::new()
            .name("ferroce".to_owned())
            .spawn(move || {
                Run {
                    shared,
                    hurries: false,
                }
                .run()
            });
        signals::restore(&blocked);
        Ok(Helper {
            thread: Mutex::new(Some(thread?)),
        })
    }

    /// Ends the thread and waits for it.
    pub(super) fn stop(&self, shared: &Shared) {
        shared.pulse.stop.store(true, Ordering::SeqCst);
        shared.pulse.wake();
        if let Some(thread) = self.thread.lock().take()
            && thread.join().is_err()
        {
            tracing::error!("the helper thread panicked: this is a bug in Ferroce");
        }
    }
}

/// The state of the running thread.
struct Run {
    shared: Arc<Shared>,
    /// The last sleep was a short one.
    hurries: bool,
}

impl Run {
    fn run(mut self) {
        self.control();
        while !self.shared.pulse.stop.load(Ordering::SeqCst) {
            let nap = self.round();
            self.sleep(nap);
        }
    }

    /// Does the engine's work until no packet comes any more, or the application polls by itself: then it gives until when
    /// it is left alone. Two who work at it would wait for one another, on one CPU for slices of time.
    fn round(&self) -> Option<Time> {
        let mut last = clock::now();
        loop {
            let polls = || self.shared.pulse.nap(clock::now());
            if let Some(until) = polls() {
                return Some(until);
            }
            let mut core = self.shared.core.lock();
            // Who had the lock may have been at this.
            if let Some(until) = polls() {
                return Some(until);
            }
            let now = clock::now();
            self.shared.pulse.works.store(true, Ordering::Relaxed);
            let received = core.round(now, Acks::Send) == Round::Received;
            self.shared.settle(&mut core);
            drop(core);
            self.shared.pulse.works.store(false, Ordering::Relaxed);
            if received {
                last = now;
            } else if self.hurries && now.since(last) < PATIENCE {
                (0..PAUSES).for_each(|_| std::hint::spin_loop());
            } else {
                return None;
            }
        }
    }

    /// Sleeps until there is something to do, or until the end of the nap.
    fn sleep(&mut self, nap: Option<Time>) {
        let shared = self.shared.clone();
        let pulse = &shared.pulse;
        let (mut receive, mut transmit, mut until) = (Vec::new(), None, nap);
        if nap.is_some() {
            // The application has the lock often enough, and sees to its deadlines.
            pulse.announce(until, true, false);
        } else {
            let core = shared.core.lock();
            core.link().receive_fds(&mut receive);
            transmit = core.link().transmit_fd().filter(|_| core.blocked());
            until = core.next_deadline();
            // Under the lock: whoever sets an earlier deadline later sees it.
            pulse.announce(until, false, transmit.is_some());
        }
        let now = clock::now();
        // An application that armed a CQ, or asked to stop, before it could see that we sleep.
        let just_armed = nap.is_some() && pulse.nap(now).is_none();
        if !just_armed && !pulse.stop.load(Ordering::SeqCst) {
            let mut fds = Vec::with_capacity(3 + receive.len());
            fds.push(PollFd::new(&pulse.wake, PollFlags::IN));
            fds.push(PollFd::from_borrowed_fd(shared.lease.control_fd(), PollFlags::IN));
            // SAFETY: the link owns these descriptors, and it lives as long as `shared`.
            let borrow = |fd| unsafe { BorrowedFd::borrow_raw(fd) };
            fds.extend(
                receive
                    .into_iter()
                    .map(|fd| PollFd::from_borrowed_fd(borrow(fd), PollFlags::IN)),
            );
            fds.extend(transmit.map(|fd| PollFd::from_borrowed_fd(borrow(fd), PollFlags::IN)));
            let timeout = until.map(|until| timespec(until.since(now)));
            if let Err(error) = rustix::event::poll(&mut fds, timeout.as_ref())
                && error != rustix::io::Errno::INTR
            {
                tracing::error!("the helper thread can't wait: {error}");
                pulse.stop.store(true, Ordering::SeqCst);
            }
            if fds[0].revents().contains(PollFlags::IN) {
                // Only an empty counter fails, and then nothing is to be taken.
                let _ = rustix::io::read(&pulse.wake, &mut [0; 8]);
            }
            if !fds[1].revents().is_empty() {
                self.control();
            }
        }
        pulse.announce(Some(Time::ZERO), false, false);
        self.hurries = nap.is_none() && clock::now().since(now) < PATIENCE;
    }

    /// Takes what the daemon has to say.
    fn control(&mut self) {
        loop {
            match self.shared.lease.receive() {
                Ok(Some(event)) => self.daemon_says(event),
                Ok(None) => return,
                // The lease has closed that connection, and looks for a new daemon.
                Err(error) => return tracing::warn!("the daemon's message can't be read: {error}"),
            }
        }
    }

    fn daemon_says(&mut self, event: Event) {
        let shared = &self.shared;
        match event {
            Event::DeviceChanged(new) => {
                let new = Arc::new(new);
                let old = std::mem::replace(&mut *shared.info.write(), new.clone());
                let mut core = shared.core.lock();
                core.link_mut().set_mtu(new.mtu);
                match super::path_mtu(&new) {
                    Ok(mtu) => core.device.set_mtu(mtu),
                    Err(error) => tracing::warn!("{error}"),
                }
                if old.up != new.up {
                    shared.publish(if new.up {
                        &AsyncEvent::PortActive
                    } else {
                        &AsyncEvent::PortError
                    });
                }
                if old.gids != new.gids {
                    shared.publish(&AsyncEvent::GidChange);
                }
            }
            Event::DeviceRemoved => shared.end(),
            Event::ReportWanted(id) => {
                let report = shared.report();
                if let Err(error) = shared.lease.report(id, report) {
                    tracing::debug!("the daemon did not take the report: {error}");
                }
            }
            Event::DaemonGone => tracing::debug!("the daemon is gone; the next one takes the lease over"),
        }
    }
}

fn timespec(d: Duration) -> Timespec {
    Timespec {
        tv_sec: d.as_secs() as i64,
        tv_nsec: i64::from(d.subsec_nanos()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn naps_only_while_the_application_polls() {
        let pulse = Pulse::new().unwrap();
        let at = |ms| Time::ZERO + Duration::from_millis(ms);
        pulse.worked(NAP);
        assert_eq!(pulse.nap(at(0)), None, "it never polled");
        pulse.driven(at(50));
        assert_eq!(pulse.nap(at(50)), Some(at(50) + NAP));
        assert_eq!(pulse.nap(at(50) + NAP), None);
        // While it works it can't poll.
        pulse.worked(NAP);
        assert_eq!(pulse.nap(at(50) + NAP), Some(at(50) + 2 * NAP));
        assert_eq!(pulse.nap(at(50) + 2 * NAP), None);
        // A single poll says nothing about the time after a long sleep.
        assert_eq!(pulse.nap(at(5000)), None);
    }

    #[test]
    fn listens_after_a_cq_was_armed() {
        let pulse = Pulse::new().unwrap();
        pulse.armed();
        let now = clock::now();
        pulse.driven(now);
        assert_eq!(pulse.nap(now), None);
        let later = now + EVENT_MODE;
        pulse.driven(later);
        assert!(pulse.nap(later).is_some());
    }
}
