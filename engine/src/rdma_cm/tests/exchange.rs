//! Whole exchanges with every message lost, doubled or late, and daemons and programs that die in every step: both ends
//! get to the same end, in time, and nothing is left.

use std::collections::BTreeMap;
use std::time::Duration;

use super::world::{Death, Fault, World, parameters};
use crate::link::random::{Prng, Probability};
use crate::rdma_cm::{Command, Event, EventKind, Id, Parameters, PortSpace, QpKind, TargetState};
use crate::time::Time;

/// What the server does with a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Serve {
    Accept,
    Reject,
}

/// Who ends the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Client,
    Server,
    Both,
}

/// An exchange.
#[derive(Clone, Copy, Debug)]
struct Plan {
    datagram: bool,
    serve: Serve,
    end: End,
}

const ALL: [Plan; 6] = [
    Plan {
        datagram: false,
        serve: Serve::Accept,
        end: End::Client,
    },
    Plan {
        datagram: false,
        serve: Serve::Accept,
        end: End::Server,
    },
    Plan {
        datagram: false,
        serve: Serve::Accept,
        end: End::Both,
    },
    Plan {
        datagram: false,
        serve: Serve::Reject,
        end: End::Client,
    },
    Plan {
        datagram: true,
        serve: Serve::Accept,
        end: End::Client,
    },
    Plan {
        datagram: true,
        serve: Serve::Reject,
        end: End::Client,
    },
];

/// How far an end has come.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Story {
    established: bool,
    rejected: Option<i32>,
    unreachable: Option<i32>,
    disconnected: u32,
}

/// The programs of both hosts.
struct Programs {
    world: World,
    plan: Plan,
    client: Option<Id>,
    stories: BTreeMap<(usize, Id), Story>,
    /// When the connection is to be ended.
    hang_up: Option<Time>,
}

/// Time after which a connection is ended: all that was lost on the way to it has been repeated by then.
const TALK: Duration = Duration::from_secs(60);

impl Programs {
    fn start(seed: u64, plan: Plan, prepare: impl FnOnce(&mut World)) -> Programs {
        let mut world = World::new(seed);
        prepare(&mut world);
        let mut programs = Programs {
            world,
            plan,
            client: None,
            stories: BTreeMap::new(),
            hang_up: None,
        };
        programs.go();
        programs
    }

    fn space(&self) -> PortSpace {
        if self.plan.datagram {
            PortSpace::Udp
        } else {
            PortSpace::Tcp
        }
    }

    /// A command, unless the program is dead; errors say that the end is near.
    fn tell(&mut self, host: usize, command: Command) -> bool {
        self.world.hosts[host].program_lives && self.world.command(host, command).is_ok()
    }

    fn create(&mut self, host: usize) -> Option<Id> {
        let command = Command::Create {
            port_space: self.space(),
            qp_kind: QpKind::Rc,
        };
        match self.world.hosts[host].program_lives && self.world.hosts[host].death.is_none() {
            true => Some(self.world.create(host, self.space())),
            false if self.world.hosts[host].program_lives => match self.world.command(host, command) {
                Ok(crate::rdma_cm::Answer::Created(id)) => Some(id),
                _ => None,
            },
            false => None,
        }
    }

    fn go(&mut self) {
        let address = super::world::address;
        if let Some(id) = self.create(1) {
            self.tell(
                1,
                Command::Bind {
                    id,
                    address: address("[::]:7174"),
                },
            );
            self.tell(1, Command::Listen { id, backlog: 4 });
        }
        self.client = self.create(0);
        if let Some(id) = self.client {
            let resolve = Command::ResolveAddress {
                id,
                source: None,
                dest: address("10.0.0.2:7174"),
                timeout_ms: 2000,
            };
            self.tell(0, resolve);
        }
        let end = self.world.now + Duration::from_secs(3600);
        loop {
            while let Some((host, event)) = self.next_event() {
                self.react(host, &event);
            }
            if let Some(due) = self.hang_up
                && self.world.next().is_none_or(|next| next > due)
            {
                self.hang_up = None;
                self.world.now = self.world.now.max(due);
                self.end();
                continue;
            }
            if !self.world.step(end) {
                break;
            }
        }
    }

    fn next_event(&mut self) -> Option<(usize, Event)> {
        (0..2).find_map(|host| Some((host, self.world.hosts[host].events.pop_front()?)))
    }

