//! Multicast groups: which QPs get a copy of what is sent to each.

use std::cell::Cell;
use std::net::IpAddr;

use ferroce_wire::RocePacket;
use ferroce_wire::bth::MULTICAST_QPN;

use super::Device;
use super::objects::room;
use crate::link::{IcrcCheck, RxPacket};
use crate::time::Time;
use crate::verbs::{QpType, VerbsError};

/// Whether a group has other QPs than the one that was attached or detached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Others {
    /// None: the link has to join or leave it.
    None,
    /// Some, or nothing was changed.
    Some,
}

impl Device {
    /// Attaches a UD QP to a group, from which it then gets a copy of each packet. Once is enough: again changes nothing.
    /// EINVAL: no UD QP; ENOMEM: too many groups, or QPs of one.
    pub fn attach_multicast(&mut self, qpn: u32, group: IpAddr) -> Result<Others, VerbsError> {
        self.alive()?;
        let qp = self.qps.get_mut(qpn).ok_or(VerbsError::NotFound)?;
        if qp.init.qp_type != QpType::Ud || !group.is_multicast() {
            return Err(VerbsError::Invalid);
        }
        if !self.groups.contains_key(&group) {
            room(self.groups.len(), self.limits.max_mcast_grp)?;
        }
        let members = self.groups.entry(group).or_default();
        if members.contains(&qpn) {
            return Ok(Others::Some);
        }
        room(members.len(), self.limits.max_mcast_qp_attach)?;
        members.push(qpn);
        qp.groups += 1;
        Ok(if members.len() == 1 {
            Others::None
        } else {
            Others::Some
        })
    }

    /// Detaches a QP from a group. EINVAL if it is not attached.
    pub fn detach_multicast(&mut self, qpn: u32, group: IpAddr) -> Result<Others, VerbsError> {
        let qp = self.qps.get_mut(qpn).ok_or(VerbsError::NotFound)?;
        let members = self.groups.get_mut(&group).ok_or(VerbsError::Invalid)?;
        let at = members.iter().position(|&member| member == qpn);
        members.remove(at.ok_or(VerbsError::Invalid)?);
        qp.groups -= 1;
        if members.is_empty() {
            self.groups.remove(&group);
            return Ok(Others::None);
        }
        Ok(Others::Some)
    }

    /// Takes a packet to a group: each QP attached gets it as if it were its own.
    pub(super) fn receive_multicast(&mut self, now: Time, packet: &RxPacket<'_>, roce: &RocePacket<'_>) {
        let members = match self.groups.get_mut(&packet.dest) {
            Some(members) if roce.bth().dest_qpn == MULTICAST_QPN => std::mem::take(members),
            _ => {
                self.counters.drop_group += 1;
                return;
            }
        };
        let icrc = CheckedOnce {
            check: packet.icrc,
            verdict: Cell::new(None),
        };
        let packet = RxPacket {
            icrc: &icrc,
            ..*packet
        };
        for &qpn in &members {
            if let Ok((qp, mut shared)) = self.qp(now, qpn) {
                qp.receive(&mut shared, &packet, roce);
                self.settle(qpn);
            }
        }
        if let Some(place) = self.groups.get_mut(&packet.dest) {
            *place = members;
        }
    }
}

/// One ICRC for all who get the packet.
struct CheckedOnce<'a> {
    check: &'a dyn IcrcCheck,
    verdict: Cell<Option<bool>>,
}

impl IcrcCheck for CheckedOnce<'_> {
    fn valid(&self, packet: &RxPacket<'_>) -> bool {
        let verdict = self.verdict.get().unwrap_or_else(|| self.check.valid(packet));
        self.verdict.set(Some(verdict));
        verdict
    }
}
