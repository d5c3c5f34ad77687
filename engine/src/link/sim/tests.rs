use super::*;
use std::net::{Ipv4Addr, Ipv6Addr};

const A: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1));
const B: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 2));
const QPN: u32 = 0x02_0007;

fn path(source: IpAddr, dest: IpAddr) -> Path {
    Path {
        ifindex: 1,
        ..Path::between(source, dest)
    }
}

/// A network of two, from A to B under `conditions`.
fn pair(seed: u64, conditions: Conditions, b: NodeConfig) -> (SimNetwork, SimLink, SimLink) {
    let network = SimNetwork::new(seed);
    let a = network.attach(NodeConfig::new(A, 1));
    let b = network.attach(b);
    network.set_conditions(a.id(), b.id(), conditions);
    (network, a, b)
}

/// Sends `count` packets that begin with their number, runs the network dry; gives (number, ICRC right) as received.
fn carry(
    network: &SimNetwork,
    a: &mut SimLink,
    b: &mut SimLink,
    path: &Path,
    count: u32,
) -> Vec<(u32, bool)> {
    for n in 0..count {
        let sent = a.packet(path, Qpns::to(QPN), 40, &mut |out| {
            out.fill(n as u8);
            out[36..].copy_from_slice(&n.to_be_bytes());
            Ok(())
        });
        assert_eq!(sent, Ok(()));
        a.flush().unwrap();
    }
    let mut got = Vec::new();
    while let Some(next) = network.next_event() {
        network.advance(next);
        a.flush().unwrap();
        b.receive(&mut |packet| {
            let number = packet.data[36..40].try_into().unwrap();
            got.push((u32::from_be_bytes(number), packet.icrc.valid(packet)));
        })
        .unwrap();
    }
    got
}

#[test]
fn a_perfect_network_keeps_order_and_icrc() {
    let ipv6 = (IpAddr::V6(Ipv6Addr::LOCALHOST), "fd00::2".parse().unwrap());
    for (version, (source, dest)) in [
        (RoceVersion::V2, (A, B)),
        (RoceVersion::V2, ipv6),
        (RoceVersion::V1, (A, B)),
        (RoceVersion::V1, ipv6),
    ] {
        let conditions = Conditions {
            delay: Duration::from_micros(5),
            jitter: Duration::from_micros(50),
            ..Default::default()
        };
        let (network, mut a, mut b) = pair(1, conditions, NodeConfig::new(dest, 2));
        let path = Path {
            version,
            ..path(source, dest)
        };
        let got = carry(&network, &mut a, &mut b, &path, 100);
        assert_eq!(got, (0..100).map(|n| (n, true)).collect::<Vec<_>>());
        assert_eq!(network.incidents(), []);
    }
}

#[test]
fn faults_happen_as_often_as_told_and_equal_seeds_are_equal() {
    let ten = Probability::percent(10);
    let conditions = Conditions {
        rates: FaultRates {
            loss: ten,
            duplicate: ten,
            reorder: ten,
            corrupt: ten,
        },
        reorder_by: Duration::from_micros(100),
        ..Default::default()
    };
    let run = |seed| {
        let (network, mut a, mut b) = pair(seed, conditions.clone(), NodeConfig::new(B, 2));
        (
            carry(&network, &mut a, &mut b, &path(A, B), 1000),
            network.incidents(),
        )
    };
    let (got, incidents) = run(7);
    assert_eq!((got.clone(), incidents.clone()), run(7));
    assert_ne!(got, run(8).0);
    let count = |kind| incidents.iter().filter(|i| i.kind == kind).count();
    let (lost, damaged) = (count(IncidentKind::Lost), count(IncidentKind::Damaged));
    assert!(
        (70..130).contains(&lost) && (50..130).contains(&damaged),
        "{lost} {damaged}"
    );
    assert_eq!(got.len(), 1000 - lost + count(IncidentKind::Duplicated));
    assert!(!got.is_sorted_by_key(|&(n, _)| n), "packets overtake each other");
    // Damage to the BTH's fifth byte alone is not covered: a damaged packet may be valid, never the reverse.
    let bad = got.iter().filter(|(_, valid)| !valid).count();
    assert!(bad <= damaged && bad > damaged * 3 / 4, "{bad} of {damaged}");
}

#[test]
fn full_queues_refuse_and_overflow() {
    let network = SimNetwork::new(3);
    let mut a = network.attach(NodeConfig {
        batch: 4,
        queue: 2,
        ..NodeConfig::new(A, 1)
    });
    let mut b = network.attach(NodeConfig {
        rx_capacity: 3 * 44,
        ..NodeConfig::new(B, 2)
    });
    let send = |a: &mut SimLink| a.packet(&path(A, B), Qpns::to(QPN), 40, &mut |_| Ok(()));
    for _ in 0..4 {
        assert_eq!(send(&mut a), Ok(()));
    }
    assert_eq!(send(&mut a), Err(TransmitError::Full));
    assert!(!a.flush().unwrap(), "the interface holds two");
    while let Some(next) = network.next_event() {
        network.advance(next);
        a.flush().unwrap();
    }
    assert!(b.readable());
    assert_eq!(b.receive(&mut |_| ()).unwrap(), 3);
    assert_eq!(b.receive(&mut |_| ()).unwrap(), 0);
    let mut dropped = 0;
    b.counters(&mut |name, value| dropped += if name == "sim_overflowed" { value } else { 0 });
    assert_eq!(dropped, 1);
}

