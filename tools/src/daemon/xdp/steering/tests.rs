//! The program, as the kernel runs it over frames; attaching and detaching.

mod frames;
mod life;

use std::path::Path;

use pcap_file::pcap::PcapReader;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};

use super::super::bpf::program::{XDP_DROP, XDP_PASS, XDP_REDIRECT};
use super::super::bpf::sys::{Place, test_run};
use super::super::testing::{in_fresh_namespace, index, ip};
use super::*;

const V4: &str = "10.1.2.3";
const V6: &str = "2001:db8::3";
/// Slots as the tests set them.
const SEAT: u8 = 7;
const SEAT_WITHOUT_SOCKET: u8 = 8;
const KERNEL: u8 = 9;
const NOBODY: u8 = 10;

const ROCE_PORT: u16 = 4791;
/// BTH, 16 bytes of payload, ICRC.
const IBA: usize = 12 + 16 + 4;

/// A program with slots and addresses, on `veth0`, whose second of four queues is the last that is served.
struct Bench {
    steering: Steering,
    ifindex: u32,
    _socket: OwnedFd,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Pass,
    Redirect,
    Unowned,
    Length,
    NoSocket,
}
use Verdict::*;
use frames::*;

impl Bench {
    fn new() -> Self {
        ip("link add veth0 numrxqueues 4 numtxqueues 4 type veth peer name veth1");
        ip("link set veth0 up");
        let ifindex = index("veth0");
        let mut steering = Steering::attach(ifindex, 2, Attach::Driver).unwrap();
        steering
            .set_addresses(&[V4.parse().unwrap(), V6.parse().unwrap()])
            .unwrap();
        for (slot, used) in [
            (SEAT, SlotUse::Seat),
            (SEAT_WITHOUT_SOCKET, SlotUse::Seat),
            (KERNEL, SlotUse::Kernel),
        ] {
            steering.set_slot(slot, used).unwrap();
        }
        let socket = xdp_socket();
        steering.set_socket(0, SEAT, Some(socket.as_fd())).unwrap();
        Self {
            steering,
            ifindex,
            _socket: socket,
        }
    }

    /// The verdict on a frame that comes by queue 0.
    fn run(&self, frame: &[u8]) -> Verdict {
        self.run_at(frame, None)
    }

    fn run_by_queue(&self, frame: &[u8], queue: u32) -> Verdict {
        let place = Place {
            ifindex: self.ifindex,
            queue,
            linear: frame.len(),
        };
        self.run_at(frame, Some(place))
    }

    fn run_at(&self, frame: &[u8], place: Option<Place>) -> Verdict {
        let before = self.steering.drops().unwrap();
        let verdict = test_run(self.steering.program.as_fd(), frame, place).unwrap();
        let after = self.steering.drops().unwrap();
        let counted = (
            after.unowned - before.unowned,
            after.length - before.length,
            after.no_socket - before.no_socket,
        );
        match (verdict as i32, counted) {
            (XDP_PASS, (0, 0, 0)) => Pass,
            (XDP_REDIRECT, (0, 0, 0)) => Redirect,
            (XDP_DROP, (1, 0, 0)) => Unowned,
            (XDP_DROP, (0, 1, 0)) => Length,
            (XDP_DROP, (0, 0, 1)) => NoSocket,
            other => panic!("verdict and counters {other:?} on {frame:02x?}"),
        }
    }
}

fn xdp_socket() -> OwnedFd {
    socket_with(AddressFamily::XDP, SocketType::RAW, SocketFlags::CLOEXEC, None).unwrap()
}

