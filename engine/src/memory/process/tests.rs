//! Faults of every kind, at every length; and the program's own handlers, in processes of their own.

use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus};
use std::ptr;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::*;

const RW: i32 = libc::PROT_READ | libc::PROT_WRITE;

/// Pages of memory with a hole after them, unmapped when dropped.
struct Pages {
    addr: u64,
    len: usize,
}

impl Pages {
    fn new(pages: usize, protection: i32) -> Pages {
        let len = pages * page_size() as usize;
        let whole = len + page_size() as usize;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new mapping, and the end of it made inaccessible.
        let addr = unsafe { libc::mmap(ptr::null_mut(), whole, protection, flags, -1, 0) };
        assert_ne!(addr, libc::MAP_FAILED);
        let pages = Pages {
            addr: addr as u64,
            len,
        };
        pages.protect(len, page_size() as usize, libc::PROT_NONE);
        pages
    }

    fn protect(&self, at: usize, len: usize, protection: i32) {
        // SAFETY: of our own mapping.
        let done = unsafe { libc::mprotect((self.addr as usize + at) as *mut _, len, protection) };
        assert_eq!(done, 0);
    }

    fn end(&self) -> u64 {
        self.addr + self.len as u64
    }

    fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.len];
        memory().read(self.addr, &mut bytes).unwrap();
        bytes
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: of our own mapping, which nothing refers to any more.
        unsafe { libc::munmap(self.addr as *mut _, self.len + page_size() as usize) };
    }
}

fn memory() -> ProcessMemory {
    ProcessMemory::new().unwrap()
}

/// Bytes that differ from their neighbours and from zero.
fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i % 251) as u8 + 1).collect()
}

/// Lengths around every case of the copy routine.
fn lengths() -> impl Iterator<Item = usize> {
    (0..=200).chain([255, 256, 511, 512, 1023, 1024, 1025, 1032, 4095, 4096, 4097, 8191])
}

#[test]
fn copies_every_length_at_every_alignment_and_nothing_beside_it() {
    let memory = memory();
    for len in lengths() {
        for (from, to) in [(0, 0), (1, 0), (0, 3), (7, 9), (15, 1)] {
            let source = pattern(len + 16);
            let mut target = vec![0u8; len + 32];
            memory
                .write(target.as_mut_ptr() as u64 + to, &source[from..from + len])
                .unwrap();
            let (before, rest) = target.split_at(to as usize);
            let (copied, after) = rest.split_at(len);
            assert_eq!(
                copied,
                &source[from..from + len],
                "length {len} from {from} to {to}"
            );
            assert!(
                before.iter().chain(after).all(|&b| b == 0),
                "length {len} from {from} to {to}"
            );

            let mut read = vec![0u8; len];
            memory
                .read(source.as_ptr() as u64 + from as u64, &mut read)
                .unwrap();
            assert_eq!(read, source[from..from + len]);
        }
    }
}

#[test]
fn long_copies_are_right_at_every_distance() {
    let memory = memory();
    let (source, target) = (Pages::new(3, RW), Pages::new(3, RW));
    let bytes = pattern(source.len);
    memory.write(source.addr, &bytes).unwrap();
    for distance in 0..48 {
        for len in [1023, 1024, 1500, 4096, 8200] {
            let mut from = vec![0; len];
            memory.read(source.addr + 8, &mut from).unwrap();
            assert_eq!(from, bytes[8..8 + len]);
            // SAFETY: nothing writes to the source any more.
            let from = unsafe { std::slice::from_raw_parts((source.addr + 8) as *const u8, len) };
            memory.write(target.addr + 8 + distance, from).unwrap();
            let mut copied = vec![0; len];
            memory.read(target.addr + 8 + distance, &mut copied).unwrap();
            assert_eq!(copied, from, "{len} bytes at distance {distance}");
            // The same distance, into the hole.
            let hole = target.end() - (len as u64 / 2 / 4096 * 4096 + 500 + distance);
            let from = &from[500 - 8..];
            assert_eq!(
                memory.write(hole, from).is_err(),
                from.len() as u64 > target.end() - hole
            );
        }
    }
}

