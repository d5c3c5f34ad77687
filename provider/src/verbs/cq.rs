//! Completion queues.

use std::ffi::c_int;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use ferroce_engine::queue::{Cq as EngineCq, CqNotify, Moderation};
use ferroce_engine::verbs::{VerbsError, Wc};

use super::context::{Channel, Context};
use super::cq_ex::Cursor;
use super::events::{Acknowledged, Object, Public};
use super::pd::Pd;
use super::place::{self, Place, Resource};
use super::uses::Use;
use super::{make, next_handle, verb};
use crate::abi::verbs::{ibv_comp_channel, ibv_context, ibv_cq, ibv_cq_ex, ibv_modify_cq_attr, ibv_wc};
use crate::guard::guard;
use crate::hooks;

/// `IBV_CQ_ATTR_MODERATE`.
const MODERATE: u32 = 1;
/// Completions converted at a time.
const BATCH: usize = 16;

/// A CQ; begins as `struct ibv_cq_ex`, which begins as `struct ibv_cq`.
#[repr(C)]
pub struct Cq {
    pub(super) public: Public<ibv_cq_ex>,
    pub(super) context: Arc<Context>,
    pub(super) queue: Arc<EngineCq>,
    /// Where its completion events go.
    events: Option<Arc<CompletionEvents>>,
    /// What the functions of `ibv_cq_ex` read.
    pub(super) cursor: Cursor,
    _domain: Option<Use>,
}

/// The completion events of a CQ.
struct CompletionEvents {
    channel: Arc<Channel>,
    /// Address of the CQ, as the program knows it.
    cq: u64,
    /// Events queued so far.
    count: AtomicU32,
}

/// The engine's hold on the events of a CQ.
struct Notify(Arc<CompletionEvents>);

impl CqNotify for Notify {
    fn completion(&self) {
        self.0.count.fetch_add(1, Ordering::Relaxed);
        self.0.channel.push([self.0.cq]);
    }
}

impl Cq {
    /// The CQ behind a public one.
    ///
    /// # Safety
    /// `cq` must be one of this provider that lives as long as the result is used.
    pub unsafe fn of<'a>(cq: *mut ibv_cq) -> &'a Cq {
        // SAFETY: as the caller says; the public part comes first.
        unsafe { &*cq.cast::<Cq>() }
    }

    /// Its queue in the engine. EINVAL if there is none, or it is of another context.
    ///
    /// # Safety
    /// `cq` must be null or one of this provider.
    pub unsafe fn queue(cq: *mut ibv_cq, context: &Arc<Context>) -> Result<Arc<EngineCq>, VerbsError> {
        // SAFETY: as the caller says; the public part comes first.
        unsafe { cq.cast::<Cq>().as_ref() }
            .filter(|cq| Arc::ptr_eq(&cq.context, context))
            .map(|cq| cq.queue.clone())
            .ok_or(VerbsError::Invalid)
    }

    /// Makes a CQ for `entries` completions, perhaps in a parent domain.
    ///
    /// # Safety
    /// `public` must be an open context of this provider, `channel` null or one of that context.
    pub(super) unsafe fn create(
        public: *mut ibv_context,
        entries: u32,
        channel: *mut ibv_comp_channel,
        vector: u32,
        domain: Option<&Pd>,
    ) -> Result<*mut Cq, VerbsError> {
        // SAFETY: as the caller says.
        let (context, vectors) = unsafe { (Context::of(public), (*public).num_comp_vectors) };
        if vector >= vectors as u32 {
            return Err(VerbsError::Invalid);
        }
        let place = Place::<Cq>::find(domain, Resource::Cq)?;
        let address = place.address();
        // SAFETY: as the caller says.
        let events = match unsafe { channel.as_ref() } {
            None => None,
            Some(channel) => Some(Arc::new(CompletionEvents {
                channel: hooks::descriptors::get_as(channel.fd).ok_or(VerbsError::Invalid)?,
                cq: address,
                count: AtomicU32::new(0),
            })),
        };
        let notify = events
            .clone()
            .map(|events| Box::new(Notify(events)) as Box<dyn CqNotify>);
        let queue = context.engine.lock()?.create_cq(entries, vector, notify)?;
        context.objects.insert(Object::Cq(queue.id()), address);
        let cq = Cq {
            // SAFETY: zeros are null pointers, numbers, and a mutex that libibverbs initialises.
            public: unsafe { Public::zeroed() },
            context,
            queue,
            events,
            cursor: Cursor::default(),
            _domain: domain.map(Pd::enter),
        };
        let capacity = cq.queue.capacity();
        let cq = place.put(cq);
        // SAFETY: nobody else has it yet. libibverbs sets the other fields.
        unsafe {
            let base = &raw mut (*(*cq).public.get()).base;
            (*base).context = public;
            (*base).channel = channel;
            (*base).handle = next_handle();
            (*base).cqe = capacity as c_int;
        }
        Ok(cq)
    }

