//! Changing and reading a QP's attributes.

use ferroce_wire::{PathMtu, Psn};

use super::state::{check_transition, relevant};
use super::unpolled::Unpolled;
use super::{Qp, Shared};
use crate::device::Limits;
use crate::verbs::{MigState, QpAttr, QpAttrMask as M, QpState, QpType, VerbsError};

impl Qp {
    /// Changes the attributes named by `mask`; nothing if any of them is wrong. `path_mtu` is the device's.
    pub fn modify(
        &mut self,
        shared: &mut Shared<'_>,
        limits: &Limits,
        path_mtu: PathMtu,
        new: &QpAttr,
        mask: M,
    ) -> Result<(), VerbsError> {
        let mask = relevant(self.init.qp_type, mask);
        if mask.contains(M::CUR_STATE) && new.cur_state != self.state {
            return Err(VerbsError::Invalid);
        }
        let target = if mask.contains(M::STATE) {
            new.state
        } else {
            self.state
        };
        check_transition(self.init.qp_type, self.state, target, mask)?;
        check_values(limits, path_mtu, new, mask)?;
        let drains = self.requester.is_draining() && !matches!(target, QpState::Reset | QpState::Err);
        if drains {
            return Err(VerbsError::Invalid);
        }
        self.assign(new, mask);
        self.enter(shared, target, path_mtu);
        Ok(())
    }

    /// Stores the attributes of the mask.
    fn assign(&mut self, new: &QpAttr, mask: M) {
        let attr = &mut self.attr;
        macro_rules! set {
            ($($bit:ident => $field:ident),* $(,)?) => {
                $(if mask.contains(M::$bit) { attr.$field = new.$field; })*
            };
        }
        set!(
            ACCESS_FLAGS => access,
            PKEY_INDEX => pkey_index,
            PORT => port,
            QKEY => qkey,
            AV => path,
            PATH_MTU => path_mtu,
            TIMEOUT => timeout,
            RETRY_CNT => retry_cnt,
            RNR_RETRY => rnr_retry,
            MAX_QP_RD_ATOMIC => max_rd_atomic,
            MIN_RNR_TIMER => min_rnr_timer,
            MAX_DEST_RD_ATOMIC => max_dest_rd_atomic,
            DEST_QPN => dest_qpn,
        );
        if mask.contains(M::STATE) && new.state == QpState::Sqd {
            attr.sqd_async_notify = mask.contains(M::EN_SQD_ASYNC_NOTIFY) && new.sqd_async_notify;
        }
        if mask.contains(M::MAX_DEST_RD_ATOMIC) {
            self.responder.resources.resize(new.max_dest_rd_atomic);
        }
        if mask.contains(M::RQ_PSN) {
            attr.rq_psn = Psn::new(new.rq_psn).value();
            self.responder.start(Psn::new(new.rq_psn));
        }
        if mask.contains(M::SQ_PSN) {
            attr.sq_psn = Psn::new(new.sq_psn).value();
            self.requester.start(Psn::new(new.sq_psn));
        }
        if let (true, Some(mtu)) = (mask.contains(M::PATH_MTU), mtu_of(new.path_mtu)) {
            self.mtu = mtu.bytes() as u32;
        }
    }

    /// Does what a change of state entails. `path_mtu` is the device's.
    fn enter(&mut self, shared: &mut Shared<'_>, target: QpState, path_mtu: PathMtu) {
        match target {
            QpState::Reset => self.reset(shared),
            QpState::Err => {
                self.responder.forsake();
                self.enter_error(shared);
            }
            QpState::Sqd if self.state == QpState::Rts => {
                self.state = target;
                self.start_drain(shared);
            }
            QpState::Rtr => {
                self.state = target;
                if self.init.qp_type == QpType::Ud {
                    self.mtu = path_mtu.bytes() as u32;
                }
            }
            QpState::Rts => {
                self.state = target;
                self.requester.end_drain();
                self.requester.refill(&self.attr);
            }
            _ => self.state = target,
        }
    }

    /// Forgets all work and completions, as new.
    fn reset(&mut self, shared: &mut Shared<'_>) {
        self.part(shared);
        self.release_active(shared);
        self.sq.clear();
        self.rq.clear();
        self.requester.stop();
        self.responder.reset();
        for cq in self.init.send_cq.iter().chain(&self.init.recv_cq) {
            cq.remove_qp(self.qpn);
        }
        self.attr = QpAttr {
            cap: self.attr.cap,
            ..QpAttr::default()
        };
        self.unpolled.iter_mut().for_each(Unpolled::clear);
        self.fatal = false;
        self.state = QpState::Reset;
    }

    /// The attributes as they are.
    pub fn query(&self) -> QpAttr {
        QpAttr {
            state: self.state,
            cur_state: self.state,
            sq_psn: self.requester.next_psn().value(),
            rq_psn: self.responder.expected_psn().value(),
            sq_draining: self.requester.is_draining(),
            ..self.attr
        }
    }
}

/// The path MTU of a verbs code.
fn mtu_of(code: u32) -> Option<PathMtu> {
    PathMtu::from_code(u8::try_from(code).ok()?)
}

/// Whether the values in the mask are ones that a QP can have: EINVAL if not.
///
/// RoCE has no alternate paths, so there is nothing to migrate to either.
fn check_values(limits: &Limits, path_mtu: PathMtu, new: &QpAttr, mask: M) -> Result<(), VerbsError> {
    let fits = |bit: M, ok: bool| !mask.contains(bit) || ok;
    let ok = !mask.contains(M::ALT_PATH)
        && fits(M::PATH_MIG_STATE, new.path_mig_state == MigState::Migrated)
        && fits(M::PORT, new.port == 1)
        && fits(M::PKEY_INDEX, new.pkey_index == 0)
        && fits(M::AV, new.path.is_some())
        && fits(
            M::PATH_MTU,
            mtu_of(new.path_mtu).is_some_and(|mtu| mtu <= path_mtu),
        )
        && fits(M::DEST_QPN, new.dest_qpn < 1 << 24)
        && fits(M::TIMEOUT, new.timeout < 32)
        && fits(M::RETRY_CNT, new.retry_cnt < 8)
        && fits(M::RNR_RETRY, new.rnr_retry < 8)
        && fits(M::MIN_RNR_TIMER, new.min_rnr_timer < 32)
        && fits(M::MAX_QP_RD_ATOMIC, new.max_rd_atomic <= limits.max_rd_atomic)
        && fits(
            M::MAX_DEST_RD_ATOMIC,
            new.max_dest_rd_atomic <= limits.max_rd_atomic,
        );
    if ok { Ok(()) } else { Err(VerbsError::Invalid) }
}
