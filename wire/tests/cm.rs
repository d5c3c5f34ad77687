//! Messages of the connection manager: captured ones decode to what tshark and the reference say
//! is in them, and come out byte for byte.

mod common;

use std::collections::HashMap;
use std::fmt::Display;
use std::path::Path;

use ferroce_wire::cm::ip_header::{port_of_service, service_id};
use ferroce_wire::cm::{
    Answered, Apr, CmMad, CmMessage, IpHeader, Lap, Path as CmPath, PortSpace, RejReason, ServiceType,
    SidrStatus,
};
use ferroce_wire::mad::{GSI_QKEY, GSI_QPN};
use ferroce_wire::{Frame, Gid, Opcode, PathMtu, udp_port};

/// The CM messages of a capture, by frame number from 1.
fn messages(file: &Path) -> Vec<(usize, CmMad)> {
    let frames = common::frames(file);
    let mut messages = Vec::new();
    for (i, bytes) in frames.iter().enumerate() {
        let frame = Frame::parse(bytes).unwrap();
        let packet = frame.datagram.packet;
        if packet.bth().dest_qpn != GSI_QPN {
            continue;
        }
        assert_eq!(packet.deth().unwrap().qkey, GSI_QKEY);
        let mad = CmMad::parse(packet.payload()).unwrap();
        assert_eq!(
            mad.to_bytes()[..],
            *packet.payload(),
            "{} frame {}",
            file.display(),
            i + 1
        );
        messages.push((i + 1, mad));
    }
    messages
}

/// What tshark calls these fields, with our values.
fn fields(mad: &CmMad) -> HashMap<&'static str, String> {
    let mut out = HashMap::new();
    let mut put = |name, value: &dyn Display| {
        out.insert(name, value.to_string());
    };
    match mad.message {
        CmMessage::Req(m) => {
            put("req", &m.local_comm_id);
            put("req.serviceid", &m.service_id);
            put("req.localcaguid", &m.local_ca_guid);
            put("req.localqkey", &m.local_qkey);
            put("req.localqpn", &m.local_qpn);
            put("req.responderres", &m.responder_resources);
            put("req.localeecn", &m.local_eecn);
            put("req.initdepth", &m.initiator_depth);
            put("req.remoteeecn", &m.remote_eecn);
            put("req.remoteresptout", &m.remote_cm_response_timeout);
            put("req.transpsvctype", &(m.transport as u8));
            put("req.e2eflowctrl", &u8::from(m.end_to_end_flow_control));
            put("req.startpsn", &m.starting_psn.value());
            put("req.localresptout", &m.local_cm_response_timeout);
            put("req.retrcount", &m.retry_count);
            put("req.pkey", &m.pkey);
            put("req.pppmtu", &m.path_mtu);
            put("req.rdcexist", &u8::from(m.rdc_exists));
            put("req.rnrretrcount", &m.rnr_retry_count);
            put("req.maxcmretr", &m.max_cm_retries);
            put("req.srq", &u8::from(m.srq));
            put("req.ext_transport", &m.extended_transport);
            put("req.prim_locallid", &m.primary.local_lid);
            put("req.prim_remotelid", &m.primary.remote_lid);
            put("req.prim_localgid", &m.primary.local_gid);
            put("req.prim_remotegid", &m.primary.remote_gid);
            put("req.prim_localgid_ipv4", &m.primary.local_gid.to_ip());
            put("req.prim_remotegid_ipv4", &m.primary.remote_gid.to_ip());
            put("req.prim_tfcclass", &m.primary.traffic_class);
            put("req.prim_hoplim", &m.primary.hop_limit);
            put("req.prim_sl", &m.primary.sl);
            put("req.prim_subnetlocal", &u8::from(m.primary.subnet_local));
            put("req.prim_localacktout", &m.primary.local_ack_timeout);
            put("req.alt_locallid", &m.alternate.local_lid);
            put("req.alt_remotelid", &m.alternate.remote_lid);
            put("req.alt_tfcclass", &m.alternate.traffic_class);
            put("req.alt_hoplim", &m.alternate.hop_limit);
            put("req.alt_sl", &m.alternate.sl);
            put("req.alt_subnetlocal", &u8::from(m.alternate.subnet_local));
            put("req.alt_localacktout", &m.alternate.local_ack_timeout);
            let ip = IpHeader::parse(&m.private_data).unwrap();
            put("req.ip_cm.majv", &0);
            put("req.ip_cm.minv", &0);
            put("req.ip_cm.ipv", &if ip.addrs.src().is_ipv4() { 4 } else { 6 });
            put("req.ip_cm.sport", &ip.src_port);
            put("req.ip_cm.sip4", &ip.addrs.src());
            put("req.ip_cm.dip4", &ip.addrs.dst());
            put("req.ip_cm.sip6", &ip.addrs.src());
            put("req.ip_cm.dip6", &ip.addrs.dst());
        }
        CmMessage::Rep(m) => {
            put("rep", &m.local_comm_id);
            put("rep.remotecommid", &m.remote_comm_id);
            put("rep.localqkey", &m.local_qkey);
            put("rep.localqpn", &m.local_qpn);
            put("rep.localeecn", &m.local_eecn);
            put("rep.startpsn", &m.starting_psn.value());
            put("rep.respres", &m.responder_resources);
            put("rep.initdepth", &m.initiator_depth);
            put("rep.tgtackdelay", &m.target_ack_delay);
            put("rep.failoveracc", &m.failover_accepted);
            put("rep.e2eflowctrl", &u8::from(m.end_to_end_flow_control));
            put("rep.rnrretrcount", &m.rnr_retry_count);
            put("rep.srq", &u8::from(m.srq));
            put("rep.localcaguid", &m.local_ca_guid);
        }
        CmMessage::Rtu(m) => {
            put("rtu.localcommid", &m.local_comm_id);
            put("rtu.remotecommid", &m.remote_comm_id);
        }
        CmMessage::Rej(m) => {
            put("rej.localcommid", &m.local_comm_id);
            put("rej.remotecommid", &m.remote_comm_id);
            put("rej.msgrej", &(m.message as u8));
            put("rej.rejinfolen", &m.info_len);
            put("rej.reason", &m.reason.0);
        }
        CmMessage::Dreq(m) => {
            put("dreq.localcommid", &m.local_comm_id);
            put("dreq.remotecommid", &m.remote_comm_id);
            put("req.remoteqpneecn", &m.remote_qpn);
        }
        CmMessage::Drep(m) => {
            put("drsp.localcommid", &m.local_comm_id);
            put("drsp.remotecommid", &m.remote_comm_id);
        }
        other => panic!("tshark does not dissect {}", other.name()),
    }
    out
}

