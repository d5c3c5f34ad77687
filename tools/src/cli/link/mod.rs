//! `ferroce link`: devices.

mod add;

use clap::Subcommand;
use ferroce_engine::control::protocol::{LinkStatus, Reply, Request, XdpStatus};
use ferroce_engine::control::{ControlError, DeviceInfo, LinkMode, Refusal, XdpInfo};
use ferroce_engine::link::RoceVersion;
use serde_json::{Value, json};

use super::{CliError, Output, print, print_json, starter};

/// Commands of `ferroce link`.
#[derive(Subcommand)]
pub enum Link {
    /// Show all devices, or one.
    #[command(visible_alias = "list")]
    Show {
        /// Name of the device.
        #[arg(value_name = "NAME")]
        name: Option<String>,
        /// How it is printed.
        #[command(flatten)]
        output: Output,
    },
    /// Add a device on a network interface that has none.
    Add(add::Add),
    /// Remove a device that no program uses.
    #[command(visible_alias = "delete")]
    Del {
        /// Name of the device.
        #[arg(value_name = "NAME")]
        name: String,
    },
}

impl Default for Link {
    fn default() -> Self {
        Self::Show {
            name: None,
            output: Output::default(),
        }
    }
}

impl Link {
    /// Runs the command.
    pub fn run(self, output: Output) -> Result<(), CliError> {
        let request = match self {
            Self::Show { name, output: after } => return show(name, output.and(after)),
            Self::Add(add) => add.request(),
            Self::Del { name } => Request::LinkDel { name },
        };
        match starter::connect_or_start()?.ask(&request)? {
            Reply::Done => Ok(()),
            Reply::Added { notes } => {
                for note in notes {
                    eprintln!("ferroce: note: {note}");
                }
                Ok(())
            }
            _ => Err(ControlError::Malformed("no answer to a change of links").into()),
        }
    }
}

fn show(name: Option<String>, output: Output) -> Result<(), CliError> {
    let Reply::Links(mut links) = starter::connect_or_start()?.ask(&Request::Links)? else {
        return Err(ControlError::Malformed("no list of links").into());
    };
    if let Some(name) = name {
        links.retain(|link| link.device.name == name);
        if links.is_empty() {
            return Err(ControlError::from(Refusal::UnknownDevice { name }).into());
        }
    }
    if output.json {
        return print_json(output, &Value::Array(links.iter().map(as_json).collect()));
    }
    if links.is_empty() {
        eprintln!(
            "ferroce: no device: none of the network interfaces is up and has an address, or theirs were removed"
        );
    }
    links.iter().try_for_each(|link| print(&as_text(link)))
}

fn as_text(link: &LinkStatus) -> String {
    let device = &link.device;
    let DeviceInfo {
        name, netdev, mtu, ..
    } = device;
    let (state, physical) = states(device);
    let mut text = format!(
        "link {name}/1 state {state} physical_state {physical} netdev {netdev} mtu {mtu} node_guid {}",
        guid(device.guid)
    );
    if let LinkMode::Xdp(info) = &device.mode {
        text += &xdp_as_text(device, info, link.xdp.as_ref());
    }
    for (index, entry) in device
        .gids
        .iter()
        .enumerate()
        .filter_map(|(index, entry)| Some((index, entry.as_ref()?)))
    {
        text += &format!(
            "\n    gid {index} {} type {}",
            entry.addr,
            gid_type(entry.version)
        );
    }
    text
}

/// One line of how it is made, and one of what was dropped, if anything was.
fn xdp_as_text(device: &DeviceInfo, info: &XdpInfo, status: Option<&XdpStatus>) -> String {
    let geometry = &info.geometry;
    let on = |on: bool| if on { "on" } else { "off" };
    let mut text = format!(
        "\n    mode xdp {} {} queues {} chunk {} programs {}/{} multi_buffer {} hugepages {}",
        attachment(info),
        if info.features.zerocopy {
            "zerocopy"
        } else {
            "copy"
        },
        geometry.queues,
        geometry.chunk,
        status.map_or(0, |status| status.programs),
        geometry.seats,
        on(info.features.multi_buffer),
        on(info.features.hugepages)
    );
    let drops = status.map_or(&[][..], |status| &status.drops);
    if drops.iter().any(|(_, count)| *count > 0) {
        text += "\n    dropped";
        for (reason, count) in drops.iter().filter(|(_, count)| *count > 0) {
            text += &format!(" {reason} {count}");
        }
    }
    if status.is_some_and(|status| status.detached) {
        let (name, netdev) = (&device.name, &device.netdev);
        text += &format!(
            "\n    detached: somebody has taken the XDP program off {netdev}. End the programs that use {name}, \
             then: ferroce link del {name}; ferroce link add {name} netdev {netdev} mode xdp"
        );
    }
    text
}

