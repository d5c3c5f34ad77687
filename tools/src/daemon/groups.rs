//! Multicast groups of the slots' sockets. Programs join and leave by themselves; what a dead one had joined is left
//! here, since its socket lives on.

use std::fs;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::BorrowedFd;

use ferroce_engine::link::udp::leave;

/// A group that some socket has joined on an interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Membership {
    group: IpAddr,
    ifindex: u32,
}

/// Lets a socket leave every group. The kernel does not tell whose a membership is, so all there are are tried.
pub fn leave_all(socket: BorrowedFd<'_>) -> io::Result<()> {
    for Membership { group, ifindex } in joined_by_anyone() {
        match leave(socket, group, ifindex) {
            // Not this socket's, or that of an interface that is just going, or of IPv6 where sockets are not.
            Err(error)
                if matches!(
                    error.raw_os_error(),
                    Some(libc::EADDRNOTAVAIL | libc::ENODEV | libc::ENOPROTOOPT)
                ) => {}
            other => other?,
        }
    }
    Ok(())
}

fn joined_by_anyone() -> Vec<Membership> {
    let read = |name: &str| fs::read_to_string(format!("/proc/self/net/{name}")).unwrap_or_default();
    let mut all = ipv4(&read("igmp"));
    all.extend(ipv6(&read("igmp6")));
    all
}

/// Of `/proc/net/igmp`: a line for each interface that begins with its index, and below it lines that begin with a
/// group, as a hexadecimal number in this host's byte order.
fn ipv4(table: &str) -> Vec<Membership> {
    let mut memberships = Vec::new();
    let mut ifindex = 0;
    for line in table.lines().skip(1) {
        let Some(first) = line.split_whitespace().next() else {
            continue;
        };
        if !line.starts_with(char::is_whitespace) {
            ifindex = first.parse().unwrap_or(0);
        } else if let Ok(group) = u32::from_str_radix(first, 16) {
            let group = Ipv4Addr::from(group.to_ne_bytes()).into();
            memberships.push(Membership { group, ifindex });
        }
    }
    memberships
}

/// Of `/proc/net/igmp6`: lines of index, interface and group in hexadecimal.
fn ipv6(table: &str) -> Vec<Membership> {
    let membership = |line: &str| {
        let mut fields = line.split_whitespace();
        let ifindex = fields.next()?.parse().ok()?;
        let group = u128::from_str_radix(fields.nth(1)?, 16).ok()?;
        Some(Membership {
            group: Ipv6Addr::from(group).into(),
            ifindex,
        })
    };
    table.lines().filter_map(membership).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn membership(group: &str, ifindex: u32) -> Membership {
        Membership {
            group: group.parse().unwrap(),
            ifindex,
        }
    }

    #[test]
    fn tables_of_proc_are_read() {
        let word = |group: [u8; 4]| format!("{:08X}", u32::from_ne_bytes(group));
        let igmp = format!(
            "Idx\tDevice    : Count Querier\tGroup    Users Timer\tReporter\n\
             1\tlo        :     1      V3\n\t\t\t\t{}     1 0:00000000\t\t0\n\
             12\teth0      :     2      V3\n\t\t\t\t{}     1 0:00000000\t\t0\n\t\t\t\t{}     1 0:00000000\t\t0\n",
            word([224, 0, 0, 1]),
            word([239, 1, 2, 3]),
            word([224, 0, 0, 1]),
        );
        assert_eq!(
            ipv4(&igmp),
            [
                membership("224.0.0.1", 1),
                membership("239.1.2.3", 12),
                membership("224.0.0.1", 12)
            ]
        );
        let igmp6 = "1    lo              ff020000000000000000000000000001     1 0000000C 0\n\
                     12   eth0            ff0e0000000000000000000000004791     1 00000004 0\n";
        assert_eq!(
            ipv6(igmp6),
            [membership("ff02::1", 1), membership("ff0e::4791", 12)]
        );
        assert_eq!(ipv4(""), []);
        assert_eq!(ipv6("1 lo\n\nx"), []);
    }
}
