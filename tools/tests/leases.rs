//! A real `ferroced` in a fresh network namespace, and processes that lease its slots.

mod common;

use std::io::{BufRead, BufReader};
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd};
use std::process::{Command, Stdio};

use common::{Daemon, Holder, eventually, in_fresh_namespace, ip};
use ferroce_engine::control::protocol::{self, Hello, ProcessStatus, Reply, Request};
use ferroce_engine::control::{Client, ControlError, Event, Lease, Refusal};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, connect, recv, send, socket_with,
};
use rustix::process::{Pid, Resource, Rlimit, Signal, getrlimit, kill_process, prlimit, test_kill_process};

#[test]
fn holder() {
    common::hold();
}

/// The start of a BTH for that slot.
fn bth(slot: u8, mark: u8) -> [u8; 16] {
    let mut bytes = [0; 16];
    (bytes[5], bytes[15]) = (slot, mark);
    bytes
}

fn readable(fd: BorrowedFd<'_>) -> bool {
    let timeout = rustix::event::Timespec {
        tv_sec: 60,
        tv_nsec: 0,
    };
    poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&timeout)).unwrap() == 1
}

/// The mark of the next datagram in the slot's queue.
fn received(lease: &Lease) -> Result<u8, Errno> {
    let mut bytes = [0; 64];
    recv(lease.socket(), &mut bytes[..], RecvFlags::DONTWAIT).map(|_| bytes[15])
}

fn next_event(lease: &Lease) -> Event {
    loop {
        assert!(readable(lease.control_fd()), "no event of the daemon");
        if let Some(event) = lease.receive().unwrap() {
            return event;
        }
    }
}

#[test]
fn slots_get_their_own_traffic_only() {
    if !in_fresh_namespace("slots_get_their_own_traffic_only") {
        return;
    }
    let _daemon = Daemon::start(&[]);
    let first = Lease::acquire("ferroce_lo").unwrap();
    let second = Lease::acquire("ferroce_lo").unwrap();
    assert_ne!(first.slot(), second.slot());
    assert_eq!(
        first.info().gids[0].unwrap().addr,
        "127.0.0.1".parse::<IpAddr>().unwrap()
    );
    for target in ["127.0.0.1:4791", "[::1]:4791"] {
        let target: SocketAddr = target.parse().unwrap();
        let sender = UdpSocket::bind((target.ip(), 0)).unwrap();
        for mark in 0..50 {
            sender.send_to(&bth(first.slot(), mark), target).unwrap();
            sender.send_to(&bth(second.slot(), 100 + mark), target).unwrap();
            // To the daemon, to a slot that nobody leases, and too short for a BTH.
            sender.send_to(&bth(0, 200), target).unwrap();
            sender.send_to(&bth(77, 200), target).unwrap();
            sender.send_to(&bth(255, 200), target).unwrap();
            sender.send_to(&[0; 3], target).unwrap();
        }
        // Loopback delivers within the send call, so all is there.
        for mark in 0..50 {
            assert_eq!((received(&first), received(&second)), (Ok(mark), Ok(100 + mark)));
        }
        assert_eq!(
            (received(&first), received(&second)),
            (Err(Errno::AGAIN), Err(Errno::AGAIN))
        );
    }
}

#[test]
fn dead_process_frees_its_slot_and_its_datagrams_are_gone() {
    if !in_fresh_namespace("dead_process_frees_its_slot_and_its_datagrams_are_gone") {
        return;
    }
    let _daemon = Daemon::start(&["--slots", "1"]);
    let target = "127.0.0.1:4791";
    let sender = UdpSocket::bind("127.0.0.1:0").unwrap();
    for round in 0..20 {
        let holder = Holder::start("ferroce_lo");
        assert_eq!(holder.slot, 1);
        let full = Lease::acquire("ferroce_lo").unwrap_err();
        assert!(
            matches!(full, ControlError::Refused(Refusal::SlotTableFull { slots: 1 })),
            "{full}"
        );
        sender.send_to(&bth(1, 1), target).unwrap();
        if round % 2 == 0 {
            holder.kill()
        } else {
            holder.finish()
        }
        let mut freed = None;
        eventually("the slot comes back", || match Lease::acquire("ferroce_lo") {
            Ok(lease) => freed.replace(lease).is_none(),
            Err(ControlError::Refused(Refusal::SlotTableFull { .. })) => false,
            Err(error) => panic!("{error}"),
        });
        let lease = freed.unwrap();
        assert_eq!(received(&lease), Err(Errno::AGAIN), "datagram of the last holder");
        sender.send_to(&bth(1, 2), target).unwrap();
        assert_eq!(received(&lease), Ok(2));
        drop(lease);
        // Now nobody has the slot, or its holder is about to lose it: both must leave no trace.
        sender.send_to(&bth(1, 3), target).unwrap();
        eventually("no lease", || leases() == 0);
        sender.send_to(&bth(1, 4), target).unwrap();
    }
}

