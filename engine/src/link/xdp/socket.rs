//! AF_XDP sockets: the system calls.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::Duration;

use rustix::net::SendFlags;

use super::memory::{Mapping, Umem};
use super::port::PortError;
use super::ring::{CompletionRing, FillRing, Offsets, RxRing, TxRing, addresses_len, descriptors_len};
use super::{Features, Geometry, Zerocopy};

/// How many descriptors one call sends in copy mode (since Linux 6.17; 32 before).
const XDP_MAX_TX_SKB_BUDGET: libc::c_int = 9;
/// What the kernel counts for a packet in the send buffer beyond a chunk, at most.
const OVERHEAD: u32 = 1024;
/// How often, and how long each time, a queue is waited for that is just being given up.
const RELEASES: u32 = 60;
const RELEASE: Duration = Duration::from_millis(10);

/// Makes a socket.
pub(super) fn create() -> io::Result<OwnedFd> {
    // SAFETY: no memory is involved.
    let fd = unsafe { libc::socket(libc::AF_XDP, libc::SOCK_RAW | libc::SOCK_CLOEXEC, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel just made it, and nobody else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn set<T>(socket: BorrowedFd<'_>, level: libc::c_int, option: libc::c_int, value: &T) -> io::Result<()> {
    let len = size_of::<T>() as libc::socklen_t;
    // SAFETY: the kernel reads `len` bytes of the value.
    let done = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            level,
            option,
            std::ptr::from_ref(value).cast(),
            len,
        )
    };
    if done == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Reads an option into `value`; false if the kernel has less of it (an older one).
///
/// # Safety
/// All bytes must be valid values of `T`.
unsafe fn get<T>(socket: BorrowedFd<'_>, option: libc::c_int, value: &mut T) -> io::Result<bool> {
    let mut len = size_of::<T>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes to the value, for which any are valid.
    let done = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_XDP,
            option,
            std::ptr::from_mut(value).cast(),
            &raw mut len,
        )
    };
    if done != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(len as usize == size_of::<T>())
}

/// Has the kernel use the frames as its memory.
pub(super) fn register(socket: BorrowedFd<'_>, umem: &Umem, geometry: &Geometry) -> io::Result<()> {
    let registration = libc::xdp_umem_reg {
        addr: umem.address(),
        len: geometry.umem_len() as u64,
        chunk_size: geometry.chunk,
        headroom: 0,
        flags: 0,
        tx_metadata_len: 0,
    };
    set(socket, libc::SOL_XDP, libc::XDP_UMEM_REG, &registration)
}

/// Makes the fill and the completion ring of a queue, with the socket that is to be its first.
pub(super) fn create_pool(socket: BorrowedFd<'_>, geometry: &Geometry) -> io::Result<()> {
    set(
        socket,
        libc::SOL_XDP,
        libc::XDP_UMEM_FILL_RING,
        &geometry.fill_ring(),
    )?;
    let completions = geometry.completion_ring();
    set(
        socket,
        libc::SOL_XDP,
        libc::XDP_UMEM_COMPLETION_RING,
        &completions,
    )
}

/// Makes a socket's receive ring, and its transmit ring if it is to have one.
pub(super) fn create_rings(socket: BorrowedFd<'_>, geometry: &Geometry, transmit: bool) -> io::Result<()> {
    set(socket, libc::SOL_XDP, libc::XDP_RX_RING, &geometry.rx_ring)?;
    if !transmit {
        return Ok(());
    }
    let entries = geometry.tx_ring;
    set(socket, libc::SOL_XDP, libc::XDP_TX_RING, &entries)?;
    // Kernels that don't know it take several calls.
    _ = set(socket, libc::SOL_XDP, XDP_MAX_TX_SKB_BUDGET, &entries);
    // What is refused here (CAP_NET_ADMIN) bounds what is under way to less.
    let buffer = i32::try_from(entries * (geometry.chunk + OVERHEAD)).unwrap_or(i32::MAX);
    if set(socket, libc::SOL_SOCKET, libc::SO_SNDBUFFORCE, &buffer).is_err() {
        _ = set(socket, libc::SOL_SOCKET, libc::SO_SNDBUF, &buffer);
    }
    Ok(())
}

