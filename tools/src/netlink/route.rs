//! Routes and neighbours, as rtnetlink tells them.

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd};

use netlink_packet_core::{
    NLM_F_ACK, NLM_F_CREATE, NLM_F_REQUEST, NetlinkHeader, NetlinkMessage, NetlinkPayload,
};
use netlink_packet_route::neighbour::{
    NeighbourAddress, NeighbourAttribute, NeighbourFlags, NeighbourMessage, NeighbourState,
};
use netlink_packet_route::route::{RouteAddress, RouteAttribute, RouteMessage, RouteType, RouteVia};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_ROUTE};
use tracing::debug;

use super::split_message;

/// RTNLGRP_NEIGH of `linux/rtnetlink.h`.
const NEIGHBOURS: u32 = 3;
/// RTNLGRP_IPV4_ROUTE, RTNLGRP_IPV4_RULE, RTNLGRP_IPV6_ROUTE and RTNLGRP_IPV6_RULE.
const ROUTES: [u32; 4] = [7, 8, 11, 19];
/// RTM_NEWNEIGH and RTM_DELNEIGH: all other news that come here are of routes.
const NEIGHBOUR_MESSAGES: [u16; 2] = [28, 29];
/// Datagrams of news that are taken before others have their turn.
const MAX_NEWS: u32 = 256;
/// The bits of a type of service that choose a route (IPTOS_RT_MASK).
const TOS_OF_ROUTES: u8 = 0x1c;

/// What a route is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Query {
    /// Own address, if it is chosen already.
    pub source: Option<IpAddr>,
    /// Where to.
    pub dest: IpAddr,
    /// The interface, if it is chosen already; else 0.
    pub ifindex: u32,
    /// Type of service.
    pub type_of_service: u8,
}

/// Where a route leads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// To another host.
    Unicast,
    /// To this host.
    Local,
    /// To many.
    Group,
}

/// A route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Route {
    /// Where it leads.
    pub kind: Kind,
    /// The interface; for [`Kind::Local`] mostly the loopback.
    pub ifindex: u32,
    /// Own address: the one asked for, or the one that the kernel prefers.
    pub source: Option<IpAddr>,
    /// The next hop, if it is not the destination.
    pub gateway: Option<IpAddr>,
    /// Packets get further headers on this way: it is a tunnel, or MPLS.
    pub encapsulates: bool,
}

/// What the kernel knows of the way to a neighbour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Neighbour {
    /// Its link-layer address, good or a little old: packets can be sent.
    Known {
        /// The address, if it is one of six bytes.
        mac: Option<[u8; 6]>,
        /// Nothing was heard of it lately; the kernel would ask it when it sends the next packet.
        stale: bool,
    },
    /// Nothing yet, or it is being asked for.
    Unknown,
    /// It was asked for in vain.
    Failed,
}

/// A connection for questions. The kernel answers a question while it is sent.
pub struct Routes {
    socket: Socket,
    sequence: u32,
}

impl Routes {
    /// Opens it.
    pub fn new() -> io::Result<Self> {
        let mut socket = Socket::new(NETLINK_ROUTE)?;
        socket.bind_auto()?;
        socket.connect(&SocketAddr::new(0, 0))?;
        socket.set_non_blocking(true)?;
        Ok(Self { socket, sequence: 0 })
    }

    /// The route of a packet.
    ///
    /// # Errors
    /// Those that sending it would have: ENETUNREACH, EHOSTUNREACH, EACCES, EINVAL.
    pub fn find(&mut self, query: &Query) -> io::Result<Route> {
        let mut message = RouteMessage::default();
        let bits = if query.dest.is_ipv4() { 32 } else { 128 };
        message.header.address_family = family(query.dest);
        message.header.destination_prefix_length = bits;
        message.header.tos = query.type_of_service & TOS_OF_ROUTES;
        message
            .attributes
            .push(RouteAttribute::Destination(query.dest.into()));
        if let Some(source) = query.source {
            message.header.source_prefix_length = bits;
            message.attributes.push(RouteAttribute::Source(source.into()));
        }
        if query.ifindex != 0 {
            message.attributes.push(RouteAttribute::Oif(query.ifindex));
        }
        match self.ask(RouteNetlinkMessage::GetRoute(message))? {
            RouteNetlinkMessage::NewRoute(found) => route(&found, query.source),
            _ => Err(io::ErrorKind::InvalidData.into()),
        }
    }

    /// What is known of a neighbour.
    pub fn neighbour(&mut self, ifindex: u32, ip: IpAddr) -> io::Result<Neighbour> {
        let message = neighbour_message(ifindex, ip);
        match self.ask(RouteNetlinkMessage::GetNeighbour(message)) {
            Ok(RouteNetlinkMessage::NewNeighbour(found)) => Ok(state(&found)),
            Ok(_) => Err(io::ErrorKind::InvalidData.into()),
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(Neighbour::Unknown),
            Err(error) => Err(error),
        }
    }