#[test]
fn packets_go_by_their_slot() {
    if !in_fresh_namespace("daemon::xdp::steering::tests::packets_go_by_their_slot") {
        return;
    }
    let bench = Bench::new();
    for (slot, verdict) in [
        (SEAT, Redirect),
        (SEAT_WITHOUT_SOCKET, NoSocket),
        (KERNEL, Pass),
        (0, Pass),
        (NOBODY, Unowned),
        (255, Unowned),
    ] {
        let [v4, tagged, v6, v1] = good(slot);
        assert_eq!(bench.run(&v4), verdict, "IPv4, slot {slot}");
        assert_eq!(bench.run(&tagged), verdict, "tagged, slot {slot}");
        assert_eq!(bench.run(&v6), verdict, "IPv6, slot {slot}");
        // RoCE v1 is nothing for the kernel.
        let verdict = if verdict == Pass { Unowned } else { verdict };
        assert_eq!(bench.run(&v1), verdict, "v1, slot {slot}");
    }
    // IPv4 by RoCE v1.
    let mapped = v6(0x8915, 0x1b, "::ffff:10.1.2.3", &iba(SEAT));
    assert_eq!(bench.run(&mapped), Redirect);

    let [v4, _, _, v1] = good(SEAT);
    assert_eq!(bench.run_by_queue(&v4, 0), Redirect);
    assert_eq!(bench.run_by_queue(&v4, 1), NoSocket);
    // Queues that nobody serves.
    assert_eq!(bench.run_by_queue(&v4, 2), Pass);
    assert_eq!(bench.run_by_queue(&v1, 3), Unowned);
    let socket = xdp_socket();
    bench.steering.set_socket(1, SEAT, Some(socket.as_fd())).unwrap();
    assert_eq!(bench.run_by_queue(&v4, 1), Redirect);
    bench.steering.set_socket(1, SEAT, None).unwrap();
    bench.steering.set_socket(1, SEAT, None).unwrap();
    assert_eq!(bench.run_by_queue(&v4, 1), NoSocket);
    bench.steering.set_slot(SEAT, SlotUse::Nobody).unwrap();
    assert_eq!(bench.run(&v4), Unowned);
    assert!(bench.steering.set_socket(2, SEAT, None).is_err());
    let file = std::fs::File::open("/dev/null").unwrap();
    assert!(bench.steering.set_socket(0, SEAT, Some(file.as_fd())).is_err());
}

#[test]
fn what_udp_sockets_send_is_divided_by_the_kernel() {
    if !in_fresh_namespace("daemon::xdp::steering::tests::what_udp_sockets_send_is_divided_by_the_kernel") {
        return;
    }
    let bench = Bench::new();
    for (slot, verdict) in [(SEAT, Pass), (KERNEL, Pass), (NOBODY, Unowned)] {
        for (frame, checksum) in good(slot).iter().zip([40, 44, 60]) {
            for bytes in [[0x12, 0x34], [0, 1], [1, 0]] {
                assert_eq!(bench.run(&with(frame, checksum, &bytes)), verdict, "slot {slot}");
            }
        }
    }
}

#[test]
fn everything_else_is_the_kernels() {
    if !in_fresh_namespace("daemon::xdp::steering::tests::everything_else_is_the_kernels") {
        return;
    }
    let bench = Bench::new();
    let [ipv4, tagged, ipv6, v1] = good(NOBODY);
    let mut options = with(&ipv4, 14, &[0x46]);
    options.splice(34..34, [1, 1, 1, 1]);
    options[17] += 4;
    let fragment = [0x20, 0x00];
    let last_fragment = [0x00, 0x10];
    for (what, frame) in [
        ("another Ethertype", with(&ipv4, 12, &[0x08, 0x06])),
        ("ARP", [ethernet(0x0806, None), vec![0; 46]].concat()),
        ("VLAN 1", v4(Some(0x0001), V4, &udp(&iba(NOBODY)))),
        ("VLAN 4095", v4(Some(0x0fff), V4, &udp(&iba(NOBODY)))),
        ("802.1ad", with(&tagged, 12, &[0x88, 0xa8])),
        ("two tags", with(&tagged, 16, &[0x81, 0x00])),
        ("a group's MAC", with(&ipv4, 0, &[1, 0, 0x5e])),
        ("TCP", with(&ipv4, 23, &[6])),
        ("UDP to another port", with(&ipv4, 36, &[0x12, 0xb6])),
        (
            "UDP from the port only",
            with(&ipv4, 34, &[0x12, 0xb7, 0x12, 0xb8]),
        ),
        ("IPv4 options", options),
        ("first fragment", with(&ipv4, 20, &fragment)),
        ("last fragment", with(&ipv4, 20, &last_fragment)),
        ("another address", v4(None, "10.1.2.4", &udp(&iba(NOBODY)))),
        ("group", v4(None, "239.1.2.3", &udp(&iba(NOBODY)))),
        ("broadcast", v4(None, "255.255.255.255", &udp(&iba(NOBODY)))),
        ("version 5", with(&ipv4, 14, &[0x55])),
        ("IPv6 TCP", with(&ipv6, 20, &[6])),
        ("IPv6 fragment", with(&ipv6, 20, &[44])),
        ("IPv6 to another port", with(&ipv6, 56, &[0])),
        ("IPv6 version 4", with(&ipv6, 14, &[0x45])),
        ("IPv6 group", v6(0x86dd, 17, "ff0e::3", &udp(&iba(NOBODY)))),
        (
            "another IPv6 address",
            v6(0x86dd, 17, "2001:db8::5", &udp(&iba(NOBODY))),
        ),
        (
            "IPv4 mapped",
            v6(0x86dd, 17, "::ffff:10.1.2.3", &udp(&iba(NOBODY))),
        ),
        ("v1, another next header", with(&v1, 20, &[17])),
        ("v1, another version", with(&v1, 14, &[0x40])),
        ("v1, another GID", v6(0x8915, 0x1b, "fe80::1", &iba(NOBODY))),
        ("v1 group", v6(0x8915, 0x1b, "ff0e::1", &iba(NOBODY))),
        ("nothing in it", ethernet(0x0800, None)),
        ("nothing behind the tag", ethernet(0x0800, Some(0))),
    ] {
        assert_eq!(bench.run(&frame), Pass, "{what}");
    }
    // The reserved flag of IPv4, and DF, make no fragment.
    assert_eq!(bench.run(&with(&ipv4, 20, &[0xc0, 0])), Unowned);
}

