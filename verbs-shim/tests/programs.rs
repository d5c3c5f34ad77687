//! Ordinary programs under the shim: they see the tree, and are otherwise as without it.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::process::{Command, Output};

/// A tree with one device; removed on drop.
struct Tree(PathBuf);

impl Tree {
    fn new(test: &str) -> Self {
        let root = std::env::temp_dir().join(format!("ferroce-shim-test-{test}-{}", std::process::id()));
        let device = root.join("sys/class/infiniband/ferroce_test");
        fs::create_dir_all(device.join("ports/1/gids")).unwrap();
        fs::create_dir_all(device.join("device/net/lo")).unwrap();
        fs::create_dir_all(root.join("sys/class/infiniband_verbs/uverbs0")).unwrap();
        fs::create_dir_all(root.join("dev/infiniband")).unwrap();
        fs::write(root.join("sys/class/infiniband_verbs/abi_version"), "6\n").unwrap();
        fs::write(device.join("node_type"), "1: CA\n").unwrap();
        fs::write(device.join("ports/1/gids/0"), "a gid\n").unwrap();
        symlink("/dev/null", root.join("dev/infiniband/uverbs0")).unwrap();
        symlink(
            "../../infiniband/ferroce_test",
            root.join("sys/class/infiniband_verbs/uverbs0/device"),
        )
        .unwrap();
        Self(root)
    }

    /// Runs a program under the shim.
    fn run<S: AsRef<OsStr>>(&self, program: &str, arguments: &[S]) -> Output {
        let shim = std::env::current_exe()
            .unwrap()
            .with_file_name("libferroce_shim.so");
        assert!(shim.exists(), "{}", shim.display());
        Command::new(program)
            .args(arguments)
            .env("LC_ALL", "C")
            .env("LD_PRELOAD", shim)
            .env("FERROCE_TREE", &self.0)
            .output()
            .unwrap_or_else(|error| panic!("{program}: {error}"))
    }

    /// What it prints; it must say nothing on standard error, and succeed.
    fn prints(&self, program: &str, arguments: &[&str]) -> String {
        let output = self.run(program, arguments);
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(
            output.status.success() && said.is_empty(),
            "{program} {arguments:?}: {} {said}",
            output.status
        );
        String::from_utf8(output.stdout).unwrap()
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).unwrap();
    }
}

#[test]
fn coreutils_see_the_tree() {
    let tree = Tree::new("coreutils");
    assert_eq!(tree.prints("ls", &["/sys/class/infiniband"]), "ferroce_test\n");
    assert_eq!(
        tree.prints("ls", &["/sys/class/infiniband/ferroce_test/device/net/"]),
        "lo\n"
    );
    assert_eq!(
        tree.prints("cat", &["/sys/class/infiniband_verbs/abi_version"]),
        "6\n"
    );
    assert_eq!(
        tree.prints("cat", &["//sys//class/infiniband/ferroce_test/node_type"]),
        "1: CA\n"
    );
    assert_eq!(
        tree.prints(
            "head",
            &["-n1", "/sys/class/infiniband/ferroce_test/ports/1/gids/0"]
        ),
        "a gid\n"
    );
    assert_eq!(
        tree.prints("stat", &["-Lc", "%F %t:%T", "/dev/infiniband/uverbs0"]),
        "character special file 1:3\n"
    );
    assert_eq!(tree.prints("cat", &["/dev/infiniband/uverbs0"]), "");
    assert!(
        tree.prints("ls", &["-laR", "/sys/class/infiniband"])
            .contains("node_type")
    );
    assert!(
        tree.prints("find", &["/sys/class/infiniband_verbs"])
            .contains("uverbs0/device")
    );
    assert!(
        tree.prints("grep", &["-r", "CA", "/sys/class/infiniband"])
            .contains("node_type:1: CA")
    );
    let real = tree.prints("readlink", &["-f", "/sys/class/infiniband_verbs/uverbs0/device"]);
    assert_eq!(real, "/sys/class/infiniband/ferroce_test\n");
    let python = "import ctypes; libc = ctypes.CDLL(None); libc.realpath.restype = ctypes.c_char_p\n\
        print(libc.realpath(b'/sys/class/infiniband_verbs/uverbs0/device', None).decode())";
    let place = fs::canonicalize(&tree.0)
        .unwrap()
        .join("sys/class/infiniband/ferroce_test");
    assert_eq!(
        tree.prints("python3", &["-c", python]).trim(),
        place.to_str().unwrap()
    );
}

