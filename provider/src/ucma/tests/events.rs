//! Waiting for events: blocking or not, from many threads, with signals, cancellation and closing in between.

use super::*;

#[test]
fn events_are_waited_for_or_not() {
    let (process, daemon) = start();
    let program = Program::new(process, NONBLOCK);
    let id = program.create(11, TCP).unwrap();
    assert_eq!(program.event().unwrap_err(), libc::EAGAIN);
    daemon.event(id, EventKind::AddressResolved, None, None);
    program.poll();
    assert_eq!(program.event().unwrap().uid, 11);
    assert_eq!(program.event().unwrap_err(), libc::EAGAIN);
    let body = rdma_ucm_get_event { response: 8 };
    assert_eq!(program.call(cmd::GET_EVENT, &body, 323), Err(libc::ENOSPC));
    daemon.event(id, EventKind::RouteResolved, None, None);
    program.poll();
    assert_eq!(program.call(cmd::GET_EVENT, &body, 324), Err(libc::EFAULT));
    assert_eq!(program.event().unwrap().event, 2, "it stays until it is got");
    // Now blocking, as the program may say at any time.
    // SAFETY: the channel is open.
    let fd = unsafe { std::os::fd::BorrowedFd::borrow_raw(program.0) };
    rustix::fs::fcntl_setfl(fd, rustix::fs::OFlags::RDWR).unwrap();
    let waiting = std::thread::spawn(move || program.event());
    std::thread::sleep(Duration::from_millis(20));
    daemon.event(id, EventKind::Established, None, None);
    assert_eq!(waiting.join().unwrap().unwrap().event, 9);
    assert_eq!(program.end(cmd::DESTROY_ID, id), Ok(3));
    program.close();
}

#[test]
fn who_waits_when_the_channel_is_closed_waits_on() {
    extern "C" fn nothing(_: c_int) {}
    let (process, daemon) = start();
    let program = Program::new(process, libc::O_RDWR);
    let id = program.create(11, TCP).unwrap();
    daemon.command();
    let waiting: Vec<_> = (0..3).map(|_| waiting(program)).collect();
    std::thread::sleep(Duration::from_millis(50));
    program.close();
    assert_eq!(daemon.command(), Command::Destroy { id });
    std::thread::sleep(Duration::from_millis(50));
    // SAFETY: the handler does nothing; no other test uses this signal.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = nothing as *const () as usize;
        assert_eq!(libc::sigaction(libc::SIGWINCH, &action, ptr::null_mut()), 0);
    }
    for (id, thread) in waiting {
        assert!(!thread.is_finished(), "programs free what it would use");
        // SAFETY: the thread has not been joined.
        assert_eq!(unsafe { libc::pthread_kill(id, libc::SIGWINCH) }, 0);
        assert_eq!(thread.join().unwrap().unwrap_err(), libc::EINTR);
    }
}

/// A thread that waits for an event, and its number.
fn waiting(program: Program) -> (libc::pthread_t, JoinHandle<Result<rdma_ucm_event_resp, c_int>>) {
    let (send, thread) = mpsc::channel();
    let waiting = std::thread::spawn(move || {
        // SAFETY: always succeeds.
        send.send(unsafe { libc::pthread_self() }).unwrap();
        program.event()
    });
    (thread.recv().unwrap(), waiting)
}

