//! Makes the program of a seed.

use std::time::Duration;

use ferroce_engine::link::RoceVersion;
use ferroce_engine::link::fault::FaultRates;
use ferroce_engine::link::random::{Prng, Probability};
use ferroce_engine::link::sim::Conditions;
use ferroce_engine::time::Time;
use ferroce_engine::verbs::QpType;

use crate::program::{
    Connection, GRH_LEN, Hole, Kind, Message, NodeShape, Place, Program, Receive, Region, Slot, Stream,
    is_reliable, mtu_bytes,
};
use crate::windows;

/// Packets of a whole program, so that a run stays short.
const PACKETS: u64 = 600;

/// What a case is about, beside faults of the network.
#[derive(Clone, Copy, PartialEq)]
enum Special {
    Nothing,
    /// From some time on nothing gets through, one way or both.
    Dark,
    /// Receives are missing, and RNR retries limited.
    NoReceives,
    /// A receive is too short.
    ShortReceive,
    /// A remote operation names a wrong key.
    WrongKey,
    /// A buffer is unmapped while in use.
    Hole,
    /// A message names a shared receive queue that is none, or of another domain (XRC).
    WrongSrq,
}

impl Program {
    /// The program of a seed.
    pub fn new(transport: QpType, seed: u64) -> Program {
        let mut rng = Prng::new(seed ^ (transport as u64) << 56);
        let r = &mut rng;
        let mtu = r.between(1, 5) as u32;
        let special = match r.below(20) {
            _ if !is_reliable(transport) => Special::Nothing,
            0 => Special::Dark,
            1 => Special::NoReceives,
            2 => Special::ShortReceive,
            3 => Special::WrongKey,
            4 => Special::Hole,
            5 if transport == QpType::XrcSend => Special::WrongSrq,
            _ => Special::Nothing,
        };
        // On a shared queue nobody can say which message gets which receive.
        let xrc = transport == QpType::XrcSend;
        let may_share = !xrc && !matches!(special, Special::NoReceives | Special::Hole);
        let srq = [(); 2].map(|()| one_in(r, 4) && may_share);
        let mut conditions = [conditions(r), conditions(r)];
        if special == Special::Dark {
            let start = Time::from_nanos(r.below(500_000));
            let dark = r.below(3);
            for (side, conditions) in (0..).zip(&mut conditions) {
                if dark == 2 || dark == side {
                    conditions.blackout = Some(start..Time::from_nanos(u64::MAX));
                }
            }
        }
        let mut nodes = srq.map(|srq| node(r, srq));
        if xrc {
            nodes
                .iter_mut()
                .for_each(|node| node.xrc_srqs = r.between(1, 3) as usize);
        }
        let xrc_srqs = [nodes[0].xrc_srqs, nodes[1].xrc_srqs];
        let count = *r.pick(&[1, 1, 1, 2, 3, 4]).unwrap_or(&1);
        let remote = transport != QpType::Ud && (special == Special::WrongKey || one_in(r, 2));
        let mut left = PACKETS;
        let connections = (0..count).map(|_| {
            let share = left / (2 * count);
            left -= share;
            let mut connection = connection(r, transport, mtu, remote, special, share);
            for (stream, srqs) in connection.streams.iter_mut().zip([xrc_srqs[1], xrc_srqs[0]]) {
                if srqs > 1 {
                    let messages = stream.messages.iter_mut();
                    messages.for_each(|message| message.srq = r.below(srqs as u64) as usize);
                }
            }
            connection
        });
        let connections = connections.collect();
        let ipv6 = one_in(r, 3);
        let multicast = transport == QpType::Ud && one_in(r, 3);
        let mut program = Program {
            seed,
            transport,
            ipv6,
            // A third of the seeds, and no other one changes.
            version: if seed % 3 == 1 && !multicast {
                RoceVersion::V1
            } else {
                RoceVersion::V2
            },
            multicast,
            mtu,
            conditions,
            nodes,
            connections,
            hole: None,
        };
        if special == Special::Hole {
            program.hole = hole(r, &program);
        }
        program.mend();
        program
    }

