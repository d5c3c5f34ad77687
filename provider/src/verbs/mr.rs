//! Memory regions: of the program's memory, of device memory and of DMA buffers.

use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::Arc;

use ferroce_engine::device::{MrChange, MrInfo};
use ferroce_engine::verbs::{Access, VerbsError};

use super::context::Context;
use super::dm::Dm;
use super::dmabuf::{self, Mapping};
use super::pd::Pd;
use super::uses::Use;
use super::{make, verb};
use crate::abi::private::verbs_mr;
use crate::abi::verbs::{ibv_dm, ibv_mr, ibv_mr_init_attr, ibv_pd};

/// `IBV_MR_TYPE_MR`.
pub(super) const ORDINARY: u32 = 0;
/// `IBV_ACCESS_OPTIONAL_RANGE`: rights that a device may ignore.
pub(super) const OPTIONAL: u32 = 0x3ff0_0000;
/// What can be asked of device memory and DMA buffers.
const DEVICE_RIGHTS: Access = Access::LOCAL_WRITE
    .union(Access::REMOTE_WRITE)
    .union(Access::REMOTE_READ)
    .union(Access::REMOTE_ATOMIC);
/// Bits of `enum ibv_mr_init_attr_mask`.
const WITH_IOVA: u64 = 1;
const WITH_ADDR: u64 = 1 << 1;
const WITH_FD: u64 = 1 << 2;
const WITH_FD_OFFSET: u64 = 1 << 3;

/// Bits of `enum ibv_rereg_mr_flags`.
const CHANGE_TRANSLATION: c_int = 1;
const CHANGE_PD: c_int = 1 << 1;
const CHANGE_ACCESS: c_int = 1 << 2;

/// What lies under a region, with what keeps it there. The discriminant is `enum ibv_mr_type`.
enum Backing {
    Program,
    Device { _dm: Use },
    DmaBuf { _mapping: Mapping },
    Nothing,
}

impl Backing {
    /// `enum ibv_mr_type`, by which libibverbs knows which memory children may not inherit, and what can be
    /// registered again.
    fn mr_type(&self) -> u32 {
        match self {
            Backing::Program | Backing::Device { .. } => ORDINARY,
            Backing::Nothing => 1,
            Backing::DmaBuf { .. } => 3,
        }
    }
}

/// A memory region; begins as `struct verbs_mr`.
#[repr(C)]
struct Mr {
    public: verbs_mr,
    context: Arc<Context>,
    backing: Backing,
    domain: Use,
}

/// Rights as the engine has them. EINVAL if there are unknown ones.
fn rights(access: c_int) -> Result<Access, VerbsError> {
    Access::from_bits(access as u32 & !OPTIONAL).ok_or(VerbsError::Invalid)
}

/// Whether two addresses lie at the same place of a page, as translation by pages needs.
fn same_place(a: u64, b: u64) -> bool {
    (a ^ b) & (dmabuf::page_size() - 1) == 0
}

/// What the program shall see of a region.
struct Shown {
    addr: *mut c_void,
    length: usize,
    access: c_int,
}

impl Mr {
    /// Makes the object of a region that was registered in `pd`.
    fn make(public: *mut ibv_pd, pd: &Pd, keys: MrInfo, shown: &Shown, backing: Backing) -> *mut ibv_mr {
        let mr = Mr {
            public: verbs_mr {
                mr: ibv_mr {
                    context: pd.public_context(),
                    pd: public,
                    addr: shown.addr,
                    length: shown.length,
                    handle: keys.lkey,
                    lkey: keys.lkey,
                    rkey: keys.rkey,
                },
                mr_type: backing.mr_type(),
                access: shown.access,
            },
            context: pd.context.clone(),
            backing,
            domain: pd.enter(),
        };
        Box::into_raw(Box::new(mr)).cast()
    }
}

