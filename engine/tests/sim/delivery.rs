//! Whether what arrived is what was sent, by the rules of each transport.

use std::net::IpAddr;

use ferroce_engine::link::RoceVersion;
use ferroce_engine::link::sim::IncidentKind;
use ferroce_engine::verbs::{QpType, WcFlags, WcOpcode, WcStatus};
use ferroce_wire::Gid;
use ferroce_wire::bth::MULTICAST_QPN;

use crate::check::with_status;
use crate::harness::{Completion, Outcome};
use crate::memory::{UNTOUCHED, content};
use crate::node::address;
use crate::program::{GRH_LEN, Kind, Message, Program, Via};

/// Whether a successful receive holds just message `index` of a stream.
fn holds(
    program: &Program,
    connection: usize,
    side: usize,
    index: usize,
    c: &Completion,
    offset: u32,
) -> bool {
    let stream = &program.connections[connection].streams[side];
    let message = &stream.messages[index];
    let (wc, end) = (&c.wc, (offset + message.len) as usize);
    let opcode = match message.kind {
        Kind::Send | Kind::SendInv { .. } => WcOpcode::Recv,
        _ => WcOpcode::RecvRdmaWithImm,
    };
    // What a WRITE wrote may have been overwritten by the time that the application looks.
    let later = |m: &Message| m.kind == message.kind && !message.kind.is_send();
    let stable = !stream.messages.iter().skip(index + 1).any(later);
    let invalidated = match message.kind {
        Kind::SendInv { window, tag } => Some(Via { window, tag }),
        _ => None,
    };
    wc.byte_len == offset + message.len
        && invalidated == c.invalidated
        && wc.opcode == opcode
        && message.imm == wc.flags.contains(WcFlags::WITH_IMM).then_some(wc.imm)
        && (!stable
            || c.bytes.get(offset as usize..end)
                == Some(&content(program.seed, connection, side, index, message.len)[..]))
}

/// The messages that were posted and take a receive: their indices.
fn takers(program: &Program, outcome: &Outcome, connection: usize, side: usize) -> Vec<usize> {
    let posted = outcome.qps[connection][side].sends_posted;
    let stream = &program.connections[connection].streams[side];
    stream
        .receiving()
        .map(|(index, _)| index)
        .filter(|&index| index < posted)
        .collect()
}

/// RC and XRC: the messages arrive in order, once, byte-exact, and nothing beside them is touched.
pub fn reliable(
    program: &Program,
    outcome: &Outcome,
    connection: usize,
    side: usize,
) -> Result<usize, String> {
    let all = takers(program, outcome, connection, side);
    let messages = &program.connections[connection].streams[side].messages;
    let mut count = 0;
    for (queue, receives) in outcome.queues(connection, 1 - side).into_iter().enumerate() {
        let mut takers = all.iter().filter(|&&index| messages[index].srq == queue);
        for c in receives.iter().filter(|c| c.wc.status == WcStatus::Success) {
            let Some(&index) = takers.next() else {
                return Err(format!("{} messages arrive, more than were sent", count + 1));
            };
            if !holds(program, connection, side, index, c, 0) {
                return Err(format!("delivery {count} is not message {index}: {:?}", c.wc));
            }
            if program.transport == QpType::XrcSend && c.wc.src_qp != outcome.qps[connection][side].qpn {
                return Err(format!("delivery {count} is another sender's: {:?}", c.wc));
            }
            let behind = &c.bytes.get(c.wc.byte_len as usize..).unwrap_or_default();
            if c.wc.opcode == WcOpcode::Recv && behind.iter().any(|&b| b != UNTOUCHED) {
                return Err(format!(
                    "delivery {count} wrote behind its {} bytes",
                    c.wc.byte_len
                ));
            }
            count += 1;
        }
    }
    Ok(count)
}

/// Whether nothing that went to node `1 - side` over this connection met a fault, and the receiver was ready. On an SRQ
/// the copies of one connection take the receives of others: there it is about all of them.
pub fn untroubled(program: &Program, outcome: &Outcome, connection: usize, side: usize) -> bool {
    let shared = program.nodes[1 - side].srq;
    let concerned = |qpn: u32| {
        let mut qps = outcome.qps.iter().enumerate();
        qpn == MULTICAST_QPN || qps.any(|(i, qps)| qps[1 - side].qpn == qpn && (shared || i == connection))
    };
    let ready = program.nodes[1 - side].nap == 0
        && program
            .connections
            .iter()
            .all(|c| c.streams[side].receives.iter().all(|r| r.at == 0));
    ready && !outcome.network.incidents().iter().any(|i| concerned(i.dest_qpn))
}

/// UC: what arrives is a part of what was sent, in order, each message whole and unmixed; all of it without faults.
pub fn unreliable(
    program: &Program,
    outcome: &Outcome,
    connection: usize,
    side: usize,
) -> Result<usize, String> {
    let takers = takers(program, outcome, connection, side);
    let (mut next, mut count) = (0, 0);
    for c in with_status(&outcome.qps[connection][1 - side].receives, WcStatus::Success) {
        let is_it = |&n: &usize| holds(program, connection, side, takers[n], c, 0);
        let Some(found) = (next..takers.len()).find(is_it) else {
            return Err(match (0..next).find(is_it) {
                Some(n) => {
                    format!("delivery {count} is the {n}th message, when the {next}th would be the earliest")
                }
                None => format!("delivery {count} is none of the messages: {:?}", c.wc),
            });
        };
        next = found + 1;
        count += 1;
    }
    if count < takers.len() && untroubled(program, outcome, connection, side) {
        return Err(format!(
            "{count} of {} messages arrive though nothing was lost",
            takers.len()
        ));
    }
    Ok(count)
}

/// UD: each delivery is one message sent, with the right GRH and sender; no more than were sent and duplicated.
pub fn datagrams(
    program: &Program,
    outcome: &Outcome,
    connection: usize,
    side: usize,
) -> Result<usize, String> {
    let [from, to] = [side, 1 - side].map(|s| &outcome.qps[connection][s]);
    let sent = from.sends_posted;
    let copies = outcome
        .network
        .incidents()
        .iter()
        .filter(|i| [to.qpn, MULTICAST_QPN].contains(&i.dest_qpn) && i.kind == IncidentKind::Duplicated)
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
        let dest = if program.multicast {
            program.group(1 - side, connection)
        } else {
            address(program, 1 - side)
        };
        let octets = |ip: IpAddr| match (program.version, ip) {
            (RoceVersion::V2, IpAddr::V4(ip)) => ip.octets().to_vec(),
            (_, ip) => Gid::from_ip(ip).0.to_vec(),
        };
        let addresses = [octets(address(program, side)), octets(dest)].concat();
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
