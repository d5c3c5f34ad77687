//! `ferroce run`: becomes a program that finds the devices of Ferroce.

use std::convert::Infallible;
use std::ffi::{OsStr, OsString};
use std::io::{self, Write as _};
use std::os::unix::process::CommandExt;
use std::process::Command;

use clap::Args;
use ferroce_engine::control::protocol::Request;
use ferroce_engine::control::{ControlError, TREE_VARIABLE};

use super::installation::Installation;
use super::{CliError, program, starter};

const ENVIRONMENT: &str = "Environment that the program heeds (more in ferroce(8)):
  FERROCE_LOG=debug                 What Ferroce does, on standard error
  FERROCE_PCAP=/tmp/x-{pid}.pcap    A capture of its packets
  FERROCE_FAULT=loss=0.01,seed=7    Faults on purpose: loss, dup, reorder, corrupt";

/// Arguments of `ferroce run`.
#[derive(Args)]
#[command(after_help = ENVIRONMENT)]
pub struct Run {
    /// The program and its arguments.
    #[arg(
        trailing_var_arg = true,
        allow_hyphen_values = true,
        required = true,
        value_name = "CMD"
    )]
    command: Vec<OsString>,
}

impl Run {
    /// Replaces this process by the program: same pid, signals and exit status. The daemon stays as
    /// long as that process lives.
    pub fn run(self) -> Result<Infallible, CliError> {
        let installation = Installation::find()?;
        let daemon = starter::connect_or_start()?;
        let tree = daemon.welcome().tree.clone();
        match daemon.ask(&Request::Hold) {
            // The daemon does not see our pid; then it is to see the connection as long as we live.
            Err(ControlError::Refused(_)) => daemon.keep_across_exec()?,
            other => drop(other?),
        }
        let (program, arguments) = self.command.split_first().ok_or(CliError::NoDaemon)?;
        if let Some(why) = program::obstacle(program) {
            // To a closed standard error nothing can be said.
            let program = program.to_string_lossy();
            _ = writeln!(
                io::stderr(),
                "ferroce: `{program}` {why}: it finds no devices itself, only what it starts may"
            );
        }
        let provider = installation.provider.as_os_str();
        let source = Command::new(program)
            .args(arguments)
            .env(TREE_VARIABLE, tree)
            .env(
                "LD_PRELOAD",
                prepended(installation.shim.as_os_str(), "LD_PRELOAD"),
            )
            .env("RDMAV_DRIVERS", prepended(provider, "RDMAV_DRIVERS"))
            .env("IBV_DRIVERS", prepended(provider, "IBV_DRIVERS"))
            .exec();
        Err(CliError::Exec {
            program: program.to_string_lossy().into_owned(),
            source,
        })
    }
}

/// The value before what the variable has, unless that has it already.
fn prepended(value: &OsStr, variable: &str) -> OsString {
    let mut list = value.to_owned();
    if let Some(others) = std::env::var_os(variable).filter(|others| !others.is_empty()) {
        if others
            .as_encoded_bytes()
            .split(|byte| *byte == b':')
            .any(|one| one == value.as_encoded_bytes())
        {
            return others;
        }
        list.push(":");
        list.push(others);
    }
    list
}
