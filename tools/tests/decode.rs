//! `ferroce decode` on the project's captures, and on damaged, truncated and converted ones.

use std::borrow::Cow;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

use ferroce_wire::{Headers, Network, Opcode, Psn, datagram};
use pcap_file::DataLink;
use pcap_file::pcap::{PcapHeader, PcapReader, PcapWriter, RawPcapPacket};
use pcap_file::pcapng::PcapNgWriter;
use pcap_file::pcapng::blocks::enhanced_packet::EnhancedPacketBlock;
use pcap_file::pcapng::blocks::interface_description::{
    InterfaceDescriptionBlock, InterfaceDescriptionOption,
};

const PACKETS: usize = 1220;

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../tests/golden")
        .join(name)
}

fn decode(file: &Path) -> Output {
    Command::new(env!("CARGO_BIN_EXE_ferroce"))
        .arg("decode")
        .arg(file)
        .output()
        .unwrap()
}

/// The lines printed; nothing may be said on standard error.
fn lines(output: &Output) -> Vec<String> {
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
    String::from_utf8(output.stdout.clone())
        .unwrap()
        .lines()
        .map(str::to_owned)
        .collect()
}

/// A file in the temporary directory, removed on drop.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        Self(std::env::temp_dir().join(format!("ferroce-decode-test-{}-{name}", std::process::id())))
    }

    fn pcap(name: &str, link: DataLink, frames: &[(Vec<u8>, usize)]) -> Self {
        let scratch = Self::new(name);
        let header = PcapHeader {
            datalink: link,
            snaplen: 65535,
            ..PcapHeader::default()
        };
        let mut writer = PcapWriter::with_header(File::create(&scratch.0).unwrap(), header).unwrap();
        for (bytes, original_len) in frames {
            let packet = RawPcapPacket {
                ts_sec: 1,
                ts_frac: 500_000,
                incl_len: bytes.len() as u32,
                orig_len: *original_len as u32,
                data: Cow::Borrowed(bytes),
            };
            writer.write_raw_packet(&packet).unwrap();
        }
        scratch
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

fn frames(file: &Path) -> Vec<Vec<u8>> {
    let mut reader = PcapReader::new(File::open(file).unwrap()).unwrap();
    let mut frames = Vec::new();
    while let Some(packet) = reader.next_packet() {
        frames.push(packet.unwrap().data.into_owned());
    }
    frames
}

#[test]
fn every_golden_packet_is_sound() {
    let mut count = 0;
    for entry in fs::read_dir(golden("")).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "pcap") {
            let output = decode(&path);
            assert!(output.status.success(), "{}", path.display());
            let lines = lines(&output);
            assert!(
                lines.iter().all(|line| line.ends_with(" icrc ok")),
                "{}: {lines:#?}",
                path.display()
            );
            count += lines.len();
        }
    }
    assert_eq!(count, PACKETS);
}

#[test]
fn fields_are_shown() {
    let send = lines(&decode(&golden("rc-send-imm-v4-mtu1024.pcap")));
    assert!(
        send.iter()
            .any(|line| line.contains("RC SEND_ONLY_WITH_IMM qp 0x") && line.contains(" imm 0x")),
        "{send:#?}"
    );
    assert!(send.iter().any(|line| line.contains("RC ACKNOWLEDGE qp 0x")
        && line.contains(" ack")
        && line.contains(" msn ")));
    let read = lines(&decode(&golden("rc-nak-access-read-v4.pcap")));
    assert!(
        read.iter().any(|line| line.contains("nak remote_access")),
        "{read:#?}"
    );
    let cm = lines(&decode(&golden("cm-rping-v6ll.pcap")));
    assert!(
        cm.iter()
            .any(|line| line.contains("UD SEND_ONLY qp 0x000001") && line.contains("cm REQ")),
        "{cm:#?}"
    );
    assert!(cm[0].contains("fe80::"));
}

#[test]
fn rocev1_is_shown_by_its_gids() {
    let shown = lines(&decode(&golden("../captures/icrc-vectors.pcap")));
    let v1: Vec<_> = shown
        .iter()
        .filter_map(|line| line.split_once(' ').unwrap().1.split_once(" rocev1 "))
        .collect();
    let gids = "::ffff:15.0.0.2 > ::ffff:15.0.0.2";
    assert_eq!(
        v1,
        [
            (
                gids,
                "RC RDMA_WRITE_ONLY qp 0x00010a psn 10979516 migreq ackreq va 0x55d4c0726000 rkey 0x000047b3 \
                 dma_len 5 len 5 icrc ok"
            ),
            (
                gids,
                "RC ACKNOWLEDGE qp 0x000109 psn 10979520 migreq ack credits 0 msn 5 icrc ok"
            ),
        ]
    );
}

