//! What a run must have shown: every promise of the three transports, checked against the program.

use std::collections::HashSet;
use std::time::Duration;

use ferroce_engine::link::sim::IncidentKind;
use ferroce_engine::time::Time;
use ferroce_engine::verbs::{AsyncEvent, QpType, Wc, WcFlags, WcOpcode, WcStatus};

use crate::harness::{Completion, Outcome, QpLog, work_request};
use crate::memory::{UNTOUCHED, content};
use crate::program::{Connection, GRH_LEN, Program};

/// More than a packet and its answer take: delays, lateness, naps, and waiting for a slow interface.
const LONGEST_TRIP: Duration = Duration::from_millis(20);

/// Sums over runs, to see that the programs reach what they are meant to reach.
#[derive(Clone, Copy, Debug, Default)]
pub struct Stats {
    /// Programs run.
    pub runs: u64,
    /// Messages posted.
    pub sent: u64,
    /// Messages received.
    pub delivered: u64,
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
        self.complete += s.complete;
        self.retry_exceeded += s.retry_exceeded;
        self.unlucky += s.unlucky;
        self.rnr_exceeded += s.rnr_exceeded;
        self.too_long += s.too_long;
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
        packets: outcome.counter("tx_packets"),
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
            receive_queue(program.nodes[side].srq, i, log, posted, used).map_err(context)?;
        }
        if program.transport == QpType::Rc {
            reliable_errors(program, outcome, i, &mut stats).map_err(|e| format!("connection {i}: {e}"))?;
        }
        for side in 0..2 {
            let context = |e: String| format!("connection {i}, messages of node {side}: {e}");
            let delivered = match program.transport {
                QpType::Rc => reliable(program, outcome, i, side),
                QpType::Uc => unreliable(program, outcome, i, side),
                _ => datagrams(program, outcome, i, side),
            }
            .map_err(context)?;
            stats.delivered += delivered as u64;
            stats.sent += outcome.qps[i][side].sends_posted as u64;
        }
    }
    stats.complete = u64::from(stats.sent == stats.delivered);
    async_events(program, outcome)?;
    Ok(stats)
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
                if c.wc.opcode != WcOpcode::Send {
                    return Err(format!("send {index} completes as {:?}", c.wc.opcode));
                }
            }
            Some(c) if failed && c.wc.status != WcStatus::WrFlushErr => {
                return Err(format!("send {index} behind an error ends as {:?}", c.wc.status));
            }
            Some(_) => failed = true,
        }
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
    if program.transport != QpType::Rc && log.sends_posted != messages.len() {
        return Err(format!(
            "only {} of {} sends were taken",
            log.sends_posted,
            messages.len()
        ));
    }
    Ok(())
}

/// Every receive completes once; those of a QP of its own in order, and after an error all flush.
fn receive_queue(
    srq: bool,
    connection: usize,
    log: &QpLog,
    last: usize,
    used: &mut HashSet<u64>,
) -> Result<(), String> {
    let mut failed = false;
    for (n, c) in log.receives.iter().enumerate() {
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
        if !srq && (owner, index) != (connection, expected) {
            return Err(format!(
                "receive {owner}/{index} completes where {expected} is due"
            ));
        }
    }
    let completions = log.receives.len();
    if !srq && completions != log.receives_posted + 1 {
        return Err(format!(
            "{completions} completions for {} receives",
            log.receives_posted + 1
        ));
    }
    Ok(())
}

/// Completions with the status, in the order of a log.
fn with_status(completions: &[Completion], status: WcStatus) -> impl Iterator<Item = &Completion> {
    completions.iter().filter(move |c| c.wc.status == status)
}

