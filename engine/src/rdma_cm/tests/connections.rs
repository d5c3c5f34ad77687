//! Connections without losses: what either side is told, step by step.

use std::time::Duration;

use ferroce_wire::cm::{CmMad, CmMessage};

use super::world::{PROGRAM, World, address, parameters};
use crate::rdma_cm::{
    Arrival, Command, Details, EventKind, IdOption, Output, Parameters, PortSpace, TargetState,
};

fn connection(details: &Details) -> &Parameters {
    match details {
        Details::Connection(parameters) => parameters,
        other => panic!("{other:?}"),
    }
}

#[test]
fn both_sides_learn_what_the_other_said() {
    for to in ["10.0.0.2:7174", "[fd00::2]:7174", "[fe80::b%2]:7174"] {
        let mut world = World::new(1);
        let listener = world.listener(1, PortSpace::Tcp, "[::]:7174");
        let client = world.route(0, PortSpace::Tcp, to);
        world.connect(0, client, parameters(0x11)).unwrap();
        let request = world.expect(1, EventKind::ConnectRequest);
        assert_eq!(request.id, listener);
        let server = request.new_id.unwrap();
        world.command(1, Command::Taken { id: server }).unwrap();
        let theirs = connection(&request.details);
        // What one sends at once, the other takes at once.
        assert_eq!((theirs.responder_resources, theirs.initiator_depth), (5, 3));
        assert_eq!((theirs.retry_count, theirs.rnr_retry_count), (6, 7));
        assert_eq!((theirs.qpn, theirs.flow_control, theirs.srq), (0x11, true, false));
        assert_eq!(theirs.private_data.len(), 56);
        assert_eq!(
            theirs.private_data[..9],
            [0x11, 0x11, 0x11, 0x11, 0x11, 0x11, 0x11, 0x11, 0]
        );

        let init = world.attributes(1, server, TargetState::Init).unwrap();
        assert_eq!((init.mask, init.access, init.port), (0x39, 0xe, 1));
        let rtr = world.attributes(1, server, TargetState::Rtr).unwrap();
        assert_eq!(rtr.mask, 0x0012_9181);
        assert_eq!((rtr.dest_qpn, rtr.path_mtu, rtr.max_dest_rd_atomic), (0x11, 3, 5));
        let rts = world.attributes(1, server, TargetState::Rts).unwrap();
        assert_eq!(rts.mask, 0x0001_2e01);
        assert_eq!((rts.retry_count, rts.rnr_retry, rts.max_rd_atomic), (6, 7, 3));

        let reply = Parameters {
            responder_resources: 2,
            initiator_depth: 1,
            rnr_retry_count: 4,
            private_data: vec![9; 196],
            ..parameters(0x22)
        };
        world.accept(1, server, Some(reply)).unwrap();
        let response = world.expect(0, EventKind::ConnectResponse);
        let theirs = connection(&response.details);
        assert_eq!((theirs.responder_resources, theirs.initiator_depth), (1, 2));
        assert_eq!((theirs.qpn, theirs.rnr_retry_count), (0x22, 4));
        assert_eq!(theirs.private_data, [9; 196]);

        let ours = world.attributes(0, client, TargetState::Rtr).unwrap();
        let sending = world.attributes(0, client, TargetState::Rts).unwrap();
        let rts = world.attributes(1, server, TargetState::Rts).unwrap();
        let rtr = world.attributes(1, server, TargetState::Rtr).unwrap();
        assert_eq!(ours.dest_qpn, 0x22);
        assert_eq!((ours.rq_psn, sending.sq_psn), (rts.sq_psn, rtr.rq_psn));
        assert_eq!(ours.address.dest_gid, address(to).gid());
        assert_eq!(ours.address.port, 1);
        assert_eq!(ours.address.hop_limit, 64);

        world.accept(0, client, None).unwrap();
        world.expect(1, EventKind::Established);
        for row in world.hosts.iter().flat_map(|host| host.cm.status()) {
            assert!(["LISTEN", "CONNECTED"].contains(&row.state.as_str()), "{row:?}");
        }

        world.command(0, Command::Disconnect { id: client }).unwrap();
        let end = world.expect(1, EventKind::Disconnected);
        assert_eq!((end.id, end.status), (server, 0));
        world.command(1, Command::Disconnect { id: server }).unwrap();
        world.expect(0, EventKind::Disconnected);
        world.expect(0, EventKind::TimewaitExit);
        world.expect(1, EventKind::TimewaitExit);
        world.finish();
    }
}

