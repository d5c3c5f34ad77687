//! Completions that the program has not polled. Their requests count as outstanding until then, as on hardware: a program
//! that posts until its queue is full does not overrun a CQ that is as large.

use std::collections::VecDeque;

use crate::queue::Cq;
use crate::verbs::VerbsError;

/// The completions of a queue that may wait to be polled, by their numbers in the CQ, which it takes in order.
pub(crate) struct Unpolled(VecDeque<u64>);

impl Unpolled {
    /// With room for the completions of a queue of this capacity. ENOMEM.
    pub fn new(capacity: u32) -> Result<Unpolled, VerbsError> {
        let mut numbers = VecDeque::new();
        numbers
            .try_reserve_exact(capacity as usize)
            .map_err(|_| VerbsError::NoMemory)?;
        Ok(Unpolled(numbers))
    }

    /// A completion with this number was added to the CQ.
    pub fn pushed(&mut self, number: u64, cq: &Cq) {
        let oldest = cq.oldest();
        while self.0.front().is_some_and(|&first| first < oldest) {
            self.0.pop_front();
        }
        self.0.push_back(number);
    }

    /// All were taken out of the CQ.
    pub fn clear(&mut self) {
        self.0.clear();
    }

    /// How many more requests can be posted: the `free` places of the queue less what waits in the CQ.
    pub fn room(&self, free: usize, cq: &Cq) -> usize {
        let oldest = cq.oldest();
        let polled = self.0.partition_point(|&number| number < oldest);
        free.saturating_sub(self.0.len() - polled)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verbs::Wc;

    #[test]
    fn what_is_polled_makes_room_whoever_it_was_of() {
        let cq = Cq::new(1, 8, 0, None).unwrap();
        let mut own = Unpolled::new(4).unwrap();
        // Own completions are the second, third and fifth.
        for (at, mine) in [false, true, true, false, true].into_iter().enumerate() {
            let pushed = cq.push(Wc::default(), false).unwrap();
            assert_eq!(pushed.number, at as u64 + 1);
            if mine {
                own.pushed(pushed.number, &cq);
            }
        }
        for room in [1, 1, 2, 3, 3] {
            assert_eq!(own.room(4, &cq), room);
            assert_eq!(cq.poll(&mut [Wc::default()]), 1);
        }
        assert_eq!((own.room(4, &cq), own.room(0, &cq)), (4, 0));
        let pushed = cq.push(Wc::default(), false).unwrap();
        own.pushed(pushed.number, &cq);
        assert_eq!(
            (own.room(4, &cq), own.0.len()),
            (3, 1),
            "the others are forgotten"
        );
        own.clear();
        assert_eq!(own.room(4, &cq), 4);
    }
}