    /// Has the kernel do what it does when it sends a packet to a neighbour: ask it, if it is unknown or stale.
    ///
    /// # Errors
    /// EPERM without CAP_NET_ADMIN.
    pub fn probe(&mut self, ifindex: u32, ip: IpAddr) -> io::Result<()> {
        let mut message = neighbour_message(ifindex, ip);
        message.header.flags = NeighbourFlags::Use;
        let request = RouteNetlinkMessage::NewNeighbour(message);
        self.exchange(request, NLM_F_ACK | NLM_F_CREATE).map(drop)
    }

    fn ask(&mut self, request: RouteNetlinkMessage) -> io::Result<RouteNetlinkMessage> {
        let answer = self.exchange(request, 0)?;
        answer.ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    /// Sends a request; gives what is answered, or `None` for an acknowledgement.
    fn exchange(
        &mut self,
        request: RouteNetlinkMessage,
        flags: u16,
    ) -> io::Result<Option<RouteNetlinkMessage>> {
        self.sequence = self.sequence.wrapping_add(1);
        let mut header = NetlinkHeader::default();
        header.flags = NLM_F_REQUEST | flags;
        header.sequence_number = self.sequence;
        let mut message = NetlinkMessage::new(header, NetlinkPayload::from(request));
        message.finalize();
        let mut bytes = vec![0; message.buffer_len()];
        message.serialize(&mut bytes);
        self.socket.send(&bytes, 0)?;
        loop {
            let (datagram, _) = self.socket.recv_from_full()?;
            let mut rest = &datagram[..];
            while let Some((message, after)) = split_message(rest) {
                rest = after;
                let answer = NetlinkMessage::<RouteNetlinkMessage>::deserialize(message)
                    .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error.to_string()))?;
                // An answer that an earlier question did not wait for.
                if answer.header.sequence_number != self.sequence {
                    continue;
                }
                match answer.payload {
                    NetlinkPayload::Error(error) if error.code.is_none() => return Ok(None),
                    NetlinkPayload::Error(error) => return Err(error.to_io()),
                    NetlinkPayload::InnerMessage(answer) => return Ok(Some(answer)),
                    other => debug!(?other, "netlink message passed over"),
                }
            }
        }
    }
}

/// Something that concerns the way of packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum News {
    /// What is known of a neighbour now.
    Neighbour {
        /// The interface behind which it is.
        ifindex: u32,
        /// Its address.
        ip: IpAddr,
        /// What is known of it.
        state: Neighbour,
    },
    /// Some route or rule has changed.
    Routes,
}

/// Tells of neighbours that come to be known or fail, and of changes of routes if these are followed as well, while it is
/// wanted.
pub struct WayWatch {
    socket: Socket,
    with_routes: bool,
    wanted: bool,
}

impl WayWatch {
    /// One of neighbours only, that tells nothing yet.
    pub fn of_neighbours() -> io::Result<Self> {
        Self::new(false)
    }

    /// One of neighbours and routes, that tells nothing yet.
    pub fn of_neighbours_and_routes() -> io::Result<Self> {
        Self::new(true)
    }

    fn new(with_routes: bool) -> io::Result<Self> {
        let mut socket = Socket::new(NETLINK_ROUTE)?;
        socket.bind_auto()?;
        socket.set_non_blocking(true)?;
        Ok(Self {
            socket,
            with_routes,
            wanted: false,
        })
    }

    /// Begins or ends to tell: on a busy host neighbours change all the time.
    pub fn want(&mut self, wanted: bool) -> io::Result<()> {
        if wanted == self.wanted {
            return Ok(());
        }
        let routes = if self.with_routes { &ROUTES[..] } else { &[] };
        for group in [NEIGHBOURS].iter().chain(routes) {
            if wanted {
                self.socket.add_membership(*group)?;
            } else {
                self.socket.drop_membership(*group)?;
            }
        }
        self.wanted = wanted;
        Ok(())
    }

    /// Hands over the news that wait, up to a bound: [`AsFd`] stays readable while there are more. False if some were
    /// lost.
    pub fn drain(&self, mut take: impl FnMut(News)) -> io::Result<bool> {
        let mut buffer = Vec::with_capacity(32 * 1024);
        let mut whole = true;
        for _ in 0..MAX_NEWS {
            buffer.clear();
            match self.socket.recv(&mut buffer, 0) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => {
                    whole = false;
                    continue;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            }
            let mut rest = &buffer[..];
            while let Some((message, after)) = split_message(rest) {
                rest = after;
                if let Some(news) = news(message) {
                    take(news);
                }
            }
        }
        Ok(whole)
    }
}

