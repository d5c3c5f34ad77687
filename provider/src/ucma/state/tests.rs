use std::os::fd::{AsFd, FromRawFd, OwnedFd};

use ferroce_engine::rdma_cm::Ece;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::*;

/// A state with one channel, and the program's descriptor of that.
fn state() -> (State, ChannelId, OwnedFd) {
    let mut state = State::default();
    let (channel, fd) = add_channel(&mut state);
    (state, channel, fd)
}

fn add_channel(state: &mut State) -> (ChannelId, OwnedFd) {
    let (tickets, fd) = Tickets::new(libc::O_NONBLOCK).unwrap();
    // SAFETY: the descriptor was just made for the caller.
    (state.add_channel(tickets), unsafe { OwnedFd::from_raw_fd(fd) })
}

fn add_id(state: &mut State, id: Id, channel: ChannelId) {
    state.add_id(id, channel, u64::from(id) + 1000, PortSpace::Tcp, QpKind::Rc);
}

fn event(id: Id, kind: EventKind) -> Event {
    Event {
        id,
        kind,
        status: 0,
        details: Details::None,
        ece: Ece::default(),
        new_id: None,
        membership: None,
    }
}

/// The thread that reads.
const ME: libc::pid_t = 1;

fn request(listener: Id, new_id: Id) -> Event {
    Event {
        new_id: Some(new_id),
        ..event(listener, EventKind::ConnectRequest)
    }
}

fn readable(fd: &OwnedFd) -> bool {
    let mut fds = [PollFd::from_borrowed_fd(fd.as_fd(), PollFlags::IN)];
    let now = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    poll(&mut fds, Some(&now)).unwrap() == 1
}

/// What a program gets that does not wait: context, number and kind of an event.
fn get(state: &mut State, channel: ChannelId, fd: &OwnedFd) -> Option<(u64, u32, u32)> {
    loop {
        rustix::io::read(fd, &mut [0u8; 8]).ok()?;
        let mut got = None;
        let taken = state.take(channel, ME, |response| {
            got = Some((response.uid, response.id, response.event));
            Ok(())
        });
        if taken.is_some() {
            return got;
        }
    }
}

#[test]
fn events_come_in_order_and_are_counted() {
    let (mut state, channel, fd) = state();
    add_id(&mut state, 1, channel);
    add_id(&mut state, 2, channel);
    state.deliver(&event(1, EventKind::AddressResolved));
    state.deliver(&event(2, EventKind::AddressResolved));
    state.deliver(&event(1, EventKind::RouteResolved));
    state.deliver(&event(9, EventKind::RouteResolved));
    assert_eq!(get(&mut state, channel, &fd), Some((1001, 1, 0)));
    assert_eq!(get(&mut state, channel, &fd), Some((1002, 2, 0)));
    assert!(readable(&fd));
    assert_eq!(get(&mut state, channel, &fd), Some((1001, 1, 2)));
    assert!(!readable(&fd));
    assert_eq!(get(&mut state, channel, &fd), None);
    assert_eq!(state.destroy(1).reported, 2);
    assert_eq!(state.destroy(2).reported, 1);
    assert_eq!(state.destroy(2).reported, 0);
}

#[test]
fn an_event_that_can_not_be_stored_stays() {
    let (mut state, channel, fd) = state();
    add_id(&mut state, 1, channel);
    state.deliver(&event(1, EventKind::Established));
    rustix::io::read(&fd, &mut [0u8; 8]).unwrap();
    assert_eq!(
        state.take(channel, ME, |_| Err(libc::EFAULT)),
        Some(Err(libc::EFAULT))
    );
    assert!(readable(&fd));
    assert_eq!(get(&mut state, channel, &fd), Some((1001, 1, 9)));
    assert_eq!(state.destroy(1).reported, 1);
}

#[test]
fn a_request_for_a_destroyed_listener_is_nobodys() {
    let (mut state, channel, fd) = state();
    add_id(&mut state, 1, channel);
    assert_eq!(state.deliver(&request(1, 2)), None);
    assert_eq!(state.destroy(1).undelivered, [2]);
    assert_eq!(state.deliver(&request(1, 3)), Some(3));
    assert_eq!(state.check_id(3, channel), Err(libc::ENOENT));
    assert_eq!(get(&mut state, channel, &fd), None);
}

#[test]
fn a_destroyed_id_takes_its_events_along() {
    let (mut state, channel, fd) = state();
    add_id(&mut state, 1, channel);
    add_id(&mut state, 2, channel);
    state.deliver(&event(1, EventKind::AddressResolved));
    state.deliver(&event(2, EventKind::AddressResolved));
    state.deliver(&event(1, EventKind::RouteResolved));
    let destroyed = state.destroy(1);
    assert_eq!((destroyed.reported, destroyed.undelivered.len()), (0, 0));
    assert_eq!(get(&mut state, channel, &fd), Some((1002, 2, 0)));
    assert!(!readable(&fd));
    state.deliver(&event(1, EventKind::Disconnected));
    assert!(!readable(&fd));
}

