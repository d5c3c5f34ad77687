//! Replays the client's packets of the captures `rc-drop-*` and `rc-nak-*` (tests/golden: two Soft-RoCE peers) to our
//! responder, set up as the server was, and compares its responses with those that the protocol prescribes. Where these
//! are not the ones that Soft-RoCE gave, the case says why.
#![forbid(unsafe_code)]

use std::fs::File;
use std::net::IpAddr;
use std::path::Path as FilePath;
use std::sync::Arc;
use std::time::Duration;

use ferroce_engine::device::{Device, DeviceConfig, Limits, QpInit};
use ferroce_engine::link::{IcrcCheck, Path, RxPacket, Transmit, TransmitError};
use ferroce_engine::memory::Fault;
use ferroce_engine::memory::sim::SimMemory;
use ferroce_engine::time::Time;
use ferroce_engine::verbs::*;
use ferroce_wire::frame::Frame;
use ferroce_wire::{Kind, PathMtu, RocePacket};
use pcap_file::pcap::PcapReader;

/// Where the server's buffer stands.
const BUF: u64 = 0x5000_0000;
const BUF_LEN: usize = 1 << 20;
/// Bytes of a full packet: every capture here has path MTU 1024.
const MTU: usize = 1024;
/// What the server put where atomics go.
const ATOMIC_VALUE: u64 = 0x1122_3344_5566_7788;

/// A packet that was or should be sent by the responder.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Reply {
    kind: Kind,
    psn: u32,
    /// Syndrome and MSN of the AETH.
    aeth: Option<(u8, u32)>,
    /// Original value of an atomic.
    original: Option<u64>,
    payload: Vec<u8>,
}

/// What the client does, and with it what the server prepares (gen.c).
#[derive(Clone, Copy, Debug)]
enum Op {
    /// SEND of so many bytes to a receive of this size.
    Send { len: usize, receive: usize },
    /// So many SENDs of 16 bytes.
    Burst(usize),
    /// SEND whose receive is posted before the client's packet of this index.
    Late { len: usize, posted: usize },
    /// RDMA WRITE.
    Write(usize),
    /// RDMA READ.
    Read(usize),
    /// Atomics.
    Atomic,
}

/// A capture, and what is known of it beyond its packets.
struct Case {
    capture: &'static str,
    /// The index of the client's first packet of each operation, and the operation.
    ops: &'static [(usize, Op)],
    /// Client packets that the bridge dropped before they came to the server.
    dropped: &'static [usize],
    /// The client uses a wrong remote key.
    bad_key: bool,
    /// READs and atomics that the server accepts.
    max_dest_rd_atomic: u8,
    /// What the server is to answer.
    replies: Vec<Reply>,
    /// Why Soft-RoCE's answers in the capture are others; `None` if they are the same.
    differs: Option<&'static str>,
}

impl Case {
    fn new(capture: &'static str, ops: &'static [(usize, Op)], replies: Vec<Reply>) -> Case {
        Case {
            capture,
            ops,
            dropped: &[],
            bad_key: false,
            max_dest_rd_atomic: 4,
            replies,
            differs: None,
        }
    }
}

fn reply(kind: Kind, psn: u32, aeth: Option<(u8, u32)>) -> Reply {
    Reply {
        kind,
        psn,
        aeth,
        original: None,
        payload: Vec::new(),
    }
}

/// An ACK without credit limit, as a QP gives it whose peer needs none.
fn ack(psn: u32, msn: u32) -> Reply {
    reply(Kind::Acknowledge, psn, Some((0x1f, msn)))
}

fn nak(syndrome: u8, psn: u32, msn: u32) -> Reply {
    reply(Kind::Acknowledge, psn, Some((syndrome, msn)))
}

fn atomic_ack(psn: u32, msn: u32) -> Reply {
    Reply {
        original: Some(ATOMIC_VALUE),
        ..reply(Kind::AtomicAcknowledge, psn, Some((0x1f, msn)))
    }
}

/// The responses of a READ of the server's bytes `offset..end` by operation 0, from PSN `psn` on.
fn read_responses(psn: u32, offset: usize, end: usize) -> Vec<Reply> {
    let count = (end - offset).div_ceil(MTU);
    (0..count)
        .map(|i| {
            let kind = match i {
                0 if count == 1 => Kind::ReadResponseOnly,
                0 => Kind::ReadResponseFirst,
                i if i + 1 == count => Kind::ReadResponseLast,
                _ => Kind::ReadResponseMiddle,
            };
            let start = offset + i * MTU;
            let aeth = (kind != Kind::ReadResponseMiddle).then_some((0x1f, 1));
            let payload = pattern(0, start, end.min(start + MTU) - start);
            Reply {
                payload,
                ..reply(kind, psn + i as u32, aeth)
            }
        })
        .collect()
}

