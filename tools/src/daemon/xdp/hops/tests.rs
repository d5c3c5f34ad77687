//! The keeper with routes and neighbours of the tests' own; [`live`] has the kernel's.

mod live;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use ferroce_engine::link::xdp::hops::{HOPS, Hop};

use super::*;
use crate::netlink::route::Kind;
use crate::netlink::{Address, Interface};

impl HasHops for Arc<HopTable> {
    fn hops(&self) -> &HopTable {
        self
    }
}

const PORT: u32 = 5;
const OWN_MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];
const MAC: [u8; 6] = [2, 0, 0, 0, 0, 2];
const OTHER_MAC: [u8; 6] = [2, 0, 0, 0, 0, 3];
/// Somewhat more than the time between looks.
const A_LOOK: Duration = Duration::from_secs(16);
const A_MOMENT: Duration = Duration::from_secs(2);

fn known(mac: [u8; 6]) -> Neighbour {
    Neighbour::Known {
        mac: Some(mac),
        stale: false,
    }
}

fn frame(dest: [u8; 6]) -> Option<Hop> {
    let source = OWN_MAC;
    Some(Hop::Frame { source, dest })
}

fn parse(text: &str) -> IpAddr {
    text.parse().unwrap()
}

/// Routes by source and destination, else to the destination itself; neighbours.
#[derive(Default)]
struct Fake {
    gateways: BTreeMap<(IpAddr, IpAddr), IpAddr>,
    elsewhere: BTreeMap<IpAddr, Route>,
    neighbours: BTreeMap<IpAddr, Neighbour>,
    probes: Vec<IpAddr>,
    questions: usize,
}

impl Ways for Fake {
    fn route(&mut self, query: &Query) -> io::Result<Route> {
        self.questions += 1;
        let source = query.source.unwrap();
        if let Some(route) = self.elsewhere.get(&query.dest) {
            return Ok(*route);
        }
        Ok(Route {
            gateway: self.gateways.get(&(source, query.dest)).copied(),
            ..direct()
        })
    }

    fn neighbour(&mut self, ifindex: u32, ip: IpAddr) -> io::Result<Neighbour> {
        assert_eq!(ifindex, PORT);
        Ok(self.neighbours.get(&ip).copied().unwrap_or(Neighbour::Unknown))
    }

    fn probe(&mut self, ifindex: u32, ip: IpAddr) {
        assert_eq!(ifindex, PORT);
        self.probes.push(ip);
    }
}

fn direct() -> Route {
    Route {
        kind: Kind::Unicast,
        ifindex: PORT,
        source: None,
        gateway: None,
        encapsulates: false,
    }
}

fn interface(addresses: &[&str]) -> Interface {
    let address = |ip: &&str| Address {
        ip: parse(ip),
        usable: true,
    };
    Interface {
        mac: OWN_MAC,
        up: true,
        carrier: true,
        ethernet: true,
        addresses: addresses.iter().map(address).collect(),
        ..Interface::default()
    }
}

struct Test {
    keeper: Keeper,
    ways: Fake,
    table: Arc<HopTable>,
    interface: Interface,
    now: Instant,
}

impl Test {
    fn new() -> Self {
        let mut test = Self {
            keeper: Keeper::new(),
            ways: Fake::default(),
            table: Arc::from(HopTable::new()),
            interface: interface(&["10.0.0.1", "10.0.0.11", "2001:db8::1", "fe80::1"]),
            now: Instant::now(),
        };
        test.follow();
        test.keeper.add(PORT, Box::new(test.table.clone()), test.now);
        test
    }

    fn follow(&mut self) {
        let interfaces = [(PORT, self.interface.clone())].into();
        self.keeper.follow(&interfaces, self.now);
    }

    fn ask(&mut self, dest: &str) -> Option<Hop> {
        self.ask_as(1, parse(dest))
    }

    fn ask_as(&mut self, asker: u32, dest: IpAddr) -> Option<Hop> {
        let source = parse(if dest.is_ipv4() { "10.0.0.1" } else { "2001:db8::1" });
        self.keeper
            .ask(&mut self.ways, PORT, source, dest, asker, self.now);
        self.entry(dest)
    }

