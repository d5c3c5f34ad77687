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
mod tests {
    use super::*;
    use crate::netlink::Address;

    fn interface(name: &str, mac: u8, ips: &[&str]) -> Interface {
        let addresses = ips
            .iter()
            .map(|ip| Address {
                ip: ip.parse().unwrap(),
                usable: true,
            })
            .collect();
        let mac = if mac == 0 {
            [0; 6]
        } else {
            [0x52, 0x54, 0, 0, 0, mac]
        };
        Interface {
            name: name.into(),
            mac,
            mtu: 1500,
            speed: 1000,
            up: true,
            carrier: true,
            lo: name == "lo",
            addresses,
            ..Interface::default()
        }
    }

    /// Of a kernel whose packets take one frame each.
    fn xdp_info() -> XdpInfo {
        let mut info = XdpInfo::default();
        info.geometry.chunk = 2048;
        info
    }

    fn names(devices: &Devices) -> Vec<&str> {
        devices.iter().map(|info| info.name.as_str()).collect()
    }

    #[test]
    fn interfaces_with_an_address_get_devices() {
        let mut devices = Devices::new(1);
        let mut down = interface("down", 3, &["10.0.0.9"]);
        down.up = false;
        let interfaces = Interfaces::from([
            (1, interface("lo", 0, &["127.0.0.1", "::1"])),
            (2, interface("eth0", 1, &["10.0.0.1"])),
            (3, interface("bare", 2, &[])),
            (4, down),
        ]);
        assert_eq!(devices.follow(interfaces.clone()).len(), 2);
        assert_eq!(names(&devices), ["ferroce_eth0", "ferroce_lo"]);
        assert!(devices.follow(interfaces).is_empty());
        let eth0 = devices.get("ferroce_eth0").unwrap();
        assert_eq!(eth0.guid, 0x5054_00ff_fe00_0001);
        assert_ne!(eth0.uverbs, devices.get("ferroce_lo").unwrap().uverbs);
    }

    #[test]
    fn device_follows_rename_mtu_and_state_and_goes_with_its_interface() {
        let mut devices = Devices::new(1);
        devices.follow(Interfaces::from([(2, interface("eth0", 1, &["10.0.0.1"]))]));
        let mut changed = interface("wan", 1, &["10.0.0.1"]);
        (changed.mtu, changed.carrier) = (4200, false);
        let changes = devices.follow(Interfaces::from([
            (2, changed),
            (3, interface("eth0", 2, &["10.0.0.2"])),
        ]));
        assert!(matches!(&changes[..], [Change::Changed(a), Change::Added(b)]
            if (a.name.as_str(), a.netdev.as_str(), a.mtu, a.up) == ("ferroce_eth0", "wan", 4200, false)
            && b.name == "ferroce_eth0_1"));
        let changes = devices.follow(Interfaces::new());
        assert!(matches!(&changes[..], [Change::Removed(_), Change::Removed(_)]));
    }

    #[test]
    fn guids_are_unique_without_and_with_equal_mac() {
        let interfaces = Interfaces::from([
            (1, interface("lo", 0, &["127.0.0.1"])),
            (2, interface("eth0", 1, &["10.0.0.1"])),
            (3, interface("vlan", 1, &["10.0.0.2"])),
            (4, interface("tun", 0, &["10.0.0.3"])),
        ]);
        let mut devices = Devices::new(1);
        devices.follow(interfaces.clone());
        let guids: BTreeSet<u64> = devices.iter().map(|info| info.guid).collect();
        assert_eq!(guids.len(), 4);
        let mut elsewhere = Devices::new(2);
        elsewhere.follow(interfaces);
        assert_ne!(
            devices.get("ferroce_lo").unwrap().guid,
            elsewhere.get("ferroce_lo").unwrap().guid
        );
    }

    #[test]
    fn device_of_an_earlier_daemon_is_restored() {
        let interfaces = Interfaces::from([(2, interface("eth0", 1, &["10.0.0.1", "10.0.0.2"]))]);
        let mut earlier = Devices::new(1);
        earlier.follow(interfaces.clone());
        earlier.remove("ferroce_eth0").unwrap();
        earlier.add("rdma0", "eth0").unwrap();
        let mut info = earlier.get("rdma0").unwrap().clone();
        info.gids.reverse();
        let mut devices = Devices::new(1);
        devices.follow(interfaces);
        assert!(
            devices.restore(&info, LinkMode::Udp, |_| true).is_empty(),
            "programs use the other one"
        );
        devices.restore(&info, LinkMode::Udp, |_| false);
        assert_eq!(names(&devices), ["rdma0"]);
        let restored = devices.get("rdma0").unwrap();
        assert_eq!((&restored.gids, restored.guid), (&info.gids, info.guid));
        info.gids.reverse();
        assert!(
            devices.restore(&info, LinkMode::Udp, |_| false).is_empty(),
            "the first has told"
        );
        info.ifindex = 9;
        info.name = "gone".into();
        assert!(devices.restore(&info, LinkMode::Udp, |_| false).is_empty());
    }

