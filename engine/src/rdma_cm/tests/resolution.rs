//! Addresses, routes, path records, and devices that change.

use std::time::Duration;

use super::world::{PROGRAM, World, address, device, parameters};
use crate::rdma_cm::{
    Address, Answer, Command, EventKind, Id, IdOption, Output, PathRecord, PortSpace, Route, TargetState,
};

fn query(world: &mut World, host: usize, id: Id) -> Route {
    match world.command(host, Command::Query { id }) {
        Ok(Answer::Route(route)) => *route,
        other => panic!("{other:?}"),
    }
}

fn resolve(id: Id, source: Option<&str>, dest: &str, timeout_ms: u32) -> Command {
    Command::ResolveAddress {
        id,
        source: source.map(address),
        dest: address(dest),
        timeout_ms,
    }
}

#[test]
fn a_path_is_what_linux_has() {
    let mut world = World::new(1);
    world.listener(1, PortSpace::Tcp, "0.0.0.0:7174");
    let id = world.create(0, PortSpace::Tcp);
    world.bind(0, id, "10.0.0.1:53238").unwrap();
    let before = query(&mut world, 0, id);
    assert_eq!((before.port, before.pkey, before.path), (1, 0xffff, None));
    assert_eq!(before.source_gid, address("10.0.0.1:0").gid());
    world.resolve_to(0, id, "10.0.0.2:7174");
    let route = query(&mut world, 0, id);
    assert_eq!(route.node_guid, Some(0x0200_00ff_fe00_0002));
    assert_eq!(route.device.as_deref(), Some("a"));
    assert_eq!(route.source, Some(address("10.0.0.1:53238")));
    assert_eq!(route.dest, Some(address("10.0.0.2:7174")));
    let path = PathRecord {
        dest_gid: address("10.0.0.2:0").gid(),
        source_gid: address("10.0.0.1:0").gid(),
        service_id: 0,
        // As in a capture of rping between these ports.
        flow_label: 0x94ad0,
        hop_limit: 64,
        traffic_class: 0,
        pkey: 0xffff,
        sl: 0,
        mtu: 3,
        rate: 0,
        packet_life_time: 18,
    };
    assert_eq!(route.path, Some(path));
    world.connect(0, id, parameters(1)).unwrap();
    let server = world.expect(1, EventKind::ConnectRequest).new_id.unwrap();
    let route = query(&mut world, 1, server);
    assert_eq!(route.source, Some(address("10.0.0.2:7174")));
    assert_eq!(route.dest, Some(address("10.0.0.1:53238")));
    assert_eq!(route.device.as_deref(), Some("b"));
    let back = PathRecord {
        dest_gid: path.source_gid,
        source_gid: path.dest_gid,
        service_id: 0x0106_1c06,
        ..path
    };
    assert_eq!(route.path, Some(back));
    world.finish();
}

#[test]
fn mtus_of_interfaces() {
    for (mtu, code) in [
        (256, None),
        (1500, Some(3)),
        (2200, Some(4)),
        (4200, Some(5)),
        (9000, Some(5)),
    ] {
        let mut device = device("a", 2, &["10.0.0.1"]);
        device.mtu = mtu;
        let mut world = World::of(2, vec![vec![device]]);
        let id = world.create(0, PortSpace::Tcp);
        world.command(0, resolve(id, None, "10.0.0.1:7", 1000)).unwrap();
        world.expect(0, EventKind::AddressResolved);
        let result = world.command(0, Command::ResolveRoute { id, timeout_ms: 1 });
        assert_eq!(result.is_ok(), code.is_some(), "{mtu}");
        assert_eq!(query(&mut world, 0, id).path.map(|path| path.mtu), code);
        world.hosts[0].events.clear();
        world.finish();
    }
}

#[test]
fn states_are_kept_to() {
    let mut world = World::new(3);
    let id = world.create(0, PortSpace::Tcp);
    let route = |timeout_ms| Command::ResolveRoute { id, timeout_ms };
    assert_eq!(world.command(0, route(1)), Err(libc::EINVAL));
    assert_eq!(world.connect(0, id, parameters(1)), Err(libc::EINVAL));
    assert_eq!(world.accept(0, id, None), Err(libc::EINVAL));
    assert_eq!(world.command(0, Command::Disconnect { id }), Err(libc::EINVAL));
    assert_eq!(
        world.command(0, Command::Notify { id, event: 4 }),
        Err(libc::EINVAL)
    );
    assert_eq!(world.attributes(0, id, TargetState::Init), Err(libc::EINVAL));
    world.command(0, resolve(id, None, "10.0.0.2:7", 1000)).unwrap();
    world.expect(0, EventKind::AddressResolved);
    assert_eq!(
        world.command(0, resolve(id, None, "10.0.0.2:7", 1000)),
        Err(libc::EINVAL)
    );
    assert_eq!(world.command(0, route(0)), Err(libc::EINVAL));
    assert_eq!(world.connect(0, id, parameters(1)), Err(libc::EINVAL));
    world.command(0, route(1)).unwrap();
    world.expect(0, EventKind::RouteResolved);
    assert_eq!(world.command(0, route(1)), Err(libc::EINVAL));
    assert_eq!(world.listen(0, id, 1), Err(libc::EINVAL));
    // A queue pair may be made, but not connected yet.
    assert_eq!(world.attributes(0, id, TargetState::Init).unwrap().mask, 0x39);
    let unknown = id ^ 0x8000_0000;
    assert_eq!(
        world.command(0, Command::Destroy { id: unknown }),
        Err(libc::ENOENT)
    );
    assert_eq!(
        world.command(0, Command::Leave { membership: id }),
        Err(libc::ENOENT)
    );
    world.finish();
}