#[test]
fn a_rejection_has_reason_and_private_data() {
    for (reason, shown) in [(0, 28), (28, 28), (35, 35)] {
        let mut world = World::new(2);
        world.listener(1, PortSpace::Tcp, "10.0.0.2:7174");
        let client = world.route(0, PortSpace::Tcp, "10.0.0.2:7174");
        world.connect(0, client, parameters(1)).unwrap();
        let server = world.expect(1, EventKind::ConnectRequest).new_id.unwrap();
        let reject = |reason, len| Command::Reject {
            id: server,
            reason,
            private_data: vec![7; len],
        };
        assert_eq!(world.command(1, reject(1, 0)), Err(libc::EINVAL));
        assert_eq!(world.command(1, reject(reason, 149)), Err(libc::EINVAL));
        world.command(1, reject(reason, 148)).unwrap();
        let event = world.expect(0, EventKind::Rejected);
        assert_eq!(event.status, shown);
        assert_eq!(connection(&event.details).private_data, [7; 148]);
        // What was rejected can not be accepted any more.
        assert_eq!(world.accept(1, server, Some(parameters(2))), Err(libc::EINVAL));
        world.finish();
    }
}

#[test]
fn private_data_has_exactly_its_room() {
    let with = |len| Parameters {
        private_data: vec![1; len],
        ..parameters(1)
    };
    let mut world = World::new(3);
    world.listener(1, PortSpace::Tcp, "0.0.0.0:1");
    let client = world.route(0, PortSpace::Tcp, "10.0.0.2:1");
    assert_eq!(world.connect(0, client, with(57)), Err(libc::EINVAL));
    world.connect(0, client, with(56)).unwrap();
    let server = world.expect(1, EventKind::ConnectRequest).new_id.unwrap();
    // As in the kernel, what can not be accepted is rejected.
    assert_eq!(world.accept(1, server, Some(with(197))), Err(libc::EINVAL));
    assert_eq!(world.expect(0, EventKind::Rejected).status, 28);
    world.finish();
}

/// A device in XDP mode has each GID twice.
#[test]
fn connections_are_of_v2() {
    use super::world::{device, ip};
    use crate::control::GidEntry;
    use crate::link::RoceVersion;
    let mut device = device("a", 2, &["10.0.0.1"]);
    let v1 = GidEntry::new(RoceVersion::V1, ip("10.0.0.1"));
    device.gids.insert(0, Some(v1));
    assert_eq!(crate::rdma_cm::bind::gid_index(&device, v1.addr), Some(1));
    device.gids.truncate(1);
    assert_eq!(crate::rdma_cm::bind::gid_index(&device, v1.addr), None);
}

#[test]
fn nobody_listens() {
    let mut world = World::new(4);
    let client = world.route(0, PortSpace::Tcp, "10.0.0.2:9");
    world.connect(0, client, parameters(1)).unwrap();
    assert_eq!(world.expect(0, EventKind::Rejected).status, 8);
    // One listens at the port, but not at the address.
    world.hosts[1].devices[0]
        .gids
        .push(Some(crate::control::GidEntry::roce_v2(super::world::ip(
            "10.0.0.3",
        ))));
    let devices = world.hosts[1].devices.clone();
    let now = world.now;
    world.hosts[1].cm.set_devices(now, &devices);
    world.listener(1, PortSpace::Tcp, "10.0.0.3:9");
    let client = world.route(0, PortSpace::Tcp, "10.0.0.2:9");
    world.connect(0, client, parameters(1)).unwrap();
    assert_eq!(world.expect(0, EventKind::Rejected).status, 28);
    world.finish();
}