#[test]
fn events_are_left_to_another_thread_that_reads() {
    let (mut state, channel, fd) = state();
    add_id(&mut state, 1, channel);
    add_id(&mut state, 2, channel);
    state.add_membership(7, 1, 1007);
    let (id, membership) = (Subject::Id(1), Subject::Membership(7));
    state.deliver(&event(1, EventKind::AddressResolved));
    assert_eq!(state.left_to_reader(id, 2), None, "nobody has read");
    assert_eq!(get(&mut state, channel, &fd), Some((1001, 1, 0)));
    assert_eq!(state.left_to_reader(id, 2), None, "nothing waits");
    state.deliver(&event(1, EventKind::RouteResolved));
    assert_eq!(state.left_to_reader(id, ME), None);
    assert_eq!(state.left_to_reader(id, 2), Some(channel));
    assert_eq!(state.left_to_reader(Subject::Id(2), 2), None);
    assert_eq!(state.left_to_reader(membership, 2), None);
    state.deliver(&Event {
        membership: Some(7),
        ..event(1, EventKind::MulticastJoin)
    });
    assert_eq!(state.left_to_reader(membership, 2), Some(channel));
    state.give_up_reader(channel);
    assert_eq!(state.left_to_reader(id, 2), None);
    assert_eq!(get(&mut state, channel, &fd), Some((1001, 1, 2)));
    assert_eq!(
        state.left_to_reader(membership, 2),
        Some(channel),
        "it reads again"
    );
}

#[test]
fn a_thread_whose_event_was_removed_waits_on() {
    let (mut state, channel, fd) = state();
    add_id(&mut state, 1, channel);
    state.deliver(&event(1, EventKind::AddressResolved));
    rustix::io::read(&fd, &mut [0u8; 8]).unwrap();
    state.destroy(1);
    assert_eq!(state.take(channel, ME, |_| Ok(())), None);
    // Two threads with tickets, one event left: the second gets the one that comes next.
    add_id(&mut state, 2, channel);
    add_id(&mut state, 3, channel);
    state.deliver(&event(2, EventKind::AddressResolved));
    state.deliver(&event(3, EventKind::AddressResolved));
    rustix::io::read(&fd, &mut [0u8; 8]).unwrap();
    rustix::io::read(&fd, &mut [0u8; 8]).unwrap();
    state.destroy(2);
    state.deliver(&event(3, EventKind::RouteResolved));
    assert_eq!(state.take(channel, ME, |_| Ok(())), Some(Ok(None)));
    assert_eq!(state.take(channel, ME, |_| Ok(())), Some(Ok(None)));
    assert!(!readable(&fd), "no ticket without an event");
}

#[test]
fn requests_make_ids_that_have_a_name_once_accepted() {
    let (mut state, channel, fd) = state();
    add_id(&mut state, 1, channel);
    state.deliver(&request(1, 5));
    state.deliver(&event(5, EventKind::Disconnected));
    assert_eq!(get(&mut state, channel, &fd), Some((1001, 5, 4)));
    assert!(!readable(&fd), "nobody could tell whose event it is");
    assert!(state.id(5, channel).is_ok());
    state.set_uid(5, 77);
    state.deliver(&event(5, EventKind::Established));
    assert_eq!(get(&mut state, channel, &fd), Some((77, 5, 9)));
    assert_eq!(state.destroy(1).reported, 1);
    assert_eq!(state.destroy(5).reported, 1);
}

#[test]
fn undelivered_requests_end_with_their_listener() {
    let (mut state, channel, fd) = state();
    add_id(&mut state, 1, channel);
    for new_id in 5..8 {
        state.deliver(&request(1, new_id));
    }
    assert_eq!(get(&mut state, channel, &fd), Some((1001, 5, 4)));
    let destroyed = state.destroy(1);
    assert_eq!((destroyed.reported, destroyed.undelivered), (1, vec![6, 7]));
    assert!(!readable(&fd));
    assert!(state.id(5, channel).is_ok());
    assert_eq!(state.id(6, channel).err(), Some(libc::ENOENT));
}

#[test]
fn an_id_moves_with_its_events() {
    let (mut state, old, old_fd) = state();
    let (new, new_fd) = add_channel(&mut state);
    add_id(&mut state, 1, old);
    add_id(&mut state, 2, old);
    state.deliver(&event(1, EventKind::AddressResolved));
    get(&mut state, old, &old_fd);
    state.deliver(&request(1, 5));
    state.deliver(&event(2, EventKind::AddressResolved));
    state.deliver(&event(1, EventKind::Disconnected));
    assert_eq!(state.migrate(1, old, new), Ok(1));
    assert_eq!(get(&mut state, old, &old_fd), Some((1002, 2, 0)));
    assert!(!readable(&old_fd));
    assert_eq!(get(&mut state, new, &new_fd), Some((1001, 5, 4)));
    assert_eq!(get(&mut state, new, &new_fd), Some((1001, 1, 10)));
    assert!(!readable(&new_fd));
    assert_eq!(state.id(1, old).err(), Some(libc::EINVAL));
    assert!(state.id(5, new).is_ok());
    assert_eq!(state.migrate(1, old, new), Err(libc::EINVAL));
    assert_eq!(state.migrate(9, old, new), Err(libc::ENOENT));
    assert_eq!(state.migrate(1, new, new), Ok(3));
}

