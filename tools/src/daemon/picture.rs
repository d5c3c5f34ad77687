//! What sysfs and `/dev` would show of a device if the kernel had made it.
//!
//! Names and formats are those of `Documentation/ABI/stable/sysfs-class-infiniband` of Linux, as
//! libibverbs, librdmacm and tools (ibstat, perftest, UCX) read them.

use std::collections::BTreeMap;
use std::fs;

use ferroce_engine::control::{DeviceInfo, GidEntry, protocol::RELEASE};
use ferroce_engine::link::RoceVersion;

/// `abi_version` of `infiniband_verbs`: the newest that every rdma-core knows.
pub const VERBS_ABI: &str = "6\n";
/// Device number of `/dev/null`, which stands for `uverbsN`: opening it must give a character
/// device of this number, and its ioctls fail in a way that libibverbs knows (ENOTTY).
const NULL_DEVICE: &str = "1:3\n";

/// Device number of `/dev/full`, which stands for `rdma_cm`.
const FULL_DEVICE: &str = "1:7\n";
/// `abi_version` of `rdma_cm`: the only one that there is since 2006.
const CM_ABI: &str = "4\n";

/// A kernel shows a file for each index of the GID table, used or not. A few unused ones are enough
/// to show that there are such, and much faster to make: libibverbs asks the provider, not the files.
const SHOWN_GIDS: usize = 16;

/// Something at a path of the tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Node {
    /// A file with this text.
    File(String),
    /// A symbolic link to there.
    Link(String),
}

/// Nodes by path below the tree's root.
pub type Picture = BTreeMap<String, Node>;

/// What stands for RDMA CM, of which there is one for all devices: its device file, and what librdmacm reads of it.
///
/// The device file is `/dev/full`: a librdmacm whose commands the provider does not see has them refused (ENOSPC), where
/// `/dev/null` would take them and answer nothing.
pub fn connection_manager() -> Picture {
    let file = |name: &str, text: &str| {
        (
            format!("sys/class/misc/rdma_cm/{name}"),
            Node::File(text.to_owned()),
        )
    };
    Picture::from([
        (
            "dev/infiniband/rdma_cm".to_owned(),
            Node::Link("/dev/full".to_owned()),
        ),
        file("abi_version", CM_ABI),
        file("dev", FULL_DEVICE),
    ])
}

/// Directory of the device in `class/infiniband`.
pub fn device_directory(info: &DeviceInfo) -> String {
    format!("sys/class/infiniband/{}", info.name)
}

/// Directory of the device in `class/infiniband_verbs`.
pub fn verbs_directory(info: &DeviceInfo) -> String {
    format!("sys/class/infiniband_verbs/uverbs{}", info.uverbs)
}

/// Path of the device file.
pub fn device_file(info: &DeviceInfo) -> String {
    format!("dev/infiniband/uverbs{}", info.uverbs)
}