#[test]
fn a_peer_that_is_not_there() {
    let mut world = World::new(5);
    let client = world.route(0, PortSpace::Tcp, "10.0.0.2:9");
    world.lose = Box::new(|| Some(super::world::Fault::Lost));
    let start = world.now;
    world.connect(0, client, parameters(1)).unwrap();
    let event = world.expect(0, EventKind::Unreachable);
    assert_eq!(event.status, -libc::ETIMEDOUT);
    assert!(world.now.since(start) < Duration::from_secs(180));
    world.finish();
}

#[test]
fn a_host_reaches_itself() {
    use super::world::device;
    for to in ["10.0.0.1:5", "127.0.0.1:5", "0.0.0.0:5", "[::1]:5"] {
        let mut world = World::of(
            6,
            vec![vec![
                device("lo", 1, &["127.0.0.1", "::1"]),
                device("a", 2, &["10.0.0.1"]),
            ]],
        );
        let listener = world.listener(0, PortSpace::Tcp, "[::]:5");
        let client = world.route(0, PortSpace::Tcp, to);
        world.connect(0, client, parameters(1)).unwrap();
        let event = world.expect(0, EventKind::ConnectRequest);
        assert_eq!(event.id, listener);
        let server = event.new_id.unwrap();
        world.accept(0, server, Some(parameters(2))).unwrap();
        world.expect(0, EventKind::ConnectResponse);
        world.accept(0, client, None).unwrap();
        assert_eq!(world.expect(0, EventKind::Established).id, server);
        world.command(0, Command::Destroy { id: client }).unwrap();
        assert_eq!(world.expect(0, EventKind::Disconnected).id, server);
        world.finish();
    }
}

#[test]
fn listeners_that_do_not_answer_leave_room_for_others() {
    let mut world = World::new(12);
    for port in 100..110 {
        world.listener(1, PortSpace::Tcp, &format!("0.0.0.0:{port}"));
    }
    // A REQ on its way, changed for each of a flood.
    let client = world.route(0, PortSpace::Tcp, "10.0.0.2:109");
    let connect = Command::Connect {
        id: client,
        parameters: parameters(1),
        ece: crate::rdma_cm::Ece::default(),
    };
    let now = world.now;
    world.hosts[0].cm.command(now, PROGRAM, connect).unwrap();
    let sent = std::iter::from_fn(|| world.hosts[0].cm.poll()).find_map(|output| match output {
        Output::Send { mad, .. } => Some(mad),
        _ => None,
    });
    let flood = CmMad::parse(&sent.unwrap()[..]).unwrap();
    let mut came = 0;
    let mut send = |world: &mut World, number: u32, port: u64| {
        let mut mad = flood;
        let CmMessage::Req(req) = &mut mad.message else {
            panic!("no REQ");
        };
        (req.local_comm_id, req.local_qpn) = (number, number & 0xff_ffff);
        req.service_id = req.service_id & !0xffff | port;
        let arrival = Arrival {
            device: "b",
            source: super::world::ip("10.0.0.1"),
            dest: super::world::ip("10.0.0.2"),
            ifindex: 3,
            traffic_class: 0,
            flow_label: 0,
            mad: &mad.to_bytes(),
        };
        world.hosts[1].cm.receive(now, &arrival);
        world.drain(1, true, false);
        came += world.hosts[1].events.drain(..).count();
        came
    };
    // Nine with as many as their backlogs take, and more, none of which is taken.
    for number in 0..9 * 1100 {
        send(&mut world, 1000 + number, 100 + u64::from(number % 9));
    }
    assert_eq!(send(&mut world, 100_000, 100), 9 * 1024);
    assert_eq!(send(&mut world, 100_001, 109), 9 * 1024 + 1);
    world.hosts[0].events.clear();
    world.finish();
}

