//! What a run must have shown: every promise of the three transports, checked against the program.

use std::collections::HashSet;

use ferroce_engine::time::Time;
use ferroce_engine::verbs::{AsyncEvent, QpType, WcOpcode, WcStatus};

use crate::delivery::{datagrams, reliable, unreliable};
use crate::errors::reliable_errors;
use crate::harness::{Completion, Outcome, QpLog};
use crate::node::work_request;
use crate::program::{Connection, Kind, Message, Program};
use crate::remote::{reliable_slots, unreliable_slots};
use crate::windows::nothing_came_late;

/// Sums over runs, to see that the programs reach what they are meant to reach.
#[derive(Clone, Copy, Debug, Default)]
pub struct Stats {
    /// Programs run.
    pub runs: u64,
    /// Messages posted that take a receive.
    pub sent: u64,
    /// Messages received.
    pub delivered: u64,
    /// READs and atomics that brought their data.
    pub fetched: u64,
    /// FLUSHes and ATOMIC WRITEs that were done.
    pub placed: u64,
    /// Programs in which every message arrived.
    pub complete: u64,
    /// Sends that ended as "retries exceeded".
    pub retry_exceeded: u64,
    /// Those in programs with all seven retries, sane timeouts and no blackout: bad luck only.
    pub unlucky: u64,
    /// Sends that ended as "RNR retries exceeded".
    pub rnr_exceeded: u64,
    /// Receives that were too short.
    pub too_long: u64,
    /// Wrong keys that were refused.
    pub refused: u64,
    /// Wrong SRQ numbers that were refused.
    pub strangers: u64,
    /// Binds and local invalidations that succeeded.
    pub local: u64,
    /// Bindings of windows that ended.
    pub windows_ended: u64,
    /// Operations that were refused because their window ended at the same time.
    pub raced: u64,
    /// Work requests that met unmapped memory, here or there.
    pub faults: u64,
    /// Packets lost, damaged, dropped by full queues, late, twice.
    pub incidents: u64,
    /// Packets sent again.
    pub retransmits: u64,
    /// RNR NAKs sent.
    pub rnr_naks: u64,
    /// Packets given to the link.
    pub packets: u64,
    /// Virtual seconds that the longest program took.
    pub longest: f64,
}

impl Stats {
    /// Adds another's sums.
    pub fn add(&mut self, s: &Stats) {
        self.runs += s.runs;
        self.sent += s.sent;
        self.delivered += s.delivered;
        self.fetched += s.fetched;
        self.placed += s.placed;
        self.complete += s.complete;
        self.retry_exceeded += s.retry_exceeded;
        self.unlucky += s.unlucky;
        self.rnr_exceeded += s.rnr_exceeded;
        self.too_long += s.too_long;
        self.refused += s.refused;
        self.strangers += s.strangers;
        self.local += s.local;
        self.windows_ended += s.windows_ended;
        self.raced += s.raced;
        self.faults += s.faults;
        self.incidents += s.incidents;
        self.retransmits += s.retransmits;
        self.rnr_naks += s.rnr_naks;
        self.packets += s.packets;
        self.longest = self.longest.max(s.longest);
    }
}

/// Checks a run.
pub fn check(program: &Program, outcome: &Outcome) -> Result<Stats, String> {
    let mut stats = Stats {
        runs: 1,
        incidents: outcome.network.incidents().len() as u64,
        retransmits: outcome.counter("retransmits"),
        rnr_naks: outcome.counter("tx_rnr_nak"),
        packets: outcome.counter("transport_tx"),
        longest: outcome.end.since(Time::ZERO).as_secs_f64(),
        ..Stats::default()
    };
    let mut used = [HashSet::new(), HashSet::new()];
    for (i, connection) in program.connections.iter().enumerate() {
        for (side, used) in used.iter_mut().enumerate() {
            let log = &outcome.qps[i][side];
            let context = |e: String| format!("connection {i}, node {side}: {e}");
            send_queue(program, connection, side, log).map_err(context)?;
            let posted = connection.streams[1 - side].receives.len();
            for queue in outcome.queues(i, side) {
                let shape = &program.nodes[side];
                receive_queue(shape.shares(), i, log, &queue, posted, used).map_err(context)?;
            }
        }
        if program.is_reliable() {
            reliable_errors(program, outcome, i, &mut stats).map_err(|e| format!("connection {i}: {e}"))?;
        }
        for side in 0..2 {
            let context = |e: String| format!("connection {i}, messages of node {side}: {e}");
            let delivered = match program.transport {
                QpType::Rc | QpType::XrcSend => reliable(program, outcome, i, side),
                QpType::Uc => unreliable(program, outcome, i, side),
                _ => datagrams(program, outcome, i, side),
            }
            .map_err(context)?;
            stats.delivered += delivered as u64;
            let posted = outcome.qps[i][side].sends_posted;
            stats.sent += connection.streams[side].receives_of(posted) as u64;
            match program.transport {
                QpType::Rc | QpType::XrcSend => {
                    stats.fetched += reliable_slots(program, outcome, i, side).map_err(context)? as u64;
                    stats.windows_ended +=
                        nothing_came_late(program, outcome, i, side).map_err(context)? as u64;
                    let done = acknowledged(&outcome.qps[i][side]);
                    let messages = &connection.streams[side].messages[..done];
                    stats.local += messages.iter().filter(|m| m.kind.is_local()).count() as u64;
                    let places = |m: &&Message| matches!(m.kind, Kind::Flush { .. } | Kind::AtomicWrite(_));
                    stats.placed += messages.iter().filter(places).count() as u64;
                }
                _ => unreliable_slots(program, outcome, i, side).map_err(context)?,
            }
        }
    }
    stats.complete = u64::from(stats.sent == stats.delivered);
    async_events(program, outcome)?;
    Ok(stats)
}

