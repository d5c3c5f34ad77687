//! The process's side of RDMA CM: a connection to the daemon that many threads use at once, and that outlives it.
//!
//! The thread that waits for an answer receives by itself when nobody else does, which saves a hand-over between
//! threads. A thread of the session's own ("ferroce-cm") receives otherwise, and looks for the next daemon when one
//! ends: it shows that the ids by their keepsakes, and repeats the commands that were under way.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, epoll, eventfd, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};

use super::ControlError;
use super::client::io as io_error;
use super::client::{ANSWER_TIMEOUT, Client, FIRST_PATIENCE, LAST_PATIENCE};
use super::protocol::{self, CmAnswer, CmNews, MAX_MESSAGE, Reply, Request};
use crate::rdma_cm::{self, Answer, Command, Event, Id, Keepsake};
use crate::signals;

/// Most bytes of keepsakes in one message to a new daemon.
const RESTORE_BYTES: usize = MAX_MESSAGE / 2;
/// What tells the events of the epoll set apart.
const SOCKET: u64 = 0;
const WAKE: u64 = 1;

/// How a connection is made that the daemon has welcomed.
pub type Connect = Box<dyn Fn() -> Result<OwnedFd, ControlError> + Send + Sync>;

/// Who is told what the daemon tells by itself. Called from any thread that uses the session, in the daemon's order;
/// it must not wait for a command.
pub trait Listener: Send + Sync + 'static {
    /// Something happened to an id.
    fn event(&self, event: Event);
    /// A new daemon could not go on with the id.
    fn lost(&self, id: Id);
}

/// What a command gives.
type Outcome = Result<Answer, rdma_cm::Errno>;
/// What is done with the answer before anything that the daemon told after it.
type Then = Box<dyn FnOnce(&Outcome) + Send>;

/// A connection to the daemon for [`Command`]s. The daemon destroys the ids when it is dropped or the process ends.
pub struct Session(Arc<Inner>);

/// A command under way.
#[must_use = "the answer is to be waited for"]
pub struct Waiting {
    inner: Arc<Inner>,
    sequence: u32,
    slot: Arc<Slot>,
    /// From the start: who waits for many answers one after the other does not wait for each as long.
    deadline: Instant,
}

/// Where the answer is put for who waits.
#[derive(Default)]
struct Slot {
    outcome: Mutex<Option<Outcome>>,
    filled: Condvar,
}

struct Inner {
    connect: Connect,
    listener: Box<dyn Listener>,
    link: Mutex<Link>,
    /// Who holds it receives; the buffer is that of a message.
    receiving: Mutex<Vec<u8>>,
    /// What the session's own thread waits for: the socket, unless another thread receives, and `wake`.
    epoll: OwnedFd,
    wake: OwnedFd,
    stop: AtomicBool,
    /// Number of the socket, -1 without one: for who may take no lock.
    number: AtomicI32,
}

/// How we stand with the daemon, and what it would have to know anew.
#[derive(Default)]
struct Link {
    socket: Option<Arc<OwnedFd>>,
    /// Messages of keepsakes whose answer is awaited: commands are not sent before.
    restoring: usize,
    next_sequence: u32,
    pending: BTreeMap<u32, Pending>,
    keepsakes: BTreeMap<Id, Vec<u8>>,
    /// Requests that the program has taken.
    taken: BTreeSet<Id>,
}

struct Pending {
    command: Command,
    then: Option<Then>,
    slot: Arc<Slot>,
}

impl Slot {
    fn fill(&self, outcome: Outcome) {
        *self.outcome.lock() = Some(outcome);
        self.filled.notify_one();
    }
}

impl Session {
    /// Connects to the daemon of this network namespace.
    pub fn open(listener: Box<dyn Listener>) -> Result<Session, ControlError> {
        Session::with(Box::new(|| Ok(Client::connect()?.into_socket())), listener)
    }

