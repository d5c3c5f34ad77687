//! A simulated network in virtual time: delay, loss, duplication, reordering, damage, bursts, blackouts, full queues.
//!
//! Everything follows from the seed and the calls made. Packets carry a real ICRC over the IP and UDP headers that
//! they would have, so that damage is found, or not, as on a real network.
#![deny(unsafe_code)]

use std::cmp::Ordering;
use std::collections::{BinaryHeap, HashMap, VecDeque};
use std::io;
use std::net::IpAddr;
use std::ops::Range;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use super::fault::{FaultRates, damage};
use super::headers::Addressing;
use super::random::{Prng, Probability};
use super::{ICRC_LEN, IcrcCheck, Link, Path, RxPacket, Transmit, TransmitError};
use crate::memory::Fault;
use crate::time::Time;

/// Packets that one [`Link::receive`] hands over at most.
const RECEIVE_BATCH: usize = 64;

/// How packets fare in one direction between two nodes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Conditions {
    /// Faults of single packets. A reordered packet is late by up to `reorder_by`, and others overtake it.
    pub rates: FaultRates,
    /// How often a packet begins a burst of losses.
    pub burst: Probability,
    /// Packets lost in a burst.
    pub burst_length: u32,
    /// Time on the way.
    pub delay: Duration,
    /// More time on the way, up to this, without overtaking.
    pub jitter: Duration,
    /// How late a reordered or duplicated packet may be.
    pub reorder_by: Duration,
    /// When nothing gets through.
    pub blackout: Option<Range<Time>>,
}

/// A node's queues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeConfig {
    /// The node's address.
    pub address: IpAddr,
    /// The slot: packets to QPNs with this high byte come here.
    pub slot: u8,
    /// Packets that the link takes before a flush.
    pub batch: usize,
    /// Packets that the interface holds until they have left.
    pub queue: usize,
    /// Time for a byte to leave, in picoseconds; 0 is infinitely fast.
    pub picos_per_byte: u64,
    /// Bytes that wait to be received before more are dropped.
    pub rx_capacity: usize,
    /// What [`Link::window`] answers.
    pub window: u32,
    /// It does not fill the receive queue of a single node by more than half, as one that shares a host with that.
    pub considerate: bool,
}

impl NodeConfig {
    /// A fast node with room for everything.
    pub fn new(address: IpAddr, slot: u8) -> NodeConfig {
        NodeConfig {
            address,
            slot,
            batch: 256,
            queue: 1024,
            picos_per_byte: 800,
            rx_capacity: 4 << 20,
            window: 2 << 20,
            considerate: false,
        }
    }
}

/// Number of a node, in order of attachment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct NodeId(usize);

/// A packet's end, for who watches the network: what happened to which packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Incident {
    /// When it was sent.
    pub time: Time,
    /// Who sent it.
    pub from: NodeId,
    /// The QPN it was sent to.
    pub dest_qpn: u32,
    /// What happened.
    pub kind: IncidentKind,
}

/// What the network did to a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum IncidentKind {
    /// It vanished.
    Lost,
    /// It was damaged.
    Damaged,
    /// It arrived once more.
    Duplicated,
    /// Others overtake it.
    Reordered,
    /// It came to a full receive queue.
    Overflowed,
    /// It went to an address and slot that no node has.
    NoRoute,
}

/// A network of nodes in virtual time. Clones are the same network.
#[derive(Clone)]
pub struct SimNetwork(Arc<Mutex<State>>);

struct State {
    now: Time,
    prng: Prng,
    sent: u64,
    in_flight: BinaryHeap<InFlight>,
    nodes: Vec<Node>,
    directions: HashMap<(usize, usize), DirectionState>,
    incidents: Vec<Incident>,
}

#[derive(Default)]
struct DirectionState {
    conditions: Conditions,
    burst_left: u32,
    last_arrival: Time,
}

