//! Frames to send: which way a packet goes, and the headers in front of it.
#![deny(unsafe_code)]

use std::hash::{BuildHasher, BuildHasherDefault};
use std::net::IpAddr;
use std::time::Duration;

use ferroce_wire::datagram::Network;
use ferroce_wire::frame::{Ethernet, ether_type_of};
use ferroce_wire::{Bth, Icrc, udp_port};
use rustc_hash::{FxHashMap, FxHasher};

use super::hops::Hop;
use crate::link::headers::Addressing;
use crate::link::{ICRC_LEN, Path, Qpns};

/// Bytes of an Ethernet header without a tag: tags are the business of VLAN interfaces.
pub(super) const ETHERNET: usize = 14;
/// Bytes of the longest headers in front of a BTH.
const MAX_HEAD: usize = ETHERNET + 40 + 8;
/// Flows kept; a power of two. Two that fall on one place take turns there.
const FLOWS: usize = 1024;
/// Byte of the BTH that the ICRC takes for ones: FECN, BECN, reserved.
const BTH_RESERVED: usize = 4;
/// Destinations whose last question is remembered.
const MAX_ASKED: usize = 1024;
/// How often the daemon is asked for one destination.
const ASK_AGAIN: Duration = Duration::from_secs(1);
/// The same where it could not be asked.
const RETRY: Duration = Duration::from_millis(20);

/// The headers for packets of one length.
#[derive(Clone, Copy)]
struct Head {
    /// Bytes from the BTH to the padding; 0 before the first use.
    len: usize,
    bytes: [u8; MAX_HEAD],
    /// The ICRC of what is covered of these headers.
    icrc: u32,
}

/// Packets of one queue pair to another.
pub(super) struct Flow<K> {
    path: Path,
    qpns: Qpns,
    pub hop: Hop,
    /// How to see that the hop has not changed.
    pub known: K,
    network: Option<Network>,
    head_len: usize,
    /// Of the two lengths that were used last: data and acknowledgements take turns.
    heads: [Head; 2],
}

impl<K> Flow<K> {
    pub fn new(path: &Path, qpns: Qpns, hop: Hop, known: K) -> Flow<K> {
        let network = network(path, qpns);
        let empty = Head {
            len: 0,
            bytes: [0; MAX_HEAD],
            icrc: 0,
        };
        Flow {
            path: *path,
            qpns,
            hop,
            known,
            head_len: ETHERNET + network.as_ref().map_or(0, Network::header_len),
            network,
            heads: [empty; 2],
        }
    }

    /// Whether these packets are of this flow.
    #[inline]
    pub fn is(&self, path: &Path, qpns: Qpns) -> bool {
        self.qpns == qpns && self.path == *path
    }

    /// Bytes of the headers in front of each packet.
    #[inline]
    pub fn head_len(&self) -> usize {
        self.head_len
    }

    /// Writes a whole frame around a packet of `len` bytes, BTH to padding, which is there already: headers in front, and
    /// the ICRC behind. `frame` has room for exactly that.
    pub fn wrap(&mut self, frame: &mut [u8], len: usize) {
        if self.heads[0].len != len {
            self.heads.swap(0, 1);
            if self.heads[0].len != len {
                self.heads[0] = self.make(len);
            }
        }
        let head = &self.heads[0];
        let (front, packet) = frame.split_at_mut(self.head_len);
        front.copy_from_slice(&head.bytes[..self.head_len]);
        let (covered, icrc) = packet.split_at_mut(len);
        icrc.copy_from_slice(&seal(head.icrc, covered).to_le_bytes());
    }

    /// The headers for packets of `len` bytes.
    fn make(&self, len: usize) -> Head {
        let mut head = Head {
            len,
            bytes: [0; MAX_HEAD],
            icrc: 0,
        };
        let (Some(network), Hop::Frame { source, dest }) = (self.network, self.hop) else {
            return head;
        };
        let ethernet = Ethernet {
            dst: dest,
            src: source,
            vlan: None,
        };
        let whole = (len + ICRC_LEN) as u16;
        ethernet.emit(ether_type_of(&network), &mut head.bytes);
        network.emit(whole, &mut head.bytes[ETHERNET..]);
        head.icrc = network.icrc(whole).finish();
        head
    }
}

