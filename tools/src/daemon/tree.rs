//! The directory that pictures sysfs and `/dev`, kept up to date for the path shim.
//!
//! Each file changes at once (written elsewhere, then renamed), and the directory of a device is
//! never touched while the device lives: libibverbs takes its mtime for the device's identity.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, symlink};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use ferroce_engine::control::DeviceInfo;
use rustix::fs::{FlockOperation, flock};
use tracing::{debug, warn};

use super::picture::{self, Node, Picture};

/// Where a file is written before it is renamed to its place.
const STAGING: &str = ".staging";
/// Locked by the daemon as long as it lives.
const LOCK: &str = ".lock";

/// More than a daemon needs from making its tree to locking it.
const START_TIME: Duration = Duration::from_secs(60);
/// More than a daemon needs to take a dead one's tree out of the way.
const SWEEP_TIME: Duration = Duration::from_secs(2);
/// The directories that a tree pictures.
const PICTURED: [&str; 3] = [
    "sys/class/infiniband",
    "sys/class/infiniband_verbs",
    "dev/infiniband",
];

/// The tree of a running daemon; removed on drop.
pub struct Tree {
    root: PathBuf,
    lock: File,
    pictures: BTreeMap<String, Picture>,
}

impl Tree {
    /// Makes the tree of this network namespace, in place of one that a killed daemon left.
    /// It lies below `/run/ferroce` for root, else in the user's runtime directory, else in `/tmp`;
    /// `shared` says that other users must be able to read it.
    pub fn create(netns: u64, shared: bool) -> io::Result<Self> {
        let mut failure = io::Error::from(io::ErrorKind::NotFound);
        for (parent, prefix) in places(shared) {
            match Self::create_in(&parent, &prefix, netns) {
                Ok(tree) => return Ok(tree),
                Err(error) => {
                    failure = io::Error::new(error.kind(), format!("{}: {error}", parent.display()))
                }
            }
        }
        Err(failure)
    }

