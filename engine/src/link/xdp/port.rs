//! A port: the memory and the sockets of an interface in XDP mode, as the daemon makes, leases and tidies them.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use serde::{Deserialize, Serialize};

use super::hops::HopTable;
use super::memory::{self, Control, Umem};
use super::ring::{CompletionRing, FillRing};
use super::seat::owner;
use super::socket::{self, Layout};
use super::{Geometry, circulation};

/// Whether the driver is to read and write the frames itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Zerocopy {
    /// Where it can.
    #[default]
    Auto,
    /// Yes, or the port is not made.
    On,
    /// No: the kernel copies.
    Off,
}

/// What the kernel could do when a port was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Features {
    /// The driver reads and writes the frames itself.
    pub zerocopy: bool,
    /// Packets may take several frames (since Linux 6.6).
    pub multi_buffer: bool,
    /// The frames lie in huge pages.
    pub hugepages: bool,
}

/// What older kernels lack: there the rings of a socket can't be mapped (EBUSY) once it is bound, so not by another process.
pub const NOT_SHARED: &str = "AF_XDP sockets that processes can share (Linux 6.4 and later have them)";

/// A step that failed, when a port was made.
#[derive(Debug, thiserror::Error)]
#[error("{what}: {source}")]
pub struct PortError {
    /// What was tried.
    pub what: &'static str,
    /// What the kernel said.
    pub source: io::Error,
}

/// How often the kernel is asked to send what a program left.
const TRIES: usize = 8;

impl PortError {
    fn new(what: &'static str) -> impl Fn(io::Error) -> PortError {
        move |source| PortError { what, source }
    }
}

/// The memory and the sockets of an interface in XDP mode. Its descriptors can be shared with a successor.
pub struct Port {
    geometry: Geometry,
    features: Features,
    control_file: OwnedFd,
    umem_file: OwnedFd,
    /// By queue, then by seat.
    sockets: Vec<Vec<OwnedFd>>,
    /// By queue.
    pools: Vec<Pool>,
    control: Control,
}

/// The rings that all sockets of a queue share.
struct Pool {
    fill: FillRing,
    completions: CompletionRing,
}

impl Port {
    /// Makes the memory files and the sockets of all seats, bound to the queues of an interface. [`Port::serve`] is to follow.
    ///
    /// # Errors
    /// What was tried, and what the kernel said; nothing is left then.
    pub fn create(ifindex: u32, geometry: Geometry, zerocopy: Zerocopy) -> Result<Port, PortError> {
        if !geometry.is_sound() {
            let source = io::ErrorKind::InvalidInput.into();
            return Err(PortError::new("such a port can't be")(source));
        }
        // First of all, to know whether there can be a port.
        let first = socket::create().map_err(socket_error)?;
        let no_memory = PortError::new("memory for the frames can't be had");
        let control_file = memory::create_file(c"ferroce-xdp-control", Control::len(&geometry), false)
            .map_err(&no_memory)?;
        let (umem_file, umem, hugepages) = frames(&geometry).map_err(&no_memory)?;
        let mut features = Features::default();
        let mut sockets = open_sockets(first, ifindex, &geometry, zerocopy, &umem, &mut features);
        if sockets.is_err() && features.zerocopy && zerocopy == Zerocopy::Auto {
            // There are drivers that can do it on some of their queues only.
            let first = socket::create().map_err(socket_error)?;
            sockets = open_sockets(first, ifindex, &geometry, Zerocopy::Off, &umem, &mut features);
        }
        let sockets = sockets?;
        drop(umem);
        features.hugepages = hugepages;
        let port = Port::new(geometry, features, control_file, umem_file, sockets)?;
        port.serve(0);
        Ok(port)
    }

    /// Goes on with the port of an earlier daemon; `sockets` by queue, then by seat.
    ///
    /// # Errors
    /// These are not what they should be.
    pub fn inherit(
        geometry: Geometry,
        features: Features,
        control: OwnedFd,
        umem: OwnedFd,
        sockets: Vec<Vec<OwnedFd>>,
    ) -> Result<Port, PortError> {
        let seats = usize::from(geometry.seats);
        let whole = geometry.is_sound()
            && sockets.len() == usize::from(geometry.queues)
            && sockets.iter().all(|queue| queue.len() == seats);
        if !whole {
            let source = io::ErrorKind::InvalidData.into();
            return Err(PortError::new("the port of an earlier daemon is incomplete")(
                source,
            ));
        }
        let port = Port::new(geometry, features, control, umem, sockets)?;
        port.control.hops().repair();
        Ok(port)
    }

