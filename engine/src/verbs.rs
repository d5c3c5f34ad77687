//! The vocabulary of verbs: types, attributes, work requests and completions, with the numbers the verbs API gives them.
//!
//! Values of enums and flags equal those of `infiniband/verbs.h`, so that the provider converts by number.

use std::fmt;

use bitflags::bitflags;

/// Errors of verbs calls. Each is one errno, as the kernel's drivers return it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum VerbsError {
    /// An attribute, mask, state, number or handle that the call does not take (EINVAL).
    #[error("invalid argument")]
    Invalid,
    /// A queue or table is full (ENOMEM).
    #[error("no room")]
    NoMemory,
    /// The object is still used by another (EBUSY).
    #[error("object in use")]
    Busy,
    /// The device does not do this (EOPNOTSUPP).
    #[error("operation not supported")]
    NotSupported,
    /// Memory that is not mapped (EFAULT).
    #[error("bad address")]
    Fault,
    /// An object of another protection domain, or without the right (EPERM).
    #[error("operation not permitted")]
    NotPermitted,
    /// No such object (ENOENT).
    #[error("no such object")]
    NotFound,
    /// A descriptor that is not open (EBADF).
    #[error("bad descriptor")]
    BadDescriptor,
    /// There is no XRC domain of this file yet, and none is to be made (EAGAIN).
    #[error("no such domain yet")]
    NoDomain,
    /// The engine can't be used any more: the device is gone, or this is a forked child (EIO).
    #[error("device is gone")]
    Gone,
}

impl VerbsError {
    /// The errno value (positive).
    pub fn errno(self) -> i32 {
        match self {
            VerbsError::Invalid => libc::EINVAL,
            VerbsError::NoMemory => libc::ENOMEM,
            VerbsError::Busy => libc::EBUSY,
            VerbsError::NotSupported => libc::EOPNOTSUPP,
            VerbsError::Fault => libc::EFAULT,
            VerbsError::NotPermitted => libc::EPERM,
            VerbsError::NotFound => libc::ENOENT,
            VerbsError::BadDescriptor => libc::EBADF,
            VerbsError::NoDomain => libc::EAGAIN,
            VerbsError::Gone => libc::EIO,
        }
    }
}

/// QP type (`enum ibv_qp_type`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum QpType {
    /// Reliable connection.
    Rc = 2,
    /// Unreliable connection.
    Uc = 3,
    /// Unreliable datagram.
    Ud = 4,
    /// Extended reliable connection, initiator.
    XrcSend = 9,
    /// Extended reliable connection, target.
    XrcRecv = 10,
}

/// Type of a memory window (`enum ibv_mw_type`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum MwType {
    /// For all QPs of its PD; bound, again and again, by `ibv_bind_mw`.
    Type1 = 1,
    /// For the QP by which it was bound (2B of the specification); to be invalidated before it is bound again.
    Type2 = 2,
}

/// QP state (`enum ibv_qp_state`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum QpState {
    /// Newly made or reset.
    Reset = 0,
    /// Receives may be posted.
    Init = 1,
    /// Ready to receive.
    Rtr = 2,
    /// Ready to send.
    Rts = 3,
    /// Send queue drained.
    Sqd = 4,
    /// Send queue error (UC, UD).
    Sqe = 5,
    /// Error: both queues flush.
    Err = 6,
}

/// Path migration state (`enum ibv_mig_state`). Without an alternate path, as ever on RoCE, a QP is in the first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum MigState {
    /// On the path it has.
    #[default]
    Migrated = 0,
    /// A new alternate path is to be armed.
    Rearm = 1,
    /// The alternate path is ready.
    Armed = 2,
}

bitflags! {
    /// Access rights of a memory region or QP (`enum ibv_access_flags`).
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct Access: u32 {
        /// The local HCA may write (receives, READ results).
        const LOCAL_WRITE = 1;
        /// Peers may WRITE.
        const REMOTE_WRITE = 1 << 1;
        /// Peers may READ.
        const REMOTE_READ = 1 << 2;
        /// Peers may do atomics.
        const REMOTE_ATOMIC = 1 << 3;
        /// Memory windows may be bound.
        const MW_BIND = 1 << 4;
        /// Remote addresses start at zero.
        const ZERO_BASED = 1 << 5;
        /// On-demand paging.
        const ON_DEMAND = 1 << 6;
        /// Hugepages hint.
        const HUGETLB = 1 << 7;
        /// Peers may FLUSH to global visibility.
        const FLUSH_GLOBAL = 1 << 8;
        /// Peers may FLUSH to persistence.
        const FLUSH_PERSISTENT = 1 << 9;
        /// Optional: relaxed ordering. All bits from 20 on may be ignored.
        const RELAXED_ORDERING = 1 << 20;
    }
}

