//! `ferroce run` and the daemon that it starts.

mod common;

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use common::{in_fresh_namespace, ip};

/// A directory with the files of an installation; nothing loads the provider here.
struct Installation(PathBuf);

impl Installation {
    fn new() -> Self {
        // The pid says nothing in a pid namespace; each test has a network namespace of its own.
        let namespace = fs::metadata("/proc/self/ns/net").unwrap().ino();
        let path = std::env::temp_dir().join(format!("ferroce-run-test-{namespace}"));
        fs::create_dir(&path).unwrap();
        fs::write(path.join("libferroce-rdmav34.so"), "").unwrap();
        // A shim that is none: the dynamic linker says so on standard error, and goes on.
        fs::write(path.join("libferroce_shim.so"), "").unwrap();
        Self(path)
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ferroce"));
        command.args(arguments).env("FERROCE_LIBDIR", &self.0);
        command
    }

    fn run(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().unwrap()
    }
}

impl Drop for Installation {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn daemon_runs() -> bool {
    fs::read_to_string("/proc/self/net/unix")
        .unwrap()
        .contains("@ferroced\n")
}

/// Waits for the end of the daemon.
fn await_no_daemon() {
    let start = Instant::now();
    while daemon_runs() {
        assert!(
            start.elapsed() < Duration::from_secs(60),
            "the daemon does not leave"
        );
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn program_gets_its_environment_and_gives_its_status() {
    if !in_fresh_namespace("program_gets_its_environment_and_gives_its_status") {
        return;
    }
    ip("link set lo up");
    let installation = Installation::new();
    let script = "echo $FERROCE_TREE $RDMAV_DRIVERS $LD_PRELOAD; cat $FERROCE_TREE/sys/class/infiniband/ferroce_lo/node_type; exit 42";
    let output = installation
        .command(&["run", "--", "sh", "-c", script])
        .env("RDMAV_DRIVERS", "other")
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(42), "{}", text(&output.stderr));
    let directory = installation.0.display();
    let printed = text(&output.stdout);
    let (tree, rest) = printed.split_once(' ').unwrap();
    assert_eq!(
        rest,
        format!("{directory}/libferroce:other {directory}/libferroce_shim.so\n1: CA\n")
    );
    assert_eq!(
        installation
            .run(&["run", "sh", "-c", "kill -9 $$"])
            .status
            .signal(),
        Some(9)
    );
    let missing = installation.run(&["run", "--", "/no/such/program"]);
    assert_eq!(missing.status.code(), Some(127));
    assert!(
        text(&missing.stderr)
            .ends_with("ferroce: can't run `/no/such/program`: no such program, or no interpreter for it: install it, or give its path\n")
    );
    assert_eq!(installation.run(&["run", "/"]).status.code(), Some(126));
    await_no_daemon();
    assert!(!PathBuf::from(tree).exists());
}

#[test]
fn daemon_stays_for_a_program_that_opens_no_device() {
    if !in_fresh_namespace("daemon_stays_for_a_program_that_opens_no_device") {
        return;
    }
    ip("link set lo up");
    let installation = Installation::new();
    let output = installation.run(&[
        "run",
        "sh",
        "-c",
        "sleep 6; cat $FERROCE_TREE/sys/class/infiniband_verbs/abi_version",
    ]);
    assert_eq!(text(&output.stdout), "6\n");
    await_no_daemon();
}

#[test]
fn many_runs_at_once_share_one_daemon() {
    if !in_fresh_namespace("many_runs_at_once_share_one_daemon") {
        return;
    }
    ip("link set lo up");
    let installation = Installation::new();
    let runs: Vec<_> = (0..16)
        .map(|_| {
            installation
                .command(&["run", "sh", "-c", "exit 7"])
                .stderr(Stdio::piped())
                .spawn()
                .unwrap()
        })
        .collect();
    for run in runs {
        let output = run.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(7), "{}", text(&output.stderr));
    }
    let mine = fs::read_link("/proc/self/ns/net").unwrap();
    let daemons = fs::read_dir("/proc").unwrap().flatten().filter(|entry| {
        fs::read_to_string(entry.path().join("comm")).is_ok_and(|name| name == "ferroced\n")
            && fs::read_link(entry.path().join("ns/net")).is_ok_and(|other| other == mine)
    });
    assert_eq!(daemons.count(), 1);
    await_no_daemon();
}

#[test]
fn links_are_added_and_removed_and_keep_the_daemon() {
    if !in_fresh_namespace("links_are_added_and_removed_and_keep_the_daemon") {
        return;
    }
    ip("link add bare type veth peer name other");
    let installation = Installation::new();
    let link = |arguments: &[&str]| {
        let output = installation.run(arguments);
        (
            output.status.success(),
            text(&output.stdout) + &text(&output.stderr),
        )
    };
    assert_eq!(
        link(&["link", "add", "rdma0", "netdev", "bare"]),
        (true, String::new())
    );
    let (_, shown) = link(&["link"]);
    assert!(
        shown.starts_with("link rdma0/1 state DOWN physical_state DISABLED netdev bare "),
        "{shown}"
    );
    ip("address add 10.4.0.1/24 dev bare");
    ip("link set bare up");
    ip("link set other up");
    // The daemon serves in order: it has read the notices of the kernel that came before.
    let start = Instant::now();
    while !link(&["link", "show", "rdma0", "--json"])
        .1
        .contains("\"address\":\"10.4.0.1\"")
    {
        assert!(start.elapsed() < Duration::from_secs(10));
    }
    let (ok, said) = link(&["link", "add", "rdma1", "netdev", "bare"]);
    assert!(
        !ok && said.contains("device `rdma0` exists already on interface bare"),
        "{said}"
    );
    let (ok, said) = link(&["link", "add", "rdma1", "netdev", "nope"]);
    assert!(
        !ok && said.contains("`nope`") && said.lines().count() == 1,
        "{said}"
    );
    assert_eq!(link(&["link", "del", "rdma0"]), (true, String::new()));
    let (ok, said) = link(&["link", "del", "rdma0"]);
    assert!(!ok && said.contains("no device `rdma0`"), "{said}");
    let (ok, said) = link(&["link"]);
    assert!(ok && said.starts_with("ferroce: no device"), "{said}");
    let (ok, said) = link(&["link", "show", "rdma0"]);
    assert!(!ok && said.contains("no device `rdma0`"), "{said}");
    // The interface has an address, so that no device on it is the user's wish, and kept.
    assert_eq!(
        link(&["link", "add", "ferroce_bare", "netdev", "bare"]),
        (true, String::new())
    );
    let status = text(&installation.run(&["status", "--json"]).stdout);
    let pid = status
        .split("\"pid\":")
        .nth(1)
        .unwrap()
        .split(',')
        .next()
        .unwrap()
        .parse()
        .unwrap();
    let pid = rustix::process::Pid::from_raw(pid).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    await_no_daemon();
    assert!(!installation.run(&["status"]).status.success());
}

#[test]
fn failures_of_the_daemon_are_one_line() {
    if !in_fresh_namespace("failures_of_the_daemon_are_one_line") {
        return;
    }
    ip("link set lo up");
    let installation = Installation::new();
    let taken = std::net::UdpSocket::bind("0.0.0.0:4791").unwrap();
    let output = installation.run(&["run", "true"]);
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        said.contains("UDP port 4791 is taken by run-") && said.lines().count() == 1,
        "{said}"
    );
    drop(taken);
    let empty = installation.0.join("empty");
    fs::create_dir(&empty).unwrap();
    let output = installation
        .command(&["run", "true"])
        .env("FERROCE_LIBDIR", &empty)
        .output()
        .unwrap();
    assert!(text(&output.stderr).contains("path shim") && !output.status.success());
    assert!(!daemon_runs());
}
