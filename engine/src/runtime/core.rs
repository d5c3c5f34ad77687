//! What the engine's lock protects: the device, its link, and the rounds that move packets between them.

use std::time::Duration;

use super::clock;
use crate::device::{Acks, Device, Progress};
use crate::link::Link;
use crate::time::Time;
use crate::verbs::AsyncEvent;

/// Calls of [`Device::transmit`] before arrivals are looked at, and others get the lock: a peer may have asked for all of
/// a READ of 2^31 bytes.
const TURNS: usize = 4;

/// A system call that sends takes about this long: within that time after one, posts need not make another at once.
const RING_PAUSE: Duration = Duration::from_micros(5);
/// So many packets that it takes longer: then the time counts from its end.
const MANY: u64 = 8;
/// Packets that leave without any that comes, after which who is to take them may have the CPU: no receive ring has room
/// for what a program can send in a slice of time, and on UC and UD what finds none is lost.
const MOST_UNHEARD: u64 = 256;
/// Posts in a row that wait for one another at most.
const MOST_POSTS: u32 = 32;

/// What came of a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Round {
    /// Nothing has changed.
    Nothing,
    /// No packet came, but there were timers, or something to send.
    Sent,
    /// Packets came.
    Received,
}

/// The device and its link.
pub(super) struct Core {
    pub(super) device: Device,
    link: Box<dyn Link>,
    /// Packets wait for the link to become writable.
    blocked: bool,
    /// Packets are ready that wait for the next round.
    more: bool,
    /// Posts that wait, in their send queues, for the next round or for more of their kind.
    unsent_posts: u32,
    /// When packets left last, and how many the device had given to the link by then.
    sent_at: Time,
    sent: u64,
    /// How many it had given when something was received last, or somebody else had the CPU.
    heard: u64,
    /// When something was received last, or that was taken for long ago.
    idle_since: Time,
}

impl Core {
    pub(super) fn new(device: Device, link: Box<dyn Link>) -> Core {
        Core {
            device,
            link,
            blocked: false,
            more: false,
            unsent_posts: 0,
            sent_at: Time::ZERO,
            sent: 0,
            heard: 0,
            idle_since: Time::ZERO,
        }
    }

    /// One round: packets in, due timers, everything ready out.
    pub(super) fn round(&mut self, now: Time, acks: Acks) -> Round {
        let device = &mut self.device;
        let received = match self.link.receive(&mut |packet| device.receive(now, packet)) {
            Ok(count) => count > 0,
            Err(error) => {
                tracing::debug!("receive: {error}");
                false
            }
        };
        let due = device.is_due(now);
        if due {
            device.handle_timeouts(now);
        }
        if received {
            self.idle_since = now;
            self.heard = self.device.sent();
        } else if !due && self.is_quiet() && !self.device.owes(now, acks) && self.unsent_posts == 0 {
            // Whoever polls sees this most of the time.
            return Round::Nothing;
        }
        self.transmit(now, acks);
        if received { Round::Received } else { Round::Sent }
    }

    /// Whether much was sent and nothing was received; then it begins anew.
    pub(super) fn floods(&mut self) -> bool {
        let sent = self.device.sent();
        let floods = sent - self.heard >= MOST_UNHEARD;
        if floods {
            self.heard = sent;
        }
        floods
    }

    /// When a round that began at `now` was at work last, as far as that is known.
    pub(super) fn worked_at(&self, now: Time) -> Time {
        self.sent_at.max(now)
    }

    /// Whether nothing was received for so long; then it begins anew.
    pub(super) fn idles(&mut self, now: Time, time: Duration) -> bool {
        let idles = now.since(self.idle_since) >= time;
        if idles {
            self.idle_since = now;
        }
        idles
    }

    /// Sends what the device has ready, as far as the link takes it; where that is much, the next round goes on.
    pub(super) fn transmit(&mut self, now: Time, acks: Acks) {
        if self.give_to_link(now, acks) {
            self.flush(now);
        }
    }

    /// As [`Core::transmit`] after a post. Packets leave at once, but where some have left a moment ago, and `polls` says
    /// that the application will be back at once to poll, those of several posts leave together, or with that poll. What
    /// may answer a message is waited for, and leaves at once in any case.
    pub(super) fn transmit_posted(&mut self, now: Time, polls: bool) {
        let answers = self.device.take_answered();
        let waits = polls
            && !answers
            && !self.blocked
            && self.unsent_posts < MOST_POSTS
            && now.since(self.sent_at) < RING_PAUSE;
        if waits {
            self.unsent_posts += 1;
            self.more = true;
        } else {
            self.transmit(now, Acks::MayWait);
        }
    }

    /// See [`Link::expect_bursts`].
    pub(super) fn expect_bursts(&mut self) {
        self.link.expect_bursts();
    }

