//! Whether the errors of RC and XRC connections have causes in the program or in what the network did.

use std::time::Duration;

use ferroce_engine::time::Time;
use ferroce_engine::verbs::{AsyncEvent, QpType, Wc, WcStatus};

use crate::check::{Stats, acknowledged, with_status};
use crate::harness::{Completion, Outcome};
use crate::node::work_request;
use crate::program::{Kind, Message, Place, Program};

/// More than a packet and its answer take: delays, lateness, naps, and waiting for a slow interface.
const LONGEST_TRIP: Duration = Duration::from_millis(16);

/// Whether every error of a reliable connection has a cause.
pub fn reliable_errors(
    program: &Program,
    outcome: &Outcome,
    connection: usize,
    stats: &mut Stats,
) -> Result<(), String> {
    let shape = &program.connections[connection];
    let qps = &outcome.qps[connection];
    let xrc = program.transport == QpType::XrcSend;
    let dark = program.conditions.iter().any(|c| c.blackout.is_some());
    // (time, side, on the receive queue, completion)
    let mut errors: Vec<(Time, usize, bool, &Wc)> = Vec::new();
    for (side, qp) in qps.iter().enumerate() {
        for (receive, completions) in [(false, &qp.sends), (true, &qp.receives)] {
            let real = |c: &&Completion| !matches!(c.wc.status, WcStatus::Success | WcStatus::WrFlushErr);
            errors.extend(
                completions
                    .iter()
                    .filter(real)
                    .map(|c| (c.time, side, receive, &c.wc)),
            );
        }
    }
    errors.sort_by_key(|&(time, ..)| time);
    for (n, &(time, side, receive, wc)) in errors.iter().enumerate() {
        // The QPs at both ends. The halves of an XRC connection that go the other way have nothing to do with it.
        let (mut own, mut peer) = (qps[side].qpn, qps[1 - side].target);
        if receive {
            (own, peer) = (qps[side].target, qps[1 - side].qpn);
        }
        let peer_failed = errors[..n]
            .iter()
            .any(|&(_, other, other_receive, _)| other != side && (!xrc || other_receive != receive))
            || outcome.events[1 - side]
                .iter()
                .any(|event| failure_of(event) == Some(peer));
        let message = Some(work_request(wc.wr_id).1).filter(|_| !receive);
        let message = message.and_then(|index| shape.streams[side].messages.get(index));
        let problem = match (wc.status, receive) {
            (WcStatus::RetryExcErr, false) => {
                stats.retry_exceeded += 1;
                // Packets behind the last success may have been sent before it was known.
                let since = with_status(&qps[side].sends, WcStatus::Success)
                    .last()
                    .map_or(Time::ZERO, |c| c.time - LONGEST_TRIP);
                // A late copy counts too: behind a loss it looks like a gap.
                let incidents = outcome.network.incidents().into_iter();
                let bad = incidents
                    .filter(|i| [own, peer].contains(&i.dest_qpn) && i.time >= since)
                    .count();
                // Timeouts below the time to and fro expire with no packet lost.
                let hasty = shape.timeout < 10;
                if !peer_failed && !hasty && !dark && shape.retry_cnt == 7 {
                    stats.unlucky += 1;
                }
                (!peer_failed && !hasty && bad <= usize::from(shape.retry_cnt))
                    .then(|| format!("retries exceeded since {since:?}, but only {bad} packets met a fault"))
            }
            (WcStatus::RnrRetryExcErr, false) => {
                stats.rnr_exceeded += 1;
                (shape.rnr_retry == 7).then(|| "RNR retries exceeded, with endless ones".to_string())
            }
            (WcStatus::LocLenErr, true) => {
                stats.too_long += 1;
                let (owner, index) = work_request(wc.wr_id);
                let short = program.is_short_receive(owner, 1 - side, index);
                (!short).then(|| format!("receive {index} is said to be too short"))
            }
            (WcStatus::RemInvReqErr, false) if message.is_some_and(|m| m.wrong_srq) => {
                stats.strangers += 1;
                None
            }
            (WcStatus::RemInvReqErr, false) => {
                let known = errors[..n]
                    .iter()
                    .any(|e| e.1 != side && e.3.status == WcStatus::LocLenErr);
                (!known).then(|| "invalid request, though the peer's receive did not fail".to_string())
            }
            (WcStatus::RemAccessErr, false) if message.is_some_and(|m| m.wrong_key && !m.kind.is_local()) => {
                stats.refused += 1;
                None
            }
            (WcStatus::RemAccessErr, false) if message.is_some_and(|m| m.raced) => {
                stats.raced += 1;
                None
            }
            (WcStatus::MwBindErr, false) if message.is_some_and(|m| m.wrong_key && m.kind.is_local()) => {
                stats.refused += 1;
                None
            }
            (WcStatus::RemInvReqErr, true) => {
                let wrong = |m: &Message| m.wrong_key && matches!(m.kind, Kind::SendInv { .. });
                let known = shape.streams[1 - side].messages.iter().any(wrong);
                (!known).then(|| "an invalidation is refused that is right".to_string())
            }
            (WcStatus::LocProtErr | WcStatus::RemOpErr | WcStatus::RemAccessErr, _) => {
                stats.faults += 1;
                let index = work_request(wc.wr_id).1;
                let slot = message.and_then(|m| m.kind.slot());
                let cause = program
                    .hole
                    .filter(|hole| hole.connection == connection)
                    .is_some_and(|hole| match (wc.status, receive, hole.place) {
                        (WcStatus::LocProtErr, false, Place::Message(i)) => (hole.side, i) == (side, index),
                        (WcStatus::LocProtErr, true, Place::Receive(i)) => {
                            (hole.side, i) == (1 - side, index)
                        }
                        (WcStatus::RemOpErr, false, Place::Receive(_)) => peer_failed && hole.side == side,
                        (WcStatus::RemOpErr | WcStatus::RemAccessErr, false, Place::Slot(i)) => {
                            hole.side == side && slot == Some(i)
                        }
                        _ => false,
                    });
                (!cause).then(|| format!("{:?} has no cause", wc.status))
            }
            (status, _) => Some(format!("{status:?} has no cause")),
        };
        // The answer of a READ that is asked for again is refused in silence: the peer may long have it.
        let again = message.is_some_and(|m| matches!(m.kind, Kind::Read(_)));
        let told = || untold(outcome, &errors, wc.status, receive, 1 - side, peer);
        let problem = problem.or_else(|| told().filter(|_| !again));
        if let Some(problem) = problem {
            return Err(format!(
                "node {side} at {time:?}, work request {:#x}: {problem}",
                wc.wr_id
            ));
        }
    }
    // Where both refuse a request of the other, neither is in a state to hear of it.
    let refuses = |side: usize| {
        let failed = outcome.events[side].iter().filter_map(failure_of);
        failed.into_iter().any(|qpn| qpn == qps[side].qpn)
    };
    let quiet = errors.is_empty() && !(refuses(0) && refuses(1));
    for side in 0..2 {
        let stream = &shape.streams[side];
        let (messages, acknowledged) = (stream.messages.len(), acknowledged(&qps[side]));
        if quiet && acknowledged != messages {
            return Err(format!(
                "no error, but only {acknowledged} of {messages} sends of node {side} succeed"
            ));
        }
        let (due, delivered) = (
            stream.receives_of(acknowledged),
            with_status(&qps[1 - side].receives, WcStatus::Success).count(),
        );
        if delivered < due {
            return Err(format!(
                "{due} messages of node {side} succeed, but {delivered} arrived"
            ));
        }
    }
    Ok(())
}

