//! Shared receive queues.

use std::ffi::c_int;
use std::sync::Arc;

use ferroce_engine::device::{Device, PdId, SrqId};
use ferroce_engine::verbs::VerbsError;

use super::context::Context;
use super::cq::Cq;
use super::events::{Acknowledged, Object, Public};
use super::pd::Pd;
use super::place::{self, Place, Resource};
use super::uses::Use;
use super::xrcd::Xrcd;
use super::{make, next_handle, verb};
use crate::abi::verbs::{
    ibv_context, ibv_pd, ibv_srq, ibv_srq_attr, ibv_srq_init_attr, ibv_srq_init_attr_ex,
};

/// `IBV_SRQ_INIT_ATTR_TYPE`.
const WITH_TYPE: u32 = 1;
/// `IBV_SRQ_INIT_ATTR_PD`.
const WITH_PD: u32 = 1 << 1;
/// `IBV_SRQ_INIT_ATTR_XRCD` and `IBV_SRQ_INIT_ATTR_CQ`.
const WITH_XRC: u32 = 1 << 2 | 1 << 3;
/// `IBV_SRQT_BASIC`.
const BASIC: u32 = 0;
/// `IBV_SRQT_XRC`.
const XRC: u32 = 1;
/// `IBV_SRQ_MAX_WR`.
const MAX_WR: u32 = 1;
/// `IBV_SRQ_LIMIT`.
const LIMIT: u32 = 1 << 1;

/// A shared receive queue; begins as `struct ibv_srq`.
#[repr(C)]
pub struct Srq {
    public: Public<ibv_srq>,
    pub(super) context: Arc<Context>,
    pub(super) id: SrqId,
    _domain: Use,
}

impl Srq {
    /// The SRQ behind a public one.
    ///
    /// # Safety
    /// `srq` must be one of this provider that lives as long as the result is used.
    pub unsafe fn of<'a>(srq: *mut ibv_srq) -> &'a Srq {
        // SAFETY: as the caller says; the public part comes first.
        unsafe { &*srq.cast::<Srq>() }
    }

    /// Its name in the engine; `None` if there is none. EINVAL if it is of another context.
    ///
    /// # Safety
    /// `srq` must be null or one of this provider.
    pub unsafe fn id(srq: *mut ibv_srq, context: &Arc<Context>) -> Result<Option<SrqId>, VerbsError> {
        // SAFETY: as the caller says; the public part comes first.
        match unsafe { srq.cast::<Srq>().as_ref() } {
            Some(srq) if !Arc::ptr_eq(&srq.context, context) => Err(VerbsError::Invalid),
            srq => Ok(srq.map(|srq| srq.id)),
        }
    }
}

/// Makes an SRQ by `make`; stores the sizes granted in `attr`.
///
/// # Safety
/// `public_pd` must be of this provider.
unsafe fn create(
    public_pd: *mut ibv_pd,
    srq_context: *mut std::ffi::c_void,
    attr: &mut ibv_srq_attr,
    make: impl FnOnce(&mut Device, PdId, &ibv_srq_attr) -> Result<SrqId, VerbsError>,
) -> Result<*mut ibv_srq, VerbsError> {
    // SAFETY: as the caller says.
    let (pd, public_context) = unsafe { (Pd::of(public_pd), (*public_pd).context) };
    let context = pd.context.clone();
    let place = Place::<Srq>::find(Some(pd), Resource::Srq)?;
    let (id, granted) = {
        let mut session = context.engine.lock()?;
        let id = make(&mut session, pd.id, attr)?;
        (id, session.query_srq(id)?)
    };
    (attr.max_wr, attr.max_sge) = (granted.max_wr, granted.max_sge);
    context.objects.insert(Object::Srq(id.0), place.address());
    let srq = place.put(Srq {
        // SAFETY: zeros are null pointers, numbers, and an initialised mutex and condition variable.
        public: unsafe { Public::zeroed() },
        context,
        id,
        _domain: pd.enter(),
    });
    // SAFETY: nobody else has it yet.
    unsafe {
        let public = (*srq).public.get();
        (*public).context = public_context;
        (*public).srq_context = srq_context;
        (*public).pd = public_pd;
        (*public).handle = next_handle();
    }
    Ok(srq.cast())
}

/// Makes an SRQ that QPs are made with. Its limit is not armed yet.
fn basic(device: &mut Device, pd: PdId, attr: &ibv_srq_attr) -> Result<SrqId, VerbsError> {
    device.create_srq(pd, attr.max_wr, attr.max_sge, 0)
}

