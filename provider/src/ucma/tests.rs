//! Programs' commands, byte for byte, through the hooks to a daemon that the test plays.

use std::ffi::c_void;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::JoinHandle;
use std::time::Duration;

use ferroce_engine::control::protocol::{self, MAX_MESSAGE, Reply, Request};
use ferroce_engine::rdma_cm::{
    Address, Answer, Details, Ece, EventKind, IdOption, Parameters, PathRecord, PortSpace, QpAttributes,
    QpKind, Route, TargetState,
};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, socketpair};

use super::layout::*;
use super::*;
use crate::hooks::rdmacm;

/// The daemon: it notes every command, and answers as told, or by itself.
struct Daemon {
    socket: OwnedFd,
    commands: Receiver<Command>,
    answers: Sender<Result<Answer, c_int>>,
    thread: Option<JoinHandle<()>>,
}

/// A process with a daemon of its own.
fn start() -> (&'static Process, Daemon) {
    let flags = SocketFlags::CLOEXEC;
    let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
    let socket = ours.try_clone().unwrap();
    let (note, commands) = mpsc::channel();
    let (answers, told) = mpsc::channel();
    let thread = std::thread::spawn(move || serve(&ours, &note, &told));
    let theirs = Mutex::new(Some(theirs));
    let connect = Box::new(move || theirs.lock().take().ok_or(ControlError::NoDaemon));
    let process = Process::with(Some(connect)).unwrap();
    let thread = Some(thread);
    let daemon = Daemon {
        socket,
        commands,
        answers,
        thread,
    };
    (process, daemon)
}

fn serve(socket: &OwnedFd, note: &Sender<Command>, told: &Receiver<Result<Answer, c_int>>) {
    let mut buffer = vec![0; MAX_MESSAGE];
    let mut next_id = 1;
    while let Ok(length @ 1..) = protocol::receive_into(socket.as_fd(), &mut buffer, RecvFlags::empty()) {
        let Some(Request::Cm { sequence, command }) = protocol::decode(&buffer[..length]) else {
            panic!("no command");
        };
        let result = told.try_recv().unwrap_or_else(|_| {
            Ok(match command {
                Command::Create { .. } => {
                    next_id += 1;
                    Answer::Created(next_id)
                }
                Command::Join { .. } => {
                    next_id += 1;
                    Answer::Joined(next_id)
                }
                Command::Query { .. } => Answer::Route(Box::default()),
                Command::QpAttributes { .. } => Answer::QpAttributes(Box::default()),
                _ => Answer::Done,
            })
        });
        let answered = !matches!(command, Command::Taken { .. });
        if note.send(command).is_err() {
            return;
        }
        if answered {
            let reply = Reply::CmDone {
                sequence,
                result,
                keepsakes: Vec::new(),
            };
            protocol::send_message(socket, &reply, SendFlags::empty()).unwrap();
        }
    }
}

impl Daemon {
    /// The next command that it gets.
    fn command(&self) -> Command {
        self.commands
            .recv_timeout(Duration::from_secs(10))
            .expect("a command")
    }

    fn idle(&self) -> bool {
        self.commands.try_recv().is_err()
    }

    /// Answers the next command that way.
    fn answer(&self, result: Result<Answer, c_int>) {
        self.answers.send(result).unwrap();
    }

    fn event(&self, id: Id, kind: EventKind, new_id: Option<Id>, membership: Option<u32>) {
        let event = Box::new(Event {
            id,
            kind,
            status: 0,
            details: Details::None,
            ece: Ece::default(),
            new_id,
            membership,
        });
        let keepsakes = Vec::new();
        let reply = Reply::CmEvent { event, keepsakes };
        protocol::send_message(&self.socket, &reply, SendFlags::empty()).unwrap();
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Both);
        if let Some(Err(_)) = self.thread.take().map(JoinHandle::join)
            && !std::thread::panicking()
        {
            panic!("the daemon panicked");
        }
    }
}

