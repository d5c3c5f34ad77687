//! QPs that are reset, destroyed, failed and drained in the middle of traffic, and connected again while the packets of
//! their old lives still fly.
//!
//! The model: a life of a pair of QPs has operations each way, memory of its own at both nodes, and PSNs far from those
//! of the life before. What it must show at any moment is known from the operations alone:
//! - a completion is of the life that goes on, in the order of posting, and succeeds unless the program did something to
//!   this life; what it is about is in memory, here and at the peer, at the very moment it is seen;
//! - a slot that is written again and again holds the newest write up to some byte, and the one before it from there on;
//! - ERR flushes everything at once, oldest first; RESET and destruction leave nothing; memory of a life that has ended
//!   never changes again;
//! - a send queue that drains says so once, and begins nothing before it goes on;
//! - a region that was deregistered never changes again, nor is it read, whatever is under way;
//! - additions of all QPs to one counter give each value once.

use std::collections::HashSet;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use ferroce_engine::device::{Device, DeviceConfig, Limits, PdId, Progress, QpInit};
use ferroce_engine::link::sim::{NodeConfig, SimLink, SimNetwork};
use ferroce_engine::link::{Link, Path, RxPacket};
use ferroce_engine::memory::sim::SimMemory;
use ferroce_engine::queue::Cq;
use ferroce_engine::time::Time;
use ferroce_engine::verbs::*;
use ferroce_wire::PathMtu;

use crate::memory::content;
use crate::trace::{Traced, trace};

mod plan;
mod verdict;

use plan::{Fate, Life, OpKind};
pub use plan::{Plan, Sums};

const BASE: u64 = 0x7e00_0000_0000;
/// Bytes of what WRITEs and READs name.
const SLOT: usize = 1500;
/// Operations of one life, each way, at most.
const OPS: usize = 12;
/// Bytes of a message's buffer.
const BUFFER: usize = 2048;
/// Bytes of one life of one pair at a node: what the peer reads, what it writes, buffers of sends, buffers of receives.
const BLOCK: usize = 2 * BUFFER + 2 * OPS * BUFFER;
/// Lives of a pair at most.
const LIVES: usize = 4;
/// The cookie's part that says that it is a receive.
const RECEIVE: u64 = 1 << 63;
/// For how long the program looks away before it resets or destroys a QP, in microseconds.
const NAP: u64 = 100;
/// More virtual time than any plan needs.
const LIMIT: Time = Time::from_nanos(60_000_000_000);

/// A node.
struct Node {
    device: Device,
    link: SimLink,
    memory: Arc<SimMemory>,
    pd: PdId,
    cq: Arc<Cq>,
    lkey: u32,
}

/// One QP of a pair, in its present life.
#[derive(Default)]
struct Qp {
    qpn: u32,
    rkey: u32,
    posted: usize,
    sent: usize,
    received: usize,
    receives: usize,
    /// A completion told of an error, or the program took it to ERR.
    failed: bool,
    ended: bool,
    /// How many sends had completed when the queue had drained.
    drained: Option<usize>,
    drains: bool,
    /// What the deregistered memory held, and how many sends the peer had posted by then.
    closed: Option<(Vec<u8>, usize)>,
    access_error: bool,
    refused: bool,
}

/// A completion, and the buffer that it was about at that moment.
struct Seen {
    wc: Wc,
    buffer: Vec<u8>,
}

/// A run.
struct World<'a> {
    plan: &'a Plan,
    network: SimNetwork,
    nodes: [Node; 2],
    /// By pair: which life it lives, since when, and its QPs.
    pairs: Vec<(usize, Time, [Qp; 2])>,
    /// Memory that must not change any more: node, address, contents.
    frozen: Vec<(usize, u64, Vec<u8>)>,
    /// Additions to the counter of the peer, by node: posted, done, the values they brought.
    posted: [u64; 2],
    brought: [HashSet<u64>; 2],
    sums: Sums,
    now: Time,
}

fn cookie(pair: usize, life: usize, index: usize) -> u64 {
    (pair as u64) << 40 | (life as u64) << 20 | index as u64
}

/// Pair, life and index of a cookie.
fn meaning(wr_id: u64) -> (usize, usize, usize) {
    let part = |shift: u32| (wr_id >> shift & 0xf_ffff) as usize;
    (part(40) & 0xffff, part(20), part(0))
}

