//! Thread domains: the program promises that one thread at a time uses what is made in them.
//!
//! Nothing is gained from the promise: the engine's lock is without contention then, and costs what it must.

use std::ffi::c_int;

use ferroce_engine::verbs::VerbsError;

use super::uses::Uses;
use super::{make, verb};
use crate::abi::verbs::{ibv_context, ibv_td, ibv_td_init_attr};

/// A thread domain; begins as `struct ibv_td`.
#[repr(C)]
pub struct Td {
    pub(super) public: ibv_td,
    /// Parent domains with it.
    pub(super) uses: Uses,
}

impl Td {
    /// The thread domain behind a public one; `None` if there is none.
    ///
    /// # Safety
    /// `td` must be null or one of this provider that lives as long as the result is used.
    pub unsafe fn of<'a>(td: *mut ibv_td) -> Option<&'a Td> {
        // SAFETY: as the caller says; the public part comes first.
        unsafe { td.cast::<Td>().as_ref() }
    }
}

pub(super) unsafe extern "C" fn alloc_td(
    context: *mut ibv_context,
    attr: *mut ibv_td_init_attr,
) -> *mut ibv_td {
    make(|| {
        // SAFETY: the program passes attributes.
        if unsafe { (*attr).comp_mask } != 0 {
            return Err(VerbsError::Invalid);
        }
        let td = Td {
            public: ibv_td { context },
            uses: Uses::default(),
        };
        Ok(Box::into_raw(Box::new(td)).cast())
    })
}

/// EBUSY while a parent domain has it.
pub(super) unsafe extern "C" fn dealloc_td(public: *mut ibv_td) -> c_int {
    verb(|| {
        // SAFETY: the program passes a thread domain of this provider.
        unsafe { Td::of(public) }
            .ok_or(VerbsError::Invalid)?
            .uses
            .none()?;
        // SAFETY: `alloc_td` made it, and no parent domain has it any more.
        drop(unsafe { Box::from_raw(public.cast::<Td>()) });
        Ok(())
    })
}
