//! Queue pairs: made, changed, queried and destroyed.

use std::ffi::c_int;
use std::ptr;
use std::sync::Arc;

use ferroce_engine::device::QpInit;
use ferroce_engine::verbs::{QpAttr, QpAttrMask, QpCap, QpType, VerbsError};
use ferroce_wire::Gid;

use super::context::Context;
use super::cq::Cq;
use super::events::{Acknowledged, Object, Public};
use super::pd::Pd;
use super::qp_attr;
use super::qp_ex::{self, Builder};
use super::srq::Srq;
use super::{make, next_handle, verb};
use crate::abi::private::VERBS_QP_EX;
use crate::abi::verbs::{
    ibv_context, ibv_pd, ibv_qp, ibv_qp_attr, ibv_qp_cap, ibv_qp_ex, ibv_qp_init_attr, ibv_qp_init_attr_ex,
};

/// `IBV_QP_INIT_ATTR_PD`.
const WITH_PD: u32 = 1;
/// `IBV_QP_INIT_ATTR_CREATE_FLAGS`.
const WITH_CREATE_FLAGS: u32 = 1 << 2;
/// `IBV_QP_INIT_ATTR_SEND_OPS_FLAGS`.
const WITH_SEND_OPS: u32 = 1 << 6;
/// Words of the largest `struct verbs_qp`: `struct ibv_qp_ex`, `comp_mask` and a pointer.
const VERBS_QP: usize = size_of::<ibv_qp_ex>() / 8 + 2;

/// A queue pair; begins as `struct verbs_qp`, whose layout differs by release.
#[repr(C)]
pub struct Qp {
    public: Public<[u64; VERBS_QP]>,
    pub(super) context: Arc<Context>,
    pub(super) qpn: u32,
    pub(super) cap: QpCap,
    /// What the functions of `ibv_qp_ex` build, if it has them.
    pub(super) builder: Builder,
}

impl Qp {
    /// The QP behind a public one.
    ///
    /// # Safety
    /// `qp` must be one of this provider that lives as long as the result is used.
    pub unsafe fn of<'a>(qp: *mut ibv_qp) -> &'a Qp {
        // SAFETY: as the caller says; the public part comes first.
        unsafe { &*qp.cast::<Qp>() }
    }
}

/// Makes a QP; stores the sizes granted in `attr`. With `extended` it has the functions of `ibv_qp_ex`.
///
/// # Safety
/// `public_pd` and the objects that `attr` names must be of this provider.
unsafe fn create(
    public_pd: *mut ibv_pd,
    attr: &mut ibv_qp_init_attr,
    extended: bool,
) -> Result<*mut ibv_qp, VerbsError> {
    // SAFETY: as the caller says.
    let (pd, public_context, send_cq, recv_cq, srq) = unsafe {
        let pd = Pd::of(public_pd);
        (
            pd,
            (*public_pd).context,
            Cq::queue(attr.send_cq)?,
            Cq::queue(attr.recv_cq)?,
            Srq::id(attr.srq),
        )
    };
    let qp_type = QpType::from_number(attr.qp_type).ok_or(VerbsError::NotSupported)?;
    let context = pd.context.clone();
    let init = QpInit {
        pd: pd.id,
        qp_type,
        cap: cap_of(&attr.cap),
        send_cq,
        recv_cq,
        srq,
        sq_sig_all: attr.sq_sig_all != 0,
    };
    let (qpn, cap) = context.engine.lock()?.create_qp(init)?;
    attr.cap = exported_cap(&cap);
    let abi = context.abi;
    let qp = Box::new(Qp {
        // SAFETY: zeros are null pointers and numbers.
        public: unsafe { Public::zeroed() },
        context,
        qpn,
        cap,
        builder: Builder::default(),
    });
    let public = qp.public.get().cast::<ibv_qp>();
    // SAFETY: nobody else has it yet, and the structure of every release fits. A mutex and a condition variable of
    // zeros are initialised ones; some releases initialise them again.
    unsafe {
        if extended {
            let functions = &raw const qp_ex::FUNCTIONS;
            ptr::copy_nonoverlapping(functions.cast::<u8>(), public.cast::<u8>(), abi.qp_ex);
            public.byte_add(abi.qp_ex).cast::<u32>().write(VERBS_QP_EX);
        }
        (*public).context = public_context;
        (*public).qp_context = attr.qp_context;
        (*public).pd = public_pd;
        (*public).send_cq = attr.send_cq;
        (*public).recv_cq = attr.recv_cq;
        (*public).srq = attr.srq;
        (*public).handle = next_handle();
        (*public).qp_num = qpn;
        (*public).qp_type = attr.qp_type;
    }
    qp.context.objects.insert(Object::Qp(qpn), public as u64);
    Ok(Box::into_raw(qp).cast())
}

/// Queue sizes as the engine has them.
fn cap_of(cap: &ibv_qp_cap) -> QpCap {
    QpCap {
        max_send_wr: cap.max_send_wr,
        max_recv_wr: cap.max_recv_wr,
        max_send_sge: cap.max_send_sge,
        max_recv_sge: cap.max_recv_sge,
        max_inline_data: cap.max_inline_data,
    }
}

