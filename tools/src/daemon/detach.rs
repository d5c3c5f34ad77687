//! Starting the daemon in the background, so that its starter knows when it is ready.
//!
//! Two processes: the starter's child waits for the daemon's word on a pipe and ends with its
//! status; the daemon is then nobody's child, and no program's `wait` will ever see it.

use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};

use super::{DaemonError, sys};

/// Option by which the daemon knows that it is to report on standard output.
pub const READY_OPTION: &str = "--ready-on-stdout";
const READY: &[u8] = b"ready\n";

/// Runs this program again with these arguments as the daemon, and waits until it is ready or has
/// failed; then it has said why on standard error.
pub fn start(arguments: impl Iterator<Item = OsString>) -> io::Result<ExitCode> {
    sys::close_inherited_on_exec()?;
    let mut daemon = Command::new(std::env::current_exe()?)
        .args(arguments)
        .arg(READY_OPTION)
        // The daemon itself must see the true sysfs.
        .env_remove("LD_PRELOAD")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()?;
    let mut word = Vec::new();
    if let Some(mut pipe) = daemon.stdout.take() {
        pipe.read_to_end(&mut word)?;
    }
    if word == READY {
        return Ok(ExitCode::SUCCESS);
    }
    let status = daemon.wait()?;
    Ok(ExitCode::from(
        status
            .code()
            .and_then(|code| u8::try_from(code).ok())
            .unwrap_or(1),
    ))
}

/// Leaves the session and directory of the starter.
pub fn leave_starter() -> io::Result<()> {
    rustix::process::setsid()?;
    std::env::set_current_dir("/")
}

/// Tells the starter that the daemon serves, and lets its standard streams go; what is logged from
/// now on goes to the file, if one is given.
pub fn report_ready(log: Option<&Path>) -> Result<(), DaemonError> {
    let sink = match log {
        Some(path) => OpenOptions::new()
            .create(true)
            .append(true)
            .open(path)
            .map_err(|source| DaemonError::Log {
                path: path.to_owned(),
                source,
            })?,
        None => File::options()
            .write(true)
            .open("/dev/null")
            .map_err(DaemonError::io("open /dev/null"))?,
    };
    hand_over(sink.into()).map_err(DaemonError::io("tell who started it"))
}

fn hand_over(sink: OwnedFd) -> io::Result<()> {
    io::stdout().write_all(READY)?;
    io::stdout().flush()?;
    rustix::stdio::dup2_stdout(&sink)?;
    rustix::stdio::dup2_stderr(&sink)?;
    Ok(())
}