    /// As [`Session::open`], with connections made by `connect`.
    pub fn with(connect: Connect, listener: Box<dyn Listener>) -> Result<Session, ControlError> {
        let socket = connect()?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(io_error("epoll_create"))?;
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let wake = eventfd(0, flags).map_err(io_error("eventfd"))?;
        let watch = |fd, data, flags| epoll::add(&epoll, fd, epoll::EventData::new_u64(data), flags);
        watch(wake.as_fd(), WAKE, epoll::EventFlags::IN).map_err(io_error("epoll_ctl"))?;
        watch(socket.as_fd(), SOCKET, armed()).map_err(io_error("epoll_ctl"))?;
        let inner = Arc::new(Inner {
            connect,
            listener,
            number: AtomicI32::new(socket.as_raw_fd()),
            link: Mutex::new(Link {
                socket: Some(Arc::new(socket)),
                ..Link::default()
            }),
            receiving: Mutex::new(vec![0; MAX_MESSAGE]),
            epoll,
            wake,
            stop: AtomicBool::new(false),
        });
        let thread = Arc::clone(&inner);
        let blocked = signals::block_all();
        let started = std::thread::Builder::new()
            .name("ferroce-cm".to_owned())
            .spawn(move || thread.run());
        signals::restore(&blocked);
        started.map_err(|source| ControlError::Io {
            what: "thread",
            source,
        })?;
        Ok(Session(inner))
    }

    /// Gives the daemon a command. `then` is called with what it gives before anything that the daemon told later is
    /// listened to.
    pub fn start(&self, command: Command, then: impl FnOnce(&Outcome) + Send + 'static) -> Waiting {
        self.0.start(command, Some(Box::new(then)))
    }

    /// Gives the daemon a command, and waits for the answer.
    ///
    /// # Errors
    /// What the daemon gives; ENODEV when there is none for long, EIO when it does not answer.
    pub fn ask(&self, command: Command) -> Outcome {
        self.0.start(command, None).wait()
    }

    /// Tells the daemon that the program has got the request that made this id. Never waits for long.
    pub fn taken(&self, id: Id) {
        let mut link = self.0.link.lock();
        link.taken.insert(id);
        if link.restoring == 0
            && let Some(socket) = link.socket.clone()
        {
            send_taken(&socket, id);
        }
    }

    /// Has no later daemon hear of an id.
    pub fn forget(&self, id: Id) {
        self.0.link.lock().forget(id);
    }

    /// The descriptor of the connection, -1 without one; takes no lock. For a forked child, which must close it.
    pub fn descriptor(&self) -> RawFd {
        self.0.number.load(Ordering::Relaxed)
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.0.stop.store(true, Ordering::Relaxed);
        self.0.wake();
    }
}

impl Waiting {
    /// Waits for the answer; the errors are those of [`Session::ask`].
    pub fn wait(self) -> Outcome {
        loop {
            if let Some(outcome) = self.slot.outcome.lock().take() {
                return outcome;
            }
            if let Some(mut buffer) = self.inner.receiving.try_lock() {
                self.inner.receive_until(&mut buffer, self.deadline, &self.slot);
            }
            let mut outcome = self.slot.outcome.lock();
            if outcome.is_none()
                && self
                    .slot
                    .filled
                    .wait_until(&mut outcome, self.deadline)
                    .timed_out()
            {
                drop(outcome);
                let mut link = self.inner.link.lock();
                if link.pending.remove(&self.sequence).is_some() {
                    return Err(match link.socket {
                        Some(_) => libc::EIO,
                        None => libc::ENODEV,
                    });
                }
                // Its answer is being put in the slot right now.
                drop(link);
                let mut outcome = self.slot.outcome.lock();
                while outcome.is_none() {
                    self.slot.filled.wait(&mut outcome);
                }
            }
        }
    }
}

