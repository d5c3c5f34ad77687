//! What responses do to the send queue: acknowledgements, NAKs, and the timers that stand in for them.

use std::time::Duration;

use ferroce_wire::aeth::{credits, rnr_timer_us};
use ferroce_wire::{Aeth, Kind, NakCode, RocePacket, Syndrome};

use super::budget::Buffer;
use super::payload::{Cursor, Domain};
use crate::qp::{Qp, Shared};
use crate::queue::sq::SendWqe;
use crate::time::Time;
use crate::verbs::{Operation, VendorError, WcStatus};

impl Qp {
    /// Takes a response packet.
    pub fn receive_response(&mut self, shared: &mut Shared<'_>, roce: &RocePacket<'_>) {
        let (kind, aeth) = (roce.opcode().kind(), roce.aeth());
        let Some(seq) = self.requester.outstanding_seq(roce.bth().psn) else {
            shared.counters.drop_psn += 1;
            let acknowledges = aeth.is_none_or(|aeth| matches!(aeth.syndrome, Syndrome::Ack { .. }));
            if acknowledges && roce.bth().psn.is_before(self.requester.psn(self.requester.una)) {
                self.requester.heard(shared.now, &self.attr);
            }
            return;
        };
        match (kind, aeth.map(|aeth| aeth.syndrome)) {
            (Kind::Acknowledge, Some(Syndrome::RnrNak { timer })) => self.rnr_nak(shared, seq, timer),
            (Kind::Acknowledge, Some(Syndrome::Nak(code))) => self.nak(shared, seq, code),
            (_, Some(Syndrome::Ack { .. }) | None) => {
                if let Some(Aeth {
                    syndrome: Syndrome::Ack { credit },
                    msn,
                }) = aeth
                {
                    self.requester.grant(msn, credits(credit));
                }
                match kind {
                    Kind::Acknowledge => {
                        self.acknowledged(shared, seq + 1);
                    }
                    Kind::AtomicAcknowledge => self.atomic_response(shared, seq, roce),
                    _ => self.read_response(shared, seq, roce.payload()),
                }
            }
            _ => shared.counters.drop_opcode += 1,
        }
    }

    /// Everything before `to` has arrived at the peer. False if the answer of a READ or atomic before that is missing:
    /// it is asked for again.
    fn acknowledged(&mut self, shared: &mut Shared<'_>, to: u64) -> bool {
        self.advance(shared, to, false);
        if self.requester.una >= to || !self.sends() {
            return true;
        }
        if !self.requester.rnr_waiting() && !self.requester.nak_is_copy(self.requester.una) {
            self.retry(shared, VendorError::Losses);
        }
        false
    }

    /// A packet of a READ response, which also answers FLUSHes and ATOMIC WRITEs, without data then.
    fn read_response(&mut self, shared: &mut Shared<'_>, seq: u64, payload: &[u8]) {
        let Some((index, wqe)) = self.answered(shared, seq) else {
            return;
        };
        let offset = (seq - wqe.first) as u32 * self.mtu;
        let expected = match wqe.operation {
            Operation::Read { .. } => wqe.length.saturating_sub(offset).min(self.mtu),
            Operation::AtomicWrite { .. } | Operation::Flush { .. } => 0,
            _ => {
                shared.counters.drop_opcode += 1;
                return;
            }
        };
        if payload.len() as u32 != expected {
            self.fail_send(shared, WcStatus::BadRespErr, VendorError::BadResponse);
        } else if expected == 0 {
            self.advance(shared, self.requester.una + 1, true);
        } else {
            self.take_data(shared, index, &wqe, offset, payload);
        }
    }

    /// The answer of an atomic: the old value, in the byte order of this host.
    fn atomic_response(&mut self, shared: &mut Shared<'_>, seq: u64, roce: &RocePacket<'_>) {
        let Some((index, wqe)) = self.answered(shared, seq) else {
            return;
        };
        let atomic = matches!(
            wqe.operation,
            Operation::CompareSwap { .. } | Operation::FetchAdd { .. }
        );
        let Some(answer) = roce.atomic_ack_eth().filter(|_| atomic) else {
            shared.counters.drop_opcode += 1;
            return;
        };
        self.take_data(shared, index, &wqe, 0, &answer.original.to_ne_bytes());
    }

    /// The WQE that a data response answers, if it is the next answer that is wanted.
    fn answered(&mut self, shared: &mut Shared<'_>, seq: u64) -> Option<(u64, SendWqe)> {
        if !self.acknowledged(shared, seq) {
            return None;
        }
        let wqe = *self.sq.front()?;
        (self.sends() && wqe.first <= seq && seq == self.requester.una).then_some((self.sq.head(), wqe))
    }

