//! Connections: asking, accepting, rejecting and ending them.

use ferroce_wire::cm::{IpHeader, IpPair, RejReason, SidrStatus};
use ferroce_wire::gid::Gid;

use super::id::{Kept, State};
use super::listen::{SERVICE_TIMEOUT, data_offset};
use super::lobby::Asks;
use super::{Address, Details, Ece, Errno, Event, EventKind, Handle, Parameters, QpKind, RdmaCm};
use crate::cm::{self, CommId, ReplyParameters, RequestParameters, SidrReplyParameters, Transport};
use crate::time::Time;

/// Time that either side has for an answer: 4.096 us x 2^20 (`CMA_CM_RESPONSE_TIMEOUT`).
pub(super) const RESPONSE_TIMEOUT: u8 = 20;
/// Times that a message is sent again (`CMA_MAX_CM_RETRIES`).
pub(super) const MAX_RETRIES: u8 = 15;
/// How long the device takes to acknowledge, as `ibv_query_device` says.
const ACK_DELAY: u8 = 15;
/// Most retries that fit their fields.
const MAX_RETRY_COUNT: u8 = 7;
const QPN_MASK: u32 = 0xff_ffff;

/// Bytes of private data that a REQ, a REP, a REJ and a SIDR_REP carry.
pub(super) const REQ_DATA: usize = 92;
const REP_DATA: usize = 196;
const REJ_DATA: usize = 148;
const SIDR_REP_DATA: usize = 136;

/// `IBV_EVENT_COMM_EST`.
const COMMUNICATION_ESTABLISHED: u32 = 4;

impl RdmaCm {
    /// CONNECT.
    pub(super) fn connect(
        &mut self,
        now: Time,
        id: Handle,
        parameters: &Parameters,
        ece: Ece,
    ) -> Result<(), Errno> {
        let kept = &self.own_bound(id)?.kept;
        if kept.state != State::RouteResolved {
            return Err(libc::EINVAL);
        }
        let comm = if kept.is_datagram() {
            self.ask_datagram(now, id, parameters)?
        } else {
            let request = self.request_of(kept, parameters, ece)?;
            self.cm.request(now, &request)?
        };
        let kept = &mut self.entry_mut(id).kept;
        kept.qpn = parameters.qpn & QPN_MASK;
        kept.state = State::Connect;
        self.connect_comm(id, comm);
        Ok(())
    }

    fn request_of(&self, kept: &Kept, parameters: &Parameters, ece: Ece) -> Result<RequestParameters, Errno> {
        let path = kept.path.ok_or(libc::EINVAL)?;
        let transport = match kept.qp_kind {
            QpKind::Rc => Transport::Rc,
            QpKind::Uc => Transport::Uc,
            QpKind::XrcInitiator => Transport::Xrc,
            QpKind::Ud | QpKind::XrcTarget => return Err(libc::EINVAL),
        };
        Ok(RequestParameters {
            way: self.way_along(kept, &path)?,
            local_ca_guid: self.device_of(kept).ok_or(libc::ENODEV)?.guid,
            service_id: self.service_of(kept),
            transport,
            qpn: parameters.qpn & QPN_MASK,
            starting_psn: kept.psn,
            responder_resources: parameters.responder_resources,
            initiator_depth: parameters.initiator_depth,
            flow_control: parameters.flow_control,
            retry_count: parameters.retry_count.min(MAX_RETRY_COUNT),
            rnr_retry_count: parameters.rnr_retry_count.min(MAX_RETRY_COUNT),
            srq: parameters.srq,
            pkey: super::resolve::PKEY,
            path_mtu: path.mtu,
            packet_rate: path.rate,
            packet_life_time: path.packet_life_time,
            ack_delay: ACK_DELAY,
            remote_cm_response_timeout: RESPONSE_TIMEOUT,
            local_cm_response_timeout: RESPONSE_TIMEOUT,
            max_cm_retries: MAX_RETRIES,
            ece: ece_for_peer(ece),
            private_data: with_header(kept, &parameters.private_data, REQ_DATA)?,
        })
    }

    /// The service id that the peer listens at.
    pub(super) fn service_of(&self, kept: &Kept) -> u64 {
        kept.dest.map_or(0, |dest| dest.service_id(kept.port_space))
    }

