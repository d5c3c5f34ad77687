//! What the transport costs per packet, apart from links: two devices and a buffer between them.
//!
//! `cargo bench -p ferroce-engine --bench transport` prints nanoseconds per packet for both sides together. The copies
//! of the payload are in it (once into the packet, once out of it), ICRC and system calls are not.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::Instant;

use ferroce_engine::device::{Device, DeviceConfig, Limits, Progress, QpInit};
use ferroce_engine::link::{IcrcCheck, Path, Qpns, RoceVersion, RxPacket, Transmit, TransmitError};
use ferroce_engine::memory::Fault;
use ferroce_engine::memory::process::ProcessMemory;
use ferroce_engine::queue::Cq;
use ferroce_engine::time::Time;
use ferroce_engine::verbs::*;
use ferroce_wire::PathMtu;

/// Packets of one batch, one behind the other.
#[derive(Default)]
struct Batch {
    bytes: Vec<u8>,
    used: usize,
    ends: Vec<usize>,
}

impl Transmit for Batch {
    fn packet(
        &mut self,
        _: &Path,
        _: Qpns,
        len: usize,
        fill: &mut dyn FnMut(&mut [u8]) -> Result<(), Fault>,
    ) -> Result<(), TransmitError> {
        let end = self.used + len + 4;
        let room = self
            .bytes
            .get_mut(self.used..end - 4)
            .ok_or(TransmitError::Full)?;
        fill(room).map_err(TransmitError::Fault)?;
        self.used = end;
        self.ends.push(end);
        Ok(())
    }
}

struct Always;
impl IcrcCheck for Always {
    fn valid(&self, _: &RxPacket<'_>) -> bool {
        true
    }
}

struct Side {
    dev: Device,
    cq: Arc<Cq>,
    qpn: u32,
    addr: IpAddr,
    buffer: Vec<u8>,
    lkey: u32,
    batch: Batch,
    packets: u64,
}

impl Side {
    fn new(number: u8) -> Side {
        let memory = Arc::new(ProcessMemory::new().expect("fault handler"));
        let mut dev = Device::new(DeviceConfig {
            slot: number,
            memory,
            seed: [number; 32],
            mtu: PathMtu::Mtu4096,
            limits: Limits::default(),
            window: Box::new(|_| 1 << 20),
        });
        let pd = dev.alloc_pd().unwrap();
        let buffer = vec![number; 1 << 20];
        let addr = buffer.as_ptr() as u64;
        let lkey = dev
            .reg_mr(pd, addr, 1 << 20, addr, Access::LOCAL_WRITE)
            .unwrap()
            .lkey;
        let cq = dev.create_cq(4096, 0, None).unwrap();
        let cap = QpCap {
            max_send_wr: 256,
            max_recv_wr: 256,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline_data: 0,
        };
        let init = QpInit {
            pd: Some(pd),
            qp_type: QpType::Rc,
            cap,
            send_cq: Some(cq.clone()),
            recv_cq: Some(cq.clone()),
            srq: None,
            xrcd: None,
            sq_sig_all: true,
        };
        let (qpn, _) = dev.create_qp(init).unwrap();
        let batch = Batch {
            bytes: vec![0; 1 << 21],
            ..Batch::default()
        };
        Side {
            dev,
            cq,
            qpn,
            addr: IpAddr::V4(Ipv4Addr::new(10, 0, 0, number)),
            buffer,
            lkey,
            batch,
            packets: 0,
        }
    }

    fn connect(&mut self, qpn: u32, addr: IpAddr) {
        use QpAttrMask as M;
        let path = Path {
            ifindex: 1,
            ..Path::between(self.addr, addr)
        };
        let init = QpAttr {
            state: QpState::Init,
            port: 1,
            ..QpAttr::default()
        };
        let rtr = QpAttr {
            state: QpState::Rtr,
            path: Some(path),
            path_mtu: 5,
            dest_qpn: qpn,
            min_rnr_timer: 1,
            ..init
        };
        let rts = QpAttr {
            state: QpState::Rts,
            timeout: 14,
            retry_cnt: 7,
            rnr_retry: 7,
            ..init
        };
        let steps = [
            (init, M::STATE | M::PKEY_INDEX | M::PORT | M::ACCESS_FLAGS),
            (
                rtr,
                M::STATE
                    | M::AV
                    | M::PATH_MTU
                    | M::DEST_QPN
                    | M::RQ_PSN
                    | M::MAX_DEST_RD_ATOMIC
                    | M::MIN_RNR_TIMER,
            ),
            (
                rts,
                M::STATE | M::SQ_PSN | M::TIMEOUT | M::RETRY_CNT | M::RNR_RETRY | M::MAX_QP_RD_ATOMIC,
            ),
        ];
        for (attr, mask) in steps {
            self.dev.modify_qp(Time::ZERO, self.qpn, &attr, mask).unwrap();
        }
    }

    fn sge(&self, length: u32) -> [Sge; 1] {
        [Sge {
            addr: self.buffer.as_ptr() as u64,
            length,
            lkey: self.lkey,
        }]
    }

    /// Moves what the device sends now to its peer.
    fn pass_to(&mut self, peer: &mut Side) {
        loop {
            self.batch.used = 0;
            self.batch.ends.clear();
            let progress = self.dev.transmit(Time::ZERO, &mut self.batch);
            let mut start = 0;
            for &end in &self.batch.ends {
                let data = &self.batch.bytes[start..end];
                let packet = RxPacket {
                    version: RoceVersion::V2,
                    source: self.addr,
                    source_port: 0xc000,
                    dest: peer.addr,
                    ifindex: 0,
                    traffic_class: 0,
                    hop_limit: 64,
                    flow_label: 0,
                    data,
                    icrc: &Always,
                };
                peer.dev.receive(Time::ZERO, &packet);
                start = end;
            }
            self.packets += self.batch.ends.len() as u64;
            if progress == Progress::Idle {
                return;
            }
        }
    }
}

/// Sends messages of `len` bytes in batches of 64; gives nanoseconds per request packet.
fn run(len: u32) -> f64 {
    let (mut a, mut b) = (Side::new(1), Side::new(2));
    a.connect(b.qpn, b.addr);
    b.connect(a.qpn, a.addr);
    let depth = if len > 65536 { 4 } else { 64 };
    let rounds = (200_000_000 / (u64::from(len) + 2000) / depth).max(50);
    let mut out = [Wc::default(); 64];
    let start = Instant::now();
    for _ in 0..rounds {
        let (from, to) = (a.sge(len), b.sge(len));
        for wr_id in 0..depth {
            b.dev.post_recv(b.qpn, &RecvWr { wr_id, sges: &to }).unwrap();
        }
        for wr_id in 0..depth {
            let wr = SendWr {
                wr_id,
                operation: Operation::Send,
                flags: SendFlags::empty(),
                sges: &from,
                ..SendWr::default()
            };
            a.dev.post_send(Time::ZERO, a.qpn, &wr).unwrap();
        }
        let (mut sent, mut received) = (0, 0);
        while sent < depth || received < depth {
            a.pass_to(&mut b);
            b.pass_to(&mut a);
            received += b.cq.poll(&mut out) as u64;
            sent += a.cq.poll(&mut out) as u64;
        }
    }
    start.elapsed().as_nanos() as f64 / a.packets as f64
}

fn main() {
    println!("{:>10} {:>10}", "bytes", "ns/packet");
    for len in [0, 64, 1024, 4096, 1 << 20] {
        let best = (0..5).map(|_| run(len)).fold(f64::INFINITY, f64::min);
        println!("{len:>10} {best:>10.1}");
    }
}
