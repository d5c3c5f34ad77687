//! The floor of AF_XDP: two threads that spin on a socket of their own each, without any protocol.
//!
//!     bench-xdp ping-pong NETNS:INTERFACE NETNS:INTERFACE [ROUNDS]   # a round trip of 64-byte frames: median and mean, us
//!     bench-xdp rate NETNS:INTERFACE NETNS:INTERFACE [SECONDS]       # 64-byte frames that arrive: millions in a second
//!     bench-xdp bandwidth NETNS:INTERFACE NETNS:INTERFACE [SECONDS]  # those of path MTU 2048: Gbit/s of payload
//!
//! The first side asks or sends, the second answers or receives; "-" is the namespace that it was started in. The threads
//! run on the first and the last CPU. The last two also print the share that was sent but did not arrive. Needs root.

use std::env;
use std::error::Error;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::ptr;
use std::slice;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// UDP port of the frames. Not that of RoCE, which a daemon may have.
const PORT: u16 = 4790;
/// Bytes of a small frame: the shortest that Ethernet carries, with its checksum.
const SMALL: usize = 64;
/// Bytes of a packet's payload at path MTU 2048, and of its headers and ICRC.
const PAYLOAD: usize = 2048;
const HEADERS: usize = 14 + 20 + 8 + 12 + 4;
/// Bytes of a frame's room in memory; received frames have `HEADROOM` in front.
const CHUNK: usize = 4096;
/// Entries of each ring, and frames for each direction.
const RING: u32 = 512;
/// Frames that are handed over at once: what the kernel sends for one system call. More, or busy polling, are slower.
const BATCH: u32 = 32;
const WARM_UP: usize = 1000;
const PATIENCE: Duration = Duration::from_secs(5);

type Failure = Box<dyn Error + Send + Sync>;

fn main() -> Result<(), Failure> {
    let args: Vec<String> = env::args().skip(1).collect();
    let usage = "usage: bench-xdp ping-pong|rate|bandwidth NETNS:INTERFACE NETNS:INTERFACE [ROUNDS|SECONDS]";
    let (mode, first, second, number) = match args.as_slice() {
        [mode, first, second] => (mode, first, second, None),
        [mode, first, second, number] => (mode, first, second, Some(number.parse()?)),
        _ => return Err(usage.into()),
    };
    let cpus = thread::available_parallelism()?.get();
    let (first, second) = (Side::new(first, 0)?, Side::new(second, cpus - 1)?);
    match mode.as_str() {
        "ping-pong" => ping_pong(&first, &second, number.unwrap_or(100_000)),
        "rate" => flood(&first, &second, SMALL, number.unwrap_or(1), |rate| rate / 1e6),
        "bandwidth" => flood(&first, &second, PAYLOAD + HEADERS, number.unwrap_or(1), |rate| {
            rate * PAYLOAD as f64 * 8.0 / 1e9
        }),
        _ => Err(usage.into()),
    }
}

/// Where one end is.
struct Side {
    namespace: String,
    interface: String,
    core: usize,
}

impl Side {
    fn new(place: &str, core: usize) -> Result<Self, Failure> {
        let (namespace, interface) = place.split_once(':').ok_or("a side is NETNS:INTERFACE")?;
        Ok(Self {
            namespace: namespace.into(),
            interface: interface.into(),
            core,
        })
    }

    /// Takes the thread to the side's namespace and core, and makes its socket.
    fn enter(&self) -> Result<Socket, Failure> {
        if self.namespace != "-" {
            let file = File::open(format!("/run/netns/{}", self.namespace))?;
            rustix::thread::move_into_link_name_space(file.as_fd(), None)?;
        }
        let mut cores = rustix::thread::CpuSet::new();
        cores.set(self.core);
        rustix::thread::sched_setaffinity(None, &cores)?;
        Socket::new(&self.interface)
    }
}

