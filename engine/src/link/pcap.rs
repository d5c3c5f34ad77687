//! Packet capture: writes what a link sends and receives to a pcap file, as whole Ethernet frames.
//!
//! A link shows neither Ethernet headers nor, before sending, IPv4 identification and source port. The frames get
//! nominal ones: addresses made from the IP addresses or GIDs, id 0, and a port from the flow label or the destination
//! QPN; their ICRC is right for these. RoCE v1 has its own Ethertype, and its GRH. Of received packets the id is recovered from the ICRC; where that fails, the packet
//! was damaged, and the frame shows it.
#![deny(unsafe_code)]

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::net::IpAddr;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use ferroce_wire::datagram::Network;
use ferroce_wire::frame::{Ethernet, ether_type_of};
use ferroce_wire::gid::Gid;
use ferroce_wire::icrc::id_from_icrc;
use ferroce_wire::udp_port;
use parking_lot::Mutex;
use pcap_file::pcap::{PcapHeader, PcapPacket, PcapWriter};
use pcap_file::{DataLink, PcapError, TsResolution};

use super::headers::Addressing;
use super::{ICRC_LEN, Link, Path, Qpns, Reach, RoceVersion, RxPacket, Transmit, TransmitError};
use crate::memory::Fault;

/// Bytes of a file kept in memory until the next flush.
const BUFFER: usize = 1 << 20;

/// A link with a capture file: wraps another.
pub struct PcapTap<L> {
    inner: L,
    capture: Capture,
    sent: Vec<u8>,
}

/// The clock of a capture: time since 1970, or since any start in a simulation.
pub type Clock = Box<dyn FnMut() -> Duration + Send>;

struct Capture {
    /// `None` once writing has failed.
    file: Option<Arc<CaptureFile>>,
    clock: Clock,
    frame: Vec<u8>,
    written: u64,
}

/// A capture file: one for all the devices of a process that write to it.
struct CaptureFile {
    /// Locked for a whole record.
    writer: Mutex<PcapWriter<Output>>,
    output: Output,
}

/// The capture files of this process, by process id (a forked child makes its own) and name. They stay open, so that a
/// device which is opened later adds to the file.
static FILES: Mutex<Vec<(u32, String, Arc<CaptureFile>)>> = Mutex::new(Vec::new());

impl CaptureFile {
    /// The file of that name; makes it, unless this process did.
    fn shared(name: &str) -> io::Result<Arc<CaptureFile>> {
        let pid = std::process::id();
        let name = name.replace("{pid}", &pid.to_string());
        let mut files = FILES.lock();
        if let Some((.., file)) = files.iter().find(|(by, of, _)| *by == pid && *of == name) {
            return Ok(Arc::clone(file));
        }
        let file = Arc::new(CaptureFile::new(Box::new(File::create(&name)?))?);
        // The capture of a device that nobody uses has its header too.
        file.flush()?;
        files.push((pid, name, Arc::clone(&file)));
        Ok(file)
    }

    /// Writes the header of a pcap file.
    fn new(output: Box<dyn Write + Send>) -> io::Result<CaptureFile> {
        let output = Output(Arc::new(Mutex::new(BufWriter::with_capacity(BUFFER, output))));
        let header = PcapHeader {
            datalink: DataLink::ETHERNET,
            ts_resolution: TsResolution::NanoSecond,
            ..PcapHeader::default()
        };
        let writer = PcapWriter::with_header(output.clone(), header).map_err(into_io)?;
        Ok(CaptureFile {
            writer: Mutex::new(writer),
            output,
        })
    }

    /// Hands what was written to the system.
    fn flush(&self) -> io::Result<()> {
        self.output.0.lock().flush()
    }
}

/// Where a file's bytes go: shared by the writer and by who flushes it.
#[derive(Clone)]
struct Output(Arc<Mutex<BufWriter<Box<dyn Write + Send>>>>);

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.lock().flush()
    }
}

impl<L: Link> PcapTap<L> {
    /// Wraps `inner`; writes to the file `name`, in which `{pid}` stands for the process id. All the taps of a process
    /// that name the same file share it.
    pub fn create(inner: L, name: &str) -> io::Result<PcapTap<L>> {
        // A clock before 1970 is a time of zero.
        let clock = || SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
        Ok(PcapTap::to_file(
            inner,
            CaptureFile::shared(name)?,
            Box::new(clock),
        ))
    }