/// The processes and the number of leases that the daemon tells.
fn status(client: &Client) -> (Vec<ProcessStatus>, u32) {
    let mut processes = Vec::new();
    let mut reply = client.ask(&Request::Status).unwrap();
    loop {
        match reply {
            Reply::Process(process) => processes.push(*process),
            Reply::StatusEnd(status) => return (processes, status.leased),
            other => panic!("{other:?}"),
        }
        reply = client.next_reply().unwrap();
    }
}

/// Number of leases that the daemon knows.
fn leases() -> u32 {
    status(&Client::connect().unwrap()).1
}

#[test]
fn status_asks_every_process_and_names_the_silent_one() {
    if !in_fresh_namespace("status_asks_every_process_and_names_the_silent_one") {
        return;
    }
    let _daemon = Daemon::start(&[]);
    let client = Client::connect().unwrap();
    let (first, second) = (Holder::start("ferroce_lo"), Holder::start("ferroce_lo"));
    let answering = |count: usize| {
        let (processes, leased) = status(&client);
        assert_eq!((processes.len(), leased), (2, 2));
        processes
            .iter()
            .filter(|process| process.report.is_some())
            .count()
            == count
    };
    eventually("both answer", || answering(2));
    let (processes, _) = status(&client);
    let process = processes
        .iter()
        .find(|process| process.slot == first.slot)
        .unwrap();
    assert_eq!(
        (process.pid, process.device.as_str(), process.uid),
        (first.child.id(), "ferroce_lo", 0)
    );
    assert!(process.command.starts_with("leases-"));
    let pid = Pid::from_child(&second.child);
    kill_process(pid, Signal::STOP).unwrap();
    eventually("one is silent", || answering(1));
    kill_process(pid, Signal::CONT).unwrap();
    eventually("both answer again", || answering(2));
}

#[test]
fn fork_does_not_keep_the_slot_of_a_dead_process() {
    if !in_fresh_namespace("fork_does_not_keep_the_slot_of_a_dead_process") {
        return;
    }
    let _daemon = Daemon::start(&[]);
    // The protocol by hand: hello, then a request (variant 0, and a text with its length before it).
    let python = format!(
        "import os, socket, sys\n\
        s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); s.connect(b'\\0ferroced')\n\
        s.send(b'FRRC' + ({}).to_bytes(2, 'little') + b'test'); s.recv(9999); s.recv(9999)\n\
        s.send(b'\\x00\\x0aferroce_lo'); socket.recv_fds(s, 9999, 3)\n\
        child = os.fork()\n\
        if child: print(child, flush=True)\n\
        sys.stdin.read()",
        protocol::VERSION
    );
    let mut parent = Command::new("python3")
        .args(["-c", &python])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(parent.stdout.take().unwrap())
        .read_line(&mut line)
        .unwrap();
    let child = Pid::from_raw(line.trim().parse().unwrap()).unwrap();
    assert_eq!(leases(), 1);
    // `wait` would close the standard input that keeps the child.
    let _stdin = parent.stdin.take();
    parent.kill().unwrap();
    parent.wait().unwrap();
    eventually("the slot comes back", || leases() == 0);
    assert!(
        test_kill_process(child).is_ok(),
        "the child lives, and holds the connection"
    );
    kill_process(child, Signal::KILL).unwrap();
}

#[test]
fn garbage_ends_a_connection_and_nothing_else() {
    if !in_fresh_namespace("garbage_ends_a_connection_and_nothing_else") {
        return;
    }
    let _daemon = Daemon::start(&[]);
    let hello = Hello::ours().emit();
    let connect_raw = || {
        let flags = SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        connect(&socket, &protocol::address()).unwrap();
        socket
    };
    let long = vec![0xff; 150_000];
    for garbage in [&b"GET / HTTP/1.1"[..], b"\xff", b"FRRC", &[0; 5000], &long] {
        for greeting in [None, Some(&hello)] {
            let socket = connect_raw();
            for bytes in greeting.map(Vec::as_slice).into_iter().chain([garbage]) {
                send(&socket, bytes, SendFlags::NOSIGNAL).unwrap();
            }
            let mut bytes = [0; 9999];
            // Hello and welcome may come first; then the end, by close or reset.
            while recv(&socket, &mut bytes[..], RecvFlags::empty()).is_ok_and(|(length, _)| length > 0) {}
        }
    }
    assert_eq!(leases(), 0);
}

