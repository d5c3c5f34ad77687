//! One connection: what is known of it, the messages that say so, and the times of the protocol.

use std::time::Duration;

use ferroce_wire::cm::{
    Answered, Apr, CmMad, CmMessage, Drep, Dreq, Mra, Path as CmPath, Rej, RejReason, Rep, Req, Rtu,
    ServiceType,
};
use ferroce_wire::mad::MAD_LEN;
use ferroce_wire::{Gid, Psn};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::interface::*;
use crate::time::Time;

/// The LID of paths without LIDs.
const PERMISSIVE_LID: u16 = 0xffff;

/// Longest time that a refusal is kept, and what has no user any more.
pub(super) const MAX_LINGER: Duration = Duration::from_secs(120);

/// Status of an APR: alternate paths are not supported.
const APR_UNSUPPORTED: u8 = 2;

/// Bytes of a message, kept to be sent again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Mad(pub Box<[u8; MAD_LEN]>);

impl Mad {
    pub fn new(tid: u64, attribute_modifier: u32, message: impl Into<CmMessage>) -> Mad {
        let mad = CmMad {
            tid,
            attribute_modifier,
            message: message.into(),
        };
        Mad(Box::new(mad.to_bytes()))
    }

    /// Whether it is the message of that attribute id.
    pub fn is(&self, attribute_id: u16) -> bool {
        self.0[16..18] == attribute_id.to_be_bytes()
    }
}

impl Serialize for Mad {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        // Private data is mostly empty: the zeros at the end go without saying.
        let len = self.0.iter().rposition(|&byte| byte != 0).map_or(0, |at| at + 1);
        self.0[..len].serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Mad {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Mad, D::Error> {
        let bytes = Vec::<u8>::deserialize(deserializer)?;
        let mut mad = Box::new([0; MAD_LEN]);
        let head = mad
            .get_mut(..bytes.len())
            .ok_or_else(|| serde::de::Error::custom("more than a MAD"))?;
        head.copy_from_slice(&bytes);
        Ok(Mad(mad))
    }
}

/// A message that waits for its answer.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Sending {
    pub mad: Mad,
    /// From one try to the next.
    pub interval: Duration,
    /// Tries left.
    pub retries: u8,
}

/// What is known of a connection.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Connection {
    pub comm_id: CommId,
    /// 0 until it is known.
    pub remote_comm_id: u32,
    pub state: State,
    /// Its user has let go of it.
    pub destroyed: bool,
    /// It is in the table of (GUID, remote comm id).
    pub listed_by_id: bool,
    /// It is in the table of (GUID, remote QPN).
    pub listed_by_qpn: bool,
    /// We sent the REQ.
    pub active: bool,
    pub transport: Transport,
    pub way: Way,
    /// Of the REQ, and then of the DREQ that came.
    pub tid: u64,
    pub local_ca_guid: u64,
    pub remote_ca_guid: u64,
    pub local_qpn: u32,
    pub remote_qpn: u32,
    pub rq_psn: u32,
    pub sq_psn: u32,
    pub responder_resources: u8,
    pub initiator_depth: u8,
    pub retry_count: u8,
    pub rnr_retry_count: u8,
    pub pkey: u16,
    pub path_mtu: u8,
    pub packet_rate: u8,
    /// Code of the local ACK timeout; timewait takes as long.
    pub ack_timeout: u8,
    /// From one try of a message to the next.
    pub interval: Duration,
    /// How long a refusal is kept, to be repeated.
    pub linger: Duration,
    pub max_retries: u8,
    /// The message that waits for its answer.
    pub sending: Option<Sending>,
    /// What duplicates of the peer's last message are answered with.
    pub answer: Option<Mad>,
    /// When to send again, or when timewait ends.
    #[serde(skip)]
    pub deadline: Option<Time>,
    /// To be forgotten, by who has it in hands.
    #[serde(skip)]
    pub gone: bool,
}

/// 4.096 us x 2^code, as Linux takes it: in milliseconds, at least one.
pub(super) fn duration_of(code: u8) -> Duration {
    Duration::from_millis(1 << code.saturating_sub(8).min(31))
}

/// How long a refusal is kept for a peer that repeats its message at that interval: a few of its tries may be lost.
fn linger(interval: Duration) -> Duration {
    (interval * 4).min(MAX_LINGER)
}

/// The code of a local ACK timeout: of the peer's time to acknowledge and twice the life time of a packet. As one more
/// doubles it, the sum is the larger of both, and one more only if the other is near.
pub(super) fn ack_timeout(ack_delay: u8, packet_life_time: u8) -> u8 {
    let flight = packet_life_time.saturating_add(1);
    let code = if flight >= ack_delay {
        flight.saturating_add(u8::from(ack_delay >= flight - 1))
    } else {
        ack_delay + u8::from(flight >= ack_delay - 1)
    };
    code.min(31)
}