#[test]
fn the_backlog_counts_what_is_not_taken() {
    let mut world = World::new(7);
    let listener = world.create(1, PortSpace::Tcp);
    world.bind(1, listener, "0.0.0.0:5").unwrap();
    world.listen(1, listener, 2).unwrap();
    let clients: Vec<_> = (0..3)
        .map(|n| {
            let client = world.route(0, PortSpace::Tcp, "10.0.0.2:5");
            world.connect(0, client, parameters(n + 1)).unwrap();
            client
        })
        .collect();
    let first = world.expect(1, EventKind::ConnectRequest).new_id.unwrap();
    let second = world.expect(1, EventKind::ConnectRequest).new_id.unwrap();
    world.run(Duration::from_secs(1));
    assert!(world.hosts[1].events.is_empty(), "the third waits for room");
    let mut dropped = 0;
    let mut find = |name, value| dropped += if name == "cm_drop_backlog" { value } else { 0 };
    world.hosts[1].cm.counters(&mut find);
    assert_eq!(dropped, 1);
    world.command(1, Command::Taken { id: first }).unwrap();
    let third = world.expect(1, EventKind::ConnectRequest).new_id.unwrap();
    // What is not taken dies with its listener.
    world.command(1, Command::Destroy { id: listener }).unwrap();
    world.run(Duration::from_secs(1));
    let rejected: Vec<_> = world.hosts[0]
        .events
        .drain(..)
        .map(|e| (e.id, e.status))
        .collect();
    assert_eq!(rejected, [(clients[1], 28), (clients[2], 28)]);
    for (id, left) in [(first, true), (second, false), (third, false)] {
        assert_eq!(world.command(1, Command::Query { id }).is_ok(), left);
    }
    world.finish();
}

#[test]
fn data_may_come_before_the_rtu() {
    let mut world = World::new(8);
    world.listener(1, PortSpace::Tcp, "0.0.0.0:5");
    let client = world.route(0, PortSpace::Tcp, "10.0.0.2:5");
    world.connect(0, client, parameters(1)).unwrap();
    let server = world.expect(1, EventKind::ConnectRequest).new_id.unwrap();
    let notify = |event| Command::Notify { id: server, event };
    assert_eq!(world.command(1, notify(4)), Err(libc::EINVAL));
    world.accept(1, server, Some(parameters(2))).unwrap();
    world.expect(0, EventKind::ConnectResponse);
    assert_eq!(world.command(1, notify(7)), Err(libc::EINVAL));
    world.command(1, notify(4)).unwrap();
    world.expect(1, EventKind::Established);
    assert_eq!(world.command(1, notify(4)), Err(libc::EISCONN));
    world.accept(0, client, None).unwrap();
    world.run(Duration::from_secs(100));
    assert!(world.hosts[1].events.is_empty(), "it is told once");
    world.finish();
}

#[test]
fn options_show() {
    let mut world = World::new(9);
    world.listener(1, PortSpace::Tcp, "0.0.0.0:5");
    let client = world.create(0, PortSpace::Tcp);
    let set = |option| Command::SetOption { id: client, option };
    world.command(0, set(IdOption::TypeOfService(0x68))).unwrap();
    world.command(0, set(IdOption::AckTimeout(12))).unwrap();
    world.resolve_to(0, client, "10.0.0.2:5");
    assert_eq!(
        world.command(0, set(IdOption::AddressFamilyOnly(true))),
        Err(libc::EINVAL)
    );
    assert_eq!(
        world.command(0, set(IdOption::ReuseAddress(false))),
        Err(libc::EINVAL)
    );
    world.connect(0, client, parameters(1)).unwrap();
    let server = world.expect(1, EventKind::ConnectRequest).new_id.unwrap();
    world.accept(1, server, Some(parameters(2))).unwrap();
    world.expect(0, EventKind::ConnectResponse);
    let rts = world.attributes(0, client, TargetState::Rts).unwrap();
    assert_eq!(rts.timeout, 12);
    for (host, id) in [(0, client), (1, server)] {
        let rtr = world.attributes(host, id, TargetState::Rtr).unwrap();
        assert_eq!(rtr.address.traffic_class, 0x68);
    }
    world.finish();
}

