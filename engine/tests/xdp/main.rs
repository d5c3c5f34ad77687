//! Ports and seats on a pair of veth interfaces, with a minimal XDP program. Needs root: XDP programs can't be loaded
//! from a user namespace.

mod bpf;

use std::os::fd::OwnedFd;
use std::process::Command;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use bpf::Steering;
use ferroce_engine::link::xdp::port::Port;
use ferroce_engine::link::xdp::seat::Seat;
use ferroce_engine::link::xdp::{Geometry, Zerocopy};
use rustix::thread::UnshareFlags;

const QUEUES: u16 = 2;
const GEOMETRY: Geometry = Geometry {
    chunk: 2048,
    queues: QUEUES,
    seats: 4,
    rx_ring: 64,
    tx_ring: 64,
};
/// Bytes of an Ethernet header; behind it the test says the seat, then a number.
const HEADER: usize = 14;

/// An interface with a port, all of whose seats get what is for them.
struct End {
    port: Port,
    _steering: Steering,
}

impl End {
    fn new(interface: &str) -> End {
        let end = End::of(interface, GEOMETRY);
        for programs in [0, 1, 1, GEOMETRY.seats, 2] {
            end.port.serve(programs);
        }
        assert_eq!(end.port.frames_waiting(0), GEOMETRY.circulating(GEOMETRY.seats));
        end
    }

    /// With frames for one program.
    fn of(interface: &str, geometry: Geometry) -> End {
        let name = std::ffi::CString::new(interface).unwrap();
        let ifindex = bpf::index(&name);
        let port = Port::create(ifindex, geometry, Zerocopy::Auto).unwrap();
        let steering = Steering::attach(ifindex);
        for queue in 0..QUEUES {
            for seat in 0..geometry.seats {
                steering.set(queue, seat, port.socket(queue, seat));
            }
        }
        End {
            port,
            _steering: steering,
        }
    }

    fn seat(&self, seat: u16) -> Seat {
        let own = |fd: std::os::fd::BorrowedFd<'_>| -> OwnedFd { fd.try_clone_to_owned().unwrap() };
        let sockets = (0..QUEUES).map(|queue| own(self.port.socket(queue, seat)));
        let (control, umem) = (own(self.port.control()), own(self.port.umem()));
        Seat::open(self.port.geometry(), seat, control, umem, sockets.collect()).unwrap()
    }
}

/// Runs a test in a network namespace of its own with two interfaces `a` and `b`, if that may be.
fn on_veth(test: fn()) {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: loading XDP programs needs root");
        return;
    }
    let inside = move || {
        // SAFETY: threads have their own network namespaces; nothing else is unshared.
        unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET) }.unwrap();
        let queues = format!("numrxqueues {QUEUES} numtxqueues {QUEUES} mtu 9000");
        ip(&format!(
            "link add name a {queues} type veth peer name b {queues}"
        ));
        ip("link set dev a up");
        ip("link set dev b up");
        test();
    };
    thread::spawn(inside).join().unwrap();
}

fn ip(words: &str) {
    let status = Command::new("ip").args(words.split(' ')).status().unwrap();
    assert!(status.success(), "ip {words}");
}

/// Writes a frame with a number for a seat, every byte of which depends on the number.
fn write(frame: &mut [u8], seat: u16, number: u32) {
    frame.fill(number as u8);
    frame[..6].fill(0xff);
    frame[6..12].fill(2);
    frame[12..14].copy_from_slice(&0x88b5u16.to_be_bytes());
    frame[HEADER] = seat as u8;
    frame[HEADER + 1..][..4].copy_from_slice(&number.to_le_bytes());
}

/// The number in a frame, if it is one of the test's; it must be whole.
fn read(frame: &[u8], len: usize, seat: u16) -> Option<u32> {
    if frame.get(12..14)? != 0x88b5u16.to_be_bytes() {
        return None;
    }
    assert_eq!(u16::from(frame[HEADER]), seat);
    let number = u32::from_le_bytes(*frame[HEADER + 1..].first_chunk().unwrap());
    assert_eq!(frame.len(), len);
    assert!(frame[HEADER + 5..].iter().all(|&byte| byte == number as u8));
    Some(number)
}

