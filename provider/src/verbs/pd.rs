//! Protection domains.

use std::ffi::c_int;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use ferroce_engine::device::PdId;
use ferroce_engine::verbs::VerbsError;

use super::context::Context;
use super::{make, next_handle, verb};
use crate::abi::verbs::{ibv_context, ibv_pd};

/// A protection domain; begins as `struct ibv_pd`.
#[repr(C)]
pub struct Pd {
    public: ibv_pd,
    /// The context it is of.
    pub context: Arc<Context>,
    /// Its name in the engine.
    pub id: PdId,
    /// Address handles of it, which the engine does not know.
    pub handles: AtomicU32,
}

impl Pd {
    /// The PD behind a public one.
    ///
    /// # Safety
    /// `pd` must be one of this provider that lives as long as the result is used.
    pub unsafe fn of<'a>(pd: *mut ibv_pd) -> &'a Pd {
        // SAFETY: as the caller says; the public part comes first.
        unsafe { &*pd.cast::<Pd>() }
    }

    /// Its name in the engine; EINVAL if there is none.
    ///
    /// # Safety
    /// `pd` must be null or one of this provider.
    pub unsafe fn id(pd: *mut ibv_pd) -> Result<PdId, VerbsError> {
        // SAFETY: as the caller says; the public part comes first.
        let pd = unsafe { pd.cast::<Pd>().as_ref() };
        pd.map(|pd| pd.id).ok_or(VerbsError::Invalid)
    }
}

pub(super) unsafe extern "C" fn alloc_pd(public: *mut ibv_context) -> *mut ibv_pd {
    make(|| {
        // SAFETY: libibverbs passes an open context of this provider.
        let context = unsafe { Context::of(public) };
        let id = context.engine.lock()?.alloc_pd()?;
        let pd = Pd {
            public: ibv_pd {
                context: public,
                handle: next_handle(),
            },
            context,
            id,
            handles: AtomicU32::new(0),
        };
        Ok(Box::into_raw(Box::new(pd)).cast())
    })
}

pub(super) unsafe extern "C" fn dealloc_pd(public: *mut ibv_pd) -> c_int {
    verb(|| {
        // SAFETY: libibverbs passes a PD of this provider.
        let pd = unsafe { Pd::of(public) };
        if pd.handles.load(Ordering::Relaxed) > 0 {
            return Err(VerbsError::Busy);
        }
        pd.context.engine.lock()?.dealloc_pd(pd.id)?;
        // SAFETY: `alloc_pd` made it, and no object uses it any more.
        drop(unsafe { Box::from_raw(public.cast::<Pd>()) });
        Ok(())
    })
}
