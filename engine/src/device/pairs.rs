//! Verbs on queue pairs.

use super::objects::room;
use super::{Device, QpInit};
use crate::control::QpReport;
use crate::qp::Qp;
use crate::time::Time;
use crate::verbs::{QpAttr, QpAttrMask, QpCap, QpType, RecvWr, SendWr, VerbsError};

impl Device {
    /// Makes a QP in RESET; gives its number and the queue sizes granted.
    pub fn create_qp(&mut self, init: QpInit) -> Result<(u32, QpCap), VerbsError> {
        room(self.qps.len(), self.limits.max_qp)?;
        if matches!(init.qp_type, QpType::XrcSend | QpType::XrcRecv) {
            return Err(VerbsError::NotSupported);
        }
        let (cap, limits) = (init.cap, &self.limits);
        let fits = cap.max_send_wr <= limits.max_qp_wr
            && cap.max_recv_wr <= limits.max_qp_wr
            && cap.max_send_sge <= limits.max_sge
            && cap.max_recv_sge <= limits.max_sge
            && cap.max_inline_data <= limits.max_inline;
        if !fits || !self.has_cq(&init.send_cq) || !self.has_cq(&init.recv_cq) {
            return Err(VerbsError::Invalid);
        }
        let granted = match init.srq {
            None => cap,
            Some(_) => QpCap {
                max_recv_wr: 0,
                max_recv_sge: 0,
                ..cap
            },
        };
        if let Some(id) = init.srq {
            self.srqs.get_mut(&id).ok_or(VerbsError::Invalid)?;
        }
        self.enter_pd(init.pd)?;
        if let Some(srq) = init.srq.and_then(|id| self.srqs.get_mut(&id)) {
            srq.users += 1;
        }
        self.use_cq(&init.send_cq, true);
        self.use_cq(&init.recv_cq, true);
        let qpn = self.qps.new_qpn(&mut self.rng);
        let init = QpInit { cap: granted, ..init };
        self.qps
            .insert(Box::new(Qp::new(qpn, init, self.mtu.bytes() as u32)));
        Ok((qpn, granted))
    }

    /// Changes attributes of a QP; nothing if any of them is wrong.
    pub fn modify_qp(
        &mut self,
        now: Time,
        qpn: u32,
        attr: &QpAttr,
        mask: QpAttrMask,
    ) -> Result<(), VerbsError> {
        let (limits, mtu) = (self.limits.clone(), self.mtu);
        let (qp, mut shared) = self.qp(now, qpn)?;
        qp.modify(&mut shared, &limits, mtu, attr, mask)?;
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
        let qp = self.qps.remove(qpn).ok_or(VerbsError::NotFound)?;
        let init = &qp.init;
        init.send_cq.remove_qp(qpn);
        init.recv_cq.remove_qp(qpn);
        self.use_cq(&init.send_cq, false);
        self.use_cq(&init.recv_cq, false);
        if let Some(srq) = init.srq.and_then(|id| self.srqs.get_mut(&id)) {
            srq.users = srq.users.saturating_sub(1);
        }
        self.keys.release_qp(qpn);
        self.leave_pd(init.pd);
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
        if before < qp.sq.room() {
            Ok(())
        } else {
            Err(VerbsError::NoMemory)
        }
    }

    /// Posts a receive. EINVAL: state, an SRQ, or too many entries; ENOMEM: full.
    pub fn post_recv(&mut self, qpn: u32, wr: &RecvWr<'_>) -> Result<(), VerbsError> {
        let (qp, mut shared) = self.qp(self.now, qpn)?;
        qp.post_recv(&mut shared, wr)
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
