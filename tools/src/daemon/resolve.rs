//! Ways to addresses for RDMA CM, as the kernel's `addr.c` finds them: by the routes of the host, and then by the
//! neighbour, which is asked for and waited for.
//!
//! Nothing here waits: questions to rtnetlink are answered at once, and news of neighbours wake the daemon's loop.

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr, SocketAddrV6};
use std::os::fd::{AsFd, BorrowedFd};

use ferroce_engine::rdma_cm::{Errno, Resolution};
use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType, bind, sendto, socket_with};
use tracing::{debug, warn};

use super::sys;
use crate::netlink::route::{Kind, Neighbour, News, Query, Route, Routes, WayWatch};
use crate::netlink::{Interface, Interfaces};

/// RFC 863.
const DISCARD_PORT: u16 = 9;

/// Finds ways, by the token of who asks.
pub struct Resolver {
    routes: Routes,
    watch: WayWatch,
    interfaces: Interfaces,
    waiting: BTreeMap<u64, Waiting>,
}

/// One whose next hop is not known yet.
struct Waiting {
    query: Query,
    next_hop: IpAddr,
    resolution: Resolution,
}

/// What came of a question.
pub type Outcome = Result<Resolution, Errno>;

impl Resolver {
    /// One that knows no interfaces yet.
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            routes: Routes::new()?,
            watch: WayWatch::of_neighbours()?,
            interfaces: Interfaces::new(),
            waiting: BTreeMap::new(),
        })
    }

    /// Takes over the present interfaces.
    pub fn follow(&mut self, interfaces: &Interfaces) {
        self.interfaces.clone_from(interfaces);
    }

    /// Begins to look for a way. `None`: the neighbour is asked for, and the answer comes by [`Resolver::news`], if it
    /// comes: who asks knows how long to wait.
    pub fn start(&mut self, token: u64, query: Query) -> Option<Outcome> {
        let found = self.find(&query);
        debug!(?query, ?found, "route");
        let (resolution, next_hop) = match found {
            Ok(found) => found,
            Err(error) => return Some(Err(error)),
        };
        let Some(next_hop) = next_hop else {
            return Some(Ok(resolution));
        };
        // Before the first look: what happens after it is told.
        if let Err(error) = self.watch.want(true) {
            warn!(%error, "neighbours can't be followed");
        }
        let waiting = Waiting {
            query,
            next_hop,
            resolution,
        };
        if self.is_known(&waiting) {
            self.rest();
            return Some(Ok(resolution));
        }
        waiting.ask_for_neighbour();
        self.waiting.insert(token, waiting);
        None
    }

    /// The answer is not wanted any more.
    pub fn cancel(&mut self, token: u64) {
        self.waiting.remove(&token);
        self.rest();
    }

    /// Takes news of neighbours, which [`AsFd`] has told of.
    pub fn news(&mut self) -> io::Result<Vec<(u64, Outcome)>> {
        let Self { watch, waiting, .. } = self;
        let mut found = Vec::new();
        let whole = watch.drain(|news| {
            let News::Neighbour { ifindex, ip, state } = news else {
                return;
            };
            let concerned = waiting
                .iter()
                .filter(|(_, it)| it.resolution.ifindex == ifindex && it.next_hop == ip);
            match state {
                Neighbour::Known { .. } => found.extend(concerned.map(|(token, _)| *token)),
                // The kernel has given up; a program that has set more time gets it.
                Neighbour::Failed => concerned.take(1).for_each(|(_, it)| it.ask_for_neighbour()),
                Neighbour::Unknown => {}
            }
        })?;
        if !whole {
            let tokens: Vec<u64> = self.waiting.keys().copied().collect();
            for token in tokens {
                if let Some(waiting) = self.waiting.remove(&token) {
                    if self.is_known(&waiting) {
                        found.push(token);
                    }
                    self.waiting.insert(token, waiting);
                }
            }
        }
        let found = found.into_iter();
        let outcomes = found.filter_map(|token| Some((token, Ok(self.waiting.remove(&token)?.resolution))));
        let outcomes = outcomes.collect();
        self.rest();
        Ok(outcomes)
    }

    /// Nobody waits: news of neighbours need not wake us.
    fn rest(&mut self) {
        if self.waiting.is_empty()
            && let Err(error) = self.watch.want(false)
        {
            warn!(%error, "neighbours are followed on");
        }
    }

    fn is_known(&mut self, waiting: &Waiting) -> bool {
        match self
            .routes
            .neighbour(waiting.resolution.ifindex, waiting.next_hop)
        {
            Ok(state) => matches!(state, Neighbour::Known { .. }),
            // Kernels before 5.0 can't be asked: then the first message finds out.
            Err(error) => {
                debug!(%error, "the kernel does not tell of neighbours");
                true
            }
        }
    }

    /// The way, and the neighbour that must be known for it.
    fn find(&mut self, query: &Query) -> Result<(Resolution, Option<IpAddr>), Errno> {
        if query.dest.is_multicast()
            && let Some(found) = self.way_to_group(query)
        {
            return Ok((found, None));
        }
        let route = self.routes.find(query).map_err(|error| errno(&error))?;
        let loopback = self.interfaces.get(&route.ifindex).is_some_and(|it| it.lo);
        let ifindex = if route.kind == Kind::Local || loopback {
            self.interface_of(query.dest, query.ifindex)
                .unwrap_or(route.ifindex)
        } else {
            route.ifindex
        };
        let source = match (route.source, route.kind) {
            (Some(source), _) => source,
            (None, Kind::Local) => query.dest,
            (None, _) => return Err(libc::EADDRNOTAVAIL),
        };
        let resolution = Resolution { source, ifindex };
        let noarp = self.interfaces.get(&ifindex).is_none_or(|it| it.noarp);
        let needs_neighbour = route.kind == Kind::Unicast && !loopback && !noarp;
        Ok((resolution, needs_neighbour.then(|| next_hop(&route, query.dest))))
    }

    /// A group is reached by the interface of the source, whatever routes there are: for IPv4 the kernel does the same,
    /// and IPv6 groups on loopback have no route.
    fn way_to_group(&self, query: &Query) -> Option<Resolution> {
        let source = query.source.filter(|source| !source.is_unspecified())?;
        Some(Resolution {
            source,
            ifindex: self.interface_of(source, query.ifindex)?,
        })
    }

    /// The interface that has the address: the wanted one, if it has.
    fn interface_of(&self, ip: IpAddr, wanted: u32) -> Option<u32> {
        let has = |interface: &Interface| interface.addresses.iter().any(|address| address.ip == ip);
        if self.interfaces.get(&wanted).is_some_and(has) {
            return Some(wanted);
        }
        let mut having = self.interfaces.iter().filter(|(_, interface)| has(interface));
        having.next().map(|(ifindex, _)| *ifindex)
    }
}

