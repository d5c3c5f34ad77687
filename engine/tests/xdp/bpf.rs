//! An XDP program of a dozen instructions: the byte behind the Ethernet header and the queue choose the socket.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::atomic::AtomicU32;

const MAP_CREATE: libc::c_long = 0;
const MAP_UPDATE: libc::c_long = 2;
const PROG_LOAD: libc::c_long = 5;
const LINK_CREATE: libc::c_long = 28;
const TYPE_XSKMAP: u32 = 17;
const TYPE_XDP: u32 = 6;
const ATTACH_XDP: u32 = 37;
const HAS_FRAGS: u32 = 1 << 5;
const REDIRECT_MAP: i32 = 51;
const PASS: i32 = 2;

/// Calls `bpf` with the words of its attributes.
fn bpf(command: libc::c_long, attributes: &[u32]) -> OwnedFd {
    let len = size_of_val(attributes);
    // SAFETY: the kernel reads `len` bytes, and what these point to, which outlives the call.
    let fd = unsafe { libc::syscall(libc::SYS_bpf, command, attributes.as_ptr(), len) };
    assert!(fd >= 0, "bpf {command}: {}", io::Error::last_os_error());
    // SAFETY: the kernel just made it.
    unsafe { OwnedFd::from_raw_fd(fd as i32) }
}

fn halves<T>(pointer: *const T) -> [u32; 2] {
    [pointer as u64 as u32, (pointer as u64 >> 32) as u32]
}

/// The program, attached, and its map.
pub struct Steering {
    map: OwnedFd,
    _link: OwnedFd,
}

impl Steering {
    pub fn attach(ifindex: u32) -> Steering {
        let map = bpf(MAP_CREATE, &[TYPE_XSKMAP, 4, 4, 1024]);
        let op = |code: u8, dst: u8, src: u8, offset: i16, value: i32| {
            let registers = u64::from(dst | src << 4) << 8;
            let offset = u64::from(offset as u16) << 16;
            u64::from(code) | registers | offset | u64::from(value as u32) << 32
        };
        let program = [
            op(0x61, 2, 1, 0, 0),               // r2 = data
            op(0x61, 3, 1, 4, 0),               // r3 = data_end
            op(0xbf, 4, 2, 0, 0),               // r4 = r2
            op(0x07, 4, 0, 0, 15),              // r4 += 15
            op(0x2d, 4, 3, 9, 0),               // if r4 > r3 goto pass
            op(0x71, 5, 2, 14, 0),              // r5 = byte 14
            op(0x61, 2, 1, 16, 0),              // r2 = rx_queue_index
            op(0x67, 2, 0, 0, 8),               // r2 <<= 8
            op(0x0f, 2, 5, 0, 0),               // r2 += r5
            op(0x18, 1, 1, 0, map.as_raw_fd()), // r1 = map
            0,
            op(0xb7, 3, 0, 0, PASS),         // r3 = what to do without a socket
            op(0x85, 0, 0, 0, REDIRECT_MAP), // call
            op(0x95, 0, 0, 0, 0),            // exit
            op(0xb7, 0, 0, 0, PASS),         // pass: r0 = PASS
            op(0x95, 0, 0, 0, 0),            // exit
        ];
        let (code, license) = (halves(program.as_ptr()), halves(c"GPL".as_ptr()));
        let mut attributes = [0; 18];
        attributes[..6].copy_from_slice(&[
            TYPE_XDP,
            program.len() as u32,
            code[0],
            code[1],
            license[0],
            license[1],
        ]);
        attributes[11] = HAS_FRAGS;
        attributes[17] = ATTACH_XDP;
        let program = bpf(PROG_LOAD, &attributes);
        let _link = bpf(LINK_CREATE, &[program.as_raw_fd() as u32, ifindex, ATTACH_XDP, 0]);
        Steering { map, _link }
    }

    pub fn set(&self, queue: u16, seat: u16, socket: BorrowedFd<'_>) {
        let key = u32::from(queue) << 8 | u32::from(seat);
        let value = socket.as_raw_fd();
        let (key, value) = (halves(&raw const key), halves(&raw const value));
        let map = self.map.as_fd().as_raw_fd() as u32;
        let attributes = [map, 0, key[0], key[1], value[0], value[1], 0, 0];
        let len = size_of_val(&attributes);
        // SAFETY: as for `bpf`; this command gives no descriptor.
        let done = unsafe { libc::syscall(libc::SYS_bpf, MAP_UPDATE, attributes.as_ptr(), len) };
        assert_eq!(done, 0, "{}", io::Error::last_os_error());
    }
}

/// The index of an interface.
pub fn index(interface: &CStr) -> u32 {
    // SAFETY: it reads a C string.
    let index = unsafe { libc::if_nametoindex(interface.as_ptr()) };
    assert!(index > 0, "{}", io::Error::last_os_error());
    index
}

/// Keeps this thread on one processor.
pub fn pin_to(processor: usize) {
    let mut set = rustix::thread::CpuSet::new();
    set.set(processor);
    _ = rustix::thread::sched_setaffinity(None, &set);
}

/// The producer's counter of a socket's transmit ring, mapped for ever.
pub fn transmit_producer(socket: BorrowedFd<'_>, size: u32) -> &'static AtomicU32 {
    // SAFETY: it consists of numbers.
    let mut offsets: libc::xdp_mmap_offsets = unsafe { std::mem::zeroed() };
    let mut len = size_of_val(&offsets) as libc::socklen_t;
    // SAFETY: the kernel writes no more than that.
    let done = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_XDP,
            libc::XDP_MMAP_OFFSETS,
            (&raw mut offsets).cast(),
            &mut len,
        )
    };
    assert_eq!(done, 0);
    let bytes = offsets.tx.desc as usize + size as usize * size_of::<libc::xdp_desc>();
    // SAFETY: a new mapping, which stays.
    unsafe {
        let ring = libc::mmap(
            std::ptr::null_mut(),
            bytes,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED,
            socket.as_raw_fd(),
            libc::XDP_PGOFF_TX_RING,
        );
        assert_ne!(ring, libc::MAP_FAILED);
        &*ring.cast::<u8>().add(offsets.tx.producer as usize).cast()
    }
}
