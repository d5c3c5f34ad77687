//! Sockets and their options.

use std::io;
use std::mem;
use std::net::{IpAddr, Ipv6Addr};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use libc::{c_int, c_void};

use crate::link::Path;

/// Destination port of every RoCEv2 packet.
pub(super) const ROCE_PORT: u16 = ferroce_wire::udp_port::ROCE_V2_PORT;
/// Send buffer asked for; the kernel gives less if `wmem_max` is less.
const SEND_BUFFER: c_int = 4 << 20;

/// Sets a socket option.
pub(super) fn set<T>(fd: BorrowedFd<'_>, level: c_int, name: c_int, value: &T) -> io::Result<()> {
    let value: *const T = value;
    // SAFETY: `value` is valid for its size.
    let done = unsafe {
        libc::setsockopt(
            fd.as_raw_fd(),
            level,
            name,
            value.cast::<c_void>(),
            mem::size_of::<T>() as u32,
        )
    };
    if done == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Gives a socket option of the type int, or of several.
pub(super) fn get<const N: usize>(fd: BorrowedFd<'_>, level: c_int, name: c_int) -> io::Result<[c_int; N]> {
    let mut value = [0; N];
    let mut len = mem::size_of_val(&value) as u32;
    // SAFETY: `value` and `len` are valid, and the kernel writes no more than `len` bytes.
    let done = unsafe {
        libc::getsockopt(
            fd.as_raw_fd(),
            level,
            name,
            value.as_mut_ptr().cast(),
            &raw mut len,
        )
    };
    if done == 0 {
        Ok(value)
    } else {
        Err(io::Error::last_os_error())
    }
}

/// What the kernel counts for a socket (`SO_MEMINFO`): bytes in the receive queue first, datagrams dropped last. Zeros
/// where it does not tell.
pub(super) fn meminfo(fd: BorrowedFd<'_>) -> [c_int; 9] {
    const SO_MEMINFO: c_int = 55;
    get(fd, libc::SOL_SOCKET, SO_MEMINFO).unwrap_or_default()
}

/// Sets what receiving needs on a socket that is bound to port 4791 already.
///
/// The daemon has set it before; here it is asked for again, because what is missing would show as lost packets only.
pub(super) fn prepare_receiver(fd: BorrowedFd<'_>) -> io::Result<()> {
    let [domain] = get(fd, libc::SOL_SOCKET, libc::SO_DOMAIN)?;
    // An IPv6 socket tells IPv4 addresses too; twice would be wasted work.
    set(
        fd,
        libc::IPPROTO_IP,
        libc::IP_PKTINFO,
        &i32::from(domain == libc::AF_INET),
    )?;
    set(fd, libc::IPPROTO_IP, libc::IP_RECVTOS, &1)?;
    set(fd, libc::IPPROTO_IP, libc::IP_RECVTTL, &1)?;
    if domain == libc::AF_INET6 {
        set(fd, libc::IPPROTO_IPV6, libc::IPV6_RECVPKTINFO, &1)?;
        set(fd, libc::IPPROTO_IPV6, libc::IPV6_RECVTCLASS, &1)?;
        set(fd, libc::IPPROTO_IPV6, libc::IPV6_RECVHOPLIMIT, &1)?;
        // Soft-RoCE and hardware send no UDP checksum.
        set(fd, libc::SOL_UDP, libc::UDP_NO_CHECK6_RX, &1)?;
    }
    // Only groups of our own, not what any process of the host has joined. IPv6 knows that since 4.20.
    set(fd, libc::IPPROTO_IP, libc::IP_MULTICAST_ALL, &0)?;
    if domain == libc::AF_INET6 {
        set_if_known(fd, libc::IPPROTO_IPV6, libc::IPV6_MULTICAST_ALL, 0)?;
    }
    // Kernels before 5.0 don't merge: every packet comes alone, and nothing else changes.
    set_if_known(fd, libc::SOL_UDP, libc::UDP_GRO, 1)
}

/// Sets an option that older kernels lack and do without.
fn set_if_known(fd: BorrowedFd<'_>, level: c_int, name: c_int, value: c_int) -> io::Result<()> {
    match set(fd, level, name, &value) {
        Err(error) if error.raw_os_error() != Some(libc::ENOPROTOOPT) => Err(error),
        _ => Ok(()),
    }
}

/// Makes the socket a member of a multicast group on an interface.
pub(super) fn join(fd: BorrowedFd<'_>, group: IpAddr, ifindex: u32) -> io::Result<()> {
    change_membership(
        fd,
        group,
        ifindex,
        [libc::IP_ADD_MEMBERSHIP, libc::IPV6_ADD_MEMBERSHIP],
    )
}

/// Ends a socket's membership of a multicast group on an interface. EADDRNOTAVAIL: it is none.
pub fn leave(fd: BorrowedFd<'_>, group: IpAddr, ifindex: u32) -> io::Result<()> {
    change_membership(
        fd,
        group,
        ifindex,
        [libc::IP_DROP_MEMBERSHIP, libc::IPV6_DROP_MEMBERSHIP],
    )
}

/// `names`: what the change is called for IPv4 and IPv6.
fn change_membership(fd: BorrowedFd<'_>, group: IpAddr, ifindex: u32, names: [c_int; 2]) -> io::Result<()> {
    match group {
        IpAddr::V4(group) => {
            let request = libc::ip_mreqn {
                imr_multiaddr: libc::in_addr {
                    s_addr: u32::from_ne_bytes(group.octets()),
                },
                imr_address: libc::in_addr { s_addr: 0 },
                imr_ifindex: ifindex as c_int,
            };
            set(fd, libc::IPPROTO_IP, names[0], &request)
        }
        IpAddr::V6(group) => {
            let request = libc::ipv6_mreq {
                ipv6mr_multiaddr: libc::in6_addr {
                    s6_addr: group.octets(),
                },
                ipv6mr_interface: ifindex,
            };
            set(fd, libc::IPPROTO_IPV6, names[1], &request)
        }
    }
}

/// A socket address as the kernel takes it.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) union Address {
    v4: libc::sockaddr_in,
    v6: libc::sockaddr_in6,
}

