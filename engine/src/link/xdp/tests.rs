//! The link over a seat of plain memory, and frames that others have made.

use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::path::Path as FilePath;
use std::sync::{Arc, OnceLock};

use ferroce_wire::{Frame, Network};
use parking_lot::Mutex;
use pcap_file::pcap::PcapReader;
use rustix::event::{EventfdFlags, eventfd};

use super::hops::Hop;
use super::place::Place;
use super::*;
use crate::link::RoceVersion;

/// Frames of the captures that are RoCE: IPv4, IPv6 and RoCE v1.
pub(super) fn golden() -> Vec<Vec<u8>> {
    static FRAMES: OnceLock<Vec<Vec<u8>>> = OnceLock::new();
    let read = || {
        let folder = FilePath::new(env!("CARGO_MANIFEST_DIR")).join("../tests");
        let names = [
            "golden/rc-all-v4-mtu256.pcap",
            "golden/rc-all-v6global-mtu1024.pcap",
            "golden/ud-send-v6ll.pcap",
            "captures/icrc-vectors.pcap",
        ];
        let mut frames = Vec::new();
        for name in names {
            let mut reader = PcapReader::new(File::open(folder.join(name)).unwrap()).unwrap();
            let mut left = 60;
            while let Some(packet) = reader.next_packet() {
                let bytes = packet.unwrap().data.to_vec();
                if left > 0 && Frame::parse(&bytes).is_ok() {
                    frames.push(bytes);
                    left -= 1;
                }
            }
        }
        frames
    };
    FRAMES.get_or_init(read).clone()
}

const CHUNK: usize = 2048;

/// What the kernel and the daemon would do for a seat.
struct World {
    arrived: VecDeque<Vec<u8>>,
    frames: Vec<Option<Vec<u8>>>,
    queued: Vec<Vec<u8>>,
    sent: Vec<Vec<u8>>,
    /// Frames that the kernel takes with one kick; `None`: the interface is down.
    takes: Option<usize>,
    /// The kernel gives back what it has sent.
    completes: bool,
    hops: HashMap<IpAddr, Hop>,
    version: u64,
    by_udp: Vec<(Path, usize)>,
    udp_arrived: VecDeque<Vec<u8>>,
    udp_looks: usize,
    udp_takes: bool,
    asked: Vec<(IpAddr, IpAddr)>,
    mtu: u32,
}

#[derive(Clone)]
struct Memory(Arc<Mutex<World>>, Arc<OwnedFd>);

struct Fake {
    world: Memory,
    /// The frame that is being written.
    open: Option<Vec<u8>>,
}

impl Place for Fake {
    type Known = (IpAddr, u64);
    /// Number, and bytes of room.
    type Frames = (usize, usize);

    fn expect_bursts(&mut self) {}

    fn receive(&mut self, sink: &mut dyn FnMut(&[u8])) -> usize {
        let frames: Vec<_> = self.world.0.lock().arrived.drain(..).collect();
        frames.iter().for_each(|frame| sink(frame));
        frames.len()
    }

    fn reserve(&mut self, len: usize) -> Option<(usize, usize)> {
        let mut world = self.world.0.lock();
        let first = world.frames.iter().position(Option::is_none)?;
        assert!(len <= CHUNK && self.open.is_none());
        world.frames[first] = Some(Vec::new());
        self.open = Some(vec![0xee; CHUNK]);
        Some((first, len))
    }

    fn bytes(&mut self, frames: &(usize, usize)) -> &mut [u8] {
        &mut self.open.as_mut().unwrap()[..frames.1]
    }

    fn submit(&mut self, frames: (usize, usize)) {
        let bytes = self.open.take().unwrap();
        self.world.0.lock().queued.push(bytes[..frames.1].to_vec());
    }

    fn give_back(&mut self, frames: (usize, usize)) {
        self.open = None;
        self.world.0.lock().frames[frames.0] = None;
    }

    fn kick(&mut self) -> io::Result<bool> {
        let mut world = self.world.0.lock();
        let takes = world
            .takes
            .ok_or_else(|| io::Error::from_raw_os_error(libc::ENETDOWN))?;
        let count = takes.min(world.queued.len());
        let taken: Vec<_> = world.queued.drain(..count).collect();
        world.sent.extend(taken);
        if world.completes {
            let held = world.queued.len();
            for (i, frame) in world.frames.iter_mut().enumerate() {
                *frame = (i < held).then(Vec::new);
            }
        }
        Ok(world.queued.is_empty())
    }

    fn receive_fds(&self, fds: &mut Vec<RawFd>) {
        fds.push(self.world.1.as_raw_fd());
    }

