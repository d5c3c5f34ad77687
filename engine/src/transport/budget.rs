//! What all QPs together may have under way to one socket. A process has one receive buffer, however many QPs its peer
//! has towards it; and what READs bring comes to our own.

use std::collections::VecDeque;
use std::net::IpAddr;
use std::time::Duration;

use rustc_hash::FxHashMap;

use super::window::BUDGET;
use crate::qp::Qp;
use crate::time::Time;

/// How long a budget may be used up without any progress: then what is under way is taken to be gone, for QPs whose
/// timers run long, or not at all, must not stop the others for ever.
const PATIENCE: Duration = Duration::from_millis(100);

/// Names a budget.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BudgetId(usize);

impl BudgetId {
    /// That of our own receive buffer, which answers of READs and atomics fill.
    pub const OURS: BudgetId = BudgetId(0);
}

/// A process at the end of a path: its address, and the slot of its QPNs.
pub(crate) type Process = (IpAddr, u8);

/// Whose receive buffer a request fills.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Buffer {
    /// The peer's: SENDs and WRITEs.
    Theirs,
    /// Our own, with the answer: READs and atomics.
    Ours,
}

/// A QP's place in the line for a budget.
#[derive(Clone, Copy)]
pub(crate) struct Place {
    pub budget: BudgetId,
    /// When to look whether there is any progress.
    pub look_at: Time,
}

/// What one receive buffer is filled with, in the units of [`super::window::PacketCost`].
#[derive(Default)]
struct Budget {
    /// QPs that send there.
    users: u32,
    used: u64,
    /// How often what was under way was taken to be gone: shares of before do not count any more.
    epoch: u32,
    /// When something was last released.
    released: Time,
    /// QPs that wait for their turn, the next one first, with the room that each needs.
    waiting: VecDeque<(u32, u64)>,
    /// The QP whose turn it is, until it has sent.
    serves: Option<u32>,
}

/// What a QP has in a budget.
#[derive(Clone, Copy, Default)]
pub(crate) struct Share {
    counted: u64,
    epoch: u32,
}

/// Where a QP stands with the budgets that it draws on.
#[derive(Default)]
pub(crate) struct Standing {
    /// The peer's process, and its budget, while the QP is connected.
    peer: Option<(Process, BudgetId)>,
    theirs: Share,
    ours: Share,
}

/// The budgets of a device.
pub(crate) struct Budgets {
    all: Vec<Budget>,
    vacant: Vec<usize>,
    by_process: FxHashMap<Process, usize>,
}

impl Default for Budgets {
    fn default() -> Budgets {
        Budgets {
            all: vec![Budget::default()],
            vacant: Vec::new(),
            by_process: FxHashMap::default(),
        }
    }
}

impl Budgets {
    /// The budget of a process, for one more QP.
    pub fn enter(&mut self, process: Process) -> BudgetId {
        let index = *self.by_process.entry(process).or_insert_with(|| {
            self.vacant.pop().unwrap_or_else(|| {
                self.all.push(Budget::default());
                self.all.len() - 1
            })
        });
        if let Some(budget) = self.all.get_mut(index) {
            budget.users += 1;
        }
        BudgetId(index)
    }

    /// A QP, which has nothing under way any more, does not send to the process any longer.
    pub fn leave(&mut self, process: Process) {
        let Some(&index) = self.by_process.get(&process) else {
            return;
        };
        let Some(budget) = self.all.get_mut(index) else {
            return;
        };
        budget.users = budget.users.saturating_sub(1);
        if budget.users == 0 {
            *budget = Budget::default();
            self.by_process.remove(&process);
            self.vacant.push(index);
        }
    }

    /// How much more a QP may send that has `under_way` in the budget, some of it perhaps not counted yet: anything
    /// where nothing is under way.
    pub fn room(&self, id: BudgetId, share: &Share, under_way: u64) -> u64 {
        let Some(budget) = self.all.get(id.0) else {
            return 0;
        };
        let counted = if share.epoch == budget.epoch {
            share.counted
        } else {
            0
        };
        match (budget.used + under_way).saturating_sub(counted) {
            0 => u64::MAX,
            used => BUDGET.saturating_sub(used),
        }
    }

    /// Counts what a QP has under way now.
    pub fn count(&mut self, now: Time, id: BudgetId, share: &mut Share, under_way: u64) {
        let Some(budget) = self.all.get_mut(id.0) else {
            return;
        };
        if share.epoch != budget.epoch {
            *share = Share {
                counted: 0,
                epoch: budget.epoch,
            };
        }
        if under_way < share.counted {
            budget.released = now;
        }
        budget.used = (budget.used + under_way).saturating_sub(share.counted);
        share.counted = under_way;
    }

