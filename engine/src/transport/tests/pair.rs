//! Two devices and the packets between them. Nothing moves by itself: a test says what arrives, what is lost, and
//! what time it is.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::Duration;

use ferroce_wire::{Aeth, Bth, Opcode, PathMtu, Psn, RocePacket, Syndrome};

use crate::device::{Acks, Device, DeviceConfig, Limits, MrInfo, PdId, Progress, QpInit, SrqId, XrcdId};
use crate::link::{IcrcCheck, Path, Qpns, RxPacket, Transmit, TransmitError};
use crate::memory::sim::SimMemory;
use crate::memory::{Fault, Memory};
use crate::queue::Cq;
use crate::time::Time;
use crate::verbs::*;

/// Where each side's memory begins.
pub const BASE: u64 = 0x10_0000;
/// Bytes of memory on each side.
pub const MEMORY: usize = 1 << 20;
/// Receives go into the upper half.
pub const RECV: u64 = BASE + (MEMORY / 2) as u64;

/// What each side lets the other do.
pub const REMOTE: Access = Access::REMOTE_WRITE
    .union(Access::REMOTE_READ)
    .union(Access::REMOTE_ATOMIC)
    .union(Access::FLUSH_GLOBAL);

/// A packet under way; without ICRC.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Packet {
    pub path: Path,
    pub bytes: Vec<u8>,
}

impl Packet {
    pub fn roce(&self) -> RocePacket<'_> {
        RocePacket::parse(&self.bytes).unwrap()
    }

    pub fn opcode(&self) -> Opcode {
        self.roce().opcode()
    }

    pub fn psn(&self) -> u32 {
        self.roce().bth().psn.value()
    }

    pub fn aeth(&self) -> Aeth {
        self.roce().aeth().unwrap()
    }

    /// (syndrome byte, PSN, MSN)
    pub fn ack(&self) -> (u8, u32, u32) {
        assert_eq!(self.opcode(), Opcode::RcAcknowledge);
        (self.aeth().syndrome.value(), self.psn(), self.aeth().msn)
    }
}

/// What a device sent.
#[derive(Default)]
pub struct Sent {
    pub packets: Vec<Packet>,
    /// Room for more packets.
    pub room: usize,
}

impl Transmit for Sent {
    fn packet(
        &mut self,
        path: &Path,
        qpns: Qpns,
        len: usize,
        fill: &mut dyn FnMut(&mut [u8]) -> Result<(), Fault>,
    ) -> Result<(), TransmitError> {
        let dest_qpn = qpns.dest;
        if self.room == 0 {
            return Err(TransmitError::Full);
        }
        let mut bytes = vec![0xee; len];
        fill(&mut bytes).map_err(TransmitError::Fault)?;
        bytes.extend([0; 4]);
        assert_eq!(Bth::parse(&bytes).unwrap().dest_qpn, dest_qpn);
        assert_eq!(len % 4, 0);
        self.room -= 1;
        self.packets.push(Packet { path: *path, bytes });
        Ok(())
    }
}

/// An ICRC check with a fixed answer.
pub struct Verdict(pub bool);
impl IcrcCheck for Verdict {
    fn valid(&self, _: &RxPacket<'_>) -> bool {
        self.0
    }
}

/// One side.
pub struct Side {
    pub dev: Device,
    pub memory: Arc<SimMemory>,
    pub pd: PdId,
    pub mr: MrInfo,
    pub send_cq: Arc<Cq>,
    pub recv_cq: Arc<Cq>,
    pub qpn: u32,
    /// The domain of an XRC target, and the SRQs of it.
    pub xrc: Option<(XrcdId, [SrqId; 2])>,
    pub addr: IpAddr,
    pub now: Time,
}

/// How a pair is made.
#[derive(Clone)]
pub struct Setup {
    /// With `XrcSend`, the second side has the target.
    pub qp_type: QpType,
    pub mtu: PathMtu,
    pub psn: u32,
    pub timeout: u8,
    pub retry_cnt: u8,
    pub rnr_retry: u8,
    pub cap: QpCap,
    pub sig_all: bool,
    pub srq: Option<u32>,
    pub window: u32,
    /// What the devices reach instead of the sides' own memory.
    pub memory: Option<Arc<dyn Memory>>,
}

