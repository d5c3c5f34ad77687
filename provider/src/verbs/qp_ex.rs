//! The extended way to post sends (`ibv_wr_*`): each call adds to a batch, which is posted as a whole.

use std::cell::UnsafeCell;
use std::ffi::{c_int, c_void};
use std::ops::Range;

use ferroce_engine::verbs::{
    MwType, Operation, Placement, QpType, Selectivity, SendFlags, SendWr, Sge, UdDest, VerbsError,
};
use parking_lot::RawMutex;
use parking_lot::lock_api::RawMutex as _;

use super::ah::Ah;
use super::mw;
use super::qp::Qp;
use super::verb;
use crate::abi::verbs::{ibv_ah, ibv_data_buf, ibv_mw, ibv_mw_bind_info, ibv_qp_ex};
use crate::guard::guard;

/// Bits of `enum ibv_qp_create_send_ops_flags`: SEND, with immediate data.
const SENDS: u64 = 1 << 2 | 1 << 3;
/// RDMA WRITE, with immediate data.
const WRITES: u64 = 1 << 0 | 1 << 1;
/// RDMA READ, compare and swap, fetch and add.
const READS_AND_ATOMICS: u64 = 1 << 4 | 1 << 5 | 1 << 6;
/// FLUSH.
const FLUSH: u64 = 1 << 11;
/// ATOMIC WRITE.
pub(super) const ATOMIC_WRITE: u64 = 1 << 12;
/// Bytes that an ATOMIC WRITE stores.
pub(super) const WORD: u32 = 8;
/// Local invalidation and binds of memory windows, and SEND with invalidate.
const LOCAL: u64 = 1 << 7 | 1 << 8;
const SEND_WITH_INV: u64 = 1 << 9;

/// The send operations that a QP of a type (`enum ibv_qp_type`) can be made with.
pub(super) fn send_ops(qp_type: u32) -> u64 {
    match QpType::from_number(qp_type) {
        Some(QpType::Rc | QpType::XrcSend) => {
            SENDS | SEND_WITH_INV | WRITES | READS_AND_ATOMICS | FLUSH | ATOMIC_WRITE | LOCAL
        }
        Some(QpType::Uc) => SENDS | WRITES | LOCAL,
        Some(QpType::Ud) => SENDS,
        _ => 0,
    }
}

/// The batch of a QP: one thread's, from `wr_start` to `wr_complete` or `wr_abort`.
pub struct Builder {
    lock: RawMutex,
    batch: UnsafeCell<Batch>,
}

// SAFETY: `batch` is reached only by the thread that holds `lock`.
unsafe impl Sync for Builder {}

impl Default for Builder {
    fn default() -> Builder {
        Builder {
            lock: RawMutex::INIT,
            batch: UnsafeCell::default(),
        }
    }
}

/// Work requests that are being built. Vectors keep their memory from batch to batch.
#[derive(Default)]
struct Batch {
    requests: Vec<Request>,
    sges: Vec<Sge>,
    inline: Vec<u8>,
    /// The first error; then nothing is posted.
    error: Option<VerbsError>,
}

/// One work request of a batch.
struct Request {
    wr_id: u64,
    flags: SendFlags,
    operation: Operation,
    /// Its part of `sges`.
    sges: Range<usize>,
    /// Its part of `inline`, if it has inline data.
    inline: Option<Range<usize>>,
    ud: Option<UdDest>,
    srqn: u32,
}

impl Batch {
    /// Forgets everything.
    fn clear(&mut self) {
        self.requests.clear();
        self.sges.clear();
        self.inline.clear();
        self.error = None;
    }

    /// Notes an error.
    fn fail(&mut self, error: VerbsError) {
        self.error.get_or_insert(error);
    }

