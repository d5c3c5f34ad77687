//! Device memory: allocated here, reached by copy functions and through regions.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicU32, Ordering};

use ferroce_engine::memory::device::Taken;
use ferroce_engine::verbs::VerbsError;

use super::context::Context;
use super::uses::Uses;
use super::{make, next_handle, verb};
use crate::abi::verbs::{ibv_alloc_dm_attr, ibv_context, ibv_dm};

/// `IBV_DM_MASK_HANDLE`.
const WITH_HANDLE: u32 = 1;
/// Bytes that a copy moves at a time, and that its place and length are multiples of.
const WORD: usize = size_of::<u32>();
/// The least alignment, as an exponent of 2: that of the pieces of memory that devices give out.
const LOG_ALIGN: u32 = 6;
/// The largest alignment, as an exponent of 2: a page.
const MAX_LOG_ALIGN: u32 = 12;

/// Device memory; begins as `struct ibv_dm`.
#[repr(C)]
pub struct Dm {
    public: ibv_dm,
    /// The handle again, where `struct verbs_dm` has it.
    handle: u32,
    memory: Memory,
    /// Regions of it.
    pub(super) uses: Uses,
}

/// Memory that begins as zeros.
struct Memory {
    at: *mut u8,
    layout: Layout,
    len: usize,
    _taken: Taken,
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: it was allocated with this layout.
        unsafe { dealloc(self.at, self.layout) };
    }
}

impl Dm {
    /// The device memory behind a public one.
    ///
    /// # Safety
    /// `dm` must be one of this provider that lives as long as the result is used.
    pub unsafe fn of<'a>(dm: *mut ibv_dm) -> &'a Dm {
        // SAFETY: as the caller says; the public part comes first.
        unsafe { &*dm.cast::<Dm>() }
    }

    /// The address in the process of `length` bytes at `offset`; `None` if they are not all in it.
    pub(super) fn part(&self, offset: u64, length: usize) -> Option<*mut u8> {
        let offset = usize::try_from(offset).ok()?;
        let end = offset.checked_add(length)?;
        (end <= self.memory.len).then(|| self.memory.at.wrapping_add(offset))
    }

    /// The words that a copy reads or writes. EFAULT beyond the end, EINVAL if they are no whole words.
    fn words(&self, offset: u64, length: usize) -> Result<&[AtomicU32], VerbsError> {
        let at = self.part(offset, length).ok_or(VerbsError::Fault)?;
        if !offset.is_multiple_of(WORD as u64) || !length.is_multiple_of(WORD) {
            return Err(VerbsError::Invalid);
        }
        // SAFETY: the words lie in the memory, which is aligned, and is written by atomics and by the engine only.
        Ok(unsafe { std::slice::from_raw_parts(at.cast::<AtomicU32>(), length / WORD) })
    }
}

/// Allocates device memory. EINVAL: no bytes or more than there can be; ENOMEM: more than there are left.
pub(super) unsafe extern "C" fn alloc_dm(
    public: *mut ibv_context,
    attr: *mut ibv_alloc_dm_attr,
) -> *mut ibv_dm {
    make(|| {
        // SAFETY: libibverbs passes an open context of this provider, the program attributes.
        let (context, attr) = unsafe { (Context::of(public), &*attr) };
        let most = context.engine.limits().max_dm_size;
        if attr.comp_mask != 0
            || attr.length == 0
            || attr.length as u64 > most
            || attr.log_align_req > MAX_LOG_ALIGN
        {
            return Err(VerbsError::Invalid);
        }
        let align = 1 << attr.log_align_req.max(LOG_ALIGN);
        let layout = Layout::from_size_align(attr.length, align)
            .map_err(|_| VerbsError::Invalid)?
            .pad_to_align();
        let taken = context.engine.device_memory().take(layout.size() as u64)?;
        // SAFETY: the layout is not of zero bytes.
        let at = unsafe { alloc_zeroed(layout) };
        if at.is_null() {
            return Err(VerbsError::NoMemory);
        }
        let handle = next_handle();
        let dm = Dm {
            public: ibv_dm {
                context: public,
                memcpy_to_dm: Some(memcpy_to_dm),
                memcpy_from_dm: Some(memcpy_from_dm),
                comp_mask: WITH_HANDLE,
                handle,
            },
            handle,
            memory: Memory {
                at,
                layout,
                len: attr.length,
                _taken: taken,
            },
            uses: Uses::default(),
        };
        Ok(Box::into_raw(Box::new(dm)).cast())
    })
}

/// EBUSY while a region has it.
pub(super) unsafe extern "C" fn free_dm(public: *mut ibv_dm) -> c_int {
    verb(|| {
        // SAFETY: the program passes device memory of this provider.
        unsafe { Dm::of(public) }.uses.none()?;
        // SAFETY: `alloc_dm` made it, and no region has it any more.
        drop(unsafe { Box::from_raw(public.cast::<Dm>()) });
        Ok(())
    })
}

unsafe extern "C" fn memcpy_to_dm(
    public: *mut ibv_dm,
    offset: u64,
    from: *const c_void,
    length: usize,
) -> c_int {
    verb(|| {
        // SAFETY: the program passes device memory of this provider.
        let words = unsafe { Dm::of(public) }.words(offset, length)?;
        for (at, word) in words.iter().enumerate() {
            // SAFETY: the program passes `length` readable bytes.
            let value = unsafe { from.cast::<u32>().add(at).read_unaligned() };
            word.store(value, Ordering::Relaxed);
        }
        Ok(())
    })
}

unsafe extern "C" fn memcpy_from_dm(
    into: *mut c_void,
    public: *mut ibv_dm,
    offset: u64,
    length: usize,
) -> c_int {
    verb(|| {
        // SAFETY: the program passes device memory of this provider.
        let words = unsafe { Dm::of(public) }.words(offset, length)?;
        for (at, word) in words.iter().enumerate() {
            // SAFETY: the program passes `length` writable bytes.
            unsafe {
                into.cast::<u32>()
                    .add(at)
                    .write_unaligned(word.load(Ordering::Relaxed))
            };
        }
        Ok(())
    })
}
