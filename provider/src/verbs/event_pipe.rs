//! Descriptors from which libibverbs reads events of a fixed size: completion channels and asynchronous events.
//!
//! A pipe serves: poll, epoll and O_NONBLOCK act on it as on the kernel's descriptors. Events that do not fit wait in
//! a list, and follow as soon as the program has read one.

use std::collections::VecDeque;
use std::ffi::c_int;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};

use ferroce_engine::runtime::Guest;
use parking_lot::Mutex;

use crate::hooks::descriptors::Descriptor;

/// The provider's side of an event descriptor; events are `N` words.
pub struct EventPipe<const N: usize> {
    /// A copy of the end that the program reads: while it lives, writing can't raise SIGPIPE.
    reader: OwnedFd,
    writer: OwnedFd,
    /// Events that found the pipe full, oldest first. The lock is held for whatever changes the order of events.
    waiting: Mutex<VecDeque<[u64; N]>>,
}

impl<const N: usize> Descriptor for EventPipe<N> {}

impl<const N: usize> EventPipe<N> {
    /// Bytes of an event.
    const SIZE: usize = N * size_of::<u64>();

    /// Makes a pipe; gives the descriptor that the program reads and closes.
    pub fn new() -> io::Result<(EventPipe<N>, RawFd)> {
        let mut ends: [c_int; 2] = [0; 2];
        // SAFETY: there is room for two descriptors.
        check(unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) })?;
        // SAFETY: both are new, and nobody else's.
        let [program, writer] = ends.map(|fd| unsafe { OwnedFd::from_raw_fd(fd) });
        // Non-blocking is of the open file, so this end must not be the program's.
        // SAFETY: a descriptor of ours.
        check(unsafe { libc::fcntl(writer.as_raw_fd(), libc::F_SETFL, libc::O_NONBLOCK) })?;
        let reader = program.try_clone()?;
        let pipe = EventPipe {
            reader,
            writer,
            waiting: Mutex::default(),
        };
        Ok((pipe, program.into_raw_fd()))
    }

    /// Queues an event.
    pub fn push(&self, event: [u64; N]) {
        let mut waiting = self.waiting.lock();
        if !waiting.is_empty() || !self.write(&event) {
            waiting.push_back(event);
        }
    }

    /// Moves events that wait into the pipe; called when the program has read one.
    pub fn refill(&self) {
        let _guest = Guest::enter();
        let mut waiting = self.waiting.lock();
        while waiting.front().is_some_and(|event| self.write(event)) {
            waiting.pop_front();
        }
    }

    /// Takes out the events that `which` names and that the program has not read; gives their number.
    pub fn retract(&self, which: impl Fn(&[u64; N]) -> bool) -> u32 {
        let _guest = Guest::enter();
        let mut waiting = self.waiting.lock();
        let mut unread: VecDeque<_> = std::iter::from_fn(|| self.take()).collect();
        unread.append(&mut waiting);
        let before = unread.len();
        unread.retain(|event| !which(event));
        let retracted = before - unread.len();
        while unread.front().is_some_and(|event| self.write(event)) {
            unread.pop_front();
        }
        *waiting = unread;
        retracted as u32
    }

    /// Writes an event, unless the pipe is full. An event is much smaller than PIPE_BUF, so it is written wholly.
    fn write(&self, event: &[u64; N]) -> bool {
        loop {
            // SAFETY: an event has this size.
            let written = unsafe { libc::write(self.writer.as_raw_fd(), event.as_ptr().cast(), Self::SIZE) };
            match written {
                n if n == Self::SIZE as isize => return true,
                _ if io::Error::last_os_error().kind() == io::ErrorKind::Interrupted => {}
                _ => return false,
            }
        }
    }

    /// Reads an event without blocking, whether or not the program has made its end so: vmsplice can be told.
    fn take(&self) -> Option<[u64; N]> {
        let mut event = [0; N];
        loop {
            let room = libc::iovec {
                iov_base: event.as_mut_ptr().cast(),
                iov_len: Self::SIZE,
            };
            // SAFETY: `room` is what is left of one event.
            let taken = unsafe { libc::vmsplice(self.reader.as_raw_fd(), &room, 1, libc::SPLICE_F_NONBLOCK) };
            match taken {
                n if n == Self::SIZE as isize => return Some(event),
                -1 if io::Error::last_os_error().kind() == io::ErrorKind::Interrupted => {}
                _ => return None,
            }
        }
    }
}

/// The result of a system call.
fn check(result: c_int) -> io::Result<c_int> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(result)
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Read;

    use super::*;

    fn pipe() -> (EventPipe<1>, File) {
        let (pipe, fd) = EventPipe::new().unwrap();
        // SAFETY: the descriptor was just made for the caller.
        (pipe, unsafe { File::from_raw_fd(fd) })
    }

    fn read(program: &mut File) -> u64 {
        let mut event = [0; 8];
        program.read_exact(&mut event).unwrap();
        u64::from_ne_bytes(event)
    }

    fn is_empty(program: &File) -> bool {
        let mut poll = libc::pollfd {
            fd: program.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: one descriptor.
        unsafe { libc::poll(&mut poll, 1, 0) == 0 }
    }

    #[test]
    fn events_come_in_order_even_when_the_pipe_is_full() {
        let (pipe, mut program) = pipe();
        let count = 20_000; // a pipe holds 8,192
        for n in 0..count {
            pipe.push([n]);
        }
        for n in 0..count {
            assert_eq!(read(&mut program), n);
            pipe.refill();
        }
        assert!(is_empty(&program));
    }

    #[test]
    fn unread_events_can_be_retracted() {
        let (pipe, mut program) = pipe();
        for n in 0..20_000 {
            pipe.push([n % 2]);
        }
        assert_eq!(read(&mut program), 0);
        assert_eq!(pipe.retract(|event| *event == [0]), 9_999);
        assert_eq!(pipe.retract(|event| *event == [7]), 0);
        for _ in 0..10_000 {
            assert_eq!(read(&mut program), 1);
            pipe.refill();
        }
        assert!(is_empty(&program));
        assert_eq!(pipe.retract(|_| true), 0, "does not block on an empty pipe");
    }

    #[test]
    fn the_program_may_close_its_end_first() {
        let (pipe, program) = pipe();
        drop(program);
        pipe.push([1]);
        assert_eq!(pipe.retract(|_| true), 1);
    }
}