/// A channel of the program.
#[derive(Clone, Copy)]
struct Program(RawFd);

impl Program {
    fn new(process: &'static Process, flags: c_int) -> Program {
        Program(process.open(flags).unwrap())
    }

    /// Writes bytes as librdmacm does; an error is an errno.
    fn write(self, bytes: &[u8]) -> Result<(), c_int> {
        // SAFETY: the bytes are there; their response pointers are valid, or to be found bad.
        let written = unsafe { rdmacm::write(self.0, bytes.as_ptr().cast(), bytes.len()) };
        match written {
            -1 => Err(std::io::Error::last_os_error().raw_os_error().unwrap()),
            written => {
                assert_eq!(written as usize, bytes.len());
                Ok(())
            }
        }
    }

    fn call<T: Plain>(self, cmd: u32, body: &T, room: usize) -> Result<(), c_int> {
        self.call_bytes(cmd, body.bytes(), room)
    }

    fn call_bytes(self, cmd: u32, body: &[u8], room: usize) -> Result<(), c_int> {
        let header = rdma_ucm_cmd_hdr {
            cmd,
            in_: body.len() as u16,
            out: room as u16,
        };
        self.write(&[header.bytes(), body].concat())
    }

    fn create(self, uid: u64, ps: u16) -> Result<Id, c_int> {
        let mut response = rdma_ucm_create_id_resp { id: 0 };
        let body = rdma_ucm_create_id {
            uid,
            response: &raw mut response as u64,
            ps,
            qp_type: 9,
            reserved: [0; 5],
        };
        self.call(cmd::CREATE_ID, &body, 4)?;
        Ok(response.id)
    }

    /// DESTROY_ID or LEAVE_MCAST.
    fn end(self, cmd: u32, id: u32) -> Result<u32, c_int> {
        let mut response = rdma_ucm_destroy_id_resp { events_reported: 99 };
        let body = rdma_ucm_destroy_id {
            response: &raw mut response as u64,
            id,
            reserved: 0,
        };
        self.call(cmd, &body, 4)?;
        Ok(response.events_reported)
    }

    fn event(self) -> Result<rdma_ucm_event_resp, c_int> {
        let mut response = rdma_ucm_event_resp::zeroed();
        let body = rdma_ucm_get_event {
            response: &raw mut response as u64,
        };
        self.call(cmd::GET_EVENT, &body, size_of::<rdma_ucm_event_resp>())?;
        Ok(response)
    }

    /// Waits until there is an event, as poll tells.
    fn poll(self) {
        // SAFETY: the channel is open while the test uses it.
        let fd = unsafe { std::os::fd::BorrowedFd::borrow_raw(self.0) };
        let mut fds = [rustix::event::PollFd::from_borrowed_fd(
            fd,
            rustix::event::PollFlags::IN,
        )];
        let ten_seconds = rustix::event::Timespec {
            tv_sec: 10,
            tv_nsec: 0,
        };
        assert_eq!(rustix::event::poll(&mut fds, Some(&ten_seconds)), Ok(1));
    }

    fn close(self) {
        let channel = descriptors::remove(self.0).unwrap();
        channel.closed();
        // SAFETY: the descriptor is the test's.
        unsafe { libc::close(self.0) };
    }
}

const TCP: u16 = 0x0106;
const NONBLOCK: c_int = libc::O_RDWR | libc::O_NONBLOCK | libc::O_CLOEXEC;

fn ip(text: &str) -> Address {
    Address::Ip(text.parse().unwrap())
}

fn storage(text: &str) -> (Storage, u16) {
    address::to_storage(Some(&ip(text)))
}

