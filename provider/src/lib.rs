//! The Ferroce provider: what libibverbs loads to drive `ferroce_*` devices.
//!
//! libibverbs loads the library for the sake of its constructor, which finds the libibverbs of the process, learns
//! its release, answers the calls that it would make to a kernel ([`hooks`]), and registers the driver ([`verbs`]).

#[cfg(not(target_pointer_width = "64"))]
compile_error!("the tables of libibverbs' interface are those of 64-bit machines");

pub mod abi;
pub mod elf;
pub mod guard;
pub mod hooks;
pub mod report;
pub mod verbs;

use abi::library::{Library, is_libibverbs};
use report::say;
use verbs::driver::Driver;

/// Called by the dynamic linker when the library is loaded. It holds locks: no thread may be started here.
#[cfg(not(test))]
#[used]
#[unsafe(link_section = ".init_array")]
static CONSTRUCTOR: extern "C" fn() = {
    extern "C" fn constructor() {
        guard::guard((), load);
    }
    constructor
};

/// Serves every libibverbs of the process that it knows, and says why it does not serve another.
#[cfg_attr(test, allow(dead_code))]
fn load() {
    report::start_log();
    let mut served = false;
    for object in elf::loaded().iter().filter(|object| is_libibverbs(object)) {
        let library = match Library::open(object) {
            Ok(library) => library,
            Err(error) => {
                say(format_args!("{error}"));
                continue;
            }
        };
        if let Err(error) = hooks::install(object) {
            say(format_args!("{} can't be hooked: {error}", object.path.display()));
            continue;
        }
        tracing::debug!(
            "{} is of rdma-core {}",
            object.path.display(),
            library.abi.release
        );
        Driver::register(library);
        served = true;
    }
    if served {
        hooks::descriptors::watch_forks();
    }
}
