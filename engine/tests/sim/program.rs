//! Random programs: what two nodes send each other, and under which conditions. Made from a seed, and shrunk on failure.

use std::fmt;
use std::time::Duration;

use ferroce_engine::link::fault::FaultRates;
use ferroce_engine::link::random::{Prng, Probability};
use ferroce_engine::link::sim::Conditions;
use ferroce_engine::time::Time;
use ferroce_engine::verbs::QpType;

/// Room for the GRH before a UD payload.
pub const GRH_LEN: u32 = 40;

/// A whole case: everything that a run depends on.
#[derive(Clone, Debug, PartialEq)]
pub struct Program {
    /// Seeds the network, the devices and the message bytes.
    pub seed: u64,
    /// RC, UC or UD.
    pub transport: QpType,
    /// IPv6 addresses instead of IPv4.
    pub ipv6: bool,
    /// Verbs code of the path MTU.
    pub mtu: u32,
    /// Conditions from node 0 to node 1, and back.
    pub conditions: [Conditions; 2],
    /// The two nodes.
    pub nodes: [NodeShape; 2],
    /// QP pairs.
    pub connections: Vec<Connection>,
}

/// What is particular to a node.
#[derive(Clone, Debug, PartialEq)]
pub struct NodeShape {
    /// Packets that the link takes before a flush, and that the interface holds.
    pub tx_room: (usize, usize),
    /// Bytes of the receive queue, and the window that the link tells of.
    pub rx_room: (usize, u32),
    /// How long the application may look away, in microseconds.
    pub nap: u64,
    /// The application sleeps until its CQs notify it, instead of polling.
    pub events: bool,
    /// One CQ for sends and receives.
    pub one_cq: bool,
    /// One shared receive queue for all QPs.
    pub srq: bool,
}

/// A pair of QPs, one at each node.
#[derive(Clone, Debug, PartialEq)]
pub struct Connection {
    /// First PSN that each node sends.
    pub psn: [u32; 2],
    /// Depth of the send queues.
    pub depth: u32,
    /// Every send gives a completion.
    pub sig_all: bool,
    /// Local ACK timeout code.
    pub timeout: u8,
    /// Retries of timeouts.
    pub retry_cnt: u8,
    /// Retries after RNR NAKs.
    pub rnr_retry: u8,
    /// RNR timer code.
    pub min_rnr_timer: u8,
    /// What node 0 sends to node 1, and back.
    pub streams: [Stream; 2],
}

/// What one node sends to the other over one connection.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Stream {
    /// In order of posting.
    pub messages: Vec<Message>,
    /// What the receiver posts for them, in order. May be too few or too short where the case is about that.
    pub receives: Vec<Receive>,
}

/// A message to send.
#[derive(Clone, Debug, PartialEq)]
pub struct Message {
    /// Bytes.
    pub len: u32,
    /// Immediate data.
    pub imm: Option<u32>,
    /// Ask for a completion.
    pub signaled: bool,
    /// Ask for a solicited event.
    pub solicited: bool,
    /// Data copied when posting.
    pub inline: bool,
    /// Scatter/gather entries.
    pub sges: u32,
    /// Not posted before this time, in microseconds.
    pub at: u64,
}

/// A receive to post.
#[derive(Clone, Debug, PartialEq)]
pub struct Receive {
    /// Bytes.
    pub len: u32,
    /// Scatter/gather entries.
    pub sges: u32,
    /// Not posted before this time, in microseconds.
    pub at: u64,
}

/// Bytes of a path MTU code.
pub fn mtu_bytes(code: u32) -> u32 {
    128 << code
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Program {
            seed,
            transport,
            ipv6,
            mtu,
            conditions,
            nodes,
            connections,
        } = self;
        writeln!(
            f,
            "{transport}, seed {seed:#x}, path MTU {}, IPv6 {ipv6}",
            mtu_bytes(*mtu)
        )?;
        for side in 0..2 {
            writeln!(f, "  node {side}: {:?}", nodes[side])?;
            writeln!(f, "    sends under {:?}", conditions[side])?;
        }
        for (i, connection) in connections.iter().enumerate() {
            let Connection { streams, .. } = connection;
            let empty = Connection {
                streams: Default::default(),
                ..connection.clone()
            };
            writeln!(f, "  connection {i}: {empty:?}")?;
            for (side, stream) in streams.iter().enumerate() {
                stream
                    .messages
                    .iter()
                    .try_for_each(|m| writeln!(f, "    node {side} sends {m:?}"))?;
                stream
                    .receives
                    .iter()
                    .try_for_each(|r| writeln!(f, "    node {} has {r:?}", 1 - side))?;
            }
        }
        Ok(())
    }
}