#[test]
fn shells_and_their_children_see_the_tree() {
    let tree = Tree::new("shells");
    for shell in ["bash", "sh"] {
        let script = "test -d /sys/class/infiniband && test -c /dev/infiniband/uverbs0 && test -r /dev/infiniband/uverbs0 \
            && cd /sys/class/infiniband/ferroce_test && echo $(cat node_type) /sys/class/infiniband/* \
            && read line </sys/class/infiniband_verbs/abi_version && echo $line && echo x >/dev/infiniband/uverbs0";
        assert_eq!(
            tree.prints(shell, &["-c", script]),
            "1: CA /sys/class/infiniband/ferroce_test\n6\n",
            "{shell}"
        );
    }
    let python = "import os, glob, subprocess\n\
        print(os.listdir('/sys/class/infiniband'), open('/sys/class/infiniband_verbs/abi_version').read().strip())\n\
        print(os.path.exists('/dev/infiniband/uverbs0'), glob.glob('/sys/class/infiniband/*/ports/*'))\n\
        print([entry.name for entry in os.scandir('/sys/class/infiniband')])\n\
        print(subprocess.check_output(['ls', '/sys/class/infiniband'], text=True))";
    assert_eq!(
        tree.prints("python3", &["-c", python]),
        "['ferroce_test'] 6\nTrue ['/sys/class/infiniband/ferroce_test/ports/1']\n['ferroce_test']\nferroce_test\n\n"
    );
}

#[test]
fn programs_with_other_preloads_see_the_tree() {
    let tree = Tree::new("preloads");
    let list = ["ls", "/sys/class/infiniband"];
    let other = "LD_PRELOAD=libm.so.6";
    assert_eq!(
        tree.prints("env", &[&[other][..], &list].concat()),
        "ferroce_test\n"
    );
    let script = format!("{other} {}", list.join(" "));
    assert_eq!(tree.prints("sh", &["-c", &script]), "ferroce_test\n");
    let python = "import os, subprocess\n\
        print(subprocess.check_output(['ls', '/sys/class/infiniband'], env=dict(os.environ, LD_PRELOAD='libm.so.6'), text=True))\n\
        environment = dict(os.environ, LD_PRELOAD='libm.so.6')\n\
        pid = os.posix_spawnp('ls', ['ls', '/sys/class/infiniband'], environment)\n\
        os.waitpid(pid, 0)\n\
        os.environ['LD_PRELOAD'] = 'libm.so.6'\n\
        print(os.environ['LD_PRELOAD'], flush=True)\n\
        os.execvp('sh', ['sh', '-c', 'echo $LD_PRELOAD | grep -c shim.so:libm; ls /sys/class/infiniband'])";
    assert_eq!(
        tree.prints("python3", &["-uc", python]),
        "ferroce_test\n\nferroce_test\nlibm.so.6\n1\nferroce_test\n"
    );
    // Who wants none has none, and a list that has the shim stays as it is.
    let output = tree.prints("env", &["-u", "LD_PRELOAD", "sh", "-c", "echo \"<$LD_PRELOAD>\""]);
    assert_eq!(output, "<>\n");
    let output = tree.prints(
        "sh",
        &["-c", "LD_PRELOAD=$LD_PRELOAD:libm.so.6 sh -c 'echo $LD_PRELOAD'"],
    );
    assert_eq!(output.matches("libferroce_shim.so").count(), 1);
}

#[test]
fn other_paths_and_errors_stay_as_they_are() {
    let tree = Tree::new("others");
    let missing = tree.run("cat", &["/sys/class/infiniband/none", "/no/such/file"]);
    assert_eq!(
        String::from_utf8(missing.stderr).unwrap(),
        "cat: /sys/class/infiniband/none: No such file or directory\ncat: /no/such/file: No such file or directory\n"
    );
    let directory = tree.0.join("work");
    fs::create_dir(&directory).unwrap();
    let script = format!(
        "cd {} && umask 027 && echo data >file && stat -c %a file && cat file && mkdir -p a/b && ls",
        directory.display()
    );
    assert_eq!(tree.prints("sh", &["-c", &script]), "640\ndata\na\nfile\n");
    let long = "x".repeat(3000);
    let output = tree.run("cat", &[format!("/sys/class/infiniband/{long}")]);
    assert!(
        String::from_utf8(output.stderr)
            .unwrap()
            .contains("cat: /sys/class/infiniband/xxx")
    );
    // In a tree that is gone, all is as without the shim.
    let script = "unset FERROCE_TREE; ls /sys/class | head -n1 >/dev/null; ls /sys/class/infiniband_verbs/abi_version >/dev/null && exit 3; exit 0";
    if !PathBuf::from("/sys/class/infiniband_verbs").exists() {
        assert!(tree.run("sh", &["-c", script]).status.success());
    }
}

#[test]
fn only_the_netlink_of_rdma_is_refused() {
    let tree = Tree::new("netlink");
    // As a program that loads libibverbs, and with it libnl, by dlopen: the call itself goes through
    // the global scope, where the shim is first.
    let python = "import ctypes\n\
        nl = ctypes.CDLL('libnl-3.so.200'); hooked = ctypes.CDLL(None).nl_connect\n\
        nl.nl_socket_alloc.restype = ctypes.c_void_p\n\
        connect = lambda protocol: hooked(ctypes.c_void_p(nl.nl_socket_alloc()), protocol)\n\
        print(connect(20), connect(0))";
    assert_eq!(tree.prints("python3", &["-c", python]), "-26 0\n");
}
