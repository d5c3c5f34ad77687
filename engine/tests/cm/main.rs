//! Two connection managers over a network that loses, doubles, delays and reorders their messages, in virtual time.
//!
//! `plan` says what the programs of a run do, `world` runs it, `verdict` says what must come of it. Every message of
//! every scenario meets every fault, alone and in pairs, and then many at random: both ends must reach the same outcome
//! in the time that the protocol allows, and nothing may be left. `golden` replays Linux's captures. `script`, which a fuzz
//! target has too, does anything in any order.
//!
//! `FERROCE_SEEDS=N` runs N random seeds, `FERROCE_SEED=S` just that one. A plan that fails is shrunk before it is shown.
#![forbid(unsafe_code)]

mod golden;
mod plan;
#[path = "../cm_script/mod.rs"]
mod script;
mod verdict;
mod world;

use std::env;

use ferroce_engine::link::random::Prng;

use crate::plan::{Fault, Plan, Scenario};

/// Random seeds run if nothing else is asked for.
const SEEDS: u64 = 3000;

/// Runs a plan that must go well; one that does not is shrunk and shown.
fn must(plan: &Plan, name: &str) {
    let Err(error) = verdict::attempt(plan) else {
        return;
    };
    let (mut plan, mut error) = (plan.clone(), error);
    while let Some((simpler, why)) = plan
        .simpler()
        .into_iter()
        .find_map(|simpler| verdict::attempt(&simpler).err().map(|why| (simpler, why)))
    {
        (plan, error) = (simpler, why);
    }
    let trace = world::run(&plan).trace.join("\n  ");
    panic!("{name}: {error}\n  {trace}\n{plan:#?}");
}

#[test]
fn without_faults_all_goes_well_at_once() {
    for scenario in Scenario::ALL {
        let plan = Plan::of(scenario);
        must(&plan, &format!("{scenario:?}"));
        assert!(world::run(&plan).messages > 1, "{scenario:?}");
    }
}

/// Every fault at every message.
#[test]
fn each_message_meets_each_fault() {
    let mut runs = 0;
    for scenario in Scenario::ALL {
        let plan = Plan::of(scenario);
        // A fault may make more messages, each of which meets one in pairs.
        for at in 0..world::run(&plan).messages {
            for fault in Fault::ALL {
                let plan = plan.with(&[(at, fault)]);
                must(&plan, &format!("{scenario:?}, {fault:?} at message {at}"));
                runs += 1;
            }
        }
    }
    println!("{runs} runs");
    assert!(runs > 400);
}

/// Every two faults at every two messages, those that come of the first included.
#[test]
fn each_two_messages_meet_each_two_faults() {
    let mut runs = 0;
    for scenario in Scenario::ALL {
        let plan = Plan::of(scenario);
        for first in 0..world::run(&plan).messages {
            for fault in Fault::ALL {
                let plan = plan.with(&[(first, fault)]);
                for second in first + 1..world::run(&plan).messages {
                    for another in Fault::ALL {
                        let plan = plan.with(&[(first, fault), (second, another)]);
                        must(&plan, &format!("{scenario:?}, {:?}", plan.faults));
                        runs += 1;
                    }
                }
            }
        }
    }
    println!("{runs} runs");
    assert!(runs > 10_000);
}

/// Several connections at once, with many faults.
#[test]
fn many_faults_at_random() {
    let number = |name| env::var(name).ok().map(|it| it.parse::<u64>().expect("a number"));
    let seeds = match number("FERROCE_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..number("FERROCE_SEEDS").unwrap_or(SEEDS),
    };
    for seed in seeds {
        let plan = Plan::random(seed);
        must(
            &plan,
            &format!("run again by FERROCE_SEED={seed} cargo test -p ferroce-engine --test cm many_faults"),
        );
    }
}

/// Whatever a peer sends and programs ask for, in whatever order.
#[test]
fn random_scripts() {
    for seed in 0..SEEDS {
        let mut prng = Prng::new(seed);
        let len = prng.between(1, 400);
        let bytes: Vec<u8> = (0..len).map(|_| prng.next_u64() as u8).collect();
        let run = std::panic::catch_unwind(|| script::run(&bytes));
        assert!(run.is_ok(), "seed {seed}");
    }
}
