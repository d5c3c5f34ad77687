//! What the tests of the tools share: a fresh network namespace, a daemon in it, helper processes.

#![allow(dead_code, reason = "each test file uses its own part")]

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use ferroce_engine::control::{Client, ControlError, Event, Lease, Report};
use rustix::event::{PollFd, PollFlags, poll};

/// Set in a test that was started again inside a namespace of its own.
const INSIDE: &str = "FERROCE_TEST_INSIDE";
/// Set in a test binary that is to hold a lease of the device named.
const HOLD: &str = "FERROCE_TEST_HOLD";

/// True inside a fresh network (and user) namespace with `lo` up. Outside it runs the test of that
/// name again in one, asserts that it passes, and gives false.
pub fn in_fresh_namespace(test: &str) -> bool {
    if std::env::var_os(INSIDE).is_some() {
        return true;
    }
    let status = Command::new("unshare")
        // A pid namespace as well: whatever a test leaves ends with it.
        .args([
            "-r",
            "-n",
            "-p",
            "-m",
            "--fork",
            "--kill-child",
            "--mount-proc",
            "--",
        ])
        // Trees are made below /run, and one of a killed daemon is to go with it.
        .args(["sh", "-c", "mount -t tmpfs tmpfs /run && exec \"$0\" \"$@\""])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture", "--test-threads=1"])
        .env(INSIDE, "1")
        .env_remove("XDG_RUNTIME_DIR")
        .status()
        .expect("unshare (util-linux) is needed");
    assert!(status.success(), "{test} failed inside its namespace");
    false
}

/// As [`in_fresh_namespace`], but with the privilege of the host's root, which XDP programs take. Without it the test is
/// skipped, and says so.
pub fn in_fresh_namespace_of_root(test: &str) -> bool {
    if std::env::var_os(INSIDE).is_some() {
        return true;
    }
    if !rustix::process::geteuid().is_root() || !may_use_bpf() {
        eprintln!("SKIPPED {test}: XDP takes root's privilege on the host");
        return false;
    }
    let status = Command::new("unshare")
        .args(["-n", "-p", "-m", "--fork", "--kill-child", "--mount-proc", "--"])
        // Of sysfs, the part that is of the network namespace.
        .args([
            "sh",
            "-c",
            "mount -t tmpfs -o mode=755 tmpfs /run && mount -t sysfs sysfs /sys && exec \"$0\" \"$@\"",
        ])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture", "--test-threads=1"])
        .env(INSIDE, "1")
        .env_remove("XDG_RUNTIME_DIR")
        .status()
        .expect("unshare (util-linux) is needed");
    assert!(status.success(), "{test} failed inside its namespace");
    false
}

/// Whether this process may load programs into the kernel: in a container root often may not.
fn may_use_bpf() -> bool {
    const CAP_NET_ADMIN: u32 = 12;
    const CAP_BPF: u32 = 39;
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let effective = status
        .lines()
        .find_map(|line| u64::from_str_radix(line.strip_prefix("CapEff:")?.trim(), 16).ok());
    let user_namespace = std::fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    let is_of_the_host = user_namespace.split_whitespace().eq(["0", "0", "4294967295"]);
    is_of_the_host
        && effective.is_some_and(|all| [CAP_NET_ADMIN, CAP_BPF].iter().all(|one| all >> one & 1 == 1))
}

/// Waits until it is true.
pub fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(
            start.elapsed() < Duration::from_secs(60),
            "not so within 60 s: {what}"
        );
    }
}

/// Runs `ip` with these words.
pub fn ip(words: &str) {
    let status = Command::new("ip")
        .args(words.split(' '))
        .status()
        .expect("ip (iproute2) is needed");
    assert!(status.success(), "ip {words}");
}

/// A running `ferroced`, ended on drop.
pub struct Daemon(pub Child);

impl Daemon {
    /// Starts one with `lo` up, and waits until it answers.
    pub fn start(arguments: &[&str]) -> Self {
        ip("link set lo up");
        let mut daemon = Self::spawn(arguments);
        daemon.wait_until_it_answers();
        daemon
    }

    /// Starts one.
    pub fn spawn(arguments: &[&str]) -> Self {
        Self(
            Command::new(env!("CARGO_BIN_EXE_ferroced"))
                .args(arguments)
                .spawn()
                .unwrap(),
        )
    }

    /// Ends it by SIGKILL.
    pub fn kill(mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }

    fn wait_until_it_answers(&mut self) {
        loop {
            match Client::connect() {
                Ok(_) => return,
                Err(ControlError::NoDaemon | ControlError::Silent) => {
                    assert!(
                        self.0.try_wait().unwrap().is_none(),
                        "ferroced ended at its start"
                    );
                    std::thread::yield_now();
                }
                Err(error) => panic!("{error}"),
            }
        }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let pid = rustix::process::Pid::from_child(&self.0);
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        let _ = self.0.wait();
    }
}

/// Another process that holds a lease.
pub struct Holder {
    /// The process.
    pub child: Child,
    /// Its slot.
    pub slot: u8,
    stdin: Option<ChildStdin>,
    stdout: BufReader<ChildStdout>,
}

impl Holder {
    /// Starts it; the test binary must have a test `holder` that calls [`hold`].
    pub fn start(device: &str) -> Self {
        Self::spawn(device, &mut Command::new(std::env::current_exe().unwrap()))
    }

    /// Starts it as an ordinary user of that id, in the group of that id.
    pub fn start_as(device: &str, id: u32) -> Self {
        // Where others may read it.
        let program = format!("/run/holder-{id}");
        if !std::path::Path::new(&program).exists() {
            std::fs::copy(std::env::current_exe().unwrap(), &program).unwrap();
        }
        Self::spawn(device, Command::new(program).current_dir("/").uid(id).gid(id))
    }

    fn spawn(device: &str, command: &mut Command) -> Self {
        let mut child = command
            .args(["--exact", "holder", "--nocapture"])
            .env(HOLD, device)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        let slot = stdout
            .by_ref()
            .lines()
            .map_while(Result::ok)
            .find_map(|line| line.strip_prefix("slot ")?.parse().ok());
        Self {
            slot: slot.expect("the holder gets a lease"),
            stdin: child.stdin.take(),
            stdout,
            child,
        }
    }

    /// Ends it by SIGKILL.
    pub fn kill(self) {
        drop(self);
    }

    /// Lets it end by itself.
    pub fn finish(mut self) {
        drop(self.stdin.take());
        std::io::copy(&mut self.stdout, &mut std::io::sink()).unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The body of a [`Holder`]: holds a lease until its standard input ends. No test by itself.
pub fn hold() {
    let Some(device) = std::env::var_os(HOLD) else {
        return;
    };
    let lease = Lease::acquire(device.to_str().unwrap()).unwrap();
    println!("\nslot {}", lease.slot());
    std::io::stdout().flush().unwrap();
    loop {
        let (stdin, control) = (std::io::stdin(), lease.control_fd());
        let mut fds = [
            PollFd::new(&stdin, PollFlags::IN),
            PollFd::new(&control, PollFlags::IN),
        ];
        poll(&mut fds, None).unwrap();
        if !fds[0].revents().is_empty() {
            return;
        }
        while let Some(event) = lease.receive().unwrap() {
            if let Event::ReportWanted(id) = event {
                let report = Report {
                    qps: Vec::new(),
                    counters: vec![("tests".to_owned(), 1)],
                };
                lease.report(id, report).unwrap();
            }
        }
    }
}
