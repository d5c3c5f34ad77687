//! A simulated network in virtual time: delay, loss, duplication, reordering, damage, bursts, blackouts, full queues.
//!
//! Everything follows from the seed and the calls made. Packets carry a real ICRC over the IP and UDP headers, or the
//! GRH, that they would have, so that damage is found, or not, as on a real network.
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
use super::{ICRC_LEN, IcrcCheck, Link, Path, Qpns, RoceVersion, RxPacket, Transmit, TransmitError};
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
        qpns: Qpns,
        len: usize,
        fill: &mut dyn FnMut(&mut [u8]) -> Result<(), Fault>,
    ) -> Result<(), TransmitError> {
        let dest_qpn = qpns.dest;
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
        let source_port = match path.version {
            RoceVersion::V1 => 0,
            RoceVersion::V2 => 0xc000 | (dest_qpn as u16 & 0x3fff),
        };
        let addressing = Addressing {
            id,
            ..Addressing::of(path, source_port)
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
                version,
                source,
                dest,
                source_port,
                traffic_class,
                hop_limit,
                flow_label,
                ..
            } = frame.addressing;
            let (data, icrc) = (&frame.data, &frame);
            sink(&RxPacket {
                version,
                source,
                source_port,
                dest,
                ifindex: 0,
                traffic_class,
                hop_limit,
                flow_label,
                data,
                icrc,
            });
        }
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<bool> {
        Ok(self.network.0.lock().flush(self.node))
    }

    fn receive_fds(&self, _: &mut Vec<RawFd>) {}

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
mod tests;
