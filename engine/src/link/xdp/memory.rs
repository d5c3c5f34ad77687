//! The memory that the processes of a port share: mappings, the control area, and frames.
//!
//! Other programs may write to all of it at any time, so nothing here is lent as a Rust reference but atomics; frames
//! are copied in and out.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicU8, AtomicU32};

use rustix::fs::{self, SealFlags};

use super::Geometry;
use super::hops::HopTable;
use super::layout::MAX_QUEUES;

/// Lengths of memory files are multiples of this: that of the huge pages that are asked for.
const HUGE_PAGE: usize = 2 << 20;
const CACHE_LINE: usize = 64;

/// Marks of frames to send: one is under way, or was when its program ended.
const BUSY: u8 = 1;
const LEFT: u8 = 2;

/// Mapped memory, shared with the kernel or other processes; unmapped on drop.
#[derive(Debug)]
pub(super) struct Mapping {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping belongs to the process, not to a thread, and what lies in it is only reached by atomics and copies.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `len` bytes of a descriptor. `populate`: its pages are mapped at once.
    pub fn new(fd: BorrowedFd<'_>, offset: libc::off_t, len: usize, populate: bool) -> io::Result<Mapping> {
        let flags = libc::MAP_SHARED | if populate { libc::MAP_POPULATE } else { 0 };
        Mapping::map(fd.as_raw_fd(), flags, offset, len)
    }

    /// Maps `len` zero bytes of this process.
    #[cfg(test)]
    pub fn anonymous(len: usize) -> io::Result<Mapping> {
        Mapping::map(-1, libc::MAP_SHARED | libc::MAP_ANONYMOUS, 0, len)
    }

    fn map(fd: i32, flags: i32, offset: libc::off_t, len: usize) -> io::Result<Mapping> {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping where the kernel likes: no memory in use changes.
        let start = unsafe { libc::mmap(ptr::null_mut(), len, protection, flags, fd, offset) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::AddrNotAvailable)?;
        Ok(Mapping { start, len })
    }

    /// Where `count` values of a type lie from an offset on, if they do within the mapping and are aligned. What is
    /// read and written there is shared: atomics only.
    pub fn at<T>(&self, offset: usize, count: usize) -> io::Result<NonNull<T>> {
        let bytes = count.checked_mul(size_of::<T>());
        let end = bytes.and_then(|bytes| bytes.checked_add(offset));
        // Mappings start at pages, so the offset's alignment is the address's.
        if end.is_none_or(|end| end > self.len) || !offset.is_multiple_of(align_of::<T>()) {
            return Err(io::ErrorKind::InvalidData.into());
        }
        // SAFETY: within the mapping, as just checked.
        Ok(unsafe { self.start.add(offset) }.cast())
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is our own, and all that points into it is owned along with it.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.len) };
    }
}

