//! RDMA CM for librdmacm: the kernel's `rdma_ucm` interface, answered in the process and by `ferroced`.
//!
//! librdmacm opens `/dev/infiniband/rdma_cm` and writes commands to it. The hooks bring both here: a channel is an
//! eventfd ([`tickets`]), its commands are parsed ([`command`]) and given to the daemon over one session for the whole
//! process; events wait in the process's own [`state`] until the program asks for them.

pub mod address;
mod command;
pub mod events;
pub mod layout;
mod options;
mod query;
pub mod state;
pub mod tickets;
pub mod user;

use std::ffi::c_int;
use std::os::fd::RawFd;
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};
use std::sync::{Arc, Once, OnceLock};
use std::time::{Duration, Instant};

use ferroce_engine::control::{self, Connect, ControlError, Listener, Session};
use ferroce_engine::rdma_cm::{Command, Event, Id};
use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::hooks::descriptors::{self, Descriptor};
use crate::report::say;
use state::{ChannelId, State, Subject};
use tickets::Tickets;

/// What stands for RDMA CM in a process; never freed.
pub struct Process {
    /// [`GENERATION`] when it began.
    generation: u32,
    session: OnceLock<Session>,
    state: Mutex<State>,
    /// An event was taken, or a channel has gone.
    taken: Condvar,
    /// [`PATIENCE`].
    patience: Duration,
}

/// How long what removes events waits for the thread that reads their channel.
const PATIENCE: Duration = Duration::from_millis(20);

/// The process that the program is now; null before it uses RDMA CM, and in the child of a fork.
static CURRENT: AtomicPtr<Process> = AtomicPtr::new(ptr::null_mut());
/// Number of forks between the program's first process and this one.
static GENERATION: AtomicU32 = AtomicU32::new(0);
/// Held while a process starts to use RDMA CM.
static STARTING: Mutex<()> = Mutex::new(());

/// Gives what the daemon tells to the channels.
struct Deliver(&'static Process);

impl Listener for Deliver {
    fn event(&self, event: Event) {
        let unwanted = self.0.state.lock().deliver(&event);
        if let (Some(id), Ok(session)) = (unwanted, self.0.session()) {
            // The daemon ends it with the listener; a new one that never knew the listener is not to hear of it.
            session.forget(id);
        }
    }

    fn lost(&self, id: Id) {
        self.0.state.lock().lose(id);
    }
}

impl Process {
    /// One whose connections to the daemon are made by `connect`.
    fn with(connect: Option<Connect>, patience: Duration) -> Result<&'static Process, ControlError> {
        let process: &'static Process = Box::leak(Box::new(Process {
            generation: GENERATION.load(Ordering::Relaxed),
            session: OnceLock::new(),
            state: Mutex::default(),
            taken: Condvar::new(),
            patience,
        }));
        let listener = Box::new(Deliver(process));
        let session = match connect {
            Some(connect) => Session::with(connect, listener)?,
            None => Session::open(listener)?,
        };
        _ = process.session.set(session);
        Ok(process)
    }

    /// This process.
    fn current() -> Result<&'static Process, ControlError> {
        watch_forks();
        let _starting = STARTING.lock();
        // SAFETY: what is stored there is never freed.
        if let Some(process) = unsafe { CURRENT.load(Ordering::Acquire).as_ref() } {
            return Ok(process);
        }
        let process = Process::with(None, PATIENCE)?;
        CURRENT.store(ptr::from_ref(process).cast_mut(), Ordering::Release);
        Ok(process)
    }

    /// The connection to the daemon.
    fn session(&self) -> Result<&Session, c_int> {
        self.session.get().ok_or(libc::ENODEV)
    }

    /// The state, for removing events, once the thread that reads their channel has taken them, if it comes soon.
    ///
    /// Poll may have told that thread of them already, and if they are gone when it comes, it waits for others, for ever
    /// perhaps: `rping` then does not end, as it ends its id and that thread at the same time. In the kernel the same can
    /// happen, but there an id takes long enough to be destroyed for the thread to come first.
    fn state_after_reader(&self, subject: Subject) -> MutexGuard<'_, State> {
        let mut state = self.state.lock();
        let deadline = Instant::now() + self.patience;
        while let Some(channel) = state.left_to_reader(subject, thread_number()) {
            if self.taken.wait_until(&mut state, deadline).timed_out() {
                state.give_up_reader(channel);
            }
        }
        state
    }

    /// Whether this is what the program is now, and not what its parent was.
    fn is_current(&self) -> bool {
        self.generation == GENERATION.load(Ordering::Relaxed)
    }
}

