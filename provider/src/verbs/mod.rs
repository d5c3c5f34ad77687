//! The verbs: one file per object. Each op is an `extern "C"` function that turns the C structures into the engine's
//! vocabulary, and errors into what the op's callers expect.

pub mod advise;
pub mod ah;
pub mod context;
pub mod cq;
pub mod cq_ex;
pub mod dm;
pub mod dmabuf;
pub mod driver;
pub mod event_pipe;
pub mod events;
pub mod mr;
pub mod mw;
pub mod ops;
pub mod pd;
pub mod place;
pub mod post;
pub mod qp;
pub mod qp_attr;
pub mod qp_ex;
pub mod query;
pub mod srq;
pub mod td;
pub mod uses;
pub mod xrcd;

use std::ffi::c_int;
use std::ptr;
use std::sync::atomic::{AtomicU32, Ordering};

use ferroce_engine::verbs::VerbsError;

use crate::guard::guard;
use crate::hooks::set_errno;

/// Runs an op that gives 0, or an errno (also in `errno`).
pub(crate) fn verb(f: impl FnOnce() -> Result<(), VerbsError>) -> c_int {
    guard(libc::EIO, || match f() {
        Ok(()) => 0,
        Err(error) => {
            set_errno(error.errno());
            error.errno()
        }
    })
}

/// Runs an op that makes an object, or gives null and sets `errno`.
pub(crate) fn make<T>(f: impl FnOnce() -> Result<*mut T, VerbsError>) -> *mut T {
    guard(ptr::null_mut(), || match f() {
        Ok(object) => object,
        Err(error) => {
            set_errno(error.errno());
            ptr::null_mut()
        }
    })
}

/// A number for the `handle` of a new object; the kernel's would be unique too.
pub(crate) fn next_handle() -> u32 {
    static NEXT: AtomicU32 = AtomicU32::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}