#[test]
fn ids_are_made_and_destroyed() {
    let (process, daemon) = start();
    let program = Program::new(process, NONBLOCK);
    let id = program.create(1, TCP).unwrap();
    let made = |port_space, qp_kind| Command::Create { port_space, qp_kind };
    assert_eq!(daemon.command(), made(PortSpace::Tcp, QpKind::Rc));
    program.create(1, 0x0111).unwrap();
    assert_eq!(daemon.command(), made(PortSpace::Udp, QpKind::Ud));
    program.create(1, 2).unwrap();
    assert_eq!(daemon.command(), made(PortSpace::Ipoib, QpKind::Ud));
    program.create(1, 0x013f).unwrap();
    assert_eq!(daemon.command(), made(PortSpace::Ib, QpKind::XrcInitiator));
    assert_eq!(program.create(1, 7), Err(libc::EINVAL));
    daemon.answer(Err(libc::ENOMEM));
    assert_eq!(program.create(1, TCP), Err(libc::ENOMEM));
    daemon.command();
    assert_eq!(program.end(cmd::DESTROY_ID, id), Ok(0));
    assert_eq!(daemon.command(), Command::Destroy { id });
    assert_eq!(program.end(cmd::DESTROY_ID, id), Err(libc::ENOENT));
    assert!(daemon.idle());
    program.close();
}

#[test]
fn an_id_without_a_place_for_its_number_does_not_stay() {
    let (process, daemon) = start();
    let program = Program::new(process, NONBLOCK);
    let body = rdma_ucm_create_id {
        response: 8,
        ps: TCP,
        ..rdma_ucm_create_id::zeroed()
    };
    assert_eq!(program.call(cmd::CREATE_ID, &body, 3), Err(libc::ENOSPC));
    assert_eq!(program.call(cmd::CREATE_ID, &body, 4), Err(libc::EFAULT));
    assert!(matches!(daemon.command(), Command::Create { .. }));
    assert!(matches!(daemon.command(), Command::Destroy { .. }));
    program.close();
}

#[test]
fn what_is_no_command() {
    let (process, daemon) = start();
    let program = Program::new(process, NONBLOCK);
    assert_eq!(program.write(&[0; 7]), Err(libc::EINVAL));
    assert_eq!(program.call_bytes(cmd::END, &[], 0), Err(libc::EINVAL));
    assert_eq!(
        program.call_bytes(cmd::GET_OPTION, &[0; 64], 64),
        Err(libc::ENOSYS)
    );
    // The header says more than there is.
    assert_eq!(
        program.write(&[10, 0, 0, 0, 5, 0, 0, 0, 1, 0, 0, 0]),
        Err(libc::EINVAL)
    );
    // SAFETY: nothing is there, which is to be found.
    let written = unsafe { rdmacm::write(program.0, 8 as *const c_void, 16) };
    assert_eq!(written, -1);
    assert_eq!(std::io::Error::last_os_error().raw_os_error(), Some(libc::EFAULT));
    // Every command is refused that is cut short.
    for cmd in 0..cmd::END {
        let expected = if cmd == cmd::GET_OPTION {
            libc::ENOSYS
        } else {
            libc::EINVAL
        };
        assert_eq!(program.call_bytes(cmd, &[0; 3], 4096), Err(expected), "{cmd}");
    }
    assert!(daemon.idle());
    program.close();
}

#[test]
fn ids_are_of_one_channel() {
    let (process, daemon) = start();
    let (program, other) = (Program::new(process, NONBLOCK), Program::new(process, NONBLOCK));
    let id = program.create(1, TCP).unwrap();
    daemon.command();
    let disconnect = rdma_ucm_disconnect { id };
    assert_eq!(other.call(cmd::DISCONNECT, &disconnect, 0), Err(libc::EINVAL));
    assert_eq!(other.end(cmd::DESTROY_ID, id), Err(libc::EINVAL));
    assert_eq!(program.call(cmd::DISCONNECT, &disconnect, 0), Ok(()));
    assert_eq!(daemon.command(), Command::Disconnect { id });
    let unknown = rdma_ucm_disconnect { id: 999 };
    assert_eq!(program.call(cmd::DISCONNECT, &unknown, 0), Err(libc::ENOENT));
    other.close();
    program.close();
    assert_eq!(daemon.command(), Command::Destroy { id });
}

