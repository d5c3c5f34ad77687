//! The command line; see ferroce(8).

#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    ferroce_tools::cli::main()
}
