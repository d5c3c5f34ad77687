//! bpf(2): programs, maps and links of the kernel, as much of them as the steering needs.
//!
//! The kernel reads and writes the memory that a request points to by the sizes of the object it names, so each object is
//! known for what it is before anything is asked of it.

#![allow(unsafe_code)]

use std::ffi::CStr;
use std::fs;
use std::io;
use std::mem::{size_of, zeroed};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use super::insn::Insn;

/// Commands of `linux/bpf.h`.
mod command {
    pub const MAP_CREATE: i32 = 0;
    pub const MAP_LOOKUP_ELEM: i32 = 1;
    pub const MAP_UPDATE_ELEM: i32 = 2;
    pub const MAP_DELETE_ELEM: i32 = 3;
    pub const MAP_GET_NEXT_KEY: i32 = 4;
    pub const PROG_LOAD: i32 = 5;
    #[cfg(test)]
    pub const PROG_TEST_RUN: i32 = 10;
    pub const OBJ_GET_INFO_BY_FD: i32 = 15;
    pub const LINK_CREATE: i32 = 28;
    pub const LINK_DETACH: i32 = 34;
}

/// Program type, attach type and link type of XDP.
pub const PROG_TYPE_XDP: u32 = 6;
const ATTACH_TYPE_XDP: u32 = 37;
/// See [`PROG_TYPE_XDP`].
pub const LINK_TYPE_XDP: u32 = 6;
/// Flag of a program: it takes frames in several buffers.
pub const XDP_HAS_FRAGS: u32 = 1 << 5;
/// Flags of attaching: by the kernel, and by the driver.
pub const XDP_FLAGS_SKB_MODE: u32 = 1 << 1;
/// See [`XDP_FLAGS_SKB_MODE`].
pub const XDP_FLAGS_DRV_MODE: u32 = 1 << 2;

/// What the program may be linked with: nothing that it calls is for GPL programs only.
const LICENSE: &CStr = c"Dual MIT/GPL";
/// Names of objects end with a zero byte.
const NAME_LEN: usize = 16;
/// Enough for what the verifier says of a program that it refuses.
const LOG_LEN: usize = 256 * 1024;
/// More maps than a program of ours has.
const MAX_MAPS: usize = 16;

/// Kinds of map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum MapKind {
    /// By arbitrary keys.
    Hash = 1,
    /// By number.
    Array = 2,
    /// By number, with values for each processor.
    PerCpuArray = 6,
    /// AF_XDP sockets by number.
    Sockets = 17,
}

/// What a map is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Its kind.
    pub kind: MapKind,
    /// Bytes of a key.
    pub key: u32,
    /// Bytes of a value.
    pub value: u32,
    /// How many values it can have.
    pub entries: u32,
}

/// A map.
#[derive(Debug)]
pub struct Map {
    fd: OwnedFd,
    shape: Shape,
    id: u32,
    /// Bytes of what is read: all processors' values.
    read: usize,
}

/// Why a program was not loaded.
#[derive(Debug, thiserror::Error)]
#[error("{source}")]
pub struct LoadError {
    /// What the kernel says.
    #[source]
    pub source: io::Error,
    /// What its verifier says, if it came so far.
    pub log: String,
}

/// What a link is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkInfo {
    /// Its type.
    pub kind: u32,
    /// The number of its program.
    pub program: u32,
    /// The interface; 0 if it is gone.
    pub ifindex: u32,
}

/// What a program is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProgramInfo {
    /// Its type.
    pub kind: u32,
    /// Its number.
    pub id: u32,
    /// Its name.
    pub name: String,
    /// The numbers of its maps.
    pub maps: Vec<u32>,
}

