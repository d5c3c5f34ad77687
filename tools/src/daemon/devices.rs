//! The devices of this daemon and how they follow their network interfaces.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use ferroce_engine::control::{DeviceInfo, LinkMode, Refusal, XdpInfo};

use super::gid::GidTable;
use super::xdp::plan::longest_packet;
use crate::netlink::{Interface, Interfaces};

/// Longest name of a device in bytes (`IBV_SYSFS_NAME_MAX` less the final zero).
const MAX_NAME: usize = 63;

/// What happened to a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// It is new.
    Added(DeviceInfo),
    /// Something about it is different.
    Changed(DeviceInfo),
    /// It is gone.
    Removed(DeviceInfo),
}

/// All devices by name.
pub struct Devices {
    by_name: BTreeMap<String, Device>,
    interfaces: Interfaces,
    /// Interfaces (by index) whose device the user removed: none is made there by itself.
    without: BTreeSet<u32>,
    /// Interfaces that an earlier daemon has left in XDP mode get none by itself: the programs behind may come yet.
    leave_xdp: bool,
    /// Seed of GUIDs of interfaces without a MAC address: differs by boot and network namespace.
    seed: u64,
}

struct Device {
    info: DeviceInfo,
    gids: GidTable,
    by_user: bool,
    /// A program has told how an earlier daemon had it.
    restored: bool,
}

impl Devices {
    /// No devices yet; `netns` is the inode of the network namespace.
    pub fn new(netns: u64) -> Self {
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let seed = fnv(boot.trim().as_bytes(), fnv(&netns.to_le_bytes(), FNV_START));
        Self {
            by_name: BTreeMap::new(),
            interfaces: Interfaces::new(),
            without: BTreeSet::new(),
            leave_xdp: false,
            seed,
        }
    }

    /// The device of that name.
    pub fn get(&self, name: &str) -> Option<&DeviceInfo> {
        self.by_name.get(name).map(|device| &device.info)
    }

    /// All devices, by name.
    pub fn iter(&self) -> impl Iterator<Item = &DeviceInfo> {
        self.by_name.values().map(|device| &device.info)
    }

    /// Takes over the present interfaces: an interface that is up and has an address gets a device,
    /// one that is gone loses it, and one that changed changes it.
    pub fn follow(&mut self, interfaces: Interfaces) -> Vec<Change> {
        self.interfaces = interfaces;
        let interfaces = &self.interfaces;
        self.without.retain(|ifindex| interfaces.contains_key(ifindex));
        let mut changes = Vec::new();
        self.by_name.retain(|_, device| {
            let Some(interface) = interfaces.get(&device.info.ifindex) else {
                changes.push(Change::Removed(device.info.clone()));
                return false;
            };
            let before = device.info.clone();
            device.gids.follow(&interface.addresses);
            describe(&mut device.info, interface, &device.gids);
            if device.info != before {
                changes.push(Change::Changed(device.info.clone()));
            }
            true
        });
        changes.extend(self.fill());
        changes
    }

    /// Whether interfaces that have an XDP program get no device by themselves, for now.
    pub fn leave_xdp(&mut self, leave: bool) -> Vec<Change> {
        self.leave_xdp = leave;
        self.fill()
    }

    /// Gives every interface a device that is to have one.
    fn fill(&mut self) -> Vec<Change> {
        let mut changes = Vec::new();
        let bare: Vec<u32> = self
            .interfaces
            .iter()
            .filter(|(index, it)| self.wants_device(**index, it))
            .map(|(index, _)| *index)
            .collect();
        for ifindex in bare {
            if let Some(interface) = self.interfaces.get(&ifindex) {
                let name = self.default_name(&interface.name);
                changes.push(Change::Added(self.insert(name, ifindex, LinkMode::Udp, false)));
            }
        }
        changes
    }

