//! Two hosts in virtual time: programs, daemons that may die, a resolver, and a network with faults.

use std::collections::{BTreeMap, VecDeque};
use std::net::IpAddr;
use std::time::Duration;

use crate::control::{DeviceInfo, GidEntry};
use crate::link::random::Prng;
use crate::rdma_cm::{
    Address, Answer, Arrival, Command, Ece, Errno, Event, EventKind, Id, Keepsake, Output, Parameters,
    PortSpace, QpAttributes, QpKind, RdmaCm, Resolution, Session, TargetState,
};
use crate::time::Time;

/// The process of a host, unless a test has more.
pub const PROGRAM: Session = 1;
/// Time that a packet takes.
const LATENCY: Duration = Duration::from_micros(50);

pub fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

pub fn address(text: &str) -> Address {
    Address::Ip(text.parse().unwrap())
}

/// A device of an interface with addresses.
pub fn device(name: &str, ifindex: u32, addresses: &[&str]) -> DeviceInfo {
    DeviceInfo {
        name: name.into(),
        netdev: format!("net_{name}"),
        ifindex,
        guid: 0x0200_00ff_fe00_0000 + u64::from(ifindex),
        mac: [2, 0, 0, 0, 0, ifindex as u8],
        mtu: 1500,
        up: true,
        lo: addresses.contains(&"127.0.0.1"),
        gids: addresses
            .iter()
            .map(|text| Some(GidEntry::roce_v2(ip(text))))
            .collect(),
        ..DeviceInfo::default()
    }
}

/// What the network does to a MAD.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    Lost,
    /// Comes twice, the second time after that long.
    Twice(Duration),
    /// Comes late, behind what was sent after it.
    Late(Duration),
}

/// How a daemon dies in one of its calls: what the programs get of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Death {
    /// All that the call gave.
    After,
    /// All, but its MADs were not sent.
    BeforeSending,
    /// Nothing, but its MADs were sent.
    BeforeTelling,
    /// Nothing, and nothing was sent.
    Before,
    /// The daemon lives, the program dies.
    OfProgram,
}

pub struct Host {
    pub cm: RdmaCm,
    pub devices: Vec<DeviceInfo>,
    pub keepsakes: BTreeMap<Id, Vec<u8>>,
    pub events: VecDeque<Event>,
    pub calls: usize,
    pub death: Option<(usize, Death)>,
    pub program_lives: bool,
    seed: u64,
}

struct Packet {
    host: usize,
    source: IpAddr,
    dest: IpAddr,
    mad: Box<[u8; 256]>,
}

pub struct World {
    pub now: Time,
    pub hosts: Vec<Host>,
    flying: BTreeMap<(Time, u64), Packet>,
    sent: u64,
    /// What happens to the MAD of that number.
    pub faults: BTreeMap<u64, Fault>,
    /// What happens to any MAD, unless it has a fault of its own.
    pub lose: Box<dyn FnMut() -> Option<Fault>>,
    /// The MADs sent: host and attribute id.
    pub log: Vec<(usize, u16)>,
}

fn rdma_cm(seed: u64) -> RdmaCm {
    let mut random = Prng::new(seed);
    RdmaCm::new(Box::new(move || random.next_u64()))
}

impl Host {
    fn new(seed: u64, devices: Vec<DeviceInfo>) -> Host {
        let mut host = Host {
            cm: rdma_cm(seed),
            devices,
            keepsakes: BTreeMap::new(),
            events: VecDeque::new(),
            calls: 0,
            death: None,
            program_lives: true,
            seed,
        };
        host.cm.set_devices(Time::ZERO, &host.devices);
        host.cm.open(PROGRAM, 0);
        host
    }

    /// Another daemon takes over. Gives the ids that it does not go on with.
    pub fn restart(&mut self, now: Time) -> Vec<Id> {
        self.seed += 1000;
        self.cm = rdma_cm(self.seed);
        self.cm.set_devices(now, &self.devices);
        self.cm.open(PROGRAM, 0);
        let mut lost = Vec::new();
        for (&id, state) in &self.keepsakes {
            let keepsake = Keepsake {
                id,
                state: Some(state.clone()),
            };
            if !self.cm.restore(now, PROGRAM, &keepsake) {
                lost.push(id);
            }
        }
        lost
    }
}

impl World {
    /// Two hosts on one link.
    pub fn new(seed: u64) -> World {
        World::of(
            seed,
            vec![
                vec![device("a", 2, &["fe80::a", "10.0.0.1", "fd00::1"])],
                vec![device("b", 3, &["fe80::b", "10.0.0.2", "fd00::2"])],
            ],
        )
    }