#[test]
fn events_of_a_request_that_is_not_accepted_say_nothing() {
    let mut world = World::new(10);
    world.listener(1, PortSpace::Tcp, "0.0.0.0:5");
    let client = world.route(0, PortSpace::Tcp, "10.0.0.2:5");
    world.connect(0, client, parameters(1)).unwrap();
    let server = world.expect(1, EventKind::ConnectRequest).new_id.unwrap();
    world.command(0, Command::Destroy { id: client }).unwrap();
    world.run(Duration::from_secs(1));
    assert!(world.hosts[1].events.is_empty());
    assert_eq!(world.accept(1, server, Some(parameters(2))), Err(libc::EINVAL));
    world.finish();
}

#[test]
fn connections_share_a_listener() {
    let mut world = World::new(11);
    world.listener(1, PortSpace::Tcp, "0.0.0.0:5");
    let pairs: Vec<_> = (1..21).map(|qpn| world.connected("10.0.0.2:5", qpn)).collect();
    for (client, server) in pairs {
        world.command(1, Command::Destroy { id: server }).unwrap();
        assert_eq!(world.expect(0, EventKind::Disconnected).id, client);
    }
    world.finish();
}

#[test]
fn a_queue_pair_that_connects_again_has_lost_its_peer() {
    let mut world = World::new(12);
    world.listener(1, PortSpace::Tcp, "0.0.0.0:5");
    let (_, server) = world.connected("10.0.0.2:5", 9);
    let again = world.route(0, PortSpace::Tcp, "10.0.0.2:5");
    world.connect(0, again, parameters(9)).unwrap();
    assert_eq!(world.expect(1, EventKind::Disconnected).id, server);
    let events = [world.event(0), world.event(0)];
    assert!(
        events.iter().any(|event| event.id == again && event.status == 10),
        "{events:?}"
    );
    world.finish();
}

#[test]
fn other_kinds_of_queue_pairs() {
    use crate::rdma_cm::QpKind::{Rc, Uc, Ud, XrcInitiator, XrcTarget};
    for (ours, theirs) in [(Rc, Rc), (Uc, Uc), (XrcInitiator, XrcTarget)] {
        let mut world = World::new(13);
        let listener = world.create_of(1, PortSpace::Ib, theirs);
        world.bind(1, listener, "0.0.0.0:5").unwrap();
        world.listen(1, listener, 0).unwrap();
        let client = world.create_of(0, PortSpace::Ib, ours);
        world.resolve_to(0, client, "10.0.0.2:5");
        world.connect(0, client, parameters(1)).unwrap();
        let server = world.expect(1, EventKind::ConnectRequest).new_id.unwrap();
        world.accept(1, server, Some(parameters(2))).unwrap();
        world.expect(0, EventKind::ConnectResponse);
        let masks = |world: &mut World, host, id| {
            [TargetState::Rtr, TargetState::Rts].map(|state| world.attributes(host, id, state).unwrap().mask)
        };
        // Both halves of RC, none of UC; the initiator of XRC retries, the target answers.
        let (rtr, rts) = (0x0010_1181, 0x0001_0001);
        let expected = match ours {
            Rc => [[rtr | 0x2_8000, rts | 0x2e00]; 2],
            Uc => [[rtr, rts]; 2],
            _ => [[rtr, rts | 0x2e00], [rtr | 0x2_8000, rts | 0x200]],
        };
        let found = [masks(&mut world, 0, client), masks(&mut world, 1, server)];
        assert_eq!(found, expected, "{ours:?}");
        world.accept(0, client, None).unwrap();
        world.expect(1, EventKind::Established);
        world.finish();
    }
    // Kinds that do not go together, and one that does not connect.
    let mut world = World::new(14);
    world.listener(1, PortSpace::Ib, "0.0.0.0:5");
    let client = world.create_of(0, PortSpace::Ib, Uc);
    world.resolve_to(0, client, "10.0.0.2:5");
    world.connect(0, client, parameters(1)).unwrap();
    assert_eq!(world.expect(0, EventKind::Rejected).status, 28);
    let client = world.create_of(0, PortSpace::Ib, XrcTarget);
    world.resolve_to(0, client, "10.0.0.2:5");
    assert_eq!(world.connect(0, client, parameters(1)), Err(libc::EINVAL));
    let client = world.create_of(0, PortSpace::Ib, Ud);
    world.resolve_to(0, client, "10.0.0.2:5");
    world.connect(0, client, parameters(1)).unwrap();
    assert_eq!(world.expect(0, EventKind::Unreachable).status, 2);
    world.finish();
}

