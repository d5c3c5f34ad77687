//! The Ferroce provider: what libibverbs loads to drive `ferroce_*` devices.

pub mod abi;
pub mod elf;
pub mod fork;
pub mod guard;
pub mod hooks;
pub mod verbs;
