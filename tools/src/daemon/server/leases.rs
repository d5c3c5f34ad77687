//! Leases: slots and seats that programs take, give back, or had of an earlier daemon.

use std::collections::BTreeSet;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Instant;

use ferroce_engine::control::{DeviceInfo, LinkMode, Refusal};
use rustix::fs::fstat;
use tracing::{info, warn};

use super::super::connection::{End, LeaseState};
use super::super::port::held_by_others;
use super::{FIRST_SEARCH, Server};

impl Server {
    pub(super) fn lease(&mut self, id: u32, device: &str) -> Result<(), Refusal> {
        let info = self.devices.get(device).ok_or_else(|| Refusal::UnknownDevice {
            name: device.to_owned(),
        })?;
        let info = info.clone();
        let Some(connection) = self.connections.get(&id) else {
            return Ok(());
        };
        if connection.lease.is_some() {
            return Err(Refusal::Failed("one connection holds one lease".to_owned()));
        }
        let (pid, is_owner) = (connection.pid(), connection.is_owner());
        let slot = self.free.take().ok_or(Refusal::SlotTableFull {
            slots: u32::from(self.slots),
        })?;
        let seat = match self.take_seat(device, slot) {
            Ok(seat) => seat,
            Err(refusal) => {
                self.free.give_back(slot);
                return Err(refusal);
            }
        };
        let rx = match self.sockets.accept_traffic(slot) {
            Ok(rx) => rx.try_clone_to_owned(),
            Err(error) => Err(error),
        };
        let rx = match rx {
            Ok(rx) => rx,
            Err(error) => {
                self.take_back(slot);
                return Err(Refusal::Failed(format!("slot {slot}: {error}")));
            }
        };
        info!(slot, seat, device, pid, "leased");
        let heirloom = self.sockets.heirloom().filter(|_| is_owner || seat.is_some());
        let fds: Vec<BorrowedFd<'_>> = std::iter::once(rx.as_fd())
            .chain(
                seat.zip(self.xdp.get(device))
                    .map(|(seat, device)| device.fds(seat))
                    .unwrap_or_default(),
            )
            .chain(heirloom)
            .collect();
        let lease = LeaseState {
            slot,
            device: device.to_owned(),
        };
        let Some(connection) = self.connections.get_mut(&id) else {
            return Ok(());
        };
        if !connection.send_lease(lease, seat, info, &fds) {
            self.drop_connection(id, End::LeaseNotTaken);
        }
        Ok(())
    }

    /// Goes on with a lease of an earlier daemon.
    pub(super) fn resume(
        &mut self,
        id: u32,
        earlier: &DeviceInfo,
        fds: &[OwnedFd],
    ) -> Result<DeviceInfo, Refusal> {
        let slot = fds
            .get(1)
            .and_then(|rx| self.sockets.slot_of(rx))
            .ok_or(Refusal::UnknownLease)?;
        let connection = self.connections.get(&id).ok_or(Refusal::UnknownLease)?;
        // Of devices in UDP mode only owners got what they show: what others tell of these would make devices as they like.
        let is_believed = connection.is_owner() || earlier.mode != LinkMode::Udp;
        if connection.lease.is_some() || !is_believed || !self.presumed.contains(&slot) {
            return Err(Refusal::UnknownLease);
        }
        let mode = self.restore_mode(earlier, slot, fds.get(2))?;
        let leased: BTreeSet<String> = self
            .connections
            .values()
            .filter_map(|it| it.lease.as_ref())
            .map(|lease| lease.device.clone())
            .collect();
        for change in self.devices.restore(earlier, mode, |name| leased.contains(name)) {
            self.announce(&change);
        }
        self.forget_port_without_device(&earlier.name);
        let info = self.devices.get(&earlier.name).cloned();
        let info = info.ok_or_else(|| Refusal::UnknownDevice {
            name: earlier.name.clone(),
        })?;
        if info.mode != mode {
            return Err(Refusal::UnknownLease);
        }
        if let Some(connection) = self.connections.get_mut(&id) {
            info!(slot, device = info.name, pid = connection.pid(), "lease goes on");
            connection.lease = Some(LeaseState {
                slot,
                device: info.name.clone(),
            });
            self.presumed.remove(&slot);
        }
        self.lease_goes_on();
        Ok(info)
    }

    /// The program of a slot may live without a connection: the slot is its own until it is dead, or comes back.
    pub(super) fn presume(&mut self, slot: u8) {
        let soon = Instant::now() + FIRST_SEARCH;
        self.next_search = if self.presumed.is_empty() {
            soon
        } else {
            self.next_search.min(soon)
        };
        self.presumed.insert(slot);
    }

    /// Takes back the slots of programs that are dead, of an earlier daemon or without a connection.
    pub(super) fn search_dead(&mut self) {
        let inode = |slot: u8| {
            self.sockets
                .get(slot)
                .and_then(|socket| fstat(socket).ok())
                .map(|stat| stat.st_ino)
        };
        let slots: Vec<(u8, u64)> = self
            .presumed
            .iter()
            .filter_map(|slot| Some((*slot, inode(*slot)?)))
            .collect();
        let held = held_by_others(&slots.iter().map(|(_, inode)| *inode).collect());
        for (slot, _) in slots.into_iter().filter(|(_, inode)| !held.contains(inode)) {
            info!(slot, "program is dead");
            self.presumed.remove(&slot);
            self.take_back(slot);
        }
    }

    pub(super) fn take_back(&mut self, slot: u8) {
        self.idle_since = Instant::now();
        self.end_seats(slot);
        match self.sockets.reject_traffic(slot) {
            Ok(()) => self.free.give_back(slot),
            // A slot that can't be closed is not leased again.
            Err(error) => warn!(slot, %error, "slot can't be taken back"),
        }
    }
}
