//! The UDP sockets of all slots: one SO_REUSEPORT group on port 4791, steered by the QPN's slot.
//!
//! The kernel keeps the group's sockets in the order of their `bind`, and a classic BPF program
//! gives the index for each datagram: bits 16..24 of the destination QPN (IBTA 9.2.8), which are
//! the slot. A closed socket would make the last one move to its index, so all are made at the
//! start and the daemon keeps a duplicate of each. A slot that nobody leases has a second filter,
//! of the socket itself, that rejects everything in the kernel.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use ferroce_engine::control::{DAEMON_SLOT, protocol};
use rustix::fs::fstat;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, bind, getsockname, ipproto, recv,
    socket_with, socketpair, sockopt,
};
use tracing::warn;

use super::xdp::is_own;
use super::{groups, port, sys};

/// The UDP port of RoCE v2 (IBTA annex A17).
pub const ROCE_PORT: u16 = 4791;
/// The bytes of the message in the heirloom's queue.
const HEIRLOOM_MARK: &[u8] = b"ferroced sockets 1";
/// Receive buffer asked for, in bytes; the kernel doubles it and may grant less.
const RECEIVE_BUFFER: usize = 4 << 20;

/// The sockets of all slots.
pub struct SlotSockets {
    /// By slot.
    sockets: Vec<OwnedFd>,
    /// Holds all of them in its queue; see [`ferroce_engine::control::protocol`]. Without it the
    /// sockets end with the daemon.
    heirloom: Option<OwnedFd>,
}

impl SlotSockets {
    /// Makes `count` sockets, all closed to traffic. `EADDRINUSE` if anyone else has the port.
    pub fn open(count: u8) -> io::Result<Self> {
        let family = family()?;
        // A socket without SO_REUSEPORT can't join a group: this finds any other user of the port.
        bind_port(&new_socket(family)?, family)?;
        let mut sockets = Vec::with_capacity(usize::from(count));
        for slot in 0..count {
            let socket = new_socket(family)?;
            configure(socket.as_fd(), family)?;
            reject_all(socket.as_fd())?;
            sockopt::set_socket_reuseport(&socket, true)?;
            bind_port(&socket, family)?;
            if slot == 0 {
                steer_by_slot(socket.as_fd(), count)?;
            }
            sockets.push(socket);
        }
        let heirloom = make_heirloom(&sockets)
            .inspect_err(|error| warn!(%error, "traffic will not outlive this daemon"))
            .ok();
        Ok(Self { sockets, heirloom })
    }

    /// Takes the sockets over from an earlier daemon of this user in this network namespace. Whoever shows them: they are their maker's, and what
    /// lies in the queue was put there before anyone else had it.
    pub fn inherit(heirloom: OwnedFd) -> io::Result<Self> {
        let invalid = |what| io::Error::new(io::ErrorKind::InvalidData, what);
        if !is_own(heirloom.as_fd())? {
            return Err(invalid("a socket of another user"));
        }
        let message = protocol::receive(heirloom.as_fd(), RecvFlags::PEEK | RecvFlags::DONTWAIT)?;
        if message.bytes != HEIRLOOM_MARK || message.fds.len() < 2 {
            return Err(invalid("no sockets of a ferroced"));
        }
        // A program may have the heirloom of another namespace's daemon too.
        let here = port::inodes_on_roce_port();
        for socket in &message.fds {
            // Anything else would not be what programs take it for.
            if !is_own(socket.as_fd())? || !is_bound_to_port(socket) || !sockopt::socket_reuseport(socket)? {
                return Err(invalid("a socket of another port, or of another user"));
            }
            if !here.contains(&fstat(socket)?.st_ino) {
                return Err(invalid("a socket of another network namespace"));
            }
        }
        Ok(Self {
            sockets: message.fds,
            heirloom: Some(heirloom),
        })
    }

    /// Number of sockets, the daemon's included.
    pub fn count(&self) -> u8 {
        u8::try_from(self.sockets.len()).unwrap_or(u8::MAX)
    }