#[test]
fn addresses_in_both_forms() {
    let (process, daemon) = start();
    let program = Program::new(process, NONBLOCK);
    let id = program.create(1, TCP).unwrap();
    daemon.command();
    let (addr, addr_size) = storage("10.0.0.1:7471");
    let (dst_addr, dst_size) = storage("[fd00::1]:7471");
    let bind = Command::Bind {
        id,
        address: ip("10.0.0.1:7471"),
    };
    let body = rdma_ucm_bind {
        id,
        addr_size,
        reserved: 0,
        addr,
    };
    assert_eq!(program.call(cmd::BIND, &body, 0), Ok(()));
    assert_eq!(daemon.command(), bind);
    for bad in [
        rdma_ucm_bind { reserved: 1, ..body },
        rdma_ucm_bind {
            addr_size: 28,
            ..body
        },
        rdma_ucm_bind { addr_size: 0, ..body },
    ] {
        assert_eq!(program.call(cmd::BIND, &bad, 0), Err(libc::EINVAL));
    }
    let body = rdma_ucm_bind_ip {
        response: 0,
        addr: address::to_in6(Some(&ip("10.0.0.1:7471"))),
        id,
    };
    assert_eq!(program.call(cmd::BIND_IP, &body, 0), Ok(()));
    assert_eq!(daemon.command(), bind);
    let resolve = |source: Option<&str>| Command::ResolveAddress {
        id,
        source: source.map(ip),
        dest: ip("[fd00::1]:7471"),
        timeout_ms: 2000,
    };
    let body = rdma_ucm_resolve_addr {
        id,
        timeout_ms: 2000,
        src_size: 0,
        dst_size,
        reserved: 0,
        src_addr: addr,
        dst_addr,
    };
    assert_eq!(program.call(cmd::RESOLVE_ADDR, &body, 0), Ok(()));
    assert_eq!(daemon.command(), resolve(None));
    let with_source = rdma_ucm_resolve_addr {
        src_size: addr_size,
        ..body
    };
    assert_eq!(program.call(cmd::RESOLVE_ADDR, &with_source, 0), Ok(()));
    assert_eq!(daemon.command(), resolve(Some("10.0.0.1:7471")));
    let bad = rdma_ucm_resolve_addr { dst_size: 0, ..body };
    assert_eq!(program.call(cmd::RESOLVE_ADDR, &bad, 0), Err(libc::EINVAL));
    let body = rdma_ucm_resolve_ip {
        src_addr: sockaddr_in6::zeroed(),
        dst_addr: address::to_in6(Some(&ip("[fd00::1]:7471"))),
        id,
        timeout_ms: 2000,
    };
    assert_eq!(program.call(cmd::RESOLVE_IP, &body, 0), Ok(()));
    assert_eq!(daemon.command(), resolve(None));
    let bad = rdma_ucm_resolve_ip {
        dst_addr: sockaddr_in6::zeroed(),
        ..body
    };
    assert_eq!(program.call(cmd::RESOLVE_IP, &bad, 0), Err(libc::EINVAL));
    let body = rdma_ucm_resolve_route { id, timeout_ms: 5 };
    assert_eq!(program.call(cmd::RESOLVE_ROUTE, &body, 0), Ok(()));
    assert_eq!(daemon.command(), Command::ResolveRoute { id, timeout_ms: 5 });
    assert!(daemon.idle());
    program.close();
}

fn conn_param() -> rdma_ucm_conn_param {
    let mut param = rdma_ucm_conn_param {
        qp_num: 0xff12_3456,
        qkey: 77,
        private_data_len: 3,
        srq: 1,
        responder_resources: 4,
        initiator_depth: 5,
        flow_control: 1,
        retry_count: 7,
        rnr_retry_count: 6,
        valid: 1,
        ..rdma_ucm_conn_param::zeroed()
    };
    param.private_data[..4].copy_from_slice(b"abcd");
    param
}

