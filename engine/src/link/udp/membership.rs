//! The multicast groups of the receive socket.

use std::fs;
use std::io;
use std::net::IpAddr;
use std::os::fd::BorrowedFd;

use super::{socket, tunnel};

/// Groups that Linux lets a socket join, unless it is told otherwise.
const USUAL_MOST: u32 = 20;

/// How many groups a link can join at once, as the administrator of this network namespace has it.
pub(crate) fn most_groups() -> u32 {
    let setting = fs::read_to_string("/proc/sys/net/ipv4/igmp_max_memberships");
    setting
        .ok()
        .and_then(|text| text.trim().parse().ok())
        .unwrap_or(USUAL_MOST)
}

/// Groups joined, each with its interface.
pub(super) struct Memberships {
    /// The interface is the loopback.
    loopback: bool,
    groups: Vec<(IpAddr, u32)>,
}

impl Memberships {
    pub fn new(loopback: bool) -> Memberships {
        Memberships {
            loopback,
            groups: Vec::new(),
        }
    }

    /// As [`crate::link::Link::join`].
    pub fn join(&mut self, socket: BorrowedFd<'_>, group: IpAddr, ifindex: u32) -> io::Result<()> {
        if self.tunnels(group) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        if !tunnel::takes(self.loopback, group) {
            socket::join(socket, group, ifindex)?;
        } else if !self.uses_tunnel() {
            socket::join(socket, tunnel::GROUP, ifindex)?;
        }
        self.groups.push((group, ifindex));
        Ok(())
    }

    /// As [`crate::link::Link::leave`].
    pub fn leave(&mut self, socket: BorrowedFd<'_>, group: IpAddr) -> io::Result<()> {
        let Some(at) = self.groups.iter().position(|&(joined, _)| joined == group) else {
            return Err(io::ErrorKind::AddrNotAvailable.into());
        };
        let (_, ifindex) = self.groups.swap_remove(at);
        if !tunnel::takes(self.loopback, group) {
            socket::leave(socket, group, ifindex)
        } else if !self.uses_tunnel() {
            socket::leave(socket, tunnel::GROUP, ifindex)
        } else {
            Ok(())
        }
    }

    /// Whether packets to `dest` carry others through the [`tunnel`]. Elsewhere its group is one like all others.
    pub fn tunnels(&self, dest: IpAddr) -> bool {
        self.loopback && dest == tunnel::GROUP
    }

    fn uses_tunnel(&self) -> bool {
        self.groups
            .iter()
            .any(|&(group, _)| tunnel::takes(self.loopback, group))
    }

    /// Whether a packet to `dest` that came by an interface is for us: the kernel does not tell interfaces apart for
    /// IPv6, and old ones give a socket what others on the host have joined.
    pub fn admits(&self, dest: IpAddr, ifindex: u32) -> bool {
        !dest.is_multicast() || self.groups.contains(&(dest, ifindex))
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn the_group_of_the_tunnel_is_special_on_the_loopback_only() {
        let other = "239.18.183.7".parse().unwrap();
        for loopback in [true, false] {
            let mut memberships = Memberships::new(loopback);
            assert_eq!(memberships.tunnels(tunnel::GROUP), loopback);
            assert!(!memberships.tunnels(other));
            if loopback {
                let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
                let refused = memberships.join(socket.as_fd(), tunnel::GROUP, 1).unwrap_err();
                assert_eq!(refused.kind(), io::ErrorKind::InvalidInput);
            }
        }
    }
}
