//! Our responder in the place of the server: it is given the client's packets, and what it sends, delivers and
//! completes is checked.

use ferroce_engine::link::RoceVersion;
use ferroce_engine::verbs::*;
use ferroce_wire::{GrhArea, Network};

use super::capture::{Captured, Packet, read_as};
use super::cases::{Answers, Case};
use super::node::{BUF, Node, Peer, Role};
use super::script::{self, Op, Options, Work};

/// Bytes in front of a datagram.
const GRH_LEN: usize = 40;

/// The server of a case.
struct Server<'a> {
    case: &'a Case,
    options: Options,
    node: Node,
    /// Key of the window that was bound last.
    window: u32,
    /// The operation under way, and its last packet.
    current: Option<(Op, Captured)>,
}

impl Server<'_> {
    fn is_ud(&self) -> bool {
        self.options.qp_type == QpType::Ud
    }

    /// Does what the server does when it begins with an operation.
    fn begin(&mut self, op: &Op) {
        match op.work {
            _ if op.bad_key => self.node.fill(&[]),
            Work::Read => self.node.fill(&op.pattern(0, op.len)),
            Work::CompareSwap | Work::FetchAdd => self.node.fill(&op.original.to_ne_bytes()),
            _ => self.node.fill(&[]),
        }
        if op.work == Work::SendInv {
            self.window = self.node.bind_window();
        }
        if !op.late {
            self.post(op);
        }
    }

    fn post(&mut self, op: &Op) {
        for _ in 0..op.count {
            if let Some(len) = op.receive {
                self.node.post_receive(op.index as u64, len);
            }
        }
    }

    /// Checks what an operation has left.
    fn end(&mut self) {
        let Some((op, last)) = self.current.take() else {
            return;
        };
        let completions = self.node.completions();
        if self.case.undelivered.contains(&op.index) {
            self.check_undelivered(&op, &completions);
        } else {
            self.check_completions(&op, &completions, &last);
            self.check_memory(&op, &last.network);
        }
    }

    fn check_undelivered(&self, op: &Op, completions: &[Wc]) {
        let name = self.case.capture;
        let statuses: Vec<WcStatus> = completions.iter().map(|wc| wc.status).collect();
        let expected = if self.case.misplaced == Some(op.index) {
            vec![WcStatus::LocLenErr, WcStatus::WrFlushErr]
        } else if op.fits() {
            vec![]
        } else {
            vec![WcStatus::LocLenErr]
        };
        assert_eq!(statuses, expected, "{name}: {op:?}");
        // A message that is cut short leaves what came.
        if op.bad_key {
            assert!(self.node.untouched_behind(0), "{name}: memory after {op:?}");
        }
    }

    fn check_completions(&self, op: &Op, completions: &[Wc], last: &Captured) {
        let name = self.case.capture;
        let count = if op.receive.is_some() { op.count } else { 0 };
        assert_eq!(completions.len(), count, "{name}: completions of {op:?}");
        let (opcode, mut flags) = op.received();
        let mut len = op.len;
        if self.is_ud() {
            len += GRH_LEN;
            flags |= WcFlags::GRH;
        }
        for wc in completions {
            assert_eq!(wc.status, WcStatus::Success, "{name}: {op:?}");
            assert_eq!(
                (wc.opcode, wc.byte_len as usize, wc.flags),
                (opcode, len, flags),
                "{name}: {op:?}"
            );
            let src_qp = last.packet.headers.deth.src_qpn;
            assert_eq!((wc.qp_num, wc.src_qp), (self.node.qpn, src_qp), "{name}: {op:?}");
            if flags.contains(WcFlags::WITH_IMM) {
                assert_eq!(wc.imm, op.imm(), "{name}: {op:?}");
            }
            if flags.contains(WcFlags::WITH_INV) {
                assert_eq!(wc.imm, self.window, "{name}: {op:?}");
            }
        }
    }

    fn check_memory(&self, op: &Op, network: &Network) {
        let name = self.case.capture;
        let grh = if self.is_ud() { GRH_LEN } else { 0 };
        let written = match op.work {
            Work::CompareSwap | Work::FetchAdd => op.result().to_ne_bytes().to_vec(),
            _ => op.pattern(0, op.len),
        };
        let bytes = self.node.bytes(grh + written.len());
        assert!(bytes[grh..] == written, "{name}: the data of {op:?}");
        assert!(
            self.node.untouched_behind(grh + written.len()),
            "{name}: behind {op:?}"
        );
        if grh > 0 {
            check_grh(&bytes[..grh], network);
        }
    }
}

