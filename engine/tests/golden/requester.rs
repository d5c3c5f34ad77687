//! Our requester in the place of the client: it is given the work and the server's packets, and what it sends and
//! completes is checked.

use std::collections::VecDeque;

use ferroce_engine::link::RoceVersion;
use ferroce_engine::verbs::*;

use super::capture::{Captured, Packet, read_as};
use super::cases::Case;
use super::node::{Node, Peer, Role};
use super::responder::base;
use super::script::{self, Op, Options, Remote, Work};

/// The client of a case.
struct Client<'a> {
    case: &'a Case,
    options: Options,
    node: Node,
    remote: Remote,
    /// Keys that SENDs invalidate, in order.
    windows: VecDeque<u32>,
    ops: VecDeque<Op>,
    /// The operation under way.
    current: Option<Op>,
    /// What was sent and not yet compared.
    sent: VecDeque<Packet>,
}

impl Client<'_> {
    /// Posts the next operation, if there is one.
    fn begin(&mut self) {
        let Some(op) = self.ops.pop_front() else { return };
        let ud = self.options.qp_type == QpType::Ud;
        self.node.fill(&op.pattern(0, op.len));
        if op.work == Work::SendInv {
            self.remote.window = self.windows.pop_front().unwrap();
        }
        for k in 0..op.count {
            let operation = op.operation(&self.remote);
            self.node
                .post_send(op.index as u64, operation, op.flags(k), op.len, ud);
        }
        self.current = Some(op);
        self.transmit();
    }

    /// Whether the operation under way has completed; checks how.
    fn has_ended(&mut self) -> bool {
        let Some(op) = self.current.clone() else {
            return true;
        };
        let completions = self.node.completions();
        let Some(wc) = completions.first() else {
            return false;
        };
        let name = self.case.capture;
        let status = if self.ops.is_empty() {
            self.case.status
        } else {
            WcStatus::Success
        };
        assert_eq!(completions.len(), 1, "{name}: {completions:?} of {op:?}");
        assert_eq!(
            (wc.wr_id, wc.status, wc.qp_num),
            (op.index as u64, status, self.node.qpn),
            "{name}"
        );
        if status == WcStatus::Success {
            assert_eq!(wc.opcode, op.sent(), "{name}: {op:?}");
            self.check_data(&op, wc);
        }
        self.current = None;
        true
    }

    /// What READs and atomics bring.
    fn check_data(&self, op: &Op, wc: &Wc) {
        let data = match op.work {
            Work::Read => op.pattern(0, op.len),
            Work::CompareSwap | Work::FetchAdd => op.original.to_ne_bytes().to_vec(),
            _ => return,
        };
        let name = self.case.capture;
        assert_eq!(wc.byte_len as usize, data.len(), "{name}: {op:?}");
        assert!(
            self.node.bytes(data.len()) == data && self.node.untouched_behind(data.len()),
            "{name}: {op:?}"
        );
    }

    fn transmit(&mut self) {
        self.sent.extend(self.node.transmit());
    }

    /// The next packet: of what was sent, of the next operation, or of what a timer sends again.
    fn next_packet(&mut self) -> Option<Packet> {
        if self.sent.is_empty() && self.has_ended() {
            self.begin();
        }
        while self.sent.is_empty() && self.node.wait() {
            self.transmit();
        }
        self.sent.pop_front()
    }
}

/// What the capture tells of the server's memory.
fn remote(captured: &[Captured], ops: &[Op]) -> Remote {
    let headers = || captured.iter().map(|c| &c.packet.headers);
    let rkey = headers().find_map(|headers| {
        let opcode = headers.bth.opcode;
        opcode
            .has_reth()
            .then_some(headers.reth.rkey)
            .or(opcode.has_atomic_eth().then_some(headers.atomic_eth.rkey))
    });
    let wrong = if ops.iter().any(|op| op.bad_key) {
        0x5500
    } else {
        0
    };
    Remote {
        addr: base(captured).unwrap_or(0),
        rkey: rkey.unwrap_or(0) ^ wrong,
        window: 0,
    }
}

/// Replays a case.
pub fn replay(case: &Case, version: RoceVersion) {
    let name = case.capture;
    let (options, ops) = script::parse(case.told);
    let captured = read_as(name, version);
    let peer = Peer::of(&captured[0], false, captured[0].packet.headers.bth.dest_qpn);
    let mut client = Client {
        case,
        remote: remote(&captured, &ops),
        windows: captured
            .iter()
            .map(|c| &c.packet.headers)
            .filter(|headers| headers.bth.opcode.has_ieth())
            .map(|headers| headers.ieth.rkey)
            .collect(),
        node: Node::new(Role::Client, &options, peer),
        options,
        ops: ops.into(),
        current: None,
        sent: VecDeque::new(),
    };
    for (n, captured) in captured.iter().enumerate() {
        if !captured.by_client {
            let mut packet = captured.packet.clone();
            packet.headers.bth.dest_qpn = client.node.qpn;
            client.node.receive(captured, &packet);
            client.transmit();
            continue;
        }
        let mut expected = captured.packet.clone();
        let headers = &mut expected.headers;
        if headers.bth.opcode.has_deth() {
            headers.deth.src_qpn = client.node.qpn;
        }
        // What asks for data is answered anyway; rxe asks for an acknowledgement too.
        if expected.is_data_request() {
            expected.headers.bth.ack_request = false;
        }
        let ours = client.next_packet();
        assert_eq!(ours.as_ref(), Some(&expected), "{name}: packet {n}");
    }
    while client.current.is_some() && !client.has_ended() {
        assert!(
            client.node.wait(),
            "{name}: {:?} does not complete",
            client.current
        );
        client.transmit();
    }
    assert!(
        client.ops.is_empty() && client.sent.is_empty(),
        "{name}: {:?}",
        client.sent
    );
}