#[test]
fn damage_is_told_for_the_damaged_packet_only() {
    let original = frames(&golden("rc-send-v4-mtu1024.pcap"));
    let mut damaged: Vec<_> = original
        .iter()
        .map(|frame| (frame.clone(), frame.len()))
        .collect();
    let last = damaged[2].0.len() - 1;
    damaged[2].0[last] ^= 0x10;
    let file = Scratch::pcap("damaged", DataLink::ETHERNET, &damaged);
    let output = decode(&file.0);
    assert_eq!(output.status.code(), Some(1));
    let lines = lines(&output);
    assert_eq!(lines.len(), original.len());
    for (index, line) in lines.iter().enumerate() {
        assert!(line.starts_with("1.500000000 "), "{line}");
        assert_eq!(line.ends_with(" icrc BAD"), index == 2, "{line}");
    }
}

#[test]
fn truncation_at_any_byte_is_no_damage() {
    let frame = frames(&golden("rc-write-imm-v4-mtu1024.pcap"))
        .into_iter()
        .next()
        .unwrap();
    let cut: Vec<_> = (0..frame.len())
        .map(|len| (frame[..len].to_vec(), frame.len()))
        .collect();
    let file = Scratch::pcap("truncated", DataLink::ETHERNET, &cut);
    let output = decode(&file.0);
    assert!(output.status.success());
    let lines = lines(&output);
    assert!(
        lines.iter().all(|line| line.ends_with("bytes captured")),
        "{lines:#?}"
    );
    let last = lines.last().unwrap();
    assert!(last.ends_with(&format!(
        "truncated, {} of {} bytes captured",
        frame.len() - 1,
        frame.len()
    )));
    assert!(last.contains(" qp 0x"));
}

#[test]
fn garbage_of_any_length_is_survived() {
    let frame = frames(&golden("rc-all-v6ll-mtu1024.pcap"))
        .into_iter()
        .next()
        .unwrap();
    // Every single byte changed, and every shorter frame that claims to be whole.
    let mut spoiled: Vec<_> = (0..frame.len().min(120))
        .map(|at| {
            let mut frame = frame.clone();
            frame[at] ^= 0xff;
            let len = frame.len();
            (frame, len)
        })
        .collect();
    spoiled.extend((0..frame.len()).map(|len| (frame[..len].to_vec(), len)));
    for link in [
        DataLink::ETHERNET,
        DataLink::RAW,
        DataLink::LINUX_SLL,
        DataLink::LINUX_SLL2,
        DataLink::NULL,
    ] {
        let file = Scratch::pcap(&format!("garbage-{}", u32::from(link)), link, &spoiled);
        let output = decode(&file.0);
        assert!(matches!(output.status.code(), Some(0 | 1)), "{output:?}");
        lines(&output);
    }
}

#[test]
fn pcapng_and_other_links_show_the_same() {
    let original = golden("rc-atomic-v4-mtu1024.pcap");
    let without_time = |output: &Output| -> Vec<String> {
        lines(output)
            .iter()
            .map(|line| line.split_once(' ').unwrap().1.to_owned())
            .collect()
    };
    let expected = without_time(&decode(&original));
    let frames = frames(&original);

    let file = Scratch::new("pcapng");
    let mut writer = PcapNgWriter::new(File::create(&file.0).unwrap()).unwrap();
    writer
        .write_pcapng_block(InterfaceDescriptionBlock {
            linktype: DataLink::ETHERNET,
            snaplen: 0,
            options: vec![InterfaceDescriptionOption::IfTsResol(3)],
        })
        .unwrap();
    for frame in &frames {
        writer
            .write_pcapng_block(EnhancedPacketBlock {
                interface_id: 0,
                // 1.5 s: the library writes these nanoseconds as ticks, here of a millisecond.
                timestamp: Duration::from_nanos(1500),
                original_len: frame.len() as u32,
                data: Cow::Borrowed(frame),
                options: vec![],
            })
            .unwrap();
    }
    drop(writer);
    let output = decode(&file.0);
    assert_eq!(without_time(&output), expected);
    assert!(lines(&output).iter().all(|line| line.starts_with("1.500000000 ")));

    let behind = |header: &[u8]| -> Vec<(Vec<u8>, usize)> {
        frames
            .iter()
            .map(|frame| [header, &frame[14..]].concat())
            .map(|frame| (frame.clone(), frame.len()))
            .collect()
    };
    let mut sll = [0; 16];
    sll[14..].copy_from_slice(&[8, 0]);
    let mut sll2 = [0; 20];
    sll2[..2].copy_from_slice(&[8, 0]);
    for (link, header) in [
        (DataLink::RAW, &[][..]),
        (DataLink::LINUX_SLL, &sll),
        (DataLink::LINUX_SLL2, &sll2),
    ] {
        let file = Scratch::pcap(&format!("link-{}", u32::from(link)), link, &behind(header));
        assert_eq!(without_time(&decode(&file.0)), expected);
    }

    let tagged: Vec<_> = frames
        .iter()
        .map(|frame| [&frame[..12], &[0x81, 0, 0, 7], &frame[12..]].concat())
        .map(|frame| (frame.clone(), frame.len()))
        .collect();
    let file = Scratch::pcap("vlan", DataLink::ETHERNET, &tagged);
    let expected: Vec<_> = expected.iter().map(|line| format!("vlan 7 {line}")).collect();
    assert_eq!(without_time(&decode(&file.0)), expected);
}

