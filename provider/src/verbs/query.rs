//! What the device and its port are and can do.

use std::ffi::{c_char, c_int};

use ferroce_engine::control::GID_TABLE_LEN;
use ferroce_engine::verbs::VerbsError;
use ferroce_wire::PathMtu;

use super::context::{Context, PORT};
use super::verb;
use crate::abi::verbs::{
    ibv_context, ibv_cq_moderation_caps, ibv_device_attr, ibv_device_attr_ex, ibv_odp_caps, ibv_port_attr,
    ibv_query_device_ex_input, ibv_values_ex,
};

/// Bits of `enum ibv_device_cap_flags`: UD_AV_PORT_ENFORCE, CURR_QP_STATE_MOD, PORT_ACTIVE_EVENT, SYS_IMAGE_GUID,
/// RC_RNR_NAK_GEN, SRQ_RESIZE; MEM_WINDOW, XRC, MEM_MGT_EXTENSIONS, MEM_WINDOW_TYPE_2B.
const CAPABILITIES: u32 =
    1 << 6 | 1 << 7 | 1 << 10 | 1 << 11 | 1 << 12 | 1 << 13 | 1 << 17 | 1 << 20 | 1 << 21 | 1 << 24;
/// Those beyond 32 bits (`enum ib_uverbs_device_cap_flags`): FLUSH_GLOBAL, ATOMIC_WRITE. Not FLUSH_PERSISTENT: what
/// outlasts a loss of power is in files, and gets there by system calls that may take long.
const MORE_CAPABILITIES: u64 = 1 << 38 | 1 << 40;
/// Bits of `enum ibv_port_cap_flags`: CM_SUP, IP_BASED_GIDS.
const PORT_CAPABILITIES: u32 = 1 << 16 | 1 << 26;
/// Vendor id of devices that have none.
const NO_VENDOR: u32 = 0xff_ffff;
/// `IBV_ATOMIC_HCA`, as hardware says: programs such as UCX use the atomics of no other kind. They are more than that
/// promises: atomic towards the CPUs too, for CPUs do them.
const ATOMIC_HCA: u32 = 1;
/// Page sizes from 4 KiB to 2 GiB; all are the same here.
const PAGE_SIZES: u64 = 0xffff_f000;
/// As long as an answer may take, as an exponent of 4.096 us; what most drivers say.
const ACK_DELAY: u8 = 15;
/// Frequency of the clock of timestamps in kHz: nanoseconds.
const CLOCK_KHZ: u64 = 1_000_000;
/// `IBV_VALUES_MASK_RAW_CLOCK`.
const RAW_CLOCK: u32 = 1;

/// Bits of `enum ibv_odp_transport_cap_bits`. A page that is not there is faulted in by whatever reaches for it, so that
/// each transport can do with it all that it can do.
const ODP_SEND: u32 = 1;
const ODP_RECV: u32 = 1 << 1;
const ODP_WRITE: u32 = 1 << 2;
const ODP_READ: u32 = 1 << 3;
const ODP_ATOMIC: u32 = 1 << 4;
const ODP_SRQ_RECV: u32 = 1 << 5;
const ODP_FLUSH: u32 = 1 << 6;
const ODP_ATOMIC_WRITE: u32 = 1 << 7;
/// What reliable connections do, but for receives of their own.
const ODP_RELIABLE: u32 =
    ODP_SEND | ODP_WRITE | ODP_READ | ODP_ATOMIC | ODP_SRQ_RECV | ODP_FLUSH | ODP_ATOMIC_WRITE;
/// `IBV_ODP_SUPPORT` and `IBV_ODP_SUPPORT_IMPLICIT`, and what can be done by transport.
const ON_DEMAND_PAGING: ibv_odp_caps = ibv_odp_caps {
    general_caps: 3,
    rc_odp_caps: ODP_RELIABLE | ODP_RECV,
    uc_odp_caps: ODP_SEND | ODP_RECV | ODP_WRITE | ODP_SRQ_RECV,
    ud_odp_caps: ODP_SEND | ODP_RECV | ODP_SRQ_RECV,
};
/// The same for XRC, where all receives are of shared queues.
const XRC_ON_DEMAND_PAGING: u32 = ODP_RELIABLE;

