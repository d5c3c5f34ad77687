//! Runs a program: two nodes in virtual time, until nothing is left to happen.

use ferroce_engine::link::random::Prng;
use ferroce_engine::link::sim::SimNetwork;
use ferroce_engine::time::Time;
use ferroce_engine::verbs::{AsyncEvent, Wc};

use crate::node::Node;
use crate::program::{Program, Via};
use crate::windows::Frozen;

/// More virtual time than any program needs.
const TIME_LIMIT: Time = Time::from_nanos(600_000_000_000);
/// More turns of the loop than any program needs.
const TURN_LIMIT: u32 = 2_000_000;

/// A completion with when it was polled, and for receives the buffer as it was then.
#[derive(Clone, Debug)]
pub struct Completion {
    /// The completion.
    pub wc: Wc,
    /// When.
    pub time: Time,
    /// Of receives: the whole buffer, or what a WRITE with immediate wrote. Empty for sends.
    pub bytes: Vec<u8>,
    /// Of receives: the window that was invalidated.
    pub invalidated: Option<Via>,
}

/// What one QP did: node `side` of a connection.
#[derive(Default)]
pub struct QpLog {
    /// Its number.
    pub qpn: u32,
    /// The number of the QP that receives: the same, but with XRC.
    pub target: u32,
    /// Messages posted.
    pub sends_posted: usize,
    /// Receives of this connection posted, to the QP or to the SRQ.
    pub receives_posted: usize,
    /// Completions of sends, in order.
    pub sends: Vec<Completion>,
    /// Completions of receives, in order.
    pub receives: Vec<Completion>,
    /// By message: what a READ or atomic brought, once it was known to have succeeded.
    pub results: Vec<Option<Vec<u8>>>,
    /// What slots held when windows to them had ended.
    pub frozen: Vec<Frozen>,
    /// What the slots that the peer names held at the end.
    pub slots: Vec<Vec<u8>>,
}

/// What a run showed.
pub struct Outcome {
    /// By connection, by node.
    pub qps: Vec<[QpLog; 2]>,
    /// The network, with what it did to packets.
    pub network: SimNetwork,
    /// Numbers of the XRC SRQs of each node.
    pub srqs: [Vec<u32>; 2],
    /// Asynchronous events of each node.
    pub events: [Vec<AsyncEvent>; 2],
    /// Sums of both devices' counters.
    pub counters: Vec<(&'static str, u64)>,
    /// When the last thing happened.
    pub end: Time,
}

impl Outcome {
    /// The completions of receives of a connection at a node, by the queue that they were of.
    pub fn queues(&self, connection: usize, side: usize) -> Vec<Vec<&Completion>> {
        let receives = &self.qps[connection][side].receives;
        if self.srqs[side].is_empty() {
            return vec![receives.iter().collect()];
        }
        let of = |&srqn: &u32| receives.iter().filter(|c| c.wc.srqn == srqn).collect();
        self.srqs[side].iter().map(of).collect()
    }

    /// A counter's value; 0 if there is none of that name.
    pub fn counter(&self, name: &str) -> u64 {
        self.counters
            .iter()
            .filter(|(n, _)| *n == name)
            .map(|(_, v)| v)
            .sum()
    }
}

/// Runs a program to its end. Errors are broken promises of the engine that show while it runs.
pub fn run(program: &Program) -> Result<Outcome, String> {
    let mut rng = Prng::new(program.seed);
    let network = SimNetwork::new(rng.next_u64());
    let mut nodes = [
        Node::new(program, 0, &network, &mut rng)?,
        Node::new(program, 1, &network, &mut rng)?,
    ];
    let ids = [nodes[0].id(), nodes[1].id()];
    network.set_conditions(ids[0], ids[1], program.conditions[0].clone());
    network.set_conditions(ids[1], ids[0], program.conditions[1].clone());
    let exports = [nodes[0].export(), nodes[1].export()];
    for (node, peer) in nodes.iter_mut().zip(exports.into_iter().rev()) {
        node.connect(program, peer)?;
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
    let srqs = [nodes[0].srqs(), nodes[1].srqs()];
    let (mut events, mut counters) = ([Vec::new(), Vec::new()], Vec::new());
    let mut logs = Vec::new();
    for (side, mut node) in nodes.into_iter().enumerate() {
        node.end(program, now)?;
        node.counters(&mut |name, value| counters.push((name, value)));
        let (log, seen) = node.into_log();
        logs.push(log);
        events[side] = seen;
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
        srqs,
        events,
        counters,
        end: now,
    })
}
