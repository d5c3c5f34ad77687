//! What a program asks of RDMA CM, and what it is told: the commands and events of `rdma/rdma_user_cm.h`, as values.
//!
//! The provider makes them from what librdmacm writes and reads, the daemon gives them to [`super::RdmaCm`].

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

/// Number of an id (`rdma_cm_id`), unique in its process: the handle that librdmacm has for it, below 65,536 since that
/// keeps a table of them.
pub type Id = u32;

/// Number of a multicast membership of an id, from the same numbers as ids.
pub type MembershipId = u32;

/// A positive errno value, as the kernel gives it for the same failure.
pub type Errno = i32;

/// Most bytes of private data that a command or an event carries (`RDMA_MAX_PRIVATE_DATA`, and its length is 8 bits).
pub const MAX_PRIVATE_DATA: usize = 255;

/// An address that a program names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Address {
    /// `sockaddr_in` or `sockaddr_in6`, with port and scope id.
    Ip(#[serde(with = "socket_address")] SocketAddr),
    /// `sockaddr_ib`.
    Ib(IbAddress),
}

/// A socket address with flow information and scope id, which serde's own form of it leaves out.
mod socket_address {
    use std::net::{IpAddr, SocketAddr, SocketAddrV6};

    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    type Parts = (IpAddr, u16, u32, u32);

    pub fn serialize<S: Serializer>(address: &SocketAddr, serializer: S) -> Result<S::Ok, S::Error> {
        let (flow_info, scope_id) = match address {
            SocketAddr::V4(_) => (0, 0),
            SocketAddr::V6(v6) => (v6.flowinfo(), v6.scope_id()),
        };
        let parts: Parts = (address.ip(), address.port(), flow_info, scope_id);
        parts.serialize(serializer)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<SocketAddr, D::Error> {
        let (ip, port, flow_info, scope_id) = Parts::deserialize(deserializer)?;
        Ok(match ip {
            IpAddr::V4(_) => SocketAddr::new(ip, port),
            IpAddr::V6(ip) => SocketAddrV6::new(ip, port, flow_info, scope_id).into(),
        })
    }

    #[test]
    fn nothing_is_left_out() {
        use super::Address;
        let v6 = SocketAddrV6::new("fe80::1".parse().unwrap(), 7471, 0x12345, 9);
        for address in [SocketAddr::V6(v6), "10.0.0.1:7471".parse().unwrap()] {
            let address = Address::Ip(address);
            let bytes = postcard::to_stdvec(&address).unwrap();
            assert_eq!(postcard::from_bytes::<Address>(&bytes).unwrap(), address);
        }
    }
}

/// `sockaddr_ib`, in host byte order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct IbAddress {
    /// Partition key.
    pub pkey: u16,
    /// Flow information.
    pub flow_info: u32,
    /// GID, in network order.
    pub gid: [u8; 16],
    /// Service id: port space and port.
    pub service_id: u64,
    /// The bits of the service id that count.
    pub service_mask: u64,
    /// Scope.
    pub scope_id: u64,
}

/// Port space of an id (`enum rdma_port_space`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum PortSpace {
    /// `RDMA_PS_IPOIB`: joins the multicast groups of IP over InfiniBand.
    Ipoib = 0x0002,
    /// `RDMA_PS_TCP`: connections.
    Tcp = 0x0106,
    /// `RDMA_PS_UDP`: datagrams.
    Udp = 0x0111,
    /// `RDMA_PS_IB`: any, by service ids.
    Ib = 0x013f,
}

impl PortSpace {
    /// The port space of that number.
    pub const fn from_number(number: u32) -> Option<Self> {
        match number {
            0x0002 => Some(Self::Ipoib),
            0x0106 => Some(Self::Tcp),
            0x0111 => Some(Self::Udp),
            0x013f => Some(Self::Ib),
            _ => None,
        }
    }
}

