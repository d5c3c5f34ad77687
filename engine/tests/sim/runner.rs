//! Runs many seeds, and shrinks the program of one that fails.

use std::env;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use ferroce_engine::verbs::QpType;

use crate::check::{Stats, check};
use crate::harness;
use crate::program::Program;
use crate::trace::TRACE;

/// Seeds run if nothing else is asked for.
const SEEDS: u64 = 1000;
/// Attempts at a simpler program.
const SHRINK_LIMIT: usize = 3000;
/// Time spent on them.
const SHRINK_TIME: Duration = Duration::from_secs(30);

/// Whether enough seeds run to judge their sums.
pub fn is_full_run() -> bool {
    number("FERROCE_SEED").is_none() && number("FERROCE_SEEDS").is_none_or(|n| n >= SEEDS)
}

fn number(name: &str) -> Option<u64> {
    let value = env::var(name).ok()?;
    Some(
        value
            .parse()
            .unwrap_or_else(|_| panic!("{name}='{value}' is not a number")),
    )
}

/// Runs the seeds of a transport; panics with the first that fails, shrunk, and how to run it again.
pub fn run_seeds(transport: QpType, test: &str) -> Stats {
    let seeds = match number("FERROCE_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..number("FERROCE_SEEDS").unwrap_or(SEEDS),
    };
    let started = Instant::now();
    let mut stats = Stats::default();
    for seed in seeds {
        let program = Program::new(transport, seed);
        match attempt(&program) {
            Ok(one) => stats.add(&one),
            Err(error) => {
                let (program, error) = shrink(program, error);
                if env::var_os("FERROCE_TRACE").is_some() {
                    TRACE.store(true, Ordering::Relaxed);
                    attempt(&program).expect_err("a program that failed fails again");
                }
                panic!(
                    "seed {seed}: {error}\nthe smallest program that fails: {program}\
                     again: FERROCE_SEED={seed} cargo test -p ferroce-engine --test sim {test}\n"
                );
            }
        }
    }
    println!("{test}: {stats:?} in {:?}", started.elapsed());
    stats
}

/// Runs and checks a program; a panic is a failure like any other.
fn attempt(program: &Program) -> Result<Stats, String> {
    let run = || harness::run(program).and_then(|outcome| check(program, &outcome));
    catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|panic| {
        let text = panic
            .downcast_ref::<String>()
            .map(String::as_str)
            .or(panic.downcast_ref().copied());
        Err(format!("panic: {}", text.unwrap_or("no message")))
    })
}

/// Simplifies a failing program as long as it still fails, in whatever way.
fn shrink(mut program: Program, mut error: String) -> (Program, String) {
    let (mut attempts, started) = (0, Instant::now());
    'simpler: loop {
        for candidate in program.simpler() {
            attempts += 1;
            if attempts > SHRINK_LIMIT || started.elapsed() > SHRINK_TIME {
                break 'simpler;
            }
            if let Err(e) = attempt(&candidate) {
                (program, error) = (candidate, e);
                continue 'simpler;
            }
        }
        break;
    }
    (program, error)
}
