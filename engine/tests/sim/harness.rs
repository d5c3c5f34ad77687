//! Runs a program: two nodes, each a device, its link, its memory and an application, in virtual time.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ferroce_engine::device::{Acks, Device, DeviceConfig, Limits, PdId, Progress, QpInit, SrqId};
use ferroce_engine::link::random::Prng;
use ferroce_engine::link::sim::{NodeConfig, SimLink, SimNetwork};
use ferroce_engine::link::{Link, Path};
use ferroce_engine::queue::{Cq, CqNotify};
use ferroce_engine::time::Time;
use ferroce_engine::verbs::*;
use ferroce_wire::PathMtu;

use crate::memory::{Arena, Buffer, Layout, content};
use crate::program::Program;

/// The Q_Key of UD QPs.
const QKEY: u32 = 0x1111_1111;
/// More virtual time than any program needs.
const TIME_LIMIT: Time = Time::from_nanos(600_000_000_000);
/// More turns of the loop than any program needs.
const TURN_LIMIT: u32 = 2_000_000;
/// Marks the work request of a receive.
const RECEIVE: u64 = 1 << 63;

/// A completion with when it was polled, and for receives the buffer as it was then.
#[derive(Clone, Debug)]
pub struct Completion {
    /// The completion.
    pub wc: Wc,
    /// When.
    pub time: Time,
    /// The whole receive buffer; empty for sends.
    pub bytes: Vec<u8>,
}

/// What one QP did: node `side` of a connection.
#[derive(Default)]
pub struct QpLog {
    /// Its number.
    pub qpn: u32,
    /// Messages posted.
    pub sends_posted: usize,
    /// Receives of this connection posted, to the QP or to the SRQ.
    pub receives_posted: usize,
    /// Completions of sends, in order.
    pub sends: Vec<Completion>,
    /// Completions of receives, in order.
    pub receives: Vec<Completion>,
}

