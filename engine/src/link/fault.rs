//! Fault injection: losses, duplicates, reordering and damage, seeded, around any link.
#![deny(unsafe_code)]

use std::fmt;
use std::io;
use std::net::IpAddr;
use std::os::fd::RawFd;
use std::str::FromStr;

use super::random::{Prng, Probability};
use super::{IcrcCheck, Link, Path, Qpns, Reach, RoceVersion, RxPacket, Transmit, TransmitError};
use crate::memory::Fault;

/// How often which fault befalls a packet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FaultRates {
    /// The packet vanishes.
    pub loss: Probability,
    /// It arrives twice.
    pub duplicate: Probability,
    /// Later packets overtake it.
    pub reorder: Probability,
    /// Some of its bits change on the way.
    pub corrupt: Probability,
}

/// The directions in which a [`FaultInjector`] acts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Direction {
    /// Packets sent and packets received.
    #[default]
    Both,
    /// Packets received.
    Receive,
    /// Packets sent. These can't be damaged: the link's ICRC would cover the damage.
    Transmit,
}

/// What a [`FaultInjector`] does, as the environment variable `FERROCE_FAULT` says it:
/// `loss=0.01,dup=0.01,reorder=0.01,corrupt=0.01,seed=7,dir=both|rx|tx`, each part optional.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FaultConfig {
    /// How often which fault happens.
    pub rates: FaultRates,
    /// Where.
    pub direction: Direction,
    /// Equal seeds give equal faults for equal traffic.
    pub seed: u64,
}

impl FromStr for FaultConfig {
    type Err = String;

    fn from_str(s: &str) -> Result<FaultConfig, String> {
        let mut config = FaultConfig::default();
        for part in s.split(',').map(str::trim).filter(|part| !part.is_empty()) {
            let (key, value) = part.split_once('=').unwrap_or((part, ""));
            match key {
                "loss" => config.rates.loss = value.parse()?,
                "dup" => config.rates.duplicate = value.parse()?,
                "reorder" => config.rates.reorder = value.parse()?,
                "corrupt" => config.rates.corrupt = value.parse()?,
                "seed" => {
                    config.seed = value
                        .parse()
                        .map_err(|_| format!("seed: '{value}' is not a number"))?;
                }
                "dir" => {
                    config.direction = match value {
                        "both" => Direction::Both,
                        "rx" => Direction::Receive,
                        "tx" => Direction::Transmit,
                        _ => return Err(format!("dir: '{value}' is none of both, rx, tx")),
                    }
                }
                _ => {
                    return Err(format!(
                        "'{key}' is none of loss, dup, reorder, corrupt, seed, dir"
                    ));
                }
            }
        }
        Ok(config)
    }
}

impl fmt::Display for FaultConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let FaultRates {
            loss,
            duplicate,
            reorder,
            corrupt,
        } = self.rates;
        let dir = match self.direction {
            Direction::Both => "both",
            Direction::Receive => "rx",
            Direction::Transmit => "tx",
        };
        write!(
            f,
            "loss={loss},dup={duplicate},reorder={reorder},corrupt={corrupt},seed={},dir={dir}",
            self.seed
        )
    }
}

/// Changes some bits of `bytes`: one bit, one byte, or a run of up to four bytes. A CRC-32 finds every one of these.
pub fn damage(bytes: &mut [u8], prng: &mut Prng) {
    let run = match prng.below(4) {
        0 | 1 => {
            let at = prng.below(bytes.len() as u64) as usize;
            if let Some(byte) = bytes.get_mut(at) {
                *byte ^= 1 << prng.below(8);
            }
            return;
        }
        2 => 1,
        _ => prng.between(2, 4),
    };
    let start = prng.below((bytes.len() as u64).saturating_sub(run) + 1) as usize;
    for byte in bytes.iter_mut().skip(start).take(run as usize) {
        *byte ^= prng.between(1, 255) as u8;
    }
}

/// A link with faults: wraps another.
pub struct FaultInjector<L> {
    inner: L,
    rates: FaultRates,
    direction: Direction,
    prng: Prng,
    /// A received packet that waits for one to overtake it.
    late_rx: Option<LateRx>,
    /// A packet to send that waits for one to overtake it.
    late_tx: Option<LateTx>,
    counts: Counts,
}

#[derive(Default)]
struct Counts {
    lost: u64,
    duplicated: u64,
    reordered: u64,
    damaged: u64,
}

struct LateRx {
    version: RoceVersion,
    source: IpAddr,
    source_port: u16,
    dest: IpAddr,
    ifindex: u32,
    traffic_class: u8,
    hop_limit: u8,
    flow_label: u32,
    data: Vec<u8>,
    icrc: Verdict,
}

struct LateTx {
    path: Path,
    qpns: Qpns,
    data: Vec<u8>,
}

/// What the link's ICRC check said before the packet was put aside.
struct Verdict(bool);

impl IcrcCheck for Verdict {
    fn valid(&self, _: &RxPacket<'_>) -> bool {
        self.0
    }
}