impl Map {
    /// Makes one. Names are at most 15 bytes.
    pub fn create(name: &str, shape: Shape) -> io::Result<Self> {
        #[repr(C)]
        struct Request {
            kind: u32,
            key: u32,
            value: u32,
            entries: u32,
            flags: u32,
            inner: u32,
            node: u32,
            name: [u8; NAME_LEN],
        }
        let mut request = Request {
            kind: shape.kind as u32,
            key: shape.key,
            value: shape.value,
            entries: shape.entries,
            flags: 0,
            inner: 0,
            node: 0,
            name: object_name(name)?,
        };
        // SAFETY: the request is that of the command, and points nowhere.
        let fd = unsafe { bpf_fd(command::MAP_CREATE, &mut request) }?;
        Self::adopt(fd, shape)
    }

    /// Takes one that somebody else made.
    ///
    /// # Errors
    /// EINVAL if it is not one of that shape.
    pub fn adopt(fd: OwnedFd, shape: Shape) -> io::Result<Self> {
        Self::adopt_any(fd, |_| shape)
    }

    /// Takes one that somebody else made, whose number of entries says its shape.
    ///
    /// # Errors
    /// EINVAL if it is not one of that shape.
    pub fn adopt_any(fd: OwnedFd, shape: impl FnOnce(u32) -> Shape) -> io::Result<Self> {
        #[repr(C)]
        struct Info {
            kind: u32,
            id: u32,
            key: u32,
            value: u32,
            entries: u32,
            flags: u32,
            name: [u8; NAME_LEN],
        }
        must_be(fd.as_fd(), "bpf-map")?;
        // SAFETY: plain numbers.
        let mut info: Info = unsafe { zeroed() };
        get_info(fd.as_fd(), &mut info)?;
        let shape = shape(info.entries);
        let found = (info.kind, info.key, info.value, info.entries);
        if found != (shape.kind as u32, shape.key, shape.value, shape.entries) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let read = match shape.kind {
            MapKind::PerCpuArray => shape.value.next_multiple_of(8) as usize * possible_processors()?,
            _ => shape.value as usize,
        };
        Ok(Self {
            fd,
            shape,
            id: info.id,
            read,
        })
    }

    /// Its number.
    pub fn id(&self) -> u32 {
        self.id
    }

    /// How many values it can have.
    pub fn entries(&self) -> u32 {
        self.shape.entries
    }

    /// Sets a value.
    pub fn set(&self, key: &[u8], value: &[u8]) -> io::Result<()> {
        // What is written is as long as what is read.
        assert_eq!(value.len(), self.read, "value of a map");
        let mut request = self.request(key, value.as_ptr() as u64);
        // SAFETY: key and value are live and as long as those of this map, which the kernel reads.
        unsafe { bpf(command::MAP_UPDATE_ELEM, &mut request) }.map(drop)
    }

    /// Takes a value away; well if there is none.
    pub fn remove(&self, key: &[u8]) -> io::Result<()> {
        let mut request = self.request(key, 0);
        // SAFETY: the key is live and as long as those of this map, which the kernel reads.
        match unsafe { bpf(command::MAP_DELETE_ELEM, &mut request) } {
            Err(error) if error.raw_os_error() != Some(libc::ENOENT) => Err(error),
            _ => Ok(()),
        }
    }

    /// A value; of a map with values for each processor all of them.
    pub fn get(&self, key: &[u8]) -> io::Result<Vec<u8>> {
        let mut value = vec![0u8; self.read];
        let mut request = self.request(key, value.as_mut_ptr() as u64);
        // SAFETY: the key is live and as long as those of this map, and so is the value, which the kernel writes.
        unsafe { bpf(command::MAP_LOOKUP_ELEM, &mut request) }?;
        Ok(value)
    }