    fn react(&mut self, host: usize, event: &Event) {
        let id = event.id;
        let story = self.stories.entry((host, id)).or_default();
        match event.kind {
            EventKind::AddressResolved => {
                self.tell(host, Command::ResolveRoute { id, timeout_ms: 1000 });
            }
            EventKind::RouteResolved => {
                let command = Command::Connect {
                    id,
                    parameters: parameters(0x11),
                    ece: Default::default(),
                };
                self.tell(host, command);
            }
            EventKind::ConnectRequest => self.serve(event.new_id.unwrap()),
            EventKind::ConnectResponse => {
                self.ready(host, id);
                let accept = Command::Accept {
                    id,
                    parameters: None,
                    ece: Default::default(),
                };
                if self.tell(host, accept) {
                    self.stories.entry((host, id)).or_default().established = true;
                    self.hang_up = Some(self.world.now + TALK);
                }
            }
            EventKind::Established => story.established = true,
            EventKind::Rejected => story.rejected = Some(event.status),
            EventKind::Unreachable => story.unreachable = Some(event.status),
            EventKind::Disconnected => {
                story.disconnected += 1;
                self.tell(host, Command::Disconnect { id });
            }
            EventKind::TimewaitExit => {
                self.tell(host, Command::Destroy { id });
            }
            kind => panic!("{kind:?}"),
        }
    }

    fn serve(&mut self, id: Id) {
        self.tell(1, Command::Taken { id });
        let ece = Default::default();
        match self.plan.serve {
            Serve::Reject => {
                let reject = Command::Reject {
                    id,
                    reason: 28,
                    private_data: vec![1, 2, 3],
                };
                self.tell(1, reject);
                self.tell(1, Command::Destroy { id });
            }
            Serve::Accept => {
                if !self.plan.datagram {
                    self.ready(1, id);
                }
                let parameters = Some(Parameters {
                    qpn: 0x22,
                    ..parameters(0x22)
                });
                let accepted = self.tell(1, Command::Accept { id, parameters, ece });
                if accepted {
                    self.stories.entry((1, id)).or_default();
                }
            }
        }
    }

    fn ready(&mut self, host: usize, id: Id) {
        for state in [TargetState::Init, TargetState::Rtr, TargetState::Rts] {
            self.tell(host, Command::QpAttributes { id, state });
        }
    }

    fn end(&mut self) {
        let both: Vec<_> = self
            .stories
            .iter()
            .filter(|(_, story)| story.established && story.disconnected == 0)
            .map(|(end, _)| *end)
            .collect();
        for (host, id) in both {
            let ends = match self.plan.end {
                End::Client => host == 0,
                End::Server => host == 1,
                End::Both => true,
            };
            if ends {
                self.tell(host, Command::Disconnect { id });
            }
        }
    }

    fn client_story(&self) -> Story {
        self.client
            .and_then(|id| self.stories.get(&(0, id)).cloned())
            .unwrap_or_default()
    }

    /// The stories of the connections that the server accepted.
    fn server_stories(&self) -> Vec<Story> {
        let of_server = |((host, _), story): (&(usize, Id), &Story)| (*host == 1).then(|| story.clone());
        self.stories
            .iter()
            .filter_map(of_server)
            .filter(|story| *story != Story::default() || self.plan.datagram)
            .collect()
    }

    /// Both ends came to what the plan says.
    fn check_success(&self) {
        let client = self.client_story();
        let expected = match (self.plan.datagram, self.plan.serve) {
            (false, Serve::Accept) => Story {
                established: true,
                disconnected: 1,
                ..Story::default()
            },
            (false, Serve::Reject) => Story {
                rejected: Some(28),
                ..Story::default()
            },
            (true, Serve::Accept) => Story {
                established: true,
                ..Story::default()
            },
            (true, Serve::Reject) => Story {
                unreachable: Some(2),
                ..Story::default()
            },
        };
        assert_eq!(client, expected, "the client's story");
        if !self.plan.datagram && self.plan.serve == Serve::Accept {
            assert_eq!(self.server_stories(), [client], "the server's story");
        }
    }

    /// What one end held for a connection, the other did, too.
    fn check_agreement(&self) {
        self.check_client();
        for server in self.server_stories() {
            if self.world.hosts[1].program_lives && server.established {
                assert_eq!(server.disconnected, 1, "the connection ended: {server:?}");
            }
        }
    }

    /// The client has one end only.
    fn check_client(&self) {
        let client = self.client_story();
        let ends = [client.rejected.is_some(), client.unreachable.is_some()];
        assert!(ends.iter().filter(|end| **end).count() <= 1, "{client:?}");
        if self.world.hosts[0].program_lives && client.established && !self.plan.datagram {
            assert_eq!(client.disconnected, 1, "the connection ended: {client:?}");
        }
    }