/// What is wrong if the peer that refused a request was not told, or told although a completion of its own tells it.
fn untold(
    outcome: &Outcome,
    errors: &[(Time, usize, bool, &Wc)],
    status: WcStatus,
    receive: bool,
    peer: usize,
    qpn: u32,
) -> Option<String> {
    let told = |event| outcome.events[peer].iter().filter(|&&e| e == event).count();
    let fails = |status| errors.iter().any(|e| e.1 == peer && e.2 && e.3.status == status);
    let (event, by_completion) = match (status, receive) {
        (WcStatus::RemAccessErr, false) => (AsyncEvent::QpAccessError(qpn), fails(WcStatus::RemInvReqErr)),
        (WcStatus::RemInvReqErr, false) => (AsyncEvent::QpRequestError(qpn), fails(WcStatus::LocLenErr)),
        (WcStatus::RemOpErr, false) => (AsyncEvent::QpFatal(qpn), fails(WcStatus::LocProtErr)),
        _ => return None,
    };
    let expected = usize::from(!by_completion);
    (told(event) != expected).then(|| format!("{} events {event:?}, not {expected}", told(event)))
}

/// The QP whose failure an event tells.
fn failure_of(event: &AsyncEvent) -> Option<u32> {
    match *event {
        AsyncEvent::QpFatal(qpn) | AsyncEvent::QpRequestError(qpn) | AsyncEvent::QpAccessError(qpn) => {
            Some(qpn)
        }
        _ => None,
    }
}
