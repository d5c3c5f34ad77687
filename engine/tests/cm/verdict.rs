//! What must come of a plan.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use ferroce_wire::cm::{RejReason, SidrStatus};

use crate::plan::{Plan, Scenario};
use crate::world::{self, End, Outcome, Side};

/// What one fault can cost: the longest time until a message is sent again, and what it is late by.
const COST: Duration = Duration::from_millis(6144 + 6500);

/// How long refusals and ended connections are kept.
const REMAINS: Duration = Duration::from_secs(27);

/// Runs a plan, and judges it.
pub fn attempt(plan: &Plan) -> Result<(), String> {
    let report = catch_unwind(AssertUnwindSafe(|| world::run(plan))).map_err(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        text.unwrap_or_else(|| "panicked".to_string())
    })?;
    if !report.left.is_empty() {
        return Err(format!("left: {:?}", report.left));
    }
    let thinking = plan.scenarios.iter().map(|(it, start, _)| *start + it.thinking());
    let longest = thinking.max().unwrap_or_default() + world::CONNECTED + REMAINS;
    let limit = longest + COST * plan.faults.len() as u32;
    if report.duration > limit {
        return Err(format!("took {:?}, not {limit:?}", report.duration));
    }
    for (&(scenario, ..), outcome) in plan.scenarios.iter().zip(&report.outcomes) {
        judge(plan, scenario, outcome).map_err(|error| {
            format!(
                "{scenario:?}: {error}; askers {:?}, asked {:?}",
                outcome.askers, outcome.asked
            )
        })?;
    }
    Ok(())
}

fn check(is_right: bool, what: &str) -> Result<(), String> {
    if is_right { Ok(()) } else { Err(what.to_string()) }
}

fn judge(plan: &Plan, scenario: Scenario, outcome: &Outcome) -> Result<(), String> {
    let askers = if scenario == Scenario::Crossing { 2 } else { 1 };
    check(outcome.askers.len() == askers, "who asks")?;
    for side in outcome.askers.iter().chain(&outcome.asked) {
        let is_service = matches!(scenario, Scenario::Sidr | Scenario::SidrRefused);
        let is_over = side.end.is_some() || side.dropped || is_service || scenario == Scenario::NoListener;
        check(is_over, "an end does not know that it is over")?;
    }
    both_agree(scenario, outcome)?;
    let few = plan.faults.len() <= 2;
    let limit =
        outcome.start + scenario.thinking() + COST * plan.faults.len() as u32 + Duration::from_millis(10);
    for asker in &outcome.askers {
        let decided = asker
            .connected
            .map(|(_, time)| time)
            .or(asker.end.map(|(_, time)| time));
        if let Some(time) = decided {
            let late = time.since(limit);
            check(late.is_zero(), &format!("decided {late:?} late"))?;
        }
    }
    let asker = &outcome.askers[0];
    let end = asker.end.map(|(end, _)| end);
    match scenario {
        Scenario::Rejected => check(
            end == Some(End::Rejected(RejReason::CONSUMER_DEFINED)),
            "not refused by the program",
        ),
        Scenario::NoListener => check(
            end == Some(End::Rejected(RejReason::INVALID_SERVICE_ID)),
            "not told that nobody listens",
        ),
        Scenario::ReplyRejected => {
            let refused = |side: &Side| matches!(side.end, Some((End::Rejected(_), _)));
            check(outcome.asked.iter().all(refused), "not refused")?;
            let by_program =
                |side: &Side| matches!(side.end, Some((End::Rejected(RejReason::CONSUMER_DEFINED), _)));
            check(
                !few || outcome.asked.iter().any(by_program),
                "not refused by the program",
            )
        }
        Scenario::AskerGivesUp => {
            let over = |side: &Side| matches!(side.end, Some((End::Rejected(_), _)));
            check(
                outcome.asked.iter().all(over),
                "not told that the peer has given up",
            )
        }
        Scenario::AskedWithdraws => {
            // If the refusal is lost for good, it is a connection until somebody ends it.
            let refused = end == Some(End::Rejected(RejReason::CONSUMER_DEFINED));
            let ended = asker.connected.is_some() && matches!(end, Some(End::Here | End::Rejected(_)));
            check(refused || ended && plan.faults.len() > 1, "not refused")
        }
        Scenario::Sidr => check(end == Some(End::Service(SidrStatus::SUCCESS)), "no service"),
        Scenario::SidrRefused => check(
            end == Some(End::Service(SidrStatus::UNSUPPORTED)),
            "not told that there is no service",
        ),
        _ => {
            let all = outcome.askers.iter().all(|side| side.connected.is_some());
            check(all, "not connected")?;
            if few {
                let connected = outcome.asked.iter().filter(|side| side.connected.is_some());
                check(
                    connected.count() == outcome.askers.len(),
                    "one side is not connected",
                )?;
            }
            Ok(())
        }
    }
}

/// Whether each connected end has exactly one peer that knows it, and both have the same numbers.
fn both_agree(scenario: Scenario, outcome: &Outcome) -> Result<(), String> {
    for asker in &outcome.askers {
        let Some((mine, _)) = asker.connected else {
            continue;
        };
        let peers: Vec<&Side> = outcome
            .asked
            .iter()
            .filter(|it| it.qpn == mine.dest_qpn)
            .collect();
        let [peer] = peers[..] else {
            return Err("connected to nobody".to_string());
        };
        check(mine.sq_psn == peer.psn && mine.rq_psn == asker.psn, "other PSNs")?;
        match peer.connected {
            Some((theirs, _)) => {
                check(theirs.dest_qpn == asker.qpn, "connected to another")?;
                check(
                    theirs.sq_psn == asker.psn && theirs.rq_psn == peer.psn,
                    "other PSNs",
                )?;
            }
            // It was ended before the peer knew that it was ready, or withdrawn.
            None => {
                let ended = matches!(peer.end, Some((End::ByPeer | End::Rejected(_), _)));
                check(ended || peer.dropped, "connected with one who is not")?;
            }
        }
    }
    let known = |it: &Side| {
        outcome
            .askers
            .iter()
            .any(|asker| asker.connected.is_some_and(|(mine, _)| mine.dest_qpn == it.qpn))
    };
    let strangers = outcome.asked.iter().filter(|it| !known(it));
    for stranger in strangers {
        check(stranger.connected.is_none(), "connected with nobody")?;
    }
    check(
        scenario.connects()
            || outcome.asked.iter().all(|it| it.connected.is_none())
            || scenario == Scenario::AskedWithdraws,
        "connected all the same",
    )
}
