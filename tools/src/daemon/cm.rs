//! RDMA CM of all programs: the engine's [`RdmaCm`] with queue pair 1, the routes of the host and a clock around it.
//!
//! A session is a connection to the daemon, from its first request of RDMA CM on. What is to be told to programs is
//! given as [`Letters`], in the order in which they must read it; MADs leave after them ([`ConnectionManager::transmit`]).

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::mem;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use ferroce_engine::control::DeviceInfo;
use ferroce_engine::control::protocol::{CmAnswer, Reply};
use ferroce_engine::rdma_cm::{Command, Errno, Id, IdStatus, Keepsake, Output, RdmaCm, Session};
use ferroce_engine::time::Time;
use rustix::time::{ClockId, clock_gettime};
use tracing::{debug, info};

use super::gsi::Gsi;
use super::news::News;
use super::resolve::{Outcome, Resolver};
use crate::netlink::Interfaces;
use crate::netlink::route::Query;

/// How long programs of an earlier daemon have to come: they look for a new one about once a second.
pub const RESTORE_TIME: Duration = Duration::from_secs(2);

/// What sessions are to be told, in this order.
pub type Letters = Vec<(Session, Reply)>;

/// RDMA CM of one network namespace.
pub struct ConnectionManager {
    cm: RdmaCm,
    gsi: Gsi,
    resolver: Resolver,
    sessions: BTreeSet<Session>,
    /// Ways that were found at once.
    resolved: Vec<(u64, Outcome)>,
    restores: Vec<Restore>,
}

/// What a program had, as far as it could not go on yet.
struct Restore {
    session: Session,
    left: Vec<Keepsake>,
    deadline: Instant,
}

/// A command that is about to be answered.
struct Pending {
    session: Session,
    answer: CmAnswer,
}

impl ConnectionManager {
    /// On the socket of slot 0, given twice.
    pub fn new(socket: OwnedFd, same: OwnedFd) -> io::Result<Self> {
        // The system's generator is there, or the daemon is not to run.
        let random = || getrandom::u64().expect("the system gives random numbers");
        let start = random() as u32;
        Ok(Self {
            cm: RdmaCm::new(Box::new(random)),
            gsi: Gsi::new(socket, same, start, time())?,
            resolver: Resolver::new()?,
            sessions: BTreeSet::new(),
            resolved: Vec::new(),
            restores: Vec::new(),
        })
    }

    /// Programs of an earlier daemon are going to come, each with what it has.
    pub fn expect_restores(&mut self) {
        self.cm.expect_restores(time() + RESTORE_TIME);
    }

