//! What the user of a [`super::Cm`] gives it, and what it is told.

use ferroce_wire::cm::{Rej, RejReason, Rep, Req, SidrRep, SidrReq, SidrStatus};
use ferroce_wire::mad::MAD_LEN;
use serde::{Deserialize, Serialize};

use crate::link::Path;

/// Our number of a connection, of an attempt at one, or of a SIDR exchange; never 0.
pub type CommId = u32;

/// A positive errno value.
pub type Errno = i32;

/// Where a MAD goes: from which device, and how.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Way {
    /// Name of the device.
    pub device: String,
    /// From our address to the peer's.
    pub path: Path,
}

/// What kind of queue pairs a connection is between.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Transport {
    /// Reliable connection.
    Rc,
    /// Unreliable connection.
    Uc,
    /// XRC: who sends the REQ is the initiator, the other the target.
    Xrc,
}

/// Enhanced connection option: a vendor's own, passed through.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Ece {
    /// Vendor id, 24 bits; 0 for none.
    pub vendor_id: u32,
    /// Attribute modifier of the MAD header.
    pub attribute_modifier: u32,
}

/// All that a REQ says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestParameters {
    /// Where to; its path is the connection's primary path too.
    pub way: Way,
    /// Node GUID of our device.
    pub local_ca_guid: u64,
    /// The service asked for.
    pub service_id: u64,
    /// Type of the queue pair.
    pub transport: Transport,
    /// Our queue pair.
    pub qpn: u32,
    /// The PSN that our queue pair expects first: its RQ PSN.
    pub starting_psn: u32,
    /// READs and atomics that our queue pair takes at once.
    pub responder_resources: u8,
    /// READs and atomics that our queue pair has outstanding at most.
    pub initiator_depth: u8,
    /// End-to-end flow control.
    pub flow_control: bool,
    /// Retries on timeout, 0 to 7.
    pub retry_count: u8,
    /// Retries on RNR NAK, 0 to 7.
    pub rnr_retry_count: u8,
    /// Our queue pair has a shared receive queue.
    pub srq: bool,
    /// Partition key.
    pub pkey: u16,
    /// Path MTU, `enum ibv_mtu`.
    pub path_mtu: u8,
    /// Rate, `enum ibv_rate`.
    pub packet_rate: u8,
    /// How long a packet may take, 4.096 us x 2^t; 18 in RoCE.
    pub packet_life_time: u8,
    /// How long our device takes to acknowledge (`local_ca_ack_delay`), 4.096 us x 2^t.
    pub ack_delay: u8,
    /// Time that the peer has to answer, 4.096 us x 2^t; 20 by custom.
    pub remote_cm_response_timeout: u8,
    /// Time within which we answer, 4.096 us x 2^t; 20 by custom.
    pub local_cm_response_timeout: u8,
    /// Times that a message is sent again, 0 to 15; 15 by custom.
    pub max_cm_retries: u8,
    /// Enhanced connection option.
    pub ece: Ece,
    /// At most 92 bytes: those of RDMA CM begin with its own header.
    pub private_data: Vec<u8>,
}

/// All that a REP says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReplyParameters {
    /// Node GUID of our device.
    pub local_ca_guid: u64,
    /// Our queue pair.
    pub qpn: u32,
    /// The PSN that our queue pair expects first: its RQ PSN.
    pub starting_psn: u32,
    /// READs and atomics that our queue pair takes at once.
    pub responder_resources: u8,
    /// READs and atomics that our queue pair has outstanding at most.
    pub initiator_depth: u8,
    /// How long our device takes to acknowledge (`local_ca_ack_delay`), 4.096 us x 2^t.
    pub ack_delay: u8,
    /// End-to-end flow control.
    pub flow_control: bool,
    /// Retries on RNR NAK, 0 to 7.
    pub rnr_retry_count: u8,
    /// Our queue pair has a shared receive queue.
    pub srq: bool,
    /// Enhanced connection option.
    pub ece: Ece,
    /// At most 196 bytes.
    pub private_data: Vec<u8>,
}

/// All that a SIDR_REQ says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SidrParameters {
    /// Where to.
    pub way: Way,
    /// The service asked for.
    pub service_id: u64,
    /// Partition key.
    pub pkey: u16,
    /// Time from one try to the next, in milliseconds. RDMA CM has 4096.
    pub timeout_ms: u32,
    /// Times that it is sent again, 0 to 15.
    pub max_cm_retries: u8,
    /// At most 216 bytes: those of RDMA CM begin with its own header.
    pub private_data: Vec<u8>,
}

/// All that a SIDR_REP says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SidrReplyParameters {
    /// [`SidrStatus::SUCCESS`], or why not.
    pub status: SidrStatus,
    /// The service's queue pair.
    pub qpn: u32,
    /// Its Q_Key.
    pub qkey: u32,
    /// Enhanced connection option.
    pub ece: Ece,
    /// At most 72 bytes about the status.
    pub info: Vec<u8>,
    /// At most 136 bytes.
    pub private_data: Vec<u8>,
}

