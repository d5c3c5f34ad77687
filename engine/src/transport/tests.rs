//! Pairs of devices, driven by hand over a link in memory: one test per rule.

mod crowd;
mod errors;
mod lengths;
mod one_sided;
pub(crate) mod pair;
mod placement;
mod rc;
mod recovery;
mod regions;
mod states;
mod uc;
mod ud;
mod windows;
mod xrc;