/// Where the block of a life lies: first what the peer reads, then what it writes.
fn block(pair: usize, life: usize) -> u64 {
    BASE + 64 + ((pair * LIVES + life) * BLOCK) as u64
}

fn slot(pair: usize, life: usize) -> u64 {
    block(pair, life) + BUFFER as u64
}

fn buffer(wr_id: u64) -> u64 {
    let (pair, life, index) = meaning(wr_id);
    let queue = if wr_id & RECEIVE != 0 { OPS } else { 0 };
    block(pair, life) + ((2 + queue + index) * BUFFER) as u64
}

fn micros(n: u64) -> Duration {
    Duration::from_micros(n)
}

fn ok<T>(what: &str, result: Result<T, VerbsError>) -> Result<T, String> {
    result.map_err(|e| format!("{what}: {e}"))
}

/// The bytes of a message, or with index `OPS` of what the peer reads.
fn bytes(plan: &Plan, side: usize, wr_id: u64, len: usize) -> Vec<u8> {
    let (pair, life, index) = meaning(wr_id);
    content(plan.seed, pair * LIVES + life, side, index, len as u32)
}

/// Runs a plan and checks it.
pub fn run(plan: &Plan) -> Result<Sums, String> {
    let mut world = World::new(plan)?;
    for pair in 0..plan.pairs.len() {
        world.begin(pair)?;
    }
    loop {
        world.network.advance(world.now);
        for side in 0..2 {
            world.drive(side)?;
        }
        let acted = world.act()?;
        let events = world.nodes.iter().filter_map(|node| node.device.next_deadline());
        let next = events
            .chain(world.network.next_event())
            .chain(world.next_act())
            .min();
        if acted {
            continue;
        }
        let Some(next) = next else { break };
        world.now = next.max(world.now);
        if world.now > LIMIT {
            return Err("no end".into());
        }
    }
    world.finish()
}

impl<'a> World<'a> {
    fn new(plan: &'a Plan) -> Result<World<'a>, String> {
        let network = SimNetwork::new(plan.seed);
        let len = 64 + plan.pairs.len() * LIVES * BLOCK;
        let node = |side: usize| -> Result<Node, String> {
            let memory = Arc::new(SimMemory::new(BASE, len));
            let address = IpAddr::from([10, 0, 0, side as u8 + 1]);
            let slot = side as u8 + 1;
            let config = NodeConfig::new(address, slot);
            let window = config.window;
            let link = network.attach(config);
            let mut device = Device::new(DeviceConfig {
                slot,
                memory: memory.clone(),
                seed: [slot ^ plan.seed as u8; 32],
                mtu: PathMtu::Mtu4096,
                limits: Limits::default(),
                window: Box::new(move |_| window),
            });
            let pd = ok("alloc_pd", device.alloc_pd())?;
            let cq = ok("create_cq", device.create_cq(1000, 0, None))?;
            let access = Access::LOCAL_WRITE | Access::REMOTE_ATOMIC;
            let lkey = ok("reg_mr", device.reg_mr(pd, BASE, len as u64, BASE, access))?.lkey;
            Ok(Node {
                device,
                link,
                memory,
                pd,
                cq,
                lkey,
            })
        };
        let nodes = [node(0)?, node(1)?];
        let ids = [nodes[0].link.id(), nodes[1].link.id()];
        network.set_conditions(ids[0], ids[1], plan.conditions[0].clone());
        network.set_conditions(ids[1], ids[0], plan.conditions[1].clone());
        let mut world = World {
            plan,
            network,
            nodes,
            pairs: Vec::new(),
            frozen: Vec::new(),
            posted: [0; 2],
            brought: Default::default(),
            sums: Sums::default(),
            now: Time::ZERO,
        };
        for _ in &plan.pairs {
            let qps = [world.create(0)?, world.create(1)?];
            world.pairs.push((0, Time::ZERO, qps));
        }
        Ok(world)
    }

    fn create(&mut self, side: usize) -> Result<Qp, String> {
        let node = &mut self.nodes[side];
        let init = QpInit {
            pd: Some(node.pd),
            qp_type: QpType::Rc,
            cap: QpCap {
                max_send_wr: OPS as u32,
                max_recv_wr: OPS as u32,
                max_send_sge: 1,
                max_recv_sge: 1,
                max_inline_data: 0,
            },
            send_cq: Some(node.cq.clone()),
            recv_cq: Some(node.cq.clone()),
            srq: None,
            xrcd: None,
            sq_sig_all: true,
        };
        let (qpn, _) = ok("create_qp", node.device.create_qp(init))?;
        Ok(Qp { qpn, ..Qp::default() })
    }

    fn life(&self, pair: usize) -> &'a Life {
        &self.plan.pairs[pair][self.pairs[pair].0]
    }