impl Address {
    pub const EMPTY: Address = Address {
        // SAFETY: all zeros is a valid address (AF_UNSPEC).
        v6: unsafe { mem::zeroed() },
    };
    pub const MAX_LEN: u32 = mem::size_of::<Address>() as u32;

    /// `scope` is the interface index, used where an IPv6 address needs one.
    pub fn new(ip: IpAddr, port: u16, scope: u32) -> (Address, u32) {
        match ip {
            IpAddr::V4(ip) => {
                let v4 = libc::sockaddr_in {
                    sin_family: libc::AF_INET as u16,
                    sin_port: port.to_be(),
                    sin_addr: libc::in_addr {
                        s_addr: u32::from_ne_bytes(ip.octets()),
                    },
                    sin_zero: [0; 8],
                };
                (Address { v4 }, mem::size_of_val(&v4) as u32)
            }
            IpAddr::V6(ip) => {
                let scoped = ip.is_unicast_link_local() || ip.is_multicast();
                let v6 = libc::sockaddr_in6 {
                    sin6_family: libc::AF_INET6 as u16,
                    sin6_port: port.to_be(),
                    sin6_flowinfo: 0,
                    sin6_addr: libc::in6_addr { s6_addr: ip.octets() },
                    sin6_scope_id: if scoped { scope } else { 0 },
                };
                (Address { v6 }, mem::size_of_val(&v6) as u32)
            }
        }
    }

    /// The address (never an IPv4-mapped one) and port; `None` for another family.
    pub fn parse(&self) -> Option<(IpAddr, u16)> {
        // SAFETY: every bit pattern is valid in either view, and the family lies at the same place.
        unsafe {
            match c_int::from(self.v4.sin_family) {
                libc::AF_INET => {
                    let ip = self.v4.sin_addr.s_addr.to_ne_bytes();
                    Some((ip.into(), u16::from_be(self.v4.sin_port)))
                }
                libc::AF_INET6 => {
                    let ip = Ipv6Addr::from(self.v6.sin6_addr.s6_addr);
                    Some((ip.to_canonical(), u16::from_be(self.v6.sin6_port)))
                }
                _ => None,
            }
        }
    }
}