    /// Puts data of a response where the oldest WQE wants it.
    fn take_data(&mut self, shared: &mut Shared<'_>, index: u64, wqe: &SendWqe, offset: u32, data: &[u8]) {
        let domain = Domain {
            pd: self.pd,
            keys: &*shared.keys,
            memory: shared.memory,
        };
        let sges = self.sq.sges(index, wqe);
        let placed = Cursor::at(sges, offset).and_then(|mut cursor| domain.scatter(sges, &mut cursor, data));
        match placed {
            Ok(()) => self.advance(shared, self.requester.una + 1, true),
            Err(_) => self.fail_send(shared, WcStatus::LocProtErr, VendorError::LocalMemory),
        }
    }

    /// Everything before `to` has arrived: completes what that covers. Past a WQE that is answered by more than an
    /// acknowledgement only its `answer` moves, and then it is the oldest.
    fn advance(&mut self, shared: &mut Shared<'_>, to: u64, answer: bool) {
        let from = self.requester.una;
        let (mut at, mut theirs, mut ours) = (from, 0, 0);
        let sent = self.requester.send;
        while at < to {
            let Some(wqe) = self.sq.front() else { break };
            if wqe.is_answered() && !answer {
                break;
            }
            let end = wqe.end();
            let part = end.min(to);
            // What went back to be sent again does not count as in flight.
            let counted = part.min(sent);
            if counted > at {
                let cost = wqe.cost(shared.cost, self.mtu, at, counted);
                match wqe.fills() {
                    Buffer::Theirs => theirs += cost,
                    Buffer::Ours => ours += cost,
                }
            }
            at = part;
            if part < end {
                break;
            }
            self.complete_send(shared);
        }
        if at == from {
            return;
        }
        self.complete_local(shared);
        self.requester.acked(shared.now, &self.attr, at, theirs, ours);
        if self.requester.send < at {
            let cursor = self.sq.find(at);
            self.requester.skip_to(at, cursor);
        }
        self.settle_failure(shared);
        self.check_drained(shared);
    }

    /// The peer had no receive for the packet `seq`: wait as long as it says, then send from there.
    fn rnr_nak(&mut self, shared: &mut Shared<'_>, seq: u64, timer: u8) {
        shared.counters.rx_rnr_nak += 1;
        if !self.acknowledged(shared, seq) || !self.sends() || self.requester.rnr_waiting() {
            return;
        }
        if !self.requester.take_rnr_retry(&self.attr) {
            let nak = VendorError::Nak(Syndrome::RnrNak { timer });
            self.fail_send(shared, WcStatus::RnrRetryExcErr, nak);
            return;
        }
        let until = shared.now + Duration::from_micros(u64::from(rnr_timer_us(timer)));
        self.requester.wait_rnr(until, self.sq.find(seq));
    }

    /// The peer refused the packet `seq`; it has everything before that.
    fn nak(&mut self, shared: &mut Shared<'_>, seq: u64, code: NakCode) {
        let status = match code {
            NakCode::PsnSequence => {
                shared.counters.rx_nak_sequence += 1;
                self.sequence_nak(shared, seq);
                return;
            }
            NakCode::InvalidRequest => WcStatus::RemInvReqErr,
            NakCode::RemoteAccess => WcStatus::RemAccessErr,
            NakCode::RemoteOperational => WcStatus::RemOpErr,
            NakCode::InvalidRdRequest | NakCode::Reserved(_) => {
                shared.counters.drop_opcode += 1;
                return;
            }
        };
        shared.counters.rx_nak_error += 1;
        if self.acknowledged(shared, seq) && self.sends() {
            self.fail_send(shared, status, VendorError::Nak(Syndrome::Nak(code)));
        }
    }

    /// The packet `seq` was lost.
    fn sequence_nak(&mut self, shared: &mut Shared<'_>, seq: u64) {
        // The wait that an RNR NAK asked for stands: what the peer misses it has refused itself.
        if self.acknowledged(shared, seq)
            && self.sends()
            && !self.requester.rnr_waiting()
            && !self.requester.nak_is_copy(seq)
        {
            self.retry(shared, VendorError::Losses);
        }
    }

    /// A timer ran out.
    pub fn handle_timeout(&mut self, shared: &mut Shared<'_>) {
        let due = |time: Time| time <= shared.now;
        if let Some(place) = &mut self.place
            && due(place.look_at)
        {
            place.look_at = shared.budgets.look(shared.now, place.budget);
        }
        if !self.requester.deadline().is_some_and(due) {
            return;
        }
        if self.requester.rnr_waiting() {
            self.requester.end_rnr();
        } else {
            shared.counters.timeouts += 1;
            self.requester.forget_nak();
            self.retry(shared, VendorError::Timeout);
        }
    }

    /// Goes back to the oldest unacknowledged packet, or gives up for that reason.
    fn retry(&mut self, shared: &mut Shared<'_>, reason: VendorError) {
        if self.requester.take_retry() {
            let cursor = self.sq.find(self.requester.una);
            self.requester.go_back(cursor);
        } else {
            self.fail_send(shared, WcStatus::RetryExcErr, reason);
        }
    }
}