/// Compares what lies in front of a datagram with the network header it came with; links do not tell the identification
/// and the flow label.
fn check_grh(area: &[u8], network: &Network) {
    match (GrhArea::parse(area).unwrap(), *network) {
        (
            GrhArea::V4(grh),
            Network::Ipv4 {
                tos, ttl, src, dst, ..
            },
        ) => assert_eq!((grh.tos, grh.ttl, grh.src, grh.dst), (tos, ttl, src, dst)),
        (
            GrhArea::V6(grh),
            Network::Ipv6 {
                traffic_class,
                hop_limit,
                ..
            },
        ) => assert_eq!(
            (grh.traffic_class, grh.hop_limit, grh.sgid, grh.dgid),
            (traffic_class, hop_limit, network.src(), network.dst())
        ),
        (GrhArea::V6(grh), Network::Grh(sent)) => assert_eq!(grh, sent),
        (grh, _) => panic!("{grh:?} of {network:?}"),
    }
}

/// The client's packet as it would be, had it been told of our server.
fn readdress(packet: &Packet, server: &Server<'_>, base: u64, op: &Op) -> Packet {
    let (mut packet, node) = (packet.clone(), &server.node);
    let rkey = if op.bad_key {
        node.key.rkey ^ 0x5500
    } else {
        node.key.rkey
    };
    let headers = &mut packet.headers;
    if headers.bth.dest_qpn != ferroce_wire::bth::MULTICAST_QPN {
        headers.bth.dest_qpn = node.qpn;
    }
    headers.reth.va = headers.reth.va.wrapping_sub(base).wrapping_add(BUF);
    headers.reth.rkey = rkey;
    headers.atomic_eth.va = headers.atomic_eth.va.wrapping_sub(base).wrapping_add(BUF);
    headers.atomic_eth.rkey = rkey;
    headers.ieth.rkey = server.window;
    packet
}

/// The address that the first WRITE, READ or atomic names.
pub fn base(captured: &[Captured]) -> Option<u64> {
    captured.iter().map(|c| &c.packet.headers).find_map(|headers| {
        let opcode = headers.bth.opcode;
        opcode
            .has_reth()
            .then_some(headers.reth.va)
            .or(opcode.has_atomic_eth().then_some(headers.atomic_eth.va))
    })
}

/// The operation that each of the client's packets belongs to: by its PSN, as each side does one after the other.
fn op_of(packet: &Packet, options: &Options, ops: &[Op]) -> usize {
    let at = packet.headers.bth.psn.value().wrapping_sub(options.client_psn) & 0xff_ffff;
    let mut end = 0;
    ops.iter()
        .position(|op| {
            end += op.packets(options.path_mtu.bytes());
            (at as usize) < end
        })
        .unwrap()
}

/// Replays a case.
pub fn replay(case: &Case, version: RoceVersion) {
    let name = case.capture;
    let (_, ops) = script::parse(case.told);
    let (options, _) = script::parse(&format!("{} {}", case.told, case.server));
    let captured = read_as(name, version);
    let answers: Vec<Packet> = captured
        .iter()
        .filter(|c| !c.by_client)
        .map(|c| c.packet.clone())
        .collect();
    let client_qpn = answers.first().map_or(0x99, |answer| answer.headers.bth.dest_qpn);
    let base = base(&captured).unwrap_or(0);
    let peer = Peer::of(&captured[0], true, client_qpn);
    let mut server = Server {
        case,
        node: Node::new(Role::Server, &options, peer),
        options,
        window: 0,
        current: None,
    };
    let (qpn, dest) = (server.node.qpn, captured[0].dest);
    if dest.is_multicast() {
        server.node.device.attach_multicast(qpn, dest).unwrap();
    }
    let mut sent: Vec<Packet> = Vec::new();
    for (n, captured) in captured.iter().filter(|c| c.by_client).enumerate() {
        let op = &ops[op_of(&captured.packet, &server.options, &ops)];
        if server
            .current
            .as_ref()
            .is_none_or(|(current, _)| current.index != op.index)
        {
            server.end();
            server.begin(op);
        }
        server.current = Some((op.clone(), captured.clone()));
        if case.late == Some(n) {
            server.post(op);
        }
        if case.dropped.contains(&n) {
            continue;
        }
        let packet = readdress(&captured.packet, &server, base, op);
        server.node.receive(captured, &packet);
        sent.extend(server.node.transmit());
    }
    server.end();
    match &case.answers {
        Answers::AsCaptured => assert_eq!(sent, answers, "{name}: the responses"),
        Answers::Differ { why, expected } => {
            let expected: Vec<Packet> = expected.iter().map(|answer| answer.packet(client_qpn)).collect();
            assert_eq!(sent, expected, "{name}: the responses ({why})");
            assert_ne!(sent, answers, "{name}: nothing differs, although {why}");
        }
    }
}
