//! Routes and neighbours of the kernel, in namespaces.

use std::io::{BufRead, BufReader, Write};
use std::net::UdpSocket;
use std::process::{Child, Command, Stdio};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::super::super::testing::{in_fresh_namespace, index, ip};
use super::*;
use crate::netlink::interfaces;

/// A host at the other end of `veth0`: a process in a network namespace of its own.
struct Peer(Child);

impl Peer {
    fn start() -> Self {
        let mut child = Command::new("unshare")
            .args(["-n", "sh", "-c", "echo ready; read line"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        let stdout = child.stdout.take().unwrap();
        BufReader::new(stdout).read_line(&mut line).unwrap();
        Self(child)
    }

    fn run(&self, command: &str) {
        let output = Command::new("nsenter")
            .args(["-t", &self.0.id().to_string(), "-n", "sh", "-ec", command])
            .output()
            .unwrap();
        assert!(output.status.success(), "{command}: {output:?}");
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        if let Some(mut stdin) = self.0.stdin.take() {
            let _ = stdin.write_all(b"\n");
        }
        let _ = self.0.wait();
    }
}

/// What follows the tables, driven as the daemon does.
struct Live {
    hops: Hops,
    table: Arc<HopTable>,
    port: u32,
}

impl Live {
    fn ask(&mut self, source: &str, dest: &str) {
        self.hops.ask(self.port, parse(source), parse(dest), 1);
    }

    fn step(&mut self) {
        // The daemon hears of these by its own watch.
        self.hops.follow(&interfaces().unwrap());
        let left = self
            .hops
            .deadline()
            .map_or(Duration::from_millis(20), |deadline| {
                deadline.saturating_duration_since(Instant::now())
            });
        let timeout = Timespec::try_from(left.min(Duration::from_millis(20))).unwrap();
        let fd = self.hops.as_fd();
        if poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&timeout)) == Ok(1) {
            self.hops.news().unwrap();
        }
        self.hops.expire(Instant::now());
    }

    fn becomes(&mut self, what: &str, dest: &str, hop: Option<Hop>) {
        let start = Instant::now();
        loop {
            let list = self.table.list();
            let found = list
                .iter()
                .find(|(ip, _)| *ip == parse(dest))
                .map(|(_, hop)| *hop);
            if found == hop {
                return;
            }
            assert!(start.elapsed() < Duration::from_secs(30), "{what}: {found:?}");
            self.step();
        }
    }
}

/// Has the kernel send something, as a program's UDP socket does.
fn send_by_kernel(dest: &str) {
    let any = if dest.contains(':') { "[::]:0" } else { "0.0.0.0:0" };
    let _ = UdpSocket::bind(any).unwrap().send_to(&[], (dest, 9));
}