/// Submits a frame, handing over what is queued where there is no room.
fn send(from: &mut Seat, len: usize, to: u16, number: u32) {
    let start = Instant::now();
    loop {
        if let Some(frames) = from.reserve(len) {
            write(from.bytes(&frames), to, number);
            from.submit(frames);
            return;
        }
        from.kick().unwrap();
        assert!(start.elapsed() < Duration::from_secs(10), "no room for 10 s");
    }
}

/// Receives until so many frames of the test have come.
fn receive(at: &mut Seat, seat: u16, len: usize, count: usize) -> Vec<u32> {
    let mut numbers = Vec::new();
    let start = Instant::now();
    while numbers.len() < count {
        at.receive(&mut |frame| numbers.extend(read(frame, len, seat)));
        let lost = count - numbers.len();
        assert!(
            start.elapsed() < Duration::from_secs(10),
            "{lost} of {count} lost"
        );
    }
    numbers
}

#[test]
fn frames_go_from_seat_to_seat() {
    on_veth(|| {
        let (a, b) = (End::new("a"), End::new("b"));
        assert!(a.port.features().multi_buffer);
        // One seat for each queue to send on.
        let mut senders = [a.seat(0), a.seat(1)];
        let mut receivers = [b.seat(1), b.seat(2), b.seat(3)];
        for len in [60, 1000, 1792, 2000, 2048, 2049, 3500, 4096] {
            for sender in &mut senders {
                for round in 0..100 {
                    for (to, receiver) in (1..).zip(&mut receivers) {
                        let numbers: Vec<_> = (0..20).map(|it| round * 20 + it).collect();
                        for &number in &numbers {
                            send(sender, len, to, number);
                        }
                        assert!(sender.kick().unwrap());
                        assert_eq!(receive(receiver, to, len, 20), numbers, "{len} bytes");
                    }
                }
            }
        }
        // And back, on both queues.
        for (to, back) in (0..).zip(&mut senders) {
            for receiver in &mut receivers {
                send(receiver, 100, to, 7);
                assert!(receiver.kick().unwrap());
                assert_eq!(receive(back, to, 100, 1), [7]);
            }
        }
    });
}

#[test]
fn nothing_is_lost_with_programs_that_die() {
    on_veth(|| {
        let (a, b) = (End::new("a"), End::new("b"));
        let mut sender = a.seat(0);
        for round in 0..300u32 {
            // It dies with some frames that it has seen, more that it has not, and some on their way out.
            let mut victim = b.seat(1);
            for number in 0..64 {
                send(&mut sender, 100, 1, number);
            }
            assert!(sender.kick().unwrap());
            if round % 2 == 0 {
                assert!(victim.receive(&mut |_| {}) > 0);
            }
            for number in 0..round % 64 {
                send(&mut victim, 100, 0, number);
            }
            drop(victim);
            b.port.reclaim(1);
            // What it had queued leaves.
            assert_eq!(
                receive(&mut sender, 0, 100, (round % 64) as usize).len(),
                (round % 64) as usize
            );
        }
        // All frames are there: every seat's rings can be filled.
        for seat in 1..GEOMETRY.seats {
            let mut receiver = b.seat(seat);
            for number in 0..64 {
                send(&mut sender, 100, seat, number);
            }
            assert!(sender.kick().unwrap());
            assert_eq!(receive(&mut receiver, seat, 100, 64).len(), 64);
        }
        // And all frames to send.
        let mut heir = b.seat(1);
        for number in 0..64 {
            let frames = heir.reserve(100).unwrap();
            write(heir.bytes(&frames), 0, number);
            heir.submit(frames);
        }
    });
}