/// Sends a frame to and fro.
fn ping_pong(first: &Side, second: &Side, rounds: usize) -> Result<(), Failure> {
    let ready = Barrier::new(2);
    let over = AtomicBool::new(false);
    let mut times = thread::scope(|scope| {
        let answering = scope.spawn(|| -> Result<(), Failure> {
            let socket = second.enter();
            ready.wait();
            let mut socket = socket?;
            while !over.load(Ordering::Relaxed) {
                if socket.receive(1) > 0 {
                    socket.send(1, SMALL)?;
                }
            }
            Ok(())
        });
        let asking = scope.spawn(|| -> Result<Vec<Duration>, Failure> {
            let socket = first.enter();
            ready.wait();
            let result = socket.and_then(|mut socket| ask(&mut socket, rounds));
            over.store(true, Ordering::Relaxed);
            result
        });
        let times = asking.join().map_err(|_| "the asking side panicked")?;
        answering.join().map_err(|_| "the answering side panicked")??;
        times
    })?;
    times.sort_unstable();
    let mean = times.iter().sum::<Duration>().as_secs_f64() / times.len() as f64;
    let median = times[times.len() / 2].as_secs_f64();
    println!("{:.2} {:.2}", median * 1e6, mean * 1e6);
    Ok(())
}

/// Makes the round trips; what each took, without the first ones.
fn ask(socket: &mut Socket, rounds: usize) -> Result<Vec<Duration>, Failure> {
    let mut times = Vec::with_capacity(rounds.max(1));
    for round in 0..WARM_UP + rounds.max(1) {
        let start = Instant::now();
        socket.send(1, SMALL)?;
        while socket.receive(1) == 0 {
            if start.elapsed() > PATIENCE {
                return Err("no answer: is the interface up, and without another XDP program?".into());
            }
        }
        if round >= WARM_UP {
            times.push(start.elapsed());
        }
    }
    Ok(times)
}

/// Sends as much as goes out for so many seconds, and prints what arrives.
fn flood(
    first: &Side,
    second: &Side,
    len: usize,
    seconds: usize,
    scale: impl Fn(f64) -> f64,
) -> Result<(), Failure> {
    let ready = Barrier::new(2);
    let over = AtomicBool::new(false);
    let (sent, arrived, time) = thread::scope(|scope| {
        let receiving = scope.spawn(|| -> Result<u64, Failure> {
            let socket = second.enter();
            ready.wait();
            let mut socket = socket?;
            let mut arrived = 0;
            // What comes after the last look is not counted.
            while !over.load(Ordering::Acquire) {
                arrived += u64::from(socket.receive(BATCH));
            }
            Ok(arrived)
        });
        let sending = scope.spawn(|| -> Result<(u64, Duration), Failure> {
            let socket = first.enter();
            ready.wait();
            let mut sent = 0;
            let (start, end) = (Instant::now(), Duration::from_secs(seconds.max(1) as u64));
            let result = socket.and_then(|mut socket| {
                while start.elapsed() < end {
                    sent += u64::from(socket.send(BATCH, len)?);
                }
                Ok(start.elapsed())
            });
            over.store(true, Ordering::Release);
            result.map(|time| (sent, time))
        });
        let result = sending.join().map_err(|_| "the sending side panicked")?;
        let arrived = receiving.join().map_err(|_| "the receiving side panicked")??;
        result.map(|(sent, time)| (sent, arrived, time))
    })?;
    if arrived == 0 {
        return Err("nothing arrives: is the interface up, and without another XDP program?".into());
    }
    let lost = 1.0 - arrived as f64 / sent as f64;
    println!(
        "{:.3} {:.3}",
        scale(arrived as f64 / time.as_secs_f64()),
        lost.max(0.0)
    );
    Ok(())
}

/// An AF_XDP socket on queue 0 of an interface, with memory, rings and an XDP program of its own.
struct Socket {
    fd: OwnedFd,
    memory: Mapping,
    fill: Ring<u64>,
    completion: Ring<u64>,
    rx: Ring<libc::xdp_desc>,
    tx: Ring<libc::xdp_desc>,
    /// Frames to send that are free. Those with the lower addresses are for receiving.
    free: Vec<u64>,
    /// Detaches the program when it is closed.
    _link: OwnedFd,
}

