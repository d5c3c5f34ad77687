//! One side of a capture: a device of ours with a QP, set up as `gen` sets up its own.

use std::sync::Arc;
use std::time::Duration;

use ferroce_engine::device::{Device, DeviceConfig, Limits, MrInfo, QpInit};
use ferroce_engine::link::{Path, Qpns, Transmit, TransmitError};
use ferroce_engine::memory::Fault;
use ferroce_engine::memory::sim::SimMemory;
use ferroce_engine::queue::Cq;
use ferroce_engine::time::Time;
use ferroce_engine::verbs::*;
use ferroce_wire::PathMtu;

use super::capture::{Captured, Packet};
use super::script::Options;

/// Where the buffer stands.
pub const BUF: u64 = 0x5000_0000;
const BUF_LEN: usize = 1 << 20;
/// What follows what was written.
const UNTOUCHED: u8 = 0xee;

/// Where the QP's packets go.
#[derive(Clone, Copy, Debug)]
pub struct Peer {
    pub path: Path,
    pub qpn: u32,
}

impl Peer {
    /// The sender of a packet, or who it was sent to.
    pub fn of(captured: &Captured, sender: bool, qpn: u32) -> Peer {
        let (source, dest) = if sender {
            (captured.dest, captured.source)
        } else {
            (captured.source, captured.dest)
        };
        let path = Path {
            version: captured.version(),
            ifindex: 1,
            ..Path::between(source, dest)
        };
        Peer { path, qpn }
    }
}

/// Keeps what is sent.
struct Recorder {
    peer: Peer,
    packets: Vec<Packet>,
}

impl Transmit for Recorder {
    fn packet(
        &mut self,
        path: &Path,
        qpns: Qpns,
        len: usize,
        fill: &mut dyn FnMut(&mut [u8]) -> Result<(), Fault>,
    ) -> Result<(), TransmitError> {
        let dest_qpn = qpns.dest;
        assert_eq!(
            (*path, dest_qpn),
            (self.peer.path, self.peer.qpn),
            "a packet goes elsewhere"
        );
        let mut data = vec![0; len + 4];
        fill(&mut data[..len]).map_err(TransmitError::Fault)?;
        self.packets.push(Packet::parse(&data));
        Ok(())
    }
}

/// Which side it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    Client,
    Server,
}

/// One side.
pub struct Node {
    pub device: Device,
    pub memory: Arc<SimMemory>,
    pub qpn: u32,
    pub key: MrInfo,
    qkey: u32,
    peer: Peer,
    cq: Arc<Cq>,
    recorder: Recorder,
    now: Time,
}

impl Node {
    /// Connected to the peer.
    pub fn new(role: Role, options: &Options, peer: Peer) -> Node {
        let memory = Arc::new(SimMemory::new(BUF, BUF_LEN));
        let mut device = Device::new(DeviceConfig {
            slot: 1,
            memory: memory.clone(),
            seed: [7; 32],
            mtu: options.path_mtu.max(PathMtu::Mtu1024),
            limits: Limits::default(),
            window: Box::new(|_| 1 << 28),
        });
        let pd = device.alloc_pd().unwrap();
        let remote = Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC;
        let key = device
            .reg_mr(
                pd,
                BUF,
                BUF_LEN as u64,
                BUF,
                Access::LOCAL_WRITE | Access::MW_BIND | remote,
            )
            .unwrap();
        let cq = device.create_cq(256, 0, None).unwrap();
        let cap = QpCap {
            max_send_wr: 128,
            max_recv_wr: 128,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline_data: 0,
        };
        let init = QpInit {
            pd: Some(pd),
            qp_type: options.qp_type,
            cap,
            send_cq: Some(cq.clone()),
            recv_cq: Some(cq.clone()),
            srq: None,
            xrcd: None,
            sq_sig_all: false,
        };
        let (qpn, _) = device.create_qp(init).unwrap();
        let mut node = Node {
            device,
            memory,
            qpn,
            key,
            qkey: options.qkey,
            peer,
            cq,
            recorder: Recorder {
                peer,
                packets: Vec::new(),
            },
            now: Time::ZERO,
        };
        node.connect(role, options, remote);
        node
    }

