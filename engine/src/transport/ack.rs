//! What responses do to the send queue: acknowledgements, NAKs, and the timers that stand in for them.

use std::time::Duration;

use ferroce_wire::aeth::{credits, rnr_timer_us};
use ferroce_wire::{Kind, NakCode, RocePacket, Syndrome};

use crate::qp::{Qp, Shared};
use crate::verbs::WcStatus;

impl Qp {
    /// Takes a response packet.
    pub fn receive_response(&mut self, shared: &mut Shared<'_>, roce: &RocePacket<'_>) {
        match (roce.opcode().kind(), roce.aeth()) {
            (Kind::Acknowledge, Some(aeth)) => {
                let Some(seq) = self.requester.outstanding_seq(roce.bth().psn) else {
                    shared.counters.drop_psn += 1;
                    return;
                };
                match aeth.syndrome {
                    Syndrome::Ack { credit } => {
                        self.requester.grant(aeth.msn, credits(credit));
                        self.advance(shared, seq + 1);
                    }
                    Syndrome::RnrNak { timer } => self.rnr_nak(shared, seq, timer),
                    Syndrome::Nak(code) => self.nak(shared, seq, code),
                    Syndrome::Reserved(_) => shared.counters.drop_opcode += 1,
                }
            }
            _ => shared.counters.drop_opcode += 1,
        }
    }

    /// Everything before `to` has arrived: completes what that covers.
    fn advance(&mut self, shared: &mut Shared<'_>, to: u64) {
        let from = self.requester.una;
        if to <= from {
            return;
        }
        let (mut at, mut cost) = (from, 0);
        let sent = self.requester.send;
        while at < to {
            let Some(wqe) = self.sq.front() else { break };
            let (first, end, length) = (wqe.first, wqe.end(), wqe.length);
            let part = end.min(to);
            // What went back to be sent again does not count as in flight.
            let counted = part.min(sent);
            if counted > at {
                let last = u64::from(counted == end);
                let full = counted - at - last;
                cost += full * shared.cost.of(self.mtu as usize);
                let tail = u64::from(length).saturating_sub((end - 1 - first) * u64::from(self.mtu));
                cost += last * shared.cost.of(tail as usize);
            }
            at = part;
            if part < end {
                break;
            }
            self.complete_send(shared);
        }
        self.requester.acked(shared.now, &self.attr, at, cost);
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
        self.advance(shared, seq);
        if !self.sends() || self.requester.rnr_waiting() {
            return;
        }
        if !self.requester.take_rnr_retry(&self.attr) {
            self.fail_send(shared, WcStatus::RnrRetryExcErr);
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
        self.advance(shared, seq);
        if self.sends() {
            self.fail_send(shared, status);
        }
    }

    /// The packet `seq` was lost.
    fn sequence_nak(&mut self, shared: &mut Shared<'_>, seq: u64) {
        self.advance(shared, seq);
        // The wait that an RNR NAK asked for stands: what the peer misses it has refused itself.
        if !self.sends() || self.requester.rnr_waiting() || self.requester.nak_is_copy(seq) {
            return;
        }
        self.retry(shared);
    }

    /// A timer ran out.
    pub fn handle_timeout(&mut self, shared: &mut Shared<'_>) {
        if self.requester.rnr_waiting() {
            self.requester.end_rnr();
        } else {
            shared.counters.timeouts += 1;
            self.retry(shared);
        }
    }

    /// Goes back to the oldest unacknowledged packet, or gives up.
    fn retry(&mut self, shared: &mut Shared<'_>) {
        if self.requester.take_retry() {
            let cursor = self.sq.find(self.requester.una);
            self.requester.go_back(cursor);
        } else {
            self.fail_send(shared, WcStatus::RetryExcErr);
        }
    }
}
