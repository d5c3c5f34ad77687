//! Ways as the resolver of RDMA CM finds them, in a network namespace with a neighbour in another.

mod common;

use std::io::{BufRead, BufReader, Write};
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::process::{Child, Command, Stdio};

use common::{in_fresh_namespace, ip};
use ferroce_engine::rdma_cm::Resolution;
use ferroce_tools::daemon::resolve::{Outcome, Resolver};
use ferroce_tools::netlink::interfaces;
use ferroce_tools::netlink::route::Query;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// A host at the other end of `veth0`: a process in a network namespace of its own.
struct Neighbour(Child);

impl Neighbour {
    /// 10.0.0.1 and 2001:db8::1 are here, .2 and ::2 there.
    fn start() -> Self {
        let mut child = Command::new("unshare")
            .args(["-n", "sh", "-c", "echo ready; read line"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap())
            .read_line(&mut line)
            .unwrap();
        assert_eq!(line, "ready\n");
        let neighbour = Self(child);
        ip("link set lo up");
        ip("link add veth0 type veth peer name veth1");
        ip(&format!("link set veth1 netns {}", neighbour.0.id()));
        ip("addr add 10.0.0.1/24 dev veth0");
        ip("addr add 10.0.0.11/24 dev veth0");
        ip("addr add 2001:db8::1/64 dev veth0 nodad");
        ip("addr add fe80::a/64 dev veth0 nodad");
        ip("link set veth0 up");
        neighbour.ip("addr add 10.0.0.2/24 dev veth1");
        neighbour.ip("addr add 2001:db8::2/64 dev veth1 nodad");
        neighbour.ip("addr add fe80::b/64 dev veth1 nodad");
        neighbour.ip("link set veth1 up");
        neighbour
    }

    /// Runs `ip` there.
    fn ip(&self, words: &str) {
        let status = Command::new("nsenter")
            .args(["-t", &self.0.id().to_string(), "-n", "ip"])
            .args(words.split(' '))
            .status()
            .unwrap();
        assert!(status.success(), "ip {words}");
    }
}

impl Drop for Neighbour {
    fn drop(&mut self) {
        if let Some(mut stdin) = self.0.stdin.take() {
            let _ = stdin.write_all(b"\n");
        }
        let _ = self.0.wait();
    }
}

fn index(name: &str) -> u32 {
    let interfaces = interfaces().unwrap();
    let found = interfaces.iter().find(|(_, it)| it.name == name);
    *found.unwrap().0
}

fn query(dest: &str) -> Query {
    Query {
        source: None,
        dest: dest.parse().unwrap(),
        ifindex: 0,
        type_of_service: 0,
    }
}

fn resolver() -> Resolver {
    let mut resolver = Resolver::new().unwrap();
    resolver.follow(&interfaces().unwrap());
    resolver
}

fn found(source: &str, interface: &str) -> Outcome {
    Ok(Resolution {
        source: source.parse().unwrap(),
        ifindex: index(interface),
    })
}

/// What comes of it, though the neighbour must be asked for.
fn after_news(resolver: &mut Resolver, query: Query) -> Outcome {
    if let Some(outcome) = resolver.start(7, query) {
        panic!("{query:?} was known: {outcome:?}");
    }
    loop {
        let timeout = Timespec {
            tv_sec: 60,
            tv_nsec: 0,
        };
        let ready = poll(
            &mut [PollFd::new(&resolver.as_fd(), PollFlags::IN)],
            Some(&timeout),
        );
        assert_eq!(ready, Ok(1), "no news for {query:?}");
        if let [(7, outcome)] = resolver.news().unwrap()[..] {
            return outcome;
        }
    }
}

#[test]
fn own_addresses_are_reached_without_neighbours() {
    if !in_fresh_namespace("own_addresses_are_reached_without_neighbours") {
        return;
    }
    let _neighbour = Neighbour::start();
    let mut resolver = resolver();
    let mut start = |query| resolver.start(1, query).expect("known at once");
    assert_eq!(start(query("127.0.0.1")), found("127.0.0.1", "lo"));
    assert_eq!(start(query("::1")), found("::1", "lo"));
    // The interface is that of the address, whatever the route says.
    assert_eq!(start(query("10.0.0.1")), found("10.0.0.1", "veth0"));
    assert_eq!(start(query("2001:db8::1")), found("2001:db8::1", "veth0"));
    let scoped = Query {
        ifindex: index("veth0"),
        ..query("fe80::a")
    };
    assert_eq!(start(scoped), found("fe80::a", "veth0"));
    // Groups: by the interface of the source.
    for (source, group, interface) in [
        ("10.0.0.11", "239.1.2.3", "veth0"),
        ("127.0.0.1", "239.1.2.3", "lo"),
        ("::1", "ff15::1", "lo"),
    ] {
        let to_group = Query {
            source: Some(source.parse().unwrap()),
            ..query(group)
        };
        assert_eq!(start(to_group), found(source, interface));
    }
}

#[test]
fn what_has_no_way_fails_as_sending_would() {
    if !in_fresh_namespace("what_has_no_way_fails_as_sending_would") {
        return;
    }
    let _neighbour = Neighbour::start();
    ip("route add unreachable 10.8.0.0/16");
    ip("route add prohibit 10.9.0.0/16");
    ip("-6 route add unreachable 2001:db8:8::/48");
    let mut resolver = resolver();
    let mut start = |query| resolver.start(1, query).expect("known at once");
    assert_eq!(start(query("192.0.2.1")), Err(libc::ENETUNREACH));
    assert_eq!(start(query("2001:db8:1::1")), Err(libc::ENETUNREACH));
    assert_eq!(start(query("10.8.0.1")), Err(libc::EHOSTUNREACH));
    assert_eq!(start(query("2001:db8:8::1")), Err(libc::EHOSTUNREACH));
    assert_eq!(start(query("10.9.0.1")), Err(libc::EACCES));
    let not_ours = Query {
        source: Some("10.0.0.99".parse().unwrap()),
        ..query("10.0.0.2")
    };
    // EINVAL, or ENETUNREACH in newer kernels.
    start(not_ours).unwrap_err();
}

#[test]
fn neighbours_are_asked_for_and_waited_for() {
    if !in_fresh_namespace("neighbours_are_asked_for_and_waited_for") {
        return;
    }
    let neighbour = Neighbour::start();
    ip("route add 10.5.0.0/16 via 10.0.0.2");
    let mut resolver = resolver();
    let mut wants = |query| after_news(&mut resolver, query);
    assert_eq!(wants(query("10.0.0.2")), found("10.0.0.1", "veth0"));
    assert_eq!(wants(query("2001:db8::2")), found("2001:db8::1", "veth0"));
    let scoped = Query {
        ifindex: index("veth0"),
        ..query("fe80::b")
    };
    let source = |outcome: Outcome| outcome.unwrap().source;
    assert!(matches!(source(wants(scoped)), IpAddr::V6(ip) if ip.is_unicast_link_local()));
    // Known now: also as the gateway of others.
    let second = Query {
        source: Some("10.0.0.11".parse().unwrap()),
        ..query("10.0.0.2")
    };
    let mut start = |query| resolver.start(1, query);
    assert_eq!(start(second), Some(found("10.0.0.11", "veth0")));
    assert_eq!(start(query("10.5.1.2")), Some(found("10.0.0.1", "veth0")));

    // Nobody there, then somebody.
    assert_eq!(resolver.start(3, query("10.0.0.77")), None);
    resolver.cancel(3);
    ip("neigh flush dev veth0");
    neighbour.ip("addr add 10.0.0.77/24 dev veth1");
    assert_eq!(
        after_news(&mut resolver, query("10.0.0.77")),
        found("10.0.0.1", "veth0")
    );
}