impl Access {
    /// Those by which memory may be written, now or through a window bound later.
    pub const WRITABLE: Access = Access::LOCAL_WRITE
        .union(Access::REMOTE_WRITE)
        .union(Access::REMOTE_ATOMIC)
        .union(Access::MW_BIND);
}

/// What is to be done with the memory of regions that are paged on demand (`enum ibv_advise_mr_advice`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Advice {
    /// Page it in for reading.
    Prefetch = 0,
    /// Page it in for writing.
    PrefetchWrite = 1,
    /// Take note of what is paged in; page nothing in.
    PrefetchNoFault = 2,
}

bitflags! {
    /// Flags of a send work request (`enum ibv_send_flags`).
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct SendFlags: u32 {
        /// Wait for the answers of what precedes: READs, atomics, ATOMIC WRITEs and FLUSHes.
        const FENCE = 1;
        /// Give a completion.
        const SIGNALED = 1 << 1;
        /// Raise a solicited event at the receiver.
        const SOLICITED = 1 << 2;
        /// Copy the data when posting; keys are not looked at.
        const INLINE = 1 << 3;
        /// Not supported (checksum offload).
        const IP_CSUM = 1 << 4;
    }
}

bitflags! {
    /// Which fields of [`QpAttr`] a modify sets (`enum ibv_qp_attr_mask`).
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct QpAttrMask: u32 {
        /// `state`
        const STATE = 1;
        /// `cur_state`
        const CUR_STATE = 1 << 1;
        /// `sqd_async_notify`
        const EN_SQD_ASYNC_NOTIFY = 1 << 2;
        /// `access`
        const ACCESS_FLAGS = 1 << 3;
        /// `pkey_index`
        const PKEY_INDEX = 1 << 4;
        /// `port`
        const PORT = 1 << 5;
        /// `qkey`
        const QKEY = 1 << 6;
        /// `path`
        const AV = 1 << 7;
        /// `path_mtu`
        const PATH_MTU = 1 << 8;
        /// `timeout`
        const TIMEOUT = 1 << 9;
        /// `retry_cnt`
        const RETRY_CNT = 1 << 10;
        /// `rnr_retry`
        const RNR_RETRY = 1 << 11;
        /// `rq_psn`
        const RQ_PSN = 1 << 12;
        /// `max_rd_atomic`
        const MAX_QP_RD_ATOMIC = 1 << 13;
        /// alternate path
        const ALT_PATH = 1 << 14;
        /// `min_rnr_timer`
        const MIN_RNR_TIMER = 1 << 15;
        /// `sq_psn`
        const SQ_PSN = 1 << 16;
        /// `max_dest_rd_atomic`
        const MAX_DEST_RD_ATOMIC = 1 << 17;
        /// `path_mig_state`
        const PATH_MIG_STATE = 1 << 18;
        /// `cap`
        const CAP = 1 << 19;
        /// `dest_qpn`
        const DEST_QPN = 1 << 20;
        /// rate limit (raw packets only)
        const RATE_LIMIT = 1 << 25;
    }
}

/// Sizes of a QP's queues (`struct ibv_qp_cap`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QpCap {
    /// Send work requests outstanding.
    pub max_send_wr: u32,
    /// Receive work requests outstanding.
    pub max_recv_wr: u32,
    /// Scatter/gather entries of a send.
    pub max_send_sge: u32,
    /// Scatter/gather entries of a receive.
    pub max_recv_sge: u32,
    /// Bytes of inline data.
    pub max_inline_data: u32,
}

