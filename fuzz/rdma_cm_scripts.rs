//! Scripts for the target `rdma_cm`: listeners, and what captured requests bring; a client's way.

use ferroce_engine::control::protocol;
use ferroce_engine::rdma_cm::{Address, Command, Ece, Id, Parameters, PortSpace, QpKind};

fn step(script: &mut Vec<u8>, what: u8, bytes: &[u8]) {
    script.push(what);
    script.extend((bytes.len() as u16).to_le_bytes());
    script.extend(bytes);
}

fn command(script: &mut Vec<u8>, command: &Command) {
    step(script, 1, &protocol::encode(command));
}

fn address(text: &str) -> Address {
    Address::Ip(text.parse().expect("an address"))
}

/// A listener, and its number: the first id of a process is 1.
fn listener(script: &mut Vec<u8>, port_space: PortSpace) -> Id {
    let id = 1;
    command(
        script,
        &Command::Create {
            port_space,
            qp_kind: QpKind::Rc,
        },
    );
    let address = address("[::]:7174");
    command(script, &Command::Bind { id, address });
    command(script, &Command::Listen { id, backlog: 5 });
    id
}

/// A request that a capture has, accepted over a restart.
pub fn served(mad: &[u8], port_space: PortSpace) -> Vec<u8> {
    let mut script = Vec::new();
    let listener = listener(&mut script, port_space);
    step(&mut script, 0, mad);
    let id = listener + 1;
    command(&mut script, &Command::Taken { id });
    step(&mut script, 4, &[9, 0, 0]);
    command(
        &mut script,
        &Command::Accept {
            id,
            parameters: Some(Parameters {
                qpn: 17,
                ..Parameters::default()
            }),
            ece: Ece::default(),
        },
    );
    step(&mut script, 0, mad);
    step(&mut script, 4, &[1, 20, 1]);
    command(&mut script, &Command::Disconnect { id });
    step(&mut script, 2, &[255, 20]);
    script
}

/// A client that asks a peer which does not answer.
pub fn asked(port_space: PortSpace) -> Vec<u8> {
    let mut script = Vec::new();
    let id = 1;
    command(
        &mut script,
        &Command::Create {
            port_space,
            qp_kind: QpKind::Rc,
        },
    );
    command(
        &mut script,
        &Command::ResolveAddress {
            id,
            source: None,
            dest: address("10.77.0.2:7174"),
            timeout_ms: 2000,
        },
    );
    step(&mut script, 4, &[9, 0, 0]);
    step(&mut script, 3, &[1]);
    command(&mut script, &Command::ResolveRoute { id, timeout_ms: 1 });
    command(
        &mut script,
        &Command::Connect {
            id,
            parameters: Parameters::default(),
            ece: Ece::default(),
        },
    );
    step(&mut script, 2, &[255, 20]);
    step(&mut script, 4, &[0, 3, 1]);
    step(&mut script, 2, &[255, 23]);
    script
}
