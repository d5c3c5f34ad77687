//! Reaching the daemon, and starting one if there is none.

use std::process::{Command, Stdio};

use ferroce_engine::control::{Client, ControlError};

use super::CliError;
use super::installation::Installation;

/// Seconds that a daemon started by us stays after its last client.
const IDLE_EXIT: &str = "5";
/// Another `ferroce run` may start its daemon at the same time, or a daemon may just leave.
const ATTEMPTS: u32 = 4;

/// Connects to the daemon of this network namespace.
pub fn connect() -> Result<Client, CliError> {
    Client::connect().map_err(|error| match error {
        ControlError::NoDaemon => CliError::NoDaemon,
        other => other.into(),
    })
}

/// Connects to the daemon; starts one if there is none, and waits until it is ready.
pub fn connect_or_start() -> Result<Client, CliError> {
    let mut failure = None;
    for _ in 0..ATTEMPTS {
        match Client::connect() {
            Err(ControlError::NoDaemon | ControlError::Gone) => failure = start()?,
            other => return Ok(other?),
        }
    }
    Err(failure.unwrap_or(CliError::NoDaemon))
}

/// Starts a daemon. The error inside is the daemon's own: it may be that another one runs already.
fn start() -> Result<Option<CliError>, CliError> {
    let program = Installation::daemon();
    let output = Command::new(&program)
        .args(["--detach", "--idle-exit", IDLE_EXIT])
        .env_remove("LD_PRELOAD")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .output()
        .map_err(|error| CliError::Start(format!("can't start {}: {error}", program.display())))?;
    if output.status.success() {
        return Ok(None);
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let line = said.lines().last().unwrap_or("it said nothing");
    let line = line.strip_prefix("ferroced: ").unwrap_or(line);
    Ok(Some(CliError::Start(format!("ferroced did not start: {line}"))))
}
