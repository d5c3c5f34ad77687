//! `ferroce status`: who uses the devices.

use std::net::Ipv6Addr;

use ferroce_engine::control::protocol::{CmProcessStatus, DaemonStatus, ProcessStatus, Reply, Request};
use ferroce_engine::control::{ControlError, QpReport};
use ferroce_engine::rdma_cm::{Address, PortSpace};
use serde_json::{Value, json};

use super::{CliError, Output, print, print_json, starter};

/// Runs the command.
pub fn run(output: Output) -> Result<(), CliError> {
    let client = starter::connect()?;
    let (mut processes, mut managed) = (Vec::new(), Vec::new());
    let mut reply = client.ask(&Request::Status)?;
    let daemon = loop {
        match reply {
            Reply::Process(process) => processes.push(*process),
            Reply::CmProcess(process) => managed.push(*process),
            Reply::StatusEnd(daemon) => break daemon,
            _ => return Err(ControlError::Malformed("no status").into()),
        }
        reply = client.next_reply()?;
    };
    // A daemon that took over from another one has them in the order in which they came to it.
    processes.sort_by_key(|process| process.slot);
    managed.sort_by_key(|process| (process.uid.is_none(), process.pid));
    if output.json {
        let processes: Vec<Value> = processes.iter().map(process_json).collect();
        let managed: Vec<Value> = managed.iter().map(managed_json).collect();
        return print_json(
            output,
            &json!({ "ferroced": daemon_json(&daemon), "processes": processes, "rdma_cm": managed }),
        );
    }
    print(&daemon_text(&daemon))?;
    processes
        .iter()
        .try_for_each(|process| print(&process_text(process)))?;
    managed
        .iter()
        .try_for_each(|process| print(&managed_text(process)))
}

fn daemon_text(daemon: &DaemonStatus) -> String {
    let text = format!(
        "ferroced pid {} uid {} release {} slots {}/{} receive_buffer {}",
        daemon.pid, daemon.uid, daemon.release, daemon.leased, daemon.slots, daemon.receive_buffer
    );
    text + &counters_text(&daemon.counters)
}

/// There are many; JSON has those that are zero as well.
fn counters_text(counters: &[(String, u64)]) -> String {
    counters
        .iter()
        .filter(|(_, value)| *value > 0)
        .map(|(name, value)| format!("\n    counter {name} {value}"))
        .collect()
}

fn process_text(process: &ProcessStatus) -> String {
    let ProcessStatus {
        slot,
        device,
        pid,
        command,
        uid,
        report,
    } = process;
    let mut text = format!("slot {slot} dev {device} pid {pid} comm {command} uid {uid}");
    let Some(report) = report else {
        return text + "\n    does not answer";
    };
    for QpReport {
        qpn,
        transport,
        state,
        dest_qpn,
        remote,
    } in &report.qps
    {
        text += &format!("\n    qp {qpn:#08x} type {transport} state {state}");
        if let Some(dest_qpn) = dest_qpn {
            text += &format!(" dest_qp {dest_qpn:#08x}");
        }
        if let Some(remote) = remote {
            text += &format!(" remote {remote}");
        }
    }
    text + &counters_text(&report.counters)
}

/// The ids of one process, each with both ends.
fn managed_text(process: &CmProcessStatus) -> String {
    let mut text = match process.uid {
        Some(uid) => format!("rdma_cm pid {} comm {} uid {uid}", process.pid, process.command),
        None => "rdma_cm of programs that ended".to_owned(),
    };
    for id in &process.ids {
        text += &format!(
            "\n    id {} ps {} state {}",
            id.id,
            port_space(id.port_space),
            id.state
        );
        for (name, value) in [
            ("dev", id.device.clone()),
            ("src", id.source.as_ref().map(address)),
            ("dst", id.dest.as_ref().map(address)),
            ("qp", id.qpn.map(|qpn| format!("{qpn:#08x}"))),
            ("dest_qp", id.remote_qpn.map(|qpn| format!("{qpn:#08x}"))),
        ] {
            if let Some(value) = value {
                text += &format!(" {name} {value}");
            }
        }
    }
    text
}

/// As rdma(8) names them.
fn port_space(port_space: PortSpace) -> &'static str {
    match port_space {
        PortSpace::Ipoib => "IPoIB",
        PortSpace::Tcp => "TCP",
        PortSpace::Udp => "UDP",
        PortSpace::Ib => "IB",
    }
}

fn address(address: &Address) -> String {
    match address {
        Address::Ip(address) => address.to_string(),
        Address::Ib(address) => format!(
            "[{}] service {:#018x}",
            Ipv6Addr::from(address.gid),
            address.service_id
        ),
    }
}

fn managed_json(process: &CmProcessStatus) -> Value {
    let ids = process.ids.iter().map(|id| {
        json!({
            "id": id.id,
            "ps": port_space(id.port_space),
            "state": id.state,
            "dev": id.device,
            "src": id.source.as_ref().map(address),
            "dst": id.dest.as_ref().map(address),
            "qpn": id.qpn,
            "dest_qpn": id.remote_qpn,
        })
    });
    json!({
        "pid": process.pid,
        "comm": process.command,
        "uid": process.uid,
        "ids": ids.collect::<Vec<Value>>(),
    })
}

fn counters_json(counters: &[(String, u64)]) -> Value {
    let counters = counters
        .iter()
        .map(|(name, value)| (name.clone(), (*value).into()));
    Value::Object(counters.collect())
}

fn process_json(process: &ProcessStatus) -> Value {
    let mut value = json!({
        "slot": process.slot,
        "dev": process.device,
        "pid": process.pid,
        "comm": process.command,
        "uid": process.uid,
        "answers": process.report.is_some(),
    });
    if let Some(report) = &process.report {
        value["counters"] = counters_json(&report.counters);
        value["qps"] = serde_json::to_value(&report.qps).unwrap_or_default();
    }
    value
}

fn daemon_json(daemon: &DaemonStatus) -> Value {
    json!({
        "pid": daemon.pid,
        "uid": daemon.uid,
        "release": daemon.release,
        "slots": daemon.slots,
        "leased": daemon.leased,
        "receive_buffer": daemon.receive_buffer,
        "counters": counters_json(&daemon.counters),
    })
}
