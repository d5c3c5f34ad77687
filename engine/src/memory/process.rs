//! The process's own memory, as [`Memory`]: registered ranges that the program may unmap at any time.
//!
//! Registration pins nothing. An access to memory that is gone raises a signal inside one of few machine
//! instructions; a signal handler ([`fault`]) knows their addresses, and lets the routine end with an error instead.
//! On architectures without such routines the kernel does the copy (`by_kernel`).

#[cfg(any(not(target_arch = "x86_64"), test))]
mod by_kernel;
#[cfg(target_arch = "x86_64")]
mod fault;
#[cfg(target_arch = "x86_64")]
mod guarded;
#[cfg(test)]
mod tests;

use std::io;

use super::{AtomicOp, Fault, Memory};

#[cfg(not(target_arch = "x86_64"))]
use by_kernel as access;
#[cfg(target_arch = "x86_64")]
use guarded as access;

/// Fault-safe access to the address space of this process.
#[derive(Debug)]
pub struct ProcessMemory(());

impl ProcessMemory {
    /// Makes access fault-safe: installs the handlers of SIGSEGV and SIGBUS, in front of the program's own.
    ///
    /// Code that uses the value must not be unloaded (`dlclose`), and threads that use it must not block these
    /// signals: the kernel kills a process that faults while the signal is blocked.
    pub fn new() -> io::Result<ProcessMemory> {
        ensure_handlers()?;
        Ok(ProcessMemory(()))
    }
}

impl Memory for ProcessMemory {
    #[inline]
    fn read(&self, addr: u64, into: &mut [u8]) -> Result<(), Fault> {
        // SAFETY: `into` is writable for its length; `addr` may be anything.
        let left = unsafe { access::copy(into.as_mut_ptr(), addr as *const u8, into.len()) };
        whole(addr, into.len(), left)
    }

    #[inline]
    fn write(&self, addr: u64, from: &[u8]) -> Result<(), Fault> {
        // SAFETY: `from` is readable for its length. `addr` lies in a range that the application registered for
        // writing, which is its promise that nothing of ours or of its own depends on these bytes; if it is not
        // mapped, nothing is written.
        let left = unsafe { access::copy(addr as *mut u8, from.as_ptr(), from.len()) };
        whole(addr, from.len(), left)
    }

    fn atomic(&self, addr: u64, op: AtomicOp) -> Result<u64, Fault> {
        if !addr.is_multiple_of(8) {
            return Err(Fault { addr });
        }
        // SAFETY: as for `write`.
        unsafe { access::atomic(addr as *mut u64, op) }.ok_or(Fault { addr })
    }

    /// Also looks whether the program has replaced the signal handlers since, and puts ours in front again: even if no
    /// byte is to be faulted in.
    fn populate(&self, addr: u64, len: u64, writable: bool) -> Result<(), Fault> {
        ensure_handlers().map_err(|_| Fault { addr })?;
        if len == 0 {
            return Ok(());
        }
        let page = page_size();
        let end = addr.checked_add(len - 1).ok_or(Fault { addr })? | (page - 1);
        let start = addr & !(page - 1);
        let advice = if writable {
            libc::MADV_POPULATE_WRITE
        } else {
            libc::MADV_POPULATE_READ
        };
        loop {
            // SAFETY: these advices change no content, and the kernel checks the range.
            let done = unsafe { libc::madvise(start as *mut _, (end - start) as usize + 1, advice) };
            if done == 0 {
                return Ok(());
            }
            match io::Error::last_os_error().raw_os_error() {
                Some(libc::EAGAIN | libc::EINTR) => {}
                // A kernel before 5.14, or a mapping of a device.
                Some(libc::EINVAL) => return self.touch(start, end, page, writable),
                _ => return Err(Fault { addr }),
            }
        }
    }
}

impl ProcessMemory {
    /// Faults in every page of `start..=end` by an access that changes nothing.
    fn touch(&self, start: u64, end: u64, page: u64, writable: bool) -> Result<(), Fault> {
        let mut at = start;
        loop {
            if writable {
                self.atomic(at, AtomicOp::FetchAdd { add: 0 })?;
            } else {
                self.read(at, &mut [0])?;
            }
            match at.checked_add(page) {
                Some(next) if next <= end => at = next,
                _ => return Ok(()),
            }
        }
    }
}

/// The result of a copy of `len` bytes at `addr` that left `left` bytes undone.
#[inline]
fn whole(addr: u64, len: usize, left: usize) -> Result<(), Fault> {
    if left == 0 {
        Ok(())
    } else {
        Err(Fault {
            addr: addr.wrapping_add((len - left) as u64),
        })
    }
}

/// The page size, in bytes.
fn page_size() -> u64 {
    // SAFETY: reads a constant of the process.
    unsafe { libc::sysconf(libc::_SC_PAGESIZE) as u64 }
}

#[cfg(target_arch = "x86_64")]
fn ensure_handlers() -> io::Result<()> {
    fault::ensure_handlers()
}

#[cfg(not(target_arch = "x86_64"))]
fn ensure_handlers() -> io::Result<()> {
    Ok(())
}
