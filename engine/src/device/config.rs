//! What a device is made from, and the names of its objects.

use std::sync::Arc;
use std::time::Duration;

use ferroce_wire::PathMtu;

use crate::memory::Memory;
use crate::transport::MAX_MESSAGE;
use crate::verbs::{Access, VerbsError};

/// A protection domain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PdId(pub(crate) u32);

impl PdId {
    /// What stands in a QP without a protection domain: nothing belongs to it.
    pub(crate) const NONE: PdId = PdId(0);
}

/// A shared receive queue; the number, of 24 bits, is that of [`crate::verbs::AsyncEvent::SrqLimit`] and the one by
/// which XRC peers name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SrqId(pub u32);

/// A memory window: the index of its keys (their upper 24 bits).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MwId(pub(crate) u32);

/// The keys of a memory region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MrInfo {
    /// For work requests.
    pub lkey: u32,
    /// For peers.
    pub rkey: u32,
}

/// Attributes of an SRQ (`struct ibv_srq_attr`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SrqAttr {
    /// Receives that fit.
    pub max_wr: u32,
    /// Scatter entries of a receive.
    pub max_sge: u32,
    /// Low-water mark of the limit event; 0 when none is armed.
    pub limit: u32,
}

/// What a device can do at most (`struct ibv_device_attr`); enforced.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Queue pairs.
    pub max_qp: u32,
    /// Work requests of a send or receive queue.
    pub max_qp_wr: u32,
    /// Scatter/gather entries of a work request.
    pub max_sge: u32,
    /// Inline bytes of a send.
    pub max_inline: u32,
    /// Completion queues.
    pub max_cq: u32,
    /// Entries of a completion queue.
    pub max_cqe: u32,
    /// How long an event of a completion queue is held back.
    pub max_cq_period: Duration,
    /// Memory regions.
    pub max_mr: u32,
    /// Bytes of a region.
    pub max_mr_size: u64,
    /// Memory windows.
    pub max_mw: u32,
    /// Bytes of device memory.
    pub max_dm_size: u64,
    /// Protection domains.
    pub max_pd: u32,
    /// Shared receive queues.
    pub max_srq: u32,
    /// Receives of an SRQ.
    pub max_srq_wr: u32,
    /// Multicast groups that QPs are attached to.
    pub max_mcast_grp: u32,
    /// QPs attached to one group.
    pub max_mcast_qp_attach: u32,
    /// READs and atomics outstanding, each way, per QP.
    pub max_rd_atomic: u8,
    /// Bytes of an RC or UC message.
    pub max_message: u32,
}

impl Limits {
    /// Whether a region may be registered with these rights. EINVAL and EOPNOTSUPP as the kernel says; that its memory
    /// is mapped is looked at elsewhere ([`crate::memory::Memory::populate`]).
    pub fn check_mr(&self, addr: u64, len: u64, access: Access) -> Result<(), VerbsError> {
        let remote = access.intersects(Access::REMOTE_WRITE | Access::REMOTE_ATOMIC);
        if remote && !access.contains(Access::LOCAL_WRITE) {
            return Err(VerbsError::Invalid);
        }
        if access.contains(Access::FLUSH_PERSISTENT) {
            return Err(VerbsError::NotSupported);
        }
        let everything = addr == 0 && len == u64::MAX && access.contains(Access::ON_DEMAND);
        if len > self.max_mr_size && !everything || addr.checked_add(len).is_none() {
            return Err(VerbsError::Invalid);
        }
        Ok(())
    }
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            max_qp: 16384,
            max_qp_wr: 32768,
            max_sge: 32,
            max_inline: 1024,
            max_cq: 65536,
            max_cqe: 4 << 20,
            max_cq_period: Duration::from_micros(u16::MAX as u64),
            max_mr: 1 << 20,
            max_mr_size: 1 << 47,
            max_mw: 1 << 20,
            max_dm_size: 4 << 20,
            max_pd: 65536,
            max_srq: 16384,
            max_srq_wr: 1 << 20,
            max_mcast_grp: 20,
            max_mcast_qp_attach: 4096,
            max_rd_atomic: 16,
            max_message: MAX_MESSAGE,
        }
    }
}

/// What a device is made from.
pub struct DeviceConfig<'a> {
    /// High byte of every QPN: the process's lease.
    pub slot: u8,
    /// The memory that work requests and peers' keys name.
    pub memory: Arc<dyn Memory>,
    /// Seed of keys and QPNs; must be secret and used once, but in simulations.
    pub seed: [u8; 32],
    /// The largest path MTU.
    pub mtu: PathMtu,
    /// Upper bounds.
    pub limits: Limits,
    /// [`crate::link::Link::window`]: bytes of packets of a length that a peer's buffer holds. Asked at the start only.
    pub window: Box<dyn Fn(usize) -> u32 + 'a>,
}

/// What a call of [`crate::device::Device::transmit`] left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// Nothing to send now.
    Idle,
    /// The link is full.
    Full,
    /// There is more to send: a look at what has arrived may come first.
    More,
}

/// Whether acknowledgements that nothing else waits for may wait themselves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Acks {
    /// No: the caller may not come again soon.
    Send,
    /// Until the next call with a later time, at most: the requests that the application posts until then take them
    /// along, and later ones make earlier ones unnecessary.
    MayWait,
}
