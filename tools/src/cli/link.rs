//! `ferroce link`: devices.

use clap::Subcommand;
use ferroce_engine::control::protocol::{Reply, Request};
use ferroce_engine::control::{ControlError, DeviceInfo, Refusal};
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
    Add {
        /// Name of the new device.
        #[arg(value_name = "NAME")]
        name: String,
        /// The word `netdev`.
        #[arg(value_name = "netdev", value_parser = ["netdev"])]
        keyword: String,
        /// The network interface.
        #[arg(value_name = "IF")]
        netdev: String,
    },
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
            Self::Add { name, netdev, .. } => Request::LinkAdd {
                name,
                netdev,
                xdp: None,
            },
            Self::Del { name } => Request::LinkDel { name },
        };
        match starter::connect_or_start()?.ask(&request)? {
            Reply::Done => Ok(()),
            _ => Err(ControlError::Malformed("no answer to a change of links").into()),
        }
    }
}

fn show(name: Option<String>, output: Output) -> Result<(), CliError> {
    let Reply::Links(mut devices) = starter::connect_or_start()?.ask(&Request::Links)? else {
        return Err(ControlError::Malformed("no list of links").into());
    };
    if let Some(name) = name {
        devices.retain(|device| device.name == name);
        if devices.is_empty() {
            return Err(ControlError::from(Refusal::UnknownDevice { name }).into());
        }
    }
    if output.json {
        return print_json(output, &Value::Array(devices.iter().map(as_json).collect()));
    }
    if devices.is_empty() {
        eprintln!(
            "ferroce: no device: none of the network interfaces is up and has an address, or theirs were removed"
        );
    }
    devices.iter().try_for_each(|device| print(&as_text(device)))
}

fn as_text(device: &DeviceInfo) -> String {
    let DeviceInfo {
        name, netdev, mtu, ..
    } = device;
    let (state, physical) = states(device);
    let mut text = format!(
        "link {name}/1 state {state} physical_state {physical} netdev {netdev} mtu {mtu} node_guid {}",
        guid(device.guid)
    );
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

fn as_json(device: &DeviceInfo) -> Value {
    let (state, physical) = states(device);
    let gids: Vec<Value> = device
        .gids
        .iter()
        .enumerate()
        .filter_map(|(index, entry)| Some((index, entry.as_ref()?)))
        .map(|(index, entry)| json!({ "index": index, "address": entry.addr, "type": gid_type(entry.version) }))
        .collect();
    json!({
        "ifname": device.name,
        "port": 1,
        "state": state,
        "physical_state": physical,
        "netdev": device.netdev,
        "netdev_index": device.ifindex,
        "mtu": device.mtu,
        "node_guid": guid(device.guid),
        "uverbs": device.uverbs,
        "gids": gids,
    })
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
        assert_eq!(
            as_text(&device),
            "link ferroce_eth0/1 state ACTIVE physical_state LINK_UP netdev eth0 mtu 1500 node_guid 0011:2233:4455:6677\n    \
             gid 1 10.0.0.1 type RoCE v2"
        );
        assert_eq!(
            as_json(&device)["gids"],
            json!([{ "index": 1, "address": "10.0.0.1", "type": "RoCE v2" }])
        );
    }
}