/// A program that is alone has few frames circulate, until more wait for it than one peer has under way, or it says so.
#[test]
fn frames_for_bursts_come_with_them() {
    const LONG: Geometry = Geometry {
        rx_ring: 1024,
        seats: 2,
        ..GEOMETRY
    };
    on_veth(|| {
        let (a, b) = (End::new("a"), End::of("b", LONG));
        b.port.serve(1);
        let few = b.port.frames_waiting(0);
        assert_eq!(few, LONG.circulating(1));
        assert!(few < LONG.for_bursts());
        let (mut sender, mut receiver) = (a.seat(0), b.seat(1));
        // What one peer has under way waits, and is all there.
        let burst = |sender: &mut Seat, count| {
            for number in 0..count {
                send(sender, 100, 1, number);
                assert!(sender.kick().unwrap());
            }
        };
        burst(&mut sender, 256);
        assert_eq!(receive(&mut receiver, 1, 100, 256).len(), 256);
        while receiver.receive(&mut |_| {}) > 0 {}
        assert_eq!(b.port.frames_waiting(0), few);
        // More: then many may come.
        burst(&mut sender, 300);
        assert_eq!(receive(&mut receiver, 1, 100, 300).len(), 300);
        while receiver.receive(&mut |_| {}) > 0 {}
        assert_eq!(b.port.frames_waiting(0), LONG.for_bursts());
        burst(&mut sender, 1024);
        assert_eq!(receive(&mut receiver, 1, 100, 1024).len(), 1024);
        while receiver.receive(&mut |_| {}) > 0 {}
        assert_eq!(b.port.frames_waiting(0), LONG.for_bursts());
        // The other queue had none of it, and one who expects them says so.
        assert_eq!(b.port.frames_waiting(1), LONG.for_bursts());
        // For another program there are as many as ever.
        b.port.serve(2);
        assert_eq!(b.port.frames_waiting(0), LONG.circulating(2));
        b.seat(0).expect_bursts();
        assert_eq!(b.port.frames_waiting(0), LONG.circulating(2));
    });
}

/// Processes that are killed at any instruction, while two others go on.
#[test]
fn killed_processes_leave_the_others_at_work() {
    on_veth(|| {
        let (a, b) = (End::new("a"), End::new("b"));
        let whole: Vec<_> = (0..QUEUES).map(|queue| b.port.frames_waiting(queue)).collect();
        let (mut sender, mut witness) = (a.seat(0), b.seat(2));
        let kills = 300;
        let mut number = 0;
        for kill in 0..kills {
            let victim = fork(b.seat(1));
            let end = Instant::now() + Duration::from_micros(200 + kill * 7);
            for round in 0.. {
                if round >= 4 && Instant::now() >= end {
                    break;
                }
                for to in [1, 1, 1, 2] {
                    send(&mut sender, 200, to, number);
                }
                assert!(sender.kick().unwrap());
                assert_eq!(receive(&mut witness, 2, 200, 1), [number]);
                number += 1;
                sender.receive(&mut |_| {});
            }
            victim.kill();
            b.port.reclaim(1);
        }
        // What came between is with the kernel.
        while witness.receive(&mut |_| {}) > 0 {}
        b.port.reclaim(1);
        for (queue, &whole) in (0..).zip(&whole) {
            let left = b.port.frames_waiting(queue);
            println!("queue {queue}: {left} of {whole} frames after {kills} kills");
            assert!(left + 16 >= whole, "{left} of {whole}");
        }
    });
}

/// A process that receives and answers until it is killed.
struct Victim(rustix::process::Pid);

fn fork(mut seat: Seat) -> Victim {
    // SAFETY: the child does nothing but work on the seat, which neither allocates nor locks.
    match unsafe { libc::fork() } {
        0 => loop {
            let mut count = seat.receive(&mut |_| {});
            while count > 0
                && let Some(frames) = seat.reserve(100)
            {
                write(seat.bytes(&frames), 0, 0);
                seat.submit(frames);
                count -= 1;
            }
            _ = seat.kick();
        },
        pid => Victim(rustix::process::Pid::from_raw(pid).expect("fork")),
    }
}