#[test]
fn a_write_into_a_hole_faults_there_and_leaves_what_precedes() {
    let memory = memory();
    for len in lengths().filter(|&len| len > 0) {
        for mapped in [
            0,
            1,
            7,
            8,
            9,
            len / 2,
            len.saturating_sub(9),
            len.saturating_sub(8),
            len - 1,
        ] {
            let mapped = mapped.min(len - 1);
            let pages = Pages::new(2, RW);
            let source = pattern(len);
            let result = memory.write(pages.end() - mapped as u64, &source);
            assert_eq!(
                result,
                Err(Fault { addr: pages.end() }),
                "length {len}, {mapped} mapped"
            );
            let bytes = pages.bytes();
            let (before, written) = bytes.split_at(bytes.len() - mapped);
            assert_eq!(written, &source[..mapped], "length {len}, {mapped} mapped");
            assert!(before.iter().all(|&b| b == 0));
        }
    }
}

#[test]
fn a_read_out_of_a_hole_faults_there() {
    let memory = memory();
    let pages = Pages::new(2, RW);
    for len in lengths().filter(|&len| len > 0) {
        for mapped in [0, len / 2, len - 1] {
            let result = memory.read(pages.end() - mapped as u64, &mut vec![0; len]);
            assert_eq!(
                result,
                Err(Fault { addr: pages.end() }),
                "length {len}, {mapped} mapped"
            );
        }
    }
}

#[test]
fn read_only_memory_is_read_and_not_written() {
    let memory = memory();
    let pages = Pages::new(1, RW);
    memory.write(pages.addr, &pattern(pages.len)).unwrap();
    pages.protect(0, pages.len, libc::PROT_READ);
    assert_eq!(pages.bytes(), pattern(pages.len));
    assert_eq!(
        memory.write(pages.addr + 8, &[0; 8]),
        Err(Fault { addr: pages.addr + 8 })
    );
    assert!(memory.atomic(pages.addr, AtomicOp::FetchAdd { add: 1 }).is_err());
    assert!(memory.atomic(pages.addr, AtomicOp::Store { value: 1 }).is_err());
    assert_eq!(pages.bytes(), pattern(pages.len));
}

#[test]
fn addresses_that_no_process_has_fault() {
    let memory = memory();
    for addr in [0, 8, 1 << 47, 1 << 60, 0xffff_8000_0000_0000, u64::MAX - 7] {
        assert!(memory.read(addr, &mut [0; 8]).is_err(), "{addr:#x}");
        assert!(memory.write(addr, &[0; 600]).is_err(), "{addr:#x}");
        assert!(
            memory.atomic(addr & !7, AtomicOp::FetchAdd { add: 0 }).is_err(),
            "{addr:#x}"
        );
        assert!(memory.atomic(addr & !7, AtomicOp::Store { value: 0 }).is_err());
        assert!(memory.populate(addr, 8, false).is_err(), "{addr:#x}");
    }
    assert!(memory.populate(u64::MAX, 2, false).is_err());
}