/// The picture of a device.
pub fn picture(info: &DeviceInfo) -> Picture {
    let mut picture = Picture::new();
    picture.insert(device_file(info), Node::Link("/dev/null".to_owned()));

    let base = verbs_directory(info);
    let mut put = |name: &str, text: String| {
        picture.insert(format!("{base}/{name}"), Node::File(text));
    };
    put("ibdev", format!("{}\n", info.name));
    put("dev", NULL_DEVICE.to_owned());
    put("abi_version", "1\n".to_owned());
    picture.insert(
        format!("{base}/device"),
        Node::Link(format!("../../infiniband/{}/device", info.name)),
    );

    let base = device_directory(info);
    let mut put = |name: &str, text: String| {
        picture.insert(format!("{base}/{name}"), Node::File(text + "\n"));
    };
    // Nothing directly in this directory may change while the device lives.
    put("node_type", "1: CA".to_owned());
    put("node_guid", guid(info.guid));
    put("sys_image_guid", guid(info.guid));
    put("node_desc", info.name.clone());
    put("fw_ver", RELEASE.to_owned());
    put("hw_rev", "0".to_owned());
    put("hca_type", "Ferroce".to_owned());
    put("board_id", "Ferroce".to_owned());

    // A software device sits on no bus.
    put("device/modalias", "platform:ferroce".to_owned());
    put("device/vendor", "0x0000".to_owned());
    put("device/device", "0x0000".to_owned());
    put("device/numa_node", "-1".to_owned());
    let cpus = fs::read_to_string("/sys/devices/system/cpu/online").unwrap_or_default();
    put("device/local_cpus", cpu_mask(&cpus));
    put("device/local_cpulist", cpus.trim().to_owned());
    let net = |name: &str| format!("device/net/{}/{name}", info.netdev);
    put(
        &net("address"),
        info.mac.map(|byte| format!("{byte:02x}")).join(":"),
    );
    put(&net("ifindex"), info.ifindex.to_string());
    put(&net("mtu"), info.mtu.to_string());
    put(&net("operstate"), if info.up { "up" } else { "down" }.to_owned());
    put(&net("dev_id"), "0x0".to_owned());
    put(&net("dev_port"), "0".to_owned());

    put(
        "ports/1/state",
        if info.up { "4: ACTIVE" } else { "1: DOWN" }.to_owned(),
    );
    put(
        "ports/1/phys_state",
        if info.up { "5: LinkUp" } else { "3: Disabled" }.to_owned(),
    );
    put("ports/1/link_layer", "Ethernet".to_owned());
    put("ports/1/rate", info.rate().to_string());
    put("ports/1/lid", "0x0".to_owned());
    put("ports/1/lid_mask_count", "0".to_owned());
    put("ports/1/sm_lid", "0x0".to_owned());
    put("ports/1/sm_sl", "0".to_owned());
    put("ports/1/cap_mask", "0x00010000".to_owned());
    put("ports/1/pkeys/0", "0xffff".to_owned());
    for index in 0..info.gids.len().next_multiple_of(SHOWN_GIDS).max(SHOWN_GIDS) {
        let entry = info.gids.get(index).copied().flatten();
        put(
            &format!("ports/1/gids/{index}"),
            gid(entry.map_or([0; 16], |entry| entry.gid)),
        );
        put(
            &format!("ports/1/gid_attrs/types/{index}"),
            gid_type(entry).to_owned(),
        );
        if entry.is_some() {
            put(&format!("ports/1/gid_attrs/ndevs/{index}"), info.netdev.clone());
        }
    }
    picture
}

/// Reading the type of an unused index fails with EINVAL on a kernel, which no plain file can do;
/// libibverbs makes "IB/RoCE v1" of that error, and so do we.
fn gid_type(entry: Option<GidEntry>) -> &'static str {
    match entry.map(|entry| entry.version) {
        Some(RoceVersion::V1) => "IB/RoCE v1",
        Some(RoceVersion::V2) => "RoCE v2",
        None => "IB/RoCE v1",
    }
}

fn guid(guid: u64) -> String {
    words(&guid.to_be_bytes())
}

fn gid(gid: [u8; 16]) -> String {
    words(&gid)
}

/// `0011:2233:...` as sysfs writes identifiers.
fn words(bytes: &[u8]) -> String {
    let words: Vec<String> = bytes
        .chunks(2)
        .map(|pair| pair.iter().map(|byte| format!("{byte:02x}")).collect())
        .collect();
    words.join(":")
}

