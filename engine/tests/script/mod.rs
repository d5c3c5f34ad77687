//! Runs a device by a script of bytes: work requests, packets real and forged, faults of memory, time and state changes
//! in any order. For fuzzing (`fuzz/`) and for random scripts: whatever the bytes, nothing may panic or spin, and every
//! work request completes at most once, in order, and only if it was posted.

use std::collections::VecDeque;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::Duration;

use ferroce_engine::device::{
    Acks, Device, DeviceConfig, Limits, MrChange, MwId, PdId, Progress, QpInit, SrqId, XrcdId,
};
use ferroce_engine::link::{IcrcCheck, Path, Qpns, RoceVersion, RxPacket, Transmit, TransmitError};
use ferroce_engine::memory::Fault;
use ferroce_engine::memory::sim::SimMemory;
use ferroce_engine::queue::Cq;
use ferroce_engine::time::Time;
use ferroce_engine::verbs::*;
use ferroce_wire::PathMtu;
use ferroce_wire::bth::MULTICAST_QPN;

const HERE: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1));
/// The multicast group of all UD QPs.
const GROUP: IpAddr = IpAddr::V4(Ipv4Addr::new(239, 0, 0, 1));
const BASE: u64 = 0x10_0000;
const LEN: usize = 1 << 16;
const QKEY: u32 = 0x1111_1111;
/// Send and receive queues' depth.
const DEPTH: u32 = 8;
/// Work requests of an SRQ.
const SRQ_DEPTH: u32 = 8;
/// First PSN of every QP: near the wrap.
const FIRST_PSN: u32 = 0xff_fffc;
/// What peers may do.
const REMOTE: Access = Access::REMOTE_WRITE
    .union(Access::REMOTE_READ)
    .union(Access::REMOTE_ATOMIC)
    .union(Access::FLUSH_GLOBAL);
/// Packets that wait to be delivered at most; more are lost.
const WIRE: usize = 256;

/// A QP: type, index of the peer, on an SRQ.
type Shape = (QpType, usize, bool);

/// The QPs, without XRC and with it.
const QPS: [[Shape; 8]; 2] = {
    let mut plain = [
        (QpType::Rc, 1, false),
        (QpType::Rc, 0, false),
        (QpType::Uc, 3, false),
        (QpType::Uc, 2, true),
        (QpType::Ud, 5, false),
        (QpType::Ud, 4, true),
        (QpType::Rc, 7, true),
        (QpType::Rc, 6, true),
    ];
    let without = plain;
    plain[6].0 = QpType::XrcSend;
    plain[7].0 = QpType::XrcRecv;
    [without, plain]
};

/// Reads a script; after its end everything is 0.
struct Script<'a>(&'a [u8]);

impl<'a> Script<'a> {
    fn u8(&mut self) -> u8 {
        self.bytes(1).first().copied().unwrap_or(0)
    }

    fn u16(&mut self) -> u16 {
        u16::from_be_bytes([self.u8(), self.u8()])
    }

    fn u32(&mut self) -> u32 {
        u32::from(self.u16()) << 16 | u32::from(self.u16())
    }

    fn u64(&mut self) -> u64 {
        u64::from(self.u32()) << 32 | u64::from(self.u32())
    }

    fn bytes(&mut self, count: usize) -> &'a [u8] {
        let (bytes, rest) = self.0.split_at(count.min(self.0.len()));
        self.0 = rest;
        bytes
    }
}

/// An ICRC that is right or not, as the script says.
struct Verdict(bool);

impl IcrcCheck for Verdict {
    fn valid(&self, _: &RxPacket<'_>) -> bool {
        self.0
    }
}

/// The link: keeps packets until the script delivers them.
struct Wire {
    packets: VecDeque<Vec<u8>>,
    room: usize,
    taken: usize,
}