    /// Wraps `inner`; writes to `output` with the times of `clock`.
    pub fn new(inner: L, output: Box<dyn Write + Send>, clock: Clock) -> io::Result<PcapTap<L>> {
        Ok(PcapTap::to_file(
            inner,
            Arc::new(CaptureFile::new(output)?),
            clock,
        ))
    }

    fn to_file(inner: L, file: Arc<CaptureFile>, clock: Clock) -> PcapTap<L> {
        let capture = Capture {
            file: Some(file),
            clock,
            frame: Vec::new(),
            written: 0,
        };
        PcapTap {
            inner,
            capture,
            sent: Vec::new(),
        }
    }
}

fn into_io(error: PcapError) -> io::Error {
    match error {
        PcapError::IoError(e) => e,
        other => io::Error::other(other),
    }
}

/// A MAC address for an IP address: multicast as on a network, unicast locally administered, from its last bytes.
fn mac(address: IpAddr) -> [u8; 6] {
    let gid = Gid::from_ip(address);
    let [.., a, b, c, d] = gid.0;
    gid.multicast_mac().unwrap_or([2, 0, a, b, c, d])
}

impl Capture {
    /// Writes a frame; ends the capture, with a word in the log, if that fails.
    fn record(&mut self, network: Option<Network>, packet: &[u8], icrc: &[u8]) {
        let (Some(network), Some(file)) = (network, &self.file) else {
            return;
        };
        let (src, dst) = (mac(network.src().to_ip()), mac(network.dst().to_ip()));
        let ethernet = Ethernet { dst, src, vlan: None };
        let (link_len, network_len) = (ethernet.header_len(), network.header_len());
        self.frame.clear();
        self.frame.resize(link_len + network_len, 0);
        let (link_header, network_header) = self.frame.split_at_mut(link_len);
        ethernet.emit(ether_type_of(&network), link_header);
        network.emit((packet.len() + icrc.len()) as u16, network_header);
        self.frame.extend_from_slice(packet);
        self.frame.extend_from_slice(icrc);
        let record = PcapPacket::new((self.clock)(), self.frame.len() as u32, &self.frame);
        let outcome = file
            .writer
            .lock()
            .write_packet(&record)
            .map(|_| ())
            .map_err(into_io);
        self.written += 1;
        self.note(outcome);
    }

    /// Hands what was written to the system, so that the file is whole whenever the process ends.
    fn flush(&mut self) {
        if let Some(outcome) = self.file.as_deref().map(CaptureFile::flush) {
            self.note(outcome);
        }
    }

    fn note(&mut self, outcome: io::Result<()>) {
        if let Err(error) = outcome {
            tracing::warn!("the packet capture ends: {error}");
            self.file = None;
        }
    }

    /// Records a received packet.
    fn received(&mut self, packet: &RxPacket<'_>) {
        let mut addressing = Addressing {
            version: packet.version,
            source: packet.source,
            dest: packet.dest,
            source_port: packet.source_port,
            traffic_class: packet.traffic_class,
            hop_limit: packet.hop_limit,
            flow_label: packet.flow_label,
            id: 0,
        };
        if let (Some((covered, icrc)), true) = (
            packet.data.split_last_chunk::<ICRC_LEN>(),
            packet.version == RoceVersion::V2 && packet.source.is_ipv4(),
        ) {
            // From the id to the ICRC: 14 bytes of IPv4 header, 8 of UDP.
            let len = covered.len() as u16 + 22;
            let computed = addressing.icrc(covered).unwrap_or_default();
            addressing.id = id_from_icrc(u32::from_le_bytes(*icrc), computed, len).unwrap_or(0);
        }
        self.record(addressing.network(), packet.data, &[]);
    }

    /// Records a packet that was sent.
    fn transmitted(&mut self, path: &Path, dest_qpn: u32, packet: &[u8]) {
        let entropy = if path.flow_label == 0 {
            dest_qpn & 0xf_ffff
        } else {
            path.flow_label
        };
        let addressing = Addressing::of(path, udp_port::source_port(entropy));
        let icrc = addressing.icrc(packet).unwrap_or_default();
        self.record(addressing.network(), packet, &icrc.to_le_bytes());
    }
}