impl Program {
    /// The program of a seed.
    pub fn new(transport: QpType, seed: u64) -> Program {
        let mut rng = Prng::new(seed ^ (transport as u64) << 56);
        let r = &mut rng;
        let mtu = r.between(1, 5) as u32;
        // What is special about this case: most have only faults.
        let special = if transport == QpType::Rc { r.below(20) } else { 99 };
        let (dark, no_receives, short_receives) = (special == 0, special == 1, special == 2);
        let srq = [one_in(r, 4) && !no_receives, one_in(r, 4) && !no_receives];
        let mut conditions = [conditions(r), conditions(r)];
        if dark {
            let start = Time::from_nanos(r.below(500_000));
            let side = r.below(3);
            for (i, c) in conditions.iter_mut().enumerate() {
                if side == 2 || side == i as u64 {
                    c.blackout = Some(start..Time::from_nanos(u64::MAX));
                }
            }
        }
        let nodes = srq.map(|srq| node(r, srq));
        let count = *r.pick(&[1, 1, 1, 2, 3, 4]).unwrap_or(&1);
        // Packets of the whole program, so that a run stays short.
        let mut budget = 600;
        let connections = (0..count)
            .map(|_| {
                let depth = r.between(1, 24) as u32;
                let sig_all = one_in(r, 4);
                let psn = [psn(r), psn(r)];
                let late = one_in(r, 3);
                let mut streams = [(); 2].map(|()| {
                    let share = budget / (2 * count);
                    let messages = messages(r, transport, mtu, depth, share);
                    let largest = messages.iter().map(|m| m.len).max().unwrap_or(0);
                    Stream {
                        receives: receives(r, transport, mtu, &messages, largest, late),
                        messages,
                    }
                });
                budget -= budget / (2 * count);
                let victim = &mut streams[r.below(2) as usize];
                if no_receives {
                    victim
                        .receives
                        .truncate(r.below(victim.messages.len() as u64 + 1) as usize);
                }
                if short_receives
                    && let Some(i) = (0..victim.receives.len()).find(|&i| victim.messages[i].len > 0)
                {
                    let len = victim.messages[i].len;
                    victim.receives[i].len = r.below(u64::from(len)) as u32;
                }
                Connection {
                    psn,
                    depth,
                    sig_all,
                    // 4 ms to 34 ms: above the longest way to and fro, naps included; sometimes far below it.
                    timeout: if one_in(r, 10) {
                        r.between(5, 8) as u8
                    } else {
                        r.between(10, 13) as u8
                    },
                    retry_cnt: if one_in(r, 8) { r.below(7) as u8 } else { 7 },
                    rnr_retry: if no_receives { r.below(7) as u8 } else { 7 },
                    min_rnr_timer: r.between(1, 14) as u8,
                    streams,
                }
            })
            .collect();
        let mut program = Program {
            seed,
            transport,
            ipv6: one_in(r, 3),
            mtu,
            conditions,
            nodes,
            connections,
        };
        program.mend();
        program
    }

    /// Makes receives of a shared queue fit any message, as nobody can say which gets which.
    fn mend(&mut self) {
        for side in 0..2 {
            if !self.nodes[1 - side].srq {
                continue;
            }
            let largest = self
                .connections
                .iter()
                .flat_map(|c| &c.streams[side].messages)
                .map(|m| m.len)
                .max()
                .unwrap_or(0);
            for c in &mut self.connections {
                for receive in &mut c.streams[side].receives {
                    receive.len = receive.len.max(largest);
                }
            }
        }
    }

    /// Whether some receive of the stream from `side` is shorter than the message that it gets.
    pub fn has_short_receive(&self, connection: usize, side: usize) -> bool {
        let stream = &self.connections[connection].streams[side];
        !self.nodes[1 - side].srq
            && self.transport == QpType::Rc
            && stream
                .messages
                .iter()
                .zip(&stream.receives)
                .any(|(m, r)| r.len < m.len)
    }

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
                variant(&mut |p| drop(p.connections.remove(i)));
            }
        }
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
            variant(&mut |p| p.nodes[side].srq = false);
            variant(&mut |p| p.nodes[side].events = false);
            variant(&mut |p| p.nodes[side].one_cq = true);
            variant(&mut |p| p.nodes[side].tx_room = (256, 1024));
            variant(&mut |p| p.nodes[side].rx_room = (4 << 20, 2 << 20));
        }
        variant(&mut |p| p.ipv6 = false);
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
                        if len < message.len {
                            variant(&mut |p| p.connections[i].streams[side].messages[k].len = len);
                        }
                    }
                }
            }
        }
        out
    }
}

/// Takes away what is special about a message, but its length.
fn plain(message: &mut Message) {
    *message = Message {
        imm: None,
        signaled: true,
        solicited: false,
        inline: false,
        sges: 1,
        ..message.clone()
    };
}

/// Removes messages and the receives meant for them.
fn remove_messages(p: &mut Program, connection: usize, side: usize, range: std::ops::Range<usize>) {
    let stream = &mut p.connections[connection].streams[side];
    let end = range.end.min(stream.receives.len());
    stream.receives.drain(range.start.min(end)..end);
    stream.messages.drain(range);
    if let Some(last) = stream.messages.last_mut() {
        last.signaled = true;
    }
}

