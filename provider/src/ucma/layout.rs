//! The structures of `rdma/rdma_user_cm.h` and those that they contain, as programs and kernel exchange them.
#![allow(non_camel_case_types, missing_docs)] // the names of the header

/// Commands (`RDMA_USER_CM_CMD_*`).
pub mod cmd {
    pub const CREATE_ID: u32 = 0;
    pub const DESTROY_ID: u32 = 1;
    pub const BIND_IP: u32 = 2;
    pub const RESOLVE_IP: u32 = 3;
    pub const RESOLVE_ROUTE: u32 = 4;
    pub const QUERY_ROUTE: u32 = 5;
    pub const CONNECT: u32 = 6;
    pub const LISTEN: u32 = 7;
    pub const ACCEPT: u32 = 8;
    pub const REJECT: u32 = 9;
    pub const DISCONNECT: u32 = 10;
    pub const INIT_QP_ATTR: u32 = 11;
    pub const GET_EVENT: u32 = 12;
    pub const GET_OPTION: u32 = 13;
    pub const SET_OPTION: u32 = 14;
    pub const NOTIFY: u32 = 15;
    pub const JOIN_IP_MCAST: u32 = 16;
    pub const LEAVE_MCAST: u32 = 17;
    pub const MIGRATE_ID: u32 = 18;
    pub const QUERY: u32 = 19;
    pub const BIND: u32 = 20;
    pub const RESOLVE_ADDR: u32 = 21;
    pub const JOIN_MCAST: u32 = 22;
    pub const RESOLVE_IB_SERVICE: u32 = 23;
    pub const WRITE_CM_EVENT: u32 = 24;
    /// The first number that is no command.
    pub const END: u32 = 25;
}

/// Structures that any bytes make a value of, and that have no padding which matters.
///
/// # Safety
/// All bit patterns must be valid, and no padding left unset where the value is made by this crate.
pub unsafe trait Plain: Copy {
    /// All bytes 0.
    fn zeroed() -> Self {
        // SAFETY: all bit patterns are valid.
        unsafe { std::mem::zeroed() }
    }

    /// The bytes of the value.
    fn bytes(&self) -> &[u8] {
        // SAFETY: the value is `size_of` bytes long, all of them set.
        unsafe { std::slice::from_raw_parts((&raw const *self).cast(), size_of::<Self>()) }
    }

    /// The bytes of the value, to be set.
    fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and any bytes are a value.
        unsafe { std::slice::from_raw_parts_mut((&raw mut *self).cast(), size_of::<Self>()) }
    }
}

