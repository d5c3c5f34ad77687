//! Memory keys: who may reach which memory by them, and where it lies in the process.
//!
//! A key is an index (its upper 24 bits) and a tag (the lower 8), both random. No two objects have the same index. The
//! tag of a window is the application's: each bind gives it another.

mod region;
mod window;

use rustc_hash::FxHashMap;

pub(crate) use region::Region;
pub(crate) use window::Window;

use crate::device::PdId;
use crate::verbs::{Access, VerbsError};

/// The bits of the tag.
const TAG: u32 = 0xff;

/// A key, range or right that does not exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Denied;

/// Where the memory of a work request lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Spot {
    /// At this address of the process.
    At(u64),
    /// Nowhere: it reads as zeros, and writes to it are lost.
    Nowhere,
}

/// Which keys a QP and its peer may use: those of its PD, and windows that were bound by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Scope {
    pub pd: PdId,
    pub qpn: u32,
}

/// The keys of a device. `lkey` and `rkey` of a region are the same number.
#[derive(Default)]
pub(crate) struct KeyTable {
    /// By index: the whole key, and what it stands for.
    regions: FxHashMap<u32, (u32, Region)>,
    /// By index.
    windows: FxHashMap<u32, Window>,
}

/// The index of a key.
pub(crate) fn index(key: u32) -> u32 {
    key >> TAG.count_ones()
}

impl KeyTable {
    /// The number of regions.
    pub fn regions(&self) -> usize {
        self.regions.len()
    }

    /// Whether a new object may have this key.
    pub fn is_free(&self, key: u32) -> bool {
        let index = index(key);
        index != 0 && !self.regions.contains_key(&index) && !self.windows.contains_key(&index)
    }

    /// Adds a region under a key that is free.
    pub fn insert_region(&mut self, key: u32, region: Region) {
        self.regions.insert(index(key), (key, region));
    }

    /// Removes a region. EBUSY while windows are bound to it.
    pub fn remove_region(&mut self, key: u32) -> Result<Region, VerbsError> {
        if self.region(key).map_err(|Denied| VerbsError::NotFound)?.windows > 0 {
            return Err(VerbsError::Busy);
        }
        let (_, region) = self.regions.remove(&index(key)).ok_or(VerbsError::NotFound)?;
        Ok(region)
    }

    /// Changes a region: its keys stay. EBUSY while windows are bound to it, for they hold what they were bound to.
    pub fn replace_region(&mut self, key: u32, region: Region) -> Result<(), VerbsError> {
        let old = self.region_mut(key).map_err(|Denied| VerbsError::NotFound)?;
        if old.windows > 0 {
            return Err(VerbsError::Busy);
        }
        *old = region;
        Ok(())
    }

    /// Where `len` bytes at `va` of a work request's region lie, if its PD is `pd` and it has all `rights`.
    #[inline]
    pub fn local(&self, pd: PdId, lkey: u32, va: u64, len: u64, rights: Access) -> Result<Spot, Denied> {
        self.region(lkey)?.grant_local(pd, va, len, rights)
    }

    /// The process address of `len` bytes at `va` of what a peer names, if that lies in its scope and has all `rights`.
    #[inline]
    pub fn remote(&self, scope: Scope, rkey: u32, va: u64, len: u64, rights: Access) -> Result<u64, Denied> {
        if let Ok(region) = self.region(rkey) {
            return region.grant(scope.pd, va, len, rights);
        }
        let window = self.windows.get(&index(rkey)).ok_or(Denied)?;
        let (region, va) = window.reach(scope, rkey, va, len, rights)?;
        self.region(region)?.locate(va, len)
    }

    /// Whether a peer may reach the whole region of `rkey`, with all `rights`.
    pub fn remote_region(&self, scope: Scope, rkey: u32, rights: Access) -> Result<(), Denied> {
        let granted = self.region(rkey)?.grants_all(scope.pd, rights);
        granted.then_some(()).ok_or(Denied)
    }

    /// The region of a key.
    #[inline]
    pub fn region(&self, key: u32) -> Result<&Region, Denied> {
        match self.regions.get(&index(key)) {
            Some((whole, region)) if *whole == key => Ok(region),
            _ => Err(Denied),
        }
    }

