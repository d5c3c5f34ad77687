//! Runs a plan: two hosts, their programs, and the network between them.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use ferroce_engine::cm::{
    Attributes, Cm, CommId, Ece, Event, EventKind, ReplyParameters, RequestParameters, SidrParameters,
    SidrReplyParameters, State, Status, Transport, Way,
};
use ferroce_engine::link::Path;
use ferroce_engine::link::random::Prng;
use ferroce_engine::time::Time;
use ferroce_wire::cm::{CmMad, RejReason, SidrStatus};

use crate::plan::{Fault, Plan, Scenario};

/// How long a message takes.
const LATENCY: Duration = Duration::from_millis(1);
/// How long programs stay connected: longer than a message or two need to be sent again, with the patience that was
/// asked for.
pub const CONNECTED: Duration = Duration::from_secs(150);
/// A run that takes longer does not end.
const LIMIT: Duration = Duration::from_secs(2000);

/// How a connection came to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The peer refused, or ended it by a refusal.
    Rejected(RejReason),
    /// Nobody answered.
    Timeout,
    /// The peer ended it.
    ByPeer,
    /// It was ended from here.
    Here,
    /// A datagram service has answered.
    Service(SidrStatus),
}

/// One end of a connection, or of an attempt at one.
#[derive(Clone, Debug)]
pub struct Side {
    pub qpn: u32,
    pub psn: u32,
    /// What was known when it was connected, and when that was.
    pub connected: Option<(Attributes, Time)>,
    pub end: Option<(End, Time)>,
    /// The program has let go of it by itself.
    pub dropped: bool,
}

/// What came of a scenario.
#[derive(Clone, Debug)]
pub struct Outcome {
    pub start: Time,
    /// Who asked: one, or two that cross.
    pub askers: Vec<Side>,
    /// Who was asked: one, and more if an old message came too late.
    pub asked: Vec<Side>,
}

/// What came of a plan.
pub struct Report {
    pub outcomes: Vec<Outcome>,
    /// What is left in both hosts.
    pub left: Vec<Status>,
    pub messages: usize,
    /// How long it took.
    pub duration: Duration,
    pub trace: Vec<String>,
}

/// What a program does later.
#[derive(Clone, Copy, Debug)]
enum Task {
    Begin(usize),
    Reply(usize, CommId),
    Ready(usize, CommId),
    Data(CommId),
    Disconnect(CommId),
    Die(CommId),
}

struct Host {
    cm: Cm,
    address: IpAddr,
    guid: u64,
}

type Mad = Box<[u8; 256]>;

struct World<'a> {
    plan: &'a Plan,
    now: Time,
    hosts: [Host; 2],
    wire: BTreeMap<(Time, usize), (usize, Mad)>,
    tasks: BTreeMap<(Time, usize), (usize, Task)>,
    outcomes: Vec<Outcome>,
    /// Whose a comm id of a host is: scenario, asker or not, and which of them.
    owners: BTreeMap<(usize, CommId), (usize, bool, usize)>,
    messages: usize,
    order: usize,
    restarts: u64,
    next_qpn: u32,
    trace: Vec<String>,
}

/// Runs it to its end.
pub fn run(plan: &Plan) -> Report {
    let start = Time::from_nanos(1_000_000_000);
    let host = |number: u8| Host {
        cm: new_cm(number.into()),
        address: IpAddr::V4(Ipv4Addr::new(10, 0, 0, number)),
        guid: u64::from(number) << 32,
    };
    let mut world = World {
        plan,
        now: start,
        hosts: [host(1), host(2)],
        wire: BTreeMap::new(),
        tasks: BTreeMap::new(),
        outcomes: Vec::new(),
        owners: BTreeMap::new(),
        messages: 0,
        order: 0,
        restarts: 2,
        next_qpn: 0x100,
        trace: Vec::new(),
    };
    for (number, &(scenario, delay, by_second)) in plan.scenarios.iter().enumerate() {
        world.outcomes.push(Outcome {
            start: start + delay,
            askers: Vec::new(),
            asked: Vec::new(),
        });
        let asker = usize::from(by_second);
        world.later(delay, asker, Task::Begin(number));
        if scenario == Scenario::Crossing {
            world.later(delay, 1 - asker, Task::Begin(number));
        }
    }
    world.run(start + LIMIT);
    let left = world.hosts.iter().flat_map(|host| host.cm.status()).collect();
    Report {
        outcomes: world.outcomes,
        left,
        messages: world.messages,
        duration: world.now.since(start),
        trace: world.trace,
    }
}

