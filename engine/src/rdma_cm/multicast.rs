//! Multicast groups of an id.

use ferroce_wire::PathMtu;

use super::id::{Membership, State};
use super::resolve::HOP_LIMIT;
use super::{
    Address, AddressVector, DatagramParameters, Details, Ece, Errno, Event, EventKind, Handle, RdmaCm,
};

/// Most groups that an id is in.
pub(super) const MAX_MEMBERSHIPS: usize = 256;
/// The queue pair that a multicast packet names.
const MULTICAST_QPN: u32 = 0xff_ffff;

impl RdmaCm {
    /// JOIN_MCAST. The process joins the group itself, when it attaches its queue pair.
    pub(super) fn join(&mut self, id: Handle, address: Address, send_only: bool) -> Result<Handle, Errno> {
        let kept = &self.own_bound(id)?.kept;
        if !matches!(kept.state, State::Bound | State::AddressResolved) || !kept.is_datagram() {
            return Err(libc::EINVAL);
        }
        let ip = address.ip().ok_or(libc::EOPNOTSUPP)?;
        if ferroce_wire::gid::Gid::from_ip(ip).multicast_group().is_none() {
            return Err(libc::EINVAL);
        }
        let device = self.device_of(kept).ok_or(libc::ENODEV)?;
        PathMtu::from_netdev_mtu(device.mtu as usize).ok_or(libc::EINVAL)?;
        let source_index = kept
            .source
            .and_then(|source| source.ip())
            .and_then(|source| super::bind::gid_index(device, source))
            .unwrap_or(0);
        if !self.has_room(id.session) || kept.memberships.len() >= MAX_MEMBERSHIPS {
            return Err(libc::ENOMEM);
        }
        let vector = AddressVector {
            dest_gid: address.gid(),
            source_index,
            flow_label: 0,
            hop_limit: HOP_LIMIT,
            traffic_class: kept.type_of_service.unwrap_or(0),
            sl: 0,
            rate: 0,
            port: super::attributes::PORT,
        };
        let membership = self.new_handle(id.session);
        self.memberships.insert(membership, id);
        self.hold(id.session, 1);
        let kept = &mut self.entry_mut(id).kept;
        if kept.qkey == 0 {
            kept.set_default_qkey();
        }
        let qkey = kept.qkey;
        kept.memberships
            .insert(membership.number, Membership { address, send_only });
        self.push_event(
            id.session,
            Event {
                id: id.number,
                kind: EventKind::MulticastJoin,
                status: 0,
                details: Details::Datagram(DatagramParameters {
                    qpn: MULTICAST_QPN,
                    qkey,
                    private_data: Vec::new(),
                    address: vector,
                }),
                ece: Ece::default(),
                new_id: None,
                membership: Some(membership.number),
            },
        );
        Ok(membership)
    }

    /// LEAVE_MCAST.
    pub(super) fn leave(&mut self, membership: Handle) -> Result<(), Errno> {
        let id = *self.memberships.get(&membership).ok_or(libc::ENOENT)?;
        self.own_any(id)?;
        self.memberships.remove(&membership);
        self.entry_mut(id).kept.memberships.remove(&membership.number);
        self.hold(id.session, -1);
        self.touch(id);
        Ok(())
    }
}