/// Queue sizes as the program has them.
pub(super) fn exported_cap(cap: &QpCap) -> ibv_qp_cap {
    ibv_qp_cap {
        max_send_wr: cap.max_send_wr,
        max_recv_wr: cap.max_recv_wr,
        max_send_sge: cap.max_send_sge,
        max_recv_sge: cap.max_recv_sge,
        max_inline_data: cap.max_inline_data,
    }
}

pub(super) unsafe extern "C" fn create_qp(pd: *mut ibv_pd, attr: *mut ibv_qp_init_attr) -> *mut ibv_qp {
    // SAFETY: libibverbs passes a PD of this provider, the program attributes with objects of it.
    make(|| unsafe { create(pd, &mut *attr, false) })
}

pub(super) unsafe extern "C" fn create_qp_ex(
    _: *mut ibv_context,
    attr: *mut ibv_qp_init_attr_ex,
) -> *mut ibv_qp {
    make(|| {
        // SAFETY: the program passes attributes.
        let ex = unsafe { &mut *attr };
        let asks_for = |bit| ex.comp_mask & bit != 0;
        if ex.comp_mask & !(WITH_PD | WITH_CREATE_FLAGS | WITH_SEND_OPS) != 0
            || asks_for(WITH_CREATE_FLAGS) && ex.create_flags != 0
            || asks_for(WITH_SEND_OPS) && ex.send_ops_flags & !qp_ex::send_ops(ex.qp_type) != 0
        {
            return Err(VerbsError::NotSupported);
        }
        if !asks_for(WITH_PD) || ex.pd.is_null() {
            return Err(VerbsError::Invalid);
        }
        let extended = asks_for(WITH_SEND_OPS);
        let mut plain = ibv_qp_init_attr {
            qp_context: ex.qp_context,
            send_cq: ex.send_cq,
            recv_cq: ex.recv_cq,
            srq: ex.srq,
            cap: ex.cap,
            qp_type: ex.qp_type,
            sq_sig_all: ex.sq_sig_all,
        };
        // SAFETY: the program passes objects of this provider.
        let qp = unsafe { create(ex.pd, &mut plain, extended)? };
        ex.cap = plain.cap;
        Ok(qp)
    })
}

pub(super) unsafe extern "C" fn modify_qp(public: *mut ibv_qp, attr: *mut ibv_qp_attr, mask: c_int) -> c_int {
    verb(|| {
        // SAFETY: libibverbs passes a QP of this provider, and attributes.
        let (qp, attr) = unsafe { (Qp::of(public), &*attr) };
        let mask = QpAttrMask::from_bits(mask as u32).ok_or(VerbsError::Invalid)?;
        let attr: QpAttr = qp_attr::imported(&qp.context, attr, mask)?;
        let mut session = qp.context.engine.lock()?;
        let now = session.now();
        session.modify_qp(now, qp.qpn, &attr, mask)
    })
}

/// Queries all attributes, whatever the mask.
pub(super) unsafe extern "C" fn query_qp(
    public: *mut ibv_qp,
    attr: *mut ibv_qp_attr,
    _: c_int,
    init: *mut ibv_qp_init_attr,
) -> c_int {
    verb(|| {
        // SAFETY: libibverbs passes a QP of this provider.
        let qp = unsafe { Qp::of(public) };
        let (now, made) = qp.context.engine.lock()?.query_qp(qp.qpn)?;
        // SAFETY: the program passes room for both.
        unsafe {
            attr.write(qp_attr::exported(&now));
            init.write(ibv_qp_init_attr {
                qp_context: (*public).qp_context,
                send_cq: (*public).send_cq,
                recv_cq: (*public).recv_cq,
                srq: (*public).srq,
                cap: exported_cap(&qp.cap),
                qp_type: made.qp_type as u32,
                sq_sig_all: made.sq_sig_all.into(),
            });
        }
        Ok(())
    })
}

pub(super) unsafe extern "C" fn destroy_qp(public: *mut ibv_qp) -> c_int {
    verb(|| {
        // SAFETY: libibverbs passes a QP of this provider.
        let qp = unsafe { Qp::of(public) };
        let mut session = qp.context.engine.lock()?;
        let now = session.now();
        session.destroy_qp(now, qp.qpn)?;
        drop(session);
        // SAFETY: the QP lives, and it is of this QP.
        unsafe { qp.context.forget(Object::Qp(qp.qpn), Acknowledged::of_qp(public)) };
        // SAFETY: `create` made it, and nobody uses it any more.
        drop(unsafe { Box::from_raw(public.cast::<Qp>()) });
        Ok(())
    })
}

pub(super) unsafe extern "C" fn attach_mcast(public: *mut ibv_qp, mgid: *const [u8; 16], _lid: u16) -> c_int {
    verb(|| {
        // SAFETY: libibverbs passes a QP of this provider, the program a GID.
        let (qp, mgid) = unsafe { (Qp::of(public), Gid(*mgid)) };
        qp.context.engine.lock()?.attach_multicast(qp.qpn, mgid)
    })
}

pub(super) unsafe extern "C" fn detach_mcast(public: *mut ibv_qp, mgid: *const [u8; 16], _lid: u16) -> c_int {
    verb(|| {
        // SAFETY: as above.
        let (qp, mgid) = unsafe { (Qp::of(public), Gid(*mgid)) };
        qp.context.engine.lock()?.detach_multicast(qp.qpn, mgid)
    })
}