/// What a run showed.
pub struct Outcome {
    /// By connection, by node.
    pub qps: Vec<[QpLog; 2]>,
    /// The network, with what it did to packets.
    pub network: SimNetwork,
    /// Asynchronous events of each node.
    pub events: [Vec<AsyncEvent>; 2],
    /// Sums of both devices' counters.
    pub counters: Vec<(&'static str, u64)>,
    /// When the last thing happened.
    pub end: Time,
}

impl Outcome {
    /// A counter's value; 0 if there is none of that name.
    pub fn counter(&self, name: &str) -> u64 {
        self.counters
            .iter()
            .filter(|(n, _)| *n == name)
            .map(|(_, v)| v)
            .sum()
    }
}

/// Notes that a CQ raised its event.
struct Flag(Arc<AtomicBool>);

impl CqNotify for Flag {
    fn completion(&self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

struct Node {
    side: usize,
    device: Device,
    link: SimLink,
    arena: Arena,
    pd: PdId,
    lkey: u32,
    cqs: Vec<Arc<Cq>>,
    flag: Arc<AtomicBool>,
    srq: Option<SrqId>,
    /// By connection: send buffers, receive buffers.
    buffers: Vec<(Vec<Buffer>, Vec<Buffer>)>,
    qps: Vec<QpLog>,
    /// By connection: an error completion was seen.
    dead: Vec<bool>,
    events: Vec<AsyncEvent>,
    /// By connection: the send queue was full at the last post.
    full: Vec<bool>,
    /// By connection: the other node's QPN.
    peers: Vec<u32>,
    naps: Prng,
    /// When the application looks again, if something calls for it.
    wake: Option<Time>,
    blocked: bool,
}

/// Runs a program to its end. Errors are broken promises of the engine that show while it runs.
pub fn run(program: &Program) -> Result<Outcome, String> {
    let mut rng = Prng::new(program.seed);
    let network = SimNetwork::new(rng.next_u64());
    let mut nodes = [
        Node::new(program, 0, &network, &mut rng)?,
        Node::new(program, 1, &network, &mut rng)?,
    ];
    let ids = [nodes[0].link.id(), nodes[1].link.id()];
    network.set_conditions(ids[0], ids[1], program.conditions[0].clone());
    network.set_conditions(ids[1], ids[0], program.conditions[1].clone());
    let qpns = [nodes[0].qpns(), nodes[1].qpns()];
    for node in &mut nodes {
        node.connect(program, &qpns)?;
    }
    let (mut now, mut turns) = (Time::ZERO, 0);
    loop {
        network.advance(now);
        let first = rng.below(2) as usize;
        for side in [first, 1 - first] {
            nodes[side].turn(program, now)?;
        }
        let times = nodes.iter().map(|node| node.next(program, now));
        let Some(next) = times.chain([network.next_event()]).flatten().min() else {
            break;
        };
        now = next.max(now);
        turns += 1;
        if now > TIME_LIMIT || turns > TURN_LIMIT {
            return Err(format!(
                "no end: {:?} of virtual time and {turns} turns",
                now.since(Time::ZERO)
            ));
        }
    }
    let [a, b] = nodes;
    let (mut events, mut counters) = ([Vec::new(), Vec::new()], Vec::new());
    let mut logs = Vec::new();
    for (side, mut node) in [a, b].into_iter().enumerate() {
        node.end(program, now)?;
        node.device
            .counters(&mut |name, value| counters.push((name, value)));
        logs.push(node.qps);
        events[side] = node.events;
    }
    let qps = logs
        .remove(0)
        .into_iter()
        .zip(logs.remove(0))
        .map(|(a, b)| [a, b])
        .collect();
    Ok(Outcome {
        qps,
        network,
        events,
        counters,
        end: now,
    })
}

/// What the verbs API says to a call, as an error of the run.
fn ok<T>(what: &str, result: Result<T, VerbsError>) -> Result<T, String> {
    result.map_err(|e| format!("{what}: {e}"))
}

fn address(program: &Program, side: usize) -> IpAddr {
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
    fn new(program: &Program, side: usize, network: &SimNetwork, rng: &mut Prng) -> Result<Node, String> {
        let shape = &program.nodes[side];
        let mut layout = Layout::new(rng.fork());
        let mut buffers: Vec<(Vec<Buffer>, Vec<Buffer>)> = Vec::new();
        for connection in &program.connections {
            let sends = &connection.streams[side].messages;
            let receives = &connection.streams[1 - side].receives;
            buffers.push((
                sends.iter().map(|m| layout.buffer(m.len, m.sges)).collect(),
                receives.iter().map(|r| layout.buffer(r.len, r.sges)).collect(),
            ));
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
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC;
        let mr = ok(
            "reg_mr",
            device.reg_mr(pd, arena.base(), arena.len as u64, arena.base(), access),
        )?;
        for (connection, (sends, receives)) in buffers.iter_mut().enumerate() {
            for (index, buffer) in sends.iter().enumerate() {
                let len = program.connections[connection].streams[side].messages[index].len;
                arena.fill(buffer, &content(program.seed, connection, side, index, len));
            }
            receives.iter().for_each(|buffer| arena.prepare(buffer));
            for sge in sends
                .iter_mut()
                .chain(receives)
                .flat_map(|buffer| &mut buffer.sges)
            {
                sge.lkey = mr.lkey;
            }
        }
        let flag = Arc::new(AtomicBool::new(true));
        let receives: usize = buffers.iter().map(|(_, receives)| receives.len()).sum();
        let sends: usize = buffers.iter().map(|(sends, _)| sends.len()).sum();
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
            cqs,
            flag,
            srq,
            dead: vec![false; buffers.len()],
            full: vec![false; buffers.len()],
            peers: Vec::new(),
            qps: Vec::new(),
            buffers,
            events: Vec::new(),
            naps: rng.fork(),
            wake: None,
            blocked: false,
        };
        for connection in &program.connections {
            let init = QpInit {
                pd,
                qp_type: program.transport,
                cap: QpCap {
                    max_send_wr: connection.depth,
                    max_recv_wr: (connection.streams[1 - side].receives.len() as u32).max(1),
                    max_send_sge: 4,
                    max_recv_sge: 3,
                    max_inline_data: 64,
                },
                send_cq: node.cqs[0].clone(),
                recv_cq: node.cqs[node.cqs.len() - 1].clone(),
                srq,
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

    fn qpns(&self) -> Vec<u32> {
        self.qps.iter().map(|qp| qp.qpn).collect()
    }

    /// Brings every QP to RTS.
    fn connect(&mut self, program: &Program, qpns: &[Vec<u32>; 2]) -> Result<(), String> {
        use QpAttrMask as M;
        let side = self.side;
        for (i, connection) in program.connections.iter().enumerate() {
            let attr = QpAttr {
                state: QpState::Init,
                port: 1,
                qkey: QKEY,
                access: Access::REMOTE_WRITE,
                path_mtu: program.mtu,
                dest_qpn: qpns[1 - side][i],
                rq_psn: connection.psn[1 - side],
                sq_psn: connection.psn[side],
                path: Some(path(program, side)),
                max_rd_atomic: 4,
                max_dest_rd_atomic: 4,
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
            // The peer, for UD sends.
            self.peers.push(qpns[1 - side][i]);
        }
        Ok(())
    }

    /// Looks whether the application has a reason to act, lets it nap, and drives the device when it wakes.
    fn turn(&mut self, program: &Program, now: Time) -> Result<(), String> {
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
    fn next(&self, program: &Program, now: Time) -> Option<Time> {
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
                .map(|m| time(m.at))
                .filter(|_| !self.dead[i] && !self.full[i]);
            let receive = connection.streams[1 - self.side]
                .receives
                .get(self.qps[i].receives_posted);
            for at in send.into_iter().chain(receive.map(|r| time(r.at))) {
                next = Some(next.map_or(at, |next: Time| next.min(at)));
            }
        }
        next
    }

    /// One round of what a runtime and an application do: receive, timers, poll, post, transmit.
    fn drive(&mut self, program: &Program, now: Time) -> Result<(), String> {
        let Node { device, link, .. } = self;
        while link
            .receive(&mut |packet| device.receive(now, packet))
            .map_err(|e| e.to_string())?
            > 0
        {}
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
            let progress = self.device.transmit_acks(now, &mut self.link, acks);
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
                    self.completed(now, *wc)?;
                }
            }
        }
        Ok(())
    }

    /// Files a completion with its QP.
    fn completed(&mut self, now: Time, wc: Wc) -> Result<(), String> {
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
        };
        let log = &mut self.qps[qp];
        if wc.wr_id & RECEIVE != 0 {
            // A last receive that was posted in ERR has no buffer.
            if let Some(buffer) = self
                .buffers
                .get(connection)
                .and_then(|(_, receives)| receives.get(index))
            {
                completion.bytes = self.arena.take(buffer);
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
            let sends = &self.buffers[connection].0;
            sends
                .iter()
                .take(index + 1)
                .skip(first)
                .for_each(|buffer| self.arena.spend(buffer));
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
                    sges: &self.buffers[i].1[index].sges,
                };
                match self.srq {
                    Some(srq) => ok("post_srq_recv", self.device.post_srq_recv(srq, &wr))?,
                    None => ok("post_recv", self.device.post_recv(self.qps[i].qpn, &wr))?,
                }
                self.qps[i].receives_posted += 1;
            }
            let messages = &connection.streams[self.side].messages;
            while let Some(message) = messages.get(self.qps[i].sends_posted) {
                if !due(message.at) || self.dead[i] {
                    break;
                }
                let index = self.qps[i].sends_posted;
                let buffer = &self.buffers[i].0[index];
                let mut flags = SendFlags::empty();
                flags.set(SendFlags::SIGNALED, message.signaled);
                flags.set(SendFlags::SOLICITED, message.solicited);
                flags.set(SendFlags::INLINE, message.inline);
                let wr = SendWr {
                    wr_id: wr_id(i, index),
                    operation: message.imm.map_or(Operation::Send, Operation::SendImm),
                    flags,
                    sges: &buffer.sges,
                    ud: (program.transport == QpType::Ud).then(|| UdDest {
                        path: path(program, self.side),
                        qpn: self.peers[i],
                        qkey: QKEY,
                    }),
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

    /// Ends everything in order: QPs to ERR, where all that is left flushes, then every object is destroyed.
    fn end(&mut self, program: &Program, now: Time) -> Result<(), String> {
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
            let ud = (program.transport == QpType::Ud).then(|| UdDest {
                path: path(program, self.side),
                qpn: self.peers[i],
                qkey: QKEY,
            });
            let wr = SendWr {
                wr_id: wr_id(i, sends),
                operation: Operation::Send,
                flags: SendFlags::empty(),
                sges: &[],
                ud,
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
        for qp in &self.qps {
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
        ok("dereg_mr", self.device.dereg_mr(self.lkey))?;
        ok("dealloc_pd", self.device.dealloc_pd(self.pd))?;
        self.arena.check_guards()
    }
}

fn wr_id(connection: usize, index: usize) -> u64 {
    (connection as u64) << 32 | index as u64
}

/// Connection and index of a work request.
pub fn work_request(wr_id: u64) -> (usize, usize) {
    ((wr_id & !RECEIVE) as usize >> 32, wr_id as u32 as usize)
}
