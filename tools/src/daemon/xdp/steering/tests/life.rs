//! What changes while the program runs: addresses, attaching and detaching, a successor.

use std::time::{Duration, Instant};

use super::super::super::testing::{in_fresh_namespace, index, ip};
use super::Verdict::*;
use super::frames::*;
use super::*;

#[test]
fn addresses_follow() {
    if !in_fresh_namespace("daemon::xdp::steering::tests::life::addresses_follow") {
        return;
    }
    let mut bench = Bench::new();
    let [ipv4, _, ipv6, _] = good(SEAT);
    bench.steering.set_addresses(&[V6.parse().unwrap()]).unwrap();
    assert_eq!((bench.run(&ipv4), bench.run(&ipv6)), (Pass, Redirect));
    bench
        .steering
        .set_addresses(&[V4.parse().unwrap(), "239.1.2.3".parse().unwrap()])
        .unwrap();
    assert_eq!((bench.run(&ipv4), bench.run(&ipv6)), (Redirect, Pass));
    assert_eq!(bench.run(&v4(None, "239.1.2.3", &udp(&iba(SEAT)))), Pass);
    let many: Vec<IpAddr> = (0..1024u32)
        .map(|n| std::net::Ipv4Addr::from(0x0b00_0000 + n).into())
        .collect();
    bench.steering.set_addresses(&many).unwrap();
    assert_eq!(bench.run(&v4(None, "11.0.3.255", &udp(&iba(SEAT)))), Redirect);
    bench.steering.set_addresses(&many[1..]).unwrap();
    bench.steering.set_addresses(&many).unwrap();
    let more = [&many[..], &[V4.parse().unwrap()]].concat();
    let error = bench.steering.set_addresses(&more).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::E2BIG));
    bench.steering.set_addresses(&[]).unwrap();
    assert_eq!((bench.run(&ipv4), bench.run(&ipv6)), (Pass, Pass));
}

/// What `ip` says of the program on an interface.
fn is_attached(interface: &str) -> bool {
    let output = std::process::Command::new("ip")
        .args(["link", "show", interface])
        .output()
        .unwrap();
    String::from_utf8(output.stdout).unwrap().contains("xdp")
}

#[test]
fn attaching_and_what_is_left() {
    if !in_fresh_namespace("daemon::xdp::steering::tests::life::attaching_and_what_is_left") {
        return;
    }
    ip("link add veth0 type veth peer name veth1");
    ip("link set veth0 up");
    let ifindex = index("veth0");
    for (mode, other) in [
        (Attach::Driver, Attach::Generic),
        (Attach::Generic, Attach::Driver),
    ] {
        let steering = Steering::attach(ifindex, 1, mode).unwrap();
        assert!(is_attached("veth0"));
        assert_eq!(steering.ifindex().unwrap(), Some(ifindex));
        assert_eq!(steering.queues(), 1);
        for again in [mode, other] {
            let error = Steering::attach(ifindex, 1, again).unwrap_err().raw_os_error();
            assert!(
                matches!(error, Some(libc::EBUSY | libc::EEXIST)),
                "{again:?} over {mode:?}: {error:?}"
            );
        }
        drop(steering);
        // The kernel detaches when the last descriptor's work is done, a moment later.
        let start = Instant::now();
        while is_attached("veth0") {
            assert!(start.elapsed() < Duration::from_secs(10), "{mode:?} stays");
        }
    }
    // Interfaces that go, or that there never were.
    let steering = Steering::attach(ifindex, 1, Attach::Driver).unwrap();
    ip("link del veth0");
    assert_eq!(steering.ifindex().unwrap(), None);
    let error = Steering::attach(ifindex, 1, Attach::Driver).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EINVAL));
}

#[test]
fn a_successor_goes_on() {
    if !in_fresh_namespace("daemon::xdp::steering::tests::life::a_successor_goes_on") {
        return;
    }
    let bench = Bench::new();
    let [ipv4, _, ipv6, _] = good(SEAT);
    let copies = |steering: &Steering| -> Vec<OwnedFd> {
        let fds = steering.fds();
        assert_eq!(fds.len(), Steering::FDS);
        fds.iter().map(|fd| fd.try_clone_to_owned().unwrap()).collect()
    };
    // Not in their order, too few, or of another program.
    for at in 0..Steering::FDS - 1 {
        let mut fds = copies(&bench.steering);
        fds.swap(at, at + 1);
        assert!(Steering::inherit(fds).is_err(), "{at}");
    }
    let mut few = copies(&bench.steering);
    few.pop();
    assert!(Steering::inherit(few).is_err());
    let other = Steering::attach(index("veth1"), 2, Attach::Generic).unwrap();
    for at in 0..Steering::FDS {
        let mut fds = copies(&bench.steering);
        fds[at] = copies(&other).swap_remove(at);
        assert!(Steering::inherit(fds).is_err(), "{at}");
        let mut fds = copies(&bench.steering);
        fds[at] = std::fs::File::open("/dev/null").unwrap().into();
        assert!(Steering::inherit(fds).is_err(), "{at}");
    }

    assert_eq!(bench.run(&ipv4), Redirect);
    let Bench {
        steering,
        ifindex,
        _socket,
    } = bench;
    let fds = copies(&steering);
    drop(steering);
    let mut bench = Bench {
        steering: Steering::inherit(fds).unwrap(),
        ifindex,
        _socket,
    };
    assert_eq!((bench.run(&ipv4), bench.run(&ipv6)), (Redirect, Redirect));
    assert_eq!(bench.steering.queues(), 2);
    assert_eq!(bench.steering.ifindex().unwrap(), Some(ifindex));
    bench.steering.set_addresses(&[V6.parse().unwrap()]).unwrap();
    assert_eq!((bench.run(&ipv4), bench.run(&ipv6)), (Pass, Redirect));
    assert!(is_attached("veth0"));
}
