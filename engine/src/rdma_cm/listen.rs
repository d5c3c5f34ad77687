//! Listeners, and the requests that come to them.

use ferroce_wire::cm::{IpHeader, RejReason};
use std::net::{IpAddr, SocketAddr};

use super::address::Family;
use super::bind::gid_index;
use super::id::{Kept, State};
use super::lobby::Asks;
use super::resolve::bound;
use super::{
    Address, DatagramParameters, Details, Errno, Event, EventKind, Handle, IbAddress, Parameters, PathRecord,
    PortSpace, QpKind, RdmaCm,
};
use crate::cm::{CommId, Request, SidrReplyParameters, SidrRequest, Transport, Way};
use crate::time::Time;

/// Most requests that a listener holds for its program (`net.rdma_ucm.max_backlog`).
pub(super) const MAX_BACKLOG: u32 = 1024;
/// What an MRA asks for: 4.096 us x 2^24, 69 s, for a program to decide (`CMA_CM_MRA_SETTING`).
pub(super) const SERVICE_TIMEOUT: u8 = 24;

/// What a request says about who asks whom.
struct Asked {
    space: PortSpace,
    port: u16,
    /// Whether there is an IP header, good or bad.
    is_ip: bool,
    /// `None`: what comes has no IP header, as the requests of InfiniBand's own address family.
    header: Option<IpHeader>,
    /// The kind of the new id's queue pair.
    qp_kind: QpKind,
}

/// Why a request finds no id.
pub(super) enum Miss {
    /// There is no such service.
    Service,
    /// Nobody listens at the port.
    Listener,
    /// Who listens there does so at other addresses.
    Address,
    /// It is none that who listens would take.
    Unwanted,
    /// There is no room: the peer will ask again.
    NoRoom,
}

impl RdmaCm {
    /// LISTEN.
    pub(super) fn listen(&mut self, now: Time, id: Handle, backlog: i32) -> Result<(), Errno> {
        if self.own(id)?.kept.state != State::Bound {
            let any = Address::Ip(SocketAddr::new(IpAddr::V4(std::net::Ipv4Addr::UNSPECIFIED), 0));
            self.bind_to(id, any, None)?;
        }
        let kept = &self.entry(id).kept;
        if kept.reuse_address
            && let (Some(space), Some(source)) = (kept.owns_port, kept.source)
        {
            // A listener has its address for itself.
            self.check_port(id, space, source.port(), false)?;
            self.entry_mut(id).kept.reuse_address = false;
        }
        let kept = &mut self.entry_mut(id).kept;
        kept.state = State::Listen;
        kept.backlog = u32::try_from(backlog)
            .ok()
            .filter(|backlog| (1..MAX_BACKLOG).contains(backlog))
            .unwrap_or(MAX_BACKLOG);
        let (owned, source) = (kept.owns_port, kept.source);
        if let (Some(space), Some(source)) = (owned, source) {
            self.offer_waiting(now, space, source.port());
        }
        Ok(())
    }

    /// The program has got the request.
    pub(super) fn taken(&mut self, id: Handle) -> Result<(), Errno> {
        self.own_any(id)?;
        if let Some(listener) = self.entry_mut(id).kept.listener.take() {
            let listener = Handle::new(id.session, listener);
            self.requests.remove(&(listener, id));
            if let Some(entry) = self.ids.get_mut(&listener) {
                entry.kept.backlog = (entry.kept.backlog + 1).min(MAX_BACKLOG);
                self.touch(listener);
            }
            self.touch(id);
        }
        Ok(())
    }

    /// Gives a request to who listens for it.
    pub(super) fn offer(&mut self, comm: CommId, asks: &Asks) -> Result<(), Miss> {
        let (space, port) = asks.service().ok_or(Miss::Service)?;
        match asks {
            Asks::Connection(request) => self.offer_connection(comm, request, space, port),
            Asks::Datagram(request) => self.offer_datagram(comm, request, space, port),
        }
    }