/// Every field of every message that tshark dissects: `tests/golden/cm-fields.tsv`.
#[test]
fn captured_messages_say_what_tshark_reads() {
    let golden = common::folder("golden");
    let table = std::fs::read_to_string(golden.join("cm-fields.tsv")).unwrap();
    let mut compared = 0;
    for line in table.lines() {
        let mut columns = line.split('\t');
        let (file, number) = (columns.next().unwrap(), columns.next().unwrap());
        let folder = if file.contains("synthetic") {
            common::folder("captures")
        } else {
            golden.clone()
        };
        let number: usize = number.parse().unwrap();
        let all = messages(&folder.join(file));
        let (_, mad) = all.iter().find(|(n, _)| *n == number).unwrap();
        let ours = fields(mad);
        for column in columns {
            let (name, value) = column.split_once('=').unwrap();
            assert_eq!(
                ours.get(name).map(String::as_str),
                Some(value),
                "{file} {number} {name}"
            );
            compared += 1;
        }
    }
    assert_eq!(table.lines().count(), 48);
    assert!(compared > 700, "{compared}");
}

/// Counts by kind, over all captures.
#[test]
fn every_captured_message_survives() {
    let mut count: HashMap<&str, usize> = HashMap::new();
    let mut files = common::pcaps(&common::folder("golden"));
    files.retain(|file| file.file_name().unwrap().to_string_lossy().starts_with("cm-"));
    files.extend(
        common::pcaps(&common::folder("captures"))
            .into_iter()
            .filter(|file| file.file_name().unwrap().to_string_lossy().starts_with("cm-")),
    );
    for file in &files {
        for (_, mad) in messages(file) {
            *count.entry(mad.message.name()).or_default() += 1;
        }
    }
    for kind in [
        "REQ", "REP", "RTU", "REJ", "MRA", "DREQ", "DREP", "SIDR_REQ", "SIDR_REP",
    ] {
        assert!(count.get(kind).is_some_and(|&n| n > 0), "no {kind}: {count:?}");
    }
}