    /// Begins a work request.
    fn begin(&mut self, wr_id: u64, flags: u32, operation: Operation) {
        let end = self.sges.len();
        self.requests.push(Request {
            wr_id,
            // Whether the data is inline is told by the setter.
            flags: SendFlags::from_bits_truncate(flags) - SendFlags::INLINE,
            operation,
            sges: end..end,
            inline: None,
            ud: None,
            srqn: 0,
        });
    }

    /// Changes the work request that was begun last; an error if there is none.
    fn set(&mut self, change: impl FnOnce(&mut Request)) {
        match self.requests.last_mut() {
            Some(request) => change(request),
            None => self.fail(VerbsError::Invalid),
        }
    }

    /// Gives the last work request these entries.
    fn set_sges(&mut self, sges: &[Sge], most: u32) {
        if sges.len() > most as usize {
            return self.fail(VerbsError::Invalid);
        }
        let start = self.sges.len();
        self.sges.extend_from_slice(sges);
        let end = self.sges.len();
        self.set(|request| request.sges = start..end);
    }

    /// Gives the last work request a copy of this data.
    fn set_inline<'a>(&mut self, parts: impl Iterator<Item = &'a [u8]>, most: u32) {
        let start = self.inline.len();
        for part in parts {
            if self.inline.len() - start + part.len() > most as usize {
                return self.fail(VerbsError::NoMemory);
            }
            self.inline.extend_from_slice(part);
        }
        let end = self.inline.len();
        self.set(|request| request.inline = Some(start..end));
    }

    /// Hands every work request to `post`, until one fails.
    fn each(&self, mut post: impl FnMut(&SendWr<'_>) -> Result<(), VerbsError>) -> Result<(), VerbsError> {
        for request in &self.requests {
            let mut inline = [Sge::default()];
            let (sges, flags) = match &request.inline {
                None => (&self.sges[request.sges.clone()], request.flags),
                Some(range) => {
                    let data = &self.inline[range.clone()];
                    inline[0] = Sge {
                        addr: data.as_ptr() as u64,
                        length: data.len() as u32,
                        lkey: 0,
                    };
                    (&inline[..], request.flags | SendFlags::INLINE)
                }
            };
            let Request {
                wr_id,
                operation,
                ud,
                srqn,
                ..
            } = *request;
            post(&SendWr {
                wr_id,
                operation,
                flags,
                sges,
                ud,
                srqn,
            })?;
        }
        Ok(())
    }
}

/// Runs `f` with the batch of a QP.
///
/// # Safety
/// `public` must be a QP of this provider, on which the calling thread is between `wr_start` and its end.
unsafe fn with(public: *mut ibv_qp_ex, f: impl FnOnce(&Qp, &mut Batch)) {
    guard((), || {
        // SAFETY: as the caller says.
        let qp = unsafe { Qp::of(public.cast()) };
        // SAFETY: the calling thread holds the lock.
        f(qp, unsafe { &mut *qp.builder.batch.get() });
    });
}

/// Begins a work request.
///
/// # Safety
/// As [`with`].
unsafe fn begin(public: *mut ibv_qp_ex, operation: Operation) {
    // SAFETY: as the caller says; the program sets these fields before the call.
    unsafe {
        let (wr_id, flags) = ((*public).wr_id, (*public).wr_flags);
        with(public, |_, batch| batch.begin(wr_id, flags, operation));
    }
}

