//! Queue pair 1 of every device: the MADs of communication management, on the socket of slot 0.
//!
//! Everything comes in here that names slot 0 or a slot that does not exist. What is checked, and in which order, is
//! section 12 of the wire reference; each drop is counted by its reason. What a flood of MADs can cost is bounded twice:
//! the daemon takes so many before others have their turn, and so many in a second; the rest the kernel drops.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::{IpAddr, Ipv6Addr};
use std::os::fd::OwnedFd;
use std::time::Duration;

use ferroce_engine::control::{DAEMON_SLOT, DeviceInfo, GidEntry};
use ferroce_engine::link::udp::UdpLink;
use ferroce_engine::link::{Link, Path, Qpns, RoceVersion, RxPacket, Transmit, TransmitError};
use ferroce_engine::rdma_cm::Arrival;
use ferroce_engine::time::Time;
use ferroce_wire::mad::{GSI_QKEY, GSI_QPN, MAD_LEN};
use ferroce_wire::{Deth, Headers, Opcode, Psn, RocePacket};
use tracing::{debug, warn};

/// MADs go from queue pair 1 to queue pair 1.
const GSI_QPNS: Qpns = Qpns {
    local: GSI_QPN,
    dest: GSI_QPN,
};
/// Batches taken before others have their turn.
const BATCHES: u32 = 4;
/// MADs taken in a second at most, and at once after a time of rest.
const RATE: u64 = 50_000;
const BURST: u64 = 10_000;
/// MADs that may wait for room: a burst of all connections of a program.
const MAX_WAITING: usize = 4096;
/// When to try again where there was no room.
const PAUSE: Duration = Duration::from_millis(1);
/// The bits of a P_Key that name the partition, and that of the default partition.
const PARTITION: u16 = 0x7fff;

/// Queue pair 1.
pub struct Gsi {
    link: UdpLink,
    psn: Psn,
    waiting: VecDeque<(Path, Box<[u8; MAD_LEN]>)>,
    /// When what waits is tried again.
    retry: Option<Time>,
    budget: Budget,
    addresses: Addresses,
    counters: Counters,
}

/// What QP 1 counts.
#[derive(Default)]
struct Counters {
    rx_mads: u64,
    tx_mads: u64,
    tx_dropped: u64,
    drop_length: u64,
    drop_opcode: u64,
    drop_version: u64,
    drop_qpn: u64,
    drop_pkey: u64,
    drop_qkey: u64,
    drop_address: u64,
    drop_icrc: u64,
}

/// The devices by their addresses.
#[derive(Default)]
struct Addresses(HashMap<IpAddr, Vec<Owner>>);

/// A device that has an address.
struct Owner {
    device: String,
    ifindex: u32,
}

impl Gsi {
    /// On the socket of slot 0. What goes to ourselves leaves only while there is room for it: `own` gives that socket
    /// again.
    pub fn new(socket: OwnedFd, own: OwnedFd, start: u32, now: Time) -> io::Result<Self> {
        let own = move |slot: u8| (slot == DAEMON_SLOT).then(|| own.try_clone().ok())?;
        Ok(Self {
            link: UdpLink::new(socket, DAEMON_SLOT, false, Box::new(own))?,
            psn: Psn::new(start),
            waiting: VecDeque::new(),
            retry: None,
            budget: Budget::new(now),
            addresses: Addresses::default(),
            counters: Counters::default(),
        })
    }

    /// Takes over the devices as they are.
    pub fn set_devices(&mut self, devices: &[DeviceInfo]) {
        self.addresses = Addresses::of(devices);
    }

    /// Queues a MAD; [`Gsi::transmit`] is to follow.
    pub fn send(&mut self, path: Path, mad: Box<[u8; MAD_LEN]>) {
        if self.waiting.len() < MAX_WAITING {
            self.waiting.push_back((path, mad));
        } else {
            // As lost on the way: it is sent again in time.
            self.counters.tx_dropped += 1;
        }
    }

