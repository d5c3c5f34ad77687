//! Extended reliable connections: domains, the shared receive queues that a domain's targets reach by number, and
//! targets that several users share.

use std::sync::Arc;

use super::objects::room;
use super::{Device, PdId, SrqId};
use crate::queue::Cq;
use crate::queue::srq::XrcPart;
use crate::time::Time;
use crate::verbs::{QpType, VerbsError};

/// An opened XRC domain. Each call of [`Device::open_xrcd`] gives another, also for a domain that is open already.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct XrcdId(u32);

/// A file by which a domain is found: numbers of its device and inode.
pub type FileId = (u64, u64);

/// Joins XRC SRQs and target QPs: only those of one domain know each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DomainId(u32);

/// One opening of a domain.
pub(super) struct Xrcd {
    domain: DomainId,
    file: Option<FileId>,
    /// SRQs and QPs that were made or opened with it.
    users: u32,
}

impl Device {
    /// Opens the XRC domain of a file, or one that nobody else can open. `create`: make it if there is none (EAGAIN);
    /// `exclusive`: refuse one that there is (EINVAL). A domain lasts as long as it is open.
    pub fn open_xrcd(
        &mut self,
        file: Option<FileId>,
        create: bool,
        exclusive: bool,
    ) -> Result<XrcdId, VerbsError> {
        self.alive()?;
        room(self.xrcds.len(), self.limits.max_pd)?;
        let known = file.and_then(|_| self.xrcds.values().find(|xrcd| xrcd.file == file));
        let domain = match known.map(|xrcd| xrcd.domain) {
            Some(_) if exclusive => return Err(VerbsError::Invalid),
            None if file.is_some() && !create => return Err(VerbsError::NoDomain),
            Some(domain) => domain,
            None => DomainId(self.new_id() as u32),
        };
        let id = XrcdId(self.new_id() as u32);
        let users = 0;
        self.xrcds.insert(id, Xrcd { domain, file, users });
        Ok(id)
    }

    /// Closes what [`Device::open_xrcd`] opened. EBUSY while it has SRQs or QPs.
    pub fn close_xrcd(&mut self, id: XrcdId) -> Result<(), VerbsError> {
        match self.xrcds.get(&id) {
            None => Err(VerbsError::NotFound),
            Some(xrcd) if xrcd.users > 0 => Err(VerbsError::Busy),
            Some(_) => {
                self.xrcds.remove(&id);
                Ok(())
            }
        }
    }

    /// The domain that is open as `id`.
    pub(super) fn domain(&self, id: XrcdId) -> Result<DomainId, VerbsError> {
        let xrcd = self.xrcds.get(&id).ok_or(VerbsError::Invalid)?;
        Ok(xrcd.domain)
    }

    /// Counts a user of an opened domain in (`true`) or out.
    pub(super) fn use_xrcd(&mut self, id: XrcdId, used: bool) {
        if let Some(Xrcd { users, .. }) = self.xrcds.get_mut(&id) {
            *users = if used { *users + 1 } else { users.saturating_sub(1) };
        }
    }

    /// Makes an XRC SRQ: peers name it by its number, and its receives complete on `cq`, whatever QP they came by.
    pub fn create_xrc_srq(
        &mut self,
        pd: PdId,
        xrcd: XrcdId,
        cq: &Arc<Cq>,
        max_wr: u32,
        max_sge: u32,
    ) -> Result<SrqId, VerbsError> {
        let domain = self.domain(xrcd)?;
        if !self.has_cq(cq) {
            return Err(VerbsError::Invalid);
        }
        let id = self.create_srq(pd, max_wr, max_sge, 0)?;
        self.use_xrcd(xrcd, true);
        self.use_cq(cq, true);
        if let Some(srq) = self.srqs.get_mut(&id) {
            let cq = cq.clone();
            srq.xrc = Some(XrcPart { xrcd, domain, cq });
        }
        Ok(id)
    }

    /// Opens a target QP of the domain once more: it then ends when all have closed it. EINVAL if there is no such QP.
    pub fn open_qp(&mut self, xrcd: XrcdId, qpn: u32) -> Result<(), VerbsError> {
        self.alive()?;
        let domain = self.domain(xrcd)?;
        let qp = self.qps.get_mut(qpn).ok_or(VerbsError::Invalid)?;
        if qp.init.qp_type != QpType::XrcRecv || qp.domain != Some(domain) {
            return Err(VerbsError::Invalid);
        }
        qp.opened.push(xrcd);
        self.use_xrcd(xrcd, true);
        Ok(())
    }

    /// Closes a target QP that was made or opened with `xrcd`; the last one to do so destroys it.
    pub fn close_qp(&mut self, now: Time, qpn: u32, xrcd: XrcdId) -> Result<(), VerbsError> {
        let qp = self.qps.get_mut(qpn).ok_or(VerbsError::NotFound)?;
        let opened = qp.opened.iter().position(|&by| by == xrcd);
        let opened = opened.ok_or(VerbsError::Invalid)?;
        if let [_] = qp.opened[..] {
            return self.destroy_qp(now, qpn);
        }
        qp.opened.swap_remove(opened);
        self.use_xrcd(xrcd, false);
        Ok(())
    }
}
