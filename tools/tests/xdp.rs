//! Devices in XDP mode: a real `ferroced` in a fresh network namespace, with the privilege that it takes.

mod common;

use std::fs;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use common::{Daemon, Holder, eventually, in_fresh_namespace, in_fresh_namespace_of_root, ip};
use ferroce_engine::control::protocol::{self, Hello, LinkStatus, Reply, Request, XdpOptions};
use ferroce_engine::control::{Client, ControlError, DeviceInfo, LinkMode, Refusal, XdpInfo};
use ferroce_engine::link::xdp::port::Zerocopy;
use ferroce_tools::daemon::xdp::steering::{Attach, Steering};
use ferroce_tools::netlink;
use rustix::fs::{Gid, Uid};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, connect, socket_with};
use rustix::thread::{set_thread_gid, set_thread_groups, set_thread_uid};

#[test]
fn holder() {
    common::hold();
}

/// A pair of interfaces that are up, `fa` with an address.
fn make_veth() {
    ip("link set lo up");
    ip("link add fa numrxqueues 2 numtxqueues 2 type veth peer name fb numrxqueues 2 numtxqueues 2");
    ip("link set fa up");
    ip("link set fb up");
    ip("address add 10.1.0.1/24 dev fa");
}

fn add(netdev: &str, options: XdpOptions) -> Result<(), Refusal> {
    let request = Request::LinkAdd {
        name: "rdma0".into(),
        netdev: netdev.into(),
        xdp: Some(options),
    };
    done(&request)
}

fn del(name: &str) -> Result<(), Refusal> {
    done(&Request::LinkDel { name: name.into() })
}

fn done(request: &Request) -> Result<(), Refusal> {
    match Client::connect().unwrap().ask(request) {
        Ok(Reply::Done | Reply::Added { .. }) => Ok(()),
        Err(ControlError::Refused(refusal)) => {
            assert!(!refusal.to_string().contains('\n'));
            Err(refusal)
        }
        other => panic!("{other:?}"),
    }
}

fn links() -> Vec<LinkStatus> {
    match Client::connect().unwrap().ask(&Request::Links) {
        Ok(Reply::Links(links)) => links,
        other => panic!("{other:?}"),
    }
}

fn link(name: &str) -> Option<LinkStatus> {
    links().into_iter().find(|link| link.device.name == name)
}

/// What the device is made of.
fn xdp_info(name: &str) -> XdpInfo {
    match link(name).map(|link| link.device.mode) {
        Some(LinkMode::Xdp(info)) => info,
        other => panic!("{other:?}"),
    }
}

/// Programs that have a seat.
fn seats_taken(name: &str) -> u16 {
    link(name).and_then(|link| link.xdp).unwrap().programs
}

fn index(netdev: &str) -> u32 {
    let interfaces = netlink::interfaces().unwrap();
    let found = interfaces.iter().find(|(_, interface)| interface.name == netdev);
    *found.unwrap().0
}

/// Whether an XDP program is on the interface.
fn has_program(netdev: &str) -> bool {
    netlink::interfaces().unwrap()[&index(netdev)]
        .xdp_program
        .is_some()
}

/// Nothing is otherwise than it was before XDP mode.
fn assert_untouched() {
    assert!(!has_program("fa"));
    let device = link("ferroce_fa").expect("the device of the interface").device;
    assert_eq!(device.mode, LinkMode::Udp);
    assert!(link("rdma0").is_none());
}

fn programs(programs: u16) -> XdpOptions {
    XdpOptions {
        programs: Some(programs),
        ..XdpOptions::default()
    }
}

/// A lease by hand: the connection that keeps it, the answer, and what came with it.
fn lease(device: &str) -> (OwnedFd, Reply, Vec<OwnedFd>) {
    let request = Request::Lease {
        device: device.into(),
    };
    ask(&request, &[])
}

