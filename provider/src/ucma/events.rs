//! Events as the program reads them (`rdma_ucm_event_resp`).

use ferroce_engine::rdma_cm::{AddressVector, DatagramParameters, Details, Event, Parameters, QpKind};

use super::layout::{
    MAX_PRIVATE_DATA, Plain, ib_uverbs_ah_attr, ib_uverbs_global_route, rdma_ucm_conn_param, rdma_ucm_ece,
    rdma_ucm_event_resp, rdma_ucm_ud_param,
};

/// Bytes of an event without the members that were added at its end.
pub const SHORTEST: usize = size_of::<rdma_ucm_event_resp>() - size_of::<rdma_ucm_ece>() - size_of::<u32>();

/// The event of the daemon, with the number and the context that the program knows the object by.
pub fn response(event: &Event, number: u32, uid: u64, qp_kind: QpKind) -> rdma_ucm_event_resp {
    let mut response = rdma_ucm_event_resp {
        uid,
        id: number,
        event: event.kind as u32,
        status: event.status.cast_unsigned(),
        ece: rdma_ucm_ece {
            vendor_id: event.ece.vendor_id,
            attr_mod: event.ece.attr_mod,
        },
        ..rdma_ucm_event_resp::zeroed()
    };
    match &event.details {
        Details::None => {}
        // The program takes the union for what suits its queue pair.
        Details::Connection(parameters) if qp_kind != QpKind::Ud => {
            put(&mut response, connection(parameters).bytes());
        }
        Details::Datagram(parameters) if qp_kind == QpKind::Ud => {
            put(&mut response, datagram(parameters).bytes());
        }
        Details::Connection(_) | Details::Datagram(_) => {
            tracing::warn!("an event of {qp_kind:?} has parameters of another kind");
        }
    }
    response
}

/// An event that the program has made itself.
pub fn own(id: u32, uid: u64, kind: u32, status: u32, argument: u64) -> rdma_ucm_event_resp {
    let mut response = rdma_ucm_event_resp {
        uid,
        id,
        event: kind,
        status,
        ..rdma_ucm_event_resp::zeroed()
    };
    put(&mut response, &argument.to_ne_bytes());
    response
}

fn put(response: &mut rdma_ucm_event_resp, member: &[u8]) {
    response.param[..member.len()].copy_from_slice(member);
}

/// Private data and its length.
fn private(data: &[u8]) -> ([u8; MAX_PRIVATE_DATA], u8) {
    let mut place = [0; MAX_PRIVATE_DATA];
    let length = data.len().min(u8::MAX.into());
    place[..length].copy_from_slice(&data[..length]);
    (place, length as u8)
}

fn connection(parameters: &Parameters) -> rdma_ucm_conn_param {
    let (private_data, private_data_len) = private(&parameters.private_data);
    rdma_ucm_conn_param {
        qp_num: parameters.qpn,
        qkey: 0,
        private_data,
        private_data_len,
        srq: parameters.srq.into(),
        responder_resources: parameters.responder_resources,
        initiator_depth: parameters.initiator_depth,
        flow_control: parameters.flow_control.into(),
        retry_count: parameters.retry_count,
        rnr_retry_count: parameters.rnr_retry_count,
        valid: 0,
    }
}

fn datagram(parameters: &DatagramParameters) -> rdma_ucm_ud_param {
    let (private_data, private_data_len) = private(&parameters.private_data);
    rdma_ucm_ud_param {
        qp_num: parameters.qpn,
        qkey: parameters.qkey,
        ah_attr: address_handle(&parameters.address),
        private_data,
        private_data_len,
        reserved: [0; 7],
    }
}

