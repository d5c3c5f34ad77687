//! Frames of a capture file, pcap or pcapng.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;
use std::time::Duration;

use pcap_file::pcap::PcapReader;
use pcap_file::pcapng::blocks::interface_description::{
    InterfaceDescriptionBlock, InterfaceDescriptionOption,
};
use pcap_file::pcapng::{Block, PcapNgReader};
use pcap_file::{DataLink, PcapError, TsResolution};

/// First bytes of a pcapng file, in either byte order.
const PCAPNG_MAGIC: [u8; 4] = [0x0a, 0x0d, 0x0d, 0x0a];

type Input = Box<dyn Read>;

/// An open capture file.
pub enum Capture {
    /// The older format.
    Pcap(PcapReader<Input>),
    /// The newer format.
    PcapNg(PcapNgReader<Input>),
}

/// One captured frame.
pub struct Captured {
    /// Time since 1970.
    pub time: Duration,
    /// What the bytes begin with.
    pub link: DataLink,
    /// Bytes that the frame had on the wire.
    pub original_len: usize,
    /// Bytes captured of them.
    pub bytes: Vec<u8>,
}

impl Capture {
    /// Opens a file, or standard input for `-`.
    pub fn open(path: &Path) -> Result<Self, PcapError> {
        if path == Path::new("-") {
            Self::read(io::stdin())
        } else {
            Self::read(File::open(path).map_err(PcapError::IoError)?)
        }
    }

    /// Reads the beginning of a capture.
    pub fn read(input: impl Read + 'static) -> Result<Self, PcapError> {
        let mut input = BufReader::new(input);
        let newer = input
            .fill_buf()
            .map_err(PcapError::IoError)?
            .starts_with(&PCAPNG_MAGIC);
        let input: Input = Box::new(input);
        if newer {
            PcapNgReader::new(input).map(Self::PcapNg)
        } else {
            PcapReader::new(input).map(Self::Pcap)
        }
    }

    /// The next frame.
    pub fn next(&mut self) -> Option<Result<Captured, PcapError>> {
        match self {
            Self::Pcap(reader) => next_of_pcap(reader),
            Self::PcapNg(reader) => next_of_pcapng(reader),
        }
    }
}

/// The library's checked packets refuse every frame longer than the snap length, that is every
/// truncated one; so the raw ones are taken.
fn next_of_pcap(reader: &mut PcapReader<Input>) -> Option<Result<Captured, PcapError>> {
    let header = reader.header();
    let packet = match reader.next_raw_packet()? {
        Ok(packet) => packet,
        Err(error) => return Some(Err(error)),
    };
    let nanoseconds = match header.ts_resolution {
        TsResolution::MicroSecond => u64::from(packet.ts_frac) * 1000,
        TsResolution::NanoSecond => u64::from(packet.ts_frac),
    };
    Some(Ok(Captured {
        time: Duration::from_secs(packet.ts_sec.into()) + Duration::from_nanos(nanoseconds),
        link: header.datalink,
        original_len: packet.orig_len as usize,
        bytes: packet.data.into_owned(),
    }))
}

fn next_of_pcapng(reader: &mut PcapNgReader<Input>) -> Option<Result<Captured, PcapError>> {
    loop {
        let block = match reader.next_block()? {
            Ok(block) => block.into_owned(),
            Err(error) => return Some(Err(error)),
        };
        let interface = |id: u32| reader.interfaces().get(id as usize);
        let captured = match block {
            Block::EnhancedPacket(packet) => interface(packet.interface_id).map(|interface| Captured {
                // The library gives the count of ticks, whatever their length, as nanoseconds.
                time: ticks_to_time(packet.timestamp.as_nanos() as u64, interface),
                link: interface.linktype,
                original_len: packet.original_len as usize,
                bytes: packet.data.into_owned(),
            }),
            Block::Packet(packet) => interface(packet.interface_id.into()).map(|interface| Captured {
                time: ticks_to_time(packet.timestamp, interface),
                link: interface.linktype,
                original_len: packet.original_len as usize,
                bytes: packet.data.into_owned(),
            }),
            Block::SimplePacket(packet) => interface(0).map(|interface| Captured {
                time: Duration::ZERO,
                link: interface.linktype,
                original_len: packet.original_len as usize,
                bytes: packet.data.into_owned(),
            }),
            _ => continue,
        };
        return Some(captured.ok_or(PcapError::InvalidField(
            "packet of an interface that the file does not describe",
        )));
    }
}

/// The option if_tsresol: 10 to the minus n seconds a tick, or 2 to the minus n if bit 7 is set;
/// microseconds without it.
fn ticks_to_time(ticks: u64, interface: &InterfaceDescriptionBlock<'_>) -> Duration {
    let resolution = interface.options.iter().find_map(|option| match option {
        InterfaceDescriptionOption::IfTsResol(resolution) => Some(*resolution),
        _ => None,
    });
    let exponent = u32::from(resolution.unwrap_or(6) & 0x7f);
    let base: u128 = if resolution.unwrap_or(6) & 0x80 == 0 {
        10
    } else {
        2
    };
    let per_second = base.checked_pow(exponent).unwrap_or(u128::MAX);
    let nanoseconds = (u128::from(ticks) % per_second).saturating_mul(1_000_000_000) / per_second;
    Duration::from_secs((u128::from(ticks) / per_second) as u64) + Duration::from_nanos(nanoseconds as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_have_the_length_that_the_interface_says() {
        let interface = |resolution: Option<u8>| InterfaceDescriptionBlock {
            linktype: DataLink::ETHERNET,
            snaplen: 0,
            options: resolution
                .map(InterfaceDescriptionOption::IfTsResol)
                .into_iter()
                .collect(),
        };
        assert_eq!(
            ticks_to_time(1_500_000, &interface(None)),
            Duration::from_millis(1500)
        );
        assert_eq!(
            ticks_to_time(1_500_000_000, &interface(Some(9))),
            Duration::from_millis(1500)
        );
        assert_eq!(
            ticks_to_time(3 << 31, &interface(Some(0x80 | 32))),
            Duration::from_millis(1500)
        );
        assert_eq!(ticks_to_time(u64::MAX, &interface(Some(0))).as_secs(), u64::MAX);
        assert_eq!(ticks_to_time(u64::MAX, &interface(Some(0x7f))), Duration::ZERO);
    }

    #[test]
    fn no_capture_is_an_error() {
        assert!(Capture::read(&b"not a capture\n"[..]).is_err());
        assert!(Capture::read(&b""[..]).is_err());
    }
}