impl Transport {
    /// What a REQ says, if it makes sense.
    pub(super) fn of(req: &Req) -> Option<Transport> {
        match (req.transport, req.extended_transport) {
            (ServiceType::Rc, _) => Some(Transport::Rc),
            (ServiceType::Uc, _) => Some(Transport::Uc),
            (ServiceType::Extended, 1) => Some(Transport::Xrc),
            _ => None,
        }
    }
}

/// `data`, and zeros up to the length of the field.
pub(super) fn padded<const N: usize>(data: &[u8]) -> Result<[u8; N], Errno> {
    let mut field = [0; N];
    field
        .get_mut(..data.len())
        .ok_or(libc::EINVAL)?
        .copy_from_slice(data);
    Ok(field)
}

/// Whether these numbers fit as many bits.
pub(super) fn fit(fields: &[(u32, u32)]) -> Result<(), Errno> {
    let fits = |&(value, bits): &(u32, u32)| value >> bits == 0;
    if fields.iter().all(fits) {
        Ok(())
    } else {
        Err(libc::EINVAL)
    }
}

impl RequestParameters {
    /// The REQ that says so.
    pub(super) fn message(&self, comm_id: CommId) -> Result<Req, Errno> {
        fit(&[
            (self.qpn, 24),
            (self.starting_psn, 24),
            (self.retry_count.into(), 3),
            (self.rnr_retry_count.into(), 3),
            (self.path_mtu.into(), 4),
            (self.packet_rate.into(), 6),
            (self.packet_life_time.into(), 5),
            (self.remote_cm_response_timeout.into(), 5),
            (self.local_cm_response_timeout.into(), 5),
            (self.max_cm_retries.into(), 4),
            (self.ece.vendor_id, 24),
        ])?;
        let path = &self.way.path;
        let xrc = self.transport == Transport::Xrc;
        Ok(Req {
            local_comm_id: comm_id,
            vendor_id: self.ece.vendor_id,
            service_id: self.service_id,
            local_ca_guid: self.local_ca_guid,
            local_qpn: self.qpn,
            // An XRC initiator receives nothing.
            responder_resources: if xrc { 0 } else { self.responder_resources },
            initiator_depth: self.initiator_depth,
            remote_cm_response_timeout: self.remote_cm_response_timeout,
            transport: match self.transport {
                Transport::Rc => ServiceType::Rc,
                Transport::Uc => ServiceType::Uc,
                Transport::Xrc => ServiceType::Extended,
            },
            end_to_end_flow_control: self.flow_control,
            starting_psn: Psn::new(self.starting_psn),
            local_cm_response_timeout: self.local_cm_response_timeout,
            retry_count: if xrc { 0 } else { self.retry_count },
            pkey: self.pkey,
            path_mtu: self.path_mtu,
            rnr_retry_count: if xrc { 0 } else { self.rnr_retry_count },
            max_cm_retries: self.max_cm_retries,
            srq: !xrc && self.srq,
            extended_transport: u8::from(xrc),
            primary: CmPath {
                local_lid: PERMISSIVE_LID,
                remote_lid: PERMISSIVE_LID,
                local_gid: Gid::from_ip(path.source),
                remote_gid: Gid::from_ip(path.dest),
                flow_label: path.flow_label,
                packet_rate: self.packet_rate,
                traffic_class: path.traffic_class,
                hop_limit: path.hop_limit_on_wire(),
                sl: path.service_level,
                subnet_local: path.hop_limit_on_wire() <= 1,
                local_ack_timeout: ack_timeout(self.ack_delay, self.packet_life_time),
            },
            private_data: padded(&self.private_data)?,
            ..Req::default()
        })
    }
}

impl Connection {
    /// One that begins with our REQ.
    pub fn requested(comm_id: CommId, tid: u64, parameters: &RequestParameters) -> Connection {
        let flight = duration_of(parameters.packet_life_time) * 2;
        Connection {
            comm_id,
            remote_comm_id: 0,
            state: State::ReqSent,
            destroyed: false,
            listed_by_id: false,
            listed_by_qpn: false,
            active: true,
            transport: parameters.transport,
            way: parameters.way.clone(),
            tid,
            local_ca_guid: parameters.local_ca_guid,
            remote_ca_guid: 0,
            local_qpn: parameters.qpn,
            remote_qpn: 0,
            rq_psn: parameters.starting_psn,
            sq_psn: 0,
            responder_resources: parameters.responder_resources,
            initiator_depth: parameters.initiator_depth,
            retry_count: parameters.retry_count,
            rnr_retry_count: parameters.rnr_retry_count,
            pkey: parameters.pkey,
            path_mtu: parameters.path_mtu,
            packet_rate: parameters.packet_rate,
            ack_timeout: (parameters.packet_life_time + 1).min(31),
            interval: flight + duration_of(parameters.remote_cm_response_timeout),
            linger: linger(duration_of(parameters.local_cm_response_timeout)),
            max_retries: parameters.max_cm_retries,
            sending: None,
            answer: None,
            deadline: None,
            gone: false,
        }
    }

