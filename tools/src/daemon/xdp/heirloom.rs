//! What outlives a daemon of a device in XDP mode: a socket whose queue holds one message with everything that is open.
//!
//! Its text is a mark and a [`Record`]; its descriptors are those of the steering, the memory files, the ledger, and
//! bundles: sockets of the same kind, whose message holds the AF_XDP sockets, as there may be more of these than one
//! message takes. Programs hold it, and show it to the next daemon.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use ferroce_engine::control::{XdpInfo, protocol};
use rustix::fs::fstat;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, socketpair, sockopt};
use rustix::process::geteuid;
use serde::{Deserialize, Serialize};

use super::ledger::Ledger;
use super::steering::Steering;
use crate::daemon::sys;

/// The text of a port's message begins with it.
const PORT_MARK: &[u8] = b"ferroced port 1";
/// The text of a bundle's message.
const BUNDLE_MARK: &[u8] = b"ferroced bundle 1";
/// Descriptors of one message (the kernel's bound).
const MAX_FDS: usize = 253;
/// Descriptors before the bundles: the steering's, two memory files, the ledger.
const FIXED: usize = Steering::FDS + 3;

/// What the descriptors are of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// Name of the device.
    pub name: String,
    /// The network namespace of its interface, by inode.
    pub netns: u64,
    /// Its interface.
    pub ifindex: u32,
    /// How it was made.
    pub info: XdpInfo,
}

/// What an heirloom holds.
pub struct Inheritance {
    /// What the rest is of.
    pub record: Record,
    /// In the order of [`Steering::fds`].
    pub steering: Vec<OwnedFd>,
    /// The memory file of what processes tell each other.
    pub control: OwnedFd,
    /// The memory file of the frames.
    pub umem: OwnedFd,
    /// Who has which seat.
    pub ledger: Ledger,
    /// By queue, then by seat.
    pub sockets: Vec<Vec<OwnedFd>>,
}

/// Makes one. `fixed` are the descriptors before the sockets, `sockets` these by queue, then by seat.
pub fn make(record: &Record, fixed: &[BorrowedFd<'_>], sockets: &[BorrowedFd<'_>]) -> io::Result<OwnedFd> {
    let bundles = sockets
        .chunks(MAX_FDS)
        .map(|part| enclose(BUNDLE_MARK, part))
        .collect::<io::Result<Vec<OwnedFd>>>()?;
    let mut text = PORT_MARK.to_vec();
    text.extend(protocol::encode(record));
    let fds: Vec<BorrowedFd<'_>> = fixed
        .iter()
        .copied()
        .chain(bundles.iter().map(AsFd::as_fd))
        .collect();
    enclose(&text, &fds)
}

/// A socket whose queue holds one message. The other end is closed: nobody adds another.
fn enclose(text: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC;
    let (sender, holder) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    protocol::send(sender.as_fd(), text, fds, SendFlags::DONTWAIT)?;
    Ok(holder)
}

/// Looks into one that a program shows. Only what this user's daemon made in this network namespace is believed: a socket is its maker's, and what
/// lies in the queue of this one was put there before anyone else had it.
pub fn open(heirloom: BorrowedFd<'_>) -> io::Result<Inheritance> {
    let (text, mut fds) = look_into(heirloom)?;
    let record = text
        .strip_prefix(PORT_MARK)
        .and_then(protocol::decode::<Record>)
        .filter(|record| record.info.geometry.is_sound())
        .ok_or_else(|| invalid("no port of a ferroced"))?;
    // A program may have the heirloom of another namespace's daemon too.
    if record.netns != sys::network_namespace()? {
        return Err(invalid("a port of another network namespace"));
    }
    let geometry = record.info.geometry;
    let (queues, seats) = (usize::from(geometry.queues), usize::from(geometry.seats));
    if fds.len() != FIXED + (queues * seats).div_ceil(MAX_FDS) {
        return Err(invalid("a port with too many or too few descriptors"));
    }
    let bundles = fds.split_off(FIXED);
    let mut all = Vec::with_capacity(queues * seats);
    for bundle in &bundles {
        let (text, sockets) = look_into(bundle.as_fd())?;
        if text != BUNDLE_MARK {
            return Err(invalid("no bundle of a ferroced"));
        }
        for socket in sockets {
            if !is_own(socket.as_fd())? || !is_af_xdp(&socket) {
                return Err(invalid("a socket of another kind"));
            }
            all.push(socket);
        }
    }
    if all.len() != queues * seats {
        return Err(invalid("a port with too many or too few sockets"));
    }
    let mut all = all.into_iter();
    let sockets = (0..queues).map(|_| all.by_ref().take(seats).collect()).collect();
    let steering = fds.drain(..Steering::FDS).collect();
    let mut files = fds.into_iter();
    let mut file = || files.next().ok_or_else(|| invalid("a port without memory"));
    let (control, umem, ledger) = (file()?, file()?, file()?);
    for memory in [&control, &umem, &ledger] {
        if !is_own(memory.as_fd())? {
            return Err(invalid("memory of another user"));
        }
    }
    Ok(Inheritance {
        record,
        steering,
        control,
        umem,
        ledger: Ledger::from(ledger),
        sockets,
    })
}