/// QP attributes, for modify and query (`struct ibv_qp_attr`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QpAttr {
    /// The state to enter, or the current one in a query.
    pub state: QpState,
    /// The state that the caller believes the QP in.
    pub cur_state: QpState,
    /// Path MTU, verbs code 1 (256) to 5 (4096).
    pub path_mtu: u32,
    /// Q_Key (UD).
    pub qkey: u32,
    /// First PSN expected, 24 bits.
    pub rq_psn: u32,
    /// First PSN sent, 24 bits.
    pub sq_psn: u32,
    /// The peer's QPN, 24 bits.
    pub dest_qpn: u32,
    /// What peers may do.
    pub access: Access,
    /// Queue sizes.
    pub cap: QpCap,
    /// The address vector, resolved; `None` in a query of a QP that has none.
    pub path: Option<crate::link::Path>,
    /// P_Key table index; only 0 exists.
    pub pkey_index: u16,
    /// Raise an event when drained.
    pub sqd_async_notify: bool,
    /// Whether the send queue is draining (query).
    pub sq_draining: bool,
    /// READs and atomics outstanding as initiator.
    pub max_rd_atomic: u8,
    /// READs and atomics accepted as target.
    pub max_dest_rd_atomic: u8,
    /// RNR NAK timer code, 5 bits (reference section 8).
    pub min_rnr_timer: u8,
    /// Port; only 1 exists.
    pub port: u8,
    /// Local ACK timeout, 5 bits: 4.096 us x 2^t; 0 is for ever.
    pub timeout: u8,
    /// Retries after timeouts and sequence errors, 3 bits.
    pub retry_cnt: u8,
    /// Retries after RNR NAKs, 3 bits; 7 is for ever.
    pub rnr_retry: u8,
    /// Path migration state.
    pub path_mig_state: MigState,
}

impl Default for QpAttr {
    fn default() -> Self {
        QpAttr {
            state: QpState::Reset,
            cur_state: QpState::Reset,
            path_mtu: 0,
            qkey: 0,
            rq_psn: 0,
            sq_psn: 0,
            dest_qpn: 0,
            access: Access::empty(),
            cap: QpCap::default(),
            path: None,
            pkey_index: 0,
            sqd_async_notify: false,
            sq_draining: false,
            max_rd_atomic: 0,
            max_dest_rd_atomic: 0,
            min_rnr_timer: 0,
            port: 0,
            timeout: 0,
            retry_cnt: 0,
            rnr_retry: 0,
            path_mig_state: MigState::Migrated,
        }
    }
}

/// A scatter/gather entry (`struct ibv_sge`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Sge {
    /// Address, in the terms of the key's region.
    pub addr: u64,
    /// Bytes; 0 stands for 2^31 in hardware's wire format, but for 0 in verbs: 0 here.
    pub length: u32,
    /// Local key.
    pub lkey: u32,
}

bitflags! {
    /// How far a FLUSH brings data (`enum ibv_placement_type`, the placement type of the FETH).
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Placement: u8 {
        /// Every observer of the memory sees it.
        const GLOBAL = 1;
        /// It outlasts a loss of power.
        const PERSISTENT = 2;
    }
}

impl Placement {
    /// The rights that QP and memory must give for it.
    pub(crate) fn rights(self) -> Access {
        let when = |placement, right| {
            if self.contains(placement) {
                right
            } else {
                Access::empty()
            }
        };
        when(Placement::GLOBAL, Access::FLUSH_GLOBAL) | when(Placement::PERSISTENT, Access::FLUSH_PERSISTENT)
    }
}

/// What a FLUSH covers (`enum ibv_selectivity_level`, the selectivity level of the FETH).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Selectivity {
    /// The range that it names.
    Range = 0,
    /// The whole region of the key.
    Region = 1,
}

/// What a send work request does, with what that needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// SEND.
    Send,
    /// SEND with immediate data (network order as the application gave it).
    SendImm(u32),
    /// SEND that invalidates the peer's key.
    SendInv(u32),
    /// RDMA WRITE.
    Write {
        /// Remote address.
        addr: u64,
        /// Remote key.
        rkey: u32,
    },
    /// RDMA WRITE with immediate data.
    WriteImm {
        /// Remote address.
        addr: u64,
        /// Remote key.
        rkey: u32,
        /// Immediate, network order as given.
        imm: u32,
    },
    /// RDMA READ.
    Read {
        /// Remote address.
        addr: u64,
        /// Remote key.
        rkey: u32,
    },
    /// Compare and swap.
    CompareSwap {
        /// Remote address, 8-byte aligned.
        addr: u64,
        /// Remote key.
        rkey: u32,
        /// Expected value.
        compare: u64,
        /// New value.
        swap: u64,
    },
    /// Fetch and add.
    FetchAdd {
        /// Remote address, 8-byte aligned.
        addr: u64,
        /// Remote key.
        rkey: u32,
        /// Addend.
        add: u64,
    },
    /// Atomic store of 8 bytes, after all that was flushed before.
    AtomicWrite {
        /// Remote address, 8-byte aligned.
        addr: u64,
        /// Remote key.
        rkey: u32,
    },
    /// FLUSH: what was written before gets to where `placement` says.
    Flush {
        /// Remote address.
        addr: u64,
        /// Remote key.
        rkey: u32,
        /// Bytes.
        length: u32,
        /// How far.
        placement: Placement,
        /// Which of the memory.
        selectivity: Selectivity,
    },
    /// Invalidate the key of a type 2 memory window.
    LocalInvalidate(u32),
    /// Bind a memory window.
    BindMw(MwBind),
}

