//! What the provider tells the user of the program, on stderr.

use std::fmt;
use std::io::{self, Write};

use ferroce_engine::environment;
use tracing_subscriber::EnvFilter;

/// Environment variable that asks for a log, in the form of `RUST_LOG`: `debug`, `ferroce_engine=trace`.
pub const LOG_VARIABLE: &str = "FERROCE_LOG";

/// Tells something on one line, if there is a stderr.
pub(crate) fn say(message: fmt::Arguments<'_>) {
    // Not eprintln!, which panics when stderr is closed.
    _ = writeln!(io::stderr(), "ferroce: {message}");
}

/// Starts the log: what goes wrong within Ferroce, or what `FERROCE_LOG` asks for. The program's own output stays as
/// it is otherwise.
#[cfg_attr(test, allow(dead_code))]
pub(crate) fn start_log() {
    let wanted = environment::variable(LOG_VARIABLE).and_then(|wanted| wanted.into_string().ok());
    let filter = EnvFilter::try_new(wanted.as_deref().unwrap_or("warn")).unwrap_or_else(|error| {
        say(format_args!("{LOG_VARIABLE}: {error}"));
        EnvFilter::new("warn")
    });
    // It fails where a log was started before, by another libibverbs of the process: then that serves.
    _ = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(io::stderr)
        .log_internal_errors(false)
        .try_init();
}
