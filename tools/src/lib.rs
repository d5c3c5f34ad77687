//! The tools of Ferroce: what `ferroced` (the daemon) and `ferroce` (the command line) are made of.

#![deny(unsafe_code)]

pub mod cli;
pub mod daemon;
pub mod netlink;

use tracing_subscriber::EnvFilter;

/// Logs to standard error: warnings by default, more with each `-v`, or what `FERROCE_LOG` says
/// (in the form of `RUST_LOG`).
pub fn log_to_stderr(verbose: u8) {
    let default = ["warn", "info", "debug"]
        .get(usize::from(verbose))
        .unwrap_or(&"trace");
    let filter = match std::env::var("FERROCE_LOG") {
        Ok(wanted) if verbose == 0 && !wanted.is_empty() => EnvFilter::new(wanted),
        _ => EnvFilter::new(default),
    };
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_target(false)
        .init();
}
