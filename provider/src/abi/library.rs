//! The libibverbs loaded in this process: which release it is, and what the provider calls in it.
//!
//! The provider is linked to no symbol of libibverbs, since their names and versions differ by release.

use std::ffi::{CStr, CString, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use ferroce_engine::environment;

use super::private::{VERBS_QP_EX, verbs_device_ops};
use super::verbs::{ibv_device, ibv_qp, ibv_qp_ex};
use super::version::{Abi, NEWEST, OLDEST, Traits};
use crate::elf::Object;

/// Environment variable that gives the release of a libibverbs whose file name does not.
pub const RELEASE_VARIABLE: &str = "FERROCE_RDMA_CORE";

/// Why a libibverbs can't be served.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum LibraryError {
    /// A release that the tables do not describe.
    #[error(
        "{} is of rdma-core {release}, and this provider knows {OLDEST} to {NEWEST}: use another release of Ferroce or of libibverbs",
        path.display()
    )]
    UnknownRelease {
        /// The library.
        path: PathBuf,
        /// Its release.
        release: u32,
    },
    /// The file name has no release, and what it exports is not that of one that the tables describe.
    #[error(
        "{} tells its release neither by its name (libibverbs.so.1.A.B) nor by what it exports: set {RELEASE_VARIABLE}=B, its release of rdma-core",
        path.display()
    )]
    Unversioned {
        /// The library.
        path: PathBuf,
    },
    /// A symbol of that release is missing.
    #[error(
        "{} has no symbol {symbol}, so it is not the rdma-core {release} that its name tells: set {RELEASE_VARIABLE} to its release",
        path.display()
    )]
    MissingSymbol {
        /// The library.
        path: PathBuf,
        /// The release as its name tells.
        release: u32,
        /// The symbol.
        symbol: String,
    },
    /// The library is not loaded any more.
    #[error("{} can't be kept loaded: load it without RTLD_LOCAL tricks, or link to it", path.display())]
    Unloadable {
        /// The library.
        path: PathBuf,
    },
}

type RegisterDriver = unsafe extern "C" fn(*const verbs_device_ops);
type InitAndAllocContext =
    unsafe extern "C" fn(*mut ibv_device, c_int, usize, *mut c_void, u32) -> *mut c_void;
type SetOps = unsafe extern "C" fn(*mut c_void, *const *const c_void);
type UninitContext = unsafe extern "C" fn(*mut c_void);

/// A libibverbs of a known release. It stays loaded for good.
pub struct Library {
    /// Its private interface.
    pub abi: Abi,
    /// `verbs_register_driver_NN(ops)`; `ops` must live for good.
    pub register_driver: RegisterDriver,
    /// `_verbs_init_and_alloc_context(device, cmd_fd, size, offset, driver_id)`.
    pub init_and_alloc_context: InitAndAllocContext,
    /// `verbs_set_ops(context, ops)`.
    pub set_ops: SetOps,
    /// `verbs_uninit_context(context)`.
    pub uninit_context: UninitContext,
}

/// The number of the private interface between a libibverbs and its providers; `None` if the object is none.
///
/// The symbol versions tell, as the file may have any name: wheels, for one, rename it.
pub fn private_number(object: &Object) -> Option<u32> {
    newest(object, "IBVERBS_PRIVATE_")
}

/// The greatest number that follows `prefix` in the names of an object's symbol versions.
fn newest(object: &Object, prefix: &str) -> Option<u32> {
    let versions = object.versions();
    let numbers = versions
        .iter()
        .filter_map(|version| version.strip_prefix(prefix)?.parse().ok());
    numbers.max()
}

