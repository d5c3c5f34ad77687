//! The devices of this daemon and how they follow their network interfaces.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use ferroce_engine::control::{DeviceInfo, LinkMode, Refusal};

use super::gid::GidTable;
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
        let bare: Vec<u32> = self
            .interfaces
            .iter()
            .filter(|(index, it)| self.wants_device(**index, it))
            .map(|(index, _)| *index)
            .collect();
        for ifindex in bare {
            if let Some(interface) = self.interfaces.get(&ifindex) {
                let name = self.default_name(&interface.name);
                changes.push(Change::Added(self.insert(name, ifindex, false)));
            }
        }
        changes
    }

    /// Makes a device as an earlier daemon had it, which a program of that time tells: its name, and
    /// the order of its GIDs. `is_leased` says whether a device has programs already.
    pub fn restore(&mut self, earlier: &DeviceInfo, is_leased: impl Fn(&str) -> bool) -> Vec<Change> {
        let mut changes = Vec::new();
        let Some(interface) = self.interfaces.get(&earlier.ifindex).cloned() else {
            return changes;
        };
        if !self.by_name.contains_key(&earlier.name) && is_device_name(&earlier.name) {
            // The user had removed the one that came by itself, or renamed the interface since.
            let other = self
                .iter()
                .find(|info| info.ifindex == earlier.ifindex)
                .map(|info| info.name.clone());
            if let Some(other) = other {
                if is_leased(&other) {
                    return changes;
                }
                changes.extend(
                    self.by_name
                        .remove(&other)
                        .map(|device| Change::Removed(device.info)),
                );
            }
            changes.push(Change::Added(self.insert(
                earlier.name.clone(),
                earlier.ifindex,
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
        if !is_device_name(name) {
            return Err(Refusal::BadDeviceName {
                name: name.to_owned(),
            });
        }
        let Some(ifindex) = self
            .interfaces
            .iter()
            .find(|(_, it)| it.name == netdev)
            .map(|(index, _)| *index)
        else {
            return Err(Refusal::UnknownInterface {
                netdev: netdev.to_owned(),
            });
        };
        // One device for an interface: an address must name one device.
        if let Some(other) = self
            .iter()
            .find(|info| info.name == name || info.ifindex == ifindex)
        {
            return Err(Refusal::DeviceExists {
                name: other.name.clone(),
                netdev: other.netdev.clone(),
            });
        }
        self.without.remove(&ifindex);
        Ok(Change::Added(self.insert(name.to_owned(), ifindex, true)))
    }

    /// Removes a device by the user's wish.
    pub fn remove(&mut self, name: &str) -> Result<Change, Refusal> {
        let Some(device) = self.by_name.remove(name) else {
            return Err(Refusal::UnknownDevice {
                name: name.to_owned(),
            });
        };
        let ifindex = device.info.ifindex;
        if self
            .interfaces
            .get(&ifindex)
            .is_some_and(|interface| self.wants_device(ifindex, interface))
        {
            self.without.insert(ifindex);
        }
        Ok(Change::Removed(device.info))
    }

    fn wants_device(&self, ifindex: u32, interface: &Interface) -> bool {
        interface.up
            && interface.addresses.iter().any(|address| address.usable)
            && !self.without.contains(&ifindex)
            && self.iter().all(|info| info.ifindex != ifindex)
    }

    fn insert(&mut self, name: String, ifindex: u32, by_user: bool) -> DeviceInfo {
        let interface = self.interfaces.get(&ifindex).cloned().unwrap_or_default();
        let mode = LinkMode::Udp;
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
    info.mtu = interface.mtu;
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
            devices.restore(&info, |_| true).is_empty(),
            "programs use the other one"
        );
        devices.restore(&info, |_| false);
        assert_eq!(names(&devices), ["rdma0"]);
        let restored = devices.get("rdma0").unwrap();
        assert_eq!((&restored.gids, restored.guid), (&info.gids, info.guid));
        info.gids.reverse();
        assert!(devices.restore(&info, |_| false).is_empty(), "the first has told");
        info.ifindex = 9;
        info.name = "gone".into();
        assert!(devices.restore(&info, |_| false).is_empty());
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
}