/// The functions that begin a work request.
macro_rules! begins {
    ($($name:ident($($argument:ident: $type:ty),*) = $operation:expr;)*) => {
        $(
            unsafe extern "C" fn $name(qp: *mut ibv_qp_ex $(, $argument: $type)*) {
                // SAFETY: the program calls it between `wr_start` and its end.
                unsafe { begin(qp, $operation) }
            }
        )*
    };
}
begins! {
    wr_atomic_cmp_swp(rkey: u32, addr: u64, compare: u64, swap: u64) =
        Operation::CompareSwap { addr, rkey, compare, swap };
    wr_atomic_fetch_add(rkey: u32, addr: u64, add: u64) = Operation::FetchAdd { addr, rkey, add };
    wr_local_inv(key: u32) = Operation::LocalInvalidate(key);
    wr_rdma_read(rkey: u32, addr: u64) = Operation::Read { addr, rkey };
    wr_rdma_write(rkey: u32, addr: u64) = Operation::Write { addr, rkey };
    wr_rdma_write_imm(rkey: u32, addr: u64, imm: u32) = Operation::WriteImm { addr, rkey, imm };
    wr_send() = Operation::Send;
    wr_send_imm(imm: u32) = Operation::SendImm(imm);
    wr_send_inv(key: u32) = Operation::SendInv(key);
}

/// The functions for what no QP of this provider does.
macro_rules! unsupported {
    ($($name:ident($($type:ty),*);)*) => {
        $(
            unsafe extern "C" fn $name(qp: *mut ibv_qp_ex $(, _: $type)*) {
                // SAFETY: the program calls it between `wr_start` and its end.
                unsafe { with(qp, |_, batch| batch.fail(VerbsError::NotSupported)) }
            }
        )*
    };
}
unsupported! {
    wr_send_tso(*mut c_void, u16, u16);
}

/// An ATOMIC WRITE of the 8 bytes at `word`, which are copied at once.
unsafe extern "C" fn wr_atomic_write(public: *mut ibv_qp_ex, rkey: u32, addr: u64, word: *const c_void) {
    // SAFETY: the program calls it between `wr_start` and its end, with so many bytes.
    unsafe {
        begin(public, Operation::AtomicWrite { addr, rkey });
        let data = std::iter::once_with(|| bytes(word, WORD as usize));
        with(public, |_, batch| batch.set_inline(data, WORD));
    }
}

unsafe extern "C" fn wr_flush(
    public: *mut ibv_qp_ex,
    rkey: u32,
    addr: u64,
    length: usize,
    placement: u8,
    level: u8,
) {
    let flush = u32::try_from(length).ok().and_then(|length| {
        Some(Operation::Flush {
            addr,
            rkey,
            length,
            placement: Placement::from_bits(placement)?,
            selectivity: Selectivity::from_number(level.into())?,
        })
    });
    // SAFETY: the program calls it between `wr_start` and its end.
    unsafe {
        match flush {
            Some(flush) => begin(public, flush),
            None => with(public, |_, batch| batch.fail(VerbsError::Invalid)),
        }
    }
}

unsafe extern "C" fn wr_bind_mw(
    public: *mut ibv_qp_ex,
    mw: *mut ibv_mw,
    rkey: u32,
    info: *const ibv_mw_bind_info,
) {
    // SAFETY: the program calls it between `wr_start` and its end, with a window and a region of this provider.
    unsafe {
        match mw::bind((*public).qp_base.context, mw, MwType::Type2, rkey, &*info) {
            Ok(operation) => begin(public, operation),
            Err(error) => with(public, |_, batch| batch.fail(error)),
        }
    }
}

unsafe extern "C" fn wr_set_ud_addr(public: *mut ibv_qp_ex, ah: *mut ibv_ah, qpn: u32, qkey: u32) {
    // SAFETY: the program calls it between `wr_start` and its end, with an address handle of this provider.
    unsafe {
        match Ah::path(ah) {
            Ok(path) => {
                with(public, |_, batch| {
                    batch.set(|request| request.ud = Some(UdDest { path, qpn, qkey }))
                });
            }
            Err(error) => with(public, |_, batch| batch.fail(error)),
        }
    }
}

unsafe extern "C" fn wr_set_xrc_srqn(public: *mut ibv_qp_ex, srqn: u32) {
    // SAFETY: the program calls it between `wr_start` and its end.
    unsafe { with(public, |_, batch| batch.set(|request| request.srqn = srqn)) };
}

