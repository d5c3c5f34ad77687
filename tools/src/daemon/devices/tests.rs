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
