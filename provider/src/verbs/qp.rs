//! Queue pairs: made, changed, queried and destroyed.

use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::Arc;

use ferroce_engine::device::{QpInit, XrcdId};
use ferroce_engine::verbs::{QpAttr, QpAttrMask, QpCap, QpType, VerbsError};
use ferroce_wire::Gid;

use super::context::Context;
use super::cq::Cq;
use super::events::{Acknowledged, Object, Public};
use super::pd::Pd;
use super::place::{self, Place, Resource};
use super::qp_attr;
use super::qp_ex::{self, Builder};
use super::srq::Srq;
use super::uses::Use;
use super::xrcd::Xrcd;
use super::{make, next_handle, verb};
use crate::abi::private::VERBS_QP_EX;
use crate::abi::verbs::{
    ibv_context, ibv_cq, ibv_pd, ibv_qp, ibv_qp_attr, ibv_qp_cap, ibv_qp_ex, ibv_qp_init_attr,
    ibv_qp_init_attr_ex, ibv_qp_open_attr, ibv_srq, ibv_xrcd,
};

/// `IBV_QP_INIT_ATTR_PD`.
const WITH_PD: u32 = 1;
/// `IBV_QP_INIT_ATTR_XRCD`.
const WITH_XRCD: u32 = 1 << 1;
/// `IBV_QP_INIT_ATTR_CREATE_FLAGS`.
const WITH_CREATE_FLAGS: u32 = 1 << 2;
/// `IBV_QP_INIT_ATTR_SEND_OPS_FLAGS`.
const WITH_SEND_OPS: u32 = 1 << 6;
/// `IBV_QP_OPEN_ATTR_NUM`, `IBV_QP_OPEN_ATTR_XRCD` and `IBV_QP_OPEN_ATTR_TYPE`.
const OPEN_BY: u32 = 1 << 0 | 1 << 1 | 1 << 3;
/// `IBV_QP_OPEN_ATTR_CONTEXT`.
const OPEN_CONTEXT: u32 = 1 << 2;
/// Words of the largest `struct verbs_qp`: `struct ibv_qp_ex`, `comp_mask` and a pointer.
const VERBS_QP: usize = size_of::<ibv_qp_ex>() / 8 + 2;

/// A queue pair; begins as `struct verbs_qp`, whose layout differs by release.
#[repr(C)]
pub struct Qp {
    public: Public<[u64; VERBS_QP]>,
    pub(super) context: Arc<Context>,
    pub(super) qpn: u32,
    pub(super) cap: QpCap,
    /// The domain with which an XRC target was made or opened.
    xrcd: Option<XrcdId>,
    /// What the functions of `ibv_qp_ex` build, if it has them.
    pub(super) builder: Builder,
    _domain: Option<Use>,
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

/// What the program names for a QP, beside what every way to make one has.
struct Wanted<'a> {
    context: *mut ibv_context,
    /// Null, if there is none.
    pd: *mut ibv_pd,
    /// Null, if there is none.
    xrcd: *mut ibv_xrcd,
    attr: &'a mut ibv_qp_init_attr,
    /// It has the functions of `ibv_qp_ex`.
    extended: bool,
}

