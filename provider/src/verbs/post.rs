//! Posting lists of work requests.

use std::ffi::c_int;

use ferroce_engine::runtime::Engine;
use ferroce_engine::verbs::{MwType, Operation, RecvWr, SendFlags, SendWr, Sge, UdDest, VerbsError};

use super::ah::Ah;
use super::mw;
use super::qp::Qp;
use super::srq::Srq;
use super::verb;
use crate::abi::verbs::{ibv_context, ibv_qp, ibv_recv_wr, ibv_send_wr, ibv_srq};

/// `IBV_QPT_UD`.
const UD: u32 = 4;
/// `IBV_QPT_XRC_SEND`.
const XRC_SEND: u32 = 9;

/// The scatter/gather list of a work request. One of more than `max` entries, which no queue takes, is not looked at.
///
/// # Safety
/// `list` must have `count` entries if these are no more than `max`, and live as long as the result.
unsafe fn sges<'a>(list: *const Sge, count: c_int, max: u32) -> Result<&'a [Sge], VerbsError> {
    match usize::try_from(count) {
        Ok(0) => Ok(&[]),
        Ok(count) if !list.is_null() && count <= max as usize => {
            // SAFETY: as the caller says.
            Ok(unsafe { std::slice::from_raw_parts(list, count) })
        }
        _ => Err(VerbsError::Invalid),
    }
}

/// A send work request as the engine takes it. `context` and `qp_type` are those of the QP.
///
/// # Safety
/// What `wr` points to must be what its opcode and the type of QP ask for.
unsafe fn send_wr(
    wr: &ibv_send_wr,
    context: *mut ibv_context,
    qp_type: u32,
    max_sge: u32,
) -> Result<SendWr<'_>, VerbsError> {
    // SAFETY: all members of the union are plain numbers, and the opcode says which is meant.
    let (rdma, atomic) = unsafe { (wr.wr.rdma, wr.wr.atomic) };
    let operation = match wr.opcode {
        0 => Operation::Write {
            addr: rdma.remote_addr,
            rkey: rdma.rkey,
        },
        1 => Operation::WriteImm {
            addr: rdma.remote_addr,
            rkey: rdma.rkey,
            imm: wr.imm_data,
        },
        2 => Operation::Send,
        3 => Operation::SendImm(wr.imm_data),
        4 => Operation::Read {
            addr: rdma.remote_addr,
            rkey: rdma.rkey,
        },
        5 => Operation::CompareSwap {
            addr: atomic.remote_addr,
            rkey: atomic.rkey,
            compare: atomic.compare_add,
            swap: atomic.swap,
        },
        6 => Operation::FetchAdd {
            addr: atomic.remote_addr,
            rkey: atomic.rkey,
            add: atomic.compare_add,
        },
        7 => Operation::LocalInvalidate(wr.imm_data),
        8 => {
            let bind = &wr.bind_mw;
            // SAFETY: as the caller says.
            unsafe { mw::bind(context, bind.mw, MwType::Type2, bind.rkey, &bind.bind_info)? }
        }
        9 => Operation::SendInv(wr.imm_data),
        15 => Operation::AtomicWrite {
            addr: rdma.remote_addr,
            rkey: rdma.rkey,
        },
        _ => return Err(VerbsError::Invalid),
    };
    let ud = match qp_type {
        UD if !operation.is_local() => {
            // SAFETY: on a UD QP this member is meant, with an address handle of this provider.
            let (ud, path) = unsafe { (wr.wr.ud, Ah::path(wr.wr.ud.ah)?) };
            Some(UdDest {
                path,
                qpn: ud.remote_qpn,
                qkey: ud.remote_qkey,
            })
        }
        _ => None,
    };
    Ok(SendWr {
        wr_id: wr.wr_id,
        operation,
        flags: SendFlags::from_bits_truncate(wr.send_flags),
        sges: if operation.is_local() {
            &[]
        } else {
            // SAFETY: as the caller says.
            unsafe { sges(wr.sg_list, wr.num_sge, max_sge)? }
        },
        ud,
        srqn: if qp_type == XRC_SEND { wr.remote_srqn } else { 0 },
    })
}