/// A shared file mapping of two pages whose file is then cut to one: the second raises SIGBUS.
fn truncated_file() -> Pages {
    use std::os::fd::AsRawFd;
    let page = page_size() as usize;
    let file = rustix::fs::memfd_create("ferroce-test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, 2 * page as u64).unwrap();
    let pages = Pages::new(2, libc::PROT_NONE);
    let flags = libc::MAP_SHARED | libc::MAP_FIXED;
    // SAFETY: replaces pages of our own mapping.
    let addr = unsafe { libc::mmap(pages.addr as *mut _, 2 * page, RW, flags, file.as_raw_fd(), 0) };
    assert_eq!(addr as u64, pages.addr);
    memory().write(pages.addr, &pattern(2 * page)).unwrap();
    rustix::fs::ftruncate(&file, page as u64).unwrap();
    pages
}

#[test]
fn a_file_cut_short_under_its_mapping_faults() {
    let memory = memory();
    let page = page_size();
    let pages = truncated_file();
    let mut bytes = vec![0; 2 * page as usize];
    let fault = Err(Fault {
        addr: pages.addr + page,
    });
    assert_eq!(memory.read(pages.addr, &mut bytes), fault);
    assert_eq!(bytes[..page as usize], pattern(page as usize));
    assert_eq!(memory.write(pages.addr + page - 20, &[7; 40]), fault);
    assert!(
        memory
            .atomic(pages.addr + page, AtomicOp::FetchAdd { add: 1 })
            .is_err()
    );
    assert!(memory.populate(pages.addr, 2 * page, true).is_err());
    assert!(memory.populate(pages.addr, page, true).is_ok());
}

#[test]
fn atomics_change_the_word_and_give_the_old_value() {
    let memory = memory();
    let word = AtomicU64::new(5);
    let addr = word.as_ptr() as u64;
    assert_eq!(memory.atomic(addr, AtomicOp::FetchAdd { add: u64::MAX }), Ok(5));
    assert_eq!(word.load(Ordering::SeqCst), 4);
    assert_eq!(
        memory.atomic(addr, AtomicOp::CompareSwap { compare: 9, swap: 1 }),
        Ok(4)
    );
    assert_eq!(word.load(Ordering::SeqCst), 4);
    assert_eq!(
        memory.atomic(addr, AtomicOp::CompareSwap { compare: 4, swap: 1 }),
        Ok(4)
    );
    assert_eq!(word.load(Ordering::SeqCst), 1);
    assert_eq!(memory.atomic(addr, AtomicOp::Store { value: 8 }), Ok(1));
    assert_eq!(word.load(Ordering::SeqCst), 8);
    assert_eq!(
        memory.atomic(addr + 4, AtomicOp::FetchAdd { add: 1 }),
        Err(Fault { addr: addr + 4 })
    );
}

#[test]
fn populate_checks_the_whole_range_as_asked() {
    let memory = memory();
    let pages = Pages::new(3, RW);
    let len = pages.len as u64;
    assert!(memory.populate(pages.addr, len, true).is_ok());
    assert!(memory.populate(pages.addr + 5, len - 10, true).is_ok());
    assert!(memory.populate(pages.addr, 0, true).is_ok());
    assert!(memory.populate(pages.addr, len + 1, false).is_err());
    pages.protect(page_size() as usize, page_size() as usize, libc::PROT_READ);
    assert!(memory.populate(pages.addr, len, false).is_ok());
    assert!(memory.populate(pages.addr, len, true).is_err());
    // What kernels without the advice get.
    let (start, last) = (pages.addr, pages.end() - 1);
    assert!(memory.touch(start, last, page_size(), false).is_ok());
    assert!(memory.touch(start, last, page_size(), true).is_err());
    assert!(memory.touch(start, last + 1, page_size(), false).is_err());
}

#[test]
fn threads_fault_side_by_side() {
    let memory = memory();
    std::thread::scope(|scope| {
        for thread in 0..8 {
            let memory = &memory;
            scope.spawn(move || {
                let pages = Pages::new(1, RW);
                for turn in 0..2_000 {
                    let len = 1 + (thread * 131 + turn * 7) % 900;
                    assert!(memory.write(pages.end() - len as u64, &pattern(len)).is_ok());
                    assert!(memory.write(pages.end() - len as u64 + 1, &pattern(len)).is_err());
                    assert!(
                        memory
                            .read(pages.end() - len as u64 + 1, &mut vec![0; len])
                            .is_err()
                    );
                }
            });
        }
    });
}

#[test]
fn copies_race_with_unmapping_and_live() {
    let memory = memory();
    let pages = Pages::new(4, RW);
    let half = pages.len / 2;
    let turns = 3_000;
    std::thread::scope(|scope| {
        let copier = scope.spawn(|| {
            let mut faults = 0u32;
            let mut bytes = vec![3; pages.len];
            for _ in 0..turns {
                faults += u32::from(memory.write(pages.addr, &bytes).is_err());
                faults += u32::from(memory.read(pages.addr, &mut bytes).is_err());
                faults += u32::from(
                    memory
                        .atomic(pages.end() - 8, AtomicOp::FetchAdd { add: 1 })
                        .is_err(),
                );
            }
            faults
        });
        while !copier.is_finished() {
            pages.protect(half, half, libc::PROT_NONE);
            pages.protect(half, half, RW);
        }
        copier.join().unwrap();
    });
}

#[test]
fn the_kernels_copy_is_as_safe() {
    for len in lengths().filter(|&len| len > 0) {
        let source = pattern(len);
        let mut target = vec![0u8; len];
        // SAFETY: both ranges are ours.
        let left = unsafe { by_kernel::copy(target.as_mut_ptr(), source.as_ptr(), len) };
        assert_eq!(left, 0);
        assert_eq!(source, target);
        let pages = Pages::new(3, RW);
        let mapped = len / 2;
        // SAFETY: the end of the target is not mapped.
        let left = unsafe { by_kernel::copy((pages.end() - mapped as u64) as *mut u8, source.as_ptr(), len) };
        assert!(left >= len - mapped, "length {len}: {left} left");
        // SAFETY: the end of the source is not mapped.
        let left = unsafe {
            by_kernel::copy(
                target.as_mut_ptr(),
                (pages.end() - mapped as u64) as *const u8,
                len,
            )
        };
        assert!(left >= len - mapped, "length {len}: {left} left");
    }
    let pages = Pages::new(1, RW);
    let add = AtomicOp::FetchAdd { add: 2 };
    // SAFETY: aligned words, one of them not mapped.
    unsafe {
        assert_eq!(by_kernel::atomic(pages.addr as *mut u64, add), Some(0));
        assert_eq!(by_kernel::atomic(pages.addr as *mut u64, add), Some(2));
        let store = AtomicOp::Store { value: 9 };
        assert_eq!(by_kernel::atomic(pages.addr as *mut u64, store), Some(4));
        assert_eq!(by_kernel::atomic(pages.addr as *mut u64, add), Some(9));
        assert_eq!(by_kernel::atomic(pages.end() as *mut u64, add), None);
    }
}

// The program's own handlers. Each case runs in a process of its own: this test binary again, told by the environment.

const CASE: &str = "FERROCE_TEST_CASE";

/// Runs `case` in a child process (in the child: runs it, and exits with 0).
fn in_child(name: &str, case: fn()) -> ExitStatus {
    if std::env::var(CASE).as_deref() == Ok(name) {
        case();
        std::process::exit(0);
    }
    let path = format!("{}::{name}", module_path!().split_once("::").unwrap().1);
    let mut child = Command::new(std::env::current_exe().unwrap());
    child
        .args(["--exact", &path, "--nocapture", "--test-threads=1"])
        .env(CASE, name);
    child
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::null());
    child.status().unwrap()
}