    /// What a process needs to show the sockets to the next daemon.
    pub fn heirloom(&self) -> Option<BorrowedFd<'_>> {
        self.heirloom.as_ref().map(AsFd::as_fd)
    }

    /// The slot whose socket this is.
    pub fn slot_of(&self, socket: &OwnedFd) -> Option<u8> {
        let wanted = sockopt::socket_cookie(socket).ok()?;
        let slot = self
            .sockets
            .iter()
            .position(|it| sockopt::socket_cookie(it).is_ok_and(|cookie| cookie == wanted));
        slot.and_then(|slot| u8::try_from(slot).ok())
    }

    /// True if the slot is open to traffic.
    pub fn is_open(&self, slot: u8) -> bool {
        self.get(slot)
            .is_some_and(|socket| sys::has_filter(socket).is_ok_and(|filtered| !filtered))
    }

    /// The socket of the daemon's own slot.
    pub fn own(&self) -> Option<BorrowedFd<'_>> {
        self.get(DAEMON_SLOT)
    }

    /// The socket of a slot, if there is such a slot.
    pub fn get(&self, slot: u8) -> Option<BorrowedFd<'_>> {
        self.sockets.get(usize::from(slot)).map(AsFd::as_fd)
    }

    /// Opens the slot to traffic, with an empty queue.
    pub fn accept_traffic(&self, slot: u8) -> io::Result<BorrowedFd<'_>> {
        let socket = self.get(slot).ok_or(io::ErrorKind::NotFound)?;
        drain(socket)?;
        sys::set_integer(socket, libc::SOL_SOCKET, libc::SO_DETACH_FILTER, 0)?;
        Ok(socket)
    }

    /// The socket of the daemon's own slot, open to traffic. What has come for an earlier daemon is kept: it is what
    /// peers wait for an answer to.
    pub fn open_own(&self) -> io::Result<BorrowedFd<'_>> {
        if self.is_open(DAEMON_SLOT) {
            self.get(DAEMON_SLOT).ok_or(io::ErrorKind::NotFound.into())
        } else {
            self.accept_traffic(DAEMON_SLOT)
        }
    }

    /// Closes the slot to traffic, leaves its multicast groups, and drops what waits in its queue.
    pub fn reject_traffic(&self, slot: u8) -> io::Result<()> {
        let socket = self.get(slot).ok_or(io::ErrorKind::NotFound)?;
        reject_all(socket)?;
        groups::leave_all(socket)?;
        drain(socket)
    }

    /// Receive buffer of a slot in bytes, as the kernel counts it.
    pub fn receive_buffer(&self) -> u32 {
        self.sockets
            .first()
            .and_then(|socket| sockopt::socket_recv_buffer_size(socket).ok())
            .unwrap_or(0) as u32
    }
}

/// Puts all sockets into the queue of a new socket. The other end is not needed.
fn make_heirloom(sockets: &[OwnedFd]) -> io::Result<OwnedFd> {
    let (sender, heirloom) = socketpair(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )?;
    let fds: Vec<BorrowedFd<'_>> = sockets.iter().map(AsFd::as_fd).collect();
    protocol::send(sender.as_fd(), HEIRLOOM_MARK, &fds, SendFlags::DONTWAIT)?;
    Ok(heirloom)
}

fn is_bound_to_port(socket: &OwnedFd) -> bool {
    let address = getsockname(socket)
        .ok()
        .and_then(|address| SocketAddr::try_from(address).ok());
    address.is_some_and(|address| address.port() == ROCE_PORT)
}

/// IPv6 sockets serve both protocols, unless the kernel has no IPv6.
fn family() -> io::Result<AddressFamily> {
    match socket_with(
        AddressFamily::INET6,
        SocketType::DGRAM,
        SocketFlags::CLOEXEC,
        None,
    ) {
        Ok(_) => Ok(AddressFamily::INET6),
        Err(Errno::AFNOSUPPORT) => Ok(AddressFamily::INET),
        Err(error) => Err(error.into()),
    }
}

fn new_socket(family: AddressFamily) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(family, SocketType::DGRAM, flags, Some(ipproto::UDP))?;
    if family == AddressFamily::INET6 {
        sockopt::set_ipv6_v6only(&socket, false)?;
    }
    Ok(socket)
}

fn bind_port(socket: &OwnedFd, family: AddressFamily) -> io::Result<()> {
    if family == AddressFamily::INET6 {
        bind(socket, &SocketAddrV6::new(Ipv6Addr::UNSPECIFIED, ROCE_PORT, 0, 0))?;
    } else {
        bind(socket, &SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, ROCE_PORT))?;
    }
    Ok(())
}

