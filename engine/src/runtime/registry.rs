//! The engines of this process: one for each device, shared by all who open it, gone with the last of them.

use std::collections::HashMap;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use super::{Engine, OpenError, fork};

/// The engines of the process with this fork generation.
struct Registry {
    generation: u32,
    engines: Mutex<HashMap<String, Weak<Engine>>>,
}

/// The current registry. A forked child can't use its parent's: a thread that is not in the child may hold the lock.
static CURRENT: AtomicPtr<Registry> = AtomicPtr::new(std::ptr::null_mut());

/// This process's registry, made on first use and kept for ever.
fn current() -> &'static Registry {
    let generation = fork::generation();
    loop {
        let known = CURRENT.load(Ordering::Acquire);
        // SAFETY: `CURRENT` holds null or a pointer from `Box::into_raw` below, which is never freed.
        if let Some(registry) = unsafe { known.as_ref() }
            && registry.generation == generation
        {
            return registry;
        }
        let fresh = Box::into_raw(Box::new(Registry {
            generation,
            engines: Mutex::default(),
        }));
        if CURRENT
            .compare_exchange(known, fresh, Ordering::AcqRel, Ordering::Acquire)
            .is_err()
        {
            // SAFETY: `fresh` came from `Box::into_raw` and was not published.
            drop(unsafe { Box::from_raw(fresh) });
        }
    }
}

/// The engine of `device`, opened by `open` if this process has none, or one whose device was removed.
pub(super) fn get_or_open(
    device: &str,
    open: impl FnOnce() -> Result<Engine, OpenError>,
) -> Result<Arc<Engine>, OpenError> {
    let mut engines = current().engines.lock();
    let known = engines.get(device).and_then(Weak::upgrade);
    if let Some(engine) = known.filter(|engine| !engine.is_gone()) {
        return Ok(engine);
    }
    let engine = Arc::new(open()?);
    engines.insert(device.to_owned(), Arc::downgrade(&engine));
    Ok(engine)
}

/// Every engine that is open in this process; none where another thread holds the registry too long.
pub(super) fn all_at_exit() -> Vec<Arc<Engine>> {
    let engines = current().engines.try_lock_for(super::LAST_WORDS);
    engines.map_or_else(Vec::new, |engines| {
        engines.values().filter_map(Weak::upgrade).collect()
    })
}