#[test]
fn enhanced_connection_options_pass_through() {
    use crate::rdma_cm::Ece;
    let ece = |n: u32| Ece {
        vendor_id: 0xab_cd00 + n,
        attr_mod: 0x1234_5600 + n,
    };
    let mut world = World::new(15);
    world.listener(1, PortSpace::Tcp, "0.0.0.0:5");
    let id = world.route(0, PortSpace::Tcp, "10.0.0.2:5");
    let connect = Command::Connect {
        id,
        parameters: parameters(1),
        ece: ece(1),
    };
    world.command(0, connect).unwrap();
    let request = world.expect(1, EventKind::ConnectRequest);
    assert_eq!(request.ece, ece(1));
    let accept = Command::Accept {
        id: request.new_id.unwrap(),
        parameters: Some(parameters(2)),
        ece: ece(2),
    };
    world.command(1, accept).unwrap();
    assert_eq!(world.expect(0, EventKind::ConnectResponse).ece, ece(2));
    world.finish();
}

#[test]
fn the_listener_that_is_meant() {
    use super::world::device;
    let mut world = World::of(
        16,
        vec![
            vec![device("a", 2, &["fe80::a", "10.0.0.1", "fd00::1"])],
            vec![device("b", 3, &["fe80::b", "10.0.0.2", "10.0.0.3", "fd00::2"])],
        ],
    );
    let only = |world: &mut World, at: &str| {
        let id = world.create(1, PortSpace::Tcp);
        let option = IdOption::AddressFamilyOnly(true);
        world.command(1, Command::SetOption { id, option }).unwrap();
        world.bind(1, id, at).unwrap();
        world.listen(1, id, 0).unwrap();
        id
    };
    let any4 = world.listener(1, PortSpace::Tcp, "0.0.0.0:5");
    let any6 = only(&mut world, "[::]:5");
    let one = world.listener(1, PortSpace::Tcp, "10.0.0.2:6");
    let other = world.listener(1, PortSpace::Tcp, "10.0.0.3:6");
    let local = world.listener(1, PortSpace::Tcp, "[fe80::b%3]:6");
    for (to, listener) in [
        ("10.0.0.2:5", Some(any4)),
        ("10.0.0.3:5", Some(any4)),
        ("[fd00::2]:5", Some(any6)),
        ("[fe80::b%2]:5", Some(any6)),
        ("10.0.0.2:6", Some(one)),
        ("10.0.0.3:6", Some(other)),
        ("[fe80::b%2]:6", Some(local)),
        ("[fd00::2]:6", None),
    ] {
        let client = world.route(0, PortSpace::Tcp, to);
        world.connect(0, client, parameters(1)).unwrap();
        match listener {
            Some(listener) => {
                let event = world.expect(1, EventKind::ConnectRequest);
                assert_eq!(event.id, listener, "{to}");
                let id = event.new_id.unwrap();
                world.command(1, Command::Destroy { id }).unwrap();
                world.expect(0, EventKind::Rejected);
            }
            None => assert_eq!(world.expect(0, EventKind::Rejected).status, 28, "{to}"),
        }
    }
    world.finish();
}