fn xdp_as_json(info: &XdpInfo, status: Option<&XdpStatus>) -> Value {
    let drops = status.map_or(&[][..], |status| &status.drops);
    let drops: serde_json::Map<String, Value> = drops
        .iter()
        .map(|(reason, count)| (reason.clone(), json!(count)))
        .collect();
    json!({
        "attached": attachment(info),
        "detached": status.is_some_and(|status| status.detached),
        "zerocopy": info.features.zerocopy,
        "queues": info.geometry.queues,
        "chunk": info.geometry.chunk,
        "programs": info.geometry.seats,
        "programs_used": status.map(|status| status.programs),
        "multi_buffer": info.features.multi_buffer,
        "hugepages": info.features.hugepages,
        "memory": info.geometry.umem_len(),
        "drops": drops,
    })
}

/// Who runs the XDP program.
fn attachment(info: &XdpInfo) -> &'static str {
    if info.driver { "driver" } else { "skb" }
}

fn as_json(link: &LinkStatus) -> Value {
    let device = &link.device;
    let (state, physical) = states(device);
    let gids: Vec<Value> = device
        .gids
        .iter()
        .enumerate()
        .filter_map(|(index, entry)| Some((index, entry.as_ref()?)))
        .map(|(index, entry)| json!({ "index": index, "address": entry.addr, "type": gid_type(entry.version) }))
        .collect();
    let mut value = json!({
        "ifname": device.name,
        "port": 1,
        "state": state,
        "physical_state": physical,
        "netdev": device.netdev,
        "netdev_index": device.ifindex,
        "mtu": device.mtu,
        "node_guid": guid(device.guid),
        "uverbs": device.uverbs,
        "mode": if matches!(device.mode, LinkMode::Udp) { "udp" } else { "xdp" },
        "gids": gids,
    });
    if let LinkMode::Xdp(info) = &device.mode {
        value["xdp"] = xdp_as_json(info, link.xdp.as_ref());
    }
    value
}

/// Port state and physical state, in the words of `rdma link`.
fn states(device: &DeviceInfo) -> (&'static str, &'static str) {
    if device.up {
        ("ACTIVE", "LINK_UP")
    } else {
        ("DOWN", "DISABLED")
    }
}

fn gid_type(kind: RoceVersion) -> &'static str {
    match kind {
        RoceVersion::V1 => "IB/RoCE v1",
        RoceVersion::V2 => "RoCE v2",
    }
}

/// `aabb:ccdd:eeff:0011`.
fn guid(guid: u64) -> String {
    let word = |shift: u32| format!("{:04x}", (guid >> shift) & 0xffff);
    [48, 32, 16, 0].map(word).join(":")
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferroce_engine::control::GidEntry;

    #[test]
    fn holes_keep_the_index() {
        let device = DeviceInfo {
            name: "ferroce_eth0".into(),
            netdev: "eth0".into(),
            ifindex: 2,
            uverbs: 0,
            guid: 0x0011_2233_4455_6677,
            mac: [0; 6],
            mtu: 1500,
            speed: 10_000,
            up: true,
            lo: false,
            mode: ferroce_engine::control::LinkMode::Udp,
            gids: vec![None, Some(GidEntry::roce_v2("10.0.0.1".parse().unwrap()))],
        };
        let link = LinkStatus { device, xdp: None };
        assert_eq!(
            as_text(&link),
            "link ferroce_eth0/1 state ACTIVE physical_state LINK_UP netdev eth0 mtu 1500 node_guid 0011:2233:4455:6677\n    \
             gid 1 10.0.0.1 type RoCE v2"
        );
        assert_eq!(
            as_json(&link)["gids"],
            json!([{ "index": 1, "address": "10.0.0.1", "type": "RoCE v2" }])
        );
    }

    #[test]
    fn xdp_mode_is_shown() {
        let geometry = ferroce_engine::link::xdp::Geometry {
            chunk: 4096,
            queues: 2,
            seats: 32,
            rx_ring: 512,
            tx_ring: 256,
        };
        let info = XdpInfo {
            geometry,
            driver: true,
            features: ferroce_engine::link::xdp::port::Features {
                zerocopy: false,
                multi_buffer: true,
                hugepages: false,
            },
        };
        let link = LinkStatus {
            device: DeviceInfo {
                mode: LinkMode::Xdp(info),
                ..DeviceInfo::default()
            },
            xdp: Some(XdpStatus {
                detached: false,
                programs: 3,
                drops: vec![("unowned".into(), 0), ("length".into(), 7)],
            }),
        };
        assert!(
            as_text(&link).ends_with(
                "\n    mode xdp driver copy queues 2 chunk 4096 programs 3/32 multi_buffer on hugepages off\n    \
                 dropped length 7"
            ),
            "{}",
            as_text(&link)
        );
        let json = as_json(&link);
        assert_eq!(json["mode"], "xdp");
        assert_eq!(json["xdp"]["drops"], json!({ "unowned": 0, "length": 7 }));
        assert_eq!(json["xdp"]["detached"], false);
        let mut link = link;
        (link.device.name, link.device.netdev) = ("rdma0".into(), "eth0".into());
        link.xdp = link.xdp.map(|status| XdpStatus {
            detached: true,
            ..status
        });
        assert_eq!(as_json(&link)["xdp"]["detached"], true);
        let text = as_text(&link);
        assert!(
            text.ends_with("ferroce link del rdma0; ferroce link add rdma0 netdev eth0 mode xdp"),
            "{text}"
        );
    }
}