    /// Sends what waits, as far as there is room.
    pub fn transmit(&mut self, now: Time) {
        self.retry = None;
        let mut flushed = false;
        while let Some((path, mad)) = self.waiting.front() {
            let mut headers = Headers::new(Opcode::UdSendOnly, GSI_QPN, self.psn);
            headers.deth = Deth {
                qkey: GSI_QKEY,
                src_qpn: GSI_QPN,
            };
            let len = headers.header_len() + MAD_LEN;
            let taken = self.link.packet(path, GSI_QPNS, len, &mut |into| {
                let used = headers.emit(into);
                into[used..].copy_from_slice(&mad[..]);
                Ok(())
            });
            match taken {
                Ok(()) => {
                    self.psn = self.psn.next();
                    self.counters.tx_mads += 1;
                    self.waiting.pop_front();
                    flushed = false;
                }
                Err(TransmitError::Full) if !flushed => {
                    self.flush();
                    flushed = true;
                }
                // Ourselves, with a queue that is half full, or the kernel's buffers.
                Err(TransmitError::Full | TransmitError::Busy) => break,
                Err(TransmitError::Fault(_)) => {
                    self.counters.tx_dropped += 1;
                    self.waiting.pop_front();
                }
            }
        }
        if !self.flush() || !self.waiting.is_empty() {
            self.retry = Some(now + PAUSE);
        }
    }

    fn flush(&mut self) -> bool {
        self.link.flush().unwrap_or_else(|error| {
            warn!(%error, "MADs can't be sent");
            true
        })
    }

