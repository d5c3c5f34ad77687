//! Attaching QPs to multicast groups, which the link joins while any QP wants them.

use std::io;
use std::net::IpAddr;

use ferroce_wire::Gid;

use super::Session;
use crate::control::DeviceInfo;
use crate::device::Others;
use crate::verbs::VerbsError;

/// The address that packets to a group of the other IP version than the GID wanted leave from.
pub(super) fn source(info: &DeviceInfo, group: IpAddr) -> Option<IpAddr> {
    let mut addresses = info.gids.iter().flatten().map(|entry| entry.addr);
    addresses.find(|address| address.is_ipv4() == group.is_ipv4())
}

impl Session<'_> {
    /// Attaches a UD QP to the group of a multicast GID. EINVAL: no such GID, or no UD QP; ENOMEM: too many groups.
    pub fn attach_multicast(&mut self, qpn: u32, mgid: Gid) -> Result<(), VerbsError> {
        let group = mgid.multicast_group().ok_or(VerbsError::Invalid)?;
        if self.core.device.attach_multicast(qpn, group)? == Others::Some {
            return Ok(());
        }
        let ifindex = self.shared.info.read().ifindex;
        self.core.link_mut().join(group, ifindex).map_err(|error| {
            tracing::warn!("multicast group {group} can't be joined: {error}");
            // It was attached just now.
            _ = self.core.device.detach_multicast(qpn, group);
            refusal(&error)
        })
    }

    /// Detaches a QP from the group of a multicast GID. EINVAL if it is not attached.
    pub fn detach_multicast(&mut self, qpn: u32, mgid: Gid) -> Result<(), VerbsError> {
        let group = mgid.multicast_group().ok_or(VerbsError::Invalid)?;
        if self.core.device.detach_multicast(qpn, group)? == Others::None
            && let Err(error) = self.core.link_mut().leave(group)
        {
            // The interface is gone, and all its groups with it.
            tracing::debug!("multicast group {group} can't be left: {error}");
        }
        Ok(())
    }
}

/// What a program sees of a refused join.
fn refusal(error: &io::Error) -> VerbsError {
    match error.raw_os_error() {
        Some(libc::ENOBUFS | libc::ENOMEM) => VerbsError::NoMemory,
        Some(libc::ENODEV) => VerbsError::Gone,
        _ => VerbsError::Invalid,
    }
}
