//! The Ferroce provider: what libibverbs loads to drive `ferroce_*` devices.
//!
//! libibverbs loads the library for the sake of its constructor, which finds the libibverbs of the process, learns
//! its release, answers the calls that it would make to a kernel ([`hooks`]), and registers the driver ([`verbs`]).
//! librdmacm has no drivers: what it asks of the kernel is answered too ([`ucma`]).

#[cfg(not(target_pointer_width = "64"))]
compile_error!("the tables of libibverbs' interface are those of 64-bit machines");

pub mod abi;
pub mod elf;
pub mod guard;
pub mod hooks;
pub mod report;
pub mod ucma;
pub mod verbs;

use std::collections::BTreeSet;
use std::ffi::{CStr, OsStr, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use abi::library::{Library, private_number};
use parking_lot::Mutex;
use report::say;
use verbs::driver::Driver;

/// Called by the dynamic linker when the library is loaded. It holds locks: no thread may be started here.
#[cfg(not(test))]
#[used]
#[unsafe(link_section = ".init_array")]
static CONSTRUCTOR: extern "C" fn() = {
    extern "C" fn constructor() {
        guard::guard((), || {
            report::start_log();
            serve();
            hooks::descriptors::watch_forks();
            serve_those_to_come();
        });
    }
    constructor
};

/// Serves every libibverbs of the process that it knows and has not met yet, and says why it does not serve another;
/// and every librdmacm.
///
/// libibverbs loads the file that is named after its private interface. One of another interface has another file
/// loaded, and that serves it: two would not know each other's descriptors.
#[cfg_attr(test, allow(dead_code))]
fn serve() {
    /// Where those are loaded that were met. They stay loaded, or nobody would have them listed here.
    static MET: Mutex<BTreeSet<usize>> = Mutex::new(BTreeSet::new());
    let own = file().and_then(interface_of);
    for object in elf::loaded() {
        let Some(private) = private_number(&object) else {
            if hooks::rdmacm::is_librdmacm(&object)
                && MET.lock().insert(object.base())
                && let Err(error) = hooks::rdmacm::install(&object, file())
            {
                say(format_args!("{} can't be hooked: {error}", object.path.display()));
            }
            continue;
        };
        // The lock is left before the dynamic linker is called, whose own one a caller may hold.
        if own.is_some_and(|own| own != private) || !MET.lock().insert(object.base()) {
            continue;
        }
        let library = match Library::open(&object, private) {
            Ok(library) => library,
            Err(error) => {
                say(format_args!("{error}"));
                continue;
            }
        };
        if let Err(error) = hooks::install(&object) {
            say(format_args!("{} can't be hooked: {error}", object.path.display()));
            continue;
        }
        tracing::debug!(
            "{} is of rdma-core {}",
            object.path.display(),
            library.abi.release
        );
        Driver::register(library);
    }
}

/// Has the path shim tell when somebody is about to list the devices: it may be a libibverbs that came later, and
/// does not run the constructor again as the file is loaded already.
#[cfg_attr(test, allow(dead_code))]
fn serve_those_to_come() {
    extern "C" fn before_listing() {
        guard::guard((), serve);
    }
    // SAFETY: the name is zero-terminated.
    let tell = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"ferroce_shim_before_listing".as_ptr()) };
    if tell.is_null() {
        return tracing::debug!("no path shim: a libibverbs that is loaded later finds no devices");
    }
    // SAFETY: this is the type of the shim's function.
    let tell = unsafe { std::mem::transmute::<*mut c_void, extern "C" fn(extern "C" fn())>(tell) };
    tell(before_listing);
}

/// The file of this library.
fn file() -> Option<&'static Path> {
    let mut info = std::mem::MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: there is room for the answer; null is a valid name in it.
    let info = unsafe {
        if libc::dladdr(file as *const c_void, info.as_mut_ptr()) == 0 {
            return None;
        }
        info.assume_init()
    };
    // SAFETY: the name is null or zero-terminated, and stays as long as the library.
    let name = (!info.dli_fname.is_null()).then(|| unsafe { CStr::from_ptr(info.dli_fname) })?;
    Some(Path::new(OsStr::from_bytes(name.to_bytes())))
}

/// The private interface that a provider's file is for: `34` of `libferroce-rdmav34.so`.
fn interface_of(file: &Path) -> Option<u32> {
    let (_, suffix) = file.file_stem()?.to_str()?.rsplit_once("-rdmav")?;
    suffix.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_of_the_file_tells_whom_it_serves() {
        let interface = |file| interface_of(Path::new(file));
        assert_eq!(interface("/usr/lib/libibverbs/libferroce-rdmav34.so"), Some(34));
        assert_eq!(interface("/x-rdmav1/libferroce_provider.so"), None);
        assert!(file().is_some_and(Path::is_absolute));
    }
}