impl AsFd for Resolver {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.watch.as_fd()
    }
}

impl Waiting {
    /// Has the kernel ask for the neighbour, by sending the destination an empty datagram that nobody there takes. Not to
    /// the port of RoCE: Soft-RoCE of Linux 6.1 crashes on datagrams too short for a BTH.
    fn ask_for_neighbour(&self) {
        if let Err(error) = self.send_nothing() {
            debug!(%error, dest = %self.query.dest, "neighbour can't be asked for");
        }
    }

    fn send_nothing(&self) -> io::Result<()> {
        let Resolution { source, ifindex, .. } = self.resolution;
        let (family, level, interface) = match source {
            IpAddr::V4(_) => (AddressFamily::INET, libc::IPPROTO_IP, libc::IP_UNICAST_IF),
            IpAddr::V6(_) => (AddressFamily::INET6, libc::IPPROTO_IPV6, libc::IPV6_UNICAST_IF),
        };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(family, SocketType::DGRAM, flags, None)?;
        sys::set_integer(socket.as_fd(), level, interface, ifindex.to_be().cast_signed())?;
        if source.is_ipv4() {
            let tos = i32::from(self.query.type_of_service);
            sys::set_integer(socket.as_fd(), libc::IPPROTO_IP, libc::IP_TOS, tos)?;
        }
        bind(&socket, &address(source, 0, ifindex))?;
        let dest = address(self.query.dest, DISCARD_PORT, ifindex);
        sendto(&socket, &[], SendFlags::NOSIGNAL, &dest)?;
        Ok(())
    }
}

fn next_hop(route: &Route, dest: IpAddr) -> IpAddr {
    route.gateway.unwrap_or(dest)
}

/// A socket address; link-local ones are scoped by the interface.
fn address(ip: IpAddr, port: u16, ifindex: u32) -> SocketAddr {
    match ip {
        IpAddr::V4(_) => SocketAddr::new(ip, port),
        IpAddr::V6(ip) => SocketAddrV6::new(ip, port, 0, scope(ip, ifindex)).into(),
    }
}

fn scope(ip: Ipv6Addr, ifindex: u32) -> u32 {
    if ip.is_unicast_link_local() { ifindex } else { 0 }
}

fn errno(error: &io::Error) -> Errno {
    error.raw_os_error().unwrap_or(libc::EIO)
}