#[test]
fn an_address_that_does_not_answer() {
    let mut world = World::new(4);
    let id = world.create(0, PortSpace::Tcp);
    let start = world.now;
    world.command(0, resolve(id, None, "10.0.0.77:7", 1500)).unwrap();
    let event = world.expect(0, EventKind::AddressError);
    assert_eq!(event.status, -libc::ETIMEDOUT);
    assert_eq!(world.now.since(start), Duration::from_millis(1500));
    // It may be tried again, with another address.
    world.resolve_to(0, id, "10.0.0.2:7");
    // One may give up before.
    let id = world.create(0, PortSpace::Tcp);
    world.command(0, resolve(id, None, "10.0.0.77:7", 1500)).unwrap();
    world.command(0, Command::Destroy { id }).unwrap();
    world.run(Duration::from_secs(5));
    assert!(world.hosts[0].events.is_empty());
    world.finish();
}

#[test]
fn addresses_that_do_not_go() {
    let mut world = World::new(5);
    for (source, dest, expected) in [
        (Some("10.0.0.1:0"), "[fd00::2]:7", libc::EINVAL),
        (Some("10.0.0.77:0"), "10.0.0.2:7", libc::EADDRNOTAVAIL),
        (Some("[fe80::a]:0"), "[fe80::b%2]:7", libc::EINVAL),
    ] {
        let id = world.create(0, PortSpace::Tcp);
        let result = world.command(0, resolve(id, source, dest, 1000));
        assert_eq!(result, Err(expected), "{source:?} {dest}");
    }
    // No device has an address of the loopback: a connection from there could not be made.
    for dest in ["127.0.0.1:7", "[::1]:7", "0.0.0.0:7"] {
        let id = world.create(0, PortSpace::Tcp);
        let result = world.command(0, resolve(id, None, dest, 1000));
        assert_eq!(result, Err(libc::ENODEV), "{dest}");
    }
    // From an own address it can.
    let id = world.create(0, PortSpace::Tcp);
    world.bind(0, id, "10.0.0.1:0").unwrap();
    world.resolve_to(0, id, "127.0.0.1:7");
    // An interface that the way leads by, but has no device.
    let id = world.create(0, PortSpace::Ipoib);
    world.command(0, resolve(id, None, "10.0.0.2:7", 1000)).unwrap();
    assert_eq!(world.expect(0, EventKind::AddressError).status, -libc::EINVAL);
    world.finish();
}

#[test]
fn a_question_that_fails_at_once_fails_its_command() {
    let mut world = World::new(7);
    let id = world.create(0, PortSpace::Tcp);
    let now = world.now;
    let cm = &mut world.hosts[0].cm;
    let ask = resolve(id, None, "10.0.0.2:7", 1000);
    cm.command(now, PROGRAM, ask.clone()).unwrap();
    let token = std::iter::from_fn(|| cm.poll()).find_map(|output| match output {
        Output::Resolve { token, .. } => Some(token),
        _ => None,
    });
    cm.resolve_failed(now, token.unwrap());
    // No event: but for what is kept, nothing tells of it.
    let told: Vec<Output> = std::iter::from_fn(|| cm.poll()).collect();
    assert!(matches!(told[..], [Output::Keepsake { .. }]), "{told:?}");
    assert_eq!((cm.status()[0].state.as_str(), cm.deadline()), ("BOUND", None));
    // It may be tried again.
    world.command(0, ask).unwrap();
    world.expect(0, EventKind::AddressResolved);
    world.finish();
}

