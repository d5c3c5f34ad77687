//! A script of work requests, packets, memory faults, time and state changes: nothing panics or spins, and every work
//! request completes at most once, in order. The interpreter is that of the engine's own test of random scripts.
#![no_main]

#[path = "../../engine/tests/script/mod.rs"]
mod script;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| script::run(bytes));
