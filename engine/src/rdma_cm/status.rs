//! What `ferroce status` shows of an id.

use super::id::{Identifier, State};
use super::{Handle, IdStatus, RdmaCm};
use crate::cm;

impl RdmaCm {
    pub(super) fn status_of(&self, id: Handle, entry: &Identifier) -> IdStatus {
        let kept = &entry.kept;
        let known = |qpn: u32| Some(qpn).filter(|qpn| *qpn != 0);
        IdStatus {
            id: id.number,
            session: id.session,
            device: kept.bound.as_ref().map(|bound| bound.device.clone()),
            port_space: kept.port_space,
            state: self.state_name(entry).into(),
            source: kept.source,
            dest: kept.dest,
            qpn: known(kept.qpn),
            remote_qpn: known(kept.remote_qpn),
        }
    }

    fn state_name(&self, entry: &Identifier) -> &'static str {
        use cm::State as Comm;
        let comm = entry.comm.and_then(|comm| self.cm.state(comm));
        match entry.kept.state {
            State::Idle => "IDLE",
            State::Bound => "BOUND",
            State::AddressQuery => "RESOLVING",
            State::AddressResolved => "ADDRESS_RESOLVED",
            State::RouteResolved => "ROUTE_RESOLVED",
            State::Listen => "LISTEN",
            State::Removed => "DEVICE_REMOVED",
            State::Connect | State::Disconnect => match comm {
                Some(
                    Comm::ReqSent
                    | Comm::MraReqReceived
                    | Comm::RepReceived
                    | Comm::MraRepSent
                    | Comm::SidrReqSent,
                ) => "CONNECTING",
                Some(Comm::ReqReceived | Comm::MraReqSent | Comm::SidrReqReceived) => "REQUESTED",
                Some(Comm::RepSent | Comm::MraRepReceived) => "ACCEPTING",
                Some(Comm::Established) => "CONNECTED",
                Some(Comm::DreqSent) => "DISCONNECTING",
                Some(Comm::DreqReceived) => "DISCONNECTED",
                Some(Comm::Timewait) => "TIMEWAIT",
                // The exchange of a datagram service is over once the queue pair is known.
                Some(Comm::Idle) | None if entry.kept.is_datagram() && entry.kept.qkey != 0 => "CONNECTED",
                Some(Comm::Idle) | None => "CLOSED",
            },
        }
    }
}