impl Transmit for Wire {
    fn packet(
        &mut self,
        path: &Path,
        qpns: Qpns,
        len: usize,
        fill: &mut dyn FnMut(&mut [u8]) -> Result<(), Fault>,
    ) -> Result<(), TransmitError> {
        let dest_qpn = qpns.dest;
        assert_eq!((path.source, path.dest), (HERE, HERE));
        assert!(
            (12..=4096 + 80).contains(&len) && len.is_multiple_of(4),
            "a packet of {len} bytes"
        );
        if self.room == 0 {
            return Err(TransmitError::Full);
        }
        let mut data = vec![0; len + 4];
        fill(&mut data[..len]).map_err(TransmitError::Fault)?;
        assert_eq!(data[5..8], dest_qpn.to_be_bytes()[1..]);
        self.room -= 1;
        self.taken += 1;
        if self.packets.len() < WIRE {
            self.packets.push_back(data);
        }
        Ok(())
    }
}

/// Work requests of a queue that may still complete, in order of posting.
#[derive(Default)]
struct Ledger {
    outstanding: VecDeque<u64>,
}

impl Ledger {
    /// Notes a completion: it must be of an outstanding request. With `ordered`, all before it are done as well.
    fn complete(&mut self, wr_id: u64, ordered: bool) {
        let at = self.outstanding.iter().position(|&id| id == wr_id);
        let at = at.unwrap_or_else(|| panic!("work request {wr_id:#x} completes, but is not outstanding"));
        if ordered {
            self.outstanding.drain(..=at);
        } else {
            self.outstanding.remove(at);
        }
    }
}

struct World {
    device: Device,
    memory: Arc<SimMemory>,
    wire: Wire,
    now: Time,
    pd: PdId,
    /// A region of everything, one that is read only, and one without memory.
    keys: [u32; 3],
    /// Windows of both types, with a key that they had; `None` when deallocated.
    windows: [Option<(MwId, u32)>; 4],
    cqs: [Arc<Cq>; 2],
    srq: SrqId,
    xrcd: XrcdId,
    xrc_srq: SrqId,
    qps: [Shape; 8],
    qpns: Vec<u32>,
    sends: Vec<Ledger>,
    receives: Vec<Ledger>,
    shared: Ledger,
    /// Receives of the XRC SRQ.
    named: Ledger,
    next_id: u64,
    overrun: bool,
}

/// Runs a script to its end, and tears everything down.
pub fn run(bytes: &[u8]) {
    let mut script = Script(bytes);
    let mut world = World::new(script.u8());
    while !script.0.is_empty() {
        world.step(&mut script);
    }
    world.end();
}

impl World {
    /// A device with connected QPs; `choice` picks the path MTU, the size of the CQs, and whether there is XRC.
    fn new(choice: u8) -> World {
        let memory = Arc::new(SimMemory::new(BASE, LEN));
        let mut device = Device::new(DeviceConfig {
            slot: 3,
            memory: memory.clone(),
            seed: [1; 32],
            mtu: PathMtu::Mtu4096,
            limits: Limits::default(),
            window: Box::new(|_| 16 << 10),
        });
        let pd = device.alloc_pd().unwrap();
        let all = Access::LOCAL_WRITE | Access::MW_BIND | REMOTE;
        let whole = device.reg_mr(pd, BASE, LEN as u64, BASE, all).unwrap();
        let windows = [MwType::Type1, MwType::Type1, MwType::Type2, MwType::Type2]
            .map(|mw_type| device.alloc_mw(pd, mw_type).ok());
        let fixed = device
            .reg_mr(pd, BASE, LEN as u64, 0, Access::REMOTE_READ | Access::MW_BIND)
            .unwrap();
        let null = device.alloc_null_mr(pd).unwrap();
        let capacity = if choice & 0x80 == 0 { 1024 } else { 5 };
        let cqs = [(); 2].map(|()| device.create_cq(capacity, 0, None).unwrap());
        let srq = device.create_srq(pd, SRQ_DEPTH, 2, 3).unwrap();
        let xrcd = device.open_xrcd(None, true, false).unwrap();
        let xrc_srq = device.create_xrc_srq(pd, xrcd, &cqs[1], SRQ_DEPTH, 2).unwrap();
        let qps = QPS[usize::from(choice >> 5 & 1)];
        let mut qpns = Vec::new();
        for (qp_type, _, shared) in qps {
            let cap = QpCap {
                max_send_wr: DEPTH,
                max_recv_wr: DEPTH,
                max_send_sge: 2,
                max_recv_sge: 2,
                max_inline_data: 32,
            };
            let init = QpInit {
                pd: Some(pd),
                qp_type,
                cap,
                send_cq: Some(cqs[0].clone()),
                recv_cq: Some(cqs[1].clone()),
                srq: shared.then_some(srq),
                xrcd: Some(xrcd),
                sq_sig_all: choice & 0x40 != 0,
            };
            qpns.push(device.create_qp(init).unwrap().0);
        }
        let mut world = World {
            device,
            memory,
            wire: Wire {
                packets: VecDeque::new(),
                room: 0,
                taken: 0,
            },
            now: Time::from_nanos(1),
            pd,
            keys: [whole.lkey, fixed.lkey, null.lkey],
            windows,
            cqs,
            srq,
            xrcd,
            xrc_srq,
            qps,
            qpns,
            sends: qps.iter().map(|_| Ledger::default()).collect(),
            receives: qps.iter().map(|_| Ledger::default()).collect(),
            shared: Ledger::default(),
            named: Ledger::default(),
            next_id: 0,
            overrun: false,
        };
        for qp in 0..qps.len() {
            for state in [QpState::Init, QpState::Rtr, QpState::Rts] {
                assert!(world.modify(qp, state, 1 + u32::from(choice & 0x1f) % 5));
            }
        }
        for qpn in world.datagram_qpns() {
            world.device.attach_multicast(qpn, GROUP).unwrap();
        }
        world
    }

