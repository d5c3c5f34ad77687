//! Memory regions by key: who may reach which memory, and where it lies in the process.

use rustc_hash::FxHashMap;

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
    access: Access,
}

/// A key, range or right that does not exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Denied;

/// The regions of a device. `lkey` and `rkey` of a region are the same number.
#[derive(Default)]
pub(crate) struct KeyTable {
    regions: FxHashMap<u32, Region>,
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
        })
    }
}

impl KeyTable {
    /// The number of regions.
    pub fn len(&self) -> usize {
        self.regions.len()
    }

    /// Whether `key` is taken.
    pub fn contains(&self, key: u32) -> bool {
        self.regions.contains_key(&key)
    }

    /// Adds a region under a key that is not taken.
    pub fn insert(&mut self, key: u32, region: Region) {
        self.regions.insert(key, region);
    }

    /// Removes a region.
    pub fn remove(&mut self, key: u32) -> Option<Region> {
        self.regions.remove(&key)
    }

    /// The process address of `len` bytes at `va` of the region `key`, if its PD is `pd` and it has all `rights`.
    #[inline]
    pub fn resolve(&self, pd: PdId, key: u32, va: u64, len: u64, rights: Access) -> Result<u64, Denied> {
        let region = self.regions.get(&key).ok_or(Denied)?;
        let offset = va.checked_sub(region.iova).ok_or(Denied)?;
        let end = offset.checked_add(len).ok_or(Denied)?;
        if region.pd != pd || end > region.len || !region.access.contains(rights) {
            return Err(Denied);
        }
        Ok(region.addr + offset)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checks_range_rights_and_domain() {
        let pd = PdId(1);
        let mut keys = KeyTable::default();
        let access = Access::LOCAL_WRITE | Access::REMOTE_READ;
        keys.insert(7, Region::new(pd, 0x1000, 0x100, 0x9_0000, access).unwrap());
        let resolve = |key, va, len, rights| keys.resolve(pd, key, va, len, rights);
        assert_eq!(resolve(7, 0x9_0000, 0x100, Access::LOCAL_WRITE), Ok(0x1000));
        assert_eq!(resolve(7, 0x9_00ff, 1, access), Ok(0x10ff));
        assert_eq!(resolve(7, 0x9_00ff, 2, access), Err(Denied));
        assert_eq!(resolve(7, 0x8_ffff, 1, access), Err(Denied));
        assert_eq!(resolve(7, u64::MAX, 1, access), Err(Denied));
        assert_eq!(resolve(7, 0x9_0001, u64::MAX, access), Err(Denied));
        assert_eq!(resolve(7, 0x9_0000, 1, Access::REMOTE_WRITE), Err(Denied));
        assert_eq!(resolve(8, 0x9_0000, 1, access), Err(Denied));
        assert_eq!(keys.resolve(PdId(2), 7, 0x9_0000, 1, access), Err(Denied));
        assert!(keys.remove(7).is_some() && keys.remove(7).is_none());
    }

    #[test]
    fn refuses_wrapping_regions() {
        assert!(Region::new(PdId(1), u64::MAX, 2, 0, Access::empty()).is_none());
        assert!(Region::new(PdId(1), 0, 2, u64::MAX, Access::empty()).is_none());
    }
}
