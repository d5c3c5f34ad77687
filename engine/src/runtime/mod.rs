//! The engine of one process and one device: it drives the transport with the application's own threads.
//!
//! Posting sends at once; polling an empty CQ receives. A helper thread, asleep unless needed, serves what the
//! application's threads do not: armed CQs, timers, and requests of peers while the application is elsewhere.

mod clock;
mod core;
mod ends;
mod exit;
mod fork;
mod guest;
mod helper;
mod multicast;
mod registry;

use std::cell::OnceCell;
use std::collections::BTreeMap;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use ferroce_wire::gid::Gid;
use ferroce_wire::mtu::PathMtu;
use parking_lot::{Mutex, MutexGuard, RwLock};

use crate::control::{ControlError, DeviceInfo, Lease, QpReport, Report};
use crate::device::{Acks, Device, DeviceConfig, Limits, PdId, QpInit};
use crate::link::udp::{self, UdpLink};
use crate::link::xdp::seat::Seat;
use crate::link::xdp::{self, XdpLink};
use crate::link::{Link, Path, Reach, wrap};
use crate::memory::Memory;
use crate::memory::device::DeviceMemory;
use crate::memory::process::ProcessMemory;
use crate::queue::Cq;
use crate::time::Time;
use crate::verbs::{Access, Advice, AsyncEvent, QpCap, QpType, Sge, VerbsError};

use self::core::{Core, Round};
use self::ends::Ends;
pub use self::guest::Guest;
use self::helper::Helper;

/// Time in vain after which another thread may have the CPU: where there are more that poll than CPUs, it may be the
/// one that this one waits for.
const YIELD_AFTER: Duration = Duration::from_micros(20);

/// How long a program that names a destination waits until it is known where its packets go, and between two looks.
const HOP_PATIENCE: Duration = Duration::from_millis(50);
const HOP_PAUSE: Duration = Duration::from_micros(200);

/// How long exit and close wait for the engine's lock before they give up on the last packets.
const LAST_WORDS: Duration = Duration::from_millis(200);
/// How long they pause where there is no room for them.
const LAST_PAUSE: Duration = Duration::from_micros(500);

/// Why a device could not be opened; one line that says what to do.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The daemon did not lease a slot.
    #[error(transparent)]
    Control(#[from] ControlError),
    /// The operating system refused something.
    #[error("{what}: {source}")]
    System {
        /// What was tried.
        what: &'static str,
        /// What the system said.
        source: std::io::Error,
    },
    /// A setting in the environment can't be used.
    #[error("{0}")]
    Setting(String),
}

impl OpenError {
    /// What a call that failed for this reason leaves in `errno`.
    pub fn errno(&self) -> i32 {
        match self {
            OpenError::Control(error) => error.errno(),
            OpenError::System { source, .. } => source.raw_os_error().unwrap_or(libc::EIO),
            OpenError::Setting(_) => libc::EINVAL,
        }
    }
}

/// Names a subscription to asynchronous events.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct SubscriptionId(u64);

/// Called with each asynchronous event, under the engine's lock: it must not call the engine.
pub type Subscriber = Box<dyn Fn(&AsyncEvent) + Send + Sync>;

/// The engine of one device in this process, shared by all who opened it.
pub struct Engine {
    shared: Arc<Shared>,
    helper: Helper,
}

/// What the application's threads and the helper thread share.
struct Shared {
    core: Mutex<Core>,
    lease: Lease,
    info: RwLock<Arc<DeviceInfo>>,
    memory: Arc<ProcessMemory>,
    device_memory: DeviceMemory,
    limits: Limits,
    subscribers: Mutex<BTreeMap<u64, Subscriber>>,
    next_subscriber: AtomicU64,
    pulse: helper::Pulse,
    /// The daemon has removed the device.
    gone: AtomicBool,
    /// The process that opened it, as [`fork::generation`] tells.
    generation: u32,
}

impl Engine {
    /// Opens a device by name, or gives the engine that this process already has for it.
    pub fn open(device: &str) -> Result<Arc<Engine>, OpenError> {
        let _guest = Guest::enter();
        fork::watch();
        exit::watch();
        registry::get_or_open(device, || Engine::start(device))
    }

    /// Sends what is still to be sent, for the process ends.
    fn last_words(&self) {
        if self.usable() {
            self.shared.last_words();
        }
    }

