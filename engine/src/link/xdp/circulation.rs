//! Which frames for receiving circulate on a queue: its first ones, up to a number that only grows.
#![deny(unsafe_code)]

use std::sync::atomic::Ordering::{AcqRel, Acquire};

use super::Geometry;
use super::memory::Control;
use super::ring::FillRing;

/// Frames that are added at once.
const STEP: u32 = 64;

/// Has so many frames of a queue circulate, or more. False if one can't be put into the fill ring: a program overwrites
/// it, and more tries take long.
///
/// First the number grows, by a step: whoever is killed in between leaves these frames out, and gives none twice.
pub(super) fn raise(
    control: &Control,
    fill: &FillRing,
    geometry: &Geometry,
    queue: u16,
    wanted: u32,
) -> bool {
    let frames = geometry.frames_of_queue(queue);
    let wanted = wanted.min(geometry.rx_frames());
    let circulating = control.circulating(queue);
    loop {
        let now = circulating.load(Acquire);
        if now >= wanted {
            return true;
        }
        let next = wanted.min(now + STEP);
        // Others may do the same meanwhile.
        let before = circulating.fetch_max(next, AcqRel);
        let mut added = frames.start + before.min(next)..frames.start + next;
        if !added.all(|frame| fill.push(u64::from(frame) * u64::from(geometry.chunk))) {
            return false;
        }
    }
}