static CALLS: AtomicU32 = AtomicU32::new(0);
static BEFORE: AtomicU64 = AtomicU64::new(0);

/// A program's handler that mends the fault by mapping the page it happened at.
extern "C" fn mend(_: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    CALLS.fetch_add(1, Ordering::SeqCst);
    assert!(!context.is_null());
    // SAFETY: the kernel's info of a fault; the page is one of this test's.
    unsafe {
        let page = (*info).si_addr() as usize & !(page_size() as usize - 1);
        assert_eq!(libc::mprotect(page as *mut _, page_size() as usize, RW), 0);
    }
}

/// A program's handler that counts, and calls the one it found.
extern "C" fn pass_on(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    CALLS.fetch_add(100, Ordering::SeqCst);
    let before = BEFORE.load(Ordering::SeqCst) as usize;
    // SAFETY: installed by `set`, with this type.
    unsafe {
        std::mem::transmute::<usize, extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void)>(before)(
            signal, info, context,
        );
    }
}

/// A handler of the plain kind, which ends the process in its own way.
extern "C" fn leave(signal: i32) {
    // SAFETY: async-signal-safe.
    unsafe { libc::_exit(if signal == libc::SIGSEGV { 42 } else { 43 }) }
}

/// Installs a handler; gives the one that was there.
fn set(signal: i32, handler: usize, flags: i32) -> usize {
    // SAFETY: a whole action, zero where not said.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler;
        action.sa_flags = flags;
        let mut old = std::mem::zeroed();
        assert_eq!(libc::sigaction(signal, &action, &mut old), 0);
        old.sa_sigaction
    }
}

/// An access of the program's own to a page that is not accessible.
fn own_fault() -> Pages {
    let pages = Pages::new(1, libc::PROT_NONE);
    // SAFETY: faults; a handler mends it, or the process ends.
    unsafe { (pages.addr as *mut u8).write_volatile(1) };
    pages
}

fn our_fault() {
    let pages = Pages::new(1, libc::PROT_NONE);
    assert!(memory().write(pages.addr, &[1; 100]).is_err());
}

#[test]
fn the_programs_handler_gets_its_own_faults_only() {
    let status = in_child("the_programs_handler_gets_its_own_faults_only", || {
        set(libc::SIGSEGV, mend as *const () as usize, libc::SA_SIGINFO);
        our_fault();
        assert_eq!(CALLS.load(Ordering::SeqCst), 0);
        own_fault();
        assert_eq!(CALLS.load(Ordering::SeqCst), 1);
        our_fault();
        assert_eq!(CALLS.load(Ordering::SeqCst), 1);
    });
    assert!(status.success(), "{status}");
}