/// A program may well go on with its sockets when the daemon has given up its connection.
#[test]
fn garbage_does_not_free_the_slot_of_a_program_that_lives() {
    if !in_fresh_namespace("garbage_does_not_free_the_slot_of_a_program_that_lives") {
        return;
    }
    let _daemon = Daemon::start(&["--slots", "1"]);
    let ask = |request: &Request, fds: &[BorrowedFd<'_>]| {
        let flags = SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        connect(&socket, &protocol::address()).unwrap();
        protocol::send(socket.as_fd(), &Hello::ours().emit(), &[], SendFlags::empty()).unwrap();
        let request = protocol::encode(request);
        protocol::send(socket.as_fd(), &request, fds, SendFlags::empty()).unwrap();
        // Hello, welcome, answer.
        let mut answers = (0..3).map(|_| protocol::receive(socket.as_fd(), RecvFlags::empty()).unwrap());
        let answer = answers.by_ref().last().unwrap();
        drop(answers);
        (
            socket,
            protocol::decode::<Reply>(&answer.bytes).unwrap(),
            answer.fds,
        )
    };
    let request = Request::Lease {
        device: "ferroce_lo".into(),
    };
    let full = Reply::Refused(Refusal::SlotTableFull { slots: 1 });
    let (mut connection, reply, fds) = ask(&request, &[]);
    let Reply::Leased { device, .. } = reply else {
        panic!("{reply:?}");
    };
    let [udp, heirloom] = &fds[..] else {
        panic!("{} descriptors", fds.len());
    };
    for garbage in [&b"\xff"[..], &[0xff; 150_000]] {
        send(&connection, garbage, SendFlags::NOSIGNAL).unwrap();
        let mut bytes = [0; 9999];
        while recv(&connection, &mut bytes[..], RecvFlags::empty()).is_ok_and(|(length, _)| length > 0) {}
        assert_eq!(ask(&request, &[]).1, full);
        // It comes back to what it has.
        let device = device.clone();
        let (again, reply, _) = ask(
            &Request::Resume {
                device: device.clone(),
            },
            &[heirloom.as_fd(), udp.as_fd()],
        );
        assert_eq!(reply, Reply::Resumed { device });
        connection = again;
    }
    send(&connection, b"\xff", SendFlags::NOSIGNAL).unwrap();
    eventually("no lease", || leases() == 0);
    // Longer than until the first look for dead programs.
    std::thread::sleep(std::time::Duration::from_secs(3));
    assert_eq!(ask(&request, &[]).1, full);
    drop(fds);
    eventually("the slot comes back", || {
        std::thread::sleep(std::time::Duration::from_millis(100));
        ask(&request, &[]).1 != full
    });
}

#[test]
fn every_slot_can_be_leased() {
    if !in_fresh_namespace("every_slot_can_be_leased") {
        return;
    }
    let _daemon = Daemon::start(&[]);
    let leases: Vec<Lease> = (0..251).map(|_| Lease::acquire("ferroce_lo").unwrap()).collect();
    let sender = UdpSocket::bind("127.0.0.1:0").unwrap();
    for lease in &leases {
        sender
            .send_to(&bth(lease.slot(), lease.slot()), "127.0.0.1:4791")
            .unwrap();
    }
    for lease in &leases {
        assert_eq!(received(lease), Ok(lease.slot()));
    }
    let full = Lease::acquire("ferroce_lo").unwrap_err();
    assert!(
        matches!(full, ControlError::Refused(Refusal::SlotTableFull { slots: 251 })),
        "{full}"
    );
}

