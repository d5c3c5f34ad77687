//! The captures that the tests read.

use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};

use pcap_file::DataLink;
use pcap_file::pcap::PcapReader;

/// The repository's folder of that name under `tests/`.
pub fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests").join(name)
}

/// All `.pcap` files of a folder, by name.
pub fn pcaps(folder: &Path) -> Vec<PathBuf> {
    let entries = folder
        .read_dir()
        .unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
    let mut files: Vec<_> = entries
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|ext| ext == "pcap"))
        .collect();
    files.sort();
    assert!(!files.is_empty(), "no captures in {}", folder.display());
    files
}

/// The Ethernet frames of a capture.
pub fn frames(file: &Path) -> Vec<Vec<u8>> {
    let open = File::open(file).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
    let mut reader = PcapReader::new(BufReader::new(open)).unwrap();
    assert_eq!(reader.header().datalink, DataLink::ETHERNET, "{}", file.display());
    let mut frames = Vec::new();
    while let Some(packet) = reader.next_packet() {
        frames.push(packet.unwrap().data.into_owned());
    }
    frames
}