    /// Whether a QP may send now: it is its turn, or nobody waits for one.
    pub fn is_turn(&self, id: BudgetId, qpn: u32) -> bool {
        let budget = self.all.get(id.0);
        budget.is_some_and(|it| it.serves == Some(qpn) || it.waiting.is_empty() && it.serves.is_none())
    }

    /// A QP waits until there is so much room and its turn comes.
    pub fn wait(&mut self, now: Time, id: BudgetId, qpn: u32, needs: u64) -> Place {
        if let Some(budget) = self.all.get_mut(id.0) {
            if budget.waiting.is_empty() {
                budget.released = budget.released.max(now);
            }
            budget.waiting.push_back((qpn, needs));
        }
        Place {
            budget: id,
            look_at: now + PATIENCE,
        }
    }

    /// A QP has waited for long: where nothing was released all that time, what is under way is taken to be gone.
    /// Gives when to look again.
    pub fn look(&mut self, now: Time, id: BudgetId) -> Time {
        let Some(budget) = self.all.get_mut(id.0) else {
            return now + PATIENCE;
        };
        if now.since(budget.released) >= PATIENCE {
            budget.used = 0;
            budget.epoch = budget.epoch.wrapping_add(1);
            budget.released = now;
        }
        budget.released + PATIENCE
    }

    /// The QP whose turn is next, if there is room for it. Its turn lasts until [`Budgets::end_turn`].
    pub fn next(&mut self, id: BudgetId) -> Option<u32> {
        let budget = self.all.get_mut(id.0)?;
        let &(qpn, needs) = budget.waiting.front()?;
        if budget.serves.is_some() || budget.used > 0 && budget.used + needs > BUDGET {
            return None;
        }
        budget.waiting.pop_front();
        budget.serves = Some(qpn);
        budget.serves
    }

    /// The QP's turn is over, if it had one; it waits no longer.
    pub fn end_turn(&mut self, id: BudgetId, qpn: u32) {
        if let Some(budget) = self.all.get_mut(id.0) {
            budget.serves.take_if(|served| *served == qpn);
        }
    }

    /// The QP does not wait any more.
    pub fn forget(&mut self, id: BudgetId, qpn: u32) {
        self.end_turn(id, qpn);
        if let Some(budget) = self.all.get_mut(id.0) {
            budget.waiting.retain(|(waiting, _)| *waiting != qpn);
        }
    }
}

impl Qp {
    /// The budget for a buffer; `None` if nothing limits what goes there.
    pub fn budget(&self, buffer: Buffer) -> Option<BudgetId> {
        match buffer {
            Buffer::Ours => Some(BudgetId::OURS),
            Buffer::Theirs => self.standing.peer.map(|(_, id)| id),
        }
    }

    /// What is left of the budget for a buffer.
    pub fn room(&self, budgets: &Budgets, buffer: Buffer) -> u64 {
        let Standing { theirs, ours, .. } = &self.standing;
        let share = match buffer {
            Buffer::Theirs => theirs,
            Buffer::Ours => ours,
        };
        let under_way = self.requester.window.under_way(buffer);
        self.budget(buffer)
            .map_or(u64::MAX, |id| budgets.room(id, share, under_way))
    }

    /// Counts what is under way now.
    pub fn count(&mut self, now: Time, budgets: &mut Budgets) {
        let window = &self.requester.window;
        let Standing { peer, theirs, ours } = &mut self.standing;
        if let Some((_, id)) = *peer {
            budgets.count(now, id, theirs, window.under_way(Buffer::Theirs));
        }
        budgets.count(now, BudgetId::OURS, ours, window.under_way(Buffer::Ours));
    }

    /// Its turn to fill a buffer is over, if it had one.
    pub fn end_turn(&self, budgets: &mut Budgets) {
        for buffer in [Buffer::Theirs, Buffer::Ours] {
            if let Some(id) = self.budget(buffer) {
                budgets.end_turn(id, self.qpn);
            }
        }
    }

    /// Leaves the line that it stands in.
    pub fn leave_line(&mut self, budgets: &mut Budgets) {
        if let Some(place) = self.place.take() {
            budgets.forget(place.budget, self.qpn);
        }
    }

    /// After the path changed: its budget is that of the process to which it leads.
    pub fn follow_path(&mut self, now: Time, budgets: &mut Budgets) {
        let reliable = self.is_reliable();
        let path = self.attr.path.filter(|_| reliable);
        let process = path.map(|path| (path.dest, (self.attr.dest_qpn >> 16) as u8));
        if process == self.standing.peer.map(|(process, _)| process) {
            return;
        }
        self.retire(now, budgets);
        self.standing.peer = process.map(|process| (process, budgets.enter(process)));
    }