#[test]
fn address_and_interface_changes_are_told() {
    if !in_fresh_namespace("address_and_interface_changes_are_told") {
        return;
    }
    ip("link add fa type veth peer name fb");
    ip("link set fa up");
    ip("link set fb up");
    ip("address add 10.1.0.1/24 dev fa");
    let _daemon = Daemon::start(&[]);
    let lease = Lease::acquire("ferroce_fa").unwrap();
    let addresses = |event: Event| match event {
        Event::DeviceChanged(info) => info
            .gids
            .iter()
            .map(|gid| gid.map(|gid| gid.addr.to_string()))
            .collect::<Vec<_>>(),
        other => panic!("{other:?}"),
    };
    let wait_for = |test: &dyn Fn(&Event) -> bool| {
        loop {
            let event = next_event(&lease);
            if test(&event) {
                return event;
            }
        }
    };
    let has = |event: &Event, ip: &str| matches!(event, Event::DeviceChanged(info) if info.gids.iter().flatten().any(|gid| gid.addr.to_string() == ip));
    ip("address add 10.1.0.2/24 dev fa");
    let shown = addresses(wait_for(&|event| has(event, "10.1.0.2")));
    assert_eq!(
        shown[1..3],
        [Some("10.1.0.1".to_owned()), Some("10.1.0.2".to_owned())]
    );
    ip("address del 10.1.0.2/24 dev fa");
    wait_for(&|event| !has(event, "10.1.0.2"));
    ip("link set fa mtu 4200");
    wait_for(&|event| matches!(event, Event::DeviceChanged(info) if info.mtu == 4200 && info.up));
    ip("link set fb down");
    wait_for(&|event| matches!(event, Event::DeviceChanged(info) if !info.up));
    ip("link set fb up");
    wait_for(&|event| matches!(event, Event::DeviceChanged(info) if info.up));
    ip("link set fa down");
    ip("link set fa name renamed");
    let event = wait_for(&|event| matches!(event, Event::DeviceChanged(info) if info.netdev == "renamed"));
    assert!(matches!(event, Event::DeviceChanged(info) if info.name == "ferroce_fa" && !info.up));
    ip("link del renamed");
    wait_for(&|event| matches!(event, Event::DeviceRemoved));
    let gone = Lease::acquire("ferroce_fa").unwrap_err();
    assert!(
        matches!(gone, ControlError::Refused(Refusal::UnknownDevice { .. })),
        "{gone}"
    );
}

#[test]
fn end_of_the_daemon_is_told() {
    if !in_fresh_namespace("end_of_the_daemon_is_told") {
        return;
    }
    let missing = Lease::acquire("ferroce_lo").unwrap_err();
    assert!(matches!(missing, ControlError::NoDaemon), "{missing}");
    let daemon = Daemon::start(&[]);
    let lease = Lease::acquire("ferroce_lo").unwrap();
    assert_eq!(lease.receive().unwrap(), None);
    drop(daemon);
    assert_eq!(next_event(&lease), Event::DaemonGone);
    assert_eq!(lease.receive().unwrap(), None);
    assert!(lease.socket().as_fd().try_clone_to_owned().is_ok());
}

/// Waits for the lease to be taken over by a new daemon.
fn await_takeover(lease: &Lease) {
    while !matches!(next_event(lease), Event::DeviceChanged(_)) {}
}

#[test]
fn leases_outlive_a_killed_daemon_and_the_next_takes_them_over() {
    if !in_fresh_namespace("leases_outlive_a_killed_daemon_and_the_next_takes_them_over") {
        return;
    }
    ip("link add fa type veth peer name fb");
    let first = Daemon::start(&["--slots", "5"]);
    let client = Client::connect().unwrap();
    let request = Request::LinkAdd {
        xdp: None,
        name: "rdma0".into(),
        netdev: "fa".into(),
    };
    assert_eq!(client.ask(&request).unwrap(), Reply::Added { notes: Vec::new() });
    let lease = Lease::acquire("ferroce_lo").unwrap();
    let named = Lease::acquire("rdma0").unwrap();
    let holder = Holder::start("ferroce_lo");
    let dead = Holder::start("ferroce_lo");
    assert_eq!((lease.slot(), named.slot(), holder.slot, dead.slot), (1, 2, 3, 4));
    first.kill();
    assert_eq!(next_event(&lease), Event::DaemonGone);
    // Traffic goes on without a daemon.
    let sender = UdpSocket::bind("127.0.0.1:0").unwrap();
    sender.send_to(&bth(lease.slot(), 1), "127.0.0.1:4791").unwrap();
    assert_eq!(received(&lease), Ok(1));
    dead.kill();

    let second = Daemon::spawn(&[]);
    await_takeover(&lease);
    await_takeover(&named);
    sender.send_to(&bth(lease.slot(), 2), "127.0.0.1:4791").unwrap();
    assert_eq!(received(&lease), Ok(2));
    // The dead one's slot comes back, the others stay taken, also after a third daemon.
    eventually("three leases", || leases() == 3);
    second.kill();
    let _third = Daemon::spawn(&["--slots", "100"]);
    await_takeover(&lease);
    await_takeover(&named);
    eventually("three leases", || leases() == 3);
    let mut slots = Vec::new();
    // The dead one's is free when the daemon has looked for its holder.
    eventually("a second free slot", || {
        match Lease::acquire("ferroce_lo") {
            Ok(lease) => slots.push(lease),
            Err(ControlError::Refused(Refusal::SlotTableFull { .. })) => {}
            Err(error) => panic!("{error}"),
        }
        slots.len() == 2
    });
    let full = Lease::acquire("ferroce_lo").unwrap_err();
    assert!(
        matches!(full, ControlError::Refused(Refusal::SlotTableFull { slots: 5 })),
        "{full}"
    );
    slots.sort_by_key(Lease::slot);
    assert_eq!((slots[0].slot(), slots[1].slot()), (4, 5));
    sender.send_to(&bth(5, 3), "127.0.0.1:4791").unwrap();
    assert_eq!(received(&slots[1]), Ok(3));
    holder.kill();
    eventually("four leases", || leases() == 4);
}