impl Socket {
    fn new(interface: &str) -> Result<Self, Failure> {
        let name = std::ffi::CString::new(interface)?;
        // SAFETY: the name ends with a zero.
        let ifindex = unsafe { libc::if_nametoindex(name.as_ptr()) };
        if ifindex == 0 {
            return Err(format!("{interface}: {}", io::Error::last_os_error()).into());
        }
        // SAFETY: a plain system call.
        let fd = owned(unsafe { libc::socket(libc::AF_XDP, libc::SOCK_RAW | libc::SOCK_CLOEXEC, 0) })?;
        let mut memory = Mapping::anonymous(2 * RING as usize * CHUNK)?;
        for frame in memory.bytes().chunks_exact_mut(CHUNK) {
            frame.fill(0);
        }
        // SAFETY: all zero is a value of this structure of numbers.
        let mut umem: libc::xdp_umem_reg = unsafe { std::mem::zeroed() };
        umem.addr = memory.start as u64;
        umem.len = memory.len as u64;
        umem.chunk_size = CHUNK as u32;
        set(&fd, libc::XDP_UMEM_REG, &umem)?;
        for ring in [
            libc::XDP_UMEM_FILL_RING,
            libc::XDP_UMEM_COMPLETION_RING,
            libc::XDP_RX_RING,
            libc::XDP_TX_RING,
        ] {
            set(&fd, ring, &RING)?;
        }
        // SAFETY: all zero is a value of this structure of numbers, and the kernel is told its length.
        let offsets = unsafe {
            let mut offsets: libc::xdp_mmap_offsets = std::mem::zeroed();
            let mut len = size_of_val(&offsets) as libc::socklen_t;
            done(libc::getsockopt(
                fd.as_raw_fd(),
                libc::SOL_XDP,
                libc::XDP_MMAP_OFFSETS,
                (&raw mut offsets).cast(),
                &raw mut len,
            ))?;
            offsets
        };
        let fill = Ring::map(&fd, libc::XDP_UMEM_PGOFF_FILL_RING as i64, &offsets.fr)?;
        let completion = Ring::map(&fd, libc::XDP_UMEM_PGOFF_COMPLETION_RING as i64, &offsets.cr)?;
        let rx = Ring::map(&fd, libc::XDP_PGOFF_RX_RING, &offsets.rx)?;
        let tx = Ring::map(&fd, libc::XDP_PGOFF_TX_RING, &offsets.tx)?;
        bind(&fd, ifindex).map_err(|error| format!("an AF_XDP socket on {interface}: {error}"))?;
        let link = steer(&fd, ifindex).map_err(|error| format!("an XDP program on {interface}: {error}"))?;
        let mut socket = Self {
            fd,
            memory,
            fill,
            completion,
            rx,
            tx,
            free: (RING..2 * RING)
                .map(|frame| u64::from(frame) * CHUNK as u64)
                .collect(),
            _link: link,
        };
        socket.write_headers(&name)?;
        for frame in 0..RING {
            socket.fill.push(u64::from(frame) * CHUNK as u64);
        }
        socket.fill.publish();
        Ok(socket)
    }

    /// Makes all frames to send: UDP to `PORT`, between addresses for tests (RFC 2544).
    fn write_headers(&mut self, interface: &std::ffi::CStr) -> Result<(), Failure> {
        let source = hardware_address(interface)?;
        for frame in self.memory.bytes().chunks_exact_mut(CHUNK).skip(RING as usize) {
            // The other end of a veth takes what is sent to all.
            frame[..6].fill(0xff);
            frame[6..12].copy_from_slice(&source);
            frame[12..24].copy_from_slice(&[8, 0, 0x45, 0, 0, 0, 0, 0, 0x40, 0, 64, 17]);
            frame[26..34].copy_from_slice(&[198, 18, 0, 1, 198, 18, 0, 2]);
            frame[34..36].copy_from_slice(&PORT.to_be_bytes());
            frame[36..38].copy_from_slice(&PORT.to_be_bytes());
        }
        Ok(())
    }