    pub fn of(seed: u64, devices: Vec<Vec<DeviceInfo>>) -> World {
        World {
            now: Time::ZERO + Duration::from_secs(1),
            hosts: devices
                .into_iter()
                .zip(1..)
                .map(|(devices, host)| Host::new(seed * 10 + host, devices))
                .collect(),
            flying: BTreeMap::new(),
            sent: 0,
            faults: BTreeMap::new(),
            lose: Box::new(|| None),
            log: Vec::new(),
        }
    }

    /// Does something with a host's daemon, which may die of it. True: it has to be done again.
    fn call(&mut self, host: usize, work: &mut dyn FnMut(&mut RdmaCm, Time)) -> bool {
        let death = {
            let host = &mut self.hosts[host];
            host.calls += 1;
            host.death
                .filter(|(call, _)| *call == host.calls)
                .map(|(_, death)| death)
        };
        work(&mut self.hosts[host].cm, self.now);
        match death {
            None => self.drain(host, true, true),
            Some(Death::OfProgram) => {
                self.drain(host, true, true);
                self.kill_program(host);
            }
            Some(death) => {
                let told = matches!(death, Death::After | Death::BeforeSending);
                let sent = matches!(death, Death::After | Death::BeforeTelling);
                self.drain(host, told, sent);
                let lost = self.hosts[host].restart(self.now);
                assert_eq!(lost, [], "a daemon that follows goes on with all");
                self.drain(host, true, true);
                return !told;
            }
        }
        false
    }

    pub fn kill_program(&mut self, host: usize) {
        self.hosts[host].program_lives = false;
        self.hosts[host].events.clear();
        self.hosts[host].cm.close(self.now, PROGRAM);
        self.drain(host, true, true);
        self.hosts[host].keepsakes.clear();
    }

    /// Takes what a daemon gives.
    pub fn drain(&mut self, index: usize, told: bool, sent: bool) {
        while let Some(output) = self.hosts[index].cm.poll() {
            match output {
                Output::Send { device, path, mad } => {
                    if sent {
                        let host = &self.hosts[index];
                        assert!(host.devices.iter().any(|d| d.name == device), "{device}");
                        self.send(index, path.source, path.dest, mad);
                    }
                }
                Output::Event { session, event } => {
                    if told && session == PROGRAM && self.hosts[index].program_lives {
                        self.hosts[index].events.push_back(event);
                    }
                }
                Output::Keepsake { session, keepsake } => {
                    if told && session == PROGRAM {
                        let keepsakes = &mut self.hosts[index].keepsakes;
                        match keepsake.state {
                            Some(state) => drop(keepsakes.insert(keepsake.id, state)),
                            None => drop(keepsakes.remove(&keepsake.id)),
                        }
                    }
                }
                Output::Resolve {
                    token,
                    source,
                    dest,
                    ifindex,
                    ..
                } => {
                    if let Some(answer) = self.resolve(index, source, dest, ifindex) {
                        let now = self.now;
                        self.hosts[index].cm.resolved(now, token, answer);
                    }
                }
                Output::ResolveCancel { .. } => {}
            }
        }
    }

    /// The resolver: `None` for an address that nobody has, which does not answer.
    fn resolve(
        &self,
        index: usize,
        source: Option<IpAddr>,
        dest: IpAddr,
        ifindex: u32,
    ) -> Option<Result<Resolution, Errno>> {
        let has = |device: &DeviceInfo, ip: IpAddr| device.gids.iter().flatten().any(|gid| gid.addr == ip);
        let ours = &self.hosts[index].devices;
        if let Some(device) = ours.iter().find(|device| has(device, dest)) {
            return Some(Ok(Resolution {
                source: source.unwrap_or(dest),
                ifindex: device.ifindex,
            }));
        }
        if !dest.is_multicast()
            && !self
                .hosts
                .iter()
                .flat_map(|host| &host.devices)
                .any(|device| has(device, dest))
        {
            return None;
        }
        let link_local =
            |ip: IpAddr| matches!(ip, IpAddr::V6(ip) if [0xfe80, 0xff02].contains(&ip.segments()[0]));
        ours.iter()
            .filter(|device| ifindex == 0 || device.ifindex == ifindex)
            .find_map(|device| {
                let gid = device.gids.iter().flatten().find(|gid| {
                    source.map_or(
                        gid.addr.is_ipv4() == dest.is_ipv4() && link_local(gid.addr) == link_local(dest),
                        |source| gid.addr == source,
                    )
                })?;
                Some(Ok(Resolution {
                    source: gid.addr,
                    ifindex: device.ifindex,
                }))
            })
            .or(Some(Err(libc::ENETUNREACH)))
    }

