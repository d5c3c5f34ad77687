//! Who is at the other end of a unix socket.

#![allow(unsafe_code)]

use std::io;
use std::mem::size_of;
use std::os::fd::{AsRawFd, BorrowedFd};

/// The process that connected, or that listened, as it was then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Its id; `None` for a process that this one's pid namespace does not show.
    pub pid: Option<u32>,
    /// Its effective user.
    pub uid: u32,
    /// Its effective group.
    pub gid: u32,
}

impl Peer {
    /// The peer of a connected socket (`SO_PEERCRED`).
    pub fn of(socket: BorrowedFd<'_>) -> io::Result<Peer> {
        let mut peer = libc::ucred {
            pid: 0,
            uid: u32::MAX,
            gid: u32::MAX,
        };
        let mut length = size_of::<libc::ucred>() as libc::socklen_t;
        // SAFETY: there is room for what the option gives.
        let result = unsafe {
            libc::getsockopt(
                socket.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_PEERCRED,
                (&raw mut peer).cast(),
                &raw mut length,
            )
        };
        if result != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Peer {
            pid: u32::try_from(peer.pid).ok().filter(|pid| *pid != 0),
            uid: peer.uid,
            gid: peer.gid,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn this_process_is_its_own_peer() {
        let (socket, _other) = UnixStream::pair().unwrap();
        let peer = Peer::of(socket.as_fd()).unwrap();
        assert_eq!(peer.pid, Some(std::process::id()));
        assert_eq!(peer.uid, rustix::process::geteuid().as_raw());
        assert_eq!(peer.gid, rustix::process::getegid().as_raw());
    }
}
