//! What comes back from a process is not believed.

use std::time::Duration;

use super::world::{Fault, PROGRAM, World, parameters};
use crate::link::random::Prng;
use crate::rdma_cm::{Answer, Command, EventKind, Keepsake, PortSpace, QpKind, Session};

/// A host with ids in many states, and the keepsakes of its program.
fn prepared() -> World {
    let mut world = World::new(1);
    world.listener(1, PortSpace::Tcp, "0.0.0.0:5");
    world.listener(1, PortSpace::Udp, "[::]:5");
    world.create(1, PortSpace::Tcp);
    world.connected("10.0.0.2:5", 3);
    for (space, qpn) in [(PortSpace::Tcp, 4), (PortSpace::Udp, 5)] {
        let client = world.route(0, space, "10.0.0.2:5");
        world.connect(0, client, parameters(qpn)).unwrap();
        world.expect(1, EventKind::ConnectRequest);
    }
    let group = world.create(1, PortSpace::Udp);
    world.bind(1, group, "10.0.0.2:0").unwrap();
    let join = Command::Join {
        id: group,
        address: super::world::address("239.1.2.3:0"),
        send_only: false,
    };
    world.command(1, join).unwrap();
    let resolving = world.create(1, PortSpace::Tcp);
    let resolve = Command::ResolveAddress {
        id: resolving,
        source: None,
        dest: super::world::address("10.0.0.77:1"),
        timeout_ms: 1000,
    };
    world.command(1, resolve).unwrap();
    let routed = world.create(1, PortSpace::Tcp);
    world.hosts[1].events.clear();
    world.resolve_to(1, routed, "10.0.0.1:5");
    world.hosts[1].events.clear();
    world
}

/// The process of [`thief_of`].
const THIEF: Session = 2;

/// Another process of the host has bound an id to the address.
fn thief_of(world: &mut World, host: usize, to: &str) {
    let now = world.now;
    let cm = &mut world.hosts[host].cm;
    cm.open(THIEF, 0);
    let create = Command::Create {
        port_space: PortSpace::Tcp,
        qp_kind: QpKind::Rc,
    };
    let Ok(Answer::Created(id)) = cm.command(now, THIEF, create) else {
        panic!("no id");
    };
    let address = super::world::address(to);
    cm.command(now, THIEF, Command::Bind { id, address }).unwrap();
}

#[test]
fn all_states_go_on() {
    let mut world = prepared();
    let before = world.hosts[1].cm.status();
    let now = world.now;
    assert_eq!(world.hosts[1].restart(now), []);
    world.drain(1, true, true);
    assert_eq!(world.hosts[1].cm.status(), before);
    // A question is asked again.
    assert_eq!(world.expect(1, EventKind::AddressError).status, -libc::ETIMEDOUT);
    world.finish();
}

#[test]
fn new_ids_follow_those_that_the_program_still_has() {
    let mut world = World::new(1);
    world.hosts[0].cm.skip_numbers(PROGRAM, 41);
    assert_eq!(world.create(0, PortSpace::Tcp), 42);
    world.hosts[0].cm.skip_numbers(PROGRAM, 7);
    assert_eq!(world.create(0, PortSpace::Tcp), 43);
    world.hosts[0].cm.skip_numbers(PROGRAM, u32::MAX);
    assert!(world.create(0, PortSpace::Tcp) <= 65_535);
    world.finish();
}

#[test]
fn a_stale_connection_ends_in_the_next_daemon() {
    let mut world = World::new(1);
    world.listener(1, PortSpace::Tcp, "0.0.0.0:5");
    let (_, stale) = world.connected("10.0.0.2:5", 3);
    // The peer forgets all, and asks for another connection of the same queue pair; no more of it is heard.
    world.hosts[0].keepsakes.clear();
    let now = world.now;
    world.hosts[0].restart(now);
    let client = world.route(0, PortSpace::Tcp, "10.0.0.2:5");
    world.connect(0, client, parameters(3)).unwrap();
    world.lose = Box::new(|| Some(Fault::Lost));
    let end = world.now + Duration::from_millis(1);
    while world.step(end) {}
    assert!(world.hosts[1].events.is_empty());
    // This one dies while it tells the peer of the end.
    let now = world.now;
    assert_eq!(world.hosts[1].restart(now), []);
    world.drain(1, true, true);
    let event = world.expect(1, EventKind::Disconnected);
    assert_eq!((event.id, event.status), (stale, -libc::ETIMEDOUT));
    world.hosts[0].events.clear();
    world.finish();
}