    fn modify(&mut self, side: usize, qpn: u32, attr: QpAttr, mask: QpAttrMask) -> Result<(), String> {
        let modified = self.nodes[side].device.modify_qp(self.now, qpn, &attr, mask);
        modified.map_err(|e| format!("to {:?}: {e}", attr.state))
    }

    fn enter(&mut self, side: usize, qpn: u32, state: QpState) -> Result<(), String> {
        let attr = QpAttr {
            state,
            sqd_async_notify: true,
            ..QpAttr::default()
        };
        let drain = state == QpState::Sqd;
        let notify = if drain {
            QpAttrMask::EN_SQD_ASYNC_NOTIFY
        } else {
            QpAttrMask::empty()
        };
        self.modify(side, qpn, attr, QpAttrMask::STATE | notify)
    }

    /// A life begins: both QPs are in RESET.
    fn begin(&mut self, pair: usize) -> Result<(), String> {
        use QpAttrMask as M;
        let (number, since, _) = self.pairs[pair];
        debug_assert!(since <= self.now);
        let life = self.life(pair);
        let qpns = [0, 1].map(|side| self.pairs[pair].2[side].qpn);
        self.pairs[pair].1 = self.now;
        for side in 0..2 {
            let node = &mut self.nodes[side];
            let (at, len) = (block(pair, number), 2 * BUFFER as u64);
            let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ;
            let rkey = ok("reg_mr", node.device.reg_mr(node.pd, at, len, at, access))?.rkey;
            let source = bytes(self.plan, side, cookie(pair, number, OPS), SLOT);
            node.memory.with(at, SLOT, |b| b.copy_from_slice(&source));
            self.pairs[pair].2[side] = Qp {
                qpn: qpns[side],
                rkey,
                ..Qp::default()
            };
            let address = |side: usize| IpAddr::from([10, 0, 0, side as u8 + 1]);
            let attr = QpAttr {
                state: QpState::Init,
                port: 1,
                access: Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC,
                path_mtu: self.plan.mtu,
                dest_qpn: qpns[1 - side],
                rq_psn: life.psn[1 - side],
                sq_psn: life.psn[side],
                path: Some(Path {
                    ifindex: 1,
                    ..Path::between(address(side), address(1 - side))
                }),
                max_rd_atomic: 4,
                max_dest_rd_atomic: 4,
                min_rnr_timer: 1,
                timeout: 10,
                retry_cnt: 7,
                rnr_retry: 7,
                ..QpAttr::default()
            };
            let init = M::STATE | M::PKEY_INDEX | M::PORT | M::ACCESS_FLAGS;
            self.modify(side, qpns[side], attr, init)?;
            let sends = life.ops[1 - side].iter();
            let receives = sends.filter(|op| matches!(op.kind, OpKind::Send(_))).count();
            for index in 0..receives {
                let wr_id = RECEIVE | cookie(pair, number, index);
                self.receive(side, qpns[side], wr_id)?;
            }
            self.pairs[pair].2[side].receives = receives;
            let rtr =
                M::AV | M::PATH_MTU | M::DEST_QPN | M::RQ_PSN | M::MAX_DEST_RD_ATOMIC | M::MIN_RNR_TIMER;
            let rts = M::SQ_PSN | M::TIMEOUT | M::RETRY_CNT | M::RNR_RETRY | M::MAX_QP_RD_ATOMIC;
            for (state, mask) in [(QpState::Rtr, rtr), (QpState::Rts, rts)] {
                self.modify(side, qpns[side], QpAttr { state, ..attr }, M::STATE | mask)?;
            }
        }
        if number > 0 && self.network.in_flight() > 0 {
            self.sums.flying += 1;
        }
        Ok(())
    }

