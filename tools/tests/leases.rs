//! A real `ferroced` in a fresh network namespace, and processes that lease its slots.

mod common;

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd};

use common::{Daemon, Holder, in_fresh_namespace, ip};
use ferroce_engine::control::protocol::{Reply, Request};
use ferroce_engine::control::{Client, ControlError, Event, Lease, Refusal};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};

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
        tv_sec: 10,
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
        let lease = loop {
            match Lease::acquire("ferroce_lo") {
                Ok(lease) => break lease,
                Err(ControlError::Refused(Refusal::SlotTableFull { .. })) => std::thread::yield_now(),
                Err(error) => panic!("{error}"),
            }
        };
        assert_eq!(received(&lease), Err(Errno::AGAIN), "datagram of the last holder");
        sender.send_to(&bth(1, 2), target).unwrap();
        assert_eq!(received(&lease), Ok(2));
        drop(lease);
        // Now nobody has the slot, or its holder is about to lose it: both must leave no trace.
        sender.send_to(&bth(1, 3), target).unwrap();
        while status(&Client::connect().unwrap()) != 0 {}
        sender.send_to(&bth(1, 4), target).unwrap();
    }
}

/// Number of leases.
fn status(client: &Client) -> u32 {
    let mut reply = client.ask(&Request::Status).unwrap();
    loop {
        match reply {
            Reply::StatusEnd(status) => return status.leased,
            _ => reply = client.next_reply().unwrap(),
        }
    }
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