#[test]
fn what_is_taken_by_others_is_lost() {
    let mut world = prepared();
    let now = world.now;
    let kept: Vec<Keepsake> = world.hosts[1]
        .keepsakes
        .iter()
        .map(|(id, state)| Keepsake {
            id: *id,
            state: Some(state.clone()),
        })
        .collect();
    // The ids are there.
    let cm = &mut world.hosts[1].cm;
    assert!(kept.iter().all(|keepsake| !cm.restore(now, PROGRAM, keepsake)));
    // Nobody knows that process.
    assert_eq!(world.hosts[1].restart(now), []);
    world.drain(1, true, true);
    let cm = &mut world.hosts[1].cm;
    assert!(!cm.restore(now, 99, &kept[0]));
    // The device is not there: what needs none goes on.
    world.hosts[1].devices.clear();
    let lost = world.hosts[1].restart(now).len();
    assert_eq!(kept.len() - lost, 4);
    world.drain(1, true, true);
    // Another has the port.
    let mut world = prepared();
    let now = world.now;
    let keepsakes = std::mem::take(&mut world.hosts[1].keepsakes);
    world.hosts[1].restart(now);
    thief_of(&mut world, 1, "0.0.0.0:5");
    let cm = &mut world.hosts[1].cm;
    let taken: Vec<bool> = keepsakes
        .iter()
        .map(|(id, state)| {
            let state = Some(state.clone());
            cm.restore(now, PROGRAM, &Keepsake { id: *id, state })
        })
        .collect();
    assert_eq!(taken.iter().filter(|taken| !**taken).count(), 1, "{taken:?}");
    world.drain(1, true, true);
    world.hosts[1].keepsakes.extend(keepsakes);
    world.hosts[1].cm.close(now, THIEF);
    for host in 0..2 {
        world.kill_program(host);
        world.hosts[host].cm.open(PROGRAM, 0);
    }
    world.finish();
}

#[test]
fn a_connection_goes_on_though_its_port_was_given_away() {
    let mut world = World::new(1);
    world.listener(1, PortSpace::Tcp, "0.0.0.0:5");
    world.connected("10.0.0.2:5", 3);
    let port = world.hosts[0].cm.status()[0].source.unwrap().port();
    let now = world.now;
    let keepsakes = std::mem::take(&mut world.hosts[0].keepsakes);
    assert_eq!(keepsakes.len(), 1);
    world.hosts[0].restart(now);
    thief_of(&mut world, 0, &format!("0.0.0.0:{port}"));
    for (id, state) in &keepsakes {
        let state = Some(state.clone());
        assert!(
            world.hosts[0]
                .cm
                .restore(now, PROGRAM, &Keepsake { id: *id, state })
        );
    }
    world.drain(0, true, true);
    world.hosts[0].cm.close(now, THIEF);
    world.finish();
}

#[test]
fn low_ports_stay_for_the_privileged() {
    let mut world = prepared();
    let now = world.now;
    let kept = world.hosts[1].keepsakes.clone();
    world.hosts[1].keepsakes.clear();
    world.hosts[1].restart(now);
    world.hosts[1].cm.open(9, 1000);
    let cm = &mut world.hosts[1].cm;
    let lost = kept
        .iter()
        .filter(|(id, state)| {
            let state = Some((*state).clone());
            !cm.restore(now, 9, &Keepsake { id: **id, state })
        })
        .count();
    assert_eq!(lost, 2, "both listeners");
}

#[test]
fn bytes_that_make_no_sense() {
    let base = prepared();
    let kept = base.hosts[1].keepsakes.clone();
    let mut random = Prng::new(1);
    for round in 0..3000u32 {
        let mut world = World::new(2);
        let now = world.now;
        for (&id, state) in &kept {
            let mut state = state.clone();
            match random.below(4) {
                0 => state.truncate(random.below(state.len() as u64) as usize),
                1 => state.push(random.next_u64() as u8),
                _ => {
                    for _ in 0..=random.below(3) {
                        let at = random.below(state.len() as u64) as usize;
                        state[at] ^= 1 << random.below(8);
                    }
                }
            }
            let state = Some(state);
            let id = if random.below(20) == 0 { 0 } else { id };
            world.hosts[1].cm.restore(now, PROGRAM, &Keepsake { id, state });
            world.drain(1, true, true);
        }
        world.hosts[1].events.clear();
        if round % 10 == 0 {
            world.run(Duration::from_secs(300));
        }
        world.finish();
    }
}
