//! The requester: which packets of the send queue go out, and which the peer has acknowledged.
//!
//! Packets are counted by sequence numbers of 64 bits that never wrap; the PSN on the wire is the first PSN plus the
//! sequence number, modulo 2^24. Received PSNs become sequence numbers by their distance from the oldest
//! unacknowledged packet. A loss is repaired by going back to that packet and sending everything from there again.

use std::collections::VecDeque;

use ferroce_wire::Psn;

use super::budget::Buffer;
use super::timer::{RoundTrip, local_ack_timeout};
use super::window::Window;
use crate::time::Time;
use crate::verbs::{QpAttr, VendorError, WcStatus};

/// Packets that may be sent and not acknowledged: with more, it could not be told which of them a PSN means.
const MAX_UNACKNOWLEDGED: u64 = (1 << 23) - 1;

/// Why the requester waits although there is more to send.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Wait {
    #[default]
    No,
    /// For an acknowledgement: window, credits, fence.
    Ack,
    /// For its turn in the line for a receive buffer.
    Turn,
    /// For the end of the time an RNR NAK asked for.
    Rnr,
    /// For ever: the WQE at the cursor can't be sent, and fails so once those before it are done.
    Failed(WcStatus, VendorError),
}

/// State of the sending half of a QP.
#[derive(Default)]
pub(crate) struct Requester {
    /// PSN of sequence number 0.
    base: Psn,
    /// Sequence number that the next WQE begins with.
    tail: u64,
    /// Sequence number of the next packet to send, or to send again.
    pub send: u64,
    /// The sequence number after the highest that was ever sent.
    pub sent: u64,
    /// The oldest sequence number that is not acknowledged.
    pub una: u64,
    /// Index of the WQE that `send` belongs to.
    pub cursor: u64,
    /// Index of the first WQE that was never begun: no packet of it was sent, or it is local and was not done. Local
    /// work before this is done, and is not done again when the cursor passes it after going back.
    pub begun: u64,
    /// WQEs ever posted, which is the index of the next one.
    posted: u64,
    /// Nothing from this sequence number on is sent while the queue drains (SQD).
    drain: Option<u64>,
    /// The end of the drain is to be told.
    tell_drained: bool,
    /// Messages posted.
    ssn: u64,
    /// The last message that the peer has credits for; `None`: no limit.
    credit_limit: Option<u32>,
    pub window: Window,
    /// Requests that take a resource of the responder and are not wholly answered (READs, atomics, ATOMIC WRITEs,
    /// FLUSHes): the sequence number after the last answer of each.
    unanswered: VecDeque<u64>,
    /// Where such requests ever ended, beyond `una`, in order: the peer may know them as such, and when it is asked
    /// again, no request may reach across.
    boundaries: VecDeque<u64>,
    wait: Wait,
    round_trip: RoundTrip,
    /// When the retransmission timer or the RNR wait runs out.
    deadline: Option<Time>,
    retries: u8,
    rnr_retries: u8,
    /// A sequence NAK that was acted on: the responder sends one per gap, so another is a copy.
    nak_done: Option<u64>,
}

impl Requester {
    /// Begins with a PSN (RTR to RTS).
    pub fn start(&mut self, psn: Psn) {
        *self = Requester {
            base: psn,
            ..Requester::default()
        };
    }

    /// Stops sending and all timers; the queue is about to be emptied.
    pub fn stop(&mut self) {
        self.send = self.tail;
        self.sent = self.tail;
        self.una = self.tail;
        self.begun = self.posted;
        self.wait = Wait::No;
        self.drain = None;
        self.deadline = None;
        self.unanswered.clear();
        self.boundaries.clear();
        self.window.rewind();
    }

    /// First sequence number, number of packets and send sequence number of the next WQE: a local one has no packets,
    /// and is no message.
    pub fn numbers(&self, packets: u32) -> (u64, u32, u64) {
        (self.tail, packets, self.ssn + u64::from(packets > 0))
    }

