//! Memory windows.

use std::ffi::c_int;
use std::sync::Arc;

use ferroce_engine::device::MwId;
use ferroce_engine::verbs::{Access, MwBind, MwType, Operation, SendFlags, SendWr, VerbsError};

use super::context::Context;
use super::mr::{OPTIONAL, ORDINARY};
use super::pd::Pd;
use super::qp::Qp;
use super::uses::Use;
use super::{make, verb};
use crate::abi::private::verbs_mr;
use crate::abi::verbs::{ibv_context, ibv_mw, ibv_mw_bind, ibv_mw_bind_info, ibv_pd, ibv_qp};

/// A memory window; begins as `struct ibv_mw`.
#[repr(C)]
struct Mw {
    public: ibv_mw,
    context: Arc<Context>,
    /// Its name in the engine.
    id: MwId,
    _domain: Use,
}

/// What may be asked of a window: local access is no matter of windows, and is let pass, as by the kernel's drivers.
const RIGHTS: Access = Access::LOCAL_WRITE
    .union(Access::REMOTE_WRITE)
    .union(Access::REMOTE_READ)
    .union(Access::REMOTE_ATOMIC)
    .union(Access::ZERO_BASED);

pub(super) unsafe extern "C" fn alloc_mw(public: *mut ibv_pd, mw_type: u32) -> *mut ibv_mw {
    make(|| {
        // SAFETY: libibverbs passes a PD of this provider.
        let pd = unsafe { Pd::of(public) };
        let kind = MwType::from_number(mw_type).ok_or(VerbsError::Invalid)?;
        let (id, rkey) = pd.context.engine.lock()?.alloc_mw(pd.id, kind)?;
        let mw = Mw {
            public: ibv_mw {
                context: pd.public_context(),
                pd: public,
                rkey,
                handle: rkey >> 8,
                mw_type,
            },
            context: pd.context.clone(),
            id,
            _domain: pd.enter(),
        };
        Ok(Box::into_raw(Box::new(mw)).cast())
    })
}

pub(super) unsafe extern "C" fn dealloc_mw(public: *mut ibv_mw) -> c_int {
    verb(|| {
        // SAFETY: the program passes a window of this provider.
        let mw = unsafe { &*public.cast::<Mw>() };
        mw.context.engine.lock()?.dealloc_mw(mw.id)?;
        // SAFETY: `alloc_mw` made it.
        drop(unsafe { Box::from_raw(public.cast::<Mw>()) });
        Ok(())
    })
}

/// A work request that binds a window under a new key. EINVAL: the window is not of this type or not of the context, or
/// what is asked is no matter of its. Whether the region, its rights and its range allow it shows when the work is done.
///
/// # Safety
/// Window and region must be null or of this provider.
pub(super) unsafe fn bind(
    context: *mut ibv_context,
    mw: *mut ibv_mw,
    mw_type: MwType,
    rkey: u32,
    info: &ibv_mw_bind_info,
) -> Result<Operation, VerbsError> {
    // SAFETY: as the caller says.
    let (mw, mr) = unsafe { (mw.cast::<Mw>().as_ref(), info.mr.cast::<verbs_mr>().as_ref()) };
    let mw = mw.ok_or(VerbsError::Invalid)?;
    let access = Access::from_bits(info.mw_access_flags & !OPTIONAL)
        .filter(|&access| RIGHTS.contains(access))
        .ok_or(VerbsError::Invalid)?;
    let one = mw_type == MwType::Type1;
    if mw.public.context != context || mr.is_some_and(|mr| mr.mr.context != context) {
        return Err(VerbsError::Invalid);
    }
    if mw.public.mw_type != mw_type as u32
        || one && access.contains(Access::ZERO_BASED)
        || !one && (mr.is_none() || info.length == 0)
        || mr.is_none() && (info.addr != 0 || info.length != 0)
    {
        return Err(VerbsError::Invalid);
    }
    if mr.is_some_and(|mr| mr.mr_type != ORDINARY) {
        return Err(VerbsError::NotSupported);
    }
    if one && mr.is_some_and(|mr| mr.access as u32 & Access::ZERO_BASED.bits() != 0) {
        return Err(VerbsError::Invalid);
    }
    Ok(Operation::BindMw(MwBind {
        window: mw.id,
        rkey,
        lkey: mr.map_or(0, |mr| mr.mr.lkey),
        addr: info.addr,
        len: info.length,
        access,
    }))
}

/// Posts the bind of a window of type 1, which has its new key at once: the program takes the old one back if the bind
/// fails.
pub(super) unsafe extern "C" fn bind_mw(
    public: *mut ibv_qp,
    mw: *mut ibv_mw,
    bind_mw: *mut ibv_mw_bind,
) -> c_int {
    verb(|| {
        // SAFETY: libibverbs passes a QP and a window of this provider.
        let (qp, context, request, old) =
            unsafe { (Qp::of(public), (*public).context, &*bind_mw, (*mw).rkey) };
        let rkey = old & !0xff | old.wrapping_add(1) & 0xff;
        let wr = SendWr {
            wr_id: request.wr_id,
            // SAFETY: as above; the program passes a region or none.
            operation: unsafe { bind(context, mw, MwType::Type1, rkey, &request.bind_info)? },
            flags: SendFlags::from_bits_truncate(request.send_flags)
                & (SendFlags::FENCE | SendFlags::SIGNALED),
            sges: &[],
            ud: None,
            srqn: 0,
        };
        let mut session = qp.context.engine.lock()?;
        let now = session.now();
        session.post_send(now, qp.qpn, &wr)?;
        // SAFETY: as above.
        unsafe { (*mw).rkey = rkey };
        Ok(())
    })
}