    /// One that begins with a peer's REQ.
    pub fn received(comm_id: CommId, tid: u64, way: Way, transport: Transport, req: &Req) -> Connection {
        let flight = duration_of(req.primary.local_ack_timeout.saturating_sub(1)) * 2;
        Connection {
            comm_id,
            remote_comm_id: req.local_comm_id,
            state: State::ReqReceived,
            destroyed: false,
            listed_by_id: false,
            listed_by_qpn: false,
            active: false,
            transport,
            way,
            tid,
            local_ca_guid: 0,
            remote_ca_guid: req.local_ca_guid,
            local_qpn: 0,
            remote_qpn: req.local_qpn,
            rq_psn: 0,
            sq_psn: req.starting_psn.value(),
            responder_resources: req.initiator_depth,
            initiator_depth: req.responder_resources,
            retry_count: req.retry_count,
            rnr_retry_count: req.rnr_retry_count,
            pkey: req.pkey,
            path_mtu: req.path_mtu,
            packet_rate: req.primary.packet_rate,
            ack_timeout: req.primary.local_ack_timeout.max(1),
            interval: duration_of(req.local_cm_response_timeout),
            linger: linger(flight + duration_of(req.remote_cm_response_timeout)),
            max_retries: req.max_cm_retries,
            sending: None,
            answer: None,
            deadline: None,
            gone: false,
        }
    }

    /// Takes what a REP says, which is the first thing known of the peer.
    pub fn replied(&mut self, rep: &Rep) {
        self.remote_comm_id = rep.local_comm_id;
        self.remote_ca_guid = rep.local_ca_guid;
        self.remote_qpn = self.qpn_of(rep);
        self.sq_psn = rep.starting_psn.value();
        self.responder_resources = rep.initiator_depth;
        self.initiator_depth = rep.responder_resources;
        self.rnr_retry_count = rep.rnr_retry_count;
        self.ack_timeout = ack_timeout(rep.target_ack_delay, self.ack_timeout.saturating_sub(1));
    }

    /// The peer's queue pair: an XRC target has another field for it.
    pub fn qpn_of(&self, rep: &Rep) -> u32 {
        match self.transport {
            Transport::Xrc => rep.local_eecn,
            Transport::Rc | Transport::Uc => rep.local_qpn,
        }
    }

    /// The REP that says so.
    pub fn rep(&self, parameters: &ReplyParameters) -> Result<Rep, Errno> {
        fit(&[
            (parameters.qpn, 24),
            (parameters.starting_psn, 24),
            (parameters.ack_delay.into(), 5),
            (parameters.rnr_retry_count.into(), 3),
            (parameters.ece.vendor_id, 24),
        ])?;
        let mut rep = Rep {
            local_comm_id: self.comm_id,
            remote_comm_id: self.remote_comm_id,
            vendor_id: parameters.ece.vendor_id,
            starting_psn: Psn::new(parameters.starting_psn),
            responder_resources: parameters.responder_resources,
            target_ack_delay: parameters.ack_delay,
            rnr_retry_count: parameters.rnr_retry_count,
            local_ca_guid: parameters.local_ca_guid,
            private_data: padded(&parameters.private_data)?,
            ..Rep::default()
        };
        if self.transport == Transport::Xrc {
            // An XRC target sends nothing, and has shared receive queues only.
            rep.local_eecn = parameters.qpn;
            rep.srq = true;
        } else {
            rep.local_qpn = parameters.qpn;
            rep.initiator_depth = parameters.initiator_depth;
            rep.end_to_end_flow_control = parameters.flow_control;
            rep.srq = parameters.srq;
        }
        Ok(rep)
    }

    pub fn rtu(&self, private_data: &[u8]) -> Result<Mad, Errno> {
        let rtu = Rtu {
            local_comm_id: self.comm_id,
            remote_comm_id: self.remote_comm_id,
            private_data: padded(private_data)?,
        };
        Ok(Mad::new(self.tid, 0, rtu))
    }

