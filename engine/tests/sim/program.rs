//! Programs: what two nodes send each other, and under which conditions. `generate` makes them, `shrink` simplifies them.

use std::fmt;
use std::net::IpAddr;

use ferroce_engine::link::RoceVersion;
use ferroce_engine::link::sim::Conditions;
use ferroce_engine::verbs::QpType;

/// Room for the GRH before a UD payload.
pub const GRH_LEN: u32 = 40;

/// A whole case: everything that a run depends on.
#[derive(Clone, Debug, PartialEq)]
pub struct Program {
    /// Seeds the network, the devices and the message bytes.
    pub seed: u64,
    /// RC, UC, UD, or `XrcSend` for XRC: then each node has an initiator and a target in place of each QP.
    pub transport: QpType,
    /// IPv6 addresses instead of IPv4.
    pub ipv6: bool,
    /// The version of the paths. Multicast is RoCE v2.
    pub version: RoceVersion,
    /// UD: every QP is attached to a multicast group of its own, and messages go there.
    pub multicast: bool,
    /// Verbs code of the path MTU.
    pub mtu: u32,
    /// Conditions from node 0 to node 1, and back.
    pub conditions: [Conditions; 2],
    /// The two nodes.
    pub nodes: [NodeShape; 2],
    /// QP pairs.
    pub connections: Vec<Connection>,
    /// Memory that is unmapped while in use.
    pub hole: Option<Hole>,
}

/// A buffer that is unmapped at some time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Hole {
    /// The connection.
    pub connection: usize,
    /// The node that sends the stream concerned.
    pub side: usize,
    /// Which of its buffers.
    pub place: Place,
    /// When, in microseconds.
    pub at: u64,
}

/// A buffer of a stream.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Place {
    /// The local buffer of a message.
    Message(usize),
    /// A receive at the peer.
    Receive(usize),
    /// A slot at the peer.
    Slot(usize),
}

/// What is particular to a node.
#[derive(Clone, Debug, PartialEq)]
pub struct NodeShape {
    /// Packets that the link takes before a flush, and that the interface holds.
    pub tx_room: (usize, usize),
    /// Bytes of the receive queue, and the window that the link tells of.
    pub rx_room: (usize, u32),
    /// It looks at the peer's receive queue before it sends.
    pub considerate: bool,
    /// How long the application may look away, in microseconds.
    pub nap: u64,
    /// The application sleeps until its CQs notify it, instead of polling.
    pub events: bool,
    /// One CQ for sends and receives.
    pub one_cq: bool,
    /// One shared receive queue for all QPs.
    pub srq: bool,
    /// XRC: shared receive queues behind all targets. 0 for other transports.
    pub xrc_srqs: usize,
    /// How the memory is registered.
    pub region: Region,
}

impl NodeShape {
    /// Whether several QPs take the same receives.
    pub fn shares(&self) -> bool {
        self.srq || self.xrc_srqs > 0
    }
}

/// The region of a node.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Region {
    /// The memory, by its addresses.
    Plain,
    /// The memory, by offsets.
    ZeroBased,
    /// All addresses, paged on demand.
    Everything,
}

/// A pair of QPs, one at each node.
#[derive(Clone, Debug, PartialEq)]
pub struct Connection {
    /// First PSN that each node sends.
    pub psn: [u32; 2],
    /// Depth of the send queues.
    pub depth: u32,
    /// Every send gives a completion.
    pub sig_all: bool,
    /// Local ACK timeout code.
    pub timeout: u8,
    /// Retries of timeouts.
    pub retry_cnt: u8,
    /// Retries after RNR NAKs.
    pub rnr_retry: u8,
    /// RNR timer code.
    pub min_rnr_timer: u8,
    /// READs and atomics outstanding at most, both ways.
    pub rd_atomic: u8,
    /// What node 0 sends to node 1, and back.
    pub streams: [Stream; 2],
}

/// What one node sends to the other over one connection.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Stream {
    /// In order of posting.
    pub messages: Vec<Message>,
    /// What the receiver posts for those that take a receive, in order. May be too few or too short where the case is
    /// about that.
    pub receives: Vec<Receive>,
    /// Memory of the receiver that WRITEs, READs and atomics name.
    pub slots: Vec<Slot>,
    /// Memory windows of the receiver.
    pub windows: Vec<Window>,
}

/// A memory window, which the node that has the slot binds to all of it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Window {
    /// The slot, which is reached through this window only.
    pub slot: usize,
    /// It is of type 2.
    pub two: bool,
    /// Its addresses begin with 0.
    pub zero_based: bool,
}

