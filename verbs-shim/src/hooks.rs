//! The hooked functions: every one of the C library that looks a path up for reading.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::mem::transmute;
use std::ptr::null_mut;

use libc::{DIR, FILE, mode_t, size_t, ssize_t};

use crate::real::{Failure, Real, with_path};
use crate::{exec, listing, path};

/// Runs when the library is loaded, before the program.
#[used]
#[unsafe(link_section = ".init_array")]
static AT_LOAD: extern "C" fn() = {
    extern "C" fn at_load() {
        path::load_tree();
        exec::load_own();
    }
    at_load
};

/// Defines functions of the C library that differ from the real one only in the path they take.
/// `[...]` is the type of the real function where it is variadic.
macro_rules! hooks {
    ($(fn $name:ident($($before:ident: $before_type:ty,)* @path $(, $after:ident: $after_type:ty)*) -> $result:ty $(, [$variadic:ty])?;)*) => {
        $(
            /// The C library's function of this name, with the path redirected.
            ///
            /// # Safety
            /// As for the real function: every pointer must be what it wants.
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name($($before: $before_type,)* path: *const c_char $(, $after: $after_type)*) -> $result {
                static REAL: Real = Real::new(
                    match std::ffi::CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                        Ok(name) => name,
                        Err(_) => panic!("no zero inside"),
                    },
                );
                type Function = hooks!(@type [$($variadic)?] ($($before_type,)* *const c_char $(, $after_type)*) -> $result);
                let Some(address) = REAL.address() else { return <$result>::FAILURE };
                // SAFETY: the address is that of the C library's function of this name and type.
                let function: Function = unsafe { transmute(address) };
                // SAFETY: the caller passes what the real function wants, and so do we.
                unsafe { with_path(path, |path| function($($before,)* path $(, $after)*)) }
            }
        )*
    };
    (@type [] ($($type:ty),*) -> $result:ty) => { unsafe extern "C" fn($($type),*) -> $result };
    (@type [$variadic:ty] ($($type:ty),*) -> $result:ty) => { $variadic };
}

/// The `compar` and `filter` of `scandir` and the callback of `nftw`, which are only passed on.
type Callback = *mut c_void;
/// Any struct that is only passed on.
type Buffer = *mut c_void;

/// `open` and its like have a mode only with O_CREAT or O_TMPFILE. Without it the third argument is
/// whatever the register holds, which the real function then does not look at either.
type Open = unsafe extern "C" fn(*const c_char, c_int, ...) -> c_int;
type OpenAt = unsafe extern "C" fn(c_int, *const c_char, c_int, ...) -> c_int;