    /// A WQE of so many packets was posted.
    pub fn posted(&mut self, packets: u32) {
        self.tail += u64::from(packets);
        self.ssn += u64::from(packets > 0);
        self.posted += 1;
    }

    /// The PSN on the wire of a sequence number.
    pub fn psn(&self, seq: u64) -> Psn {
        self.base.add(seq as u32)
    }

    /// The PSN of the next new packet.
    pub fn next_psn(&self) -> Psn {
        self.psn(self.sent)
    }

    /// The outstanding packet with this PSN; `None` if no such packet is outstanding.
    pub fn outstanding_seq(&self, psn: Psn) -> Option<u64> {
        let distance = u64::try_from(psn.distance(self.psn(self.una))).ok()?;
        let seq = self.una + distance;
        (seq < self.sent).then_some(seq)
    }

    /// How many more sequence numbers may be under way.
    pub fn psn_room(&self) -> u32 {
        MAX_UNACKNOWLEDGED.saturating_sub(self.send - self.una) as u32
    }

    /// Whether packets are sent and not acknowledged.
    pub fn outstanding(&self) -> bool {
        self.una < self.sent
    }

    /// Whether there is a packet to send or local work to do, and nothing to wait for. A queue that drains begins no
    /// more WQEs.
    pub fn has_work(&self) -> bool {
        let more = match self.drain {
            Some(end) => self.send < end,
            None => self.send < self.tail || self.begun < self.posted,
        };
        self.wait == Wait::No && more
    }

    /// The WQE with this index is begun: it is local and done, or a packet of it is sent.
    pub fn begin(&mut self, index: u64) {
        self.begun = self.begun.max(index + 1);
    }

    /// When a timer runs out.
    pub fn deadline(&self) -> Option<Time> {
        self.deadline
    }

    /// Nothing but what precedes `end` is to be sent any more (SQD).
    pub fn set_drain(&mut self, end: u64, tell: bool) {
        self.drain = Some(end);
        self.tell_drained = tell;
    }

    /// Everything is to be sent again (SQD to RTS).
    pub fn end_drain(&mut self) {
        self.drain = None;
        self.tell_drained = false;
    }

    /// Whether what the drain waits for is still under way.
    pub fn is_draining(&self) -> bool {
        self.drain.is_some_and(|end| self.una < end)
    }

    /// Whether the queue has drained, and that is to be told: once.
    pub fn take_drained(&mut self) -> bool {
        self.drain.is_some_and(|end| self.una >= end) && std::mem::take(&mut self.tell_drained)
    }

    /// Whether the message with this send sequence number may begin, by the peer's credits: one more than it
    /// granted may, to find out. A further packet of that one waits until the first is acknowledged.
    pub fn has_credit(&self, ssn: u64, first: u64) -> bool {
        let Some(limit) = self.credit_limit else {
            return true;
        };
        match Psn::new(ssn as u32).distance(Psn::new(limit)) {
            ..=0 => true,
            1 => self.send == first || self.una > first,
            // A peer that counts otherwise must not stop us for ever.
            _ => self.una == self.send,
        }
    }

    /// Whether the peer granted the message with this send sequence number.
    pub fn is_granted(&self, ssn: u64) -> bool {
        self.credit_limit
            .is_none_or(|limit| Psn::new(ssn as u32).distance(Psn::new(limit)) <= 0)
    }

    /// Takes the credits of an AETH: `None` for no limit.
    pub fn grant(&mut self, msn: u32, credits: Option<u32>) {
        let limit = credits.map(|credits| Psn::new(msn).add(credits).value());
        if self.wait == Wait::Ack && limit != self.credit_limit {
            self.wait = Wait::No;
        }
        self.credit_limit = limit;
    }

    /// Waits for an acknowledgement before more is sent.
    pub fn wait_for_ack(&mut self) {
        self.wait = Wait::Ack;
    }

    /// Waits for its turn in a line before more is sent.
    pub fn wait_for_turn(&mut self) {
        self.wait = Wait::Turn;
    }

    /// Whether it waits for its turn.
    pub fn waits_for_turn(&self) -> bool {
        self.wait == Wait::Turn
    }

