//! Simplifies a program that shows a fault of the engine.

use std::ops::Range;
use std::time::Duration;

use ferroce_engine::link::RoceVersion;
use ferroce_engine::link::random::Probability;

use crate::program::{Hole, Message, Place, Program, Region, mtu_bytes};

impl Program {
    /// Programs that are simpler than this one in one respect, boldest first.
    pub fn simpler(&self) -> Vec<Program> {
        let mut out = Vec::new();
        let mut variant = |change: &mut dyn FnMut(&mut Program)| {
            let mut p = self.clone();
            change(&mut p);
            if p != *self {
                out.push(p);
            }
        };
        for i in 0..self.connections.len() {
            if self.connections.len() > 1 {
                variant(&mut |p| {
                    p.connections.remove(i);
                    let renumber = |hole: Hole| Hole {
                        connection: hole.connection - usize::from(hole.connection > i),
                        ..hole
                    };
                    p.hole = p.hole.filter(|hole| hole.connection != i).map(renumber);
                });
            }
        }
        variant(&mut |p| p.hole = None);
        for i in 0..self.connections.len() {
            for side in 0..2 {
                let len = self.connections[i].streams[side].messages.len();
                for range in [0..len, len / 2..len, 0..len / 2] {
                    variant(&mut |p| remove_messages(p, i, side, range.clone()));
                }
            }
        }
        for side in 0..2 {
            variant(&mut |p| p.conditions[side].rates.loss = Probability::ZERO);
            variant(&mut |p| p.conditions[side].rates.duplicate = Probability::ZERO);
            variant(&mut |p| p.conditions[side].rates.reorder = Probability::ZERO);
            variant(&mut |p| p.conditions[side].rates.corrupt = Probability::ZERO);
            variant(&mut |p| p.conditions[side].burst = Probability::ZERO);
            variant(&mut |p| p.conditions[side].blackout = None);
            variant(&mut |p| p.conditions[side].jitter = Duration::ZERO);
            variant(&mut |p| p.nodes[side].nap = 0);
            variant(&mut |p| p.nodes[side].considerate = false);
            variant(&mut |p| p.nodes[side].srq = false);
            variant(&mut |p| one_srq(p, side));
            variant(&mut |p| p.nodes[side].region = Region::Plain);
            variant(&mut |p| p.nodes[side].events = false);
            variant(&mut |p| p.nodes[side].one_cq = true);
            variant(&mut |p| p.nodes[side].tx_room = (256, 1024));
            variant(&mut |p| p.nodes[side].rx_room = (4 << 20, 2 << 20));
        }
        variant(&mut |p| p.ipv6 = false);
        variant(&mut |p| p.version = RoceVersion::V2);
        variant(&mut |p| p.multicast = false);
        for i in 0..self.connections.len() {
            variant(&mut |p| p.connections[i].sig_all = false);
            variant(&mut |p| p.connections[i].psn = [0, 0]);
            variant(&mut |p| p.connections[i].timeout = 12);
            variant(&mut |p| p.connections[i].retry_cnt = 7);
            for side in 0..2 {
                variant(&mut |p| {
                    p.connections[i].streams[side]
                        .receives
                        .iter_mut()
                        .for_each(|r| r.at = 0)
                });
                variant(&mut |p| {
                    p.connections[i].streams[side]
                        .receives
                        .iter_mut()
                        .for_each(|r| r.sges = 1)
                });
                variant(&mut |p| {
                    p.connections[i].streams[side]
                        .messages
                        .iter_mut()
                        .for_each(|m| m.at = 0)
                });
                variant(&mut |p| p.connections[i].streams[side].messages.iter_mut().for_each(plain));
                let messages = &self.connections[i].streams[side].messages;
                for k in 0..messages.len() {
                    variant(&mut |p| remove_messages(p, i, side, k..k + 1));
                }
                for (k, message) in messages.iter().enumerate() {
                    for len in [0, 1, mtu_bytes(self.mtu) + 1, message.len / 2] {
                        if len < message.len && !message.kind.counts() {
                            variant(&mut |p| p.connections[i].streams[side].messages[k].len = len);
                        }
                    }
                }
            }
        }
        out
    }
}

/// XRC: one shared receive queue at a node.
fn one_srq(p: &mut Program, side: usize) {
    if p.nodes[side].xrc_srqs > 1 {
        p.nodes[side].xrc_srqs = 1;
        let streams = p.connections.iter_mut().map(|c| &mut c.streams[1 - side]);
        streams
            .flat_map(|stream| &mut stream.messages)
            .for_each(|message| message.srq = 0);
    }
}

/// Takes away what is special about a message, but what it does, its length and a fence that it may need.
fn plain(message: &mut Message) {
    *message = Message {
        imm: message.imm.filter(|_| !message.kind.is_send()),
        signaled: true,
        solicited: false,
        inline: false,
        sges: 1,
        ..message.clone()
    };
}

/// Removes messages; and if they are steps of windows, all steps of these.
fn remove_messages(p: &mut Program, connection: usize, side: usize, range: Range<usize>) {
    let removed = &p.connections[connection].streams[side].messages[range.clone()];
    let lives: Vec<(usize, usize)> = removed
        .iter()
        .filter_map(|m| m.step)
        .map(|s| (s.owner, s.window))
        .collect();
    remove(p, connection, side, range);
    for side in 0..2 {
        let ends = |m: &Message| m.step.is_some_and(|s| lives.contains(&(s.owner, s.window)));
        while let Some(at) = p.connections[connection].streams[side]
            .messages
            .iter()
            .position(ends)
        {
            remove(p, connection, side, at..at + 1);
        }
    }
}

/// Removes messages and the receives meant for them. A hole keeps its buffer, or goes.
fn remove(p: &mut Program, connection: usize, side: usize, range: Range<usize>) {
    let stream = &mut p.connections[connection].streams[side];
    let first = stream.receives_of(range.start).min(stream.receives.len());
    let end = stream.receives_of(range.end).min(stream.receives.len());
    stream.receives.drain(first..end);
    stream.messages.drain(range.clone());
    if let Some(last) = stream.messages.last_mut() {
        last.signaled = true;
    }
    let Some(hole) = p
        .hole
        .as_mut()
        .filter(|h| (h.connection, h.side) == (connection, side))
    else {
        return;
    };
    let (at, removed) = match &mut hole.place {
        Place::Message(at) => (at, range),
        Place::Receive(at) => (at, first..end),
        Place::Slot(_) => return,
    };
    if removed.contains(at) {
        p.hole = None;
    } else if *at >= removed.end {
        *at -= removed.len();
    }
}