struct Node {
    config: NodeConfig,
    /// Multicast groups that it has joined.
    groups: Vec<IpAddr>,
    /// Taken by `packet`, not flushed yet or not by the interface.
    held: VecDeque<Frame>,
    /// When the packets in the interface will have left.
    departures: VecDeque<Time>,
    busy_until: Time,
    rx: VecDeque<Frame>,
    rx_bytes: usize,
    /// Bytes taken from senders that are not received yet, and may be lost on the way.
    due: usize,
    sent: u64,
    received: u64,
    overflowed: u64,
}

impl Node {
    /// Whether a packet to that address and QPN comes here.
    fn is_addressed(&self, dest: IpAddr, dest_qpn: u32) -> bool {
        if dest.is_multicast() {
            self.groups.contains(&dest)
        } else {
            self.config.address == dest && u32::from(self.config.slot) == dest_qpn >> 16
        }
    }

    /// When the interface has room for what it could not take; `None` if nothing waits.
    fn room_at(&self) -> Option<Time> {
        self.departures.front().copied().filter(|_| !self.held.is_empty())
    }
}

/// A packet with what its IP and UDP headers say.
#[derive(Clone)]
struct Frame {
    from: usize,
    addressing: Addressing,
    dest_qpn: u32,
    sent: Time,
    /// BTH to ICRC.
    data: Vec<u8>,
}

impl Frame {
    fn incident(&self, kind: IncidentKind) -> Incident {
        Incident {
            time: self.sent,
            from: NodeId(self.from),
            dest_qpn: self.dest_qpn,
            kind,
        }
    }
}

impl IcrcCheck for Frame {
    fn valid(&self, packet: &RxPacket<'_>) -> bool {
        packet
            .data
            .split_last_chunk::<ICRC_LEN>()
            .is_some_and(|(covered, icrc)| self.addressing.icrc(covered) == Some(u32::from_le_bytes(*icrc)))
    }
}

struct InFlight {
    arrival: Time,
    order: u64,
    to: usize,
    frame: Frame,
}

impl PartialEq for InFlight {
    fn eq(&self, other: &InFlight) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}
impl Eq for InFlight {}
impl PartialOrd for InFlight {
    fn partial_cmp(&self, other: &InFlight) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for InFlight {
    /// The earliest is the greatest, as `BinaryHeap` gives the greatest first.
    fn cmp(&self, other: &InFlight) -> Ordering {
        (other.arrival, other.order).cmp(&(self.arrival, self.order))
    }
}

impl SimNetwork {
    /// An empty network at time zero.
    pub fn new(seed: u64) -> SimNetwork {
        SimNetwork(Arc::new(Mutex::new(State {
            now: Time::ZERO,
            prng: Prng::new(seed),
            sent: 0,
            in_flight: BinaryHeap::new(),
            nodes: Vec::new(),
            directions: HashMap::new(),
            incidents: Vec::new(),
        })))
    }

    /// Attaches a node; gives its end.
    pub fn attach(&self, config: NodeConfig) -> SimLink {
        let mut state = self.0.lock();
        state.nodes.push(Node {
            config,
            groups: Vec::new(),
            held: VecDeque::new(),
            departures: VecDeque::new(),
            busy_until: Time::ZERO,
            rx: VecDeque::new(),
            rx_bytes: 0,
            due: 0,
            sent: 0,
            received: 0,
            overflowed: 0,
        });
        SimLink {
            network: self.clone(),
            node: state.nodes.len() - 1,
            batch: Vec::new(),
        }
    }

    /// Sets how packets fare from one node to another; perfect and immediate if never set.
    pub fn set_conditions(&self, from: NodeId, to: NodeId, conditions: Conditions) {
        self.0
            .lock()
            .directions
            .entry((from.0, to.0))
            .or_default()
            .conditions = conditions;
    }

    /// The virtual time.
    pub fn now(&self) -> Time {
        self.0.lock().now
    }