    /// Its turn has come; false if it does not wait for that any more.
    pub fn take_turn(&mut self) -> bool {
        let waits = self.wait == Wait::Turn;
        if waits {
            self.wait = Wait::No;
        }
        waits
    }

    /// The WQE at the cursor can't be sent.
    pub fn fail_at_cursor(&mut self, status: WcStatus, reason: VendorError) {
        self.wait = Wait::Failed(status, reason);
    }

    /// What the oldest WQE fails with, if it is the one that can't be sent.
    pub fn failure_of(&self, head: u64) -> Option<(WcStatus, VendorError)> {
        match self.wait {
            Wait::Failed(status, reason) if head == self.cursor => Some((status, reason)),
            _ => None,
        }
    }

    /// The packet at `send` has been handed to the link; it stood for `packets` sequence numbers, and fills a buffer by
    /// `cost`. `answered`: the peer is to answer it at once.
    pub fn packet_sent(
        &mut self,
        now: Time,
        attr: &QpAttr,
        packets: u32,
        (buffer, cost): (Buffer, u64),
        answered: bool,
    ) {
        let new = self.send >= self.sent;
        self.send += u64::from(packets);
        if new && answered {
            self.round_trip.sent(self.send, now);
        }
        self.sent = self.sent.max(self.send);
        self.window.sent(cost, buffer);
        if self.deadline.is_none() {
            self.restart_timer(now, attr);
        }
    }

    /// The packet just sent takes a resource of the responder.
    pub fn asked_for_answer(&mut self) {
        self.unanswered.push_back(self.send);
        let before = self.boundaries.iter().rposition(|&end| end < self.send);
        let at = before.map_or(0, |index| index + 1);
        if self.boundaries.get(at) != Some(&self.send) {
            self.boundaries.insert(at, self.send);
        }
    }

    /// Where such a request at `seq` has to end at the latest, if it is sent again.
    pub fn boundary(&self, seq: u64) -> Option<u64> {
        self.boundaries.iter().copied().find(|&end| end > seq)
    }

    /// Requests that take a resource of the responder, and are not wholly answered.
    pub fn unanswered(&self) -> usize {
        self.unanswered.len()
    }

    /// Whether there are such requests: what a fence waits for.
    pub fn awaits_answers(&self) -> bool {
        !self.unanswered.is_empty()
    }

    /// The packet at `send` has been handed to the link, and nobody will acknowledge it (UC, UD).
    pub fn unreliable_sent(&mut self) {
        self.send += 1;
        self.sent = self.send;
        self.una = self.send;
    }

    /// What is before `to` need not be sent again, even if it could not be.
    pub fn skip_to(&mut self, to: u64, cursor: u64) {
        self.send = to;
        self.cursor = cursor.min(self.begun);
        if matches!(self.wait, Wait::Failed(..)) {
            self.wait = Wait::No;
        }
    }

    /// Everything before `to` is acknowledged (`to` is past `una`). Of that, `theirs` and `ours` were counted as under
    /// way to the peer's buffer and to ours.
    pub fn acked(&mut self, now: Time, attr: &QpAttr, to: u64, theirs: u64, ours: u64) {
        self.una = to;
        while self.unanswered.front().is_some_and(|&end| end <= to) {
            self.unanswered.pop_front();
        }
        while self.boundaries.front().is_some_and(|&end| end <= to) {
            self.boundaries.pop_front();
        }
        self.window.acked(theirs, ours);
        if let (Some(sample), Some(timeout)) =
            (self.round_trip.acked(to, now), local_ack_timeout(attr.timeout))
        {
            self.window.keep_below(timeout / 4, sample);
        }
        self.refill(attr);
        self.nak_done = None;
        if !matches!(self.wait, Wait::Failed(..) | Wait::Turn) {
            self.wait = Wait::No;
        }
        self.restart_timer(now, attr);
    }

    /// Sets the retry counters to what the QP allows.
    pub fn refill(&mut self, attr: &QpAttr) {
        self.retries = attr.retry_cnt;
        self.rnr_retries = attr.rnr_retry;
    }

