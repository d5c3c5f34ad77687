//! What a queue pair is to be set to for its id (INIT_QP_ATTR), and what is known of an id (QUERY).

use super::{Errno, Handle, QpAttributes, QpKind, RdmaCm, Route, TargetState};
use crate::verbs::{Access, QpAttrMask, QpState};

/// The only port of a device.
pub(super) const PORT: u8 = 1;

impl RdmaCm {
    /// INIT_QP_ATTR.
    pub(super) fn qp_attributes(&mut self, id: Handle, target: TargetState) -> Result<QpAttributes, Errno> {
        let entry = self.own_bound(id)?;
        match entry.comm {
            Some(comm) if !entry.kept.is_datagram() => self.connected_attributes(id, comm, target),
            _ => Ok(self.first_attributes(id, target)),
        }
    }

    /// Attributes of a queue pair that has no peer yet, or never has one: as in the kernel those of INIT, whatever was
    /// asked for.
    fn first_attributes(&mut self, id: Handle, target: TargetState) -> QpAttributes {
        let kept = &mut self.entry_mut(id).kept;
        let mut attributes = QpAttributes {
            state: number(target),
            port: PORT,
            ..QpAttributes::default()
        };
        let mut mask = QpAttrMask::STATE | QpAttrMask::PKEY_INDEX | QpAttrMask::PORT;
        if kept.is_datagram() {
            kept.set_default_qkey();
            attributes.qkey = kept.qkey;
            mask |= QpAttrMask::QKEY;
        } else {
            mask |= QpAttrMask::ACCESS_FLAGS;
        }
        if target == TargetState::Rtr {
            attributes.rq_psn = kept.psn;
        }
        attributes.mask = mask.bits();
        attributes
    }

    /// Attributes by what both sides have said.
    fn connected_attributes(
        &self,
        id: Handle,
        comm: crate::cm::CommId,
        target: TargetState,
    ) -> Result<QpAttributes, Errno> {
        use crate::cm::State as Comm;
        let kept = &self.entry(id).kept;
        let state = self.cm.state(comm).ok_or(libc::EINVAL)?;
        let asked = matches!(state, Comm::ReqSent | Comm::MraReqReceived);
        let known = matches!(
            state,
            Comm::ReqReceived
                | Comm::MraReqSent
                | Comm::RepReceived
                | Comm::MraRepSent
                | Comm::RepSent
                | Comm::MraRepReceived
                | Comm::Established
        );
        if !(known || asked && target == TargetState::Init) {
            return Err(libc::EINVAL);
        }
        let theirs = self.cm.attributes(comm);
        let mut attributes = QpAttributes {
            state: number(target),
            port: PORT,
            ..QpAttributes::default()
        };
        let mask = match target {
            TargetState::Init => {
                let mut access = Access::REMOTE_WRITE;
                if theirs.is_some_and(|theirs| theirs.responder_resources > 0) {
                    access |= Access::REMOTE_READ | Access::REMOTE_ATOMIC;
                }
                attributes.access = access.bits();
                QpAttrMask::ACCESS_FLAGS | QpAttrMask::PKEY_INDEX | QpAttrMask::PORT
            }
            TargetState::Rtr => {
                let theirs = theirs.ok_or(libc::EINVAL)?;
                let path = kept.path.ok_or(libc::EINVAL)?;
                attributes.address = self.address_along(kept, &path);
                attributes.path_mtu = theirs.path_mtu;
                attributes.dest_qpn = theirs.dest_qpn;
                attributes.rq_psn = kept.psn;
                let mut mask =
                    QpAttrMask::AV | QpAttrMask::PATH_MTU | QpAttrMask::DEST_QPN | QpAttrMask::RQ_PSN;
                if matches!(kept.qp_kind, QpKind::Rc | QpKind::XrcTarget) {
                    attributes.max_dest_rd_atomic = theirs.responder_resources;
                    mask |= QpAttrMask::MAX_DEST_RD_ATOMIC | QpAttrMask::MIN_RNR_TIMER;
                }
                mask
            }
            TargetState::Rts => {
                let theirs = theirs.ok_or(libc::EINVAL)?;
                attributes.sq_psn = theirs.sq_psn;
                let mut mask = QpAttrMask::SQ_PSN;
                if matches!(kept.qp_kind, QpKind::Rc | QpKind::XrcInitiator) {
                    attributes.retry_count = theirs.retry_count;
                    attributes.rnr_retry = theirs.rnr_retry_count;
                    attributes.max_rd_atomic = theirs.initiator_depth;
                    mask |= QpAttrMask::RETRY_CNT | QpAttrMask::RNR_RETRY | QpAttrMask::MAX_QP_RD_ATOMIC;
                }
                if kept.qp_kind != QpKind::Uc {
                    attributes.timeout = kept.ack_timeout.unwrap_or(theirs.timeout);
                    mask |= QpAttrMask::TIMEOUT;
                }
                mask
            }
        };
        attributes.mask = (mask | QpAttrMask::STATE).bits();
        Ok(attributes)
    }

    /// QUERY and QUERY_ROUTE.
    pub(super) fn query(&self, id: Handle) -> Result<Route, Errno> {
        let kept = &self.own(id)?.kept;
        let (source_gid, dest_gid) = self.gids_of(kept);
        let bound = kept.bound.as_ref();
        Ok(Route {
            node_guid: bound.map(|bound| bound.guid),
            device: bound.map(|bound| bound.device.clone()),
            port: bound.map_or(0, |_| PORT),
            source: kept.source,
            dest: kept.dest,
            source_gid,
            dest_gid,
            pkey: bound.map_or(0, |_| super::resolve::PKEY),
            path: kept.path,
        })
    }
}

/// `enum ibv_qp_state`.
fn number(target: TargetState) -> u8 {
    let state = match target {
        TargetState::Init => QpState::Init,
        TargetState::Rtr => QpState::Rtr,
        TargetState::Rts => QpState::Rts,
    };
    state as u8
}
