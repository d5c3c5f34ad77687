//! Two processes' links in one process, over the loopback interface of a network namespace of the test's own.
//!
//! Port 4791 belongs to the daemon where one runs, so each test makes a namespace: that needs root, or unprivileged
//! user namespaces. Without either the test says so and is skipped.

use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::time::{Duration, Instant};

use ferroce_wire::Bth;

use super::*;
use crate::link::RoceVersion;
use crate::link::headers::Addressing;

const V4: &str = "127.0.0.1";
const V6: &str = "::1";
/// Slots of the links that tests make.
const SLOTS: [u8; 2] = [0, 1];

/// Runs `test` in a thread with a network namespace of its own, whose loopback is up.
fn in_namespace(test: impl FnOnce() + Send) {
    let run = std::thread::scope(|scope| {
        scope
            .spawn(move || {
                // SAFETY: changes this thread only; for an ordinary user, together with a user namespace, which the
                // kernel refuses to threaded processes.
                if unsafe { libc::unshare(libc::CLONE_NEWNET) } != 0 {
                    return false;
                }
                loopback_up();
                test();
                true
            })
            .join()
    });
    match run {
        Ok(true) => {}
        Ok(false) => eprintln!("skipped: no permission to make a network namespace"),
        Err(panic) => std::panic::resume_unwind(panic),
    }
}

fn loopback_up() {
    let socket = udp(libc::AF_INET);
    // SAFETY: a zeroed request, filled as SIOCSIFFLAGS wants it.
    unsafe {
        let mut request: libc::ifreq = std::mem::zeroed();
        request.ifr_name[..2].copy_from_slice(&[b'l' as _, b'o' as _]);
        request.ifr_ifru.ifru_flags = (libc::IFF_UP | libc::IFF_RUNNING) as _;
        assert_eq!(libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS, &request), 0);
    }
}

fn udp(domain: i32) -> OwnedFd {
    // SAFETY: a new descriptor.
    unsafe {
        let fd = libc::socket(domain, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0);
        assert!(fd >= 0);
        OwnedFd::from_raw_fd(fd)
    }
}

/// The daemon's part: sockets on port 4791 for slots 0 and 1, chosen by the high byte of the destination QPN.
fn slots() -> [OwnedFd; 2] {
    SLOTS.map(|slot| {
        let fd = udp(libc::AF_INET6);
        socket::set(fd.as_fd(), libc::IPPROTO_IPV6, libc::IPV6_V6ONLY, &0).unwrap();
        socket::set(fd.as_fd(), libc::SOL_SOCKET, libc::SO_REUSEPORT, &1).unwrap();
        socket::set(fd.as_fd(), libc::SOL_SOCKET, libc::SO_RCVBUF, &(4 << 20)).unwrap();
        if slot == 0 {
            let code = |code, k| libc::sock_filter {
                code: code as u16,
                jt: 0,
                jf: 0,
                k,
            };
            let mut program = [
                code(libc::BPF_LD | libc::BPF_B | libc::BPF_ABS, 5),
                code(libc::BPF_RET | libc::BPF_A, 0),
            ];
            let program = libc::sock_fprog {
                len: program.len() as u16,
                filter: program.as_mut_ptr(),
            };
            socket::set(
                fd.as_fd(),
                libc::SOL_SOCKET,
                libc::SO_ATTACH_REUSEPORT_CBPF,
                &program,
            )
            .unwrap();
        }
        let (address, len) = socket::Address::new("::".parse().unwrap(), socket::ROCE_PORT, 0);
        // SAFETY: a valid address.
        let bound = unsafe { libc::bind(fd.as_raw_fd(), (&raw const address).cast(), len) };
        assert_eq!(bound, 0);
        fd
    })
}

fn links() -> [UdpLink; 2] {
    let [a, b] = slots();
    [(a, 0), (b, 1)].map(|(socket, slot)| UdpLink::new(socket, slot, true, Box::new(|_| None)).unwrap())
}

fn path(ip: &str) -> Path {
    let ip: IpAddr = ip.parse().unwrap();
    Path {
        ifindex: 1,
        ..Path::between(ip, ip)
    }
}