impl Default for Setup {
    fn default() -> Setup {
        Setup {
            qp_type: QpType::Rc,
            mtu: PathMtu::Mtu256,
            psn: 0xff_fffe,
            timeout: 14,
            retry_cnt: 3,
            rnr_retry: 3,
            cap: QpCap {
                max_send_wr: 64,
                max_recv_wr: 64,
                max_send_sge: 4,
                max_recv_sge: 4,
                max_inline_data: 64,
            },
            sig_all: true,
            srq: None,
            window: 64 * 1024,
            memory: None,
        }
    }
}

/// Nanoseconds of local ACK timeout 14.
pub const TIMEOUT: Duration = Duration::from_nanos(4096 << 14);

/// The Q_Key of UD pairs.
pub const QKEY: u32 = 0x1111_1111;

impl Side {
    fn new(number: u8, setup: &Setup) -> Side {
        let memory = Arc::new(SimMemory::new(BASE, MEMORY));
        let window = setup.window;
        let mut dev = Device::new(DeviceConfig {
            slot: number,
            memory: setup.memory.clone().unwrap_or(memory.clone()),
            seed: [number; 32],
            mtu: PathMtu::Mtu4096,
            limits: Limits::default(),
            window: Box::new(move |_| window * 16),
        });
        let pd = dev.alloc_pd().unwrap();
        let access = Access::LOCAL_WRITE | Access::MW_BIND | REMOTE;
        let mr = dev.reg_mr(pd, BASE, MEMORY as u64, BASE, access).unwrap();
        let send_cq = dev.create_cq(256, 0, None).unwrap();
        let recv_cq = dev.create_cq(256, 0, None).unwrap();
        let srq = setup.srq.map(|limit| dev.create_srq(pd, 64, 4, limit).unwrap());
        let qp_type = match setup.qp_type {
            QpType::XrcSend if number == 2 => QpType::XrcRecv,
            qp_type => qp_type,
        };
        let xrc = (qp_type == QpType::XrcRecv).then(|| {
            let xrcd = dev.open_xrcd(None, true, false).unwrap();
            let mut srq = || dev.create_xrc_srq(pd, xrcd, &recv_cq, 64, 4).unwrap();
            (xrcd, [srq(), srq()])
        });
        let init = QpInit {
            pd: Some(pd),
            qp_type,
            cap: setup.cap,
            send_cq: Some(send_cq.clone()),
            recv_cq: Some(recv_cq.clone()),
            srq,
            xrcd: xrc.map(|(xrcd, _)| xrcd),
            sq_sig_all: setup.sig_all,
        };
        let (qpn, _) = dev.create_qp(init).unwrap();
        memory.with(BASE, MEMORY / 2, |bytes| {
            for (i, byte) in bytes.iter_mut().enumerate() {
                *byte = (i * 7 + i / 251) as u8;
            }
        });
        let addr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, number));
        Side {
            dev,
            memory,
            pd,
            mr,
            send_cq,
            recv_cq,
            qpn,
            xrc,
            addr,
            now: Time::ZERO,
        }
    }

    pub fn path_to(&self, dest: IpAddr) -> Path {
        Path {
            ifindex: 1,
            ..Path::between(self.addr, dest)
        }
    }

    pub fn modify(&mut self, attr: &QpAttr, mask: QpAttrMask) -> Result<(), VerbsError> {
        self.dev.modify_qp(self.now, self.qpn, attr, mask)
    }

    pub fn go_to(&mut self, state: QpState) {
        self.modify(
            &QpAttr {
                state,
                ..QpAttr::default()
            },
            QpAttrMask::STATE,
        )
        .unwrap();
    }

    pub fn state(&self) -> QpState {
        self.dev.query_qp(self.qpn).unwrap().0.state
    }

    pub fn qp_type(&self) -> QpType {
        self.dev.query_qp(self.qpn).unwrap().1.qp_type
    }

    pub fn srq(&self) -> Option<SrqId> {
        let own = self.dev.query_qp(self.qpn).unwrap().1.srq;
        own.or(self.xrc.map(|(_, [first, _])| first))
    }

    /// Takes the QP to INIT and RTR.
    pub fn ready_to_receive(&mut self, peer: u32, addr: IpAddr, setup: &Setup) {
        use QpAttrMask as M;
        let attr = QpAttr {
            state: QpState::Init,
            port: 1,
            qkey: QKEY,
            access: REMOTE,
            path: Some(self.path_to(addr)),
            path_mtu: u32::from(setup.mtu.code()),
            dest_qpn: peer,
            rq_psn: setup.psn,
            max_dest_rd_atomic: 4,
            min_rnr_timer: 12,
            ..QpAttr::default()
        };
        let rtr = QpAttr {
            state: QpState::Rtr,
            ..attr
        };
        let init = M::STATE | M::PKEY_INDEX | M::PORT;
        if setup.qp_type == QpType::Ud {
            self.modify(&attr, init | M::QKEY).unwrap();
            self.modify(&rtr, M::STATE).unwrap();
            return;
        }
        self.modify(&attr, init | M::ACCESS_FLAGS).unwrap();
        let mut mask = M::STATE | M::AV | M::PATH_MTU | M::DEST_QPN | M::RQ_PSN;
        if matches!(self.qp_type(), QpType::Rc | QpType::XrcRecv) {
            mask |= M::MAX_DEST_RD_ATOMIC | M::MIN_RNR_TIMER;
        }
        self.modify(&rtr, mask).unwrap();
    }

    /// Takes the QP from RTR to RTS.
    pub fn ready_to_send(&mut self, setup: &Setup) {
        use QpAttrMask as M;
        let attr = QpAttr {
            state: QpState::Rts,
            sq_psn: setup.psn,
            timeout: setup.timeout,
            retry_cnt: setup.retry_cnt,
            rnr_retry: setup.rnr_retry,
            max_rd_atomic: 4,
            ..QpAttr::default()
        };
        let mut mask = M::STATE | M::SQ_PSN;
        match self.qp_type() {
            QpType::Rc | QpType::XrcSend => {
                mask |= M::TIMEOUT | M::RETRY_CNT | M::RNR_RETRY | M::MAX_QP_RD_ATOMIC;
            }
            QpType::XrcRecv => mask |= M::TIMEOUT,
            QpType::Uc | QpType::Ud => {}
        }
        self.modify(&attr, mask).unwrap();
    }

    /// An entry of this side's region.
    pub fn sge(&self, addr: u64, length: u32) -> Sge {
        Sge {
            addr,
            length,
            lkey: self.mr.lkey,
        }
    }

    pub fn post(&mut self, wr: &SendWr<'_>) -> Result<(), VerbsError> {
        self.dev.post_send(self.now, self.qpn, wr)
    }

    /// Posts a SEND of `len` bytes from the start of the memory.
    pub fn send(&mut self, wr_id: u64, len: u32) {
        let sges = [self.sge(BASE, len)];
        let wr = SendWr {
            wr_id,
            operation: Operation::Send,
            flags: SendFlags::empty(),
            sges: &sges,
            ..SendWr::default()
        };
        self.post(&wr).unwrap();
    }

    /// Posts a receive of `len` bytes into the upper half of the memory.
    pub fn recv(&mut self, wr_id: u64, len: u32) {
        let sges = [self.sge(RECV, len)];
        let wr = RecvWr { wr_id, sges: &sges };
        match self.srq() {
            Some(srq) => self.dev.post_srq_recv(srq, &wr).unwrap(),
            None => self.dev.post_recv(self.qpn, &wr).unwrap(),
        }
    }

    /// Everything the device sends now.
    pub fn sent(&mut self) -> Vec<Packet> {
        self.transmit(Acks::Send)
    }

    /// What the device sends now where acknowledgements may wait.
    pub fn sent_unless_alone(&mut self) -> Vec<Packet> {
        self.transmit(Acks::MayWait)
    }

    fn transmit(&mut self, acks: Acks) -> Vec<Packet> {
        let mut sent = Sent {
            room: usize::MAX,
            ..Sent::default()
        };
        while self.dev.transmit_acks(self.now, &mut sent, acks) == Progress::More {}
        sent.packets
    }

    /// Some of what the device sends now.
    pub fn some(&mut self) -> Vec<Packet> {
        let mut sent = Sent {
            room: 64,
            ..Sent::default()
        };
        self.dev.transmit(self.now, &mut sent);
        sent.packets
    }

    /// A packet arrives.
    pub fn receive(&mut self, packet: &Packet) {
        self.receive_as(packet, packet.path.source, &Verdict(true));
    }

    pub fn receive_as(&mut self, packet: &Packet, source: IpAddr, icrc: &dyn IcrcCheck) {
        let packet = RxPacket {
            version: packet.path.version,
            source,
            source_port: 0xc000,
            dest: packet.path.dest,
            ifindex: packet.path.ifindex,
            traffic_class: packet.path.traffic_class,
            hop_limit: packet.path.hop_limit,
            flow_label: packet.path.flow_label,
            data: &packet.bytes,
            icrc,
        };
        self.dev.receive(self.now, &packet);
    }

    /// Packets arrive.
    pub fn receive_all(&mut self, packets: &[Packet]) {
        for packet in packets {
            self.receive(packet);
        }
    }

    /// An answer to the request with this PSN arrives, made up by the test.
    pub fn answer(&mut self, peer: IpAddr, psn: u32, syndrome: Syndrome, msn: u32) {
        let mut bytes = vec![0; 20];
        Bth::new(Opcode::RcAcknowledge, self.qpn, Psn::new(psn)).emit(&mut bytes);
        Aeth { syndrome, msn }.emit(&mut bytes[12..]);
        let path = Path {
            source: peer,
            dest: self.addr,
            ..self.path_to(peer)
        };
        self.receive(&Packet { path, bytes });
    }

    /// (wr_id, status) of all completions that wait.
    fn polled(cq: &Cq) -> Vec<Wc> {
        let mut out = vec![Wc::default(); 256];
        let n = cq.poll(&mut out);
        out.truncate(n);
        out
    }

    pub fn send_full(&self) -> Vec<Wc> {
        Side::polled(&self.send_cq)
    }

    pub fn send_wcs(&self) -> Vec<(u64, WcStatus)> {
        self.send_full().iter().map(|wc| (wc.wr_id, wc.status)).collect()
    }

    pub fn recv_wcs(&self) -> Vec<(u64, WcStatus)> {
        self.recv_full().iter().map(|wc| (wc.wr_id, wc.status)).collect()
    }

    pub fn recv_full(&self) -> Vec<Wc> {
        Side::polled(&self.recv_cq)
    }

    /// The first bytes of the memory that sends come from.
    pub fn source(&self, len: usize) -> Vec<u8> {
        self.memory.with(BASE, len, |bytes| bytes.to_vec())
    }

    /// The first bytes of the memory that receives go to.
    pub fn target(&self, len: usize) -> Vec<u8> {
        self.memory.with(RECV, len, |bytes| bytes.to_vec())
    }

    pub fn events(&mut self) -> Vec<AsyncEvent> {
        std::iter::from_fn(|| self.dev.take_event()).collect()
    }

    pub fn counter(&self, name: &str) -> u64 {
        let mut value = None;
        self.dev.counters(&mut |n, v| {
            if n == name {
                value = Some(v);
            }
        });
        value.unwrap()
    }

    /// Lets time pass, and timers with it.
    pub fn wait(&mut self, time: Duration) {
        self.now = self.now + time;
        self.dev.handle_timeouts(self.now);
    }
}

/// Two connected sides.
pub struct Pair {
    pub a: Side,
    pub b: Side,
}

impl Pair {
    pub fn new(setup: &Setup) -> Pair {
        let (mut a, mut b) = (Side::new(1, setup), Side::new(2, setup));
        a.ready_to_receive(b.qpn, b.addr, setup);
        b.ready_to_receive(a.qpn, a.addr, setup);
        a.ready_to_send(setup);
        b.ready_to_send(setup);
        Pair { a, b }
    }

    /// Carries packets both ways until none is left; gives how many.
    pub fn run(&mut self) -> usize {
        let mut moved = 0;
        loop {
            let (from_a, from_b) = (self.a.sent(), self.b.sent());
            if from_a.is_empty() && from_b.is_empty() {
                return moved;
            }
            moved += from_a.len() + from_b.len();
            self.b.receive_all(&from_a);
            self.a.receive_all(&from_b);
        }
    }
}