    /// Makes a device as an earlier daemon had it, which a program of that time tells: its name, and
    /// the order of its GIDs. `mode` is what it is known to have now, `is_leased` says whether a device has programs
    /// already.
    pub fn restore(
        &mut self,
        earlier: &DeviceInfo,
        mode: LinkMode,
        is_leased: impl Fn(&str) -> bool,
    ) -> Vec<Change> {
        let mut changes = Vec::new();
        let Some(interface) = self.interfaces.get(&earlier.ifindex).cloned() else {
            return changes;
        };
        let is_it = |info: &&DeviceInfo| info.ifindex == earlier.ifindex && info.mode == mode;
        let is_free = !self.by_name.contains_key(&earlier.name)
            || self
                .get(&earlier.name)
                .is_some_and(|info| info.ifindex == earlier.ifindex);
        if self.get(&earlier.name).filter(is_it).is_none() && is_free && is_device_name(&earlier.name) {
            // The one that came by itself, which the user had removed or replaced, or whose interface has another name.
            let other = self
                .iter()
                .find(|info| info.ifindex == earlier.ifindex)
                .map(|info| info.name.clone());
            if let Some(other) = other {
                if is_leased(&other) {
                    return changes;
                }
                changes.extend(self.take_away(&other));
            }
            changes.push(Change::Added(self.insert(
                earlier.name.clone(),
                earlier.ifindex,
                mode,
                true,
            )));
        }
        if let Some(device) = self.by_name.get_mut(&earlier.name)
            && device.info.ifindex == earlier.ifindex
            && !device.restored
        {
            device.restored = true;
            device.gids = GidTable::restored(&earlier.gids, &interface.addresses, device.info.mode);
            let before = device.info.clone();
            describe(&mut device.info, &interface, &device.gids);
            if device.info != before {
                changes.push(Change::Changed(device.info.clone()));
            }
        }
        changes
    }

    /// True if the user added or removed something that a new daemon would not know.
    pub fn are_configured(&self) -> bool {
        !self.without.is_empty() || self.by_name.values().any(|device| device.by_user)
    }

    /// Adds a device by the user's wish.
    pub fn add(&mut self, name: &str, netdev: &str) -> Result<Change, Refusal> {
        let (ifindex, _) = self.place_for(name, netdev, |_| false)?;
        self.without.remove(&ifindex);
        Ok(Change::Added(self.insert(
            name.to_owned(),
            ifindex,
            LinkMode::Udp,
            true,
        )))
    }

    /// The interface on which a device in XDP mode is to be added, by index. `leases` tells how many processes have a
    /// device: one that came by itself and that nobody has gives way.
    pub fn place_for_xdp(
        &self,
        name: &str,
        netdev: &str,
        leases: impl Fn(&str) -> usize,
    ) -> Result<(u32, &Interface), Refusal> {
        let gives_way = |device: &Device| !device.by_user;
        let place = self.place_for(name, netdev, gives_way)?;
        if let Some(other) = self.iter().find(|info| info.ifindex == place.0) {
            let leases = leases(&other.name);
            if leases > 0 {
                return Err(Refusal::DeviceBusy {
                    name: other.name.clone(),
                    leases: leases as u32,
                });
            }
        }
        Ok(place)
    }

    /// Adds a device in XDP mode, in a place that [`Self::place_for_xdp`] gave.
    pub fn add_xdp(&mut self, name: &str, ifindex: u32, mode: XdpInfo) -> Vec<Change> {
        let other = self
            .iter()
            .find(|info| info.ifindex == ifindex)
            .map(|info| info.name.clone());
        let mut changes: Vec<Change> = other
            .and_then(|other| self.take_away(&other))
            .into_iter()
            .collect();
        self.without.remove(&ifindex);
        changes.push(Change::Added(self.insert(
            name.to_owned(),
            ifindex,
            LinkMode::Xdp(mode),
            true,
        )));
        changes
    }

    /// Finds the interface for a new device. One device for an interface, as an address must name one device; but one
    /// that is there already may give way.
    fn place_for(
        &self,
        name: &str,
        netdev: &str,
        gives_way: impl Fn(&Device) -> bool,
    ) -> Result<(u32, &Interface), Refusal> {
        if !is_device_name(name) {
            return Err(Refusal::BadDeviceName {
                name: name.to_owned(),
            });
        }
        let place = self.interfaces.iter().find(|(_, it)| it.name == netdev);
        let (ifindex, interface) = place.ok_or_else(|| Refusal::UnknownInterface {
            netdev: netdev.to_owned(),
        })?;
        let in_the_way = |device: &&Device| {
            let here = device.info.ifindex == *ifindex;
            (here && !gives_way(device)) || (!here && device.info.name == name)
        };
        match self.by_name.values().find(in_the_way) {
            Some(other) => Err(Refusal::DeviceExists {
                name: other.info.name.clone(),
                netdev: other.info.netdev.clone(),
            }),
            None => Ok((*ifindex, interface)),
        }
    }

    /// Removes a device by the user's wish. On an interface that was in XDP mode, the one comes back that it has by itself.
    pub fn remove(&mut self, name: &str) -> Result<Vec<Change>, Refusal> {
        let removed = self.take_away(name).ok_or_else(|| Refusal::UnknownDevice {
            name: name.to_owned(),
        })?;
        let Change::Removed(info) = &removed else {
            return Ok(vec![removed]);
        };
        if info.mode == LinkMode::Udp
            && self
                .interfaces
                .get(&info.ifindex)
                .is_some_and(|interface| self.wants_device(info.ifindex, interface))
        {
            self.without.insert(info.ifindex);
        }
        let mut changes = vec![removed];
        changes.extend(self.fill());
        Ok(changes)
    }

