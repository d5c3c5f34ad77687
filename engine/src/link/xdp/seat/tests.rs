//! The halves of a seat on plain memory, with the test as the kernel.

use std::fs::File;

use super::super::memory::Mapping;
use super::super::ring::{Offsets, descriptors_len};
use super::*;

const GEOMETRY: Geometry = Geometry {
    chunk: 2048,
    queues: 1,
    seats: 2,
    rx_ring: 64,
    tx_ring: 128,
};
const OFFSETS: Offsets = Offsets {
    producer: 0,
    consumer: 64,
    flags: 128,
    entries: 192,
};

fn mapping(size: u32) -> Mapping {
    Mapping::anonymous(descriptors_len(OFFSETS, size)).unwrap()
}

/// The control area and the frames.
fn memory() -> (Control, Umem) {
    let control = Mapping::anonymous(Control::len(&GEOMETRY)).unwrap();
    let umem = Mapping::anonymous(GEOMETRY.umem_len()).unwrap();
    (
        Control::new(control, &GEOMETRY).unwrap(),
        Umem::new(umem, &GEOMETRY).unwrap(),
    )
}

fn transmitter(seat: u16) -> Transmitter {
    let completions = GEOMETRY.completion_ring();
    Transmitter {
        ring: TxRing::new(mapping(GEOMETRY.tx_ring), OFFSETS, GEOMETRY.tx_ring).unwrap(),
        completions: CompletionRing::new(mapping(completions), OFFSETS, completions).unwrap(),
        frames: GEOMETRY.frames_of_seat(seat),
        next: 0,
        turn: WINDOW,
        draft: vec![0; LONGEST].into_boxed_slice(),
        chunk: 2048,
        queued: false,
        spoilt: 0,
        stuck: None,
        room: epoll::create(epoll::CreateFlags::CLOEXEC).unwrap(),
        watched: Watched::Nothing,
        timer: timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC).unwrap(),
        kicks: 0,
        blocked: 0,
        dropped: 0,
        rescued: 0,
        queue: 0,
    }
}

/// Sends a packet; gives the number of its first frame.
fn send(transmitter: &mut Transmitter, control: &Control, umem: &Umem, len: usize) -> Option<u32> {
    let frames = transmitter.reserve(control, len)?;
    transmitter.draft[..len].fill(len as u8);
    transmitter.submit(control, umem, &frames);
    Some(frames.first)
}

/// Sends what is in the ring, as the kernel does; gives the frames back if it is to.
fn kernel_sends(transmitter: &mut Transmitter, give_back: bool) -> Vec<Descriptor> {
    let sent = transmitter.ring.consume();
    for descriptor in &sent {
        if give_back {
            transmitter.completions.put(descriptor.address);
        }
    }
    sent
}

#[test]
fn packets_take_frames_that_adjoin() {
    let (control, umem) = memory();
    let mut transmitter = transmitter(1);
    // A path MTU of 4096 bytes, with headers, needs more than two frames of this size.
    for len in [60, 2048, 2049, 4096, 4097, 4240, LONGEST, 1] {
        let first = send(&mut transmitter, &control, &umem, len).unwrap();
        let sent = kernel_sends(&mut transmitter, true);
        assert_eq!(sent[0].address, u64::from(first) * 2048);
        assert_eq!(sent.iter().map(|it| it.len as usize).sum::<usize>(), len);
        assert_eq!(sent.len(), len.div_ceil(2048));
        for (at, descriptor) in sent.iter().enumerate() {
            let last = at + 1 == sent.len();
            assert_eq!(descriptor.options, if last { 0 } else { libc::XDP_PKT_CONTD });
            assert_eq!(descriptor.address, u64::from(first) * 2048 + at as u64 * 2048);
            let mut bytes = vec![0; descriptor.len as usize];
            assert!(umem.copy_out(descriptor.address, &mut bytes));
            assert!(bytes.iter().all(|&byte| byte == len as u8));
        }
    }
    assert!(transmitter.reserve(&control, LONGEST + 1).is_none());
}

#[test]
fn frames_are_used_again_when_they_were_sent() {
    let (control, umem) = memory();
    let mut transmitter = transmitter(0);
    let range = GEOMETRY.frames_of_seat(0);
    for _ in 0..1000 {
        let first = send(&mut transmitter, &control, &umem, 60).unwrap();
        // Few are under way, so few are used.
        assert!(first < range.start + WINDOW);
        kernel_sends(&mut transmitter, true);
    }
    let mut sent = 0;
    while let Some(first) = send(&mut transmitter, &control, &umem, 60) {
        assert!(range.contains(&first));
        sent += 1;
    }
    assert_eq!(sent, GEOMETRY.tx_ring);
    kernel_sends(&mut transmitter, true);
    for _ in 0..GEOMETRY.tx_ring / 2 {
        assert!(send(&mut transmitter, &control, &umem, 4096).is_some());
    }
    assert!(send(&mut transmitter, &control, &umem, 60).is_none());
}

#[test]
fn frames_that_nobody_gives_back_are_taken_back_in_the_end() {
    let (control, umem) = memory();
    let mut transmitter = transmitter(0);
    while send(&mut transmitter, &control, &umem, 60).is_some() {}
    let long_ago = Instant::now() - 2 * RESCUE;
    // While the kernel has not sent them they are its own.
    transmitter.stuck = Some(long_ago);
    assert!(send(&mut transmitter, &control, &umem, 60).is_none());
    kernel_sends(&mut transmitter, false);
    transmitter.stuck = None;
    assert!(send(&mut transmitter, &control, &umem, 60).is_none());
    transmitter.stuck = Some(long_ago);
    assert!(send(&mut transmitter, &control, &umem, 60).is_some());
    assert_eq!(transmitter.rescued, u64::from(GEOMETRY.tx_ring));
}