/// Bytes of operation `op` (gen.c): byte k is k + 7 op.
fn pattern(op: usize, offset: usize, len: usize) -> Vec<u8> {
    (offset..offset + len).map(|k| (k + 7 * op) as u8).collect()
}

const BRIDGE: &str = "responses that the bridge dropped are not in the capture";
const TOO_LONG: &str =
    "a message too long for its receive is an invalid request (0x61), as hardware says; rxe: 0x63";
const RNR_REST: &str = "after an RNR NAK the rest of the message is dropped in silence: a sequence NAK, as rxe sends, \
                        would ask for it before the wait is over";

fn cases() -> Vec<Case> {
    const SEND_4096: &[(usize, Op)] = &[(
        0,
        Op::Send {
            len: 4096,
            receive: 4096,
        },
    )];
    const WRITE_64: &[(usize, Op)] = &[(0, Op::Write(64))];
    const READ_64: &[(usize, Op)] = &[(0, Op::Read(64))];
    const ATOMIC: &[(usize, Op)] = &[(0, Op::Atomic)];
    let acks = |count: u32| (0..count).map(|n| ack(0x100 + n, n + 1)).collect::<Vec<_>>();
    let case = Case::new;
    let send_middle = |capture| Case {
        dropped: &[1],
        ..case(capture, SEND_4096, vec![nak(0x60, 0x101, 0), ack(0x103, 1)])
    };
    let with_nak = |capture, ops, syndrome| case(capture, ops, vec![nak(syndrome, 0x100, 0)]);
    let bad = |case| Case {
        bad_key: true,
        ..case
    };
    vec![
        send_middle("rc-drop-send-middle-v4"),
        send_middle("rc-drop-send-middle-v6ll"),
        Case {
            dropped: &[3],
            ..case(
                "rc-drop-send-last-v4",
                SEND_4096,
                vec![ack(0x102, 0), ack(0x102, 0), ack(0x102, 0), ack(0x103, 1)],
            )
        },
        Case {
            differs: Some(BRIDGE),
            ..case(
                "rc-drop-ack-v4",
                &[
                    (0, Op::Send { len: 64, receive: 64 }),
                    (2, Op::Send { len: 64, receive: 64 }),
                ],
                vec![ack(0x100, 1), ack(0x100, 1), ack(0x101, 2)],
            )
        },
        Case {
            differs: Some(BRIDGE),
            ..case("rc-drop-acks-cumulative-v4", &[(0, Op::Burst(10))], acks(10))
        },
        Case {
            dropped: &[5],
            ..case("rc-drop-burst-v4", &[(0, Op::Burst(10))], {
                let mut replies = acks(10);
                replies.insert(5, nak(0x60, 0x105, 5));
                replies
            })
        },
        case(
            "rc-nak-rnr-v4",
            &[(0, Op::Late { len: 64, posted: 13 })],
            [vec![nak(0x2c, 0x100, 0); 13], vec![ack(0x100, 1)]].concat(),
        ),
        case(
            "rc-nak-rnr-exceeded-v4",
            &[(
                0,
                Op::Late {
                    len: 64,
                    posted: usize::MAX,
                },
            )],
            vec![nak(0x2c, 0x100, 0); 3],
        ),
        Case {
            differs: Some(RNR_REST),
            ..case(
                "rc-nak-rnr-multi-v4",
                &[(
                    0,
                    Op::Late {
                        len: 3000,
                        posted: 39,
                    },
                )],
                [vec![nak(0x2c, 0x100, 0); 13], vec![ack(0x102, 1)]].concat(),
            )
        },
        Case {
            differs: Some(TOO_LONG),
            ..with_nak(
                "rc-nak-operational-short-v4",
                &[(0, Op::Send { len: 64, receive: 32 })],
                0x61,
            )
        },
        Case {
            differs: Some(TOO_LONG),
            ..case(
                "rc-nak-operational-short-multi-v4",
                &[(
                    0,
                    Op::Send {
                        len: 3000,
                        receive: 1500,
                    },
                )],
                vec![nak(0x61, 0x101, 0)],
            )
        },
        Case {
            dropped: &[0],
            ..case(
                "rc-drop-write-first-v4",
                &[(0, Op::Write(4096))],
                vec![nak(0x60, 0x100, 0), ack(0x103, 1)],
            )
        },
        Case {
            dropped: &[0],
            ..case(
                "rc-drop-read-request-v4",
                &[(0, Op::Read(3500))],
                read_responses(0x100, 0, 3500),
            )
        },
        Case {
            differs: Some(
                "responses that the bridge dropped are not in the capture; and a READ of the rest is answered as any \
                 READ, from FIRST on, where rxe goes on with MIDDLE",
            ),
            ..case(
                "rc-drop-read-response-middle-v4",
                &[(0, Op::Read(4096))],
                [read_responses(0x100, 0, 4096), read_responses(0x101, MTU, 4096)].concat(),
            )
        },
        Case {
            differs: Some(
                "responses that the bridge dropped are not in the capture; and a READ of one packet is answered by \
                 ONLY, where rxe sends a LAST",
            ),
            ..case(
                "rc-drop-read-response-last-v4",
                &[(0, Op::Read(4096))],
                [
                    read_responses(0x100, 0, 4096),
                    read_responses(0x103, 3 * MTU, 4096),
                ]
                .concat(),
            )
        },
        Case {
            differs: Some(BRIDGE),
            ..case(
                "rc-drop-atomic-ack-v4",
                &[(0, Op::Atomic), (2, Op::Atomic)],
                vec![atomic_ack(0x100, 1), atomic_ack(0x100, 1), atomic_ack(0x101, 2)],
            )
        },
        bad(with_nak("rc-nak-access-write-v4", WRITE_64, 0x62)),
        bad(with_nak("rc-nak-access-write-v6ll", WRITE_64, 0x62)),
        bad(with_nak(
            "rc-nak-access-write-multi-v4",
            &[(0, Op::Write(3000))],
            0x62,
        )),
        bad(with_nak("rc-nak-access-read-v4", READ_64, 0x62)),
        bad(with_nak("rc-nak-access-atomic-v4", ATOMIC, 0x62)),
        Case {
            max_dest_rd_atomic: 0,
            ..with_nak("rc-nak-invalid-read-v4", READ_64, 0x61)
        },
        Case {
            max_dest_rd_atomic: 0,
            ..with_nak("rc-nak-invalid-atomic-v4", ATOMIC, 0x61)
        },
    ]
}