/// A packet without ICRC to `dest_qpn`, told apart by `tag`.
fn packet(dest_qpn: u32, len: usize, tag: u8) -> Vec<u8> {
    let mut bytes = vec![tag; len];
    bytes[..Bth::LEN].fill(0);
    bytes[4] = tag;
    bytes[5..8].copy_from_slice(&dest_qpn.to_be_bytes()[1..]);
    bytes
}

fn send(link: &mut UdpLink, path: &Path, dest_qpn: u32, bytes: &[u8]) -> Result<(), TransmitError> {
    link.packet(path, Qpns::to(dest_qpn), bytes.len(), &mut |into| {
        into.copy_from_slice(bytes);
        Ok(())
    })
}

/// What was received of a packet, and whether its ICRC is right.
#[derive(Debug, PartialEq)]
struct Received {
    data: Vec<u8>,
    valid: bool,
    source: IpAddr,
    source_port: u16,
    dest: IpAddr,
    traffic_class: u8,
    hop_limit: u8,
}

fn take(link: &mut UdpLink, out: &mut Vec<Received>) -> usize {
    link.receive(&mut |packet| {
        out.push(Received {
            data: packet.data[..packet.data.len().saturating_sub(4)].to_vec(),
            valid: packet.icrc.valid(packet),
            source: packet.source,
            source_port: packet.source_port,
            dest: packet.dest,
            traffic_class: packet.traffic_class,
            hop_limit: packet.hop_limit,
        });
    })
    .unwrap()
}

