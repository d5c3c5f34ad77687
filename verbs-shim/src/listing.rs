//! Tells providers that somebody is about to list the devices.
//!
//! A process may have several libibverbs, as wheels and plug-ins bring their own. The provider is loaded by the first
//! that lists devices; of the others it learns this way.

use std::ffi::{CStr, c_char, c_void};
use std::mem::transmute;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};

use crate::path;
use crate::real::{errno, set_errno};

/// What a provider wants called.
type Listener = extern "C" fn();

/// One place for each provider file that a process may load: there are fewer private interfaces than this.
static LISTENERS: [AtomicPtr<c_void>; 16] = [const { AtomicPtr::new(null_mut()) }; 16];

/// Has `listener` called before each listing of the devices, from the thread that lists them.
#[unsafe(no_mangle)]
pub extern "C" fn ferroce_shim_before_listing(listener: Listener) {
    let listener = listener as *mut c_void;
    for place in &LISTENERS {
        if place
            .compare_exchange(null_mut(), listener, Ordering::AcqRel, Ordering::Acquire)
            .is_ok()
        {
            return;
        }
    }
}

/// Calls the listeners if this is the directory by which libibverbs lists the devices.
///
/// # Safety
/// The path is null or zero-terminated.
pub unsafe fn about_to_open(path: *const c_char) {
    // SAFETY: the caller says that it is zero-terminated.
    if path.is_null() || !path::is_device_list(unsafe { CStr::from_ptr(path) }.to_bytes()) {
        return;
    }
    let errno = errno();
    for listener in &LISTENERS {
        let listener = listener.load(Ordering::Acquire);
        if listener.is_null() {
            break;
        }
        // SAFETY: only listeners are put there, and providers are never unloaded.
        let listener = unsafe { transmute::<*mut c_void, Listener>(listener) };
        listener();
    }
    set_errno(errno);
}
