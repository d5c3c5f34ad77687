//! Verbs on queue pairs.

use super::objects::room;
use super::{Device, QpInit};
use crate::control::QpReport;
use crate::qp::Qp;
use crate::time::Time;
use crate::transport::budget::{BudgetId, Buffer};
use crate::verbs::{QpAttr, QpAttrMask, QpCap, QpType, RecvWr, SendWr, VerbsError};

impl Device {
    /// Makes a QP in RESET; gives its number and the queue sizes granted.
    pub fn create_qp(&mut self, init: QpInit) -> Result<(u32, QpCap), VerbsError> {
        self.alive()?;
        room(self.qps.len(), self.limits.max_qp)?;
        let init = of_its_type(init)?;
        let (cap, limits) = (init.cap, &self.limits);
        let fits = cap.max_send_wr <= limits.max_qp_wr
            && cap.max_recv_wr <= limits.max_qp_wr
            && cap.max_send_sge <= limits.max_sge
            && cap.max_recv_sge <= limits.max_sge
            && cap.max_inline_data <= limits.max_inline;
        let mut cqs = init.send_cq.iter().chain(&init.recv_cq);
        if !fits || !cqs.all(|cq| self.has_cq(cq)) {
            return Err(VerbsError::Invalid);
        }
        if let Some(id) = init.srq {
            let srq = self.srqs.get(&id).ok_or(VerbsError::Invalid)?;
            if srq.xrc.is_some() {
                return Err(VerbsError::Invalid);
            }
        }
        let domain = init.xrcd.map(|id| self.domain(id)).transpose()?;
        let qpn = self.qps.new_qpn(&mut self.rng);
        let mtu = self.mtu.bytes() as u32;
        let qp = Box::new(Qp::new(qpn, init, domain, mtu)?);
        let init = &qp.init;
        if let Some(pd) = init.pd {
            self.enter_pd(pd)?;
        }
        if let Some(id) = init.xrcd {
            self.use_xrcd(id, true);
        }
        if let Some(srq) = init.srq.and_then(|id| self.srqs.get_mut(&id)) {
            srq.users += 1;
        }
        for cq in init.send_cq.iter().chain(&init.recv_cq) {
            self.use_cq(cq, true);
        }
        self.qps.insert(qp);
        Ok((qpn, cap))
    }

    /// Changes attributes of a QP; nothing if any of them is wrong.
    pub fn modify_qp(
        &mut self,
        now: Time,
        qpn: u32,
        attr: &QpAttr,
        mask: QpAttrMask,
    ) -> Result<(), VerbsError> {
        self.alive()?;
        let (limits, mtu) = (self.limits.clone(), self.mtu);
        let (qp, mut shared) = self.qp(now, qpn)?;
        qp.modify(&mut shared, &limits, mtu, attr, mask)?;
        qp.follow_path(now, shared.budgets);
        self.settle(qpn);
        Ok(())
    }

    /// A QP's attributes, and how it was made with the sizes granted.
    pub fn query_qp(&self, qpn: u32) -> Result<(QpAttr, QpInit), VerbsError> {
        let qp = self.qps.get(qpn).ok_or(VerbsError::NotFound)?;
        Ok((qp.query(), qp.init.clone()))
    }

    /// Ends a QP: its work is forgotten, and its completions are taken out of the CQs. EBUSY while it is attached to a
    /// multicast group.
    pub fn destroy_qp(&mut self, now: Time, qpn: u32) -> Result<(), VerbsError> {
        let (qp, mut shared) = self.qp(now, qpn)?;
        if qp.groups > 0 {
            return Err(VerbsError::Busy);
        }
        qp.part(&mut shared);
        qp.release_active(&mut shared);
        let peers = qp.budget(Buffer::Theirs);
        qp.retire(now, shared.budgets);
        for budget in peers.into_iter().chain([BudgetId::OURS]) {
            self.serve(budget);
        }
        let qp = self.qps.remove(qpn).ok_or(VerbsError::NotFound)?;
        let init = &qp.init;
        for cq in init.send_cq.iter().chain(&init.recv_cq) {
            cq.remove_qp(qpn);
            self.use_cq(cq, false);
        }
        for xrcd in qp.opened {
            self.use_xrcd(xrcd, false);
        }
        if let Some(srq) = init.srq.and_then(|id| self.srqs.get_mut(&id)) {
            srq.users = srq.users.saturating_sub(1);
        }
        self.keys.release_qp(qpn);
        if let Some(pd) = init.pd {
            self.leave_pd(pd);
        }
        Ok(())
    }