fn parameters() -> Parameters {
    Parameters {
        qpn: 0x12_3456,
        qkey: 0,
        private_data: b"abc".to_vec(),
        responder_resources: 4,
        initiator_depth: 5,
        flow_control: true,
        retry_count: 7,
        rnr_retry_count: 6,
        srq: true,
    }
}

#[test]
fn connections_are_asked_for_and_accepted() {
    let (process, daemon) = start();
    let program = Program::new(process, NONBLOCK);
    let id = program.create(1, TCP).unwrap();
    daemon.command();
    let ece = Ece {
        vendor_id: 1,
        attr_mod: 2,
    };
    let connect = rdma_ucm_connect {
        conn_param: conn_param(),
        id,
        reserved: 0,
        ece: rdma_ucm_ece {
            vendor_id: 1,
            attr_mod: 2,
        },
    };
    let parameters = parameters();
    assert_eq!(program.call(cmd::CONNECT, &connect, 0), Ok(()));
    let expected = |ece| Command::Connect {
        id,
        parameters: parameters.clone(),
        ece,
    };
    assert_eq!(daemon.command(), expected(ece));
    // Older programs end before the options.
    let old = &connect.bytes()[..280];
    assert_eq!(program.call_bytes(cmd::CONNECT, old, 0), Ok(()));
    assert_eq!(daemon.command(), expected(Ece::default()));
    assert_eq!(
        program.call_bytes(cmd::CONNECT, &old[..279], 0),
        Err(libc::EINVAL)
    );
    let mut invalid = connect;
    invalid.conn_param.valid = 0;
    assert_eq!(program.call(cmd::CONNECT, &invalid, 0), Err(libc::EINVAL));

    let accept = rdma_ucm_accept {
        uid: 5,
        conn_param: conn_param(),
        id,
        reserved: 0,
        ece: connect.ece,
    };
    assert_eq!(program.call(cmd::ACCEPT, &accept, 0), Ok(()));
    let expected = |parameters, ece| Command::Accept { id, parameters, ece };
    assert_eq!(daemon.command(), expected(Some(parameters.clone()), ece));
    let mut bare = accept;
    bare.conn_param.valid = 0;
    assert_eq!(program.call_bytes(cmd::ACCEPT, &bare.bytes()[..288], 0), Ok(()));
    assert_eq!(daemon.command(), expected(None, Ece::default()));

    let mut reject = rdma_ucm_reject {
        id,
        private_data_len: 2,
        ..rdma_ucm_reject::zeroed()
    };
    reject.private_data[..2].copy_from_slice(b"no");
    for (asked, reason) in [(0, 28), (28, 28), (35, 35)] {
        reject.reason = asked;
        assert_eq!(program.call(cmd::REJECT, &reject, 0), Ok(()));
        let private_data = b"no".to_vec();
        let expected = Command::Reject {
            id,
            reason,
            private_data,
        };
        assert_eq!(daemon.command(), expected);
    }
    reject.reason = 10;
    assert_eq!(program.call(cmd::REJECT, &reject, 0), Err(libc::EINVAL));
    let listen = rdma_ucm_listen {
        id,
        backlog: (-1i32).cast_unsigned(),
    };
    assert_eq!(program.call(cmd::LISTEN, &listen, 0), Ok(()));
    assert_eq!(daemon.command(), Command::Listen { id, backlog: -1 });
    assert_eq!(
        program.call(cmd::NOTIFY, &rdma_ucm_notify { id, event: 5 }, 0),
        Ok(())
    );
    assert_eq!(daemon.command(), Command::Notify { id, event: 5 });
    daemon.answer(Err(libc::EADDRINUSE));
    assert_eq!(program.call(cmd::LISTEN, &listen, 0), Err(libc::EADDRINUSE));
    program.close();
}

