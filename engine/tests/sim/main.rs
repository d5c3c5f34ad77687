//! Random programs over a faulty network in virtual time: 1,000 seeds per transport, each followed to its end.
//!
//! RC and XRC must deliver every message once, in order and byte-exact, or end in the error that fits; UC and UD must never
//! deliver damaged or mixed data. `lives` is about what a program does to QPs in the middle of it all: RESET,
//! destruction, ERR, SQD, and regions that end.
//!
//! The model is the program itself: from what was posted follows what memory, completions and events must be, and from
//! what the network did, which errors may be.
//!
//! `FERROCE_SEEDS=N` runs N seeds, `FERROCE_SEED=S` just that one. A failing program is shrunk before it is shown; with
//! `FERROCE_TRACE=1` its packets are printed too.
#![forbid(unsafe_code)]

mod check;
mod delivery;
mod errors;
mod generate;
mod harness;
mod lives;
mod memory;
mod node;
mod program;
mod remote;
mod runner;
mod shrink;
mod trace;
mod windows;

use ferroce_engine::link::sim::{Incident, IncidentKind};
use ferroce_engine::verbs::QpType;

use crate::check::Stats;
use crate::program::Program;

/// The sums of all seeds of a reliable transport, if it was a full run: most programs must come to their end, each with
/// more than a few of what `seen` names.
fn reliable<const N: usize>(transport: QpType, name: &str, seen: impl Fn(&Stats) -> [u64; N]) {
    let stats = runner::run_seeds(transport, name);
    if !runner::is_full_run() {
        return;
    }
    assert!(stats.complete * 3 > stats.runs * 2, "{stats:?}");
    assert!(stats.unlucky * 50 < stats.runs, "{stats:?}");
    assert!(seen(&stats).iter().all(|&n| n > 10), "{stats:?}");
}

#[test]
fn rc() {
    reliable(QpType::Rc, "rc", |stats| {
        [
            stats.retry_exceeded,
            stats.rnr_exceeded,
            stats.too_long,
            stats.fetched,
            stats.placed,
            stats.refused,
            stats.faults,
            stats.retransmits,
            stats.rnr_naks,
            stats.local,
            stats.windows_ended,
            stats.raced,
        ]
    });
}

#[test]
fn xrc() {
    reliable(QpType::XrcSend, "xrc", |stats| {
        [
            stats.retry_exceeded,
            stats.rnr_exceeded,
            stats.fetched,
            stats.placed,
            stats.refused,
            stats.strangers,
            stats.faults,
            stats.retransmits,
            stats.rnr_naks,
        ]
    });
}

#[test]
fn uc() {
    let stats = runner::run_seeds(QpType::Uc, "uc");
    if runner::is_full_run() {
        assert!(
            stats.delivered * 3 > stats.sent && stats.complete * 50 > stats.runs,
            "{stats:?}"
        );
    }
}

#[test]
fn ud() {
    let stats = runner::run_seeds(QpType::Ud, "ud");
    if runner::is_full_run() {
        assert!(
            stats.delivered * 2 > stats.sent && stats.complete * 50 > stats.runs,
            "{stats:?}"
        );
    }
}

/// More QPs than a small buffer has room for, towards one process that is slow: nothing is lost, and all get through.
#[test]
fn crowd() {
    for seed in 0..20 {
        for transport in [QpType::Rc, QpType::Uc, QpType::Ud] {
            let program = Program::crowd(transport, seed);
            let run =
                harness::run(&program).and_then(|it| check::check(&program, &it).map(|stats| (it, stats)));
            let (outcome, stats) = run.unwrap_or_else(|error| panic!("{transport}, seed {seed}: {error}"));
            let incidents = outcome.network.incidents();
            let overflowed = |it: &Incident| it.kind == IncidentKind::Overflowed;
            let overflows = incidents.into_iter().filter(overflowed).count();
            let again = outcome.counter("retransmits") + outcome.counter("timeouts");
            assert_eq!(
                (overflows, again, stats.delivered),
                (0, 0, stats.sent),
                "{transport}, seed {seed}"
            );
        }
    }
}

/// QPs with several lives, ended in every way in the middle of traffic.
#[test]
fn lives() {
    let sums = runner::run_plans();
    if !runner::is_full_run() {
        return;
    }
    let seen = [sums.flying, sums.held_back, sums.refused, sums.added];
    assert!(seen.iter().chain(&sums.interrupted).all(|&n| n > 10), "{sums:?}");
}
