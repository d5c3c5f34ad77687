//! Protection domains, and parent domains, which extend one by a thread domain and an allocator.

use std::ffi::c_int;
use std::sync::Arc;

use ferroce_engine::device::PdId;
use ferroce_engine::verbs::VerbsError;

use super::context::Context;
use super::place::Allocator;
use super::td::Td;
use super::uses::{Use, Uses};
use super::{make, next_handle, verb};
use crate::abi::verbs::{ibv_context, ibv_parent_domain_init_attr, ibv_pd};

/// `IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS`.
const WITH_ALLOCATORS: u32 = 1;
/// `IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT`.
const WITH_PD_CONTEXT: u32 = 1 << 1;
/// `IBV_PARENT_DOMAIN_INIT_ATTR_ALLOW_CC_UNPROTECTED_ALLOC` (rdma-core 65), a permission that is not needed.
const MAY_BE_UNPROTECTED: u32 = 1 << 2;

/// A protection domain; begins as `struct ibv_pd`.
#[repr(C)]
pub struct Pd {
    public: ibv_pd,
    /// The context it is of.
    pub context: Arc<Context>,
    /// Its name in the engine; a parent domain has that of the domain it extends.
    pub id: PdId,
    /// Objects made in it.
    uses: Uses,
    parent: Option<Parent>,
}

/// What a parent domain has beside a PD.
struct Parent {
    allocator: Option<Allocator>,
    /// Of the PD that it extends.
    _pd: Use,
    _td: Option<Use>,
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

    /// The PD behind a public one. EINVAL if there is none.
    ///
    /// # Safety
    /// `pd` must be null or one of this provider that lives as long as the result is used.
    pub unsafe fn named<'a>(pd: *mut ibv_pd) -> Result<&'a Pd, VerbsError> {
        // SAFETY: as the caller says; the public part comes first.
        unsafe { pd.cast::<Pd>().as_ref() }.ok_or(VerbsError::Invalid)
    }

    /// The PD behind a public one. EINVAL if there is none, or it is of another context.
    ///
    /// # Safety
    /// `pd` must be null or one of this provider that lives as long as the result is used.
    pub unsafe fn in_context<'a>(pd: *mut ibv_pd, context: &Arc<Context>) -> Result<&'a Pd, VerbsError> {
        // SAFETY: as the caller says.
        let pd = unsafe { Pd::named(pd)? };
        let own = Arc::ptr_eq(&pd.context, context);
        own.then_some(pd).ok_or(VerbsError::Invalid)
    }

    /// The parent domain behind a public PD. EINVAL if it is none.
    ///
    /// # Safety
    /// `pd` must be null or one of this provider that lives as long as the result is used.
    pub unsafe fn parent_domain<'a>(pd: *mut ibv_pd) -> Result<&'a Pd, VerbsError> {
        // SAFETY: as the caller says.
        let pd = unsafe { Pd::named(pd)? };
        pd.parent.as_ref().map(|_| pd).ok_or(VerbsError::Invalid)
    }

    /// The context as the program knows it.
    pub fn public_context(&self) -> *mut ibv_context {
        self.public.context
    }

    /// Begins the use by an object: the domain must not end before it.
    pub fn enter(&self) -> Use {
        self.uses.begin()
    }

    /// Where the memory of its objects comes from, if the program wants to say.
    pub(super) fn allocator(&self) -> Option<Allocator> {
        self.parent.as_ref()?.allocator
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
            uses: Uses::default(),
            parent: None,
        };
        Ok(Box::into_raw(Box::new(pd)).cast())
    })
}

/// Makes a parent domain, which may stand wherever the PD that it extends may.
pub(super) unsafe extern "C" fn alloc_parent_domain(
    context: *mut ibv_context,
    attr: *mut ibv_parent_domain_init_attr,
) -> *mut ibv_pd {
    make(|| {
        // SAFETY: the program passes attributes.
        let attr = unsafe { &*attr };
        let known = WITH_ALLOCATORS | WITH_PD_CONTEXT | MAY_BE_UNPROTECTED;
        // SAFETY: the program passes a PD of this provider, and a thread domain or none.
        let (pd, td) = unsafe { (Pd::in_context(attr.pd, &Context::of(context))?, Td::of(attr.td)) };
        if attr.comp_mask & !known != 0 || td.is_some_and(|td| td.public.context != context) {
            return Err(VerbsError::Invalid);
        }
        let given = |bit| attr.comp_mask & bit != 0;
        let functions = attr.alloc.zip(attr.free).filter(|_| given(WITH_ALLOCATORS));
        let mut domain = Box::new(Pd {
            public: ibv_pd {
                context: pd.public.context,
                handle: pd.public.handle,
            },
            context: pd.context.clone(),
            id: pd.id,
            uses: Uses::default(),
            parent: None,
        });
        domain.parent = Some(Parent {
            allocator: functions.map(|(alloc, free)| Allocator {
                alloc,
                free,
                domain: (&raw mut *domain).cast(),
                context: if given(WITH_PD_CONTEXT) {
                    attr.pd_context
                } else {
                    std::ptr::null_mut()
                },
            }),
            _pd: pd.enter(),
            _td: td.map(|td| td.uses.begin()),
        });
        Ok(Box::into_raw(domain).cast())
    })
}

/// Ends a PD or a parent domain. EBUSY while objects use it.
pub(super) unsafe extern "C" fn dealloc_pd(public: *mut ibv_pd) -> c_int {
    verb(|| {
        // SAFETY: libibverbs passes a PD of this provider.
        let pd = unsafe { Pd::of(public) };
        pd.uses.none()?;
        if pd.parent.is_none() {
            pd.context.engine.lock()?.dealloc_pd(pd.id)?;
        }
        // SAFETY: `alloc_pd` or `alloc_parent_domain` made it, and no object uses it any more.
        drop(unsafe { Box::from_raw(public.cast::<Pd>()) });
        Ok(())
    })
}