    fn datagram_qpns(&self) -> Vec<u32> {
        let qps = self.qps.iter().zip(&self.qpns);
        qps.filter(|((qp_type, ..), _)| *qp_type == QpType::Ud)
            .map(|(_, &qpn)| qpn)
            .collect()
    }

    fn path() -> Path {
        Path {
            ifindex: 1,
            ..Path::between(HERE, HERE)
        }
    }

    /// A modify with the attributes that the transition needs; whether it was allowed.
    fn modify(&mut self, qp: usize, state: QpState, path_mtu: u32) -> bool {
        use QpAttrMask as M;
        let (qp_type, peer, _) = self.qps[qp];
        let attr = QpAttr {
            state,
            port: 1,
            qkey: QKEY,
            access: REMOTE,
            path_mtu,
            dest_qpn: self.qpns[peer],
            rq_psn: FIRST_PSN,
            sq_psn: FIRST_PSN,
            path: Some(World::path()),
            max_rd_atomic: 2,
            max_dest_rd_atomic: 2,
            min_rnr_timer: 1,
            timeout: 4,
            retry_cnt: 2,
            rnr_retry: 2,
            ..QpAttr::default()
        };
        let (ud, rc) = (
            qp_type == QpType::Ud,
            matches!(qp_type, QpType::Rc | QpType::XrcSend | QpType::XrcRecv),
        );
        let when = |condition: bool, mask: M| if condition { mask } else { M::empty() };
        let mask = match state {
            QpState::Init => M::PKEY_INDEX | M::PORT | if ud { M::QKEY } else { M::ACCESS_FLAGS },
            QpState::Rtr => {
                when(!ud, M::AV | M::PATH_MTU | M::DEST_QPN | M::RQ_PSN)
                    | when(rc, M::MAX_DEST_RD_ATOMIC | M::MIN_RNR_TIMER)
            }
            QpState::Rts => {
                M::SQ_PSN | when(rc, M::TIMEOUT | M::RETRY_CNT | M::RNR_RETRY | M::MAX_QP_RD_ATOMIC)
            }
            _ => M::empty(),
        };
        let now = self.now;
        // RTS is entered from SQD without a first PSN.
        let masks = if state == QpState::Rts {
            vec![mask, M::empty()]
        } else {
            vec![mask]
        };
        masks.into_iter().any(|mask| {
            self.device
                .modify_qp(now, self.qpns[qp], &attr, M::STATE | mask)
                .is_ok()
        })
    }

