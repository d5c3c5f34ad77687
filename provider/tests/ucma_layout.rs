//! Compares the structures of `ucma::layout` with the installed `rdma/rdma_user_cm.h` and `infiniband/ib.h`, by a C
//! program.

mod c;

use std::mem::{offset_of, size_of};

use ferroce_provider::ucma::layout::*;

use c::{Check, ask_c, checks, compare};

fn all() -> Vec<Check> {
    checks! {
        rdma_ucm_cmd_hdr { cmd, in_ = "in", out }
        rdma_ucm_create_id { uid, response, ps, qp_type }
        rdma_ucm_create_id_resp { id }
        rdma_ucm_destroy_id { response, id }
        rdma_ucm_destroy_id_resp { events_reported }
        rdma_ucm_bind_ip { response, addr, id }
        rdma_ucm_bind { id, addr_size, reserved, addr }
        rdma_ucm_resolve_ip { src_addr, dst_addr, id, timeout_ms }
        rdma_ucm_resolve_addr { id, timeout_ms, src_size, dst_size, reserved, src_addr, dst_addr }
        rdma_ucm_resolve_route { id, timeout_ms }
        rdma_ucm_query { response, id, option }
        ib_user_path_rec {
            dgid, sgid, dlid, slid, raw_traffic, flow_label, reversible, mtu, pkey, hop_limit, traffic_class, numb_path,
            sl, mtu_selector, rate_selector, rate, packet_life_time_selector, packet_life_time, preference,
        }
        rdma_ucm_query_route_resp { node_guid, ib_route, src_addr, dst_addr, num_paths, port_num, ibdev_index }
        rdma_ucm_query_addr_resp {
            node_guid, port_num, pkey, src_size, dst_size, src_addr, dst_addr, ibdev_index,
        }
        rdma_ucm_query_path_resp { num_paths }
        ib_path_rec_data { flags, path_rec }
        rdma_ucm_conn_param {
            qp_num, qkey, private_data, private_data_len, srq, responder_resources, initiator_depth, flow_control,
            retry_count, rnr_retry_count, valid,
        }
        ib_uverbs_global_route { dgid, flow_label, sgid_index, hop_limit, traffic_class }
        ib_uverbs_ah_attr { grh, dlid, sl, src_path_bits, static_rate, is_global, port_num }
        rdma_ucm_ud_param { qp_num, qkey, ah_attr, private_data, private_data_len }
        rdma_ucm_ece { vendor_id, attr_mod }
        rdma_ucm_connect { conn_param, id, reserved, ece }
        rdma_ucm_listen { id, backlog }
        rdma_ucm_accept { uid, conn_param, id, reserved, ece }
        rdma_ucm_reject { id, private_data_len, reason, private_data }
        rdma_ucm_disconnect { id }
        rdma_ucm_init_qp_attr { response, id, qp_state }
        ib_uverbs_qp_attr {
            qp_attr_mask, qp_state, cur_qp_state, path_mtu, path_mig_state, qkey, rq_psn, sq_psn, dest_qp_num,
            qp_access_flags, ah_attr, alt_ah_attr, max_send_wr, max_recv_wr, max_send_sge, max_recv_sge,
            max_inline_data, pkey_index, alt_pkey_index, en_sqd_async_notify, sq_draining, max_rd_atomic,
            max_dest_rd_atomic, min_rnr_timer, port_num, timeout, retry_cnt, rnr_retry, alt_port_num, alt_timeout,
        }
        rdma_ucm_notify { id, event }
        rdma_ucm_join_ip_mcast { response, uid, addr, id }
        rdma_ucm_join_mcast { response, uid, id, addr_size, join_flags, addr }
        rdma_ucm_get_event { response }
        rdma_ucm_event_resp { uid, id, event, status, param, reserved, ece }
        rdma_ucm_set_option { optval, id, level, optname, optlen }
        rdma_ucm_migrate_id { response, id, fd }
        rdma_ucm_migrate_resp { events_reported }
    }
}

#[test]
fn structures_are_laid_out_as_in_the_installed_header() {
    compare("ucma-structures", "rdma/rdma_user_cm.h", &all());
}

#[test]
fn addresses_are_laid_out_as_in_the_installed_header() {
    let addresses = checks! {
        sockaddr_ib {
            family = "sib_family", pkey = "sib_pkey", flow_info = "sib_flowinfo", addr = "sib_addr", sid = "sib_sid",
            sid_mask = "sib_sid_mask", scope_id = "sib_scope_id",
        }
    };
    compare("ucma-addresses", "infiniband/ib.h", &addresses);
    let addresses = checks! {
        sockaddr_in6 {
            family = "sin6_family", port = "sin6_port", flow_info = "sin6_flowinfo", addr = "sin6_addr",
            scope_id = "sin6_scope_id",
        }
    };
    compare("ucma-ip-addresses", "netinet/in.h", &addresses);
}

#[test]
fn commands_have_their_numbers() {
    let names = [
        ("CREATE_ID", cmd::CREATE_ID),
        ("DESTROY_ID", cmd::DESTROY_ID),
        ("BIND_IP", cmd::BIND_IP),
        ("RESOLVE_IP", cmd::RESOLVE_IP),
        ("RESOLVE_ROUTE", cmd::RESOLVE_ROUTE),
        ("QUERY_ROUTE", cmd::QUERY_ROUTE),
        ("CONNECT", cmd::CONNECT),
        ("LISTEN", cmd::LISTEN),
        ("ACCEPT", cmd::ACCEPT),
        ("REJECT", cmd::REJECT),
        ("DISCONNECT", cmd::DISCONNECT),
        ("INIT_QP_ATTR", cmd::INIT_QP_ATTR),
        ("GET_EVENT", cmd::GET_EVENT),
        ("GET_OPTION", cmd::GET_OPTION),
        ("SET_OPTION", cmd::SET_OPTION),
        ("NOTIFY", cmd::NOTIFY),
        ("JOIN_IP_MCAST", cmd::JOIN_IP_MCAST),
        ("LEAVE_MCAST", cmd::LEAVE_MCAST),
        ("MIGRATE_ID", cmd::MIGRATE_ID),
        ("QUERY", cmd::QUERY),
        ("BIND", cmd::BIND),
        ("RESOLVE_ADDR", cmd::RESOLVE_ADDR),
        ("JOIN_MCAST", cmd::JOIN_MCAST),
    ];
    let expressions: Vec<_> = names
        .iter()
        .map(|(name, _)| format!("RDMA_USER_CM_CMD_{name}"))
        .collect();
    let expressions: Vec<_> = expressions.iter().map(String::as_str).collect();
    let theirs = ask_c("ucma-commands", "rdma/rdma_user_cm.h", &expressions);
    let ours: Vec<_> = names.iter().map(|(_, number)| *number as usize).collect();
    assert_eq!(ours, theirs);
}
