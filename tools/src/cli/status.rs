//! `ferroce status`: who uses the devices.

use ferroce_engine::control::protocol::{DaemonStatus, ProcessStatus, Reply, Request};
use ferroce_engine::control::{ControlError, QpReport};
use serde_json::{Value, json};

use super::{CliError, Output, print, print_json, starter};

/// Runs the command.
pub fn run(output: Output) -> Result<(), CliError> {
    let client = starter::connect()?;
    let mut processes = Vec::new();
    let mut reply = client.ask(&Request::Status)?;
    let daemon = loop {
        match reply {
            Reply::Process(process) => processes.push(*process),
            Reply::StatusEnd(daemon) => break daemon,
            _ => return Err(ControlError::Malformed("no status").into()),
        }
        reply = client.next_reply()?;
    };
    if output.json {
        let processes: Vec<Value> = processes.iter().map(process_json).collect();
        return print_json(
            output,
            &json!({ "ferroced": daemon_json(&daemon), "processes": processes }),
        );
    }
    print(&format!(
        "ferroced pid {} uid {} release {} slots {}/{} receive_buffer {}",
        daemon.pid, daemon.uid, daemon.release, daemon.leased, daemon.slots, daemon.receive_buffer
    ))?;
    processes
        .iter()
        .try_for_each(|process| print(&process_text(process)))
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
    // There are many; JSON has those that are zero as well.
    for (name, value) in report.counters.iter().filter(|(_, value)| *value > 0) {
        text += &format!("\n    counter {name} {value}");
    }
    text
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
        let counters: serde_json::Map<String, Value> = report
            .counters
            .iter()
            .map(|(name, value)| (name.clone(), (*value).into()))
            .collect();
        value["counters"] = Value::Object(counters);
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
    })
}
