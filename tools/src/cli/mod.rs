//! `ferroce`: the command line.

pub mod decode;
pub mod installation;
pub mod link;
pub mod program;
pub mod run;
pub mod starter;
pub mod status;

use std::process::ExitCode;

use clap::error::ErrorKind;
use clap::{Args, CommandFactory, Parser, Subcommand};
use ferroce_engine::control::ControlError;

const USAGE: &str = "ferroce [ OPTIONS ] OBJECT { COMMAND | help }
       ferroce run [ -- ] CMD [ ARGUMENTS ]
       ferroce decode FILE
where  OBJECT := { link | status }
       OPTIONS := { -j[son] | -p[retty] | -V[ersion] | -h[elp] }";

/// Software RDMA NIC in user space: runs unmodified verbs programs, and shows its devices.
#[derive(Parser)]
#[command(name = "ferroce", version, override_usage = USAGE, infer_subcommands = true, arg_required_else_help = true)]
pub struct Ferroce {
    #[command(flatten)]
    output: Output,
    #[command(subcommand)]
    object: Object,
}

/// How results are printed.
#[derive(Args, Clone, Copy, Default)]
pub struct Output {
    /// Print JSON.
    #[arg(short, long)]
    json: bool,
    /// With --json: on many lines.
    #[arg(short, long)]
    pretty: bool,
}

impl Output {
    /// Options may stand before and after the object.
    fn and(self, other: Self) -> Self {
        Self {
            json: self.json || other.json,
            pretty: self.pretty || other.pretty,
        }
    }
}

#[derive(Subcommand)]
enum Object {
    /// Run a program that finds the devices of Ferroce; starts ferroced if none runs.
    Run(run::Run),
    /// Show, add and remove devices.
    #[command(infer_subcommands = true)]
    Link {
        #[command(flatten)]
        output: Output,
        #[command(subcommand)]
        command: Option<link::Link>,
    },
    /// Show the programs that use devices, their queue pairs, ids of RDMA CM, and counters.
    Status {
        #[command(flatten)]
        output: Output,
    },
    /// Print the RoCE packets of a capture file; exit status 1 if any ICRC is bad.
    Decode(decode::Decode),
}

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
pub enum CliError {
    /// The daemon could not be asked, or refused.
    #[error(transparent)]
    Control(#[from] ControlError),
    /// The daemon is needed and does not run.
    #[error(
        "no ferroced runs in this network namespace: start it by `ferroced --detach`, or a program by `ferroce run -- CMD`"
    )]
    NoDaemon,
    /// The daemon could not be started.
    #[error("{0}")]
    Start(String),
    /// A file of the installation is missing.
    #[error("{0}")]
    Installation(String),
    /// The program of `ferroce run` could not be started.
    #[error("can't run `{program}`: {}", why_not(source))]
    Exec {
        /// The program.
        program: String,
        /// The error.
        source: std::io::Error,
    },
    /// A capture file could not be read.
    #[error("can't read capture {file}: {reason}")]
    Capture {
        /// The file.
        file: String,
        /// What is wrong.
        reason: String,
    },
    /// Standard output does not take the result.
    #[error("can't print: {0}")]
    Print(#[from] std::io::Error),
}

/// Why a program can't be run, and what to do about it.
fn why_not(source: &std::io::Error) -> String {
    match source.kind() {
        std::io::ErrorKind::NotFound => {
            "no such program, or no interpreter for it: install it, or give its path".into()
        }
        std::io::ErrorKind::PermissionDenied => "it is not executable by you: see `ls -l`".into(),
        _ => source.to_string(),
    }
}

impl CliError {
    /// Exit status: as `env` gives for a program that it can't run, else 1.
    fn status(&self) -> u8 {
        match self {
            Self::Exec { source, .. } if source.kind() == std::io::ErrorKind::NotFound => 127,
            Self::Exec { .. } => 126,
            _ => 1,
        }
    }
}

/// Runs the command line.
pub fn main() -> ExitCode {
    let Ferroce { output, object } = Ferroce::parse();
    if (output.json || output.pretty) && matches!(object, Object::Run(_) | Object::Decode(_)) {
        let text = "--json and --pretty are for `link show` and `status` only";
        Ferroce::command().error(ErrorKind::ArgumentConflict, text).exit();
    }
    let result = match object {
        Object::Run(run) => run.run().map(|never| match never {}),
        Object::Link {
            output: after,
            command,
        } => command.unwrap_or_default().run(output.and(after)),
        Object::Status { output: after } => status::run(output.and(after)),
        Object::Decode(decode) => match decode.run() {
            Ok(true) => Ok(()),
            // The lines say which.
            Ok(false) => return ExitCode::FAILURE,
            Err(error) => Err(error),
        },
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        // Whoever read our output has enough: no failure of ours.
        Err(CliError::Print(error)) if error.kind() == std::io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("ferroce: {error}");
            ExitCode::from(error.status())
        }
    }
}

/// Prints a value as JSON, as the options say.
fn print_json(output: Output, value: &serde_json::Value) -> Result<(), CliError> {
    let text = if output.pretty {
        format!("{value:#}")
    } else {
        value.to_string()
    };
    print(&text)
}

/// Prints text and a newline.
fn print(text: &str) -> Result<(), CliError> {
    use std::io::Write;
    let mut stdout = std::io::stdout().lock();
    writeln!(stdout, "{text}")?;
    Ok(stdout.flush()?)
}
