//! What is judged: each completion and event as it is seen, slots at any moment, memory and sums at the end.

use std::ops::Range;

use ferroce_engine::verbs::*;

use super::plan::{Op, OpKind};
use super::{
    BASE, BLOCK, BUFFER, OPS, RECEIVE, SLOT, Seen, Sums, World, buffer, bytes, cookie, meaning, slot,
};

impl World<'_> {
    pub fn events(&mut self, side: usize) -> Result<(), String> {
        while let Some(event) = self.nodes[side].device.take_event() {
            let (AsyncEvent::SqDrained(qpn) | AsyncEvent::QpAccessError(qpn)) = event else {
                return Err(format!("node {side}: unexpected {event:?}"));
            };
            let pair = self.pairs.iter_mut().find(|pair| pair.2[side].qpn == qpn);
            let (_, _, qps) = pair.ok_or_else(|| format!("{event:?} of no QP"))?;
            let qp = &mut qps[side];
            let due = match event {
                AsyncEvent::SqDrained(_) => {
                    let due = qp.drains && qp.drained.is_none();
                    qp.drained = Some(qp.sent);
                    self.sums.held_back += (qp.posted - qp.sent) as u64;
                    due
                }
                _ => qp.closed.is_some() && !std::mem::replace(&mut qp.access_error, true),
            };
            if !due {
                return Err(format!("node {side}: {event:?} is not due"));
            }
        }
        Ok(())
    }

    pub fn take(&mut self, side: usize, seen: Vec<Seen>) -> Result<(), String> {
        for seen in seen {
            let wr_id = seen.wc.wr_id;
            self.judge(side, &seen)
                .map_err(|e| format!("node {side}, {:?} of {:?}: {e}", seen.wc, meaning(wr_id)))?;
        }
        Ok(())
    }

    /// Whether a completion is due, and all that it tells of has happened.
    pub fn judge(&mut self, side: usize, Seen { wc, buffer: held }: &Seen) -> Result<(), String> {
        let (pair, number, index) = meaning(wc.wr_id);
        if self.pairs.get(pair).is_none_or(|p| p.0 != number) {
            return Err("of a life that has ended".into());
        }
        let (plan, life) = (self.plan, self.life(pair));
        let qps = &mut self.pairs[pair].2;
        let (a, b) = qps.split_at_mut(1);
        let (qp, peer) = if side == 0 {
            (&mut a[0], &mut b[0])
        } else {
            (&mut b[0], &mut a[0])
        };
        if wc.qp_num != qp.qpn || qp.ended {
            return Err("of a life that has ended".into());
        }
        let receive = wc.wr_id & RECEIVE != 0;
        let next = if receive { &mut qp.received } else { &mut qp.sent };
        if index != *next {
            return Err(format!("when {next} is due"));
        }
        *next += 1;
        match wc.status {
            WcStatus::Success if qp.failed => return Err("after an error".into()),
            WcStatus::Success => {}
            WcStatus::WrFlushErr if qp.failed => return Ok(()),
            // An ended peer is silent; a closed one refuses.
            WcStatus::RemAccessErr if peer.closed.is_some() => {
                let kind = life.ops[side].get(index).map(|op| op.kind);
                if !matches!(kind, Some(OpKind::Write | OpKind::Read)) {
                    return Err("the wrong operation is refused".into());
                }
                // The late copy of a READ that was answered is refused without an event.
                (qp.failed, qp.refused) = (true, kind == Some(OpKind::Write));
                self.sums.refused += 1;
                return Ok(());
            }
            WcStatus::WrFlushErr if qp.closed.is_some() => {
                qp.failed = true;
                return Ok(());
            }
            // A peer that refused is silent from then on: its NAK, or an answer before that, may have been lost.
            WcStatus::RetryExcErr if !receive && (peer.ended || peer.failed || peer.closed.is_some()) => {
                qp.failed = true;
                return Ok(());
            }
            _ => return Err("an error without a cause".into()),
        }
        if receive {
            let senders = life.ops[1 - side].iter().enumerate();
            let mut sends = senders.filter_map(|(i, op)| match op.kind {
                OpKind::Send(len) => Some((i, len)),
                _ => None,
            });
            let (i, len) = sends.nth(index).ok_or("nothing was sent")?;
            let data = bytes(plan, 1 - side, cookie(pair, number, i), len);
            if wc.byte_len as usize != len || held[..len] != data[..] || held[len..].iter().any(|&b| b != 0) {
                return Err("the buffer does not hold the message".into());
            }
            return Ok(());
        }
        if qp.drained.is_some_and(|sent| index >= sent) {
            return Err("begun when the queue had drained".into());
        }
        let memory = &self.nodes[1 - side].memory;
        match life.ops[side][index].kind {
            OpKind::Send(len) => {
                let before = life.ops[side][..index].iter();
                let n = before.filter(|op| matches!(op.kind, OpKind::Send(_))).count();
                let at = buffer(RECEIVE | cookie(pair, number, n));
                let data = bytes(plan, side, wc.wr_id, len);
                if memory.with(at, len, |b| b != &data[..]) {
                    return Err("the message is not there".into());
                }
            }
            kind @ (OpKind::Write | OpKind::Read) => {
                if peer.closed.as_ref().is_some_and(|(_, posted)| index >= *posted) {
                    return Err("the region did not exist any more".into());
                }
                let here = |b: &mut [u8]| b.iter().all(|&b| usize::from(b) > index);
                if kind == OpKind::Write && !memory.with(slot(pair, number), SLOT, here) {
                    return Err("the data is not there".into());
                }
                let source = bytes(plan, 1 - side, cookie(pair, number, OPS), SLOT);
                if kind == OpKind::Read && held[..SLOT] != source[..] {
                    return Err("other data was read".into());
                }
            }
            OpKind::Add => {
                let value = u64::from_ne_bytes(held[..8].try_into().map_err(|_| "no value")?);
                if value >= self.posted[side] || !self.brought[side].insert(value) {
                    return Err(format!("the counter gave {value}, twice or from nowhere"));
                }
            }
        }
        Ok(())
    }

    /// The newest write up to some byte, the one before from there on; and what was deregistered stays.
    pub fn check_slot(&self, pair: usize, side: usize) -> Result<(), String> {
        let (number, _, qps) = &self.pairs[pair];
        if *number >= self.plan.pairs[pair].len() {
            return Ok(());
        }
        let peer = &qps[1 - side];
        let ops = &self.life(pair).ops[1 - side];
        let wrote = |op: &Op| op.kind == OpKind::Write;
        let error = |what: &str| Err(format!("pair {pair}, life {number}, slot of node {side}: {what}"));
        self.nodes[side].memory.with(slot(pair, *number), BUFFER, |held| {
            let newest = usize::from(held[0]);
            let split = held[..SLOT].iter().position(|&b| b != held[0]).unwrap_or(SLOT);
            let before = ops
                .get(..newest.saturating_sub(1))
                .and_then(|ops| ops.iter().rposition(wrote));
            let before = before.map_or(0, |index| index + 1);
            if held[split..SLOT].iter().any(|&b| usize::from(b) != before) {
                return error("writes are mixed");
            }
            if newest > peer.posted || peer.drained.is_some_and(|sent| newest > sent) {
                return error("a write came too early");
            }
            if held[SLOT..].iter().any(|&b| b != 0) {
                return error("something was written behind it");
            }
            match &qps[side].closed {
                Some((closed, _)) if closed[..] != held[..] => error("changed after it was deregistered"),
                _ => Ok(()),
            }
        })
    }

    /// The sums are right, and no old memory has changed.
    pub fn finish(mut self) -> Result<Sums, String> {
        for (pair, (number, ..)) in self.pairs.iter().enumerate() {
            if *number != self.plan.pairs[pair].len() {
                return Err(format!("pair {pair} comes to a stop in life {number}"));
            }
        }
        for (side, at, held) in &self.frozen {
            if self.nodes[*side].memory.with(*at, BLOCK, |b| b != &held[..]) {
                return Err(format!("node {side}: memory at {at:#x} changed after its life"));
            }
        }
        for side in 0..2 {
            let range: Range<u64> = self.brought[side].len() as u64..self.posted[side] + 1;
            let memory = &self.nodes[1 - side].memory;
            let count = u64::from_ne_bytes(memory.with(BASE, 8, |b| b.try_into().unwrap_or_default()));
            if !range.contains(&count) || self.brought[side].iter().any(|&value| value >= count) {
                return Err(format!(
                    "the counter of node {} is {count}, not in {range:?}",
                    1 - side
                ));
            }
            self.sums.added += self.brought[side].len() as u64;
        }
        Ok(self.sums)
    }
}