/// Waits for `count` packets.
fn receive(link: &mut UdpLink, count: usize) -> Vec<Received> {
    let mut out = Vec::new();
    let deadline = Instant::now() + Duration::from_secs(10);
    while out.len() < count {
        let left = deadline.saturating_duration_since(Instant::now());
        let mut fds = Vec::new();
        link.receive_fds(&mut fds);
        let mut poll = libc::pollfd {
            fd: fds[0],
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: one valid descriptor.
        let ready = unsafe { libc::poll(&raw mut poll, 1, left.as_millis() as i32) };
        assert!(ready > 0, "{} of {count} packets came", out.len());
        take(link, &mut out);
    }
    out
}

fn counter(link: &UdpLink, wanted: &str) -> u64 {
    let mut found = None;
    link.counters(&mut |name, value| {
        if name == wanted {
            found = Some(value);
        }
    });
    found.unwrap()
}

#[test]
fn rocev1_travels_as_v2() {
    let [mut a, mut b] = links();
    let path = Path {
        version: RoceVersion::V1,
        ..path("127.0.0.1")
    };
    let bytes = packet(0x01_0007, 64, 1);
    send(&mut a, &path, 0x01_0007, &bytes).unwrap();
    assert!(a.flush().unwrap());
    let received = receive(&mut b, 1);
    assert!(received[0].valid);
    assert_eq!(received[0].data, bytes);
}

fn sizes_arrive_whole_and_valid(ip: &str) {
    let [mut a, mut b] = links();
    let path = path(ip);
    // Runs of equal sizes, a shorter one at the end, growing sizes, and the longest a packet can be here.
    let lengths = [
        [64; 5].as_slice(),
        &[1040; 70],
        &[1000],
        &[4112; 40],
        &[16, 20, 24, 4112, 12],
        &[60_000],
    ];
    let mut sent = Vec::new();
    for (tag, len) in lengths.concat().into_iter().enumerate() {
        let bytes = packet(0x01_0007, len, tag as u8);
        send(&mut a, &path, 0x01_0007, &bytes).unwrap();
        sent.push(bytes);
    }
    assert!(a.flush().unwrap());
    let received = receive(&mut b, sent.len());
    assert_eq!(received.len(), sent.len());
    for (received, sent) in received.iter().zip(&sent) {
        assert!(
            received.data == *sent,
            "a packet of {} bytes came as {}",
            sent.len(),
            received.data.len()
        );
        assert!(received.valid);
        assert_eq!((received.source, received.dest), (path.source, path.dest));
        assert_eq!((received.traffic_class, received.hop_limit), (0, 64));
        assert!(received.source_port >= 0xc000);
    }
    assert_eq!(counter(&a, "tx_packets"), sent.len() as u64);
    assert_eq!(counter(&b, "rx_packets"), sent.len() as u64);
    assert!(counter(&a, "tx_sends") < 20, "{} sends", counter(&a, "tx_sends"));
    assert_eq!(counter(&b, "rx_id_recovered"), 0);
}

#[test]
fn sizes_arrive_whole_and_valid_over_ipv4() {
    in_namespace(|| sizes_arrive_whole_and_valid(V4));
}

#[test]
fn sizes_arrive_whole_and_valid_over_ipv6() {
    in_namespace(|| sizes_arrive_whole_and_valid(V6));
}

#[test]
fn each_slot_gets_its_own() {
    in_namespace(|| {
        let [mut a, mut b] = links();
        let path = path(V4);
        for i in 0..60u8 {
            let slot = u32::from(i % 3 == 0);
            send(&mut a, &path, slot << 16 | 5, &packet(slot << 16 | 5, 100, i)).unwrap();
        }
        a.flush().unwrap();
        let (mine, theirs) = (receive(&mut a, 40), receive(&mut b, 20));
        assert!(mine.iter().all(|it| it.data[4] % 3 != 0 && it.valid));
        assert!(theirs.iter().all(|it| it.data[4] % 3 == 0 && it.valid));
        assert_ne!(mine[0].source_port, theirs[0].source_port);
    });
}

#[test]
fn a_packet_for_another_process_is_dropped_and_multicast_is_not() {
    in_namespace(|| {
        let [mut a, mut b] = links();
        let path = path(V4);
        // The kernel looks at the first packet of what travels together.
        for (tag, qpn) in [(1, 0x01_0001), (2, 0x00_0001), (3, 0xff_ffff), (4, 0x01_0001)] {
            send(&mut a, &path, 0x01_0001, &packet(qpn, 64, tag)).unwrap();
        }
        a.flush().unwrap();
        let tags: Vec<u8> = receive(&mut b, 3).iter().map(|it| it.data[4]).collect();
        assert_eq!(tags, [1, 3, 4]);
        assert_eq!(counter(&b, "rx_misdirected"), 1);
    });
}

#[test]
fn traffic_class_and_hop_limit_arrive() {
    in_namespace(|| {
        for ip in [V4, V6] {
            let [mut a, mut b] = links();
            let mut path = path(ip);
            // The second of each pair differs from what the socket was made with.
            for (class, hops) in [(0x6a, 3), (0x02, 200), (0, 64)] {
                (path.traffic_class, path.hop_limit) = (class, hops);
                send(&mut a, &path, 1 << 16, &packet(1 << 16, 64, 0)).unwrap();
                send(&mut a, &path, 1 << 16, &packet(1 << 16, 64, 0)).unwrap();
            }
            a.flush().unwrap();
            let got: Vec<_> = receive(&mut b, 6)
                .iter()
                .map(|it| (it.traffic_class, it.hop_limit, it.valid))
                .collect();
            let [x, y, z] = [(0x6a, 3, true), (0x02, 200, true), (0, 64, true)];
            assert_eq!(got, [x, x, y, y, z, z], "{ip}");
        }
    });
}

/// Sends `bytes` with an ICRC made for the identification `id`, from a foreign socket with `discover` and port.
fn send_foreign(socket: &OwnedFd, port: u16, id: u16, bytes: &mut Vec<u8>) {
    let ip: IpAddr = V4.parse().unwrap();
    let addressing = Addressing {
        version: RoceVersion::V2,
        source: ip,
        dest: ip,
        source_port: port,
        traffic_class: 0,
        hop_limit: 0,
        flow_label: 0,
        id,
    };
    bytes.extend(addressing.icrc(bytes).unwrap().to_le_bytes());
    let (address, len) = socket::Address::new(ip, socket::ROCE_PORT, 0);
    // SAFETY: valid buffers.
    let sent = unsafe {
        libc::sendto(
            socket.as_raw_fd(),
            bytes.as_ptr().cast(),
            bytes.len(),
            0,
            (&raw const address).cast(),
            len,
        )
    };
    assert_eq!(sent as usize, bytes.len());
}

/// The ICRC of another sender is made for any id, and the id on the wire can't be seen: so the id of the wire may as
/// well stay 0, and the ICRC alone say another one.
#[test]
fn other_senders_ids_are_recovered() {
    in_namespace(|| {
        let [_a, mut b] = links();
        let socket = socket::sender(&path(V4), 0xd000).unwrap();
        assert_eq!(socket::local_port(socket.as_fd()).unwrap(), 0xd000);
        let mut id = 7u16;
        for tag in 0..200u8 {
            id = id.wrapping_mul(25173).wrapping_add(13849) | 1;
            send_foreign(
                &socket,
                0xd000,
                id,
                &mut packet(1 << 16, 50 + usize::from(tag), tag),
            );
            let received = receive(&mut b, 1);
            assert!(received[0].valid, "id {id}, packet {tag}");
        }
        assert_eq!(counter(&b, "rx_id_recovered"), 200);
    });
}

#[test]
fn damage_is_seen() {
    in_namespace(|| {
        let [_a, mut b] = links();
        let socket = socket::sender(&path(V4), 0xd000).unwrap();
        let whole = packet(1 << 16, 64, 9);
        let mut seen = 0;
        for bit in 0..(64 + 4) * 8 {
            // The QPN steers; byte 4 is not covered.
            if (4 * 8..8 * 8).contains(&bit) {
                continue;
            }
            let mut bytes = whole.clone();
            let ip: IpAddr = V4.parse().unwrap();
            let addressing = Addressing {
                version: RoceVersion::V2,
                source: ip,
                dest: ip,
                source_port: 0xd000,
                traffic_class: 0,
                hop_limit: 0,
                flow_label: 0,
                id: 0,
            };
            bytes.extend(addressing.icrc(&bytes).unwrap().to_le_bytes());
            bytes[bit / 8] ^= 1 << (bit % 8);
            let (address, len) = socket::Address::new(ip, socket::ROCE_PORT, 0);
            // SAFETY: valid buffers.
            let sent = unsafe {
                libc::sendto(
                    socket.as_raw_fd(),
                    bytes.as_ptr().cast(),
                    68,
                    0,
                    (&raw const address).cast(),
                    len,
                )
            };
            assert_eq!(sent, 68);
            assert!(!receive(&mut b, 1)[0].valid, "bit {bit}");
            seen += 1;
        }
        assert_eq!(seen, 68 * 8 - 32);
    });
}

#[test]
fn short_datagrams_are_handed_over_and_not_valid() {
    in_namespace(|| {
        let [_a, mut b] = links();
        let socket = socket::sender(&path(V4), 0xd000).unwrap();
        let (address, len) = socket::Address::new(V4.parse().unwrap(), socket::ROCE_PORT, 0);
        let bytes = [0u8, 0, 0, 0, 0, 1, 0, 0, 0];
        for size in [6, 7, 9] {
            // SAFETY: valid buffers.
            let sent = unsafe {
                libc::sendto(
                    socket.as_raw_fd(),
                    bytes.as_ptr().cast(),
                    size,
                    0,
                    (&raw const address).cast(),
                    len,
                )
            };
            assert_eq!(sent as usize, size);
        }
        assert!(receive(&mut b, 3).iter().all(|it| !it.valid));
    });
}

#[test]
fn a_fault_takes_nothing() {
    in_namespace(|| {
        let [mut a, mut b] = links();
        let path = path(V4);
        let fault = Fault { addr: 77 };
        send(&mut a, &path, 1 << 16, &packet(1 << 16, 64, 1)).unwrap();
        let result = a.packet(&path, Qpns::to(1 << 16), 64, &mut |_| Err(fault));
        assert_eq!(result, Err(TransmitError::Fault(fault)));
        send(&mut a, &path, 1 << 16, &packet(1 << 16, 64, 2)).unwrap();
        a.flush().unwrap();
        let received = receive(&mut b, 2);
        assert_eq!(
            received
                .iter()
                .map(|it| (it.data[4], it.valid))
                .collect::<Vec<_>>(),
            [(1, true), (2, true)]
        );
    });
}

#[test]
fn unreachable_peers_and_absent_addresses_are_losses() {
    in_namespace(|| {
        let [mut a, mut b] = links();
        let mut away = path(V4);
        away.dest = "10.9.8.7".parse().unwrap();
        send(&mut a, &away, 1 << 16, &packet(1 << 16, 64, 1)).unwrap();
        send(&mut a, &path(V4), 1 << 16, &packet(1 << 16, 64, 2)).unwrap();
        let mut absent = path(V4);
        absent.source = "10.9.8.6".parse().unwrap();
        send(&mut a, &absent, 1 << 16, &packet(1 << 16, 64, 3)).unwrap();
        assert!(a.flush().unwrap());
        assert_eq!(receive(&mut b, 1)[0].data[4], 2);
        assert_eq!(counter(&a, "tx_lost_unreachable"), 2);
        // Longer than the interface's MTU.
        let long = vec![0; 65_450];
        send(&mut a, &path(V4), 1 << 16, &long).unwrap();
        send(&mut a, &path(V4), 1 << 16, &vec![0; 70_000]).unwrap();
        assert!(a.flush().unwrap());
        assert_eq!(counter(&a, "tx_lost_mtu") + counter(&a, "tx_packets"), 3);
    });
}

#[test]
fn many_destinations_share_the_pool() {
    in_namespace(|| {
        let [mut a, mut b] = links();
        for round in 0..2 {
            for last in 1..=150u8 {
                let mut path = path(V4);
                path.dest = IpAddr::from([127, 0, 1, last]);
                for _ in 0..2 {
                    send(&mut a, &path, 1 << 16, &packet(1 << 16, 64, last)).unwrap();
                }
            }
            a.flush().unwrap();
            let received = receive(&mut b, 300);
            assert!(received.iter().all(|it| it.valid), "round {round}");
            assert!(
                received
                    .iter()
                    .all(|it| it.dest == IpAddr::from([127, 0, 1, it.data[4]]))
            );
        }
    });
}

#[test]
fn a_device_without_checksum_offload_gets_single_packets() {
    in_namespace(|| {
        let [mut a, mut b] = links();
        let path = path(V4);
        for tag in 0..10 {
            send(&mut a, &path, 1 << 16, &packet(1 << 16, 64, tag)).unwrap();
        }
        // What the kernel answers to a segmented send on such a device.
        a.transmitter
            .refused(0, &io::Error::from_raw_os_error(libc::EIO))
            .unwrap();
        a.flush().unwrap();
        let received = receive(&mut b, 10);
        assert!(received.iter().all(|it| it.valid));
        assert!(received.iter().map(|it| it.data[4]).eq(0..10));
        assert_eq!(counter(&a, "tx_sends"), 10);
    });
}

#[test]
fn the_window_is_what_the_socket_holds() {
    in_namespace(|| {
        let [a, mut b] = links();
        let socket = socket::sender(&path(V4), 0xd000).unwrap();
        for len in [60, 300, 1036, 2060, 4108] {
            let window = a.window(len + 4);
            // Twice the window, from a foreign sender whose packets the kernel does not merge.
            let count = 2 * window as usize / (len + 4);
            for _ in 0..count {
                send_foreign(&socket, 0xd000, 0, &mut packet(1 << 16, len, 1));
            }
            let mut received = Vec::new();
            while take(&mut b, &mut received) > 0 {}
            let got = received.len();
            assert!(
                got >= count / 2,
                "{got} of {count} packets of {len} bytes: window {window}"
            );
        }
    });
}

/// A TAP interface with the address 10.4.0.1/24, whose peers never answer; gone when the descriptor is closed.
fn mute_interface() -> OwnedFd {
    use std::os::unix::fs::OpenOptionsExt;
    let tap = std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_CLOEXEC)
        .open("/dev/net/tun")
        .unwrap();
    let socket = udp(libc::AF_INET);
    let (address, _) = socket::Address::new("10.4.0.1".parse().unwrap(), 0, 0);
    // SAFETY: zeroed requests, filled as each call wants them.
    unsafe {
        let mut request: libc::ifreq = std::mem::zeroed();
        request.ifr_name[..4].copy_from_slice(&b"mute".map(|c| c as _));
        request.ifr_ifru.ifru_flags = (libc::IFF_TAP | libc::IFF_NO_PI) as _;
        assert_eq!(libc::ioctl(tap.as_raw_fd(), libc::TUNSETIFF, &request), 0);
        request.ifr_ifru.ifru_addr = (&raw const address).cast::<libc::sockaddr>().read();
        assert_eq!(libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFADDR, &request), 0);
        request.ifr_ifru.ifru_flags = (libc::IFF_UP | libc::IFF_RUNNING) as _;
        assert_eq!(libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS, &request), 0);
    }
    tap.into()
}

