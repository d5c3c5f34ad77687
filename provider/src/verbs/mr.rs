//! Memory regions.

use std::ffi::{c_int, c_void};

use ferroce_engine::verbs::{Access, VerbsError};

use super::pd::Pd;
use super::{make, verb};
use crate::abi::private::verbs_mr;
use crate::abi::verbs::{ibv_mr, ibv_pd};

/// `IBV_MR_TYPE_MR`.
pub(super) const ORDINARY: u32 = 0;
/// `IBV_ACCESS_OPTIONAL_RANGE`: rights that a device may ignore.
pub(super) const OPTIONAL: u32 = 0x3ff0_0000;

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
        let engine = &pd.context.engine;
        let rights = Access::from_bits(access as u32 & !OPTIONAL).ok_or(VerbsError::Invalid)?;
        engine.populate(addr as u64, length as u64, rights)?;
        let keys = engine
            .lock()?
            .reg_mr(pd.id, addr as u64, length as u64, iova, rights)?;
        let mr = verbs_mr {
            mr: ibv_mr {
                // SAFETY: a PD has its context.
                context: unsafe { (*public).context },
                pd: public,
                addr,
                length,
                handle: keys.lkey,
                lkey: keys.lkey,
                rkey: keys.rkey,
            },
            mr_type: ORDINARY,
            access,
        };
        Ok(Box::into_raw(Box::new(mr)).cast())
    })
}

pub(super) unsafe extern "C" fn dereg_mr(mr: *mut verbs_mr) -> c_int {
    verb(|| {
        // SAFETY: libibverbs passes a region of this provider, whose PD lives.
        let (pd, lkey) = unsafe { (Pd::of((*mr).mr.pd), (*mr).mr.lkey) };
        pd.context.engine.lock()?.dereg_mr(lkey)?;
        // SAFETY: `reg_mr` made it.
        drop(unsafe { Box::from_raw(mr) });
        Ok(())
    })
}