/// A limit as the program sees it.
fn number(limit: u32) -> c_int {
    c_int::try_from(limit).unwrap_or(c_int::MAX)
}

/// Stores as much of the attributes as there is room for (`size` bytes), which depends on what the program knows.
pub(super) unsafe extern "C" fn query_device_ex(
    public: *mut ibv_context,
    input: *const ibv_query_device_ex_input,
    attr: *mut ibv_device_attr_ex,
    size: usize,
) -> c_int {
    verb(|| {
        // SAFETY: libibverbs passes an open context of this provider.
        let context = unsafe { Context::of(public) };
        // SAFETY: the program passes an input or none.
        if unsafe { input.as_ref() }.is_some_and(|input| input.comp_mask != 0)
            || size < size_of::<ibv_device_attr>()
        {
            return Err(VerbsError::Invalid);
        }
        let all = device_attr(&context);
        let known = size.min(size_of::<ibv_device_attr_ex>());
        // SAFETY: the program has room for `size` bytes.
        unsafe {
            attr.cast::<u8>().write_bytes(0, size);
            std::ptr::copy_nonoverlapping((&raw const all).cast::<u8>(), attr.cast::<u8>(), known);
        }
        Ok(())
    })
}

/// The attributes of the device.
fn device_attr(context: &Context) -> ibv_device_attr_ex {
    let (info, limits) = (context.info(), context.engine.limits());
    // SAFETY: zeros are numbers; most say that a feature does not exist.
    let mut ex: ibv_device_attr_ex = unsafe { std::mem::zeroed() };
    ex.completion_timestamp_mask = u64::MAX;
    ex.hca_core_clock = CLOCK_KHZ;
    ex.device_cap_flags_ex = u64::from(CAPABILITIES) | MORE_CAPABILITIES;
    ex.max_dm_size = limits.max_dm_size;
    ex.odp_caps = ON_DEMAND_PAGING;
    ex.xrc_odp_caps = XRC_ON_DEMAND_PAGING;
    ex.phys_port_cnt_ex = PORT;
    ex.cq_mod_caps = ibv_cq_moderation_caps {
        max_cq_count: u16::MAX,
        max_cq_period: u16::try_from(limits.max_cq_period.as_micros()).unwrap_or(u16::MAX),
    };
    let attr = &mut ex.orig_attr;
    for (to, from) in attr.fw_ver.iter_mut().zip(env!("CARGO_PKG_VERSION").bytes()) {
        *to = from as c_char;
    }
    attr.node_guid = info.guid.to_be();
    attr.sys_image_guid = info.guid.to_be();
    attr.max_mr_size = limits.max_mr_size;
    attr.page_size_cap = PAGE_SIZES;
    attr.vendor_id = NO_VENDOR;
    attr.max_qp = number(limits.max_qp);
    attr.max_qp_wr = number(limits.max_qp_wr);
    attr.device_cap_flags = CAPABILITIES;
    attr.max_sge = number(limits.max_sge);
    attr.max_sge_rd = number(limits.max_sge);
    attr.max_cq = number(limits.max_cq);
    attr.max_cqe = number(limits.max_cqe);
    attr.max_mr = number(limits.max_mr);
    attr.max_mw = number(limits.max_mw);
    attr.max_pd = number(limits.max_pd);
    attr.max_qp_rd_atom = limits.max_rd_atomic.into();
    attr.max_qp_init_rd_atom = limits.max_rd_atomic.into();
    attr.max_res_rd_atom = number(limits.max_qp.saturating_mul(limits.max_rd_atomic.into()));
    attr.atomic_cap = ATOMIC_HCA;
    attr.max_mcast_grp = number(limits.max_mcast_grp);
    attr.max_mcast_qp_attach = number(limits.max_mcast_qp_attach);
    attr.max_total_mcast_qp_attach = number(limits.max_mcast_grp.saturating_mul(limits.max_mcast_qp_attach));
    attr.max_ah = c_int::MAX; // they live in the program's memory
    attr.max_srq = number(limits.max_srq);
    attr.max_srq_wr = number(limits.max_srq_wr);
    attr.max_srq_sge = number(limits.max_sge);
    attr.max_pkeys = 1;
    attr.local_ca_ack_delay = ACK_DELAY;
    attr.phys_port_cnt = PORT as u8;
    ex
}