/// Asks by hand: the connection, the answer, and what came with it.
fn ask(request: &Request, fds: &[BorrowedFd<'_>]) -> (OwnedFd, Reply, Vec<OwnedFd>) {
    let flags = SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
    eventually("a daemon listens", || {
        connect(&socket, &protocol::address()).is_ok()
    });
    protocol::send(socket.as_fd(), &Hello::ours().emit(), &[], SendFlags::empty()).unwrap();
    protocol::send(
        socket.as_fd(),
        &protocol::encode(request),
        fds,
        SendFlags::empty(),
    )
    .unwrap();
    let mut last = None;
    // Hello, welcome, answer.
    for _ in 0..3 {
        last = Some(protocol::receive(socket.as_fd(), RecvFlags::empty()).unwrap());
    }
    let last = last.unwrap();
    (socket, protocol::decode(&last.bytes).unwrap(), last.fds)
}

#[test]
fn device_in_xdp_mode_takes_the_place_of_the_automatic_one_and_gives_it_back() {
    if !in_fresh_namespace_of_root(
        "device_in_xdp_mode_takes_the_place_of_the_automatic_one_and_gives_it_back",
    ) {
        return;
    }
    make_veth();
    let _daemon = Daemon::start(&[]);
    assert_untouched();
    add("fa", XdpOptions::default()).unwrap();
    assert!(has_program("fa") && link("ferroce_fa").is_none());
    let info = xdp_info("rdma0");
    assert!(info.driver, "veth runs XDP programs itself");
    assert!(!info.features.zerocopy);
    let geometry = info.geometry;
    assert_eq!((geometry.queues, geometry.seats, geometry.chunk), (2, 16, 2048));
    // The table of RoCE v2 is where it was, and v1 behind it.
    let gids = link("rdma0").unwrap().device.gids;
    assert_eq!(
        gids[1].unwrap().addr,
        "10.1.0.1".parse::<std::net::IpAddr>().unwrap()
    );
    assert_eq!(gids.len(), 4);
    // It follows its interface.
    ip("address add 10.1.0.2/24 dev fa");
    eventually("an address more", || {
        let gids = link("rdma0").unwrap().device.gids;
        gids.iter()
            .flatten()
            .any(|gid| gid.addr.to_string() == "10.1.0.2")
    });
    ip("link set fa mtu 1400");
    eventually("another MTU", || link("rdma0").unwrap().device.mtu == 1400);
    ip("link set fb down");
    eventually("no carrier", || !link("rdma0").unwrap().device.up);
    ip("link set fb up");
    eventually("carrier", || link("rdma0").unwrap().device.up);
    del("rdma0").unwrap();
    assert_untouched();
    // The name of the automatic one will do as well, and all options.
    let options = XdpOptions {
        queues: Some(1),
        zerocopy: Zerocopy::Off,
        chunk: Some(4096),
        programs: Some(3),
    };
    let request = Request::LinkAdd {
        name: "ferroce_fa".into(),
        netdev: "fa".into(),
        xdp: Some(options),
    };
    done(&request).unwrap();
    let geometry = xdp_info("ferroce_fa").geometry;
    assert_eq!((geometry.queues, geometry.seats, geometry.chunk), (1, 3, 4096));
    // With the interface it ends.
    ip("link del fa");
    eventually("no device", || link("ferroce_fa").is_none());
    make_veth();
    eventually("the automatic one", || link("ferroce_fa").is_some());
    assert_untouched();
}

#[test]
fn what_can_not_be_is_refused_and_nothing_changed() {
    if !in_fresh_namespace_of_root("what_can_not_be_is_refused_and_nothing_changed") {
        return;
    }
    make_veth();
    ip("link add br0 type bridge");
    ip("link set br0 up");
    ip("link add va type veth peer name vb");
    ip("link set va master br0");
    ip("link set va up");
    ip("link add small type veth peer name small2");
    ip("link set small mtu 300");
    ip("link set small up");
    ip("link add still type veth peer name still2");
    let _daemon = Daemon::start(&[]);
    let refused = |netdev: &str, options: XdpOptions| {
        let refusal = add(netdev, options).unwrap_err();
        assert_untouched();
        eprintln!("{refusal}");
        refusal
    };
    let none = XdpOptions::default();
    assert!(matches!(refused("fz", none), Refusal::UnknownInterface { .. }));
    assert!(matches!(refused("lo", none), Refusal::XdpUnsuitable { .. }));
    assert!(matches!(refused("br0", none), Refusal::XdpUnsuitable { .. }));
    assert!(matches!(refused("va", none), Refusal::XdpUnsuitable { .. }));
    assert!(matches!(refused("still", none), Refusal::InterfaceDown { .. }));
    assert!(matches!(refused("small", none), Refusal::MtuTooSmall { .. }));
    let three = XdpOptions {
        queues: Some(3),
        ..none
    };
    assert!(matches!(
        refused("fa", three),
        Refusal::TooManyQueues { queues: 2, .. }
    ));
    let zerocopy = XdpOptions {
        zerocopy: Zerocopy::On,
        ..none
    };
    assert!(matches!(refused("fa", zerocopy), Refusal::ZerocopyRefused { .. }));
    let chunk = XdpOptions {
        chunk: Some(3000),
        ..none
    };
    assert!(matches!(refused("fa", chunk), Refusal::BadXdpOption { .. }));
    assert!(matches!(
        refused("fa", programs(252)),
        Refusal::BadXdpOption { .. }
    ));

    // A program of the automatic device.
    let holder = Holder::start("ferroce_fa");
    assert!(matches!(
        refused("fa", none),
        Refusal::DeviceBusy { leases: 1, .. }
    ));
    holder.kill();
    eventually("nobody uses it", || add("fa", none).is_ok());
    // One device for an interface.
    assert!(matches!(add("fa", none), Err(Refusal::DeviceExists { .. })));
    del("rdma0").unwrap();

    // The program of someone else.
    let other = Steering::attach(index("fa"), 1, Attach::Driver).unwrap();
    match add("fa", none) {
        Err(Refusal::XdpInUse { program: Some(_), .. }) => {}
        other => panic!("{other:?}"),
    }
    assert!(has_program("fa") && link("rdma0").is_none());
    drop(other);
    assert_untouched();
    add("fa", none).unwrap();
}

#[test]
fn where_the_driver_runs_no_program_the_kernel_does() {
    if !in_fresh_namespace_of_root("where_the_driver_runs_no_program_the_kernel_does") {
        return;
    }
    make_veth();
    ip("link add mv link fa type macvlan mode bridge");
    ip("link set mv up");
    let _daemon = Daemon::start(&[]);
    let request = |options| Request::LinkAdd {
        name: "rdma0".into(),
        netdev: "mv".into(),
        xdp: Some(options),
    };
    let notes = match Client::connect().unwrap().ask(&request(XdpOptions::default())) {
        Ok(Reply::Added { notes }) => notes,
        other => panic!("{other:?}"),
    };
    assert!(
        matches!(&notes[..], [one] if one.contains("SKB mode")),
        "{notes:?}"
    );
    let info = xdp_info("rdma0");
    assert!(!info.driver && !info.features.zerocopy);
    let holder = Holder::start("rdma0");
    holder.kill();
    eventually("the seat comes back", || seats_taken("rdma0") == 0);
    del("rdma0").unwrap();
    assert!(!has_program("mv"));
    let zerocopy = XdpOptions {
        zerocopy: Zerocopy::On,
        ..XdpOptions::default()
    };
    let refusal = done(&request(zerocopy)).unwrap_err();
    assert!(matches!(refusal, Refusal::ZerocopyRefused { .. }), "{refusal}");
    assert!(!has_program("mv"));
}

#[test]
fn without_privilege_xdp_mode_is_refused() {
    if !in_fresh_namespace("without_privilege_xdp_mode_is_refused") {
        return;
    }
    make_veth();
    let _daemon = Daemon::start(&[]);
    // Root of a user namespace has no say in BPF.
    let refusal = add("fa", XdpOptions::default()).unwrap_err();
    assert!(matches!(refusal, Refusal::XdpNotPermitted { .. }), "{refusal}");
    assert_untouched();
}

#[test]
fn interface_that_goes_takes_the_device_from_under_its_programs() {
    if !in_fresh_namespace_of_root("interface_that_goes_takes_the_device_from_under_its_programs") {
        return;
    }
    make_veth();
    let _daemon = Daemon::start(&[]);
    add("fa", programs(2)).unwrap();
    let (holder, other) = (Holder::start("rdma0"), Holder::start("rdma0"));
    ip("link del fa");
    eventually("no device", || link("rdma0").is_none());
    holder.kill();
    // The place is free for the next, though a program of the last one lives.
    make_veth();
    add("fa", programs(2)).unwrap();
    assert_eq!(seats_taken("rdma0"), 0);
    let next = Holder::start("rdma0");
    assert_ne!(next.slot, other.slot);
    other.finish();
    next.finish();
    eventually("nobody uses it", || del("rdma0").is_ok());
    assert_untouched();
}

#[test]
fn seats_run_out_and_come_back() {
    if !in_fresh_namespace_of_root("seats_run_out_and_come_back") {
        return;
    }
    make_veth();
    let _daemon = Daemon::start(&[]);
    add("fa", programs(2)).unwrap();
    for round in 0..6 {
        let (first, second) = (Holder::start("rdma0"), Holder::start("rdma0"));
        assert_eq!(seats_taken("rdma0"), 2);
        let (_, reply, _) = lease("rdma0");
        assert!(
            matches!(&reply, Reply::Refused(Refusal::SeatsTaken { programs: 2, .. })),
            "{reply:?}"
        );
        assert!(matches!(del("rdma0"), Err(Refusal::DeviceBusy { leases: 2, .. })));
        // Others lease slots of other devices as before.
        let other = Holder::start("ferroce_lo");
        if round % 2 == 0 {
            first.kill();
            second.finish();
        } else {
            first.finish();
            second.kill();
        }
        eventually("the seats come back", || seats_taken("rdma0") == 0);
        drop(other);
    }
    // What comes with a lease: see the protocol.
    let (connection, reply, fds) = lease("rdma0");
    let Reply::Leased { seat: Some(seat), .. } = reply else {
        panic!("{reply:?}");
    };
    assert!(seat < 2);
    assert_eq!(fds.len(), 1 + 2 + 2 + 1 + 1);
    // Who keeps that beyond the lease keeps nothing on the interface.
    drop(connection);
    eventually("the device is gone", || del("rdma0").is_ok());
    assert_untouched();
    drop(fds);
}

#[test]
fn adding_and_removing_a_hundred_times_leaves_nothing() {
    if !in_fresh_namespace_of_root("adding_and_removing_a_hundred_times_leaves_nothing") {
        return;
    }
    make_veth();
    let daemon = Daemon::start(&[]);
    let process = daemon.0.id();
    let descriptors = || fs::read_dir(format!("/proc/{process}/fd")).unwrap().count();
    let kibibytes = |file: &str, field: &str| -> u64 {
        let text = fs::read_to_string(file).unwrap();
        let line = text.lines().find(|line| line.starts_with(field)).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    };
    let used = || {
        let own = kibibytes(&format!("/proc/{process}/status"), "VmRSS:");
        (descriptors(), own, kibibytes("/proc/meminfo", "Shmem:"))
    };
    let round = || {
        add("fa", programs(4)).unwrap();
        let holder = Holder::start("rdma0");
        holder.kill();
        eventually("the seat comes back", || seats_taken("rdma0") == 0);
        del("rdma0").unwrap();
        assert!(!has_program("fa"));
    };
    // What is allocated once is allocated now.
    (0..5).for_each(|_| round());
    // For a moment after `del` the interface has no device.
    eventually("the automatic device is back", || link("ferroce_fa").is_some());
    let before = used();
    (0..100).for_each(|_| round());
    eventually("the automatic device is back", || link("ferroce_fa").is_some());
    eventually("no descriptor more", || descriptors() <= before.0);
    // A port of four programs takes some 10 MiB, so even a few that were kept would show.
    eventually("no memory more", || {
        let (_, own, shared) = used();
        own < before.1 + 4096 && shared < before.2 + 65_536
    });
    assert_untouched();
}

#[test]
fn killed_daemon_without_programs_leaves_nothing_on_the_interface() {
    if !in_fresh_namespace_of_root("killed_daemon_without_programs_leaves_nothing_on_the_interface") {
        return;
    }
    make_veth();
    let daemon = Daemon::start(&[]);
    add("fa", XdpOptions::default()).unwrap();
    assert!(has_program("fa"));
    daemon.kill();
    eventually("no program on the interface", || !has_program("fa"));
    let _next = Daemon::start(&[]);
    assert_untouched();
    add("fa", XdpOptions::default()).unwrap();
}

/// Root's daemon is killed while programs of `user` have seats; the next one goes on.
fn succession(user: Option<u32>) {
    make_veth();
    let group = user.map(|id| id.to_string());
    let arguments: Vec<&str> = group.iter().flat_map(|group| ["--group", group]).collect();
    let start = |device: &str| match user {
        Some(id) => Holder::start_as(device, id),
        None => Holder::start(device),
    };
    let daemon = Daemon::start(&arguments);
    add("fa", programs(3)).unwrap();
    let (lives, dies) = (start("rdma0"), start("rdma0"));
    let before = link("rdma0").unwrap().device;
    let program = netlink::interfaces().unwrap()[&index("fa")].xdp_program;
    daemon.kill();
    assert!(has_program("fa"), "traffic goes on");
    dies.kill();

    let second = Daemon::start(&arguments);
    eventually("the device is back", || link("rdma0").is_some());
    assert_eq!(link("rdma0").unwrap().device, before);
    assert_eq!(
        netlink::interfaces().unwrap()[&index("fa")].xdp_program,
        program,
        "it is the same program"
    );
    assert!(link("ferroce_fa").is_none());
    eventually("the seat of the dead one is free", || seats_taken("rdma0") == 1);
    let (third, fourth) = (start("rdma0"), start("rdma0"));
    assert_ne!(third.slot, lives.slot);
    assert_eq!(seats_taken("rdma0"), 3);
    // Once more, from a daemon that has inherited, and with programs of both.
    second.kill();
    fourth.kill();
    let third_daemon = Daemon::start(&arguments);
    eventually("both programs go on", || {
        link("rdma0").is_some() && seats_taken("rdma0") == 2
    });
    third.kill();
    lives.finish();
    eventually("nobody uses it", || seats_taken("rdma0") == 0);
    del("rdma0").unwrap();
    assert_untouched();
    drop(third_daemon);
}

#[test]
fn successor_takes_the_interface_over() {
    if in_fresh_namespace_of_root("successor_takes_the_interface_over") {
        succession(None);
    }
}

#[test]
fn successor_takes_the_interface_over_from_programs_of_ordinary_users() {
    if in_fresh_namespace_of_root("successor_takes_the_interface_over_from_programs_of_ordinary_users") {
        succession(Some(4711));
    }
}

#[test]
fn last_program_of_a_killed_daemon_takes_xdp_mode_along() {
    if !in_fresh_namespace_of_root("last_program_of_a_killed_daemon_takes_xdp_mode_along") {
        return;
    }
    make_veth();
    let daemon = Daemon::start(&[]);
    add("fa", XdpOptions::default()).unwrap();
    let holder = Holder::start("rdma0");
    daemon.kill();
    assert!(has_program("fa"));
    holder.kill();
    eventually("no program on the interface", || !has_program("fa"));
}

/// Programs of ordinary users show a new daemon what they have; what devices there are, they can't tell.
#[test]
fn ordinary_users_restore_no_devices_but_theirs() {
    if !in_fresh_namespace_of_root("ordinary_users_restore_no_devices_but_theirs") {
        return;
    }
    const USER: u32 = 4711;
    make_veth();
    let group = USER.to_string();
    let arguments = ["--group", group.as_str()];
    let daemon = Daemon::start(&arguments);
    add("fa", programs(3)).unwrap();
    let (connection, reply, fds) = as_user(USER, || lease("rdma0"));
    let Reply::Leased { device, .. } = reply else {
        panic!("{reply:?}");
    };
    daemon.kill();
    drop(connection);
    let _next = Daemon::spawn(&arguments);
    as_user(USER, move || {
        let [udp, .., port, heirloom] = &fds[..] else {
            panic!("{} descriptors", fds.len());
        };
        let shown = [heirloom.as_fd(), udp.as_fd(), port.as_fd()];
        let resume = |device| {
            let (connection, reply, _) = ask(&Request::Resume { device }, &shown);
            (connection, reply)
        };
        for (name, ifindex, mode) in [
            ("another", device.ifindex, LinkMode::Udp),
            ("another", device.ifindex, device.mode),
            ("rdma0", 1, LinkMode::Udp),
            ("rdma0", 1, device.mode),
        ] {
            let forged = DeviceInfo {
                name: name.into(),
                ifindex,
                mode,
                ..device.clone()
            };
            let refused = Reply::Refused(Refusal::UnknownLease);
            assert_eq!(resume(forged).1, refused, "{name} {ifindex} {mode:?}");
        }
        assert!(link("another").is_none() && link("rdma0").is_none());
        let (_connection, reply) = resume(device.clone());
        assert_eq!(reply, Reply::Resumed { device });
    });
}

/// A program without a connection, the only one of its device, says that it is in UDP mode.
#[test]
fn a_lie_about_the_mode_does_not_end_it() {
    if !in_fresh_namespace_of_root("a_lie_about_the_mode_does_not_end_it") {
        return;
    }
    make_veth();
    let _daemon = Daemon::start(&[]);
    add("fa", programs(2)).unwrap();
    let (connection, reply, fds) = lease("rdma0");
    let Reply::Leased { device, .. } = reply else {
        panic!("{reply:?}");
    };
    protocol::send(connection.as_fd(), b"\xff", &[], SendFlags::empty()).unwrap();
    while protocol::receive(connection.as_fd(), RecvFlags::empty()).is_ok_and(|it| !it.bytes.is_empty()) {}
    assert_eq!(seats_taken("rdma0"), 1, "the seat of a program that lives");
    let [udp, .., port, heirloom] = &fds[..] else {
        panic!("{} descriptors", fds.len());
    };
    let shown = [heirloom.as_fd(), udp.as_fd(), port.as_fd()];
    let resume = |name: &str, mode| {
        let device = DeviceInfo {
            name: name.into(),
            mode,
            ..device.clone()
        };
        let (connection, reply, _) = ask(&Request::Resume { device }, &shown);
        (connection, reply)
    };
    for name in ["rdma0", "another"] {
        let refused = Reply::Refused(Refusal::UnknownLease);
        assert_eq!(resume(name, LinkMode::Udp).1, refused, "{name}");
    }
    assert!(has_program("fa"));
    let (_connection, reply) = resume("rdma0", device.mode);
    assert!(matches!(reply, Reply::Resumed { .. }), "{reply:?}");
}

/// Does it in a thread that is of an ordinary user, and of the group of that number.
fn as_user<T: Send + 'static>(user: u32, what: impl FnOnce() -> T + Send + 'static) -> T {
    let inside = move || {
        set_thread_groups(&[]).unwrap();
        set_thread_gid(Gid::from_raw(user)).unwrap();
        set_thread_uid(Uid::from_raw(user)).unwrap();
        what()
    };
    std::thread::spawn(inside).join().unwrap()
}