    fn start(device: &str) -> Result<Engine, OpenError> {
        let lease = Lease::acquire(device)?;
        let info = Arc::new(lease.info());
        let memory = Arc::new(ProcessMemory::new().map_err(|source| OpenError::System {
            what: "the handler of memory faults",
            source,
        })?);
        let mut seed = [0; 32];
        getrandom::fill(&mut seed).map_err(|error| OpenError::System {
            what: "random numbers",
            source: error.into(),
        })?;
        let link = open_link(&lease)?;
        let device = Device::new(DeviceConfig {
            slot: lease.slot(),
            memory: memory.clone(),
            seed,
            mtu: path_mtu(&info)?,
            limits: Limits {
                max_mcast_grp: udp::most_groups(),
                ..Limits::default()
            },
            window: Box::new(|packet_len| link.window(packet_len)),
        });
        let limits = device.limits().clone();
        let shared = Arc::new(Shared {
            core: Mutex::new(Core::new(device, link)),
            lease,
            info: RwLock::new(info),
            memory,
            device_memory: DeviceMemory::new(limits.max_dm_size),
            limits,
            subscribers: Mutex::default(),
            next_subscriber: AtomicU64::new(0),
            pulse: helper::Pulse::new().map_err(|source| OpenError::System {
                what: "eventfd",
                source,
            })?,
            gone: AtomicBool::new(false),
            generation: fork::generation(),
        });
        let helper = Helper::start(shared.clone()).map_err(|source| OpenError::System {
            what: "the helper thread did not start",
            source,
        })?;
        Ok(Engine { shared, helper })
    }

    /// The device as the daemon last described it: MTU, port state, GID table.
    pub fn info(&self) -> Arc<DeviceInfo> {
        self.shared.info.read().clone()
    }

    /// What the device can do at most.
    pub fn limits(&self) -> &Limits {
        &self.shared.limits
    }

    /// The device memory that this process has left. A forked child has what it was at the fork.
    pub fn device_memory(&self) -> &DeviceMemory {
        &self.shared.device_memory
    }

    /// The slot leased: the high 8 bits of this process's QPNs.
    pub fn slot(&self) -> u8 {
        self.shared.lease.slot()
    }

    /// Whether this process may use the engine: false in a forked child.
    pub fn usable(&self) -> bool {
        self.shared.usable()
    }

    /// Whether the device was removed: what it had can be destroyed, and nothing else be done.
    pub fn is_gone(&self) -> bool {
        self.shared.gone.load(Ordering::Relaxed)
    }

    /// Calls `subscriber` with every asynchronous event from now on.
    pub fn subscribe(&self, subscriber: Subscriber) -> SubscriptionId {
        let id = self.shared.next_subscriber.fetch_add(1, Ordering::Relaxed);
        self.shared.subscribers.lock().insert(id, subscriber);
        SubscriptionId(id)
    }

    /// Ends a subscription; when it returns the subscriber is not called any more.
    pub fn unsubscribe(&self, id: SubscriptionId) {
        if self.usable() {
            self.shared.subscribers.lock().remove(&id.0);
        }
    }

    /// Resolves an address vector: the local GID gives the RoCE version and the source, `dgid` the destination address.
    ///
    /// `Invalid` if the GID index holds nothing or is of the other IP version (but packets to a multicast group can
    /// leave from any GID that is of its version), or the destination is no address; or a group over RoCE v1. `Gone`.
    pub fn resolve(
        &self,
        sgid_index: u8,
        dgid: [u8; 16],
        traffic_class: u8,
        hop_limit: u8,
        flow_label: u32,
        service_level: u8,
    ) -> Result<Path, VerbsError> {
        if self.is_gone() {
            return Err(VerbsError::Gone);
        }
        let info = self.info();
        let Ends {
            version,
            source,
            dest,
        } = ends::of(&info, sgid_index, Gid(dgid))?;
        let path = Path {
            version,
            source,
            dest,
            ifindex: info.ifindex,
            sgid_index,
            traffic_class,
            hop_limit,
            flow_label: flow_label & 0xf_ffff,
            service_level,
        };
        let is_own = info.gids.iter().flatten().any(|entry| entry.addr == dest);
        if !is_own && self.usable() {
            self.await_hop(&path);
        }
        Ok(path)
    }

    /// Waits a little for the next hop of a path where the link must look for it, as kernels do for RoCE: what goes
    /// before it is known goes another way, and what follows could overtake it.
    fn await_hop(&self, path: &Path) {
        let _guest = Guest::enter();
        let reach = || self.shared.core.lock().link_mut().reach(path);
        if reach() != Reach::Unknown {
            return;
        }
        let end = clock::now() + HOP_PATIENCE;
        // While a neighbour is asked for, it is the kernel's to send to it.
        while reach() != Reach::Own && clock::now() < end {
            std::thread::sleep(HOP_PAUSE);
        }
    }