fn new_cm(seed: u64) -> Cm {
    let mut prng = Prng::new(seed);
    Cm::new(Box::new(move || prng.next_u64()))
}

impl World<'_> {
    fn run(&mut self, limit: Time) {
        loop {
            let arrival = self.wire.first_key_value().map(|(&(time, _), _)| time);
            let task = self.tasks.first_key_value().map(|(&(time, _), _)| time);
            let timers = self.hosts.iter().filter_map(|host| host.cm.deadline()).min();
            let Some(next) = [arrival, task, timers].into_iter().flatten().min() else {
                return;
            };
            self.now = next.max(self.now);
            if self.now > limit {
                return;
            }
            if arrival == Some(next) {
                if let Some((_, (to, mad))) = self.wire.pop_first() {
                    let way = self.way(to);
                    self.hosts[to].cm.receive(next, &way, &mad[..]);
                }
            } else if task == Some(next) {
                if let Some((_, (host, task))) = self.tasks.pop_first() {
                    self.perform(host, task);
                }
            } else {
                for host in &mut self.hosts {
                    host.cm.timeout(next);
                }
            }
            self.settle();
        }
    }

    /// Gives the programs their events, and the network the messages.
    fn settle(&mut self) {
        for host in [0, 1] {
            while let Some(event) = self.hosts[host].cm.poll_event() {
                self.react(host, event);
            }
        }
        for host in [0, 1] {
            while let Some(transmit) = self.hosts[host].cm.poll_transmit() {
                self.carry(host, transmit.mad);
            }
        }
    }

    fn carry(&mut self, from: usize, mad: Mad) {
        let number = self.messages;
        self.messages += 1;
        let faults: Vec<Fault> = self.plan.faults_at(number).collect();
        let name = CmMad::parse(&mad[..]).map_or("?", |mad| mad.message.name());
        self.note(format!("{number}: host {from} sends {name} {faults:?}"));
        let to = 1 - from;
        let mut arrivals = vec![LATENCY];
        for fault in faults {
            match fault {
                Fault::Lost => arrivals.clear(),
                Fault::Doubled => arrivals.push(LATENCY * 2),
                Fault::DoubledLate => arrivals.push(Duration::from_secs(9)),
                Fault::Overtaken => arrivals.iter_mut().for_each(|it| *it += LATENCY * 3),
                Fault::Late => arrivals
                    .iter_mut()
                    .for_each(|it| *it += Duration::from_millis(6500)),
                Fault::SenderRestarts => self.restart(from),
                Fault::ReceiverRestarts => self.restart(to),
            }
        }
        for delay in arrivals {
            self.order += 1;
            self.wire
                .insert((self.now + delay, self.order), (to, mad.clone()));
        }
    }

    /// The connection manager of a host dies; the next gets what the programs have kept. Messages without programs are
    /// lost with it, so that must not be when there are some.
    fn restart(&mut self, host: usize) {
        let status = self.hosts[host].cm.status();
        if status.iter().any(|it| it.destroyed) {
            return;
        }
        self.note(format!("host {host} restarts"));
        self.restarts += 1;
        let mut next = new_cm(self.restarts);
        let old = &self.hosts[host].cm;
        for it in &status {
            let kept = old.export(self.now, it.comm_id).expect("a live comm id");
            assert_eq!(next.import(self.now, &kept), Some(it.comm_id));
        }
        let mut old = std::mem::replace(&mut self.hosts[host].cm, next);
        // What it has given out already is on its way.
        while let Some(transmit) = old.poll_transmit() {
            self.carry(host, transmit.mad);
        }
        while let Some(event) = old.poll_event() {
            self.react(host, event);
        }
    }

    fn note(&mut self, text: String) {
        let millis = self.now.as_nanos() / 1_000_000;
        self.trace.push(format!("{millis} ms: {text}"));
    }

    fn later(&mut self, delay: Duration, host: usize, task: Task) {
        self.order += 1;
        self.tasks.insert((self.now + delay, self.order), (host, task));
    }

    fn way(&self, from: usize) -> Way {
        Way {
            device: "fer0".to_string(),
            path: Path {
                ifindex: 2,
                sgid_index: 1,
                ..Path::between(self.hosts[from].address, self.hosts[1 - from].address)
            },
        }
    }

    fn side(&mut self, host: usize, comm_id: CommId) -> Option<&mut Side> {
        let &(number, is_asker, at) = self.owners.get(&(host, comm_id))?;
        let outcome = &mut self.outcomes[number];
        let sides = if is_asker {
            &mut outcome.askers
        } else {
            &mut outcome.asked
        };
        sides.get_mut(at)
    }

    fn add(&mut self, host: usize, comm_id: CommId, number: usize, is_asker: bool, qpn: u32) {
        let side = Side {
            qpn,
            psn: qpn * 7,
            connected: None,
            end: None,
            dropped: false,
        };
        let outcome = &mut self.outcomes[number];
        let sides = if is_asker {
            &mut outcome.askers
        } else {
            &mut outcome.asked
        };
        sides.push(side);
        self.owners
            .insert((host, comm_id), (number, is_asker, sides.len() - 1));
    }

    fn new_qpn(&mut self) -> u32 {
        self.next_qpn += 1;
        self.next_qpn
    }

    /// Whether a comm id is this one's that may act: its program lives.
    fn lives(&mut self, host: usize, comm_id: CommId) -> bool {
        self.side(host, comm_id).is_some_and(|side| !side.dropped)
    }

    fn destroy(&mut self, host: usize, comm_id: CommId) {
        self.hosts[host].cm.destroy(self.now, comm_id);
    }

    /// The program lets go, whatever the state.
    fn drop_it(&mut self, host: usize, comm_id: CommId) {
        if let Some(side) = self.side(host, comm_id) {
            side.dropped = true;
        }
        self.destroy(host, comm_id);
    }

    fn begin(&mut self, host: usize, number: usize) {
        let qpn = self.new_qpn();
        let way = self.way(host);
        let (cm, guid) = (&mut self.hosts[host].cm, self.hosts[host].guid);
        let (scenario, ..) = self.plan.scenarios[number];
        if matches!(scenario, Scenario::Sidr | Scenario::SidrRefused) {
            let parameters = SidrParameters {
                way,
                service_id: number as u64,
                pkey: 0xffff,
                timeout_ms: 4096,
                max_cm_retries: 15,
                private_data: Vec::new(),
            };
            let comm_id = cm.sidr_request(self.now, &parameters).expect("a request");
            self.add(host, comm_id, number, true, qpn);
            return;
        }
        let parameters = RequestParameters {
            way,
            local_ca_guid: guid,
            service_id: number as u64,
            transport: Transport::Rc,
            qpn,
            starting_psn: qpn * 7,
            responder_resources: 1,
            initiator_depth: 1,
            flow_control: false,
            retry_count: 7,
            rnr_retry_count: 7,
            srq: false,
            pkey: 0xffff,
            path_mtu: 3,
            packet_rate: 3,
            packet_life_time: 18,
            ack_delay: 15,
            remote_cm_response_timeout: 20,
            local_cm_response_timeout: 20,
            max_cm_retries: 15,
            ece: Ece::default(),
            private_data: Vec::new(),
        };
        let comm_id = cm.request(self.now, &parameters).expect("a request");
        self.add(host, comm_id, number, true, qpn);
        if scenario == Scenario::AskerGivesUp {
            self.later(LATENCY * 20, host, Task::Die(comm_id));
        }
    }

    fn perform(&mut self, host: usize, task: Task) {
        self.note(format!("host {host}: {task:?}"));
        let now = self.now;
        match task {
            Task::Begin(number) => self.begin(host, number),
            Task::Reply(number, comm_id) => self.reply(host, number, comm_id),
            Task::Ready(number, comm_id) => self.ready(host, number, comm_id),
            Task::Data(comm_id) => {
                // It may be ready, or not there any more.
                let _ = self.hosts[host].cm.establish(now, comm_id);
            }
            Task::Disconnect(comm_id) => {
                if self.hosts[host].cm.state(comm_id) == Some(State::Established) {
                    self.hosts[host].cm.disconnect(now, comm_id, &[]).expect("DREQ");
                }
            }
            Task::Die(comm_id) => self.drop_it(host, comm_id),
        }
    }

    fn reply(&mut self, host: usize, number: usize, comm_id: CommId) {
        let state = self.hosts[host].cm.state(comm_id);
        if !self.lives(host, comm_id) || !matches!(state, Some(State::ReqReceived | State::MraReqSent)) {
            return;
        }
        let Some((qpn, psn)) = self.side(host, comm_id).map(|it| (it.qpn, it.psn)) else {
            return;
        };
        let parameters = ReplyParameters {
            local_ca_guid: self.hosts[host].guid,
            qpn,
            starting_psn: psn,
            ack_delay: 15,
            ..ReplyParameters::default()
        };
        let now = self.now;
        self.hosts[host]
            .cm
            .reply(now, comm_id, &parameters)
            .expect("a reply");
        if self.plan.scenarios[number].0 == Scenario::AskedWithdraws {
            self.drop_it(host, comm_id);
        }
    }

    fn ready(&mut self, host: usize, number: usize, comm_id: CommId) {
        let state = self.hosts[host].cm.state(comm_id);
        if !matches!(state, Some(State::RepReceived | State::MraRepSent)) {
            return;
        }
        let now = self.now;
        self.hosts[host].cm.ready(now, comm_id, &[]).expect("RTU");
        self.connected(host, comm_id);
        match self.plan.scenarios[number].0 {
            Scenario::AskerDies => self.later(CONNECTED, host, Task::Die(comm_id)),
            Scenario::AskedEnds | Scenario::AskedDies => {}
            Scenario::DataFirst => {
                let remote = self.hosts[host].cm.status();
                let remote = remote.iter().find(|it| it.comm_id == comm_id);
                let remote = remote.map_or(0, |it| it.remote_comm_id);
                self.later(LATENCY / 2, 1 - host, Task::Data(remote));
                self.later(CONNECTED, host, Task::Disconnect(comm_id));
            }
            _ => self.later(CONNECTED, host, Task::Disconnect(comm_id)),
        }
    }

    fn connected(&mut self, host: usize, comm_id: CommId) {
        let now = self.now;
        let attributes = self.hosts[host].cm.attributes(comm_id).expect("what is agreed");
        if let Some(side) = self.side(host, comm_id) {
            assert!(side.connected.is_none(), "connected twice");
            side.connected = Some((attributes, now));
        }
    }

    fn ended(&mut self, host: usize, comm_id: CommId, end: End) {
        let now = self.now;
        if let Some(side) = self.side(host, comm_id) {
            assert!(side.end.is_none(), "ended twice: {:?}, {end:?}", side.end);
            side.end = Some((end, now));
        }
        let state = self.hosts[host].cm.state(comm_id);
        if state == Some(State::Idle) {
            self.destroy(host, comm_id);
        }
    }

    fn react(&mut self, host: usize, event: Event) {
        let Event { comm_id, kind } = event;
        let now = self.now;
        self.note(format!("host {host}: {}", name_of(&kind)));
        match kind {
            EventKind::Request(request) => {
                let number = request.message.service_id as usize;
                let qpn = self.new_qpn();
                self.add(host, comm_id, number, false, qpn);
                self.asked(host, number, comm_id);
            }
            EventKind::Reply(_) => {
                let Some(&(number, ..)) = self.owners.get(&(host, comm_id)) else {
                    return;
                };
                self.replied(host, number, comm_id);
            }
            EventKind::Ready { .. } | EventKind::Established => {
                self.connected(host, comm_id);
                let Some(&(number, ..)) = self.owners.get(&(host, comm_id)) else {
                    return;
                };
                match self.plan.scenarios[number].0 {
                    Scenario::AskedEnds => self.later(CONNECTED, host, Task::Disconnect(comm_id)),
                    Scenario::AskedDies => self.later(CONNECTED, host, Task::Die(comm_id)),
                    // The RTU has taken as long.
                    Scenario::BothEnd => self.later(CONNECTED - LATENCY, host, Task::Disconnect(comm_id)),
                    _ => {}
                }
            }
            EventKind::Rejected(rejection) => self.ended(host, comm_id, End::Rejected(rejection.reason)),
            EventKind::Delayed { .. } | EventKind::Stale => {}
            EventKind::RequestTimeout
            | EventKind::ReplyTimeout
            | EventKind::DisconnectTimeout
            | EventKind::SidrTimeout => self.ended(host, comm_id, End::Timeout),
            EventKind::DisconnectRequested { .. } => {
                self.hosts[host]
                    .cm
                    .answer_disconnect(now, comm_id, &[])
                    .expect("DREP");
                self.ended(host, comm_id, End::ByPeer);
            }
            EventKind::Disconnected { .. } => self.ended(host, comm_id, End::Here),
            EventKind::TimewaitExit => self.destroy(host, comm_id),
            EventKind::SidrRequest(request) => {
                let number = request.message.service_id as usize;
                let qpn = self.new_qpn();
                self.add(host, comm_id, number, false, qpn);
                if self.plan.scenarios[number].0 == Scenario::SidrRefused {
                    let reason = RejReason::INVALID_SERVICE_ID;
                    self.hosts[host].cm.refuse(now, comm_id, reason);
                } else {
                    let reply = SidrReplyParameters {
                        qpn,
                        ..SidrReplyParameters::default()
                    };
                    self.hosts[host]
                        .cm
                        .sidr_reply(now, comm_id, &reply)
                        .expect("an answer");
                    self.destroy(host, comm_id);
                }
            }
            EventKind::SidrReply(reply) => {
                self.ended(host, comm_id, End::Service(reply.message.status));
            }
        }
    }

    fn asked(&mut self, host: usize, number: usize, comm_id: CommId) {
        let now = self.now;
        let second = Duration::from_secs(1);
        let cm = &mut self.hosts[host].cm;
        match self.plan.scenarios[number].0 {
            Scenario::Rejected => {
                let reason = RejReason::CONSUMER_DEFINED;
                cm.reject(now, comm_id, reason, &[], b"no").expect("REJ");
                self.drop_it(host, comm_id);
            }
            Scenario::NoListener => cm.refuse(now, comm_id, RejReason::INVALID_SERVICE_ID),
            Scenario::SlowAsked => {
                cm.delay_when_asked(comm_id, 24).expect("patience");
                self.later(second * 20, host, Task::Reply(number, comm_id));
            }
            Scenario::Patience => {
                cm.delay(now, comm_id, 23, &[]).expect("MRA");
                self.later(second * 20, host, Task::Reply(number, comm_id));
            }
            Scenario::AskerGivesUp => self.later(LATENCY * 50, host, Task::Reply(number, comm_id)),
            _ => self.reply(host, number, comm_id),
        }
    }

    fn replied(&mut self, host: usize, number: usize, comm_id: CommId) {
        let now = self.now;
        let second = Duration::from_secs(1);
        let cm = &mut self.hosts[host].cm;
        match self.plan.scenarios[number].0 {
            Scenario::ReplyRejected => {
                let reason = RejReason::CONSUMER_DEFINED;
                cm.reject(now, comm_id, reason, &[], &[]).expect("REJ");
                self.drop_it(host, comm_id);
            }
            Scenario::SlowAsker => {
                cm.delay_when_asked(comm_id, 24).expect("patience");
                self.later(second * 20, host, Task::Ready(number, comm_id));
            }
            Scenario::Patience => {
                cm.delay(now, comm_id, 23, &[]).expect("MRA");
                self.later(second * 20, host, Task::Ready(number, comm_id));
            }
            _ => self.ready(host, number, comm_id),
        }
    }
}

fn name_of(kind: &EventKind) -> String {
    let text = format!("{kind:?}");
    let end = text.find([' ', '(', '{']).unwrap_or(text.len());
    text[..end].to_string()
}
