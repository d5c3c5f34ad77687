//! Programs' commands, byte for byte, through the hooks to a daemon that the test plays.

use std::ffi::c_void;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::JoinHandle;
use std::time::Duration;

use ferroce_engine::control::protocol::{self, CmAnswer, CmNews, MAX_MESSAGE, Reply, Request};
use ferroce_engine::rdma_cm::{
    Address, Answer, Details, Ece, EventKind, IdOption, Parameters, PathRecord, PortSpace, QpAttributes,
    QpKind, Route, TargetState,
};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, socketpair};

use super::layout::*;
use super::*;
use crate::hooks::rdmacm;

mod commands;
mod events;

/// The daemon: it notes every command, and answers as told, or by itself.
struct Daemon {
    socket: OwnedFd,
    commands: Receiver<Command>,
    answers: Sender<Result<Answer, c_int>>,
    thread: Option<JoinHandle<()>>,
}

/// A process with a daemon of its own, whose events are waited for longer than a test takes.
fn start() -> (&'static Process, Daemon) {
    start_with(Duration::from_secs(600))
}

/// As [`start`], with what stands for [`PATIENCE`].
fn start_with(patience: Duration) -> (&'static Process, Daemon) {
    let flags = SocketFlags::CLOEXEC;
    let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
    let socket = ours.try_clone().unwrap();
    let (note, commands) = mpsc::channel();
    let (answers, told) = mpsc::channel();
    let thread = std::thread::spawn(move || serve(&ours, &note, &told));
    let theirs = Mutex::new(Some(theirs));
    let connect = Box::new(move || theirs.lock().take().ok_or(ControlError::NoDaemon));
    let process = Process::with(Some(connect), patience).unwrap();
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
            let reply = Reply::CmNews(CmNews {
                answer: Some(CmAnswer { sequence, result }),
                ..CmNews::default()
            });
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
        let event = Event {
            id,
            kind,
            status: 0,
            details: Details::None,
            ece: Ece::default(),
            new_id,
            membership,
        };
        let reply = Reply::CmNews(CmNews {
            events: vec![event],
            ..CmNews::default()
        });
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

/// What a program connects with.
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