/// Has a forked child start anew: it must not speak on its parent's connection, nor keep that open when the parent
/// ends.
fn watch_forks() {
    extern "C" fn before() {
        std::mem::forget(STARTING.lock());
    }
    extern "C" fn in_parent() {
        // SAFETY: `before` locked it, in this thread or in the one that this thread is the copy of.
        unsafe { STARTING.force_unlock() };
    }
    extern "C" fn in_child() {
        GENERATION.fetch_add(1, Ordering::Relaxed);
        let parent = CURRENT.swap(ptr::null_mut(), Ordering::AcqRel);
        // SAFETY: what is stored there is never freed. Its locks may be held by threads that are not here.
        if let Some(session) = unsafe { parent.as_ref() }.and_then(|parent| parent.session.get()) {
            let socket = session.descriptor();
            if socket >= 0 {
                // SAFETY: the child's copy is used by nobody: its channels are not those of a current process.
                unsafe { libc::close(socket) };
            }
        }
        in_parent();
    }
    static WATCH: Once = Once::new();
    WATCH.call_once(|| {
        // SAFETY: the handlers take no other lock, and are never unloaded.
        let result = unsafe { libc::pthread_atfork(Some(before), Some(in_parent), Some(in_child)) };
        if result != 0 {
            say(format_args!(
                "forks can't be watched (error {result}): don't fork while RDMA CM is in use"
            ));
        }
    });
}

/// An event channel: an open `rdma_cm`.
pub struct Channel {
    process: &'static Process,
    number: ChannelId,
}

impl Descriptor for Channel {
    fn closed(&self) {
        if self.process.is_current() {
            self.close();
        }
    }
}

/// How a command on a channel goes on.
pub enum Step {
    /// The descriptor is no channel.
    Other,
    /// It is done, or has failed.
    Done(Result<(), c_int>),
    /// The program wants an event, and must have a ticket for it.
    Event(Wanted),
}

/// Where the program wants an event; nothing to be freed, as its thread may be cancelled while it waits.
#[derive(Clone, Copy, Debug)]
pub struct Wanted {
    channel: ChannelId,
    response: u64,
    room: u16,
}

/// Whether RDMA CM is ours: in a program that was started to see the devices of `ferroced`.
pub fn is_ours() -> bool {
    control::tree().is_some()
}

/// Opens `rdma_cm`, with the flags of `open`.
pub fn open(flags: c_int) -> Result<RawFd, c_int> {
    let process = Process::current().map_err(|error| {
        say(format_args!("rdma_cm can't be opened: {error}"));
        error.errno()
    })?;
    process.open(flags)
}

/// A command that is written to a descriptor.
pub fn write(fd: RawFd, bytes: *const u8, length: usize) -> Step {
    let Some(channel) = descriptors::get_as::<Channel>(fd) else {
        return Step::Other;
    };
    if !channel.process.is_current() {
        return Step::Done(Err(libc::EIO));
    }
    match channel.command(bytes as u64, length) {
        Ok(None) => Step::Done(Ok(())),
        Ok(Some(wanted)) => Step::Event(wanted),
        Err(errno) => Step::Done(Err(errno)),
    }
}

/// Gives the program an event for the ticket that it has; `None` if another ticket is needed.
pub fn take(fd: RawFd, wanted: &Wanted) -> Option<Result<(), c_int>> {
    match descriptors::get_as::<Channel>(fd) {
        Some(channel) if channel.number == wanted.channel && channel.process.is_current() => {
            channel.take(wanted)
        }
        // Closed while its thread waited.
        _ => Some(Err(libc::EBADF)),
    }
}

/// Whether the descriptor is a channel.
pub fn is_channel(fd: RawFd) -> bool {
    descriptors::get_as::<Channel>(fd).is_some()
}

impl Process {
    /// A new channel.
    fn open(&'static self, flags: c_int) -> Result<RawFd, c_int> {
        let (tickets, fd) = Tickets::new(flags)?;
        let number = self.state.lock().add_channel(tickets);
        let process = self;
        descriptors::insert(fd, Arc::new(Channel { process, number }));
        Ok(fd)
    }
}

impl Channel {
    fn take(&self, wanted: &Wanted) -> Option<Result<(), c_int>> {
        let mut state = self.process.state.lock();
        let taken = state.take(self.number, thread_number(), |response| {
            user::write(wanted.response, response, wanted.room)
        })?;
        self.process.taken.notify_all();
        Some(taken.and_then(|new_id| {
            // Under the lock: the daemon must hear of it before the listener can be destroyed.
            if let Some(id) = new_id {
                self.process.session()?.taken(id);
            }
            Ok(())
        }))
    }

    /// Destroys the channel's ids.
    fn close(&self) {
        let ids = self.process.state.lock().remove_channel(self.number);
        self.process.taken.notify_all();
        let Ok(session) = self.process.session() else {
            return;
        };
        let waiting: Vec<_> = ids
            .into_iter()
            .map(|id| session.start(Command::Destroy { id }, |_| {}))
            .collect();
        for waiting in waiting {
            _ = waiting.wait(); // here the id is gone, whatever the daemon says
        }
    }
}

/// The number of this thread.
fn thread_number() -> libc::pid_t {
    // SAFETY: it always succeeds, and touches nothing.
    unsafe { libc::gettid() }
}

#[cfg(test)]
mod tests;
