//! The way to the peer: its address, by routes and neighbours, and the path record.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use ferroce_wire::PathMtu;
use ferroce_wire::gid::Gid;

use super::address::Family;
use super::bind::gid_index;
use super::id::{Bound, Kept, State};
use super::{Address, Errno, EventKind, Handle, IdOption, Output, PathRecord, PortSpace, RdmaCm, Resolution};
use crate::cm::Way;
use crate::control::DeviceInfo;
use crate::link::Path;
use crate::time::Time;

/// How long a packet of RoCE may take, 4.096 us x 2^t (`CMA_IBOE_PACKET_LIFETIME`).
const PACKET_LIFE_TIME: u8 = 18;
/// Hop limit of all that is sent (`IPV6_DEFAULT_HOPLIMIT`, and Linux's TTL).
pub(super) const HOP_LIMIT: u8 = 64;
/// The partition key of RoCE: the default one, as a full member.
pub(super) const PKEY: u16 = 0xffff;
/// The 20 bits of a flow label.
const FLOW_LABEL_MASK: u32 = 0xf_ffff;
/// The least time that a question about an address gets: it has to go to the resolver and back.
const LEAST_RESOLVE: Duration = Duration::from_millis(100);

impl RdmaCm {
    /// RESOLVE_ADDR.
    pub(super) fn resolve_address(
        &mut self,
        now: Time,
        id: Handle,
        (source, dest): (Option<Address>, Address),
        timeout_ms: u32,
    ) -> Result<(), Errno> {
        match self.own(id)?.kept.state {
            State::Bound => {}
            State::Idle => {
                let scope = dest.link_local_scope();
                match source {
                    Some(source) => {
                        let same = Some(dest).filter(|dest| dest.family() == source.family());
                        self.bind_to(id, source, same)?;
                    }
                    None => {
                        let kept = &mut self.entry_mut(id).kept;
                        kept.ifindex = scope.unwrap_or(kept.ifindex);
                        self.bind_to(id, dest.any_like(), Some(dest))?;
                    }
                }
            }
            _ => return Err(libc::EINVAL),
        }
        let kept = &mut self.entry_mut(id).kept;
        if kept.source.is_none_or(|source| source.family() != dest.family()) {
            return Err(libc::EINVAL);
        }
        if kept.ifindex == 0 {
            // Where the program names no interface, routes say which.
            kept.ifindex = dest.link_local_scope().unwrap_or(0);
        }
        kept.dest = Some(dest);
        kept.resolve_ms = timeout_ms;
        if self.is_any(&dest) {
            return self.resolve_loopback(id, dest.family());
        }
        // RoCE devices have no addresses of InfiniBand's own family.
        if dest.family() == Family::Ib {
            return Err(libc::ENODEV);
        }
        self.entry_mut(id).kept.state = State::AddressQuery;
        self.ask_resolver(now, id);
        Ok(())
    }

    /// Asks for the way to the id's destination.
    pub(super) fn ask_resolver(&mut self, now: Time, id: Handle) {
        let kept = &self.entry(id).kept;
        let (Some(source), Some(dest)) = (
            kept.source.and_then(|source| source.ip()),
            kept.dest.and_then(|dest| dest.ip()),
        ) else {
            return;
        };
        let (ifindex, type_of_service) = (kept.ifindex, kept.type_of_service.unwrap_or(0));
        let deadline = now + Duration::from_millis(kept.resolve_ms.into()).max(LEAST_RESOLVE);
        let token = self.next_token;
        self.next_token += 1;
        self.entry_mut(id).token = Some(token);
        self.resolves.insert(token, (id, deadline));
        self.resolve_deadlines.insert((deadline, token));
        self.outputs.push_back(Output::Resolve {
            token,
            source: Some(source).filter(|source| !source.is_unspecified()),
            dest,
            ifindex,
            type_of_service,
        });
    }

    /// The question of the id is not asked any more.
    pub(super) fn cancel_resolve(&mut self, id: Handle) {
        if let Some(token) = self.entry_mut(id).token.take()
            && self.forget_token(token).is_some()
        {
            self.outputs.push_back(Output::ResolveCancel { token });
        }
    }

    /// Whose question it was.
    pub(super) fn forget_token(&mut self, token: u64) -> Option<Handle> {
        let (id, deadline) = self.resolves.remove(&token)?;
        self.resolve_deadlines.remove(&(deadline, token));
        if let Some(entry) = self.ids.get_mut(&id) {
            entry.token = None;
        }
        Some(id)
    }