/// Makes a QP; stores the sizes granted in the attributes.
///
/// # Safety
/// The objects that are named must be of this provider.
unsafe fn create(wanted: Wanted<'_>) -> Result<*mut ibv_qp, VerbsError> {
    let attr = wanted.attr;
    let qp_type = QpType::from_number(attr.qp_type).ok_or(VerbsError::NotSupported)?;
    let (sends, receives) = match qp_type {
        QpType::Rc | QpType::Uc | QpType::Ud => (true, true),
        QpType::XrcSend => (true, false),
        QpType::XrcRecv => (false, false),
    };
    // What the type has no use for is not looked at. The PD is shown all the same, as librdmacm takes it from there.
    let public = Named {
        pd: wanted.pd,
        send_cq: if sends { attr.send_cq } else { ptr::null_mut() },
        recv_cq: if receives { attr.recv_cq } else { ptr::null_mut() },
        srq: if receives { attr.srq } else { ptr::null_mut() },
    };
    // SAFETY: as the caller says.
    let context = unsafe { Context::of(wanted.context) };
    // SAFETY: as the caller says.
    let pd = sends
        .then(|| unsafe { Pd::in_context(public.pd, &context) })
        .transpose()?;
    let place = Place::find(pd, Resource::Qp)?;
    // SAFETY: as the caller says.
    let init = unsafe {
        QpInit {
            pd: pd.map(|pd| pd.id),
            qp_type,
            cap: cap_of(&attr.cap),
            send_cq: sends.then(|| Cq::queue(public.send_cq, &context)).transpose()?,
            recv_cq: receives
                .then(|| Cq::queue(public.recv_cq, &context))
                .transpose()?,
            srq: Srq::id(public.srq, &context)?,
            xrcd: (!sends).then(|| Xrcd::id(wanted.xrcd, &context)).transpose()?,
            sq_sig_all: attr.sq_sig_all != 0,
        }
    };
    let xrcd = init.xrcd;
    let (qpn, cap) = context.engine.lock()?.create_qp(init)?;
    attr.cap = exported_cap(&cap);
    let qp = Made {
        place,
        domain: pd.map(Pd::enter),
        context,
        public_context: wanted.context,
        qp_context: attr.qp_context,
        named: public,
        qpn,
        qp_type,
        cap,
        xrcd,
        extended: wanted.extended,
    };
    Ok(qp.export())
}

/// The objects that a public QP names.
struct Named {
    pd: *mut ibv_pd,
    send_cq: *mut ibv_cq,
    recv_cq: *mut ibv_cq,
    srq: *mut ibv_srq,
}

/// A QP of the engine, for which the program has no handle yet.
struct Made {
    place: Place<Qp>,
    domain: Option<Use>,
    context: Arc<Context>,
    public_context: *mut ibv_context,
    qp_context: *mut c_void,
    named: Named,
    qpn: u32,
    qp_type: QpType,
    cap: QpCap,
    xrcd: Option<XrcdId>,
    extended: bool,
}

impl Made {
    /// The handle.
    fn export(self) -> *mut ibv_qp {
        let (context, abi) = (self.context.clone(), self.context.abi);
        let qp = self.place.put(Qp {
            // SAFETY: zeros are null pointers and numbers.
            public: unsafe { Public::zeroed() },
            context: self.context,
            qpn: self.qpn,
            cap: self.cap,
            xrcd: self.xrcd,
            builder: Builder::default(),
            _domain: self.domain,
        });
        // SAFETY: nobody else has it yet, and the structure of every release fits. A mutex and a condition variable of
        // zeros are initialised ones; some releases initialise them again.
        unsafe {
            let public = (*qp).public.get().cast::<ibv_qp>();
            if self.extended {
                let functions = &raw const qp_ex::FUNCTIONS;
                ptr::copy_nonoverlapping(functions.cast::<u8>(), public.cast::<u8>(), abi.qp_ex);
                public.byte_add(abi.qp_ex).cast::<u32>().write(VERBS_QP_EX);
            }
            (*public).context = self.public_context;
            (*public).qp_context = self.qp_context;
            (*public).pd = self.named.pd;
            (*public).send_cq = self.named.send_cq;
            (*public).recv_cq = self.named.recv_cq;
            (*public).srq = self.named.srq;
            (*public).handle = next_handle();
            (*public).qp_num = self.qpn;
            (*public).qp_type = self.qp_type as u32;
        }
        // Only now may events name it: a target that is opened once more can have one at any time.
        context.objects.insert(Object::Qp(self.qpn), qp as u64);
        qp.cast()
    }
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
    make(|| unsafe {
        create(Wanted {
            context: (*pd).context,
            pd,
            xrcd: ptr::null_mut(),
            attr: &mut *attr,
            extended: false,
        })
    })
}