/// Whether this user made it.
pub fn is_own(fd: BorrowedFd<'_>) -> io::Result<bool> {
    Ok(fstat(fd)?.st_uid == geteuid().as_raw())
}

fn look_into(socket: BorrowedFd<'_>) -> io::Result<(Vec<u8>, Vec<OwnedFd>)> {
    if !is_own(socket)? {
        return Err(invalid("a socket of another user"));
    }
    let message = protocol::receive(socket, RecvFlags::PEEK | RecvFlags::DONTWAIT)?;
    Ok((message.bytes, message.fds))
}

fn is_af_xdp(socket: &OwnedFd) -> bool {
    const AF_XDP: u16 = 44;
    sockopt::socket_domain(socket).is_ok_and(|domain| domain.as_raw() == AF_XDP)
}

fn invalid(what: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferroce_engine::link::xdp::Geometry;
    use ferroce_engine::link::xdp::port::Features;
    use rustix::net::socket_with;

    fn record(queues: u16, seats: u16) -> Record {
        Record {
            name: "rdma0".into(),
            netns: sys::network_namespace().unwrap(),
            ifindex: 7,
            info: XdpInfo {
                geometry: Geometry {
                    chunk: 2048,
                    queues,
                    seats,
                    rx_ring: 64,
                    tx_ring: 64,
                },
                driver: true,
                features: Features::default(),
            },
        }
    }

    fn null() -> OwnedFd {
        std::fs::File::open("/dev/null").unwrap().into()
    }

    #[test]
    fn what_is_no_port_is_not_believed() {
        let fixed: Vec<OwnedFd> = (0..FIXED).map(|_| null()).collect();
        let fixed: Vec<BorrowedFd<'_>> = fixed.iter().map(AsFd::as_fd).collect();
        let no_socket = null();
        let refused = |made: io::Result<OwnedFd>| {
            let opened = open(made.unwrap().as_fd());
            assert_eq!(
                opened.err().map(|error| error.kind()),
                Some(io::ErrorKind::InvalidData)
            );
        };
        refused(make(&record(1, 1), &fixed, &[no_socket.as_fd()]));
        refused(make(&record(1, 2), &fixed, &[no_socket.as_fd()]));
        refused(make(&record(0, 1), &fixed, &[]));
        refused(make(&record(1, 1), &fixed[1..], &[no_socket.as_fd()]));
        refused(enclose(b"something else", &fixed));
        let elsewhere = Record {
            netns: 1,
            ..record(1, 1)
        };
        let heirloom = make(&elsewhere, &fixed, &[no_socket.as_fd()]).unwrap();
        let error = open(heirloom.as_fd()).err().unwrap();
        assert_eq!(error.to_string(), "a port of another network namespace");
    }

    #[test]
    fn more_sockets_than_a_message_takes_come_in_their_order() {
        let udp = || socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None);
        let sockets: Vec<OwnedFd> = (0..300).map(|_| udp().unwrap()).collect();
        let all: Vec<BorrowedFd<'_>> = sockets.iter().map(AsFd::as_fd).collect();
        let fixed: Vec<OwnedFd> = (0..FIXED).map(|_| null()).collect();
        let fixed: Vec<BorrowedFd<'_>> = fixed.iter().map(AsFd::as_fd).collect();
        let heirloom = make(&record(2, 150), &fixed, &all).unwrap();
        // The queue keeps its message however often it is looked at.
        for _ in 0..2 {
            let (_, fds) = look_into(heirloom.as_fd()).unwrap();
            let mut found = Vec::new();
            for bundle in &fds[FIXED..] {
                let (text, part) = look_into(bundle.as_fd()).unwrap();
                assert_eq!(text, BUNDLE_MARK);
                found.extend(part);
            }
            let cookies = |sockets: &[OwnedFd]| -> Vec<u64> {
                sockets
                    .iter()
                    .map(|socket| sockopt::socket_cookie(socket).unwrap())
                    .collect()
            };
            assert_eq!(cookies(&found), cookies(&sockets));
        }
    }

    #[test]
    fn what_another_user_made_is_not_believed() {
        let socket = enclose(PORT_MARK, &[null().as_fd()]).unwrap();
        assert!(look_into(socket.as_fd()).is_ok());
        let other = rustix::fs::Uid::from_raw(geteuid().as_raw() + 1);
        // Only root can give a socket away, as an ordinary user can't make one of root's.
        if rustix::fs::fchown(&socket, Some(other), None).is_err() {
            assert!(!geteuid().is_root());
            return;
        }
        let refused = look_into(socket.as_fd()).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::InvalidData);
    }
}