    /// Readable when there is news of neighbours.
    pub fn neighbours_fd(&self) -> BorrowedFd<'_> {
        self.resolver.as_fd()
    }

    /// Takes over the present interfaces.
    pub fn follow(&mut self, interfaces: &Interfaces) {
        let addresses = interfaces.values().flat_map(|it| &it.addresses);
        self.cm.set_addresses(addresses.map(|it| it.ip).collect());
        self.resolver.follow(interfaces);
    }

    /// Takes over the present devices.
    pub fn set_devices(&mut self, devices: &[DeviceInfo]) -> Letters {
        self.gsi.set_devices(devices);
        self.cm.set_devices(time(), devices);
        self.letters(None)
    }

    /// Does what a program of that user asks.
    pub fn command(&mut self, session: Session, uid: u32, sequence: u32, command: Command) -> Letters {
        self.open(session, uid);
        let answered = !matches!(command, Command::Taken { .. });
        let result = self.cm.command(time(), session, command);
        debug!(session, sequence, ?result, "RDMA CM");
        let answer = CmAnswer { sequence, result };
        self.letters(answered.then_some(Pending { session, answer }))
    }

    /// Answers a command that is not to be done.
    pub fn refuse(&mut self, session: Session, uid: u32, sequence: u32, error: Errno) -> Letters {
        self.open(session, uid);
        let result = Err(error);
        let answer = CmAnswer { sequence, result };
        self.letters(Some(Pending { session, answer }))
    }

    /// Goes on with what a program had from an earlier daemon. What can't go on now is tried again until `patience` ends:
    /// its device may be one that comes back with a lease.
    pub fn restore(
        &mut self,
        session: Session,
        uid: u32,
        keepsakes: Vec<Keepsake>,
        patience: Duration,
    ) -> Letters {
        self.open(session, uid);
        // Until they are all here, none of their numbers is to be given to another.
        self.cm.skip_numbers(session, highest(&keepsakes));
        let restore = Restore {
            session,
            left: keepsakes,
            deadline: Instant::now() + patience,
        };
        self.restores.push(restore);
        self.go_on_restoring()
    }

    /// Lets nothing go on of what a program had from an earlier daemon.
    pub fn refuse_restore(&mut self, session: Session, uid: u32, keepsakes: &[Keepsake]) -> Letters {
        self.open(session, uid);
        let lost: Vec<Id> = keepsakes.iter().map(|it| it.id).collect();
        // The program still has these, until it destroys them.
        self.cm.skip_numbers(session, highest(keepsakes));
        vec![(session, Reply::CmRestored { lost })]
    }

    /// Tries again what could not go on; what is late is lost.
    pub fn go_on_restoring(&mut self) -> Letters {
        let now = time();
        let mut over = Letters::new();
        for mut restore in mem::take(&mut self.restores) {
            let session = restore.session;
            restore
                .left
                .retain(|keepsake| keepsake.state.is_some() && !self.cm.restore(now, session, keepsake));
            if restore.left.is_empty() || restore.deadline <= Instant::now() {
                let lost: Vec<Id> = restore.left.iter().map(|it| it.id).collect();
                info!(session, lost = lost.len(), "ids of an earlier daemon go on");
                over.push((session, Reply::CmRestored { lost }));
            } else {
                self.restores.push(restore);
            }
        }
        over.extend(self.letters(None));
        over
    }

    fn open(&mut self, session: Session, uid: u32) {
        if self.sessions.insert(session) {
            self.cm.open(session, uid);
        }
    }

    /// A connection is gone, whether it was a session or not.
    pub fn close(&mut self, session: Session) -> Letters {
        if !self.sessions.remove(&session) {
            return Letters::new();
        }
        self.restores.retain(|it| it.session != session);
        self.cm.close(time(), session);
        self.letters(None)
    }

    /// Takes MADs that have come; what came before an error is done all the same.
    pub fn arrivals(&mut self) -> (Letters, io::Result<()>) {
        let now = time();
        let cm = &mut self.cm;
        let received = self.gsi.receive(now, |arrival| cm.receive(now, arrival));
        (self.letters(None), received)
    }

    /// Takes news of neighbours.
    pub fn neighbours(&mut self) -> io::Result<Letters> {
        let news = self.resolver.news()?;
        self.resolved.extend(news);
        Ok(self.letters(None))
    }

    /// Sends peers what there is for them. When the letters of the same call have gone out: a daemon that dies in between
    /// must not leave a program that does not know what its peer was told, and asks again.
    pub fn transmit(&mut self) {
        self.gsi.transmit(time());
    }

    /// Does what is due.
    pub fn expire(&mut self) -> Letters {
        let now = time();
        if self.cm.deadline().is_some_and(|deadline| deadline <= now) {
            self.cm.timeout(now);
        }
        let mut letters = self.letters(None);
        if !self.restores.is_empty() {
            letters.extend(self.go_on_restoring());
        }
        letters
    }

    /// When [`ConnectionManager::expire`] has something to do.
    pub fn deadline(&self) -> Option<Instant> {
        let restores = self.restores.iter().map(|it| it.deadline);
        restores.chain(self.timer().map(instant)).min()
    }

    /// Whether it has something to do now.
    pub fn is_due(&self) -> bool {
        let now = Instant::now();
        self.timer().is_some_and(|timer| timer <= time()) || self.restores.iter().any(|it| it.deadline <= now)
    }

    fn timer(&self) -> Option<Time> {
        let all = [self.cm.deadline(), self.gsi.deadline()];
        all.into_iter().flatten().min()
    }

    /// Until when MADs are not to be received, as there were too many.
    pub fn paused_until(&mut self) -> Option<Instant> {
        self.gsi.paused_until(time()).map(instant)
    }

    /// True while peers are still to be told something, or may have to be: connections that end.
    pub fn is_busy(&self) -> bool {
        self.cm.is_busy() || self.gsi.is_busy()
    }

    /// All ids.
    pub fn status(&self) -> Vec<IdStatus> {
        self.cm.status()
    }

    /// Counters by name.
    pub fn counters(&self) -> Vec<(String, u64)> {
        let mut all = self.gsi.counters();
        self.cm
            .counters(&mut |name, value| all.push((name.to_owned(), value)));
        all
    }

    /// Does what [`RdmaCm`] wants, and gives what it has to say: to each session in one message as a rule, the answer before
    /// the events.
    fn letters(&mut self, mut pending: Option<Pending>) -> Letters {
        let mut all = BTreeMap::<Session, News>::new();
        loop {
            while let Some(output) = self.cm.poll() {
                match output {
                    Output::Send { path, mad, .. } => self.gsi.send(path, mad),
                    Output::Keepsake { session, keepsake } => all.entry(session).or_default().keep(keepsake),
                    Output::Event { session, event } => all.entry(session).or_default().tell(event),
                    Output::Resolve {
                        token,
                        source,
                        dest,
                        ifindex,
                        type_of_service,
                    } => {
                        let query = Query {
                            source,
                            dest,
                            ifindex,
                            type_of_service,
                        };
                        match (self.resolver.start(token, query), &mut pending) {
                            // Only the command itself asks before it is answered.
                            (Some(Err(errno)), Some(pending)) => {
                                pending.answer.result = Err(errno);
                                self.cm.resolve_failed(time(), token);
                            }
                            (outcome, _) => {
                                self.resolved.extend(outcome.map(|outcome| (token, outcome)));
                            }
                        }
                    }
                    Output::ResolveCancel { token } => {
                        self.resolved.retain(|(resolved, _)| *resolved != token);
                        self.resolver.cancel(token);
                    }
                }
            }
            if let Some(Pending { session, answer }) = pending.take() {
                all.entry(session).or_default().answer(answer);
            }
            if self.resolved.is_empty() {
                break;
            }
            for (token, outcome) in mem::take(&mut self.resolved) {
                self.cm.resolved(time(), token, outcome);
            }
        }
        let messages = all.into_iter().flat_map(|(session, news)| {
            let messages = news.into_messages().into_iter();
            messages.map(move |message| (session, Reply::CmNews(message)))
        });
        messages.collect()
    }
}

/// The highest number among keepsakes; 0 without any.
fn highest(keepsakes: &[Keepsake]) -> Id {
    keepsakes.iter().map(|it| it.id).max().unwrap_or(0)
}

/// Now, by the monotonic clock: the same for all daemons of a host.
fn time() -> Time {
    let now = clock_gettime(ClockId::Monotonic);
    Time::from_nanos(now.tv_sec.cast_unsigned() * 1_000_000_000 + now.tv_nsec.cast_unsigned())
}

fn instant(time: Time) -> Instant {
    // A little later: a timer that is early would find nothing to do.
    Instant::now() + time.since(self::time()) + Duration::from_micros(1)
}
