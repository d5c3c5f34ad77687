//! Devices that come, change and go.

use super::id::State;
use super::{EventKind, Handle, RdmaCm};
use crate::control::DeviceInfo;

impl RdmaCm {
    /// Takes the devices as they are now.
    pub(super) fn devices_changed(&mut self, devices: &[DeviceInfo]) {
        let before = std::mem::replace(&mut self.devices, devices.to_vec());
        let is_now = |was: &DeviceInfo| {
            devices
                .iter()
                .find(|device| device.name == was.name && device.guid == was.guid)
        };
        for was in &before {
            match is_now(was) {
                None => {
                    for id in self.bound_to(was) {
                        self.device_removed(id);
                    }
                }
                // The interface has another address, as when a bond fails over.
                Some(device) if device.mac != was.mac => {
                    for id in self.bound_to(was) {
                        self.tell(id, EventKind::AddressChange, 0);
                    }
                }
                Some(device) if device.ifindex != was.ifindex => {
                    for id in self.bound_to(was) {
                        self.touch(id);
                        self.entry_mut(id).kept.ifindex = device.ifindex;
                    }
                }
                Some(_) => {}
            }
        }
    }

    /// The ids of a device, but for those that have lost theirs before. The requests of a listener that is bound to the
    /// device are bound to it as well.
    fn bound_to(&self, device: &DeviceInfo) -> Vec<Handle> {
        self.ids
            .iter()
            .filter(|(_, entry)| {
                entry.kept.state != State::Removed
                    && entry
                        .kept
                        .bound
                        .as_ref()
                        .is_some_and(|bound| bound.device == device.name && bound.guid == device.guid)
            })
            .map(|(id, _)| *id)
            .collect()
    }

    /// All that is left of an id is its number: the program is to destroy it.
    fn device_removed(&mut self, id: Handle) {
        self.touch(id);
        // There is no device to send anything from.
        if let Some(comm) = self.entry_mut(id).comm.take() {
            self.comms.remove(&comm);
            self.cm.forget(comm);
        }
        self.lose(id);
        self.entry_mut(id).kept.state = State::Removed;
        self.tell(id, EventKind::DeviceRemoval, 0);
    }
}