    /// ACCEPT.
    pub(super) fn accept(
        &mut self,
        now: Time,
        id: Handle,
        parameters: Option<&Parameters>,
        ece: Ece,
    ) -> Result<(), Errno> {
        let kept = &self.own_bound(id)?.kept;
        if kept.state != State::Connect {
            return Err(libc::EINVAL);
        }
        let datagram = kept.is_datagram();
        let comm = self.entry(id).comm.ok_or(libc::EINVAL)?;
        if let Some(parameters) = parameters {
            self.entry_mut(id).kept.qpn = parameters.qpn & QPN_MASK;
        }
        let accepted = match parameters {
            _ if datagram => self.accept_datagram(now, id, comm, parameters, ece),
            Some(parameters) => self.reply(now, id, comm, parameters, ece),
            None => self.cm.ready(now, comm, &[]),
        };
        match accepted {
            Ok(()) => self.entry_mut(id).kept.known |= parameters.is_some(),
            // What can not be accepted is refused: the peer need not wait.
            Err(_) => drop(self.refuse(now, id, comm, RejReason::CONSUMER_DEFINED, &[])),
        }
        accepted
    }

    fn reply(
        &mut self,
        now: Time,
        id: Handle,
        comm: CommId,
        parameters: &Parameters,
        ece: Ece,
    ) -> Result<(), Errno> {
        if parameters.private_data.len() > REP_DATA {
            return Err(libc::EINVAL);
        }
        let kept = &self.entry(id).kept;
        let reply = ReplyParameters {
            local_ca_guid: self.device_of(kept).ok_or(libc::ENODEV)?.guid,
            qpn: kept.qpn,
            starting_psn: kept.psn,
            responder_resources: parameters.responder_resources,
            initiator_depth: parameters.initiator_depth,
            ack_delay: ACK_DELAY,
            flow_control: parameters.flow_control,
            rnr_retry_count: parameters.rnr_retry_count.min(MAX_RETRY_COUNT),
            srq: parameters.srq,
            ece: ece_for_peer(ece),
            private_data: parameters.private_data.clone(),
        };
        self.cm.reply(now, comm, &reply)
    }

    /// REJECT.
    pub(super) fn reject(
        &mut self,
        now: Time,
        id: Handle,
        reason: u8,
        private_data: &[u8],
    ) -> Result<(), Errno> {
        let reason = match RejReason(reason.into()) {
            RejReason(0) => RejReason::CONSUMER_DEFINED,
            reason @ (RejReason::CONSUMER_DEFINED | RejReason::VENDOR_OPTION_NOT_SUPPORTED) => reason,
            _ => return Err(libc::EINVAL),
        };
        let comm = self.own_bound(id)?.comm.ok_or(libc::EINVAL)?;
        self.refuse(now, id, comm, reason, private_data)
    }

    fn refuse(
        &mut self,
        now: Time,
        id: Handle,
        comm: CommId,
        reason: RejReason,
        private_data: &[u8],
    ) -> Result<(), Errno> {
        if self.entry(id).kept.is_datagram() {
            if private_data.len() > SIDR_REP_DATA {
                return Err(libc::EINVAL);
            }
            let reply = SidrReplyParameters {
                status: SidrStatus::REJECTED,
                private_data: private_data.to_vec(),
                ..SidrReplyParameters::default()
            };
            self.cm.sidr_reply(now, comm, &reply)
        } else if private_data.len() > REJ_DATA {
            Err(libc::EINVAL)
        } else {
            self.cm.reject(now, comm, reason, &[], private_data)
        }
    }

    /// DISCONNECT. As in the kernel it succeeds wherever there is, or was, something to disconnect.
    pub(super) fn disconnect(&mut self, now: Time, id: Handle) -> Result<(), Errno> {
        let comm = self.own_bound(id)?.comm.ok_or(libc::EINVAL)?;
        if self.cm.disconnect(now, comm, &[]).is_err() {
            let _ = self.cm.answer_disconnect(now, comm, &[]);
        }
        Ok(())
    }

    /// NOTIFY.
    pub(super) fn notify(&mut self, now: Time, id: Handle, event: u32) -> Result<(), Errno> {
        let comm = self.own_bound(id)?.comm.ok_or(libc::EINVAL)?;
        match event {
            COMMUNICATION_ESTABLISHED => self.cm.establish(now, comm),
            // Others, a migrated path too, are none that a RoCE connection knows.
            _ => Err(libc::EINVAL),
        }
    }

