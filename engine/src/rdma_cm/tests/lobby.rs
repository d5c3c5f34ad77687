//! Requests that come before somebody listens for them.

use std::time::Duration;

use super::world::{World, device, parameters};
use crate::rdma_cm::lobby::{MAX_WAITING, PATIENCE};
use crate::rdma_cm::{Command, EventKind, Id, PortSpace};

const A_WHILE: Duration = Duration::from_millis(10);

/// A request of host 0 for a port of host 1 that nobody listens at; it has come there.
fn early(world: &mut World, port_space: PortSpace) -> Id {
    let client = world.route(0, port_space, "10.0.0.2:9");
    world.connect(0, client, parameters(1)).unwrap();
    world.run(A_WHILE);
    assert!(world.hosts[0].events.is_empty());
    client
}

#[test]
fn a_request_waits_for_its_listener() {
    let mut world = World::new(1);
    let client = early(&mut world, PortSpace::Tcp);
    // Others do not concern it.
    world.listener(1, PortSpace::Tcp, "10.0.0.2:10");
    world.listener(1, PortSpace::Udp, "10.0.0.2:9");
    let listener = world.listener(1, PortSpace::Tcp, "0.0.0.0:9");
    let event = world.expect(1, EventKind::ConnectRequest);
    assert_eq!(event.id, listener);
    let server = event.new_id.unwrap();
    world.command(1, Command::Taken { id: server }).unwrap();
    world.accept(1, server, Some(parameters(2))).unwrap();
    world.expect(0, EventKind::ConnectResponse);
    world.accept(0, client, None).unwrap();
    assert_eq!(world.expect(1, EventKind::Established).id, server);
    world.finish();
}

#[test]
fn a_datagram_request_waits_too() {
    let mut world = World::new(2);
    early(&mut world, PortSpace::Udp);
    world.listener(1, PortSpace::Udp, "10.0.0.2:9");
    let server = world.expect(1, EventKind::ConnectRequest).new_id.unwrap();
    world.accept(1, server, Some(parameters(2))).unwrap();
    world.expect(0, EventKind::Established);
    world.finish();
}

#[test]
fn it_is_refused_where_none_comes() {
    for (port_space, kind, status) in [
        (PortSpace::Tcp, EventKind::Rejected, 8),
        (PortSpace::Udp, EventKind::Unreachable, 1),
    ] {
        let mut world = World::new(3);
        let start = world.now;
        early(&mut world, port_space);
        // Another listener does not give it more time.
        world.listener(1, port_space, "10.0.0.2:10");
        assert_eq!(world.expect(0, kind).status, status);
        let waited = world.now.since(start);
        assert!(waited >= PATIENCE && waited < PATIENCE + A_WHILE, "{waited:?}");
        world.finish();
    }
}

#[test]
fn who_gives_up_leaves() {
    let mut world = World::new(4);
    let client = early(&mut world, PortSpace::Tcp);
    world.command(0, Command::Destroy { id: client }).unwrap();
    world.run(A_WHILE);
    world.listener(1, PortSpace::Tcp, "10.0.0.2:9");
    assert!(world.hosts[1].events.is_empty());
    world.finish();
}

#[test]
fn only_so_many_wait() {
    let mut world = World::new(5);
    let clients: Vec<_> = (0..=MAX_WAITING)
        .map(|_| world.route(0, PortSpace::Tcp, "10.0.0.2:9"))
        .collect();
    for (client, qpn) in clients.iter().zip(1..) {
        world.connect(0, *client, parameters(qpn)).unwrap();
    }
    world.run(A_WHILE);
    let refused: Vec<_> = world.hosts[0].events.drain(..).map(|event| event.id).collect();
    assert_eq!(refused, clients[MAX_WAITING..]);
    world.listener(1, PortSpace::Tcp, "10.0.0.2:9");
    assert_eq!(world.hosts[1].events.len(), MAX_WAITING);
    world.finish();
}

#[test]
fn nobody_answers_from_a_device_that_is_gone() {
    let mut world = World::new(6);
    early(&mut world, PortSpace::Tcp);
    world.hosts[1].devices = vec![device("c", 9, &["10.0.0.9"])];
    let (now, devices) = (world.now, world.hosts[1].devices.clone());
    world.hosts[1].cm.set_devices(now, &devices);
    world.run(PATIENCE);
    assert!(world.hosts[0].events.is_empty());
    world.finish();
}

#[test]
fn a_listener_at_another_address_is_not_the_one() {
    let mut world = World::of(
        8,
        vec![
            vec![device("a", 2, &["10.0.0.1"])],
            vec![device("b", 3, &["10.0.0.2", "10.0.0.3"])],
        ],
    );
    world.listener(1, PortSpace::Tcp, "10.0.0.3:9");
    let client = early(&mut world, PortSpace::Tcp);
    assert_eq!(world.expect(0, EventKind::Rejected).status, 28);
    world.command(0, Command::Destroy { id: client }).unwrap();
    early(&mut world, PortSpace::Tcp);
    let listener = world.listener(1, PortSpace::Tcp, "10.0.0.2:9");
    assert_eq!(world.expect(1, EventKind::ConnectRequest).id, listener);
    world.finish();
}

#[test]
fn a_listener_of_an_earlier_daemon_takes_it_once_all_ids_are_there() {
    let mut world = World::new(7);
    let ids = [
        world.listener(1, PortSpace::Tcp, "10.0.0.2:9"),
        world.listener(1, PortSpace::Tcp, "10.0.0.2:10"),
    ];
    let keepsakes = std::mem::take(&mut world.hosts[1].keepsakes);
    let now = world.now;
    world.hosts[1].restart(now);
    early(&mut world, PortSpace::Tcp);
    for id in ids {
        let keepsake = crate::rdma_cm::Keepsake {
            id,
            state: Some(keepsakes[&id].clone()),
        };
        let now = world.now;
        assert!(world.hosts[1].cm.restore(now, super::world::PROGRAM, &keepsake));
    }
    world.hosts[1].keepsakes = keepsakes;
    world.drain(1, true, true);
    assert!(world.hosts[1].events.is_empty());
    let request = world.expect(1, EventKind::ConnectRequest);
    assert_eq!(request.id, ids[0]);
    assert!(request.new_id.is_some_and(|id| !ids.contains(&id)));
    world.finish();
}
