//! Random programs: nothing panics, and nothing is left.

use std::time::Duration;

use super::world::{Death, Fault, PROGRAM, World, address, device};
use crate::link::random::{Prng, Probability};
use crate::rdma_cm::{
    Address, Answer, Arrival, Command, Ece, IbAddress, Id, IdOption, Parameters, PathRecord, PortSpace,
    QpKind, TargetState,
};

fn hosts() -> Vec<Vec<crate::control::DeviceInfo>> {
    vec![
        vec![
            device("lo", 1, &["127.0.0.1", "::1"]),
            device("a", 2, &["fe80::a", "10.0.0.1", "fd00::1"]),
            device("c", 4, &["fe80::c", "10.0.1.1"]),
        ],
        vec![device("b", 3, &["fe80::b", "10.0.0.2", "fd00::2"])],
    ]
}

struct Program {
    random: Prng,
    ids: [Vec<Id>; 2],
}

impl Program {
    fn id(&mut self, host: usize) -> Id {
        let random = self.random.next_u64() as u32;
        let known = !self.random.chance(Probability::percent(2));
        self.random
            .pick(&self.ids[host])
            .copied()
            .filter(|_| known)
            .unwrap_or(random)
    }

    fn address(&mut self) -> Address {
        let hosts = [
            "0.0.0.0",
            "10.0.0.1",
            "10.0.0.2",
            "10.0.1.1",
            "10.0.0.77",
            "127.0.0.1",
            "239.1.1.1",
            "[::]",
            "[::1]",
            "[fd00::1]",
            "[fd00::2]",
            "[fe80::a%2]",
            "[fe80::b%2]",
            "[fe80::b%3]",
            "[fe80::b]",
            "[ff0e::1]",
        ];
        if self.random.below(20) == 0 {
            return Address::Ib(IbAddress {
                service_id: [0, 0x0106_0005, 0x013f_0005, 5][self.random.below(4) as usize],
                service_mask: [0, u64::MAX, 0xffff][self.random.below(3) as usize],
                ..IbAddress::default()
            });
        }
        let host = self.random.pick(&hosts).unwrap();
        address(&format!("{host}:{}", self.random.below(4) * 3))
    }

    fn parameters(&mut self) -> Parameters {
        Parameters {
            qpn: self.random.below(6) as u32,
            qkey: self.random.below(2) as u32,
            private_data: vec![1; [0, 8, 56, 57, 180, 196, 255][self.random.below(7) as usize]],
            responder_resources: self.random.next_u64() as u8,
            initiator_depth: self.random.next_u64() as u8,
            flow_control: true,
            retry_count: self.random.next_u64() as u8,
            rnr_retry_count: self.random.next_u64() as u8,
            srq: false,
        }
    }

    fn command(&mut self, host: usize) -> Command {
        let id = self.id(host);
        let ece = Ece {
            vendor_id: self.random.next_u64() as u32,
            attr_mod: 1,
        };
        match self.random.below(24) {
            0..=2 => Command::Create {
                port_space: [PortSpace::Tcp, PortSpace::Udp, PortSpace::Ib, PortSpace::Ipoib]
                    [self.random.below(4) as usize],
                qp_kind: [
                    QpKind::Rc,
                    QpKind::Uc,
                    QpKind::Ud,
                    QpKind::XrcInitiator,
                    QpKind::XrcTarget,
                ][self.random.below(5) as usize],
            },
            3 => Command::Destroy { id },
            4 | 5 => Command::Bind {
                id,
                address: self.address(),
            },
            6 | 7 => {
                let source = self.address();
                Command::ResolveAddress {
                    id,
                    source: (self.random.below(3) == 0).then_some(source),
                    dest: self.address(),
                    timeout_ms: self.random.below(3) as u32 * 500,
                }
            }
            8 | 9 => Command::ResolveRoute { id, timeout_ms: 1 },
            10 => Command::Query { id },
            11 => Command::QpAttributes {
                id,
                state: [TargetState::Init, TargetState::Rtr, TargetState::Rts][self.random.below(3) as usize],
            },
            12 | 13 => Command::Connect {
                id,
                parameters: self.parameters(),
                ece,
            },
            14 | 15 => Command::Listen {
                id,
                backlog: self.random.below(4) as i32 - 1,
            },
            16 | 17 => {
                let parameters = self.parameters();
                Command::Accept {
                    id,
                    parameters: (self.random.below(3) > 0).then_some(parameters),
                    ece,
                }
            }
            18 => Command::Reject {
                id,
                reason: [0, 28, 35, 1][self.random.below(4) as usize],
                private_data: vec![2; self.random.below(255) as usize],
            },
            19 => Command::Disconnect { id },
            20 => Command::Notify {
                id,
                event: self.random.below(9) as u32,
            },
            21 => Command::SetOption {
                id,
                option: match self.random.below(5) {
                    0 => IdOption::TypeOfService(self.random.next_u64() as u8),
                    1 => IdOption::ReuseAddress(self.random.below(2) == 0),
                    2 => IdOption::AddressFamilyOnly(self.random.below(2) == 0),
                    3 => IdOption::AckTimeout(self.random.next_u64() as u8),
                    _ => IdOption::Path(PathRecord {
                        dest_gid: self.address().gid(),
                        source_gid: self.address().gid(),
                        mtu: self.random.next_u64() as u8,
                        rate: self.random.next_u64() as u8,
                        packet_life_time: self.random.next_u64() as u8,
                        flow_label: self.random.next_u64() as u32,
                        sl: self.random.next_u64() as u8,
                        ..PathRecord::default()
                    }),
                },
            },
            22 => Command::Join {
                id,
                address: self.address(),
                send_only: false,
            },
            _ => match self.random.below(2) {
                0 => Command::Leave { membership: id },
                _ => Command::Taken { id },
            },
        }
    }
}

