//! What ids know: addresses, paths, attributes of queue pairs (QUERY_ROUTE, QUERY, INIT_QP_ATTR).

use std::mem::{offset_of, size_of};

use ferroce_engine::rdma_cm::{Answer, Command, Id, PathRecord, QpAttributes, Route};

use super::command::Call;
use super::layout::*;
use super::user::{self, Result};
use super::{Channel, address, events};

/// `RDMA_USER_CM_QUERY_*`.
const ADDRESS: u32 = 0;
const PATH: u32 = 1;
const GID: u32 = 2;
const IB_SERVICE: u32 = 3;
/// `IB_PATH_GMP | IB_PATH_PRIMARY | IB_PATH_BIDIRECTIONAL`.
pub(super) const PATH_FLAGS: u32 = 1 | 2 | 8 | 32;
/// `IB_SA_EQ`: the value is exact.
const EXACTLY: u8 = 2;
/// `IBV_QP_AV`.
const ADDRESS_VECTOR: u32 = 1 << 7;
/// The index of the device is not known: librdmacm finds it by its GUID.
const NO_INDEX: u32 = u32::MAX;

impl Channel {
    /// What the daemon knows of an id.
    pub(super) fn route(&self, id: Id) -> Result<Route> {
        match self.ask(id, Command::Query { id })? {
            Answer::Route(route) => Ok(*route),
            _ => Err(libc::EIO),
        }
    }

    pub(super) fn query_route(&self, call: &Call) -> Result<()> {
        call.fits(offset_of!(rdma_ucm_query_route_resp, ibdev_index))?;
        let rdma_ucm_query { response, id, .. } = call.argument()?;
        call.respond(response, &route_response(&self.route(id)?))
    }

    pub(super) fn query(&self, call: &Call) -> Result<()> {
        let rdma_ucm_query { response, id, option } = call.argument()?;
        let port_space = self.process.state.lock().id(id, self.number)?.port_space as u16;
        match option {
            ADDRESS => {
                call.fits(offset_of!(rdma_ucm_query_addr_resp, ibdev_index))?;
                call.respond(response, &address_response(&self.route(id)?))
            }
            PATH => {
                call.fits(size_of::<rdma_ucm_query_path_resp>())?;
                user::write_bytes(response, &path_response(&self.route(id)?, call.room.into()))
            }
            GID => {
                call.fits(offset_of!(rdma_ucm_query_addr_resp, ibdev_index))?;
                call.respond(response, &gid_response(&self.route(id)?, port_space))
            }
            IB_SERVICE => {
                call.fits(size_of::<rdma_ucm_query_ib_service_resp>())?;
                Err(libc::ENODATA)
            }
            _ => Err(libc::ENOSYS),
        }
    }
}

/// The members of the device.
fn device(route: &Route) -> ([u8; 8], u8, [u8; 2]) {
    match route.node_guid {
        Some(guid) => (guid.to_be_bytes(), route.port, route.pkey.to_be_bytes()),
        None => ([0; 8], 0, [0; 2]),
    }
}

fn route_response(route: &Route) -> rdma_ucm_query_route_resp {
    let (node_guid, port_num, _) = device(route);
    let mut response = rdma_ucm_query_route_resp {
        node_guid,
        port_num,
        src_addr: address::to_in6(route.source.as_ref()),
        dst_addr: address::to_in6(route.dest.as_ref()),
        ibdev_index: NO_INDEX,
        ..rdma_ucm_query_route_resp::zeroed()
    };
    if route.node_guid.is_none() {
        return response;
    }
    let first = &mut response.ib_route[0];
    if let Some(path) = &route.path {
        response.num_paths = 1;
        *first = ib_user_path_rec {
            dgid: path.dest_gid,
            sgid: path.source_gid,
            flow_label: path.flow_label.to_be_bytes(),
            reversible: 1,
            mtu: path.mtu.into(),
            pkey: path.pkey.to_be_bytes(),
            hop_limit: path.hop_limit,
            traffic_class: path.traffic_class,
            sl: path.sl,
            mtu_selector: EXACTLY,
            rate_selector: EXACTLY,
            rate: path.rate,
            packet_life_time_selector: EXACTLY,
            packet_life_time: path.packet_life_time,
            ..ib_user_path_rec::zeroed()
        };
    } else {
        first.dgid = address::gid_of(route.dest.as_ref());
        first.sgid = address::gid_of(route.source.as_ref());
        first.pkey = 0xffffu16.to_be_bytes();
    }
    response
}

