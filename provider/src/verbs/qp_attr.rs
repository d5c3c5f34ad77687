//! The attributes of a queue pair, between `struct ibv_qp_attr` and the engine.

use ferroce_engine::verbs::{Access, MigState, QpAttr, QpAttrMask, QpState, VerbsError};

use super::ah;
use super::context::Context;
use super::qp::exported_cap;
use crate::abi::verbs::{ibv_qp_attr, ibv_qp_cap};

/// The attributes that `mask` names. EINVAL if one of them is none that exists.
pub(super) fn imported(
    context: &Context,
    attr: &ibv_qp_attr,
    mask: QpAttrMask,
) -> Result<QpAttr, VerbsError> {
    let state = |bit, number| match mask.contains(bit) {
        true => QpState::from_number(number).ok_or(VerbsError::Invalid),
        false => Ok(QpState::Reset),
    };
    let path_mig_state = match mask.contains(QpAttrMask::PATH_MIG_STATE) {
        true => MigState::from_number(attr.path_mig_state).ok_or(VerbsError::Invalid)?,
        false => MigState::default(),
    };
    let path = match mask.contains(QpAttrMask::AV) {
        true => Some(ah::resolve(context, &attr.ah_attr)?),
        false => None,
    };
    Ok(QpAttr {
        state: state(QpAttrMask::STATE, attr.qp_state)?,
        cur_state: state(QpAttrMask::CUR_STATE, attr.cur_qp_state)?,
        path_mtu: attr.path_mtu,
        qkey: attr.qkey,
        rq_psn: attr.rq_psn,
        sq_psn: attr.sq_psn,
        dest_qpn: attr.dest_qp_num,
        access: Access::from_bits_truncate(attr.qp_access_flags),
        path,
        pkey_index: attr.pkey_index,
        sqd_async_notify: attr.en_sqd_async_notify != 0,
        max_rd_atomic: attr.max_rd_atomic,
        max_dest_rd_atomic: attr.max_dest_rd_atomic,
        min_rnr_timer: attr.min_rnr_timer,
        port: attr.port_num,
        timeout: attr.timeout,
        retry_cnt: attr.retry_cnt,
        rnr_retry: attr.rnr_retry,
        path_mig_state,
        ..QpAttr::default()
    })
}

/// The attributes as the program sees them.
pub(super) fn exported(attr: &QpAttr) -> ibv_qp_attr {
    let cap: ibv_qp_cap = exported_cap(&attr.cap);
    ibv_qp_attr {
        qp_state: attr.state as u32,
        cur_qp_state: attr.cur_state as u32,
        path_mtu: attr.path_mtu,
        path_mig_state: attr.path_mig_state as u32,
        qkey: attr.qkey,
        rq_psn: attr.rq_psn,
        sq_psn: attr.sq_psn,
        dest_qp_num: attr.dest_qpn,
        qp_access_flags: attr.access.bits(),
        cap,
        ah_attr: attr.path.as_ref().map_or(ah::NOWHERE, ah::attr_of),
        alt_ah_attr: ah::NOWHERE,
        pkey_index: attr.pkey_index,
        alt_pkey_index: 0,
        en_sqd_async_notify: attr.sqd_async_notify.into(),
        sq_draining: attr.sq_draining.into(),
        max_rd_atomic: attr.max_rd_atomic,
        max_dest_rd_atomic: attr.max_dest_rd_atomic,
        min_rnr_timer: attr.min_rnr_timer,
        port_num: attr.port,
        timeout: attr.timeout,
        retry_cnt: attr.retry_cnt,
        rnr_retry: attr.rnr_retry,
        alt_port_num: 0,
        alt_timeout: 0,
        rate_limit: 0, // for raw packets only
    }
}