    /// What is in the table, without using it.
    fn entry(&self, dest: IpAddr) -> Option<Hop> {
        let list = self.table.list();
        list.iter().find(|(ip, _)| *ip == dest).map(|(_, hop)| *hop)
    }

    fn hop(&self, dest: &str) -> Option<Hop> {
        self.entry(parse(dest))
    }

    /// Lets time pass; the keeper does what it has to.
    fn pass(&mut self, time: Duration) {
        let end = self.now + time;
        while let Some(deadline) = self.keeper.deadline().filter(|deadline| *deadline <= end) {
            self.now = self.now.max(deadline);
            self.keeper.expire(&mut self.ways, self.now);
        }
        self.now = end;
    }
}

#[test]
fn frames_go_to_known_neighbours_only() {
    let mut test = Test::new();
    test.ways.neighbours = [
        (parse("10.0.0.2"), known(MAC)),
        (parse("10.0.0.3"), Neighbour::Failed),
        (
            parse("10.0.0.5"),
            Neighbour::Known {
                mac: None,
                stale: false,
            },
        ),
        (parse("10.0.0.6"), known([0xff; 6])),
        (parse("10.0.0.7"), known([0; 6])),
        (parse("2001:db8::2"), known(OTHER_MAC)),
    ]
    .into();
    assert_eq!(test.ask("10.0.0.2"), frame(MAC));
    assert_eq!(test.ask("::ffff:10.0.0.2"), None);
    assert_eq!(test.ask("2001:db8::2"), frame(OTHER_MAC));
    assert!(test.ways.probes.is_empty());
    for dest in ["10.0.0.3", "10.0.0.4", "10.0.0.5", "10.0.0.6", "10.0.0.7"] {
        assert_eq!(test.ask(dest), Some(Hop::Kernel), "{dest}");
    }
    // What is not known is asked for at once.
    assert_eq!(test.ways.probes, ["10.0.0.3", "10.0.0.4"].map(parse));
    // Nothing to ask for.
    for dest in ["239.1.2.3", "ff02::1", "0.0.0.0", "::"] {
        assert_eq!(test.ask(dest), None, "{dest}");
    }
    let stranger = parse("10.0.0.99");
    test.keeper
        .ask(&mut test.ways, PORT, stranger, parse("10.0.0.8"), 1, test.now);
    test.keeper.ask(
        &mut test.ways,
        PORT + 1,
        parse("10.0.0.1"),
        parse("10.0.0.8"),
        1,
        test.now,
    );
    assert_eq!(test.hop("10.0.0.8"), None);
}

#[test]
fn what_does_not_surely_leave_by_the_interface_is_the_kernels() {
    let mut test = Test::new();
    let elsewhere = [
        (
            "10.0.0.11",
            Route {
                kind: Kind::Local,
                ifindex: 1,
                ..direct()
            },
        ),
        (
            "10.0.0.255",
            Route {
                kind: Kind::Group,
                ..direct()
            },
        ),
        (
            "10.9.0.1",
            Route {
                ifindex: PORT + 1,
                ..direct()
            },
        ),
        (
            "10.8.0.1",
            Route {
                encapsulates: true,
                ..direct()
            },
        ),
    ];
    for (dest, route) in elsewhere {
        test.ways.neighbours.insert(parse(dest), known(MAC));
        test.ways.elsewhere.insert(parse(dest), route);
        assert_eq!(test.ask(dest), Some(Hop::Kernel), "{dest}");
    }
    // A gateway for one of our addresses, none for the other.
    let (dest, gateway) = (parse("10.7.0.1"), parse("10.0.0.2"));
    test.ways.neighbours.insert(gateway, known(MAC));
    test.ways.gateways.insert((parse("10.0.0.1"), dest), gateway);
    assert_eq!(test.ask("10.7.0.1"), Some(Hop::Kernel));
    test.ways.gateways.insert((parse("10.0.0.11"), dest), gateway);
    test.keeper.changed(test.now);
    test.pass(A_MOMENT);
    assert_eq!(test.hop("10.7.0.1"), frame(MAC));
    assert!(test.ways.probes.is_empty());
}