impl LateRx {
    fn new(packet: &RxPacket<'_>) -> LateRx {
        LateRx {
            version: packet.version,
            source: packet.source,
            source_port: packet.source_port,
            dest: packet.dest,
            ifindex: packet.ifindex,
            traffic_class: packet.traffic_class,
            hop_limit: packet.hop_limit,
            flow_label: packet.flow_label,
            data: packet.data.to_vec(),
            icrc: Verdict(packet.icrc.valid(packet)),
        }
    }

    fn packet(&self) -> RxPacket<'_> {
        RxPacket {
            version: self.version,
            source: self.source,
            source_port: self.source_port,
            dest: self.dest,
            ifindex: self.ifindex,
            traffic_class: self.traffic_class,
            hop_limit: self.hop_limit,
            flow_label: self.flow_label,
            data: &self.data,
            icrc: &self.icrc,
        }
    }
}

impl<L: Link> FaultInjector<L> {
    /// Wraps `inner`.
    pub fn new(inner: L, config: FaultConfig) -> FaultInjector<L> {
        FaultInjector {
            inner,
            rates: config.rates,
            direction: config.direction,
            prng: Prng::new(config.seed),
            late_rx: None,
            late_tx: None,
            counts: Counts::default(),
        }
    }

    /// Sends the packet that was put aside, if there is one and the link has room.
    fn send_late(&mut self) {
        if let Some(late) = self.late_tx.take() {
            let sent = self
                .inner
                .packet(&late.path, late.qpns, late.data.len(), &mut |out| {
                    out.copy_from_slice(&late.data);
                    Ok(())
                });
            if matches!(sent, Err(TransmitError::Full | TransmitError::Busy)) {
                self.late_tx = Some(late);
            }
        }
    }
}

impl<L: Link> Transmit for FaultInjector<L> {
    fn packet(
        &mut self,
        path: &Path,
        qpns: Qpns,
        len: usize,
        fill: &mut dyn FnMut(&mut [u8]) -> Result<(), Fault>,
    ) -> Result<(), TransmitError> {
        if self.direction == Direction::Receive {
            return self.inner.packet(path, qpns, len, fill);
        }
        let lost = self.prng.chance(self.rates.loss);
        if lost || (self.late_tx.is_none() && self.prng.chance(self.rates.reorder)) {
            let mut data = vec![0; len];
            fill(&mut data).map_err(TransmitError::Fault)?;
            if lost {
                self.counts.lost += 1;
            } else {
                self.counts.reordered += 1;
                self.late_tx = Some(LateTx {
                    path: *path,
                    qpns,
                    data,
                });
            }
            return Ok(());
        }
        self.inner.packet(path, qpns, len, fill)?;
        if self.prng.chance(self.rates.duplicate) {
            // A link that is full now loses the second copy only.
            match self.inner.packet(path, qpns, len, fill) {
                Ok(()) => self.counts.duplicated += 1,
                Err(TransmitError::Full | TransmitError::Busy | TransmitError::Fault(_)) => {}
            }
        }
        self.send_late();
        Ok(())
    }
}