    fn send(&mut self, from: usize, source: IpAddr, dest: IpAddr, mad: Box<[u8; 256]>) {
        let number = self.sent;
        self.sent += 1;
        self.log.push((from, u16::from_be_bytes([mad[16], mad[17]])));
        let host = self.hosts.iter().position(|host| {
            host.devices
                .iter()
                .flat_map(|device| device.gids.iter().flatten())
                .any(|gid| gid.addr == dest)
        });
        let Some(host) = host else { return };
        let fault = match self.faults.get(&number) {
            Some(fault) => Some(*fault),
            None => (self.lose)(),
        };
        let copies = match fault {
            None => vec![LATENCY],
            Some(Fault::Lost) => vec![],
            Some(Fault::Twice(later)) => vec![LATENCY, LATENCY + later],
            Some(Fault::Late(later)) => vec![LATENCY + later],
        };
        for (copy, delay) in copies.into_iter().enumerate() {
            self.flying.insert(
                (self.now + delay, number * 2 + copy as u64),
                Packet {
                    host,
                    source,
                    dest,
                    mad: mad.clone(),
                },
            );
        }
    }

    /// The next moment at which something happens by itself.
    pub fn next(&self) -> Option<Time> {
        let flying = self.flying.first_key_value().map(|((time, _), _)| *time);
        self.hosts
            .iter()
            .filter_map(|host| host.cm.deadline())
            .chain(flying)
            .min()
    }

    /// Goes to the next moment, and does what is due. False if there is none up to `end`.
    pub fn step(&mut self, end: Time) -> bool {
        let Some(next) = self.next().filter(|next| *next <= end) else {
            return false;
        };
        self.now = self.now.max(next);
        while let Some(entry) = self.flying.first_entry()
            && entry.key().0 <= self.now
        {
            let packet = entry.remove();
            let device = self.hosts[packet.host].devices.iter().find(|device| {
                let mut gids = device.gids.iter().flatten();
                gids.any(|gid| gid.addr == packet.dest)
            });
            let Some((device, ifindex)) = device.map(|device| (device.name.clone(), device.ifindex)) else {
                continue;
            };
            self.call(packet.host, &mut |cm, now| {
                let arrival = Arrival {
                    device: &device,
                    source: packet.source,
                    dest: packet.dest,
                    ifindex,
                    traffic_class: 0,
                    flow_label: 0,
                    mad: &packet.mad[..],
                };
                cm.receive(now, &arrival);
            });
        }
        for host in 0..self.hosts.len() {
            if self.hosts[host].cm.deadline().is_some_and(|due| due <= self.now) {
                self.call(host, &mut |cm, now| {
                    cm.timeout(now);
                    // Whoever sleeps until then would not sleep at all.
                    assert!(cm.deadline().is_none_or(|next| next > now), "what is due is left");
                });
            }
        }
        true
    }

    /// Lets time pass until nothing happens any more, or that long.
    pub fn run(&mut self, limit: Duration) {
        let end = self.now + limit;
        while self.step(end) {}
        if self.next().is_some() {
            self.now = end;
        }
    }

    /// A program's command; repeated where the daemon died of it.
    pub fn command(&mut self, host: usize, command: Command) -> Result<Answer, Errno> {
        let mut result = Err(0);
        while self.call(host, &mut |cm, now| {
            result = cm.command(now, PROGRAM, command.clone())
        }) {}
        result
    }

    pub fn create(&mut self, host: usize, port_space: PortSpace) -> Id {
        self.create_of(host, port_space, QpKind::Rc)
    }

    pub fn create_of(&mut self, host: usize, port_space: PortSpace, qp_kind: QpKind) -> Id {
        match self.command(host, Command::Create { port_space, qp_kind }) {
            Ok(Answer::Created(id)) => id,
            other => panic!("{other:?}"),
        }
    }

    pub fn bind(&mut self, host: usize, id: Id, to: &str) -> Result<(), Errno> {
        let address = address(to);
        self.command(host, Command::Bind { id, address }).map(drop)
    }

    pub fn listen(&mut self, host: usize, id: Id, backlog: i32) -> Result<(), Errno> {
        self.command(host, Command::Listen { id, backlog }).map(drop)
    }

