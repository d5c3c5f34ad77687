//! Compares every structure of `abi::verbs` with the installed `infiniband/verbs.h`, by a C program.

mod c;

use std::mem::{offset_of, size_of};

use ferroce_engine::verbs::Sge;
use ferroce_provider::abi::verbs::*;

use c::{Check, ask_c, checks, compare};

fn all() -> Vec<Check> {
    checks! {
        ibv_device { _ops, node_type, transport_type, name, dev_name, dev_path, ibdev_path }
        ibv_context { device, ops, cmd_fd, async_fd, num_comp_vectors, mutex, abi_compat }
        ibv_gid_entry { gid, gid_index, port_num, gid_type, ndev_ifindex }
        ibv_device_attr {
            fw_ver, node_guid, sys_image_guid, max_mr_size, page_size_cap, vendor_id, vendor_part_id, hw_ver, max_qp,
            max_qp_wr, device_cap_flags, max_sge, max_sge_rd, max_cq, max_cqe, max_mr, max_pd, max_qp_rd_atom,
            max_ee_rd_atom, max_res_rd_atom, max_qp_init_rd_atom, max_ee_init_rd_atom, atomic_cap, max_ee, max_rdd,
            max_mw, max_raw_ipv6_qp, max_raw_ethy_qp, max_mcast_grp, max_mcast_qp_attach, max_total_mcast_qp_attach,
            max_ah, max_fmr, max_map_per_fmr, max_srq, max_srq_wr, max_srq_sge, max_pkeys, local_ca_ack_delay,
            phys_port_cnt,
        }
        ibv_xrcd { context }
        ibv_xrcd_init_attr { comp_mask, fd, oflags }
        ibv_qp_open_attr { comp_mask, qp_num, xrcd, qp_context, qp_type }
        ibv_query_device_ex_input { comp_mask }
        ibv_odp_caps { general_caps, rc_odp_caps = "per_transport_caps" }
        ibv_tso_caps { max_tso, supported_qpts }
        ibv_rss_caps { supported_qpts, max_rwq_indirection_tables, rx_hash_fields_mask, rx_hash_function }
        ibv_packet_pacing_caps { qp_rate_limit_min, qp_rate_limit_max, supported_qpts }
        ibv_tm_caps { max_rndv_hdr_size, max_sge }
        ibv_cq_moderation_caps { max_cq_count, max_cq_period }
        ibv_moderate_cq { cq_count, cq_period }
        ibv_modify_cq_attr { attr_mask, moderate }
        ibv_pci_atomic_caps { fetch_add, swap, compare_swap }
        ibv_device_attr_ex {
            orig_attr, comp_mask, odp_caps, completion_timestamp_mask, hca_core_clock, device_cap_flags_ex, tso_caps,
            rss_caps, max_wq_type_rq, packet_pacing_caps, raw_packet_caps, tm_caps, cq_mod_caps, max_dm_size,
            pci_atomic_caps, xrc_odp_caps, phys_port_cnt_ex,
        }
        ibv_port_attr (grown) {
            state, max_mtu, active_mtu, gid_tbl_len, port_cap_flags, max_msg_sz, bad_pkey_cntr, qkey_viol_cntr,
            pkey_tbl_len, lid, sm_lid, lmc, max_vl_num, sm_sl, subnet_timeout, init_type_reply, active_width,
            active_speed, phys_state, link_layer, flags, port_cap_flags2,
        }
        ibv_values_ex { comp_mask, raw_clock }
        ibv_pd { context, handle }
        ibv_mr { context, pd, addr, length, handle, lkey, rkey }
        ibv_mw { context, pd, rkey, handle, mw_type = "type" }
        ibv_mw_bind_info { mr, addr, length, mw_access_flags }
        ibv_mw_bind { wr_id, send_flags, bind_info }
        ibv_td_init_attr { comp_mask }
        ibv_td { context }
        ibv_parent_domain_init_attr { pd, td, comp_mask, alloc, free, pd_context }
        ibv_alloc_dm_attr { length, log_align_req, comp_mask }
        ibv_dm { context, memcpy_to_dm, memcpy_from_dm, comp_mask, handle }
        ibv_comp_channel { context, fd, refcnt }
        ibv_cq {
            context, channel, cq_context, handle, cqe, mutex, cond, comp_events_completed, async_events_completed,
        }
        ibv_poll_cq_attr { comp_mask }
        ibv_wc_tm_info { tag, priv_ = "priv" }
        ibv_cq_ex {
            base = "context", comp_mask, status, wr_id, start_poll, next_poll, end_poll, read_opcode, read_vendor_err,
            read_byte_len, read_imm_data, read_qp_num, read_src_qp, read_wc_flags, read_slid, read_sl,
            read_dlid_path_bits, read_completion_ts, read_cvlan, read_flow_tag, read_tm_info,
            read_completion_wallclock_ns,
        }
        ibv_cq_init_attr_ex {
            cqe, cq_context, channel, comp_vector, wc_flags, comp_mask, flags, parent_domain,
        }
        ibv_wc {
            wr_id, status, opcode, vendor_err, byte_len, imm_data, qp_num, src_qp, wc_flags, pkey_index, slid, sl,
            dlid_path_bits,
        }
        ibv_global_route { dgid, flow_label, sgid_index, hop_limit, traffic_class }
        ibv_ah_attr { grh, dlid, sl, src_path_bits, static_rate, is_global, port_num }
        ibv_ah { context, pd, handle }
        ibv_srq_attr { max_wr, max_sge, srq_limit }
        ibv_srq_init_attr { srq_context, attr }
        ibv_srq_init_attr_ex { srq_context, attr, comp_mask, srq_type, pd, xrcd, cq, tm_cap }
        ibv_srq { context, srq_context, pd, handle, mutex, cond, events_completed }
        ibv_qp_cap { max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data }
        ibv_qp_init_attr { qp_context, send_cq, recv_cq, srq, cap, qp_type, sq_sig_all }
        ibv_rx_hash_conf { rx_hash_function, rx_hash_key_len, rx_hash_key, rx_hash_fields_mask }
        ibv_qp_init_attr_ex {
            qp_context, send_cq, recv_cq, srq, cap, qp_type, sq_sig_all, comp_mask, pd, xrcd, create_flags,
            max_tso_header, rwq_ind_tbl, rx_hash_conf, source_qpn, send_ops_flags,
        }
        ibv_qp_attr {
            qp_state, cur_qp_state, path_mtu, path_mig_state, qkey, rq_psn, sq_psn, dest_qp_num, qp_access_flags, cap,
            ah_attr, alt_ah_attr, pkey_index, alt_pkey_index, en_sqd_async_notify, sq_draining, max_rd_atomic,
            max_dest_rd_atomic, min_rnr_timer, port_num, timeout, retry_cnt, rnr_retry, alt_port_num, alt_timeout,
            rate_limit,
        }
        ibv_qp {
            context, qp_context, pd, send_cq, recv_cq, srq, handle, qp_num, state, qp_type, mutex, cond,
            events_completed,
        }
        ibv_data_buf { addr, length }
        ibv_qp_ex (grown) {
            qp_base, comp_mask, wr_id, wr_flags, wr_atomic_cmp_swp, wr_atomic_fetch_add, wr_bind_mw, wr_local_inv,
            wr_rdma_read, wr_rdma_write, wr_rdma_write_imm, wr_send, wr_send_imm, wr_send_inv, wr_send_tso,
            wr_set_ud_addr, wr_set_xrc_srqn, wr_set_inline_data, wr_set_inline_data_list, wr_set_sge, wr_set_sge_list,
            wr_start, wr_complete, wr_abort,
        }
        Sge { addr, length, lkey }
        ibv_send_wr {
            wr_id, next, sg_list, num_sge, opcode, send_flags, imm_data, wr, remote_srqn = "qp_type", bind_mw,
        }
        ibv_recv_wr { wr_id, next, sg_list, num_sge }
    }
}