/// The ICRC of a packet behind headers whose ICRC is `state`.
#[inline]
fn seal(state: u32, covered: &mut [u8]) -> u32 {
    let mut icrc = Icrc::resume(state);
    if covered.len() < Bth::LEN {
        // The transport sends no such packet.
        icrc.update(covered);
        return icrc.finish();
    }
    // One run over all is faster than two, and nobody looks before it is over.
    let reserved = std::mem::replace(&mut covered[BTH_RESERVED], 0xff);
    icrc.update(covered);
    covered[BTH_RESERVED] = reserved;
    icrc.finish()
}

/// The network headers of packets of a queue pair; `None` if the addresses are of two families.
fn network(path: &Path, qpns: Qpns) -> Option<Network> {
    let entropy = match path.flow_label {
        0 => udp_port::flow_label(qpns.local, qpns.dest),
        label => label,
    };
    let addressing = Addressing::of(path, udp_port::source_port(entropy));
    let mut network = addressing.network()?;
    if let Network::Ipv6 { flow_label, .. } = &mut network {
        *flow_label = path.flow_label;
    }
    Some(network)
}

/// The flows, found by their packets.
pub(super) struct Flows<K> {
    flows: Box<[Option<Flow<K>>]>,
    hasher: BuildHasherDefault<FxHasher>,
}

impl<K> Flows<K> {
    pub fn new() -> Flows<K> {
        Flows {
            flows: (0..FLOWS).map(|_| None).collect(),
            hasher: BuildHasherDefault::default(),
        }
    }

    /// The only place where such a flow may be.
    #[inline]
    pub fn place(&self, path: &Path, qpns: Qpns) -> usize {
        self.hasher.hash_one((qpns, path.dest)) as usize % FLOWS
    }

    #[inline]
    pub fn get(&self, place: usize) -> Option<&Flow<K>> {
        self.flows[place].as_ref()
    }

    #[inline]
    pub fn at(&mut self, place: usize) -> &mut Option<Flow<K>> {
        &mut self.flows[place]
    }
}

/// When the daemon was last asked for the way to a destination.
#[derive(Default)]
pub(super) struct Asked {
    /// When it may be asked again.
    next: FxHashMap<IpAddr, Duration>,
}

impl Asked {
    /// Asks for a destination, if that is due.
    pub fn ask(&mut self, dest: IpAddr, now: Duration, ask: impl FnOnce() -> bool) {
        if self.next.get(&dest).is_some_and(|&next| now < next) {
            return;
        }
        if self.next.len() >= MAX_ASKED {
            self.next.retain(|_, next| now < *next);
            if self.next.len() >= MAX_ASKED {
                return;
            }
        }
        let pause = if ask() { ASK_AGAIN } else { RETRY };
        self.next.insert(dest, now + pause);
    }
}

#[cfg(test)]
mod tests {
    use ferroce_wire::{Frame, Grh, frame};

    use super::*;
    use crate::link::RoceVersion;
    use crate::link::xdp::tests::golden;

    /// A flow whose packets have the headers of a frame.
    fn flow_of(frame: &Frame<'_>) -> Flow<()> {
        let (network, bth) = (frame.datagram.network, frame.datagram.packet.bth());
        let (hop_limit, flow_label) = match network {
            Network::Ipv4 { ttl, .. } => (ttl, 0),
            Network::Ipv6 {
                hop_limit,
                flow_label,
                ..
            } => (hop_limit, flow_label),
            Network::Grh(grh) => (grh.hop_limit, grh.flow_label),
        };
        let path = Path {
            version: match network {
                Network::Grh(_) => RoceVersion::V1,
                _ => RoceVersion::V2,
            },
            source: network.src().to_ip(),
            dest: network.dst().to_ip(),
            ifindex: 1,
            sgid_index: 0,
            traffic_class: network.traffic_class(),
            hop_limit,
            flow_label,
            service_level: 0,
        };
        let qpns = Qpns {
            local: 0x11,
            dest: bth.dest_qpn,
        };
        let hop = Hop::Frame {
            source: frame.ethernet.src,
            dest: frame.ethernet.dst,
        };
        Flow::new(&path, qpns, hop, ())
    }