    /// Hands what has come to `sink`, as much as is fair.
    pub fn receive(&mut self, now: Time, mut sink: impl FnMut(&Arrival<'_>)) -> io::Result<()> {
        let Self {
            link,
            budget,
            addresses,
            counters,
            ..
        } = self;
        for _ in 0..BATCHES {
            if !budget.has_any(now) {
                return Ok(());
            }
            let mut mads = 0;
            let count = link.receive(&mut |packet| {
                mads += 1;
                if let Some(arrival) = addresses.check(packet, counters) {
                    counters.rx_mads += 1;
                    sink(&arrival);
                }
            })?;
            budget.spend(mads);
            if count == 0 {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Until when nothing is to be received, as there was too much.
    pub fn paused_until(&mut self, now: Time) -> Option<Time> {
        (!self.budget.has_any(now)).then(|| now + PAUSE)
    }

    /// When [`Gsi::transmit`] is to be called again.
    pub fn deadline(&self) -> Option<Time> {
        self.retry
    }

    /// True while something is still to be sent.
    pub fn is_busy(&self) -> bool {
        self.retry.is_some()
    }

    /// Every counter by its name.
    pub fn counters(&self) -> Vec<(String, u64)> {
        let Counters {
            rx_mads,
            tx_mads,
            tx_dropped,
            drop_length,
            drop_opcode,
            drop_version,
            drop_qpn,
            drop_pkey,
            drop_qkey,
            drop_address,
            drop_icrc,
        } = self.counters;
        let mut all: Vec<(String, u64)> = [
            ("gsi_rx_mads", rx_mads),
            ("gsi_tx_mads", tx_mads),
            ("gsi_tx_dropped", tx_dropped),
            ("gsi_drop_length", drop_length),
            ("gsi_drop_opcode", drop_opcode),
            ("gsi_drop_version", drop_version),
            ("gsi_drop_qpn", drop_qpn),
            ("gsi_drop_pkey", drop_pkey),
            ("gsi_drop_qkey", drop_qkey),
            ("gsi_drop_address", drop_address),
            ("gsi_drop_icrc", drop_icrc),
        ]
        .map(|(name, value)| (name.to_owned(), value))
        .into();
        self.link
            .counters(&mut |name, value| all.push((format!("gsi_link_{name}"), value)));
        all
    }
}

impl Addresses {
    fn of(devices: &[DeviceInfo]) -> Self {
        let mut all: HashMap<IpAddr, Vec<Owner>> = HashMap::new();
        for info in devices {
            let connectable = |gid: &&GidEntry| gid.version == RoceVersion::V2;
            for gid in info.gids.iter().flatten().filter(connectable) {
                all.entry(gid.addr).or_default().push(Owner {
                    device: info.name.clone(),
                    ifindex: info.ifindex,
                });
            }
        }
        Self(all)
    }

    /// The device that a packet to `dest` is for, which came by an interface: of link-local addresses that of the
    /// interface, else any that has the address, as packets from the host itself come by the loopback.
    fn owner(&self, dest: IpAddr, ifindex: u32) -> Option<&Owner> {
        let owners = self.0.get(&dest)?;
        let by_interface = owners.iter().find(|owner| owner.ifindex == ifindex);
        let link_local = matches!(dest, IpAddr::V6(ip) if ip.is_unicast_link_local());
        by_interface.or_else(|| owners.first().filter(|_| !link_local || ifindex == 0))
    }

    /// The MAD of a packet, if all is right with it.
    fn check<'a>(&'a self, packet: &RxPacket<'a>, counters: &mut Counters) -> Option<Arrival<'a>> {
        let reason = match self.arrival(packet) {
            Ok(arrival) => return Some(arrival),
            Err(reason) => reason,
        };
        debug!(?reason, source = %packet.source, "packet to QP 1 dropped");
        *match reason {
            Drop::Length => &mut counters.drop_length,
            Drop::Opcode => &mut counters.drop_opcode,
            Drop::Version => &mut counters.drop_version,
            Drop::Qpn => &mut counters.drop_qpn,
            Drop::Pkey => &mut counters.drop_pkey,
            Drop::Qkey => &mut counters.drop_qkey,
            Drop::Address => &mut counters.drop_address,
            Drop::Icrc => &mut counters.drop_icrc,
        } += 1;
        None
    }

    fn arrival<'a>(&'a self, packet: &RxPacket<'a>) -> Result<Arrival<'a>, Drop> {
        let opcode = packet.data.first().ok_or(Drop::Length)?;
        if Opcode::from_u8(*opcode) != Some(Opcode::UdSendOnly) {
            return Err(Drop::Opcode);
        }
        let roce = RocePacket::parse(packet.data).map_err(|_| Drop::Length)?;
        if roce.payload().len() != MAD_LEN {
            return Err(Drop::Length);
        }
        let (bth, deth) = (roce.bth(), roce.deth().ok_or(Drop::Length)?);
        if bth.version != 0 {
            return Err(Drop::Version);
        }
        if bth.dest_qpn != GSI_QPN {
            return Err(Drop::Qpn);
        }
        // We are full members of the default partition, so others need not be.
        if bth.pkey & PARTITION != PARTITION {
            return Err(Drop::Pkey);
        }
        if deth.qkey != GSI_QKEY {
            return Err(Drop::Qkey);
        }
        if packet.source.is_multicast() || is_anywhere(packet.source) {
            return Err(Drop::Address);
        }
        let owner = self.owner(packet.dest, packet.ifindex).ok_or(Drop::Address)?;
        if !packet.icrc.valid(packet) {
            return Err(Drop::Icrc);
        }
        Ok(Arrival {
            device: &owner.device,
            source: packet.source,
            dest: packet.dest,
            ifindex: owner.ifindex,
            traffic_class: packet.traffic_class,
            flow_label: 0,
            mad: roce.payload(),
        })
    }
}

/// Why a packet is dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Drop {
    Length,
    Opcode,
    Version,
    Qpn,
    Pkey,
    Qkey,
    Address,
    Icrc,
}

/// No address that an answer could go to.
fn is_anywhere(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => ip.is_unspecified() || ip.is_broadcast(),
        IpAddr::V6(ip) => ip == Ipv6Addr::UNSPECIFIED,
    }
}

/// How many MADs may be taken now: a bucket that fills by [`RATE`] up to [`BURST`].
struct Budget {
    left: u64,
    filled: Time,
}

impl Budget {
    fn new(now: Time) -> Self {
        Self {
            left: BURST,
            filled: now,
        }
    }

    fn has_any(&mut self, now: Time) -> bool {
        let nanos = u64::try_from(now.since(self.filled).as_nanos()).unwrap_or(u64::MAX);
        let more = nanos.saturating_mul(RATE) / 1_000_000_000;
        if more > 0 {
            self.left = (self.left + more).min(BURST);
            self.filled = now;
        }
        self.left > 0
    }

    fn spend(&mut self, mads: u64) {
        self.left = self.left.saturating_sub(mads);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::daemon::picture::tests::device;
    use ferroce_engine::link::IcrcCheck;

    struct Verdict(bool);

    impl IcrcCheck for Verdict {
        fn valid(&self, _: &RxPacket<'_>) -> bool {
            self.0
        }
    }

    /// A packet that is right: header fields, then 256 bytes, then room for the ICRC.
    fn packet(change: impl Fn(&mut Headers)) -> Vec<u8> {
        let mut headers = Headers::new(Opcode::UdSendOnly, GSI_QPN, Psn::new(5));
        headers.deth = Deth {
            qkey: GSI_QKEY,
            src_qpn: GSI_QPN,
        };
        change(&mut headers);
        let mut bytes = vec![7; headers.header_len() + MAD_LEN + 4];
        headers.emit(&mut bytes);
        bytes
    }

    fn arrives(
        addresses: &Addresses,
        data: &[u8],
        dest: &str,
        ifindex: u32,
        icrc: bool,
    ) -> Result<String, Drop> {
        let packet = RxPacket {
            version: RoceVersion::V2,
            source: "10.0.0.9".parse().unwrap(),
            source_port: 50_000,
            dest: dest.parse().unwrap(),
            ifindex,
            traffic_class: 0,
            hop_limit: 64,
            flow_label: 0,
            data,
            icrc: &Verdict(icrc),
        };
        addresses.arrival(&packet).map(|arrival| {
            assert_eq!(arrival.mad, &data[20..276]);
            arrival.device.to_owned()
        })
    }

    #[test]
    fn every_check_has_its_reason() {
        let addresses = Addresses::of(&[device(&["10.0.0.1"])]);
        let good = packet(|_| ());
        let check = |data: &[u8]| arrives(&addresses, data, "10.0.0.1", 2, true);
        assert_eq!(check(&good).as_deref(), Ok("ferroce_eth0"));
        let limited = packet(|it| it.bth.pkey = 0x7fff);
        assert_eq!(check(&limited).as_deref(), Ok("ferroce_eth0"));
        assert_eq!(check(&[]), Err(Drop::Length));
        assert_eq!(check(&good[..11]), Err(Drop::Length));
        assert_eq!(check(&good[..good.len() - 4]), Err(Drop::Length));
        let mut long = good.clone();
        long.extend([0; 4]);
        assert_eq!(check(&long), Err(Drop::Length));
        assert_eq!(check(&[0xff; 300]), Err(Drop::Opcode));
        assert_eq!(
            check(&packet(|it| it.bth.opcode = Opcode::UdSendOnlyImm)),
            Err(Drop::Opcode)
        );
        assert_eq!(check(&packet(|it| it.bth.version = 1)), Err(Drop::Version));
        assert_eq!(check(&packet(|it| it.bth.dest_qpn = 0)), Err(Drop::Qpn));
        assert_eq!(check(&packet(|it| it.bth.dest_qpn = 0x00ff_0001)), Err(Drop::Qpn));
        assert_eq!(check(&packet(|it| it.bth.pkey = 0x8001)), Err(Drop::Pkey));
        assert_eq!(check(&packet(|it| it.deth.qkey = 1)), Err(Drop::Qkey));
        assert_eq!(
            arrives(&addresses, &good, "10.0.0.2", 2, true),
            Err(Drop::Address)
        );
        assert_eq!(arrives(&addresses, &good, "10.0.0.1", 2, false), Err(Drop::Icrc));
        // Before the ICRC is computed.
        assert_eq!(
            arrives(&addresses, &good, "10.0.0.2", 2, false),
            Err(Drop::Address)
        );
    }

    #[test]
    fn link_local_addresses_are_of_their_interface() {
        let mut other = device(&["fe80::1", "10.0.0.1"]);
        (other.name, other.ifindex) = ("ferroce_eth1".into(), 3);
        let addresses = Addresses::of(&[device(&["fe80::1", "10.0.0.1"]), other]);
        let good = packet(|_| ());
        let device = |dest, ifindex| arrives(&addresses, &good, dest, ifindex, true);
        assert_eq!(device("fe80::1", 2).as_deref(), Ok("ferroce_eth0"));
        assert_eq!(device("fe80::1", 3).as_deref(), Ok("ferroce_eth1"));
        assert_eq!(device("fe80::1", 1), Err(Drop::Address));
        assert_eq!(device("10.0.0.1", 3).as_deref(), Ok("ferroce_eth1"));
        // From the host itself, by the loopback.
        assert_eq!(device("10.0.0.1", 1).as_deref(), Ok("ferroce_eth0"));
    }

    #[test]
    fn a_flood_is_taken_at_its_rate() {
        let start = Time::from_nanos(1);
        let mut budget = Budget::new(start);
        let mut taken = 0;
        for millis in 0..1000 {
            let now = start + Duration::from_millis(millis);
            while budget.has_any(now) {
                budget.spend(1);
                taken += 1;
            }
        }
        assert!(
            (RATE + BURST - RATE / 500..=RATE + BURST).contains(&taken),
            "{taken}"
        );
    }
}