/// `00000000,0000000f` of a list such as `0-3,8`.
fn cpu_mask(list: &str) -> String {
    let cpus: Vec<usize> = list
        .trim()
        .split(',')
        .filter_map(|range| {
            let (first, last) = range.split_once('-').unwrap_or((range, range));
            Some(first.parse().ok()?..=last.parse::<usize>().ok()?.min(8191))
        })
        .flatten()
        .collect();
    let count = cpus.iter().max().map_or(1, |last| last / 32 + 1);
    let mut masks = vec![0u32; count];
    for cpu in cpus {
        masks[cpu / 32] |= 1 << (cpu % 32);
    }
    let masks: Vec<String> = masks.iter().rev().map(|mask| format!("{mask:08x}")).collect();
    masks.join(",")
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// A device for tests.
    pub fn device(addresses: &[&str]) -> DeviceInfo {
        DeviceInfo {
            name: "ferroce_eth0".into(),
            netdev: "eth0".into(),
            ifindex: 2,
            uverbs: 3,
            guid: 0x5054_00ff_fe00_0001,
            mac: [0x52, 0x54, 0, 0, 0, 1],
            mtu: 1500,
            speed: 10_000,
            up: true,
            lo: false,
            mode: ferroce_engine::control::LinkMode::Udp,
            gids: addresses
                .iter()
                .map(|ip| ip.parse().ok().map(GidEntry::roce_v2))
                .collect(),
        }
    }

    fn text<'a>(picture: &'a Picture, path: &str) -> &'a str {
        match picture.get(path) {
            Some(Node::File(text)) => text,
            other => panic!("{path}: {other:?}"),
        }
    }

    #[test]
    fn picture_has_the_formats_of_sysfs() {
        let picture = picture(&device(&["fe80::1", "hole", "10.0.0.1"]));
        let base = "sys/class/infiniband/ferroce_eth0";
        assert_eq!(
            text(&picture, &format!("{base}/node_guid")),
            "5054:00ff:fe00:0001\n"
        );
        assert_eq!(
            text(&picture, &format!("{base}/ports/1/gids/0")),
            "fe80:0000:0000:0000:0000:0000:0000:0001\n"
        );
        assert_eq!(
            text(&picture, &format!("{base}/ports/1/gids/1")),
            "0000:0000:0000:0000:0000:0000:0000:0000\n"
        );
        assert_eq!(
            text(&picture, &format!("{base}/ports/1/gids/2")),
            "0000:0000:0000:0000:0000:ffff:0a00:0001\n"
        );
        assert_eq!(
            text(&picture, &format!("{base}/ports/1/gid_attrs/types/2")),
            "RoCE v2\n"
        );
        assert_eq!(
            text(&picture, &format!("{base}/ports/1/gid_attrs/ndevs/2")),
            "eth0\n"
        );
        assert!(!picture.contains_key(&format!("{base}/ports/1/gid_attrs/ndevs/1")));
        assert!(picture.contains_key(&format!("{base}/ports/1/gids/15")));
        assert!(!picture.contains_key(&format!("{base}/ports/1/gids/16")));
        let many = super::picture(&device(&["10.0.0.1"; 17]));
        assert_eq!(
            text(&many, &format!("{base}/ports/1/gid_attrs/types/16")),
            "RoCE v2\n"
        );
        assert_eq!(
            text(&picture, "sys/class/infiniband_verbs/uverbs3/ibdev"),
            "ferroce_eth0\n"
        );
        assert_eq!(picture["dev/infiniband/uverbs3"], Node::Link("/dev/null".into()));
    }

    #[test]
    fn gids_have_their_types() {
        let mut info = device(&["10.0.0.1"]);
        info.gids
            .push(Some(GidEntry::new(RoceVersion::V1, "10.0.0.1".parse().unwrap())));
        let picture = picture(&info);
        for (index, kind) in ["RoCE v2\n", "IB/RoCE v1\n"].iter().enumerate() {
            let port = "sys/class/infiniband/ferroce_eth0/ports/1";
            assert_eq!(
                text(&picture, &format!("{port}/gids/{index}")),
                "0000:0000:0000:0000:0000:ffff:0a00:0001\n"
            );
            assert_eq!(text(&picture, &format!("{port}/gid_attrs/types/{index}")), *kind);
            assert_eq!(
                text(&picture, &format!("{port}/gid_attrs/ndevs/{index}")),
                "eth0\n"
            );
        }
    }

    #[test]
    fn cpu_lists_become_masks() {
        assert_eq!(cpu_mask("0-1\n"), "00000003");
        assert_eq!(cpu_mask("0-3,8,33"), "00000002,0000010f");
        assert_eq!(cpu_mask(""), "00000000");
    }
}
