//! What tests of XDP need: a network namespace, and the privilege to load programs.

use std::process::{Command, Stdio};

/// Set in a test that was started again inside a network namespace of its own.
const INSIDE: &str = "FERROCE_TEST_INSIDE_XDP";

/// True inside a fresh network namespace with `lo` up. Outside it runs the test of that path again in one, asserts that
/// it passes, and gives false. Only root may load programs; for others the test is passed over.
pub fn in_fresh_namespace(test: &str) -> bool {
    if std::env::var_os(INSIDE).is_some() {
        return true;
    }
    if !rustix::process::geteuid().is_root() {
        eprintln!("{test} passed over: not root");
        return false;
    }
    let status = Command::new("unshare")
        .args(["-n", "-p", "-m", "--fork", "--kill-child", "--mount-proc", "--"])
        .args([
            "sh",
            "-c",
            "ip link set lo up && mount -t sysfs sysfs /sys && exec \"$0\" \"$@\"",
        ])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture", "--test-threads=1"])
        .env(INSIDE, "1")
        .stdin(Stdio::null())
        .status()
        .expect("unshare (util-linux) is needed");
    assert!(status.success(), "{test} failed inside its namespace");
    false
}

/// Runs `ip` with these words.
pub fn ip(words: &str) {
    let status = Command::new("ip")
        .args(words.split(' '))
        .status()
        .expect("ip (iproute2) is needed");
    assert!(status.success(), "ip {words}");
}

/// Number of an interface.
pub fn index(name: &str) -> u32 {
    let path = format!("/sys/class/net/{name}/ifindex");
    std::fs::read_to_string(path).unwrap().trim().parse().unwrap()
}