    fn finish(self) {
        let start = self.world.now;
        assert!(start.since(Time::ZERO) < Duration::from_secs(600), "{start:?}");
        self.world.finish();
    }
}

const DEATHS: [Death; 4] = [
    Death::After,
    Death::BeforeSending,
    Death::BeforeTelling,
    Death::Before,
];

/// Runs something and says which it was if it fails.
fn named(name: impl std::fmt::Debug, work: impl FnOnce()) {
    let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
    if let Err(panic) = result {
        eprintln!("failed: {name:?}");
        std::panic::resume_unwind(panic);
    }
}

const FAULTS: [Fault; 6] = [
    Fault::Lost,
    Fault::Twice(Duration::from_micros(10)),
    Fault::Twice(Duration::from_secs(9)),
    Fault::Late(Duration::from_micros(130)),
    Fault::Late(Duration::from_secs(5)),
    Fault::Late(Duration::from_secs(30)),
];

#[test]
fn without_faults() {
    for plan in ALL {
        named(plan, || {
            let programs = Programs::start(1, plan, |_| {});
            programs.check_success();
            programs.finish();
        });
    }
}

#[test]
fn one_message_with_a_fault() {
    for plan in ALL {
        for number in 0..7 {
            for fault in FAULTS {
                named((plan, number, fault), || {
                    let programs = Programs::start(1, plan, |world| {
                        world.faults.insert(number, fault);
                    });
                    programs.check_success();
                    programs.finish();
                });
            }
        }
    }
}

#[test]
fn two_messages_with_faults() {
    for plan in ALL {
        for first in 0..6 {
            for second in first + 1..8 {
                for (one, other) in FAULTS.iter().flat_map(|one| FAULTS.map(|other| (*one, other))) {
                    named((plan, (first, one), (second, other)), || {
                        let programs = Programs::start(1, plan, |world| {
                            world.faults.insert(first, one);
                            world.faults.insert(second, other);
                        });
                        programs.check_success();
                        programs.finish();
                    });
                }
            }
        }
    }
}

#[test]
fn many_messages_with_faults() {
    for seed in 0..300 {
        for plan in ALL {
            named((seed, plan), || {
                let mut random = Prng::new(seed);
                let share = Probability::percent(random.between(1, 60) as u32);
                let programs = Programs::start(seed, plan, |world| {
                    world.lose = Box::new(move || {
                        random.chance(share).then(|| match random.below(4) {
                            0 | 1 => Fault::Lost,
                            2 => Fault::Twice(Duration::from_millis(random.below(20_000))),
                            _ => Fault::Late(Duration::from_millis(random.below(20_000))),
                        })
                    });
                });
                programs.check_agreement();
                programs.finish();
            });
        }
    }
}

#[test]
fn a_direction_that_is_cut() {
    // All from that message on is lost: retries end. Who does not ask any more, such as a server whose client has
    // vanished, learns of it by its queue pair only.
    let ends_by_client = |plan: &Plan| plan.end != End::Server;
    for plan in ALL.into_iter().filter(ends_by_client) {
        for from in 0..7 {
            named((plan, from), || {
                let programs = Programs::start(1, plan, |world| {
                    let mut number = 0;
                    world.lose = Box::new(move || {
                        number += 1;
                        (number > from).then_some(Fault::Lost)
                    });
                });
                programs.check_client();
                let client = programs.client_story();
                assert!(client != Story::default(), "the client knows an end");
                programs.finish();
            });
        }
    }
}

#[test]
fn a_daemon_that_dies_at_any_step() {
    for plan in ALL {
        for host in 0..2 {
            for call in 1..40 {
                for death in DEATHS {
                    named((plan, host, call, death), || {
                        let programs =
                            Programs::start(1, plan, |world| world.hosts[host].death = Some((call, death)));
                        // Who is not told that its request is under way asks again, by another one: it looks stale.
                        if death != Death::BeforeTelling {
                            programs.check_success();
                        }
                        programs.check_agreement();
                        programs.finish();
                    });
                }
            }
        }
    }
}

#[test]
fn a_program_that_dies_at_any_step() {
    for plan in ALL {
        for host in 0..2 {
            for call in 1..30 {
                named((plan, host, call), || {
                    let programs = Programs::start(1, plan, |world| {
                        world.hosts[host].death = Some((call, Death::OfProgram));
                    });
                    programs.check_agreement();
                    if host == 1 {
                        let client = programs.client_story();
                        assert!(client != Story::default(), "the client knows an end");
                    }
                    programs.finish();
                });
            }
        }
    }
}
