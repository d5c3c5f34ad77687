//! Taking the sockets of all slots over from a daemon that ended while programs went on.
//!
//! Those programs hold the heirloom, look for a new daemon about once a second and show it. Until
//! one did, other clients wait; then all are served.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use ferroce_engine::control::protocol::Request;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with};
use tracing::{debug, info, warn};

use super::connection::{Connection, Incoming, ReceiveBuffer};
use super::sockets::SlotSockets;

/// How long to wait for a program that shows the heirloom: some times the longest time between looks.
const PATIENCE: Duration = Duration::from_secs(5);

/// Time to let descriptors come free when none is left for a connection.
const BREATH: Duration = Duration::from_millis(10);

/// Requests that a client may send before it is answered: more than programs do, which wait for their welcome.
const MAX_REQUESTS: usize = 16;

/// A connection that came before the daemon could serve, and what it has said.
pub struct Early {
    /// The connection.
    pub connection: Connection,
    /// Its hello has come.
    pub greeted: bool,
    /// Requests with their descriptors.
    pub requests: Vec<(Request, Vec<OwnedFd>)>,
}

/// Waits for an heirloom. Gives the sockets, if there was one, and all connections so far.
pub fn wait_for_heirloom(
    listener: &OwnedFd,
    group: Option<u32>,
) -> io::Result<(Option<SlotSockets>, Vec<Early>)> {
    let deadline = Instant::now() + PATIENCE;
    let mut clients: Vec<Early> = Vec::new();
    let mut buffer = ReceiveBuffer::new();
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok((None, clients));
        }
        wait(listener, &clients, left)?;
        accept_all(listener, group, &mut clients);
        let mut sockets = None;
        clients.retain_mut(|client| client.listen(&mut buffer, &mut sockets));
        if sockets.is_some() {
            return Ok((sockets, clients));
        }
    }
}

fn wait(listener: &OwnedFd, clients: &[Early], left: Duration) -> io::Result<()> {
    let all =
        std::iter::once(listener.as_fd()).chain(clients.iter().map(|client| client.connection.socket()));
    let all: Vec<BorrowedFd<'_>> = all.collect();
    let mut fds: Vec<PollFd<'_>> = all.iter().map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
    let timeout = Timespec {
        tv_sec: left.as_secs() as i64,
        tv_nsec: left.subsec_nanos().into(),
    };
    match poll(&mut fds, Some(&timeout)) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Takes the connections that wait. What can't be taken, as no descriptor is left, stays: it must not end a daemon that
/// starts.
fn accept_all(listener: &OwnedFd, group: Option<u32>, clients: &mut Vec<Early>) {
    loop {
        let socket = match accept_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
            Ok(socket) => socket,
            Err(Errno::AGAIN) => return,
            Err(Errno::INTR | Errno::CONNABORTED) => continue,
            Err(error) => {
                debug!(%error, "can't accept a connection yet");
                std::thread::sleep(BREATH);
                return;
            }
        };
        let connection = match Connection::new(socket) {
            Ok(connection) => connection,
            Err(error) => {
                warn!(%error, "connection lost at its start");
                continue;
            }
        };
        match connection.check_permission(group) {
            Ok(()) => clients.push(Early {
                connection,
                greeted: false,
                requests: Vec::new(),
            }),
            Err(refusal) => connection.refuse(refusal),
        }
    }
}

impl Early {
    /// Takes what the client has sent; false if it is gone, or sends more than is kept.
    fn listen(&mut self, buffer: &mut ReceiveBuffer, sockets: &mut Option<SlotSockets>) -> bool {
        loop {
            match self.connection.receive(buffer) {
                Incoming::Nothing => return true,
                Incoming::Greeted => self.greeted = true,
                Incoming::Request(request, fds) => {
                    if sockets.is_none() && matches!(request, Request::Resume { .. }) {
                        *sockets = self.sockets_of(&fds);
                    }
                    if self.requests.len() == MAX_REQUESTS {
                        warn!(pid = self.connection.pid(), "too many requests before an answer");
                        return false;
                    }
                    self.requests.push((request, fds));
                }
                Incoming::Over(_) => {
                    // What is left is the hello for a client of another version.
                    let _ = self.connection.flush();
                    return false;
                }
            }
        }
    }

    fn sockets_of(&self, fds: &[OwnedFd]) -> Option<SlotSockets> {
        let heirloom = fds.first()?.try_clone().ok()?;
        match SlotSockets::inherit(heirloom) {
            Ok(sockets) => {
                info!(
                    pid = self.connection.pid(),
                    count = sockets.count(),
                    "sockets taken over"
                );
                Some(sockets)
            }
            Err(error) => {
                warn!(pid = self.connection.pid(), %error, "not an heirloom");
                None
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferroce_engine::control::protocol::{self, Hello};
    use rustix::net::{AddressFamily, SendFlags, SocketType, socketpair};

    #[test]
    fn a_listener_that_gives_no_connection_ends_nothing() {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        // It does not listen: any error will do.
        let listener =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        let (mut clients, start) = (Vec::new(), Instant::now());
        accept_all(&listener, None, &mut clients);
        // Who asks it again and again does so at leisure.
        assert!(clients.is_empty() && start.elapsed() >= BREATH);
    }

    #[test]
    fn a_client_is_not_listened_to_for_ever() {
        let (client, ours) = socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )
        .unwrap();
        let mut early = Early {
            connection: Connection::new(ours).unwrap(),
            greeted: false,
            requests: Vec::new(),
        };
        let (mut buffer, mut sockets) = (ReceiveBuffer::new(), None);
        let mut listens = |early: &mut Early| early.listen(&mut buffer, &mut sockets);
        protocol::send(client.as_fd(), &Hello::ours().emit(), &[], SendFlags::empty()).unwrap();
        for _ in 0..MAX_REQUESTS {
            protocol::send_message(&client, &Request::Status, SendFlags::empty()).unwrap();
            assert!(listens(&mut early));
        }
        assert!(early.greeted);
        assert_eq!(early.requests.len(), MAX_REQUESTS);
        protocol::send_message(&client, &Request::Status, SendFlags::empty()).unwrap();
        assert!(!listens(&mut early));
    }
}
