//! Captures of tests/golden: their RoCE packets in order, and what a packet says.

use std::fmt;
use std::fs::File;
use std::net::IpAddr;
use std::path::{Path as FilePath, PathBuf};

use ferroce_engine::link::{IcrcCheck, RoceVersion, RxPacket};
use ferroce_wire::frame::{Ethernet, Frame};
use ferroce_wire::{Grh, Headers, Kind, Network, ParseError, RocePacket};
use pcap_file::pcap::PcapReader;

/// The folder of the captures.
pub fn folder() -> PathBuf {
    FilePath::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden")
}

/// What a packet says: all but the ICRC. Headers that its opcode does not have are zeros.
#[derive(Clone, PartialEq, Eq)]
pub struct Packet {
    pub headers: Headers,
    pub payload: Vec<u8>,
}

impl Packet {
    /// Of BTH to ICRC; that is not checked.
    pub fn parse(data: &[u8]) -> Packet {
        let packet = RocePacket::parse(data).unwrap();
        Packet {
            headers: packet.headers(),
            payload: packet.payload().to_vec(),
        }
    }

    /// Whether it is a READ or atomic request.
    pub fn is_data_request(&self) -> bool {
        matches!(
            self.headers.bth.opcode.kind(),
            Kind::ReadRequest | Kind::CompareSwap | Kind::FetchAdd
        )
    }

    /// BTH to an ICRC of zeros.
    pub fn to_bytes(&self) -> Vec<u8> {
        let headers = self.headers.header_len();
        let padded = self.payload.len() + usize::from(self.headers.bth.pad);
        let mut bytes = vec![0; headers + padded + 4];
        self.headers.emit(&mut bytes);
        bytes[headers..][..self.payload.len()].copy_from_slice(&self.payload);
        bytes
    }
}

impl fmt::Debug for Packet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let headers = &self.headers;
        let opcode = headers.bth.opcode;
        write!(f, "{} {:?}", opcode.name(), headers.bth)?;
        if opcode.has_deth() {
            write!(f, " {:?}", headers.deth)?;
        }
        if opcode.has_reth() {
            write!(f, " {:?}", headers.reth)?;
        }
        if opcode.has_atomic_eth() {
            write!(f, " {:?}", headers.atomic_eth)?;
        }
        if opcode.has_aeth() {
            write!(f, " {:?}", headers.aeth)?;
        }
        if opcode.has_atomic_ack_eth() {
            write!(f, " {:?}", headers.atomic_ack_eth)?;
        }
        if opcode.has_immdt() {
            write!(f, " {:?}", headers.immdt)?;
        }
        if opcode.has_ieth() {
            write!(f, " {:?}", headers.ieth)?;
        }
        write!(
            f,
            " {} bytes {:02x?}",
            self.payload.len(),
            &self.payload[..self.payload.len().min(8)]
        )
    }
}

/// One packet of a capture.
#[derive(Clone)]
pub struct Captured {
    /// Whether the client sent it: the side that sends first.
    pub by_client: bool,
    pub source: IpAddr,
    pub dest: IpAddr,
    pub ethernet: Ethernet,
    pub network: Network,
    pub packet: Packet,
    /// The whole frame.
    pub bytes: Vec<u8>,
}

impl Captured {
    fn new(frame: &Frame<'_>, bytes: &[u8]) -> Captured {
        let network = frame.datagram.network;
        Captured {
            by_client: true,
            source: network.src().to_ip(),
            dest: network.dst().to_ip(),
            ethernet: frame.ethernet,
            network,
            packet: Packet::parse(&frame.datagram.bytes()[network.header_len()..]),
            bytes: bytes.to_vec(),
        }
    }

    /// Puts a GRH in the place of its IP and UDP headers.
    fn go_by_v1(&mut self) {
        self.network = Network::Grh(Grh {
            traffic_class: self.network.traffic_class(),
            flow_label: 0x1_2345,
            payload_len: self.packet.to_bytes().len() as u16,
            next_header: Grh::NEXT_HEADER_IBA,
            hop_limit: 7,
            sgid: self.network.src(),
            dgid: self.network.dst(),
        });
    }

    /// How it travels.
    pub fn version(&self) -> RoceVersion {
        match self.network {
            Network::Grh(_) => RoceVersion::V1,
            _ => RoceVersion::V2,
        }
    }

    /// As the link would hand it over, had it these bytes.
    pub fn received<'a>(&self, data: &'a [u8]) -> RxPacket<'a> {
        let (traffic_class, hop_limit, flow_label) = match self.network {
            Network::Ipv4 { tos, ttl, .. } => (tos, ttl, 0),
            Network::Ipv6 {
                traffic_class,
                hop_limit,
                ..
            } => (traffic_class, hop_limit, 0),
            Network::Grh(grh) => (grh.traffic_class, grh.hop_limit, grh.flow_label),
        };
        RxPacket {
            version: self.version(),
            source: self.source,
            source_port: self.network.udp().map_or(0, |udp| udp.src_port),
            dest: self.dest,
            ifindex: 0,
            traffic_class,
            hop_limit,
            flow_label,
            data,
            icrc: &Checked,
        }
    }
}

/// The packets' ICRC was checked when the capture was read; afterwards they are readdressed.
struct Checked;

impl IcrcCheck for Checked {
    fn valid(&self, _: &RxPacket<'_>) -> bool {
        true
    }
}

/// The packets of a capture, as they would be had they travelled so.
pub fn read_as(name: &str, version: RoceVersion) -> Vec<Captured> {
    let mut packets = read(name);
    if version == RoceVersion::V1 {
        packets.iter_mut().for_each(Captured::go_by_v1);
    }
    packets
}

/// The RoCE packets of a capture; of one from elsewhere by `../captures/`.
pub fn read(name: &str) -> Vec<Captured> {
    let file = File::open(folder().join(name).with_extension("pcap")).unwrap();
    let mut reader = PcapReader::new(file).unwrap();
    let mut packets: Vec<Captured> = Vec::new();
    while let Some(record) = reader.next_packet() {
        let record = record.unwrap();
        let frame = match Frame::parse(&record.data) {
            Ok(frame) => frame,
            // Those of multicast have the groups' management in them.
            Err(ParseError::NotRoce(_)) => continue,
            Err(error) => panic!("{name}: {error}"),
        };
        frame.datagram.verify().unwrap();
        let captured = Captured::new(&frame, &record.data);
        let client = packets.first().map_or(captured.source, |first| first.source);
        packets.push(Captured {
            by_client: captured.source == client,
            ..captured
        });
    }
    assert!(!packets.is_empty(), "{name} has no packet");
    packets
}