fn address_response(route: &Route) -> rdma_ucm_query_addr_resp {
    let (node_guid, port_num, pkey) = device(route);
    let (src_addr, src_size) = address::to_storage(route.source.as_ref());
    let (dst_addr, dst_size) = address::to_storage(route.dest.as_ref());
    rdma_ucm_query_addr_resp {
        node_guid,
        port_num,
        reserved: 0,
        pkey,
        src_size,
        dst_size,
        src_addr,
        dst_addr,
        ibdev_index: NO_INDEX,
        reserved1: 0,
    }
}

fn gid_response(route: &Route, port_space: u16) -> rdma_ucm_query_addr_resp {
    use ferroce_engine::rdma_cm::Address;
    let pkey = route.node_guid.map_or(0, |_| route.pkey);
    let ib =
        |of: &Option<Address>, gid| Some(Address::Ib(address::as_ib(of.as_ref(), gid, pkey, port_space)));
    address_response(&Route {
        source: ib(&route.source, route.source_gid),
        dest: ib(&route.dest, route.dest_gid),
        ..route.clone()
    })
}

/// The response and as many paths as it has room for. As in the kernel, a path needs room for more than itself.
fn path_response(route: &Route, room: usize) -> Vec<u8> {
    let header = rdma_ucm_query_path_resp {
        num_paths: route.path.is_some().into(),
        reserved: 0,
    };
    let mut response = header.bytes().to_vec();
    if let Some(path) = &route.path
        && room - response.len() > size_of::<ib_path_rec_data>()
    {
        let data = ib_path_rec_data {
            flags: PATH_FLAGS,
            reserved: 0,
            path_rec: pack_path(path),
        };
        response.extend_from_slice(data.bytes());
    }
    response
}

/// A path record as on the wire of InfiniBand.
pub(super) fn pack_path(path: &PathRecord) -> [u8; 64] {
    let mut record = [0; 64];
    let mut put = |at: usize, bytes: &[u8]| record[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, &path.service_id.to_be_bytes());
    put(8, &path.dest_gid);
    put(24, &path.source_gid);
    put(
        44,
        &(path.flow_label << 8 | u32::from(path.hop_limit)).to_be_bytes(),
    );
    put(48, &[path.traffic_class]);
    put(49, &[1 << 7]); // reversible
    put(50, &path.pkey.to_be_bytes());
    put(52, &u16::from(path.sl & 0xf).to_be_bytes());
    let exactly = EXACTLY << 6;
    let rates = [path.mtu, path.rate, path.packet_life_time].map(|value| exactly | value & 0x3f);
    put(54, &rates);
    record
}

/// Reads a path record as on the wire of InfiniBand.
pub(super) fn unpack_path(record: &[u8; 64]) -> PathRecord {
    fn at<const N: usize>(record: &[u8; 64], offset: usize) -> [u8; N] {
        std::array::from_fn(|n| record[offset + n])
    }
    let flow = u32::from_be_bytes(at(record, 44));
    PathRecord {
        service_id: u64::from_be_bytes(at(record, 0)),
        dest_gid: at(record, 8),
        source_gid: at(record, 24),
        flow_label: flow >> 8 & 0xf_ffff,
        hop_limit: flow as u8,
        traffic_class: record[48],
        pkey: u16::from_be_bytes(at(record, 50)),
        sl: record[53] & 0xf,
        mtu: record[54] & 0x3f,
        rate: record[55] & 0x3f,
        packet_life_time: record[56] & 0x3f,
    }
}

/// The attributes as the program reads them.
pub(super) fn qp_attributes(from: &QpAttributes) -> ib_uverbs_qp_attr {
    let with_address = from.mask & ADDRESS_VECTOR != 0;
    ib_uverbs_qp_attr {
        qp_attr_mask: from.mask,
        qp_state: from.state.into(),
        path_mtu: from.path_mtu.into(),
        qkey: from.qkey,
        rq_psn: from.rq_psn,
        sq_psn: from.sq_psn,
        dest_qp_num: from.dest_qpn,
        qp_access_flags: from.access,
        ah_attr: if with_address {
            events::address_handle(&from.address)
        } else {
            ib_uverbs_ah_attr::zeroed()
        },
        pkey_index: from.pkey_index,
        max_rd_atomic: from.max_rd_atomic,
        max_dest_rd_atomic: from.max_dest_rd_atomic,
        min_rnr_timer: from.min_rnr_timer,
        port_num: from.port,
        timeout: from.timeout,
        retry_cnt: from.retry_count,
        rnr_retry: from.rnr_retry,
        ..ib_uverbs_qp_attr::zeroed()
    }
}

#[cfg(test)]
mod tests {
    use ferroce_engine::rdma_cm::{Address, AddressVector};

    use super::*;