    /// Many QPs of one process towards another, whose buffer has no room for a few packets of each. RC knows by itself how
    /// much it may send; the others look.
    pub fn crowd(transport: QpType, seed: u64) -> Program {
        let mut rng = Prng::new(seed);
        let r = &mut rng;
        let mtu = r.between(3, 5) as u32;
        let connections = (0..r.between(20, 60)).map(|_| Connection {
            psn: [psn(r), psn(r)],
            depth: 16,
            sig_all: true,
            timeout: 14,
            retry_cnt: 7,
            rnr_retry: 7,
            min_rnr_timer: 12,
            rd_atomic: 4,
            streams: [(); 2].map(|()| {
                let mut stream = messages(r, transport, mtu, transport != QpType::Ud, 16, 20);
                // Receives are there first.
                stream.messages.iter_mut().for_each(|message| message.at = 1000);
                stream.receives = receives(r, transport, mtu, &stream, false);
                stream
            }),
        });
        let connections = connections.collect();
        let conditions = Conditions {
            delay: Duration::from_micros(20),
            ..Conditions::default()
        };
        let slow = NodeShape {
            tx_room: (256, 1024),
            rx_room: (96 << 10, 48 << 10),
            considerate: transport != QpType::Rc,
            nap: 200,
            events: false,
            one_cq: true,
            srq: false,
            xrc_srqs: 0,
            region: Region::Plain,
        };
        Program {
            seed,
            transport,
            ipv6: false,
            version: RoceVersion::V2,
            multicast: false,
            mtu,
            conditions: [conditions.clone(), conditions],
            nodes: [slow.clone(), slow],
            connections,
            hole: None,
        }
    }

    /// Makes receives of a shared queue fit any message.
    fn mend(&mut self) {
        for side in 0..2 {
            if !self.nodes[1 - side].shares() {
                continue;
            }
            let messages = self.connections.iter().flat_map(|c| &c.streams[side].messages);
            let largest = messages.map(|m| m.len).max().unwrap_or(0);
            let receives = self
                .connections
                .iter_mut()
                .flat_map(|c| &mut c.streams[side].receives);
            receives.for_each(|receive| receive.len = receive.len.max(largest));
        }
    }
}

fn one_in(r: &mut Prng, n: u64) -> bool {
    r.below(n) == 0
}

fn connection(
    r: &mut Prng,
    transport: QpType,
    mtu: u32,
    remote: bool,
    special: Special,
    packets: u64,
) -> Connection {
    let depth = r.between(1, 24) as u32;
    let late = one_in(r, 3);
    let mut streams = [(); 2].map(|()| messages(r, transport, mtu, remote, depth, packets));
    if transport == QpType::Rc && remote && one_in(r, 2) {
        windows::weave(r, &mut streams, mtu_bytes(mtu));
        streams.iter_mut().for_each(|stream| drain(stream, depth));
    }
    for stream in &mut streams {
        stream.receives = receives(r, transport, mtu, stream, late);
    }
    let victim = &mut streams[r.below(2) as usize];
    match special {
        Special::NoReceives => {
            let kept = r.below(victim.receives.len() as u64 + 1);
            victim.receives.truncate(kept as usize);
        }
        Special::ShortReceive => {
            let suits = |m: &Message| m.kind.is_send() && m.len > 0;
            let found = victim.receiving().zip(0..).find(|((_, m), _)| suits(m));
            if let Some((len, i)) = found.map(|((_, m), i)| (m.len, i)) {
                victim.receives[i].len = r.below(u64::from(len)) as u32;
            }
        }
        Special::WrongKey => {
            let remote = |m: &&mut Message| m.kind.slot().is_some() && m.len > 0;
            let mut messages: Vec<&mut Message> = victim.messages.iter_mut().filter(remote).collect();
            let at = r.below(messages.len() as u64) as usize;
            if let Some(message) = messages.get_mut(at) {
                message.wrong_key = true;
                if let Some(via) = &mut message.via {
                    via.tag ^= 0x80;
                }
            }
        }
        Special::WrongSrq => {
            let at = r.below(victim.messages.len() as u64) as usize;
            if let Some(message) = victim.messages.get_mut(at) {
                message.wrong_srq = true;
            }
        }
        Special::Nothing | Special::Dark | Special::Hole => {}
    }
    Connection {
        psn: [psn(r), psn(r)],
        depth,
        sig_all: one_in(r, 4),
        // 17 ms to 34 ms: above the longest way to and fro, naps and slow interfaces included; sometimes far below it.
        timeout: if one_in(r, 10) {
            r.between(5, 8) as u8
        } else {
            r.between(12, 13) as u8
        },
        retry_cnt: if one_in(r, 8) { r.below(7) as u8 } else { 7 },
        rnr_retry: if special == Special::NoReceives {
            r.below(7) as u8
        } else {
            7
        },
        min_rnr_timer: r.between(1, 14) as u8,
        rd_atomic: r.between(1, 8) as u8,
        streams,
    }
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
        considerate: one_in(r, 4),
        nap: if one_in(r, 3) { r.between(1, 300) } else { 0 },
        events: one_in(r, 4),
        one_cq: one_in(r, 2),
        srq,
        xrc_srqs: 0,
        region: match r.below(4) {
            0 => Region::ZeroBased,
            1 => Region::Everything,
            _ => Region::Plain,
        },
    }
}

