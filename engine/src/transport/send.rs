//! The send queue at work: which request goes out next, and what holds it back.

use ferroce_wire::Deth;

use super::budget::Buffer;
use super::payload::Domain;
use super::request::Request;
use super::window::{BUDGET, PacketCost};
use crate::link::{Path, Qpns, Transmit, TransmitError};
use crate::memory::keys::Denied;
use crate::qp::{Qp, Shared, Turn};
use crate::queue::sq::SendWqe;
use crate::verbs::{AsyncEvent, Operation, QpState, QpType, SendFlags, VendorError, WcStatus};

/// In the Q_Key of a UD work request: the QP's own is meant.
const OWN_QKEY: u32 = 1 << 31;

/// What there must be room for in our buffer before a part of a READ is asked for: many small requests cost more than
/// few large ones.
const WORTHWHILE: u64 = BUDGET / 8;

/// What became of the next request.
enum Step {
    Done,
    /// Nothing can be sent now.
    Waits,
    /// The link is full.
    Full,
    /// There is no room where it goes.
    Busy,
}

impl SendWqe {
    /// Whether its answer brings data: a READ or an atomic.
    pub fn fetches(&self) -> bool {
        matches!(
            self.operation,
            Operation::Read { .. } | Operation::CompareSwap { .. } | Operation::FetchAdd { .. }
        )
    }

    /// Whether it is answered by more than an acknowledgement, and takes a resource of the responder for that.
    pub fn is_answered(&self) -> bool {
        self.fetches()
            || matches!(
                self.operation,
                Operation::AtomicWrite { .. } | Operation::Flush { .. }
            )
    }

    /// Whose receive buffer it fills.
    pub fn fills(&self) -> Buffer {
        if self.fetches() {
            Buffer::Ours
        } else {
            Buffer::Theirs
        }
    }

    /// The cost of its packets from sequence number `from` to before `to`.
    pub fn cost(&self, cost: &PacketCost, mtu: u32, from: u64, to: u64) -> u64 {
        let last = u64::from(to == self.end());
        let tail = u64::from(self.length).saturating_sub((self.end() - 1 - self.first) * u64::from(mtu));
        (to - from - last) * cost.of(mtu as usize) + last * cost.of(tail as usize)
    }

    /// Whether it takes a receive of the peer, and so one of its credits.
    pub fn takes_receive(&self) -> bool {
        matches!(
            self.operation,
            Operation::Send | Operation::SendImm(_) | Operation::SendInv(_) | Operation::WriteImm { .. }
        )
    }
}

impl Qp {
    /// Gives request packets to the link, `quantum` at most.
    pub fn transmit_requests(
        &mut self,
        shared: &mut Shared<'_>,
        link: &mut dyn Transmit,
        quantum: &mut usize,
    ) -> Turn {
        while self.sends() && self.requester.has_work() {
            if *quantum == 0 {
                return Turn::More;
            }
            match self.transmit_request(shared, link, *quantum == 1) {
                Step::Done => *quantum -= 1,
                Step::Waits => return Turn::Idle,
                Step::Full => return Turn::Full,
                Step::Busy => return Turn::Busy,
            }
        }
        Turn::Idle
    }

    /// Whether the send queue is processed.
    pub fn sends(&self) -> bool {
        matches!(self.state, QpState::Rts | QpState::Sqd)
    }