    /// Checks that memory to be registered is mapped with the access wanted, and faults it in: not that of
    /// [`Access::ON_DEMAND`], which is paged in when it is used.
    pub fn populate(&self, addr: u64, len: u64, access: Access) -> Result<(), VerbsError> {
        let now = if access.contains(Access::ON_DEMAND) {
            0
        } else {
            len
        };
        self.page_in(addr, now, access.intersects(Access::WRITABLE))
    }

    /// Pages in what work requests of `pd` will use. The errors are those of [`Device::pageable`], and EFAULT for what
    /// is not mapped, or not for writing where that is wanted.
    pub fn advise(&self, pd: PdId, advice: Advice, sges: &[Sge]) -> Result<(), VerbsError> {
        let writable = advice == Advice::PrefetchWrite;
        let pageable = |session: &Session<'_>| {
            let addr = |sge: &Sge| Ok((session.pageable(pd, sge, writable)?, sge.length.into()));
            sges.iter().map(addr).collect::<Result<Vec<_>, _>>()
        };
        let ranges = pageable(&self.lock()?)?;
        if advice == Advice::PrefetchNoFault {
            // What is there is there for the engine too.
            return Ok(());
        }
        ranges
            .into_iter()
            .try_for_each(|(addr, len)| self.page_in(addr, len, writable))
    }

    fn page_in(&self, addr: u64, len: u64, writable: bool) -> Result<(), VerbsError> {
        self.shared
            .memory
            .populate(addr, len, writable)
            .map_err(|_| VerbsError::Fault)
    }

    /// The device, for as long as the session lives; when it ends, what became ready is sent.
    pub fn lock(&self) -> Result<Session<'_>, VerbsError> {
        if !self.usable() {
            return Err(VerbsError::Gone);
        }
        let guest = Guest::enter();
        Ok(Session {
            core: self.shared.core.lock(),
            shared: &self.shared,
            now: OnceCell::new(),
            _guest: guest,
        })
    }

    /// Sends what posts have left for the next poll: what polling a CQ that is not empty does.
    #[inline]
    pub fn send_posted(&self) {
        let pulse = &self.shared.pulse;
        if pulse.owes() {
            self.drive();
        } else if !pulse.naps() {
            // Who finds completions each time polls as well.
            let _guest = Guest::enter();
            pulse.driven(clock::now());
        }
    }

    /// Receives a batch, runs due timers and sends: what polling an empty CQ does.
    ///
    /// Where another thread is at it already, this one has nothing to do.
    pub fn drive(&self) {
        if !self.usable() {
            return;
        }
        let _guest = Guest::enter();
        let now = clock::now();
        self.shared.pulse.driven(now);
        let Some(mut core) = self.shared.core.try_lock() else {
            if self.shared.pulse.works() {
                std::thread::yield_now();
            }
            return;
        };
        if core.round(now, Acks::MayWait) != Round::Nothing {
            self.shared.settle(&mut core);
            // It may have taken longer than the helper has patience.
            self.shared.pulse.driven(core.worked_at(now));
        }
        let idles = core.idles(now, YIELD_AFTER);
        drop(core);
        if idles {
            std::thread::yield_now();
        }
    }

    /// Asks for one event when `cq` gets a completion (only a solicited one or an error, if so wanted).
    pub fn arm(&self, cq: &Cq, solicited_only: bool) {
        if !self.usable() {
            return;
        }
        let _guest = Guest::enter();
        cq.arm(solicited_only);
        self.shared.pulse.armed();
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        let _guest = Guest::enter();
        self.last_words();
        if self.usable() {
            self.helper.stop(&self.shared);
        }
    }
}

impl Shared {
    fn usable(&self) -> bool {
        self.generation == fork::generation()
    }

    /// After any work under the lock: hands out events, and sees to it that the helper wakes in time.
    fn settle(&self, core: &mut Core) {
        while let Some(event) = core.take_event() {
            self.publish(&event);
        }
        self.pulse.owe(core.has_unsent_posts());
        self.pulse.expect(core.next_deadline(), core.blocked());
    }

    fn publish(&self, event: &AsyncEvent) {
        for subscriber in self.subscribers.lock().values() {
            subscriber(event);
        }
    }