    /// The region of a key.
    fn region_mut(&mut self, key: u32) -> Result<&mut Region, Denied> {
        match self.regions.get_mut(&index(key)) {
            Some((whole, region)) if *whole == key => Ok(region),
            _ => Err(Denied),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verbs::MwType;

    const PD: PdId = PdId(1);
    const KEY: u32 = 0x0000_0705;

    #[test]
    fn checks_range_rights_and_domain() {
        let mut keys = KeyTable::default();
        let access = Access::LOCAL_WRITE | Access::REMOTE_READ;
        keys.insert_region(KEY, Region::new(PD, 0x1000, 0x100, 0x9_0000, access).unwrap());
        let local = |key, va, len, rights| {
            let remote = keys.remote(Scope { pd: PD, qpn: 7 }, key, va, len, rights);
            assert_eq!(keys.local(PD, key, va, len, rights), remote.map(Spot::At));
            remote
        };
        assert_eq!(local(KEY, 0x9_0000, 0x100, Access::LOCAL_WRITE), Ok(0x1000));
        assert_eq!(local(KEY, 0x9_00ff, 1, access), Ok(0x10ff));
        assert_eq!(local(KEY, 0x9_00ff, 2, access), Err(Denied));
        assert_eq!(local(KEY, 0x8_ffff, 1, access), Err(Denied));
        assert_eq!(local(KEY, u64::MAX, 1, access), Err(Denied));
        assert_eq!(local(KEY, 0x9_0001, u64::MAX, access), Err(Denied));
        assert_eq!(local(KEY, 0x9_0000, 1, Access::REMOTE_WRITE), Err(Denied));
        assert_eq!(local(KEY + 1, 0x9_0000, 1, access), Err(Denied), "another tag");
        assert_eq!(local(KEY + 0x100, 0x9_0000, 1, access), Err(Denied));
        assert_eq!(keys.local(PdId(2), KEY, 0x9_0000, 1, access), Err(Denied));
        assert_eq!(keys.remove_region(KEY + 1).unwrap_err(), VerbsError::NotFound);
        assert!(keys.remove_region(KEY).is_ok());
        assert_eq!(keys.remove_region(KEY).unwrap_err(), VerbsError::NotFound);
    }

    #[test]
    fn an_index_is_used_once() {
        let mut keys = KeyTable::default();
        assert!(!keys.is_free(0xff), "index 0 stands for no key");
        assert!(keys.is_free(KEY));
        keys.insert_region(KEY, Region::new(PD, 0, 1, 0, Access::empty()).unwrap());
        assert!(!keys.is_free(KEY ^ 0xff) && keys.is_free(KEY ^ 0x100));
        keys.insert_window(Window::new(PD, MwType::Type1, KEY ^ 0x100));
        assert!(!keys.is_free(KEY ^ 0x1ff));
        assert_eq!((keys.regions(), keys.windows()), (1, 1));
    }

    #[test]
    fn a_null_region_is_for_work_requests_only() {
        let mut keys = KeyTable::default();
        keys.insert_region(KEY, Region::null(PD));
        for va in [0, 7, 1 << 63, u64::MAX - 8] {
            assert_eq!(keys.local(PD, KEY, va, 8, Access::LOCAL_WRITE), Ok(Spot::Nowhere));
            for right in [Access::REMOTE_READ, Access::REMOTE_WRITE, Access::REMOTE_ATOMIC] {
                assert_eq!(
                    keys.remote(Scope { pd: PD, qpn: 7 }, KEY, va, 8, right),
                    Err(Denied)
                );
            }
        }
        assert_eq!(keys.local(PdId(2), KEY, 0, 8, Access::empty()), Err(Denied));
    }

    #[test]
    fn a_region_is_replaced_under_its_key() {
        let mut keys = KeyTable::default();
        keys.insert_region(KEY, Region::new(PD, 0x1000, 16, 0x1000, Access::empty()).unwrap());
        let new = Region::new(PdId(2), 0x2000, 8, 0, Access::LOCAL_WRITE).unwrap();
        assert_eq!(keys.replace_region(KEY + 1, new), Err(VerbsError::NotFound));
        assert_eq!(keys.replace_region(KEY, new), Ok(()));
        assert_eq!(keys.local(PD, KEY, 0x1000, 1, Access::empty()), Err(Denied));
        assert_eq!(
            keys.local(PdId(2), KEY, 4, 4, Access::LOCAL_WRITE),
            Ok(Spot::At(0x2004))
        );
        assert_eq!(keys.regions(), 1);
    }

    #[test]
    fn refuses_wrapping_regions() {
        assert!(Region::new(PD, u64::MAX, 2, 0, Access::empty()).is_none());
        assert!(Region::new(PD, 0, 2, u64::MAX, Access::empty()).is_none());
    }
}
