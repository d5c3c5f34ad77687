//! Runs a script of bytes: messages of a peer, calls of programs, restarts and time, all of them at random. Nothing may
//! panic, and when everybody has let go of everything, nothing may be left.

use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use ferroce_engine::cm::{
    Cm, CommId, Ece, EventKind, ReplyParameters, RequestParameters, SidrParameters, SidrReplyParameters,
    Transport, Way,
};
use ferroce_engine::link::Path;
use ferroce_engine::link::random::Prng;
use ferroce_engine::time::Time;
use ferroce_wire::Gid;
use ferroce_wire::cm::{Answered, CmMad, CmMessage, Rej, RejReason, Req, SidrReq};

/// Timers that run out until a script must be over.
const LIMIT: usize = 1_000_000;

/// The script.
struct Script<'a>(&'a [u8]);

impl Script<'_> {
    fn byte(&mut self) -> Option<u8> {
        let (&first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(first)
    }

    /// One of these.
    fn pick<T: Copy>(&mut self, of: &[T]) -> Option<T> {
        let at = usize::from(self.byte()?);
        of.get(at.checked_rem(of.len())?).copied()
    }
}

struct World {
    cm: Cm,
    restarts: u64,
    now: Time,
    /// Numbers that programs have.
    known: Vec<CommId>,
    /// What was sent of late.
    sent: Vec<CmMad>,
}

/// Runs it.
pub fn run(bytes: &[u8]) {
    let mut script = Script(bytes);
    let mut world = World {
        cm: new_cm(0),
        restarts: 0,
        now: Time::from_nanos(1_000_000_000),
        known: Vec::new(),
        sent: Vec::new(),
    };
    while world.step(&mut script).is_some() {
        world.settle();
    }
    for comm_id in std::mem::take(&mut world.known) {
        world.cm.destroy(world.now, comm_id);
    }
    for _ in 0..LIMIT {
        let Some(deadline) = world.cm.deadline() else {
            break;
        };
        world.now = deadline.max(world.now);
        world.cm.timeout(world.now);
        world.settle();
        // What came too early may only now be asked for.
        for comm_id in std::mem::take(&mut world.known) {
            world.cm.destroy(world.now, comm_id);
        }
    }
    assert_eq!(world.cm.deadline(), None);
    assert_eq!(world.cm.status(), []);
}

fn new_cm(seed: u64) -> Cm {
    let mut prng = Prng::new(seed);
    Cm::new(Box::new(move || prng.next_u64()))
}

fn way() -> Way {
    Way {
        device: "fer0".to_string(),
        path: Path {
            ifindex: 2,
            sgid_index: 1,
            ..Path::between(
                IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1)),
                IpAddr::V4(Ipv4Addr::new(10, 0, 0, 2)),
            )
        },
    }
}

impl World {
    fn settle(&mut self) {
        while let Some(transmit) = self.cm.poll_transmit() {
            let mad = CmMad::parse(&transmit.mad[..]).expect("a message of CM");
            self.sent.push(mad);
        }
        let old = self.sent.len().saturating_sub(16);
        self.sent.drain(..old);
        while let Some(event) = self.cm.poll_event() {
            let is_new = matches!(event.kind, EventKind::Request(_) | EventKind::SidrRequest(_));
            assert_eq!(is_new, !self.known.contains(&event.comm_id), "{event:?}");
            if is_new {
                self.known.push(event.comm_id);
            }
        }
    }

    fn step(&mut self, script: &mut Script<'_>) -> Option<()> {
        let now = self.now;
        let what = script.byte()? % 20;
        if what < 5 {
            self.receive(script)?;
            return Some(());
        }
        match what {
            5 => self.request(script)?,
            6 => {
                let parameters = SidrParameters {
                    way: way(),
                    service_id: 1,
                    pkey: 0xffff,
                    timeout_ms: u32::from(script.byte()?),
                    max_cm_retries: script.byte()? % 16,
                    private_data: Vec::new(),
                };
                self.known.extend(self.cm.sidr_request(now, &parameters));
            }
            7 => {
                let deadline = self.cm.deadline();
                let step = Duration::from_millis(1 << (script.byte()? % 20));
                self.now = deadline
                    .filter(|_| step > Duration::from_secs(1))
                    .unwrap_or(now + step)
                    .max(now);
                self.cm.timeout(self.now);
            }
            8 => self.restart(),
            9 => self
                .cm
                .expect_imports(now + Duration::from_millis(script.byte()?.into())),
            _ => {
                let comm_id = script.pick(&self.known).or(Some(0))?;
                self.call(what, comm_id, script)?;
            }
        }
        Some(())
    }

    fn request(&mut self, script: &mut Script<'_>) -> Option<()> {
        let transport = script.pick(&[Transport::Rc, Transport::Uc, Transport::Xrc])?;
        let number = script.byte()?;
        let parameters = RequestParameters {
            way: way(),
            local_ca_guid: 1,
            service_id: 1,
            transport,
            qpn: number.into(),
            starting_psn: 1,
            responder_resources: 1,
            initiator_depth: 1,
            flow_control: false,
            retry_count: number & 7,
            rnr_retry_count: 7,
            srq: false,
            pkey: 0xffff,
            path_mtu: 3,
            packet_rate: 3,
            packet_life_time: number & 0x1f,
            ack_delay: number & 0x1f,
            remote_cm_response_timeout: number & 0x1f,
            local_cm_response_timeout: number & 0x1f,
            max_cm_retries: number & 0xf,
            ece: Ece::default(),
            private_data: Vec::new(),
        };
        self.known.extend(self.cm.request(self.now, &parameters));
        Some(())
    }