    /// The peer answered something that was sent twice: it lives, and has yet to come to what is outstanding. Each such
    /// answer stands for a packet of ours, so they end, and a loss is still noticed.
    pub fn heard(&mut self, now: Time, attr: &QpAttr) {
        if self.deadline.is_some() && self.wait != Wait::Rnr {
            self.restart_timer(now, attr);
        }
    }

    /// Restarts the retransmission timer, or stops it when nothing is outstanding.
    fn restart_timer(&mut self, now: Time, attr: &QpAttr) {
        let tries = attr.retry_cnt.saturating_sub(self.retries);
        self.deadline = local_ack_timeout(attr.timeout)
            .filter(|_| self.outstanding())
            .map(|timeout| now + self.round_trip.patience(timeout, tries));
    }

    /// Whether it waits for the end of an RNR time.
    pub fn rnr_waiting(&self) -> bool {
        self.wait == Wait::Rnr
    }

    /// Whether this sequence NAK was acted on already; notes it if not.
    pub fn nak_is_copy(&mut self, seq: u64) -> bool {
        self.nak_done.replace(seq) == Some(seq)
    }

    /// A further sequence NAK is no copy of an earlier one.
    pub fn forget_nak(&mut self) {
        self.nak_done = None;
    }

    /// Sends everything from the oldest unacknowledged packet again. `cursor`: the WQE that it belongs to.
    pub fn go_back(&mut self, cursor: u64) {
        self.window.lost();
        self.rewind(cursor);
        self.wait = Wait::No;
    }

    /// Waits, then sends everything from the oldest unacknowledged packet again.
    pub fn wait_rnr(&mut self, until: Time, cursor: u64) {
        self.rewind(cursor);
        self.wait = Wait::Rnr;
        self.deadline = Some(until);
    }

    /// The RNR wait is over.
    pub fn end_rnr(&mut self) {
        self.wait = Wait::No;
        self.deadline = None;
    }

    fn rewind(&mut self, cursor: u64) {
        self.send = self.una;
        self.cursor = cursor;
        self.unanswered.clear();
        self.round_trip.abandon();
        self.window.rewind();
        self.deadline = None;
    }

    /// Takes one retry; false if none is left.
    pub fn take_retry(&mut self) -> bool {
        let left = self.retries.checked_sub(1);
        self.retries = left.unwrap_or(0);
        left.is_some()
    }

    /// Takes one RNR retry; false if none is left. 7 is for ever.
    pub fn take_rnr_retry(&mut self, attr: &QpAttr) -> bool {
        if attr.rnr_retry == 7 {
            return true;
        }
        let left = self.rnr_retries.checked_sub(1);
        self.rnr_retries = left.unwrap_or(0);
        left.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_psn_always_tells_which_packet_it_is() {
        let attr = QpAttr::default();
        let mut requester = Requester::default();
        requester.start(Psn::new(0xff_fff0));
        requester.posted(1 << 23);
        requester.posted(1 << 23);
        let send = |requester: &mut Requester, packets: u32| {
            requester.packet_sent(Time::ZERO, &attr, packets, (Buffer::Theirs, 1), true);
        };
        // Of a READ of 2^31 bytes in packets of 256, one packet waits.
        assert_eq!(requester.psn_room(), (1 << 23) - 1);
        send(&mut requester, (1 << 23) - 2);
        assert_eq!(requester.psn_room(), 1);
        send(&mut requester, 1);
        assert_eq!(requester.psn_room(), 0);
        let newest = requester.send - 1;
        assert_eq!(requester.outstanding_seq(requester.psn(newest)), Some(newest));
        assert_eq!(requester.outstanding_seq(requester.psn(0)), Some(0));
        assert_eq!(requester.outstanding_seq(requester.psn(newest + 1)), None);
        requester.acked(Time::ZERO, &attr, 1000, 1000, 0);
        assert_eq!(requester.psn_room(), 1000);
        assert_eq!(
            requester.outstanding_seq(requester.psn(999)),
            None,
            "acknowledged"
        );
    }
}