#[test]
fn lengths_must_agree() {
    if !in_fresh_namespace("daemon::xdp::steering::tests::lengths_must_agree") {
        return;
    }
    let bench = Bench::new();
    for (frame, ip_len, udp_len) in [
        (&good(SEAT)[0], 16, Some(38)),
        (&good(SEAT)[2], 18, Some(58)),
        (&good(SEAT)[3], 18, None),
    ]
    .map(|(frame, ip, udp)| (frame.clone(), ip, udp))
    {
        let length = u16::from_be_bytes([frame[ip_len], frame[ip_len + 1]]);
        let set = |frame: &[u8], at: usize, change: i32| {
            let old = i32::from(u16::from_be_bytes([frame[at], frame[at + 1]]));
            with(frame, at, &((old + change) as u16).to_be_bytes())
        };
        let both = |frame: &[u8], change: i32| {
            let frame = set(frame, ip_len, change);
            udp_len.map_or_else(|| frame.clone(), |at| set(&frame, at, change))
        };
        assert_eq!(bench.run(&frame), Redirect);
        // Ethernet pads short frames.
        assert_eq!(bench.run(&[&frame[..], &[0; 30]].concat()), Redirect);
        // More than there is.
        assert_eq!(bench.run(&both(&frame, 1)), Length);
        assert_eq!(bench.run(&both(&frame, 1000)), Length);
        assert_eq!(bench.run(&with(&frame, ip_len, &[0xff, 0xff])), Length);
        assert_eq!(bench.run(&with(&frame, ip_len, &[0, 0])), Length);
        // BTH and ICRC, and a byte less.
        assert_eq!(bench.run(&both(&frame, 16 - IBA as i32)), Redirect);
        assert_eq!(bench.run(&both(&frame, 15 - IBA as i32)), Length);
        if let Some(udp_len) = udp_len {
            for change in [-1, 1, -24, 1000] {
                assert_eq!(bench.run(&set(&frame, udp_len, change)), Length, "{change}");
            }
            assert_eq!(bench.run(&set(&frame, ip_len, -1)), Length);
            assert_eq!(bench.run(&with(&frame, udp_len, &[0, 0])), Length);
            assert_eq!(bench.run(&with(&frame, udp_len, &[0xff, 0xff])), Length);
        }
        assert!(length > 0);
    }
}

#[test]
fn every_truncation_is_passed_or_dropped() {
    if !in_fresh_namespace("daemon::xdp::steering::tests::every_truncation_is_passed_or_dropped") {
        return;
    }
    let bench = Bench::new();
    for (frame, headers) in good(SEAT).iter().zip([42, 46, 62, 54]) {
        // The kernel runs no program over less than an Ethernet header.
        for len in 14..frame.len() {
            let expected = if len < headers { Pass } else { Length };
            assert_eq!(bench.run(&frame[..len]), expected, "{len} bytes of {frame:02x?}");
        }
        assert_eq!(bench.run(frame), Redirect);
    }
}