    /// Sends up to `count` frames of `len` bytes; the number sent.
    fn send(&mut self, count: u32, len: usize) -> io::Result<u32> {
        let mut queued = 0;
        while queued < count
            && let Some(addr) = self.free.pop()
        {
            self.tx.push(libc::xdp_desc {
                addr,
                len: len as u32,
                options: 0,
            });
            queued += 1;
        }
        self.tx.publish();
        // SAFETY: no memory is given.
        let sent = unsafe {
            libc::sendto(
                self.fd.as_raw_fd(),
                ptr::null(),
                0,
                libc::MSG_DONTWAIT,
                ptr::null(),
                0,
            )
        };
        if sent < 0 {
            let error = io::Error::last_os_error();
            // The kernel has sent some, and goes on when it is asked again.
            if !matches!(
                error.raw_os_error(),
                Some(libc::EAGAIN | libc::EBUSY | libc::ENOBUFS)
            ) {
                return Err(error);
            }
        }
        while let Some(addr) = self.completion.pop() {
            self.free.push(addr);
        }
        self.completion.release();
        Ok(queued)
    }

    /// Takes up to `count` frames that have arrived, and gives their room back; the number of them.
    fn receive(&mut self, count: u32) -> u32 {
        let mut taken = 0;
        while taken < count
            && let Some(frame) = self.rx.pop()
        {
            self.fill.push(frame.addr & !(CHUNK as u64 - 1));
            taken += 1;
        }
        if taken > 0 {
            self.rx.release();
            self.fill.publish();
        }
        taken
    }
}

/// Memory that is unmapped when it is dropped.
struct Mapping {
    start: *mut u8,
    len: usize,
}

// SAFETY: it is memory, and belongs to whoever has this.
unsafe impl Send for Mapping {}

impl Mapping {
    fn anonymous(len: usize) -> io::Result<Self> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: new memory, wherever the kernel puts it.
        Self::taken(
            unsafe {
                libc::mmap(
                    ptr::null_mut(),
                    len,
                    libc::PROT_READ | libc::PROT_WRITE,
                    flags,
                    -1,
                    0,
                )
            },
            len,
        )
    }

    fn taken(start: *mut libc::c_void, len: usize) -> io::Result<Self> {
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Self {
            start: start.cast(),
            len,
        })
    }

    fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: the mapping has this length. What the kernel writes to it meanwhile is not looked at.
        unsafe { slice::from_raw_parts_mut(self.start, self.len) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped with this length, and nobody has it any more.
        unsafe { libc::munmap(self.start.cast(), self.len) };
    }
}

/// A ring between this thread and the kernel. Entries are put in, or taken out, by one side each.
struct Ring<T> {
    mapping: Mapping,
    offsets: libc::xdp_ring_offset,
    /// Our own position, and the kernel's when it was looked at last.
    own: u32,
    other: u32,
    entry: std::marker::PhantomData<T>,
}

impl<T: Copy> Ring<T> {
    fn map(fd: &OwnedFd, at: i64, offsets: &libc::xdp_ring_offset) -> io::Result<Self> {
        let len = offsets.desc as usize + RING as usize * size_of::<T>();
        let flags = libc::MAP_SHARED | libc::MAP_POPULATE;
        // SAFETY: a ring of the socket, of the length that it has.
        let mapping = Mapping::taken(
            unsafe {
                let access = libc::PROT_READ | libc::PROT_WRITE;
                libc::mmap(ptr::null_mut(), len, access, flags, fd.as_raw_fd(), at)
            },
            len,
        )?;
        Ok(Self {
            mapping,
            offsets: *offsets,
            own: 0,
            other: 0,
            entry: std::marker::PhantomData,
        })
    }

    fn position(&self, offset: u64) -> &AtomicU32 {
        // SAFETY: the kernel told where in the mapping its positions are.
        unsafe { AtomicU32::from_ptr(self.mapping.start.add(offset as usize).cast()) }
    }

    fn entry(&self, position: u32) -> *mut T {
        let entries: *mut T = self.mapping.start.wrapping_add(self.offsets.desc as usize).cast();
        entries.wrapping_add((position % RING) as usize)
    }