impl Inner {
    fn start(self: &Arc<Self>, command: Command, then: Option<Then>) -> Waiting {
        let slot = Arc::new(Slot::default());
        let mut link = self.link.lock();
        let sequence = link.next_sequence;
        link.next_sequence = sequence.wrapping_add(1);
        let waiting = Waiting {
            inner: Arc::clone(self),
            sequence,
            slot: Arc::clone(&slot),
            deadline: Instant::now() + ANSWER_TIMEOUT,
        };
        if let (Command::Destroy { id }, None) = (&command, &link.socket) {
            // Without a daemon, that a new one does not hear of the id is all there is to do.
            link.forget(*id);
            drop(link);
            finish(then, &slot, Ok(Answer::Done));
            return waiting;
        }
        let socket = link.socket.clone().filter(|_| link.restoring == 0);
        let bytes = socket.map(|socket| (socket, encode(sequence, &command)));
        let pending = Pending { command, then, slot };
        link.pending.insert(sequence, pending);
        // Under the lock, so that commands leave in the order of their numbers; but not while it would have to wait.
        if let Some((socket, bytes)) = bytes
            && send_now(&socket, &bytes) == Err(Errno::AGAIN)
        {
            drop(link);
            send_patiently(socket.as_fd(), &bytes);
        }
        waiting
    }

