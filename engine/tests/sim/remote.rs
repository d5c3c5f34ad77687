//! Whether WRITEs, READs and atomics had the effects of a run one after the other.

use crate::check::acknowledged;
use crate::delivery::untroubled;
use crate::harness::Outcome;
use crate::memory::{content, initial_slot};
use crate::program::{Kind, Program};

/// The slots of a stream as its messages change them, one by one.
struct Image<'a> {
    program: &'a Program,
    connection: usize,
    side: usize,
    slots: Vec<Vec<u8>>,
}

impl Image<'_> {
    fn new(program: &Program, connection: usize, side: usize) -> Image<'_> {
        let count = program.connections[connection].streams[side].slots.len();
        let slots = (0..count)
            .map(|slot| initial_slot(program, connection, side, slot))
            .collect();
        Image {
            program,
            connection,
            side,
            slots,
        }
    }

    /// Does message `index`; gives what it fetches.
    fn step(&mut self, index: usize) -> Option<Vec<u8>> {
        let Image {
            program,
            connection,
            side,
            ..
        } = *self;
        let message = &program.connections[connection].streams[side].messages[index];
        let slot = &mut self.slots[message.kind.slot()?];
        let old = slot[..message.len as usize].to_vec();
        let value = old
            .first_chunk()
            .copied()
            .map(u64::from_ne_bytes)
            .unwrap_or_default();
        let mut store = |value: u64| slot.copy_from_slice(&value.to_ne_bytes());
        match message.kind {
            Kind::Send | Kind::SendInv { .. } | Kind::Bind { .. } | Kind::LocalInv { .. } => return None,
            Kind::Write(_) => {
                let bytes = content(program.seed, connection, side, index, message.len);
                slot[..bytes.len()].copy_from_slice(&bytes);
                return None;
            }
            Kind::Read(_) => {}
            Kind::Flush { .. } => return None,
            Kind::AtomicWrite(_) => {
                let bytes = content(program.seed, connection, side, index, message.len);
                slot.copy_from_slice(&bytes);
                return None;
            }
            Kind::CompareSwap { compare, swap, .. } if compare == value => store(swap),
            Kind::CompareSwap { .. } => {}
            Kind::FetchAdd { add, .. } => store(value.wrapping_add(add)),
        }
        Some(old)
    }
}

/// RC: every operation that succeeded had its effect once, in order; gives how many fetched something.
pub fn reliable_slots(
    program: &Program,
    outcome: &Outcome,
    connection: usize,
    side: usize,
) -> Result<usize, String> {
    let (log, peer) = (&outcome.qps[connection][side], &outcome.qps[connection][1 - side]);
    let acknowledged = acknowledged(log);
    let mut image = Image::new(program, connection, side);
    let mut fetched = 0;
    for index in 0..acknowledged {
        let Some(expected) = image.step(index) else {
            continue;
        };
        let result = log.results.get(index).cloned().flatten();
        if result.as_ref() != Some(&expected) {
            return Err(format!(
                "message {index} fetched {}",
                difference(result, &expected)
            ));
        }
        fetched += 1;
    }
    let counters = |image: &Image<'_>| -> Vec<Vec<u8>> {
        let slots = program.connections[connection].streams[side]
            .slots
            .iter()
            .zip(&image.slots);
        slots
            .filter(|(slot, _)| slot.counter)
            .map(|(_, bytes)| bytes.clone())
            .collect()
    };
    let end = Image {
        slots: peer.slots.clone(),
        ..Image::new(program, connection, side)
    };
    if acknowledged == program.connections[connection].streams[side].messages.len() {
        for (slot, (got, expected)) in peer.slots.iter().zip(&image.slots).enumerate() {
            if got != expected {
                return Err(format!(
                    "slot {slot} holds {}",
                    difference(Some(got.clone()), expected)
                ));
            }
        }
    } else {
        // Of what is not known to have succeeded, some may have been done, in order.
        let mut possible = vec![counters(&image)];
        for index in acknowledged..log.sends_posted {
            image.step(index);
            possible.push(counters(&image));
        }
        if !possible.contains(&counters(&end)) {
            return Err("the counters hold what no number of atomics leads to".to_string());
        }
    }
    Ok(fetched)
}

/// UC: every byte of a slot is the old or the new one; without faults, and with ready receivers, the new one.
pub fn unreliable_slots(
    program: &Program,
    outcome: &Outcome,
    connection: usize,
    side: usize,
) -> Result<(), String> {
    let before = Image::new(program, connection, side);
    let mut after = Image::new(program, connection, side);
    (0..outcome.qps[connection][side].sends_posted).for_each(|index| drop(after.step(index)));
    let untroubled = untroubled(program, outcome, connection, side);
    for (slot, got) in outcome.qps[connection][1 - side].slots.iter().enumerate() {
        let (old, new) = (&before.slots[slot], &after.slots[slot]);
        if untroubled && got != new {
            return Err(format!(
                "nothing was lost, but slot {slot} holds {}",
                difference(Some(got.clone()), new)
            ));
        }
        if got
            .iter()
            .zip(old.iter().zip(new))
            .any(|(got, (old, new))| got != old && got != new)
        {
            return Err(format!("slot {slot} holds neither old nor new bytes"));
        }
    }
    Ok(())
}

/// Where bytes differ from the expected, for people.
fn difference(got: Option<Vec<u8>>, expected: &[u8]) -> String {
    let Some(got) = got else {
        return "nothing".to_string();
    };
    match got.iter().zip(expected).position(|(a, b)| a != b) {
        Some(at) => format!(
            "other bytes than expected, from byte {at} of {} on",
            expected.len()
        ),
        None => format!("{} bytes where {} are expected", got.len(), expected.len()),
    }
}
