//! Rules of addresses and ports.

use super::world::{PROGRAM, World, address, device};
use crate::rdma_cm::{Address, Answer, Command, IbAddress, Id, IdOption, PortSpace, QpKind, Session};

const REUSE: IdOption = IdOption::ReuseAddress(true);
const ONLY: IdOption = IdOption::AddressFamilyOnly(true);

fn set(world: &mut World, id: Id, option: IdOption) {
    world.command(0, Command::SetOption { id, option }).unwrap();
}

/// Binds an id with options; keeps it.
fn bound(world: &mut World, to: &str, options: &[IdOption]) -> Result<Id, i32> {
    let id = world.create(0, PortSpace::Tcp);
    for option in options {
        set(world, id, option.clone());
    }
    world.bind(0, id, to).map(|()| id)
}

fn source(world: &mut World, id: Id) -> Address {
    match world.command(0, Command::Query { id }) {
        Ok(Answer::Route(route)) => route.source.unwrap(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn who_may_have_a_port_beside_whom() {
    let (any4, any6, one4, two4, one6) = ("0.0.0.0:7", "[::]:7", "10.0.0.1:7", "10.0.0.9:7", "[fd00::1]:7");
    let (ok, busy, not) = (Ok(()), Err(libc::EADDRINUSE), Err(libc::EADDRNOTAVAIL));
    let none: &[IdOption] = &[];
    let cases = [
        (any4, none, any4, none, not),
        (any4, none, one4, none, not),
        (one4, none, any4, none, not),
        (one4, none, one4, none, busy),
        (one4, none, two4, none, ok),
        (one4, none, one6, none, ok),
        (any4, none, any6, none, not),
        (any6, none, any4, none, not),
        (any6, none, one4, none, not),
        (any6, &[ONLY], any4, none, ok),
        (any4, none, any6, &[ONLY], ok),
        (any6, &[ONLY], one4, none, ok),
        (any6, &[ONLY], one6, none, not),
        (any4, none, one6, &[ONLY], ok),
        (any4, &[IdOption::AddressFamilyOnly(false)], any6, &[ONLY], not),
        (any4, &[REUSE], any4, &[REUSE], ok),
        (one4, &[REUSE], one4, &[REUSE], ok),
        (one4, &[REUSE], any4, &[REUSE], ok),
        (one4, &[REUSE], one4, none, busy),
        (one4, none, one4, &[REUSE], busy),
        (any4, &[REUSE], any4, none, not),
    ];
    for (first, its, second, options, expected) in cases {
        let mut world = World::of(
            1,
            vec![vec![device("a", 2, &["10.0.0.1", "10.0.0.9", "fd00::1"])]],
        );
        bound(&mut world, first, its).unwrap();
        let result = bound(&mut world, second, options).map(drop);
        assert_eq!(result, expected, "{first} {its:?}, {second} {options:?}");
        world.finish();
    }
}

#[test]
fn a_listener_has_its_address_alone() {
    let mut world = World::new(2);
    let first = bound(&mut world, "10.0.0.1:7", &[REUSE]).unwrap();
    let second = bound(&mut world, "10.0.0.1:7", &[REUSE]).unwrap();
    assert_eq!(world.listen(0, first, 1), Err(libc::EADDRINUSE));
    world.command(0, Command::Destroy { id: second }).unwrap();
    world.listen(0, first, 1).unwrap();
    assert_eq!(bound(&mut world, "10.0.0.1:7", &[REUSE]), Err(libc::EADDRINUSE));
    world.command(0, Command::Destroy { id: first }).unwrap();
    bound(&mut world, "10.0.0.1:7", &[]).unwrap();
    world.finish();
}

#[test]
fn an_id_is_bound_once() {
    let mut world = World::new(3);
    let id = bound(&mut world, "10.0.0.1:7", &[]).unwrap();
    assert_eq!(world.bind(0, id, "10.0.0.1:8"), Err(libc::EINVAL));
    world.listen(0, id, 1).unwrap();
    assert_eq!(world.listen(0, id, 1), Err(libc::EINVAL));
    // After a failure it may be tried again.
    let id = world.create(0, PortSpace::Tcp);
    assert_eq!(world.bind(0, id, "10.0.0.1:7"), Err(libc::EADDRINUSE));
    world.bind(0, id, "10.0.0.1:8").unwrap();
    // Who listens without an address gets one.
    let id = world.create(0, PortSpace::Tcp);
    world.listen(0, id, 1).unwrap();
    assert!(source(&mut world, id).port() >= 32_768);
    world.finish();
}

#[test]
fn addresses_are_of_devices() {
    let mut world = World::of(
        4,
        vec![vec![
            device("a", 2, &["fe80::1", "10.0.0.1"]),
            device("b", 3, &["fe80::1", "10.0.1.1"]),
        ]],
    );
    for (to, expected) in [
        ("10.0.0.1:0", Ok("a")),
        ("10.0.1.1:0", Ok("b")),
        ("10.0.2.1:0", Err(libc::EADDRNOTAVAIL)),
        ("[fe80::1]:0", Err(libc::EINVAL)),
        ("[fe80::1%2]:0", Ok("a")),
        ("[fe80::1%3]:0", Ok("b")),
        ("[fe80::1%4]:0", Err(libc::ENODEV)),
        ("[fe80::2%3]:0", Err(libc::ENODEV)),
        ("[fd00::1%3]:0", Err(libc::EADDRNOTAVAIL)),
    ] {
        let id = world.create(0, PortSpace::Tcp);
        let result = world.bind(0, id, to);
        assert_eq!(result, expected.map(drop), "{to}");
        let row = world.hosts[0].cm.status().pop().unwrap();
        assert_eq!(row.device.as_deref(), expected.ok(), "{to}");
        world.command(0, Command::Destroy { id }).unwrap();
    }
    // Without `lo`'s device the loopback addresses mean any, as in the kernel.
    let id = bound(&mut world, "127.0.0.1:9", &[]).unwrap();
    assert_eq!(bound(&mut world, "0.0.0.0:9", &[]), Err(libc::EADDRNOTAVAIL));
    world.command(0, Command::Destroy { id }).unwrap();
    world.hosts[0].devices.push(device("lo", 1, &["127.0.0.1"]));
    let (devices, now) = (world.hosts[0].devices.clone(), world.now);
    world.hosts[0].cm.set_devices(now, &devices);
    bound(&mut world, "127.0.0.1:9", &[]).unwrap();
    bound(&mut world, "10.0.0.1:9", &[]).unwrap();
    world.finish();
}

#[test]
fn addresses_of_the_host_that_no_device_has() {
    let mut world = World::new(11);
    let addresses = ["10.0.0.1", "10.9.0.1", "fd09::1"].map(super::world::ip);
    world.hosts[0].cm.set_addresses(addresses.into());
    assert_eq!(bound(&mut world, "10.9.0.1:0", &[]), Err(libc::ENODEV));
    assert_eq!(bound(&mut world, "[fd09::1]:0", &[]), Err(libc::ENODEV));
    assert_eq!(bound(&mut world, "10.9.0.2:0", &[]), Err(libc::EADDRNOTAVAIL));
    bound(&mut world, "10.0.0.1:0", &[]).unwrap();
    world.finish();
}

#[test]
fn low_ports_are_for_the_privileged() {
    let mut world = World::new(5);
    let now = world.now;
    let cm = &mut world.hosts[0].cm;
    cm.open(7, 1000);
    let command =
        |cm: &mut crate::rdma_cm::RdmaCm, session: Session, command| cm.command(now, session, command);
    let create = Command::Create {
        port_space: PortSpace::Udp,
        qp_kind: QpKind::Ud,
    };
    let Ok(Answer::Created(id)) = command(cm, 7, create) else {
        panic!("no id");
    };
    let bind = |to| Command::Bind {
        id,
        address: address(to),
    };
    assert_eq!(command(cm, 7, bind("10.0.0.1:1023")), Err(libc::EACCES));
    assert_eq!(command(cm, PROGRAM, bind("10.0.0.1:1024")), Err(libc::ENOENT));
    assert_eq!(command(cm, 7, bind("10.0.0.1:1024")), Ok(Answer::Done));
    assert_eq!(command(cm, 8, Command::Query { id }), Err(libc::ENOENT));
    cm.close(now, 7);
    assert!(cm.status().is_empty());
    world.finish();
}

#[test]
fn ports_of_spaces_are_apart() {
    let mut world = World::new(6);
    for (space, kind) in [
        (PortSpace::Tcp, QpKind::Rc),
        (PortSpace::Udp, QpKind::Ud),
        (PortSpace::Ib, QpKind::Uc),
    ] {
        let id = world.create_of(0, space, kind);
        world.bind(0, id, "10.0.0.1:7").unwrap();
        let other = world.create_of(0, space, kind);
        assert_eq!(world.bind(0, other, "10.0.0.1:7"), Err(libc::EADDRINUSE));
    }
    let id = world.create(0, PortSpace::Ipoib);
    assert_eq!(world.bind(0, id, "10.0.0.1:7"), Err(libc::EINVAL));
    world.bind(0, id, "0.0.0.0:7").unwrap();
    world.finish();
}

#[test]
fn addresses_of_infinibands_own_family() {
    let bind = |id, ib| Command::Bind {
        id,
        address: Address::Ib(ib),
    };
    let mut world = World::new(7);
    // librdmacm tries this to learn whether the family is known.
    let id = world.create_of(0, PortSpace::Ib, QpKind::Rc);
    world.command(0, bind(id, IbAddress::default())).unwrap();
    let Address::Ib(source) = source(&mut world, id) else {
        panic!("another family");
    };
    assert_eq!(source.service_id >> 16, 0x013f);
    assert!(source.service_id & 0xffff >= 32_768);
    assert_eq!(source.service_mask, u64::MAX);
    let service = |service_id| IbAddress {
        service_id,
        service_mask: u64::MAX,
        ..IbAddress::default()
    };
    // A service id of the TCP space is that port.
    let id = world.create_of(0, PortSpace::Ib, QpKind::Rc);
    world.command(0, bind(id, service(0x0106_0007))).unwrap();
    assert_eq!(bound(&mut world, "10.0.0.1:7", &[]), Err(libc::EADDRNOTAVAIL));
    let id = world.create_of(0, PortSpace::Ib, QpKind::Rc);
    assert_eq!(
        world.command(0, bind(id, service(0x77_0106_0007))),
        Err(libc::EPROTONOSUPPORT)
    );
    let id = world.create(0, PortSpace::Ib);
    let of_device = IbAddress {
        gid: address("[fd00::1]:0").gid(),
        ..IbAddress::default()
    };
    assert_eq!(world.command(0, bind(id, of_device)), Err(libc::ENODEV));
    world.finish();
}

#[test]
fn ports_for_who_does_not_care() {
    let mut world = World::new(8);
    let mut ports = std::collections::BTreeSet::new();
    for _ in 0..500 {
        let id = bound(&mut world, "10.0.0.1:0", &[]).unwrap();
        let port = source(&mut world, id).port();
        assert!((32_768..=60_999).contains(&port));
        assert!(ports.insert(port), "{port} twice");
    }
    world.finish();
}

#[test]
fn all_ports_may_be_taken() {
    let mut world = World::new(9);
    let mut taken = Vec::new();
    for port in 32_768..=60_999u16 {
        taken.push(bound(&mut world, &format!("0.0.0.0:{port}"), &[]).unwrap());
    }
    assert_eq!(bound(&mut world, "10.0.0.1:0", &[]), Err(libc::EADDRNOTAVAIL));
    world.command(0, Command::Destroy { id: taken[77] }).unwrap();
    let id = bound(&mut world, "10.0.0.1:0", &[]).unwrap();
    assert_eq!(source(&mut world, id).port(), 32_768 + 77);
    world.finish();
}

#[test]
fn a_user_leaves_ids_for_others() {
    use crate::rdma_cm::id::MAX_IDS_OF_USER;
    let (hog, other) = (1000, 1001);
    let mut cm = crate::rdma_cm::RdmaCm::new(Box::new(|| 7));
    let now = crate::time::Time::ZERO;
    for session in 1..=4 {
        cm.open(session, hog);
    }
    cm.open(5, other);
    let create = |cm: &mut crate::rdma_cm::RdmaCm, session: Session| {
        let create = Command::Create {
            port_space: PortSpace::Tcp,
            qp_kind: QpKind::Rc,
        };
        let created = cm.command(now, session, create);
        while cm.poll().is_some() {}
        created.map(drop)
    };
    let taken = (0..4 * MAX_IDS_OF_USER / 2)
        .filter(|n| create(&mut cm, 1 + *n as Session % 4).is_ok())
        .count();
    assert_eq!(taken, MAX_IDS_OF_USER);
    assert_eq!(create(&mut cm, 1), Err(libc::ENOMEM));
    assert_eq!(create(&mut cm, 5), Ok(()));
    // What goes with a process makes room.
    cm.close(now, 2);
    assert_eq!(create(&mut cm, 1), Ok(()));
}

#[test]
fn ids_are_bounded() {
    let mut world = World::new(10);
    let create = Command::Create {
        port_space: PortSpace::Tcp,
        qp_kind: QpKind::Rc,
    };
    let mut last = None;
    for _ in 0..crate::rdma_cm::id::MAX_IDS_OF_SESSION {
        last = world.command(0, create.clone()).ok();
    }
    assert_eq!(world.command(0, create.clone()), Err(libc::ENOMEM));
    let Some(Answer::Created(last)) = last else {
        panic!("no id");
    };
    world.command(0, Command::Destroy { id: last }).unwrap();
    assert_eq!(world.command(0, Command::Destroy { id: last }), Err(libc::ENOENT));
    assert_ne!(world.command(0, create), Ok(Answer::Created(last)));
    let now = world.now;
    world.hosts[0].cm.close(now, PROGRAM);
    world.hosts[0].cm.open(PROGRAM, 0);
    world.drain(0, false, true);
    world.hosts[0].keepsakes.clear();
    world.finish();
}
