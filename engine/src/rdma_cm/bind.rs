//! Binding an id to an address, a device and a port.

use std::net::IpAddr;

use super::address::{Family, space_of_service};
use super::id::{Bound, Kept, State};
use super::ports::{EPHEMERAL, FIRST_UNPRIVILEGED};
use super::{Address, Errno, Handle, PortSpace, RdmaCm};
use crate::control::DeviceInfo;
use crate::link::RoceVersion;

impl RdmaCm {
    /// BIND.
    pub(super) fn bind(&mut self, id: Handle, address: Address) -> Result<(), Errno> {
        let dest = self.own(id)?.kept.dest;
        self.bind_to(id, address, dest)
    }

    /// Binds a new id; `dest` is where it will connect to, if that is known.
    pub(super) fn bind_to(
        &mut self,
        id: Handle,
        address: Address,
        dest: Option<Address>,
    ) -> Result<(), Errno> {
        let kept = &self.entry(id).kept;
        if kept.state != State::Idle {
            return Err(libc::EINVAL);
        }
        let before = kept.clone();
        let bound = self.bind_unchecked(id, address, dest);
        if bound.is_err() {
            // As if it had not been tried; `family_only` of the address family stays away, too.
            self.entry_mut(id).kept = before;
        }
        bound
    }

    fn bind_unchecked(&mut self, id: Handle, address: Address, dest: Option<Address>) -> Result<(), Errno> {
        let mut ifindex = self.entry(id).kept.ifindex;
        if let Some(scope) = address.link_local_scope() {
            if scope == 0 {
                return Err(libc::EINVAL);
            }
            ifindex = scope;
        }
        let mut device = None;
        if !self.is_any(&address) {
            (device, ifindex) = {
                let device = self.device_of_source(&address, ifindex)?;
                (Some(device.clone()), device.ifindex)
            };
            if self.entry(id).kept.port_space == PortSpace::Ipoib {
                return Err(libc::EINVAL);
            }
        }
        let kept = &mut self.entry_mut(id).kept;
        kept.ifindex = ifindex;
        kept.bound = device.map(|device| Bound {
            device: device.name,
            guid: device.guid,
        });
        kept.source = Some(address);
        kept.dest = dest;
        if !kept.family_only_set {
            kept.family_only = address.family() == Family::V4;
        }
        self.get_port(id)?;
        self.entry_mut(id).kept.state = State::Bound;
        Ok(())
    }

    /// Whether an address stands for any: the loopback addresses do where no device has them.
    pub(super) fn is_any(&self, address: &Address) -> bool {
        address.is_unspecified()
            || (address.is_loopback()
                && !address
                    .ip()
                    .is_some_and(|ip| self.devices.iter().any(|device| gid_index(device, ip).is_some())))
    }

    /// The device that has an own address.
    ///
    /// # Errors
    /// EADDRNOTAVAIL: the host has not the address. ENODEV: no device has, or not that of the interface.
    fn device_of_source(&self, address: &Address, ifindex: u32) -> Result<&DeviceInfo, Errno> {
        // RoCE devices have no addresses of InfiniBand's own family.
        let ip = address.ip().ok_or(libc::ENODEV)?;
        self.find_device(ip, ifindex)
            .ok_or(if ifindex == 0 && !self.addresses.contains(&ip) {
                libc::EADDRNOTAVAIL
            } else {
                libc::ENODEV
            })
    }

    /// The device with the address, on the interface unless that is 0.
    pub(super) fn find_device(&self, ip: IpAddr, ifindex: u32) -> Option<&DeviceInfo> {
        self.devices
            .iter()
            .find(|device| (ifindex == 0 || device.ifindex == ifindex) && gid_index(device, ip).is_some())
    }

    /// Gives the id's source a port, that which it names or any.
    fn get_port(&mut self, id: Handle) -> Result<(), Errno> {
        let kept = &mut self.entry_mut(id).kept;
        let space = match &mut kept.source {
            Some(Address::Ib(ib)) => {
                let (space, upper) = space_of_service(kept.port_space, ib.service_id, ib.service_mask)
                    .ok_or(libc::EPROTONOSUPPORT)?;
                ib.service_id = upper | (ib.service_id & ib.service_mask & 0xffff);
                ib.service_mask |= super::address::SPACE_MASK;
                space
            }
            _ => kept.port_space,
        };
        let asked = kept.source.map_or(0, |source| source.port());
        if asked == 0 {
            self.take_any_port(id, space)
        } else {
            self.take_port(id, space, asked)
        }
    }

