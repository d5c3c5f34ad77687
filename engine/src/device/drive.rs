//! Packets in, packets out, and time.

use std::cmp::Reverse;
use std::time::Duration;

use ferroce_wire::bth::MULTICAST_QPN;
use ferroce_wire::{Opcode, RocePacket, TransportClass};

use super::{Acks, Device, Progress};
use crate::link::{RxPacket, Transmit, TransmitError};
use crate::qp::{AckWait, Turn};
use crate::time::Time;
use crate::transport::budget::{BudgetId, Buffer};

/// Packets of one call of [`Device::transmit`], after which arrivals should be looked at.
const BATCH: usize = 256;

/// How long an acknowledgement waits for company at most, if the caller keeps to [`Device::next_deadline`].
const ACK_HOLD: Duration = Duration::from_millis(1);

/// How long it waits at least while the application polls: long enough for the answer to a packet whose fellows are on
/// their way.
const ACK_PATIENCE: Duration = Duration::from_micros(4);

/// A request that comes so soon after an acknowledgement was not waiting for it, as no round trip is so short: the next
/// acknowledgements stand for what comes in [`ACK_PATIENCE`], ...
const STREAM_GAP: Duration = Duration::from_micros(5);

/// ... and as each that comes is a reason to wait for the next, for what comes in this time at most.
const ACK_SPAN: Duration = Duration::from_micros(32);

/// When a packet that found no room where it goes is tried again, at the latest.
const BUSY_PAUSE: Duration = Duration::from_micros(250);

/// Packets that a QP may send before it is the next one's turn.
const QUANTUM: usize = 64;

impl Device {
    /// Takes a packet: completions, events and state follow at once, but what is to be sent because of it waits
    /// for [`Device::transmit`].
    pub fn receive(&mut self, now: Time, packet: &RxPacket<'_>) {
        self.counters.transport_rx += 1;
        let Ok(roce) = RocePacket::parse(packet.data) else {
            let known = packet
                .data
                .first()
                .is_none_or(|&byte| Opcode::from_u8(byte).is_some());
            let reason = if known {
                &mut self.counters.drop_length
            } else {
                &mut self.counters.drop_opcode
            };
            *reason += 1;
            return;
        };
        let bth = *roce.bth();
        if bth.version != 0 {
            self.counters.drop_version += 1;
            return;
        }
        if roce.opcode().transport() == TransportClass::Cnp {
            self.counters.rx_cnp += 1;
            return;
        }
        if packet.dest.is_multicast() || bth.dest_qpn == MULTICAST_QPN {
            self.receive_multicast(now, packet, &roce);
            return;
        }
        let Ok((qp, mut shared)) = self.qp(now, bth.dest_qpn) else {
            self.counters.drop_qpn += 1;
            return;
        };
        qp.receive(&mut shared, packet, &roce);
        if qp.ack_wait == AckWait::Waits {
            // Where one came, the next may follow.
            self.held_for = (now.since(self.held_since) + ACK_PATIENCE).min(ACK_SPAN);
        }
        self.settle(bth.dest_qpn);
    }

    /// Runs the timers that are due.
    pub fn handle_timeouts(&mut self, now: Time) {
        while let Some(&Reverse((time, id))) = self.cq_alarms.peek() {
            if time > now {
                break;
            }
            self.cq_alarms.pop();
            if let Some((cq, _)) = self.cqs.get(&id) {
                cq.expire(now);
            }
        }
        while let Some(&Reverse((time, qpn))) = self.alarms.peek() {
            if time > now {
                break;
            }
            self.alarms.pop();
            let Ok((qp, mut shared)) = self.qp(now, qpn) else {
                continue;
            };
            if qp.alarm != Some(time) {
                continue;
            }
            qp.alarm = None;
            if qp.deadline().is_some_and(|deadline| deadline <= now) {
                qp.handle_timeout(&mut shared);
            }
            self.settle(qpn);
        }
    }

