//! Memory windows: keys to parts of regions, which come and go by work requests (IBTA 10.6.7).

use super::{Denied, KeyTable, Scope, TAG, index};
use crate::device::PdId;
use crate::verbs::{Access, MwBind, MwType, VerbsError};

/// A memory window.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Window {
    pub pd: PdId,
    mw_type: MwType,
    /// Its index for ever, and the tag that the last bind gave it.
    key: u32,
    /// Without one the key opens nothing.
    binding: Option<Binding>,
}

/// What a window opens.
#[derive(Clone, Copy, Debug)]
struct Binding {
    /// Key of the region.
    region: u32,
    /// Where it starts, in the region's addresses.
    start: u64,
    len: u64,
    /// The address by which peers name its start.
    iova: u64,
    access: Access,
    /// The QP by which type 2 was bound: none other reaches it.
    qpn: Option<u32>,
}

impl Window {
    /// A window that is not bound.
    pub fn new(pd: PdId, mw_type: MwType, key: u32) -> Window {
        Window {
            pd,
            mw_type,
            key,
            binding: None,
        }
    }

    /// The region's key, and `va` in the region's addresses, if these `len` bytes lie in the window, and a peer in this
    /// scope has all `rights` there.
    pub fn reach(
        &self,
        scope: Scope,
        rkey: u32,
        va: u64,
        len: u64,
        rights: Access,
    ) -> Result<(u32, u64), Denied> {
        let binding = self.binding.as_ref().ok_or(Denied)?;
        let offset = va.checked_sub(binding.iova).ok_or(Denied)?;
        let end = offset.checked_add(len).ok_or(Denied)?;
        if self.key != rkey
            || self.pd != scope.pd
            || binding.qpn.is_some_and(|qpn| qpn != scope.qpn)
            || end > binding.len
            || !binding.access.contains(rights)
        {
            return Err(Denied);
        }
        Ok((binding.region, binding.start + offset))
    }
}

impl KeyTable {
    /// The number of windows.
    pub fn windows(&self) -> usize {
        self.windows.len()
    }

    /// Adds a window under its key, which is free.
    pub fn insert_window(&mut self, window: Window) {
        self.windows.insert(index(window.key), window);
    }

    /// Removes the window with this index.
    pub fn remove_window(&mut self, index: u32) -> Result<Window, VerbsError> {
        self.unbind(index);
        self.windows.remove(&index).ok_or(VerbsError::NotFound)
    }

    /// Binds a window by a work request of a QP, if all rules allow it; nothing changes if not. Type 1 may be bound
    /// already, and to no bytes, which ends its binding.
    pub fn bind(&mut self, scope: Scope, bind: &MwBind) -> Result<(), Denied> {
        let index = bind.window.0;
        let window = self.windows.get(&index).ok_or(Denied)?;
        let two = window.mw_type == MwType::Type2;
        let zero_based = bind.access.contains(Access::ZERO_BASED);
        let fits = if two {
            window.binding.is_none() && bind.len > 0
        } else {
            !zero_based
        };
        if window.pd != scope.pd || !fits {
            return Err(Denied);
        }
        let binding = if bind.len == 0 {
            None
        } else {
            let region = self.region(bind.lkey)?;
            let writes = bind
                .access
                .intersects(Access::REMOTE_WRITE | Access::REMOTE_ATOMIC);
            if region.pd != scope.pd
                || !region.access.contains(Access::MW_BIND)
                || writes && !region.access.contains(Access::LOCAL_WRITE)
            {
                return Err(Denied);
            }
            region.locate(bind.addr, bind.len)?;
            Some(Binding {
                region: bind.lkey,
                start: bind.addr,
                len: bind.len,
                iova: if zero_based { 0 } else { bind.addr },
                access: bind.access,
                qpn: two.then_some(scope.qpn),
            })
        };
        self.unbind(index);
        if let Some(binding) = &binding
            && let Ok(region) = self.region_mut(binding.region)
        {
            region.windows += 1;
        }
        if let Some(window) = self.windows.get_mut(&index) {
            window.key = index << TAG.count_ones() | bind.rkey & TAG;
            window.binding = binding;
        }
        Ok(())
    }