impl<L: Link> Transmit for PcapTap<L> {
    fn packet(
        &mut self,
        path: &Path,
        qpns: Qpns,
        len: usize,
        fill: &mut dyn FnMut(&mut [u8]) -> Result<(), Fault>,
    ) -> Result<(), TransmitError> {
        let sent = &mut self.sent;
        self.inner.packet(path, qpns, len, &mut |out| {
            fill(out)?;
            sent.clear();
            sent.extend_from_slice(out);
            Ok(())
        })?;
        self.capture.transmitted(path, qpns.dest, &self.sent);
        Ok(())
    }
}

impl<L: Link> Link for PcapTap<L> {
    fn receive(&mut self, sink: &mut dyn FnMut(&RxPacket<'_>)) -> io::Result<usize> {
        let capture = &mut self.capture;
        let received = self.inner.receive(&mut |packet| {
            capture.received(packet);
            sink(packet);
        });
        self.capture.flush();
        received
    }

    fn flush(&mut self) -> io::Result<bool> {
        self.capture.flush();
        self.inner.flush()
    }

    fn receive_fds(&self, fds: &mut Vec<RawFd>) {
        self.inner.receive_fds(fds);
    }

    fn transmit_fd(&self) -> Option<RawFd> {
        self.inner.transmit_fd()
    }

    fn window(&self, packet_len: usize) -> u32 {
        self.inner.window(packet_len)
    }

    fn join(&mut self, group: IpAddr, ifindex: u32) -> io::Result<()> {
        self.inner.join(group, ifindex)
    }

    fn leave(&mut self, group: IpAddr) -> io::Result<()> {
        self.inner.leave(group)
    }

    fn reach(&mut self, path: &Path) -> Reach {
        self.inner.reach(path)
    }

    fn set_mtu(&mut self, mtu: u32) {
        self.inner.set_mtu(mtu);
    }

    fn expect_bursts(&mut self) {
        self.inner.expect_bursts();
    }

    fn counters(&self, out: &mut dyn FnMut(&'static str, u64)) {
        self.inner.counters(out);
        out("captured", self.capture.written);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::link::fault::FaultRates;
    use crate::link::random::Probability;
    use crate::link::sim::{Conditions, NodeConfig, SimNetwork};
    use ferroce_wire::frame::Frame;
    use ferroce_wire::{Bth, Opcode, Psn};
    use pcap_file::pcap::PcapReader;

    /// A file in memory.
    #[derive(Clone, Default)]
    struct Buffer(Arc<Mutex<Vec<u8>>>);

    impl Write for Buffer {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// The frames of a capture, and whether the ICRC of each is right.
    fn frames(file: &Buffer) -> Vec<(Vec<u8>, bool)> {
        let bytes = file.0.lock().clone();
        let mut reader = PcapReader::new(&bytes[..]).unwrap();
        let mut out = Vec::new();
        while let Some(record) = reader.next_packet() {
            let data = record.unwrap().data.into_owned();
            let valid = Frame::parse(&data).is_ok_and(|frame| frame.datagram.verify().is_ok());
            out.push((data, valid));
        }
        out
    }

    /// Sends ten packets through two taps; gives both captures and whether the receiver found each ICRC right.
    fn carry(
        version: RoceVersion,
        source: &str,
        dest: &str,
        corrupt: Probability,
    ) -> ([Buffer; 2], Vec<bool>) {
        let (source, dest) = (source.parse().unwrap(), dest.parse().unwrap());
        let network = SimNetwork::new(1);
        let a = network.attach(NodeConfig::new(source, 1));
        let b = network.attach(NodeConfig::new(dest, 2));
        let rates = FaultRates {
            corrupt,
            ..FaultRates::default()
        };
        network.set_conditions(
            a.id(),
            b.id(),
            Conditions {
                rates,
                ..Conditions::default()
            },
        );
        let files = [Buffer::default(), Buffer::default()];
        let clock = || -> Clock { Box::new(|| Duration::from_nanos(1_000_000_007)) };
        let mut a = PcapTap::new(a, Box::new(files[0].clone()), clock()).unwrap();
        let mut b = PcapTap::new(b, Box::new(files[1].clone()), clock()).unwrap();
        let path = Path {
            version,
            ifindex: 1,
            traffic_class: 2,
            ..Path::between(source, dest)
        };
        for n in 0..10 {
            let bth = Bth::new(Opcode::RcSendOnly, 0x02_0000, Psn::new(n));
            a.packet(&path, Qpns::to(0x02_0000), 12 + 8, &mut |out| {
                out.fill(n as u8);
                bth.emit(out);
                Ok(())
            })
            .unwrap();
        }
        a.flush().unwrap();
        let mut valid = Vec::new();
        while let Some(next) = network.next_event() {
            network.advance(next);
        }
        b.receive(&mut |packet| valid.push(packet.icrc.valid(packet)))
            .unwrap();
        (files, valid)
    }

    #[test]
    fn devices_of_a_process_share_the_file() {
        let name = std::env::temp_dir().join("ferroce-pcap-test-{pid}.pcap");
        let name = name.to_str().unwrap();
        let network = SimNetwork::new(1);
        let source = "10.0.0.1".parse().unwrap();
        let path = Path {
            ifindex: 1,
            ..Path::between(source, source)
        };
        let tap = |qpn| PcapTap::create(network.attach(NodeConfig::new(source, qpn)), name).unwrap();
        let send = |tap: &mut PcapTap<_>, psn| {
            let bth = Bth::new(Opcode::RcSendOnly, 0x02_0000, Psn::new(psn));
            tap.packet(&path, Qpns::to(0x02_0000), 12, &mut |out| {
                bth.emit(out);
                Ok(())
            })
            .unwrap();
            tap.flush().unwrap();
        };
        let mut first = tap(1);
        send(&mut first, 0);
        let mut second = tap(2);
        send(&mut second, 1);
        send(&mut first, 2);
        drop((first, second));
        send(&mut tap(3), 3);
        let made = name.replace("{pid}", &std::process::id().to_string());
        let file = Buffer(Arc::new(Mutex::new(std::fs::read(&made).unwrap())));
        std::fs::remove_file(made).unwrap();
        let psns: Vec<Psn> = frames(&file)
            .iter()
            .map(|(data, _)| Frame::parse(data).unwrap().datagram.packet.bth().psn)
            .collect();
        assert_eq!(psns, [0, 1, 2, 3].map(Psn::new));
    }

    #[test]
    fn both_ends_capture_valid_frames() {
        for (version, source, dest) in [
            (RoceVersion::V2, "10.0.0.1", "10.0.0.2"),
            (RoceVersion::V2, "fe80::1", "fe80::2"),
            (RoceVersion::V1, "10.0.0.1", "10.0.0.2"),
            (RoceVersion::V1, "fe80::1", "fe80::2"),
        ] {
            let (files, valid) = carry(version, source, dest, Probability::ZERO);
            assert_eq!(valid, [true; 10]);
            for file in &files {
                let frames = frames(file);
                assert_eq!(frames.len(), 10);
                for (n, (data, valid)) in frames.iter().enumerate() {
                    assert!(valid, "frame {n}: {data:02x?}");
                    let frame = Frame::parse(data).unwrap();
                    assert_eq!(frame.datagram.packet.bth().psn, Psn::new(n as u32));
                    assert_eq!(frame.datagram.packet.payload(), [n as u8; 8]);
                    assert_eq!(frame.datagram.network.src().to_ip().to_string(), source);
                    assert_eq!(frame.datagram.network.traffic_class(), 2);
                    let is_v1 = matches!(frame.datagram.network, Network::Grh(_));
                    assert_eq!(is_v1, version == RoceVersion::V1);
                }
            }
        }
    }

    #[test]
    fn damage_shows_in_the_receivers_capture() {
        let (files, valid) = carry(RoceVersion::V2, "10.0.0.1", "10.0.0.2", Probability::ONE);
        assert!(frames(&files[0]).iter().all(|(_, valid)| *valid));
        let captured: Vec<bool> = frames(&files[1]).iter().map(|(_, valid)| *valid).collect();
        assert_eq!(captured, valid);
        assert!(valid.iter().any(|valid| !valid));
    }

    #[test]
    fn a_full_disk_ends_the_capture_not_the_traffic() {
        struct FullDisk;
        impl Write for FullDisk {
            fn write(&mut self, _: &[u8]) -> io::Result<usize> {
                Err(io::ErrorKind::StorageFull.into())
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let network = SimNetwork::new(1);
        let link = network.attach(NodeConfig::new("10.0.0.1".parse().unwrap(), 1));
        let mut tap = PcapTap::new(link, Box::new(FullDisk), Box::new(Duration::default)).unwrap();
        assert!(tap.flush().is_ok());
        assert!(tap.capture.file.is_none());
        assert!(tap.flush().is_ok());
    }
}
