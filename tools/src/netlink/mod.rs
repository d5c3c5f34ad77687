//! Network interfaces and their addresses, read and followed through rtnetlink; [`route`] has routes and neighbours.

pub mod route;

use std::collections::BTreeMap;
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd};

use netlink_packet_core::{NLM_F_DUMP, NLM_F_REQUEST, NetlinkHeader, NetlinkMessage, NetlinkPayload};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::address::{AddressAttribute, AddressFlags, AddressMessage};
use netlink_packet_route::link::{
    LinkAttribute, LinkFlags, LinkInfo, LinkLayerType, LinkMessage, LinkXdp, State,
};
use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_ROUTE};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
use tracing::{debug, warn};

use crate::daemon::sys;

/// RTMGRP_LINK, RTMGRP_IPV4_IFADDR and RTMGRP_IPV6_IFADDR of `linux/rtnetlink.h`.
const GROUPS: u32 = 0x1 | 0x10 | 0x100;

/// An address of an interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Address {
    /// The local address.
    pub ip: IpAddr,
    /// It may be used now: duplicate address detection has not failed and is not under way.
    pub usable: bool,
}

/// A network interface.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Interface {
    /// Its name now.
    pub name: String,
    /// MAC address; zero if it has none of six bytes.
    pub mac: [u8; 6],
    /// MTU in bytes.
    pub mtu: u32,
    /// Speed in Mbit/s; 0 if it does not tell.
    pub speed: u32,
    /// Administratively up.
    pub up: bool,
    /// Up, and the other end is there as well.
    pub carrier: bool,
    /// It is the loopback.
    pub lo: bool,
    /// Neighbours have no link-layer address, or none that must be asked for.
    pub noarp: bool,
    /// Its packets have Ethernet headers (ARPHRD_ETHER).
    pub ethernet: bool,
    /// What kind of virtual interface it is, as `ip link` names it; none of a NIC.
    pub kind: Option<String>,
    /// The bond, bridge or the like that it is a port of, by index.
    pub master: Option<u32>,
    /// The id of the XDP program on it, or of the first of them.
    pub xdp_program: Option<u32>,
    /// Its addresses in the kernel's order.
    pub addresses: Vec<Address>,
}

/// The interfaces of this network namespace by kernel index.
pub type Interfaces = BTreeMap<u32, Interface>;

/// Tells when something about interfaces or addresses changed.
pub struct Watch(Socket);

impl Watch {
    /// Starts to watch; what changes from now on is told.
    pub fn new() -> io::Result<Self> {
        let mut socket = Socket::new(NETLINK_ROUTE)?;
        socket.bind(&SocketAddr::new(0, GROUPS))?;
        socket.set_non_blocking(true)?;
        Ok(Self(socket))
    }