#[test]
fn random_programs() {
    for seed in 0..400 {
        eprintln!("seed {seed}");
        let mut world = World::of(seed, hosts());
        let mut faults = Prng::new(seed);
        world.lose = Box::new(move || {
            faults
                .chance(Probability::percent(10))
                .then(|| match faults.below(3) {
                    0 => Fault::Lost,
                    1 => Fault::Twice(Duration::from_millis(faults.below(9000))),
                    _ => Fault::Late(Duration::from_millis(faults.below(9000))),
                })
        });
        let mut program = Program {
            random: Prng::new(!seed),
            ids: [Vec::new(), Vec::new()],
        };
        let devices: Vec<_> = hosts();
        for _ in 0..500 {
            let host = program.random.below(2) as usize;
            if program.random.below(200) == 0 {
                let death =
                    [Death::After, Death::Before, Death::BeforeTelling][program.random.below(3) as usize];
                world.hosts[host].death = Some((world.hosts[host].calls + 1, death));
            }
            let command = program.command(host);
            match world.command(host, command) {
                Ok(Answer::Created(id) | Answer::Joined(id)) => program.ids[host].push(id),
                Ok(_) | Err(1..) => {}
                Err(errno) => panic!("errno {errno}"),
            }
            let new: Vec<Id> = world.hosts[host]
                .events
                .drain(..)
                .filter_map(|event| event.new_id)
                .collect();
            program.ids[host].extend(new);
            if program.random.below(3) == 0 {
                let end = world.now + Duration::from_millis(program.random.below(2000));
                while world.step(end) {}
                world.now = end;
            }
            if program.random.below(300) == 0 {
                let now = world.now;
                let some = &devices[host][..program.random.below(devices[host].len() as u64 + 1) as usize];
                world.hosts[host].cm.set_devices(now, some);
                world.drain(host, true, false);
                world.hosts[host].cm.set_devices(now, &devices[host]);
                world.drain(host, true, true);
            }
        }
        if seed % 3 == 0 {
            for host in 0..2 {
                world.kill_program(host);
                world.hosts[host].cm.open(PROGRAM, 0);
            }
        }
        world.lose = Box::new(|| None);
        world.finish();
    }
}

#[test]
fn mads_of_any_bytes() {
    let mut random = Prng::new(1);
    let mut world = World::new(1);
    world.listener(1, PortSpace::Tcp, "[::]:5");
    world.listener(1, PortSpace::Udp, "[::]:5");
    let mut exchanged = Vec::new();
    let client = world.route(0, PortSpace::Tcp, "10.0.0.2:5");
    world.connect(0, client, super::world::parameters(1)).unwrap();
    exchanged.extend(world.hosts[1].events.drain(..));
    for round in 0..20_000 {
        let mut mad = [0; 256];
        for byte in &mut mad {
            *byte = random.next_u64() as u8;
        }
        if round % 4 > 0 {
            // A CM message, at a service that is there.
            mad[..4].copy_from_slice(&[1, 7, 2, 3]);
            mad[4..8].fill(0);
            mad[16..18].copy_from_slice(&(0x10 + random.below(11) as u16).to_be_bytes());
            if round % 4 > 1 {
                let service: u64 = [0x0106_0005, 0x0111_0005][random.below(2) as usize];
                mad[32..40].copy_from_slice(&service.to_be_bytes());
                mad[40 + 124..40 + 126].copy_from_slice(&[0, 0x40]);
                mad[40..42].copy_from_slice(&[0, 0x40]);
            }
        }
        let len = if round % 7 == 0 {
            random.below(257) as usize
        } else {
            256
        };
        let arrival = Arrival {
            device: if round % 50 == 0 { "x" } else { "b" },
            source: "10.0.0.1".parse().unwrap(),
            dest: "10.0.0.2".parse().unwrap(),
            ifindex: 3,
            traffic_class: 0,
            flow_label: 0,
            mad: &mad[..len],
        };
        let now = world.now;
        world.hosts[1].cm.receive(now, &arrival);
        world.drain(1, true, false);
        world.hosts[1].events.clear();
        if round % 100 == 0 {
            world.run(Duration::from_secs(100));
        }
    }
    world.finish();
}