#[test]
fn frames_in_several_buffers_have_their_whole_length() {
    if !in_fresh_namespace("daemon::xdp::steering::tests::frames_in_several_buffers_have_their_whole_length")
    {
        return;
    }
    let bench = Bench::new();
    let (mut long, mut placed) = (iba(SEAT), 0);
    long.resize(12 + 4096 + 4, 0x5a);
    for frame in [
        v4(None, V4, &udp(&long)),
        v6(0x86dd, 17, V6, &udp(&long)),
        v6(0x8915, 0x1b, V6, &long),
    ] {
        assert_eq!(bench.run(&frame), Redirect);
        assert_eq!(bench.run(&frame[..frame.len() - 1]), Length);
        // The kernel decides where little of it lies in the first buffer (which few kernels can be told).
        for linear in [14, 40, 65, 66, 128] {
            let place = Place {
                ifindex: bench.ifindex,
                queue: 0,
                linear,
            };
            if test_run(bench.steering.program.as_fd(), &frame, Some(place)).is_ok() {
                let headers = frame.len() - long.len() + 12;
                let expected = if linear < headers { Pass } else { Redirect };
                let verdict = bench.run_at(&frame, Some(place));
                assert_eq!(verdict, expected, "{linear} of {}", frame.len());
                placed += 1;
            }
        }
    }
    println!("{placed} frames with little in the first buffer");
}

#[test]
fn damaged_frames_are_judged_as_described() {
    if !in_fresh_namespace("daemon::xdp::steering::tests::damaged_frames_are_judged_as_described") {
        return;
    }
    let bench = Bench::new();
    // A generator of Marsaglia's, so that a failure comes again.
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    let mut random = |below: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 11) as usize % below
    };
    let mut seen = [0; 5];
    for round in 0..40_000 {
        let slot = [SEAT, SEAT_WITHOUT_SOCKET, KERNEL, NOBODY, 0][random(5)];
        let mut frame = good(slot)[round % 4].clone();
        for _ in 0..random(4) {
            let at = random(frame.len().min(70));
            frame[at] = match random(3) {
                0 => random(256) as u8,
                1 => frame[at] ^ 1 << random(8),
                _ => frame[at].wrapping_add(1),
            };
        }
        frame.truncate(frame.len().max(14) - random(3) * random(frame.len() - 13) / 2);
        let verdict = bench.run(&frame);
        assert_eq!(verdict, expected(&frame), "round {round}: {frame:02x?}");
        seen[verdict as usize] += 1;
    }
    assert!(seen.iter().all(|count| *count > 500), "{seen:?}");
}

#[test]
fn golden_frames_are_steered() {
    if !in_fresh_namespace("daemon::xdp::steering::tests::golden_frames_are_steered") {
        return;
    }
    let mut bench = Bench::new();
    let own = [
        "10.77.0.1",
        "10.77.0.2",
        "fd77::1",
        "fd77::2",
        "fe80::ff:fe00:1",
        "fe80::ff:fe00:2",
    ];
    bench
        .steering
        .set_addresses(&own.map(|ip| ip.parse().unwrap()))
        .unwrap();
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden");
    let (mut roce, mut others) = (0, 0);
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|extension| extension != "pcap") {
            continue;
        }
        let mut reader = PcapReader::new(std::fs::File::open(&path).unwrap()).unwrap();
        while let Some(packet) = reader.next_packet() {
            let frame = packet.unwrap().data.into_owned();
            // Soft-RoCE numbers its queue pairs from low to high: all are of slot 0.
            assert_eq!(bench.run(&frame), Pass, "{}: {frame:02x?}", path.display());
            let (is_v4, is_v6) = (frame[12..14] == [8, 0], frame[12..14] == [0x86, 0xdd]);
            let slot = match (is_v4, is_v6) {
                (true, _) if frame[23] == 17 && frame[36..38] == [0x12, 0xb7] => 47,
                (_, true) if frame[20] == 17 && frame[56..58] == [0x12, 0xb7] => 67,
                _ => {
                    others += 1;
                    continue;
                }
            };
            let is_group = frame[0] & 1 != 0;
            let expected = if is_group { Pass } else { Redirect };
            let verdict = bench.run(&with(&frame, slot, &[SEAT]));
            assert_eq!(verdict, expected, "{}: {frame:02x?}", path.display());
            roce += 1;
        }
    }
    println!("{roce} packets of RoCE, {others} others");
    assert!(roce > 1000 && others > 0);
}