/// A step in the life of a window. It is not taken before the last message of an earlier step has come from the peer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Step {
    /// The node that has the window.
    pub owner: usize,
    /// Which of its windows on this connection.
    pub window: usize,
    /// Counts the steps.
    pub number: usize,
}

/// The key of a window.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Via {
    /// The window, one of the receiver's.
    pub window: usize,
    /// The tag of its key.
    pub tag: u8,
}

/// Memory that remote operations name.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Slot {
    /// Bytes.
    pub len: u32,
    /// It holds a counter: 8 bytes, aligned.
    pub counter: bool,
}

/// What a message does.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kind {
    /// SEND, with immediate if there is one.
    Send,
    /// RDMA WRITE to a slot, with immediate if there is one.
    Write(usize),
    /// RDMA READ of a slot.
    Read(usize),
    /// Compare and swap of a counter.
    CompareSwap {
        /// The counter.
        slot: usize,
        /// The value expected.
        compare: u64,
        /// The value stored then.
        swap: u64,
    },
    /// Fetch and add to a counter.
    FetchAdd {
        /// The counter.
        slot: usize,
        /// The addend.
        add: u64,
    },
    /// ATOMIC WRITE to a counter.
    AtomicWrite(usize),
    /// FLUSH of a slot.
    Flush {
        /// The slot.
        slot: usize,
        /// The whole region is meant, whatever is named.
        region: bool,
    },
    /// SEND that invalidates a window of the receiver.
    SendInv {
        /// The window.
        window: usize,
        /// The tag of its key.
        tag: u8,
    },
    /// Binds one of the sender's own windows, which the receiver uses; or ends that.
    Bind {
        /// The window.
        window: usize,
        /// The tag of its new key.
        tag: u8,
        /// To nothing.
        unbind: bool,
    },
    /// Invalidates one of the sender's own windows.
    LocalInv {
        /// The window.
        window: usize,
        /// The tag of its key.
        tag: u8,
    },
}

impl Kind {
    /// The slot it names.
    pub fn slot(self) -> Option<usize> {
        match self {
            Kind::Send | Kind::SendInv { .. } | Kind::Bind { .. } | Kind::LocalInv { .. } => None,
            Kind::Write(slot) | Kind::Read(slot) | Kind::AtomicWrite(slot) => Some(slot),
            Kind::CompareSwap { slot, .. } | Kind::FetchAdd { slot, .. } | Kind::Flush { slot, .. } => {
                Some(slot)
            }
        }
    }

    /// Whether it brings data back to its sender.
    pub fn fetches(self) -> bool {
        matches!(
            self,
            Kind::Read(_) | Kind::CompareSwap { .. } | Kind::FetchAdd { .. }
        )
    }

    /// Whether it works on a counter.
    pub fn counts(self) -> bool {
        matches!(
            self,
            Kind::CompareSwap { .. } | Kind::FetchAdd { .. } | Kind::AtomicWrite(_)
        )
    }

    /// Whether it has a buffer of its sender.
    pub fn has_buffer(self) -> bool {
        !self.is_local() && !matches!(self, Kind::Flush { .. })
    }

    /// Whether it is a message of its own, that the receiver's application sees.
    pub fn is_send(self) -> bool {
        matches!(self, Kind::Send | Kind::SendInv { .. })
    }

    /// Whether it is done by the sender alone.
    pub fn is_local(self) -> bool {
        matches!(self, Kind::Bind { .. } | Kind::LocalInv { .. })
    }
}

/// A message to send.
#[derive(Clone, Debug, PartialEq)]
pub struct Message {
    /// What it does.
    pub kind: Kind,
    /// XRC: which of the receiver's shared receive queues it names.
    pub srq: usize,
    /// XRC: it names one that the target may not use instead, and must fail.
    pub wrong_srq: bool,
    /// It waits for READs and atomics before it.
    pub fence: bool,
    /// It names a key that does not exist, or does what a window does not allow: it must fail.
    pub wrong_key: bool,
    /// The window that it goes through ends at the same time: it may be refused.
    pub raced: bool,
    /// The window that it goes through.
    pub via: Option<Via>,
    /// What it is to a window.
    pub step: Option<Step>,
    /// Bytes.
    pub len: u32,
    /// Immediate data.
    pub imm: Option<u32>,
    /// Ask for a completion.
    pub signaled: bool,
    /// Ask for a solicited event.
    pub solicited: bool,
    /// Data copied when posting.
    pub inline: bool,
    /// Scatter/gather entries.
    pub sges: u32,
    /// Not posted before this time, in microseconds.
    pub at: u64,
}