    /// Gives the packet at the cursor to the link, or does the local work there. `last` of this turn: the next one may be
    /// far off, if others wait for the same buffer.
    fn transmit_request(&mut self, shared: &mut Shared<'_>, link: &mut dyn Transmit, last: bool) -> Step {
        let seq = self.requester.send;
        let index = self.cursor_for(seq);
        let Some(wqe) = self.sq.get(index).copied() else {
            return Step::Waits;
        };
        if wqe.operation.is_local() {
            return self.execute_local(shared, index, &wqe);
        }
        if wqe.misfit {
            return self.fail_at(shared, index, WcStatus::LocLenErr, VendorError::SendTooLong);
        }
        let reliable = self.is_reliable();
        let Some(mut request) = Request::new(self.class(), &wqe, (seq - wqe.first) as u32, self.mtu) else {
            return self.fail_at(shared, index, WcStatus::LocQpOpErr, VendorError::Unsendable);
        };
        let (mut packets, mut cost) = (1, shared.cost.of(request.payload));
        if reliable {
            let begins = seq == wqe.first;
            let fenced = begins && wqe.flags.contains(SendFlags::FENCE) && self.requester.awaits_answers();
            let credited = !wqe.takes_receive() || self.requester.has_credit(wqe.ssn, wqe.first);
            let part = if wqe.is_answered() {
                self.answered_part(shared, &wqe, seq)
            } else {
                let room = self.requester.window.allows(cost) && self.requester.psn_room() > 0;
                room.then_some((1, cost))
            };
            let Some(part) = part.filter(|_| !fenced && credited) else {
                self.requester.wait_for_ack();
                return Step::Waits;
            };
            let Some((fitting, left)) = self.fit(shared, &wqe, seq, part) else {
                return Step::Waits;
            };
            (packets, cost) = fitting;
            if matches!(wqe.operation, Operation::Read { .. }) {
                request.dma_len = request.dma_len.min(packets.saturating_mul(self.mtu));
            }
            if !wqe.is_answered() {
                request.ack_request = seq + 1 == wqe.end()
                    || last
                    || left < cost
                    || self.requester.window.ask(cost)
                    || begins && !self.requester.is_granted(wqe.ssn);
            }
        }
        request.psn = self.requester.psn(seq);
        let Some(path) = self.address(&mut request, index) else {
            return self.fail_at(shared, index, WcStatus::LocQpOpErr, VendorError::Unsendable);
        };
        let domain = Domain {
            pd: self.pd,
            keys: &*shared.keys,
            memory: shared.memory,
        };
        let (sq, len) = (&self.sq, request.len());
        let qpns = Qpns {
            local: self.qpn,
            dest: request.dest_qpn,
        };
        let taken = link.packet(&path, qpns, len, &mut |out| {
            request.fill(out, domain, sq, index, &wqe)
        });
        match taken {
            Err(TransmitError::Full) => return Step::Full,
            Err(TransmitError::Busy) => return Step::Busy,
            Err(TransmitError::Fault(_)) => {
                return self.fail_at(shared, index, WcStatus::LocProtErr, VendorError::LocalMemory);
            }
            Ok(()) => {}
        }
        shared.counters.transport_tx += 1;
        self.requester.begin(index);
        if reliable {
            shared.counters.retransmits += u64::from(seq < self.requester.sent);
            let answered = request.ack_request || wqe.is_answered();
            self.requester
                .packet_sent(shared.now, &self.attr, packets, (wqe.fills(), cost), answered);
            if wqe.is_answered() {
                self.requester.asked_for_answer();
            }
            if answered {
                self.requester.window.asked();
            }
        } else {
            self.requester.unreliable_sent();
            if self.requester.una == wqe.end() {
                self.complete_send(shared);
                self.check_drained(shared);
            }
        }
        Step::Done
    }

    /// Does a WQE that sends no packet. It completes in order; until then, going back goes past it.
    fn execute_local(&mut self, shared: &mut Shared<'_>, index: u64, wqe: &SendWqe) -> Step {
        // An invalidation is behind everything before it, fenced or not (IBTA 10.6.5.1).
        let waits = match wqe.operation {
            Operation::LocalInvalidate(_) => index > self.sq.head(),
            _ => wqe.flags.contains(SendFlags::FENCE) && self.requester.awaits_answers(),
        };
        if waits {
            self.requester.wait_for_ack();
            return Step::Waits;
        }
        let scope = self.scope_of(self.pd);
        let done = match wqe.operation {
            Operation::LocalInvalidate(key) => shared.keys.invalidate(scope, key),
            Operation::BindMw(bind) => shared.keys.bind(scope, &bind),
            _ => Err(Denied),
        };
        if done.is_err() {
            return self.fail_at(shared, index, WcStatus::MwBindErr, VendorError::LocalMemory);
        }
        self.requester.begin(index);
        self.complete_local(shared);
        Step::Done
    }

    /// Completes the oldest WQEs as long as they are local and done.
    pub fn complete_local(&mut self, shared: &mut Shared<'_>) {
        while self.sq.head() < self.requester.begun
            && self.sq.front().is_some_and(|wqe| wqe.operation.is_local())
        {
            self.complete_send(shared);
        }
    }