pub(super) unsafe extern "C" fn create_srq(pd: *mut ibv_pd, init: *mut ibv_srq_init_attr) -> *mut ibv_srq {
    make(|| {
        // SAFETY: the program passes attributes.
        let init = unsafe { &mut *init };
        // SAFETY: libibverbs passes a PD of this provider.
        unsafe { create(pd, init.srq_context, &mut init.attr, basic) }
    })
}

pub(super) unsafe extern "C" fn create_srq_ex(
    _: *mut ibv_context,
    init: *mut ibv_srq_init_attr_ex,
) -> *mut ibv_srq {
    make(|| {
        // SAFETY: the program passes attributes.
        let init = unsafe { &mut *init };
        let srq_type = match init.comp_mask & WITH_TYPE {
            0 => BASIC,
            _ => init.srq_type,
        };
        if init.comp_mask & !(WITH_TYPE | WITH_PD | WITH_XRC) != 0 || !matches!(srq_type, BASIC | XRC) {
            return Err(VerbsError::NotSupported);
        }
        let lacks = |bits| init.comp_mask & bits != bits;
        if lacks(WITH_PD) || init.pd.is_null() || srq_type == XRC && lacks(WITH_XRC) {
            return Err(VerbsError::Invalid);
        }
        if srq_type == BASIC {
            // SAFETY: the program passes a PD of this provider.
            return unsafe { create(init.pd, init.srq_context, &mut init.attr, basic) };
        }
        // SAFETY: the program passes a PD, a domain and a CQ of this provider.
        let (xrcd, cq) = unsafe {
            let context = &Pd::of(init.pd).context;
            (Xrcd::id(init.xrcd, context)?, Cq::queue(init.cq, context)?)
        };
        let xrc = |device: &mut Device, pd, attr: &ibv_srq_attr| {
            device.create_xrc_srq(pd, xrcd, &cq, attr.max_wr, attr.max_sge)
        };
        // SAFETY: the program passes a PD of this provider.
        unsafe { create(init.pd, init.srq_context, &mut init.attr, xrc) }
    })
}

pub(super) unsafe extern "C" fn modify_srq(
    public: *mut ibv_srq,
    attr: *mut ibv_srq_attr,
    mask: c_int,
) -> c_int {
    verb(|| {
        // SAFETY: libibverbs passes an SRQ of this provider, and attributes.
        let (srq, attr) = unsafe { (Srq::of(public), &*attr) };
        let mask = mask as u32;
        if mask & !(MAX_WR | LIMIT) != 0 {
            return Err(VerbsError::Invalid);
        }
        let given = |bit, value| (mask & bit != 0).then_some(value);
        let mut session = srq.context.engine.lock()?;
        session.modify_srq(srq.id, given(MAX_WR, attr.max_wr), given(LIMIT, attr.srq_limit))
    })
}

pub(super) unsafe extern "C" fn query_srq(public: *mut ibv_srq, attr: *mut ibv_srq_attr) -> c_int {
    verb(|| {
        // SAFETY: libibverbs passes an SRQ of this provider.
        let srq = unsafe { Srq::of(public) };
        let now = srq.context.engine.lock()?.query_srq(srq.id)?;
        // SAFETY: the program passes room for it.
        unsafe {
            attr.write(ibv_srq_attr {
                max_wr: now.max_wr,
                max_sge: now.max_sge,
                srq_limit: now.limit,
            });
        }
        Ok(())
    })
}

/// Stores the number by which XRC peers name an SRQ. Others have one too, which nobody can use.
pub(super) unsafe extern "C" fn get_srq_num(public: *mut ibv_srq, number: *mut u32) -> c_int {
    verb(|| {
        // SAFETY: the program passes an SRQ of this provider, and room for the number.
        unsafe { number.write(Srq::of(public).id.0) };
        Ok(())
    })
}

pub(super) unsafe extern "C" fn destroy_srq(public: *mut ibv_srq) -> c_int {
    verb(|| {
        // SAFETY: libibverbs passes an SRQ of this provider.
        let srq = unsafe { Srq::of(public) };
        srq.context.engine.lock()?.destroy_srq(srq.id)?;
        // SAFETY: the SRQ lives, and it is of this SRQ.
        unsafe {
            srq.context
                .forget(Object::Srq(srq.id.0), public as u64, Acknowledged::of_srq(public))
        };
        // SAFETY: `create` made it, and nobody uses it any more.
        unsafe { place::remove(public.cast::<Srq>()) };
        Ok(())
    })
}