/// Defines structures, all of which are [`Plain`].
macro_rules! structures {
    ($($(#[$attribute:meta])* $name:ident { $($field:ident: $type:ty),* $(,)? })*) => {
        $(
            $(#[$attribute])*
            #[derive(Clone, Copy, Debug)]
            #[repr(C)]
            pub struct $name { $(pub $field: $type),* }

            // SAFETY: the fields are integers, and arrays and structures of them; padding is written out as fields.
            unsafe impl Plain for $name {}
        )*
    };
}

/// `RDMA_MAX_PRIVATE_DATA`.
pub const MAX_PRIVATE_DATA: usize = 256;

/// Bytes of any address, as in `sockaddr_storage`.
pub type Storage = [u64; 16];

structures! {
    rdma_ucm_cmd_hdr { cmd: u32, in_: u16, out: u16 }

    sockaddr_in6 { family: u16, port: [u8; 2], flow_info: [u8; 4], addr: [u8; 16], scope_id: u32 }

    sockaddr_ib {
        family: u16, pkey: [u8; 2], flow_info: [u8; 4], addr: [u8; 16], sid: [u8; 8], sid_mask: [u8; 8], scope_id: u64,
    }

    rdma_ucm_create_id { uid: u64, response: u64, ps: u16, qp_type: u8, reserved: [u8; 5] }
    rdma_ucm_create_id_resp { id: u32 }
    rdma_ucm_destroy_id { response: u64, id: u32, reserved: u32 }
    rdma_ucm_destroy_id_resp { events_reported: u32 }
    rdma_ucm_bind_ip { response: u64, addr: sockaddr_in6, id: u32 }
    rdma_ucm_bind { id: u32, addr_size: u16, reserved: u16, addr: Storage }
    rdma_ucm_resolve_ip { src_addr: sockaddr_in6, dst_addr: sockaddr_in6, id: u32, timeout_ms: u32 }
    rdma_ucm_resolve_addr {
        id: u32, timeout_ms: u32, src_size: u16, dst_size: u16, reserved: u32, src_addr: Storage, dst_addr: Storage,
    }
    rdma_ucm_resolve_route { id: u32, timeout_ms: u32 }
    rdma_ucm_query { response: u64, id: u32, option: u32 }

    ib_user_path_rec {
        dgid: [u8; 16], sgid: [u8; 16], dlid: [u8; 2], slid: [u8; 2], raw_traffic: u32, flow_label: [u8; 4],
        reversible: u32, mtu: u32, pkey: [u8; 2], hop_limit: u8, traffic_class: u8, numb_path: u8, sl: u8,
        mtu_selector: u8, rate_selector: u8, rate: u8, packet_life_time_selector: u8, packet_life_time: u8,
        preference: u8,
    }
    rdma_ucm_query_route_resp {
        node_guid: [u8; 8], ib_route: [ib_user_path_rec; 2], src_addr: sockaddr_in6, dst_addr: sockaddr_in6,
        num_paths: u32, port_num: u8, reserved: [u8; 3], ibdev_index: u32, reserved1: u32,
    }
    rdma_ucm_query_addr_resp {
        node_guid: [u8; 8], port_num: u8, reserved: u8, pkey: [u8; 2], src_size: u16, dst_size: u16,
        src_addr: Storage, dst_addr: Storage, ibdev_index: u32, reserved1: u32,
    }
    /// Followed by the records.
    rdma_ucm_query_path_resp { num_paths: u32, reserved: u32 }
    /// A path with its flags: `path_rec` is the record as the subnet administrator sends it (`ibv_path_record`).
    ib_path_rec_data { flags: u32, reserved: u32, path_rec: [u8; 64] }
    /// Followed by the records.
    rdma_ucm_query_ib_service_resp { num_service_recs: u32 }

    rdma_ucm_conn_param {
        qp_num: u32, qkey: u32, private_data: [u8; MAX_PRIVATE_DATA], private_data_len: u8, srq: u8,
        responder_resources: u8, initiator_depth: u8, flow_control: u8, retry_count: u8, rnr_retry_count: u8, valid: u8,
    }
    ib_uverbs_global_route {
        dgid: [u8; 16], flow_label: u32, sgid_index: u8, hop_limit: u8, traffic_class: u8, reserved: u8,
    }
    ib_uverbs_ah_attr {
        grh: ib_uverbs_global_route, dlid: u16, sl: u8, src_path_bits: u8, static_rate: u8, is_global: u8, port_num: u8,
        reserved: u8,
    }
    rdma_ucm_ud_param {
        qp_num: u32, qkey: u32, ah_attr: ib_uverbs_ah_attr, private_data: [u8; MAX_PRIVATE_DATA], private_data_len: u8,
        reserved: [u8; 7],
    }
    rdma_ucm_ece { vendor_id: u32, attr_mod: u32 }
    rdma_ucm_connect { conn_param: rdma_ucm_conn_param, id: u32, reserved: u32, ece: rdma_ucm_ece }
    rdma_ucm_listen { id: u32, backlog: u32 }
    rdma_ucm_accept { uid: u64, conn_param: rdma_ucm_conn_param, id: u32, reserved: u32, ece: rdma_ucm_ece }
    rdma_ucm_reject {
        id: u32, private_data_len: u8, reason: u8, reserved: [u8; 2], private_data: [u8; MAX_PRIVATE_DATA],
    }
    rdma_ucm_disconnect { id: u32 }
    rdma_ucm_init_qp_attr { response: u64, id: u32, qp_state: u32 }
    ib_uverbs_qp_attr {
        qp_attr_mask: u32, qp_state: u32, cur_qp_state: u32, path_mtu: u32, path_mig_state: u32, qkey: u32, rq_psn: u32,
        sq_psn: u32, dest_qp_num: u32, qp_access_flags: u32, ah_attr: ib_uverbs_ah_attr, alt_ah_attr: ib_uverbs_ah_attr,
        max_send_wr: u32, max_recv_wr: u32, max_send_sge: u32, max_recv_sge: u32, max_inline_data: u32, pkey_index: u16,
        alt_pkey_index: u16, en_sqd_async_notify: u8, sq_draining: u8, max_rd_atomic: u8, max_dest_rd_atomic: u8,
        min_rnr_timer: u8, port_num: u8, timeout: u8, retry_cnt: u8, rnr_retry: u8, alt_port_num: u8, alt_timeout: u8,
        reserved: [u8; 5],
    }
    rdma_ucm_notify { id: u32, event: u32 }
    rdma_ucm_join_ip_mcast { response: u64, uid: u64, addr: sockaddr_in6, id: u32 }
    rdma_ucm_join_mcast { response: u64, uid: u64, id: u32, addr_size: u16, join_flags: u16, addr: Storage }
    rdma_ucm_get_event { response: u64 }
    /// The union `param` is that of its largest member, a `rdma_ucm_ud_param`; the others begin where that does.
    rdma_ucm_event_resp {
        uid: u64, id: u32, event: u32, status: u32, param: [u8; size_of::<rdma_ucm_ud_param>()], reserved: u32,
        ece: rdma_ucm_ece,
    }
    rdma_ucm_set_option { optval: u64, id: u32, level: u32, optname: u32, optlen: u32 }
    rdma_ucm_migrate_id { response: u64, id: u32, fd: u32 }
    rdma_ucm_migrate_resp { events_reported: u32 }
    rdma_ucm_ib_service { service_id: u64, service_name: [u8; 64], flags: u32, reserved: u32 }
    /// The header leaves the padding before `ibs` to the compiler.
    rdma_ucm_resolve_ib_service { id: u32, padding: u32, ibs: rdma_ucm_ib_service }
    /// The union `param` has room for a `rdma_ucm_ud_param`, too; events of programs carry a number there.
    rdma_ucm_write_cm_event { id: u32, reserved: u32, event: u32, status: u32, arg: u64 }
}
