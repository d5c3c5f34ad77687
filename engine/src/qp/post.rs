//! Posting work requests: what a QP of each type and state takes.

use super::{Qp, Shared};
use crate::verbs::{Operation, QpState, QpType, RecvWr, SendFlags, SendWr, VerbsError};

impl Qp {
    /// Posts a send. The queue is as it was if that fails.
    pub fn post_send(
        &mut self,
        shared: &mut Shared<'_>,
        wr: &SendWr<'_>,
        max_message: u32,
    ) -> Result<(), VerbsError> {
        let length = self.check_send(wr, max_message)?;
        if matches!(self.state, QpState::Err | QpState::Sqe) {
            self.flushed_send(shared, wr.wr_id);
            return Ok(());
        }
        let packets = if wr.operation.is_local() {
            0
        } else {
            length.unwrap_or(0).div_ceil(self.mtu).max(1)
        };
        let numbers = self.requester.numbers(packets);
        self.sq
            .post(wr, length, numbers, |addr, into| shared.memory.read(addr, into))?;
        self.requester.posted(packets);
        self.answers = true;
        Ok(())
    }

    /// Whether a send can be posted now; gives its length, or `None` if it has one that will end in an error.
    pub fn check_send(&self, wr: &SendWr<'_>, max_message: u32) -> Result<Option<u32>, VerbsError> {
        if matches!(self.state, QpState::Reset | QpState::Init | QpState::Rtr) {
            return Err(VerbsError::Invalid);
        }
        if self.init.qp_type == QpType::XrcRecv {
            return Err(VerbsError::Invalid);
        }
        let length: u64 = wr.sges.iter().map(|sge| u64::from(sge.length)).sum();
        self.check_operation(wr)?;
        let inline = wr.flags.contains(SendFlags::INLINE);
        if inline && length > self.sq.max_inline() as u64 {
            return Err(VerbsError::Invalid);
        }
        // Data that is copied at once may lie in any number of pieces.
        self.sq.check(if inline { 0 } else { wr.sges.len() })?;
        if self.send_room() == 0 {
            return Err(VerbsError::NoMemory);
        }
        let (least, most) = match (wr.operation, self.init.qp_type) {
            (
                Operation::CompareSwap { .. } | Operation::FetchAdd { .. } | Operation::AtomicWrite { .. },
                _,
            ) => (8, 8),
            (_, QpType::Ud) => (0, self.mtu),
            _ => (0, max_message),
        };
        Ok(u32::try_from(length)
            .ok()
            .filter(|length| (least..=most).contains(length)))
    }

    /// Whether the type of QP has this operation, in this form.
    fn check_operation(&self, wr: &SendWr<'_>) -> Result<(), VerbsError> {
        let qp_type = self.init.qp_type;
        let reliable = self.is_reliable();
        let connected = reliable || qp_type == QpType::Uc;
        let inline = wr.flags.contains(SendFlags::INLINE);
        let ok = match wr.operation {
            Operation::Send | Operation::SendImm(_) => connected || qp_type == QpType::Ud && wr.ud.is_some(),
            Operation::Write { .. } | Operation::WriteImm { .. } => connected,
            Operation::Read { .. } | Operation::CompareSwap { .. } | Operation::FetchAdd { .. } => {
                reliable && !inline
            }
            Operation::AtomicWrite { .. } => reliable,
            Operation::Flush { placement, .. } => reliable && !placement.is_empty() && wr.sges.is_empty(),
            Operation::SendInv(_) => reliable,
            Operation::BindMw(_) | Operation::LocalInvalidate(_) => connected && wr.sges.is_empty(),
        };
        if ok { Ok(()) } else { Err(VerbsError::Invalid) }
    }

    /// Posts a receive to the QP's own queue.
    pub fn post_recv(&mut self, shared: &mut Shared<'_>, wr: &RecvWr<'_>) -> Result<(), VerbsError> {
        let has_queue = self.init.srq.is_none() && self.init.recv_cq.is_some();
        if self.state == QpState::Reset || !has_queue {
            return Err(VerbsError::Invalid);
        }
        if wr.sges.len() > self.rq.max_sge() as usize {
            return Err(VerbsError::Invalid);
        }
        let cq = self.init.recv_cq.as_deref();
        let free = self.rq.room();
        if cq.is_none_or(|cq| self.unpolled[1].room(free, cq) == 0) {
            return Err(VerbsError::NoMemory);
        }
        if self.state == QpState::Err {
            self.flushed_recv(shared, wr.wr_id);
            return Ok(());
        }
        self.rq.post(wr)
    }

    /// Sends that can be posted now.
    pub fn send_room(&self) -> usize {
        let cq = self.init.send_cq.as_deref();
        let free = self.sq.room();
        cq.map_or(0, |cq| self.unpolled[0].room(free, cq))
    }
}