/// What queue pairs of a connection are to be set to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attributes {
    /// Type of the queue pairs.
    pub transport: Transport,
    /// Whether we sent the REQ: an XRC initiator has, a target has not.
    pub active: bool,
    /// Partition key.
    pub pkey: u16,
    /// Path MTU, `enum ibv_mtu`.
    pub path_mtu: u8,
    /// The peer's queue pair.
    pub dest_qpn: u32,
    /// First PSN to receive. Of the passive side, 0 until it has replied.
    pub rq_psn: u32,
    /// First PSN to send.
    pub sq_psn: u32,
    /// READs and atomics taken at once (`max_dest_rd_atomic`).
    pub responder_resources: u8,
    /// READs and atomics outstanding at most (`max_rd_atomic`).
    pub initiator_depth: u8,
    /// Local ACK timeout code.
    pub timeout: u8,
    /// Retries on timeout.
    pub retry_count: u8,
    /// Retries on RNR NAK.
    pub rnr_retry_count: u8,
    /// Rate of the primary path, `enum ibv_rate`.
    pub packet_rate: u8,
}

/// Something that a connection's or an exchange's user should know.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// Of which.
    pub comm_id: CommId,
    /// What.
    pub kind: EventKind,
}

/// What happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EventKind {
    /// A peer asks for a connection; the comm id is a new one. To be answered by `reply`, `reject`, `refuse`, `delay`.
    Request(Box<Request>),
    /// The peer accepts. To be answered by `ready`, `reject`, `delay`.
    Reply(Box<Reply>),
    /// RTU: the peer is ready. The connection is established.
    Ready {
        /// 224 bytes.
        private_data: Vec<u8>,
    },
    /// [`super::Cm::establish`] was called: the peer's data came before its RTU.
    Established,
    /// REJ: the peer does not want it. After reason [`RejReason::STALE_CONNECTION`], and where a reply had come, the
    /// connection is in timewait; otherwise only `destroy` is left.
    Rejected(Box<Rejection>),
    /// MRA: the peer needs time. Nothing is to be done.
    Delayed {
        /// How long, 4.096 us x 2^t.
        service_timeout: u8,
        /// 222 bytes.
        private_data: Vec<u8>,
    },
    /// No answer to the REQ, all tries included. Only `destroy` is left.
    RequestTimeout,
    /// No answer to the REP, all tries included. Only `destroy` is left.
    ReplyTimeout,
    /// The peer's queue pair asks for, or answers as, another connection: it knows nothing of this one any more. DREQ was
    /// sent as by [`super::Cm::disconnect`], and the same events follow.
    Stale,
    /// DREQ: the peer ends the connection. To be answered by `answer_disconnect`.
    DisconnectRequested {
        /// 220 bytes.
        private_data: Vec<u8>,
    },
    /// DREP, or both asked at once: the connection is ended, timewait begins.
    Disconnected {
        /// 224 bytes of a DREP, 220 of a DREQ that crossed ours.
        private_data: Vec<u8>,
    },
    /// No answer to the DREQ, all tries included. Timewait begins.
    DisconnectTimeout,
    /// Timewait is over: the queue pair may be used again. Only `destroy` is left.
    TimewaitExit,
    /// A peer asks for a datagram service; the comm id is a new one. To be answered by `sidr_reply`.
    SidrRequest(Box<SidrRequest>),
    /// The answer to ours. Only `destroy` is left.
    SidrReply(Box<SidrReply>),
    /// No answer to the SIDR_REQ, all tries included. Only `destroy` is left.
    SidrTimeout,
}

/// A REQ that came.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// The way back, as the REQ's primary path has it.
    pub way: Way,
    /// Type of the queue pairs.
    pub transport: Transport,
    /// Enhanced connection option.
    pub ece: Ece,
    /// All that it says.
    pub message: Req,
}

/// A REP that came.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reply {
    /// The peer's queue pair.
    pub qpn: u32,
    /// Enhanced connection option.
    pub ece: Ece,
    /// All that it says.
    pub message: Rep,
}

/// A REJ that came.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rejection {
    /// Why.
    pub reason: RejReason,
    /// All that it says: [`Rej::info_len`] bytes of `info` and 148 of private data.
    pub message: Rej,
}

/// A SIDR_REQ that came.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SidrRequest {
    /// The way back.
    pub way: Way,
    /// All that it says.
    pub message: SidrReq,
}

/// A SIDR_REP that came.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SidrReply {
    /// Enhanced connection option.
    pub ece: Ece,
    /// All that it says.
    pub message: SidrRep,
}

/// A MAD to be sent from QP 1 to QP 1.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Transmit {
    /// Where to.
    pub way: Way,
    /// The MAD.
    pub mad: Box<[u8; MAD_LEN]>,
}

/// State of a connection or an exchange (IBTA 12.9.7).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[allow(missing_docs)] // the names of the specification
pub enum State {
    /// Over, or never begun: only [`super::Cm::destroy`] is left.
    Idle,
    ReqSent,
    MraReqReceived,
    ReqReceived,
    MraReqSent,
    RepSent,
    MraRepReceived,
    RepReceived,
    MraRepSent,
    Established,
    DreqSent,
    DreqReceived,
    Timewait,
    SidrReqSent,
    SidrReqReceived,
}

/// One line about a connection or an exchange.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Status {
    /// Our number.
    pub comm_id: CommId,
    /// The peer's number, 0 until it is known.
    pub remote_comm_id: u32,
    /// State.
    pub state: State,
    /// It was destroyed: what remains is for the peer's sake.
    pub destroyed: bool,
    /// Where to.
    pub way: Way,
    /// Our queue pair, 0 until it is known.
    pub local_qpn: u32,
    /// The peer's queue pair, 0 until it is known.
    pub remote_qpn: u32,
}
