//! Devices in XDP mode: adding them, leasing their seats, and going on with those of an earlier daemon.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use ferroce_engine::control::protocol::XdpOptions;
use ferroce_engine::control::{DeviceInfo, LinkMode, Refusal};
use tracing::{info, warn};

use super::super::connection::Connection;
use super::super::devices::Change;
use super::super::xdp::device::XdpDevice;
use super::super::xdp::plan;
use super::Server;
use crate::netlink;

impl Server {
    /// Puts an interface into XDP mode, in place of the device that it has by itself. Gives what the user should know.
    pub(super) fn add_xdp(
        &mut self,
        id: u32,
        name: &str,
        netdev: &str,
        options: &XdpOptions,
    ) -> Result<Vec<String>, Refusal> {
        self.connections
            .get(&id)
            .map_or(Ok(()), Connection::check_owner)?;
        // Nobody tells when XDP programs come and go.
        match netlink::interfaces() {
            Ok(interfaces) => self.follow(interfaces),
            Err(error) => return Err(Refusal::Failed(format!("interfaces can't be read: {error}"))),
        }
        let leases = |device: &str| self.holders(device).len();
        let (ifindex, interface) = self.devices.place_for_xdp(name, netdev, leases)?;
        plan::check(interface, self.devices.interfaces())?;
        let (mut device, notes) = XdpDevice::create(name, ifindex, interface, options)?;
        device
            .set_slots(|slot| self.is_used(slot))
            .map_err(|error| Refusal::Failed(format!("XDP mode on {netdev}: {error}")))?;
        let mode = device.record().info;
        info!(device = name, netdev, ?mode, "interface is in XDP mode");
        for note in &notes {
            info!(device = name, "{note}");
        }
        self.keep_xdp(device);
        for change in self.devices.add_xdp(name, ifindex, mode) {
            self.announce(&change);
        }
        Ok(notes)
    }

    /// Whether some program has the slot.
    fn is_used(&self, slot: u8) -> bool {
        let leased = |connection: &Connection| connection.lease.as_ref().is_some_and(|it| it.slot == slot);
        self.presumed.contains(&slot) || self.connections.values().any(leased)
    }

    /// What a change of a device is for XDP mode.
    pub(super) fn follow_xdp(&mut self, change: &Change) {
        match change {
            Change::Added(info) | Change::Changed(info) => {
                let Some(device) = self.xdp.get_mut(&info.name) else {
                    return;
                };
                let addresses: BTreeSet<IpAddr> =
                    info.gids.iter().flatten().map(|entry| entry.addr).collect();
                let addresses: Vec<IpAddr> = addresses.into_iter().collect();
                if let Err(error) = device.set_addresses(&addresses) {
                    warn!(device = info.name, %error, "RoCE packets to some addresses go to the kernel");
                }
            }
            Change::Removed(info) => {
                if matches!(info.mode, LinkMode::Xdp(_)) {
                    self.end_xdp(&info.name);
                }
            }
        }
    }

    fn keep_xdp(&mut self, device: XdpDevice) {
        self.hops.add(device.record().ifindex, Arc::clone(device.port()));
        self.xdp.insert(device.record().name.clone(), device);
    }

    /// The interface goes back to what it was.
    fn end_xdp(&mut self, name: &str) {
        if let Some(device) = self.xdp.remove(name) {
            self.hops.remove(device.record().ifindex);
            device.end_mode();
        }
    }

    /// Finds out where frames go, for a program that has a seat.
    pub(super) fn next_hop(&mut self, id: u32, source: IpAddr, dest: IpAddr) {
        let lease = self.connections.get(&id).and_then(|it| it.lease.as_ref());
        let device = lease
            .and_then(|lease| Some((lease.slot, self.xdp.get(&lease.device)?)))
            .filter(|(slot, device)| device.has_seat(*slot));
        // Of others it is nonsense, and harmless.
        if let Some((_, device)) = device {
            self.hops.ask(device.record().ifindex, source, dest, id);
        }
    }

    /// Takes news of routes and neighbours.
    pub(in super::super) fn hops_news(&mut self) {
        if let Err(error) = self.hops.news() {
            warn!(%error, "news of routes and neighbours can't be read");
        }
    }

    /// Takes a seat for a slot, if the device is in XDP mode; on others, their packets are the kernel's.
    pub(super) fn take_seat(&mut self, device: &str, slot: u8) -> Result<Option<u16>, Refusal> {
        let seat = match self.xdp.get_mut(device) {
            Some(device) => Some(device.lease(slot)?),
            None => None,
        };
        for (name, other) in &mut self.xdp {
            if name != device {
                other.leave_to_kernel(slot);
            }
        }
        Ok(seat)
    }

    /// The slot is nobody's any more.
    pub(super) fn end_seats(&mut self, slot: u8) {
        for device in self.xdp.values_mut() {
            device.end(slot);
        }
    }

    /// The mode of a device that a program of an earlier daemon has, and which has this slot. The first program of a
    /// device in XDP mode brings all of it along.
    pub(super) fn restore_mode(
        &mut self,
        earlier: &DeviceInfo,
        slot: u8,
        heirloom: Option<&OwnedFd>,
    ) -> Result<LinkMode, Refusal> {
        if earlier.mode == LinkMode::Udp {
            // Whoever says so of a slot with a seat, or of the interface, lies or comes too late.
            let is_xdp =
                |device: &XdpDevice| device.has_seat(slot) || device.record().ifindex == earlier.ifindex;
            return if self.xdp.values().any(is_xdp) {
                Err(Refusal::UnknownLease)
            } else {
                Ok(LinkMode::Udp)
            };
        }
        if !self.devices.interfaces().contains_key(&earlier.ifindex) {
            return Err(Refusal::UnknownDevice {
                name: earlier.name.clone(),
            });
        }
        if !self.xdp.contains_key(&earlier.name) {
            let heirloom = heirloom.and_then(|fd| fd.try_clone().ok());
            let device = self.inherit(earlier, heirloom.ok_or(Refusal::UnknownLease)?)?;
            self.keep_xdp(device);
        }
        let device = self.xdp.get(&earlier.name).filter(|it| it.has_seat(slot));
        device
            .map(|device| LinkMode::Xdp(device.record().info))
            .ok_or(Refusal::UnknownLease)
    }

    fn inherit(&self, earlier: &DeviceInfo, heirloom: OwnedFd) -> Result<XdpDevice, Refusal> {
        let lost = |error: &dyn std::fmt::Display| {
            warn!(device = earlier.name, %error, "XDP mode can't be taken over");
            Refusal::UnknownLease
        };
        let mut device = XdpDevice::inherit(heirloom).map_err(|error| lost(&error))?;
        let record = device.record();
        if record.name != earlier.name || record.ifindex != earlier.ifindex {
            return Err(lost(&"it is of another device"));
        }
        if self.xdp.values().any(|it| it.record().ifindex == record.ifindex) {
            return Err(lost(&"the interface has a device in XDP mode already"));
        }
        device
            .set_slots(|slot| self.is_used(slot))
            .map_err(|error| lost(&error))?;
        info!(device = earlier.name, mode = ?device.record().info, "XDP mode goes on");
        Ok(device)
    }

    /// Forgets a port that was inherited, if its device could not be restored: its programs go on without us.
    pub(super) fn forget_port_without_device(&mut self, name: &str) {
        let in_use = self
            .devices
            .get(name)
            .is_some_and(|info| matches!(info.mode, LinkMode::Xdp(_)));
        if !in_use && let Some(device) = self.xdp.remove(name) {
            self.hops.remove(device.record().ifindex);
        }
    }
}
