//! RDMA CM of a real `ferroced` in a fresh network namespace: programs that connect over loopback, die, and outlive it.

mod common;

use std::cell::Cell;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddrV6, UdpSocket};
use std::process::{Child, Command as Process, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use common::{Daemon, eventually, in_fresh_namespace, ip};
use ferroce_engine::control::protocol::{CmProcessStatus, DaemonStatus, Reply, Request};
use ferroce_engine::control::{Client, Lease, Listener, Session};
use ferroce_engine::rdma_cm::{
    Address, Answer, Command, Details, Ece, Event, EventKind, Id, IdStatus, Parameters, PortSpace, QpKind,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Set in a test binary that is to listen at the address named.
const LISTEN: &str = "FERROCE_TEST_LISTEN";
/// Longer than everything but a message that was lost takes.
const PATIENCE: Duration = Duration::from_secs(30);

/// A session whose events can be waited for.
struct Program {
    session: Session,
    events: Receiver<Event>,
    lost: Receiver<Id>,
    lease: Arc<Lease>,
    last_qpn: Cell<u32>,
}

struct Ears(Sender<Event>, Sender<Id>);

impl Listener for Ears {
    fn event(&self, event: Event) {
        let _ = self.0.send(event);
    }

    fn lost(&self, id: Id) {
        let _ = self.1.send(id);
    }
}

impl Program {
    fn start() -> Self {
        let ((event, events), (loss, lost)) = (channel(), channel());
        let lease = Arc::new(Lease::acquire("ferroce_lo").unwrap());
        let served = Arc::downgrade(&lease);
        std::thread::spawn(move || serve(&served));
        Self {
            session: Session::open(Box::new(Ears(event, loss))).unwrap(),
            events,
            lost,
            lease,
            last_qpn: Cell::new(0),
        }
    }

    fn ask(&self, command: Command) -> Answer {
        let said = format!("{command:?}");
        self.session
            .ask(command)
            .unwrap_or_else(|errno| panic!("{said}: errno {errno}"))
    }

    fn event(&self, kind: EventKind) -> Event {
        let event = self
            .events
            .recv_timeout(PATIENCE)
            .unwrap_or_else(|_| panic!("no {kind:?}"));
        assert_eq!((event.kind, event.status), (kind, 0), "{event:?}");
        event
    }

    fn create(&self) -> Id {
        let create = Command::Create {
            port_space: PortSpace::Tcp,
            qp_kind: QpKind::Rc,
        };
        match self.ask(create) {
            Answer::Created(id) => id,
            other => panic!("{other:?}"),
        }
    }

    /// A listener there.
    fn listen(&self, at: &str) -> Id {
        let id = self.create();
        let address = address(at);
        self.ask(Command::Bind { id, address });
        self.ask(Command::Listen { id, backlog: 0 });
        id
    }

    /// A number for a queue pair of this process: a new one for each connection, or a peer would take the one before for
    /// stale.
    fn new_qpn(&self) -> u32 {
        let next = self.last_qpn.get() + 1;
        self.last_qpn.set(next);
        u32::from(self.lease.slot()) << 16 | next
    }

    /// The queue pair of the last connection.
    fn qpn(&self) -> u32 {
        u32::from(self.lease.slot()) << 16 | self.last_qpn.get()
    }

    fn parameters(&self, private_data: &[u8]) -> Parameters {
        Parameters {
            qpn: self.new_qpn(),
            private_data: private_data.to_vec(),
            retry_count: 7,
            rnr_retry_count: 7,
            ..Parameters::default()
        }
    }

    /// An id with a route to there.
    fn route(&self, to: &str) -> Id {
        let id = self.create();
        self.ask(Command::ResolveAddress {
            id,
            source: None,
            dest: address(to),
            timeout_ms: 2000,
        });
        self.event(EventKind::AddressResolved);
        self.ask(Command::ResolveRoute { id, timeout_ms: 2000 });
        self.event(EventKind::RouteResolved);
        id
    }

    fn connect(&self, to: &str, private_data: &[u8]) -> Id {
        let id = self.route(to);
        self.ask(Command::Connect {
            id,
            parameters: self.parameters(private_data),
            ece: Ece::default(),
        });
        id
    }

    fn accept(&self, id: Id, private_data: &[u8]) {
        self.ask(Command::Accept {
            id,
            parameters: Some(self.parameters(private_data)),
            ece: Ece::default(),
        });
    }

    /// Takes the next request, with its private data.
    fn request(&self) -> (Id, Vec<u8>) {
        let event = self.event(EventKind::ConnectRequest);
        let id = event.new_id.unwrap();
        self.session.taken(id);
        (id, private_data(event))
    }

    /// Takes the reply: what librdmacm does once the queue pair is set.
    fn established(&self, id: Id) -> Vec<u8> {
        let event = self.event(EventKind::ConnectResponse);
        assert_eq!(event.id, id);
        self.ask(Command::Accept {
            id,
            parameters: None,
            ece: Ece::default(),
        });
        private_data(event)
    }
}

/// Keeps a lease over the death of daemons, as long as there is one.
fn serve(lease: &Weak<Lease>) {
    let moment = Timespec {
        tv_sec: 0,
        tv_nsec: 20_000_000,
    };
    while let Some(lease) = lease.upgrade() {
        let mut fds = [PollFd::from_borrowed_fd(lease.control_fd(), PollFlags::IN)];
        poll(&mut fds, Some(&moment)).unwrap();
        while lease.receive().unwrap().is_some() {}
    }
}

/// What the peer sent: the rest of its message's room is zeros.
fn private_data(event: Event) -> Vec<u8> {
    match event.details {
        Details::Connection(Parameters { private_data, .. }) => {
            let end = private_data.iter().rposition(|byte| *byte != 0);
            private_data[..end.map_or(0, |last| last + 1)].to_vec()
        }
        other => panic!("{other:?}"),
    }
}

fn address(text: &str) -> Address {
    Address::Ip(text.parse().unwrap())
}

/// What the daemon tells of RDMA CM.
fn status() -> (Vec<CmProcessStatus>, DaemonStatus) {
    let client = Client::connect().unwrap();
    let mut processes = Vec::new();
    let mut reply = client.ask(&Request::Status).unwrap();
    loop {
        match reply {
            Reply::CmProcess(process) => processes.push(*process),
            Reply::StatusEnd(daemon) => return (processes, daemon),
            _ => {}
        }
        reply = client.next_reply().unwrap();
    }
}

fn ids() -> Vec<IdStatus> {
    status().0.into_iter().flat_map(|process| process.ids).collect()
}

fn counter(name: &str) -> u64 {
    let counters = status().1.counters;
    let found = counters.iter().find(|(it, _)| it == name);
    found.unwrap_or_else(|| panic!("no counter {name}")).1
}

#[test]
fn programs_connect_and_disconnect() {
    if !in_fresh_namespace("programs_connect_and_disconnect") {
        return;
    }
    let _daemon = Daemon::start(&[]);
    let (server, client) = (Program::start(), Program::start());
    for (at, to) in [("0.0.0.0:7471", "127.0.0.1:7471"), ("[::1]:7471", "[::1]:7471")] {
        let listener = server.listen(at);
        let active = client.connect(to, b"hello");
        let (passive, said) = server.request();
        assert_eq!(said, b"hello");
        server.accept(passive, b"welcome");
        assert_eq!(client.established(active), b"welcome");
        assert_eq!(server.event(EventKind::Established).id, passive);

        let shown = ids();
        // Ids are numbered by process.
        let of = |qpn| shown.iter().find(|it| it.qpn == qpn).unwrap();
        assert_eq!((of(None).state.as_str(), of(None).dest), ("LISTEN", None));
        let (ours, theirs) = (of(Some(client.qpn())), of(Some(server.qpn())));
        assert_eq!((ours.id, theirs.id), (active, passive));
        assert_eq!(
            (ours.state.as_str(), theirs.state.as_str()),
            ("CONNECTED", "CONNECTED")
        );
        assert_eq!((ours.source, ours.dest), (theirs.dest, theirs.source));
        assert_eq!(ours.dest, Some(address(to)));
        assert_eq!(
            (ours.qpn, ours.remote_qpn),
            (Some(client.qpn()), Some(server.qpn()))
        );
        let (processes, _) = status();
        assert!(
            processes
                .iter()
                .all(|it| it.pid == std::process::id() && it.uid == Some(0))
        );

        client.ask(Command::Disconnect { id: active });
        server.event(EventKind::Disconnected);
        server.ask(Command::Disconnect { id: passive });
        client.event(EventKind::Disconnected);
        client.ask(Command::Destroy { id: active });
        for id in [passive, listener] {
            server.ask(Command::Destroy { id });
        }
        assert_eq!(ids(), []);
    }
    assert!(counter("gsi_rx_mads") >= 8);
}

/// How often a process has slept so far.
fn sleeps(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let count = status
        .lines()
        .find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
    count.unwrap().trim().parse().unwrap()
}

#[test]
fn a_daemon_with_nothing_to_do_sleeps() {
    if !in_fresh_namespace("a_daemon_with_nothing_to_do_sleeps") {
        return;
    }
    let daemon = Daemon::start(&[]);
    let (server, client) = (Program::start(), Program::start());
    server.listen("0.0.0.0:7471");
    // One connection that has been, timewait included, and one that is.
    for ends in [true, false] {
        let active = client.connect("127.0.0.1:7471", b"");
        let (passive, _) = server.request();
        server.accept(passive, b"");
        assert_eq!(client.established(active), b"");
        server.event(EventKind::Established);
        if ends {
            client.ask(Command::Disconnect { id: active });
            server.event(EventKind::Disconnected);
            server.ask(Command::Disconnect { id: passive });
            client.event(EventKind::Disconnected);
            server.event(EventKind::TimewaitExit);
            client.event(EventKind::TimewaitExit);
        }
    }
    eventually("it sleeps for two seconds", || {
        let before = sleeps(daemon.0.id());
        std::thread::sleep(Duration::from_secs(2));
        sleeps(daemon.0.id()) == before
    });
}

#[test]
fn addresses_that_no_device_has() {
    if !in_fresh_namespace("addresses_that_no_device_has") {
        return;
    }
    ip("link add veth0 type veth peer name veth1");
    ip("addr add 10.0.0.1/24 dev veth0");
    ip("link set veth0 up");
    let _daemon = Daemon::start(&[]);
    let client = Program::start();
    let bind = |at: &str| {
        let (id, address) = (client.create(), address(at));
        client.session.ask(Command::Bind { id, address })
    };
    assert_eq!(bind("10.0.0.1:0"), Ok(Answer::Done));
    let name = "ferroce_veth0".to_owned();
    let control = Client::connect().unwrap();
    assert_eq!(control.ask(&Request::LinkDel { name }).unwrap(), Reply::Done);
    client.event(EventKind::DeviceRemoval);
    // The host's own, and another's.
    assert_eq!(bind("10.0.0.1:0"), Err(libc::ENODEV));
    assert_eq!(bind("10.0.0.2:0"), Err(libc::EADDRNOTAVAIL));
}

#[test]
fn nobody_listens() {
    if !in_fresh_namespace("nobody_listens") {
        return;
    }
    let _daemon = Daemon::start(&[]);
    let client = Program::start();
    let id = client.connect("127.0.0.1:7471", b"");
    let event = client.events.recv_timeout(PATIENCE).unwrap();
    // IB_CM_REJ_INVALID_SERVICE_ID.
    assert_eq!((event.kind, event.status, event.id), (EventKind::Rejected, 8, id));
}

#[test]
fn what_takes_too_long_ends_in_time() {
    if !in_fresh_namespace("what_takes_too_long_ends_in_time") {
        return;
    }
    ip("link add veth0 type veth peer name veth1");
    ip("addr add 10.0.0.1/24 dev veth0");
    ip("link set veth0 up");
    ip("link set veth1 up");
    let _daemon = Daemon::start(&[]);
    let client = Program::start();
    // Two that nobody answers for, of whom one is destroyed.
    let [gone, late] = ["10.0.0.77:1", "10.0.0.78:1"].map(|to| {
        let id = client.create();
        client.ask(Command::ResolveAddress {
            id,
            source: None,
            dest: address(to),
            timeout_ms: 300,
        });
        id
    });
    client.ask(Command::Destroy { id: gone });
    let start = Instant::now();
    let event = client.events.recv_timeout(PATIENCE).unwrap();
    assert_eq!(
        (event.id, event.kind, event.status),
        (late, EventKind::AddressError, -libc::ETIMEDOUT)
    );
    assert!(start.elapsed() >= Duration::from_millis(200));
    // Scope ids arrive: this is an address of the other end.
    let id = client.create();
    let scoped = |scope| {
        let address = Address::Ip(SocketAddrV6::new("fe80::1".parse().unwrap(), 0, 0, scope).into());
        client.session.ask(Command::Bind { id, address })
    };
    assert_eq!(scoped(0), Err(libc::EINVAL));
    assert_eq!(scoped(1), Err(libc::ENODEV));
}

#[test]
fn queue_pairs_of_nobody_are_refused() {
    if !in_fresh_namespace("queue_pairs_of_nobody_are_refused") {
        return;
    }
    let _daemon = Daemon::start(&[]);
    let client = Program::start();
    let id = client.route("127.0.0.1:7471");
    let free = (client.qpn() >> 16) + 7;
    let connect = |qpn| {
        let parameters = Parameters {
            qpn,
            ..Parameters::default()
        };
        let ece = Ece::default();
        client.session.ask(Command::Connect { id, parameters, ece })
    };
    for qpn in [1, free << 16, 0xff_ffff] {
        assert_eq!(connect(qpn), Err(libc::EINVAL), "{qpn:#x}");
    }
    // A number that no process can have is as good as none: who only measures makes it up.
    assert_eq!(connect(1000), Ok(Answer::Done));
}

#[test]
fn an_address_without_a_route_is_refused_at_once() {
    if !in_fresh_namespace("an_address_without_a_route_is_refused_at_once") {
        return;
    }
    let _daemon = Daemon::start(&[]);
    let client = Program::start();
    let id = client.create();
    let resolve = |dest: &str| {
        client.session.ask(Command::ResolveAddress {
            id,
            source: None,
            dest: address(dest),
            timeout_ms: 2000,
        })
    };
    for _ in 0..2 {
        assert_eq!(resolve("198.51.100.1:7471"), Err(libc::ENETUNREACH));
    }
    assert_eq!(resolve("127.0.0.1:7471"), Ok(Answer::Done));
    // The first that is told.
    client.event(EventKind::AddressResolved);
}

#[test]
fn listener() {
    let Some(at) = std::env::var_os(LISTEN) else {
        return;
    };
    let server = Program::start();
    server.listen(at.to_str().unwrap());
    println!("\nlistens");
    std::io::stdout().flush().unwrap();
    let (passive, _) = server.request();
    server.accept(passive, b"");
    server.event(EventKind::Established);
    println!("connected");
    std::io::stdout().flush().unwrap();
    let _ = std::io::stdin().read(&mut [0]);
}

/// A process that listens, and accepts one connection.
struct Server(Child, BufReader<std::process::ChildStdout>);

impl Server {
    fn start(at: &str) -> Self {
        let mut child = Process::new(std::env::current_exe().unwrap())
            .args(["--exact", "listener", "--nocapture"])
            .env(LISTEN, at)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        let mut server = Self(child, stdout);
        server.wait_for("listens");
        server
    }

    fn wait_for(&mut self, wanted: &str) {
        let mut lines = self.1.by_ref().lines().map_while(Result::ok);
        assert!(
            lines.any(|line| line == wanted),
            "the server does not say `{wanted}`"
        );
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_killed_program_leaves_its_peer_and_its_port() {
    if !in_fresh_namespace("a_killed_program_leaves_its_peer_and_its_port") {
        return;
    }
    let _daemon = Daemon::start(&[]);
    let client = Program::start();
    for _ in 0..3 {
        let mut server = Server::start("127.0.0.1:7471");
        let active = client.connect("127.0.0.1:7471", b"");
        client.established(active);
        server.wait_for("connected");
        drop(server);
        assert_eq!(client.event(EventKind::Disconnected).id, active);
        client.ask(Command::Disconnect { id: active });
        client.ask(Command::Destroy { id: active });
    }
    assert_eq!(ids(), []);
}

#[test]
fn ids_and_connections_outlive_the_daemon() {
    if !in_fresh_namespace("ids_and_connections_outlive_the_daemon") {
        return;
    }
    let mut daemon = Daemon::start(&[]);
    let (server, client) = (Program::start(), Program::start());
    let listener = server.listen("0.0.0.0:7471");
    let active = client.connect("127.0.0.1:7471", b"");
    let (passive, _) = server.request();
    server.accept(passive, b"");
    client.established(active);
    server.event(EventKind::Established);
    let states = |ids: &[IdStatus]| {
        let mut states: Vec<(Id, String)> = ids.iter().map(|it| (it.id, it.state.clone())).collect();
        states.sort();
        states
    };
    let before = states(&ids());
    assert_eq!(before.len(), 3);
    for round in 0..4 {
        if round % 2 == 0 {
            daemon.kill();
        } else {
            // By SIGTERM.
            drop(daemon);
        }
        daemon = Daemon::start(&[]);
        eventually("all ids are back", || states(&ids()) == before);
    }
    // A handshake that the daemon does not see the end of.
    let second = client.connect("127.0.0.1:7471", b"second");
    daemon.kill();
    let daemon = Daemon::start(&[]);
    let (request, said) = server.request();
    assert_eq!(said, b"second");
    server.accept(request, b"");
    client.established(second);
    server.event(EventKind::Established);
    client.ask(Command::Disconnect { id: active });
    assert_eq!(server.event(EventKind::Disconnected).id, passive);
    server.ask(Command::Destroy { id: listener });
    assert!(client.lost.try_recv().is_err() && server.lost.try_recv().is_err());
    drop(daemon);
}

#[test]
fn a_port_that_is_taken_meanwhile_is_lost() {
    if !in_fresh_namespace("a_port_that_is_taken_meanwhile_is_lost") {
        return;
    }
    let daemon = Daemon::start(&[]);
    let server = Program::start();
    let listener = server.listen("127.0.0.1:7471");
    daemon.kill();
    // Too late for the first to be back: it has no lease that the daemon would wait for.
    let Program {
        session, lost, lease, ..
    } = server;
    drop(lease);
    let _daemon = Daemon::start(&[]);
    let other = Program::start();
    let id = other.create();
    let bound = other.session.ask(Command::Bind {
        id,
        address: address("127.0.0.1:7471"),
    });
    match bound {
        Ok(_) => assert_eq!(lost.recv_timeout(PATIENCE), Ok(listener)),
        // It was back first.
        Err(errno) => assert_eq!(errno, libc::EADDRINUSE),
    }
    drop(session);
}

#[test]
fn a_daemon_that_is_to_leave_ends_connections_first() {
    if !in_fresh_namespace("a_daemon_that_is_to_leave_ends_connections_first") {
        return;
    }
    let mut daemon = Daemon::start(&["--idle-exit", "1"]);
    let (server, client) = (Program::start(), Program::start());
    server.listen("127.0.0.1:7471");
    let active = client.connect("127.0.0.1:7471", b"");
    let (passive, _) = server.request();
    server.accept(passive, b"");
    client.established(active);
    server.event(EventKind::Established);
    drop(server);
    drop(client);
    let start = Instant::now();
    eventually("ferroced leaves", || daemon.0.try_wait().unwrap().is_some());
    // The timewait of RoCE: 2^(19 - 8) ms.
    assert!(
        start.elapsed() > Duration::from_millis(1900),
        "{:?}",
        start.elapsed()
    );
}

#[test]
fn what_is_no_mad_is_counted_and_dropped() {
    if !in_fresh_namespace("what_is_no_mad_is_counted_and_dropped") {
        return;
    }
    let _daemon = Daemon::start(&[]);
    let sender = UdpSocket::bind("127.0.0.1:0").unwrap();
    let mut packet = vec![0u8; 12 + 8 + 256 + 4];
    packet[..12].copy_from_slice(&[0x64, 0, 0xff, 0xff, 0, 0, 0, 1, 0, 0, 0, 0]);
    packet[12..20].copy_from_slice(&[0x80, 1, 0, 0, 0, 0, 0, 1]);
    for (reason, change) in [
        ("gsi_drop_icrc", (19, 1)),
        ("gsi_drop_qkey", (15, 1)),
        ("gsi_drop_qpn", (7, 0)),
        ("gsi_drop_opcode", (0, 0x04)),
        // To a slot that does not exist.
        ("gsi_link_rx_misdirected", (5, 252)),
    ] {
        let mut packet = packet.clone();
        packet[change.0] = change.1;
        sender.send_to(&packet, "127.0.0.1:4791").unwrap();
        eventually(reason, || counter(reason) == 1);
    }
    sender.send_to(&packet[..30], "127.0.0.1:4791").unwrap();
    eventually("a short one", || counter("gsi_drop_length") == 1);
}

#[test]
fn a_child_does_not_keep_the_session_of_a_dead_process() {
    if !in_fresh_namespace("a_child_does_not_keep_the_session_of_a_dead_process") {
        return;
    }
    let _daemon = Daemon::start(&[]);
    let create = ferroce_engine::control::protocol::encode(&Request::Cm {
        sequence: 1,
        command: Command::Create {
            port_space: PortSpace::Tcp,
            qp_kind: QpKind::Rc,
        },
    });
    let python = format!(
        "import os, socket, sys\n\
        s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); s.connect(b'\\0ferroced')\n\
        s.send(b'FRRC' + ({}).to_bytes(2, 'little') + b'test'); s.recv(9999); s.recv(9999)\n\
        s.send(bytes({create:?})); s.recv(9999)\n\
        child = os.fork()\n\
        if child: print(child, flush=True)\n\
        sys.stdin.read()",
        ferroce_engine::control::protocol::VERSION
    );
    let mut parent = Process::new("python3")
        .args(["-c", &python])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(parent.stdout.take().unwrap())
        .read_line(&mut line)
        .unwrap();
    assert_eq!(ids().len(), 1);
    parent.kill().unwrap();
    // The child has the pipe's end too, and lives on.
    eventually("the id is gone", || ids().is_empty());
    let child: i32 = line.trim().parse().unwrap();
    let child = rustix::process::Pid::from_raw(child).unwrap();
    rustix::process::kill_process(child, rustix::process::Signal::KILL).unwrap();
    parent.wait().unwrap();
}