#[test]
fn the_kernels_routes_and_neighbours_are_followed() {
    if !in_fresh_namespace("daemon::xdp::hops::tests::live::the_kernels_routes_and_neighbours_are_followed") {
        return;
    }
    let peer = Peer::start();
    ip("link add veth0 address 02:00:00:00:00:01 type veth peer name veth1 address 02:00:00:00:00:02");
    ip(&format!("link set veth1 netns {}", peer.0.id()));
    ip("link add other0 type veth peer name other1");
    for address in ["10.0.0.1/24", "10.0.0.11/24"] {
        ip(&format!("addr add {address} dev veth0"));
    }
    for address in ["2001:db8::1/64", "fe80::a/64"] {
        ip(&format!("addr add {address} dev veth0 nodad"));
    }
    // A second host there, with a MAC address of its own, which answers for itself only, and tells of changes.
    peer.run(
        "echo 1 >/proc/sys/net/ipv4/conf/all/arp_ignore
         echo 1 >/proc/sys/net/ipv4/conf/all/arp_notify
         ip link add gw link veth1 address 02:00:00:00:00:03 type macvlan mode bridge
         ip addr add 10.0.0.2/24 dev veth1
         ip addr add 2001:db8::2/64 dev veth1 nodad
         ip addr add fe80::b/64 dev veth1 nodad
         ip addr add 10.0.0.3/24 dev gw
         ip link set veth1 up
         ip link set gw up",
    );
    for interface in ["veth0", "other0", "other1"] {
        ip(&format!("link set {interface} up"));
    }
    ip("addr add 10.1.0.1/24 dev other0");
    ip("route add 10.5.0.0/16 via 10.0.0.2");
    let mut live = Live {
        hops: Hops::new().unwrap(),
        table: Arc::from(HopTable::new()),
        port: index("veth0"),
    };
    live.hops.add(live.port, live.table.clone());
    let start = Instant::now();
    while !interfaces().unwrap()[&live.port].carrier {
        assert!(start.elapsed() < Duration::from_secs(30));
    }
    live.step();

    // Unknown: the kernel is to send, and the neighbour is asked for.
    live.ask("10.0.0.1", "10.0.0.2");
    live.becomes("a neighbour", "10.0.0.2", frame(MAC));
    live.ask("10.0.0.1", "10.5.1.1");
    live.becomes("by a gateway", "10.5.1.1", frame(MAC));
    live.ask("2001:db8::1", "2001:db8::2");
    live.becomes("IPv6", "2001:db8::2", frame(MAC));
    live.ask("fe80::a", "fe80::b");
    live.becomes("link-local", "fe80::b", frame(MAC));
    for dest in [
        "10.0.0.1",
        "10.0.0.11",
        "10.0.0.255",
        "127.0.0.1",
        "10.1.0.2",
        "192.0.2.1",
    ] {
        live.ask("10.0.0.1", dest);
        live.becomes("no frame", dest, Some(Hop::Kernel));
    }

    // Another gateway, another interface, none.
    ip("route replace 10.5.0.0/16 via 10.0.0.3");
    live.becomes("another gateway", "10.5.1.1", frame(OTHER_MAC));
    ip("route replace 10.5.0.0/16 dev other0");
    live.becomes("another interface", "10.5.1.1", Some(Hop::Kernel));
    ip("route del 10.5.0.0/16");
    ip("route add unreachable 10.5.0.0/16");
    ip("route replace 10.5.0.0/16 via 10.0.0.2");
    live.becomes("the first again", "10.5.1.1", frame(MAC));

    // A rule that tells our addresses apart.
    ip("route add 10.5.0.0/16 via 10.0.0.3 table 100");
    ip("rule add from 10.0.0.11 lookup 100");
    live.becomes("a rule", "10.5.1.1", Some(Hop::Kernel));
    ip("rule del from 10.0.0.11 lookup 100");
    live.becomes("no rule", "10.5.1.1", frame(MAC));

    // Another MAC address there, of which the host tells by itself.
    peer.run("ip link set veth1 address 02:00:00:00:00:04");
    let changed = frame([2, 0, 0, 0, 0, 4]);
    live.becomes("its address", "10.0.0.2", changed);
    live.becomes("its address, as a gateway", "10.5.1.1", changed);

    // Failed, and there again.
    ip("neigh change 10.0.0.2 dev veth0 nud failed");
    live.becomes("failed", "10.0.0.2", Some(Hop::Kernel));
    send_by_kernel("10.0.0.2");
    live.becomes("recovered", "10.0.0.2", changed);
    ip("neigh flush dev veth0");
    live.becomes("forgotten", "10.0.0.2", Some(Hop::Kernel));
    send_by_kernel("10.0.0.2");
    live.becomes("recovered", "10.5.1.1", changed);

    // Stale, but in use: the kernel asks it, and hears of it.
    ip("neigh change 10.0.0.2 lladdr 02:00:00:00:00:04 dev veth0 nud stale");
    assert!(live.table.find(parse("10.0.0.2")).is_some());
    live.hops.expire(Instant::now() + A_LOOK);
    let output = Command::new("ip")
        .args(["neigh", "show", "10.0.0.2"])
        .output()
        .unwrap();
    let shown = String::from_utf8(output.stdout).unwrap();
    assert!(
        ["DELAY", "PROBE", "REACHABLE"]
            .iter()
            .any(|state| shown.contains(state)),
        "{shown}"
    );
    live.becomes("stale", "10.0.0.2", changed);

    // Our own.
    ip("link set veth0 address 02:00:00:00:00:05");
    let ours = |dest| {
        let source = [2, 0, 0, 0, 0, 5];
        Some(Hop::Frame { source, dest })
    };
    send_by_kernel("10.0.0.2");
    live.becomes("our address", "10.0.0.2", ours([2, 0, 0, 0, 0, 4]));
    ip("link set veth0 down");
    live.becomes("down", "10.0.0.2", Some(Hop::Kernel));
    ip("link set veth0 up");
    let start = Instant::now();
    while !interfaces().unwrap()[&live.port].carrier {
        assert!(start.elapsed() < Duration::from_secs(30));
    }
    send_by_kernel("10.0.0.2");
    live.becomes("up", "10.0.0.2", ours([2, 0, 0, 0, 0, 4]));
    ip("addr flush dev veth0");
    live.becomes("no address", "10.0.0.2", Some(Hop::Kernel));

    // Nobody uses them any more.
    for _ in 0..100 {
        live.hops.expire(Instant::now() + Duration::from_secs(1000));
    }
    assert_eq!(live.table.list(), []);
    live.hops.remove(live.port);
}