hooks! {
    fn open(@path, flags: c_int, mode: mode_t) -> c_int, [Open];
    fn open64(@path, flags: c_int, mode: mode_t) -> c_int, [Open];
    fn openat(directory: c_int, @path, flags: c_int, mode: mode_t) -> c_int, [OpenAt];
    fn openat64(directory: c_int, @path, flags: c_int, mode: mode_t) -> c_int, [OpenAt];
    fn __open_2(@path, flags: c_int) -> c_int;
    fn __open64_2(@path, flags: c_int) -> c_int;
    fn __openat_2(directory: c_int, @path, flags: c_int) -> c_int;
    fn __openat64_2(directory: c_int, @path, flags: c_int) -> c_int;

    fn fopen(@path, mode: *const c_char) -> *mut FILE;
    fn fopen64(@path, mode: *const c_char) -> *mut FILE;
    fn freopen(@path, mode: *const c_char, stream: *mut FILE) -> *mut FILE;
    fn freopen64(@path, mode: *const c_char, stream: *mut FILE) -> *mut FILE;

    fn scandir(@path, list: Buffer, filter: Callback, compare: Callback) -> c_int;
    fn scandir64(@path, list: Buffer, filter: Callback, compare: Callback) -> c_int;
    fn scandirat(directory: c_int, @path, list: Buffer, filter: Callback, compare: Callback) -> c_int;
    fn scandirat64(directory: c_int, @path, list: Buffer, filter: Callback, compare: Callback) -> c_int;
    fn ftw(@path, function: Callback, descriptors: c_int) -> c_int;
    fn ftw64(@path, function: Callback, descriptors: c_int) -> c_int;
    fn nftw(@path, function: Callback, descriptors: c_int, flags: c_int) -> c_int;
    fn nftw64(@path, function: Callback, descriptors: c_int, flags: c_int) -> c_int;
    fn chdir(@path) -> c_int;

    fn stat(@path, buffer: Buffer) -> c_int;
    fn stat64(@path, buffer: Buffer) -> c_int;
    fn lstat(@path, buffer: Buffer) -> c_int;
    fn lstat64(@path, buffer: Buffer) -> c_int;
    fn fstatat(directory: c_int, @path, buffer: Buffer, flags: c_int) -> c_int;
    fn fstatat64(directory: c_int, @path, buffer: Buffer, flags: c_int) -> c_int;
    fn statx(directory: c_int, @path, flags: c_int, mask: c_uint, buffer: Buffer) -> c_int;
    fn __xstat(version: c_int, @path, buffer: Buffer) -> c_int;
    fn __xstat64(version: c_int, @path, buffer: Buffer) -> c_int;
    fn __lxstat(version: c_int, @path, buffer: Buffer) -> c_int;
    fn __lxstat64(version: c_int, @path, buffer: Buffer) -> c_int;
    fn __fxstatat(version: c_int, directory: c_int, @path, buffer: Buffer, flags: c_int) -> c_int;
    fn __fxstatat64(version: c_int, directory: c_int, @path, buffer: Buffer, flags: c_int) -> c_int;
    fn statfs(@path, buffer: Buffer) -> c_int;
    fn statfs64(@path, buffer: Buffer) -> c_int;
    fn statvfs(@path, buffer: Buffer) -> c_int;
    fn statvfs64(@path, buffer: Buffer) -> c_int;

    fn access(@path, mode: c_int) -> c_int;
    fn faccessat(directory: c_int, @path, mode: c_int, flags: c_int) -> c_int;
    fn euidaccess(@path, mode: c_int) -> c_int;
    fn eaccess(@path, mode: c_int) -> c_int;

    fn readlink(@path, buffer: *mut c_char, size: size_t) -> ssize_t;
    fn __readlink_chk(@path, buffer: *mut c_char, length: size_t, size: size_t) -> ssize_t;
    fn readlinkat(directory: c_int, @path, buffer: *mut c_char, size: size_t) -> ssize_t;
    fn __readlinkat_chk(directory: c_int, @path, buffer: *mut c_char, length: size_t, size: size_t) -> ssize_t;
    fn realpath(@path, resolved: *mut c_char) -> *mut c_char;
    fn __realpath_chk(@path, resolved: *mut c_char, size: size_t) -> *mut c_char;
    fn canonicalize_file_name(@path) -> *mut c_char;

    fn getxattr(@path, name: *const c_char, value: *mut c_void, size: size_t) -> ssize_t;
    fn lgetxattr(@path, name: *const c_char, value: *mut c_void, size: size_t) -> ssize_t;
    fn listxattr(@path, list: *mut c_char, size: size_t) -> ssize_t;
    fn llistxattr(@path, list: *mut c_char, size: size_t) -> ssize_t;
    fn inotify_add_watch(descriptor: c_int, @path, mask: u32) -> c_int;
}

/// `opendir` of the C library, with the path redirected. libibverbs lists the devices by it.
///
/// # Safety
/// As for the real function: the path must be zero-terminated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn opendir(path: *const c_char) -> *mut DIR {
    static REAL: Real = Real::new(c"opendir");
    let Some(address) = REAL.address() else {
        return null_mut();
    };
    // SAFETY: the address is that of the C library's function of this name and type.
    let function: unsafe extern "C" fn(*const c_char) -> *mut DIR = unsafe { transmute(address) };
    // SAFETY: the caller says that the path is zero-terminated.
    unsafe {
        listing::about_to_open(path);
        with_path(path, |path| function(path))
    }
}

/// `nl_connect` of libnl: refuses RDMA's netlink protocol while there is a tree.
///
/// libibverbs asks it before sysfs, and where the kernel has RDMA it would answer with the kernel's
/// own devices only. The tree shows those as well. Where the kernel has none, it refuses by itself.
///
/// # Safety
/// As for the real function: the socket must be one of libnl.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nl_connect(socket: *mut c_void, protocol: c_int) -> c_int {
    const NETLINK_RDMA: c_int = 20;
    const NLE_PROTO_MISMATCH: c_int = 26;
    static REAL: Real = Real::new(c"nl_connect");
    if protocol == NETLINK_RDMA && path::tree().is_some() {
        return -NLE_PROTO_MISMATCH;
    }
    // A libibverbs that was loaded by dlopen has its libnl outside the search order.
    let Some(address) = REAL.address().or_else(|| REAL.address_in(c"libnl-3.so.200")) else {
        return -NLE_PROTO_MISMATCH;
    };
    // SAFETY: the address is that of libnl's function of this name and type.
    let function: unsafe extern "C" fn(*mut c_void, c_int) -> c_int = unsafe { transmute(address) };
    // SAFETY: the caller passes what the real function wants.
    unsafe { function(socket, protocol) }
}