    /// When something happens next: a packet arrives, or an interface that refused one has room again.
    pub fn next_event(&self) -> Option<Time> {
        let state = self.0.lock();
        let arrival = state.in_flight.peek().map(|packet| packet.arrival);
        let room = state
            .nodes
            .iter()
            .filter_map(Node::room_at)
            .filter(|&room| room > state.now);
        room.chain(arrival).min()
    }

    /// Moves the time on; what arrives until then goes to the receive queues. Times that lie behind change nothing.
    pub fn advance(&self, now: Time) {
        let mut state = self.0.lock();
        state.now = state.now.max(now);
        let state = &mut *state;
        while state
            .in_flight
            .peek()
            .is_some_and(|packet| packet.arrival <= state.now)
        {
            let Some(InFlight { to, frame, .. }) = state.in_flight.pop() else {
                break;
            };
            let node = &mut state.nodes[to];
            if node.rx_bytes + frame.data.len() > node.config.rx_capacity {
                node.overflowed += 1;
                node.due = node.due.saturating_sub(frame.data.len());
                state.incidents.push(frame.incident(IncidentKind::Overflowed));
            } else {
                node.rx_bytes += frame.data.len();
                node.rx.push_back(frame);
            }
        }
    }

    /// Packets on the way.
    pub fn in_flight(&self) -> usize {
        self.0.lock().in_flight.len()
    }

    /// What happened to packets so far, by the time it was found out.
    pub fn incidents(&self) -> Vec<Incident> {
        self.0.lock().incidents.clone()
    }
}

impl State {
    /// Lets the interface of `node` take what it has room for; gives whether it took everything.
    fn flush(&mut self, node: usize) -> bool {
        let now = self.now;
        loop {
            let sender = &mut self.nodes[node];
            while sender
                .departures
                .front()
                .is_some_and(|&departure| departure <= now)
            {
                sender.departures.pop_front();
            }
            if sender.held.is_empty() {
                return true;
            }
            if sender.departures.len() >= sender.config.queue {
                return false;
            }
            let Some(frame) = sender.held.pop_front() else {
                return true;
            };
            let nanos = (frame.data.len() as u64).saturating_mul(sender.config.picos_per_byte) / 1000;
            let departure = sender.busy_until.max(now) + Duration::from_nanos(nanos);
            sender.busy_until = departure;
            if departure > now {
                sender.departures.push_back(departure);
            }
            sender.sent += 1;
            self.carry(frame, departure);
        }
    }

    /// Sends a packet on its way to the node it is for, or to every member of its group.
    fn carry(&mut self, frame: Frame, departure: Time) {
        let mut addressed = false;
        for to in 0..self.nodes.len() {
            if self.nodes[to].is_addressed(frame.addressing.dest, frame.dest_qpn) {
                self.carry_to(to, frame.clone(), departure);
                addressed = true;
            }
        }
        if !addressed {
            self.incidents.push(frame.incident(IncidentKind::NoRoute));
        }
    }