    /// Puts an entry in, where there are never more than the ring holds; the kernel sees it after `publish`.
    fn push(&mut self, value: T) {
        // SAFETY: within the mapping, by the remainder.
        unsafe { self.entry(self.own).write(value) };
        self.own = self.own.wrapping_add(1);
    }

    fn publish(&self) {
        self.position(self.offsets.producer)
            .store(self.own, Ordering::Release);
    }

    /// Takes an entry out, if there is one; the kernel has its place again after `release`.
    fn pop(&mut self) -> Option<T> {
        if self.own == self.other {
            self.other = self.position(self.offsets.producer).load(Ordering::Acquire);
            if self.own == self.other {
                return None;
            }
        }
        // SAFETY: within the mapping, by the remainder; the kernel has written it.
        let value = unsafe { self.entry(self.own).read() };
        self.own = self.own.wrapping_add(1);
        Some(value)
    }

    fn release(&self) {
        self.position(self.offsets.consumer)
            .store(self.own, Ordering::Release);
    }
}

/// Binds a socket to queue 0 of the interface. One that was there before goes a little after its process.
fn bind(fd: &OwnedFd, ifindex: u32) -> io::Result<()> {
    let start = Instant::now();
    loop {
        // SAFETY: all zero is a value of this structure of numbers; bind is told its length.
        let result = unsafe {
            let mut address: libc::sockaddr_xdp = std::mem::zeroed();
            address.sxdp_family = libc::AF_XDP as u16;
            address.sxdp_flags = libc::XDP_COPY | libc::XDP_USE_NEED_WAKEUP;
            address.sxdp_ifindex = ifindex;
            let len = size_of_val(&address) as libc::socklen_t;
            done(libc::bind(fd.as_raw_fd(), (&raw const address).cast(), len))
        };
        match result {
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) && start.elapsed() < PATIENCE => {
                thread::sleep(Duration::from_millis(5));
            }
            result => return result,
        }
    }
}

fn set<T>(fd: &OwnedFd, option: libc::c_int, value: &T) -> io::Result<()> {
    // SAFETY: the kernel reads as many bytes as the value has.
    done(unsafe {
        let len = size_of::<T>() as libc::socklen_t;
        libc::setsockopt(
            fd.as_raw_fd(),
            libc::SOL_XDP,
            option,
            ptr::from_ref(value).cast(),
            len,
        )
    })
}

fn done(result: libc::c_int) -> io::Result<()> {
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

fn owned(fd: libc::c_int) -> io::Result<OwnedFd> {
    done(fd)?;
    // SAFETY: the kernel has just made it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn hardware_address(interface: &std::ffi::CStr) -> io::Result<[u8; 6]> {
    // SAFETY: a plain system call.
    let socket = owned(unsafe { libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) })?;
    // SAFETY: all zero is a value of this structure; the kernel writes the address to it.
    unsafe {
        let mut request: libc::ifreq = std::mem::zeroed();
        for (to, from) in request.ifr_name.iter_mut().zip(interface.to_bytes()) {
            *to = *from as libc::c_char;
        }
        done(libc::ioctl(
            socket.as_raw_fd(),
            libc::SIOCGIFHWADDR,
            &raw mut request,
        ))?;
        let data = request.ifr_ifru.ifru_hwaddr.sa_data;
        Ok(std::array::from_fn(|index| data[index] as u8))
    }
}

// Of linux/bpf.h.
const BPF_MAP_CREATE: libc::c_long = 0;
const BPF_MAP_UPDATE_ELEM: libc::c_long = 2;
const BPF_PROG_LOAD: libc::c_long = 5;
const BPF_LINK_CREATE: libc::c_long = 28;
const BPF_MAP_TYPE_XSKMAP: u32 = 17;
const BPF_PROG_TYPE_XDP: u32 = 6;
const BPF_XDP: u32 = 37;
const XDP_FLAGS_DRV_MODE: u32 = 4;

