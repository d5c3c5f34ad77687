//! `ferroce decode`: a capture file as one line per RoCE packet, with its ICRC checked.

mod capture;
mod packet;

use std::io::{self, BufWriter, Write};
use std::path::PathBuf;

use clap::Args;
use pcap_file::PcapError;

use super::CliError;
use capture::Capture;
use packet::Icrc;

/// Arguments of `ferroce decode`.
#[derive(Args)]
pub struct Decode {
    /// Capture file, pcap or pcapng; `-` is standard input.
    #[arg(value_name = "FILE")]
    file: PathBuf,
}

/// What is wrong with a file, without the library's names for it.
fn reason(error: PcapError) -> String {
    match error {
        PcapError::IoError(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
            "it ends before a packet or header does".into()
        }
        PcapError::IoError(error) => error.to_string(),
        PcapError::IncompleteBuffer => "it ends before a packet or header does".into(),
        PcapError::InvalidField(what) if what.contains("magic") => {
            "it is no capture: give a pcap or pcapng file".into()
        }
        other => other.to_string(),
    }
}

impl Decode {
    /// Prints every RoCE packet; true if all of them are sound.
    pub fn run(&self) -> Result<bool, CliError> {
        let unreadable = |reason: String| CliError::Capture {
            file: self.file.display().to_string(),
            reason,
        };
        let mut capture = Capture::open(&self.file).map_err(|error| {
            unreadable(match error {
                PcapError::IoError(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                    "it is too short for a capture: give a pcap or pcapng file".into()
                }
                error => reason(error),
            })
        })?;
        let mut output = BufWriter::new(io::stdout().lock());
        let mut sound = true;
        while let Some(captured) = capture.next() {
            let captured = captured.map_err(|error| unreadable(reason(error)))?;
            let time = format!("{}.{:09}", captured.time.as_secs(), captured.time.subsec_nanos());
            for packet in packet::packets(&captured) {
                sound &= !matches!(packet.icrc, Icrc::Bad);
                writeln!(output, "{time} {packet}")?;
            }
        }
        output.flush()?;
        Ok(sound)
    }
}
