//! The UDP link without a transport: what a packet costs each side, and what goes through.
//!
//!     bench-link SOURCE DEST [SOURCE-NETNS DEST-NETNS]
//!
//! Two threads, one for each side, move packets from the memory of one to that of the other, with ICRC made and
//! checked, as the engine does. Prints, for each payload size: Gbit/s, and nanoseconds of CPU time (the threads' own)
//! for each packet and side. Port 4791 must be free.

use std::env;
use std::error::Error;
use std::fs::File;
use std::net::{IpAddr, UdpSocket};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use ferroce_engine::link::udp::UdpLink;
use ferroce_engine::link::{Link, Path, Qpns, Transmit};
use ferroce_engine::memory::Memory;
use ferroce_engine::memory::process::ProcessMemory;
use rustix::time::{ClockId, clock_gettime};

/// Bytes of BTH and ICRC.
const OVERHEAD: usize = 16;
const MEMORY: usize = 1 << 20;
const QPNS: Qpns = Qpns {
    local: 1,
    dest: 1 << 16 | 1,
};
/// As the daemon asks for; the kernel gives no more than `rmem_max`.
const RECEIVE_BUFFER: usize = 8 << 20;
const TIME: Duration = Duration::from_secs(1);

struct Side {
    ip: IpAddr,
    namespace: Option<String>,
    core: usize,
}

impl Side {
    /// Takes the thread to the side's namespace and core, and makes its link.
    fn enter(&self, port: u16) -> Result<UdpLink, Box<dyn Error>> {
        if let Some(name) = &self.namespace {
            let file = File::open(format!("/run/netns/{name}"))?;
            rustix::thread::move_into_link_name_space(std::os::fd::AsFd::as_fd(&file), None)?;
        }
        let mut cores = rustix::thread::CpuSet::new();
        cores.set(self.core);
        rustix::thread::sched_setaffinity(None, &cores)?;
        let socket = UdpSocket::bind((self.ip, port))?;
        rustix::net::sockopt::set_socket_recv_buffer_size(&socket, RECEIVE_BUFFER)?;
        Ok(UdpLink::new(socket.into(), 1, false, Box::new(|_| None))?)
    }
}

/// CPU time of this thread.
fn cpu() -> Duration {
    let now = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = env::args().skip(1).collect();
    let [source, dest, namespaces @ ..] = args.as_slice() else {
        return Err("usage: bench-link SOURCE DEST [SOURCE-NETNS DEST-NETNS]".into());
    };
    let side = |ip: &str, index: usize| -> Result<Side, Box<dyn Error>> {
        Ok(Side {
            ip: ip.parse()?,
            namespace: namespaces.get(index).cloned(),
            core: index,
        })
    };
    let (sender, receiver) = (side(source, 0)?, side(dest, 1)?);
    println!(
        "{:>8} {:>9} {:>9} {:>9} {:>9} {:>7}",
        "bytes", "Gbit/s", "Mpps", "tx ns", "rx ns", "lost"
    );
    for size in [64, 256, 1024, 4096] {
        run(&sender, &receiver, size)?;
    }
    Ok(())
}

/// Moves packets with `size` bytes of payload for [`TIME`], and prints what that cost.
fn run(sender: &Side, receiver: &Side, size: usize) -> Result<(), Box<dyn Error>> {
    // Packets taken out of the receiver's socket.
    let received = AtomicU64::new(0);
    let lost = AtomicU64::new(0);
    let stop = AtomicU64::new(0);
    let (ready, is_ready) = std::sync::mpsc::channel();
    thread::scope(|scope| {
        let receiving = scope.spawn(|| -> Result<f64, String> {
            let mut link = receiver.enter(4791).map_err(|error| error.to_string())?;
            ready.send(()).map_err(|error| error.to_string())?;
            let memory = ProcessMemory::new().map_err(|error| error.to_string())?;
            let target = vec![0u8; MEMORY];
            let (mut at, mut good, mut busy) = (0, 0u64, Duration::ZERO);
            while stop.load(Ordering::Acquire) == 0 {
                let before = cpu();
                let taken = link.receive(&mut |packet| {
                    let payload = packet.data.get(12..packet.data.len() - 4).unwrap_or_default();
                    if packet.icrc.valid(packet) && memory.write(target.as_ptr() as u64 + at, payload).is_ok()
                    {
                        good += 1;
                    }
                    at = (at + size as u64) % (MEMORY as u64 - 4096);
                });
                let taken = taken.map_err(|error| error.to_string())?;
                if taken > 0 {
                    busy += cpu() - before;
                    received.fetch_add(taken as u64, Ordering::Release);
                }
            }
            if good != received.load(Ordering::Relaxed) {
                return Err("packets came damaged".into());
            }
            Ok(busy.as_nanos() as f64 / good as f64)
        });
        is_ready.recv().map_err(|_| "the receiver did not start")?;
        let sending = scope.spawn(|| -> Result<(u64, f64, Duration), String> {
            let mut link = sender.enter(0).map_err(|error| error.to_string())?;
            let memory = ProcessMemory::new().map_err(|error| error.to_string())?;
            let source = vec![7u8; MEMORY];
            let path = Path {
                ifindex: 1,
                ..Path::between(sender.ip, receiver.ip)
            };
            let window = u64::from(link.window(size + OVERHEAD)) / (size + OVERHEAD) as u64;
            let (mut sent, mut at, start, mut busy) = (0u64, 0u64, Instant::now(), Duration::ZERO);
            while start.elapsed() < TIME {
                // What the receiver has not taken for long is lost: go on without it.
                let patience = Instant::now();
                while sent - received.load(Ordering::Acquire) - lost.load(Ordering::Relaxed) >= window {
                    if patience.elapsed() > Duration::from_millis(50) {
                        lost.store(sent - received.load(Ordering::Acquire), Ordering::Relaxed);
                    }
                    std::hint::spin_loop();
                }
                let before = cpu();
                for _ in 0..64.min(window) {
                    let from = source.as_ptr() as u64 + at;
                    let taken = link.packet(&path, QPNS, 12 + size, &mut |bytes| {
                        bytes[..12].copy_from_slice(&[4, 0, 255, 255, 0, 1, 0, 1, 0, 0, 0, 0]);
                        memory.read(from, &mut bytes[12..])
                    });
                    sent += u64::from(taken.is_ok());
                    at = (at + size as u64) % (MEMORY as u64 - 4096);
                }
                link.flush().map_err(|error| error.to_string())?;
                busy += cpu() - before;
            }
            let elapsed = start.elapsed();
            Ok((sent, busy.as_nanos() as f64 / sent as f64, elapsed))
        });
        let sent = sending.join().map_err(|_| "the sender panicked")?;
        stop.store(1, Ordering::Release);
        let rx = receiving.join().map_err(|_| "the receiver panicked")??;
        let (sent, tx, elapsed) = sent?;
        let got = received.load(Ordering::Relaxed);
        let rate = got as f64 / elapsed.as_secs_f64();
        println!(
            "{size:>8} {:>9.2} {:>9.3} {tx:>9.0} {rx:>9.0} {:>7}",
            rate * size as f64 * 8.0 / 1e9,
            rate / 1e6,
            sent - got
        );
        Ok::<(), Box<dyn Error>>(())
    })
}
