//! Which slots are free, in the order of their reuse.

use std::collections::VecDeque;

/// The slots that nobody leases. The one that was freed first is given first, so that late packets
/// of a dead process find nobody.
#[derive(Debug)]
pub struct FreeSlots(VecDeque<u8>);

impl FreeSlots {
    /// Slots 1 to `count`, but those that are taken.
    pub fn new(count: u8, is_taken: impl Fn(u8) -> bool) -> Self {
        Self((1..=count).filter(|slot| !is_taken(*slot)).collect())
    }

    /// Takes the slot that has been free for longest.
    pub fn take(&mut self) -> Option<u8> {
        self.0.pop_front()
    }

    /// Gives a slot back.
    pub fn give_back(&mut self, slot: u8) {
        debug_assert!(!self.0.contains(&slot));
        self.0.push_back(slot);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn freed_slots_are_reused_last() {
        let mut free = FreeSlots::new(4, |slot| slot == 3);
        assert_eq!(free.take(), Some(1));
        free.give_back(1);
        assert_eq!(
            [free.take(), free.take(), free.take(), free.take()],
            [Some(2), Some(4), Some(1), None]
        );
    }
}