    fn offer_connection(
        &mut self,
        comm: CommId,
        request: &Request,
        space: PortSpace,
        port: u16,
    ) -> Result<(), Miss> {
        let message = &request.message;
        let asked = Asked {
            space,
            port,
            is_ip: is_ip_version(&message.private_data),
            header: IpHeader::parse(&message.private_data).ok(),
            qp_kind: match request.transport {
                Transport::Rc => QpKind::Rc,
                Transport::Uc => QpKind::Uc,
                Transport::Xrc => QpKind::XrcTarget,
            },
        };
        let (listener, mut kept) = self.admit(&asked, &request.way)?;
        let path = &message.primary;
        kept.path = Some(PathRecord {
            dest_gid: path.local_gid.0,
            source_gid: path.remote_gid.0,
            service_id: message.service_id,
            flow_label: path.flow_label,
            hop_limit: path.hop_limit,
            traffic_class: path.traffic_class,
            pkey: message.pkey,
            sl: path.sl,
            mtu: message.path_mtu,
            rate: path.packet_rate,
            packet_life_time: path.local_ack_timeout.saturating_sub(1),
        });
        if self.is_of_ib(listener) {
            name_ends(&mut kept, message.service_id);
        }
        kept.remote_qpn = message.local_qpn;
        let offset = data_offset(&self.entry(listener).kept);
        let details = Details::Connection(Parameters {
            qpn: message.local_qpn,
            qkey: 0,
            private_data: message.private_data[offset..].to_vec(),
            responder_resources: message.initiator_depth,
            initiator_depth: message.responder_resources,
            flow_control: message.end_to_end_flow_control,
            retry_count: message.retry_count,
            rnr_retry_count: message.rnr_retry_count,
            srq: message.srq,
        });
        self.present(listener, kept, comm, details, request.ece);
        // A duplicate says that the peer has waited long: it is asked for patience.
        let _ = self.cm.delay_when_asked(comm, SERVICE_TIMEOUT);
        Ok(())
    }

    fn offer_datagram(
        &mut self,
        comm: CommId,
        request: &SidrRequest,
        space: PortSpace,
        port: u16,
    ) -> Result<(), Miss> {
        let message = &request.message;
        let asked = Asked {
            space,
            port,
            is_ip: is_ip_version(&message.private_data),
            header: IpHeader::parse(&message.private_data).ok(),
            qp_kind: QpKind::Ud,
        };
        let (listener, mut kept) = self.admit(&asked, &request.way)?;
        if self.is_of_ib(listener) {
            kept.source = self.entry(listener).kept.source;
            kept.dest = None;
        }
        let offset = data_offset(&self.entry(listener).kept);
        let details = Details::Datagram(DatagramParameters {
            private_data: message.private_data[offset..].to_vec(),
            ..DatagramParameters::default()
        });
        self.present(listener, kept, comm, details, crate::cm::Ece::default());
        Ok(())
    }

    /// Answers a request that nobody takes, or leaves it unanswered, so that it comes again.
    pub(super) fn turn_away(&mut self, now: Time, comm: CommId, asks: &Asks, miss: Miss) {
        match (asks, miss) {
            (_, Miss::Service | Miss::Listener) => {
                self.cm.refuse(now, comm, RejReason::INVALID_SERVICE_ID);
            }
            (Asks::Connection(_), Miss::Address | Miss::Unwanted) => {
                let _ = self.cm.reject(now, comm, RejReason::CONSUMER_DEFINED, &[], &[]);
                self.cm.destroy(now, comm);
            }
            (Asks::Connection(_), Miss::NoRoom) => {
                self.backlog_full += 1;
                self.cm.forget(comm);
            }
            (Asks::Datagram(_), Miss::Address | Miss::Unwanted | Miss::NoRoom) => {
                let reply = SidrReplyParameters {
                    status: ferroce_wire::cm::SidrStatus::REJECTED,
                    ..SidrReplyParameters::default()
                };
                let _ = self.cm.sidr_reply(now, comm, &reply);
                self.cm.destroy(now, comm);
            }
        }
    }