/// Posts a list of sends under one lock. `bad` is set to the first that fails; those before it are posted.
pub(super) unsafe extern "C" fn post_send(
    public: *mut ibv_qp,
    mut wr: *mut ibv_send_wr,
    bad: *mut *mut ibv_send_wr,
) -> c_int {
    verb(|| {
        // SAFETY: the program passes a QP of this provider.
        let (qp, context, qp_type) = unsafe { (Qp::of(public), (*public).context, (*public).qp_type) };
        let posted = (|| {
            let engine = &qp.context.engine;
            let max_sge = engine.limits().max_sge;
            let mut session = engine.lock()?;
            let now = session.now();
            // SAFETY: the program passes a list of work requests that fit the QP.
            while let Some(request) = unsafe { wr.as_ref() } {
                // SAFETY: as above.
                session.post_send(now, qp.qpn, &unsafe {
                    send_wr(request, context, qp_type, max_sge)?
                })?;
                wr = request.next;
            }
            Ok(())
        })();
        if posted.is_err() {
            // SAFETY: the program passes room for it.
            unsafe { bad.write(wr) };
        }
        posted
    })
}

/// Posts a list of receives by `post`, under one lock. `bad` as for sends.
///
/// # Safety
/// `wr` must be a list of receives, and `bad` have room for a pointer.
unsafe fn post_receives(
    engine: &Engine,
    mut wr: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
    post: impl Fn(&mut ferroce_engine::device::Device, &RecvWr<'_>) -> Result<(), VerbsError>,
) -> Result<(), VerbsError> {
    let posted = (|| {
        let mut session = engine.lock()?;
        // SAFETY: as the caller says.
        while let Some(request) = unsafe { wr.as_ref() } {
            // SAFETY: as the caller says.
            let sges = unsafe { sges(request.sg_list, request.num_sge, engine.limits().max_sge)? };
            post(
                &mut session,
                &RecvWr {
                    wr_id: request.wr_id,
                    sges,
                },
            )?;
            wr = request.next;
        }
        Ok(())
    })();
    if posted.is_err() {
        // SAFETY: as the caller says.
        unsafe { bad.write(wr) };
    }
    posted
}

pub(super) unsafe extern "C" fn post_recv(
    public: *mut ibv_qp,
    wr: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    verb(|| {
        // SAFETY: the program passes a QP of this provider.
        let qp = unsafe { Qp::of(public) };
        // SAFETY: the program passes a list of receives.
        unsafe {
            post_receives(&qp.context.engine, wr, bad, |device, wr| {
                device.post_recv(qp.qpn, wr)
            })
        }
    })
}

pub(super) unsafe extern "C" fn post_srq_recv(
    public: *mut ibv_srq,
    wr: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    verb(|| {
        // SAFETY: the program passes an SRQ of this provider.
        let srq = unsafe { Srq::of(public) };
        // SAFETY: the program passes a list of receives.
        unsafe {
            post_receives(&srq.context.engine, wr, bad, |device, wr| {
                device.post_srq_recv(srq.id, wr)
            })
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_with_a_wrong_count_is_not_looked_at() {
        let list = [Sge::default(); 2];
        let count = |list, count| {
            // SAFETY: the array has two entries, which is the maximum here.
            unsafe { sges(list, count, 2) }.map(<[Sge]>::len)
        };
        assert_eq!(count(list.as_ptr(), 2), Ok(2));
        assert_eq!(count(std::ptr::null(), 0), Ok(0));
        for (list, n) in [
            (list.as_ptr(), 3),
            (list.as_ptr(), c_int::MAX),
            (list.as_ptr(), -1),
            (std::ptr::null(), 1),
        ] {
            assert_eq!(count(list, n), Err(VerbsError::Invalid));
        }
    }
}