impl Victim {
    fn kill(self) {
        rustix::process::kill_process(self.0, rustix::process::Signal::KILL).unwrap();
        rustix::process::waitpid(Some(self.0), rustix::process::WaitOptions::empty()).unwrap();
    }
}

#[test]
fn a_port_goes_over_to_a_successor() {
    on_veth(|| {
        let (a, b) = (End::new("a"), End::new("b"));
        let own = |fd: std::os::fd::BorrowedFd<'_>| fd.try_clone_to_owned().unwrap();
        let sockets = |queue| (0..GEOMETRY.seats).map(move |seat| (queue, seat));
        let sockets = (0..QUEUES).map(|queue| {
            let sockets = sockets(queue).map(|(queue, seat)| own(b.port.socket(queue, seat)));
            sockets.collect::<Vec<_>>()
        });
        let sockets: Vec<_> = sockets.collect();
        let (mut sender, mut receiver) = (a.seat(0), b.seat(2));
        let (control, umem) = (own(b.port.control()), own(b.port.umem()));
        let End { port, _steering } = b;
        let features = port.features();
        drop(port);
        let heir = Port::inherit(GEOMETRY, features, control, umem, sockets).unwrap();
        // It knows which frames circulate.
        let waiting = heir.frames_waiting(0);
        heir.serve(GEOMETRY.seats);
        assert_eq!(heir.frames_waiting(0), waiting);
        heir.reclaim(1);
        send(&mut sender, 100, 2, 1);
        assert!(sender.kick().unwrap());
        assert_eq!(receive(&mut receiver, 2, 100, 1), [1]);
    });
}

#[test]
fn an_interface_that_is_down_is_an_error_and_no_more() {
    on_veth(|| {
        let (a, b) = (End::new("a"), End::new("b"));
        let (mut sender, mut receiver) = (a.seat(0), b.seat(1));
        ip("link set dev a down");
        send(&mut sender, 100, 1, 1);
        let error = sender.kick().unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENETDOWN));
        ip("link set dev a up");
        assert!(sender.kick().unwrap());
        assert_eq!(receive(&mut receiver, 1, 100, 1), [1]);
        ip("link del dev a");
        send(&mut sender, 100, 1, 1);
        let error = sender.kick().unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENXIO));
        assert_eq!(receiver.receive(&mut |_| {}), 0);
    });
}

#[test]
fn what_a_program_left_is_not_sent_for_the_next() {
    on_veth(|| {
        let (a, b) = (End::new("a"), End::new("b"));
        let mut receiver = b.seat(1);
        for reclaimed_while_down in [true, false] {
            // As with every lease.
            assert!(a.port.reclaim(0));
            ip("link set dev a down");
            let mut sender = a.seat(0);
            for number in 0..40 {
                send(&mut sender, 100, 1, number);
            }
            sender.kick().unwrap_err();
            drop(sender);
            if reclaimed_while_down {
                assert!(a.port.reclaim(0));
            }
            let early = a.seat(0);
            ip("link set dev a up");
            let mut heir = if reclaimed_while_down {
                early
            } else {
                drop(early);
                // Here the daemon sends what was sent to a device that is up now.
                assert!(a.port.reclaim(0));
                receive(&mut receiver, 1, 100, 40);
                a.seat(0)
            };
            for number in 100..103 {
                send(&mut heir, 100, 1, number);
                assert!(heir.kick().unwrap());
                assert_eq!(receive(&mut receiver, 1, 100, 1), [number]);
            }
        }
    });
}