/// One packet of a capture.
struct Captured {
    source: IpAddr,
    dest: IpAddr,
    source_port: u16,
    data: Vec<u8>,
}

/// The packets of a capture: the client's and the server's. The client sends the first.
fn read(name: &str) -> (Vec<Captured>, Vec<Captured>) {
    let folder = FilePath::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden");
    let mut reader = PcapReader::new(File::open(folder.join(name).with_extension("pcap")).unwrap()).unwrap();
    let (mut client, mut server): (Vec<Captured>, Vec<Captured>) = (Vec::new(), Vec::new());
    while let Some(record) = reader.next_packet() {
        let record = record.unwrap();
        let frame = Frame::parse(&record.data).unwrap();
        frame.datagram.verify().unwrap();
        let network = frame.datagram.network;
        let data = frame.datagram.bytes()[network.header_len()..].to_vec();
        let (source, dest) = (network.src().to_ip(), network.dst().to_ip());
        let packet = Captured {
            source,
            dest,
            source_port: network.udp().unwrap().src_port,
            data,
        };
        match client.first() {
            Some(first) if first.source != source => server.push(packet),
            _ => client.push(packet),
        }
    }
    (client, server)
}

/// What a response says; `data` is BTH to ICRC.
fn reply_of(data: &[u8]) -> Reply {
    let packet = RocePacket::parse(data).unwrap();
    Reply {
        kind: packet.opcode().kind(),
        psn: packet.bth().psn.value(),
        aeth: packet.aeth().map(|aeth| (aeth.syndrome.value(), aeth.msn)),
        original: packet.atomic_ack_eth().map(|ack| ack.original),
        payload: packet.payload().to_vec(),
    }
}

/// Keeps what the responder sends.
#[derive(Default)]
struct Recorder {
    dest_qpn: u32,
    path: Option<Path>,
    replies: Vec<Reply>,
}

impl Transmit for Recorder {
    fn packet(
        &mut self,
        path: &Path,
        dest_qpn: u32,
        len: usize,
        fill: &mut dyn FnMut(&mut [u8]) -> Result<(), Fault>,
    ) -> Result<(), TransmitError> {
        assert_eq!(
            (Some(*path), dest_qpn),
            (self.path, self.dest_qpn),
            "a response goes elsewhere"
        );
        let mut data = vec![0; len + 4];
        fill(&mut data[..len]).map_err(TransmitError::Fault)?;
        assert_eq!(RocePacket::parse(&data).unwrap().bth().dest_qpn, dest_qpn);
        self.replies.push(reply_of(&data));
        Ok(())
    }
}