pub(super) unsafe extern "C" fn create_qp_ex(
    context: *mut ibv_context,
    attr: *mut ibv_qp_init_attr_ex,
) -> *mut ibv_qp {
    make(|| {
        // SAFETY: the program passes attributes.
        let ex = unsafe { &mut *attr };
        let asks_for = |bit| ex.comp_mask & bit != 0;
        if ex.comp_mask & !(WITH_PD | WITH_XRCD | WITH_CREATE_FLAGS | WITH_SEND_OPS) != 0
            || asks_for(WITH_CREATE_FLAGS) && ex.create_flags != 0
            || asks_for(WITH_SEND_OPS) && ex.send_ops_flags & !qp_ex::send_ops(ex.qp_type) != 0
        {
            return Err(VerbsError::NotSupported);
        }
        let pd = if asks_for(WITH_PD) { ex.pd } else { ptr::null_mut() };
        let xrcd = if asks_for(WITH_XRCD) {
            ex.xrcd
        } else {
            ptr::null_mut()
        };
        let extended = asks_for(WITH_SEND_OPS);
        let mut cap = ex.cap;
        if extended && ex.send_ops_flags & qp_ex::ATOMIC_WRITE != 0 {
            // The word is inline data.
            cap.max_inline_data = cap.max_inline_data.max(qp_ex::WORD);
        }
        let mut plain = ibv_qp_init_attr {
            qp_context: ex.qp_context,
            send_cq: ex.send_cq,
            recv_cq: ex.recv_cq,
            srq: ex.srq,
            cap,
            qp_type: ex.qp_type,
            sq_sig_all: ex.sq_sig_all,
        };
        let wanted = Wanted {
            context,
            pd,
            xrcd,
            attr: &mut plain,
            extended,
        };
        // SAFETY: the program passes objects of this provider.
        let qp = unsafe { create(wanted)? };
        ex.cap = plain.cap;
        Ok(qp)
    })
}

/// A further handle of an XRC target QP: it ends with the last of them.
pub(super) unsafe extern "C" fn open_qp(
    public_context: *mut ibv_context,
    attr: *mut ibv_qp_open_attr,
) -> *mut ibv_qp {
    make(|| {
        // SAFETY: the program passes attributes.
        let attr = unsafe { &*attr };
        if attr.comp_mask & !(OPEN_BY | OPEN_CONTEXT) != 0 {
            return Err(VerbsError::NotSupported);
        }
        if attr.comp_mask & OPEN_BY != OPEN_BY || attr.qp_type != QpType::XrcRecv as u32 {
            return Err(VerbsError::Invalid);
        }
        // SAFETY: the program passes a domain of this provider, libibverbs an open context.
        let context = unsafe { Context::of(public_context) };
        // SAFETY: as above.
        let xrcd = unsafe { Xrcd::id(attr.xrcd, &context)? };
        let place = Place::find(None, Resource::Qp)?;
        let (qpn, now) = (attr.qp_num, {
            let mut session = context.engine.lock()?;
            session.open_qp(xrcd, attr.qp_num)?;
            session.query_qp(attr.qp_num)?.0
        });
        let none = Named {
            pd: ptr::null_mut(),
            send_cq: ptr::null_mut(),
            recv_cq: ptr::null_mut(),
            srq: ptr::null_mut(),
        };
        let qp = Made {
            place,
            domain: None,
            context,
            public_context,
            qp_context: match attr.comp_mask & OPEN_CONTEXT {
                0 => ptr::null_mut(),
                _ => attr.qp_context,
            },
            named: none,
            qpn,
            qp_type: QpType::XrcRecv,
            cap: now.cap,
            xrcd: Some(xrcd),
            extended: false,
        };
        let public = qp.export();
        // SAFETY: nobody else has it yet.
        unsafe { (*public).state = now.state as u32 };
        Ok(public)
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
        match qp.xrcd {
            None => session.destroy_qp(now, qp.qpn)?,
            Some(xrcd) => session.close_qp(now, qp.qpn, xrcd)?,
        }
        drop(session);
        // SAFETY: the QP lives, and it is of this QP.
        unsafe {
            qp.context
                .forget(Object::Qp(qp.qpn), public as u64, Acknowledged::of_qp(public))
        };
        // SAFETY: `create` made it, and nobody uses it any more.
        unsafe { place::remove(public.cast::<Qp>()) };
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
