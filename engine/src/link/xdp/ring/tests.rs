//! Rings on plain memory, with threads as the programs and as the kernel.

use std::sync::atomic::AtomicBool;
use std::thread;
use std::time::Duration;

use super::*;

const OFFSETS: Offsets = Offsets {
    producer: 0,
    consumer: 64,
    flags: 128,
    entries: 192,
};
const CHUNK: u64 = 2048;

fn mapping(size: u32) -> Mapping {
    Mapping::anonymous(descriptors_len(OFFSETS, size)).unwrap()
}

fn fill(size: u32) -> FillRing {
    FillRing::new(mapping(size), OFFSETS, size).unwrap()
}

/// Takes an entry as the kernel does: nobody else moves the consumer, and low bits don't matter.
fn kernel_takes(ring: &Ring<AtomicU64>) -> Option<u64> {
    let position = ring.consumer().load(Relaxed);
    if ring.producer().load(Acquire) == position {
        return None;
    }
    let address = ring.entry(position).load(Relaxed) & !(CHUNK - 1);
    ring.consumer().store(position.wrapping_add(1), Release);
    Some(address)
}

/// Puts an entry in as the kernel does.
fn kernel_puts(ring: &Ring<AtomicU64>, address: u64) {
    let position = ring.producer().load(Relaxed);
    ring.entry(position).store(address, Relaxed);
    ring.producer().store(position.wrapping_add(1), Release);
}

// The kernel's end of rings, for the tests of seats.

impl RxRing {
    pub fn put(&self, descriptor: Descriptor) {
        let position = self.ring.producer().load(Relaxed);
        let entry = self.ring.entry(position);
        entry.address.store(descriptor.address, Relaxed);
        entry.len.store(descriptor.len, Relaxed);
        entry.options.store(descriptor.options, Relaxed);
        self.ring.producer().store(position.wrapping_add(1), Release);
    }
}

impl TxRing {
    pub fn consume(&self) -> Vec<Descriptor> {
        let (start, end) = (
            self.ring.consumer().load(Relaxed),
            self.ring.producer().load(Acquire),
        );
        let count = end.wrapping_sub(start);
        let entries = (0..count).map(|ahead| self.ring.entry(start.wrapping_add(ahead)));
        let read = |entry: &Slot| Descriptor {
            address: entry.address.load(Relaxed),
            len: entry.len.load(Relaxed),
            options: entry.options.load(Relaxed),
        };
        let descriptors = entries.map(read).collect();
        self.ring.consumer().store(end, Release);
        descriptors
    }
}

impl CompletionRing {
    pub fn put(&self, address: u64) {
        kernel_puts(&self.0, address);
    }
}

#[test]
fn a_fill_ring_gives_frames_in_order_over_many_laps() {
    let ring = fill(8);
    // Close to where the counters start again from 0, too.
    for start in [0, u32::MAX - 20_000] {
        let whole = start & !7;
        ring.0.producer().store(whole, Relaxed);
        ring.0.consumer().store(whole, Relaxed);
        for at in 0..8 {
            // As the lap before left them.
            let tag = ring.tag(whole.wrapping_sub(8));
            ring.0.entry(at).store(if start == 0 { 0 } else { tag }, Relaxed);
        }
        for number in 0..40_000u64 {
            assert!(ring.push(number * CHUNK));
            if number % 3 == 2 {
                for back in [2, 1, 0] {
                    assert_eq!(kernel_takes(&ring.0), Some((number - back) * CHUNK));
                }
                assert_eq!(kernel_takes(&ring.0), None);
            }
        }
        while kernel_takes(&ring.0).is_some() {}
    }
}

#[test]
fn who_stops_between_the_steps_is_helped() {
    let ring = fill(8);
    // It has written, and not gone on; or it was killed there.
    let stopped = ring.write(CHUNK).unwrap();
    assert_eq!(kernel_takes(&ring.0), None);
    assert!(ring.push(2 * CHUNK));
    assert_eq!(kernel_takes(&ring.0), Some(CHUNK));
    assert_eq!(kernel_takes(&ring.0), Some(2 * CHUNK));
    // When it goes on at last, nothing happens.
    ring.go_on(stopped);
    assert_eq!(kernel_takes(&ring.0), None);
    assert!(ring.push(3 * CHUNK));
    assert_eq!(kernel_takes(&ring.0), Some(3 * CHUNK));
}