    /// Gives up what has not been answered in time.
    pub(super) fn expire_resolves(&mut self, now: Time) {
        while let Some(&(deadline, token)) = self.resolve_deadlines.first()
            && deadline <= now
        {
            self.outputs.push_back(Output::ResolveCancel { token });
            self.address_resolved(token, Err(libc::ETIMEDOUT));
        }
    }

    /// The answer to a question.
    pub(super) fn address_resolved(&mut self, token: u64, result: Result<Resolution, Errno>) {
        let Some(id) = self.forget_token(token) else {
            return;
        };
        let result = result.and_then(|resolution| self.adopt(id, &resolution));
        self.touch(id);
        let kept = &mut self.entry_mut(id).kept;
        match result {
            Ok(()) => {
                kept.state = State::AddressResolved;
                self.tell(id, EventKind::AddressResolved, 0);
            }
            Err(errno) => {
                kept.state = State::Bound;
                self.tell(id, EventKind::AddressError, -errno.abs());
            }
        }
    }

    /// Takes the source address of a resolution, and its device if the id has none.
    fn adopt(&mut self, id: Handle, resolution: &Resolution) -> Result<(), Errno> {
        let kept = &self.entry(id).kept;
        let device = if kept.bound.is_none() {
            let device = self
                .find_device(resolution.source, resolution.ifindex)
                .ok_or(libc::ENODEV)?;
            if kept.port_space == PortSpace::Ipoib {
                return Err(libc::EINVAL);
            }
            Some((bound(device), device.ifindex))
        } else {
            None
        };
        let kept = &mut self.entry_mut(id).kept;
        if let Some((bound, ifindex)) = device {
            kept.bound = Some(bound);
            kept.ifindex = ifindex;
            kept.set_source_ip(resolution.source);
        }
        Ok(())
    }

    /// The destination is this host, whatever its address. Where the program names none of its own, that is the loopback's:
    /// without a device that has it, no connection could be made, so that is told here.
    fn resolve_loopback(&mut self, id: Handle, family: Family) -> Result<(), Errno> {
        if self.entry(id).kept.bound.is_none() {
            let ip = match family {
                Family::V4 => IpAddr::V4(Ipv4Addr::LOCALHOST),
                Family::V6 => IpAddr::V6(Ipv6Addr::LOCALHOST),
                Family::Ib => return Err(libc::ENODEV),
            };
            let device = self.find_device(ip, 0).ok_or(libc::ENODEV)?;
            let (bound, ifindex) = (bound(device), device.ifindex);
            let kept = &mut self.entry_mut(id).kept;
            kept.bound = Some(bound);
            kept.ifindex = ifindex;
            kept.set_source_ip(ip);
        }
        self.entry_mut(id).kept.state = State::AddressResolved;
        self.tell(id, EventKind::AddressResolved, 0);
        Ok(())
    }

    /// RESOLVE_ROUTE.
    pub(super) fn resolve_route(&mut self, id: Handle, timeout_ms: u32) -> Result<(), Errno> {
        let kept = &self.own_bound(id)?.kept;
        if timeout_ms == 0 || kept.state != State::AddressResolved {
            return Err(libc::EINVAL);
        }
        let device = self.device_of(kept).ok_or(libc::ENODEV)?;
        let mtu = PathMtu::from_netdev_mtu(device.mtu as usize).ok_or(libc::EINVAL)?;
        let (source_gid, dest_gid) = self.gids_of(kept);
        let path = PathRecord {
            dest_gid,
            source_gid,
            service_id: 0,
            flow_label: flow_label(kept),
            hop_limit: HOP_LIMIT,
            traffic_class: kept.type_of_service.unwrap_or(0),
            pkey: PKEY,
            sl: 0,
            mtu: mtu.code(),
            // IB_RATE_PORT_CURRENT: as fast as the port is.
            rate: 0,
            packet_life_time: match kept.ack_timeout {
                Some(timeout) if timeout > 0 => timeout - 1,
                _ => PACKET_LIFE_TIME,
            },
        };
        let kept = &mut self.entry_mut(id).kept;
        kept.path = Some(path);
        kept.state = State::RouteResolved;
        self.tell(id, EventKind::RouteResolved, 0);
        Ok(())
    }