/// Type of the queue pair that an id is for (`enum ibv_qp_type`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum QpKind {
    /// Reliable connection.
    Rc = 2,
    /// Unreliable connection.
    Uc = 3,
    /// Unreliable datagram.
    Ud = 4,
    /// XRC initiator.
    XrcInitiator = 9,
    /// XRC target.
    XrcTarget = 10,
}

impl QpKind {
    /// The type of that number.
    pub const fn from_number(number: u32) -> Option<Self> {
        match number {
            2 => Some(Self::Rc),
            3 => Some(Self::Uc),
            4 => Some(Self::Ud),
            9 => Some(Self::XrcInitiator),
            10 => Some(Self::XrcTarget),
            _ => None,
        }
    }
}

/// Enhanced connection option (`rdma_ucm_ece`): passed through.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ece {
    /// Vendor id, 24 bits.
    pub vendor_id: u32,
    /// Option word.
    pub attr_mod: u32,
}

/// `rdma_ucm_conn_param`, and the parameters of a connection in an event.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Parameters {
    /// Queue pair number, 24 bits: the program's in a command, the peer's in an event.
    pub qpn: u32,
    /// Q_Key, UD only; 0 is RDMA CM's own.
    pub qkey: u32,
    /// At most [`MAX_PRIVATE_DATA`] bytes; what fits depends on the message.
    pub private_data: Vec<u8>,
    /// READs and atomics that the sender of this takes at once.
    pub responder_resources: u8,
    /// READs and atomics that the sender of this has outstanding at most.
    pub initiator_depth: u8,
    /// End-to-end flow control.
    pub flow_control: bool,
    /// Retries on timeout, 0 to 7.
    pub retry_count: u8,
    /// Retries on RNR NAK, 0 to 7.
    pub rnr_retry_count: u8,
    /// The queue pair has a shared receive queue.
    pub srq: bool,
}

/// `rdma_ucm_ud_param` in an event: how to send to the peer.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DatagramParameters {
    /// The peer's or the group's queue pair number.
    pub qpn: u32,
    /// Its Q_Key.
    pub qkey: u32,
    /// The peer's private data.
    pub private_data: Vec<u8>,
    /// How to address it.
    pub address: AddressVector,
}

/// The address part of `ibv_ah_attr`: always with a GRH, as RoCE has it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AddressVector {
    /// Destination GID, in network order.
    pub dest_gid: [u8; 16],
    /// Index of the source GID.
    pub source_index: u8,
    /// Flow label, 20 bits.
    pub flow_label: u32,
    /// Hop limit.
    pub hop_limit: u8,
    /// Traffic class.
    pub traffic_class: u8,
    /// Service level.
    pub sl: u8,
    /// Static rate (`enum ibv_rate`).
    pub rate: u8,
    /// Port, 1.
    pub port: u8,
}

/// Option of an id (RDMA_OPTION_ID_*, RDMA_OPTION_IB_PATH).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum IdOption {
    /// Type of service, for route and traffic class.
    TypeOfService(u8),
    /// Share the address with others that allow it too.
    ReuseAddress(bool),
    /// An IPv6 listener does not take IPv4.
    AddressFamilyOnly(bool),
    /// Local ACK timeout, 4.096 us x 2^t, 0 to 31.
    AckTimeout(u8),
    /// The program gives the path itself (`ibv_path_data`): the route is resolved.
    Path(PathRecord),
}

/// State that a queue pair is to be brought to (`INIT_QP_ATTR`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum TargetState {
    /// INIT.
    Init,
    /// Ready to receive.
    Rtr,
    /// Ready to send.
    Rts,
}