/// One UDP datagram as a capture on the sender's interface shows it: `count` packets of one GSO
/// send behind one header. The payload of packet i is i.
fn gso_send(count: u16, payload_len: usize) -> Vec<u8> {
    let network = |id| Network::Ipv4 {
        tos: 0,
        id,
        dont_fragment: true,
        ttl: 64,
        src: [10, 0, 0, 1].into(),
        dst: [10, 0, 0, 2].into(),
        udp: datagram::Udp {
            src_port: 0xc000,
            checksum: 0,
        },
    };
    let mut all = vec![0; network(0).header_len()];
    for index in 0..count {
        let headers = Headers::new(Opcode::RcSendMiddle, 0x0001_0203, Psn::new(index.into()));
        let len = if index + 1 == count {
            payload_len / 2
        } else {
            payload_len
        };
        let mut out = vec![0; 5000];
        let built = datagram::build(&network(index), &headers, &vec![index as u8; len], &mut out).unwrap();
        all.extend_from_slice(&out[network(0).header_len()..built]);
    }
    let len = (all.len() - network(0).header_len()) as u16;
    network(0).emit(len, &mut all);
    all
}

#[test]
fn packets_of_a_gso_send_are_shown_each() {
    for (count, payload_len) in [(14, 4096), (40, 1024), (100, 64), (2, 256)] {
        let frame = gso_send(count, payload_len);
        let file = Scratch::pcap(
            &format!("gso-{count}"),
            DataLink::RAW,
            &[(frame.clone(), frame.len())],
        );
        let output = decode(&file.0);
        let shown = lines(&output);
        assert!(output.status.success(), "{shown:#?}");
        assert_eq!(shown.len(), usize::from(count));
        for (index, line) in shown.iter().enumerate() {
            assert!(
                line.contains(&format!(" psn {index} ")) && line.ends_with("icrc ok"),
                "{line}"
            );
        }
        let mut damaged = frame;
        let at = damaged.len() - 6;
        damaged[at] ^= 1;
        let file = Scratch::pcap(
            &format!("gso-bad-{count}"),
            DataLink::RAW,
            &[(damaged.clone(), damaged.len())],
        );
        let output = decode(&file.0);
        assert_eq!(output.status.code(), Some(1));
        assert_eq!(
            lines(&output)
                .iter()
                .filter(|line| line.ends_with("icrc BAD"))
                .count(),
            1
        );
    }
}

#[test]
fn what_is_no_capture_is_named() {
    for (name, content) in [
        ("text", &b"not a capture\n"[..]),
        ("empty", b""),
        ("header", &[0xd4, 0xc3, 0xb2, 0xa1]),
    ] {
        let file = Scratch::new(name);
        fs::write(&file.0, content).unwrap();
        let output = decode(&file.0);
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{name}");
        assert!(
            said.starts_with("ferroce: can't read capture")
                && said.contains(name)
                && said.lines().count() == 1,
            "{said}"
        );
    }
    let output = decode(Path::new("/no/such/file.pcap"));
    assert!(
        String::from_utf8(output.stderr)
            .unwrap()
            .contains("/no/such/file.pcap")
    );
}