#[test]
fn requests_are_taken_when_they_are_got() {
    let (process, daemon) = start();
    let program = Program::new(process, libc::O_RDWR);
    let id = program.create(11, TCP).unwrap();
    daemon.command();
    daemon.event(id, EventKind::ConnectRequest, Some(50), None);
    daemon.event(id, EventKind::ConnectRequest, Some(51), None);
    let event = program.event().unwrap();
    assert_eq!((event.uid, event.id, event.event), (11, 50, 4));
    assert_eq!(daemon.command(), Command::Taken { id: 50 });
    // It has no name until it is accepted.
    daemon.event(50, EventKind::Unreachable, None, None);
    let accept = rdma_ucm_accept {
        uid: 500,
        conn_param: conn_param(),
        id: 50,
        reserved: 0,
        ece: rdma_ucm_ece::zeroed(),
    };
    daemon.answer(Err(libc::EINVAL));
    assert_eq!(program.call(cmd::ACCEPT, &accept, 0), Err(libc::EINVAL));
    daemon.command();
    daemon.event(50, EventKind::Unreachable, None, None);
    assert_eq!(program.call(cmd::ACCEPT, &accept, 0), Ok(()));
    daemon.command();
    daemon.event(50, EventKind::Established, None, None);
    let event = program.event().unwrap();
    assert_eq!((event.uid, event.id, event.event), (11, 51, 4));
    daemon.command();
    let event = program.event().unwrap();
    assert_eq!((event.uid, event.id, event.event), (500, 50, 9));
    program.close();
}

#[test]
fn an_id_moves_to_another_channel() {
    let (process, daemon) = start();
    let (old, new) = (
        Program::new(process, libc::O_RDWR),
        Program::new(process, libc::O_RDWR),
    );
    let id = old.create(11, TCP).unwrap();
    daemon.event(id, EventKind::AddressResolved, None, None);
    old.event().unwrap();
    daemon.event(id, EventKind::RouteResolved, None, None);
    old.poll();
    let mut response = rdma_ucm_migrate_resp { events_reported: 9 };
    let mut body = rdma_ucm_migrate_id {
        response: &raw mut response as u64,
        id,
        fd: old.0.cast_unsigned(),
    };
    assert_eq!(new.call(cmd::MIGRATE_ID, &body, 4), Ok(()));
    assert_eq!(response.events_reported, 1);
    assert_eq!(new.event().unwrap().event, 2);
    assert_eq!(new.call(cmd::MIGRATE_ID, &body, 4), Err(libc::EINVAL));
    body.fd = 0;
    assert_eq!(
        new.call(cmd::MIGRATE_ID, &body, 4),
        Err(libc::EINVAL),
        "no channel"
    );
    body.fd = 1_000_000;
    assert_eq!(new.call(cmd::MIGRATE_ID, &body, 4), Err(libc::ENOENT));
    assert_eq!(new.end(cmd::DESTROY_ID, id), Ok(2));
    old.close();
    new.close();
}

/// A thread that reads one event, and when it is told to, after poll said that there is one, another.
fn reader(program: Program) -> (Sender<()>, JoinHandle<Result<rdma_ucm_event_resp, c_int>>) {
    let (go, told) = mpsc::channel();
    let (ready, is_ready) = mpsc::channel();
    let thread = std::thread::spawn(move || {
        program.event().unwrap();
        ready.send(()).unwrap();
        told.recv().unwrap();
        program.event()
    });
    is_ready.recv().unwrap();
    (go, thread)
}

#[test]
fn what_a_thread_was_told_of_by_poll_is_not_removed_before_it_comes() {
    for command in [cmd::DESTROY_ID, cmd::LEAVE_MCAST, cmd::MIGRATE_ID] {
        let (process, daemon) = start();
        let program = Program::new(process, NONBLOCK);
        let other = Program::new(process, libc::O_RDWR);
        let id = program.create(11, TCP).unwrap();
        daemon.event(id, EventKind::AddressResolved, None, None);
        program.poll();
        let (go, thread) = reader(program);
        let (address, addr_size) = storage("224.0.0.9:0");
        let mut membership = rdma_ucm_create_id_resp { id: 0 };
        let body = rdma_ucm_join_mcast {
            response: &raw mut membership as u64,
            uid: 12,
            id,
            addr_size,
            join_flags: 1,
            addr: address,
        };
        assert_eq!(program.call(cmd::JOIN_MCAST, &body, 4), Ok(()));
        let membership = membership.id;
        daemon.event(id, EventKind::MulticastJoin, None, Some(membership));
        program.poll();
        let (begun, has_begun) = mpsc::channel();
        let end = std::thread::spawn(move || {
            begun.send(()).unwrap();
            match command {
                cmd::DESTROY_ID => program.end(command, id),
                cmd::LEAVE_MCAST => program.end(command, membership),
                _ => {
                    let mut response = rdma_ucm_migrate_resp { events_reported: 9 };
                    let body = rdma_ucm_migrate_id {
                        response: &raw mut response as u64,
                        id,
                        fd: program.0.cast_unsigned(),
                    };
                    other.call(command, &body, 4).map(|()| response.events_reported)
                }
            }
        });
        has_begun.recv().unwrap();
        go.send(()).unwrap();
        assert_eq!(thread.join().unwrap().unwrap().uid, 12);
        let reported = if command == cmd::LEAVE_MCAST { 1 } else { 2 };
        assert_eq!(end.join().unwrap(), Ok(reported));
        other.close();
        program.close();
    }
}