    /// All keys of a map that nobody else changes.
    pub fn keys(&self) -> io::Result<Vec<Vec<u8>>> {
        let mut keys: Vec<Vec<u8>> = Vec::new();
        // Bounded, if somebody does change it.
        while keys.len() < self.shape.entries as usize {
            let mut next = vec![0u8; self.shape.key as usize];
            let mut request = Element {
                map: self.fd.as_raw_fd(),
                pad: 0,
                key: keys.last().map_or(0, |last| last.as_ptr() as u64),
                value: next.as_mut_ptr() as u64,
                flags: 0,
            };
            // SAFETY: both keys are live and as long as those of this map; the kernel writes the second.
            match unsafe { bpf(command::MAP_GET_NEXT_KEY, &mut request) } {
                Ok(_) => keys.push(next),
                Err(error) if error.raw_os_error() == Some(libc::ENOENT) => break,
                Err(error) => return Err(error),
            }
        }
        Ok(keys)
    }

    fn request(&self, key: &[u8], value: u64) -> Element {
        assert_eq!(key.len(), self.shape.key as usize, "key of a map");
        Element {
            map: self.fd.as_raw_fd(),
            pad: 0,
            key: key.as_ptr() as u64,
            value,
            flags: 0,
        }
    }
}

impl AsFd for Map {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// What is asked of an element of a map.
#[repr(C)]
struct Element {
    map: RawFd,
    pad: u32,
    key: u64,
    value: u64,
    flags: u64,
}

/// Loads an XDP program.
pub fn load(name: &str, program: &[Insn], flags: u32) -> Result<OwnedFd, LoadError> {
    #[repr(C)]
    struct Request {
        kind: u32,
        count: u32,
        program: u64,
        license: u64,
        log_level: u32,
        log_len: u32,
        log: u64,
        kernel: u32,
        flags: u32,
        name: [u8; NAME_LEN],
        ifindex: u32,
        attach_type: u32,
    }
    let without_log = |source| LoadError {
        source,
        log: String::new(),
    };
    let mut request = Request {
        kind: PROG_TYPE_XDP,
        count: program.len() as u32,
        program: program.as_ptr() as u64,
        license: LICENSE.as_ptr() as u64,
        log_level: 0,
        log_len: 0,
        log: 0,
        kernel: 0,
        flags,
        name: object_name(name).map_err(without_log)?,
        ifindex: 0,
        attach_type: ATTACH_TYPE_XDP,
    };
    // SAFETY: program and licence are live, and the kernel only reads them.
    let source = match unsafe { bpf_fd(command::PROG_LOAD, &mut request) } {
        Ok(fd) => return Ok(fd),
        Err(error) => error,
    };
    // Once more, now for what the verifier has to say.
    let mut log = vec![0u8; LOG_LEN];
    request.log_level = 1;
    request.log_len = LOG_LEN as u32;
    request.log = log.as_mut_ptr() as u64;
    // SAFETY: as before; the log is live, and as long as stated.
    match unsafe { bpf_fd(command::PROG_LOAD, &mut request) } {
        Ok(fd) => Ok(fd),
        Err(_) => {
            let text = log.split(|byte| *byte == 0).next().unwrap_or_default();
            Err(LoadError {
                source,
                log: String::from_utf8_lossy(text).into_owned(),
            })
        }
    }
}

/// Attaches an XDP program to an interface, until the last descriptor of the link that this gives is closed.
pub fn attach(program: BorrowedFd<'_>, ifindex: u32, flags: u32) -> io::Result<OwnedFd> {
    #[repr(C)]
    struct Request {
        program: RawFd,
        ifindex: u32,
        attach_type: u32,
        flags: u32,
    }
    let mut request = Request {
        program: program.as_raw_fd(),
        ifindex,
        attach_type: ATTACH_TYPE_XDP,
        flags,
    };
    // SAFETY: the request is that of the command, and points nowhere.
    unsafe { bpf_fd(command::LINK_CREATE, &mut request) }
}

/// Takes the program of a link off its interface, whoever has descriptors of the link.
pub fn detach(link: BorrowedFd<'_>) -> io::Result<()> {
    #[repr(C)]
    struct Request {
        link: RawFd,
    }
    let mut request = Request {
        link: link.as_raw_fd(),
    };
    // SAFETY: the request is that of the command, and points nowhere.
    unsafe { bpf(command::LINK_DETACH, &mut request) }.map(drop)
}

/// What a link is.
///
/// # Errors
/// EINVAL if the descriptor is not that of a link.
pub fn link_info(link: BorrowedFd<'_>) -> io::Result<LinkInfo> {
    #[repr(C)]
    struct Info {
        kind: u32,
        id: u32,
        program: u32,
        pad: u32,
        ifindex: u32,
        rest: [u32; 5],
    }
    must_be(link, "bpf_link")?;
    // SAFETY: plain numbers.
    let mut info: Info = unsafe { zeroed() };
    get_info(link, &mut info)?;
    Ok(LinkInfo {
        kind: info.kind,
        program: info.program,
        ifindex: info.ifindex,
    })
}

/// What a program is.
///
/// # Errors
/// EINVAL if the descriptor is not that of a program.
pub fn program_info(program: BorrowedFd<'_>) -> io::Result<ProgramInfo> {
    #[repr(C)]
    struct Info {
        kind: u32,
        id: u32,
        tag: [u8; 8],
        lengths: [u32; 2],
        instructions: [u64; 2],
        load_time: u64,
        uid: u32,
        map_count: u32,
        maps: u64,
        name: [u8; NAME_LEN],
    }
    must_be(program, "bpf-prog")?;
    let mut maps = [0u32; MAX_MAPS];
    // SAFETY: plain numbers.
    let mut info: Info = unsafe { zeroed() };
    info.map_count = MAX_MAPS as u32;
    info.maps = maps.as_mut_ptr() as u64;
    get_info(program, &mut info)?;
    let name = info.name.split(|byte| *byte == 0).next().unwrap_or_default();
    Ok(ProgramInfo {
        kind: info.kind,
        id: info.id,
        name: String::from_utf8_lossy(name).into_owned(),
        maps: maps.into_iter().take(info.map_count as usize).collect(),
    })
}

/// Where a frame is for [`test_run`].
#[cfg(test)]
#[derive(Clone, Copy, Debug)]
pub struct Place {
    /// The interface.
    pub ifindex: u32,
    /// Its queue.
    pub queue: u32,
    /// Bytes in the first buffer.
    pub linear: usize,
}

/// Has the kernel run an XDP program over a frame; gives the verdict. Without a place it is one of the loopback.
#[cfg(test)]
pub fn test_run(program: BorrowedFd<'_>, frame: &[u8], place: Option<Place>) -> io::Result<u32> {
    #[repr(C)]
    struct Request {
        program: RawFd,
        verdict: u32,
        len_in: u32,
        len_out: u32,
        data_in: u64,
        data_out: u64,
        repeat: u32,
        duration: u32,
        context_len_in: u32,
        context_len_out: u32,
        context_in: u64,
        context_out: u64,
        flags: u32,
        cpu: u32,
        batch: u32,
        pad: u32,
    }
    // `struct xdp_md`: data, data_end, data_meta, ingress_ifindex, rx_queue_index, egress_ifindex.
    let context = place.map(|it| [0, it.linear as u32, 0, it.ifindex, it.queue, 0]);
    // SAFETY: plain numbers.
    let mut request: Request = unsafe { zeroed() };
    request.program = program.as_raw_fd();
    request.len_in = frame.len() as u32;
    request.data_in = frame.as_ptr() as u64;
    if let Some(context) = &context {
        request.context_len_in = size_of_val(context) as u32;
        request.context_in = context.as_ptr() as u64;
    }
    // SAFETY: frame and context are live and as long as stated, and the kernel only reads them.
    unsafe { bpf(command::PROG_TEST_RUN, &mut request) }?;
    Ok(request.verdict)
}

/// The type of object behind a descriptor, which only `/proc` tells.
fn must_be(fd: BorrowedFd<'_>, kind: &str) -> io::Result<()> {
    let target = fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()))?;
    let target = target
        .to_str()
        .and_then(|target| target.strip_prefix("anon_inode:"));
    match target {
        Some(found) if found == kind => Ok(()),
        _ => Err(io::ErrorKind::InvalidInput.into()),
    }
}