    fn connect(&mut self, role: Role, options: &Options, access: Access) {
        use QpAttrMask as M;
        let (sq_psn, rq_psn) = match role {
            Role::Client => (options.client_psn, options.server_psn()),
            Role::Server => (options.server_psn(), options.client_psn),
        };
        let attr = QpAttr {
            port: 1,
            qkey: options.qkey,
            access,
            path_mtu: options.path_mtu.code().into(),
            dest_qpn: self.peer.qpn,
            rq_psn,
            sq_psn,
            path: Some(self.peer.path),
            max_rd_atomic: options.max_rd_atomic,
            max_dest_rd_atomic: options.max_rd_atomic,
            min_rnr_timer: 12,
            timeout: options.timeout,
            retry_cnt: options.retry_cnt,
            rnr_retry: options.rnr_retry,
            ..QpAttr::default()
        };
        let (rc, ud) = (options.qp_type == QpType::Rc, options.qp_type == QpType::Ud);
        let when = |condition: bool, mask: M| if condition { mask } else { M::empty() };
        let init = M::PKEY_INDEX | M::PORT | if ud { M::QKEY } else { M::ACCESS_FLAGS };
        let rtr = when(!ud, M::AV | M::PATH_MTU | M::DEST_QPN | M::RQ_PSN)
            | when(rc, M::MAX_DEST_RD_ATOMIC | M::MIN_RNR_TIMER);
        let rts = M::SQ_PSN | when(rc, M::TIMEOUT | M::RETRY_CNT | M::RNR_RETRY | M::MAX_QP_RD_ATOMIC);
        for (state, mask) in [(QpState::Init, init), (QpState::Rtr, rtr), (QpState::Rts, rts)] {
            let attr = QpAttr { state, ..attr };
            self.device
                .modify_qp(self.now, self.qpn, &attr, M::STATE | mask)
                .unwrap();
        }
    }

    /// Fills the buffer: these bytes, and what is not to change behind them.
    pub fn fill(&self, bytes: &[u8]) {
        self.memory.with(BUF, BUF_LEN, |buf| {
            buf.fill(UNTOUCHED);
            buf[..bytes.len()].copy_from_slice(bytes);
        });
    }

    /// The first bytes of the buffer.
    pub fn bytes(&self, len: usize) -> Vec<u8> {
        self.memory.with(BUF, len, |buf| buf.to_vec())
    }

    /// Whether nothing was written behind the first bytes.
    pub fn untouched_behind(&self, len: usize) -> bool {
        self.memory
            .with(BUF, BUF_LEN, |buf| buf[len..].iter().all(|&b| b == UNTOUCHED))
    }

    /// The buffer's beginning, for a work request.
    pub fn sge(&self, len: usize) -> Sge {
        Sge {
            addr: BUF,
            length: len as u32,
            lkey: self.key.lkey,
        }
    }

    /// Binds a new memory window of type 2 to the first 4096 bytes; gives its key.
    pub fn bind_window(&mut self) -> u32 {
        let pd = self.device.query_qp(self.qpn).unwrap().1.pd;
        let (window, old) = self.device.alloc_mw(pd.expect("not XRC"), MwType::Type2).unwrap();
        let rkey = old & !0xff | (old + 1) & 0xff;
        let bind = MwBind {
            window,
            rkey,
            lkey: self.key.lkey,
            addr: BUF,
            len: 4096,
            access: Access::REMOTE_WRITE,
        };
        self.post_send(0, Operation::BindMw(bind), SendFlags::empty(), 0, false);
        assert!(self.transmit().is_empty(), "a bind sends nothing");
        rkey
    }

    /// Posts a receive of so many bytes.
    pub fn post_receive(&mut self, wr_id: u64, len: usize) {
        let sges = [self.sge(len)];
        let wr = RecvWr { wr_id, sges: &sges };
        self.device.post_recv(self.qpn, &wr).unwrap();
    }

    /// Posts a send.
    pub fn post_send(&mut self, wr_id: u64, operation: Operation, flags: SendFlags, len: usize, ud: bool) {
        let sges = [self.sge(len)];
        let wr = SendWr {
            wr_id,
            operation,
            flags,
            sges: if len > 0 { &sges } else { &[] },
            ud: ud.then_some(UdDest {
                path: self.peer.path,
                qpn: self.peer.qpn,
                qkey: self.qkey,
            }),
            ..SendWr::default()
        };
        self.device.post_send(self.now, self.qpn, &wr).unwrap();
    }

    /// Takes a captured packet, or what became of it, a little later.
    pub fn receive(&mut self, captured: &Captured, packet: &Packet) {
        self.now = self.now + Duration::from_micros(1);
        self.device
            .receive(self.now, &captured.received(&packet.to_bytes()));
    }

    /// Waits for the next timer, and runs it. False if there is none.
    pub fn wait(&mut self) -> bool {
        let Some(deadline) = self.device.next_deadline() else {
            return false;
        };
        self.now = self.now.max(deadline);
        self.device.handle_timeouts(self.now);
        true
    }

    /// What is sent now.
    pub fn transmit(&mut self) -> Vec<Packet> {
        while self.device.transmit(self.now, &mut self.recorder) != ferroce_engine::device::Progress::Idle {}
        std::mem::take(&mut self.recorder.packets)
    }

    /// Everything that has completed.
    pub fn completions(&mut self) -> Vec<Wc> {
        let mut out = [Wc::default(); 256];
        let n = self.cq.poll(&mut out);
        out[..n].to_vec()
    }
}
