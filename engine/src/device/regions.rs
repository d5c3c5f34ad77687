//! Verbs on memory regions and windows.

use super::objects::room;
use super::{Device, MrInfo, MwId, PdId};
use crate::memory::keys::{Denied, Region, Window, index};
use crate::verbs::{Access, MwType, Sge, VerbsError};

/// What changes in a region that is registered again.
#[derive(Clone, Copy, Debug, Default)]
pub struct MrChange {
    /// Where it is, its bytes, and the address by which it is named.
    pub translation: Option<(u64, u64, u64)>,
    /// Its protection domain.
    pub pd: Option<PdId>,
    /// Its rights.
    pub access: Option<Access>,
}

impl Device {
    /// Registers `len` bytes at `addr`, which work requests and peers name by addresses from `iova` on, or from 0 on
    /// with [`Access::ZERO_BASED`]. That the range is mapped is for the caller to check
    /// ([`crate::memory::Memory::populate`]).
    pub fn reg_mr(
        &mut self,
        pd: PdId,
        addr: u64,
        len: u64,
        iova: u64,
        access: Access,
    ) -> Result<MrInfo, VerbsError> {
        let region = self.region(pd, addr, len, iova, access)?;
        self.add_region(region)
    }

    /// Registers a region without memory, of all addresses: what work requests read there is zeros, and what they
    /// write is lost. It has no `rkey`.
    pub fn alloc_null_mr(&mut self, pd: PdId) -> Result<MrInfo, VerbsError> {
        let keys = self.add_region(Region::null(pd))?;
        Ok(MrInfo { rkey: 0, ..keys })
    }

    /// Changes a region, whose keys stay; nothing if that can't be (EBUSY: windows are bound to it). What was named by
    /// them and is not any more can't be reached from now on, by work that was posted before either.
    pub fn rereg_mr(&mut self, lkey: u32, change: &MrChange) -> Result<(), VerbsError> {
        self.alive()?;
        let old = *self.keys.region(lkey).map_err(|Denied| VerbsError::NotFound)?;
        let ((old_addr, old_len), old_iova) = (old.memory(), old.iova());
        let (addr, len, iova) = change.translation.unwrap_or((old_addr, old_len, old_iova));
        let (pd, access) = (change.pd.unwrap_or(old.pd), change.access.unwrap_or(old.access));
        let new = self.region(pd, addr, len, iova, access)?;
        if !self.pds.contains_key(&pd) {
            return Err(VerbsError::Invalid);
        }
        self.keys.replace_region(lkey, new)?;
        self.leave_pd(old.pd);
        self.enter_pd(pd)
    }

    /// Where a region lies in the process, its bytes, and its rights.
    pub fn query_mr(&self, lkey: u32) -> Result<(u64, u64, Access), VerbsError> {
        let region = self.keys.region(lkey).map_err(|Denied| VerbsError::NotFound)?;
        let (addr, len) = region.memory();
        Ok((addr, len, region.access))
    }

    /// Where in the process the memory of an entry lies, which is to be paged in before it is used. ENOENT: not the
    /// key of a region that is paged on demand; EPERM: of another PD, or not writable; EFAULT: not in the region.
    pub fn pageable(&self, pd: PdId, sge: &Sge, writable: bool) -> Result<u64, VerbsError> {
        let region = self
            .keys
            .region(sge.lkey)
            .ok()
            .filter(|region| region.access.contains(Access::ON_DEMAND))
            .ok_or(VerbsError::NotFound)?;
        if region.pd != pd || writable && !region.access.intersects(Access::WRITABLE) {
            return Err(VerbsError::NotPermitted);
        }
        region
            .locate(sge.addr, sge.length.into())
            .map_err(|Denied| VerbsError::Fault)
    }

    /// Ends a registration. Work that still names it fails. EBUSY while memory windows are bound to it.
    pub fn dereg_mr(&mut self, lkey: u32) -> Result<(), VerbsError> {
        let region = self.keys.remove_region(lkey)?;
        self.leave_pd(region.pd);
        Ok(())
    }

    /// Makes a memory window; gives its first key, which opens nothing until the window is bound.
    pub fn alloc_mw(&mut self, pd: PdId, mw_type: MwType) -> Result<(MwId, u32), VerbsError> {
        self.alive()?;
        room(self.keys.windows(), self.limits.max_mw)?;
        self.enter_pd(pd)?;
        let key = self.new_key();
        self.keys.insert_window(Window::new(pd, mw_type, key));
        Ok((MwId(index(key)), key))
    }

    /// Ends a memory window, bound or not.
    pub fn dealloc_mw(&mut self, window: MwId) -> Result<(), VerbsError> {
        let window = self.keys.remove_window(window.0)?;
        self.leave_pd(window.pd);
        Ok(())
    }

    /// A region, if there may be such a one.
    fn region(&self, pd: PdId, addr: u64, len: u64, iova: u64, access: Access) -> Result<Region, VerbsError> {
        self.limits.check_mr(addr, len, access)?;
        let iova = if access.contains(Access::ZERO_BASED) {
            0
        } else {
            iova
        };
        Region::new(pd, addr, len, iova, access).ok_or(VerbsError::Invalid)
    }

    fn add_region(&mut self, region: Region) -> Result<MrInfo, VerbsError> {
        self.alive()?;
        room(self.keys.regions(), self.limits.max_mr)?;
        self.enter_pd(region.pd)?;
        let key = self.new_key();
        self.keys.insert_region(key, region);
        Ok(MrInfo { lkey: key, rkey: key })
    }
}
