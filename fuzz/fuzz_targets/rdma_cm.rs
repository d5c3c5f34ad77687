//! A script of commands, MADs, answers of the resolver, time, and restarts of the daemon with keepsakes that were
//! meddled with: nothing panics, and nothing is left when the programs are gone.
//!
//! Each step is a byte that says what, two of length (little endian), and that many bytes.
#![no_main]

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

use ferroce_engine::control::{DeviceInfo, GidEntry, protocol};
use ferroce_engine::link::random::Prng;
use ferroce_engine::rdma_cm::{Arrival, Command, Id, Keepsake, Output, RdmaCm, Resolution};
use ferroce_engine::time::Time;
use libfuzzer_sys::fuzz_target;

/// The process.
const SESSION: u32 = 1;
/// The addresses of the captures' server, and of its client.
const ADDRESSES: [&str; 3] = ["fe80::ff:fe00:1", "10.77.0.1", "fd77::1"];
const CLIENT: &str = "10.77.0.2";

fn ip(text: &str) -> IpAddr {
    text.parse().expect("an address")
}

struct Daemon {
    cm: RdmaCm,
    now: Time,
    restarts: u64,
    kept: BTreeMap<Id, Vec<u8>>,
    questions: Vec<u64>,
}

impl Daemon {
    fn new() -> Daemon {
        let mut daemon = Daemon {
            cm: rdma_cm(0),
            now: Time::ZERO + Duration::from_secs(1),
            restarts: 0,
            kept: BTreeMap::new(),
            questions: Vec::new(),
        };
        daemon.begin();
        daemon
    }

    fn begin(&mut self) {
        let device = DeviceInfo {
            name: "a".into(),
            ifindex: 2,
            guid: 1,
            mtu: 1500,
            up: true,
            gids: ADDRESSES
                .iter()
                .map(|text| Some(GidEntry::roce_v2(ip(text))))
                .collect(),
            ..DeviceInfo::default()
        };
        self.cm.set_devices(self.now, &[device]);
        self.cm.open(SESSION, 0);
    }

    fn drain(&mut self) {
        while let Some(output) = self.cm.poll() {
            match output {
                Output::Keepsake { keepsake, .. } => {
                    match keepsake.state {
                        Some(state) => self.kept.insert(keepsake.id, state),
                        None => self.kept.remove(&keepsake.id),
                    };
                }
                Output::Resolve { token, .. } => self.questions.push(token),
                Output::ResolveCancel { token } => self.questions.retain(|it| *it != token),
                Output::Send { .. } | Output::Event { .. } => {}
            }
        }
    }

    fn step(&mut self, what: u8, bytes: &[u8]) {
        let byte = |at: usize| bytes.get(at).copied().unwrap_or(0);
        match what % 5 {
            0 => {
                let arrival = Arrival {
                    device: "a",
                    source: ip(CLIENT),
                    dest: ip(ADDRESSES[1]),
                    ifindex: 2,
                    traffic_class: 0,
                    flow_label: 0,
                    mad: bytes,
                };
                self.cm.receive(self.now, &arrival);
            }
            1 => {
                if let Some(command) = protocol::decode::<Command>(bytes) {
                    let _ = self.cm.command(self.now, SESSION, command);
                }
            }
            2 => {
                let more = u64::from(byte(0)) << (byte(1) % 24);
                self.now = self.now + Duration::from_micros(more);
                self.cm.timeout(self.now);
            }
            3 => {
                if let Some(token) = self.questions.pop() {
                    let resolution = Resolution {
                        source: ip(ADDRESSES[usize::from(byte(0)) % 3]),
                        ifindex: 2,
                    };
                    let result = match byte(1) {
                        0 => Ok(resolution),
                        errno => Err(errno.into()),
                    };
                    self.cm.resolved(self.now, token, result);
                }
            }
            _ => {
                self.restarts += 1;
                self.cm = rdma_cm(self.restarts);
                self.questions.clear();
                self.begin();
                let kept = std::mem::take(&mut self.kept);
                for (meddled, (id, mut state)) in kept.into_iter().enumerate() {
                    if byte(0) == meddled as u8
                        && let Some(there) = state.get_mut(usize::from(byte(1)) * 2)
                    {
                        *there ^= byte(2);
                    }
                    let keepsake = Keepsake {
                        id,
                        state: Some(state.clone()),
                    };
                    if self.cm.restore(self.now, SESSION, &keepsake) {
                        self.kept.insert(id, state);
                    }
                }
            }
        }
        self.drain();
    }

    fn end(mut self) {
        self.cm.close(self.now, SESSION);
        self.drain();
        assert!(self.cm.status().is_empty(), "an id is left");
        for _ in 0..100_000 {
            let Some(deadline) = self.cm.deadline() else {
                return;
            };
            self.now = self.now.max(deadline);
            self.cm.timeout(self.now);
            self.drain();
        }
        panic!("it never ends");
    }
}

fn rdma_cm(seed: u64) -> RdmaCm {
    let mut random = Prng::new(seed);
    RdmaCm::new(Box::new(move || random.next_u64()))
}

fuzz_target!(|script: &[u8]| {
    let mut daemon = Daemon::new();
    let mut rest = script;
    while let Some(([what, low, high], tail)) = rest.split_first_chunk() {
        let len = usize::from(u16::from_le_bytes([*low, *high])).min(tail.len());
        let (bytes, after) = tail.split_at(len);
        daemon.step(*what, bytes);
        rest = after;
    }
    daemon.end();
});