    fn wake(&self) {
        // It can only fail when the counter is full, and then the thread is awake.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    /// Has the session's own thread wait for the socket, or not.
    fn arm(&self, socket: &OwnedFd, flags: epoll::EventFlags) {
        // It fails for a socket that another thread has just found closed, and taken out.
        let _ = epoll::modify(&self.epoll, socket, epoll::EventData::new_u64(SOCKET), flags);
    }

    /// Receives, in the place of the session's own thread, until the slot is filled, the connection is lost, or it is
    /// too late.
    fn receive_until(&self, buffer: &mut [u8], deadline: Instant, slot: &Slot) {
        let Some(socket) = self.link.lock().socket.clone() else {
            return;
        };
        if slot.outcome.lock().is_some() {
            return;
        }
        self.arm(&socket, epoll::EventFlags::empty() | epoll::EventFlags::ONESHOT);
        let mut connected = true;
        while connected && slot.outcome.lock().is_none() && Instant::now() < deadline {
            connected = self.receive(&socket, buffer, RecvFlags::empty()) != Received::Lost;
        }
        if connected {
            self.arm(&socket, armed());
        }
    }

    /// Receives one message, and sees to it.
    fn receive(&self, socket: &Arc<OwnedFd>, buffer: &mut [u8], flags: RecvFlags) -> Received {
        match protocol::receive_into(socket.as_fd(), buffer, flags) {
            Ok(0) => {}
            Ok(length) => match protocol::decode(&buffer[..length]).map(|reply| self.take(reply)) {
                Some(true) => return Received::Message,
                Some(false) => {}
                None => tracing::warn!("ferroced sent a message that makes no sense"),
            },
            // The socket's timeout has passed, or there is nothing. A daemon that dies with a message of ours unread resets
            // the connection, which is told once, and before what it has sent.
            Err(Errno::AGAIN | Errno::INTR | Errno::CONNRESET) => return Received::Nothing,
            Err(_) => {}
        }
        self.lose(socket);
        Received::Lost
    }

    /// Sees to a message; false if the connection is of no use any more.
    fn take(&self, reply: Reply) -> bool {
        match reply {
            Reply::CmNews(CmNews {
                keepsakes,
                answer,
                events,
            }) => {
                self.link.lock().keep(keepsakes);
                if let Some(answer) = answer {
                    self.answered(answer);
                }
                for event in events {
                    self.listener.event(event);
                }
            }
            Reply::CmRestored { lost } => {
                let mut link = self.link.lock();
                for id in &lost {
                    link.forget(*id);
                }
                link.restoring = link.restoring.saturating_sub(1);
                if link.restoring == 0 {
                    link.resume();
                }
                drop(link);
                for id in lost {
                    self.listener.lost(id);
                }
            }
            Reply::Refused(refusal) => {
                tracing::warn!("ferroced refuses to serve RDMA CM: {refusal}");
                return false;
            }
            _ => {}
        }
        true
    }

    /// Gives an answer to who waits for it.
    fn answered(&self, CmAnswer { sequence, result }: CmAnswer) {
        let mut link = self.link.lock();
        if let Some(pending) = link.pending.remove(&sequence) {
            drop(link);
            finish(pending.then, &pending.slot, result);
        } else if let Ok(Answer::Created(id)) = result
            && let Some(socket) = link.socket.clone()
        {
            // Nobody waited so long.
            let bytes = encode(sequence, &Command::Destroy { id });
            let _ = send_now(&socket, &bytes);
        }
    }

    /// The daemon behind this socket is gone.
    fn lose(&self, socket: &Arc<OwnedFd>) {
        let mut link = self.link.lock();
        if !link.socket.as_ref().is_some_and(|it| Arc::ptr_eq(it, socket)) {
            return;
        }
        link.socket = None;
        self.number.store(-1, Ordering::Relaxed);
        link.restoring = 0;
        // A forked child may have the socket too, and then closing alone would leave it in the set.
        let _ = epoll::delete(&self.epoll, socket.as_fd());
        let pending = std::mem::take(&mut link.pending);
        let mut destroyed = Vec::new();
        for (sequence, pending) in pending {
            if let Command::Destroy { id } = pending.command {
                link.forget(id);
                destroyed.push(pending);
            } else {
                link.pending.insert(sequence, pending);
            }
        }
        drop(link);
        for pending in destroyed {
            finish(pending.then, &pending.slot, Ok(Answer::Done));
        }
        self.wake();
    }

    /// The session's own thread.
    fn run(self: Arc<Self>) {
        let mut patience = FIRST_PATIENCE;
        let mut look_at = None;
        while !self.stop.load(Ordering::Relaxed) {
            self.sleep(look_at.map(|at: Instant| at.saturating_duration_since(Instant::now())));
            let socket = self.link.lock().socket.clone();
            if let Some(socket) = socket {
                look_at = None;
                patience = FIRST_PATIENCE;
                self.receive_all(&socket);
                continue;
            }
            match look_at {
                None => look_at = Some(Instant::now() + patience),
                Some(at) if at > Instant::now() => {}
                Some(_) => {
                    look_at = None;
                    if !self.reconnect() {
                        patience = (patience * 2).min(LAST_PATIENCE);
                        look_at = Some(Instant::now() + patience);
                    }
                }
            }
        }
    }

    /// Waits until there is something to do, or the time is over.
    fn sleep(&self, at_most: Option<Duration>) {
        let timeout = at_most.map(|time| Timespec {
            tv_sec: time.as_secs() as i64,
            tv_nsec: time.subsec_nanos().into(),
        });
        let mut events = [epoll::Event {
            flags: epoll::EventFlags::empty(),
            data: epoll::EventData::new_u64(0),
        }; 2];
        // All signals are blocked; whatever else happens, the caller looks by itself.
        let _ = epoll::wait(&self.epoll, &mut events, timeout.as_ref());
        let _ = rustix::io::read(&self.wake, &mut [0u8; 8]);
    }

    /// Receives what there is.
    fn receive_all(&self, socket: &Arc<OwnedFd>) {
        let mut buffer = self.receiving.lock();
        loop {
            match self.receive(socket, &mut buffer, RecvFlags::DONTWAIT) {
                Received::Message => {}
                Received::Nothing => return self.arm(socket, armed()),
                Received::Lost => return,
            }
        }
    }

    /// Connects to a new daemon, if there is one, and shows it the ids.
    fn reconnect(&self) -> bool {
        let socket = match (self.connect)() {
            Ok(socket) => Arc::new(socket),
            Err(error) => {
                tracing::debug!("no daemon to go on with: {error}");
                return false;
            }
        };
        if epoll::add(&self.epoll, &socket, epoll::EventData::new_u64(SOCKET), armed()).is_err() {
            return false;
        }
        let mut link = self.link.lock();
        let messages = link.restore_messages();
        link.restoring = messages.len();
        self.number.store(socket.as_raw_fd(), Ordering::Relaxed);
        link.socket = Some(Arc::clone(&socket));
        if messages.is_empty() {
            link.resume();
        }
        drop(link);
        for message in messages {
            send_patiently(socket.as_fd(), &message);
        }
        true
    }
}

/// What [`Inner::receive`] has met.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Received {
    Message,
    Nothing,
    Lost,
}