/// Registers `length` bytes at `addr`, which peers and work requests reach from `iova` on.
pub(super) unsafe extern "C" fn reg_mr(
    public: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    access: c_int,
) -> *mut ibv_mr {
    make(|| {
        // SAFETY: libibverbs passes a PD of this provider.
        let pd = unsafe { Pd::of(public) };
        let (at, len, rights) = (addr as u64, length as u64, rights(access)?);
        if len == 0 || !rights.contains(Access::ZERO_BASED) && !same_place(at, iova) {
            return Err(VerbsError::Invalid);
        }
        let engine = &pd.context.engine;
        engine.limits().check_mr(at, len, rights)?;
        engine.populate(at, len, rights)?;
        let keys = engine.lock()?.reg_mr(pd.id, at, len, iova, rights)?;
        let shown = Shown { addr, length, access };
        Ok(Mr::make(public, pd, keys, &shown, Backing::Program))
    })
}

/// Registers a part of device memory, which is named by offsets from where it begins.
pub(super) unsafe extern "C" fn reg_dm_mr(
    public: *mut ibv_pd,
    dm: *mut ibv_dm,
    offset: u64,
    length: usize,
    access: u32,
) -> *mut ibv_mr {
    make(|| {
        // SAFETY: the program passes a PD and device memory of this provider.
        let (pd, dm, one_context) =
            unsafe { (Pd::of(public), Dm::of(dm), (*public).context == (*dm).context) };
        if !one_context {
            return Err(VerbsError::Invalid);
        }
        let access = access as c_int;
        let rights = rights(access)?;
        let known = DEVICE_RIGHTS | Access::ZERO_BASED;
        if !rights.contains(Access::ZERO_BASED) || !known.contains(rights) {
            return Err(VerbsError::Invalid);
        }
        let at = dm.part(offset, length).ok_or(VerbsError::Invalid)? as u64;
        let keys = pd
            .context
            .engine
            .lock()?
            .reg_mr(pd.id, at, length as u64, 0, rights)?;
        let addr = ptr::null_mut();
        let backing = Backing::Device { _dm: dm.uses.begin() };
        Ok(Mr::make(
            public,
            pd,
            keys,
            &Shown { addr, length, access },
            backing,
        ))
    })
}

/// Registers `length` bytes at `offset` of a DMA buffer, which peers and work requests reach from `iova` on.
pub(super) unsafe extern "C" fn reg_dmabuf_mr(
    public: *mut ibv_pd,
    offset: u64,
    length: usize,
    iova: u64,
    fd: c_int,
    access: c_int,
) -> *mut ibv_mr {
    make(|| {
        // SAFETY: libibverbs passes a PD of this provider.
        let pd = unsafe { Pd::of(public) };
        let rights = rights(access)?;
        if !DEVICE_RIGHTS.contains(rights) || !same_place(offset, iova) {
            return Err(VerbsError::Invalid);
        }
        let engine = &pd.context.engine;
        engine.limits().check_mr(offset, length as u64, rights)?;
        let mapping = Mapping::new(fd, offset, length, rights.intersects(Access::WRITABLE))?;
        // Its pages are the other device's business.
        engine.populate(mapping.addr(), 0, rights)?;
        let keys = engine
            .lock()?
            .reg_mr(pd.id, mapping.addr(), length as u64, iova, rights)?;
        let addr = offset as *mut c_void;
        let backing = Backing::DmaBuf { _mapping: mapping };
        Ok(Mr::make(
            public,
            pd,
            keys,
            &Shown { addr, length, access },
            backing,
        ))
    })
}

/// Makes a region that reads as zeros and forgets what is written.
pub(super) unsafe extern "C" fn alloc_null_mr(public: *mut ibv_pd) -> *mut ibv_mr {
    make(|| {
        // SAFETY: the program passes a PD of this provider.
        let pd = unsafe { Pd::of(public) };
        let keys = pd.context.engine.lock()?.alloc_null_mr(pd.id)?;
        let shown = Shown {
            addr: ptr::null_mut(),
            length: usize::MAX,
            access: 0,
        };
        Ok(Mr::make(public, pd, keys, &shown, Backing::Nothing))
    })
}