#[test]
fn the_programs_own_path() {
    let mut world = World::new(6);
    world.listener(1, PortSpace::Tcp, "0.0.0.0:7");
    let id = world.create(0, PortSpace::Tcp);
    let option = |path| Command::SetOption {
        id,
        option: IdOption::Path(path),
    };
    let path = PathRecord {
        dest_gid: address("10.0.0.2:0").gid(),
        source_gid: address("10.0.0.1:0").gid(),
        hop_limit: 9,
        mtu: 2,
        ..PathRecord::default()
    };
    assert_eq!(world.command(0, option(path)), Err(libc::EINVAL));
    world
        .command(0, resolve(id, Some("10.0.0.1:0"), "10.0.0.2:7", 1000))
        .unwrap();
    world.expect(0, EventKind::AddressResolved);
    world.command(0, option(path)).unwrap();
    world.expect(0, EventKind::RouteResolved);
    world.connect(0, id, parameters(1)).unwrap();
    let server = world.expect(1, EventKind::ConnectRequest).new_id.unwrap();
    let route = query(&mut world, 1, server);
    assert_eq!(route.path.map(|path| (path.mtu, path.hop_limit)), Some((2, 9)));
    // One from an address that is not the device's.
    let id = world.route(0, PortSpace::Tcp, "10.0.0.2:7");
    assert_eq!(
        world.command(
            0,
            Command::SetOption {
                id,
                option: IdOption::Path(path)
            }
        ),
        Err(libc::EINVAL)
    );
    world.finish();
}

#[test]
fn link_local_ends_keep_to_their_interface() {
    let mut world = World::new(7);
    let elsewhere = world.create(1, PortSpace::Tcp);
    world.bind(1, elsewhere, "[::]:7").unwrap();
    world.listen(1, elsewhere, 0).unwrap();
    for without_scope in ["[fe80::b]:7", "[ff02::7]:7"] {
        let id = world.route(0, PortSpace::Udp, without_scope);
        assert_eq!(query(&mut world, 0, id).device.as_deref(), Some("a"));
    }
    let client = world.route(0, PortSpace::Tcp, "[fe80::b%2]:7");
    let route = query(&mut world, 0, client);
    let Some(Address::Ip(std::net::SocketAddr::V6(source))) = route.source else {
        panic!("no source");
    };
    assert_eq!(
        (source.ip().to_string(), source.scope_id()),
        ("fe80::a".into(), 2)
    );
    world.connect(0, client, parameters(1)).unwrap();
    world.expect(1, EventKind::ConnectRequest);
    world.finish();
}

#[test]
fn a_device_that_goes() {
    let mut world = World::new(8);
    let listener = world.listener(1, PortSpace::Tcp, "10.0.0.2:5");
    let any = world.listener(1, PortSpace::Tcp, "[::]:6");
    let (client, server) = world.connected("10.0.0.2:5", 3);
    let waiting = world.route(0, PortSpace::Tcp, "10.0.0.2:6");
    world.connect(0, waiting, parameters(4)).unwrap();
    let request = world.expect(1, EventKind::ConnectRequest).new_id.unwrap();
    let now = world.now;
    world.hosts[1].cm.set_devices(now, &[]);
    world.drain(1, true, true);
    let removed: Vec<_> = (0..2)
        .map(|_| world.expect(1, EventKind::DeviceRemoval).id)
        .collect();
    let mut expected = vec![listener, server];
    expected.sort_unstable();
    assert_eq!(removed, expected);
    // Of the rest nothing works but to destroy it.
    for id in [listener, server, request] {
        assert_eq!(world.command(1, Command::Query { id }), Err(libc::EIO));
        assert_eq!(world.listen(1, id, 1), Err(libc::EIO));
    }
    assert!(query(&mut world, 1, any).device.is_none());
    // It comes back: who listens at any address has it again.
    let devices = world.hosts[1].devices.clone();
    world.hosts[1].cm.set_devices(now, &devices);
    world.command(1, Command::Destroy { id: server }).unwrap();
    let again = world.listener(1, PortSpace::Tcp, "10.0.0.2:5");
    let next = world.route(0, PortSpace::Tcp, "10.0.0.2:6");
    world.connect(0, next, parameters(5)).unwrap();
    assert_eq!(world.expect(1, EventKind::ConnectRequest).id, any);
    world.command(0, Command::Destroy { id: client }).unwrap();
    world.command(1, Command::Destroy { id: again }).unwrap();
    world.finish();
}

#[test]
fn an_address_that_changes_under_a_device() {
    let mut world = World::new(9);
    world.listener(1, PortSpace::Tcp, "0.0.0.0:5");
    let (client, server) = world.connected("10.0.0.2:5", 3);
    world.hosts[0].devices[0].mac = [2, 0, 0, 0, 0, 99];
    let (devices, now) = (world.hosts[0].devices.clone(), world.now);
    world.hosts[0].cm.set_devices(now, &devices);
    world.drain(0, true, true);
    assert_eq!(world.expect(0, EventKind::AddressChange).id, client);
    // An IP address that goes does not end a connection.
    world.hosts[1].devices[0].gids.pop();
    let devices = world.hosts[1].devices.clone();
    world.hosts[1].cm.set_devices(now, &devices);
    world.drain(1, true, true);
    assert!(world.hosts[1].events.is_empty());
    world.command(0, Command::Destroy { id: client }).unwrap();
    assert_eq!(world.expect(1, EventKind::Disconnected).id, server);
    world.finish();
}
