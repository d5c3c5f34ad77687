//! The few system calls of the daemon that no crate at hand wraps.

#![allow(unsafe_code)]

use std::io;
use std::mem::{MaybeUninit, size_of, size_of_val};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// `setsockopt` of a C integer.
pub fn set_integer(socket: BorrowedFd<'_>, level: i32, name: i32, value: i32) -> io::Result<()> {
    set_option(socket, level, name, &value)
}

/// `setsockopt` of a classic BPF program: `SO_ATTACH_FILTER` or `SO_ATTACH_REUSEPORT_CBPF`.
pub fn attach_program(socket: BorrowedFd<'_>, name: i32, program: &[libc::sock_filter]) -> io::Result<()> {
    let length = program
        .len()
        .try_into()
        .map_err(|_| io::ErrorKind::InvalidInput)?;
    let program = libc::sock_fprog {
        len: length,
        filter: program.as_ptr().cast_mut(),
    };
    set_option(socket, libc::SOL_SOCKET, name, &program)
}

/// True if the socket has a filter of its own (`SO_ATTACH_FILTER`).
pub fn has_filter(socket: BorrowedFd<'_>) -> io::Result<bool> {
    let mut length: libc::socklen_t = 0;
    // SAFETY: with length 0 the kernel writes nothing but the number of instructions.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_GET_FILTER,
            std::ptr::null_mut(),
            &raw mut length,
        )
    };
    checked(result).map(|_| length > 0)
}

fn set_option<T>(socket: BorrowedFd<'_>, level: i32, name: i32, value: &T) -> io::Result<()> {
    let length = size_of_val(value) as libc::socklen_t;
    // SAFETY: pointer and length are those of one live value, which the kernel only reads; the
    // filter pointer of a `sock_fprog` is that of a live slice of the length beside it.
    checked(unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            level,
            name,
            std::ptr::from_ref(value).cast(),
            length,
        )
    })
    .map(drop)
}

/// The supplementary groups of the peer of a unix socket, as they were when it connected.
pub fn peer_groups(socket: BorrowedFd<'_>) -> io::Result<Vec<u32>> {
    let mut groups = vec![0u32; 64];
    loop {
        let mut length = size_of_val(groups.as_slice()) as libc::socklen_t;
        // SAFETY: the kernel writes at most `length` bytes to the live vector, and the new length.
        let result = unsafe {
            libc::getsockopt(
                socket.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_PEERGROUPS,
                groups.as_mut_ptr().cast(),
                &raw mut length,
            )
        };
        let count = length as usize / size_of::<u32>();
        match checked(result) {
            Ok(_) => {
                groups.truncate(count);
                return Ok(groups);
            }
            Err(error) if error.raw_os_error() == Some(libc::ERANGE) && count > groups.len() => {
                groups.resize(count, 0)
            }
            Err(error) => return Err(error),
        }
    }
}

/// Blocks SIGTERM and SIGINT, and gives a descriptor that becomes readable when one arrives.
pub fn termination_signals() -> io::Result<OwnedFd> {
    let mut set = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: `sigemptyset` initialises the set, which is live for all four calls; the process has
    // one thread; `signalfd` gives a descriptor that nobody else owns.
    unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        libc::sigaddset(set.as_mut_ptr(), libc::SIGTERM);
        libc::sigaddset(set.as_mut_ptr(), libc::SIGINT);
        checked(libc::sigprocmask(
            libc::SIG_BLOCK,
            set.as_ptr(),
            std::ptr::null_mut(),
        ))?;
        let fd = checked(libc::signalfd(
            -1,
            set.as_ptr(),
            libc::SFD_CLOEXEC | libc::SFD_NONBLOCK,
        ))?;
        Ok(OwnedFd::from_raw_fd(fd))
    }
}

/// Speed of a network interface in Mbit/s (ETHTOOL_GSET); `None` if it does not tell. Any socket of its namespace does.
pub fn link_speed(socket: BorrowedFd<'_>, interface: &str) -> Option<u32> {
    const ETHTOOL_GSET: u32 = 1;
    const UNKNOWN: u32 = u32::MAX;
    /// `struct ethtool_cmd`.
    #[repr(C)]
    #[derive(Default)]
    struct Settings {
        command: u32,
        modes: [u32; 2],
        speed: u16,
        port: [u8; 6],
        packets: [u32; 2],
        speed_high: u16,
        rest: [u16; 7],
    }
    const { assert!(size_of::<Settings>() == 44) };
    let mut settings = Settings {
        command: ETHTOOL_GSET,
        ..Settings::default()
    };
    // SAFETY: the structure is that of the command.
    unsafe { ask_driver(socket, interface, &mut settings) }.ok()?;
    let speed = u32::from(settings.speed) | u32::from(settings.speed_high) << 16;
    // Virtual interfaces say 0 or -1, of which drivers give one half or both.
    (speed != 0 && speed != UNKNOWN && speed != u32::from(u16::MAX)).then_some(speed)
}