    fn take_port(&mut self, id: Handle, space: PortSpace, port: u16) -> Result<(), Errno> {
        if port < FIRST_UNPRIVILEGED && !self.is_privileged(id) {
            return Err(libc::EACCES);
        }
        self.check_port(id, space, port, self.entry(id).kept.reuse_address)?;
        self.own_port(id, space, port);
        Ok(())
    }

    fn take_any_port(&mut self, id: Handle, space: PortSpace) -> Result<(), Errno> {
        let (low, high) = (*EPHEMERAL.start(), *EPHEMERAL.end());
        let count = high - low + 1;
        let first = (self.random() % u64::from(count)) as u16;
        let port = (0..count)
            .map(|step| low + ((u32::from(first) + u32::from(step)) % u32::from(count)) as u16)
            .filter(|port| *port != self.ports.last)
            .find(|port| self.is_unique(id, space, *port))
            .ok_or(libc::EADDRNOTAVAIL)?;
        self.ports.last = port;
        self.own_port(id, space, port);
        Ok(())
    }

    /// Notes that the id owns the port of its source.
    pub(super) fn own_port(&mut self, id: Handle, space: PortSpace, port: u16) {
        self.ports.take(space, port, id);
        let kept = &mut self.entry_mut(id).kept;
        kept.owns_port = Some(space);
        if let Some(source) = &mut kept.source {
            source.set_port(port);
        }
    }

    pub(super) fn release_port(&mut self, id: Handle) {
        let kept = &mut self.entry_mut(id).kept;
        if let (Some(space), Some(source)) = (kept.owns_port.take(), kept.source) {
            self.ports.release(space, source.port(), id);
        }
    }

    /// Whether an id may have a port that it names, beside those who have it.
    pub(super) fn check_port(
        &self,
        id: Handle,
        space: PortSpace,
        port: u16,
        reuse: bool,
    ) -> Result<(), Errno> {
        let kept = &self.entry(id).kept;
        self.ports
            .owners(space, port)
            .filter(|other| *other != id)
            .try_for_each(|other| self.fits(kept, &self.entry(other).kept, reuse))
    }

    /// Whether an id may have the port of another.
    pub(super) fn fits(&self, kept: &Kept, theirs: &Kept, reuse: bool) -> Result<(), Errno> {
        let (Some(source), Some(their_source)) = (kept.source, theirs.source) else {
            return Ok(());
        };
        let apart = kept.family_only && theirs.family_only && source.family() != their_source.family();
        if (reuse && theirs.reuse_address) || apart {
            Ok(())
        } else if self.is_any(&source) || self.is_any(&their_source) {
            Err(libc::EADDRNOTAVAIL)
        } else if source.same_host(&their_source) {
            Err(libc::EADDRINUSE)
        } else {
            Ok(())
        }
    }

    /// Whether a port, with own and the peer's addresses, names the id alone: then it may share the port.
    fn is_unique(&self, id: Handle, space: PortSpace, port: u16) -> bool {
        let kept = &self.entry(id).kept;
        self.ports
            .owners(space, port)
            .filter(|other| *other != id)
            .all(|other| self.differs(kept, &self.entry(other).kept))
    }

    /// Whether two ids with one port differ in something else.
    pub(super) fn differs(&self, kept: &Kept, theirs: &Kept) -> bool {
        let hosts_differ = |ours: Option<Address>, theirs: Option<Address>| match (ours, theirs) {
            (Some(ours), Some(theirs)) => {
                !self.is_any(&ours) && !self.is_any(&theirs) && !ours.same_host(&theirs)
            }
            _ => false,
        };
        let port_of = |address: Option<Address>| address.map_or(0, |address| address.port());
        let (port, their_port) = (port_of(kept.dest), port_of(theirs.dest));
        (port != 0 && their_port != 0 && port != their_port)
            || hosts_differ(kept.source, theirs.source)
            || hosts_differ(kept.dest, theirs.dest)
    }
}

/// The index of the device's GID of an address: that of RoCE v2, as there are no connections over v1.
pub(super) fn gid_index(device: &DeviceInfo, ip: IpAddr) -> Option<u8> {
    let index = device
        .gids
        .iter()
        .position(|entry| entry.is_some_and(|entry| entry.version == RoceVersion::V2 && entry.addr == ip))?;
    u8::try_from(index).ok()
}