#[test]
fn news_of_neighbours_are_followed() {
    let mut test = Test::new();
    let (gateway, through) = (parse("10.0.0.2"), "10.7.0.1");
    for source in ["10.0.0.1", "10.0.0.11"] {
        test.ways
            .gateways
            .insert((parse(source), parse(through)), gateway);
    }
    assert_eq!(test.ask("10.0.0.2"), Some(Hop::Kernel));
    assert_eq!(test.ask(through), Some(Hop::Kernel));
    assert_eq!(test.ask("10.0.0.4"), Some(Hop::Kernel));
    let stale = Neighbour::Known {
        mac: Some(OTHER_MAC),
        stale: true,
    };
    for (state, hop) in [
        (known(MAC), frame(MAC)),
        (stale, frame(OTHER_MAC)),
        (Neighbour::Failed, Some(Hop::Kernel)),
        (known(MAC), frame(MAC)),
        (Neighbour::Unknown, Some(Hop::Kernel)),
    ] {
        test.keeper.told(PORT, gateway, state);
        assert_eq!((test.hop("10.0.0.2"), test.hop(through)), (hop, hop), "{state:?}");
        // Others, and namesakes on other interfaces.
        test.keeper.told(PORT + 1, parse("10.0.0.4"), state);
        assert_eq!(test.hop("10.0.0.4"), Some(Hop::Kernel));
    }
}

#[test]
fn changes_of_the_interface_are_followed_at_once() {
    let mut test = Test::new();
    test.ways.neighbours.insert(parse("10.0.0.2"), known(MAC));
    assert_eq!(test.ask("10.0.0.2"), frame(MAC));
    let good = test.interface.clone();
    let changes: [fn(&mut Interface); 6] = [
        |it| it.up = false,
        |it| it.carrier = false,
        |it| it.noarp = true,
        |it| it.ethernet = false,
        |it| it.mac = [0; 6],
        |it| it.addresses.retain(|address| address.ip.is_ipv6()),
    ];
    for change in changes {
        change(&mut test.interface);
        test.follow();
        test.pass(Duration::ZERO);
        assert_eq!(test.hop("10.0.0.2"), Some(Hop::Kernel), "{:?}", test.interface);
        // No news of the neighbour make frames possible.
        if test.interface.addresses.len() == good.addresses.len() {
            test.keeper.told(PORT, parse("10.0.0.2"), known(MAC));
            assert_eq!(test.hop("10.0.0.2"), Some(Hop::Kernel));
        }
        test.interface.clone_from(&good);
        test.follow();
        test.pass(Duration::ZERO);
        assert_eq!(test.hop("10.0.0.2"), frame(MAC));
    }
    test.interface.mac = OTHER_MAC;
    test.follow();
    test.pass(Duration::ZERO);
    let (source, dest) = (OTHER_MAC, MAC);
    assert_eq!(test.hop("10.0.0.2"), Some(Hop::Frame { source, dest }));
    // What does not matter makes no work.
    test.pass(A_MOMENT);
    let before = test.ways.questions;
    test.interface.mtu = 9000;
    test.follow();
    test.pass(A_MOMENT);
    assert_eq!(test.ways.questions, before);
}

