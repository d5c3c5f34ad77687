//! Structures between libibverbs and its providers that have not changed from rdma-core 39 to 65.
//!
//! Names are those of rdma-core's `driver.h`. What has changed is in [`super::version`].

#![allow(non_camel_case_types)]

use std::ffi::{c_char, c_int, c_void};

use super::verbs::{ibv_device, ibv_mr};

/// `struct verbs_sysfs_dev`, as far as the provider reads it.
#[repr(C)]
pub struct verbs_sysfs_dev {
    /// Links of libibverbs' list.
    pub entry: [*mut c_void; 2],
    /// The provider's to use.
    pub provider_data: *mut c_void,
    /// Entry of the match table that fits.
    pub matched: *const c_void,
    /// Which of the attributes were read.
    pub flags: u32,
    /// `uverbsN`, NUL terminated.
    pub sysfs_name: [c_char; 64],
    /// Device number of the character device.
    pub sysfs_cdev: u64,
    /// Name of the RDMA device, NUL terminated.
    pub ibdev_name: [c_char; 64],
}

/// `struct verbs_device_ops`: what a provider registers.
#[repr(C)]
pub struct verbs_device_ops {
    /// Name of the provider.
    pub name: *const c_char,
    /// Lowest `uverbsN/abi_version` that fits.
    pub match_min_abi_version: u32,
    /// Highest `uverbsN/abi_version` that fits.
    pub match_max_abi_version: u32,
    /// Table of PCI ids, names and driver ids; may be null.
    pub match_table: *const c_void,
    /// For static linking; null.
    pub static_providers: *const c_void,
    /// Whether the device is this provider's.
    pub match_device: Option<unsafe extern "C" fn(*mut verbs_sysfs_dev) -> bool>,
    /// Opens the device; owns the command descriptor from here on, also on failure.
    pub alloc_context: Option<unsafe extern "C" fn(*mut ibv_device, c_int, *mut c_void) -> *mut c_void>,
    /// Opens the device of another process's descriptor.
    pub import_context: Option<unsafe extern "C" fn(*mut ibv_device, c_int) -> *mut c_void>,
    /// Makes the [`verbs_device`] of a matched device.
    pub alloc_device: Option<unsafe extern "C" fn(*mut verbs_sysfs_dev) -> *mut verbs_device>,
    /// Frees what `alloc_device` made.
    pub uninit_device: Option<unsafe extern "C" fn(*mut verbs_device)>,
}

/// `struct verbs_device`: a device as libibverbs lists it.
#[repr(C)]
pub struct verbs_device {
    /// The public part.
    pub device: ibv_device,
    /// The ops that the provider registered; libibverbs sets it.
    pub ops: *const verbs_device_ops,
    /// References; libibverbs counts.
    pub refcount: c_int,
    /// Links of libibverbs' list.
    pub entry: [*mut c_void; 2],
    /// What was found in sysfs; libibverbs sets it.
    pub sysfs: *mut verbs_sysfs_dev,
    /// Features of the kernel.
    pub core_support: u64,
}

/// `struct verbs_mr`: libibverbs reads `mr_type` and `access` at deregistration.
#[repr(C)]
pub struct verbs_mr {
    /// The public part.
    pub mr: ibv_mr,
    /// `enum ibv_mr_type`; 0 is an ordinary region.
    pub mr_type: u32,
    /// The access flags that it was registered with.
    pub access: c_int,
}

/// Bit of `verbs_qp.comp_mask`: the QP has the functions of `struct ibv_qp_ex`.
pub const VERBS_QP_EX: u32 = 1 << 1;

/// `struct ib_uverbs_comp_event_desc`: what a read of a completion channel gives, the address of the `ibv_cq`.
pub type CompletionRecord = [u64; 1];

/// `struct ib_uverbs_async_event_desc`: what a read of `async_fd` gives: the element, then the event type (low half).
pub type AsyncRecord = [u64; 2];
