//! Who has which port: the tables of the port spaces.

use std::collections::BTreeMap;

use super::{Handle, PortSpace};

/// Ports that are given out to who does not care (`net.ipv4.ip_local_port_range` as it comes).
pub(super) const EPHEMERAL: std::ops::RangeInclusive<u16> = 32_768..=60_999;
/// Ports below are for the privileged.
pub(super) const FIRST_UNPRIVILEGED: u16 = 1024;

/// The owners of all ports.
#[derive(Debug, Default)]
pub(super) struct Ports {
    owners: BTreeMap<(PortSpace, u16), Vec<Handle>>,
    /// The port given out last: it is not given out again at once.
    pub last: u16,
}

impl Ports {
    /// Who has the port, the latest first.
    pub fn owners(&self, space: PortSpace, port: u16) -> impl Iterator<Item = Handle> + '_ {
        self.owners
            .get(&(space, port))
            .into_iter()
            .flat_map(|ids| ids.iter().rev().copied())
    }

    /// Adds an owner.
    pub fn take(&mut self, space: PortSpace, port: u16, id: Handle) {
        self.owners.entry((space, port)).or_default().push(id);
    }

    /// Takes an owner away.
    pub fn release(&mut self, space: PortSpace, port: u16, id: Handle) {
        if let Some(ids) = self.owners.get_mut(&(space, port)) {
            ids.retain(|owner| *owner != id);
            if ids.is_empty() {
                self.owners.remove(&(space, port));
            }
        }
    }

    /// Whether no port has an owner.
    #[cfg(test)]
    pub fn is_empty(&self) -> bool {
        self.owners.is_empty()
    }
}