/// Registers what the attributes say: a range of the program's memory, or of a DMA buffer.
pub(super) unsafe extern "C" fn reg_mr_ex(public: *mut ibv_pd, attr: *mut ibv_mr_init_attr) -> *mut ibv_mr {
    // SAFETY: libibverbs passes attributes.
    let attr = unsafe { &*attr };
    let has = |bit| attr.comp_mask & bit != 0;
    let with = WITH_IOVA | WITH_ADDR | WITH_FD | WITH_FD_OFFSET;
    // The others ask for hints to a PCIe device, or for what is not known yet.
    if attr.comp_mask & !with != 0 {
        return make(|| Err(VerbsError::NotSupported));
    }
    match (has(WITH_ADDR), has(WITH_FD), has(WITH_FD_OFFSET)) {
        (true, false, false) => {
            let iova = if has(WITH_IOVA) {
                attr.iova
            } else {
                attr.addr as u64
            };
            // SAFETY: as this function was called.
            unsafe { reg_mr(public, attr.addr, attr.length, iova, attr.access) }
        }
        // SAFETY: as this function was called.
        (false, true, true) if has(WITH_IOVA) => unsafe {
            reg_dmabuf_mr(
                public,
                attr.fd_offset,
                attr.length,
                attr.iova,
                attr.fd,
                attr.access,
            )
        },
        _ => make(|| Err(VerbsError::Invalid)),
    }
}

/// Changes a region: its place, its PD, its rights. The keys stay, and on an error the region stays as it was.
///
/// libibverbs notes what it must, but for the keys.
pub(super) unsafe extern "C" fn rereg_mr(
    mr: *mut verbs_mr,
    flags: c_int,
    new_pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    access: c_int,
) -> c_int {
    verb(|| {
        let mr = mr.cast::<Mr>();
        // SAFETY: libibverbs passes a region of this provider.
        let (context, lkey, backing) =
            unsafe { ((*mr).context.clone(), (*mr).public.mr.lkey, &(*mr).backing) };
        let changes = |flag| flags & flag != 0;
        if flags == 0 || !matches!(backing, Backing::Program) {
            return Err(VerbsError::Invalid);
        }
        // SAFETY: the program passes a PD of this provider, if it changes that.
        let pd = changes(CHANGE_PD)
            .then(|| unsafe { Pd::in_context(new_pd, &context) })
            .transpose()?;
        let engine = &context.engine;
        let (old_addr, old_len, old_access) = engine.lock()?.query_mr(lkey)?;
        let (at, len) = if changes(CHANGE_TRANSLATION) {
            (addr as u64, length as u64)
        } else {
            (old_addr, old_len)
        };
        let new_access = if changes(CHANGE_ACCESS) {
            rights(access)?
        } else {
            old_access
        };
        engine.limits().check_mr(at, len, new_access)?;
        if changes(CHANGE_TRANSLATION) || changes(CHANGE_ACCESS) {
            engine.populate(at, len, new_access)?;
        }
        let change = MrChange {
            translation: changes(CHANGE_TRANSLATION).then_some((at, len, at)),
            pd: pd.map(|pd| pd.id),
            access: Some(new_access),
        };
        engine.lock()?.rereg_mr(lkey, &change)?;
        // SAFETY: the region is the caller's to change.
        unsafe {
            if let Some(pd) = pd {
                (*mr).domain = pd.enter();
            }
            if changes(CHANGE_ACCESS) {
                // By this one libibverbs knows how the memory was treated when it was registered first.
                let kept = Access::ON_DEMAND.bits() as c_int;
                let old = (*mr).public.access;
                (*mr).public.access = access & !kept | old & kept;
            }
        }
        Ok(())
    })
}

pub(super) unsafe extern "C" fn dereg_mr(mr: *mut verbs_mr) -> c_int {
    verb(|| {
        let mr = mr.cast::<Mr>();
        // SAFETY: libibverbs passes a region of this provider.
        let (context, lkey) = unsafe { ((*mr).context.clone(), (*mr).public.mr.lkey) };
        context.engine.lock()?.dereg_mr(lkey)?;
        // SAFETY: `Mr::make` made it, and the engine does not reach its memory any more.
        drop(unsafe { Box::from_raw(mr) });
        Ok(())
    })
}