#[test]
fn a_full_socket_is_reported_and_nothing_is_forgotten() {
    in_namespace(|| {
        let [mut a, mut b] = links();
        let tap = mute_interface();
        let home = path(V4);
        let mut path = path("10.4.0.1");
        path.dest = "10.4.0.2".parse().unwrap();
        // The kernel keeps packets, on the socket's account, until it knows the peer's hardware address.
        let bytes = packet(1 << 16, 1000, 1);
        send(&mut a, &path, 1 << 16, &bytes).unwrap();
        assert!(a.flush().unwrap());
        socket::set(
            a.transmitter.flows.get(0).socket.as_fd(),
            libc::SOL_SOCKET,
            libc::SO_SNDBUF,
            &1,
        )
        .unwrap();
        let mut taken = 1;
        let full = loop {
            match send(&mut a, &path, 1 << 16, &bytes) {
                Ok(()) => taken += 1,
                Err(error) => break error,
            }
            assert!(taken < 100_000);
        };
        assert_eq!(full, TransmitError::Busy);
        assert!(!a.flush().unwrap());
        assert!(a.transmit_fd().is_some());
        assert!(counter(&a, "tx_packets") < taken);
        // What goes elsewhere is not held up.
        for tag in 0..100 {
            send(&mut a, &home, 1 << 16, &packet(1 << 16, 64, tag)).unwrap();
        }
        assert!(!a.flush().unwrap());
        let received = receive(&mut b, 100);
        assert!(received.iter().map(|it| it.data[4]).eq(0..100));
        assert!(received.iter().all(|it| it.valid));
        assert_eq!(send(&mut a, &path, 1 << 16, &bytes), Err(TransmitError::Busy));
        // The interface goes, and what the kernel kept with it.
        drop(tap);
        let deadline = Instant::now() + Duration::from_secs(10);
        while !a.flush().unwrap() {
            let mut poll = libc::pollfd {
                fd: a.transmit_fd().unwrap(),
                events: libc::POLLIN,
                revents: 0,
            };
            // SAFETY: one valid descriptor.
            unsafe { libc::poll(&raw mut poll, 1, 1000) };
            assert!(Instant::now() < deadline);
        }
        assert_eq!(a.transmit_fd(), None);
        assert_eq!(
            counter(&a, "tx_packets") + counter(&a, "tx_lost_unreachable"),
            taken + 100
        );
    });
}