/// What tshark does not show: the values that the synthetic messages were made with.
#[test]
fn synthetic_messages() {
    let all = messages(&common::folder("captures").join("cm-mads-synthetic.pcap"));
    assert_eq!(all.len(), 9);
    for (_, mad) in &all {
        assert_eq!(mad.attribute_modifier, 0);
        match mad.message {
            CmMessage::Req(m) => {
                assert_eq!(m.vendor_id, 0x0a_bcde);
                assert_eq!(m.service_id, service_id(PortSpace::Tcp, 0x1234));
                assert_eq!(m.transport, ServiceType::Rc);
                assert_eq!(PathMtu::from_code(m.path_mtu), Some(PathMtu::Mtu1024));
                assert_eq!(m.primary.flow_label, 0x1_2345);
                assert_eq!(m.primary.packet_rate, 18);
                assert_eq!(m.alternate, CmPath::default());
                assert!(m.private_data[IpHeader::LEN..].starts_with(b"PRIVREQ\0"));
            }
            CmMessage::Rep(m) => {
                assert_eq!(m.vendor_id, 0xaa_bbcc);
                assert!(m.private_data.starts_with(b"PRIVREP"));
            }
            CmMessage::Rtu(m) => assert!(m.private_data.starts_with(b"PRIVRTU")),
            CmMessage::Rej(m) => {
                assert_eq!(m.message, Answered::Req);
                assert_eq!(m.reason, RejReason::CONSUMER_DEFINED);
                assert!(m.private_data.starts_with(b"PRIVREJ"));
            }
            CmMessage::Mra(m) => {
                assert_eq!((m.local_comm_id, m.remote_comm_id), (0x5566_7788, 0x1122_3344));
                assert_eq!((m.message, m.service_timeout), (Answered::Req, 24));
                assert!(m.private_data.starts_with(b"PRIVMRA"));
            }
            CmMessage::Dreq(m) => assert!(m.private_data.starts_with(b"PRIVDREQ")),
            CmMessage::Drep(m) => assert!(m.private_data.starts_with(b"PRIVDREP")),
            CmMessage::SidrReq(m) => {
                assert_eq!((m.request_id, m.pkey), (0x99, 0xffff));
                assert_eq!(port_of_service(m.service_id), Some((PortSpace::Udp, 0x1234)));
                let ip = IpHeader::parse(&m.private_data).unwrap();
                assert_eq!(ip.src_port, 40000);
                assert_eq!(ip.addrs.src().to_string(), "10.0.0.1");
                assert_eq!(ip.addrs.dst().to_string(), "10.0.0.2");
                assert!(m.private_data[IpHeader::LEN..].starts_with(b"PRIVSQ"));
            }
            CmMessage::SidrRep(m) => {
                assert_eq!((m.request_id, m.status), (0x99, SidrStatus::SUCCESS));
                assert_eq!((m.qpn, m.qkey, m.vendor_id), (0x77, 0x0123_4567, 0));
                assert_eq!(m.service_id, service_id(PortSpace::Udp, 0x1234));
                assert!(m.private_data.starts_with(b"PRIVSR"));
            }
            CmMessage::Lap(_) | CmMessage::Apr(_) => panic!("not in the file"),
        }
    }
}

/// What connections do is what their CM messages announced: QPNs, first PSNs, GIDs, the flow
/// label's source port.
#[test]
fn connections_are_as_their_messages_say() {
    for suffix in ["v4", "v6ll", "v6global"] {
        let file = common::folder("golden").join(format!("cm-ucmatose-{suffix}.pcap"));
        let mads = messages(&file);
        let [(_, req), (_, rep), ..] = mads[..] else {
            panic!("{mads:?}")
        };
        let (CmMessage::Req(req), CmMessage::Rep(rep)) = (req.message, rep.message) else {
            panic!("{req:?} {rep:?}")
        };
        assert_eq!(port_of_service(req.service_id), Some((PortSpace::Tcp, 7471)));
        let port = udp_port::source_port(req.primary.flow_label);
        let frames = common::frames(&file);
        let mut first: HashMap<Gid, u32> = HashMap::new();
        for bytes in &frames {
            let frame = Frame::parse(bytes).unwrap();
            let (network, packet) = (frame.datagram.network, frame.datagram.packet);
            if packet.opcode() != Opcode::RcSendOnly {
                continue;
            }
            let from_active = network.src() == req.primary.local_gid;
            assert!(from_active || network.src() == req.primary.remote_gid);
            assert_eq!(
                packet.bth().dest_qpn,
                if from_active { rep.local_qpn } else { req.local_qpn }
            );
            if from_active {
                assert_eq!(network.udp().unwrap().src_port, port);
            }
            first.entry(network.src()).or_insert(packet.bth().psn.value());
        }
        // Each side names the PSN that the other is to begin with.
        let (active, passive) = (req.primary.local_gid, req.primary.remote_gid);
        assert_eq!(first.get(&passive), Some(&req.starting_psn.value()));
        assert_eq!(first.get(&active), Some(&rep.starting_psn.value()));
    }
}