#[test]
fn a_thread_that_does_not_come_holds_nobody_up() {
    let (process, daemon) = start_with(Duration::ZERO);
    let program = Program::new(process, NONBLOCK);
    let id = program.create(11, TCP).unwrap();
    daemon.event(id, EventKind::AddressResolved, None, None);
    program.poll();
    let (go, thread) = reader(program);
    daemon.event(id, EventKind::RouteResolved, None, None);
    program.poll();
    assert_eq!(program.end(cmd::DESTROY_ID, id), Ok(1));
    go.send(()).unwrap();
    assert_eq!(thread.join().unwrap().unwrap_err(), libc::EAGAIN);
    program.close();
}

#[test]
fn programs_wake_each_other() {
    let (process, daemon) = start();
    let program = Program::new(process, libc::O_RDWR);
    let id = program.create(11, TCP).unwrap();
    let mut body = rdma_ucm_write_cm_event {
        id,
        reserved: 0,
        event: 18,
        status: 3,
        arg: 0xabcd,
    };
    assert_eq!(program.call(cmd::WRITE_CM_EVENT, &body, 0), Ok(()));
    let event = program.event().unwrap();
    assert_eq!((event.uid, event.event, event.status), (11, 18, 3));
    assert_eq!(event.param[..8], 0xabcdu64.to_ne_bytes());
    body.event = 9;
    assert_eq!(program.call(cmd::WRITE_CM_EVENT, &body, 0), Err(libc::EINVAL));
    program.close();
    drop(daemon);
}

#[test]
fn a_thread_can_be_cancelled_while_it_waits() {
    unsafe extern "C" {
        fn pthread_cancel(thread: libc::pthread_t) -> c_int;
        fn pthread_setcanceltype(kind: c_int, old: *mut c_int) -> c_int;
    }
    /// What librdmacm does: no Rust is on the stack of the thread but the hook.
    extern "C-unwind" fn get_event(argument: *mut c_void) -> *mut c_void {
        // SAFETY: the argument is the command of a channel that stays open.
        unsafe {
            pthread_setcanceltype(0, ptr::null_mut());
            let (fd, command) = *argument.cast::<(RawFd, [u8; 16])>();
            rdmacm::write(fd, command.as_ptr().cast(), 16);
        }
        ptr::null_mut()
    }
    let (process, daemon) = start();
    let program = Program::new(process, libc::O_RDWR);
    let id = program.create(11, TCP).unwrap();
    let mut response = rdma_ucm_event_resp::zeroed();
    let header = rdma_ucm_cmd_hdr {
        cmd: cmd::GET_EVENT,
        in_: 8,
        out: size_of::<rdma_ucm_event_resp>() as u16,
    };
    let body = rdma_ucm_get_event {
        response: &raw mut response as u64,
    };
    let command: [u8; 16] = [header.bytes(), body.bytes()].concat().try_into().unwrap();
    let mut argument = (program.0, command);
    let mut thread = 0;
    // SAFETY: the argument outlives the thread, which is joined.
    unsafe {
        let run = std::mem::transmute::<
            extern "C-unwind" fn(*mut c_void) -> *mut c_void,
            extern "C" fn(*mut c_void) -> *mut c_void,
        >(get_event);
        let argument = (&raw mut argument).cast();
        assert_eq!(
            libc::pthread_create(&raw mut thread, ptr::null(), run, argument),
            0
        );
        std::thread::sleep(Duration::from_millis(50));
        assert_eq!(pthread_cancel(thread), 0);
        let mut result = ptr::null_mut();
        assert_eq!(libc::pthread_join(thread, &raw mut result), 0);
        assert_eq!(result as isize, -1, "PTHREAD_CANCELED");
    }
    daemon.event(id, EventKind::Established, None, None);
    assert_eq!(
        program.event().unwrap().event,
        9,
        "nothing is locked, and no event lost"
    );
    program.close();
}