    pub fn mra(&self, message: Answered, service_timeout: u8, private_data: &[u8]) -> Result<Mad, Errno> {
        fit(&[(service_timeout.into(), 5)])?;
        let mra = Mra {
            local_comm_id: self.comm_id,
            remote_comm_id: self.remote_comm_id,
            message,
            service_timeout,
            private_data: padded(private_data)?,
        };
        Ok(Mad::new(self.tid, 0, mra))
    }

    /// A REJ of this state: what it refuses follows from that.
    pub fn rej(&self, reason: RejReason, info: &[u8], private_data: &[u8]) -> Result<Mad, Errno> {
        let (local_comm_id, message) = match self.state {
            // As Linux has it: who never took a REQ has no number for it.
            State::ReqReceived => (0, Answered::Req),
            State::MraReqSent => (self.comm_id, Answered::Req),
            State::RepReceived | State::MraRepSent => (self.comm_id, Answered::Rep),
            _ => (self.comm_id, Answered::Other),
        };
        let rej = Rej {
            local_comm_id,
            remote_comm_id: self.remote_comm_id,
            message,
            info_len: u8::try_from(info.len()).map_err(|_| libc::EINVAL)?,
            reason,
            info: padded(info)?,
            private_data: padded(private_data)?,
        };
        Ok(Mad::new(self.tid, 0, rej))
    }

    /// A REJ for a message that nobody answered: it names our device, as the peer may not know our comm id.
    pub fn rej_timeout(&self) -> Mad {
        let guid = self.local_ca_guid.to_be_bytes();
        let rej = Rej {
            local_comm_id: self.comm_id,
            remote_comm_id: self.remote_comm_id,
            message: Answered::Other,
            info_len: guid.len() as u8,
            reason: RejReason::TIMEOUT,
            info: {
                let mut info = [0; 72];
                info[..8].copy_from_slice(&guid);
                info
            },
            private_data: [0; 148],
        };
        Mad::new(self.tid, 0, rej)
    }

    pub fn dreq(&self, tid: u64, private_data: &[u8]) -> Result<Mad, Errno> {
        let dreq = Dreq {
            local_comm_id: self.comm_id,
            remote_comm_id: self.remote_comm_id,
            remote_qpn: self.remote_qpn,
            private_data: padded(private_data)?,
        };
        Ok(Mad::new(tid, 0, dreq))
    }

    pub fn drep(&self, private_data: &[u8]) -> Result<Mad, Errno> {
        let drep = Drep {
            local_comm_id: self.comm_id,
            remote_comm_id: self.remote_comm_id,
            private_data: padded(private_data)?,
        };
        Ok(Mad::new(self.tid, 0, drep))
    }

    /// The answer to a LAP of that transaction.
    pub fn apr(&self, tid: u64) -> Mad {
        let apr = Apr {
            local_comm_id: self.comm_id,
            remote_comm_id: self.remote_comm_id,
            status: APR_UNSUPPORTED,
            ..Apr::default()
        };
        Mad::new(tid, 0, apr)
    }

    /// Whether a message that came this way is of this connection's peer.
    pub fn is_with(&self, way: &Way) -> bool {
        is_same_way(&self.way, way)
    }

    /// What the queue pair is to be set to, once the peer's part is known.
    pub fn attributes(&self) -> Option<Attributes> {
        match self.state {
            State::ReqReceived
            | State::MraReqSent
            | State::RepReceived
            | State::MraRepSent
            | State::RepSent
            | State::MraRepReceived
            | State::Established => Some(Attributes {
                transport: self.transport,
                active: self.active,
                pkey: self.pkey,
                path_mtu: self.path_mtu,
                dest_qpn: self.remote_qpn,
                rq_psn: self.rq_psn,
                sq_psn: self.sq_psn,
                responder_resources: self.responder_resources,
                initiator_depth: self.initiator_depth,
                timeout: self.ack_timeout,
                retry_count: self.retry_count,
                rnr_retry_count: self.rnr_retry_count,
                packet_rate: self.packet_rate,
            }),
            _ => None,
        }
    }

    pub fn status(&self) -> Status {
        Status {
            comm_id: self.comm_id,
            remote_comm_id: self.remote_comm_id,
            state: self.state,
            destroyed: self.destroyed,
            way: self.way.clone(),
            local_qpn: self.local_qpn,
            remote_qpn: self.remote_qpn,
        }
    }
}

/// Whether both are between the same addresses, at the same device: it may be reached by several interfaces, and a
/// link-local address says nothing without one.
pub(super) fn is_same_way(a: &Way, b: &Way) -> bool {
    a.device == b.device && a.path.source == b.path.source && a.path.dest == b.path.dest
}