impl<L: Link> Link for FaultInjector<L> {
    fn receive(&mut self, sink: &mut dyn FnMut(&RxPacket<'_>)) -> io::Result<usize> {
        if self.direction == Direction::Transmit {
            return self.inner.receive(sink);
        }
        let (rates, prng, late, counts) = (self.rates, &mut self.prng, &mut self.late_rx, &mut self.counts);
        let mut handed = 0;
        let received = self.inner.receive(&mut |packet| {
            if prng.chance(rates.loss) {
                counts.lost += 1;
                return;
            }
            let damaged = prng.chance(rates.corrupt).then(|| {
                counts.damaged += 1;
                let mut data = packet.data.to_vec();
                damage(&mut data, prng);
                data
            });
            let packet = RxPacket {
                data: damaged.as_deref().unwrap_or(packet.data),
                ..*packet
            };
            if late.is_none() && prng.chance(rates.reorder) {
                counts.reordered += 1;
                *late = Some(LateRx::new(&packet));
                return;
            }
            sink(&packet);
            handed += 1;
            if prng.chance(rates.duplicate) {
                counts.duplicated += 1;
                sink(&packet);
                handed += 1;
            }
            if let Some(late) = late.take() {
                sink(&late.packet());
                handed += 1;
            }
        })?;
        if received == 0
            && let Some(late) = self.late_rx.take()
        {
            sink(&late.packet());
            handed += 1;
        }
        // Packets that were all lost are still not "nothing waits".
        Ok(handed.max(received))
    }

    fn flush(&mut self) -> io::Result<bool> {
        self.send_late();
        Ok(self.inner.flush()? && self.late_tx.is_none())
    }

    fn receive_fds(&self, fds: &mut Vec<RawFd>) {
        self.inner.receive_fds(fds);
    }

    fn transmit_fd(&self) -> Option<RawFd> {
        self.inner.transmit_fd()
    }

    fn window(&self, packet_len: usize) -> u32 {
        self.inner.window(packet_len)
    }

    fn join(&mut self, group: IpAddr, ifindex: u32) -> io::Result<()> {
        self.inner.join(group, ifindex)
    }

    fn leave(&mut self, group: IpAddr) -> io::Result<()> {
        self.inner.leave(group)
    }

    fn reach(&mut self, path: &Path) -> Reach {
        self.inner.reach(path)
    }

    fn set_mtu(&mut self, mtu: u32) {
        self.inner.set_mtu(mtu);
    }

    fn expect_bursts(&mut self) {
        self.inner.expect_bursts();
    }

    fn counters(&self, out: &mut dyn FnMut(&'static str, u64)) {
        self.inner.counters(out);
        out("fault_lost", self.counts.lost);
        out("fault_duplicated", self.counts.duplicated);
        out("fault_reordered", self.counts.reordered);
        out("fault_damaged", self.counts.damaged);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::link::sim::{NodeConfig, SimLink, SimNetwork};

    const QPN: u32 = 0x02_0001;

    fn path() -> Path {
        Path {
            version: RoceVersion::V1,
            ifindex: 1,
            flow_label: 0x1_2345,
            ..Path::between("10.0.0.1".parse().unwrap(), "10.0.0.2".parse().unwrap())
        }
    }

    /// Sends 1000 numbered packets from an injector of `sender` to one of `receiver`; gives what arrives and its ICRC.
    fn carry(sender: &str, receiver: &str) -> (Vec<(u32, bool)>, FaultInjector<SimLink>) {
        let network = SimNetwork::new(1);
        let a = network.attach(NodeConfig::new(path().source, 1));
        let b = network.attach(NodeConfig::new(path().dest, 2));
        let mut a = FaultInjector::new(a, sender.parse().unwrap());
        let mut b = FaultInjector::new(b, receiver.parse().unwrap());
        for n in 0..1000u32 {
            a.packet(&path(), Qpns::to(QPN), 40, &mut |out| {
                out[36..].copy_from_slice(&n.to_be_bytes());
                Ok(())
            })
            .unwrap();
            if n % 100 == 99 {
                a.flush().unwrap();
            }
        }
        while let Some(next) = network.next_event() {
            network.advance(next);
            a.flush().unwrap();
        }
        let mut got = Vec::new();
        let mut sink = |packet: &RxPacket<'_>| {
            assert_eq!((packet.version, packet.flow_label), (RoceVersion::V1, 0x1_2345));
            let number = packet.data[36..40].try_into().unwrap();
            got.push((u32::from_be_bytes(number), packet.icrc.valid(packet)));
        };
        while b.receive(&mut sink).unwrap() > 0 {}
        (got, b)
    }

    #[test]
    fn without_faults_nothing_changes() {
        let whole: Vec<_> = (0..1000).map(|n| (n, true)).collect();
        assert_eq!(carry("", "seed=3").0, whole);
        assert_eq!(
            carry("loss=1,dir=rx", "loss=1,dir=tx").0,
            whole,
            "directions that have no traffic"
        );
    }

    #[test]
    fn each_fault_shows_and_no_other() {
        for (sender, receiver) in [("seed=5,X=0.1", ""), ("", "seed=5,X=0.1")] {
            let run = |fault| carry(&sender.replace('X', fault), &receiver.replace('X', fault)).0;
            let lost = run("loss");
            assert!(
                (850..950).contains(&lost.len()) && lost.is_sorted(),
                "{}",
                lost.len()
            );
            let twice = run("dup");
            assert!(
                (1050..1150).contains(&twice.len()) && twice.is_sorted(),
                "{}",
                twice.len()
            );
            let mut mixed = run("reorder");
            assert!(!mixed.is_sorted());
            mixed.sort();
            assert_eq!(mixed, (0..1000).map(|n| (n, true)).collect::<Vec<_>>());
        }
        let (damaged, b) = carry("", "seed=5,corrupt=0.1");
        let bad = damaged.iter().filter(|(_, valid)| !valid).count();
        assert!(damaged.len() == 1000 && (70..130).contains(&bad), "{bad}");
        let mut counted = 0;
        b.counters(&mut |name, value| counted += if name == "fault_damaged" { value } else { 0 });
        assert!(counted >= bad as u64);
        assert_eq!(carry("corrupt=1", "").0.len(), 1000);
    }

    #[test]
    fn damage_changes_something() {
        let mut prng = Prng::new(9);
        for len in [1, 2, 3, 40] {
            for _ in 0..1000 {
                let mut bytes = vec![0x5a; len];
                damage(&mut bytes, &mut prng);
                assert!(bytes.iter().any(|&b| b != 0x5a));
            }
        }
        damage(&mut [], &mut prng);
    }

    #[test]
    fn the_configuration_reads_and_prints() {
        let text = "loss=0.01,dup=0.02,reorder=0.03,corrupt=0.1,seed=7,dir=rx";
        assert_eq!(text.parse::<FaultConfig>().unwrap().to_string(), text);
        assert_eq!("".parse(), Ok(FaultConfig::default()));
        for bad in ["los=1", "loss", "loss=2", "seed=x", "dir=up"] {
            assert!(bad.parse::<FaultConfig>().is_err(), "{bad}");
        }
    }
}