    /// The device is removed: the port goes down for good, and all work flushes.
    fn end(&self) {
        if self.gone.swap(true, Ordering::Relaxed) {
            return;
        }
        let mut info = DeviceInfo::clone(&self.info.read());
        info.up = false;
        info.gids.clear();
        *self.info.write() = Arc::new(info);
        let mut core = self.core.lock();
        core.device.end(clock::now());
        self.settle(&mut core);
    }

    /// Sends what is still to be sent before the engine goes: no kernel does it later.
    fn last_words(&self) {
        let end = clock::now() + LAST_WORDS;
        let Some(mut core) = self.core.try_lock_for(LAST_WORDS) else {
            return;
        };
        loop {
            core.transmit(clock::now(), Acks::Send);
            if !core.holds_back() || clock::now() > end {
                return;
            }
            std::thread::sleep(LAST_PAUSE);
        }
    }

    fn report(&self) -> Report {
        let core = self.core.lock();
        let mut counters = Vec::new();
        core.device
            .counters(&mut |name, value| counters.push((name.to_owned(), value)));
        // Both count packets.
        core.link()
            .counters(&mut |name, value| counters.push((format!("link_{name}"), value)));
        let qps: Vec<QpReport> = core.device.qp_reports();
        Report { qps, counters }
    }
}

/// The device under the engine's lock.
pub struct Session<'a> {
    core: MutexGuard<'a, Core>,
    shared: &'a Shared,
    /// The time of its first look at the clock.
    now: OnceCell<Time>,
    /// Left last, when the lock is free.
    _guest: Guest,
}

impl Session<'_> {
    /// The time, the same throughout the session.
    pub fn now(&self) -> Time {
        *self.now.get_or_init(clock::now)
    }

    /// As [`Device::create_qp`], of which the link is to know.
    ///
    /// # Errors
    /// Those of the device.
    pub fn create_qp(&mut self, init: QpInit) -> Result<(u32, QpCap), VerbsError> {
        let is_acknowledged = !matches!(init.qp_type, QpType::Uc | QpType::Ud);
        let made = self.core.device.create_qp(init)?;
        if !is_acknowledged {
            self.core.expect_bursts();
        }
        Ok(made)
    }
}

impl Deref for Session<'_> {
    type Target = Device;
    fn deref(&self) -> &Device {
        &self.core.device
    }
}

impl DerefMut for Session<'_> {
    fn deref_mut(&mut self) -> &mut Device {
        &mut self.core.device
    }
}

impl Drop for Session<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            // The device may be half changed, and a second panic would end the program.
            return;
        }
        // Most receives are posted so.
        if !self.core.is_quiet() {
            let now = self.now();
            self.core.transmit_posted(now, self.shared.pulse.naps());
            self.shared.pulse.worked(self.core.worked_at(now).since(now));
        }
        self.shared.settle(&mut self.core);
        if self.core.floods() {
            MutexGuard::unlocked(&mut self.core, std::thread::yield_now);
        }
    }
}

/// The path MTU that the interface carries.
fn path_mtu(info: &DeviceInfo) -> Result<PathMtu, OpenError> {
    PathMtu::from_netdev_mtu(info.mtu as usize).ok_or_else(|| {
        let DeviceInfo {
            name, netdev, mtu, ..
        } = info;
        OpenError::Setting(format!(
            "{name}: the MTU of {netdev} is {mtu}: RoCE needs more, see `ip link set mtu`"
        ))
    })
}

/// The link of a lease, by UDP or by a seat of its own, wrapped as the environment asks.
fn open_link(lease: &Lease) -> Result<Box<dyn Link>, OpenError> {
    let system = |what| move |source| OpenError::System { what, source };
    let info = lease.info();
    let socket = lease
        .socket()
        .try_clone_to_owned()
        .map_err(system("the leased socket"))?;
    let udp = UdpLink::new(socket, lease.slot(), info.lo, Box::new(lease.neighbours()))
        .map_err(system("the UDP link did not start"))?;
    let link: Box<dyn Link> = match lease.take_seat() {
        None => Box::new(udp),
        Some(files) => {
            let geometry = files.port.geometry;
            let seat = Seat::open(geometry, files.seat, files.control, files.umem, files.sockets)
                .map_err(system("the AF_XDP seat did not open"))?;
            let config = xdp::Config {
                slot: lease.slot(),
                ifindex: info.ifindex,
                mtu: info.mtu,
                geometry,
                ask: Box::new(lease.asker()),
            };
            let link = XdpLink::new(seat, Box::new(udp.half()), config);
            Box::new(link.map_err(system("the AF_XDP link did not start"))?)
        }
    };
    wrap::from_env(link).map_err(OpenError::Setting)
}