    /// Gives packets to the link: QPs take turns, and each sends its responses before its requests.
    pub fn transmit(&mut self, now: Time, link: &mut dyn Transmit) -> Progress {
        self.transmit_acks(now, link, Acks::Send)
    }

    /// As [`Device::transmit`], where acknowledgements go as `acks` says.
    pub fn transmit_acks(&mut self, now: Time, link: &mut dyn Transmit, acks: Acks) -> Progress {
        if self.owes(now, acks) {
            while let Some(qpn) = self.held.pop_front() {
                if let Some(qp) = self.qps.get_mut(qpn) {
                    // It waited in vain: the next one does not, unless the application sends again.
                    qp.answers &= qp.ack_wait != AckWait::Waits;
                    qp.ack_wait = AckWait::Over;
                    qp.acknowledged_at = now;
                    self.ready.push_back(qpn);
                }
            }
        }
        // Each is the first one at some time.
        self.ready.append(&mut self.busy);
        if !self.transmit_partings(link) {
            return Progress::Full;
        }
        let mut left = BATCH;
        while let Some(qpn) = self.ready.pop_front() {
            let Ok((qp, mut shared)) = self.qp(now, qpn) else {
                continue;
            };
            let company = qp.answers || now.since(qp.acknowledged_at) < STREAM_GAP;
            let may_wait = acks == Acks::MayWait && company && qp.ack_wait == AckWait::No;
            if qp.has_only_ack() {
                if may_wait {
                    qp.ack_wait = AckWait::Waits;
                    qp.end_turn(shared.budgets);
                    self.held.push_back(qpn);
                    (self.held_since, self.held_for) = (now, ACK_PATIENCE);
                    continue;
                }
                qp.acknowledged_at = now;
            }
            qp.ack_wait = AckWait::No;
            let mut quantum = QUANTUM.min(left);
            let allowed = quantum;
            let turn = qp.transmit(&mut shared, link, &mut quantum);
            qp.queued = false;
            if turn != Turn::Full {
                qp.end_turn(shared.budgets);
            }
            left -= allowed - quantum;
            match turn {
                Turn::Idle => self.settle(qpn),
                Turn::More => {
                    qp.queued = true;
                    self.ready.push_back(qpn);
                    self.settle(qpn);
                }
                Turn::Full => {
                    qp.queued = true;
                    self.ready.push_front(qpn);
                    self.settle(qpn);
                    return Progress::Full;
                }
                Turn::Busy => {
                    qp.queued = true;
                    self.busy.push_back(qpn);
                    self.settle(qpn);
                }
            }
            if left == 0 {
                break;
            }
        }
        self.busy.rotate_left(usize::from(self.busy.len() > 1));
        self.busy_since = now;
        if !self.transmit_partings(link) {
            Progress::Full
        } else if self.ready.is_empty() {
            Progress::Idle
        } else {
            Progress::More
        }
    }

    /// Gives the responses that belong to no QP's turn to the link; false when that is full.
    fn transmit_partings(&mut self, link: &mut dyn Transmit) -> bool {
        let mut busy = 0;
        while let Some(parting) = self.partings.get(busy) {
            match parting.transmit(link) {
                Err(TransmitError::Full) => return false,
                Err(TransmitError::Busy) => busy += 1,
                Ok(()) | Err(TransmitError::Fault(_)) => {
                    self.counters.transport_tx += 1;
                    self.partings.swap_remove(busy);
                }
            }
        }
        true
    }

    /// Packets given to links so far.
    pub fn sent(&self) -> u64 {
        self.counters.transport_tx
    }

    /// Whether acknowledgements that waited are to leave now.
    pub fn owes(&self, now: Time, acks: Acks) -> bool {
        !self.held.is_empty() && (acks == Acks::Send || self.held_since + self.held_for <= now)
    }

    /// Whether since the last call something came to be sent that an acknowledgement waited for: it may be an answer.
    pub fn take_answered(&mut self) -> bool {
        std::mem::take(&mut self.answered)
    }

