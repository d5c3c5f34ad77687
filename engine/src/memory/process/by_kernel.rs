//! Access through the kernel, for architectures without guarded routines: slower, and as safe.

use std::sync::atomic::{AtomicU64, Ordering};

use libc::iovec;

use super::page_size;
use crate::memory::AtomicOp;

/// Copies `len` bytes from `src` to `dst` in order; gives how many are left when memory can't be reached.
///
/// The last eight bytes are a piece of their own, which the kernel copies last.
///
/// # Safety
/// Where memory is mapped, the usual rules of raw reads and writes hold; memory that is not mapped is no violation.
pub(super) unsafe fn copy(dst: *mut u8, src: *const u8, len: usize) -> usize {
    let mut done = 0;
    while done < len {
        let left = len - done;
        let head = left.saturating_sub(8);
        let piece = |at: *mut u8, len| iovec {
            iov_base: at.wrapping_add(done).cast(),
            iov_len: len,
        };
        let pieces = |at: *mut u8| [piece(at, head), piece(at.wrapping_add(head), left - head)];
        let (to, from) = (pieces(dst), pieces(src.cast_mut()));
        // SAFETY: the kernel checks both sides; which of them is "remote" makes no difference for our own process.
        let copied = unsafe { libc::process_vm_readv(libc::getpid(), to.as_ptr(), 2, from.as_ptr(), 2, 0) };
        match usize::try_from(copied) {
            Ok(copied) if copied > 0 => done += copied,
            _ => break,
        }
    }
    len - done
}

/// Runs `op` on `word`; gives the old value, or `None` if it can't be read or written.
///
/// Checked before, not during the access: memory that another thread unmaps between the two still ends the process.
///
/// # Safety
/// As for [`copy`]. `word` is aligned.
pub(super) unsafe fn atomic(word: *mut u64, op: AtomicOp) -> Option<u64> {
    let page = page_size() as usize;
    let start = (word as usize & !(page - 1)) as *mut libc::c_void;
    // SAFETY: changes no content; the kernel checks the range.
    if unsafe { libc::madvise(start, page, libc::MADV_POPULATE_WRITE) } != 0 {
        return None;
    }
    // SAFETY: it is mapped and writable, and aligned as the caller promises.
    let word = unsafe { AtomicU64::from_ptr(word) };
    Some(match op {
        AtomicOp::CompareSwap { compare, swap } => word
            .compare_exchange(compare, swap, Ordering::SeqCst, Ordering::SeqCst)
            .unwrap_or_else(|old| old),
        AtomicOp::FetchAdd { add } => word.fetch_add(add, Ordering::SeqCst),
        AtomicOp::Store { value } => word.swap(value, Ordering::SeqCst),
    })
}