    /// Something has happened to a connection.
    pub(super) fn comm_event(&mut self, now: Time, event: cm::Event) {
        use cm::EventKind as Kind;
        let comm = event.comm_id;
        let kind = match event.kind {
            Kind::Request(request) => return self.request_came(now, comm, Asks::Connection(request)),
            Kind::SidrRequest(request) => return self.request_came(now, comm, Asks::Datagram(request)),
            kind => kind,
        };
        let Some(&id) = self.comms.get(&comm) else {
            return self.leave_lobby(now, comm);
        };
        self.touch(id);
        let expected = match kind {
            Kind::TimewaitExit => State::Disconnect,
            _ => State::Connect,
        };
        if self.entry(id).kept.state != expected {
            return;
        }
        match &kind {
            // The last one changes the keepsake alone.
            Kind::Request(_) | Kind::SidrRequest(_) | Kind::Delayed { .. } | Kind::Stale => {}
            Kind::Reply(reply) => self.reply_came(id, comm, reply),
            Kind::Ready { .. } | Kind::Established => self.tell(id, EventKind::Established, 0),
            Kind::Rejected(rejection) => {
                let details = Details::Connection(Parameters {
                    private_data: rejection.message.private_data.to_vec(),
                    ..Parameters::default()
                });
                let status = rejection.reason.0.into();
                self.tell_more(id, EventKind::Rejected, status, details, Ece::default());
            }
            Kind::RequestTimeout | Kind::ReplyTimeout | Kind::SidrTimeout => {
                self.tell(id, EventKind::Unreachable, -libc::ETIMEDOUT);
            }
            Kind::DisconnectRequested { .. } | Kind::Disconnected { .. } => self.ended(id, 0),
            Kind::DisconnectTimeout => self.ended(id, -libc::ETIMEDOUT),
            Kind::TimewaitExit => self.tell(id, EventKind::TimewaitExit, 0),
            Kind::SidrReply(reply) => self.sidr_reply_came(id, reply),
        }
    }

    fn reply_came(&mut self, id: Handle, comm: CommId, reply: &cm::Reply) {
        // A duplicate says that the peer has waited long: it is asked for patience.
        let _ = self.cm.delay_when_asked(comm, SERVICE_TIMEOUT);
        let message = &reply.message;
        self.entry_mut(id).kept.remote_qpn = reply.qpn;
        let details = Details::Connection(Parameters {
            qpn: reply.qpn,
            qkey: 0,
            private_data: message.private_data.to_vec(),
            responder_resources: message.initiator_depth,
            initiator_depth: message.responder_resources,
            flow_control: message.end_to_end_flow_control,
            retry_count: 0,
            rnr_retry_count: message.rnr_retry_count,
            srq: message.srq,
        });
        // The program, or librdmacm for it, brings the queue pair up and accepts the reply.
        let ece = ece_for_program(reply.ece);
        self.tell_more(id, EventKind::ConnectResponse, 0, details, ece);
    }

    fn ended(&mut self, id: Handle, status: i32) {
        self.entry_mut(id).kept.state = State::Disconnect;
        self.tell(id, EventKind::Disconnected, status);
    }

    /// The connection belongs to the id from now on.
    pub(super) fn connect_comm(&mut self, id: Handle, comm: CommId) {
        self.comms.insert(comm, id);
        self.entry_mut(id).comm = Some(comm);
    }

    /// Tells the program of an event without details.
    pub(super) fn tell(&mut self, id: Handle, kind: EventKind, status: i32) {
        self.tell_more(id, kind, status, Details::None, Ece::default());
    }

    /// Tells the program of an event, unless it does not know the id yet: then its accept fails.
    pub(super) fn tell_more(&mut self, id: Handle, kind: EventKind, status: i32, details: Details, ece: Ece) {
        let entry = self.entry(id);
        if entry.kept.known {
            let event = Event {
                id: id.number,
                kind,
                status,
                details,
                ece,
                new_id: None,
                membership: None,
            };
            self.push_event(id.session, event);
        }
    }
}

/// The program's private data, behind the header that names the ends unless these are of InfiniBand's own family.
///
/// # Errors
/// EINVAL: more than `room` bytes.
pub(super) fn with_header(kept: &Kept, private_data: &[u8], room: usize) -> Result<Vec<u8>, Errno> {
    if data_offset(kept) + private_data.len() > room {
        return Err(libc::EINVAL);
    }
    let mut bytes = match (kept.source, kept.dest) {
        (Some(Address::Ip(source)), Some(Address::Ip(dest))) => {
            let dest = match (dest.ip(), &kept.path) {
                // What means this host is, to who listens, the address by which it was reached.
                (ip, Some(path)) if ip.is_unspecified() || ip.is_loopback() => Gid(path.dest_gid).to_ip(),
                (ip, _) => ip,
            };
            let header = IpHeader {
                src_port: source.port(),
                addrs: IpPair::new(source.ip(), dest).ok_or(libc::EINVAL)?,
            };
            header.to_bytes().to_vec()
        }
        _ => Vec::new(),
    };
    bytes.extend_from_slice(private_data);
    Ok(bytes)
}

pub(super) fn ece_for_peer(ece: Ece) -> cm::Ece {
    cm::Ece {
        vendor_id: ece.vendor_id & 0xff_ffff,
        attribute_modifier: ece.attr_mod,
    }
}

pub(super) fn ece_for_program(ece: cm::Ece) -> Ece {
    Ece {
        vendor_id: ece.vendor_id,
        attr_mod: ece.attribute_modifier,
    }
}