    fn take_away(&mut self, name: &str) -> Option<Change> {
        self.by_name
            .remove(name)
            .map(|device| Change::Removed(device.info))
    }

    /// Every interface, and what it has.
    pub fn interfaces(&self) -> &Interfaces {
        &self.interfaces
    }

    fn wants_device(&self, ifindex: u32, interface: &Interface) -> bool {
        interface.up
            && interface.addresses.iter().any(|address| address.usable)
            && !self.without.contains(&ifindex)
            && !(self.leave_xdp && interface.xdp_program.is_some())
            && self.iter().all(|info| info.ifindex != ifindex)
    }

    fn insert(&mut self, name: String, ifindex: u32, mode: LinkMode, by_user: bool) -> DeviceInfo {
        let interface = self.interfaces.get(&ifindex).cloned().unwrap_or_default();
        let gids = GidTable::new(&interface.addresses, mode);
        let mut info = DeviceInfo {
            name: name.clone(),
            netdev: String::new(),
            ifindex,
            uverbs: self.free_uverbs(),
            guid: self.free_guid(&interface, ifindex),
            mac: [0; 6],
            mtu: 0,
            speed: 0,
            up: false,
            lo: interface.lo,
            mode,
            gids: Vec::new(),
        };
        describe(&mut info, &interface, &gids);
        self.by_name.insert(
            name,
            Device {
                info: info.clone(),
                gids,
                by_user,
                restored: false,
            },
        );
        info
    }

    /// `ferroce_<netdev>`, with a number behind if a renamed interface's device has that name.
    fn default_name(&self, netdev: &str) -> String {
        let name = format!("ferroce_{netdev}");
        let numbered = (1..).map(|n| format!("{name}_{n}"));
        std::iter::once(name.clone())
            .chain(numbered)
            .find(|name| !self.by_name.contains_key(name))
            .unwrap_or(name)
    }

    /// The lowest N such that neither we nor the kernel have `uverbsN`.
    fn free_uverbs(&self) -> u32 {
        let taken = |n: &u32| {
            self.iter().any(|info| info.uverbs == *n)
                || Path::new(&format!("/sys/class/infiniband_verbs/uverbs{n}")).exists()
        };
        (0..).find(|n| !taken(n)).unwrap_or(0)
    }

    /// The modified EUI-64 of the MAC address (RFC 4291, appendix A), as real NICs have it; where
    /// there is no MAC address, or another device has the same one, a hash.
    fn free_guid(&self, interface: &Interface, ifindex: u32) -> u64 {
        let [a, b, c, d, e, f] = interface.mac;
        let eui64 = u64::from_be_bytes([a ^ 2, b, c, 0xff, 0xfe, d, e, f]);
        let taken = |guid: u64| self.iter().any(|info| info.guid == guid);
        if interface.mac != [0; 6] && !taken(eui64) {
            return eui64;
        }
        let start = fnv(&interface.mac, fnv(&ifindex.to_le_bytes(), self.seed));
        // The first byte of a locally made identifier.
        let local = |hash: u64| (hash & 0x00ff_ffff_ffff_ffff) | (0x02 << 56);
        std::iter::successors(Some(start), |hash| Some(fnv(&[0], *hash)))
            .map(local)
            .find(|guid| !taken(*guid))
            .unwrap_or(start)
    }
}

fn describe(info: &mut DeviceInfo, interface: &Interface, gids: &GidTable) {
    info.netdev.clone_from(&interface.name);
    info.mac = interface.mac;
    info.mtu = match &info.mode {
        LinkMode::Udp => interface.mtu,
        LinkMode::Xdp(mode) => interface.mtu.min(longest_packet(mode)),
    };
    info.speed = interface.speed;
    info.up = interface.carrier;
    info.gids = gids.entries();
}

/// Device names become directory names, and libibverbs drops `rxe*` of no kernel device.
fn is_device_name(name: &str) -> bool {
    (1..=MAX_NAME).contains(&name.len())
        && !name.starts_with('.')
        && !name.starts_with("rxe")
        && name
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || b"_-.".contains(&byte))
}

const FNV_START: u64 = 0xcbf2_9ce4_8422_2325;

/// FNV-1a: an identifier, not a secret.
fn fnv(bytes: &[u8], start: u64) -> u64 {
    bytes.iter().fold(start, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests;
