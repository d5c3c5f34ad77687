//! QPs by number: found by an index table, with indices that can't be guessed and are not used again soon.

use std::collections::VecDeque;

use rand_chacha::rand_core::RngCore;

use crate::qp::Qp;

/// Freed indices that wait before they may be used again.
const QUARANTINE: usize = 8192;

/// In the index table: not in use.
const FREE: u16 = 0;
/// In the index table: used not long ago.
const RESTING: u16 = u16::MAX;

/// The QPs of a device.
pub(super) struct QpTable {
    slot: u32,
    /// By low 16 bits of the QPN: 1 + the place in `qps`.
    index: Vec<u16>,
    qps: Vec<Option<Box<Qp>>>,
    vacant: Vec<u16>,
    resting: VecDeque<u16>,
}

impl QpTable {
    /// No QPs.
    pub fn new(slot: u8) -> QpTable {
        QpTable {
            slot: u32::from(slot) << 16,
            index: vec![FREE; 1 << 16],
            qps: Vec::new(),
            vacant: Vec::new(),
            resting: VecDeque::new(),
        }
    }

    /// The number of QPs.
    pub fn len(&self) -> usize {
        self.qps.len() - self.vacant.len()
    }

    /// A QPN that is free. Indices 0 and 1 stand for QP0 and QP1, and 0xffff for multicast: never given.
    pub fn new_qpn(&self, rng: &mut impl RngCore) -> u32 {
        loop {
            let index = rng.next_u32() as u16;
            if (2..u16::MAX).contains(&index) && self.index.get(usize::from(index)) == Some(&FREE) {
                return self.slot | u32::from(index);
            }
        }
    }

    /// Adds a QP under its number, one of [`QpTable::new_qpn`].
    pub fn insert(&mut self, qp: Box<Qp>) {
        let index = (qp.qpn & 0xffff) as usize;
        let place = self.vacant.pop().unwrap_or_else(|| {
            self.qps.push(None);
            (self.qps.len() - 1) as u16
        });
        if let (Some(room), Some(entry)) = (self.qps.get_mut(usize::from(place)), self.index.get_mut(index)) {
            *room = Some(qp);
            *entry = place + 1;
        }
    }

    /// A QP by its number.
    #[inline]
    pub fn get(&self, qpn: u32) -> Option<&Qp> {
        self.qps.get(self.place(qpn)?)?.as_deref()
    }

    /// A QP by its number.
    #[inline]
    pub fn get_mut(&mut self, qpn: u32) -> Option<&mut Qp> {
        let place = self.place(qpn)?;
        self.qps.get_mut(place)?.as_deref_mut()
    }

    /// Removes a QP.
    pub fn remove(&mut self, qpn: u32) -> Option<Box<Qp>> {
        let place = self.place(qpn)?;
        let qp = self.qps.get_mut(place)?.take()?;
        self.vacant.push(place as u16);
        let index = (qpn & 0xffff) as u16;
        self.set(index, RESTING);
        self.resting.push_back(index);
        if self.resting.len() > QUARANTINE
            && let Some(rested) = self.resting.pop_front()
        {
            self.set(rested, FREE);
        }
        Some(qp)
    }

    /// The numbers of all QPs.
    pub fn numbers(&self) -> Vec<u32> {
        self.iter().map(|qp| qp.qpn).collect()
    }

    /// Every QP.
    pub fn iter(&self) -> impl Iterator<Item = &Qp> {
        self.qps.iter().flatten().map(|qp| &**qp)
    }

    fn set(&mut self, index: u16, value: u16) {
        if let Some(entry) = self.index.get_mut(usize::from(index)) {
            *entry = value;
        }
    }

    /// Where a QP lies in `qps`.
    fn place(&self, qpn: u32) -> Option<usize> {
        if qpn & !0xffff != self.slot {
            return None;
        }
        let entry = *self.index.get((qpn & 0xffff) as usize)?;
        if entry == FREE || entry == RESTING {
            None
        } else {
            Some(usize::from(entry) - 1)
        }
    }
}
