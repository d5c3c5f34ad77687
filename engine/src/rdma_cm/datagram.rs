//! Datagram services: asking for one's queue pair by SIDR, and telling it.

use ferroce_wire::cm::SidrStatus;
use ferroce_wire::cm::ip_header::UDP_QKEY;

use super::connect::{MAX_RETRIES, RESPONSE_TIMEOUT, ece_for_peer, ece_for_program, with_header};
use super::id::Kept;
use super::{
    Address, AddressVector, DatagramParameters, Details, Ece, Errno, EventKind, Handle, Parameters,
    PathRecord, PortSpace, RdmaCm,
};
use crate::cm::{CommId, SidrParameters, SidrReply, SidrReplyParameters};
use crate::time::Time;

/// Bytes of private data of a SIDR_REQ.
const SIDR_REQ_DATA: usize = 216;

impl RdmaCm {
    /// Asks for the queue pair of the service at the id's destination.
    pub(super) fn ask_datagram(
        &mut self,
        now: Time,
        id: Handle,
        parameters: &Parameters,
    ) -> Result<CommId, Errno> {
        let kept = &self.entry(id).kept;
        let path = kept.path.ok_or(libc::EINVAL)?;
        let request = SidrParameters {
            way: self.way_along(kept, &path)?,
            service_id: self.service_of(kept),
            pkey: super::resolve::PKEY,
            timeout_ms: 1 << (RESPONSE_TIMEOUT - 8),
            max_cm_retries: MAX_RETRIES,
            private_data: with_header(kept, &parameters.private_data, SIDR_REQ_DATA)?,
        };
        self.cm.sidr_request(now, &request)
    }

    /// Tells who asked the queue pair.
    pub(super) fn accept_datagram(
        &mut self,
        now: Time,
        id: Handle,
        comm: CommId,
        parameters: Option<&Parameters>,
        ece: Ece,
    ) -> Result<(), Errno> {
        let kept = &mut self.entry_mut(id).kept;
        // As in the kernel, only addresses of InfiniBand's own family come with a Q_Key of the program's choice.
        let asked = match kept.source {
            Some(Address::Ib(_)) => parameters.map_or(0, |parameters| parameters.qkey),
            _ => 0,
        };
        if asked == 0 {
            kept.set_default_qkey();
        } else {
            kept.set_qkey(asked)?;
        }
        let reply = SidrReplyParameters {
            status: SidrStatus::SUCCESS,
            qpn: kept.qpn,
            qkey: kept.qkey,
            ece: ece_for_peer(ece),
            info: Vec::new(),
            private_data: parameters.map_or_else(Vec::new, |parameters| parameters.private_data.clone()),
        };
        self.cm.sidr_reply(now, comm, &reply)
    }

    /// The service has answered.
    pub(super) fn sidr_reply_came(&mut self, id: Handle, reply: &SidrReply) {
        let message = &reply.message;
        let mut datagram = DatagramParameters {
            private_data: message.private_data.to_vec(),
            ..DatagramParameters::default()
        };
        let ece = ece_for_program(reply.ece);
        let (kind, status) = if message.status != SidrStatus::SUCCESS {
            (EventKind::Unreachable, i32::from(message.status.0))
        } else if let Err(errno) = self.entry_mut(id).kept.set_qkey(message.qkey) {
            (EventKind::AddressError, -errno)
        } else {
            let kept = &mut self.entry_mut(id).kept;
            kept.remote_qpn = message.qpn;
            datagram.qpn = message.qpn;
            datagram.qkey = message.qkey;
            let kept = &self.entry(id).kept;
            if let Some(path) = &kept.path {
                datagram.address = self.address_along(kept, path);
            }
            (EventKind::Established, 0)
        };
        self.tell_more(id, kind, status, Details::Datagram(datagram), ece);
    }

    /// The address vector along a path record.
    pub(super) fn address_along(&self, kept: &Kept, path: &PathRecord) -> AddressVector {
        let source = ferroce_wire::gid::Gid(path.source_gid).to_ip();
        AddressVector {
            dest_gid: path.dest_gid,
            source_index: self
                .device_of(kept)
                .and_then(|device| super::bind::gid_index(device, source))
                .unwrap_or(0),
            flow_label: path.flow_label,
            hop_limit: path.hop_limit,
            traffic_class: path.traffic_class,
            sl: path.sl,
            rate: path.rate,
            port: super::attributes::PORT,
        }
    }
}

impl Kept {
    /// The Q_Key that datagrams of the port space have by default.
    pub(super) fn set_default_qkey(&mut self) {
        if matches!(self.port_space, PortSpace::Udp | PortSpace::Ib) {
            self.qkey = UDP_QKEY;
        }
    }

    /// Sets the Q_Key, once.
    fn set_qkey(&mut self, qkey: u32) -> Result<(), Errno> {
        if qkey == 0 || (self.qkey != 0 && self.qkey != qkey) {
            return Err(libc::EINVAL);
        }
        self.qkey = qkey;
        Ok(())
    }
}
