//! The daemon of one network namespace; see ferroced(8).

use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use ferroce_tools::daemon::{Daemon, Options};

/// Control plane of the Ferroce software RDMA NIC, one per network namespace.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    /// Number of slots that processes can lease.
    #[arg(long, value_name = "N", default_value_t = 251, value_parser = clap::value_parser!(u8).range(1..=251))]
    slots: u8,
    /// Leave that long after the last client (default: stay).
    #[arg(long, value_name = "SECONDS")]
    idle_exit: Option<u64>,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let options = Options {
        slots: arguments.slots,
        idle_exit: arguments.idle_exit.map(Duration::from_secs),
        ..Options::default()
    };
    match Daemon::new(&options).and_then(|daemon| daemon.run()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("ferroced: {error}");
            ExitCode::FAILURE
        }
    }
}