    /// Whether packets of posts wait for the application's next poll.
    pub(super) fn has_unsent_posts(&self) -> bool {
        self.unsent_posts > 0
    }

    /// Whether there is nothing to send, but acknowledgements that wait.
    pub(super) fn is_quiet(&self) -> bool {
        !self.blocked && !self.more && self.device.is_quiet()
    }

    /// Gives what the device has ready to the link. False if all that can be done for now is done.
    fn give_to_link(&mut self, now: Time, acks: Acks) -> bool {
        if self.blocked {
            // There may be room now, and who waits for it goes on.
            self.flush(now);
        }
        self.more = false;
        for _ in 0..TURNS {
            match self.device.transmit_acks(now, &mut *self.link, acks) {
                Progress::Idle => return true,
                Progress::More => {}
                Progress::Full => {
                    if !self.flush(now) {
                        return false;
                    }
                }
            }
        }
        // A link that is full now says itself when to go on.
        self.more = self.flush(now);
        false
    }

    /// Pushes out what the link holds; false if the socket is full.
    fn flush(&mut self, now: Time) -> bool {
        self.unsent_posts = 0;
        let sent = self.device.sent();
        let new = sent - self.sent;
        if new > 0 {
            (self.sent, self.sent_at) = (sent, now);
        }
        let all = self.link.flush().unwrap_or_else(|error| {
            // Lost packets are the transport's business; its timers will notice.
            tracing::debug!("transmit: {error}");
            true
        });
        self.blocked = !all;
        if new >= MANY {
            self.sent_at = clock::now();
        }
        all
    }

    /// Whether packets wait for the link to become writable.
    pub(super) fn blocked(&self) -> bool {
        self.blocked
    }

    /// Whether something is ready to be sent that found no room, or waits for the next round.
    pub(super) fn holds_back(&self) -> bool {
        self.blocked || self.more || self.device.is_busy()
    }

    /// When the transport next needs a round.
    pub(super) fn next_deadline(&self) -> Option<Time> {
        if self.more {
            return Some(Time::ZERO);
        }
        self.device.next_deadline()
    }

    /// Takes the events that came up, in order.
    pub(super) fn take_event(&mut self) -> Option<AsyncEvent> {
        self.device.take_event()
    }

    pub(super) fn link(&self) -> &dyn Link {
        &*self.link
    }

