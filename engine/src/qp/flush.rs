//! How queues empty: completions of work that was done, that failed, or that is flushed.

use super::{Qp, Shared};
use crate::verbs::{AsyncEvent, Operation, QpState, QpType, SendFlags, VendorError, Wc, WcOpcode, WcStatus};

impl Qp {
    /// Completes the oldest send successfully. Unsignaled sends leave without a completion.
    pub fn complete_send(&mut self, shared: &mut Shared<'_>) {
        let Some(wqe) = self.sq.pop() else { return };
        if self.init.sq_sig_all || wqe.flags.contains(SendFlags::SIGNALED) {
            let opcode = match wqe.operation {
                Operation::Send | Operation::SendImm(_) | Operation::SendInv(_) => WcOpcode::Send,
                Operation::Write { .. } | Operation::WriteImm { .. } => WcOpcode::RdmaWrite,
                Operation::Read { .. } => WcOpcode::RdmaRead,
                Operation::CompareSwap { .. } => WcOpcode::CompSwap,
                Operation::FetchAdd { .. } => WcOpcode::FetchAdd,
                Operation::AtomicWrite { .. } => WcOpcode::AtomicWrite,
                Operation::Flush { .. } => WcOpcode::Flush,
                Operation::LocalInvalidate(_) => WcOpcode::LocalInv,
                Operation::BindMw(_) => WcOpcode::BindMw,
            };
            let wc = Wc {
                wr_id: wqe.wr_id,
                opcode,
                byte_len: wqe.length,
                ..Wc::default()
            };
            self.push_send(shared, wc);
        }
    }

    /// Completes the oldest send with an error and stops the send queue: RC goes to ERR, UC and UD to SQE.
    pub fn fail_send(&mut self, shared: &mut Shared<'_>, status: WcStatus, vendor_err: VendorError) {
        if let Some(wqe) = self.sq.pop() {
            self.push_send(
                shared,
                Wc {
                    wr_id: wqe.wr_id,
                    status,
                    vendor_err: vendor_err.number(),
                    ..Wc::default()
                },
            );
        }
        if matches!(self.init.qp_type, QpType::Uc | QpType::Ud) {
            self.state = QpState::Sqe;
            self.flush_send(shared);
        } else {
            self.enter_error(shared);
        }
    }

    /// Completions were lost, so the program can't go on with this QP: it is told, and the QP goes to ERR.
    pub fn fail(&mut self, shared: &mut Shared<'_>) {
        if self.state != QpState::Reset && !std::mem::replace(&mut self.fatal, true) {
            shared.events.push_back(AsyncEvent::QpFatal(self.qpn));
            self.enter_error(shared);
        }
    }

    /// Goes to ERR: both queues flush, oldest first.
    pub fn enter_error(&mut self, shared: &mut Shared<'_>) {
        if self.state == QpState::Err {
            return;
        }
        self.state = QpState::Err;
        self.flush_send(shared);
        self.flush_recv(shared);
        if self.init.srq.is_some() || self.init.qp_type == QpType::XrcRecv {
            shared.events.push_back(AsyncEvent::LastWqeReached(self.qpn));
        }
    }

    /// Flushes every send, and stops the requester.
    fn flush_send(&mut self, shared: &mut Shared<'_>) {
        self.requester.stop();
        while let Some(wqe) = self.sq.pop() {
            self.flushed_send(shared, wqe.wr_id);
        }
    }

    /// Flushes the receive in progress, and those of the QP's own queue. What waits in an SRQ stays there.
    fn flush_recv(&mut self, shared: &mut Shared<'_>) {
        if let Some(wr_id) = self.release_active(shared) {
            self.flushed_recv(shared, wr_id);
        }
        while let Some(wr_id) = self.rq.pop() {
            self.flushed_recv(shared, wr_id);
        }
    }

    /// Ends the use of the receive WQE in progress, if there is one; gives its cookie.
    pub fn release_active(&mut self, shared: &mut Shared<'_>) -> Option<u64> {
        let wr_id = self.responder.end_active()?;
        match self.responder.srq {
            None => self.rq.done(),
            Some(id) => {
                if let Some(srq) = shared.srqs.get_mut(&id) {
                    srq.queue.done();
                }
            }
        }
        Some(wr_id)
    }

    /// A flush completion of a send.
    pub fn flushed_send(&mut self, shared: &mut Shared<'_>, wr_id: u64) {
        self.push_send(
            shared,
            Wc {
                wr_id,
                status: WcStatus::WrFlushErr,
                vendor_err: VendorError::Flushed.number(),
                ..Wc::default()
            },
        );
    }

    /// A flush completion of a receive.
    pub fn flushed_recv(&mut self, shared: &mut Shared<'_>, wr_id: u64) {
        let wc = Wc {
            wr_id,
            status: WcStatus::WrFlushErr,
            vendor_err: VendorError::Flushed.number(),
            opcode: WcOpcode::Recv,
            ..Wc::default()
        };
        self.push_recv(shared, wc, false);
    }
}