#[test]
fn queries_are_answered_with_what_there_is_room_for() {
    let (process, daemon) = start();
    let program = Program::new(process, NONBLOCK);
    let id = program.create(1, TCP).unwrap();
    let route = Route {
        node_guid: Some(7),
        port: 1,
        source: Some(ip("10.0.0.1:1")),
        pkey: 0xffff,
        path: Some(PathRecord::default()),
        ..Route::default()
    };
    let query = |cmd, option, room: usize| {
        daemon.answer(Ok(Answer::Route(Box::new(route.clone()))));
        // One byte off, and a guard behind it.
        let mut response = vec![0xeeu8; room + 2];
        let body = rdma_ucm_query {
            response: response.as_mut_ptr() as u64 + 1,
            id,
            option,
        };
        let result = program.call(cmd, &body, room);
        assert_eq!((response[0], response[room + 1]), (0xee, 0xee));
        result.map(|()| response[1..=room].to_vec())
    };
    let whole = query(cmd::QUERY_ROUTE, 0, 208).unwrap();
    assert_eq!(whole[..8], [0, 0, 0, 0, 0, 0, 0, 7]);
    assert_eq!(query(cmd::QUERY_ROUTE, 0, 200).unwrap(), whole[..200]);
    let whole = query(cmd::QUERY, 0, 280).unwrap();
    assert_eq!(query(cmd::QUERY, 0, 272).unwrap(), whole[..272]);
    assert_eq!(query(cmd::QUERY, 2, 280).unwrap()[16], 27);
    let paths = query(cmd::QUERY, 1, 8 + 6 * 72).unwrap();
    assert_eq!(paths[..4], [1, 0, 0, 0]);
    assert_eq!(paths[80..], [0xee; 5 * 72], "no more than there are");
    // The answers that are not fetched stay with the daemon of the test, so these come last.
    assert_eq!(query(cmd::QUERY_ROUTE, 0, 199).unwrap_err(), libc::ENOSPC);
    assert_eq!(query(cmd::QUERY, 0, 271).unwrap_err(), libc::ENOSPC);
    assert_eq!(query(cmd::QUERY, 1, 7).unwrap_err(), libc::ENOSPC);
    assert_eq!(query(cmd::QUERY, 3, 3).unwrap_err(), libc::ENOSPC);
    assert_eq!(query(cmd::QUERY, 3, 64).unwrap_err(), libc::ENODATA);
    assert_eq!(query(cmd::QUERY, 4, 64).unwrap_err(), libc::ENOSYS);
}

#[test]
fn attributes_options_and_services() {
    let (process, daemon) = start();
    let program = Program::new(process, NONBLOCK);
    let id = program.create(1, TCP).unwrap();
    daemon.command();
    let mut attributes = ib_uverbs_qp_attr::zeroed();
    let mut body = rdma_ucm_init_qp_attr {
        response: &raw mut attributes as u64,
        id,
        qp_state: 2,
    };
    daemon.answer(Ok(Answer::QpAttributes(Box::new(QpAttributes {
        mask: 3,
        timeout: 19,
        ..QpAttributes::default()
    }))));
    assert_eq!(program.call(cmd::INIT_QP_ATTR, &body, 144), Ok(()));
    let state = TargetState::Rtr;
    assert_eq!(daemon.command(), Command::QpAttributes { id, state });
    assert_eq!((attributes.qp_attr_mask, attributes.timeout), (3, 19));
    assert_eq!(program.call(cmd::INIT_QP_ATTR, &body, 143), Err(libc::ENOSPC));
    body.qp_state = 7;
    assert_eq!(program.call(cmd::INIT_QP_ATTR, &body, 144), Err(libc::EINVAL));

    let tos = 8u8;
    let mut option = rdma_ucm_set_option {
        optval: &raw const tos as u64,
        id,
        level: 0,
        optname: 0,
        optlen: 1,
    };
    assert_eq!(program.call(cmd::SET_OPTION, &option, 0), Ok(()));
    let expected = Command::SetOption {
        id,
        option: IdOption::TypeOfService(8),
    };
    assert_eq!(daemon.command(), expected);
    option.optname = 9;
    assert_eq!(program.call(cmd::SET_OPTION, &option, 0), Err(libc::ENOSYS));
    option.id = 999;
    assert_eq!(program.call(cmd::SET_OPTION, &option, 0), Err(libc::ENOENT));

    let service = rdma_ucm_resolve_ib_service {
        id,
        ..rdma_ucm_resolve_ib_service::zeroed()
    };
    assert_eq!(
        program.call(cmd::RESOLVE_IB_SERVICE, &service, 0),
        Err(libc::EINVAL)
    );
    daemon.answer(Ok(Answer::Route(Box::new(Route {
        node_guid: Some(1),
        ..Route::default()
    }))));
    assert_eq!(
        program.call(cmd::RESOLVE_IB_SERVICE, &service, 0),
        Err(libc::EOPNOTSUPP)
    );
    program.close();
}