/// Datagrams go to the queue pair, with the key, that SIDR_REP named.
#[test]
fn datagrams_are_as_sidr_says() {
    for suffix in ["v4", "v6ll", "v6global"] {
        let file = common::folder("golden").join(format!("cm-sidr-udaddy-{suffix}.pcap"));
        let mads = messages(&file);
        let [(_, req), (_, rep)] = mads[..] else {
            panic!("{mads:?}")
        };
        let (CmMessage::SidrReq(req), CmMessage::SidrRep(rep)) = (req.message, rep.message) else {
            panic!("{req:?} {rep:?}")
        };
        assert_eq!(req.request_id, rep.request_id);
        assert_eq!(rep.status, SidrStatus::SUCCESS);
        let ip = IpHeader::parse(&req.private_data).unwrap();
        let mut datagrams = 0;
        for bytes in &common::frames(&file) {
            let frame = Frame::parse(bytes).unwrap();
            let packet = frame.datagram.packet;
            let from_active = frame.datagram.network.src() == Gid::from_ip(ip.addrs.src());
            if packet.bth().dest_qpn != GSI_QPN && from_active {
                assert_eq!(frame.datagram.network.dst(), Gid::from_ip(ip.addrs.dst()));
                assert_eq!(packet.bth().dest_qpn, rep.qpn);
                assert_eq!(packet.deth().unwrap().qkey, rep.qkey);
                datagrams += 1;
            }
        }
        assert_eq!(datagrams, 2);
    }
    for (_, mad) in messages(&common::folder("golden").join("cm-sidr-rej-v4.pcap")) {
        if let CmMessage::SidrRep(rep) = mad.message {
            assert_eq!(rep.status, SidrStatus::UNSUPPORTED);
        }
    }
}

/// LAP and APR are in no capture: bytes as the reference places them.
#[test]
fn alternate_path_messages() {
    let mut data = [0; Lap::LEN];
    data[..8].copy_from_slice(&[1, 2, 3, 4, 5, 6, 7, 8]);
    data[12..16].copy_from_slice(&[0xaa, 0xbb, 0xcc, 20 << 3]);
    data[20..24].copy_from_slice(&[0x11, 0x12, 0x21, 0x22]);
    data[24..40].fill(0x31);
    data[40..56].fill(0x32);
    data[56..64].copy_from_slice(&[0x12, 0x34, 0x50, 0x61, 0x62, 0x23, 0x98, 19 << 3]);
    data[64..].fill(0x77);
    let lap = Lap {
        local_comm_id: 0x0102_0304,
        remote_comm_id: 0x0506_0708,
        remote_qpn: 0xaa_bbcc,
        remote_cm_response_timeout: 20,
        alternate: CmPath {
            local_lid: 0x1112,
            remote_lid: 0x2122,
            local_gid: Gid([0x31; 16]),
            remote_gid: Gid([0x32; 16]),
            flow_label: 0x1_2345,
            traffic_class: 0x61,
            hop_limit: 0x62,
            packet_rate: 0x23,
            sl: 9,
            subnet_local: true,
            local_ack_timeout: 19,
        },
        private_data: [0x77; 168],
    };
    assert_eq!(Lap::parse(&data), Ok(lap));
    assert_eq!(lap.to_bytes(), data);

    let mut data = [0; Apr::LEN];
    data[..10].copy_from_slice(&[1, 2, 3, 4, 5, 6, 7, 8, 16, 8]);
    data[12..84].fill(0x55);
    data[84..].fill(0x66);
    let apr = Apr {
        local_comm_id: 0x0102_0304,
        remote_comm_id: 0x0506_0708,
        info_len: 16,
        status: 8,
        info: [0x55; 72],
        private_data: [0x66; 148],
    };
    assert_eq!(Apr::parse(&data), Ok(apr));
    assert_eq!(apr.to_bytes(), data);
}

/// MADs of other classes, versions, methods and attributes are refused, and cut ones.
#[test]
fn other_mads_are_refused() {
    let good = CmMad {
        tid: 1,
        attribute_modifier: 0,
        message: Apr::default().into(),
    }
    .to_bytes();
    assert!(CmMad::parse(&good).is_ok());
    assert!(CmMad::parse(&good[..255]).is_err());
    for (at, value) in [
        (0, 2),
        (1, 0x04),
        (2, 1),
        (3, 0x81),
        (16, 1),
        (17, 0x1b),
        (17, 0x0f),
    ] {
        let mut bad = good;
        bad[at] = value;
        assert!(CmMad::parse(&bad).is_err(), "byte {at}");
    }
}