/// Whether every error of an RC connection has a cause.
fn reliable_errors(
    program: &Program,
    outcome: &Outcome,
    connection: usize,
    stats: &mut Stats,
) -> Result<(), String> {
    let shape = &program.connections[connection];
    let qps = &outcome.qps[connection];
    let qpns = [qps[0].qpn, qps[1].qpn];
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
        let peer_failed = errors[..n].iter().any(|&(_, other, ..)| other != side);
        let problem = match (wc.status, receive) {
            (WcStatus::RetryExcErr, false) => {
                stats.retry_exceeded += 1;
                // Packets behind the last success may have been sent before it was known.
                let since = with_status(&qps[side].sends, WcStatus::Success)
                    .last()
                    .map_or(Time::ZERO, |c| c.time - LONGEST_TRIP);
                let bad = outcome.network.incidents().into_iter().filter(|i| {
                    qpns.contains(&i.dest_qpn)
                        && i.time >= since
                        && !matches!(i.kind, IncidentKind::Duplicated | IncidentKind::NoRoute)
                });
                let bad = bad.count();
                // Timeouts below the time to and fro expire with no packet lost.
                let hasty = shape.timeout < 10;
                if !peer_failed && !hasty && !dark && shape.retry_cnt == 7 {
                    stats.unlucky += 1;
                }
                (!peer_failed && !hasty && bad <= usize::from(shape.retry_cnt)).then(|| {
                    format!("retries exceeded since {since:?}, but only {bad} packets were lost or late")
                })
            }
            (WcStatus::RnrRetryExcErr, false) => {
                stats.rnr_exceeded += 1;
                (shape.rnr_retry == 7).then(|| "RNR retries exceeded, with endless ones".to_string())
            }
            (WcStatus::LocLenErr, true) => {
                stats.too_long += 1;
                let index = work_request(wc.wr_id).1;
                let stream = &shape.streams[1 - side];
                let short = program.has_short_receive(connection, 1 - side)
                    && stream.messages[index].len > stream.receives[index].len;
                (!short).then(|| format!("receive {index} is said to be too short"))
            }
            (WcStatus::RemInvReqErr, false) => {
                let known = errors[..n]
                    .iter()
                    .any(|e| e.1 != side && e.3.status == WcStatus::LocLenErr);
                (!known).then(|| "invalid request, though the peer's receive did not fail".to_string())
            }
            (status, _) => Some(format!("{status:?} has no cause")),
        };
        if let Some(problem) = problem {
            return Err(format!(
                "node {side} at {time:?}, work request {:#x}: {problem}",
                wc.wr_id
            ));
        }
    }
    for side in 0..2 {
        let messages = shape.streams[side].messages.len();
        let acknowledged = with_status(&qps[side].sends, WcStatus::Success)
            .last()
            .map_or(0, |c| work_request(c.wc.wr_id).1 + 1);
        if errors.is_empty() && acknowledged != messages {
            return Err(format!(
                "no error, but only {acknowledged} of {messages} sends of node {side} succeed"
            ));
        }
        let delivered = with_status(&qps[1 - side].receives, WcStatus::Success).count();
        if delivered < acknowledged {
            return Err(format!(
                "{acknowledged} sends of node {side} succeed, but {delivered} arrived"
            ));
        }
    }
    Ok(())
}

/// Whether a successful receive holds just message `index` of a stream.
fn holds(
    program: &Program,
    connection: usize,
    side: usize,
    index: usize,
    c: &Completion,
    offset: u32,
) -> bool {
    let message = &program.connections[connection].streams[side].messages[index];
    let (wc, end) = (&c.wc, (offset + message.len) as usize);
    wc.byte_len == offset + message.len
        && wc.opcode == WcOpcode::Recv
        && message.imm == wc.flags.contains(WcFlags::WITH_IMM).then_some(wc.imm)
        && c.bytes.get(offset as usize..end)
            == Some(&content(program.seed, connection, side, index, message.len)[..])
}

/// RC: the messages arrive in order, once, byte-exact, and nothing beside them is touched.
fn reliable(program: &Program, outcome: &Outcome, connection: usize, side: usize) -> Result<usize, String> {
    let receives = &outcome.qps[connection][1 - side].receives;
    let mut count = 0;
    for c in with_status(receives, WcStatus::Success) {
        if count >= outcome.qps[connection][side].sends_posted {
            return Err(format!("{} messages arrive, more than were sent", count + 1));
        }
        if !holds(program, connection, side, count, c, 0) {
            return Err(format!("delivery {count} differs from what was sent: {:?}", c.wc));
        }
        if c.bytes[c.wc.byte_len as usize..].iter().any(|&b| b != UNTOUCHED) {
            return Err(format!(
                "delivery {count} wrote behind its {} bytes",
                c.wc.byte_len
            ));
        }
        count += 1;
    }
    Ok(count)
}

/// Whether nothing that went to node `1 - side` over this connection met a fault, and the receiver was ready. On an SRQ
/// the copies of one connection take the receives of others: there it is about all of them.
fn untroubled(program: &Program, outcome: &Outcome, connection: usize, side: usize) -> bool {
    let shared = program.nodes[1 - side].srq;
    let concerned = |qpn: u32| {
        let mut qps = outcome.qps.iter().enumerate();
        qps.any(|(i, qps)| qps[1 - side].qpn == qpn && (shared || i == connection))
    };
    let ready = program.nodes[1 - side].nap == 0
        && program
            .connections
            .iter()
            .all(|c| c.streams[side].receives.iter().all(|r| r.at == 0));
    ready && !outcome.network.incidents().iter().any(|i| concerned(i.dest_qpn))
}

