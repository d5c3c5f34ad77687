//! Random scripts run through a device: what the fuzz target `engine` does, briefly and without a fuzzer.
//! `FERROCE_SEEDS=N` runs N scripts, `FERROCE_SEED=S` just that one.
#![forbid(unsafe_code)]

mod script;

use std::env;
use std::panic::{AssertUnwindSafe, catch_unwind};

use ferroce_engine::link::random::Prng;

#[test]
fn scripts_break_nothing() {
    let number = |name| env::var(name).ok().map(|n| n.parse::<u64>().expect("a number"));
    let seeds = match number("FERROCE_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..number("FERROCE_SEEDS").unwrap_or(5000),
    };
    for seed in seeds {
        let mut prng = Prng::new(seed);
        let len = prng.between(1, 4000);
        let bytes: Vec<u8> = (0..len).map(|_| prng.next_u64() as u8).collect();
        if catch_unwind(AssertUnwindSafe(|| script::run(&bytes))).is_err() {
            panic!("again: FERROCE_SEED={seed} cargo test -p ferroce-engine --test random_scripts");
        }
    }
}