/// Queues for receiving and for sending that a network interface has in use (ETHTOOL_GCHANNELS); `None` if it does not
/// tell. Any socket of its namespace does.
pub fn channels(socket: BorrowedFd<'_>, interface: &str) -> Option<(u32, u32)> {
    const ETHTOOL_GCHANNELS: u32 = 0x3c;
    /// `struct ethtool_channels`.
    #[repr(C)]
    #[derive(Default)]
    struct Channels {
        command: u32,
        /// Of receiving, sending, other things, and both receiving and sending: the most, then those in use.
        most: [u32; 4],
        receive: u32,
        send: u32,
        other: u32,
        combined: u32,
    }
    const { assert!(size_of::<Channels>() == 36) };
    let mut channels = Channels {
        command: ETHTOOL_GCHANNELS,
        ..Channels::default()
    };
    // SAFETY: the structure is that of the command.
    unsafe { ask_driver(socket, interface, &mut channels) }.ok()?;
    let with_combined = |queues: u32| queues.saturating_add(channels.combined);
    let (receive, send) = (with_combined(channels.receive), with_combined(channels.send));
    (receive > 0 && send > 0).then_some((receive, send))
}

/// What an AF_XDP socket could not take.
pub struct XdpStatistics {
    /// Packets for which its receive ring had no room.
    pub ring_full: u64,
    /// Packets for which there was no frame.
    pub no_frame: u64,
}

/// Reads `XDP_STATISTICS` of an AF_XDP socket.
pub fn xdp_statistics(socket: BorrowedFd<'_>) -> io::Result<XdpStatistics> {
    const SOL_XDP: i32 = 283;
    const XDP_STATISTICS: i32 = 7;
    // `struct xdp_statistics`: dropped for other reasons, bad descriptors of both rings, receive ring full, fill ring
    // empty, transmit ring empty.
    let mut counters = [0u64; 6];
    let mut length = size_of_val(&counters) as libc::socklen_t;
    // SAFETY: the kernel writes at most `length` bytes to the live array, and the new length.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            SOL_XDP,
            XDP_STATISTICS,
            counters.as_mut_ptr().cast(),
            &raw mut length,
        )
    };
    checked(result)?;
    let [_, _, _, ring_full, no_frame, _] = counters;
    Ok(XdpStatistics { ring_full, no_frame })
}

/// `SIOCETHTOOL`.
///
/// # Safety
/// `command` is to begin with a command that neither reads nor writes more than a value of its type has.
unsafe fn ask_driver<T>(socket: BorrowedFd<'_>, interface: &str, command: &mut T) -> io::Result<()> {
    const SIOCETHTOOL: libc::c_ulong = 0x8946;
    // SAFETY: zeros are a request without a name.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    if interface.len() >= request.ifr_name.len() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    for (to, from) in request.ifr_name.iter_mut().zip(interface.bytes()) {
        *to = from as libc::c_char;
    }
    request.ifr_ifru.ifru_data = std::ptr::from_mut(command).cast();
    // SAFETY: the request names an interface and points to a live structure, as large as the caller says.
    checked(unsafe { libc::ioctl(socket.as_raw_fd(), SIOCETHTOOL as _, &raw mut request) }).map(drop)
}

/// The network namespace of this process, by its inode.
pub fn network_namespace() -> io::Result<u64> {
    Ok(rustix::fs::stat("/proc/self/ns/net")?.st_ino)
}

/// Makes every descriptor from 3 on close-on-exec: a detached daemon must keep no pipe of its
/// starter open.
pub fn close_inherited_on_exec() -> io::Result<()> {
    // SAFETY: the call changes only descriptor flags.
    checked(unsafe {
        libc::syscall(
            libc::SYS_close_range,
            3,
            libc::c_uint::MAX,
            libc::CLOSE_RANGE_CLOEXEC,
        )
    } as i32)
    .map(drop)
}

fn checked(result: i32) -> io::Result<i32> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(result)
    }
}
