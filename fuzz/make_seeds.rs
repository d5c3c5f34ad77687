//! Makes the seeds of all targets anew: `cargo run --bin make_seeds`, in this folder.
//!
//! Each seed is the shortest of its kind in the captures of `../tests`, or built where no capture
//! has it, and is named by what it is.

mod cm_scripts;
mod engine_scripts;
mod rdma_cm_scripts;

use std::collections::BTreeMap;
use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};

use ferroce_engine::rdma_cm::PortSpace;
use ferroce_wire::cm::{Apr, CmMad, CmMessage, Lap};
use ferroce_wire::frame::{self, Vlan};
use ferroce_wire::mad::GSI_QPN;
use ferroce_wire::{Frame, Headers, Network, Opcode, Psn};
use pcap_file::pcap::PcapReader;

/// Seeds by target and name; the shorter of two wins.
#[derive(Default)]
struct Seeds(BTreeMap<(&'static str, String), Vec<u8>>);

impl Seeds {
    fn add(&mut self, target: &'static str, name: &str, bytes: &[u8]) {
        let name = name.to_lowercase().replace([' ', '_'], "-");
        let seed = self.0.entry((target, name)).or_insert_with(|| bytes.to_vec());
        if bytes.len() < seed.len() {
            *seed = bytes.to_vec();
        }
    }

    /// Adds what a frame is to each target.
    fn add_frame(&mut self, bytes: &[u8]) {
        let Ok(frame) = Frame::parse(bytes) else {
            self.add("parse_frame", "not-roce", bytes);
            self.add("xdp_frame", "not-roce", bytes);
            return;
        };
        let packet = frame.datagram.packet;
        let network = match frame.datagram.network {
            Network::Ipv4 { .. } => "ipv4",
            Network::Ipv6 { .. } => "ipv6",
            Network::Grh(_) => "rocev1",
        };
        let tag = if frame.ethernet.vlan.is_some() {
            "-vlan"
        } else {
            ""
        };
        let name = packet.opcode().name();
        let udp_payload = &frame.datagram.bytes()[frame.datagram.network.header_len()..];
        self.add("parse_packet", name, udp_payload);
        self.add("parse_frame", &format!("{network}{tag}"), bytes);
        self.add("xdp_frame", &format!("{network}{tag}"), bytes);
        let pad = packet.bth().pad;
        self.add("icrc", &format!("{network}-pad-{pad}"), frame.datagram.bytes());
        if packet.bth().dest_qpn == GSI_QPN
            && let Ok(mad) = CmMad::parse(packet.payload())
        {
            self.add(
                "cm_message",
                &format!("{}-{network}", mad.message.name()),
                packet.payload(),
            );
            let space = match mad.message {
                CmMessage::Req(_) => PortSpace::Tcp,
                CmMessage::SidrReq(_) => PortSpace::Udp,
                _ => return,
            };
            self.add(
                "rdma_cm",
                &format!("served-{}-{network}", mad.message.name()),
                &rdma_cm_scripts::served(packet.payload(), space),
            );
        }
    }
}

/// The frames of all captures.
fn captured(tests: &Path) -> Result<Vec<Vec<u8>>, Box<dyn Error>> {
    let mut files: Vec<PathBuf> = Vec::new();
    for folder in ["golden", "captures"] {
        for entry in fs::read_dir(tests.join(folder))? {
            files.push(entry?.path());
        }
    }
    files.retain(|file| file.extension().is_some_and(|extension| extension == "pcap"));
    files.sort();
    let mut frames = Vec::new();
    for file in files {
        let mut reader = PcapReader::new(fs::File::open(file)?)?;
        while let Some(packet) = reader.next_packet() {
            frames.push(packet?.data.into_owned());
        }
    }
    Ok(frames)
}

fn main() -> Result<(), Box<dyn Error>> {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let frames = captured(&here.join("../tests"))?;
    let mut seeds = Seeds::default();
    for bytes in &frames {
        seeds.add_frame(bytes);
    }

    // Built: the opcodes that no capture has, a tagged frame, and the messages LAP and APR.
    let template = frames
        .iter()
        .find_map(|bytes| Frame::parse(bytes).ok())
        .ok_or("no captures")?;
    let mut ethernet = template.ethernet;
    let network = template.datagram.network;
    let build = |ethernet: &_, headers: &Headers, payload: &[u8]| {
        let mut bytes = vec![0; 400];
        let len = frame::build(ethernet, &network, headers, payload, &mut bytes)?;
        bytes.truncate(len);
        Ok::<_, Box<dyn Error>>(bytes)
    };
    for &opcode in Opcode::ALL {
        let payload: &[u8] = if opcode.has_payload() { b"8 bytes." } else { b"" };
        seeds.add_frame(&build(
            &ethernet,
            &Headers::new(opcode, 17, Psn::new(256)),
            payload,
        )?);
    }
    let messages: [CmMessage; 2] = [Lap::default().into(), Apr::default().into()];
    for message in messages {
        let mad = CmMad {
            tid: 1,
            attribute_modifier: 0,
            message,
        };
        let headers = Headers::new(Opcode::UdSendOnly, GSI_QPN, Psn::new(1));
        seeds.add_frame(&build(&ethernet, &headers, &mad.to_bytes())?);
    }
    ethernet.vlan = Some(Vlan {
        priority: 3,
        drop_eligible: false,
        id: 100,
    });
    seeds.add_frame(&build(
        &ethernet,
        &Headers::new(Opcode::RcSendOnly, 17, Psn::new(0)),
        b"tag",
    )?);

    for (name, script) in engine_scripts::all() {
        seeds.add("engine", name, &script);
    }
    for (name, script) in cm_scripts::all() {
        seeds.add("cm", name, &script);
    }

    seeds.add("rdma_cm", "asked-tcp", &rdma_cm_scripts::asked(PortSpace::Tcp));
    seeds.add("rdma_cm", "asked-udp", &rdma_cm_scripts::asked(PortSpace::Udp));

    for ((target, name), bytes) in &seeds.0 {
        let folder = here.join("seeds").join(target);
        fs::create_dir_all(&folder)?;
        fs::write(folder.join(name), bytes)?;
    }
    println!("{} seeds", seeds.0.len());
    Ok(())
}