/// A command of a program. All but [`Command::Taken`] are answered.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Command {
    /// CREATE_ID; [`Answer::Created`].
    Create {
        /// Port space.
        port_space: PortSpace,
        /// Type of its queue pairs.
        qp_kind: QpKind,
    },
    /// DESTROY_ID: with what it has, and the connection requests that were not [`Command::Taken`].
    Destroy {
        /// The id.
        id: Id,
    },
    /// BIND_IP, BIND.
    Bind {
        /// The id.
        id: Id,
        /// To what.
        address: Address,
    },
    /// RESOLVE_IP, RESOLVE_ADDR; [`EventKind::AddressResolved`] or [`EventKind::AddressError`] follows.
    ResolveAddress {
        /// The id.
        id: Id,
        /// Where from, if the program cares.
        source: Option<Address>,
        /// Where to.
        dest: Address,
        /// How long it may take.
        timeout_ms: u32,
    },
    /// RESOLVE_ROUTE; [`EventKind::RouteResolved`] or [`EventKind::RouteError`] follows.
    ResolveRoute {
        /// The id.
        id: Id,
        /// How long it may take.
        timeout_ms: u32,
    },
    /// QUERY_ROUTE and QUERY; [`Answer::Route`].
    Query {
        /// The id.
        id: Id,
    },
    /// INIT_QP_ATTR; [`Answer::QpAttributes`].
    QpAttributes {
        /// The id.
        id: Id,
        /// The state that the queue pair is to have.
        state: TargetState,
    },
    /// CONNECT.
    Connect {
        /// The id.
        id: Id,
        /// For the peer.
        parameters: Parameters,
        /// Enhanced connection option.
        ece: Ece,
    },
    /// LISTEN.
    Listen {
        /// The id.
        id: Id,
        /// Connection requests that may wait; 0 or less, and more than the limit, is the limit.
        backlog: i32,
    },
    /// ACCEPT, of a request, and of a reply by who has not given the queue pair to librdmacm.
    Accept {
        /// The id.
        id: Id,
        /// For the peer; `None` where librdmacm says that there are none.
        parameters: Option<Parameters>,
        /// Enhanced connection option.
        ece: Ece,
    },
    /// REJECT.
    Reject {
        /// The id.
        id: Id,
        /// `IB_CM_REJ_CONSUMER_DEFINED` (28), or `IB_CM_REJ_VENDOR_OPTION_NOT_SUPPORTED` (35).
        reason: u8,
        /// For the peer.
        private_data: Vec<u8>,
    },
    /// DISCONNECT.
    Disconnect {
        /// The id.
        id: Id,
    },
    /// NOTIFY: an event of the queue pair that matters here (`IBV_EVENT_COMM_EST`).
    Notify {
        /// The id.
        id: Id,
        /// `enum ibv_event_type`.
        event: u32,
    },
    /// SET_OPTION.
    SetOption {
        /// The id.
        id: Id,
        /// Which, and what.
        option: IdOption,
    },
    /// JOIN_IP_MCAST, JOIN_MCAST; [`Answer::Joined`], and [`EventKind::MulticastJoin`] or
    /// [`EventKind::MulticastError`] follows.
    Join {
        /// The id.
        id: Id,
        /// The group.
        address: Address,
        /// Only to send.
        send_only: bool,
    },
    /// LEAVE_MCAST.
    Leave {
        /// The membership.
        membership: MembershipId,
    },
    /// The program has got the [`EventKind::ConnectRequest`] that made this id: it counts no more in the backlog.
    /// Not answered.
    Taken {
        /// The new id.
        id: Id,
    },
}

/// What a command gives.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Answer {
    /// Nothing more than that it was done.
    Done,
    /// The new id.
    Created(Id),
    /// The new membership.
    Joined(MembershipId),
    /// What is known of addresses, device and path.
    Route(Box<Route>),
    /// Attributes for a queue pair.
    QpAttributes(Box<QpAttributes>),
}

/// Answer of QUERY_ROUTE and QUERY.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Route {
    /// Node GUID of the device, once the id is bound to one; a number whose big-endian bytes are the EUI-64.
    pub node_guid: Option<u64>,
    /// The device's name, if bound.
    pub device: Option<String>,
    /// Port, 1; 0 if not bound.
    pub port: u8,
    /// Own address.
    pub source: Option<Address>,
    /// The peer's address.
    pub dest: Option<Address>,
    /// Own GID.
    pub source_gid: [u8; 16],
    /// The peer's GID.
    pub dest_gid: [u8; 16],
    /// Partition key.
    pub pkey: u16,
    /// The path, once resolved.
    pub path: Option<PathRecord>,
}

