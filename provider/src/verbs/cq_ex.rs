//! The extended way to poll a CQ (`struct ibv_cq_ex`): one completion at a time, read by functions.

use std::cell::UnsafeCell;
use std::ffi::{c_int, c_uint};

use ferroce_engine::verbs::{VerbsError, Wc};
use parking_lot::RawMutex;
use parking_lot::lock_api::RawMutex as _;

use super::cq::Cq;
use super::make;
use super::pd::Pd;
use crate::abi::verbs::{ibv_context, ibv_cq_ex, ibv_cq_init_attr_ex, ibv_poll_cq_attr, ibv_wc_tm_info};
use crate::guard::guard;

/// `IBV_WC_STANDARD_FLAGS`, timestamps of both kinds, and flow tags, which are 0 where no flow has set one.
const WC_FLAGS: u64 = 0x7f | 1 << 7 | 1 << 9 | 1 << 11;
/// `IBV_CQ_INIT_ATTR_MASK_FLAGS`.
const WITH_FLAGS: u32 = 1;
/// `IBV_CQ_INIT_ATTR_MASK_PD`.
const WITH_PD: u32 = 1 << 1;
/// `IBV_CREATE_CQ_ATTR_SINGLE_THREADED`, which asks for nothing.
const SINGLE_THREADED: u32 = 1;
/// `IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN`.
const IGNORE_OVERRUN: u32 = 1 << 1;

/// The completion that is being read: one thread's, from `start_poll` to `end_poll`.
pub struct Cursor {
    lock: RawMutex,
    wc: UnsafeCell<Wc>,
}

// SAFETY: `wc` is reached only by the thread that holds `lock`.
unsafe impl Sync for Cursor {}

impl Default for Cursor {
    fn default() -> Cursor {
        Cursor {
            lock: RawMutex::INIT,
            wc: UnsafeCell::default(),
        }
    }
}

impl Cq {
    /// The CQ behind an extended one.
    ///
    /// # Safety
    /// `cq` must be one of this provider that lives as long as the result is used.
    unsafe fn of_ex<'a>(cq: *mut ibv_cq_ex) -> &'a Cq {
        // SAFETY: as the caller says; the public part comes first.
        unsafe { &*cq.cast::<Cq>() }
    }

    /// Makes `wc` the one that is read.
    ///
    /// # Safety
    /// The calling thread must hold the cursor.
    unsafe fn show(&self, wc: Wc) {
        // SAFETY: the thread holds the cursor, and these fields are its to read.
        unsafe {
            let public = self.public.get();
            (*public).wr_id = wc.wr_id;
            (*public).status = wc.status as u32;
            *self.cursor.wc.get() = wc;
        }
    }
}

/// Makes a CQ that is polled in the extended way. EINVAL: a flag that does not exist; EOPNOTSUPP: a field that
/// completions do not have.
pub(super) unsafe extern "C" fn create_cq_ex(
    context: *mut ibv_context,
    attr: *mut ibv_cq_init_attr_ex,
) -> *mut ibv_cq_ex {
    make(|| {
        // SAFETY: the program passes attributes.
        let attr = unsafe { &*attr };
        let flags = if attr.comp_mask & WITH_FLAGS == 0 {
            0
        } else {
            attr.flags
        };
        if attr.comp_mask & !(WITH_FLAGS | WITH_PD) != 0 || flags & !(SINGLE_THREADED | IGNORE_OVERRUN) != 0 {
            return Err(VerbsError::Invalid);
        }
        if attr.wc_flags & !WC_FLAGS != 0 {
            return Err(VerbsError::NotSupported);
        }
        let domain = if attr.comp_mask & WITH_PD == 0 {
            None
        } else {
            // SAFETY: the program passes a PD of this provider.
            Some(unsafe { Pd::parent_domain(attr.parent_domain)? })
        };
        // SAFETY: libibverbs passes an open context of this provider, the program a channel of it or none.
        let cq = unsafe { Cq::create(context, attr.cqe, attr.channel, attr.comp_vector, domain)? };
        if flags & IGNORE_OVERRUN != 0 {
            // SAFETY: nobody else has it yet.
            unsafe { (*cq).queue.ignore_overrun() };
        }
        // SAFETY: nobody else has it yet.
        unsafe {
            let public = (*cq).public.get();
            (*public).start_poll = Some(start_poll);
            (*public).next_poll = Some(next_poll);
            (*public).end_poll = Some(end_poll);
            (*public).read_opcode = Some(read_opcode);
            (*public).read_vendor_err = Some(read_vendor_err);
            (*public).read_byte_len = Some(read_byte_len);
            (*public).read_imm_data = Some(read_imm_data);
            (*public).read_qp_num = Some(read_qp_num);
            (*public).read_src_qp = Some(read_src_qp);
            (*public).read_wc_flags = Some(read_wc_flags);
            (*public).read_slid = Some(read_slid);
            (*public).read_sl = Some(read_sl);
            (*public).read_dlid_path_bits = Some(read_dlid_path_bits);
            (*public).read_completion_ts = Some(read_completion_ts);
            (*public).read_cvlan = Some(read_cvlan);
            (*public).read_flow_tag = Some(read_flow_tag);
            (*public).read_tm_info = Some(read_tm_info);
            (*public).read_completion_wallclock_ns = Some(read_completion_wallclock_ns);
        }
        Ok(cq.cast())
    })
}