    /// A call; it may be one that the state does not allow.
    fn call(&mut self, what: u8, comm_id: CommId, script: &mut Script<'_>) -> Option<()> {
        let (now, cm) = (self.now, &mut self.cm);
        let number = script.byte()?;
        let reason = RejReason(number.into());
        let _ = match what {
            10 => {
                let parameters = ReplyParameters {
                    local_ca_guid: 1,
                    qpn: number.into(),
                    starting_psn: 1,
                    ack_delay: number & 0x1f,
                    ..ReplyParameters::default()
                };
                cm.reply(now, comm_id, &parameters)
            }
            11 => cm.ready(now, comm_id, &[number]),
            12 => cm.reject(now, comm_id, reason, &[], &[number]),
            13 if number > 127 => cm.delay(now, comm_id, number & 0x1f, &[]),
            13 => cm.delay_when_asked(comm_id, number & 0x1f),
            14 => cm.disconnect(now, comm_id, &[number]),
            15 => cm.answer_disconnect(now, comm_id, &[number]),
            16 => cm.establish(now, comm_id),
            17 => cm.sidr_reply(now, comm_id, &SidrReplyParameters::default()),
            18 => {
                self.known.retain(|known| *known != comm_id);
                cm.destroy(now, comm_id);
                Ok(())
            }
            _ => {
                if number > 127 {
                    cm.refuse(now, comm_id, reason);
                } else {
                    cm.forget(comm_id);
                }
                if cm.state(comm_id).is_none() {
                    self.known.retain(|known| *known != comm_id);
                }
                Ok(())
            }
        };
        Some(())
    }

    fn restart(&mut self) {
        self.restarts += 1;
        let mut next = new_cm(self.restarts);
        for &comm_id in &self.known {
            let kept = self.cm.export(self.now, comm_id).expect("a live comm id");
            assert_eq!(next.import(self.now, &kept), Some(comm_id));
        }
        self.cm = next;
    }

    fn receive(&mut self, script: &mut Script<'_>) -> Option<()> {
        let kind = script.byte()?;
        let number = script.byte()?;
        let local = u32::from(number & 3) + 1;
        let remote = script.pick(&self.known).unwrap_or(number.into());
        // An answer names the numbers that were sent.
        let numbers = script.pick(&self.sent);
        let attribute_id = 0x10 + u16::from(kind % 11);
        let mut data = [0; 232];
        data[..4].copy_from_slice(&local.to_be_bytes());
        data[4..8].copy_from_slice(&remote.to_be_bytes());
        let mut message = CmMessage::parse(attribute_id, &data).ok()?;
        match &mut message {
            CmMessage::Req(req) => self.fill(req, number),
            CmMessage::SidrReq(req) => {
                *req = SidrReq {
                    request_id: local,
                    ..SidrReq::default()
                };
            }
            CmMessage::SidrRep(rep) => rep.request_id = remote,
            CmMessage::Rej(rej) => {
                *rej = Rej {
                    reason: RejReason(u16::from(number >> 3)),
                    message: Answered::from_bits(number >> 1),
                    ..*rej
                };
                rej.info[7] = 2;
            }
            CmMessage::Mra(mra) => {
                mra.message = Answered::from_bits(number >> 2);
                mra.service_timeout = number >> 3;
            }
            CmMessage::Rep(rep) => {
                rep.local_qpn = (number >> 2).into();
                rep.local_ca_guid = 2;
            }
            CmMessage::Dreq(dreq) => {
                let sent = numbers.map(|mad| mad.message);
                dreq.remote_qpn = match sent {
                    Some(CmMessage::Req(req)) => req.local_qpn,
                    Some(CmMessage::Rep(rep)) => rep.local_qpn,
                    _ => number.into(),
                };
            }
            _ => {}
        }
        let mad = CmMad {
            tid: u64::from(number >> 6),
            attribute_modifier: 0,
            message,
        };
        let mut bytes = mad.to_bytes();
        if kind > 250 {
            bytes[usize::from(number)] ^= kind;
        }
        self.cm.receive(self.now, &way(), &bytes);
        Some(())
    }

    fn fill(&self, req: &mut Req, number: u8) {
        req.vendor_id = 0;
        req.local_ca_guid = 2;
        req.local_qpn = (number >> 4).into();
        req.local_cm_response_timeout = number & 0x1f;
        req.remote_cm_response_timeout = number & 0x1f;
        req.max_cm_retries = number & 0xf;
        req.primary.local_ack_timeout = number & 0x1f;
        req.primary.local_gid = Gid::from_ip(way().path.dest);
        req.primary.remote_gid = Gid::from_ip(way().path.source);
    }
}