#[test]
fn nonsense_in_a_fill_ring_is_written_over() {
    let ring = fill(8);
    for at in 0..8 {
        ring.0.entry(at).store(u64::MAX - u64::from(at), Relaxed);
    }
    for number in 0..100 {
        assert!(ring.push(number * CHUNK));
        assert_eq!(kernel_takes(&ring.0), Some(number * CHUNK));
    }
}

/// Frames go round from many producers to the kernel, which gives each to the next producer that asks: as received
/// frames do. None may be lost, none be twice.
#[test]
fn a_fill_ring_takes_every_frame_once_from_many_producers() {
    const FRAMES: u64 = 100;
    const ROUNDS: usize = 300_000;
    let ring = fill(128);
    let held: Vec<AtomicBool> = (0..FRAMES).map(|_| AtomicBool::new(false)).collect();
    let received = parking_lot::Mutex::new(Vec::new());
    let done = AtomicBool::new(false);
    for frame in 0..FRAMES {
        ring.push(frame * CHUNK);
    }
    thread::scope(|scope| {
        for thread in 0..6 {
            let (ring, received, held, done) = (&ring, &received, &held, &done);
            scope.spawn(move || {
                let mut count = 0u32;
                while !done.load(Relaxed) {
                    let Some(frame) = received.lock().pop() else {
                        thread::yield_now();
                        continue;
                    };
                    held[frame as usize].store(false, Release);
                    count = count.wrapping_add(1);
                    if count % 50 != thread {
                        assert!(ring.push(frame * CHUNK));
                        continue;
                    }
                    // It stops between the steps for a while.
                    let position = loop {
                        if let Some(position) = ring.write(frame * CHUNK) {
                            break position;
                        }
                    };
                    match count % 3 {
                        0 => thread::sleep(Duration::from_micros(50)),
                        1 => thread::yield_now(),
                        // It is killed.
                        _ => continue,
                    }
                    ring.go_on(position);
                }
            });
        }
        let mut taken = 0;
        while taken < ROUNDS {
            let Some(address) = kernel_takes(&ring.0) else {
                // All may have stopped between the steps: the next one helps.
                let position = ring.0.producer().load(Acquire);
                if ring.0.entry(position).load(Acquire) & TAG == ring.tag(position) {
                    ring.go_on(position);
                }
                thread::yield_now();
                continue;
            };
            let frame = address / CHUNK;
            assert!(
                !held[frame as usize].swap(true, Acquire),
                "frame {frame} came twice"
            );
            taken += 1;
            received.lock().push(frame);
        }
        done.store(true, Relaxed);
    });
    let mut all: Vec<_> = received.lock().drain(..).collect();
    let position = ring.0.producer().load(Acquire);
    if ring.0.entry(position).load(Acquire) & TAG == ring.tag(position) {
        ring.go_on(position);
    }
    all.extend(std::iter::from_fn(|| kernel_takes(&ring.0)).map(|address| address / CHUNK));
    all.sort_unstable();
    assert_eq!(all, (0..FRAMES).collect::<Vec<_>>());
}

#[test]
fn a_completion_ring_gives_every_frame_once_to_many_consumers() {
    const COUNT: u64 = 500_000;
    let ring = CompletionRing::new(mapping(64), OFFSETS, 64).unwrap();
    let done = AtomicBool::new(false);
    let consumer = || {
        let mut taken = Vec::new();
        loop {
            let last = done.load(Acquire);
            match ring.pop() {
                Some(address) => taken.push(address),
                None if last => return taken,
                None => thread::yield_now(),
            }
        }
    };
    let mut all = thread::scope(|scope| {
        let consumers: Vec<_> = (0..4).map(|_| scope.spawn(consumer)).collect();
        for number in 0..COUNT {
            while ring
                .0
                .producer()
                .load(Relaxed)
                .wrapping_sub(ring.0.consumer().load(Acquire))
                == 64
            {
                thread::yield_now();
            }
            kernel_puts(&ring.0, number);
        }
        done.store(true, Release);
        let taken = consumers.into_iter().map(|it| it.join().unwrap());
        taken.flatten().collect::<Vec<_>>()
    });
    all.sort_unstable();
    assert!(all.into_iter().eq(0..COUNT));
}