    /// Takes all notices that wait; true if there was any. Then [`interfaces`] is to be read again.
    pub fn drain(&self) -> io::Result<bool> {
        let mut buffer = Vec::with_capacity(32 * 1024);
        let mut any = false;
        loop {
            buffer.clear();
            match self.0.recv(&mut buffer, 0) {
                Ok(_) => any = true,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(any),
                // Notices were lost: all the same to us, they only say that something changed.
                Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => any = true,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }
}

impl AsFd for Watch {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Reads all interfaces with their addresses.
pub fn interfaces() -> io::Result<Interfaces> {
    let mut socket = Socket::new(NETLINK_ROUTE)?;
    socket.bind_auto()?;
    socket.connect(&SocketAddr::new(0, 0))?;
    let mut interfaces = Interfaces::new();
    dump(
        &socket,
        RouteNetlinkMessage::GetLink(LinkMessage::default()),
        |message| {
            if let RouteNetlinkMessage::NewLink(link) = message {
                interfaces.insert(link.header.index, interface(&link));
            }
        },
    )?;
    dump(
        &socket,
        RouteNetlinkMessage::GetAddress(AddressMessage::default()),
        |message| {
            if let RouteNetlinkMessage::NewAddress(message) = message
                && let Some(address) = address(&message)
                && let Some(interface) = interfaces.get_mut(&message.header.index)
                && interface.addresses.iter().all(|known| known.ip != address.ip)
            {
                interface.addresses.push(address);
            }
        },
    )?;
    let socket = socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    for interface in interfaces.values_mut() {
        interface.speed = sys::link_speed(socket.as_fd(), &interface.name).unwrap_or(0);
    }
    Ok(interfaces)
}

/// Sends one dump request and hands each message of the answer to `take`.
fn dump(
    socket: &Socket,
    request: RouteNetlinkMessage,
    mut take: impl FnMut(RouteNetlinkMessage),
) -> io::Result<()> {
    let mut header = NetlinkHeader::default();
    header.flags = NLM_F_REQUEST | NLM_F_DUMP;
    let mut message = NetlinkMessage::new(header, NetlinkPayload::from(request));
    message.finalize();
    let mut bytes = vec![0; message.buffer_len()];
    message.serialize(&mut bytes);
    socket.send(&bytes, 0)?;
    loop {
        let (datagram, _) = socket.recv_from_full()?;
        let mut rest = &datagram[..];
        while let Some((message, after)) = split_message(rest) {
            rest = after;
            match NetlinkMessage::<RouteNetlinkMessage>::deserialize(message) {
                Ok(NetlinkMessage {
                    payload: NetlinkPayload::Done(_),
                    ..
                }) => return Ok(()),
                Ok(NetlinkMessage {
                    payload: NetlinkPayload::Error(error),
                    ..
                }) => return Err(error.to_io()),
                Ok(NetlinkMessage {
                    payload: NetlinkPayload::InnerMessage(message),
                    ..
                }) => take(message),
                Ok(other) => debug!(?other, "netlink message passed over"),
                Err(error) => warn!(%error, "netlink message not understood"),
            }
        }
    }
}

/// Splits the first netlink message off a datagram; `None` at its end.
fn split_message(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    const HEADER_LEN: usize = 16;
    let length = u32::from_ne_bytes(*bytes.first_chunk()?) as usize;
    if length < HEADER_LEN {
        return None;
    }
    let message = bytes.get(..length)?;
    Some((
        message,
        bytes.get(length.next_multiple_of(4)..).unwrap_or_default(),
    ))
}

fn interface(link: &LinkMessage) -> Interface {
    let flags = link.header.flags;
    let mut interface = Interface {
        up: flags.contains(LinkFlags::Up),
        lo: flags.contains(LinkFlags::Loopback),
        noarp: flags.contains(LinkFlags::Noarp),
        ethernet: link.header.link_layer_type == LinkLayerType::Ether,
        ..Interface::default()
    };
    let mut carrier = flags.contains(LinkFlags::LowerUp);
    for attribute in &link.attributes {
        match attribute {
            LinkAttribute::IfName(name) => interface.name.clone_from(name),
            LinkAttribute::Mtu(mtu) => interface.mtu = *mtu,
            LinkAttribute::Address(bytes) => interface.mac = bytes.as_slice().try_into().unwrap_or_default(),
            LinkAttribute::OperState(State::Down | State::LowerLayerDown | State::NotPresent) => {
                carrier = false
            }
            LinkAttribute::Controller(index) => interface.master = Some(*index).filter(|index| *index != 0),
            LinkAttribute::LinkInfo(infos) => interface.kind = kind(infos),
            LinkAttribute::Xdp(attributes) => interface.xdp_program = xdp_program(attributes),
            _ => {}
        }
    }
    interface.carrier = interface.up && carrier;
    interface
}

fn kind(infos: &[LinkInfo]) -> Option<String> {
    infos.iter().find_map(|info| match info {
        LinkInfo::Kind(kind) => Some(kind.to_string()),
        _ => None,
    })
}

fn xdp_program(attributes: &[LinkXdp]) -> Option<u32> {
    attributes.iter().find_map(|attribute| match attribute {
        LinkXdp::ProgId(id) | LinkXdp::DrvProgId(id) | LinkXdp::SkbProgId(id) | LinkXdp::HwProgId(id) => {
            Some(*id)
        }
        _ => None,
    })
}

fn address(message: &AddressMessage) -> Option<Address> {
    let mut flags = AddressFlags::from_bits_retain(u32::from(message.header.flags.bits()));
    let (mut local, mut remote) = (None, None);
    for attribute in &message.attributes {
        match attribute {
            AddressAttribute::Local(ip) => local = Some(*ip),
            // The peer's address on a point-to-point link, else the same as the local one.
            AddressAttribute::Address(ip) => remote = Some(*ip),
            AddressAttribute::Flags(all) => flags = *all,
            _ => {}
        }
    }
    let tentative = flags.contains(AddressFlags::Tentative) && !flags.contains(AddressFlags::Optimistic);
    let usable = !tentative && !flags.contains(AddressFlags::Dadfailed);
    Some(Address {
        ip: local.or(remote)?,
        usable,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_is_read() {
        let interfaces = interfaces().unwrap();
        let lo = interfaces.values().find(|interface| interface.lo).unwrap();
        assert_eq!((lo.name.as_str(), lo.mac), ("lo", [0; 6]));
    }

    #[test]
    fn messages_are_split_with_padding() {
        let mut bytes = 17u32.to_ne_bytes().to_vec();
        bytes.resize(20, 0);
        bytes.extend_from_slice(&16u32.to_ne_bytes());
        bytes.resize(36, 0);
        let (first, rest) = split_message(&bytes).unwrap();
        assert_eq!((first.len(), rest.len()), (17, 16));
        assert_eq!(split_message(rest).unwrap().1.len(), 0);
        assert_eq!(split_message(&[]), None);
        assert_eq!(split_message(&[5, 0, 0, 0, 0]), None);
        assert_eq!(split_message(&[200, 0, 0, 0, 0]), None);
    }
}