    /// Ends the binding of a type 2 window by its key, for a QP or its peer. It must be bound by that very QP. Regions
    /// of user space can't be invalidated.
    pub fn invalidate(&mut self, scope: Scope, key: u32) -> Result<(), Denied> {
        let window = self.windows.get(&index(key)).ok_or(Denied)?;
        let owner = window.binding.and_then(|binding| binding.qpn);
        if window.key != key || window.pd != scope.pd || owner != Some(scope.qpn) {
            return Err(Denied);
        }
        self.unbind(index(key));
        Ok(())
    }

    /// A QP ends: so do the bindings that it made of type 2 windows.
    pub fn release_qp(&mut self, qpn: u32) {
        let bound_by_it = |window: &Window| window.binding.is_some_and(|binding| binding.qpn == Some(qpn));
        let bound = self.windows.iter().filter(|(_, window)| bound_by_it(window));
        let indices: Vec<u32> = bound.map(|(&index, _)| index).collect();
        for index in indices {
            self.unbind(index);
        }
    }

    /// Ends the binding of the window with this index, if it has one.
    fn unbind(&mut self, index: u32) {
        let binding = self
            .windows
            .get_mut(&index)
            .and_then(|window| window.binding.take());
        if let Some(binding) = binding
            && let Ok(region) = self.region_mut(binding.region)
        {
            region.windows = region.windows.saturating_sub(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Region;
    use super::*;
    use crate::device::MwId;

    const PD: PdId = PdId(1);
    const HERE: Scope = Scope { pd: PD, qpn: 7 };
    const REGION: u32 = 0x0000_0705;
    const WINDOW: u32 = 0x0000_0900;
    const FULL: Access = Access::LOCAL_WRITE.union(Access::MW_BIND);
    const WRITE: Access = Access::REMOTE_WRITE;

    /// A region of 0x100 bytes at process address 0x1000, named 0x9_0000, and a window.
    fn table(mw_type: MwType, access: Access) -> KeyTable {
        let mut keys = KeyTable::default();
        keys.insert_region(REGION, Region::new(PD, 0x1000, 0x100, 0x9_0000, access).unwrap());
        keys.insert_window(Window::new(PD, mw_type, WINDOW));
        keys
    }

    /// Of 0x40 bytes from 0x10 on, under tag 1.
    fn bind() -> MwBind {
        MwBind {
            window: MwId(index(WINDOW)),
            rkey: WINDOW + 1,
            lkey: REGION,
            addr: 0x9_0010,
            len: 0x40,
            access: WRITE,
        }
    }

    #[test]
    fn a_window_opens_what_it_was_bound_to() {
        for mw_type in [MwType::Type1, MwType::Type2] {
            let mut keys = table(mw_type, FULL);
            let write = |keys: &KeyTable, key, va, len| keys.remote(HERE, key, va, len, WRITE);
            assert_eq!(
                write(&keys, WINDOW, 0x9_0010, 1),
                Err(Denied),
                "not before it is bound"
            );
            keys.bind(HERE, &bind()).unwrap();
            let key = WINDOW + 1;
            assert_eq!(
                write(&keys, key, 0x9_0010, 0x40),
                Ok(0x1010),
                "the region itself is not open"
            );
            assert_eq!(write(&keys, key, 0x9_004f, 1), Ok(0x104f));
            assert_eq!(write(&keys, key, 0x9_000f, 1), Err(Denied));
            assert_eq!(write(&keys, key, 0x9_004f, 2), Err(Denied));
            assert_eq!(write(&keys, key, u64::MAX, 2), Err(Denied));
            assert_eq!(write(&keys, WINDOW, 0x9_0010, 1), Err(Denied), "the old key");
            assert_eq!(
                keys.remote(HERE, key, 0x9_0010, 1, Access::REMOTE_READ),
                Err(Denied)
            );
            assert_eq!(
                keys.local(PD, key, 0x9_0010, 1, Access::empty()),
                Err(Denied),
                "for peers only"
            );
            let elsewhere = Scope { pd: PdId(2), ..HERE };
            assert_eq!(keys.remote(elsewhere, key, 0x9_0010, 1, WRITE), Err(Denied));
            let other = Scope { qpn: 8, ..HERE };
            let expected = match mw_type {
                MwType::Type1 => Ok(0x1010),
                MwType::Type2 => Err(Denied),
            };
            assert_eq!(keys.remote(other, key, 0x9_0010, 1, WRITE), expected);
        }
    }

    #[test]
    fn what_can_not_be_bound() {
        let both = [MwType::Type1, MwType::Type2];
        let refused = |mw_type, region, scope, bind: MwBind| {
            let mut keys = table(mw_type, region);
            assert_eq!(
                keys.bind(scope, &bind),
                Err(Denied),
                "{mw_type:?}, {region:?}, {bind:?}"
            );
            assert!(keys.remove_region(REGION).is_ok(), "it is not bound");
        };
        for mw_type in both {
            refused(mw_type, Access::LOCAL_WRITE, HERE, bind());
            refused(mw_type, Access::MW_BIND, HERE, bind());
            let atomic = MwBind {
                access: Access::REMOTE_ATOMIC,
                ..bind()
            };
            refused(mw_type, Access::MW_BIND, HERE, atomic);
            let elsewhere = Scope { pd: PdId(2), ..HERE };
            refused(mw_type, FULL, elsewhere, bind());
            for (addr, len) in [
                (0x8_ffff, 2),
                (0x9_00ff, 2),
                (0x9_0000, 0x101),
                (0x9_0001, u64::MAX),
            ] {
                refused(mw_type, FULL, HERE, MwBind { addr, len, ..bind() });
            }
            for lkey in [REGION + 1, WINDOW, 0] {
                refused(mw_type, FULL, HERE, MwBind { lkey, ..bind() });
            }
            let window = MwId(index(REGION));
            refused(mw_type, FULL, HERE, MwBind { window, ..bind() });
            // To read no right to write is needed.
            let mut keys = table(mw_type, Access::MW_BIND);
            let access = Access::REMOTE_READ;
            assert_eq!(keys.bind(HERE, &MwBind { access, ..bind() }), Ok(()));
        }
        let access = WRITE | Access::ZERO_BASED;
        refused(MwType::Type1, FULL, HERE, MwBind { access, ..bind() });
        refused(MwType::Type2, FULL, HERE, MwBind { len: 0, ..bind() });
        let mut keys = table(MwType::Type2, FULL);
        keys.bind(HERE, &bind()).unwrap();
        let again = MwBind {
            rkey: WINDOW + 2,
            ..bind()
        };
        assert_eq!(keys.bind(HERE, &again), Err(Denied), "it is bound");
        assert!(keys.remote(HERE, WINDOW + 1, 0x9_0010, 1, WRITE).is_ok());
    }

    #[test]
    fn type_1_moves_and_ends_by_binding() {
        let mut keys = table(MwType::Type1, FULL);
        keys.bind(HERE, &bind()).unwrap();
        assert_eq!(keys.remove_region(REGION).unwrap_err(), VerbsError::Busy);
        let other = Region::new(PD, 0, 1, 0, Access::empty()).unwrap();
        assert_eq!(keys.replace_region(REGION, other), Err(VerbsError::Busy));
        let moved = MwBind {
            rkey: WINDOW + 2,
            addr: 0x9_0000,
            len: 1,
            ..bind()
        };
        keys.bind(HERE, &moved).unwrap();
        assert_eq!(
            keys.remote(HERE, WINDOW + 1, 0x9_0010, 1, WRITE),
            Err(Denied),
            "a stale key"
        );
        assert_eq!(keys.remote(HERE, WINDOW + 2, 0x9_0000, 1, WRITE), Ok(0x1000));
        assert_eq!(keys.invalidate(HERE, WINDOW + 2), Err(Denied));
        let none = MwBind {
            rkey: WINDOW + 3,
            lkey: 0,
            addr: 0,
            len: 0,
            ..bind()
        };
        keys.bind(HERE, &none).unwrap();
        for tag in 0..4 {
            assert_eq!(keys.remote(HERE, WINDOW + tag, 0x9_0000, 1, WRITE), Err(Denied));
        }
        assert!(keys.remove_region(REGION).is_ok());
    }

    #[test]
    fn type_2_ends_by_invalidation_of_its_key_on_its_qp() {
        let mut keys = table(MwType::Type2, FULL);
        assert_eq!(keys.invalidate(HERE, WINDOW), Err(Denied), "not bound");
        keys.bind(HERE, &bind()).unwrap();
        assert_eq!(keys.remove_region(REGION).unwrap_err(), VerbsError::Busy);
        let key = WINDOW + 1;
        for wrong in [WINDOW, key + 0x100, REGION] {
            assert_eq!(keys.invalidate(HERE, wrong), Err(Denied));
        }
        assert_eq!(keys.invalidate(Scope { qpn: 8, ..HERE }, key), Err(Denied));
        assert_eq!(keys.invalidate(Scope { pd: PdId(2), ..HERE }, key), Err(Denied));
        assert_eq!(keys.invalidate(HERE, key), Ok(()));
        assert_eq!(keys.invalidate(HERE, key), Err(Denied));
        assert_eq!(keys.remote(HERE, key, 0x9_0010, 1, WRITE), Err(Denied));
        // Bound again, from zero on; only the tag of the new key counts.
        let access = WRITE | Access::ZERO_BASED;
        let rkey = 0xffff_ff02;
        keys.bind(
            HERE,
            &MwBind {
                access,
                rkey,
                ..bind()
            },
        )
        .unwrap();
        assert_eq!(keys.remote(HERE, WINDOW + 2, 0x3f, 1, WRITE), Ok(0x104f));
        assert_eq!(keys.remote(HERE, WINDOW + 2, 0x40, 1, WRITE), Err(Denied));
        assert_eq!(keys.remote(HERE, WINDOW + 2, 0x9_0010, 1, WRITE), Err(Denied));
    }

    #[test]
    fn bindings_end_with_their_qp_and_window() {
        let mut keys = table(MwType::Type2, FULL);
        keys.bind(HERE, &bind()).unwrap();
        keys.release_qp(8);
        assert!(keys.remote(HERE, WINDOW + 1, 0x9_0010, 1, WRITE).is_ok());
        keys.release_qp(7);
        assert_eq!(keys.remote(HERE, WINDOW + 1, 0x9_0010, 1, WRITE), Err(Denied));
        keys.bind(HERE, &bind()).unwrap();
        assert_eq!(keys.remove_region(REGION).unwrap_err(), VerbsError::Busy);
        assert!(keys.remove_window(index(WINDOW)).is_ok());
        assert_eq!(
            keys.remove_window(index(WINDOW)).unwrap_err(),
            VerbsError::NotFound
        );
        assert!(keys.remove_region(REGION).is_ok());
        assert_eq!((keys.regions(), keys.windows()), (0, 0));
        // Type 1 is not the QP's.
        let mut keys = table(MwType::Type1, FULL);
        keys.bind(HERE, &bind()).unwrap();
        keys.release_qp(7);
        assert!(keys.remote(HERE, WINDOW + 1, 0x9_0010, 1, WRITE).is_ok());
    }
}
