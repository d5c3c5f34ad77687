//! The table of ops that a context gets.

use std::ffi::c_void;
use std::ptr;

use super::{advise, ah, context, cq, cq_ex, dm, events, mr, mw, pd, post, qp, query, srq, td, xrcd};
use crate::abi::version::Abi;

/// The ops of this provider, by their names in `struct verbs_context_ops`. Those that are missing fail with EOPNOTSUPP.
const OPS: &[(&str, *const c_void)] = &[
    ("advise_mr", advise::advise_mr as *const c_void),
    ("alloc_dm", dm::alloc_dm as *const c_void),
    ("alloc_mw", mw::alloc_mw as *const c_void),
    ("alloc_null_mr", mr::alloc_null_mr as *const c_void),
    ("alloc_parent_domain", pd::alloc_parent_domain as *const c_void),
    ("alloc_pd", pd::alloc_pd as *const c_void),
    ("alloc_td", td::alloc_td as *const c_void),
    ("async_event", events::async_event as *const c_void),
    ("attach_mcast", qp::attach_mcast as *const c_void),
    ("bind_mw", mw::bind_mw as *const c_void),
    ("close_xrcd", xrcd::close_xrcd as *const c_void),
    ("cq_event", cq::cq_event as *const c_void),
    ("create_ah", ah::create_ah as *const c_void),
    ("create_cq", cq::create_cq as *const c_void),
    ("create_cq_ex", cq_ex::create_cq_ex as *const c_void),
    ("create_qp", qp::create_qp as *const c_void),
    ("create_qp_ex", qp::create_qp_ex as *const c_void),
    ("create_srq", srq::create_srq as *const c_void),
    ("create_srq_ex", srq::create_srq_ex as *const c_void),
    ("dealloc_mw", mw::dealloc_mw as *const c_void),
    ("dealloc_pd", pd::dealloc_pd as *const c_void),
    ("dealloc_td", td::dealloc_td as *const c_void),
    ("dereg_mr", mr::dereg_mr as *const c_void),
    ("destroy_ah", ah::destroy_ah as *const c_void),
    ("destroy_cq", cq::destroy_cq as *const c_void),
    ("destroy_qp", qp::destroy_qp as *const c_void),
    ("destroy_srq", srq::destroy_srq as *const c_void),
    ("detach_mcast", qp::detach_mcast as *const c_void),
    ("free_context", context::free_context as *const c_void),
    ("free_dm", dm::free_dm as *const c_void),
    ("get_srq_num", srq::get_srq_num as *const c_void),
    ("modify_cq", cq::modify_cq as *const c_void),
    ("modify_qp", qp::modify_qp as *const c_void),
    ("modify_srq", srq::modify_srq as *const c_void),
    ("open_qp", qp::open_qp as *const c_void),
    ("open_xrcd", xrcd::open_xrcd as *const c_void),
    ("poll_cq", cq::poll_cq as *const c_void),
    ("post_recv", post::post_recv as *const c_void),
    ("post_send", post::post_send as *const c_void),
    ("post_srq_recv", post::post_srq_recv as *const c_void),
    ("query_device_ex", query::query_device_ex as *const c_void),
    ("query_port", query::query_port as *const c_void),
    ("query_port_speed", query::query_port_speed as *const c_void),
    ("query_qp", qp::query_qp as *const c_void),
    ("query_rt_values", query::query_rt_values as *const c_void),
    ("query_srq", srq::query_srq as *const c_void),
    ("reg_dm_mr", mr::reg_dm_mr as *const c_void),
    ("reg_dmabuf_mr", mr::reg_dmabuf_mr as *const c_void),
    ("reg_mr", mr::reg_mr as *const c_void),
    ("reg_mr_ex", mr::reg_mr_ex as *const c_void),
    ("req_notify_cq", cq::req_notify_cq as *const c_void),
    ("rereg_mr", mr::rereg_mr as *const c_void),
    ("resize_cq", cq::resize_cq as *const c_void),
];

/// The `struct verbs_context_ops` of a release.
pub(super) fn table(abi: &Abi) -> Vec<*const c_void> {
    let op = |name| {
        OPS.iter()
            .find(|(own, _)| *own == name)
            .map_or(ptr::null(), |(_, function)| *function)
    };
    abi.ops().map(op).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_op_has_a_place_in_the_newest_release() {
        let newest = Abi::of_release(crate::abi::version::NEWEST).unwrap();
        let table = table(&newest);
        assert_eq!(table.iter().filter(|op| !op.is_null()).count(), OPS.len());
    }

    #[test]
    fn every_op_that_a_release_has_is_in_its_table() {
        for release in crate::abi::version::OLDEST..=crate::abi::version::NEWEST {
            let abi = Abi::of_release(release).unwrap();
            let table = table(&abi);
            assert_eq!(table.len(), abi.ops().count());
            let own = OPS
                .iter()
                .filter(|(name, _)| abi.ops().any(|op| op == *name))
                .count();
            assert_eq!(
                table.iter().filter(|op| !op.is_null()).count(),
                own,
                "release {release}"
            );
        }
    }
}
