//! Who has the RoCE port, for the message that it is taken.

use std::fs;
use std::path::Path;

use super::sockets::ROCE_PORT;

/// Names the program that has UDP port 4791 in this network namespace, as far as `/proc` tells.
pub fn owner_of_roce_port() -> String {
    let inodes: Vec<String> = ["/proc/net/udp", "/proc/net/udp6"]
        .iter()
        .filter_map(|table| fs::read_to_string(table).ok())
        .flat_map(|table| inodes_on_port(&table, ROCE_PORT))
        .collect();
    // Sockets of the kernel itself are in no table of a process.
    if inodes.iter().all(|inode| inode == "0") && Path::new("/sys/module/rdma_rxe").exists() {
        return "the kernel's Soft-RoCE (rdma_rxe)".to_owned();
    }
    let processes = fs::read_dir("/proc")
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| {
            let pid: u32 = entry.file_name().to_str()?.parse().ok()?;
            holds_socket(pid, &inodes).then(|| format!("{} (pid {pid})", command_name(pid)))
        });
    processes
        .into_iter()
        .next()
        .unwrap_or_else(|| "another program".to_owned())
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

/// Inodes of the sockets on a local port, from a table in the format of `/proc/net/udp`.
fn inodes_on_port(table: &str, port: u16) -> Vec<String> {
    let suffix = format!(":{port:04X}");
    let inode = |line: &str| {
        let mut fields = line.split_whitespace();
        let local = fields.nth(1)?;
        local
            .ends_with(&suffix)
            .then(|| fields.nth(7).map(str::to_owned))?
    };
    table.lines().skip(1).filter_map(inode).collect()
}

fn holds_socket(pid: u32, inodes: &[String]) -> bool {
    let links = fs::read_dir(format!("/proc/{pid}/fd"))
        .into_iter()
        .flatten()
        .flatten();
    links
        .filter_map(|entry| fs::read_link(entry.path()).ok())
        .any(|target| {
            let target = target.to_string_lossy();
            let inode = target
                .strip_prefix("socket:[")
                .and_then(|rest| rest.strip_suffix(']'));
            inode.is_some_and(|inode| inodes.iter().any(|wanted| wanted == inode))
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
        assert_eq!(inodes_on_port(table, 4791), ["4242"]);
    }
}