    fn new(
        geometry: Geometry,
        features: Features,
        control_file: OwnedFd,
        umem_file: OwnedFd,
        sockets: Vec<Vec<OwnedFd>>,
    ) -> Result<Port, PortError> {
        let pools = sockets.iter().map(|queue| Pool::of(&queue[0], &geometry));
        let pools = pools.collect::<io::Result<_>>();
        let pools = pools.map_err(|source: io::Error| match source.raw_os_error() {
            Some(libc::EBUSY) => PortError {
                what: NOT_SHARED,
                source: io::Error::from_raw_os_error(libc::EOPNOTSUPP),
            },
            _ => PortError::new("the rings of AF_XDP sockets can't be mapped")(source),
        })?;
        let control = Control::map(&control_file, &geometry);
        let control = control.map_err(PortError::new("shared memory can't be mapped"))?;
        Ok(Port {
            geometry,
            features,
            control_file,
            umem_file,
            sockets,
            pools,
            control,
        })
    }

    /// What it is made of.
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// What the kernel can do.
    pub fn features(&self) -> Features {
        self.features
    }

    /// The memory file of what processes tell each other.
    pub fn control(&self) -> BorrowedFd<'_> {
        self.control_file.as_fd()
    }

    /// The memory file of the frames.
    pub fn umem(&self) -> BorrowedFd<'_> {
        self.umem_file.as_fd()
    }

    /// The socket of a seat on a queue; both must be of the geometry.
    pub fn socket(&self, queue: u16, seat: u16) -> BorrowedFd<'_> {
        self.sockets[usize::from(queue)][usize::from(seat)].as_fd()
    }

    /// Frames that wait to be received into on a queue: nearly all that circulate, when nothing arrives.
    pub fn frames_waiting(&self, queue: u16) -> u32 {
        self.pools[usize::from(queue)].fill.waiting()
    }

    /// Has as many frames circulate as that many programs need at once, or more: to be called before one more has a seat.
    /// What circulates once stays. A driver that reads and writes the frames itself fills rings of its own, whose length
    /// nobody tells: it gets them all.
    pub fn serve(&self, programs: u16) {
        let wanted = if self.features.zerocopy {
            self.geometry.rx_frames()
        } else {
            self.geometry.circulating(programs)
        };
        for (queue, pool) in (0..).zip(&self.pools) {
            circulation::raise(&self.control, &pool.fill, &self.geometry, queue, wanted);
            if pool.fill.needs_wakeup() {
                socket::kick_fill(&self.sockets[usize::from(queue)][0]);
            }
        }
    }

    /// Takes back what a program had that is gone: no packet comes to its sockets any more (they are out of the map).
    /// Frames that it received go back to the fill ring; those that it was sending are free when they are sent.
    ///
    /// A daemon killed in here leaves what its successor finds by doing it again, but for one frame at most. So does a
    /// kernel that does not let its rings be mapped, which is logged.
    ///
    /// False if the seat can't be used again: its program has spoilt the transmit ring for the kernel.
    pub fn reclaim(&self, seat: u16) -> bool {
        let late = |error: io::Error| {
            tracing::warn!(%error, seat, "frames of a program that is gone can't be taken back yet");
        };
        for queue in 0..self.geometry.queues {
            self.reclaim_received(queue, seat).unwrap_or_else(late);
        }
        self.reclaim_sent(seat).unwrap_or_else(|error| {
            late(error);
            true
        })
    }

    fn reclaim_received(&self, queue: u16, seat: u16) -> io::Result<()> {
        let socket = self.socket(queue, seat);
        let mut ring = Layout::of(socket)?.rx(socket, self.geometry.rx_ring)?;
        let frames = self.geometry.frames_of_queue(queue);
        // What the ring holds is marked as the program's first, so that all it had is found by the marks: once each.
        for ahead in 0..ring.available() {
            let frame = ring.peek(ahead).address / u64::from(self.geometry.chunk);
            if let Ok(frame) = u32::try_from(frame)
                && frames.contains(&frame)
            {
                self.control.own(frame, owner(seat));
            }
        }
        ring.release_all();
        let fill = &self.pools[usize::from(queue)].fill;
        for frame in frames {
            // Where one can't be put in, the ring is being overwritten: no more tries, which would take long.
            if self.control.disown(frame, owner(seat)) && !fill.push(self.address_of(frame)) {
                let what = "a program overwrites the fill ring: remove the device and add it again";
                return Err(io::Error::other(what));
            }
        }
        if fill.needs_wakeup() {
            socket::kick_fill(&self.sockets[usize::from(queue)][usize::from(seat)]);
        }
        Ok(())
    }

    fn reclaim_sent(&self, seat: u16) -> io::Result<bool> {
        let queue = usize::from(self.geometry.tx_queue(seat));
        let socket = &self.sockets[queue][usize::from(seat)];
        let mut ring = Layout::of(socket.as_fd())?.tx(socket.as_fd(), self.geometry.tx_ring)?;
        // It leaves as from a device that had it already.
        for _ in 0..TRIES {
            self.drain(queue);
            if ring.waiting() == 0 || socket::kick_transmit(socket).is_ok() {
                break;
            }
        }
        // What can't leave now must not when the next program sends. And a kernel that still takes entries where there
        // are none goes by a counter that was nonsense: it sees no other before it is through with that.
        ring.spoil();
        for _ in 0..=self.geometry.tx_ring {
            match socket::kick_transmit(socket) {
                Err(error) if error.raw_os_error() != Some(libc::EAGAIN) => break,
                _ if ring.waiting() == 0 => break,
                _ => {}
            }
        }
        self.drain(queue);
        for frame in self.geometry.frames_of_seat(seat) {
            self.control.age_busy(frame);
        }
        Ok(ring.is_sound())
    }

    fn drain(&self, queue: usize) {
        self.pools[queue].completions.drain(|address| {
            if let Ok(frame) = u32::try_from(address / u64::from(self.geometry.chunk)) {
                self.control.set_busy(frame, false);
            }
        });
    }

    fn address_of(&self, frame: u32) -> u64 {
        u64::from(frame) * u64::from(self.geometry.chunk)
    }

    /// The table of next hops.
    pub fn hops(&self) -> &HopTable {
        self.control.hops()
    }
}