#[test]
fn groups_are_joined_and_left() {
    let (process, daemon) = start();
    let program = Program::new(process, libc::O_RDWR);
    let id = program.create(1, 0x0111).unwrap();
    daemon.command();
    let (addr, addr_size) = storage("239.1.2.3:0");
    let mut response = rdma_ucm_create_id_resp { id: 0 };
    let mut body = rdma_ucm_join_mcast {
        response: &raw mut response as u64,
        uid: 4040,
        id,
        addr_size,
        join_flags: 1,
        addr,
    };
    assert_eq!(program.call(cmd::JOIN_MCAST, &body, 4), Ok(()));
    let address = ip("239.1.2.3:0");
    let join = |send_only| Command::Join {
        id,
        address,
        send_only,
    };
    assert_eq!(daemon.command(), join(true));
    let membership = response.id;
    daemon.event(id, EventKind::MulticastJoin, None, Some(membership));
    let event = program.event().unwrap();
    assert_eq!((event.uid, event.id, event.event), (4040, membership, 12));
    body.join_flags = 2;
    assert_eq!(program.call(cmd::JOIN_MCAST, &body, 4), Err(libc::EINVAL));
    assert_eq!(program.call(cmd::JOIN_MCAST, &body, 3), Err(libc::ENOSPC));
    let old = rdma_ucm_join_ip_mcast {
        response: &raw mut response as u64,
        uid: 5050,
        addr: address::to_in6(Some(&address)),
        id,
    };
    assert_eq!(program.call(cmd::JOIN_IP_MCAST, &old, 4), Ok(()));
    assert_eq!(daemon.command(), join(false));
    assert_eq!(program.end(cmd::LEAVE_MCAST, membership), Ok(1));
    assert_eq!(daemon.command(), Command::Leave { membership });
    assert_eq!(program.end(cmd::LEAVE_MCAST, membership), Err(libc::ENOENT));
    body.join_flags = 0;
    body.response = 8;
    assert_eq!(program.call(cmd::JOIN_MCAST, &body, 4), Err(libc::EFAULT));
    assert_eq!(daemon.command(), join(false));
    assert!(matches!(daemon.command(), Command::Leave { .. }));
    assert_eq!(program.end(cmd::DESTROY_ID, id), Ok(1));
    program.close();
}

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
    let event = Box::new(Event {
        id,
        kind: EventKind::Disconnected,
        status: 0,
        details: Details::None,
        ece: Ece::default(),
        new_id: None,
        membership: None,
    });
    let keepsakes = Vec::new();
    let reply = Reply::CmEvent { event, keepsakes };
    protocol::send_message(socket, &reply, SendFlags::empty()).unwrap();
}