    fn transmit_fd(&self) -> RawFd {
        self.world.1.as_raw_fd()
    }

    fn find(&self, dest: IpAddr) -> Option<(Hop, (IpAddr, u64))> {
        let world = self.world.0.lock();
        world.hops.get(&dest).map(|&hop| (hop, (dest, world.version)))
    }

    fn is_current(&self, known: &(IpAddr, u64)) -> bool {
        self.world.0.lock().version == known.1
    }

    fn counters(&self, _: &mut dyn FnMut(&'static str, u64)) {}
}

/// The UDP half.
struct Kernel(Memory);

impl Transmit for Kernel {
    fn packet(
        &mut self,
        path: &Path,
        _: Qpns,
        len: usize,
        fill: &mut dyn FnMut(&mut [u8]) -> Result<(), Fault>,
    ) -> Result<(), TransmitError> {
        fill(&mut vec![0; len]).map_err(TransmitError::Fault)?;
        self.0.0.lock().by_udp.push((*path, len));
        Ok(())
    }
}

impl Link for Kernel {
    fn receive(&mut self, sink: &mut dyn FnMut(&RxPacket<'_>)) -> io::Result<usize> {
        let frames: Vec<_> = {
            let mut world = self.0.0.lock();
            world.udp_looks += 1;
            world.udp_arrived.drain(..).collect()
        };
        for frame in &frames {
            let carried = receive::parse(frame).unwrap();
            let icrc = Exact {
                network: carried.network,
            };
            sink(&carried.packet(7, &icrc));
        }
        Ok(frames.len())
    }

    fn flush(&mut self) -> io::Result<bool> {
        Ok(self.0.0.lock().udp_takes)
    }

    fn receive_fds(&self, _: &mut Vec<RawFd>) {}

    fn transmit_fd(&self) -> Option<RawFd> {
        (!self.0.0.lock().udp_takes).then(|| self.0.1.as_raw_fd())
    }

    fn window(&self, packet_len: usize) -> u32 {
        4000 * packet_len as u32
    }

    fn join(&mut self, _: IpAddr, _: u32) -> io::Result<()> {
        Ok(())
    }

    fn leave(&mut self, _: IpAddr) -> io::Result<()> {
        Ok(())
    }

    fn set_mtu(&mut self, mtu: u32) {
        self.0.0.lock().mtu = mtu;
    }

    fn counters(&self, _: &mut dyn FnMut(&'static str, u64)) {}
}

const HOP: Hop = Hop::Frame {
    source: [2, 0, 0, 0, 0, 1],
    dest: [2, 0, 0, 0, 0, 2],
};
const QPNS: Qpns = Qpns {
    local: 0x02_0011,
    dest: 0x03_0012,
};

/// A link with four frames to send, at an interface with an MTU of 1500 bytes.
fn link() -> (XdpLink<Fake>, Arc<Mutex<World>>) {
    let world = Arc::new(Mutex::new(World {
        arrived: VecDeque::new(),
        frames: vec![None; 4],
        queued: Vec::new(),
        sent: Vec::new(),
        takes: Some(usize::MAX),
        completes: true,
        hops: HashMap::from([(peer(), HOP)]),
        version: 1,
        by_udp: Vec::new(),
        udp_arrived: VecDeque::new(),
        udp_looks: 0,
        udp_takes: true,
        asked: Vec::new(),
        mtu: 0,
    }));
    let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
    let memory = Memory(world.clone(), Arc::new(event));
    let asked = world.clone();
    let config = Config {
        slot: 3,
        ifindex: 9,
        mtu: 1500,
        geometry: Geometry {
            chunk: CHUNK as u32,
            queues: 1,
            seats: 4,
            rx_ring: 256,
            tx_ring: 64,
        },
        ask: Box::new(move |source, dest| {
            asked.lock().asked.push((source, dest));
            true
        }),
    };
    let seat = Fake {
        world: memory.clone(),
        open: None,
    };
    (
        XdpLink::new(seat, Box::new(Kernel(memory)), config).unwrap(),
        world,
    )
}

fn peer() -> IpAddr {
    "10.0.0.2".parse().unwrap()
}

fn path(dest: IpAddr) -> Path {
    Path {
        version: RoceVersion::V2,
        source: "10.0.0.1".parse().unwrap(),
        dest,
        ifindex: 9,
        sgid_index: 0,
        traffic_class: 2,
        hop_limit: 0,
        flow_label: 0,
        service_level: 0,
    }
}

/// Sends a SEND of `len` bytes in all, its payload of one value.
fn send(link: &mut XdpLink<Fake>, path: &Path, len: usize, value: u8) -> Result<(), TransmitError> {
    link.packet(path, QPNS, len, &mut |out| {
        let (bth, payload) = out.split_at_mut(12);
        bth.copy_from_slice(&[4, 0, 0xff, 0xff, 0, 3, 0, 0x12, 0, 0, 0, 1]);
        payload.fill(value);
        Ok(())
    })
}

#[test]
fn frames_go_where_the_table_says() {
    let (mut link, world) = link();
    send(&mut link, &path(peer()), 76, 0x5a).unwrap();
    assert!(world.lock().sent.is_empty(), "nothing leaves before the flush");
    assert!(link.flush().unwrap());
    let bytes = world.lock().sent.remove(0);
    let frame = Frame::parse(&bytes).unwrap();
    assert_eq!(frame.ethernet.dst, [2, 0, 0, 0, 0, 2]);
    assert_eq!(frame.datagram.verify(), Ok(()));
    assert_eq!(frame.datagram.packet.payload(), [0x5a; 64]);
    let Network::Ipv4 {
        tos,
        id,
        dont_fragment,
        ttl,
        ..
    } = frame.datagram.network
    else {
        panic!("IPv4")
    };
    assert_eq!((tos, id, dont_fragment, ttl), (2, 0, true, 64));

    // The neighbour moves.
    let hop = Hop::Frame {
        source: [2, 0, 0, 0, 0, 1],
        dest: [2, 0, 0, 0, 0, 9],
    };
    world.lock().hops.insert(peer(), hop);
    world.lock().version += 1;
    send(&mut link, &path(peer()), 76, 1).unwrap();
    assert!(link.flush().unwrap());
    assert_eq!(world.lock().sent[0][..6], [2, 0, 0, 0, 0, 9]);
    assert!(world.lock().by_udp.is_empty());
    assert!(world.lock().asked.is_empty());

    // It is reached by another interface now.
    world.lock().hops.insert(peer(), Hop::Kernel);
    world.lock().version += 1;
    send(&mut link, &path(peer()), 76, 1).unwrap();
    assert_eq!(world.lock().by_udp, [(path(peer()), 76)]);
}

#[test]
fn the_kernel_sends_what_has_no_known_hop() {
    let (mut link, world) = link();
    let unknown = "10.0.0.3".parse().unwrap();
    for _ in 0..10 {
        send(&mut link, &path(unknown), 16, 0).unwrap();
    }
    assert_eq!(world.lock().by_udp.len(), 10);
    assert_eq!(world.lock().asked, [("10.0.0.1".parse().unwrap(), unknown)]);
    // The answer appears in the table.
    assert_eq!(link.reach(&path(unknown)), Reach::Unknown);
    world.lock().hops.insert(unknown, Hop::Kernel);
    assert_eq!(link.reach(&path(unknown)), Reach::Kernel);
    world.lock().hops.insert(unknown, HOP);
    assert_eq!(link.reach(&path(unknown)), Reach::Own);
    send(&mut link, &path(unknown), 16, 0).unwrap();
    assert!(link.flush().unwrap());
    assert_eq!(world.lock().sent.len(), 1);
    // Multicast is the kernel's, and nobody is asked.
    send(&mut link, &path("239.1.2.3".parse().unwrap()), 16, 0).unwrap();
    assert_eq!(world.lock().by_udp.len(), 11);
    assert_eq!(world.lock().asked.len(), 1);
}

#[test]
fn what_does_not_fit_is_lost_and_counted() {
    let (mut link, world) = link();
    let longest = 1500 - 20 - 8 - ICRC_LEN;
    send(&mut link, &path(peer()), longest, 0).unwrap();
    send(&mut link, &path(peer()), longest + 1, 0).unwrap();
    assert!(link.flush().unwrap());
    assert_eq!(world.lock().sent.len(), 1);
    assert_eq!(link.counters.tx_lost_mtu, 1);
    link.set_mtu(1501);
    send(&mut link, &path(peer()), longest + 1, 0).unwrap();
    assert!(link.flush().unwrap());
    assert_eq!(world.lock().sent.len(), 2);
}

#[test]
fn without_room_nothing_is_lost() {
    let (mut link, world) = link();
    world.lock().takes = Some(1);
    for i in 0..5 {
        // The fifth has the place of the first, which a kick made.
        send(&mut link, &path(peer()), 76, i).unwrap();
    }
    world.lock().takes = Some(0);
    assert_eq!(send(&mut link, &path(peer()), 76, 5), Err(TransmitError::Full));
    assert!(!link.flush().unwrap());
    assert!(link.transmit_fd().is_some());
    world.lock().takes = Some(usize::MAX);
    assert!(link.flush().unwrap());
    let sent: Vec<_> = world.lock().sent.iter().map(|frame| frame[54]).collect();
    assert_eq!(sent, [0, 1, 2, 3, 4]);

    // The kernel has all, and gives back nothing yet.
    world.lock().completes = false;
    for i in 0..4 {
        send(&mut link, &path(peer()), 76, i).unwrap();
    }
    assert_eq!(send(&mut link, &path(peer()), 76, 4), Err(TransmitError::Busy));
    assert!(link.flush().unwrap());
    world.lock().completes = true;
    send(&mut link, &path(peer()), 76, 4).unwrap();

    // The interface goes down: frames are lost, and timers see to it.
    world.lock().takes = None;
    for i in 0..10 {
        send(&mut link, &path(peer()), 76, i).unwrap();
    }
    assert!(link.counters.tx_lost_down > 0);
    assert!(link.flush().is_err());
}

#[test]
fn memory_that_can_not_be_read_costs_no_frame() {
    let (mut link, world) = link();
    for _ in 0..10 {
        let result = link.packet(&path(peer()), QPNS, 76, &mut |_| Err(Fault { addr: 0 }));
        assert!(matches!(result, Err(TransmitError::Fault(_))));
    }
    assert!(world.lock().frames.iter().all(Option::is_none));
}

#[test]
fn a_full_half_does_not_hide_the_other() {
    let (mut link, world) = link();
    world.lock().udp_takes = false;
    send(&mut link, &path("10.0.0.3".parse().unwrap()), 16, 0).unwrap();
    send(&mut link, &path(peer()), 16, 0).unwrap();
    assert!(!link.flush().unwrap());
    assert_eq!(world.lock().sent.len(), 1);
    assert!(link.transmit_fd().is_some());
    world.lock().udp_takes = true;
    assert!(link.flush().unwrap());
    assert!(link.transmit_fd().is_none());
}

fn received(link: &mut XdpLink<Fake>) -> Vec<Vec<u8>> {
    let mut packets = Vec::new();
    let count = link
        .receive(&mut |packet| {
            assert!(packet.icrc.valid(packet));
            packets.push(packet.data.to_vec());
        })
        .unwrap();
    assert_eq!(count, packets.len());
    packets
}

/// A frame for slot 3.
fn frame() -> Vec<u8> {
    let (mut link, world) = link();
    send(&mut link, &path(peer()), 76, 0x77).unwrap();
    link.flush().unwrap();
    world.lock().sent.remove(0)
}

#[test]
fn frames_arrive_or_are_counted() {
    let (mut link, world) = link();
    let good = frame();
    let mut for_another = good.clone();
    for_another[47] = 4;
    let mut other_type = good.clone();
    other_type[13] = 6;
    world.lock().arrived = [&good, &for_another, &other_type, &good[..30].to_vec(), &good]
        .map(Clone::clone)
        .into();
    assert_eq!(received(&mut link), [&good[42..], &good[42..]]);
    let counters = &link.counters;
    let drops = (
        counters.rx_misdirected,
        counters.rx_not_roce,
        counters.rx_truncated,
    );
    assert_eq!((drops, counters.rx_packets), ((1, 1, 1), 2));
}

#[test]
fn a_quiet_socket_is_seldom_looked_at() {
    let (mut link, world) = link();
    let rounds = 100 * UDP_REST as usize;
    for _ in 0..rounds {
        received(&mut link);
    }
    let looks = std::mem::take(&mut world.lock().udp_looks);
    assert!((50..=110).contains(&looks), "{looks}");
    // Who has slept on the descriptors finds what woke it.
    link.receive_fds(&mut Vec::new());
    world.lock().udp_arrived.push_back(frame());
    assert_eq!(received(&mut link).len(), 1);
    // From then on each round looks, for a while.
    for _ in 0..100 {
        received(&mut link);
    }
    assert_eq!(world.lock().udp_looks, 101);
    for _ in 0..UDP_ACTIVE as usize + rounds {
        received(&mut link);
    }
    let looks = world.lock().udp_looks;
    assert!(looks < UDP_ACTIVE as usize + 200, "{looks}");
}

#[test]
fn the_window_is_half_of_a_ring() {
    let (link, _) = link();
    assert_eq!(link.window(80), 128 * 80);
    // Three pieces for each packet.
    assert_eq!(link.window(4112), 128 / 3 * 4112);
}
