//! Who has the RoCE port, and who holds which of its sockets, as `/proc` tells.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use super::sockets::ROCE_PORT;

/// Names the program that has UDP port 4791 in this network namespace, as far as `/proc` tells.
pub fn owner_of_roce_port() -> String {
    let inodes = inodes_on_roce_port();
    // Sockets of the kernel itself are in no table of a process.
    if inodes.iter().all(|inode| *inode == 0) && Path::new("/sys/module/rdma_rxe").exists() {
        return "the kernel's Soft-RoCE (rdma_rxe)".to_owned();
    }
    let owner = processes().find(|pid| sockets_of(*pid).any(|inode| inodes.contains(&inode)));
    owner.map_or_else(
        || "another program".to_owned(),
        |pid| format!("{} (pid {pid})", command_name(pid)),
    )
}

/// The sockets on the RoCE port of this network namespace.
pub fn inodes_on_roce_port() -> BTreeSet<u64> {
    let sockets = sockets_on_roce_port().into_iter();
    sockets.map(|socket| socket.inode).collect()
}

/// True if the port looks as an earlier daemon of this user leaves it to programs that go on.
pub fn is_left_by_a_daemon() -> bool {
    let sockets = sockets_on_roce_port();
    let own = rustix::process::geteuid().as_raw();
    sockets.len() > 1 && sockets.iter().all(|socket| socket.uid == own)
}

/// Which of these sockets other processes hold. Processes that `/proc` does not show (of another
/// pid namespace) are not seen.
pub fn held_by_others(wanted: &BTreeSet<u64>) -> BTreeSet<u64> {
    let own = std::process::id();
    processes()
        .filter(|pid| *pid != own)
        .flat_map(sockets_of)
        .filter(|inode| wanted.contains(inode))
        .collect()
}

/// Command name of a process; `?` if it is not to be seen.
pub fn command_name(pid: u32) -> String {
    let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    if name.trim().is_empty() {
        "?".to_owned()
    } else {
        name.trim().to_owned()
    }
}

/// A line of `/proc/net/udp`.
#[derive(Debug, PartialEq, Eq)]
struct UdpSocket {
    uid: u32,
    inode: u64,
}

fn sockets_on_roce_port() -> Vec<UdpSocket> {
    let tables = ["/proc/self/net/udp", "/proc/self/net/udp6"].into_iter();
    tables
        .filter_map(|table| fs::read_to_string(table).ok())
        .flat_map(|table| sockets_on_port(&table, ROCE_PORT))
        .collect()
}

/// The sockets on a local port, from a table in the format of `/proc/net/udp`.
fn sockets_on_port(table: &str, port: u16) -> Vec<UdpSocket> {
    let suffix = format!(":{port:04X}");
    let socket = |line: &str| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let [_, local, _, _, _, _, _, uid, _, inode, ..] = fields[..] else {
            return None;
        };
        local.ends_with(&suffix).then(|| {
            Some(UdpSocket {
                uid: uid.parse().ok()?,
                inode: inode.parse().ok()?,
            })
        })?
    };
    table.lines().skip(1).filter_map(socket).collect()
}

fn processes() -> impl Iterator<Item = u32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

/// Inodes of the sockets that a process has; none if it is not ours to look at.
fn sockets_of(pid: u32) -> impl Iterator<Item = u64> {
    let links = fs::read_dir(format!("/proc/{pid}/fd"))
        .into_iter()
        .flatten()
        .flatten();
    links.filter_map(|entry| {
        let target = fs::read_link(entry.path()).ok()?;
        target
            .to_str()?
            .strip_prefix("socket:[")?
            .strip_suffix(']')?
            .parse()
            .ok()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_of_proc_is_read() {
        let table = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode ref pointer drops\n\
            1: 0100007F:12B7 00000000:0000 07 00000000:00000000 00:00000000 00000000     0        0 4242 2 0 0\n\
            2: 0100007F:12B8 00000000:0000 07 00000000:00000000 00:00000000 00000000     0        0 4243 2 0 0\n";
        assert_eq!(sockets_on_port(table, 4791), [UdpSocket { uid: 0, inode: 4242 }]);
    }
}