#[test]
fn a_frame_left_under_way_twice_is_free() {
    let (control, _) = memory();
    let frame = GEOMETRY.frames_of_seat(1).start;
    control.set_busy(frame, true);
    control.age_busy(frame);
    assert!(control.is_busy(frame));
    control.age_busy(frame);
    assert!(!control.is_busy(frame));
    // Marks of received frames are others'.
    control.own(3, 1);
    control.set_busy(3, false);
    assert!(control.disown(3, 1) && !control.disown(3, 1));
}

fn rx_queue() -> RxQueue {
    let fill = GEOMETRY.fill_ring();
    RxQueue {
        ring: RxRing::new(mapping(GEOMETRY.rx_ring), OFFSETS, GEOMETRY.rx_ring).unwrap(),
        fill: FillRing::new(mapping(fill), OFFSETS, fill).unwrap(),
        frames: GEOMETRY.frames_of_queue(0),
        owner: owner(0),
        held: Vec::new(),
        seen: 0,
        may_hold: HELD,
        packet: vec![0; LONGEST].into_boxed_slice(),
        len: 0,
        broken: false,
        socket: File::open("/dev/null").unwrap().into(),
    }
}

/// Receives as [`Seat::receive`] does; gives the lengths of packets, and how many were overlong and invalid.
fn receive(queue: &mut RxQueue, control: &Control, umem: &Umem) -> (Vec<usize>, usize, usize) {
    let (mut lengths, mut overlong, mut invalid) = (Vec::new(), 0, 0);
    for _ in 0..queue.ring.available() {
        match queue.next(umem) {
            Piece::Last => lengths.push(std::mem::take(&mut queue.len)),
            Piece::More => {}
            Piece::Overlong => overlong += 1,
            Piece::Invalid => invalid += 1,
        }
    }
    queue.give_back(control, umem);
    (lengths, overlong, invalid)
}

#[test]
fn pieces_are_joined_and_nonsense_is_left_out() {
    let (control, umem) = memory();
    let mut queue = rx_queue();
    let piece = |frame: u64, len: u32, more: bool| Descriptor {
        address: frame * 2048 + HEADROOM,
        len,
        options: if more { libc::XDP_PKT_CONTD } else { 0 },
    };
    const HEADROOM: u64 = 256;
    let nowhere = Descriptor {
        address: u64::MAX - 5,
        len: u32::MAX,
        options: 0,
    };
    let entries = [
        piece(1, 60, false),
        piece(2, 1792, true),
        piece(3, 1000, false),
        // Not a frame for receiving, and not of one frame.
        piece(u64::from(GEOMETRY.frames_of_seat(0).start), 60, false),
        piece(4, 2000, false),
        nowhere,
        // The last piece of a packet whose first was nonsense.
        piece(5, 1793, true),
        piece(6, 60, false),
        piece(7, 0, false),
    ];
    for entry in entries {
        queue.ring.put(entry);
    }
    let got = receive(&mut queue, &control, &umem);
    // A length that nothing has is overlong wherever it lies.
    assert_eq!(got, (vec![60, 2792, 0], 1, 3));
    // A packet that is too long, and one after it.
    for frame in 10..15 {
        queue.ring.put(piece(frame, 1792, frame < 14));
    }
    queue.ring.put(piece(15, 61, false));
    assert_eq!(receive(&mut queue, &control, &umem), (vec![61], 1, 0));
    // Every frame that was one went back, once.
    assert_eq!(queue.fill.waiting(), 7 + 6);
    assert!((0..20).all(|frame| !control.disown(frame, queue.owner)));
}

#[test]
fn a_kernel_that_takes_nothing_is_asked_again_by_time() {
    let (control, umem) = memory();
    let mut transmitter = transmitter(0);
    // Always writable, as a socket is whose ring has room.
    let socket = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
    let readable = |transmitter: &Transmitter, milliseconds: i64| {
        let mut fds = [rustix::event::PollFd::new(
            &transmitter.room,
            rustix::event::PollFlags::IN,
        )];
        let timeout = Timespec {
            tv_sec: 0,
            tv_nsec: milliseconds * 1_000_000,
        };
        rustix::event::poll(&mut fds, Some(&timeout)).unwrap() > 0
    };
    for _ in 0..3 {
        send(&mut transmitter, &control, &umem, 60).unwrap();
        for _ in 0..3 {
            let before = Instant::now();
            transmitter.watch(&socket, true);
            assert!(readable(&transmitter, 900));
            assert!(before.elapsed() >= Duration::from_nanos(AGAIN.tv_nsec as u64));
        }
        // More than half full: the ring itself tells.
        while transmitter.ring.is_writable() {
            send(&mut transmitter, &control, &umem, 60).unwrap();
        }
        transmitter.watch(&socket, true);
        assert!(transmitter.watched == Watched::Ring && readable(&transmitter, 0));
        kernel_sends(&mut transmitter, true);
        transmitter.watch(&socket, false);
        assert!(!readable(&transmitter, 1));
    }
}