pub(super) unsafe extern "C" fn query_port(
    public: *mut ibv_context,
    port: u8,
    attr: *mut ibv_port_attr,
) -> c_int {
    verb(|| {
        if u32::from(port) != PORT {
            return Err(VerbsError::Invalid);
        }
        // SAFETY: libibverbs passes an open context of this provider.
        let context = unsafe { Context::of(public) };
        let mtu = context.engine.lock()?.mtu();
        let all = port_attr(&context, mtu);
        // SAFETY: libibverbs has room for the structure of its release.
        unsafe {
            let from = (&raw const all).cast::<u8>();
            std::ptr::copy_nonoverlapping(from, attr.cast::<u8>(), context.abi.port_attr);
        }
        Ok(())
    })
}

/// The attributes of the port.
fn port_attr(context: &Context, mtu: PathMtu) -> ibv_port_attr {
    let info = context.info();
    let rate = info.rate();
    ibv_port_attr {
        state: if info.up { 4 } else { 1 }, // ACTIVE, DOWN
        max_mtu: PathMtu::Mtu4096.code().into(),
        active_mtu: mtu.code().into(),
        gid_tbl_len: GID_TABLE_LEN as c_int,
        port_cap_flags: PORT_CAPABILITIES,
        max_msg_sz: context.engine.limits().max_message,
        bad_pkey_cntr: 0,
        qkey_viol_cntr: 0,
        pkey_tbl_len: 1,
        lid: 0,
        sm_lid: 0,
        lmc: 0,
        max_vl_num: 1,
        sm_sl: 0,
        subnet_timeout: 0,
        init_type_reply: 0,
        active_width: rate.width_code(),
        active_speed: rate.speed_code(),
        phys_state: if info.up { 5 } else { 3 }, // LinkUp, Disabled
        link_layer: 2,                           // Ethernet
        flags: 1,                                // a GRH is required
        port_cap_flags2: 0,
        active_speed_ex: 0, // `active_speed` says it
    }
}

/// The speed of the port in units of 100 Mbit/s.
pub(super) unsafe extern "C" fn query_port_speed(
    public: *mut ibv_context,
    port: u32,
    speed: *mut u64,
) -> c_int {
    verb(|| {
        if port != PORT {
            return Err(VerbsError::Invalid);
        }
        // SAFETY: libibverbs passes an open context of this provider.
        let rate = unsafe { Context::of(public) }.info().rate();
        // SAFETY: the program passes room for it.
        unsafe { speed.write(rate.hundreds().into()) };
        Ok(())
    })
}

/// The clock of timestamps.
pub(super) unsafe extern "C" fn query_rt_values(
    public: *mut ibv_context,
    values: *mut ibv_values_ex,
) -> c_int {
    verb(|| {
        // SAFETY: libibverbs passes an open context of this provider, and values.
        let (context, values) = unsafe { (Context::of(public), &mut *values) };
        let asked = values.comp_mask;
        values.comp_mask = asked & RAW_CLOCK;
        if asked & RAW_CLOCK != 0 {
            let now = context.engine.lock()?.now().as_nanos();
            values.raw_clock.tv_sec = (now / 1_000_000_000) as libc::time_t;
            values.raw_clock.tv_nsec = (now % 1_000_000_000) as _;
        }
        Ok(())
    })
}
