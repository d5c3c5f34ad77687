//! Datagram services and multicast groups.

use super::world::{World, address, parameters};
use crate::rdma_cm::{
    Address, AddressVector, Answer, Command, DatagramParameters, Details, Event, EventKind, IbAddress, Id,
    Parameters, PortSpace, QpKind, TargetState,
};

fn datagram(event: &Event) -> &DatagramParameters {
    match &event.details {
        Details::Datagram(parameters) => parameters,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_service_tells_its_queue_pair() {
    let mut world = World::new(1);
    let listener = world.listener(1, PortSpace::Udp, "0.0.0.0:7174");
    let client = world.route(0, PortSpace::Udp, "10.0.0.2:7174");
    let first = world.attributes(0, client, TargetState::Init).unwrap();
    assert_eq!((first.mask, first.qkey), (0x71, 0x0123_4567));
    let with = |len| Parameters {
        private_data: vec![5; len],
        ..parameters(0x11)
    };
    assert_eq!(world.connect(0, client, with(181)), Err(libc::EINVAL));
    world.connect(0, client, with(180)).unwrap();
    let request = world.expect(1, EventKind::ConnectRequest);
    assert_eq!(request.id, listener);
    assert_eq!(datagram(&request).private_data, [5; 180]);
    let server = request.new_id.unwrap();
    world.command(1, Command::Taken { id: server }).unwrap();
    // A Q_Key of the program's own is not looked at with IP addresses.
    let reply = Parameters {
        qpn: 0x77,
        qkey: 9,
        ..with(136)
    };
    world.accept(1, server, Some(reply)).unwrap();
    let event = world.expect(0, EventKind::Established);
    let theirs = datagram(&event);
    assert_eq!((theirs.qpn, theirs.qkey), (0x77, 0x0123_4567));
    assert_eq!(theirs.private_data, [5; 136]);
    let expected = AddressVector {
        dest_gid: address("10.0.0.2:0").gid(),
        source_index: 1,
        hop_limit: 64,
        port: 1,
        flow_label: theirs.address.flow_label,
        ..AddressVector::default()
    };
    assert_eq!(theirs.address, expected);
    for host in [0, 1] {
        let rows = world.hosts[host].cm.status();
        assert!(rows.iter().any(|row| row.state == "CONNECTED"), "{rows:?}");
    }
    // There is no connection to end, as in the kernel.
    world.command(0, Command::Disconnect { id: client }).unwrap();
    assert_eq!(world.accept(1, server, Some(with(0))), Err(libc::EINVAL));
    world.finish();
}

#[test]
fn a_service_may_refuse() {
    let mut world = World::new(2);
    world.listener(1, PortSpace::Udp, "0.0.0.0:1");
    let client = world.route(0, PortSpace::Udp, "10.0.0.2:1");
    world.connect(0, client, parameters(1)).unwrap();
    let server = world.expect(1, EventKind::ConnectRequest).new_id.unwrap();
    let reject = |len| Command::Reject {
        id: server,
        reason: 0,
        private_data: vec![8; len],
    };
    assert_eq!(world.command(1, reject(137)), Err(libc::EINVAL));
    world.command(1, reject(136)).unwrap();
    let event = world.expect(0, EventKind::Unreachable);
    assert_eq!(event.status, 2);
    assert_eq!(datagram(&event).private_data, [8; 136]);
    // Nobody there.
    let client = world.route(0, PortSpace::Udp, "10.0.0.2:2");
    world.connect(0, client, parameters(1)).unwrap();
    assert_eq!(world.expect(0, EventKind::Unreachable).status, 1);
    // Too much private data to accept.
    let client = world.route(0, PortSpace::Udp, "10.0.0.2:1");
    world.connect(0, client, parameters(1)).unwrap();
    let server = world.expect(1, EventKind::ConnectRequest).new_id.unwrap();
    let long = Parameters {
        private_data: vec![1; 137],
        ..parameters(2)
    };
    assert_eq!(world.accept(1, server, Some(long)), Err(libc::EINVAL));
    assert_eq!(world.expect(0, EventKind::Unreachable).status, 2);
    world.finish();
}

#[test]
fn the_backlog_is_for_datagrams_too() {
    let mut world = World::new(3);
    let listener = world.create(1, PortSpace::Udp);
    world.bind(1, listener, "0.0.0.0:1").unwrap();
    world.listen(1, listener, 1).unwrap();
    let clients: Vec<_> = (0..2)
        .map(|_| {
            let client = world.route(0, PortSpace::Udp, "10.0.0.2:1");
            world.connect(0, client, parameters(1)).unwrap();
            client
        })
        .collect();
    world.expect(1, EventKind::ConnectRequest);
    let event = world.expect(0, EventKind::Unreachable);
    assert_eq!((event.id, event.status), (clients[1], 2));
    world.command(1, Command::Destroy { id: listener }).unwrap();
    assert_eq!(world.expect(0, EventKind::Unreachable).id, clients[0]);
    world.finish();
}

fn join(world: &mut World, id: Id, group: &str) -> Result<Answer, i32> {
    let address = address(group);
    let send_only = false;
    world.command(
        0,
        Command::Join {
            id,
            address,
            send_only,
        },
    )
}

#[test]
fn groups() {
    let mut world = World::new(4);
    for (to, group, mgid, index) in [
        ("10.0.0.1:0", "239.1.2.3:0", "::ffff:239.1.2.3", 1),
        ("[fd00::1]:0", "[ff0e::4791]:0", "ff0e::4791", 2),
        ("[fe80::a%2]:0", "[ff02::1234%2]:0", "ff02::1234", 0),
        ("[fd00::1]:0", "[::ffff:239.1.2.3]:0", "::ffff:239.1.2.3", 2),
    ] {
        let id = world.create(0, PortSpace::Udp);
        assert_eq!(join(&mut world, id, group), Err(libc::EINVAL), "not bound");
        world.bind(0, id, to).unwrap();
        let Ok(Answer::Joined(membership)) = join(&mut world, id, group) else {
            panic!("{group}");
        };
        let event = world.expect(0, EventKind::MulticastJoin);
        assert_eq!((event.id, event.membership), (id, Some(membership)));
        let theirs = datagram(&event);
        assert_eq!((theirs.qpn, theirs.qkey), (0xff_ffff, 0x0123_4567));
        let mgid: std::net::Ipv6Addr = mgid.parse().unwrap();
        assert_eq!(theirs.address.dest_gid, mgid.octets());
        assert_eq!((theirs.address.source_index, theirs.address.port), (index, 1));
        let leave = Command::Leave { membership };
        world.command(0, leave.clone()).unwrap();
        assert_eq!(world.command(0, leave), Err(libc::ENOENT));
        // What is not left goes with its id.
        assert!(join(&mut world, id, group).is_ok());
        world.hosts[0].events.clear();
        world.command(0, Command::Destroy { id }).unwrap();
    }
    world.finish();
}

#[test]
fn groups_that_do_not_go() {
    let mut world = World::new(5);
    let id = world.create(0, PortSpace::Tcp);
    world.bind(0, id, "10.0.0.1:0").unwrap();
    assert_eq!(
        join(&mut world, id, "239.1.2.3:0"),
        Err(libc::EINVAL),
        "no datagrams"
    );
    let id = world.create(0, PortSpace::Udp);
    world.bind(0, id, "0.0.0.0:0").unwrap();
    assert_eq!(
        join(&mut world, id, "239.1.2.3:0"),
        Err(libc::EINVAL),
        "no device"
    );
    let id = world.create(0, PortSpace::Udp);
    world.bind(0, id, "10.0.0.1:0").unwrap();
    for group in ["0.0.0.0:0", "10.0.0.2:0", "[::]:0", "[fd00::2]:0"] {
        assert_eq!(join(&mut world, id, group), Err(libc::EINVAL), "{group}");
    }
    let ib = Command::Join {
        id,
        address: Address::Ib(IbAddress::default()),
        send_only: false,
    };
    assert_eq!(world.command(0, ib), Err(libc::EOPNOTSUPP));
    for _ in 0..256 {
        assert!(join(&mut world, id, "239.1.2.3:0").is_ok());
    }
    assert_eq!(join(&mut world, id, "239.1.2.3:0"), Err(libc::ENOMEM));
    world.finish();
}

#[test]
fn a_group_is_a_destination() {
    // mckey resolves the group's address to find the device, then joins.
    let mut world = World::new(6);
    let id = world.create_of(0, PortSpace::Udp, QpKind::Ud);
    let resolve = Command::ResolveAddress {
        id,
        source: Some(address("10.0.0.1:0")),
        dest: address("239.1.2.3:0"),
        timeout_ms: 2000,
    };
    world.command(0, resolve).unwrap();
    world.expect(0, EventKind::AddressResolved);
    assert!(join(&mut world, id, "239.1.2.3:0").is_ok());
    world.expect(0, EventKind::MulticastJoin);
    world.finish();
}