#[test]
fn a_transmit_ring_that_was_spoilt_is_told() {
    on_veth(|| {
        let a = End::new("a");
        for (seat, jump) in [(0, 1 << 20), (1, 1 << 20), (2, 0)] {
            let mut sender = a.seat(seat);
            send(&mut sender, 100, 1, 1);
            let counter = bpf::transmit_producer(a.port.socket(seat % QUEUES, seat), GEOMETRY.tx_ring);
            let before = counter.fetch_add(jump, Ordering::SeqCst);
            _ = sender.kick();
            if seat == 1 {
                // The kernel has seen the other number.
                counter.store(before, Ordering::SeqCst);
            }
            drop(sender);
            assert_eq!(a.port.reclaim(seat), jump == 0, "seat {seat}");
            assert_eq!(a.port.reclaim(seat), jump == 0, "seat {seat}");
        }
    });
}

#[test]
fn what_a_port_can_not_have_is_said() {
    on_veth(|| {
        let ifindex = bpf::index(c"a");
        let error = Port::create(ifindex, GEOMETRY, Zerocopy::On).err().unwrap();
        assert_eq!(error.what, "its driver can't do zero-copy");
        let more = Geometry {
            queues: 3,
            ..GEOMETRY
        };
        let error = Port::create(ifindex, more, Zerocopy::Auto).err().unwrap();
        assert_eq!(error.source.raw_os_error(), Some(libc::EINVAL), "{error}");
        let _first = Port::create(ifindex, GEOMETRY, Zerocopy::Off).unwrap();
        let error = Port::create(ifindex, GEOMETRY, Zerocopy::Auto).err().unwrap();
        assert_eq!(error.source.raw_os_error(), Some(libc::EBUSY), "{error}");
        let error = Port::create(9999, GEOMETRY, Zerocopy::Auto).err().unwrap();
        assert_eq!(error.source.raw_os_error(), Some(libc::ENODEV), "{error}");
    });
}

/// Prints figures: `cargo test --release --test xdp figures -- --ignored --nocapture`.
#[test]
#[ignore = "a measurement"]
fn figures() {
    on_veth(|| {
        let (a, b) = (End::new("a"), End::new("b"));
        let (mut ping, mut pong) = (a.seat(0), b.seat(0));
        let rounds = 200_000;
        let post = |from: &mut Seat, number| {
            let frames = from.reserve(64).unwrap();
            write(from.bytes(&frames), 0, number);
            from.submit(frames);
            assert!(from.kick().unwrap());
        };
        let echo = thread::spawn(move || {
            bpf::pin_to(1);
            for number in 0..rounds {
                while pong.receive(&mut |_| {}) == 0 {}
                post(&mut pong, number);
            }
        });
        bpf::pin_to(0);
        let mut times: Vec<_> = (0..rounds)
            .map(|number| {
                let start = Instant::now();
                post(&mut ping, number);
                while ping.receive(&mut |_| {}) == 0 {}
                start.elapsed()
            })
            .collect();
        echo.join().unwrap();
        times.sort();
        println!(
            "round trip of 64 bytes: p50 {:?}, p99 {:?}",
            times[100_000], times[198_000]
        );
        let start = Instant::now();
        for _ in 0..10_000_000 {
            assert_eq!(ping.receive(&mut |_| {}), 0);
        }
        println!("empty receive: {:?}", start.elapsed() / 10_000_000);
        for len in [64, 2106, 4096] {
            flood(&mut ping, b.seat(1), len);
        }
    });
}

fn flood(from: &mut Seat, mut to: Seat, len: usize) {
    let stop = std::sync::atomic::AtomicBool::new(false);
    let received = thread::scope(|scope| {
        let receiver = scope.spawn(|| {
            bpf::pin_to(1);
            let mut received = 0;
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                received += to.receive(&mut |_| {});
            }
            received
        });
        let start = Instant::now();
        let mut sent = 0;
        while start.elapsed() < Duration::from_secs(1) {
            for number in 0..32 {
                send(from, len, 1, number);
            }
            sent += 32;
            from.kick().unwrap();
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        (receiver.join().unwrap(), sent)
    });
    println!(
        "{len} bytes: {} of {} frames arrived in a second",
        received.0, received.1
    );
    from.counters(&mut |name, value| print!("{name} {value} "));
    println!();
}