/// UC: what arrives is a part of what was sent, in order, each message whole and unmixed; all of it without faults.
fn unreliable(program: &Program, outcome: &Outcome, connection: usize, side: usize) -> Result<usize, String> {
    let sent = outcome.qps[connection][side].sends_posted;
    let (mut next, mut count) = (0, 0);
    for c in with_status(&outcome.qps[connection][1 - side].receives, WcStatus::Success) {
        let Some(found) = (next..sent).find(|&index| holds(program, connection, side, index, c, 0)) else {
            let earlier = (0..next).find(|&index| holds(program, connection, side, index, c, 0));
            return Err(match earlier {
                Some(index) => {
                    format!("delivery {count} is message {index}, when {next} would be the earliest")
                }
                None => format!("delivery {count} is none of the messages: {:?}", c.wc),
            });
        };
        next = found + 1;
        count += 1;
    }
    if count < sent && untroubled(program, outcome, connection, side) {
        return Err(format!(
            "{count} of {sent} messages arrive though nothing was lost"
        ));
    }
    Ok(count)
}

/// UD: each delivery is one message sent, with the right GRH and sender; no more than were sent and duplicated.
fn datagrams(program: &Program, outcome: &Outcome, connection: usize, side: usize) -> Result<usize, String> {
    let [from, to] = [side, 1 - side].map(|s| &outcome.qps[connection][s]);
    let sent = from.sends_posted;
    let copies = outcome
        .network
        .incidents()
        .iter()
        .filter(|i| i.dest_qpn == to.qpn && i.kind == IncidentKind::Duplicated)
        .count();
    let mut left = vec![1; sent];
    let mut copies_left = copies;
    let mut count = 0;
    for c in with_status(&to.receives, WcStatus::Success) {
        let matches: Vec<usize> = (0..sent)
            .filter(|&index| holds(program, connection, side, index, c, GRH_LEN))
            .collect();
        match matches.iter().find(|&&index| left[index] > 0) {
            Some(&index) => left[index] = 0,
            None if matches.is_empty() => {
                return Err(format!("delivery {count} is none of the messages: {:?}", c.wc));
            }
            None if copies_left == 0 => {
                return Err(format!(
                    "delivery {count} is one too many of message {}",
                    matches[0]
                ));
            }
            None => copies_left -= 1,
        }
        if !c.wc.flags.contains(WcFlags::GRH) || c.wc.src_qp != from.qpn {
            return Err(format!("delivery {count}: no GRH, or another sender: {:?}", c.wc));
        }
        let addresses: Vec<u8> = if program.ipv6 {
            let address = |s: usize| [0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, s as u8 + 1];
            [address(side), address(1 - side)].concat()
        } else {
            vec![10, 0, 0, side as u8 + 1, 10, 0, 0, 2 - side as u8]
        };
        if c.bytes[..GRH_LEN as usize].ends_with(&addresses) {
            count += 1;
        } else {
            return Err(format!(
                "delivery {count}: GRH {:02x?}",
                &c.bytes[..GRH_LEN as usize]
            ));
        }
    }
    if count < sent && untroubled(program, outcome, connection, side) {
        return Err(format!(
            "{count} of {sent} messages arrive though nothing was lost"
        ));
    }
    Ok(count)
}

/// QPs of an SRQ say once that their last receive is consumed; CQs never overrun; unreliable QPs never fail.
fn async_events(program: &Program, outcome: &Outcome) -> Result<(), String> {
    for (side, events) in outcome.events.iter().enumerate() {
        for qps in &outcome.qps {
            let qpn = qps[side].qpn;
            let last = events
                .iter()
                .filter(|&&e| e == AsyncEvent::LastWqeReached(qpn))
                .count();
            if last != usize::from(program.nodes[side].srq) {
                return Err(format!(
                    "node {side}, QP {qpn:#x}: {last} events of the last receive"
                ));
            }
        }
        for event in events {
            let expected = match event {
                AsyncEvent::LastWqeReached(_) => true,
                AsyncEvent::QpFatal(_) | AsyncEvent::QpRequestError(_) | AsyncEvent::QpAccessError(_) => {
                    program.transport == QpType::Rc
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