    /// Takes completions; drives the engine if there are none.
    pub(super) fn take(&self, into: &mut [Wc]) -> usize {
        match self.queue.poll(into) {
            0 => {
                self.context.engine.drive();
                self.queue.poll(into)
            }
            taken => {
                self.context.engine.send_posted();
                taken
            }
        }
    }
}

/// A completion as the program sees it.
fn exported(wc: &Wc) -> ibv_wc {
    ibv_wc {
        wr_id: wc.wr_id,
        status: wc.status as u32,
        opcode: wc.opcode as u32,
        vendor_err: wc.vendor_err,
        byte_len: wc.byte_len,
        imm_data: wc.imm,
        qp_num: wc.qp_num,
        src_qp: wc.src_qp,
        wc_flags: wc.flags.bits(),
        pkey_index: 0,
        slid: 0,
        sl: wc.service_level,
        dlid_path_bits: 0,
    }
}

pub(super) unsafe extern "C" fn create_cq(
    context: *mut ibv_context,
    entries: c_int,
    channel: *mut ibv_comp_channel,
    vector: c_int,
) -> *mut ibv_cq {
    make(|| {
        let number = |n: c_int| u32::try_from(n).map_err(|_| VerbsError::Invalid);
        // SAFETY: libibverbs passes an open context of this provider, and a channel of it or none.
        let cq = unsafe { Cq::create(context, number(entries)?, channel, number(vector)?, None)? };
        Ok(cq.cast())
    })
}

/// Sets how completion events are held back. EINVAL: nothing is asked for; EOPNOTSUPP: something else.
pub(super) unsafe extern "C" fn modify_cq(public: *mut ibv_cq, attr: *mut ibv_modify_cq_attr) -> c_int {
    verb(|| {
        // SAFETY: libibverbs passes a CQ of this provider, the program attributes.
        let (cq, attr) = unsafe { (Cq::of(public), &*attr) };
        match attr.attr_mask {
            0 => return Err(VerbsError::Invalid),
            MODERATE => {}
            _ => return Err(VerbsError::NotSupported),
        }
        let moderation = Moderation {
            count: attr.moderate.cq_count,
            period: Duration::from_micros(attr.moderate.cq_period.into()),
        };
        cq.context.engine.lock()?.moderate_cq(&cq.queue, moderation)
    })
}

pub(super) unsafe extern "C" fn resize_cq(public: *mut ibv_cq, entries: c_int) -> c_int {
    verb(|| {
        // SAFETY: libibverbs passes a CQ of this provider.
        let cq = unsafe { Cq::of(public) };
        let entries = u32::try_from(entries).map_err(|_| VerbsError::Invalid)?;
        cq.context.engine.lock()?.resize_cq(&cq.queue, entries)?;
        // SAFETY: as above.
        unsafe { (*public).cqe = cq.queue.capacity() as c_int };
        Ok(())
    })
}