    #[test]
    fn user_removes_and_adds() {
        let interfaces = Interfaces::from([
            (2, interface("eth0", 1, &["10.0.0.1"])),
            (3, interface("bare", 2, &[])),
        ]);
        let mut devices = Devices::new(1);
        devices.follow(interfaces.clone());
        assert!(matches!(
            devices.add("rdma0", "eth0"),
            Err(Refusal::DeviceExists { .. })
        ));
        assert!(matches!(
            devices.add("ferroce_eth0", "bare"),
            Err(Refusal::DeviceExists { .. })
        ));
        assert!(matches!(
            devices.add("rdma0", "eth7"),
            Err(Refusal::UnknownInterface { .. })
        ));
        for bad in ["", "a/b", "..", "rxe0", "a b"] {
            assert!(
                matches!(devices.add(bad, "bare"), Err(Refusal::BadDeviceName { .. })),
                "{bad:?}"
            );
        }
        devices.add("spare", "bare").unwrap();
        assert!(devices.are_configured());
        devices.remove("spare").unwrap();
        assert!(!devices.are_configured(), "all is as it would be by itself");
        devices.remove("ferroce_eth0").unwrap();
        assert!(devices.are_configured());
        assert!(
            devices.follow(interfaces).is_empty(),
            "a removed device comes not back by itself"
        );
        devices.add("rdma0", "eth0").unwrap();
        devices.add("spare", "bare").unwrap();
        assert_eq!(names(&devices), ["rdma0", "spare"]);
        assert!(matches!(
            devices.remove("ferroce_eth0"),
            Err(Refusal::UnknownDevice { .. })
        ));
    }

    #[test]
    fn xdp_mode_takes_the_place_of_the_device_that_came_by_itself() {
        let mut devices = Devices::new(1);
        devices.follow(Interfaces::from([
            (2, interface("eth0", 1, &["10.0.0.1"])),
            (3, interface("eth1", 2, &["10.0.1.1"])),
        ]));
        let busy = devices.place_for_xdp("rdma0", "eth0", |_| 2);
        assert!(matches!(busy, Err(Refusal::DeviceBusy { leases: 2, .. })));
        let taken = devices.place_for_xdp("ferroce_eth1", "eth0", |_| 0);
        assert!(matches!(taken, Err(Refusal::DeviceExists { .. })));
        assert_eq!(devices.place_for_xdp("ferroce_eth0", "eth0", |_| 0).unwrap().0, 2);
        assert_eq!(devices.place_for_xdp("rdma0", "eth0", |_| 0).unwrap().0, 2);
        let changes = devices.add_xdp("rdma0", 2, xdp_info());
        assert!(matches!(&changes[..], [Change::Removed(a), Change::Added(b)]
            if a.name == "ferroce_eth0" && b.name == "rdma0" && b.mode != LinkMode::Udp));
        let again = devices.place_for_xdp("rdma1", "eth0", |_| 0);
        assert!(matches!(again, Err(Refusal::DeviceExists { .. })));
        let changes = devices.remove("rdma0").unwrap();
        assert!(matches!(&changes[..], [Change::Removed(a), Change::Added(b)]
            if a.name == "rdma0" && b.name == "ferroce_eth0" && b.mode == LinkMode::Udp));
        assert!(!devices.are_configured());
    }

    #[test]
    fn interface_left_in_xdp_mode_waits_for_its_programs() {
        let mut left = interface("eth0", 1, &["10.0.0.1"]);
        left.xdp_program = Some(7);
        let mut devices = Devices::new(1);
        devices.leave_xdp(true);
        let interfaces = Interfaces::from([(2, left), (3, interface("eth1", 2, &["10.0.1.1"]))]);
        devices.follow(interfaces);
        assert_eq!(names(&devices), ["ferroce_eth1"]);
        let mut earlier = DeviceInfo {
            name: "rdma0".into(),
            ifindex: 2,
            ..DeviceInfo::default()
        };
        let mode = LinkMode::Xdp(xdp_info());
        devices.restore(&earlier, mode, |_| false);
        assert_eq!(devices.get("rdma0").unwrap().mode, mode);
        let mut jumbo = devices.interfaces().clone();
        jumbo.get_mut(&2).unwrap().mtu = 9000;
        devices.follow(jumbo);
        assert_eq!(devices.get("rdma0").unwrap().mtu, 2048 - 256 - 18);
        // One that is there in another mode gives way.
        (earlier.name, earlier.ifindex) = ("ferroce_eth1".into(), 3);
        assert!(devices.restore(&earlier, mode, |_| true).is_empty());
        devices.restore(&earlier, mode, |_| false);
        assert_eq!(devices.get("ferroce_eth1").unwrap().mode, mode);
        devices.remove("rdma0").unwrap();
        assert_eq!(names(&devices), ["ferroce_eth1"]);
        devices.leave_xdp(false);
        assert_eq!(names(&devices), ["ferroce_eth0", "ferroce_eth1"]);
    }
}