    /// Whether [`Device::transmit`] has nothing to do but acknowledge.
    pub fn is_quiet(&self) -> bool {
        self.ready.is_empty() && !self.is_busy()
    }

    /// Whether something waits for room where it goes: then [`Device::transmit`] is to be called again soon.
    pub fn is_busy(&self) -> bool {
        !self.busy.is_empty() || !self.partings.is_empty()
    }

    /// After a QP changed: puts it into the list of those that have something to send, and sets its alarm.
    pub(super) fn settle(&mut self, qpn: u32) {
        if !self.overrun.is_empty() {
            self.fail_with_cqs();
        }
        let Some(qp) = self.qps.get_mut(qpn) else { return };
        qp.count(self.now, &mut self.budgets);
        if !qp.requester.waits_for_turn() {
            qp.leave_line(&mut self.budgets);
        }
        // What an acknowledgement waited for has come. The entry in `held` stays, and does no harm.
        let joined = qp.ack_wait == AckWait::Waits && !qp.has_only_ack();
        if joined {
            qp.ack_wait = AckWait::Over;
            self.answered = true;
        }
        if joined || !qp.queued && qp.has_work() {
            qp.queued = true;
            self.ready.push_back(qpn);
        }
        if let Some(deadline) = qp.deadline()
            && qp.alarm.is_none_or(|alarm| deadline < alarm)
        {
            qp.alarm = Some(deadline);
            self.alarms.push(Reverse((deadline, qpn)));
        }
        let budgets = [Buffer::Theirs, Buffer::Ours].map(|buffer| qp.budget(buffer));
        budgets
            .into_iter()
            .flatten()
            .for_each(|budget| self.serve(budget));
    }

    /// Where there is room in a budget, it is the turn of the next QP that waits for some.
    pub(super) fn serve(&mut self, budget: BudgetId) {
        while let Some(qpn) = self.budgets.next(budget) {
            let mut qp = self.qps.get_mut(qpn);
            if let Some(qp) = qp.take_if(|qp| qp.requester.take_turn()) {
                qp.place = None;
                if !qp.queued {
                    qp.queued = true;
                    self.ready.push_back(qpn);
                }
                return;
            }
            self.budgets.end_turn(budget, qpn);
        }
    }

    /// Fails the QPs of CQs that overran, and those that lost a completion: they can't go on.
    fn fail_with_cqs(&mut self) {
        // The work that they flush may overrun further ones.
        while let Some((id, loser)) = self.overrun.pop() {
            for qpn in self.qps.numbers() {
                let Ok((qp, mut shared)) = self.qp(self.now, qpn) else {
                    continue;
                };
                let mut cqs = qp.init.send_cq.iter().chain(&qp.init.recv_cq);
                if qpn == loser || cqs.any(|cq| cq.id() == id) {
                    qp.fail(&mut shared);
                }
            }
        }
    }

    /// When [`Device::handle_timeouts`] and [`Device::transmit`] should be called at the latest; they may find nothing to
    /// do then.
    pub fn next_deadline(&self) -> Option<Time> {
        self.deadlines().min()
    }

    /// Whether [`Device::next_deadline`] is not in the future.
    pub fn is_due(&self, now: Time) -> bool {
        self.deadlines().any(|deadline| deadline <= now)
    }

    fn deadlines(&self) -> impl Iterator<Item = Time> {
        let alarm = self.alarms.peek().map(|Reverse((time, _))| *time);
        let held = (!self.held.is_empty()).then_some(self.held_since + ACK_HOLD);
        let cq_alarm = self.cq_alarms.peek().map(|Reverse((time, _))| *time);
        let busy = self.is_busy().then_some(self.busy_since + BUSY_PAUSE);
        [alarm, held, cq_alarm, busy].into_iter().flatten()
    }

    /// Counters by name.
    pub fn counters(&self, out: &mut dyn FnMut(&'static str, u64)) {
        self.counters.each(out);
    }
}