/// Makes a memory file of `len` bytes that nobody can make longer or shorter.
pub(super) fn create_file(name: &std::ffi::CStr, len: usize, hugepages: bool) -> io::Result<OwnedFd> {
    let huge = if hugepages {
        libc::MFD_HUGETLB | libc::MFD_HUGE_2MB
    } else {
        0
    };
    let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING | huge;
    // SAFETY: the name is a C string; nothing else is read.
    let fd = unsafe { libc::memfd_create(name.as_ptr(), flags) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel just made it, and nobody else knows it.
    let file = unsafe { OwnedFd::from_raw_fd(fd) };
    fs::ftruncate(&file, len as u64)?;
    fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(file)
}

/// Maps a memory file of which it must be sure that its bytes are there and stay.
fn map_file(file: &OwnedFd, len: usize, populate: bool) -> io::Result<Mapping> {
    let is_long_enough = u64::try_from(fs::fstat(file)?.st_size).is_ok_and(|size| size >= len as u64);
    if !is_long_enough || !fs::fcntl_get_seals(file)?.contains(SealFlags::SHRINK) {
        return Err(io::ErrorKind::InvalidData.into());
    }
    Mapping::new(file.as_fd(), 0, len, populate)
}

/// What the processes of a port tell each other: next hops, how many frames of each queue circulate, and a byte for each
/// frame. For one that was received: the
/// program that has it (its seat + 1). For one to send: whether it is under way.
pub(super) struct Control {
    hops: NonNull<HopTable>,
    /// By queue.
    circulating: NonNull<AtomicU32>,
    bytes: NonNull<AtomicU8>,
    frames: u32,
    first_to_send: u32,
    /// Keeps the memory.
    _mapping: Mapping,
}

// SAFETY: it points to atomics in a mapping that it owns.
unsafe impl Send for Control {}
// SAFETY: as above.
unsafe impl Sync for Control {}

impl Control {
    /// Bytes of its memory file.
    pub fn len(geometry: &Geometry) -> usize {
        Self::bytes_at() + Self::bytes_len(geometry)
    }

    /// Where the bytes of the frames begin.
    const fn bytes_at() -> usize {
        size_of::<HopTable>() + MAX_QUEUES * size_of::<AtomicU32>()
    }

    /// Bytes of frames for receiving and of those for sending don't share a cache line.
    fn bytes_len(geometry: &Geometry) -> usize {
        geometry.frames() as usize + CACHE_LINE
    }

    /// Maps it. The geometry must be sound.
    pub fn map(file: &OwnedFd, geometry: &Geometry) -> io::Result<Control> {
        Control::new(map_file(file, Control::len(geometry), true)?, geometry)
    }

    pub fn new(mapping: Mapping, geometry: &Geometry) -> io::Result<Control> {
        Ok(Control {
            hops: mapping.at(0, 1)?,
            circulating: mapping.at(size_of::<HopTable>(), MAX_QUEUES)?,
            bytes: mapping.at(Self::bytes_at(), Self::bytes_len(geometry))?,
            frames: geometry.frames(),
            first_to_send: geometry.frames_of_seat(0).start,
            _mapping: mapping,
        })
    }

    pub fn hops(&self) -> &HopTable {
        // SAFETY: it lies in the mapping and is made of atomics, for which all bytes are valid values.
        unsafe { self.hops.as_ref() }
    }

    /// Of the frames of a queue, those from the first on that were given to the kernel.
    pub fn circulating(&self, queue: u16) -> &AtomicU32 {
        let queue = usize::from(queue).min(MAX_QUEUES - 1);
        // SAFETY: there is one for each queue that there can be; atomics in the mapping.
        unsafe { self.circulating.add(queue).as_ref() }
    }

    fn byte(&self, frame: u32) -> Option<&AtomicU8> {
        let is_to_send = frame >= self.first_to_send;
        let gap = if is_to_send {
            CACHE_LINE - self.first_to_send as usize % CACHE_LINE
        } else {
            0
        };
        // SAFETY: there is a byte for each frame and a cache line more; atomics in the mapping.
        (frame < self.frames).then(|| unsafe { self.bytes.add(frame as usize + gap).as_ref() })
    }

    /// The program that has a received frame says so: `owner` is its seat + 1.
    pub fn own(&self, frame: u32, owner: u8) {
        if let Some(byte) = self.byte(frame) {
            byte.store(owner, Relaxed);
        }
    }

    /// A program has the frame no more. True for one caller only: it is to give the frame to the kernel.
    pub fn disown(&self, frame: u32, owner: u8) -> bool {
        self.byte(frame)
            .is_some_and(|byte| byte.compare_exchange(owner, 0, AcqRel, Relaxed).is_ok())
    }

    /// Whether a frame to send is under way.
    pub fn is_busy(&self, frame: u32) -> bool {
        self.byte(frame).is_none_or(|byte| byte.load(Acquire) != 0)
    }

    /// A program is gone whose frame to send may be under way. One that was left so by an earlier program too, and that
    /// none since could have used, is under way no longer: who was to say so was killed.
    pub fn age_busy(&self, frame: u32) {
        if let Some(byte) = self.byte(frame)
            && byte.compare_exchange(LEFT, 0, AcqRel, Relaxed).is_err()
        {
            _ = byte.compare_exchange(BUSY, LEFT, AcqRel, Relaxed);
        }
    }

    /// Says that a frame to send is under way, or no longer. Those for receiving stay as they are.
    pub fn set_busy(&self, frame: u32, busy: bool) {
        if frame >= self.first_to_send
            && let Some(byte) = self.byte(frame)
        {
            byte.store(if busy { BUSY } else { 0 }, Release);
        }
    }
}

/// The frames.
pub(super) struct Umem {
    start: NonNull<u8>,
    chunk: usize,
    len: usize,
    mapping: Mapping,
}

// SAFETY: it points to a mapping that it owns, and copies only.
unsafe impl Send for Umem {}

impl Umem {
    /// Bytes of its memory file.
    pub fn file_len(geometry: &Geometry) -> usize {
        geometry.umem_len().next_multiple_of(HUGE_PAGE)
    }

    /// Maps it. The geometry must be sound.
    pub fn map(file: &OwnedFd, geometry: &Geometry) -> io::Result<Umem> {
        Umem::new(map_file(file, Umem::file_len(geometry), true)?, geometry)
    }

    pub fn new(mapping: Mapping, geometry: &Geometry) -> io::Result<Umem> {
        Ok(Umem {
            start: mapping.at(0, geometry.umem_len())?,
            chunk: geometry.chunk as usize,
            len: geometry.umem_len(),
            mapping,
        })
    }

    /// Where it lies in this process.
    pub fn address(&self) -> u64 {
        self.mapping.start.as_ptr() as u64
    }

    /// The frame in which an address lies, and where in it.
    pub fn locate(&self, address: u64) -> (u64, usize) {
        let chunk = self.chunk as u64;
        (address / chunk, (address % chunk) as usize)
    }

    /// The address of a frame.
    pub fn address_of(&self, frame: u32) -> u64 {
        u64::from(frame) * self.chunk as u64
    }

    /// Copies bytes of one frame to `to`. False, and nothing copied, if they are not of one frame.
    #[inline]
    pub fn copy_out(&self, address: u64, to: &mut [u8]) -> bool {
        let (_, offset) = self.locate(address);
        if address >= self.len as u64 || offset + to.len() > self.chunk {
            return false;
        }
        // SAFETY: within the mapping, as just checked; `to` is private memory. Who may write to the frame meanwhile is
        // another process: some mixture of bytes is copied then, and nothing else depends on them.
        unsafe {
            let from = self.start.as_ptr().add(address as usize);
            ptr::copy_nonoverlapping(from, to.as_mut_ptr(), to.len());
        }
        true
    }

    /// Copies `from` to a frame, and the frames behind it where it is longer. False, and nothing copied, if they are
    /// not there.
    #[inline]
    pub fn copy_in(&self, frame: u32, from: &[u8]) -> bool {
        let address = self.address_of(frame) as usize;
        if address + from.len() > self.len {
            return false;
        }
        // SAFETY: as for `copy_out`.
        unsafe {
            let to = self.start.as_ptr().add(address);
            ptr::copy_nonoverlapping(from.as_ptr(), to, from.len());
        }
        true
    }

    /// Has the processor fetch what lies at an address, where that can be said.
    #[inline]
    pub fn prefetch(&self, address: u64) {
        if address < self.len as u64 {
            // SAFETY: within the mapping, as just checked.
            fetch(unsafe { self.start.as_ptr().add(address as usize) });
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[inline]
fn fetch(from: *const u8) {
    use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
    // SAFETY: a hint, without any effect but on the caches.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(from.cast()) };
}

#[cfg(not(target_arch = "x86_64"))]
#[inline]
fn fetch(_from: *const u8) {}
