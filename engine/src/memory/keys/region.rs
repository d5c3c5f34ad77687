//! A registered memory region.

use super::{Denied, Spot};
use crate::device::PdId;
use crate::verbs::Access;

/// A registered memory region.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Region {
    pub pd: PdId,
    /// Where it starts in the process.
    addr: u64,
    len: u64,
    /// The address by which work requests and peers name its start.
    iova: u64,
    pub access: Access,
    /// Windows that are bound to it.
    pub windows: u32,
    /// It has no memory: reads give zeros, and what is written is lost.
    null: bool,
}

impl Region {
    /// A region; `None` if it wraps around in either address space.
    pub fn new(pd: PdId, addr: u64, len: u64, iova: u64, access: Access) -> Option<Region> {
        addr.checked_add(len)?;
        iova.checked_add(len)?;
        Some(Region {
            pd,
            addr,
            len,
            iova,
            access,
            windows: 0,
            null: false,
        })
    }

    /// A region of all addresses, without memory. No peer has rights to it.
    pub fn null(pd: PdId) -> Region {
        Region {
            pd,
            addr: 0,
            len: u64::MAX,
            iova: 0,
            access: Access::LOCAL_WRITE,
            windows: 0,
            null: true,
        }
    }

    /// Where it starts in the process, and its bytes.
    pub fn memory(&self) -> (u64, u64) {
        (self.addr, self.len)
    }

    /// The address by which work requests and peers name its start.
    pub fn iova(&self) -> u64 {
        self.iova
    }

    /// Whether the whole region may be reached: its PD is `pd`, and it has all `rights`.
    pub fn grants_all(&self, pd: PdId, rights: Access) -> bool {
        self.grant(pd, self.iova, self.len, rights).is_ok()
    }

    /// The process address of `len` bytes at `va`, if they lie in the region. Rights are not looked at.
    #[inline]
    pub fn locate(&self, va: u64, len: u64) -> Result<u64, Denied> {
        let offset = va.checked_sub(self.iova).ok_or(Denied)?;
        let end = offset.checked_add(len).ok_or(Denied)?;
        if end > self.len {
            return Err(Denied);
        }
        Ok(self.addr + offset)
    }

    /// Where `len` bytes at `va` lie for a peer, if they lie in the region, its PD is `pd`, and it has all `rights`.
    #[inline]
    pub fn grant(&self, pd: PdId, va: u64, len: u64, rights: Access) -> Result<u64, Denied> {
        if self.pd != pd || !self.access.contains(rights) {
            return Err(Denied);
        }
        self.locate(va, len)
    }

    /// The same for a work request, which may name a null region.
    #[inline]
    pub fn grant_local(&self, pd: PdId, va: u64, len: u64, rights: Access) -> Result<Spot, Denied> {
        let addr = self.grant(pd, va, len, rights)?;
        Ok(if self.null { Spot::Nowhere } else { Spot::At(addr) })
    }
}