/// The length of a message: often at the edges of packets, sometimes long.
fn message_len(r: &mut Prng, transport: QpType, mtu: u32, packets: u64) -> u32 {
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
        packets * mtu
    };
    len.min(longest) as u32
}

/// Chooses what messages do, and which slots they name. Results must not depend on timing: a WRITE to a slot that a
/// READ before it names waits for that by its fence.
struct Slots {
    slots: Vec<Slot>,
    /// By slot: a READ names it.
    read: Vec<bool>,
    transport: QpType,
}

impl Slots {
    fn add(&mut self, len: u32, counter: bool) -> usize {
        self.slots.push(Slot { len, counter });
        self.read.push(false);
        self.slots.len() - 1
    }

    /// A slot for `len` bytes: one that exists (where all arrives), or a new one.
    fn choose(&mut self, r: &mut Prng, len: u32) -> usize {
        let fits = |slot: &usize| !self.slots[*slot].counter && self.slots[*slot].len >= len;
        let old: Vec<usize> = (0..self.slots.len()).filter(fits).collect();
        match r.pick(&old) {
            Some(&slot) if is_reliable(self.transport) && one_in(r, 2) => slot,
            _ => self.add(len, false),
        }
    }

    fn counter(&mut self) -> usize {
        let known = self.slots.iter().position(|slot| slot.counter);
        known.unwrap_or_else(|| self.add(8, true))
    }

    /// Kind, length and whether a fence is needed.
    fn operation(&mut self, r: &mut Prng, len: u32) -> (Kind, u32, bool) {
        let reliable = is_reliable(self.transport);
        match r.below(12) {
            0 | 1 => {
                let slot = self.choose(r, len);
                (Kind::Write(slot), len, self.read[slot])
            }
            2 | 3 if reliable => {
                let slot = self.choose(r, len);
                self.read[slot] = true;
                (Kind::Read(slot), len, false)
            }
            4 if reliable => {
                let (slot, compare, swap) = (self.counter(), r.below(3), r.below(3));
                (Kind::CompareSwap { slot, compare, swap }, 8, false)
            }
            5 if reliable => {
                let (slot, add) = (self.counter(), r.below(3));
                (Kind::FetchAdd { slot, add }, 8, false)
            }
            6 if reliable => (Kind::AtomicWrite(self.counter()), 8, false),
            7 if reliable => {
                let (slot, region) = (self.choose(r, len), one_in(r, 4));
                (Kind::Flush { slot, region }, len, false)
            }
            _ => (Kind::Send, len, false),
        }
    }
}