impl Message {
    /// A message of one piece that completes.
    pub fn new(kind: Kind, len: u32) -> Message {
        Message {
            kind,
            srq: 0,
            wrong_srq: false,
            fence: false,
            wrong_key: false,
            raced: false,
            via: None,
            step: None,
            len,
            imm: None,
            signaled: true,
            solicited: false,
            inline: false,
            sges: 1,
            at: 0,
        }
    }

    /// Whether it takes a receive at the peer.
    pub fn takes_receive(&self) -> bool {
        match self.kind {
            Kind::Send | Kind::SendInv { .. } => true,
            Kind::Write(_) => self.imm.is_some(),
            _ => false,
        }
    }
}

impl Stream {
    /// How many of the first `count` messages take a receive.
    pub fn receives_of(&self, count: usize) -> usize {
        self.messages
            .iter()
            .take(count)
            .filter(|m| m.takes_receive())
            .count()
    }

    /// How many receives must have completed before a message of the peer's with this step may be posted.
    pub fn receives_before(&self, step: Step) -> usize {
        let before = |message: &Message| {
            message.takes_receive()
                && message.step.is_some_and(|s| {
                    (s.owner, s.window) == (step.owner, step.window) && s.number < step.number
                })
        };
        let last = self.messages.iter().rposition(before);
        last.map_or(0, |last| self.receives_of(last + 1))
    }

    /// XRC: which shared receive queue a receive goes to.
    pub fn srq_of(&self, receive: usize) -> usize {
        self.receiving().nth(receive).map_or(0, |(_, m)| m.srq)
    }

    /// The messages that take a receive, with their indices: one for each receive.
    pub fn receiving(&self) -> impl Iterator<Item = (usize, &Message)> {
        self.messages
            .iter()
            .enumerate()
            .filter(|(_, m)| m.takes_receive())
    }
}

/// A receive to post.
#[derive(Clone, Debug, PartialEq)]
pub struct Receive {
    /// Bytes.
    pub len: u32,
    /// Scatter/gather entries.
    pub sges: u32,
    /// Not posted before this time, in microseconds.
    pub at: u64,
}

/// Whether a transport acknowledges.
pub fn is_reliable(transport: QpType) -> bool {
    matches!(transport, QpType::Rc | QpType::XrcSend)
}

/// Bytes of a path MTU code.
pub fn mtu_bytes(code: u32) -> u32 {
    128 << code
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Program {
            seed,
            transport,
            ipv6,
            version,
            multicast,
            mtu,
            conditions,
            nodes,
            connections,
            hole,
        } = self;
        writeln!(
            f,
            "{transport}, seed {seed:#x}, path MTU {}, IPv6 {ipv6}, RoCE {version:?}, multicast {multicast}",
            mtu_bytes(*mtu)
        )?;
        for side in 0..2 {
            writeln!(f, "  node {side}: {:?}", nodes[side])?;
            writeln!(f, "    sends under {:?}", conditions[side])?;
        }
        if let Some(hole) = hole {
            writeln!(f, "  {hole:?}")?;
        }
        for (i, connection) in connections.iter().enumerate() {
            let Connection { streams, .. } = connection;
            let empty = Connection {
                streams: Default::default(),
                ..connection.clone()
            };
            writeln!(f, "  connection {i}: {empty:?}")?;
            for (side, stream) in streams.iter().enumerate() {
                stream
                    .slots
                    .iter()
                    .try_for_each(|s| writeln!(f, "    node {} has {s:?}", 1 - side))?;
                stream
                    .windows
                    .iter()
                    .try_for_each(|w| writeln!(f, "    node {} has {w:?}", 1 - side))?;
                stream
                    .messages
                    .iter()
                    .try_for_each(|m| writeln!(f, "    node {side} sends {m:?}"))?;
                stream
                    .receives
                    .iter()
                    .try_for_each(|r| writeln!(f, "    node {} has {r:?}", 1 - side))?;
            }
        }
        Ok(())
    }
}

impl Program {
    /// Whether every message arrives, or an error tells.
    pub fn is_reliable(&self) -> bool {
        is_reliable(self.transport)
    }

    /// The multicast group of the QP that a node has for a connection.
    pub fn group(&self, side: usize, connection: usize) -> IpAddr {
        if self.ipv6 {
            IpAddr::from([0xff0e, 0, 0, 0, 0, 0, side as u16, connection as u16])
        } else {
            IpAddr::from([239, 1, side as u8, connection as u8])
        }
    }

    /// Whether a receive of the stream from `side` is shorter than the SEND that gets it.
    pub fn is_short_receive(&self, connection: usize, side: usize, receive: usize) -> bool {
        let stream = &self.connections[connection].streams[side];
        let message = stream.receiving().nth(receive).map(|(_, message)| message);
        message.is_some_and(|m| m.kind.is_send() && stream.receives[receive].len < m.len)
    }
}