pub(super) unsafe extern "C" fn destroy_cq(public: *mut ibv_cq) -> c_int {
    verb(|| {
        // SAFETY: libibverbs passes a CQ of this provider.
        let cq = unsafe { Cq::of(public) };
        cq.context.engine.lock()?.destroy_cq(&cq.queue)?;
        // Nothing completes into it any more. Events that the program has not read point to it, so they must go.
        if let Some(events) = &cq.events {
            let unread = events.channel.retract(|[of]| *of == events.cq);
            let read = events.count.load(Ordering::Relaxed).wrapping_sub(unread);
            // SAFETY: the CQ lives, and libibverbs has initialised it.
            unsafe { Acknowledged::of_completions(public).wait_for(read) };
        }
        // SAFETY: as above, and it is of this CQ.
        unsafe {
            cq.context.forget(
                Object::Cq(cq.queue.id()),
                public as u64,
                Acknowledged::of_cq(public),
            )
        };
        // SAFETY: `Cq::create` made it, and nobody uses it any more.
        unsafe { place::remove(public.cast::<Cq>()) };
        Ok(())
    })
}

/// Takes up to `count` completions: gives how many, or a negative errno.
pub(super) unsafe extern "C" fn poll_cq(public: *mut ibv_cq, count: c_int, into: *mut ibv_wc) -> c_int {
    guard(-libc::EIO, || {
        // SAFETY: the program passes a CQ of this provider.
        let cq = unsafe { Cq::of(public) };
        if !cq.context.engine.usable() {
            return -libc::EIO;
        }
        let wanted = usize::try_from(count).unwrap_or(0);
        if cq.queue.is_empty() {
            cq.context.engine.drive();
        } else {
            cq.context.engine.send_posted();
        }
        let mut done = 0;
        while done < wanted && !cq.queue.is_empty() {
            let mut batch = [Wc::default(); BATCH];
            let room = BATCH.min(wanted - done);
            let taken = cq.queue.poll(&mut batch[..room]);
            for wc in &batch[..taken] {
                // SAFETY: the program has room for `count` completions.
                unsafe { into.add(done).write(exported(wc)) };
                done += 1;
            }
            if taken < room {
                break;
            }
        }
        done as c_int
    })
}

pub(super) unsafe extern "C" fn req_notify_cq(public: *mut ibv_cq, solicited_only: c_int) -> c_int {
    verb(|| {
        // SAFETY: the program passes a CQ of this provider.
        let cq = unsafe { Cq::of(public) };
        if !cq.context.engine.usable() {
            return Err(VerbsError::Gone);
        }
        cq.context.engine.arm(&cq.queue, solicited_only != 0);
        Ok(())
    })
}

/// The program has read a completion event: there is room for one that waits.
pub(super) unsafe extern "C" fn cq_event(public: *mut ibv_cq) {
    guard((), || {
        // SAFETY: libibverbs passes a CQ of this provider.
        if let Some(events) = unsafe { &Cq::of(public).events } {
            events.channel.refill();
        }
    });
}

#[cfg(test)]
mod tests {
    use ferroce_engine::verbs::{WcFlags, WcOpcode, WcStatus};

    use super::*;

    #[test]
    fn a_completion_keeps_its_numbers() {
        let wc = exported(&Wc {
            wr_id: 1,
            status: WcStatus::RnrRetryExcErr,
            opcode: WcOpcode::RecvRdmaWithImm,
            vendor_err: 2,
            byte_len: 3,
            imm: 4,
            qp_num: 5,
            src_qp: 6,
            flags: WcFlags::GRH | WcFlags::WITH_IMM,
            service_level: 7,
            timestamp: 8,
            ..Wc::default()
        });
        assert_eq!((wc.wr_id, wc.status, wc.opcode, wc.vendor_err), (1, 13, 129, 2));
        assert_eq!((wc.byte_len, wc.imm_data, wc.qp_num, wc.src_qp), (3, 4, 5, 6));
        assert_eq!((wc.wc_flags, wc.sl), (3, 7));
    }
}