impl Library {
    /// Takes hold of a loaded libibverbs whose private interface has this number.
    pub fn open(object: &Object, private: u32) -> Result<Library, LibraryError> {
        let path = object.path.canonicalize().unwrap_or_else(|_| object.path.clone());
        let Ok(name) = CString::new(object.path.as_os_str().as_bytes()) else {
            return Err(LibraryError::Unloadable { path });
        };
        // SAFETY: the library is loaded already, so this runs no code of it; it only counts a reference.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD) };
        if handle.is_null() {
            return Err(LibraryError::Unloadable { path });
        }
        let stated = environment::variable(RELEASE_VARIABLE).and_then(|text| text.to_str()?.parse().ok());
        // What is stated is meant for one library; the process may have others.
        let stated =
            stated.filter(|release| Abi::of_release(*release).is_none_or(|abi| abi.private == private));
        let abi = match stated.or_else(|| release_of(&path)) {
            Some(release) => Abi::of_release(release).ok_or_else(|| LibraryError::UnknownRelease {
                path: path.clone(),
                release,
            })?,
            None => newest(object, "IBVERBS_1.")
                // SAFETY: the handle is valid, and that of a libibverbs.
                .zip(unsafe { qp_ex_size(handle) })
                .and_then(|(public, qp_ex)| {
                    Abi::with_traits(Traits {
                        private,
                        public,
                        qp_ex,
                    })
                })
                .ok_or_else(|| LibraryError::Unversioned { path: path.clone() })?,
        };
        let release = abi.release;
        let symbol = |symbol: &CStr| {
            // SAFETY: the handle is valid, and never closed.
            let address = unsafe { libc::dlsym(handle, symbol.as_ptr()) };
            if address.is_null() {
                let symbol = symbol.to_string_lossy().into_owned();
                return Err(LibraryError::MissingSymbol {
                    path: path.clone(),
                    release,
                    symbol,
                });
            }
            Ok(address)
        };
        let register = CString::new(format!("verbs_register_driver_{}", abi.private)).unwrap_or_default();
        let register = symbol(&register)?;
        let (init, set_ops, uninit) = (
            symbol(c"_verbs_init_and_alloc_context")?,
            symbol(c"verbs_set_ops")?,
            symbol(c"verbs_uninit_context")?,
        );
        // SAFETY: these functions have these types in every release of the table.
        unsafe {
            Ok(Library {
                abi,
                register_driver: std::mem::transmute::<*mut c_void, RegisterDriver>(register),
                init_and_alloc_context: std::mem::transmute::<*mut c_void, InitAndAllocContext>(init),
                set_ops: std::mem::transmute::<*mut c_void, SetOps>(set_ops),
                uninit_context: std::mem::transmute::<*mut c_void, UninitContext>(uninit),
            })
        }
    }
}

/// Size of a libibverbs's `struct ibv_qp_ex`, in bytes.
///
/// # Safety
/// The handle must be valid, and that of a libibverbs.
unsafe fn qp_ex_size(handle: *mut c_void) -> Option<usize> {
    type ToExtended = unsafe extern "C" fn(*mut ibv_qp) -> *mut ibv_qp_ex;
    // SAFETY: the handle is valid, and the name zero-terminated.
    let to_extended = unsafe { libc::dlsym(handle, c"ibv_qp_to_qp_ex".as_ptr()) };
    if to_extended.is_null() {
        return None;
    }
    // SAFETY: the function has this type in every release that has it.
    let to_extended = unsafe { std::mem::transmute::<*mut c_void, ToExtended>(to_extended) };
    // It looks at one bit of the mask that follows the `ibv_qp_ex` in a QP. So a QP that has this bit there, and
    // nothing else, tells where it looks.
    Abi::QP_EX.into_iter().find(|size| {
        let mut qp = [0u64; 64];
        let place = qp.as_mut_ptr().cast::<u8>();
        // SAFETY: the place lies within the array, and is aligned as all sizes are multiples of 8. The function only
        // reads, and no further than a mask may lie.
        unsafe {
            place.add(*size).cast::<u32>().write(VERBS_QP_EX);
            !to_extended(place.cast()).is_null()
        }
    })
}

/// The release in a file name: `44` of `libibverbs.so.1.14.44.0`.
fn release_of(path: &Path) -> Option<u32> {
    let name = path.file_name()?.to_str()?;
    let (_, numbers) = name.split_once(".so.")?;
    numbers.split('.').nth(2)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn release_in_the_file_name() {
        let release = |name| release_of(Path::new(name));
        assert_eq!(release("/lib/libibverbs.so.1.14.44.0"), Some(44));
        assert_eq!(release("libibverbs.so.1.15.62.0"), Some(62));
        assert_eq!(release("/x/libibverbs-4b1e2a.so.1.14.48.0"), Some(48));
        assert_eq!(release("libibverbs.so.1"), None);
        assert_eq!(release("libibverbs.so"), None);
        assert_eq!(release("libibverbs.so.1.14.x"), None);
    }

    #[test]
    fn errors_are_one_line_that_says_what_to_do() {
        let path = PathBuf::from("/lib/libibverbs.so.1.99.66.0");
        for error in [
            LibraryError::UnknownRelease {
                path: path.clone(),
                release: 66,
            },
            LibraryError::Unversioned { path: path.clone() },
            LibraryError::MissingSymbol {
                path,
                release: 65,
                symbol: "verbs_set_ops".into(),
            },
        ] {
            let text = error.to_string();
            assert!(!text.contains('\n') && text.contains(": "), "{text}");
        }
    }
}