impl AsFd for WayWatch {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// What a message tells.
fn news(message: &[u8]) -> Option<News> {
    let kind = u16::from_ne_bytes(*message.get(4..)?.first_chunk()?);
    // That something changed is all that is to be known of routes.
    if !NEIGHBOUR_MESSAGES.contains(&kind) {
        return Some(News::Routes);
    }
    let message = NetlinkMessage::<RouteNetlinkMessage>::deserialize(message).ok()?;
    let (neighbour, state) = match message.payload {
        NetlinkPayload::InnerMessage(RouteNetlinkMessage::NewNeighbour(news)) => {
            let state = state(&news);
            (news, state)
        }
        NetlinkPayload::InnerMessage(RouteNetlinkMessage::DelNeighbour(news)) => (news, Neighbour::Unknown),
        _ => return None,
    };
    Some(News::Neighbour {
        ifindex: neighbour.header.ifindex,
        ip: address_of(&neighbour)?,
        state,
    })
}

fn neighbour_message(ifindex: u32, ip: IpAddr) -> NeighbourMessage {
    let mut message = NeighbourMessage::default();
    message.header.family = family(ip);
    message.header.ifindex = ifindex;
    message.attributes.push(NeighbourAttribute::Destination(match ip {
        IpAddr::V4(ip) => NeighbourAddress::Inet(ip),
        IpAddr::V6(ip) => NeighbourAddress::Inet6(ip),
    }));
    message
}

fn family(ip: IpAddr) -> AddressFamily {
    match ip {
        IpAddr::V4(_) => AddressFamily::Inet,
        IpAddr::V6(_) => AddressFamily::Inet6,
    }
}

fn route(message: &RouteMessage, source: Option<IpAddr>) -> io::Result<Route> {
    let kind = match message.header.kind {
        RouteType::Local => Kind::Local,
        RouteType::Broadcast | RouteType::Anycast | RouteType::Multicast => Kind::Group,
        RouteType::Unicast => Kind::Unicast,
        // With these, the answer of the kernel is mostly the error itself.
        RouteType::Unreachable => return Err(io::Error::from_raw_os_error(libc::EHOSTUNREACH)),
        RouteType::Prohibit => return Err(io::Error::from_raw_os_error(libc::EACCES)),
        _ => return Err(io::Error::from_raw_os_error(libc::ENETUNREACH)),
    };
    let mut found = Route {
        kind,
        ifindex: 0,
        source,
        gateway: None,
        encapsulates: false,
    };
    for attribute in &message.attributes {
        match attribute {
            RouteAttribute::Oif(ifindex) => found.ifindex = *ifindex,
            RouteAttribute::Gateway(gateway) => found.gateway = ip(gateway),
            RouteAttribute::Via(RouteVia::Inet(gateway)) => found.gateway = Some((*gateway).into()),
            RouteAttribute::Via(RouteVia::Inet6(gateway)) => found.gateway = Some((*gateway).into()),
            RouteAttribute::Encap(_) | RouteAttribute::EncapType(_) | RouteAttribute::NewDestination(_) => {
                found.encapsulates = true;
            }
            RouteAttribute::PrefSource(preferred) if source.is_none() => found.source = ip(preferred),
            _ => {}
        }
    }
    Ok(found)
}

fn ip(address: &RouteAddress) -> Option<IpAddr> {
    match address {
        RouteAddress::Inet(ip) => Some((*ip).into()),
        RouteAddress::Inet6(ip) => Some((*ip).into()),
        _ => None,
    }
}

fn address_of(message: &NeighbourMessage) -> Option<IpAddr> {
    message.attributes.iter().find_map(|attribute| match attribute {
        NeighbourAttribute::Destination(NeighbourAddress::Inet(ip)) => Some((*ip).into()),
        NeighbourAttribute::Destination(NeighbourAddress::Inet6(ip)) => Some((*ip).into()),
        _ => None,
    })
}

/// As the kernel's NUD_VALID.
fn state(message: &NeighbourMessage) -> Neighbour {
    let state = message.header.state;
    match state {
        NeighbourState::Reachable
        | NeighbourState::Stale
        | NeighbourState::Delay
        | NeighbourState::Probe
        | NeighbourState::Noarp
        | NeighbourState::Permanent => Neighbour::Known {
            mac: message.attributes.iter().find_map(mac),
            stale: state == NeighbourState::Stale,
        },
        NeighbourState::Failed => Neighbour::Failed,
        _ => Neighbour::Unknown,
    }
}

fn mac(attribute: &NeighbourAttribute) -> Option<[u8; 6]> {
    match attribute {
        NeighbourAttribute::LinkLocalAddress(bytes) => bytes.as_slice().try_into().ok(),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_way_to_loopback_is_local() {
        let mut routes = Routes::new().unwrap();
        let dest: IpAddr = "127.0.0.1".parse().unwrap();
        let query = Query {
            source: None,
            dest,
            ifindex: 0,
            type_of_service: 0xff,
        };
        let route = routes.find(&query).unwrap();
        assert_eq!(
            (route.kind, route.source, route.gateway),
            (Kind::Local, Some(dest), None)
        );
    }

    #[test]
    fn news_come_only_while_they_are_wanted() {
        for mut watch in [WayWatch::of_neighbours(), WayWatch::of_neighbours_and_routes()].map(Result::unwrap)
        {
            watch.want(true).unwrap();
            watch.want(true).unwrap();
            watch.want(false).unwrap();
            assert!(watch.drain(|_| ()).unwrap());
        }
    }
}