fn bind(
    socket: BorrowedFd<'_>,
    ifindex: u32,
    queue: u16,
    flags: u16,
    shared: Option<BorrowedFd<'_>>,
) -> io::Result<()> {
    let address = libc::sockaddr_xdp {
        sxdp_family: libc::AF_XDP as u16,
        sxdp_flags: flags,
        sxdp_ifindex: ifindex,
        sxdp_queue_id: u32::from(queue),
        sxdp_shared_umem_fd: shared.map_or(0, |fd| fd.as_raw_fd() as u32),
    };
    let len = size_of_val(&address) as libc::socklen_t;
    let mut tries = 0;
    loop {
        // SAFETY: the kernel reads `len` bytes of the address.
        let done = unsafe { libc::bind(socket.as_raw_fd(), (&raw const address).cast(), len) };
        if done == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        tries += 1;
        if error.raw_os_error() != Some(libc::EBUSY) || tries > RELEASES {
            return Err(error);
        }
        // The kernel lets go of a queue some time after its last socket was closed.
        std::thread::sleep(RELEASE);
    }
}

/// Binds the first socket of all, in the best way that kernel and driver can.
pub(super) fn bind_first(
    socket: BorrowedFd<'_>,
    ifindex: u32,
    zerocopy: Zerocopy,
) -> Result<Features, PortError> {
    let modes: &[u16] = match zerocopy {
        Zerocopy::Auto => &[libc::XDP_ZEROCOPY, libc::XDP_COPY],
        Zerocopy::On => &[libc::XDP_ZEROCOPY],
        Zerocopy::Off => &[libc::XDP_COPY],
    };
    let mut outcome = Err(io::ErrorKind::Unsupported.into());
    for &mode in modes {
        for pieces in [libc::XDP_USE_SG, 0] {
            let flags = mode | pieces | libc::XDP_USE_NEED_WAKEUP;
            outcome = bind(socket, ifindex, 0, flags, None);
            match &outcome {
                Ok(()) => {
                    return Ok(Features {
                        zerocopy: is_zerocopy(socket),
                        multi_buffer: pieces != 0,
                        hugepages: false,
                    });
                }
                // It has a pool of another program, or is not there: nothing else would help.
                Err(error) if matches!(error.raw_os_error(), Some(libc::EBUSY | libc::ENODEV)) => {
                    return Err(bind_error(outcome, zerocopy));
                }
                Err(_) => {}
            }
        }
    }
    Err(bind_error(outcome, zerocopy))
}

/// Binds a further socket: one that has made a pool of its own for a queue, or one that uses that of `like`.
pub(super) fn bind_shared(
    socket: BorrowedFd<'_>,
    ifindex: u32,
    queue: u16,
    like: BorrowedFd<'_>,
) -> Result<(), PortError> {
    let outcome = bind(socket, ifindex, queue, libc::XDP_SHARED_UMEM, Some(like));
    if outcome.is_ok() {
        return Ok(());
    }
    Err(bind_error(outcome, Zerocopy::Auto))
}

fn bind_error(outcome: io::Result<()>, zerocopy: Zerocopy) -> PortError {
    let source = outcome.err().unwrap_or_else(|| io::ErrorKind::Other.into());
    let what = match source.raw_os_error() {
        Some(libc::EBUSY) => "another program has AF_XDP sockets on a queue of this interface",
        Some(libc::ENODEV) => "the interface is gone",
        Some(libc::ENETDOWN) => "the interface is down",
        Some(libc::EOPNOTSUPP) if zerocopy == Zerocopy::On => "its driver can't do zero-copy",
        Some(libc::EINVAL) => {
            "AF_XDP sockets can't be bound: the interface has fewer queues, or the kernel is too old"
        }
        _ => "AF_XDP sockets can't be bound to its queues",
    };
    PortError { what, source }
}