impl Pool {
    fn of(socket: &OwnedFd, geometry: &Geometry) -> io::Result<Pool> {
        let layout = Layout::of(socket.as_fd())?;
        Ok(Pool {
            fill: layout.fill(socket.as_fd(), geometry.fill_ring())?,
            completions: layout.completion(socket.as_fd(), geometry.completion_ring())?,
        })
    }
}

/// Memory for the frames, in huge pages if enough are free.
fn frames(geometry: &Geometry) -> io::Result<(OwnedFd, Umem, bool)> {
    let of = |hugepages| -> io::Result<_> {
        let file = memory::create_file(c"ferroce-xdp-frames", Umem::file_len(geometry), hugepages)?;
        // Huge pages are set aside here, or there are not enough.
        let umem = Umem::map(&file, geometry)?;
        Ok((file, umem, hugepages))
    };
    of(true).or_else(|_| of(false))
}

/// Makes and binds the sockets of all seats, by queue and seat. What the first could have is in `features`, also if it
/// fails with a later one.
fn open_sockets(
    first: OwnedFd,
    ifindex: u32,
    geometry: &Geometry,
    zerocopy: Zerocopy,
    umem: &Umem,
    features: &mut Features,
) -> Result<Vec<Vec<OwnedFd>>, PortError> {
    let no_rings = PortError::new("the rings of AF_XDP sockets can't be made");
    let mut first = Some(first);
    let mut sockets: Vec<Vec<OwnedFd>> = Vec::new();
    for queue in 0..geometry.queues {
        let mut of_queue: Vec<OwnedFd> = Vec::new();
        for seat in 0..geometry.seats {
            let (socket, is_first) = match first.take() {
                Some(socket) => (socket, true),
                None => (socket::create().map_err(socket_error)?, false),
            };
            let fd = socket.as_fd();
            if is_first {
                let refused = PortError::new("the kernel does not take the memory for the frames");
                socket::register(fd, umem, geometry).map_err(refused)?;
            }
            if seat == 0 {
                socket::create_pool(fd, geometry).map_err(&no_rings)?;
            }
            let transmit = geometry.tx_queue(seat) == queue;
            socket::create_rings(fd, geometry, transmit).map_err(&no_rings)?;
            // The socket whose memory it shares, and whose pool too if that is of the same queue.
            match of_queue.first().or_else(|| sockets.first()?.first()) {
                None => *features = socket::bind_first(fd, ifindex, zerocopy)?,
                Some(like) => socket::bind_shared(fd, ifindex, queue, like.as_fd())?,
            }
            of_queue.push(socket);
        }
        sockets.push(of_queue);
    }
    Ok(sockets)
}

fn socket_error(source: io::Error) -> PortError {
    let what = match source.raw_os_error() {
        Some(libc::EAFNOSUPPORT) => "the kernel has no AF_XDP sockets (CONFIG_XDP_SOCKETS)",
        Some(libc::EPERM | libc::EACCES) => "AF_XDP sockets need CAP_NET_RAW",
        Some(libc::EMFILE | libc::ENFILE) => "too many open files for a socket of each seat on each queue",
        _ => "an AF_XDP socket can't be made",
    };
    PortError { what, source }
}