    /// The listener for a request, and what the new id is to be.
    fn admit(&self, asked: &Asked, way: &Way) -> Result<(Handle, Kept), Miss> {
        let device = self
            .devices
            .iter()
            .find(|device| device.name == way.device)
            .ok_or(Miss::Service)?;
        let mut listeners = self.ports.owners(asked.space, asked.port).filter(|id| {
            let kept = &self.entry(*id).kept;
            kept.state == State::Listen
                && kept
                    .bound
                    .as_ref()
                    .is_none_or(|bound| bound.device == device.name)
        });
        let first = listeners.next().ok_or(Miss::Listener)?;
        if asked.is_ip && asked.header.is_none() {
            return Err(Miss::Unwanted);
        }
        let listener = std::iter::once(first)
            .chain(listeners)
            .find(|id| self.takes(&self.entry(*id).kept, asked, device.ifindex))
            .ok_or(Miss::Address)?;
        let entry = self.entry(listener);
        let theirs = &entry.kept;
        if theirs.qp_kind != asked.qp_kind {
            return Err(Miss::Unwanted);
        }
        let mut kept = Kept::new(theirs.port_space, asked.qp_kind, 0);
        kept.state = State::Connect;
        kept.known = false;
        kept.listener = Some(listener.number);
        kept.bound = Some(bound(device));
        kept.ifindex = device.ifindex;
        if let Some(header) = &asked.header {
            // The address asked for is the device's, and the peer's is one that may be answered.
            let (ours, theirs) = (header.addrs.dst(), header.addrs.src());
            if gid_index(device, ours).is_none()
                || theirs.is_multicast()
                || theirs.is_unspecified()
                || (theirs.is_loopback() && !device.lo)
            {
                return Err(Miss::Unwanted);
            }
            kept.source = Some(Address::Ip(SocketAddr::new(ours, asked.port)));
            kept.dest = Some(Address::Ip(SocketAddr::new(theirs, header.src_port)));
        }
        if theirs.backlog == 0 || !self.has_room(listener.session) {
            return Err(Miss::NoRoom);
        }
        Ok((listener, kept))
    }

    /// Whether a listener is bound to an address of InfiniBand's own family.
    fn is_of_ib(&self, listener: Handle) -> bool {
        matches!(self.entry(listener).kept.source, Some(Address::Ib(_)))
    }

    /// Whether a listener is for what the request names (`cma_match_private_data`, `cma_match_net_dev`).
    fn takes(&self, kept: &Kept, asked: &Asked, ifindex: u32) -> bool {
        let Some(source) = kept.source else { return false };
        let Some(header) = &asked.header else {
            return source.family() == Family::Ib;
        };
        let wanted = header.addrs.dst();
        let any = self.is_any(&source);
        let named = if any && !kept.family_only {
            true
        } else {
            match source {
                Address::Ip(source) => source.is_ipv4() == wanted.is_ipv4() && (any || source.ip() == wanted),
                Address::Ib(_) => true,
            }
        };
        let link_local = matches!(wanted, IpAddr::V6(ip) if ip.is_unicast_link_local());
        named && (!link_local || kept.ifindex == 0 || kept.ifindex == ifindex)
    }

    /// Makes the id of a request, and tells the listener's program.
    fn present(
        &mut self,
        listener: Handle,
        mut kept: Kept,
        comm: CommId,
        details: Details,
        ece: crate::cm::Ece,
    ) {
        kept.psn = self.random() as u32 & 0xff_ffff;
        let entry = self.entry_mut(listener);
        entry.kept.backlog -= 1;
        self.touch(listener);
        let new_id = self.add(listener.session, kept);
        self.connect_comm(new_id, comm);
        self.push_event(
            listener.session,
            Event {
                id: listener.number,
                kind: EventKind::ConnectRequest,
                status: 0,
                details,
                ece: super::connect::ece_for_program(ece),
                new_id: Some(new_id.number),
                membership: None,
            },
        );
    }
}

/// Whether private data begins with an IP header, good or bad: those of InfiniBand's own address family do not.
fn is_ip_version(private_data: &[u8]) -> bool {
    private_data[0] != 0 || matches!(private_data[1] >> 4, 4 | 6)
}

/// Where the program's own private data begins.
pub(super) fn data_offset(kept: &Kept) -> usize {
    match kept.source {
        Some(Address::Ib(_)) => 0,
        _ => IpHeader::LEN,
    }
}

/// The ends of a connection between addresses of InfiniBand's own family.
fn name_ends(kept: &mut Kept, service_id: u64) {
    let Some(path) = kept.path else { return };
    let end = |gid, service_id, service_mask| {
        Some(Address::Ib(IbAddress {
            pkey: path.pkey,
            flow_info: path.flow_label,
            gid,
            service_id,
            service_mask,
            scope_id: 0,
        }))
    };
    kept.source = end(path.source_gid, service_id, u64::MAX);
    kept.dest = end(path.dest_gid, 0, 0);
}
