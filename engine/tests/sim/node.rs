//! A node: a device, its link, its memory, and an application that posts, polls and naps as the program says.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ferroce_engine::device::{Acks, Device, DeviceConfig, Limits, MwId, PdId, Progress, QpInit, SrqId};
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
pub struct Export {
    /// By connection: QPN, addresses of slots, and keys of windows without their tags.
    connections: Vec<(u32, Vec<u64>, Vec<u32>)>,
    rkey: u32,
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
        source: address(program, side),
        dest: address(program, 1 - side),
        ifindex: 1,
        sgid_index: 0,
        traffic_class: 0,
        hop_limit: 64,
        flow_label: 0,
        service_level: 0,
    }
}

impl Node {
    /// A node with its buffers, queues and QPs, not connected yet.
    pub fn new(program: &Program, side: usize, network: &SimNetwork, rng: &mut Prng) -> Result<Node, String> {
        let shape = &program.nodes[side];
        let mut layout = Layout::new(rng.fork());
        let mut buffers = Vec::new();
        for connection in &program.connections {
            let (out, into) = (&connection.streams[side], &connection.streams[1 - side]);
            buffers.push(Buffers {
                sends: out
                    .messages
                    .iter()
                    .map(|m| layout.buffer(m.len, m.sges))
                    .collect(),
                receives: into
                    .receives
                    .iter()
                    .map(|r| layout.buffer(r.len, r.sges))
                    .collect(),
                slots: into.slots.iter().map(|s| layout.slot(s.len)).collect(),
                windows: Vec::new(),
            });
        }
        let arena = layout.build();
        let slot = side as u8 + 1;
        let (batch, queue) = shape.tx_room;
        let (rx_capacity, window) = shape.rx_room;
        let link = network.attach(NodeConfig {
            batch,
            queue,
            rx_capacity,
            window,
            ..NodeConfig::new(address(program, side), slot)
        });
        let mut seed = [0; 32];
        seed[..8].copy_from_slice(&rng.next_u64().to_le_bytes());
        let mut device = Device::new(DeviceConfig {
            slot,
            memory: arena.memory.clone(),
            seed,
            mtu: PathMtu::Mtu4096,
            limits: Limits::default(),
            window: Box::new(move |_| window),
        });
        let pd = ok("alloc_pd", device.alloc_pd())?;
        let (base, len) = (arena.base(), arena.len as u64);
        let (addr, len, kind) = match shape.region {
            Region::Plain => (base, len, Access::empty()),
            Region::ZeroBased => (base, len, Access::ZERO_BASED),
            Region::Everything => (0, u64::MAX, Access::ON_DEMAND),
        };
        let access = Access::LOCAL_WRITE | REMOTE | kind;
        let mr = ok("reg_mr", device.reg_mr(pd, addr, len, addr, access))?;
        let bindable = Access::LOCAL_WRITE | Access::MW_BIND | kind & Access::ZERO_BASED;
        let closed = ok(
            "reg_mr",
            device.reg_mr(pd, base, arena.len as u64, base, bindable),
        )?;
        for (connection, buffers) in buffers.iter_mut().enumerate() {
            for window in &program.connections[connection].streams[1 - side].windows {
                let mw_type = if window.two { MwType::Type2 } else { MwType::Type1 };
                buffers
                    .windows
                    .push(ok("alloc_mw", device.alloc_mw(pd, mw_type))?);
            }
            let messages = &program.connections[connection].streams[side].messages;
            for (index, (buffer, message)) in buffers.sends.iter().zip(messages).enumerate() {
                if message.kind.fetches() {
                    arena.prepare(buffer);
                } else {
                    arena.fill(
                        buffer,
                        &content(program.seed, connection, side, index, message.len),
                    );
                }
            }
            buffers.receives.iter().for_each(|buffer| arena.prepare(buffer));
            for (slot, buffer) in buffers.slots.iter().enumerate() {
                arena.fill(buffer, &initial_slot(program, connection, 1 - side, slot));
            }
            let sges = buffers
                .sends
                .iter_mut()
                .chain(&mut buffers.receives)
                .flat_map(|b| &mut b.sges);
            sges.for_each(|sge| sge.lkey = mr.lkey);
        }
        let flag = Arc::new(AtomicBool::new(true));
        let receives: usize = buffers.iter().map(|b| b.receives.len()).sum();
        let sends: usize = buffers.iter().map(|b| b.sends.len()).sum();
        let room = (sends + receives + 2 * buffers.len()) as u32;
        let mut cqs = Vec::new();
        for _ in 0..if shape.one_cq { 1 } else { 2 } {
            let notify: Box<dyn CqNotify> = Box::new(Flag(flag.clone()));
            let cq = ok("create_cq", device.create_cq(room, 0, Some(notify)))?;
            cq.arm(false);
            cqs.push(cq);
        }
        let srq = if shape.srq {
            Some(ok(
                "create_srq",
                device.create_srq(pd, receives.max(1) as u32, 3, 0),
            )?)
        } else {
            None
        };
        let mut node = Node {
            side,
            device,
            link,
            arena,
            pd,
            lkey: mr.lkey,
            rkey: mr.rkey,
            origin: if shape.region == Region::ZeroBased {
                base
            } else {
                0
            },
            closed: closed.lkey,
            cqs,
            flag,
            srq,
            dead: vec![false; buffers.len()],
            full: vec![false; buffers.len()],
            peer: Export {
                connections: Vec::new(),
                rkey: 0,
            },
            hole: hole(program, side, &buffers),
            qps: Vec::new(),
            buffers,
            events: Vec::new(),
            naps: rng.fork(),
            wake: None,
            blocked: false,
        };
        for connection in &program.connections {
            let init = QpInit {
                pd: Some(pd),
                qp_type: program.transport,
                cap: QpCap {
                    max_send_wr: connection.depth,
                    max_recv_wr: (connection.streams[1 - side].receives.len() as u32).max(1),
                    max_send_sge: 4,
                    max_recv_sge: 3,
                    max_inline_data: 64,
                },
                send_cq: Some(node.cqs[0].clone()),
                recv_cq: Some(node.cqs[node.cqs.len() - 1].clone()),
                srq,
                xrcd: None,
                sq_sig_all: connection.sig_all,
            };
            let (qpn, _) = ok("create_qp", node.device.create_qp(init))?;
            node.qps.push(QpLog {
                qpn,
                ..QpLog::default()
            });
        }
        Ok(node)
    }

