//! The device: protection domains, memory regions, queues and queue pairs, driven by packets and time.
//!
//! Sans-I/O and deterministic: it reads no clock, owns no socket, thread or randomness beyond its seed. Packets go in
//! by [`Device::receive`] and out by [`Device::transmit`]; [`Device::next_deadline`] says when
//! [`Device::handle_timeouts`] has work.
#![deny(unsafe_code)]

mod config;
mod counters;
mod drive;
mod multicast;
mod objects;
mod pairs;
mod regions;
mod table;
mod xrc;

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use ferroce_wire::PathMtu;
use rand_chacha::ChaCha12Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use rustc_hash::FxHashMap;

pub use crate::qp::QpInit;
pub use config::{Acks, DeviceConfig, Limits, MrInfo, MwId, PdId, Progress, SrqAttr, SrqId};
pub(crate) use counters::Counters;
pub use multicast::Others;
pub use regions::MrChange;
pub(crate) use xrc::DomainId;
pub use xrc::{FileId, XrcdId};

use crate::memory::Memory;
use crate::memory::keys::KeyTable;
use crate::qp::{Qp, Shared};
use crate::queue::Cq;
use crate::queue::srq::Srq;
use crate::time::Time;
use crate::transport::budget::Budgets;
use crate::transport::responder::Parting;
use crate::transport::window::PacketCost;
use crate::verbs::{AsyncEvent, VerbsError};
use table::QpTable;
use xrc::Xrcd;

#[cfg(test)]
mod tests;

/// One engine's device.
pub struct Device {
    limits: Limits,
    mtu: PathMtu,
    memory: Arc<dyn Memory>,
    cost: PacketCost,
    rng: ChaCha12Rng,
    /// Number of the newest PD, CQ or XRC domain.
    next_id: u64,
    /// High byte of QP and SRQ numbers, and the low half of the newest SRQ number.
    slot: u8,
    newest_srq: u16,
    /// Objects in each PD.
    pds: FxHashMap<PdId, u32>,
    keys: KeyTable,
    /// CQs and how many QPs use each.
    cqs: FxHashMap<u64, (Arc<Cq>, u32)>,
    srqs: FxHashMap<SrqId, Srq>,
    xrcds: FxHashMap<XrcdId, Xrcd>,
    qps: QpTable,
    /// QPs attached to each multicast group; none is empty.
    groups: FxHashMap<IpAddr, Vec<u32>>,
    /// What is under way to receive buffers, ours and those of peers.
    budgets: Budgets,
    events: VecDeque<AsyncEvent>,
    counters: Counters,
    /// QPs with something to send, in turn.
    ready: VecDeque<u32>,
    /// QPs that have nothing but an acknowledgement to send, which waits since `held_since`.
    held: VecDeque<u32>,
    held_since: Time,
    /// How long it waits while the application polls.
    held_for: Duration,
    /// See [`Device::take_answered`].
    answered: bool,
    /// QPs whose next packet found no room where it goes, when the link was last asked.
    busy: VecDeque<u32>,
    busy_since: Time,
    /// Answers that do not wait for the turns of their QPs, which may be gone.
    partings: Vec<Parting>,
    /// CQs that lost a completion just now, and the QP that it was of.
    overrun: Vec<(u64, u32)>,
    /// When CQs want [`Cq::expire`]; entries may be stale.
    cq_alarms: BinaryHeap<Reverse<(Time, u64)>>,
    /// The device is gone: nothing new is made.
    gone: bool,
    /// When QPs want [`Device::handle_timeouts`]; entries may be stale.
    alarms: BinaryHeap<Reverse<(Time, u32)>>,
    /// The latest time that a caller gave.
    now: Time,
}

impl Device {
    /// A device without objects.
    pub fn new(config: DeviceConfig<'_>) -> Device {
        Device {
            cost: PacketCost::new(&*config.window),
            limits: config.limits,
            mtu: config.mtu,
            memory: config.memory,
            rng: ChaCha12Rng::from_seed(config.seed),
            next_id: 1,
            slot: config.slot,
            newest_srq: 0,
            pds: FxHashMap::default(),
            keys: KeyTable::default(),
            cqs: FxHashMap::default(),
            srqs: FxHashMap::default(),
            xrcds: FxHashMap::default(),
            qps: QpTable::new(config.slot),
            groups: FxHashMap::default(),
            budgets: Budgets::default(),
            events: VecDeque::new(),
            counters: Counters::default(),
            ready: VecDeque::new(),
            held: VecDeque::new(),
            held_since: Time::ZERO,
            held_for: Duration::ZERO,
            answered: false,
            busy: VecDeque::new(),
            busy_since: Time::ZERO,
            partings: Vec::new(),
            overrun: Vec::new(),
            cq_alarms: BinaryHeap::new(),
            gone: false,
            alarms: BinaryHeap::new(),
            now: Time::ZERO,
        }
    }

    /// What the device can do at most.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// The largest path MTU of its QPs, and the payload of a UD packet.
    pub fn mtu(&self) -> PathMtu {
        self.mtu
    }

    /// Changes the largest path MTU of QPs that are connected from now on (the interface's MTU changed).
    pub fn set_mtu(&mut self, mtu: PathMtu) {
        self.mtu = mtu;
    }

    /// The next asynchronous event.
    pub fn take_event(&mut self) -> Option<AsyncEvent> {
        self.events.pop_front()
    }

    /// The device ends: all work flushes, and nothing new can be made. What there is can still be destroyed.
    pub fn end(&mut self, now: Time) {
        self.gone = true;
        for qpn in self.qps.numbers() {
            if let Ok((qp, mut shared)) = self.qp(now, qpn) {
                qp.responder.forsake();
                qp.enter_error(&mut shared);
                self.settle(qpn);
            }
        }
        self.events.push_back(AsyncEvent::DeviceFatal);
    }

    /// EIO if the device is gone.
    fn alive(&self) -> Result<(), VerbsError> {
        if self.gone { Err(VerbsError::Gone) } else { Ok(()) }
    }

    /// A number for a new object, and for nothing else ever.
    fn new_id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    /// A QP, and the parts of the device it works with.
    fn qp(&mut self, now: Time, qpn: u32) -> Result<(&mut Qp, Shared<'_>), VerbsError> {
        self.now = self.now.max(now);
        let qp = self.qps.get_mut(qpn).ok_or(VerbsError::NotFound)?;
        let shared = Shared {
            now,
            memory: &*self.memory,
            keys: &mut self.keys,
            srqs: &mut self.srqs,
            events: &mut self.events,
            counters: &mut self.counters,
            cost: &self.cost,
            budgets: &mut self.budgets,
            partings: &mut self.partings,
            overrun: &mut self.overrun,
            cq_alarms: &mut self.cq_alarms,
        };
        Ok((qp, shared))
    }

    /// A number for a new SRQ: unique on this device, and not used again soon.
    fn new_srq_id(&mut self) -> SrqId {
        loop {
            self.newest_srq = self.newest_srq.wrapping_add(1);
            let id = SrqId(u32::from(self.slot) << 16 | u32::from(self.newest_srq));
            if self.newest_srq != 0 && !self.srqs.contains_key(&id) {
                return id;
            }
        }
    }

    /// A random key for a new object.
    fn new_key(&mut self) -> u32 {
        loop {
            let key = self.rng.next_u32();
            if self.keys.is_free(key) {
                return key;
            }
        }
    }
}