    fn step(&mut self, script: &mut Script<'_>) {
        let action = script.u8();
        let qp = usize::from(action >> 5);
        match action & 0x1f {
            0..=5 => self.post_send(qp, script),
            6..=9 => self.post_receive(qp, script),
            10..=11 => self.transmit(usize::from(script.u8()), Acks::Send),
            12..=13 => self.transmit(usize::from(script.u8()), Acks::MayWait),
            14..=18 => self.deliver(script),
            19 => {
                self.wire.packets.pop_front();
            }
            20 => self.forge(qp, script),
            21 => {
                let len = usize::from(script.u8());
                let data = script.bytes(len).to_vec();
                self.receive(&data, true, script.u8());
            }
            22 | 23 => {
                let step = Duration::from_nanos(1 << (script.u8() & 31));
                self.now = self.now + step;
                self.device.handle_timeouts(self.now);
            }
            24 | 25 => {
                if let Some(deadline) = self.device.next_deadline() {
                    self.now = self.now.max(deadline);
                    self.device.handle_timeouts(self.now);
                }
            }
            26 | 27 => self.poll(),
            28 => {
                let at = BASE + u64::from(script.u16());
                self.memory.unmap(at, usize::from(script.u8()));
            }
            29 => match script.u8() & 3 {
                0 | 2 => self.memory.map_all(),
                1 => self.renew_window(script.u8()),
                _ => self.register_again(script),
            },
            30 => self.change_state(qp, script.u8()),
            _ => self.query(qp),
        }
    }

    /// Scatter/gather entries: mostly in bounds, keys mostly right.
    fn sges(&self, script: &mut Script<'_>) -> Vec<Sge> {
        let shape = script.u8();
        (0..shape & 3)
            .map(|_| {
                let addr = BASE + u64::from(script.u16());
                let length = match shape >> 2 & 3 {
                    0 => u32::from(script.u8()),
                    1 => u32::from(script.u16()) & 0x3fff,
                    2 => 0,
                    _ => u32::from(script.u16()),
                };
                let lkey = match shape >> 4 {
                    0 => self.keys[1],
                    1 => script.u32(),
                    2 => self.keys[2],
                    _ => self.keys[0],
                };
                Sge { addr, length, lkey }
            })
            .collect()
    }

    fn new_id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    fn post_send(&mut self, qp: usize, script: &mut Script<'_>) {
        let kind = script.u8();
        let rkey = match kind >> 6 {
            0 => self.keys[0],
            1 => self.window(script.u8()).map_or(0, |(_, key)| key),
            _ => script.u32(),
        };
        let addr = BASE + u64::from(script.u16());
        let operation = match kind & 0xf {
            0 => Operation::SendInv(rkey),
            1 => Operation::Write { addr, rkey },
            2 => Operation::WriteImm {
                addr,
                rkey,
                imm: script.u32(),
            },
            3 => Operation::Read { addr, rkey },
            4 => Operation::CompareSwap {
                addr: addr & !7,
                rkey,
                compare: 0,
                swap: script.u64(),
            },
            5 => Operation::FetchAdd {
                addr,
                rkey,
                add: script.u64(),
            },
            6 => Operation::LocalInvalidate(rkey),
            10 => Operation::AtomicWrite {
                addr: if kind & 0x20 == 0 { addr & !7 } else { addr },
                rkey,
            },
            11 => Operation::Flush {
                addr,
                rkey,
                length: script.u16().into(),
                placement: if kind & 0x20 == 0 {
                    Placement::GLOBAL
                } else {
                    Placement::from_bits_truncate(script.u8())
                },
                selectivity: if kind & 0x10 == 0 {
                    Selectivity::Range
                } else {
                    Selectivity::Region
                },
            },
            14 | 15 => self.bind(script),
            7 | 8 => Operation::SendImm(script.u32()),
            _ => Operation::Send,
        };
        let flags = SendFlags::from_bits_truncate(u32::from(script.u8()) & 0xf);
        let without_data = operation.is_local() || matches!(operation, Operation::Flush { .. });
        let sges = if without_data && kind & 0x80 == 0 {
            Vec::new()
        } else {
            self.sges(script)
        };
        let (qp_type, peer, _) = self.qps[qp];
        let ud = (qp_type == QpType::Ud || kind & 0x70 == 0x70).then(|| UdDest {
            path: World::path(),
            qpn: match kind & 0x60 {
                0x60 => MULTICAST_QPN,
                0x20 => script.u32() & 0xff_ffff,
                _ => self.qpns[peer],
            },
            qkey: if kind & 0x10 == 0 { QKEY } else { script.u32() },
        });
        let wr_id = self.new_id();
        let wr = SendWr {
            wr_id,
            operation,
            flags,
            sges: &sges,
            ud,
            srqn: match kind & 0x30 {
                0x30 if qp_type == QpType::XrcSend => script.u32() & 0xff_ffff,
                _ => self.xrc_srq.0,
            },
        };
        if self.device.post_send(self.now, self.qpns[qp], &wr).is_ok() {
            self.sends[qp].outstanding.push_back(wr_id);
        }
    }