    pub(super) fn link_mut(&mut self) -> &mut dyn Link {
        &mut *self.link
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::net::IpAddr;
    use std::os::fd::RawFd;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::link::{Path, Qpns, RxPacket, Transmit, TransmitError};
    use crate::memory::Fault;
    use crate::transport::tests::pair::{BASE, MEMORY, Pair, Setup};
    use crate::verbs::{Operation, SendWr};

    /// A link that takes all packets, and counts them, and how often some left.
    #[derive(Clone, Default)]
    struct Count(Arc<AtomicUsize>, Arc<AtomicUsize>);

    impl Transmit for Count {
        fn packet(
            &mut self,
            _: &Path,
            _: Qpns,
            _: usize,
            _: &mut dyn FnMut(&mut [u8]) -> Result<(), Fault>,
        ) -> Result<(), TransmitError> {
            self.0.fetch_add(1, Ordering::Relaxed);
            Ok(())
        }
    }

    impl Link for Count {
        fn receive(&mut self, _: &mut dyn FnMut(&RxPacket<'_>)) -> io::Result<usize> {
            Ok(0)
        }
        fn flush(&mut self) -> io::Result<bool> {
            self.1.fetch_add(1, Ordering::Relaxed);
            Ok(true)
        }
        fn receive_fds(&self, _: &mut Vec<RawFd>) {}
        fn transmit_fd(&self) -> Option<RawFd> {
            None
        }
        fn window(&self, _: usize) -> u32 {
            u32::MAX
        }
        fn join(&mut self, _: IpAddr, _: u32) -> io::Result<()> {
            Ok(())
        }
        fn leave(&mut self, _: IpAddr) -> io::Result<()> {
            Ok(())
        }
        fn counters(&self, _: &mut dyn FnMut(&'static str, u64)) {}
    }

    #[test]
    fn posts_in_a_row_leave_together() {
        let pair = Pair::new(&Setup::default());
        let sges = [pair.a.sge(BASE, 64)];
        let wr = SendWr {
            sges: &sges,
            ..SendWr::default()
        };
        let (qpn, mut now) = (pair.a.qpn, pair.a.now + Duration::from_secs(1));
        let link = Count::default();
        let mut core = Core::new(pair.a.dev, Box::new(link.clone()));
        let post = |core: &mut Core, now, polls| {
            core.device.post_send(now, qpn, &wr).unwrap();
            core.transmit_posted(now, polls);
            (link.0.load(Ordering::Relaxed), link.1.load(Ordering::Relaxed))
        };
        assert_eq!(post(&mut core, now, true), (1, 1), "the first leaves at once");
        assert!(!core.has_unsent_posts() && !core.holds_back());
        assert_eq!(post(&mut core, now, true), (1, 1));
        assert!(core.has_unsent_posts() && core.holds_back());
        assert_eq!(core.next_deadline(), Some(Time::ZERO), "whoever is next sends it");
        assert_eq!(post(&mut core, now, true), (1, 1));
        core.transmit(now, Acks::MayWait);
        assert_eq!(link.0.load(Ordering::Relaxed), 3);
        assert!(!core.has_unsent_posts() && !core.holds_back(), "a poll sends");
        assert_eq!(post(&mut core, now, false), (4, 3), "nobody may poll soon");
        now = now + RING_PAUSE;
        assert_eq!(post(&mut core, now, true), (5, 4), "some time after the last");
        for _ in 0..MOST_POSTS {
            assert_eq!(post(&mut core, now, true).1, 4);
        }
        assert_eq!(post(&mut core, now, true).1, 5, "too many");
    }

    #[test]
    fn an_answer_leaves_at_once() {
        let mut pair = Pair::new(&Setup::default());
        pair.a.recv(1, 64);
        pair.b.send(1, 64);
        let packets = pair.b.sent();
        pair.a.receive_all(&packets);
        assert_eq!(pair.a.sent_unless_alone(), [], "its acknowledgement waits");
        let sges = [pair.a.sge(BASE, 64)];
        let wr = SendWr {
            sges: &sges,
            ..SendWr::default()
        };
        let (qpn, now) = (pair.a.qpn, pair.a.now);
        let link = Count::default();
        let mut core = Core::new(pair.a.dev, Box::new(link.clone()));
        core.sent_at = now;
        let post = |core: &mut Core| {
            core.device.post_send(now, qpn, &wr).unwrap();
            core.transmit_posted(now, true);
            (link.0.load(Ordering::Relaxed), link.1.load(Ordering::Relaxed))
        };
        assert_eq!(post(&mut core), (2, 1), "with the acknowledgement");
        assert_eq!(post(&mut core), (2, 1), "what follows waits");
        assert!(core.has_unsent_posts());
    }

    #[test]
    fn work_counts_until_its_end() {
        let pair = Pair::new(&Setup::default());
        let sges = [pair.a.sge(BASE, 64)];
        let wr = SendWr {
            sges: &sges,
            ..SendWr::default()
        };
        let (qpn, now) = (pair.a.qpn, pair.a.now + Duration::from_secs(1));
        let mut core = Core::new(pair.a.dev, Box::new(Count::default()));
        assert_eq!(core.worked_at(now), now);
        for _ in 0..MANY {
            core.device.post_send(now, qpn, &wr).unwrap();
        }
        // The test's own time stands still, that of the calls does not.
        let begin = clock::now();
        core.transmit(now, Acks::MayWait);
        assert!(core.worked_at(now) >= begin.max(now));
    }

    #[test]
    fn a_long_answer_takes_many_rounds() {
        let mut pair = Pair::new(&Setup::default());
        let len = MEMORY as u32 / 2;
        let sges = [pair.a.sge(BASE, 256)];
        let operation = Operation::Read {
            addr: BASE,
            rkey: pair.b.mr.rkey,
        };
        let wr = SendWr {
            operation,
            sges: &sges,
            ..SendWr::default()
        };
        pair.a.post(&wr).unwrap();
        let mut request = pair.a.sent();
        assert_eq!(request.len(), 1);
        // Our own requester would ask for less at once.
        request[0].bytes[24..28].copy_from_slice(&len.to_be_bytes());
        assert_eq!(request[0].roce().reth().unwrap().dma_len, len);
        pair.b.receive_all(&request);
        let (packets, now) = (Count::default(), pair.b.now);
        let mut core = Core::new(pair.b.dev, Box::new(packets.clone()));
        let all = len as usize / 256;
        let mut sent = 0;
        while sent < all {
            assert_ne!(core.round(now, Acks::Send), Round::Received);
            let new = packets.0.load(Ordering::Relaxed);
            assert!(sent < new && new - sent <= all / 2, "{new} after {sent}");
            sent = new;
            let goes_on = sent < all;
            assert_eq!(core.holds_back(), goes_on);
            assert_eq!(core.next_deadline() == Some(Time::ZERO), goes_on);
        }
        core.round(now, Acks::Send);
        assert_eq!(packets.0.load(Ordering::Relaxed), all);
        assert!(
            all as u64 > MOST_UNHEARD && core.floods(),
            "nothing came meanwhile"
        );
        assert!(!core.floods(), "only once");
        assert!(!core.holds_back() && core.next_deadline().is_none());
    }
}