#[test]
fn entries_in_use_keep_their_neighbour_awake_and_others_go() {
    let mut test = Test::new();
    let (used, unused) = (parse("10.0.0.2"), parse("10.0.0.3"));
    for ip in [used, unused] {
        test.ways.neighbours.insert(ip, known(MAC));
        assert_eq!(test.ask_as(1, ip), frame(MAC));
    }
    let stale = Neighbour::Known {
        mac: Some(MAC),
        stale: true,
    };
    for ip in [used, unused] {
        test.ways.neighbours.insert(ip, stale);
    }
    for round in 1..=4 {
        assert!(test.table.find(used).is_some());
        test.pass(A_LOOK);
        assert_eq!(test.ways.probes, vec![used; round]);
    }
    test.ways.neighbours.insert(used, known(MAC));
    assert!(test.table.find(used).is_some());
    test.pass(A_LOOK);
    assert_eq!(test.ways.probes.len(), 4);
    for _ in 0..20 {
        assert!(test.table.find(used).is_some());
        test.pass(A_LOOK);
    }
    assert_eq!((test.entry(used), test.entry(unused)), (frame(MAC), None));
    test.pass(Duration::from_secs(400));
    assert_eq!(test.entry(used), None);
    assert_eq!(test.keeper.deadline(), None);
}

#[test]
fn bursts_of_changes_are_one() {
    let mut test = Test::new();
    for host in 0..100 {
        test.ask(&format!("10.0.1.{host}"));
    }
    test.pass(A_MOMENT);
    let before = test.ways.questions;
    for _ in 0..1000 {
        test.keeper.changed(test.now);
        test.pass(Duration::from_micros(15));
    }
    test.pass(A_MOMENT);
    // Two addresses each, once.
    assert_eq!(test.ways.questions - before, 200);
    // Changes that never end: there are pauses between.
    let before = test.ways.questions;
    for _ in 0..1000 {
        test.keeper.changed(test.now);
        test.pass(Duration::from_millis(1));
    }
    let sweeps = (test.ways.questions - before) / 200;
    assert!((5..=11).contains(&sweeps), "{sweeps} in a second");
}

#[test]
fn room_is_shared_between_programs() {
    let mut test = Test::new();
    let host = |program: u32, number: u32| {
        IpAddr::from(std::net::Ipv4Addr::from_bits(
            0x0b00_0000 | program << 16 | number,
        ))
    };
    let count = |test: &Test, program: u32| {
        let list = test.table.list();
        let hosts: BTreeSet<IpAddr> = (0..3000).map(|number| host(program, number)).collect();
        list.iter().filter(|(ip, _)| hosts.contains(ip)).count()
    };
    // One that asks for ever more.
    for number in 0..3000 {
        test.ask_as(1, host(1, number));
        test.pass(Duration::from_micros(10));
    }
    let full = count(&test, 1);
    assert!((HOPS / 2..HOPS).contains(&full), "{full}");
    // Its last is there, its first gave way.
    assert!(test.entry(host(1, 2999)).is_some() && test.entry(host(1, 0)).is_none());
    // It uses all of them: no more for itself, but others get theirs.
    let use_all = |test: &Test, program| {
        for number in 0..3000 {
            test.table.find(host(program, number));
        }
    };
    use_all(&test, 1);
    assert_eq!(test.ask_as(1, host(1, 5000)), None);
    for number in 0..3000 {
        use_all(&test, 1);
        test.ask_as(2, host(2, number));
        if test.entry(host(2, number)).is_none() {
            break;
        }
        use_all(&test, 2);
    }
    let (first, second) = (count(&test, 1), count(&test, 2));
    assert!(first.abs_diff(second) < 60, "{first} and {second}");
    test.keeper.remove(PORT);
    assert_eq!(test.table.list(), []);
    assert_eq!(test.keeper.deadline(), None);
    assert!(test.keeper.is_empty());
}

#[test]
fn what_an_earlier_daemon_left_is_looked_up_again() {
    let mut test = Test::new();
    test.keeper.remove(PORT);
    let old = Hop::Frame {
        source: OTHER_MAC,
        dest: OTHER_MAC,
    };
    test.table.set(parse("10.0.0.2"), old);
    test.table.set(parse("10.0.0.3"), old);
    test.ways.neighbours.insert(parse("10.0.0.2"), known(MAC));
    test.keeper.add(PORT, Box::new(test.table.clone()), test.now);
    test.pass(Duration::ZERO);
    assert_eq!(test.hop("10.0.0.2"), frame(MAC));
    assert_eq!(test.hop("10.0.0.3"), Some(Hop::Kernel));
}