fn messages(r: &mut Prng, transport: QpType, mtu: u32, remote: bool, depth: u32, packets: u64) -> Stream {
    let count = match r.below(8) {
        0 => 0,
        1 => 1,
        2 | 3 => r.between(2, 8),
        _ => r.between(8, 40),
    };
    let paced = one_in(r, 4);
    let (mut left, mut at) = (packets, 0);
    let mut slots = Slots {
        slots: Vec::new(),
        read: Vec::new(),
        transport,
    };
    let mut out: Vec<Message> = Vec::new();
    for _ in 0..count {
        let len = message_len(r, transport, mtu, left);
        let (kind, len, fence) = if remote {
            slots.operation(r, len)
        } else {
            (Kind::Send, len, false)
        };
        left = left.saturating_sub(u64::from(len.div_ceil(mtu_bytes(mtu))).max(1));
        let signaled = one_in(r, 2);
        at += if paced { r.below(300) } else { 0 };
        out.push(Message {
            fence: fence || one_in(r, 8),
            imm: (one_in(r, 3) && matches!(kind, Kind::Send | Kind::Write(_))).then(|| r.next_u64() as u32),
            signaled,
            solicited: one_in(r, 3),
            inline: len <= 64 && one_in(r, 2) && kind.has_buffer() && !kind.fetches(),
            sges: if kind.fetches() && len == 8 {
                1
            } else {
                r.between(1, 4) as u32
            },
            at,
            ..Message::new(kind, len)
        });
        if left == 0 {
            break;
        }
    }
    let mut stream = Stream {
        messages: out,
        slots: slots.slots,
        ..Stream::default()
    };
    drain(&mut stream, depth);
    stream
}

/// A queue drains by completions: at least one in every depth of it.
fn drain(stream: &mut Stream, depth: u32) {
    let mut unsignaled = 0;
    for message in &mut stream.messages {
        message.signaled |= unsignaled + 1 >= depth;
        unsignaled = if message.signaled { 0 } else { unsignaled + 1 };
    }
    if let Some(last) = stream.messages.last_mut() {
        last.signaled = true;
    }
}

fn receives(r: &mut Prng, transport: QpType, mtu: u32, stream: &Stream, late: bool) -> Vec<Receive> {
    let largest = stream.messages.iter().map(|m| m.len).max().unwrap_or(0);
    let mut at = 0;
    let receive = |(_, message): (usize, &Message)| {
        at += if late && one_in(r, 3) { r.below(1500) } else { 0 };
        let len = match transport {
            QpType::Ud => GRH_LEN + mtu_bytes(mtu),
            // Losses shift which message gets which receive.
            QpType::Uc => largest,
            _ if !message.kind.is_send() => r.below(2) as u32,
            _ if one_in(r, 2) => message.len,
            _ => message.len + r.below(100) as u32,
        };
        Receive {
            len,
            sges: r.between(1, 3) as u32,
            at,
        }
    };
    stream.receiving().map(receive).collect()
}

/// A buffer to unmap: one that holds something and is not copied when posted.
fn hole(r: &mut Prng, program: &Program) -> Option<Hole> {
    let mut places = Vec::new();
    for (connection, c) in program.connections.iter().enumerate() {
        for (side, stream) in c.streams.iter().enumerate() {
            let mut add = |place| places.push((connection, side, place));
            for (i, message) in stream.messages.iter().enumerate() {
                if message.len > 0 && !message.inline && message.kind.has_buffer() {
                    add(Place::Message(i));
                }
            }
            for (i, (_, message)) in stream.receiving().enumerate() {
                if message.len > 0 && message.kind.is_send() && program.transport == QpType::Rc {
                    add(Place::Receive(i));
                }
            }
            (0..stream.slots.len())
                .filter(|&i| stream.slots[i].len > 0)
                .for_each(|i| add(Place::Slot(i)));
        }
    }
    let &(connection, side, place) = r.pick(&places)?;
    Some(Hole {
        connection,
        side,
        place,
        at: r.below(300),
    })
}
