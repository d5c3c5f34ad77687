//! DMA buffers of other devices: the engine reaches them through a mapping, as it reaches all memory.

use std::ffi::{c_int, c_void};
use std::{io, ptr};

use ferroce_engine::verbs::VerbsError;

/// `DMA_BUF_MAGIC`: the type of the file system that all DMA buffers lie in.
const DMA_BUF_MAGIC: i64 = 0x444d_4142;

/// A part of a DMA buffer, mapped into the process.
#[derive(Debug)]
pub struct Mapping {
    /// Where the buffer begins.
    start: *mut c_void,
    len: usize,
    /// Where the part begins.
    addr: u64,
}

// SAFETY: the mapping belongs to no thread.
unsafe impl Send for Mapping {}
// SAFETY: nothing of it changes.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `length` bytes from `offset` on. EBADF: no file; EINVAL: another kind of file, or not so many bytes;
    /// EOPNOTSUPP: its device does not let it be mapped.
    pub fn new(fd: c_int, offset: u64, length: usize, writable: bool) -> Result<Mapping, VerbsError> {
        let size = size_of_buffer(fd)?;
        let end = offset
            .checked_add(length as u64)
            .filter(|&end| length > 0 && end <= size)
            .ok_or(VerbsError::Invalid)?;
        // From its beginning on: graphics drivers are known to map that whatever offset is asked for.
        let len = usize::try_from(end).map_err(|_| VerbsError::Invalid)?;
        let protection = libc::PROT_READ | if writable { libc::PROT_WRITE } else { 0 };
        // SAFETY: a new mapping, wherever the kernel likes.
        let start = unsafe { libc::mmap(ptr::null_mut(), len, protection, libc::MAP_SHARED, fd, 0) };
        if start == libc::MAP_FAILED {
            return Err(match io::Error::last_os_error().raw_os_error() {
                Some(libc::ENOMEM) => VerbsError::NoMemory,
                _ => VerbsError::NotSupported,
            });
        }
        Ok(Mapping {
            start,
            len,
            addr: start as u64 + offset,
        })
    }

    /// Where the part begins.
    pub fn addr(&self) -> u64 {
        self.addr
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: it was mapped so, and is used no more.
        unsafe { libc::munmap(self.start, self.len) };
    }
}

/// Bytes of a DMA buffer.
fn size_of_buffer(fd: c_int) -> Result<u64, VerbsError> {
    // SAFETY: zeros are numbers.
    let mut file_system: libc::statfs = unsafe { std::mem::zeroed() };
    // SAFETY: there is room for the answer.
    if unsafe { libc::fstatfs(fd, &raw mut file_system) } != 0 {
        return Err(VerbsError::BadDescriptor);
    }
    if file_system.f_type as i64 != DMA_BUF_MAGIC {
        return Err(VerbsError::Invalid);
    }
    // SAFETY: seeking tells the size of a DMA buffer, and changes nothing in it.
    u64::try_from(unsafe { libc::lseek(fd, 0, libc::SEEK_END) }).map_err(|_| VerbsError::Invalid)
}

/// The page size, in bytes.
pub(super) fn page_size() -> u64 {
    // SAFETY: reads a constant of the process.
    unsafe { libc::sysconf(libc::_SC_PAGESIZE) as u64 }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;

    #[test]
    fn other_files_are_refused() {
        assert_eq!(
            Mapping::new(-1, 0, 1, true).unwrap_err(),
            VerbsError::BadDescriptor
        );
        let file = std::fs::File::open("/proc/self/exe").unwrap();
        assert_eq!(
            Mapping::new(file.as_raw_fd(), 0, 1, false).unwrap_err(),
            VerbsError::Invalid
        );
    }
}
