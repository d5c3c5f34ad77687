//! Runs many seeds, and shrinks the program of one that fails.

use std::env;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use ferroce_engine::verbs::QpType;

use crate::check::{Stats, check};
use crate::harness;
use crate::lives::{self, Plan, Sums};
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

/// What is run for a seed.
trait Case: Clone {
    /// What a run adds to the sums.
    type Sums;
    /// Runs and checks it.
    fn attempt(&self) -> Result<Self::Sums, String>;
    /// Cases that are a little simpler.
    fn simpler(&self) -> Vec<Self>;
    /// For people.
    fn show(&self) -> String;
}

impl Case for Program {
    type Sums = Stats;

    fn attempt(&self) -> Result<Stats, String> {
        harness::run(self).and_then(|outcome| check(self, &outcome))
    }

    fn simpler(&self) -> Vec<Program> {
        self.simpler()
    }

    fn show(&self) -> String {
        self.to_string()
    }
}

impl Case for Plan {
    type Sums = Sums;

    fn attempt(&self) -> Result<Sums, String> {
        lives::run(self)
    }

    fn simpler(&self) -> Vec<Plan> {
        self.simpler()
    }

    fn show(&self) -> String {
        format!("{self:?}\n")
    }
}

/// Runs the seeds of a transport.
pub fn run_seeds(transport: QpType, test: &str) -> Stats {
    let mut stats = Stats::default();
    run(
        test,
        SEEDS,
        |seed| Program::new(transport, seed),
        |one| stats.add(&one),
    );
    println!("{test}: {stats:?}");
    stats
}

/// Runs the seeds of the plans of QPs with several lives.
pub fn run_plans() -> Sums {
    let mut sums = Sums::default();
    run("lives", SEEDS, Plan::new, |one| sums.add(&one));
    println!("lives: {sums:?}");
    sums
}

/// Runs the case of each seed; panics with the first that fails, shrunk, and how to run it again.
fn run<C: Case>(test: &str, seeds: u64, case: impl Fn(u64) -> C, mut add: impl FnMut(C::Sums)) {
    let seeds = match number("FERROCE_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..number("FERROCE_SEEDS").unwrap_or(seeds),
    };
    let started = Instant::now();
    for seed in seeds {
        let case = case(seed);
        match attempt(&case) {
            Ok(one) => add(one),
            Err(error) => {
                let (case, error) = shrink(case, error);
                if env::var_os("FERROCE_TRACE").is_some() {
                    TRACE.store(true, Ordering::Relaxed);
                    let again = attempt(&case);
                    assert!(again.is_err(), "a case that failed fails again");
                }
                panic!(
                    "seed {seed}: {error}\nthe smallest case that fails: {}\
                     again: FERROCE_SEED={seed} cargo test -p ferroce-engine --test sim {test}\n",
                    case.show()
                );
            }
        }
    }
    println!("{test}: {:?}", started.elapsed());
}

/// Runs and checks a case; a panic is a failure like any other.
fn attempt<C: Case>(case: &C) -> Result<C::Sums, String> {
    catch_unwind(AssertUnwindSafe(|| case.attempt())).unwrap_or_else(|panic| {
        let text = panic
            .downcast_ref::<String>()
            .map(String::as_str)
            .or(panic.downcast_ref().copied());
        Err(format!("panic: {}", text.unwrap_or("no message")))
    })
}

/// Simplifies a failing case as long as it still fails, in whatever way.
fn shrink<C: Case>(mut case: C, mut error: String) -> (C, String) {
    let (mut attempts, started) = (0, Instant::now());
    'simpler: loop {
        for candidate in case.simpler() {
            attempts += 1;
            if attempts > SHRINK_LIMIT || started.elapsed() > SHRINK_TIME {
                break 'simpler;
            }
            if let Err(e) = attempt(&candidate) {
                (case, error) = (candidate, e);
                continue 'simpler;
            }
        }
        break;
    }
    (case, error)
}