/// `bpf(2)` with the first fields of its attributes, as 32-bit words.
fn bpf(command: libc::c_long, words: &[u32]) -> io::Result<libc::c_int> {
    // SAFETY: the kernel reads as many bytes as there are; what they point to lives until then.
    let result = unsafe { libc::syscall(libc::SYS_bpf, command, words.as_ptr(), size_of_val(words)) };
    done(result as libc::c_int)?;
    Ok(result as libc::c_int)
}

/// The two words of a pointer, as the kernel reads it from a 64-bit field.
fn pointer<T>(to: *const T) -> [u32; 2] {
    let addr = (to as u64).to_ne_bytes();
    [0, 4].map(|at| u32::from_ne_bytes([addr[at], addr[at + 1], addr[at + 2], addr[at + 3]]))
}

/// Attaches a program to the interface, in the driver, that leads UDP to `PORT` to the socket and passes all else.
fn steer(socket: &OwnedFd, ifindex: u32) -> io::Result<OwnedFd> {
    let map = owned(bpf(BPF_MAP_CREATE, &[BPF_MAP_TYPE_XSKMAP, 4, 4, 1])?)?;
    let (key, value) = (0u32, socket.as_raw_fd());
    let ([k0, k1], [v0, v1]) = (pointer(&raw const key), pointer(&raw const value));
    bpf(
        BPF_MAP_UPDATE_ELEM,
        &[map.as_raw_fd() as u32, 0, k0, k1, v0, v1, 0, 0],
    )?;

    // code, destination | source << 4, offset, immediate
    let code = |code: u8, registers: u8, offset: i16, immediate: i32| {
        u64::from(code)
            | u64::from(registers) << 8
            | u64::from(offset as u16) << 16
            | u64::from(immediate as u32) << 32
    };
    let port = i32::from(u16::from_ne_bytes(PORT.to_be_bytes()));
    let ethertype = i32::from(u16::from_ne_bytes([8, 0]));
    let program = [
        code(0x61, 0x16, 16, 0),              // r6 = receive queue
        code(0x61, 0x12, 0, 0),               // r2 = data
        code(0x61, 0x13, 4, 0),               // r3 = its end
        code(0xbf, 0x24, 0, 0),               // r4 = r2
        code(0x07, 0x04, 0, 42),              // r4 += headers
        code(0x2d, 0x34, 14, 0),              // too short: pass
        code(0x69, 0x24, 12, 0),              // Ethertype
        code(0x55, 0x04, 12, ethertype),      // not IPv4: pass
        code(0x71, 0x24, 14, 0),              // version and header length
        code(0x55, 0x04, 10, 0x45),           // options: pass
        code(0x71, 0x24, 23, 0),              // protocol
        code(0x55, 0x04, 8, 17),              // not UDP: pass
        code(0x69, 0x24, 36, 0),              // destination port
        code(0x55, 0x04, 6, port),            // another: pass
        code(0x18, 0x11, 0, map.as_raw_fd()), // r1 = map
        code(0x00, 0x00, 0, 0),               // its second half
        code(0xbf, 0x62, 0, 0),               // r2 = r6
        code(0xb7, 0x03, 0, 2),               // r3 = XDP_PASS, where no socket has that queue
        code(0x85, 0x00, 0, 51),              // r0 = bpf_redirect_map
        code(0x95, 0x00, 0, 0),               // return r0
        code(0xb7, 0x00, 0, 2),               // pass: r0 = XDP_PASS
        code(0x95, 0x00, 0, 0),               // return r0
    ];
    let program_of = pointer(program.as_ptr());
    let licence = pointer(c"MIT".as_ptr());
    let words = [
        BPF_PROG_TYPE_XDP,
        program.len() as u32,
        program_of[0],
        program_of[1],
        licence[0],
        licence[1],
    ];
    let program = owned(bpf(BPF_PROG_LOAD, &words)?)?;
    owned(bpf(
        BPF_LINK_CREATE,
        &[program.as_raw_fd() as u32, ifindex, BPF_XDP, XDP_FLAGS_DRV_MODE],
    )?)
}