#[test]
fn nonsense_in_a_completion_ring_ends() {
    let ring = CompletionRing::new(mapping(8), OFFSETS, 8).unwrap();
    ring.0.producer().store(1 << 30, Relaxed);
    assert_eq!(ring.pop(), None);
}

#[test]
fn who_takes_from_a_completion_ring_that_is_filled_on_and_on_comes_to_an_end() {
    let ring = CompletionRing::new(mapping(8), OFFSETS, 8).unwrap();
    kernel_puts(&ring.0, 0);
    let mut taken = 0;
    ring.drain(|address| {
        taken += 1;
        kernel_puts(&ring.0, address);
    });
    assert_eq!(taken, 8);
}

#[test]
fn a_receive_ring_gives_back_what_was_seen() {
    let mapping = mapping(8);
    let mut ring = RxRing::new(mapping, OFFSETS, 8).unwrap();
    assert_eq!(ring.available(), 0);
    for round in 0..10u32 {
        for number in 0..3 {
            ring.put(Descriptor {
                address: u64::from(round * 3 + number) * CHUNK,
                len: number,
                options: round,
            });
        }
        assert_eq!(ring.available(), 3);
        for number in 0..3 {
            let expected = Descriptor {
                address: u64::from(round * 3 + number) * CHUNK,
                len: number,
                options: round,
            };
            assert_eq!(ring.peek(0), expected);
            ring.advance();
        }
        assert_eq!(ring.ring.consumer().load(Relaxed), round * 3);
        ring.release();
        assert_eq!(ring.ring.consumer().load(Relaxed), round * 3 + 3);
    }
    // More than the ring can hold is nothing.
    ring.ring.producer().store(1 << 20, Relaxed);
    assert_eq!(ring.available(), 0);
}

#[test]
fn a_transmit_ring_is_full_when_it_is() {
    let mut ring = TxRing::new(mapping(8), OFFSETS, 8).unwrap();
    let descriptor = Descriptor {
        address: CHUNK,
        len: 60,
        options: 0,
    };
    for round in 1..10u32 {
        for _ in 0..4 {
            assert!(ring.has_room(2));
            ring.write(0, descriptor);
            ring.write(1, descriptor);
            ring.publish(2);
        }
        assert!(!ring.has_room(1));
        assert_eq!(ring.waiting(), 8);
        ring.ring.consumer().store(round * 8, Release);
        assert_eq!(ring.waiting(), 0);
    }
}

#[test]
fn a_ring_that_its_mapping_does_not_hold_is_refused() {
    let small = Mapping::anonymous(4096).unwrap();
    assert!(FillRing::new(small, OFFSETS, 1024).is_err());
    assert!(FillRing::new(mapping(8), OFFSETS, 7).is_err());
}

#[test]
fn what_is_spoilt_no_kernel_sends() {
    let mut ring = TxRing::new(mapping(8), OFFSETS, 8).unwrap();
    let sent = Descriptor {
        address: CHUNK,
        len: 60,
        options: 0,
    };
    ring.write(0, sent);
    ring.write(1, sent);
    ring.publish(2);
    ring.spoil();
    assert_eq!(ring.consume(), [REFUSED; 2]);
    assert!(ring.is_sound());
    // A kernel that goes on where there is nothing.
    ring.ring.consumer().fetch_add(1, Relaxed);
    assert!(!ring.is_sound());
}

#[test]
fn a_receive_ring_that_was_left_as_nonsense_begins_anew() {
    let mut ring = RxRing::new(mapping(8), OFFSETS, 8).unwrap();
    ring.ring.producer().store(1 << 20, Relaxed);
    assert_eq!(ring.available(), 0);
    let came = Descriptor {
        address: CHUNK,
        len: 60,
        options: 0,
    };
    ring.put(came);
    assert_eq!((ring.available(), ring.peek(0)), (1, came));
}