#[test]
fn port_is_free_when_the_last_program_of_a_killed_daemon_ends() {
    if !in_fresh_namespace("port_is_free_when_the_last_program_of_a_killed_daemon_ends") {
        return;
    }
    let daemon = Daemon::start(&[]);
    let holder = Holder::start("ferroce_lo");
    daemon.kill();
    holder.kill();
    drop(UdpSocket::bind("0.0.0.0:4791").unwrap());
    let _next = Daemon::start(&[]);
    assert_eq!(leases(), 0);
}

#[test]
fn sockets_that_are_no_heirloom_are_refused() {
    if !in_fresh_namespace("sockets_that_are_no_heirloom_are_refused") {
        return;
    }
    let _daemon = Daemon::start(&[]);
    let lease = Lease::acquire("ferroce_lo").unwrap();
    let client = Client::connect().unwrap();
    // A slot that its program has not lost, and no descriptors at all.
    let request = Request::Resume { device: lease.info() };
    let refused = client.ask(&request).unwrap_err();
    assert!(
        matches!(refused, ControlError::Refused(Refusal::UnknownLease)),
        "{refused}"
    );
    assert_eq!(leases(), 1);
}

#[test]
fn a_process_takes_one_hold_however_often_it_asks() {
    if !in_fresh_namespace("a_process_takes_one_hold_however_often_it_asks") {
        return;
    }
    let daemon = Daemon::start(&[]);
    let descriptors = || {
        let all = std::fs::read_dir(format!("/proc/{}/fd", daemon.0.id())).unwrap();
        all.count()
    };
    let client = Client::connect().unwrap();
    assert_eq!(client.ask(&Request::Hold).unwrap(), Reply::Done);
    let before = descriptors();
    for _ in 0..100 {
        assert_eq!(client.ask(&Request::Hold).unwrap(), Reply::Done);
        let other = Client::connect().unwrap();
        assert_eq!(other.ask(&Request::Hold).unwrap(), Reply::Done);
    }
    eventually("the other connections are closed", || descriptors() <= before);
}

#[test]
fn a_daemon_without_free_descriptors_refuses_and_recovers() {
    if !in_fresh_namespace("a_daemon_without_free_descriptors_refuses_and_recovers") {
        return;
    }
    let daemon = Daemon::start(&["--slots", "2"]);
    let used = std::fs::read_dir(format!("/proc/{}/fd", daemon.0.id())).unwrap();
    let limit = Rlimit {
        current: Some(used.count() as u64 + 10),
        ..getrlimit(Resource::Nofile)
    };
    prlimit(Some(Pid::from_child(&daemon.0)), Resource::Nofile, limit).unwrap();
    let mut clients = Vec::new();
    for _ in 0..3 {
        let refused = loop {
            match Client::connect() {
                Ok(client) => clients.push(client),
                Err(error) => break error,
            }
        };
        assert!(
            matches!(refused, ControlError::Refused(Refusal::TooManyConnections)),
            "{refused}"
        );
    }
    assert_eq!(status(&clients[0]).1, 0);
    drop(clients);
    eventually("there is room again", || Client::connect().is_ok());
}