#[test]
fn memberships_count_their_own_events() {
    let (mut state, channel, fd) = state();
    let (other, _fd) = add_channel(&mut state);
    add_id(&mut state, 1, channel);
    let join = |membership| Event {
        membership: Some(membership),
        ..event(1, EventKind::MulticastJoin)
    };
    state.deliver(&join(40));
    assert!(!readable(&fd), "of a membership that is not there (any more)");
    state.add_membership(40, 1, 4040);
    state.add_membership(41, 1, 4141);
    state.deliver(&join(40));
    state.deliver(&join(41));
    state.deliver(&join(41));
    assert_eq!(get(&mut state, channel, &fd), Some((4040, 40, 12)));
    assert_eq!(get(&mut state, channel, &fd), Some((4141, 41, 12)));
    assert_eq!(state.check_membership(40, other), Err(libc::EINVAL));
    assert_eq!(state.check_membership(42, channel), Err(libc::ENOENT));
    assert_eq!(state.leave(41), 1);
    assert!(!readable(&fd));
    assert_eq!(state.leave(41), 0);
    assert_eq!(state.destroy(1).reported, 2);
    assert_eq!(state.check_membership(40, channel), Err(libc::ENOENT));
}

#[test]
fn an_id_whose_device_is_gone_can_only_be_destroyed() {
    let (mut state, channel, fd) = state();
    add_id(&mut state, 1, channel);
    state.deliver(&event(1, EventKind::DeviceRemoval));
    assert_eq!(state.id(1, channel).err(), Some(libc::ENXIO));
    assert_eq!(state.check_id(1, channel), Ok(()));
    assert_eq!(get(&mut state, channel, &fd), Some((1001, 1, 11)));
}

#[test]
fn lost_ids_are_told_as_what_they_wait_for() {
    let (mut state, channel, fd) = state();
    let phases = [
        (Phase::Idle, 11),
        (Phase::Address, 1),
        (Phase::Route, 3),
        (Phase::Connecting, 7),
        (Phase::Connected, 10),
    ];
    for (id, (phase, kind)) in (0u32..).zip(phases) {
        add_id(&mut state, id, channel);
        state.set_phase(id, phase);
        state.lose(id);
        assert_eq!(
            get(&mut state, channel, &fd),
            Some((u64::from(id) + 1000, id, kind))
        );
    }
    add_id(&mut state, 9, channel);
    state.set_phase(9, Phase::Connecting);
    state.deliver(&event(9, EventKind::Established));
    state.lose(9);
    get(&mut state, channel, &fd);
    assert_eq!(get(&mut state, channel, &fd), Some((1009, 9, 10)));
    state.lose(77);
}

#[test]
fn programs_make_events() {
    let (mut state, channel, fd) = state();
    add_id(&mut state, 1, channel);
    assert_eq!(state.deliver_own(2, channel, 18, 0, 0), Err(libc::ENOENT));
    assert_eq!(
        state.deliver_own(1, channel, 18, 5, 0x1122_3344_5566_7788),
        Ok(())
    );
    rustix::io::read(&fd, &mut [0u8; 8]).unwrap();
    let taken = state.take(channel, ME, |response| {
        assert_eq!((response.uid, response.event, response.status), (1001, 18, 5));
        assert_eq!(response.param[..8], 0x1122_3344_5566_7788u64.to_ne_bytes());
        Ok(())
    });
    assert_eq!(taken, Some(Ok(None)));
    assert_eq!(state.destroy(1).reported, 1);
}

#[test]
fn a_closed_channel_has_no_events() {
    let (mut state, channel, fd) = state();
    let (other, _other_fd) = add_channel(&mut state);
    add_id(&mut state, 1, channel);
    add_id(&mut state, 2, other);
    add_id(&mut state, 3, channel);
    state.deliver(&event(1, EventKind::AddressResolved));
    assert_eq!(state.remove_channel(channel), [1, 3]);
    assert!(!state.has_channel(channel));
    assert!(!readable(&fd));
    assert_eq!(state.take(channel, ME, |_| Ok(())), None);
    assert!(state.id(2, other).is_ok());
    state.add_id(4, channel, 1, PortSpace::Tcp, QpKind::Rc);
    state.deliver(&event(4, EventKind::AddressResolved));
    assert_eq!(state.remove_channel(channel), [4]);
}