impl Operation {
    /// Whether it is done here, and no packet is sent.
    pub fn is_local(&self) -> bool {
        matches!(self, Operation::LocalInvalidate(_) | Operation::BindMw(_))
    }
}

/// What a memory window is bound to (`struct ibv_mw_bind_info`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MwBind {
    /// The window.
    pub window: crate::device::MwId,
    /// Its new key, of which only the lowest 8 bits count.
    pub rkey: u32,
    /// The region; any if `len` is 0.
    pub lkey: u32,
    /// Where it starts, in the terms of the region.
    pub addr: u64,
    /// Bytes; 0 ends the binding of a type 1 window.
    pub len: u64,
    /// What peers may do. With [`Access::ZERO_BASED`] they name its start by 0, else by `addr`.
    pub access: Access,
}

/// The destination of a UD send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UdDest {
    /// The address handle, resolved.
    pub path: crate::link::Path,
    /// Destination QPN; 0xffffff for multicast.
    pub qpn: u32,
    /// Q_Key; with bit 31 set the QP's own is used.
    pub qkey: u32,
}

/// A send work request. [`SendWr::default`] is an unsignaled SEND of nothing.
#[derive(Clone, Copy, Debug)]
pub struct SendWr<'a> {
    /// The application's cookie.
    pub wr_id: u64,
    /// What it does.
    pub operation: Operation,
    /// Flags.
    pub flags: SendFlags,
    /// The local data. With [`SendFlags::INLINE`] it is copied at once and keys are not looked at.
    pub sges: &'a [Sge],
    /// UD only.
    pub ud: Option<UdDest>,
    /// XRC only: the number of the SRQ at the peer, 24 bits.
    pub srqn: u32,
}

impl Default for SendWr<'_> {
    fn default() -> Self {
        SendWr {
            wr_id: 0,
            operation: Operation::Send,
            flags: SendFlags::empty(),
            sges: &[],
            ud: None,
            srqn: 0,
        }
    }
}

/// A receive work request.
#[derive(Clone, Copy, Debug)]
pub struct RecvWr<'a> {
    /// The application's cookie.
    pub wr_id: u64,
    /// Where the data goes.
    pub sges: &'a [Sge],
}

/// Status of a completion (`enum ibv_wc_status`, reference section 6).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u32)]
#[allow(missing_docs)]
pub enum WcStatus {
    #[default]
    Success = 0,
    LocLenErr = 1,
    LocQpOpErr = 2,
    LocEecOpErr = 3,
    LocProtErr = 4,
    WrFlushErr = 5,
    MwBindErr = 6,
    BadRespErr = 7,
    LocAccessErr = 8,
    RemInvReqErr = 9,
    RemAccessErr = 10,
    RemOpErr = 11,
    RetryExcErr = 12,
    RnrRetryExcErr = 13,
    LocRddViolErr = 14,
    RemInvRdReqErr = 15,
    RemAbortErr = 16,
    InvEecnErr = 17,
    InvEecStateErr = 18,
    FatalErr = 19,
    RespTimeoutErr = 20,
    GeneralErr = 21,
}

/// What an error completion tells beyond its status (`vendor_err`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VendorError {
    /// 1: the queue was in ERR or SQE, or came there.
    Flushed,
    /// 2: a local key, range or right does not exist, or the memory is gone.
    LocalMemory,
    /// 3: the message is longer than its receive.
    ReceiveTooShort,
    /// 4: the send is longer than the transport takes.
    SendTooLong,
    /// 5: the operation can't be sent.
    Unsendable,
    /// 6: no answer in time.
    Timeout,
    /// 7: answers came, but the same packet was lost again and again.
    Losses,
    /// 8: the answer is not of the length asked for.
    BadResponse,
    /// The syndrome of the peer's NAK: from 0x20 (RNR) or 0x60 on.
    Nak(ferroce_wire::Syndrome),
}

impl VendorError {
    /// The number in the completion.
    pub fn number(self) -> u32 {
        match self {
            VendorError::Flushed => 1,
            VendorError::LocalMemory => 2,
            VendorError::ReceiveTooShort => 3,
            VendorError::SendTooLong => 4,
            VendorError::Unsendable => 5,
            VendorError::Timeout => 6,
            VendorError::Losses => 7,
            VendorError::BadResponse => 8,
            VendorError::Nak(syndrome) => syndrome.value().into(),
        }
    }
}