/// A path (`ib_user_path_rec`, `ibv_path_record`), in host byte order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PathRecord {
    /// Destination GID.
    pub dest_gid: [u8; 16],
    /// Source GID.
    pub source_gid: [u8; 16],
    /// Service id.
    pub service_id: u64,
    /// Flow label, 20 bits.
    pub flow_label: u32,
    /// Hop limit.
    pub hop_limit: u8,
    /// Traffic class.
    pub traffic_class: u8,
    /// Partition key.
    pub pkey: u16,
    /// Service level.
    pub sl: u8,
    /// Path MTU, `enum ibv_mtu`.
    pub mtu: u8,
    /// Rate, `enum ibv_rate`.
    pub rate: u8,
    /// Packet life time, 4.096 us x 2^t.
    pub packet_life_time: u8,
}

/// Answer of INIT_QP_ATTR: the attributes of `ibv_modify_qp` and which of them count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct QpAttributes {
    /// `enum ibv_qp_attr_mask`.
    pub mask: u32,
    /// `enum ibv_qp_state`.
    pub state: u8,
    /// `enum ibv_mtu`.
    pub path_mtu: u8,
    /// Q_Key.
    pub qkey: u32,
    /// First PSN to receive.
    pub rq_psn: u32,
    /// First PSN to send.
    pub sq_psn: u32,
    /// The peer's queue pair.
    pub dest_qpn: u32,
    /// `enum ibv_access_flags`.
    pub access: u32,
    /// Address of the peer.
    pub address: AddressVector,
    /// Index of the partition key.
    pub pkey_index: u16,
    /// READs and atomics outstanding at most.
    pub max_rd_atomic: u8,
    /// READs and atomics taken at once.
    pub max_dest_rd_atomic: u8,
    /// RNR timer code.
    pub min_rnr_timer: u8,
    /// Port.
    pub port: u8,
    /// Local ACK timeout code.
    pub timeout: u8,
    /// Retries on timeout.
    pub retry_count: u8,
    /// Retries on RNR NAK.
    pub rnr_retry: u8,
}

/// `enum rdma_cm_event_type`, of what the daemon tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)] // the names of rdma_cm.h
pub enum EventKind {
    AddressResolved = 0,
    AddressError = 1,
    RouteResolved = 2,
    RouteError = 3,
    ConnectRequest = 4,
    ConnectResponse = 5,
    ConnectError = 6,
    Unreachable = 7,
    Rejected = 8,
    Established = 9,
    Disconnected = 10,
    DeviceRemoval = 11,
    MulticastJoin = 12,
    MulticastError = 13,
    AddressChange = 14,
    TimewaitExit = 15,
}

/// What comes along with an event.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Details {
    /// Nothing.
    #[default]
    None,
    /// `param.conn`.
    Connection(Parameters),
    /// `param.ud`.
    Datagram(DatagramParameters),
}

/// `rdma_ucm_event_resp`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// The id that it is about: of a [`EventKind::ConnectRequest`], the listener.
    pub id: Id,
    /// What happened.
    pub kind: EventKind,
    /// 0, a negative errno, or the reason of a REJ (positive), as the kernel has it.
    pub status: i32,
    /// More.
    pub details: Details,
    /// Enhanced connection option of the peer.
    pub ece: Ece,
    /// The new id of a [`EventKind::ConnectRequest`].
    pub new_id: Option<Id>,
    /// The membership of [`EventKind::MulticastJoin`] and [`EventKind::MulticastError`].
    pub membership: Option<MembershipId>,
}

/// What the daemon would have to know of an id after its own death: the process keeps it, in bytes, and never looks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Keepsake {
    /// The id.
    pub id: Id,
    /// Its state; `None` when the id is gone.
    pub state: Option<Vec<u8>>,
}