    /// A window, if it is there.
    fn window(&self, choice: u8) -> Option<(MwId, u32)> {
        self.windows[usize::from(choice) % self.windows.len()]
    }

    /// A bind, mostly of the kind that succeeds.
    fn bind(&mut self, script: &mut Script<'_>) -> Operation {
        let choice = script.u8();
        let slot = usize::from(choice) % self.windows.len();
        // A program may know the number of a window that is gone.
        let known = self.windows[slot].or(self.windows[0]).or(self.windows[1]);
        let Some((window, key)) = known else {
            return Operation::Send;
        };
        let rkey = key & !0xff | u32::from(script.u8());
        if self.windows[slot].is_some() {
            self.windows[slot] = Some((window, rkey));
        }
        let access = match choice >> 6 {
            0 => Access::REMOTE_READ,
            1 => Access::all(),
            _ => Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC,
        };
        Operation::BindMw(MwBind {
            window,
            rkey,
            lkey: self.keys[usize::from(choice >> 5 & 1)],
            addr: BASE + u64::from(script.u16()),
            len: match choice >> 2 & 7 {
                0 => 0,
                1 => script.u64(),
                _ => u64::from(script.u16() >> 1),
            },
            access,
        })
    }

    /// Deallocates a window, or makes a new one in its place.
    fn renew_window(&mut self, choice: u8) {
        let slot = usize::from(choice) % self.windows.len();
        let mw_type = if slot < 2 { MwType::Type1 } else { MwType::Type2 };
        self.windows[slot] = match self.windows[slot].take() {
            Some((window, _)) => {
                self.device.dealloc_mw(window).unwrap();
                None
            }
            None => self.device.alloc_mw(self.pd, mw_type).ok(),
        };
    }

    fn post_receive(&mut self, qp: usize, script: &mut Script<'_>) {
        let sges = self.sges(script);
        let wr_id = self.new_id();
        let wr = RecvWr { wr_id, sges: &sges };
        let (posted, ledger) = match self.qps[qp] {
            (QpType::XrcSend | QpType::XrcRecv, ..) => {
                (self.device.post_srq_recv(self.xrc_srq, &wr), &mut self.named)
            }
            (_, _, true) => (self.device.post_srq_recv(self.srq, &wr), &mut self.shared),
            _ => (self.device.post_recv(self.qpns[qp], &wr), &mut self.receives[qp]),
        };
        if posted.is_ok() {
            ledger.outstanding.push_back(wr_id);
        }
    }

    /// Lets the device send until it is idle or the link has taken `room` packets.
    fn transmit(&mut self, room: usize, acks: Acks) {
        self.wire.room = room;
        loop {
            self.wire.taken = 0;
            match self.device.transmit_acks(self.now, &mut self.wire, acks) {
                Progress::Idle => break,
                Progress::Full => {
                    assert_eq!(self.wire.room, 0, "the link was not full");
                    break;
                }
                Progress::More => assert!(self.wire.taken > 0, "more to send, but nothing was sent"),
            }
        }
    }