    /// A listener.
    pub fn listener(&mut self, host: usize, port_space: PortSpace, at: &str) -> Id {
        let id = self.create(host, port_space);
        self.bind(host, id, at).unwrap();
        self.listen(host, id, 0).unwrap();
        id
    }

    /// The next event of a host, while time passes.
    pub fn event(&mut self, host: usize) -> Event {
        let end = self.now + Duration::from_secs(600);
        loop {
            if let Some(event) = self.hosts[host].events.pop_front() {
                return event;
            }
            assert!(self.step(end), "no event comes");
        }
    }

    pub fn expect(&mut self, host: usize, kind: EventKind) -> Event {
        let event = self.event(host);
        assert_eq!(event.kind, kind, "{event:?}");
        event
    }

    /// An id with a route to the address.
    pub fn route(&mut self, host: usize, port_space: PortSpace, to: &str) -> Id {
        let id = self.create(host, port_space);
        self.resolve_to(host, id, to);
        id
    }

    pub fn resolve_to(&mut self, host: usize, id: Id, to: &str) {
        let resolve = Command::ResolveAddress {
            id,
            source: None,
            dest: address(to),
            timeout_ms: 2000,
        };
        self.command(host, resolve).unwrap();
        self.expect(host, EventKind::AddressResolved);
        self.command(host, Command::ResolveRoute { id, timeout_ms: 2000 })
            .unwrap();
        self.expect(host, EventKind::RouteResolved);
    }

    pub fn connect(&mut self, host: usize, id: Id, parameters: Parameters) -> Result<(), Errno> {
        let ece = Ece::default();
        self.command(host, Command::Connect { id, parameters, ece })
            .map(drop)
    }

    pub fn accept(&mut self, host: usize, id: Id, parameters: Option<Parameters>) -> Result<(), Errno> {
        let ece = Ece::default();
        self.command(host, Command::Accept { id, parameters, ece })
            .map(drop)
    }

    pub fn attributes(&mut self, host: usize, id: Id, state: TargetState) -> Result<QpAttributes, Errno> {
        match self.command(host, Command::QpAttributes { id, state })? {
            Answer::QpAttributes(attributes) => Ok(*attributes),
            other => panic!("{other:?}"),
        }
    }

    /// A connection between queue pairs of that number: ids of both hosts.
    pub fn connected(&mut self, to: &str, qpn: u32) -> (Id, Id) {
        let client = self.route(0, PortSpace::Tcp, to);
        self.connect(0, client, parameters(qpn)).unwrap();
        let server = self.expect(1, EventKind::ConnectRequest).new_id.unwrap();
        self.command(1, Command::Taken { id: server }).unwrap();
        self.accept(1, server, Some(parameters(qpn))).unwrap();
        self.expect(0, EventKind::ConnectResponse);
        self.accept(0, client, None).unwrap();
        let event = self.expect(1, EventKind::Established);
        assert_eq!(event.id, server);
        (client, server)
    }

    /// Destroys all that the programs have, and checks that in the end nothing is left.
    pub fn finish(mut self) {
        for host in 0..self.hosts.len() {
            let ids: Vec<Id> = self.hosts[host].cm.ids.keys().map(|id| id.number).collect();
            for id in ids {
                // One may have gone with its listener.
                let _ = self.command(host, Command::Destroy { id });
            }
        }
        self.run(Duration::from_secs(3600));
        for host in &self.hosts {
            let cm = &host.cm;
            assert!(cm.ids.is_empty() && cm.comms.is_empty() && cm.memberships.is_empty());
            assert!(cm.ports.is_empty(), "a port leaks");
            assert_eq!(cm.cm.status(), [], "a connection leaks");
            assert!(cm.resolves.is_empty() && cm.resolve_deadlines.is_empty());
            assert!(cm.sessions.values().all(|process| process.held == 0) && cm.users.is_empty());
            assert_eq!(cm.deadline(), None);
            assert!(host.keepsakes.is_empty(), "{:?}", host.keepsakes.keys());
        }
    }
}

/// Parameters of a connection with all fields different.
pub fn parameters(qpn: u32) -> Parameters {
    Parameters {
        qpn,
        qkey: 0,
        private_data: vec![qpn as u8; 8],
        responder_resources: 3,
        initiator_depth: 5,
        flow_control: true,
        retry_count: 6,
        rnr_retry_count: 7,
        srq: false,
    }
}