#[test]
fn a_signal_ends_waiting_unless_its_handler_says_otherwise() {
    extern "C" fn nothing(_: c_int) {}
    let install = |flags| {
        // SAFETY: the handler does nothing; no other test uses this signal.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = nothing as *const () as usize;
            action.sa_flags = flags;
            assert_eq!(libc::sigaction(libc::SIGURG, &action, ptr::null_mut()), 0);
        }
    };
    let (process, daemon) = start();
    let program = Program::new(process, libc::O_RDWR);
    let id = program.create(11, TCP).unwrap();
    for flags in [0, libc::SA_RESTART] {
        install(flags);
        let (thread, waiting) = waiting(program);
        std::thread::sleep(Duration::from_millis(50));
        // SAFETY: the thread has not been joined.
        assert_eq!(unsafe { libc::pthread_kill(thread, libc::SIGURG) }, 0);
        if flags == 0 {
            assert_eq!(waiting.join().unwrap().unwrap_err(), libc::EINTR);
        } else {
            std::thread::sleep(Duration::from_millis(50));
            daemon.event(id, EventKind::Established, None, None);
            assert_eq!(waiting.join().unwrap().unwrap().event, 9);
        }
    }
    program.close();
}

#[test]
fn many_threads_on_one_channel() {
    let (process, daemon) = start();
    let program = Program::new(process, libc::O_RDWR);
    let ids: Vec<_> = (0..4).map(|uid| program.create(uid + 1, TCP).unwrap()).collect();
    let readers: Vec<_> = (0..4)
        .map(|_| {
            std::thread::spawn(move || {
                let mut got = 0u32;
                while program.event().is_ok_and(|event| event.event != 18) {
                    got += 1;
                }
                got
            })
        })
        .collect();
    std::thread::scope(|scope| {
        for id in &ids {
            scope.spawn(|| {
                for _ in 0..100 {
                    let disconnect = rdma_ucm_disconnect { id: *id };
                    assert_eq!(program.call(cmd::DISCONNECT, &disconnect, 0), Ok(()));
                    daemon_event(&daemon.socket, *id);
                }
            });
        }
    });
    // All of the daemon's events are queued when this is answered, so that those that end the readers come last.
    program
        .call(cmd::DISCONNECT, &rdma_ucm_disconnect { id: ids[0] }, 0)
        .unwrap();
    for _ in 0..4 {
        let end = rdma_ucm_write_cm_event {
            id: ids[0],
            event: 18,
            ..rdma_ucm_write_cm_event::zeroed()
        };
        program.call(cmd::WRITE_CM_EVENT, &end, 0).unwrap();
    }
    let got: u32 = readers.into_iter().map(|reader| reader.join().unwrap()).sum();
    assert_eq!(got, 400);
    let reported: u32 = ids
        .iter()
        .map(|id| program.end(cmd::DESTROY_ID, *id).unwrap())
        .sum();
    assert_eq!(reported, 404);
    program.close();
}

fn daemon_event(socket: &OwnedFd, id: Id) {
    let event = Event {
        id,
        kind: EventKind::Disconnected,
        status: 0,
        details: Details::None,
        ece: Ece::default(),
        new_id: None,
        membership: None,
    };
    let reply = Reply::CmNews(CmNews {
        events: vec![event],
        ..CmNews::default()
    });
    protocol::send_message(socket, &reply, SendFlags::empty()).unwrap();
}