/// The packets' ICRC was checked when the capture was read; afterwards they are readdressed.
struct Checked;

impl IcrcCheck for Checked {
    fn valid(&self, _: &RxPacket<'_>) -> bool {
        true
    }
}

/// The server of a case.
struct Server {
    device: Device,
    memory: Arc<SimMemory>,
    qpn: u32,
    lkey: u32,
    rkey: u32,
    cq: Arc<ferroce_engine::queue::Cq>,
}

impl Server {
    fn new(path: Path, client_qpn: u32, max_dest_rd_atomic: u8) -> Server {
        let memory = Arc::new(SimMemory::new(BUF, BUF_LEN));
        let mut device = Device::new(DeviceConfig {
            slot: 1,
            memory: memory.clone(),
            seed: [7; 32],
            mtu: PathMtu::Mtu1024,
            limits: Limits::default(),
            window: Box::new(|_| 1 << 20),
        });
        let pd = device.alloc_pd().unwrap();
        let remote = Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC;
        let mr = device
            .reg_mr(pd, BUF, BUF_LEN as u64, BUF, Access::LOCAL_WRITE | remote)
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
            pd,
            qp_type: QpType::Rc,
            cap,
            send_cq: cq.clone(),
            recv_cq: cq.clone(),
            srq: None,
            sq_sig_all: false,
        };
        let (qpn, _) = device.create_qp(init).unwrap();
        use QpAttrMask as M;
        let attr = QpAttr {
            state: QpState::Init,
            port: 1,
            access: remote,
            path_mtu: 3,
            dest_qpn: client_qpn,
            rq_psn: 0x100,
            sq_psn: 0x200,
            path: Some(path),
            max_rd_atomic: 4,
            max_dest_rd_atomic,
            min_rnr_timer: 12,
            timeout: 14,
            retry_cnt: 7,
            rnr_retry: 7,
            ..QpAttr::default()
        };
        let connected =
            M::AV | M::PATH_MTU | M::DEST_QPN | M::RQ_PSN | M::MAX_DEST_RD_ATOMIC | M::MIN_RNR_TIMER;
        let sending = M::SQ_PSN | M::TIMEOUT | M::RETRY_CNT | M::RNR_RETRY | M::MAX_QP_RD_ATOMIC;
        for (state, mask) in [
            (QpState::Init, M::PKEY_INDEX | M::PORT | M::ACCESS_FLAGS),
            (QpState::Rtr, connected),
            (QpState::Rts, sending),
        ] {
            let attr = QpAttr { state, ..attr };
            device.modify_qp(Time::ZERO, qpn, &attr, M::STATE | mask).unwrap();
        }
        Server {
            device,
            memory,
            qpn,
            lkey: mr.lkey,
            rkey: mr.rkey,
            cq,
        }
    }

    fn post(&mut self, len: usize) {
        let sges = [Sge {
            addr: BUF,
            length: len as u32,
            lkey: self.lkey,
        }];
        self.device
            .post_recv(
                self.qpn,
                &RecvWr {
                    wr_id: len as u64,
                    sges: &sges,
                },
            )
            .unwrap();
    }

    /// Does what the server does at the start of operation `index`.
    fn prepare(&mut self, index: usize, op: Op) {
        self.memory.with(BUF, BUF_LEN, |buf| {
            buf.fill(0xee);
            match op {
                Op::Read(len) => buf[..len].copy_from_slice(&pattern(index, 0, len)),
                Op::Atomic => buf[..8].copy_from_slice(&ATOMIC_VALUE.to_ne_bytes()),
                _ => {}
            }
        });
        match op {
            Op::Send { receive, .. } => self.post(receive),
            Op::Burst(count) => (0..count).for_each(|_| self.post(16)),
            _ => {}
        }
    }

    /// Checks the server's memory after operation `index`, if nothing was wrong with it.
    fn check(&self, case: &Case, index: usize, op: Op) {
        let failed = case.replies.iter().any(|r| r.aeth.is_some_and(|(s, _)| s > 0x60));
        self.memory.with(BUF, BUF_LEN, |buf| {
            let written = match op {
                _ if failed => 0,
                Op::Late {
                    posted: usize::MAX, ..
                } => 0,
                Op::Send { len, .. } | Op::Late { len, .. } | Op::Write(len) => len,
                Op::Burst(_) => 16,
                Op::Read(_) => return,
                Op::Atomic => {
                    let value = u64::from_ne_bytes(buf[..8].try_into().unwrap());
                    assert_eq!(
                        value,
                        ATOMIC_VALUE + 0x10,
                        "{}: the add is done once",
                        case.capture
                    );
                    return;
                }
            };
            // A message too long fills what there is of its receive.
            assert!(
                failed || buf[..written] == pattern(index, 0, written),
                "{}: the data",
                case.capture
            );
            assert!(
                failed || buf[written..].iter().all(|&b| b == 0xee),
                "{}: behind the data",
                case.capture
            );
        });
    }
}