    /// What the reference makes of the packet, with our port and identification.
    fn reference(frame: &Frame<'_>) -> Vec<u8> {
        let mut network = frame.datagram.network;
        let ours = |udp: &mut ferroce_wire::datagram::Udp, label| {
            let qpn = frame.datagram.packet.bth().dest_qpn;
            let label = if label == 0 {
                udp_port::flow_label(0x11, qpn)
            } else {
                label
            };
            *udp = ferroce_wire::datagram::Udp {
                src_port: udp_port::source_port(label),
                checksum: 0,
            };
        };
        match &mut network {
            Network::Ipv4 {
                id,
                dont_fragment,
                udp,
                ..
            } => {
                (*id, *dont_fragment) = (0, true);
                ours(udp, 0);
            }
            Network::Ipv6 { udp, flow_label, .. } => ours(udp, *flow_label),
            Network::Grh(_) => {}
        }
        let packet = frame.datagram.packet;
        let mut bytes = vec![0; 9000];
        let ethernet = Ethernet {
            vlan: None,
            ..frame.ethernet
        };
        let len = frame::build(
            &ethernet,
            &network,
            &packet.headers(),
            packet.payload(),
            &mut bytes,
        );
        bytes.truncate(len.unwrap());
        bytes
    }

    fn wrapped(flow: &mut Flow<()>, packet: &[u8]) -> Vec<u8> {
        let len = packet.len();
        let mut bytes = vec![0xaa; flow.head_len() + len + ICRC_LEN];
        bytes[flow.head_len()..][..len].copy_from_slice(packet);
        flow.wrap(&mut bytes, len);
        bytes
    }

    #[test]
    fn frames_are_those_of_the_reference() {
        let mut kinds = [0; 3];
        for bytes in golden() {
            let frame = Frame::parse(&bytes).unwrap();
            kinds[match frame.datagram.network {
                Network::Ipv4 { .. } => 0,
                Network::Ipv6 { .. } => 1,
                Network::Grh(_) => 2,
            }] += 1;
            let mut flow = flow_of(&frame);
            let data = &frame.datagram.bytes()[frame.datagram.network.header_len()..];
            let covered = &data[..data.len() - ICRC_LEN];
            let expected = reference(&frame);
            for len in [covered.len(), 16, 32] {
                // Other lengths in between, so that cached headers are used and replaced.
                _ = wrapped(&mut flow, &vec![0x44; len]);
                assert_eq!(wrapped(&mut flow, covered), expected);
            }
        }
        assert!(kinds.iter().all(|&count| count > 1), "{kinds:?}");
    }

    #[test]
    fn roce_v1_frames_are_those_captured() {
        let mut found = 0;
        for bytes in golden() {
            let frame = Frame::parse(&bytes).unwrap();
            if let Network::Grh(_) = frame.datagram.network {
                found += 1;
                let data = &frame.datagram.bytes()[Grh::LEN..];
                let made = wrapped(&mut flow_of(&frame), &data[..data.len() - ICRC_LEN]);
                assert_eq!(made, bytes[..made.len()]);
            }
        }
        assert!(found > 0);
    }

    #[test]
    fn a_destination_is_asked_for_once_a_second() {
        let mut asked = Asked::default();
        let dest = "10.0.0.2".parse().unwrap();
        let mut count = 0;
        for ms in (0..3000).step_by(10) {
            asked.ask(dest, Duration::from_millis(ms), || {
                count += 1;
                true
            });
        }
        assert_eq!(count, 3);
        // Without a daemon sooner, but not with every packet.
        let mut count = 0;
        for ms in 4000..4100 {
            asked.ask(dest, Duration::from_millis(ms), || {
                count += 1;
                false
            });
        }
        assert_eq!(count, 5);
    }
}