    /// Own and the peer's GID: of a destination that means this host, the own one.
    pub(super) fn gids_of(&self, kept: &Kept) -> ([u8; 16], [u8; 16]) {
        if kept.bound.is_none() {
            return ([0; 16], [0; 16]);
        }
        let source = kept.source.map_or([0; 16], |source| source.gid());
        let dest = match kept.dest {
            Some(dest) if kept.state != State::Bound && self.is_any(&dest) => source,
            Some(dest) => dest.gid(),
            None => [0; 16],
        };
        (source, dest)
    }

    /// SET_OPTION.
    pub(super) fn set_option(&mut self, id: Handle, option: IdOption) -> Result<(), Errno> {
        let kept = &self.own(id)?.kept;
        match option {
            IdOption::TypeOfService(value) => self.entry_mut(id).kept.type_of_service = Some(value),
            IdOption::ReuseAddress(reuse) => {
                if !(reuse && kept.state != State::Listen || kept.state == State::Idle) {
                    return Err(libc::EINVAL);
                }
                self.entry_mut(id).kept.reuse_address = reuse;
            }
            IdOption::AddressFamilyOnly(only) => {
                if !matches!(kept.state, State::Idle | State::Bound) {
                    return Err(libc::EINVAL);
                }
                let kept = &mut self.entry_mut(id).kept;
                kept.family_only = only;
                kept.family_only_set = true;
            }
            IdOption::AckTimeout(timeout) => {
                use super::QpKind::{Rc, XrcInitiator};
                if !matches!(kept.qp_kind, Rc | XrcInitiator) || timeout > 31 {
                    return Err(libc::EINVAL);
                }
                self.entry_mut(id).kept.ack_timeout = Some(timeout);
            }
            IdOption::Path(path) => {
                if kept.bound.is_none() || kept.state != State::AddressResolved {
                    return Err(libc::EINVAL);
                }
                let kept = &mut self.entry_mut(id).kept;
                kept.path = Some(path);
                kept.state = State::RouteResolved;
                self.tell(id, EventKind::RouteResolved, 0);
            }
        }
        Ok(())
    }

    /// The device that an id is bound to, as it is now.
    pub(super) fn device_of(&self, kept: &Kept) -> Option<&DeviceInfo> {
        let bound = kept.bound.as_ref()?;
        self.devices
            .iter()
            .find(|device| device.name == bound.device && device.guid == bound.guid)
    }

    /// The way along a path record, from a GID that the device has.
    ///
    /// # Errors
    /// ENODEV: no device. EINVAL: it has not the path's source GID.
    pub(super) fn way_along(&self, kept: &Kept, path: &PathRecord) -> Result<Way, Errno> {
        let device = self.device_of(kept).ok_or(libc::ENODEV)?;
        let (source, dest) = (Gid(path.source_gid).to_ip(), Gid(path.dest_gid).to_ip());
        let sgid_index = gid_index(device, source).ok_or(libc::EINVAL)?;
        if source.is_ipv4() != dest.is_ipv4() || dest.is_unspecified() {
            return Err(libc::EINVAL);
        }
        Ok(Way {
            device: device.name.clone(),
            path: Path {
                ifindex: device.ifindex,
                sgid_index,
                traffic_class: path.traffic_class,
                hop_limit: path.hop_limit,
                flow_label: path.flow_label & FLOW_LABEL_MASK,
                service_level: path.sl & 0xf,
                ..Path::between(source, dest)
            },
        })
    }
}

pub(super) fn bound(device: &DeviceInfo) -> Bound {
    Bound {
        device: device.name.clone(),
        guid: device.guid,
    }
}

impl Kept {
    /// Sets the own address, and leaves the port as it is.
    fn set_source_ip(&mut self, ip: IpAddr) {
        let ifindex = self.ifindex;
        if let Some(Address::Ip(source)) = &mut self.source {
            let port = source.port();
            *source = match ip {
                IpAddr::V6(ip) if ip.is_unicast_link_local() => {
                    std::net::SocketAddrV6::new(ip, port, 0, ifindex).into()
                }
                ip => SocketAddr::new(ip, port),
            };
        }
    }
}

/// The flow label that the program gives, or one of the ports: packets of a connection take one way.
fn flow_label(kept: &Kept) -> u32 {
    if let Some(Address::Ip(SocketAddr::V6(source))) = kept.source
        && source.flowinfo() & FLOW_LABEL_MASK != 0
    {
        return source.flowinfo() & FLOW_LABEL_MASK;
    }
    let port = |address: Option<Address>| address.map_or(0, |address| u32::from(address.port()));
    (port(kept.source) * 31 + port(kept.dest)) & FLOW_LABEL_MASK
}
