//! The libibverbs loaded in this process: which release it is, and what the provider calls in it.
//!
//! The provider is linked to no symbol of libibverbs, since their names and versions differ by release.

use std::ffi::{CStr, CString, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use ferroce_engine::environment;

use super::private::verbs_device_ops;
use super::verbs::ibv_device;
use super::version::{Abi, NEWEST, OLDEST};
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
    /// The file name has no release.
    #[error(
        "{} does not tell its release by its name (libibverbs.so.1.A.B): set {RELEASE_VARIABLE}=B, its release of rdma-core",
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

/// Whether a loaded object is a libibverbs, by its file name (`libibverbs.so.1`, also with a hash as in wheels).
pub fn is_libibverbs(object: &Object) -> bool {
    let name = object
        .path
        .file_name()
        .map(|name| name.as_bytes())
        .unwrap_or_default();
    name.starts_with(b"libibverbs") && name.windows(3).any(|w| w == b".so")
}

impl Library {
    /// Takes hold of a loaded libibverbs.
    pub fn open(object: &Object) -> Result<Library, LibraryError> {
        let path = object.path.canonicalize().unwrap_or_else(|_| object.path.clone());
        let stated = environment::variable(RELEASE_VARIABLE).and_then(|text| text.to_str()?.parse().ok());
        let Some(release) = stated.or_else(|| release_of(&path)) else {
            return Err(LibraryError::Unversioned { path });
        };
        let Some(abi) = Abi::of_release(release) else {
            return Err(LibraryError::UnknownRelease { path, release });
        };
        let Ok(name) = CString::new(object.path.as_os_str().as_bytes()) else {
            return Err(LibraryError::Unloadable { path });
        };
        // SAFETY: the library is loaded already, so this runs no code of it; it only counts a reference.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD) };
        if handle.is_null() {
            return Err(LibraryError::Unloadable { path });
        }
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