unsafe extern "C" fn wr_set_sge(public: *mut ibv_qp_ex, lkey: u32, addr: u64, length: u32) {
    // SAFETY: the program calls it between `wr_start` and its end.
    unsafe {
        with(public, |qp, batch| {
            batch.set_sges(&[Sge { addr, length, lkey }], qp.cap.max_send_sge)
        });
    }
}

unsafe extern "C" fn wr_set_sge_list(public: *mut ibv_qp_ex, count: usize, list: *const Sge) {
    // SAFETY: the program calls it between `wr_start` and its end, with so many entries.
    unsafe {
        let sges = if count == 0 {
            &[]
        } else {
            std::slice::from_raw_parts(list, count)
        };
        with(public, |qp, batch| batch.set_sges(sges, qp.cap.max_send_sge));
    }
}

/// The bytes of a piece of inline data.
///
/// # Safety
/// They must be there.
unsafe fn bytes<'a>(addr: *const c_void, length: usize) -> &'a [u8] {
    if length == 0 {
        return &[];
    }
    // SAFETY: as the caller says.
    unsafe { std::slice::from_raw_parts(addr.cast(), length) }
}

unsafe extern "C" fn wr_set_inline_data(public: *mut ibv_qp_ex, addr: *mut c_void, length: usize) {
    // SAFETY: the program calls it between `wr_start` and its end, with this data.
    unsafe {
        let data = std::iter::once_with(|| bytes(addr, length));
        with(public, |qp, batch| batch.set_inline(data, qp.cap.max_inline_data));
    }
}

unsafe extern "C" fn wr_set_inline_data_list(
    public: *mut ibv_qp_ex,
    count: usize,
    list: *const ibv_data_buf,
) {
    // SAFETY: the program calls it between `wr_start` and its end, with so many pieces of data.
    unsafe {
        let list = if count == 0 {
            &[]
        } else {
            std::slice::from_raw_parts(list, count)
        };
        let data = list.iter().map(|part| bytes(part.addr, part.length));
        with(public, |qp, batch| batch.set_inline(data, qp.cap.max_inline_data));
    }
}

/// Begins a batch.
unsafe extern "C" fn wr_start(public: *mut ibv_qp_ex) {
    // SAFETY: the program passes a QP of this provider.
    let builder = unsafe { &Qp::of(public.cast()).builder };
    builder.lock.lock();
    // SAFETY: locked just now.
    unsafe { (*builder.batch.get()).clear() };
}

/// Posts the batch: all of it, or nothing and an errno.
unsafe extern "C" fn wr_complete(public: *mut ibv_qp_ex) -> c_int {
    verb(|| {
        // SAFETY: the program passes a QP of this provider.
        let qp = unsafe { Qp::of(public.cast()) };
        let _end = End(&qp.builder);
        // SAFETY: the calling thread holds the lock since `wr_start`.
        let batch = unsafe { &*qp.builder.batch.get() };
        if let Some(error) = batch.error {
            return Err(error);
        }
        let mut session = qp.context.engine.lock()?;
        let mut before = 0;
        batch.each(|wr| {
            before += 1;
            session.check_send(qp.qpn, wr, before - 1)
        })?;
        let now = session.now();
        batch.each(|wr| session.post_send(now, qp.qpn, wr))
    })
}

/// Drops the batch.
unsafe extern "C" fn wr_abort(public: *mut ibv_qp_ex) {
    // SAFETY: the program passes a QP of this provider, which its thread has locked by `wr_start`.
    drop(End(unsafe { &Qp::of(public.cast()).builder }));
}

/// Ends a batch when dropped.
struct End<'a>(&'a Builder);

impl Drop for End<'_> {
    fn drop(&mut self) {
        // SAFETY: made only where the calling thread holds the lock.
        unsafe { self.0.lock.unlock() };
    }
}

