//! Which paths are redirected, and to where.

use std::ffi::c_char;
use std::sync::OnceLock;

/// Directories that the tree pictures.
const ROOTS: [&[&[u8]]; 4] = [
    &[b"sys", b"class", b"infiniband"],
    &[b"sys", b"class", b"infiniband_verbs"],
    &[b"dev", b"infiniband"],
    &[b"sys", b"class", b"misc", b"rdma_cm"],
];

/// Longest redirected path, tree and final zero included. Kept small, as a hook may run on the
/// little stack of a signal handler.
const MAX_PATH: usize = 768;

/// The tree's directory, read once when the library is loaded; empty without one.
static TREE: OnceLock<Vec<u8>> = OnceLock::new();

/// The environment variable that names the tree.
pub const TREE_VARIABLE: &[u8] = b"FERROCE_TREE";

/// Reads the environment as the program was started with.
pub fn load_tree() {
    use std::ffi::OsStr;
    use std::os::unix::ffi::{OsStrExt, OsStringExt};
    let tree = std::env::var_os(OsStr::from_bytes(TREE_VARIABLE))
        .map(OsStringExt::into_vec)
        .unwrap_or_default();
    // The second of two loads finds it set already, to the same.
    let _ = TREE.set(if tree.starts_with(b"/") { tree } else { Vec::new() });
}

/// The tree, if there is one.
pub fn tree() -> Option<&'static [u8]> {
    TREE.get().map(Vec::as_slice).filter(|tree| !tree.is_empty())
}

/// True for an absolute path at or below one of the roots. Doubled slashes and `.` count for
/// nothing, as in the kernel; a path with `..` before the root's end is none of ours.
pub fn is_ours(path: &[u8]) -> bool {
    path.first() == Some(&b'/') && ROOTS.iter().any(|root| starts_with(path, root))
}

fn starts_with(path: &[u8], root: &[&[u8]]) -> bool {
    let mut parts = parts(path);
    root.iter().all(|wanted| parts.next() == Some(*wanted))
}

fn parts(path: &[u8]) -> impl Iterator<Item = &[u8]> {
    path.split(|byte| *byte == b'/')
        .filter(|part| !part.is_empty() && *part != b".")
}

/// True for the directory that libibverbs reads to list the devices.
pub fn is_device_list(path: &[u8]) -> bool {
    path.first() == Some(&b'/') && parts(path).eq(ROOTS[1].iter().copied())
}

/// A path in the tree, zero-terminated.
pub struct TreePath([u8; MAX_PATH]);

impl TreePath {
    /// The place of `path` in `tree`; `None` if that is too long.
    pub fn new(tree: &[u8], path: &[u8]) -> Option<Self> {
        let mut bytes = [0; MAX_PATH];
        let (first, rest) = bytes.split_at_mut_checked(tree.len())?;
        first.copy_from_slice(tree);
        let (second, end) = rest.split_at_mut_checked(path.len())?;
        second.copy_from_slice(path);
        (!end.is_empty()).then_some(Self(bytes))
    }

    /// The path as C wants it.
    pub fn as_ptr(&self) -> *const c_char {
        self.0.as_ptr().cast()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_paths_of_verbs_devices_are_ours() {
        for ours in [
            "/sys/class/infiniband",
            "/sys/class/infiniband/",
            "//sys//class/./infiniband/x/ports",
            "/sys/class/infiniband_verbs/abi_version",
            "/dev/infiniband/uverbs0",
            "/dev/infiniband/rdma_cm",
            "/sys/class/misc/rdma_cm/abi_version",
        ] {
            assert!(is_ours(ours.as_bytes()), "{ours}");
        }
        for other in [
            "",
            "/",
            "sys/class/infiniband",
            "/sys/class",
            "/sys/class/infiniband_mad/abi_version",
            "/sys/class/misc",
            "/sys/class/misc/fuse",
            "/sys/class/infiniband2",
            "/sys/../sys/class/infiniband",
            "/dev/infinibandx/uverbs0",
            "/tmp/sys/class/infiniband",
        ] {
            assert!(!is_ours(other.as_bytes()), "{other}");
        }
    }

    #[test]
    fn the_directory_of_the_devices() {
        assert!(is_device_list(b"/sys/class/infiniband_verbs"));
        assert!(is_device_list(b"//sys/class/infiniband_verbs/"));
        assert!(!is_device_list(b"/sys/class/infiniband_verbs/uverbs0"));
        assert!(!is_device_list(b"/sys/class/infiniband"));
        assert!(!is_device_list(b"sys/class/infiniband_verbs"));
    }

    #[test]
    fn tree_path_is_terminated_and_bounded() {
        let path = TreePath::new(b"/run/t", b"/dev/infiniband").unwrap();
        assert!(path.0.starts_with(b"/run/t/dev/infiniband\0"));
        assert!(TreePath::new(&[b'a'; MAX_PATH - 10], &[b'b'; 9]).is_some());
        assert!(TreePath::new(&[b'a'; MAX_PATH - 10], &[b'b'; 10]).is_none());
        assert!(TreePath::new(&[b'a'; MAX_PATH + 1], b"/").is_none());
    }
}