#[test]
fn a_considerate_node_overruns_nobody() {
    let network = SimNetwork::new(3);
    let mut a = network.attach(NodeConfig {
        considerate: true,
        ..NodeConfig::new(A, 1)
    });
    let mut b = network.attach(NodeConfig {
        rx_capacity: 4 * 44,
        ..NodeConfig::new(B, 2)
    });
    let mut c = network.attach(NodeConfig::new(B, 3));
    let send = |a: &mut SimLink, qpn| a.packet(&path(A, B), Qpns::to(qpn), 40, &mut |_| Ok(()));
    for _ in 0..3 {
        assert_eq!(send(&mut a, QPN), Ok(()));
        assert_eq!(send(&mut a, QPN), Ok(()));
        assert_eq!(send(&mut a, QPN), Err(TransmitError::Busy));
        assert_eq!(send(&mut a, 0x03_0001), Ok(()), "others have room");
        a.flush().unwrap();
        while let Some(next) = network.next_event() {
            network.advance(next);
        }
        assert_eq!(send(&mut a, QPN), Err(TransmitError::Busy));
        assert_eq!(b.receive(&mut |_| ()).unwrap(), 2);
        assert_eq!(c.receive(&mut |_| ()).unwrap(), 1);
    }
}

#[test]
fn blackouts_and_bursts_lose_runs() {
    let dark = Conditions {
        blackout: Some(Time::ZERO..Time::from_nanos(u64::MAX)),
        ..Default::default()
    };
    let (network, mut a, mut b) = pair(4, dark, NodeConfig::new(B, 2));
    assert_eq!(carry(&network, &mut a, &mut b, &path(A, B), 50), []);
    let bursts = Conditions {
        burst: Probability::percent(2),
        burst_length: 10,
        ..Default::default()
    };
    let (network, mut a, mut b) = pair(5, bursts, NodeConfig::new(B, 2));
    let got = carry(&network, &mut a, &mut b, &path(A, B), 1000);
    let gaps: Vec<u32> = got
        .windows(2)
        .map(|w| w[1].0 - w[0].0 - 1)
        .filter(|&gap| gap > 0)
        .collect();
    assert!(
        !gaps.is_empty() && gaps.iter().all(|gap| gap % 10 == 0),
        "{gaps:?}"
    );
}

#[test]
fn faulting_memory_sends_nothing() {
    let (network, mut a, mut b) = pair(6, Conditions::default(), NodeConfig::new(B, 2));
    let fault = Fault { addr: 5 };
    assert_eq!(
        a.packet(&path(A, B), Qpns::to(QPN), 40, &mut |_| Err(fault)),
        Err(TransmitError::Fault(fault))
    );
    a.flush().unwrap();
    assert_eq!(network.next_event(), None);
    assert_eq!(b.receive(&mut |_| ()).unwrap(), 0);
}

#[test]
fn every_member_of_a_group_gets_a_copy() {
    let network = SimNetwork::new(1);
    let mut nodes = [1, 2, 3].map(|n| network.attach(NodeConfig::new(IpAddr::from([10, 0, 0, n]), n)));
    let group: IpAddr = "239.1.2.3".parse().unwrap();
    nodes[0].join(group, 1).unwrap();
    nodes[1].join(group, 1).unwrap();
    nodes[2].join("239.1.2.4".parse().unwrap(), 1).unwrap();
    let mut arrivals = || {
        let to_group = path(IpAddr::from([10, 0, 0, 1]), group);
        nodes[0]
            .packet(&to_group, Qpns::to(0xff_ffff), 40, &mut |_| Ok(()))
            .unwrap();
        nodes[0].flush().unwrap();
        while let Some(next) = network.next_event() {
            network.advance(next);
        }
        let mut receive = |node: usize| {
            let mut valid = 0;
            let sink = &mut |packet: &RxPacket<'_>| valid += usize::from(packet.icrc.valid(packet));
            nodes[node].receive(sink).unwrap();
            valid
        };
        let counts = [receive(0), receive(1), receive(2)];
        nodes[0].leave(group).unwrap();
        counts
    };
    assert_eq!(arrivals(), [1, 1, 0], "the sender is a member too");
    assert_eq!(arrivals(), [0, 1, 0]);
}

#[test]
fn unknown_destinations_are_counted() {
    let (network, mut a, _b) = pair(6, Conditions::default(), NodeConfig::new(B, 3));
    a.packet(&path(A, B), Qpns::to(QPN), 40, &mut |_| Ok(())).unwrap();
    a.flush().unwrap();
    assert_eq!(network.incidents()[0].kind, IncidentKind::NoRoute);
}
