//! The driver as libibverbs knows it: which devices are ours, and how they are opened.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr;

use ferroce_engine::control;

use super::context::Context;
use crate::abi::library::Library;
use crate::abi::private::{verbs_device, verbs_device_ops, verbs_sysfs_dev};
use crate::abi::verbs::ibv_device;
use crate::guard::guard;

/// What a libibverbs has been told of this provider; found again through `verbs_device.ops`.
#[repr(C)]
pub struct Driver {
    ops: verbs_device_ops,
    /// The libibverbs it is registered with.
    pub library: Library,
}

impl Driver {
    /// Registers the provider with a libibverbs, for good.
    pub fn register(library: Library) {
        let driver: &'static Driver = Box::leak(Box::new(Driver {
            ops: verbs_device_ops {
                name: c"ferroce".as_ptr(),
                match_min_abi_version: 1,
                match_max_abi_version: 1,
                match_table: ptr::null(),
                static_providers: ptr::null(),
                match_device: Some(match_device),
                alloc_context: Some(alloc_context),
                import_context: None,
                alloc_device: Some(alloc_device),
                uninit_device: Some(uninit_device),
            },
            library,
        }));
        // SAFETY: the ops live for good.
        unsafe { (driver.library.register_driver)(&raw const driver.ops) };
    }

    /// The driver that a device was matched by.
    ///
    /// # Safety
    /// `device` must be one of this provider.
    unsafe fn of(device: *mut ibv_device) -> &'static Driver {
        // SAFETY: the public part is the first of `verbs_device`, and the ops are the first of `Driver`.
        unsafe { &*(*device.cast::<verbs_device>()).ops.cast::<Driver>() }
    }
}

/// The string in a NUL terminated field.
fn text(field: &[c_char]) -> String {
    let bytes: Vec<u8> = field
        .iter()
        .map(|c| c.cast_unsigned())
        .take_while(|c| *c != 0)
        .collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Whether a device name is one of Ferroce's: it is in the tree of `ferroced`, or begins as the default names do.
fn is_ours(name: &str) -> bool {
    name.starts_with("ferroce_") || !name.is_empty() && control::is_in_tree(name)
}

unsafe extern "C" fn match_device(device: *mut verbs_sysfs_dev) -> bool {
    // SAFETY: libibverbs passes a device it has found.
    guard(false, || is_ours(&text(unsafe { &(*device).ibdev_name })))
}

unsafe extern "C" fn alloc_device(_: *mut verbs_sysfs_dev) -> *mut verbs_device {
    guard(ptr::null_mut(), || {
        // SAFETY: zeros are what libibverbs expects in what it does not set itself.
        Box::into_raw(unsafe { Box::new(std::mem::zeroed::<verbs_device>()) })
    })
}

unsafe extern "C" fn uninit_device(device: *mut verbs_device) {
    // SAFETY: `alloc_device` made it.
    drop(unsafe { Box::from_raw(device) });
}

unsafe extern "C" fn alloc_context(device: *mut ibv_device, cmd_fd: c_int, _: *mut c_void) -> *mut c_void {
    guard(ptr::null_mut(), || {
        // SAFETY: libibverbs passes a device of this provider, whose name is NUL terminated.
        let (driver, name) = unsafe {
            (
                Driver::of(device),
                CStr::from_ptr((&raw const (*device).name).cast()),
            )
        };
        // SAFETY: as this function was called.
        unsafe { Context::open(&driver.library, device, &name.to_string_lossy(), cmd_fd) }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_devices() {
        assert!(is_ours("ferroce_lo"));
        assert!(!is_ours("mlx5_0"));
        assert!(!is_ours("rxe_ferroce_lo"));
        assert!(!is_ours(""));
    }

    #[test]
    fn text_ends_at_the_first_nul() {
        assert_eq!(text(&[b'a', b'b', 0, b'c'].map(u8::cast_signed)), "ab");
        assert_eq!(text(&[b'a'].map(u8::cast_signed)), "a");
    }
}
