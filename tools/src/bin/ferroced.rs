//! The daemon of one network namespace; see ferroced(8).

#![forbid(unsafe_code)]

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::error::ErrorKind;
use clap::{ArgAction, CommandFactory, Parser};
use ferroce_tools::daemon::{self, Daemon, DaemonError, Options, detach};

/// Control plane of the Ferroce software RDMA NIC: one for each network namespace.
#[derive(Parser)]
#[command(name = "ferroced", version)]
struct Arguments {
    /// Number of slots: programs that can use devices at once, 1 to 251.
    #[arg(long, value_name = "N", default_value_t = 251, value_parser = clap::value_parser!(u8).range(1..=251))]
    slots: u8,
    /// Leave that long after the last client [default: stay].
    #[arg(long, value_name = "SECONDS")]
    idle_exit: Option<u64>,
    /// Admit members of this group, besides root and the daemon's own user.
    #[arg(long, value_name = "GROUP", value_parser = daemon::parse_group)]
    group: Option<u32>,
    /// Go to the background; return when the daemon is ready.
    #[arg(long)]
    detach: bool,
    /// Log to this file after going to the background [default: nowhere].
    #[arg(long, value_name = "FILE")]
    log: Option<PathBuf>,
    /// Log more: -v what is leased and changed, -vv every request (or set FERROCE_LOG).
    #[arg(short, long, action = ArgAction::Count)]
    verbose: u8,
    /// Says on standard output when the daemon is ready; what `--detach` starts.
    #[arg(long, hide = true)]
    ready_on_stdout: bool,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    if arguments.log.is_some() && !arguments.detach && !arguments.ready_on_stdout {
        let text = "--log needs --detach: in the foreground the log goes to standard error";
        Arguments::command()
            .error(ErrorKind::MissingRequiredArgument, text)
            .exit();
    }
    let result = if arguments.detach {
        let others = std::env::args_os()
            .skip(1)
            .filter(|argument| argument != "--detach");
        detach::start(others).map_err(DaemonError::io("go to the background"))
    } else {
        serve(&arguments).map(|()| ExitCode::SUCCESS)
    };
    result.unwrap_or_else(|error| {
        eprintln!("ferroced: {error}");
        ExitCode::FAILURE
    })
}

fn serve(arguments: &Arguments) -> Result<(), DaemonError> {
    ferroce_tools::log_to_stderr(arguments.verbose);
    // Where the starter is, which is left.
    let log = match &arguments.log {
        Some(path) => Some(std::path::absolute(path).map_err(DaemonError::io("find the current directory"))?),
        None => None,
    };
    if arguments.ready_on_stdout {
        detach::leave_starter().map_err(DaemonError::io("leave the session"))?;
    }
    let daemon = Daemon::new(&Options {
        slots: arguments.slots,
        idle_exit: arguments.idle_exit.map(Duration::from_secs),
        group: arguments.group,
    })?;
    if arguments.ready_on_stdout {
        detach::report_ready(log.as_deref())?;
    }
    daemon.run()
}