fn one_in(r: &mut Prng, n: u64) -> bool {
    r.below(n) == 0
}

/// A first PSN, often so near the wrap that the program crosses it.
fn psn(r: &mut Prng) -> u32 {
    match r.below(3) {
        0 => r.next_u64() as u32 & 0xff_ffff,
        1 => 0xff_ffff - r.below(4) as u32,
        _ => 0xff_ffff - r.below(400) as u32,
    }
}

fn conditions(r: &mut Prng) -> Conditions {
    let mut rate = || {
        if one_in(r, 3) {
            Probability::ZERO
        } else {
            Probability::per_million(r.below(100_001) as u32)
        }
    };
    let rates = FaultRates {
        loss: rate(),
        duplicate: rate(),
        reorder: rate(),
        corrupt: rate(),
    };
    Conditions {
        rates,
        burst: if one_in(r, 6) {
            Probability::per_million(r.below(5_000) as u32)
        } else {
            Probability::ZERO
        },
        burst_length: r.between(2, 30) as u32,
        delay: Duration::from_nanos(r.between(500, 100_000)),
        jitter: Duration::from_nanos(if one_in(r, 2) { r.below(50_000) } else { 0 }),
        reorder_by: Duration::from_nanos(r.between(1_000, 1_000_000)),
        blackout: None,
    }
}

fn node(r: &mut Prng, srq: bool) -> NodeShape {
    NodeShape {
        tx_room: if one_in(r, 3) {
            (r.between(1, 16) as usize, r.between(1, 16) as usize)
        } else {
            (256, 1024)
        },
        // A small queue holds at least eight of the largest packets; the window may be far too large for it.
        rx_room: match r.below(4) {
            0 => (
                r.between(34_000, 200_000) as usize,
                r.between(10_000, 400_000) as u32,
            ),
            1 => (1 << 20, 512 << 10),
            _ => (4 << 20, 2 << 20),
        },
        nap: if one_in(r, 3) { r.between(1, 300) } else { 0 },
        events: one_in(r, 4),
        one_cq: one_in(r, 2),
        srq,
    }
}

/// The length of a message: often at the edges of packets, sometimes long.
fn message_len(r: &mut Prng, transport: QpType, mtu: u32, budget: u64) -> u32 {
    let mtu = u64::from(mtu_bytes(mtu));
    let len = match r.below(10) {
        0 => 0,
        1 | 2 => r.between(1, 64),
        3 | 4 => r.below(mtu + 1),
        5 => mtu,
        6 => mtu * r.between(1, 4) + r.between(0, 2),
        7 => (mtu * r.between(1, 4)).saturating_sub(r.between(1, 3)),
        8 => r.below(8 * mtu),
        _ => r.below(400_000),
    };
    let longest = if transport == QpType::Ud {
        mtu
    } else {
        budget * mtu
    };
    len.min(longest) as u32
}

fn messages(r: &mut Prng, transport: QpType, mtu: u32, depth: u32, budget: u64) -> Vec<Message> {
    let count = match r.below(8) {
        0 => 0,
        1 => 1,
        2 | 3 => r.between(2, 8),
        _ => r.between(8, 40),
    };
    let paced = one_in(r, 4);
    let (mut left, mut unsignaled, mut at) = (budget, 0, 0);
    let mut out: Vec<Message> = Vec::new();
    for _ in 0..count {
        let len = message_len(r, transport, mtu, left);
        left = left.saturating_sub(u64::from(len.div_ceil(mtu_bytes(mtu))).max(1));
        // A queue drains by completions: at least one in every depth of it.
        let signaled = one_in(r, 2) || unsignaled + 1 >= depth;
        unsignaled = if signaled { 0 } else { unsignaled + 1 };
        at += if paced { r.below(300) } else { 0 };
        out.push(Message {
            len,
            imm: one_in(r, 3).then(|| r.next_u64() as u32),
            signaled,
            solicited: one_in(r, 3),
            inline: len <= 64 && one_in(r, 2),
            sges: r.between(1, 4) as u32,
            at,
        });
        if left == 0 {
            break;
        }
    }
    if let Some(last) = out.last_mut() {
        last.signaled = true;
    }
    out
}

fn receives(
    r: &mut Prng,
    transport: QpType,
    mtu: u32,
    messages: &[Message],
    largest: u32,
    late: bool,
) -> Vec<Receive> {
    let mut at = 0;
    messages
        .iter()
        .map(|m| {
            at += if late && one_in(r, 3) { r.below(1500) } else { 0 };
            let len = match transport {
                QpType::Ud => GRH_LEN + mtu_bytes(mtu),
                // Losses shift which message gets which receive.
                QpType::Uc => largest,
                _ if one_in(r, 2) => m.len,
                _ => m.len + r.below(100) as u32,
            };
            Receive {
                len,
                sges: r.between(1, 3) as u32,
                at,
            }
        })
        .collect()
}
