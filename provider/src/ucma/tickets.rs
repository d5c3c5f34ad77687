//! The descriptor of an event channel: an eventfd that counts the events in its queue.
//!
//! Poll, epoll and O_NONBLOCK act on it as on the kernel's. Who wants an event reads the descriptor first, which may
//! block: that takes a ticket, and a ticket allows to take one event of the queue. A thread that blocks when the program
//! closes the descriptor goes on blocking, as in the kernel: programs count on it, and free what the thread would use.

use std::ffi::c_int;
use std::os::fd::{AsFd, IntoRawFd, OwnedFd, RawFd};

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::{Errno, IoSliceMut, ReadWriteFlags};

/// The provider's copy of the descriptor.
pub struct Tickets(OwnedFd);

impl Tickets {
    /// Makes one; gives the descriptor for the program, opened with the flags of `open`.
    pub fn new(flags: c_int) -> Result<(Tickets, RawFd), c_int> {
        let mut kind = EventfdFlags::SEMAPHORE;
        kind.set(EventfdFlags::CLOEXEC, flags & libc::O_CLOEXEC != 0);
        kind.set(EventfdFlags::NONBLOCK, flags & libc::O_NONBLOCK != 0);
        let program = eventfd(0, kind).map_err(Errno::raw_os_error)?;
        let own = rustix::io::fcntl_dupfd_cloexec(&program, 3).map_err(Errno::raw_os_error)?;
        Ok((Tickets(own), program.into_raw_fd()))
    }

    /// Adds tickets.
    pub fn add(&self, count: usize) {
        if count > 0 {
            // It fails only when the counter is full, at 2^64.
            let _ = rustix::io::write(&self.0, &(count as u64).to_ne_bytes());
        }
    }

    /// Takes up to `count` tickets back, without waiting: those of events that are not delivered any more. What is not
    /// there has been taken by a thread that will find no event for it, and then waits for the next.
    pub fn take_back(&self, count: usize) {
        for _ in 0..count {
            let mut ticket = [0; 8];
            let mut room = [IoSliceMut::new(&mut ticket)];
            // At no position: the descriptor has none. Before Linux 5.8 this is not supported: then the descriptor
            // is readable once too often.
            match rustix::io::preadv2(self.0.as_fd(), &mut room, u64::MAX, ReadWriteFlags::NOWAIT) {
                Ok(_) => {}
                Err(_) => return,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::FromRawFd;

    use super::*;

    fn readable(fd: &OwnedFd) -> bool {
        let mut fds = [rustix::event::PollFd::new(fd, rustix::event::PollFlags::IN)];
        let now = rustix::event::Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        rustix::event::poll(&mut fds, Some(&now)).unwrap() == 1
    }

    #[test]
    fn the_descriptor_counts() {
        for flags in [libc::O_RDWR, libc::O_RDWR | libc::O_NONBLOCK | libc::O_CLOEXEC] {
            let (tickets, fd) = Tickets::new(flags).unwrap();
            // SAFETY: the descriptor was just made for the caller.
            let program = unsafe { OwnedFd::from_raw_fd(fd) };
            let status = rustix::fs::fcntl_getfl(&program).unwrap();
            assert_eq!(
                status.contains(rustix::fs::OFlags::NONBLOCK),
                flags & libc::O_NONBLOCK != 0
            );
            let cloexec = rustix::io::fcntl_getfd(&program)
                .unwrap()
                .contains(rustix::io::FdFlags::CLOEXEC);
            assert_eq!(cloexec, flags & libc::O_CLOEXEC != 0);
            assert!(!readable(&program));
            tickets.take_back(3);
            tickets.add(2);
            assert!(readable(&program));
            tickets.take_back(1);
            assert!(readable(&program));
            let mut ticket = [0; 8];
            assert_eq!(rustix::io::read(&program, &mut ticket), Ok(8));
            assert_eq!(u64::from_ne_bytes(ticket), 1);
            assert!(!readable(&program));
            tickets.add(5);
            tickets.take_back(9);
            assert!(!readable(&program), "whether or not the program's end blocks");
        }
    }
}