impl Link {
    /// Keeps what the daemon gives to be kept.
    fn keep(&mut self, keepsakes: Vec<Keepsake>) {
        for Keepsake { id, state } in keepsakes {
            match state {
                Some(state) => {
                    self.keepsakes.insert(id, state);
                }
                None => self.forget(id),
            }
        }
    }

    /// The id is gone.
    fn forget(&mut self, id: Id) {
        self.keepsakes.remove(&id);
        self.taken.remove(&id);
    }

    /// What a new daemon is to be told of the ids: the highest number first, so that it gives out none of the others.
    fn restore_messages(&self) -> Vec<Vec<u8>> {
        let mut messages = Vec::new();
        let (mut keepsakes, mut bytes) = (Vec::new(), 0);
        for (id, state) in self.keepsakes.iter().rev() {
            if bytes + state.len() > RESTORE_BYTES && !keepsakes.is_empty() {
                messages.push(protocol::encode(&Request::CmRestore(std::mem::take(
                    &mut keepsakes,
                ))));
                bytes = 0;
            }
            bytes += state.len() + 16;
            keepsakes.push(Keepsake {
                id: *id,
                state: Some(state.clone()),
            });
        }
        if !keepsakes.is_empty() {
            messages.push(protocol::encode(&Request::CmRestore(keepsakes)));
        }
        messages
    }

    /// Repeats to a new daemon, which knows the ids now, what the one before has not done: the keepsakes of a command come
    /// with its answer.
    fn resume(&mut self) {
        let Some(socket) = self.socket.clone() else {
            return;
        };
        for id in &self.taken {
            send_taken(&socket, *id);
        }
        for (sequence, pending) in &self.pending {
            send_patiently(socket.as_fd(), &encode(*sequence, &pending.command));
        }
    }
}

/// Gives an outcome to who waits for it.
fn finish(then: Option<Then>, slot: &Slot, outcome: Outcome) {
    if let Some(then) = then {
        then(&outcome);
    }
    slot.fill(outcome);
}

/// The epoll flags of a socket that the session's own thread is to receive from.
fn armed() -> epoll::EventFlags {
    epoll::EventFlags::IN | epoll::EventFlags::ONESHOT
}

fn encode(sequence: u32, command: &Command) -> Vec<u8> {
    protocol::encode(&Request::Cm {
        sequence,
        command: command.clone(),
    })
}

/// Tells that a request was taken: its answer is not waited for.
fn send_taken(socket: &OwnedFd, id: Id) {
    let bytes = encode(0, &Command::Taken { id });
    if send_now(socket, &bytes) == Err(Errno::AGAIN) {
        send_patiently(socket.as_fd(), &bytes);
    }
}

fn send_now(socket: &OwnedFd, bytes: &[u8]) -> Result<(), Errno> {
    protocol::send(socket.as_fd(), bytes, &[], SendFlags::DONTWAIT)
}

/// Sends, and waits while the daemon's queue is full. That it is gone shows when its answer is received.
fn send_patiently(socket: BorrowedFd<'_>, bytes: &[u8]) {
    let deadline = Instant::now() + ANSWER_TIMEOUT;
    while protocol::send(socket, bytes, &[], SendFlags::DONTWAIT) == Err(Errno::AGAIN) {
        if Instant::now() > deadline {
            return tracing::warn!("ferroced does not take a command");
        }
        let mut fds = [PollFd::from_borrowed_fd(socket, PollFlags::OUT)];
        let second = Timespec {
            tv_sec: 1,
            tv_nsec: 0,
        };
        let _ = poll(&mut fds, Some(&second));
    }
}

#[cfg(test)]
mod tests;