    fn create_in(parent: &Path, prefix: &str, netns: u64) -> io::Result<Self> {
        let root = parent.join(format!("{prefix}{netns}"));
        let deadline = Instant::now() + SWEEP_TIME;
        loop {
            sweep(parent, prefix);
            match Self::make_root(&root) {
                Ok(lock) => {
                    return Ok(Self {
                        root,
                        lock,
                        pictures: BTreeMap::new(),
                    });
                }
                // Another daemon is about to remove what was there.
                Err(error)
                    if error.kind() == io::ErrorKind::DirectoryNotEmpty && Instant::now() < deadline =>
                {
                    std::thread::yield_now();
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Makes the tree without devices; gives its lock.
    fn make_root(root: &Path) -> io::Result<File> {
        let fresh = root.with_extension(std::process::id().to_string());
        // It must not be there yet: in /tmp anyone may have made it.
        DirBuilder::new().mode(0o755).create(&fresh)?;
        Self::fill(&fresh)
            .and_then(|lock| fs::rename(&fresh, root).map(|()| lock))
            .inspect_err(|_| remove(&fresh))
    }

    /// Makes the tree again if someone has removed it, as those do who clean `/tmp` of what is old.
    pub fn restore<'a>(&mut self, devices: impl Iterator<Item = &'a DeviceInfo>) -> io::Result<()> {
        if is_lock_of(&self.lock, &self.root) {
            return Ok(());
        }
        warn!(root = %self.root.display(), "the device tree was removed, and is made again");
        remove_tree(&self.root);
        if let Some(parent) = self.root.parent() {
            DirBuilder::new().recursive(true).mode(0o755).create(parent)?;
        }
        self.lock = Self::make_root(&self.root)?;
        self.pictures.clear();
        for info in devices {
            self.add(info)?;
        }
        Ok(())
    }

    fn fill(root: &Path) -> io::Result<File> {
        // Nobody is to see it unlocked.
        let unlocked = root.join(".lock.new");
        let lock = File::create(&unlocked)?;
        flock(&lock, FlockOperation::NonBlockingLockExclusive)?;
        fs::rename(unlocked, root.join(LOCK))?;
        for directory in [
            "sys/class/infiniband",
            "sys/class/infiniband_verbs",
            "dev/infiniband",
            STAGING,
        ] {
            fs::create_dir_all(root.join(directory))?;
        }
        fs::write(
            root.join("sys/class/infiniband_verbs/abi_version"),
            picture::VERBS_ABI,
        )?;
        for (path, node) in &picture::connection_manager() {
            make(&root.join(path), node)?;
        }
        Ok(lock)
    }

    /// The directory.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Shows a new device.
    pub fn add(&mut self, info: &DeviceInfo) -> io::Result<()> {
        let picture = picture::picture(info);
        let staging = self.root.join(STAGING).join(&info.name);
        for (path, node) in &picture {
            make(&staging.join(path), node)?;
        }
        // A program looks for `uverbsN` first, so that comes last.
        for part in parts(info) {
            fs::rename(staging.join(&part), self.root.join(&part))?;
        }
        remove(&staging);
        self.pictures.insert(info.name.clone(), picture);
        Ok(())
    }

    /// Shows a device as it is now.
    pub fn change(&mut self, info: &DeviceInfo) -> io::Result<()> {
        let picture = picture::picture(info);
        let before = self
            .pictures
            .insert(info.name.clone(), picture.clone())
            .unwrap_or_default();
        for (path, node) in picture
            .iter()
            .filter(|(path, node)| before.get(*path) != Some(*node))
        {
            let (staged, place) = (self.root.join(STAGING).join("node"), self.root.join(path));
            make(&staged, node)?;
            create_parent(&place)?;
            fs::rename(&staged, &place)?;
        }
        for path in before.keys().filter(|path| !picture.contains_key(*path)) {
            let place = self.root.join(path);
            fs::remove_file(&place)?;
            // The directory of an interface that was renamed goes with its last file.
            if let Some(parent) = place.parent()
                && fs::read_dir(parent)?.next().is_none()
                && parent.parent().and_then(Path::file_name) == Some(OsStr::new("net"))
            {
                fs::remove_dir(parent)?;
            }
        }
        Ok(())
    }

    /// Shows a device no more.
    pub fn remove(&mut self, info: &DeviceInfo) -> io::Result<()> {
        self.pictures.remove(&info.name);
        let grave = self.root.join(STAGING).join("removed");
        for part in parts(info).iter().rev() {
            fs::rename(self.root.join(part), &grave)?;
            remove(&grave);
        }
        Ok(())
    }
}

impl Tree {
    /// Shows what the kernel itself has (`/` is the root of its sysfs and `/dev`) as links beside
    /// our devices, and what it has no more, no more. Where a name is ours, ours is shown.
    pub fn mirror_kernel(&self, root: &Path) -> io::Result<()> {
        for directory in PICTURED {
            let (ours, real) = (self.root.join(directory), root.join(directory));
            for entry in fs::read_dir(&ours)? {
                let path = entry?.path();
                if fs::read_link(&path).is_ok_and(|target| target.starts_with(&real) && !exists(&target)) {
                    fs::remove_file(&path)?;
                }
            }
            // Most hosts have none of these directories.
            for entry in fs::read_dir(&real).into_iter().flatten() {
                let name = entry?.file_name();
                if !exists(&ours.join(&name)) {
                    symlink(real.join(&name), ours.join(&name))?;
                }
            }
        }
        Ok(())
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        remove_tree(&self.root);
        // `/run/ferroce` goes with its last tree; while another is in it, this fails.
        if self
            .root
            .parent()
            .is_some_and(|parent| parent.ends_with("run/ferroce"))
        {
            let _ = self.root.parent().map(fs::remove_dir);
        }
    }
}

/// Parents of trees in the order of preference, with the first part of a tree's name.
fn places(shared: bool) -> Vec<(PathBuf, String)> {
    let uid = rustix::process::geteuid();
    let mut places = Vec::new();
    if uid.is_root()
        && DirBuilder::new()
            .recursive(true)
            .mode(0o755)
            .create("/run/ferroce")
            .is_ok()
    {
        places.push((PathBuf::from("/run/ferroce"), String::new()));
    }
    if let Some(runtime) =
        std::env::var_os("XDG_RUNTIME_DIR").filter(|it| !shared && Path::new(it).is_absolute())
    {
        places.push((PathBuf::from(runtime), "ferroce-".to_owned()));
    }
    places.push((PathBuf::from("/tmp"), format!("ferroce-{}-", uid.as_raw())));
    places
}

/// Removes our trees whose daemon is dead, of this network namespace or another.
fn sweep(parent: &Path, prefix: &str) {
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let ours = name
            .to_str()
            .and_then(|name| name.strip_prefix(prefix))
            .is_some_and(|rest| {
                !rest.is_empty() && rest.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.')
            });
        let path = entry.path();
        if ours && is_own_directory(&path) {
            bury(&path);
        }
    }
}

/// Removes a tree if its daemon is dead.
///
/// It is renamed first, under its lock: another daemon, which finds the same, may have its own tree there soon.
fn bury(tree: &Path) {
    let lock = File::open(tree.join(LOCK));
    let dead = match &lock {
        Ok(lock) => flock(lock, FlockOperation::NonBlockingLockExclusive).is_ok() && is_lock_of(lock, tree),
        // Its daemon is just starting, or was killed at the very start or end.
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let age = |tree: &Path| fs::metadata(tree).ok()?.modified().ok()?.elapsed().ok();
            age(tree).is_some_and(|age| age > START_TIME)
        }
        Err(_) => false,
    };
    if !dead {
        return;
    }
    let mut grave = tree.as_os_str().to_owned();
    grave.push(format!(".0.{}", std::process::id()));
    let grave = PathBuf::from(grave);
    if fs::rename(tree, &grave).is_ok() {
        debug!(tree = %tree.display(), "tree of a dead daemon removed");
        remove_tree(&grave);
    }
}

/// Whether the open file is the lock that lies in the tree now.
fn is_lock_of(lock: &File, tree: &Path) -> bool {
    let identity = |found: fs::Metadata| (found.dev(), found.ino());
    let found = fs::metadata(tree.join(LOCK)).map(identity).ok();
    found.is_some() && found == lock.metadata().map(identity).ok()
}

fn is_own_directory(path: &Path) -> bool {
    fs::symlink_metadata(path)
        .is_ok_and(|metadata| metadata.is_dir() && metadata.uid() == rustix::process::geteuid().as_raw())
}

/// Removes a tree, the lock last: what a daemon killed meanwhile leaves is still known as dead.
fn remove_tree(root: &Path) {
    for entry in fs::read_dir(root).into_iter().flatten().flatten() {
        if entry.file_name() != LOCK {
            remove(&entry.path());
        }
    }
    remove(root);
}

/// What of a device is renamed into its place, in order.
fn parts(info: &DeviceInfo) -> [String; 3] {
    [
        picture::device_directory(info),
        picture::device_file(info),
        picture::verbs_directory(info),
    ]
}

fn make(path: &Path, node: &Node) -> io::Result<()> {
    create_parent(path)?;
    match node {
        Node::File(text) => fs::write(path, text),
        Node::Link(target) => symlink(target, path),
    }
}

fn create_parent(path: &Path) -> io::Result<()> {
    path.parent().map_or(Ok(()), fs::create_dir_all)
}

/// True if there is anything of that name, be it a link to nowhere.
fn exists(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok()
}

/// Removes a file or directory if it is there.
fn remove(path: &Path) {
    let removed = match fs::symlink_metadata(path) {
        Ok(metadata) if metadata.is_dir() => fs::remove_dir_all(path),
        Ok(_) => fs::remove_file(path),
        Err(_) => return,
    };
    if let Err(error) = removed {
        warn!(path = %path.display(), %error, "can't be removed");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::daemon::picture::tests::device;

    /// A parent directory for trees, removed on drop.
    struct Parent(PathBuf);

    impl Parent {
        fn new(test: &str) -> Self {
            let path = std::env::temp_dir().join(format!("ferroce-tree-test-{test}-{}", std::process::id()));
            fs::create_dir(&path).unwrap();
            Self(path)
        }
    }

    impl Drop for Parent {
        fn drop(&mut self) {
            remove(&self.0);
        }
    }

    #[test]
    fn device_keeps_its_identity_while_it_changes() {
        let parent = Parent::new("identity");
        let mut tree = Tree::create_in(&parent.0, "t-", 7).unwrap();
        let mut info = device(&["10.0.0.1"]);
        tree.add(&info).unwrap();
        let directory = tree.root().join("sys/class/infiniband/ferroce_eth0");
        let identity = |path: &Path| {
            let metadata = fs::metadata(path).unwrap();
            (metadata.ino(), metadata.mtime(), metadata.mtime_nsec())
        };
        let before = identity(&directory);
        info.netdev = "wan".into();
        info.up = false;
        info.gids = device(&["hole", "10.0.0.2"]).gids;
        tree.change(&info).unwrap();
        assert_eq!(identity(&directory), before);
        let read = |path: &str| fs::read_to_string(directory.join(path)).unwrap();
        assert_eq!(read("ports/1/state"), "1: DOWN\n");
        assert_eq!(
            read("ports/1/gids/1"),
            "0000:0000:0000:0000:0000:ffff:0a00:0002\n"
        );
        assert_eq!(
            read("ports/1/gids/0"),
            "0000:0000:0000:0000:0000:0000:0000:0000\n"
        );
        assert!(!directory.join("ports/1/gid_attrs/ndevs/0").exists());
        let netdevs: Vec<_> = fs::read_dir(directory.join("device/net"))
            .unwrap()
            .flatten()
            .collect();
        assert_eq!(netdevs.len(), 1);
        assert_eq!(netdevs[0].file_name(), "wan");
        info.gids.clear();
        tree.change(&info).unwrap();
        assert!(
            directory.join("ports/1/gid_attrs/ndevs").is_dir(),
            "an empty table keeps its directory"
        );
        let through = tree
            .root()
            .join("sys/class/infiniband_verbs/uverbs3/device/numa_node");
        assert_eq!(fs::read_to_string(through).unwrap(), "-1\n");
        tree.remove(&info).unwrap();
        // RDMA CM's device file is there whatever devices there are.
        for (directory, left) in [("sys/class/infiniband", 0), ("dev/infiniband", 1), (STAGING, 0)] {
            assert_eq!(
                fs::read_dir(tree.root().join(directory)).unwrap().count(),
                left,
                "{directory}"
            );
        }
        let root = tree.root().to_owned();
        drop(tree);
        assert!(!root.exists());
    }

    #[test]
    fn a_tree_that_someone_removed_is_made_again() {
        let parent = Parent::new("restored");
        let run = parent.0.join("run");
        fs::create_dir(&run).unwrap();
        let mut tree = Tree::create_in(&run, "t-", 8).unwrap();
        let info = device(&["10.0.0.1"]);
        tree.add(&info).unwrap();
        let shown = tree
            .root()
            .join("sys/class/infiniband/ferroce_eth0/ports/1/gids/0");
        let before = fs::metadata(&shown).unwrap().ino();
        tree.restore([&info].into_iter()).unwrap();
        assert_eq!(fs::metadata(&shown).unwrap().ino(), before, "nothing was to do");
        fs::remove_dir_all(&run).unwrap();
        tree.restore([&info].into_iter()).unwrap();
        assert!(shown.exists());
        sweep(&run, "t-");
        assert!(shown.exists(), "it is locked");
        tree.remove(&info).unwrap();
    }

    #[test]
    fn daemons_that_find_the_same_dead_tree_keep_their_own() {
        let parent = Parent::new("race");
        for _ in 0..50 {
            let dead = Tree::create_in(&parent.0, "t-", 5).unwrap();
            flock(&dead.lock, FlockOperation::Unlock).unwrap();
            std::mem::forget(dead);
            let tree = std::thread::scope(|scope| {
                scope.spawn(|| sweep(&parent.0, "t-"));
                scope.spawn(|| sweep(&parent.0, "t-"));
                Tree::create_in(&parent.0, "t-", 5).unwrap()
            });
            assert!(is_lock_of(&tree.lock, tree.root()));
            for directory in PICTURED {
                assert!(tree.root().join(directory).is_dir(), "{directory}");
            }
        }
    }

    #[test]
    fn devices_of_the_kernel_are_shown_beside_ours() {
        let parent = Parent::new("kernel");
        let kernel = parent.0.join("kernel");
        fs::create_dir_all(kernel.join("sys/class/infiniband/mlx5_0")).unwrap();
        fs::create_dir_all(kernel.join("sys/class/infiniband_verbs/uverbs0")).unwrap();
        fs::write(kernel.join("sys/class/infiniband_verbs/abi_version"), "5\n").unwrap();
        let mut tree = Tree::create_in(&parent.0, "t-", 9).unwrap();
        tree.add(&device(&["10.0.0.1"])).unwrap();
        tree.mirror_kernel(&kernel).unwrap();
        let shown = |directory: &str| {
            let entries = fs::read_dir(tree.root().join(directory)).unwrap();
            let mut names: Vec<_> = entries
                .map(|it| it.unwrap().file_name().into_string().unwrap())
                .collect();
            names.sort();
            names
        };
        assert_eq!(shown("sys/class/infiniband"), ["ferroce_eth0", "mlx5_0"]);
        assert_eq!(
            shown("sys/class/infiniband_verbs"),
            ["abi_version", "uverbs0", "uverbs3"]
        );
        let version = tree.root().join("sys/class/infiniband_verbs/abi_version");
        assert_eq!(fs::read_to_string(version).unwrap(), picture::VERBS_ABI);
        fs::remove_dir(kernel.join("sys/class/infiniband/mlx5_0")).unwrap();
        tree.mirror_kernel(&kernel).unwrap();
        assert_eq!(shown("sys/class/infiniband"), ["ferroce_eth0"]);
    }

    #[test]
    fn tree_of_a_dead_daemon_is_replaced_and_that_of_a_living_one_kept() {
        let parent = Parent::new("stale");
        let living = Tree::create_in(&parent.0, "t-", 1).unwrap();
        let mut dead = Tree::create_in(&parent.0, "t-", 2).unwrap();
        dead.add(&device(&["10.0.0.1"])).unwrap();
        // As SIGKILL leaves it: the lock is open no more, the files stay.
        let Tree {
            root, lock: _lock, ..
        } = &dead;
        flock(_lock, FlockOperation::Unlock).unwrap();
        let root = root.clone();
        std::mem::forget(dead);
        let successor = Tree::create_in(&parent.0, "t-", 3).unwrap();
        assert!(!root.exists());
        assert!(living.root().exists());
        assert!(successor.root().exists());
        assert_eq!(fs::read_dir(&parent.0).unwrap().count(), 2);
    }
}