#[test]
fn a_neighbours_queue_is_not_overrun() {
    in_namespace(|| {
        let [a, b] = slots();
        socket::set(b.as_fd(), libc::SOL_SOCKET, libc::SO_RCVBUF, &100_000).unwrap();
        let look = b.try_clone().unwrap();
        let neighbours = move |slot| (slot == 1).then(|| look.try_clone().unwrap());
        let mut a = UdpLink::new(a, 0, true, Box::new(neighbours)).unwrap();
        let mut b = UdpLink::new(b, 1, true, Box::new(|_| None)).unwrap();
        for len in [16, 1036, 4112, 30_000] {
            let mut received = Vec::new();
            for tag in 0..200 {
                while let Err(error) = send(&mut a, &path(V4), 1 << 16, &packet(1 << 16, len, tag)) {
                    assert_eq!(error, TransmitError::Busy);
                    assert!(take(&mut b, &mut received) > 0, "there is no reason to wait");
                }
            }
            a.flush().unwrap();
            while take(&mut b, &mut received) > 0 {}
            assert!(received.iter().map(|it| it.data[4]).eq(0..200), "{len}");
        }
        assert!(counter(&a, "tx_waits") > 0);
        assert_eq!(counter(&b, "rx_socket_full"), 0);
    });
}