/// A `struct ibv_qp_ex` with the functions, and zeros elsewhere.
pub(super) static FUNCTIONS: FunctionTable = FunctionTable(ibv_qp_ex {
    wr_atomic_cmp_swp: Some(wr_atomic_cmp_swp),
    wr_atomic_fetch_add: Some(wr_atomic_fetch_add),
    wr_bind_mw: Some(wr_bind_mw),
    wr_local_inv: Some(wr_local_inv),
    wr_rdma_read: Some(wr_rdma_read),
    wr_rdma_write: Some(wr_rdma_write),
    wr_rdma_write_imm: Some(wr_rdma_write_imm),
    wr_send: Some(wr_send),
    wr_send_imm: Some(wr_send_imm),
    wr_send_inv: Some(wr_send_inv),
    wr_send_tso: Some(wr_send_tso),
    wr_set_ud_addr: Some(wr_set_ud_addr),
    wr_set_xrc_srqn: Some(wr_set_xrc_srqn),
    wr_set_inline_data: Some(wr_set_inline_data),
    wr_set_inline_data_list: Some(wr_set_inline_data_list),
    wr_set_sge: Some(wr_set_sge),
    wr_set_sge_list: Some(wr_set_sge_list),
    wr_start: Some(wr_start),
    wr_complete: Some(wr_complete),
    wr_abort: Some(wr_abort),
    wr_atomic_write: Some(wr_atomic_write),
    wr_flush: Some(wr_flush),
    // SAFETY: zeros are null pointers and numbers, and the functions are given.
    ..unsafe { std::mem::zeroed() }
});

/// A table that is only read.
#[repr(transparent)]
pub(super) struct FunctionTable(ibv_qp_ex);

// SAFETY: its pointers are all null or functions.
unsafe impl Sync for FunctionTable {}

#[cfg(test)]
mod tests {
    use super::*;

    fn posted(batch: &Batch) -> Vec<(u64, Operation, Vec<u8>)> {
        let mut posted = Vec::new();
        batch
            .each(|wr| {
                let data = match wr.flags.contains(SendFlags::INLINE) {
                    // SAFETY: inline data lies in the batch.
                    true => unsafe { bytes(wr.sges[0].addr as *const c_void, wr.sges[0].length as usize) }
                        .to_vec(),
                    false => wr.sges.iter().map(|sge| sge.lkey as u8).collect(),
                };
                posted.push((wr.wr_id, wr.operation, data));
                Ok(())
            })
            .unwrap();
        posted
    }

    #[test]
    fn a_batch_keeps_its_requests_apart() {
        let sge = |lkey| Sge {
            addr: 0,
            length: 1,
            lkey,
        };
        let mut batch = Batch::default();
        batch.begin(1, 2, Operation::Send);
        batch.set_sges(&[sge(10), sge(11)], 2);
        batch.begin(2, 0, Operation::SendImm(5));
        batch.set_inline([&b"in"[..], b"line"].into_iter(), 6);
        batch.begin(3, 8, Operation::Send);
        let expected = vec![
            (1, Operation::Send, vec![10, 11]),
            (2, Operation::SendImm(5), b"inline".to_vec()),
            (3, Operation::Send, vec![]),
        ];
        assert_eq!(posted(&batch), expected);
        assert_eq!(batch.error, None);
        batch.clear();
        assert_eq!(posted(&batch), []);
    }

    #[test]
    fn the_first_error_stays() {
        let mut batch = Batch::default();
        batch.set_sges(&[], 1);
        assert_eq!(batch.error, Some(VerbsError::Invalid), "nothing was begun");
        batch.begin(1, 0, Operation::Send);
        batch.set_inline([&b"long"[..]].into_iter(), 3);
        assert_eq!(batch.error, Some(VerbsError::Invalid));
        batch.clear();
        batch.begin(1, 0, Operation::Send);
        batch.set_inline([&b"long"[..]].into_iter(), 3);
        assert_eq!(batch.error, Some(VerbsError::NoMemory));
    }
}