/// Asks for what an object is; the type of the descriptor is known.
fn get_info<T>(fd: BorrowedFd<'_>, info: &mut T) -> io::Result<()> {
    #[repr(C)]
    struct Request {
        fd: RawFd,
        len: u32,
        info: u64,
    }
    let mut request = Request {
        fd: fd.as_raw_fd(),
        len: size_of::<T>() as u32,
        info: std::ptr::from_mut(info) as u64,
    };
    // SAFETY: the kernel writes at most `len` bytes to the live structure of numbers, and to where those say that are
    // pointers: none, or live ones with their length beside them.
    unsafe { bpf(command::OBJ_GET_INFO_BY_FD, &mut request) }.map(drop)
}

/// How many values a map with values for each processor has.
fn possible_processors() -> io::Result<usize> {
    let text = fs::read_to_string("/sys/devices/system/cpu/possible")?;
    processors(&text).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// Number of processors in a list such as `0-3,8`.
fn processors(list: &str) -> Option<usize> {
    list.trim().split(',').try_fold(0usize, |sum, range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
        sum.checked_add(last.checked_sub(first)?.checked_add(1)?)
    })
}

fn object_name(name: &str) -> io::Result<[u8; NAME_LEN]> {
    let mut bytes = [0; NAME_LEN];
    if name.len() >= NAME_LEN {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    bytes[..name.len()].copy_from_slice(name.as_bytes());
    Ok(bytes)
}

/// As [`bpf`], for commands that give a descriptor.
///
/// # Safety
/// As [`bpf`].
unsafe fn bpf_fd<T>(command: i32, request: &mut T) -> io::Result<OwnedFd> {
    // SAFETY: the caller's promise; such a descriptor is new and nobody else's.
    unsafe { Ok(OwnedFd::from_raw_fd(bpf(command, request)?)) }
}

/// The system call.
///
/// # Safety
/// The request is one of this command, without padding; all that it points to lives as long as the call, and is as long
/// as the request, or the object that it names, says.
unsafe fn bpf<T>(command: i32, request: &mut T) -> io::Result<i32> {
    // The verifier lets signals interrupt it.
    let mut tries = if command == command::PROG_LOAD { 10 } else { 1 };
    loop {
        // SAFETY: the caller's promise.
        let result = unsafe {
            libc::syscall(
                libc::SYS_bpf,
                command,
                std::ptr::from_mut(request),
                size_of::<T>(),
            )
        };
        if result >= 0 {
            return Ok(result as i32);
        }
        let error = io::Error::last_os_error();
        tries -= 1;
        if tries == 0 || error.raw_os_error() != Some(libc::EAGAIN) {
            return Err(error);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_processors_are_counted() {
        assert_eq!(processors("0\n"), Some(1));
        assert_eq!(processors("0-3,8,10-11\n"), Some(7));
        assert_eq!(processors("3-1"), None);
        assert_eq!(processors(""), None);
        assert!(possible_processors().unwrap() > 0);
    }

    #[test]
    fn names_are_bounded() {
        assert!(object_name("ferroce_address").is_ok());
        assert!(object_name("ferroce_addresses").is_err());
    }

    #[test]
    fn other_descriptors_are_no_objects() {
        let file = fs::File::open("/dev/null").unwrap();
        assert!(link_info(file.as_fd()).is_err());
        assert!(program_info(file.as_fd()).is_err());
        let shape = Shape {
            kind: MapKind::Array,
            key: 4,
            value: 4,
            entries: 1,
        };
        assert!(Map::adopt(file.into(), shape).is_err());
    }
}
