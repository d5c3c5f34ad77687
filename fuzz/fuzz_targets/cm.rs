//! A script of a peer's messages, calls of programs, restarts and time: nothing panics, and nothing is left in the end.
//! The interpreter is that of the engine's own test of random scripts.
#![no_main]

#[path = "../../engine/tests/cm_script/mod.rs"]
mod script;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| script::run(bytes));