    fn receive(&mut self, side: usize, qpn: u32, wr_id: u64) -> Result<(), String> {
        let sges = [Sge {
            addr: buffer(wr_id),
            length: BUFFER as u32,
            lkey: self.nodes[side].lkey,
        }];
        let wr = RecvWr { wr_id, sges: &sges };
        ok("post_recv", self.nodes[side].device.post_recv(qpn, &wr))
    }

    /// Posts operation `index` of a life.
    fn send(&mut self, pair: usize, side: usize, index: usize, kind: OpKind) -> Result<(), String> {
        let (number, _, qps) = &self.pairs[pair];
        let (number, qpn, rkey) = (*number, qps[side].qpn, qps[1 - side].rkey);
        let wr_id = cookie(pair, number, index);
        let at = buffer(wr_id);
        let (operation, len) = match kind {
            OpKind::Send(len) => (Operation::Send, len),
            OpKind::Write => {
                let addr = slot(pair, number);
                (Operation::Write { addr, rkey }, SLOT)
            }
            OpKind::Read => {
                let addr = block(pair, number);
                (Operation::Read { addr, rkey }, SLOT)
            }
            OpKind::Add => {
                self.posted[side] += 1;
                let (addr, add) = (BASE, 1);
                // All lives and pairs add to one counter.
                let rkey = self.nodes[1 - side].lkey;
                (Operation::FetchAdd { addr, rkey, add }, 8)
            }
        };
        let memory = &self.nodes[side].memory;
        match kind {
            OpKind::Send(_) => {
                let data = bytes(self.plan, side, wr_id, len);
                memory.with(at, len, |b| b.copy_from_slice(&data));
            }
            OpKind::Write => memory.with(at, len, |b| b.fill(index as u8 + 1)),
            _ => {}
        }
        let sges = [Sge {
            addr: at,
            length: len as u32,
            lkey: self.nodes[side].lkey,
        }];
        let wr = SendWr {
            wr_id,
            operation,
            flags: SendFlags::empty(),
            sges: &sges,
            ..SendWr::default()
        };
        ok("post_send", self.nodes[side].device.post_send(self.now, qpn, &wr))
    }