/// Members of the nested structures of `ibv_send_wr`.
fn nested() -> Vec<Check> {
    let check = |expression: &str, ours| Check {
        expression: expression.to_owned(),
        ours,
    };
    let wr = offset_of!(ibv_send_wr, wr);
    let bind_mw = offset_of!(ibv_send_wr, bind_mw);
    vec![
        check(
            "offsetof(struct ibv_send_wr, wr.rdma.remote_addr)",
            wr + offset_of!(ibv_wr_rdma, remote_addr),
        ),
        check(
            "offsetof(struct ibv_send_wr, wr.rdma.rkey)",
            wr + offset_of!(ibv_wr_rdma, rkey),
        ),
        check(
            "offsetof(struct ibv_send_wr, wr.atomic.remote_addr)",
            wr + offset_of!(ibv_wr_atomic, remote_addr),
        ),
        check(
            "offsetof(struct ibv_send_wr, wr.atomic.compare_add)",
            wr + offset_of!(ibv_wr_atomic, compare_add),
        ),
        check(
            "offsetof(struct ibv_send_wr, wr.atomic.swap)",
            wr + offset_of!(ibv_wr_atomic, swap),
        ),
        check(
            "offsetof(struct ibv_send_wr, wr.atomic.rkey)",
            wr + offset_of!(ibv_wr_atomic, rkey),
        ),
        check(
            "offsetof(struct ibv_send_wr, wr.ud.ah)",
            wr + offset_of!(ibv_wr_ud, ah),
        ),
        check(
            "offsetof(struct ibv_send_wr, wr.ud.remote_qpn)",
            wr + offset_of!(ibv_wr_ud, remote_qpn),
        ),
        check(
            "offsetof(struct ibv_send_wr, wr.ud.remote_qkey)",
            wr + offset_of!(ibv_wr_ud, remote_qkey),
        ),
        check(
            "offsetof(struct ibv_send_wr, bind_mw.rkey)",
            bind_mw + offset_of!(ibv_wr_bind_mw, rkey),
        ),
        check(
            "offsetof(struct ibv_send_wr, bind_mw.bind_info)",
            bind_mw + offset_of!(ibv_wr_bind_mw, bind_info),
        ),
    ]
}

#[test]
fn structures_are_laid_out_as_in_the_installed_header() {
    let mut checks = all();
    checks.extend(nested());
    compare("structures", "infiniband/verbs.h", &checks);
}

#[test]
fn the_version_table_agrees_with_the_installed_header() {
    let theirs = ask_c(
        "versions",
        "infiniband/verbs.h",
        &[
            "sizeof(struct verbs_context)",
            "offsetof(struct verbs_context, context)",
            "sizeof(struct ibv_qp_ex)",
            "sizeof(struct ibv_port_attr)",
        ],
    );
    use ferroce_provider::abi::version::{Abi, NEWEST, OLDEST};
    let fits = |abi: &Abi| vec![abi.verbs_context, abi.ibv_context(), abi.qp_ex, abi.port_attr] == theirs;
    assert!(
        (OLDEST..=NEWEST)
            .filter_map(Abi::of_release)
            .any(|abi| fits(&abi)),
        "no release of the table has {theirs:?}"
    );
}