fn is_zerocopy(socket: BorrowedFd<'_>) -> bool {
    let mut options = libc::xdp_options { flags: 0 };
    // SAFETY: it consists of numbers.
    let known = unsafe { get(socket, libc::XDP_OPTIONS, &mut options) };
    matches!(known, Ok(true)) && options.flags & libc::XDP_OPTIONS_ZEROCOPY != 0
}

/// Where the parts of a socket's rings lie.
pub(super) struct Layout(libc::xdp_mmap_offsets);

impl Layout {
    /// Asks the kernel. EINVAL, ENOPROTOOPT or ENOTSOCK: it is no AF_XDP socket.
    pub fn of(socket: BorrowedFd<'_>) -> io::Result<Layout> {
        // SAFETY: it consists of numbers.
        let mut offsets: libc::xdp_mmap_offsets = unsafe { std::mem::zeroed() };
        // SAFETY: as above.
        if !unsafe { get(socket, libc::XDP_MMAP_OFFSETS, &mut offsets)? } {
            return Err(io::ErrorKind::Unsupported.into());
        }
        Ok(Layout(offsets))
    }

    pub fn rx(&self, socket: BorrowedFd<'_>, size: u32) -> io::Result<RxRing> {
        let offsets = places(&self.0.rx);
        let len = descriptors_len(offsets, size);
        let mapping = Mapping::new(socket, libc::XDP_PGOFF_RX_RING, len, true)?;
        RxRing::new(mapping, offsets, size)
    }

    pub fn tx(&self, socket: BorrowedFd<'_>, size: u32) -> io::Result<TxRing> {
        let offsets = places(&self.0.tx);
        let len = descriptors_len(offsets, size);
        let mapping = Mapping::new(socket, libc::XDP_PGOFF_TX_RING, len, true)?;
        TxRing::new(mapping, offsets, size)
    }

    pub fn fill(&self, socket: BorrowedFd<'_>, size: u32) -> io::Result<FillRing> {
        let offsets = places(&self.0.fr);
        let len = addresses_len(offsets, size);
        let offset = libc::XDP_UMEM_PGOFF_FILL_RING as libc::off_t;
        FillRing::new(Mapping::new(socket, offset, len, true)?, offsets, size)
    }

    pub fn completion(&self, socket: BorrowedFd<'_>, size: u32) -> io::Result<CompletionRing> {
        let offsets = places(&self.0.cr);
        let len = addresses_len(offsets, size);
        let offset = libc::XDP_UMEM_PGOFF_COMPLETION_RING as libc::off_t;
        CompletionRing::new(Mapping::new(socket, offset, len, true)?, offsets, size)
    }
}

fn places(ring: &libc::xdp_ring_offset) -> Offsets {
    Offsets {
        producer: ring.producer as usize,
        consumer: ring.consumer as usize,
        flags: ring.flags as usize,
        entries: ring.desc as usize,
    }
}

/// Has the kernel send what is in the transmit ring.
#[inline]
pub(super) fn kick_transmit(socket: &OwnedFd) -> io::Result<()> {
    rustix::net::send(socket, &[], SendFlags::DONTWAIT)?;
    Ok(())
}

/// Has the kernel look into the fill ring.
pub(super) fn kick_fill(socket: &OwnedFd) {
    // SAFETY: nothing is read or written.
    unsafe {
        libc::recvfrom(
            socket.as_raw_fd(),
            std::ptr::null_mut(),
            0,
            libc::MSG_DONTWAIT,
            std::ptr::null_mut(),
            std::ptr::null_mut(),
        )
    };
}

/// What the kernel counted on a socket.
pub(super) fn statistics(socket: &OwnedFd) -> libc::xdp_statistics {
    // SAFETY: it consists of numbers.
    let mut statistics: libc::xdp_statistics = unsafe { std::mem::zeroed() };
    // SAFETY: as above. What an older kernel does not count stays 0.
    _ = unsafe { get(socket.as_fd(), libc::XDP_STATISTICS, &mut statistics) };
    statistics
}
