//! Which frames for receiving circulate on a queue: its first ones, up to a number that only grows.
#![deny(unsafe_code)]

use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};

use super::Geometry;
use super::memory::Control;
use super::ring::FillRing;

/// Has so many frames of a queue circulate, or more. Where one can't be put into the fill ring, a program overwrites it,
/// and more tries would take long: that is logged.
///
/// First the number grows, by one: whoever is killed in between leaves that frame out, and gives none twice. A program
/// that sets the number back again and again keeps nobody in here.
pub(super) fn raise(control: &Control, fill: &FillRing, geometry: &Geometry, queue: u16, wanted: u32) {
    if !try_raise(control, fill, geometry, queue, wanted) {
        tracing::warn!(
            queue,
            "a program overwrites the fill ring: remove the device and add it again"
        );
    }
}

fn try_raise(control: &Control, fill: &FillRing, geometry: &Geometry, queue: u16, wanted: u32) -> bool {
    let frames = geometry.frames_of_queue(queue);
    let wanted = wanted.min(geometry.rx_frames());
    let circulating = control.circulating(queue);
    for _ in 0..=wanted {
        let now = circulating.load(Acquire);
        if now >= wanted {
            return true;
        }
        // Others may do the same meanwhile: one of them has the frame.
        let has_it = circulating
            .compare_exchange(now, now + 1, AcqRel, Relaxed)
            .is_ok();
        if has_it && !fill.push(u64::from(frames.start + now) * u64::from(geometry.chunk)) {
            return false;
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;
    use std::thread;

    use super::*;
    use crate::link::xdp::memory::Mapping;
    use crate::link::xdp::ring::{Offsets, addresses_len};

    const GEOMETRY: Geometry = Geometry {
        chunk: 2048,
        queues: 2,
        seats: 2,
        rx_ring: 512,
        tx_ring: 16,
    };
    const OFFSETS: Offsets = Offsets {
        producer: 0,
        consumer: 64,
        flags: 128,
        entries: 192,
    };

    fn memory() -> (Control, FillRing) {
        let control = Mapping::anonymous(Control::len(&GEOMETRY)).unwrap();
        let size = GEOMETRY.fill_ring();
        let ring = Mapping::anonymous(addresses_len(OFFSETS, size)).unwrap();
        (
            Control::new(control, &GEOMETRY).unwrap(),
            FillRing::new(ring, OFFSETS, size).unwrap(),
        )
    }

    #[test]
    fn several_raise_together_and_each_frame_comes_once() {
        let (control, fill) = memory();
        thread::scope(|scope| {
            for wanted in [300, 700, 500, 700] {
                let (control, fill) = (&control, &fill);
                scope.spawn(move || assert!(try_raise(control, fill, &GEOMETRY, 1, wanted)));
            }
        });
        assert_eq!(control.circulating(1).load(Relaxed), 700);
        assert_eq!(control.circulating(0).load(Relaxed), 0);
        assert_eq!(fill.waiting(), 700);
        // No more than there are.
        assert!(try_raise(&control, &fill, &GEOMETRY, 1, u32::MAX));
        assert_eq!(fill.waiting(), GEOMETRY.rx_frames());
    }

    #[test]
    fn who_sets_the_number_back_keeps_nobody() {
        let (control, fill) = memory();
        let (control, fill, over) = (&control, &fill, &AtomicBool::new(false));
        thread::scope(|scope| {
            scope.spawn(move || {
                while !over.load(Relaxed) {
                    control.circulating(0).store(0, Relaxed);
                }
            });
            // It ends, whether it was disturbed or not.
            raise(control, fill, &GEOMETRY, 0, GEOMETRY.rx_frames());
            over.store(true, Relaxed);
        });
        assert!(fill.waiting() <= GEOMETRY.rx_frames() + 1);
    }
}