    /// The node's number in the network.
    pub fn id(&self) -> NodeId {
        self.link.id()
    }

    /// What the peer must know.
    pub fn export(&self) -> Export {
        let slots = |buffers: &Buffers| {
            let addr = |slot: &Buffer| slot.sges[0].addr - self.origin;
            buffers.slots.iter().map(addr).collect()
        };
        let keys = |buffers: &Buffers| buffers.windows.iter().map(|(_, key)| key & !0xff).collect();
        let connections = self
            .qps
            .iter()
            .zip(&self.buffers)
            .map(|(qp, b)| (qp.qpn, slots(b), keys(b)));
        Export {
            connections: connections.collect(),
            rkey: self.rkey,
        }
    }

    /// The device's counters.
    pub fn counters(&self, out: &mut dyn FnMut(&'static str, u64)) {
        self.device.counters(out);
    }

    /// What the QPs did, and the asynchronous events.
    pub fn into_log(self) -> (Vec<QpLog>, Vec<AsyncEvent>) {
        (self.qps, self.events)
    }

    /// Brings every QP to RTS.
    pub fn connect(&mut self, program: &Program, peer: Export) -> Result<(), String> {
        use QpAttrMask as M;
        let side = self.side;
        for (i, connection) in program.connections.iter().enumerate() {
            let attr = QpAttr {
                state: QpState::Init,
                port: 1,
                qkey: QKEY,
                access: match program.transport {
                    QpType::Rc => REMOTE,
                    _ => Access::REMOTE_WRITE,
                },
                path_mtu: program.mtu,
                dest_qpn: peer.connections[i].0,
                rq_psn: connection.psn[1 - side],
                sq_psn: connection.psn[side],
                path: Some(path(program, side)),
                max_rd_atomic: connection.rd_atomic,
                max_dest_rd_atomic: connection.rd_atomic,
                min_rnr_timer: connection.min_rnr_timer,
                timeout: connection.timeout,
                retry_cnt: connection.retry_cnt,
                rnr_retry: connection.rnr_retry,
                ..QpAttr::default()
            };
            let rtr = QpAttr {
                state: QpState::Rtr,
                ..attr
            };
            let rts = QpAttr {
                state: QpState::Rts,
                ..attr
            };
            let init = M::STATE | M::PKEY_INDEX | M::PORT;
            let connected = M::STATE | M::AV | M::PATH_MTU | M::DEST_QPN | M::RQ_PSN;
            let steps = match program.transport {
                QpType::Ud => [
                    (attr, init | M::QKEY),
                    (rtr, M::STATE),
                    (rts, M::STATE | M::SQ_PSN),
                ],
                QpType::Uc => [
                    (attr, init | M::ACCESS_FLAGS),
                    (rtr, connected),
                    (rts, M::STATE | M::SQ_PSN),
                ],
                _ => [
                    (attr, init | M::ACCESS_FLAGS),
                    (rtr, connected | M::MAX_DEST_RD_ATOMIC | M::MIN_RNR_TIMER),
                    (
                        rts,
                        M::STATE | M::SQ_PSN | M::TIMEOUT | M::RETRY_CNT | M::RNR_RETRY | M::MAX_QP_RD_ATOMIC,
                    ),
                ],
            };
            for (attr, mask) in steps {
                ok(
                    "modify_qp",
                    self.device.modify_qp(Time::ZERO, self.qps[i].qpn, &attr, mask),
                )?;
            }
        }
        if program.multicast {
            for (i, qp) in self.qps.iter().enumerate() {
                let group = program.group(side, i);
                ok("attach", self.device.attach_multicast(qp.qpn, group))?;
                self.link.join(group, 1).map_err(|e| e.to_string())?;
            }
        }
        self.peer = peer;
        Ok(())
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
            if self.dead[i] && self.srq.is_none() {
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
        let Some(qp) = self.qps.iter().position(|qp| qp.qpn == wc.qp_num) else {
            return Err(format!(
                "a completion of QP {:#x}, which is none of ours",
                wc.qp_num
            ));
        };
        if wc.status != WcStatus::Success {
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
                if !due(receive.at) || self.dead[i] && self.srq.is_none() {
                    break;
                }
                let index = self.qps[i].receives_posted;
                let wr = RecvWr {
                    wr_id: RECEIVE | wr_id(i, index),
                    sges: &self.named(&self.buffers[i].receives[index]),
                };
                match self.srq {
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
                    sges: if message.kind.is_local() { &[] } else { &sges },
                    ud: self.destination(program, i),
                    ..SendWr::default()
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
        let (_, slots, keys) = &self.peer.connections[connection];
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
            qpn: self.peer.connections[connection].0,
            qkey: QKEY,
        };
        if program.multicast {
            dest.path.dest = program.group(1 - self.side, connection);
            dest.qpn = MULTICAST_QPN;
        }
        (program.transport == QpType::Ud).then_some(dest)
    }

    /// Ends everything in order: QPs to ERR, where all that is left flushes, then every object is destroyed.
    pub fn end(&mut self, program: &Program, now: Time) -> Result<(), String> {
        self.flag.store(true, Ordering::Relaxed);
        self.poll(program, now)?;
        for i in 0..self.qps.len() {
            let qpn = self.qps[i].qpn;
            let attr = QpAttr {
                state: QpState::Err,
                ..QpAttr::default()
            };
            ok(
                "modify_qp to ERR",
                self.device.modify_qp(now, qpn, &attr, QpAttrMask::STATE),
            )?;
            // Posting in ERR is allowed, and flushes at once.
            let sends = program.connections[i].streams[self.side].messages.len();
            let wr = SendWr {
                wr_id: wr_id(i, sends),
                operation: Operation::Send,
                flags: SendFlags::empty(),
                sges: &[],
                ud: self.destination(program, i),
                ..SendWr::default()
            };
            ok("post_send in ERR", self.device.post_send(now, qpn, &wr))?;
            if self.srq.is_none() {
                let receives = program.connections[i].streams[1 - self.side].receives.len();
                let wr = RecvWr {
                    wr_id: RECEIVE | wr_id(i, receives),
                    sges: &[],
                };
                ok("post_recv in ERR", self.device.post_recv(qpn, &wr))?;
            }
        }
        self.flag.store(true, Ordering::Relaxed);
        self.poll(program, now)?;
        while let Some(event) = self.device.take_event() {
            self.events.push(event);
        }
        if self.device.transmit(now, &mut self.link) != Progress::Idle {
            return Err("QPs in ERR still transmit".into());
        }
        // Deadlines may be stale, but nothing sets new ones.
        let mut deadlines = 0;
        while let Some(deadline) = self.device.next_deadline() {
            self.device.handle_timeouts(deadline);
            deadlines += 1;
            if deadlines > 1000 {
                return Err("QPs in ERR still set timers".into());
            }
        }
        for (i, qp) in self.qps.iter().enumerate() {
            if program.multicast {
                if self.device.destroy_qp(now, qp.qpn) != Err(VerbsError::Busy) {
                    return Err("a QP that is attached is destroyed".into());
                }
                let group = program.group(self.side, i);
                ok("detach", self.device.detach_multicast(qp.qpn, group))?;
            }
            ok("destroy_qp", self.device.destroy_qp(now, qp.qpn))?;
        }
        for cq in self.cqs.drain(..) {
            if !cq.is_empty() {
                return Err("completions are left over".into());
            }
            ok("destroy_cq", self.device.destroy_cq(&cq))?;
        }
        if let Some(srq) = self.srq {
            ok("destroy_srq", self.device.destroy_srq(srq))?;
        }
        for (window, _) in self.buffers.iter().flat_map(|b| &b.windows) {
            ok("dealloc_mw", self.device.dealloc_mw(*window))?;
        }
        ok("dereg_mr", self.device.dereg_mr(self.closed))?;
        ok("dereg_mr", self.device.dereg_mr(self.lkey))?;
        ok("dealloc_pd", self.device.dealloc_pd(self.pd))?;
        for (qp, buffers) in self.qps.iter_mut().zip(&self.buffers) {
            qp.slots = buffers.slots.iter().map(|slot| self.arena.take(slot)).collect();
        }
        self.arena.check_guards()
    }
}

/// What a node unmaps, and when, if the program's hole lies in its memory.
fn hole(program: &Program, side: usize, buffers: &[Buffers]) -> Option<(Time, u64, usize)> {
    let hole = program.hole?;
    let of = &buffers[hole.connection];
    let buffer = match hole.place {
        Place::Message(i) if side == hole.side => of.sends.get(i),
        Place::Receive(i) if side != hole.side => of.receives.get(i),
        Place::Slot(i) if side != hole.side => of.slots.get(i),
        _ => None,
    };
    let piece = buffer?.sges.iter().find(|sge| sge.length > 0)?;
    Some((
        Time::from_nanos(hole.at * 1000),
        piece.addr,
        piece.length as usize,
    ))
}

fn wr_id(connection: usize, index: usize) -> u64 {
    (connection as u64) << 32 | index as u64
}

/// Connection and index of a work request.
pub fn work_request(wr_id: u64) -> (usize, usize) {
    ((wr_id & !RECEIVE) as usize >> 32, wr_id as u32 as usize)
}