    /// Posts a send. EINVAL: state, operation, lengths or entries; ENOMEM: full. An error leaves the queue as it was.
    pub fn post_send(&mut self, now: Time, qpn: u32, wr: &SendWr<'_>) -> Result<(), VerbsError> {
        let max_message = self.limits.max_message;
        let (qp, mut shared) = self.qp(now, qpn)?;
        qp.post_send(&mut shared, wr, max_message)?;
        self.settle(qpn);
        Ok(())
    }

    /// Whether a send could be posted after `before` others: the errors of [`Device::post_send`], and nothing posted.
    pub fn check_send(&self, qpn: u32, wr: &SendWr<'_>, before: usize) -> Result<(), VerbsError> {
        let qp = self.qps.get(qpn).ok_or(VerbsError::NotFound)?;
        qp.check_send(wr, self.limits.max_message)?;
        if before < qp.send_room() {
            Ok(())
        } else {
            Err(VerbsError::NoMemory)
        }
    }

    /// Posts a receive. EINVAL: state, an SRQ, or too many entries; ENOMEM: full.
    pub fn post_recv(&mut self, qpn: u32, wr: &RecvWr<'_>) -> Result<(), VerbsError> {
        let (qp, mut shared) = self.qp(self.now, qpn)?;
        qp.post_recv(&mut shared, wr)?;
        if !self.overrun.is_empty() {
            self.settle(qpn);
        }
        Ok(())
    }

    /// One report per QP, for `ferroce status`.
    pub fn qp_reports(&self) -> Vec<QpReport> {
        let report = |qp: &Qp| QpReport {
            qpn: qp.qpn,
            transport: qp.init.qp_type.to_string(),
            state: qp.state.to_string(),
            dest_qpn: qp.attr.path.map(|_| qp.attr.dest_qpn),
            remote: qp.attr.path.map(|path| path.dest),
        };
        self.qps.iter().map(report).collect()
    }
}

/// Bytes of a scatter/gather element in a WQE of hardware and of Soft-RoCE.
const SGE_BYTES: u32 = 16;
/// Most elements whose place is granted for inline data that was not asked for.
const MAX_INLINE_SGES: u32 = 4;

/// The QP as its type has it, without what that lacks. EINVAL if something is missing that it needs.
fn of_its_type(init: QpInit) -> Result<QpInit, VerbsError> {
    let (sends, receives) = match init.qp_type {
        QpType::XrcSend => (true, false),
        QpType::XrcRecv => (false, false),
        QpType::Rc | QpType::Uc | QpType::Ud => (true, true),
    };
    let srq = init.srq.filter(|_| receives);
    let mut cap = init.cap;
    if !sends {
        (cap.max_send_wr, cap.max_send_sge, cap.max_inline_data) = (0, 0, 0);
    }
    // As devices grant: a little inline data in the place of the list. Programs (rdma_xclient) count on it.
    let instead = cap.max_send_sge.min(MAX_INLINE_SGES) * SGE_BYTES;
    cap.max_inline_data = cap.max_inline_data.max(instead);
    if !receives || srq.is_some() {
        (cap.max_recv_wr, cap.max_recv_sge) = (0, 0);
    }
    let target = init.qp_type == QpType::XrcRecv;
    let made = QpInit {
        pd: init.pd.filter(|_| !target),
        send_cq: init.send_cq.filter(|_| sends),
        recv_cq: init.recv_cq.filter(|_| receives),
        xrcd: init.xrcd.filter(|_| target),
        srq,
        cap,
        ..init
    };
    let complete = made.pd.is_some() != target
        && made.send_cq.is_some() == sends
        && made.recv_cq.is_some() == receives
        && made.xrcd.is_some() == target;
    if complete {
        Ok(made)
    } else {
        Err(VerbsError::Invalid)
    }
}