    fn route() -> Route {
        Route {
            node_guid: Some(0x0102_0304_0506_0708),
            device: Some("ferroce_lo".into()),
            port: 1,
            source: Some(Address::Ip("10.0.0.1:7471".parse().unwrap())),
            dest: Some(Address::Ip("10.0.0.2:5".parse().unwrap())),
            source_gid: [1; 16],
            dest_gid: [2; 16],
            pkey: 0xffff,
            path: None,
        }
    }

    fn path() -> PathRecord {
        PathRecord {
            dest_gid: [2; 16],
            source_gid: [1; 16],
            service_id: 0,
            flow_label: 0x12345,
            hop_limit: 64,
            traffic_class: 8,
            pkey: 0xffff,
            sl: 3,
            mtu: 5,
            rate: 7,
            packet_life_time: 18,
        }
    }

    #[test]
    fn a_route_in_bytes() {
        let bytes = route_response(&route());
        assert_eq!(bytes.bytes().len(), 208);
        assert_eq!(bytes.bytes()[..8], [1, 2, 3, 4, 5, 6, 7, 8]);
        assert_eq!(bytes.bytes()[8..24], *b"\0\0\0\0\0\0\0\0\0\0\xff\xff\x0a\0\0\x02");
        assert_eq!(bytes.bytes()[136..144], [2, 0, 0x1d, 0x2f, 10, 0, 0, 1]);
        assert_eq!((bytes.num_paths, bytes.port_num), (0, 1));
        let resolved = route_response(&Route {
            path: Some(path()),
            ..route()
        });
        assert_eq!(resolved.num_paths, 1);
        let record = [
            0, 1, 0x23, 0x45, 1, 0, 0, 0, 5, 0, 0, 0, 0xff, 0xff, 64, 8, 0, 3, 2, 2, 7, 2, 18, 0,
        ];
        assert_eq!(resolved.ib_route[0].bytes()[40..], record);
        let unbound = route_response(&Route {
            node_guid: None,
            ..route()
        });
        assert_eq!((unbound.node_guid, unbound.port_num), ([0; 8], 0));
        assert_eq!(unbound.ib_route[0].bytes(), [0; 64]);
    }

    #[test]
    fn addresses_and_gids() {
        let response = address_response(&route());
        assert_eq!(response.bytes().len(), 280);
        assert_eq!(response.bytes()[8..16], [1, 0, 0xff, 0xff, 16, 0, 16, 0]);
        let response = gid_response(&route(), 0x0106);
        assert_eq!((response.src_size, response.dst_size), (48, 48));
        assert_eq!(response.bytes()[16..24], [27, 0, 0xff, 0xff, 0, 0, 0, 0]);
        assert_eq!(response.bytes()[24..40], [1; 16]);
        assert_eq!(response.bytes()[40..48], [0, 0, 0, 0, 1, 6, 0x1d, 0x2f]);
        assert_eq!(response.bytes()[144 + 8..144 + 24], [2; 16]);
        let nothing = address_response(&Route::default());
        assert_eq!(nothing.bytes()[..272], [0; 272]);
        assert_eq!(nothing.ibdev_index, u32::MAX);
    }

    #[test]
    fn paths_if_there_is_room() {
        let resolved = Route {
            path: Some(path()),
            ..route()
        };
        let whole = path_response(&resolved, 8 + 73);
        assert_eq!(whole.len(), 8 + 72);
        assert_eq!(whole[..12], [1, 0, 0, 0, 0, 0, 0, 0, 43, 0, 0, 0]);
        let record: [u8; 64] = whole[16..].try_into().unwrap();
        assert_eq!(
            record[44..57],
            [0x01, 0x23, 0x45, 64, 8, 0x80, 0xff, 0xff, 0, 3, 0x85, 0x87, 0x92]
        );
        assert_eq!(unpack_path(&record), path());
        assert_eq!(path_response(&resolved, 8 + 72).len(), 8);
        assert_eq!(path_response(&route(), 500), [0; 8]);
    }

    #[test]
    fn attributes_in_bytes() {
        let attributes = QpAttributes {
            mask: ADDRESS_VECTOR | 1,
            state: 2,
            address: AddressVector {
                dest_gid: [9; 16],
                port: 1,
                ..AddressVector::default()
            },
            timeout: 19,
            ..QpAttributes::default()
        };
        let bytes = qp_attributes(&attributes);
        assert_eq!(bytes.bytes().len(), 144);
        assert_eq!(bytes.bytes()[40..56], [9; 16]);
        assert_eq!(bytes.ah_attr.is_global, 1);
        assert_eq!(bytes.bytes()[134], 19);
        let without = qp_attributes(&QpAttributes {
            mask: 1,
            ..attributes
        });
        assert_eq!(without.ah_attr.bytes(), [0; 32]);
    }
}