    /// How much of its data a READ asks for with one request: packets of the response, and their cost. No more than our
    /// own socket buffer holds, because nothing else slows the peer down; `None` if too little now. What else is
    /// answered by more than an acknowledgement is so by one packet.
    fn answered_part(&self, shared: &Shared<'_>, wqe: &SendWqe, seq: u64) -> Option<(u32, u64)> {
        if self.requester.unanswered() >= usize::from(self.attr.max_rd_atomic.max(1)) {
            return None;
        }
        let end = wqe.end().min(seq + u64::from(self.requester.psn_room()));
        let end = self.requester.boundary(seq).map_or(end, |at| at.min(end));
        let left = (end - seq) as u32;
        if left == 0 {
            return None;
        }
        let all = wqe.cost(shared.cost, self.mtu, seq, end);
        // What was asked for before is asked for again as one, whatever the window: rxe, once it has answered a later part
        // again, refuses an earlier one.
        let again = seq < self.requester.sent;
        if self.requester.window.has_room(all) || again && self.requester.window.is_empty() {
            return Some((left, all));
        }
        if again {
            return None;
        }
        let full = shared.cost.of(self.mtu as usize);
        let packets = left.min(self.requester.window.packets(full)?);
        Some((
            packets,
            wqe.cost(shared.cost, self.mtu, seq, seq + u64::from(packets)),
        ))
    }

    /// How much of a part of a WQE (packets and their cost) there is room for in the buffer that it fills, and the room
    /// that is left then. `None`: there is none now, or others are before us, and we wait for our turn.
    fn fit(
        &mut self,
        shared: &mut Shared<'_>,
        wqe: &SendWqe,
        seq: u64,
        (packets, cost): (u32, u64),
    ) -> Option<((u32, u64), u64)> {
        let buffer = wqe.fills();
        let Some(budget) = self.budget(buffer) else {
            return Some(((packets, cost), u64::MAX));
        };
        let room = self.room(shared.budgets, buffer);
        let full = shared.cost.of(self.mtu as usize);
        let least = cost.min(WORTHWHILE.max(full));
        if least > room || !shared.budgets.is_turn(budget, self.qpn) {
            self.requester.wait_for_turn();
            self.leave_line(shared.budgets);
            self.place = Some(shared.budgets.wait(shared.now, budget, self.qpn, least));
            return None;
        }
        if cost <= room {
            return Some(((packets, cost), room - cost));
        }
        let packets = (room / full).max(1) as u32;
        let cost = wqe.cost(shared.cost, self.mtu, seq, seq + u64::from(packets));
        Some(((packets, cost), room.saturating_sub(cost)))
    }

    /// Where a request goes; sets its destination QP.
    fn address(&self, request: &mut Request, index: u64) -> Option<Path> {
        if self.init.qp_type == QpType::Ud {
            let dest = self.sq.ud(index)?;
            let qkey = if dest.qkey & OWN_QKEY != 0 {
                self.attr.qkey
            } else {
                dest.qkey
            };
            request.deth = Some(Deth {
                qkey,
                src_qpn: self.qpn,
            });
            request.dest_qpn = dest.qpn;
            return Some(dest.path);
        }
        request.dest_qpn = self.attr.dest_qpn;
        self.attr.path
    }

    /// The WQE that a sequence number at or after the cursor's belongs to, or local work before that which is yet to be
    /// done; moves the cursor there.
    fn cursor_for(&mut self, seq: u64) -> u64 {
        let mut index = self.requester.cursor.max(self.sq.head());
        let passed = |wqe: &SendWqe, index| {
            wqe.end() <= seq && !(wqe.operation.is_local() && index >= self.requester.begun)
        };
        while self.sq.get(index).is_some_and(|wqe| passed(wqe, index)) {
            index += 1;
        }
        self.requester.cursor = index;
        index
    }

    /// The WQE at the cursor can't be sent: it fails as soon as those before it are done.
    fn fail_at(
        &mut self,
        shared: &mut Shared<'_>,
        index: u64,
        status: WcStatus,
        reason: VendorError,
    ) -> Step {
        self.requester.cursor = index;
        self.requester.fail_at_cursor(status, reason);
        self.settle_failure(shared);
        Step::Waits
    }

    /// Fails the WQE that could not be sent, if it is the oldest now.
    pub fn settle_failure(&mut self, shared: &mut Shared<'_>) {
        if let Some((status, reason)) = self.requester.failure_of(self.sq.head()) {
            self.fail_send(shared, status, reason);
        }
    }

    /// Tells once that a send queue that was to drain (SQD) has done so.
    pub fn check_drained(&mut self, shared: &mut Shared<'_>) {
        if self.requester.take_drained() {
            shared.events.push_back(AsyncEvent::SqDrained(self.qpn));
        }
    }

    /// Begins to drain the send queue: the message that is partly sent is the last.
    pub fn start_drain(&mut self, shared: &mut Shared<'_>) {
        let sent = self.requester.sent;
        let partly = self
            .sq
            .get(self.sq.find(sent.saturating_sub(1)))
            .filter(|wqe| wqe.first < sent);
        let end = partly.map_or(sent, |wqe| wqe.end());
        self.requester.set_drain(end, self.attr.sqd_async_notify);
        self.check_drained(shared);
    }
}