    /// Delivers a packet from the wire: this or a later one, once or twice, perhaps changed.
    fn deliver(&mut self, script: &mut Script<'_>) {
        let how = script.u8();
        let at = usize::from(how & 7) % self.wire.packets.len().max(1);
        let keep = how & 0x18 == 0x18;
        let packet = if keep {
            self.wire.packets.get(at).cloned()
        } else {
            self.wire.packets.remove(at)
        };
        let Some(mut packet) = packet else { return };
        if how & 0x60 == 0x60 {
            let at = usize::from(script.u16()) % packet.len();
            packet[at] ^= script.u8();
        }
        self.receive(&packet, how & 0x80 == 0, 0);
    }

    /// Makes a packet up: a real QP and a PSN near the expected, the rest as the script says.
    fn forge(&mut self, qp: usize, script: &mut Script<'_>) {
        let mut packet = vec![0; 12];
        packet[0] = script.u8();
        packet[1] = script.u8() & 0xf0;
        packet[2..4].copy_from_slice(&[0xff, 0xff]);
        packet[5..8].copy_from_slice(&self.qpns[qp].to_be_bytes()[1..]);
        let psn = FIRST_PSN.wrapping_add(i32::from(script.u8() as i8) as u32) & 0xff_ffff;
        packet[8..12].copy_from_slice(&psn.to_be_bytes());
        packet[8] = script.u8() & 0x80;
        let headers = usize::from(script.u8()) % 48;
        let mut extension = script.bytes(headers).to_vec();
        // A key that is real, where a RETH or AtomicETH would have it, or an IETH has it; and so an SRQ.
        let (opcode, xrc) = (packet[0] & 0x1f, packet[0] >> 5 == 5);
        let (at, key) = match (opcode, self.window(packet[0])) {
            (0x16 | 0x17, Some((_, key))) => (0, key),
            (0x1c, _) => (12, self.keys[0]),
            _ => (8, self.keys[0]),
        };
        let mut put = |at: usize, number: u32| {
            if let Some(place) = extension.get_mut(at..at + 4) {
                place.copy_from_slice(&number.to_be_bytes());
            }
        };
        put(if xrc { at + 4 } else { at }, key);
        if xrc {
            put(0, self.xrc_srq.0);
        }
        packet.extend_from_slice(&extension);
        let payload = usize::from(script.u16()) % 4200;
        packet.resize(packet.len() + payload + 4, 0x55);
        self.receive(&packet, true, 0);
    }

    fn receive(&mut self, data: &[u8], valid: bool, source: u8) {
        let source = if source < 0x80 {
            HERE
        } else {
            IpAddr::V4(Ipv4Addr::new(10, 0, 0, source))
        };
        let to_group = data.get(5..8) == Some(&MULTICAST_QPN.to_be_bytes()[1..]);
        self.device.receive(
            self.now,
            &RxPacket {
                version: if data.len() % 8 < 4 {
                    RoceVersion::V2
                } else {
                    RoceVersion::V1
                },
                source,
                source_port: 0xc000,
                dest: if to_group { GROUP } else { HERE },
                ifindex: 0,
                traffic_class: 0,
                hop_limit: 64,
                flow_label: 0,
                data,
                icrc: &Verdict(valid),
            },
        );
    }

    /// Takes every completion and event.
    fn poll(&mut self) {
        let mut out = [Wc::default(); 4];
        for (queue, cq) in self.cqs.clone().iter().enumerate() {
            loop {
                let n = cq.poll(&mut out);
                for wc in &out[..n] {
                    let qp = self
                        .qpns
                        .iter()
                        .position(|&qpn| qpn == wc.qp_num)
                        .expect("a QP of ours");
                    match queue {
                        0 => self.sends[qp].complete(wc.wr_id, true),
                        _ if self.qps[qp].0 == QpType::XrcRecv => self.named.complete(wc.wr_id, false),
                        _ if self.qps[qp].2 => self.shared.complete(wc.wr_id, false),
                        _ => self.receives[qp].complete(wc.wr_id, true),
                    }
                }
                if n == 0 {
                    break;
                }
            }
        }
        while let Some(event) = self.device.take_event() {
            self.overrun |= matches!(event, AsyncEvent::CqError(_));
        }
    }

