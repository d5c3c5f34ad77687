//! A node: a device, its link, its memory, and an application that posts, polls and naps as the program says.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ferroce_engine::device::{
    Acks, Device, DeviceConfig, Limits, MwId, PdId, Progress, QpInit, SrqId, XrcdId,
};
use ferroce_engine::link::random::Prng;
use ferroce_engine::link::sim::{NodeConfig, NodeId, SimLink, SimNetwork};
use ferroce_engine::link::{Link, Path, RxPacket};
use ferroce_engine::queue::{Cq, CqNotify};
use ferroce_engine::time::Time;
use ferroce_engine::verbs::*;
use ferroce_wire::PathMtu;
use ferroce_wire::bth::MULTICAST_QPN;

use crate::harness::{Completion, QpLog};
use crate::memory::{Arena, Buffer, Layout, content, initial_slot};
use crate::program::{Kind, Message, Place, Program, Region, Via};
use crate::trace::{Traced, trace};
use crate::windows::Frozen;

mod setup;

/// The Q_Key of UD QPs.
const QKEY: u32 = 0x1111_1111;
/// Marks the work request of a receive.
const RECEIVE: u64 = 1 << 63;

/// Notes that a CQ raised its event.
struct Flag(Arc<AtomicBool>);

impl CqNotify for Flag {
    fn completion(&self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// The buffers of one connection at a node.
struct Buffers {
    /// By message.
    sends: Vec<Buffer>,
    /// By receive.
    receives: Vec<Buffer>,
    /// What the peer's remote operations name.
    slots: Vec<Buffer>,
    /// Windows to them, with the key that each had first.
    windows: Vec<(MwId, u32)>,
}

/// What a node tells its peer.
#[derive(Default)]
pub struct Export {
    /// By connection: numbers of the QPs that send and receive, addresses of slots, and keys of windows without their
    /// tags.
    connections: Vec<(u32, u32, Vec<u64>, Vec<u32>)>,
    /// XRC: numbers of the shared receive queues, and of some that no target may use.
    srqs: Vec<u32>,
    strangers: Vec<u32>,
    rkey: u32,
}

/// What a node with XRC QPs has.
struct Xrc {
    /// The domain of the targets, and another.
    domains: [XrcdId; 2],
    /// The shared receive queues of the first.
    srqs: Vec<SrqId>,
    /// One of the second domain, and one of none.
    strangers: Vec<SrqId>,
}

/// A node.
pub struct Node {
    side: usize,
    device: Device,
    link: SimLink,
    arena: Arena,
    pd: PdId,
    lkey: u32,
    rkey: u32,
    /// What the region's addresses begin with.
    origin: u64,
    /// Key of a region that windows are bound to, and that peers can't reach.
    closed: u32,
    cqs: Vec<Arc<Cq>>,
    flag: Arc<AtomicBool>,
    srq: Option<SrqId>,
    xrc: Option<Xrc>,
    /// By connection.
    buffers: Vec<Buffers>,
    qps: Vec<QpLog>,
    /// By connection: an error completion was seen.
    dead: Vec<bool>,
    events: Vec<AsyncEvent>,
    /// By connection: the send queue was full at the last post.
    full: Vec<bool>,
    peer: Export,
    /// Memory to unmap: when, where, how much.
    hole: Option<(Time, u64, usize)>,
    naps: Prng,
    /// When the application looks again, if something calls for it.
    wake: Option<Time>,
    blocked: bool,
}

/// What peers may do to the memory.
const REMOTE: Access = Access::REMOTE_WRITE
    .union(Access::REMOTE_READ)
    .union(Access::REMOTE_ATOMIC);

/// What the verbs API says to a call, as an error of the run.
fn ok<T>(what: &str, result: Result<T, VerbsError>) -> Result<T, String> {
    result.map_err(|e| format!("{what}: {e}"))
}

/// The address of a node.
pub fn address(program: &Program, side: usize) -> IpAddr {
    if program.ipv6 {
        IpAddr::from([0xfd00, 0, 0, 0, 0, 0, 0, side as u16 + 1])
    } else {
        IpAddr::from([10, 0, 0, side as u8 + 1])
    }
}

/// The path from a node to the other.
fn path(program: &Program, side: usize) -> Path {
    Path {
        version: program.version,
        ifindex: 1,
        ..Path::between(address(program, side), address(program, 1 - side))
    }
}

impl Node {
    /// The node's number in the network.
    pub fn id(&self) -> NodeId {
        self.link.id()
    }

    /// Numbers of the XRC SRQs.
    pub fn srqs(&self) -> Vec<u32> {
        self.xrc
            .iter()
            .flat_map(|xrc| &xrc.srqs)
            .map(|srq| srq.0)
            .collect()
    }

    /// The device's counters.
    pub fn counters(&self, out: &mut dyn FnMut(&'static str, u64)) {
        self.device.counters(out);
    }

    /// What the QPs did, and the asynchronous events.
    pub fn into_log(self) -> (Vec<QpLog>, Vec<AsyncEvent>) {
        (self.qps, self.events)
    }

    /// Looks whether the application has a reason to act, lets it nap, and drives the device when it wakes.
    pub fn turn(&mut self, program: &Program, now: Time) -> Result<(), String> {
        if self.wake.is_none() && self.has_work(program, now) {
            let nap = self.naps.below(program.nodes[self.side].nap * 1000 + 1);
            self.wake = Some(now + Duration::from_nanos(nap));
        }
        if self.wake.is_none_or(|wake| wake > now) {
            return Ok(());
        }
        self.wake = None;
        for _ in 0..1000 {
            self.drive(program, now)?;
            if !self.has_work(program, now) {
                return Ok(());
            }
        }
        Err(format!("node {} finds work without end at {now:?}", self.side))
    }

    /// Whether something calls for the device or the application now.
    fn has_work(&self, program: &Program, now: Time) -> bool {
        self.link.readable()
            || self
                .device
                .next_deadline()
                .is_some_and(|deadline| deadline <= now)
            || self.next_post(program).is_some_and(|at| at <= now)
            || self.blocked && self.link.room_at().is_none_or(|room| room <= now)
    }

    /// When something calls for this node next, if that is known: never a time that lies behind, for what is due
    /// sets `wake`.
    pub fn next(&self, program: &Program, now: Time) -> Option<Time> {
        if self.wake.is_some() {
            return self.wake;
        }
        let later = |time: Option<Time>| time.filter(|&time| time > now);
        [self.device.next_deadline(), later(self.next_post(program))]
            .into_iter()
            .flatten()
            .min()
    }

    /// When the application posts next: only posts that wait for a time, not for room.
    fn next_post(&self, program: &Program) -> Option<Time> {
        let time = |micros: u64| Time::from_nanos(micros * 1000);
        let mut next = None;
        for (i, connection) in program.connections.iter().enumerate() {
            if self.dead[i] && !program.nodes[self.side].shares() {
                continue;
            }
            let send = connection.streams[self.side]
                .messages
                .get(self.qps[i].sends_posted);
            let send = send
                .filter(|m| !self.dead[i] && !self.full[i] && self.may_follow(program, i, m))
                .map(|m| time(m.at));
            let receive = connection.streams[1 - self.side]
                .receives
                .get(self.qps[i].receives_posted);
            for at in send.into_iter().chain(receive.map(|r| time(r.at))) {
                next = Some(next.map_or(at, |next: Time| next.min(at)));
            }
        }
        next
    }

    /// Whether what a message waits for has come from the peer.
    fn may_follow(&self, program: &Program, connection: usize, message: &Message) -> bool {
        let Some(step) = message.step else { return true };
        let from_peer = &program.connections[connection].streams[1 - self.side];
        let received = &self.qps[connection].receives;
        let received = received.iter().filter(|c| c.wc.status == WcStatus::Success);
        received.count() >= from_peer.receives_before(step)
    }

    /// One round of what a runtime and an application do: receive, timers, poll, post, transmit.
    fn drive(&mut self, program: &Program, now: Time) -> Result<(), String> {
        if let Some((at, addr, len)) = self.hole
            && at <= now
        {
            self.arena.memory.unmap(addr, len);
            self.hole = None;
        }
        let Node {
            side, device, link, ..
        } = self;
        let mut receive = |packet: &RxPacket<'_>| {
            trace(
                *side,
                now,
                if packet.icrc.valid(packet) {
                    "receives"
                } else {
                    "drops"
                },
                packet.data,
            );
            device.receive(now, packet);
        };
        while link.receive(&mut receive).map_err(|e| e.to_string())? > 0 {}
        device.handle_timeouts(now);
        self.poll(program, now)?;
        self.post(program, now)?;
        // An application that polls, as against a helper thread that may not come again soon.
        let acks = if program.nodes[self.side].events {
            Acks::Send
        } else {
            Acks::MayWait
        };
        loop {
            let link = &mut Traced {
                side: self.side,
                now,
                link: &mut self.link,
            };
            let progress = self.device.transmit_acks(now, link, acks);
            let flushed = self.link.flush().map_err(|e| e.to_string())?;
            self.blocked = !flushed;
            if progress == Progress::Idle || !flushed {
                break;
            }
        }
        // What transmission completed (UC, UD), or failed.
        self.poll(program, now)?;
        while let Some(event) = self.device.take_event() {
            self.events.push(event);
        }
        Ok(())
    }

    /// Polls the CQs, as the application's style is.
    fn poll(&mut self, program: &Program, now: Time) -> Result<(), String> {
        if program.nodes[self.side].events {
            if !self.flag.swap(false, Ordering::Relaxed) {
                return Ok(());
            }
            self.cqs.iter().for_each(|cq| cq.arm(false));
        }
        let mut out = [Wc::default(); 7];
        for cq in self.cqs.clone() {
            loop {
                let n = cq.poll(&mut out);
                if n == 0 {
                    break;
                }
                for wc in &out[..n] {
                    self.completed(program, now, *wc)?;
                }
            }
        }
        Ok(())
    }

    /// Files a completion with its QP.
    fn completed(&mut self, program: &Program, now: Time, wc: Wc) -> Result<(), String> {
        let ours = |qp: &QpLog| [qp.qpn, qp.target].contains(&wc.qp_num);
        let Some(qp) = self.qps.iter().position(ours) else {
            return Err(format!(
                "a completion of QP {:#x}, which is none of ours",
                wc.qp_num
            ));
        };
        // The target of an XRC connection may fail without the initiator beside it.
        let sends = self.qps[qp].qpn == wc.qp_num;
        if wc.status != WcStatus::Success && sends {
            self.dead[qp] = true;
        }
        self.full[qp] = false;
        let (connection, index) = work_request(wc.wr_id);
        let mut completion = Completion {
            wc,
            time: now,
            bytes: Vec::new(),
            invalidated: None,
        };
        let log = &mut self.qps[qp];
        if wc.wr_id & RECEIVE != 0 {
            // A last receive that was posted in ERR has no buffer.
            let mut buffer = self.buffers.get(connection).and_then(|b| b.receives.get(index));
            if wc.status == WcStatus::Success && wc.opcode == WcOpcode::RecvRdmaWithImm {
                let is_it = |m: &&Message| matches!(m.kind, Kind::Write(_)) && m.imm == Some(wc.imm);
                let message = program.connections[qp].streams[1 - self.side]
                    .messages
                    .iter()
                    .find(is_it);
                let slot = message.and_then(|m| m.kind.slot());
                let slot = slot.ok_or_else(|| format!("no WRITE has immediate {:#x}", wc.imm))?;
                buffer = self.buffers[qp].slots.get(slot);
            }
            if let Some(buffer) = buffer {
                completion.bytes = self.arena.take(buffer);
            }
            if wc.flags.contains(WcFlags::WITH_INV) {
                let windows = &self.buffers[qp].windows;
                let window = windows.iter().position(|(_, key)| key >> 8 == wc.imm >> 8);
                let window = window.ok_or_else(|| format!("no window has key {:#x}", wc.imm))?;
                let tag = wc.imm as u8;
                completion.invalidated = Some(Via { window, tag });
                let is_it = |m: &&Message| m.kind == Kind::SendInv { window, tag };
                let stream = &program.connections[qp].streams[1 - self.side];
                if let Some(step) = stream.messages.iter().find(is_it).and_then(|m| m.step) {
                    let bytes = self
                        .arena
                        .take(&self.buffers[qp].slots[stream.windows[window].slot]);
                    log.frozen.push(Frozen { step, bytes });
                }
            }
            log.receives.push(completion);
            return Ok(());
        }
        if connection != qp {
            return Err(format!(
                "a send of connection {connection} completes on that of {qp}"
            ));
        }
        if wc.status == WcStatus::Success {
            // The application may use the buffers again: of this request and of all before it.
            let first = log
                .sends
                .last()
                .map_or(0, |last| work_request(last.wc.wr_id).1 + 1);
            let messages = &program.connections[connection].streams[self.side].messages;
            for (i, message) in messages.iter().enumerate().take(index + 1).skip(first) {
                let buffer = &self.buffers[connection].sends[i];
                if message.kind.fetches() {
                    log.results.resize(i, None);
                    log.results.push(Some(self.arena.take(buffer)));
                } else {
                    self.arena.spend(buffer);
                }
                let ended = matches!(
                    message.kind,
                    Kind::LocalInv { .. } | Kind::Bind { unbind: true, .. }
                );
                if let Some(step) = message.step.filter(|_| ended) {
                    let windows = &program.connections[connection].streams[1 - self.side].windows;
                    let slot = windows[step.window].slot;
                    let bytes = self.arena.take(&self.buffers[connection].slots[slot]);
                    log.frozen.push(Frozen { step, bytes });
                }
            }
        }
        log.sends.push(completion);
        Ok(())
    }

    /// Posts what is due and fits.
    fn post(&mut self, program: &Program, now: Time) -> Result<(), String> {
        let due = |micros: u64| Time::from_nanos(micros * 1000) <= now;
        for (i, connection) in program.connections.iter().enumerate() {
            let receives = &connection.streams[1 - self.side].receives;
            while let Some(receive) = receives.get(self.qps[i].receives_posted) {
                let shared = program.nodes[self.side].shares();
                if !due(receive.at) || self.dead[i] && !shared {
                    break;
                }
                let index = self.qps[i].receives_posted;
                let wr = RecvWr {
                    wr_id: RECEIVE | wr_id(i, index),
                    sges: &self.named(&self.buffers[i].receives[index]),
                };
                let srq = match &self.xrc {
                    Some(xrc) => Some(xrc.srqs[connection.streams[1 - self.side].srq_of(index)]),
                    None => self.srq,
                };
                match srq {
                    Some(srq) => ok("post_srq_recv", self.device.post_srq_recv(srq, &wr))?,
                    None => ok("post_recv", self.device.post_recv(self.qps[i].qpn, &wr))?,
                }
                self.qps[i].receives_posted += 1;
            }
            let messages = &connection.streams[self.side].messages;
            while let Some(message) = messages.get(self.qps[i].sends_posted) {
                if !due(message.at) || self.dead[i] || !self.may_follow(program, i, message) {
                    break;
                }
                let index = self.qps[i].sends_posted;
                let buffer = &self.buffers[i].sends[index];
                // Inline data is copied at once, from the program's own addresses.
                let sges = if message.inline {
                    buffer.sges.clone()
                } else {
                    self.named(buffer)
                };
                let mut flags = SendFlags::empty();
                flags.set(SendFlags::SIGNALED, message.signaled);
                flags.set(SendFlags::SOLICITED, message.solicited);
                flags.set(SendFlags::INLINE, message.inline);
                flags.set(SendFlags::FENCE, message.fence);
                let wr = SendWr {
                    wr_id: wr_id(i, index),
                    operation: self.operation(program, i, message),
                    flags,
                    sges: if message.kind.has_buffer() { &sges } else { &[] },
                    ud: self.destination(program, i),
                    srqn: self.srqn(message, index),
                };
                match self.device.post_send(now, self.qps[i].qpn, &wr) {
                    Ok(()) => {}
                    Err(VerbsError::NoMemory) => {
                        self.full[i] = true;
                        break;
                    }
                    Err(e) => return Err(format!("post_send: {e}")),
                }
                if message.inline {
                    self.arena.spend(buffer);
                }
                self.qps[i].sends_posted += 1;
            }
        }
        Ok(())
    }

    /// The shared receive queue that a message names, with XRC.
    fn srqn(&self, message: &Message, index: usize) -> u32 {
        let numbers = match message.wrong_srq {
            true => &self.peer.strangers,
            false => &self.peer.srqs,
        };
        let at = if message.wrong_srq { index % 3 } else { message.srq };
        numbers.get(at).copied().unwrap_or(0)
    }

    /// A buffer as work requests name it.
    fn named(&self, buffer: &Buffer) -> Vec<Sge> {
        let named = |sge: &Sge| Sge {
            addr: sge.addr - self.origin,
            ..*sge
        };
        buffer.sges.iter().map(named).collect()
    }

    /// The operation of a message.
    fn operation(&self, program: &Program, connection: usize, message: &Message) -> Operation {
        let (_, _, slots, keys) = &self.peer.connections[connection];
        let mut addr = message.kind.slot().map_or(0, |slot| slots[slot]);
        let rkey = match message.via {
            Some(Via { window, tag }) => {
                let stream = &program.connections[connection].streams[self.side];
                if stream.windows[window].zero_based {
                    addr = 0;
                }
                keys[window] | u32::from(tag)
            }
            None if message.wrong_key => self.peer.rkey ^ 0x5500,
            None => self.peer.rkey,
        };
        let own_key = |window: usize, tag: u8| {
            let (id, key) = self.buffers[connection].windows[window];
            (id, key & !0xff | u32::from(tag))
        };
        match (message.kind, message.imm) {
            (Kind::Send, None) => Operation::Send,
            (Kind::Send, Some(imm)) => Operation::SendImm(imm),
            (Kind::Write(_), None) => Operation::Write { addr, rkey },
            (Kind::Write(_), Some(imm)) => Operation::WriteImm { addr, rkey, imm },
            (Kind::Read(_), _) => Operation::Read { addr, rkey },
            (Kind::CompareSwap { compare, swap, .. }, _) => Operation::CompareSwap {
                addr,
                rkey,
                compare,
                swap,
            },
            (Kind::FetchAdd { add, .. }, _) => Operation::FetchAdd { addr, rkey, add },
            (Kind::AtomicWrite(_), _) => Operation::AtomicWrite { addr, rkey },
            (Kind::Flush { region, .. }, _) => Operation::Flush {
                addr: if region { addr ^ 1 << 63 } else { addr },
                rkey,
                length: message.len,
                placement: Placement::GLOBAL,
                selectivity: if region {
                    Selectivity::Region
                } else {
                    Selectivity::Range
                },
            },
            (Kind::SendInv { window, tag }, _) => Operation::SendInv(keys[window] | u32::from(tag)),
            (Kind::LocalInv { window, tag }, _) => Operation::LocalInvalidate(own_key(window, tag).1),
            (Kind::Bind { window, tag, unbind }, _) => {
                let shape = program.connections[connection].streams[1 - self.side].windows[window];
                let slot = self.buffers[connection].slots[shape.slot].sges[0];
                let (window, rkey) = own_key(window, tag);
                let mut access = REMOTE;
                access.set(Access::ZERO_BASED, shape.zero_based);
                Operation::BindMw(MwBind {
                    window,
                    rkey,
                    lkey: self.closed,
                    addr: slot.addr - self.origin,
                    len: if unbind { 0 } else { slot.length.into() },
                    access,
                })
            }
        }
    }

    /// Where UD sends of a connection go.
    fn destination(&self, program: &Program, connection: usize) -> Option<UdDest> {
        let mut dest = UdDest {
            path: path(program, self.side),
            qpn: self.peer.connections[connection].1,
            qkey: QKEY,
        };
        if program.multicast {
            dest.path.dest = program.group(1 - self.side, connection);
            dest.qpn = MULTICAST_QPN;
        }
        (program.transport == QpType::Ud).then_some(dest)
    }
}

fn wr_id(connection: usize, index: usize) -> u64 {
    (connection as u64) << 32 | index as u64
}

/// Connection and index of a work request.
pub fn work_request(wr_id: u64) -> (usize, usize) {
    ((wr_id & !RECEIVE) as usize >> 32, wr_id as u32 as usize)
}