/// Sets what every engine needs to know of a datagram.
fn configure(socket: BorrowedFd<'_>, family: AddressFamily) -> io::Result<()> {
    if sockopt::set_socket_recv_buffer_size_force(socket, RECEIVE_BUFFER).is_err() {
        sockopt::set_socket_recv_buffer_size(socket, RECEIVE_BUFFER)?;
    }
    sys::set_integer(socket, libc::SOL_UDP, libc::UDP_GRO, 1)?;
    sys::set_integer(socket, libc::IPPROTO_IP, libc::IP_PKTINFO, 1)?;
    sys::set_integer(socket, libc::IPPROTO_IP, libc::IP_RECVTOS, 1)?;
    sys::set_integer(socket, libc::IPPROTO_IP, libc::IP_RECVTTL, 1)?;
    sys::set_integer(
        socket,
        libc::IPPROTO_IP,
        libc::IP_MTU_DISCOVER,
        libc::IP_PMTUDISC_PROBE,
    )?;
    // Packets to groups that no slot has joined itself are not for them: see the engine's receive sockets.
    sys::set_integer(socket, libc::IPPROTO_IP, libc::IP_MULTICAST_ALL, 0)?;
    if family == AddressFamily::INET6 {
        const UDP_NO_CHECK6_RX: libc::c_int = 102; // linux/udp.h
        sys::set_integer(socket, libc::SOL_UDP, UDP_NO_CHECK6_RX, 1)?;
        match sys::set_integer(socket, libc::IPPROTO_IPV6, libc::IPV6_MULTICAST_ALL, 0) {
            Err(error) if error.raw_os_error() != Some(libc::ENOPROTOOPT) => return Err(error), // since 4.20
            _ => {}
        }
        sys::set_integer(socket, libc::IPPROTO_IPV6, libc::IPV6_RECVPKTINFO, 1)?;
        sys::set_integer(socket, libc::IPPROTO_IPV6, libc::IPV6_RECVTCLASS, 1)?;
        sys::set_integer(socket, libc::IPPROTO_IPV6, libc::IPV6_RECVHOPLIMIT, 1)?;
        sys::set_integer(
            socket,
            libc::IPPROTO_IPV6,
            libc::IPV6_MTU_DISCOVER,
            libc::IPV6_PMTUDISC_PROBE,
        )?;
    }
    Ok(())
}

const LOAD_WORD: u32 = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
const RETURN: u32 = libc::BPF_RET | libc::BPF_K;

/// Gives the group its program: the index is the slot of the destination QPN, or 0 if there is no
/// such slot. It sees the UDP payload; one too short for a BTH ends the program with 0.
fn steer_by_slot(socket: BorrowedFd<'_>, count: u8) -> io::Result<()> {
    let program = [
        statement(LOAD_WORD, 4),
        statement(libc::BPF_ALU | libc::BPF_RSH | libc::BPF_K, 16),
        statement(libc::BPF_ALU | libc::BPF_AND | libc::BPF_K, 0xff),
        jump(
            libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K,
            u32::from(count),
            0,
            1,
        ),
        statement(RETURN, 0),
        statement(libc::BPF_RET | libc::BPF_A, 0),
    ];
    sys::attach_program(socket, libc::SO_ATTACH_REUSEPORT_CBPF, &program)
}

fn reject_all(socket: BorrowedFd<'_>) -> io::Result<()> {
    sys::attach_program(socket, libc::SO_ATTACH_FILTER, &[statement(RETURN, 0)])
}

fn statement(code: u32, k: u32) -> libc::sock_filter {
    jump(code, k, 0, 0)
}

fn jump(code: u32, k: u32, jt: u8, jf: u8) -> libc::sock_filter {
    libc::sock_filter {
        code: code as u16,
        jt,
        jf,
        k,
    }
}

fn drain(socket: BorrowedFd<'_>) -> io::Result<()> {
    let mut byte = [0u8; 1];
    loop {
        match recv(socket, &mut byte[..], RecvFlags::DONTWAIT | RecvFlags::TRUNC) {
            Err(Errno::AGAIN) => return Ok(()),
            Ok(_) | Err(Errno::INTR | Errno::CONNREFUSED) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use rustix::thread::UnshareFlags;

    use super::*;

    /// An heirloom that was made in a network namespace of its own; `None` without the privilege.
    fn heirloom_of_elsewhere() -> Option<OwnedFd> {
        let make = || {
            // SAFETY: threads have their own network namespaces; nothing else is unshared.
            #[allow(unsafe_code)]
            unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET) }.ok()?;
            SlotSockets::open(3).unwrap().heirloom
        };
        std::thread::spawn(make).join().unwrap()
    }

    #[test]
    fn sockets_of_another_network_namespace_are_not_taken_over() {
        let Some(heirloom) = heirloom_of_elsewhere() else {
            eprintln!("passed over: no network namespace can be made");
            return;
        };
        let refused = SlotSockets::inherit(heirloom).err().unwrap();
        assert_eq!(refused.to_string(), "a socket of another network namespace");
    }
}