/// What completed (`enum ibv_wc_opcode`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u32)]
#[allow(missing_docs)]
pub enum WcOpcode {
    #[default]
    Send = 0,
    RdmaWrite = 1,
    RdmaRead = 2,
    CompSwap = 3,
    FetchAdd = 4,
    BindMw = 5,
    LocalInv = 6,
    Flush = 8,
    AtomicWrite = 9,
    Recv = 128,
    RecvRdmaWithImm = 129,
}

impl WcOpcode {
    /// Whether it is of a receive.
    pub fn is_receive(self) -> bool {
        matches!(self, WcOpcode::Recv | WcOpcode::RecvRdmaWithImm)
    }
}

bitflags! {
    /// Flags of a completion (`enum ibv_wc_flags`).
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct WcFlags: u32 {
        /// The first 40 bytes of the buffer hold a GRH (UD).
        const GRH = 1;
        /// `imm` is valid.
        const WITH_IMM = 1 << 1;
        /// `imm` holds the key that was invalidated.
        const WITH_INV = 1 << 3;
    }
}

/// A completion (`struct ibv_wc`, and what the extended CQ adds).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Wc {
    /// The work request's cookie.
    pub wr_id: u64,
    /// Outcome; on errors only `wr_id`, `status`, `vendor_err` and `qp_num` are valid.
    pub status: WcStatus,
    /// What completed.
    pub opcode: WcOpcode,
    /// A [`VendorError`]; 0 on success.
    pub vendor_err: u32,
    /// Bytes received, READ or swapped.
    pub byte_len: u32,
    /// Immediate (network order as the peer gave it) or the invalidated key (host order).
    pub imm: u32,
    /// The local QPN.
    pub qp_num: u32,
    /// The sender's QPN (UD, XRC).
    pub src_qp: u32,
    /// The XRC SRQ that a receive was of; 0 if it was of none.
    pub srqn: u32,
    /// Flags.
    pub flags: WcFlags,
    /// Service level (UD).
    pub service_level: u8,
    /// Nanoseconds, on the transport's clock.
    pub timestamp: u64,
}

/// Asynchronous events (`enum ibv_event_type`), with the object concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AsyncEvent {
    /// The CQ with this `id` overran.
    CqError(u64),
    /// A QP met a fatal error.
    QpFatal(u32),
    /// A peer's request was invalid.
    QpRequestError(u32),
    /// A peer's request broke access rules.
    QpAccessError(u32),
    /// The first packet came on an RTR QP.
    CommEstablished(u32),
    /// The send queue has drained.
    SqDrained(u32),
    /// The last receive WQE of a QP on an SRQ is consumed.
    LastWqeReached(u32),
    /// The SRQ fell below its limit.
    SrqLimit(u32),
    /// The SRQ met an error.
    SrqError(u32),
    /// The port went up.
    PortActive,
    /// The port went down.
    PortError,
    /// The GID table changed.
    GidChange,
    /// The device is gone.
    DeviceFatal,
}

macro_rules! from_number {
    ($type:ident { $($variant:ident),* $(,)? }) => {
        impl $type {
            /// The variant with this number, as the verbs API counts.
            pub fn from_number(n: u32) -> Option<$type> {
                $(if n == $type::$variant as u32 { return Some($type::$variant); })*
                None
            }
        }
    };
}
from_number!(QpType {
    Rc,
    Uc,
    Ud,
    XrcSend,
    XrcRecv
});
from_number!(MwType { Type1, Type2 });
from_number!(Selectivity { Range, Region });
from_number!(Advice {
    Prefetch,
    PrefetchWrite,
    PrefetchNoFault
});
from_number!(MigState {
    Migrated,
    Rearm,
    Armed
});
from_number!(QpState {
    Reset,
    Init,
    Rtr,
    Rts,
    Sqd,
    Sqe,
    Err
});

impl fmt::Display for QpType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            QpType::Rc => "RC",
            QpType::Uc => "UC",
            QpType::Ud => "UD",
            QpType::XrcSend => "XRC_INI",
            QpType::XrcRecv => "XRC_TGT",
        })
    }
}

impl fmt::Display for QpState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            QpState::Reset => "RESET",
            QpState::Init => "INIT",
            QpState::Rtr => "RTR",
            QpState::Rts => "RTS",
            QpState::Sqd => "SQD",
            QpState::Sqe => "SQE",
            QpState::Err => "ERR",
        })
    }
}