    /// Moves the first region, or changes what may be done there: if no window is bound to it.
    fn register_again(&mut self, script: &mut Script<'_>) {
        let choice = script.u8();
        let start = u64::from(script.u16());
        let all = Access::LOCAL_WRITE | Access::MW_BIND | Access::REMOTE_READ;
        let write = Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
        let change = MrChange {
            translation: (choice & 1 == 0).then_some((BASE + start, LEN as u64 - start, BASE)),
            pd: (choice & 2 == 0).then_some(self.pd),
            access: (choice & 4 == 0).then_some(if choice & 8 == 0 { all | write } else { all }),
        };
        let done = self.device.rereg_mr(self.keys[0], &change);
        assert!(matches!(done, Ok(()) | Err(VerbsError::Busy)), "{done:?}");
    }

    fn change_state(&mut self, qp: usize, choice: u8) {
        let states = [
            QpState::Err,
            QpState::Sqd,
            QpState::Rts,
            QpState::Reset,
            QpState::Init,
            QpState::Rtr,
        ];
        let state = states[usize::from(choice) % states.len()];
        if state == QpState::Reset {
            // What a reset clears never completes.
            self.poll();
            assert!(self.modify(qp, state, 1));
            self.sends[qp].outstanding.clear();
            self.receives[qp].outstanding.clear();
            if choice & 0x80 == 0 {
                for state in [QpState::Init, QpState::Rtr, QpState::Rts] {
                    assert!(self.modify(qp, state, 1 + u32::from(choice) % 5));
                }
            }
        } else {
            self.modify(qp, state, 1 + u32::from(choice) % 5);
        }
    }

    fn query(&mut self, qp: usize) {
        let (attr, init) = self.device.query_qp(self.qpns[qp]).unwrap();
        assert!(attr.sq_psn <= 0xff_ffff && attr.rq_psn <= 0xff_ffff && init.qp_type == self.qps[qp].0);
        let srq = self.device.query_srq(self.srq).unwrap();
        assert!(srq.max_wr >= SRQ_DEPTH && self.device.limits().max_qp > 0);
        let mut counters = 0;
        self.device.counters(&mut |_, _| counters += 1);
        assert!(counters > 0);
        self.device.qp_reports();
    }

    /// Everything to ERR, where what is left flushes; then all objects go.
    fn end(mut self) {
        self.poll();
        for qp in 0..self.qps.len() {
            let room = self.cqs.iter().all(|cq| cq.capacity() > 100);
            let (attr, _) = self.device.query_qp(self.qpns[qp]).unwrap();
            assert!(self.modify(qp, QpState::Err, 1) || attr.state == QpState::Reset);
            self.poll();
            // Unsignaled sends that succeeded complete with the next; the last of them may have none.
            if room && !self.overrun {
                assert!(
                    self.receives[qp].outstanding.is_empty(),
                    "receives of QP {qp} are not flushed"
                );
            }
        }
        self.transmit(1 << 20, Acks::Send);
        let mut deadlines = 0;
        while let Some(deadline) = self.device.next_deadline() {
            self.device.handle_timeouts(deadline);
            deadlines += 1;
            assert!(deadlines < 1000, "QPs in ERR still set timers");
        }
        for qpn in self.datagram_qpns() {
            self.device.detach_multicast(qpn, GROUP).unwrap();
        }
        for &qpn in &self.qpns {
            self.device.destroy_qp(self.now, qpn).unwrap();
        }
        self.device.destroy_srq(self.xrc_srq).unwrap();
        for cq in &self.cqs {
            self.device.destroy_cq(cq).unwrap();
        }
        self.device.destroy_srq(self.srq).unwrap();
        self.device.close_xrcd(self.xrcd).unwrap();
        for (window, _) in self.windows.into_iter().flatten() {
            self.device.dealloc_mw(window).unwrap();
        }
        for key in self.keys {
            self.device.dereg_mr(key).unwrap();
        }
        self.device.dealloc_pd(self.pd).unwrap();
    }
}