/// How a message's success is called.
fn opcode(message: &Message) -> WcOpcode {
    match message.kind {
        Kind::Send | Kind::SendInv { .. } => WcOpcode::Send,
        Kind::Write(_) => WcOpcode::RdmaWrite,
        Kind::Read(_) => WcOpcode::RdmaRead,
        Kind::CompareSwap { .. } => WcOpcode::CompSwap,
        Kind::FetchAdd { .. } => WcOpcode::FetchAdd,
        Kind::AtomicWrite(_) => WcOpcode::AtomicWrite,
        Kind::Flush { .. } => WcOpcode::Flush,
        Kind::Bind { .. } => WcOpcode::BindMw,
        Kind::LocalInv { .. } => WcOpcode::LocalInv,
    }
}

/// Every posted send completes once, in order, or is unsignaled and a later one did; after an error all flush.
fn send_queue(program: &Program, connection: &Connection, side: usize, log: &QpLog) -> Result<(), String> {
    let messages = &connection.streams[side].messages;
    let mut completions = log.sends.iter().peekable();
    let mut failed = false;
    for (index, message) in messages.iter().enumerate().take(log.sends_posted) {
        let signaled = connection.sig_all || message.signaled;
        match completions.next_if(|c| work_request(c.wc.wr_id).1 == index) {
            None if signaled || failed => return Err(format!("send {index} has no completion")),
            None => {}
            Some(c) if c.wc.status == WcStatus::Success => {
                if !signaled {
                    return Err(format!("send {index} is unsignaled but completes"));
                }
                if failed {
                    return Err(format!("send {index} succeeds after an error"));
                }
                if c.wc.opcode != opcode(message) || message.kind.fetches() && c.wc.byte_len != message.len {
                    return Err(format!("send {index} completes as {:?}", c.wc));
                }
            }
            Some(c) if failed && c.wc.status != WcStatus::WrFlushErr => {
                return Err(format!("send {index} behind an error ends as {:?}", c.wc.status));
            }
            Some(_) => failed = true,
        }
    }
    let wrong = |index: &usize| messages[*index].wrong_key || messages[*index].wrong_srq;
    if let Some(index) = (0..acknowledged(log)).find(wrong) {
        return Err(format!("send {index} succeeds, though it is wrong"));
    }
    let last = completions
        .next()
        .map(|c| (work_request(c.wc.wr_id).1, c.wc.status));
    if last != Some((messages.len(), WcStatus::WrFlushErr)) {
        return Err(format!("the send posted in ERR gives {last:?}"));
    }
    if let Some(c) = completions.next() {
        return Err(format!("a send completion too many: {:?}", c.wc));
    }
    if !program.is_reliable() && log.sends_posted != messages.len() {
        return Err(format!(
            "only {} of {} sends were taken",
            log.sends_posted,
            messages.len()
        ));
    }
    Ok(())
}

/// Every receive completes once; those of a QP of its own in order, and after an error all flush. `receives`: those of
/// one queue.
fn receive_queue(
    shared: bool,
    connection: usize,
    log: &QpLog,
    receives: &[&Completion],
    last: usize,
    used: &mut HashSet<u64>,
) -> Result<(), String> {
    let mut failed = false;
    for (n, c) in receives.iter().enumerate() {
        let (owner, index) = work_request(c.wc.wr_id);
        if !used.insert(c.wc.wr_id) {
            return Err(format!("receive {owner}/{index} completes twice"));
        }
        if failed && c.wc.status != WcStatus::WrFlushErr {
            return Err(format!(
                "receive {owner}/{index} behind an error ends as {:?}",
                c.wc.status
            ));
        }
        failed |= c.wc.status != WcStatus::Success;
        let expected = if n < log.receives_posted { n } else { last };
        if !shared && (owner, index) != (connection, expected) {
            return Err(format!(
                "receive {owner}/{index} completes where {expected} is due"
            ));
        }
    }
    let completions = receives.len();
    if !shared && completions != log.receives_posted + 1 {
        return Err(format!(
            "{completions} completions for {} receives",
            log.receives_posted + 1
        ));
    }
    Ok(())
}

/// Completions with the status, in the order of a log.
pub fn with_status(completions: &[Completion], status: WcStatus) -> impl Iterator<Item = &Completion> {
    completions.iter().filter(move |c| c.wc.status == status)
}

/// How many messages are known to have succeeded: all up to the last success.
pub fn acknowledged(log: &QpLog) -> usize {
    with_status(&log.sends, WcStatus::Success)
        .last()
        .map_or(0, |c| work_request(c.wc.wr_id).1 + 1)
}

/// QPs of an SRQ say once that their last receive is consumed; CQs never overrun; unreliable QPs never fail.
fn async_events(program: &Program, outcome: &Outcome) -> Result<(), String> {
    for (side, events) in outcome.events.iter().enumerate() {
        for qps in &outcome.qps {
            let qpn = qps[side].target;
            let last = events
                .iter()
                .filter(|&&e| e == AsyncEvent::LastWqeReached(qpn))
                .count();
            if last != usize::from(program.nodes[side].shares()) {
                return Err(format!(
                    "node {side}, QP {qpn:#x}: {last} events of the last receive"
                ));
            }
        }
        for event in events {
            let expected = match event {
                AsyncEvent::LastWqeReached(_) => true,
                AsyncEvent::QpFatal(_) | AsyncEvent::QpRequestError(_) | AsyncEvent::QpAccessError(_) => {
                    program.is_reliable()
                }
                _ => false,
            };
            if !expected {
                return Err(format!("node {side}: unexpected event {event:?}"));
            }
        }
    }
    Ok(())
}