#[test]
fn handlers_installed_later_are_followed_without_a_circle() {
    let status = in_child("handlers_installed_later_are_followed_without_a_circle", || {
        set(libc::SIGSEGV, mend as *const () as usize, libc::SA_SIGINFO);
        our_fault();
        for round in 1..=40 {
            // The program replaces ours and keeps it to call it: also again and again.
            BEFORE.store(
                set(libc::SIGSEGV, pass_on as *const () as usize, libc::SA_SIGINFO) as u64,
                Ordering::SeqCst,
            );
            // Before we know, its chain may call it twice, but ends.
            CALLS.store(0, Ordering::SeqCst);
            own_fault();
            assert_eq!(CALLS.load(Ordering::SeqCst) % 100, 1, "round {round}");
            our_fault();
            CALLS.store(0, Ordering::SeqCst);
            own_fault();
            assert_eq!(CALLS.load(Ordering::SeqCst), 101, "round {round}");
        }
        // Handlers that take turns use up the levels.
        for round in 1..=40 {
            let handler = if round % 2 == 0 {
                pass_on as *const () as usize
            } else {
                mend as *const () as usize
            };
            BEFORE.store(
                set(libc::SIGSEGV, handler, libc::SA_SIGINFO) as u64,
                Ordering::SeqCst,
            );
            our_fault();
            CALLS.store(0, Ordering::SeqCst);
            own_fault();
            assert_eq!(CALLS.load(Ordering::SeqCst) % 100, 1, "round {round}");
        }
    });
    assert!(status.success(), "{status}");
}

#[test]
fn a_plain_handler_is_called() {
    let status = in_child("a_plain_handler_is_called", || {
        set(libc::SIGSEGV, leave as *const () as usize, 0);
        our_fault();
        own_fault();
    });
    assert_eq!(status.code(), Some(42), "{status}");
}

#[test]
fn a_one_time_handler_is_called_once() {
    let status = in_child("a_one_time_handler_is_called_once", || {
        set(
            libc::SIGSEGV,
            mend as *const () as usize,
            libc::SA_SIGINFO | libc::SA_RESETHAND,
        );
        our_fault();
        own_fault();
        our_fault();
        own_fault();
    });
    assert_eq!(status.signal(), Some(libc::SIGSEGV), "{status}");
}

#[test]
fn without_a_handler_the_fault_ends_the_process() {
    let status = in_child("without_a_handler_the_fault_ends_the_process", || {
        set(libc::SIGSEGV, libc::SIG_DFL, 0);
        our_fault();
        own_fault();
    });
    assert_eq!(status.signal(), Some(libc::SIGSEGV), "{status}");
}

#[test]
fn a_signal_that_is_sent_ends_the_process_too() {
    let status = in_child("a_signal_that_is_sent_ends_the_process_too", || {
        set(libc::SIGBUS, libc::SIG_DFL, 0);
        our_fault();
        // SAFETY: to ourselves.
        unsafe { libc::raise(libc::SIGBUS) };
    });
    assert_eq!(status.signal(), Some(libc::SIGBUS), "{status}");
}

#[test]
fn ignored_signals_are_ignored_and_ignored_faults_are_not() {
    let status = in_child("ignored_signals_are_ignored_and_ignored_faults_are_not", || {
        set(libc::SIGSEGV, libc::SIG_IGN, 0);
        set(libc::SIGBUS, leave as *const () as usize, 0);
        our_fault();
        // SAFETY: to ourselves.
        unsafe { libc::raise(libc::SIGSEGV) };
        drop(truncated_file());
        own_fault();
    });
    assert_eq!(status.signal(), Some(libc::SIGSEGV), "{status}");
}

#[test]
fn a_bus_error_of_the_program_reaches_its_handler() {
    let status = in_child("a_bus_error_of_the_program_reaches_its_handler", || {
        set(libc::SIGBUS, leave as *const () as usize, libc::SA_ONSTACK);
        let pages = truncated_file();
        assert!(memory().read(pages.addr + page_size(), &mut [0]).is_err());
        // SAFETY: raises SIGBUS.
        unsafe { ((pages.addr + page_size()) as *const u8).read_volatile() };
    });
    assert_eq!(status.code(), Some(43), "{status}");
}