/// A socket to send from `path.source` and `port`, with `path`'s traffic class and hop limit as its own.
///
/// It is never connected, and in MTU discovery mode PROBE: then IPv4 identifications are 0, and count from 0 in a
/// segmented send, so that the ICRC is known. UDP checksums stay on: the kernel segments with them only.
pub(super) fn sender(path: &Path, port: u16) -> io::Result<OwnedFd> {
    let domain = if path.source.is_ipv4() {
        libc::AF_INET
    } else {
        libc::AF_INET6
    };
    // SAFETY: the descriptor is new and ours.
    let fd = unsafe {
        let fd = libc::socket(
            domain,
            libc::SOCK_DGRAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK,
            0,
        );
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        OwnedFd::from_raw_fd(fd)
    };
    let socket = std::os::fd::AsFd::as_fd(&fd);
    let (tos, hops) = (
        c_int::from(path.traffic_class),
        c_int::from(path.hop_limit_on_wire()),
    );
    let index = path.ifindex as c_int;
    match path.dest {
        IpAddr::V4(_) => {
            set(
                socket,
                libc::IPPROTO_IP,
                libc::IP_MTU_DISCOVER,
                &libc::IP_PMTUDISC_PROBE,
            )?;
            set(socket, libc::IPPROTO_IP, libc::IP_TOS, &tos)?;
            set(socket, libc::IPPROTO_IP, libc::IP_TTL, &hops)?;
            if path.dest.is_multicast() {
                let any = libc::in_addr { s_addr: 0 };
                let interface = libc::ip_mreqn {
                    imr_multiaddr: any,
                    imr_address: any,
                    imr_ifindex: index,
                };
                set(socket, libc::IPPROTO_IP, libc::IP_MULTICAST_IF, &interface)?;
                set(socket, libc::IPPROTO_IP, libc::IP_MULTICAST_TTL, &hops)?;
                set(socket, libc::IPPROTO_IP, libc::IP_MULTICAST_LOOP, &1)?;
            }
        }
        IpAddr::V6(_) => {
            set(
                socket,
                libc::IPPROTO_IPV6,
                libc::IPV6_MTU_DISCOVER,
                &libc::IPV6_PMTUDISC_PROBE,
            )?;
            set(socket, libc::IPPROTO_IPV6, libc::IPV6_TCLASS, &tos)?;
            set(socket, libc::IPPROTO_IPV6, libc::IPV6_UNICAST_HOPS, &hops)?;
            if path.dest.is_multicast() {
                set(socket, libc::IPPROTO_IPV6, libc::IPV6_MULTICAST_IF, &index)?;
                set(socket, libc::IPPROTO_IPV6, libc::IPV6_MULTICAST_HOPS, &hops)?;
                set(socket, libc::IPPROTO_IPV6, libc::IPV6_MULTICAST_LOOP, &1)?;
            }
        }
    }
    set(socket, libc::SOL_SOCKET, libc::SO_SNDBUF, &SEND_BUFFER)?;
    refuse_input(socket)?;
    let (address, len) = Address::new(path.source, port, path.ifindex);
    // SAFETY: `address` is valid for `len` bytes.
    if unsafe { libc::bind(fd.as_raw_fd(), (&raw const address).cast(), len) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(fd)
}

/// Lets a socket that only sends drop what comes in, instead of piling it up.
fn refuse_input(socket: BorrowedFd<'_>) -> io::Result<()> {
    let mut drop_all = [libc::sock_filter {
        code: (libc::BPF_RET | libc::BPF_K) as u16,
        jt: 0,
        jf: 0,
        k: 0,
    }];
    let program = libc::sock_fprog {
        len: 1,
        filter: drop_all.as_mut_ptr(),
    };
    set(socket, libc::SOL_SOCKET, libc::SO_ATTACH_FILTER, &program)
}

/// Whether the kernel segments UDP sends (since 4.18).
pub(super) fn segments(socket: BorrowedFd<'_>) -> bool {
    set(socket, libc::SOL_UDP, libc::UDP_SEGMENT, &0).is_ok()
}

/// The port a socket is bound to.
#[cfg(test)]
pub(super) fn local_port(socket: BorrowedFd<'_>) -> io::Result<u16> {
    let mut address = Address::EMPTY;
    let mut len = Address::MAX_LEN;
    // SAFETY: both are valid.
    if unsafe { libc::getsockname(socket.as_raw_fd(), (&raw mut address).cast(), &raw mut len) } != 0 {
        return Err(io::Error::last_os_error());
    }
    address
        .parse()
        .map(|(_, port)| port)
        .ok_or_else(|| io::ErrorKind::InvalidData.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_keep_what_they_are_made_of() {
        for ip in ["10.1.2.3", "::1", "fe80::1:2", "2001:db8::7"] {
            let ip: IpAddr = ip.parse().unwrap();
            let (address, len) = Address::new(ip, 4791, 3);
            assert_eq!(address.parse(), Some((ip, 4791)));
            assert!(len <= Address::MAX_LEN);
        }
        let (mapped, _) = Address::new("::ffff:10.1.2.3".parse().unwrap(), 1, 0);
        assert_eq!(mapped.parse(), Some(("10.1.2.3".parse().unwrap(), 1)));
        assert_eq!(Address::EMPTY.parse(), None);
    }
}