/// Attributes of an address handle; all zeros if there is no address.
pub fn address_handle(address: &AddressVector) -> ib_uverbs_ah_attr {
    if *address == AddressVector::default() {
        return ib_uverbs_ah_attr::zeroed();
    }
    ib_uverbs_ah_attr {
        grh: ib_uverbs_global_route {
            dgid: address.dest_gid,
            flow_label: address.flow_label,
            sgid_index: address.source_index,
            hop_limit: address.hop_limit,
            traffic_class: address.traffic_class,
            reserved: 0,
        },
        sl: address.sl,
        static_rate: address.rate,
        is_global: 1,
        port_num: address.port,
        ..ib_uverbs_ah_attr::zeroed()
    }
}

#[cfg(test)]
mod tests {
    use ferroce_engine::rdma_cm::{Ece, EventKind};

    use super::*;

    fn event(kind: EventKind, details: Details) -> Event {
        Event {
            id: 3,
            kind,
            status: -110,
            details,
            ece: Ece {
                vendor_id: 0x15b3,
                attr_mod: 9,
            },
            new_id: None,
            membership: None,
        }
    }

    fn at<const N: usize>(response: &rdma_ucm_event_resp, offset: usize) -> [u8; N] {
        response.bytes()[offset..offset + N].try_into().unwrap()
    }

    #[test]
    fn a_connection_event_in_bytes() {
        let parameters = Parameters {
            qpn: 0x0102_0304,
            qkey: 5,
            private_data: vec![0xaa; 56],
            responder_resources: 1,
            initiator_depth: 2,
            flow_control: true,
            retry_count: 7,
            rnr_retry_count: 6,
            srq: true,
        };
        let event = event(EventKind::ConnectRequest, Details::Connection(parameters));
        let response = response(&event, 4, 0x1122_3344_5566_7788, QpKind::Rc);
        assert_eq!(response.bytes().len(), 336);
        assert_eq!(SHORTEST, 324);
        assert_eq!(at(&response, 0), 0x1122_3344_5566_7788u64.to_ne_bytes());
        assert_eq!(at(&response, 8), 4u32.to_ne_bytes());
        assert_eq!(at(&response, 12), 4u32.to_ne_bytes());
        assert_eq!(at(&response, 16), (-110i32).to_ne_bytes());
        assert_eq!(at(&response, 20), 0x0102_0304u32.to_ne_bytes());
        assert_eq!(at(&response, 24), [0; 4], "no Q_Key of a connection");
        assert_eq!(at(&response, 28), [0xaa; 56]);
        assert_eq!(at(&response, 28 + 256), [56, 1, 1, 2, 1, 7, 6, 0]);
        assert_eq!(at(&response, 328), 0x15b3u32.to_ne_bytes());
        assert_eq!(at(&response, 332), 9u32.to_ne_bytes());
    }

    #[test]
    fn a_datagram_event_in_bytes() {
        let parameters = DatagramParameters {
            qpn: 7,
            qkey: 0x0123_4567,
            private_data: vec![0xbb; 136],
            address: AddressVector {
                dest_gid: [9; 16],
                source_index: 2,
                flow_label: 0x12345,
                hop_limit: 64,
                traffic_class: 8,
                sl: 1,
                rate: 3,
                port: 1,
            },
        };
        let event = event(EventKind::Established, Details::Datagram(parameters));
        let response = response(&event, 3, 1, QpKind::Ud);
        assert_eq!(at(&response, 24), 0x0123_4567u32.to_ne_bytes());
        assert_eq!(at(&response, 28), [9; 16]);
        assert_eq!(at(&response, 44), 0x12345u32.to_ne_bytes());
        assert_eq!(at(&response, 48), [2, 64, 8, 0, 0, 0, 1, 0, 3, 1, 1, 0]);
        assert_eq!(at(&response, 60), [0xbb; 136]);
        assert_eq!(at(&response, 60 + 256), [136]);
    }

    #[test]
    fn what_does_not_suit_the_queue_pair_is_left_out() {
        let event = event(EventKind::Established, Details::Connection(Parameters::default()));
        assert_eq!(response(&event, 3, 1, QpKind::Ud).param, [0; 304]);
    }
}