/// Packets to a group that a link received, after one each to `groups` from the other.
fn after_multicast(a: &mut UdpLink, b: &mut UdpLink, groups: &[&str]) -> Vec<Received> {
    for (tag, group) in (1..).zip(groups) {
        let mut path = path(if group.contains(':') { V6 } else { V4 });
        path.dest = group.parse().unwrap();
        path.hop_limit = 7;
        path.traffic_class = 12;
        send(a, &path, 0xff_ffff, &packet(0xff_ffff, 64, tag)).unwrap();
        send(a, &path, 0xff_ffff, &packet(0xff_ffff, 64, 100 + tag)).unwrap();
    }
    // The last packet is no multicast, and shows that no more comes.
    send(a, &path(V4), 0x01_0001, &packet(0x01_0001, 16, 99)).unwrap();
    a.flush().unwrap();
    let mut received = Vec::new();
    while received.last().is_none_or(|last: &Received| last.data[4] != 99) {
        received.extend(receive(b, 1));
    }
    received.pop();
    received
}

fn multicast_reaches_members(groups: [&str; 2]) {
    let [mut a, mut b] = links();
    let tags = |received: &[Received]| received.iter().map(|it| it.data[4]).collect::<Vec<_>>();
    assert_eq!(
        tags(&after_multicast(&mut a, &mut b, &groups)),
        [],
        "nobody joined"
    );

    let [first, second]: [IpAddr; 2] = groups.map(|group| group.parse().unwrap());
    b.join(first, 1).unwrap();
    a.join(second, 1).unwrap();
    let received = after_multicast(&mut a, &mut b, &groups);
    assert_eq!(tags(&received), [1, 101], "not what another joined");
    assert!(received.iter().all(|it| it.valid && it.dest == first));
    assert!(
        received
            .iter()
            .all(|it| (it.hop_limit, it.traffic_class) == (7, 12))
    );
    let own = receive(&mut a, 2);
    assert_eq!(tags(&own), [2, 102], "what it sends itself, too");
    assert!(own.iter().all(|it| it.valid && it.dest == second));

    b.join(second, 1).unwrap();
    assert_eq!(tags(&after_multicast(&mut a, &mut b, &groups)), [1, 101, 2, 102]);
    b.leave(first).unwrap();
    assert_eq!(tags(&after_multicast(&mut a, &mut b, &groups)), [2, 102]);
    b.leave(second).unwrap();
    assert_eq!(tags(&after_multicast(&mut a, &mut b, &groups)), []);
    assert!(b.leave(second).is_err());
}

#[test]
fn multicast_reaches_members_over_ipv4() {
    in_namespace(|| multicast_reaches_members(["239.1.1.1", "239.1.1.2"]));
}

/// Linux has no route for it on the loopback interface.
#[test]
fn multicast_reaches_members_over_ipv6() {
    in_namespace(|| multicast_reaches_members(["ff0e::4791", "ff01:0:2:c985::"]));
}

#[test]
fn groups_are_limited_by_the_kernel() {
    in_namespace(|| {
        let [mut a, _] = links();
        let most = most_groups();
        let group = |n: u32| IpAddr::V4(std::net::Ipv4Addr::from(0xef00_0001 + n));
        for n in 0..most {
            a.join(group(n), 1).unwrap();
        }
        let error = a.join(group(most), 1).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENOBUFS));
        assert!(a.join(group(0), 77).is_err(), "no such interface");
    });
}