    /// What a runtime does, where completions are looked at after every packet.
    fn drive(&mut self, side: usize) -> Result<(), String> {
        let (now, naps) = (self.now, self.naps(side));
        let mut seen = Vec::new();
        let Node {
            device,
            link,
            memory,
            cq,
            ..
        } = &mut self.nodes[side];
        let mut look = || {
            if !naps {
                poll(cq, memory, &mut seen);
            }
        };
        let mut receive = |packet: &RxPacket<'_>| {
            trace(side, now, "receives", packet.data);
            device.receive(now, packet);
            look();
        };
        while link.receive(&mut receive).map_err(|e| e.to_string())? > 0 {}
        self.take(side, seen)?;
        self.nodes[side].device.handle_timeouts(now);
        loop {
            let node = &mut self.nodes[side];
            let link = &mut Traced {
                side,
                now,
                link: &mut node.link,
            };
            let progress = node.device.transmit(now, link);
            node.link.flush().map_err(|e| e.to_string())?;
            if progress == Progress::Idle {
                break;
            }
        }
        if !naps {
            self.look(side)?;
            self.events(side)?;
        }
        for pair in 0..self.pairs.len() {
            self.check_slot(pair, side)?;
        }
        Ok(())
    }

    /// Whether the program does not poll: until it resets or destroys a QP, which takes completions along.
    fn naps(&self, side: usize) -> bool {
        self.pairs.iter().enumerate().any(|(pair, (number, since, qps))| {
            let life = self.plan.pairs[pair].get(*number);
            life.is_some_and(|life| {
                let at = life.at + if side == life.side { 0 } else { life.gap };
                let due = *since + micros(at.saturating_sub(NAP));
                matches!(life.fate, Fate::Reset | Fate::Destroy) && !qps[side].ended && due <= self.now
            })
        })
    }

    /// Polls, and judges what there is.
    fn look(&mut self, side: usize) -> Result<(), String> {
        let mut seen = Vec::new();
        poll(&self.nodes[side].cq, &self.nodes[side].memory, &mut seen);
        self.take(side, seen)
    }

    /// Whether a QP has nothing more to do in this life.
    fn is_done(&self, pair: usize, side: usize) -> bool {
        let qp = &self.pairs[pair].2[side];
        qp.sent == self.life(pair).ops[side].len() && qp.received == qp.receives
    }

    /// When the program next does something, if not when something completes.
    fn next_act(&self) -> Option<Time> {
        let mut times: Vec<Time> = Vec::new();
        for (pair, (number, since, qps)) in self.pairs.iter().enumerate() {
            if *number >= self.plan.pairs[pair].len() {
                continue;
            }
            let life = self.life(pair);
            for (side, qp) in qps.iter().enumerate() {
                let op = life.ops[side].get(qp.posted).filter(|_| !qp.ended && !qp.failed);
                times.extend(op.map(|op| *since + micros(op.at)));
            }
            if life.fate != Fate::Done {
                times.extend([*since + micros(life.at), *since + micros(life.at + life.gap)]);
            }
        }
        times.into_iter().filter(|&time| time > self.now).min()
    }

    /// What the program does now; whether it did something.
    fn act(&mut self) -> Result<bool, String> {
        let mut acted = false;
        for pair in 0..self.pairs.len() {
            if self.pairs[pair].0 >= self.plan.pairs[pair].len() {
                continue;
            }
            let (life, since) = (self.life(pair), self.pairs[pair].1);
            for side in 0..2 {
                loop {
                    let qp = &mut self.pairs[pair].2[side];
                    let index = qp.posted;
                    let op = life.ops[side].get(index).filter(|_| !qp.ended && !qp.failed);
                    let Some(op) = op.filter(|op| since + micros(op.at) <= self.now) else {
                        break;
                    };
                    qp.posted += 1;
                    acted = true;
                    self.send(pair, side, index, op.kind)?;
                }
            }
            let first = since + micros(life.at) <= self.now;
            let second = since + micros(life.at + life.gap) <= self.now;
            let (side, other) = (life.side, 1 - life.side);
            let due = match life.fate {
                Fate::Done => [false; 2],
                Fate::Reset | Fate::Destroy | Fate::Error => [first, second],
                Fate::Drain => {
                    acted |= self.drain(pair, side, first, second)?;
                    [false; 2]
                }
                Fate::Dereg => {
                    if first && self.pairs[pair].2[side].closed.is_none() {
                        self.dereg(pair, side)?;
                        acted = true;
                    }
                    [false; 2]
                }
            };
            for (side, due) in [side, other].into_iter().zip(due) {
                if due && !self.pairs[pair].2[side].ended {
                    self.end(pair, side, life.fate)?;
                    acted = true;
                }
            }
            let failed = self.pairs[pair].2.iter().any(|qp| qp.failed);
            let gone = |side: usize| failed || self.is_done(pair, side);
            let drained = life.fate != Fate::Drain || !self.pairs[pair].2[side].drains;
            let untouched = matches!(life.fate, Fate::Done | Fate::Drain | Fate::Dereg);
            let all_due = life.fate == Fate::Done || second;
            if untouched && all_due && drained && gone(0) && gone(1) {
                for side in 0..2 {
                    self.look(side)?;
                    self.events(side)?;
                }
                if self.pairs[pair].2[other].refused && !self.pairs[pair].2[side].access_error {
                    return Err("a request was refused without an event".into());
                }
                for side in 0..2 {
                    self.end(pair, side, life.fate)?;
                }
                acted = true;
            }
            if self.pairs[pair].2.iter().all(|qp| qp.ended) {
                acted = true;
                self.pairs[pair].0 += 1;
                if self.pairs[pair].0 < self.plan.pairs[pair].len() {
                    self.begin(pair)?;
                }
            }
        }
        Ok(acted)
    }

    /// The send queue drains, and goes on.
    fn drain(&mut self, pair: usize, side: usize, first: bool, second: bool) -> Result<bool, String> {
        let qp = &mut self.pairs[pair].2[side];
        let (qpn, begun) = (qp.qpn, qp.drains || qp.drained.is_some());
        if qp.failed {
            return Ok(false);
        }
        if first && !begun && qp.rkey != 0 {
            qp.drains = true;
            self.sums.interrupted[3] += u64::from(qp.sent < qp.posted);
            self.look(side)?;
            self.enter(side, qpn, QpState::Sqd)?;
            self.events(side)?;
            return Ok(true);
        }
        if second && qp.drains && qp.drained.is_some() {
            // Marked as drained for good: a second event would not be due.
            (qp.drains, qp.drained) = (false, Some(usize::MAX));
            self.enter(side, qpn, QpState::Rts)?;
            return Ok(true);
        }
        Ok(false)
    }

    fn dereg(&mut self, pair: usize, side: usize) -> Result<(), String> {
        let number = self.pairs[pair].0;
        let [a, b] = &self.pairs[pair].2;
        let (qp, peer) = if side == 0 { (a, b) } else { (b, a) };
        let posted = peer.posted;
        self.sums.interrupted[4] += u64::from(peer.sent < posted);
        ok("dereg_mr", self.nodes[side].device.dereg_mr(qp.rkey))?;
        let held = self.nodes[side]
            .memory
            .with(slot(pair, number), BUFFER, |b| b.to_vec());
        self.pairs[pair].2[side].closed = Some((held, posted));
        Ok(())
    }

    /// A QP's life ends, and with it every change of its memory.
    fn end(&mut self, pair: usize, side: usize, fate: Fate) -> Result<(), String> {
        if !matches!(fate, Fate::Reset | Fate::Destroy) {
            self.look(side)?;
        }
        let number = self.pairs[pair].0;
        let qp = &self.pairs[pair].2[side];
        let (qpn, rest) = (qp.qpn, u64::from(qp.sent < qp.posted));
        match fate {
            Fate::Reset => self.sums.interrupted[0] += rest,
            Fate::Destroy => self.sums.interrupted[1] += rest,
            Fate::Error => self.sums.interrupted[2] += rest,
            _ => {}
        }
        if fate == Fate::Error {
            self.pairs[pair].2[side].failed = true;
            self.enter(side, qpn, QpState::Err)?;
            // What has flushed leaves the queue when it is polled, and there is room again.
            self.look(side)?;
            let qp = &self.pairs[pair].2[side];
            let (sends, receives) = (qp.posted, qp.receives);
            self.send_flushed(pair, side, sends)?;
            self.receive(side, qpn, RECEIVE | cookie(pair, number, receives))?;
            self.look(side)?;
            let qp = &self.pairs[pair].2[side];
            if (qp.sent, qp.received) != (sends + 1, receives + 1) {
                return Err(format!(
                    "node {side}: {} and {} completions of ERR",
                    qp.sent, qp.received
                ));
            }
        }
        if fate == Fate::Destroy {
            let destroyed = self.nodes[side].device.destroy_qp(self.now, qpn);
            ok("destroy_qp", destroyed)?;
            let replaced = self.create(side)?.qpn;
            self.pairs[pair].2[side].qpn = replaced;
        } else {
            self.enter(side, qpn, QpState::Reset)?;
        }
        self.pairs[pair].2[side].ended = true;
        let at = block(pair, number);
        let held = self.nodes[side].memory.with(at, BLOCK, |b| b.to_vec());
        self.frozen.push((side, at, held));
        // Whatever the CQ had of it is gone.
        self.look(side)?;
        self.events(side)
    }

    /// A send that is posted in ERR.
    fn send_flushed(&mut self, pair: usize, side: usize, index: usize) -> Result<(), String> {
        let (number, _, qps) = &self.pairs[pair];
        let wr = SendWr {
            wr_id: cookie(pair, *number, index),
            operation: Operation::Send,
            ..SendWr::default()
        };
        ok(
            "post_send in ERR",
            self.nodes[side].device.post_send(self.now, qps[side].qpn, &wr),
        )
    }
}

fn poll(cq: &Cq, memory: &SimMemory, seen: &mut Vec<Seen>) {
    let mut out = [Wc::default(); 8];
    loop {
        let n = cq.poll(&mut out);
        if n == 0 {
            return;
        }
        for &wc in &out[..n] {
            let index = meaning(wc.wr_id).2;
            let buffer = if index < OPS {
                memory.with(buffer(wc.wr_id), BUFFER, |b| b.to_vec())
            } else {
                Vec::new()
            };
            seen.push(Seen { wc, buffer });
        }
    }
}