    /// Sends a packet on its way to a node, with the faults that befall it.
    fn carry_to(&mut self, to: usize, mut frame: Frame, departure: Time) {
        let incident = |kind| frame.incident(kind);
        let prng = &mut self.prng;
        let direction = self.directions.entry((frame.from, to)).or_default();
        let conditions = &direction.conditions;
        let rates = conditions.rates;
        if direction.burst_left == 0 && prng.chance(conditions.burst) {
            direction.burst_left = conditions.burst_length;
        }
        let in_burst = direction.burst_left > 0;
        direction.burst_left = direction.burst_left.saturating_sub(1);
        let dark = conditions
            .blackout
            .as_ref()
            .is_some_and(|dark| dark.contains(&departure));
        if prng.chance(rates.loss) || in_burst || dark {
            let node = &mut self.nodes[to];
            node.due = node.due.saturating_sub(frame.data.len());
            self.incidents.push(incident(IncidentKind::Lost));
            return;
        }
        let jitter = Duration::from_nanos(prng.below(conditions.jitter.as_nanos() as u64 + 1));
        let late =
            |prng: &mut Prng| Duration::from_nanos(prng.below(conditions.reorder_by.as_nanos() as u64 + 1));
        let mut arrival = (departure + conditions.delay + jitter).max(direction.last_arrival);
        let reordered = prng.chance(rates.reorder);
        if reordered {
            arrival = arrival + late(prng);
        } else {
            direction.last_arrival = arrival;
        }
        let copy = prng.chance(rates.duplicate).then(|| arrival + late(prng));
        let damaged = prng.chance(rates.corrupt);
        if reordered {
            self.incidents.push(incident(IncidentKind::Reordered));
        }
        if copy.is_some() {
            self.incidents.push(incident(IncidentKind::Duplicated));
        }
        if damaged {
            self.incidents.push(incident(IncidentKind::Damaged));
        }
        if let Some(arrival) = copy {
            self.nodes[to].due += frame.data.len();
            self.sent += 1;
            self.in_flight.push(InFlight {
                arrival,
                order: self.sent,
                to,
                frame: frame.clone(),
            });
        }
        if damaged {
            damage(&mut frame.data, prng);
        }
        self.sent += 1;
        self.in_flight.push(InFlight {
            arrival,
            order: self.sent,
            to,
            frame,
        });
    }
}

/// A node's end of a [`SimNetwork`].
pub struct SimLink {
    network: SimNetwork,
    node: usize,
    batch: Vec<Frame>,
}

impl SimLink {
    /// The node's number.
    pub fn id(&self) -> NodeId {
        NodeId(self.node)
    }

    /// Whether packets wait to be received.
    pub fn readable(&self) -> bool {
        self.network
            .0
            .lock()
            .nodes
            .get(self.node)
            .is_some_and(|node| !node.rx.is_empty())
    }