    /// Has nothing under way any more to anybody.
    pub fn retire(&mut self, now: Time, budgets: &mut Budgets) {
        self.leave_line(budgets);
        self.end_turn(budgets);
        let Standing { peer, theirs, ours } = &mut self.standing;
        budgets.count(now, BudgetId::OURS, ours, 0);
        if let Some((process, id)) = peer.take() {
            budgets.count(now, id, theirs, 0);
            budgets.leave(process);
        }
        *theirs = Share::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PEER: Process = (IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 7);

    fn at(ms: u64) -> Time {
        Time::ZERO + Duration::from_millis(ms)
    }

    #[test]
    fn qps_share_what_a_process_has_room_for() {
        let mut budgets = Budgets::default();
        let id = budgets.enter(PEER);
        assert_eq!(budgets.enter(PEER), id);
        assert_ne!(budgets.enter((PEER.0, 8)), id);
        let (mut a, mut b) = (Share::default(), Share::default());
        assert_eq!(budgets.room(id, &a, 0), u64::MAX, "one packet always may");
        budgets.count(at(1), id, &mut a, BUDGET / 4);
        assert_eq!(budgets.room(id, &b, 0), BUDGET * 3 / 4);
        assert_eq!(budgets.room(id, &b, 100), BUDGET * 3 / 4 - 100, "not counted yet");
        budgets.count(at(1), id, &mut b, BUDGET);
        assert_eq!(budgets.room(id, &a, BUDGET / 4), 0);
        budgets.count(at(1), id, &mut b, 0);
        assert_eq!(budgets.room(id, &a, BUDGET / 4), BUDGET * 3 / 4);
        budgets.count(at(1), id, &mut a, 0);
        budgets.leave(PEER);
        budgets.leave(PEER);
        let other = budgets.enter((PEER.0, 9));
        assert_eq!(other, id, "places are used again");
    }

    #[test]
    fn turns_are_in_order_and_come_with_room() {
        let mut budgets = Budgets::default();
        let id = budgets.enter(PEER);
        let mut share = Share::default();
        budgets.count(at(1), id, &mut share, BUDGET);
        assert!(budgets.is_turn(id, 1));
        for qpn in 1..=4 {
            budgets.wait(at(1), id, qpn, 10);
            assert!(!budgets.is_turn(id, qpn));
        }
        assert_eq!(budgets.next(id), None);
        budgets.count(at(2), id, &mut share, BUDGET - 9);
        assert_eq!(budgets.next(id), None, "too little");
        budgets.count(at(2), id, &mut share, BUDGET - 10);
        assert_eq!(budgets.next(id), Some(1));
        assert!(budgets.is_turn(id, 1) && !budgets.is_turn(id, 5));
        assert_eq!(budgets.next(id), None, "one at a time");
        budgets.end_turn(id, 2);
        assert_eq!(budgets.next(id), None, "it was not that one's");
        budgets.end_turn(id, 1);
        budgets.forget(id, 2);
        assert_eq!(budgets.next(id), Some(3));
        budgets.forget(id, 3);
        budgets.end_turn(id, 3);
        assert_eq!(budgets.next(id), Some(4));
        budgets.end_turn(id, 4);
        assert!(budgets.is_turn(id, 9));
    }

    #[test]
    fn what_brings_no_progress_for_long_counts_no_more() {
        let mut budgets = Budgets::default();
        let id = budgets.enter(PEER);
        let (mut stale, mut fresh) = (Share::default(), Share::default());
        budgets.count(at(1), id, &mut stale, BUDGET);
        let place = budgets.wait(at(50), id, 1, 10);
        assert_eq!(place.look_at, at(150));
        budgets.count(at(60), id, &mut stale, BUDGET - 1);
        assert_eq!(budgets.look(at(150), id), at(160), "there was some progress");
        assert_eq!(budgets.next(id), None);
        assert_eq!(budgets.look(at(160), id), at(260));
        assert_eq!(budgets.next(id), Some(1));
        budgets.count(at(161), id, &mut fresh, 100);
        // What was taken to be gone is not, after all: it counts again, and once.
        budgets.count(at(162), id, &mut stale, BUDGET / 2);
        assert_eq!(budgets.room(id, &fresh, 100), BUDGET / 2 - 100);
        budgets.count(at(163), id, &mut stale, 0);
        assert_eq!(budgets.room(id, &fresh, 100), BUDGET - 100);
    }
}
