//! `libferroce_shim.so`: shows programs the devices of `ferroced` where they look for a kernel's.
//!
//! Preloaded by `ferroce run`. A path below `/sys/class/infiniband`, `/sys/class/infiniband_verbs`,
//! `/sys/class/misc/rdma_cm` or `/dev/infiniband` that exists in the daemon's tree is looked up there instead; every other
//! path, and everything that is not a path, stays as it is, but that programs which are started with
//! other preloads keep the shim. The hooks allocate nothing, take no
//! lock and keep `errno`, so that they may run in signal handlers and after `vfork`.

#[cfg_attr(test, allow(dead_code, reason = "the unit tests have no hooks"))]
mod path;

// The unit tests must not hook themselves.
#[cfg(not(test))]
mod exec;
#[cfg(not(test))]
mod hooks;
#[cfg(not(test))]
mod listing;
#[cfg(not(test))]
mod real;