    /// When the interface takes more of what [`Link::flush`] could not hand over; `None` if nothing waits.
    pub fn room_at(&self) -> Option<Time> {
        self.network.0.lock().nodes.get(self.node).and_then(Node::room_at)
    }
}

impl Transmit for SimLink {
    fn packet(
        &mut self,
        path: &Path,
        dest_qpn: u32,
        len: usize,
        fill: &mut dyn FnMut(&mut [u8]) -> Result<(), Fault>,
    ) -> Result<(), TransmitError> {
        let mut state = self.network.0.lock();
        let now = state.now;
        let id = state.prng.next_u64() as u16;
        let node = &mut state.nodes[self.node];
        if node.held.len() >= node.config.batch {
            return Err(TransmitError::Full);
        }
        let considerate = node.config.considerate && !path.dest.is_multicast();
        let overrun = |to: &Node| to.due > 0 && to.due + len + ICRC_LEN > to.config.rx_capacity / 2;
        let mut addressed = state
            .nodes
            .iter()
            .filter(|to| to.is_addressed(path.dest, dest_qpn));
        if considerate && addressed.any(overrun) {
            return Err(TransmitError::Busy);
        }
        let mut data = vec![0; len + ICRC_LEN];
        let (covered, icrc) = data.split_at_mut(len);
        fill(covered).map_err(TransmitError::Fault)?;
        let addressing = Addressing {
            source: path.source,
            dest: path.dest,
            source_port: 0xc000 | (dest_qpn as u16 & 0x3fff),
            traffic_class: path.traffic_class,
            hop_limit: path.hop_limit_on_wire(),
            id,
        };
        // Addresses of two families never meet a node: such a packet ends as one without a route.
        icrc.copy_from_slice(&addressing.icrc(covered).unwrap_or_default().to_le_bytes());
        let frame = Frame {
            from: self.node,
            addressing,
            dest_qpn,
            sent: now,
            data,
        };
        for to in &mut state.nodes {
            if to.is_addressed(path.dest, dest_qpn) {
                to.due += frame.data.len();
            }
        }
        state.nodes[self.node].held.push_back(frame);
        Ok(())
    }
}

impl Link for SimLink {
    fn receive(&mut self, sink: &mut dyn FnMut(&RxPacket<'_>)) -> io::Result<usize> {
        {
            let mut state = self.network.0.lock();
            let node = &mut state.nodes[self.node];
            let count = node.rx.len().min(RECEIVE_BATCH);
            self.batch.extend(node.rx.drain(..count));
            let bytes = self.batch.iter().map(|frame| frame.data.len()).sum::<usize>();
            node.rx_bytes -= bytes;
            node.due = node.due.saturating_sub(bytes);
            node.received += count as u64;
        }
        let count = self.batch.len();
        for frame in self.batch.drain(..) {
            let Addressing {
                source,
                dest,
                source_port,
                traffic_class,
                hop_limit,
                ..
            } = frame.addressing;
            let (data, icrc) = (&frame.data, &frame);
            sink(&RxPacket {
                source,
                source_port,
                dest,
                traffic_class,
                hop_limit,
                data,
                icrc,
            });
        }
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<bool> {
        Ok(self.network.0.lock().flush(self.node))
    }

    fn receive_fd(&self) -> Option<RawFd> {
        None
    }

    fn transmit_fd(&self) -> Option<RawFd> {
        None
    }

    fn window(&self, _packet_len: usize) -> u32 {
        self.network.0.lock().nodes[self.node].config.window
    }

    fn join(&mut self, group: IpAddr, _ifindex: u32) -> io::Result<()> {
        self.network.0.lock().nodes[self.node].groups.push(group);
        Ok(())
    }

    fn leave(&mut self, group: IpAddr) -> io::Result<()> {
        let groups = &mut self.network.0.lock().nodes[self.node].groups;
        groups.retain(|&joined| joined != group);
        Ok(())
    }

    fn counters(&self, out: &mut dyn FnMut(&'static str, u64)) {
        let state = self.network.0.lock();
        let node = &state.nodes[self.node];
        out("sim_sent", node.sent);
        out("sim_received", node.received);
        out("sim_overflowed", node.overflowed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{Ipv4Addr, Ipv6Addr};

    const A: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1));
    const B: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 2));
    const QPN: u32 = 0x02_0007;

    fn path(source: IpAddr, dest: IpAddr) -> Path {
        Path {
            source,
            dest,
            ifindex: 1,
            sgid_index: 0,
            traffic_class: 0,
            hop_limit: 0,
            flow_label: 0,
            service_level: 0,
        }
    }

    /// A network of two, from A to B under `conditions`.
    fn pair(seed: u64, conditions: Conditions, b: NodeConfig) -> (SimNetwork, SimLink, SimLink) {
        let network = SimNetwork::new(seed);
        let a = network.attach(NodeConfig::new(A, 1));
        let b = network.attach(b);
        network.set_conditions(a.id(), b.id(), conditions);
        (network, a, b)
    }

    /// Sends `count` packets that begin with their number, runs the network dry; gives (number, ICRC right) as received.
    fn carry(
        network: &SimNetwork,
        a: &mut SimLink,
        b: &mut SimLink,
        path: &Path,
        count: u32,
    ) -> Vec<(u32, bool)> {
        for n in 0..count {
            let sent = a.packet(path, QPN, 40, &mut |out| {
                out.fill(n as u8);
                out[36..].copy_from_slice(&n.to_be_bytes());
                Ok(())
            });
            assert_eq!(sent, Ok(()));
            a.flush().unwrap();
        }
        let mut got = Vec::new();
        while let Some(next) = network.next_event() {
            network.advance(next);
            a.flush().unwrap();
            b.receive(&mut |packet| {
                let number = packet.data[36..40].try_into().unwrap();
                got.push((u32::from_be_bytes(number), packet.icrc.valid(packet)));
            })
            .unwrap();
        }
        got
    }

    #[test]
    fn a_perfect_network_keeps_order_and_icrc() {
        for (source, dest) in [
            (A, B),
            (IpAddr::V6(Ipv6Addr::LOCALHOST), "fd00::2".parse().unwrap()),
        ] {
            let conditions = Conditions {
                delay: Duration::from_micros(5),
                jitter: Duration::from_micros(50),
                ..Default::default()
            };
            let (network, mut a, mut b) = pair(1, conditions, NodeConfig::new(dest, 2));
            let got = carry(&network, &mut a, &mut b, &path(source, dest), 100);
            assert_eq!(got, (0..100).map(|n| (n, true)).collect::<Vec<_>>());
            assert_eq!(network.incidents(), []);
        }
    }

    #[test]
    fn faults_happen_as_often_as_told_and_equal_seeds_are_equal() {
        let ten = Probability::percent(10);
        let conditions = Conditions {
            rates: FaultRates {
                loss: ten,
                duplicate: ten,
                reorder: ten,
                corrupt: ten,
            },
            reorder_by: Duration::from_micros(100),
            ..Default::default()
        };
        let run = |seed| {
            let (network, mut a, mut b) = pair(seed, conditions.clone(), NodeConfig::new(B, 2));
            (
                carry(&network, &mut a, &mut b, &path(A, B), 1000),
                network.incidents(),
            )
        };
        let (got, incidents) = run(7);
        assert_eq!((got.clone(), incidents.clone()), run(7));
        assert_ne!(got, run(8).0);
        let count = |kind| incidents.iter().filter(|i| i.kind == kind).count();
        let (lost, damaged) = (count(IncidentKind::Lost), count(IncidentKind::Damaged));
        assert!(
            (70..130).contains(&lost) && (50..130).contains(&damaged),
            "{lost} {damaged}"
        );
        assert_eq!(got.len(), 1000 - lost + count(IncidentKind::Duplicated));
        assert!(!got.is_sorted_by_key(|&(n, _)| n), "packets overtake each other");
        // Damage to the BTH's fifth byte alone is not covered: a damaged packet may be valid, never the reverse.
        let bad = got.iter().filter(|(_, valid)| !valid).count();
        assert!(bad <= damaged && bad > damaged * 3 / 4, "{bad} of {damaged}");
    }

    #[test]
    fn full_queues_refuse_and_overflow() {
        let network = SimNetwork::new(3);
        let mut a = network.attach(NodeConfig {
            batch: 4,
            queue: 2,
            ..NodeConfig::new(A, 1)
        });
        let mut b = network.attach(NodeConfig {
            rx_capacity: 3 * 44,
            ..NodeConfig::new(B, 2)
        });
        let send = |a: &mut SimLink| a.packet(&path(A, B), QPN, 40, &mut |_| Ok(()));
        for _ in 0..4 {
            assert_eq!(send(&mut a), Ok(()));
        }
        assert_eq!(send(&mut a), Err(TransmitError::Full));
        assert!(!a.flush().unwrap(), "the interface holds two");
        while let Some(next) = network.next_event() {
            network.advance(next);
            a.flush().unwrap();
        }
        assert!(b.readable());
        assert_eq!(b.receive(&mut |_| ()).unwrap(), 3);
        assert_eq!(b.receive(&mut |_| ()).unwrap(), 0);
        let mut dropped = 0;
        b.counters(&mut |name, value| dropped += if name == "sim_overflowed" { value } else { 0 });
        assert_eq!(dropped, 1);
    }

    #[test]
    fn a_considerate_node_overruns_nobody() {
        let network = SimNetwork::new(3);
        let mut a = network.attach(NodeConfig {
            considerate: true,
            ..NodeConfig::new(A, 1)
        });
        let mut b = network.attach(NodeConfig {
            rx_capacity: 4 * 44,
            ..NodeConfig::new(B, 2)
        });
        let mut c = network.attach(NodeConfig::new(B, 3));
        let send = |a: &mut SimLink, qpn| a.packet(&path(A, B), qpn, 40, &mut |_| Ok(()));
        for _ in 0..3 {
            assert_eq!(send(&mut a, QPN), Ok(()));
            assert_eq!(send(&mut a, QPN), Ok(()));
            assert_eq!(send(&mut a, QPN), Err(TransmitError::Busy));
            assert_eq!(send(&mut a, 0x03_0001), Ok(()), "others have room");
            a.flush().unwrap();
            while let Some(next) = network.next_event() {
                network.advance(next);
            }
            assert_eq!(send(&mut a, QPN), Err(TransmitError::Busy));
            assert_eq!(b.receive(&mut |_| ()).unwrap(), 2);
            assert_eq!(c.receive(&mut |_| ()).unwrap(), 1);
        }
    }

    #[test]
    fn blackouts_and_bursts_lose_runs() {
        let dark = Conditions {
            blackout: Some(Time::ZERO..Time::from_nanos(u64::MAX)),
            ..Default::default()
        };
        let (network, mut a, mut b) = pair(4, dark, NodeConfig::new(B, 2));
        assert_eq!(carry(&network, &mut a, &mut b, &path(A, B), 50), []);
        let bursts = Conditions {
            burst: Probability::percent(2),
            burst_length: 10,
            ..Default::default()
        };
        let (network, mut a, mut b) = pair(5, bursts, NodeConfig::new(B, 2));
        let got = carry(&network, &mut a, &mut b, &path(A, B), 1000);
        let gaps: Vec<u32> = got
            .windows(2)
            .map(|w| w[1].0 - w[0].0 - 1)
            .filter(|&gap| gap > 0)
            .collect();
        assert!(
            !gaps.is_empty() && gaps.iter().all(|gap| gap % 10 == 0),
            "{gaps:?}"
        );
    }

    #[test]
    fn faulting_memory_sends_nothing() {
        let (network, mut a, mut b) = pair(6, Conditions::default(), NodeConfig::new(B, 2));
        let fault = Fault { addr: 5 };
        assert_eq!(
            a.packet(&path(A, B), QPN, 40, &mut |_| Err(fault)),
            Err(TransmitError::Fault(fault))
        );
        a.flush().unwrap();
        assert_eq!(network.next_event(), None);
        assert_eq!(b.receive(&mut |_| ()).unwrap(), 0);
    }

    #[test]
    fn every_member_of_a_group_gets_a_copy() {
        let network = SimNetwork::new(1);
        let mut nodes = [1, 2, 3].map(|n| network.attach(NodeConfig::new(IpAddr::from([10, 0, 0, n]), n)));
        let group: IpAddr = "239.1.2.3".parse().unwrap();
        nodes[0].join(group, 1).unwrap();
        nodes[1].join(group, 1).unwrap();
        nodes[2].join("239.1.2.4".parse().unwrap(), 1).unwrap();
        let mut arrivals = || {
            let to_group = path(IpAddr::from([10, 0, 0, 1]), group);
            nodes[0]
                .packet(&to_group, 0xff_ffff, 40, &mut |_| Ok(()))
                .unwrap();
            nodes[0].flush().unwrap();
            while let Some(next) = network.next_event() {
                network.advance(next);
            }
            let mut receive = |node: usize| {
                let mut valid = 0;
                let sink = &mut |packet: &RxPacket<'_>| valid += usize::from(packet.icrc.valid(packet));
                nodes[node].receive(sink).unwrap();
                valid
            };
            let counts = [receive(0), receive(1), receive(2)];
            nodes[0].leave(group).unwrap();
            counts
        };
        assert_eq!(arrivals(), [1, 1, 0], "the sender is a member too");
        assert_eq!(arrivals(), [0, 1, 0]);
    }

    #[test]
    fn unknown_destinations_are_counted() {
        let (network, mut a, _b) = pair(6, Conditions::default(), NodeConfig::new(B, 3));
        a.packet(&path(A, B), QPN, 40, &mut |_| Ok(())).unwrap();
        a.flush().unwrap();
        assert_eq!(network.incidents()[0].kind, IncidentKind::NoRoute);
    }
}
