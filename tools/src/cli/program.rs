//! What a program is, as far as it decides whether the program can find the devices.

use std::ffi::OsStr;
use std::fs::{File, Metadata};
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::process::{getegid, geteuid};

/// How much of a file is looked at for its program headers, which follow the ELF header in every program there is.
const HEADERS: u64 = 4096;
const SET_USER_ID: u32 = 0o4000;
const SET_GROUP_ID: u32 = 0o2000;
/// `PT_INTERP`: the segment that names the dynamic linker.
const INTERPRETER: u32 = 3;

/// Why a program will not find the devices, though those that it starts may: the dynamic linker does not preload the
/// path shim for it.
pub fn obstacle(program: &OsStr) -> Option<&'static str> {
    let path = find(program)?;
    let mut file = File::open(&path).ok()?;
    let metadata = file.metadata().ok()?;
    let mut head = Vec::new();
    file.by_ref().take(HEADERS).read_to_end(&mut head).ok()?;
    if is_static(&head)? {
        Some("is statically linked")
    } else if raises_rights(&metadata) {
        Some("is set-user-id or set-group-id")
    } else if !geteuid().is_root() && has_capabilities(&path) {
        Some("carries file capabilities")
    } else {
        None
    }
}

/// The file that is executed: as `execvp` looks for it.
fn find(program: &OsStr) -> Option<PathBuf> {
    if program.as_bytes().contains(&b'/') {
        return Some(program.into());
    }
    let directories = std::env::var_os("PATH")?;
    std::env::split_paths(&directories)
        .map(|directory| directory.join(program))
        .find(|path| {
            path.metadata()
                .is_ok_and(|it| it.is_file() && it.permissions().mode() & 0o111 != 0)
        })
}

/// Whether a 64-bit ELF program, of which this is the beginning, has no dynamic linker; `None` if it is none.
fn is_static(head: &[u8]) -> Option<bool> {
    let bytes = |at: usize, len: usize| head.get(at..at.checked_add(len)?);
    let half = |at| Some(u16::from_le_bytes(bytes(at, 2)?.try_into().ok()?));
    let word = |at| Some(u32::from_le_bytes(bytes(at, 4)?.try_into().ok()?));
    let long = |at| Some(u64::from_le_bytes(bytes(at, 8)?.try_into().ok()?));
    // Magic, 64-bit, little-endian.
    if !head.starts_with(b"\x7fELF\x02\x01") {
        return None;
    }
    let (first, size, count) = (long(32)?, half(54)?, half(56)?);
    for index in 0..count {
        let at = usize::try_from(first)
            .ok()?
            .checked_add(usize::from(index) * usize::from(size))?;
        if word(at)? == INTERPRETER {
            return Some(false);
        }
    }
    Some(true)
}

fn raises_rights(metadata: &Metadata) -> bool {
    let mode = metadata.mode();
    mode & SET_USER_ID != 0 && metadata.uid() != geteuid().as_raw()
        || mode & SET_GROUP_ID != 0 && metadata.gid() != getegid().as_raw()
}

fn has_capabilities(path: &Path) -> bool {
    rustix::fs::getxattr(path, "security.capability", &mut [0u8; 64][..]).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_that_find_the_devices() {
        assert_eq!(obstacle(OsStr::new("sh")), None);
        assert_eq!(obstacle(std::env::current_exe().unwrap().as_os_str()), None);
        assert_eq!(obstacle(OsStr::new("no-such-program-anywhere")), None);
        assert_eq!(obstacle(OsStr::new("/etc/passwd")), None);
    }

    #[test]
    fn a_program_without_dynamic_linker_is_static() {
        let mut head = std::fs::read("/proc/self/exe").unwrap();
        head.truncate(HEADERS as usize);
        assert_eq!(is_static(&head), Some(false));
        let (first, size, count) = (head[32] as usize, head[54] as usize, head[56] as usize);
        for header in head[first..].chunks_mut(size).take(count) {
            if header[0] == INTERPRETER as u8 {
                header[0] = 0;
            }
        }
        assert_eq!(is_static(&head), Some(true));
        assert_eq!(is_static(&head[..60]), None);
        head[4] = 1;
        assert_eq!(is_static(&head), None);
    }
}