/// Begins to read completions: 0, ENOENT if there is none (then nothing has begun), or another errno.
unsafe extern "C" fn start_poll(public: *mut ibv_cq_ex, attr: *mut ibv_poll_cq_attr) -> c_int {
    guard(libc::EIO, || {
        // SAFETY: the program passes attributes.
        if unsafe { attr.as_ref() }.is_some_and(|attr| attr.comp_mask != 0) {
            return libc::EINVAL;
        }
        // SAFETY: the program passes a CQ of this provider.
        let cq = unsafe { Cq::of_ex(public) };
        if !cq.context.engine.usable() {
            return libc::EIO;
        }
        cq.cursor.lock.lock();
        let mut wc = [Wc::default()];
        if cq.take(&mut wc) == 0 {
            // SAFETY: locked above.
            unsafe { cq.cursor.lock.unlock() };
            return libc::ENOENT;
        }
        // SAFETY: this thread holds the cursor.
        unsafe { cq.show(wc[0]) };
        0
    })
}

/// Goes on to the next completion: 0, or ENOENT if there is none.
unsafe extern "C" fn next_poll(public: *mut ibv_cq_ex) -> c_int {
    guard(libc::EIO, || {
        // SAFETY: the program passes a CQ of this provider.
        let cq = unsafe { Cq::of_ex(public) };
        let mut wc = [Wc::default()];
        if cq.queue.poll(&mut wc) == 0 {
            return libc::ENOENT;
        }
        // SAFETY: `start_poll` succeeded in this thread.
        unsafe { cq.show(wc[0]) };
        0
    })
}

/// Ends what a `start_poll` that succeeded began.
unsafe extern "C" fn end_poll(public: *mut ibv_cq_ex) {
    // SAFETY: the program passes a CQ of this provider, which it locked by `start_poll`.
    unsafe { Cq::of_ex(public).cursor.lock.unlock() };
}

/// Functions that read a field of the completion.
macro_rules! reads {
    ($($name:ident -> $type:ty = |$wc:ident, $cq:ident| $value:expr;)*) => {
        $(
            unsafe extern "C" fn $name(public: *mut ibv_cq_ex) -> $type {
                // SAFETY: the program passes a CQ of this provider, which its thread holds since `start_poll`.
                let ($wc, $cq) = unsafe {
                    let cq = Cq::of_ex(public);
                    (&*cq.cursor.wc.get(), cq)
                };
                _ = $cq;
                $value
            }
        )*
    };
}
reads! {
    read_opcode -> u32 = |wc, _cq| wc.opcode as u32;
    read_vendor_err -> u32 = |wc, _cq| wc.vendor_err;
    read_byte_len -> u32 = |wc, _cq| wc.byte_len;
    read_imm_data -> u32 = |wc, _cq| wc.imm;
    read_qp_num -> u32 = |wc, _cq| wc.qp_num;
    read_src_qp -> u32 = |wc, _cq| wc.src_qp;
    read_wc_flags -> c_uint = |wc, _cq| wc.flags.bits();
    read_slid -> u32 = |_wc, _cq| 0;
    read_sl -> u8 = |wc, _cq| wc.service_level;
    read_dlid_path_bits -> u8 = |_wc, _cq| 0;
    read_completion_ts -> u64 = |wc, _cq| wc.timestamp;
    read_cvlan -> u16 = |_wc, _cq| 0;
    read_flow_tag -> u32 = |_wc, _cq| 0;
    read_completion_wallclock_ns -> u64 = |wc, cq| guard(0, || wallclock(cq, wc.timestamp));
}

/// Tag matching, which no CQ of this provider has.
unsafe extern "C" fn read_tm_info(_: *mut ibv_cq_ex, info: *mut ibv_wc_tm_info) {
    // SAFETY: the program passes room for it.
    unsafe { info.write(ibv_wc_tm_info { tag: 0, priv_: 0 }) };
}

/// A time of the engine's clock in nanoseconds since 1970.
fn wallclock(cq: &Cq, timestamp: u64) -> u64 {
    let Ok(session) = cq.context.engine.lock() else {
        return 0;
    };
    let age = session.now().as_nanos().saturating_sub(timestamp);
    let now = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap_or_default();
    (now.as_nanos() as u64).saturating_sub(age)
}