/// Names the client's packet to our server: the QPN, and address and key of its memory.
fn readdress(data: &mut [u8], server: &Server, base: u64, bad_key: bool) {
    data[5..8].copy_from_slice(&server.qpn.to_be_bytes()[1..]);
    let packet = RocePacket::parse(data).unwrap();
    let addr = packet.reth().map(|h| h.va).or(packet.atomic_eth().map(|h| h.va));
    if let Some(addr) = addr {
        let key = if bad_key {
            server.rkey ^ 0x5500
        } else {
            server.rkey
        };
        data[12..20].copy_from_slice(&(addr - base + BUF).to_be_bytes());
        data[20..24].copy_from_slice(&key.to_be_bytes());
    }
}

fn replay(case: &Case) {
    let (client, answers) = read(case.capture);
    let captured: Vec<Reply> = answers.iter().map(|packet| reply_of(&packet.data)).collect();
    let client_qpn = RocePacket::parse(&answers[0].data).unwrap().bth().dest_qpn;
    let path = Path {
        source: client[0].dest,
        dest: client[0].source,
        ifindex: 1,
        sgid_index: 0,
        traffic_class: 0,
        hop_limit: 64,
        flow_label: 0,
        service_level: 0,
    };
    let mut server = Server::new(path, client_qpn, case.max_dest_rd_atomic);
    let mut recorder = Recorder {
        dest_qpn: client_qpn,
        path: Some(path),
        replies: Vec::new(),
    };
    let base = client.iter().find_map(|p| {
        let packet = RocePacket::parse(&p.data).unwrap();
        packet.reth().map(|h| h.va).or(packet.atomic_eth().map(|h| h.va))
    });
    let mut current: Option<(usize, Op)> = None;
    let mut now = Time::ZERO;
    for (n, packet) in client.iter().enumerate() {
        if let Some(index) = case.ops.iter().position(|&(first, _)| first == n) {
            if let Some((index, op)) = current {
                server.check(case, index, op);
            }
            current = Some((index, case.ops[index].1));
            server.prepare(index, case.ops[index].1);
        }
        if let Some((_, Op::Late { len, posted })) = current
            && posted == n
        {
            server.post(len);
        }
        if case.dropped.contains(&n) {
            continue;
        }
        now = now + Duration::from_millis(1);
        let mut data = packet.data.clone();
        readdress(&mut data, &server, base.unwrap_or(0), case.bad_key);
        let packet = RxPacket {
            source: packet.source,
            source_port: packet.source_port,
            dest: packet.dest,
            traffic_class: 0,
            hop_limit: 64,
            data: &data,
            icrc: &Checked,
        };
        server.device.receive(now, &packet);
        server.device.transmit(now, &mut recorder);
    }
    let name = case.capture;
    assert_eq!(recorder.replies, case.replies, "{name}: the responses");
    assert_eq!(
        case.differs.is_none(),
        captured == case.replies,
        "{name}: {:?}, but the capture has {captured:#?}",
        case.differs
    );
    let (index, op) = current.unwrap();
    server.check(case, index, op);
    let mut out = [Wc::default(); 16];
    let n = server.cq.poll(&mut out);
    if name.contains("operational-short") {
        assert_eq!(
            out[..n].iter().map(|wc| wc.status).collect::<Vec<_>>(),
            [WcStatus::LocLenErr],
            "{name}"
        );
    } else {
        assert!(
            out[..n].iter().all(|wc| wc.status == WcStatus::Success),
            "{name}: {:?}",
            &out[..n]
        );
    }
}

#[test]
fn responders_answer_as_prescribed() {
    for case in cases() {
        replay(&case);
    }
}

#[test]
fn every_capture_of_the_kind_has_a_case() {
    let folder = FilePath::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden");
    let mut names: Vec<String> = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.starts_with("rc-drop-") || name.starts_with("rc-nak-"))
        .map(|name| name.trim_end_matches(".pcap").to_string())
        .collect();
    let mut known: Vec<String> = cases().iter().map(|case| case.capture.to_string()).collect();
    names.sort();
    known.sort();
    assert_eq!(names, known);
}
