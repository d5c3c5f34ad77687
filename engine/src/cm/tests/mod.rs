//! Two `Cm`s that are joined by hand, and what each rule of the protocol makes of it.

mod disconnect;
mod handshake;
mod keep;
mod limits;
mod sidr;

use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use ferroce_wire::cm::{CmMad, CmMessage};

use super::*;
use crate::link::random::Prng;

/// One end: a `Cm` with one device.
struct End {
    cm: Cm,
    address: IpAddr,
    guid: u64,
}

impl End {
    fn new(number: u8) -> End {
        let mut prng = Prng::new(u64::from(number) << 32);
        End {
            cm: Cm::new(Box::new(move || prng.next_u64())),
            address: IpAddr::V4(Ipv4Addr::new(10, 0, 0, number)),
            guid: 0x1000 + u64::from(number),
        }
    }

    fn way_to(&self, other: IpAddr) -> Way {
        Way {
            device: "fer0".to_string(),
            path: Path {
                ifindex: 2,
                sgid_index: 1,
                flow_label: 0x12345,
                ..Path::between(self.address, other)
            },
        }
    }

    fn event(&mut self) -> Event {
        self.cm.poll_event().expect("an event")
    }

    fn events(&mut self) -> Vec<EventKind> {
        std::iter::from_fn(|| self.cm.poll_event().map(|event| event.kind)).collect()
    }

    fn counter(&self, name: &str) -> u64 {
        let mut found = None;
        self.cm.counters(&mut |counter, value| {
            if counter == name {
                found = Some(value);
            }
        });
        found.expect("a counter of that name")
    }
}

/// Both ends and the time.
struct Pair {
    now: Time,
    /// Who asks.
    a: End,
    /// Who is asked.
    b: End,
}

/// Which end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    A,
    B,
}

use Side::{A, B};

impl Pair {
    fn new() -> Pair {
        Pair {
            now: Time::from_nanos(1_000_000_000),
            a: End::new(1),
            b: End::new(2),
        }
    }

    fn end(&mut self, side: Side) -> &mut End {
        match side {
            A => &mut self.a,
            B => &mut self.b,
        }
    }

    fn ends(&mut self, side: Side) -> (&mut End, &mut End) {
        match side {
            A => (&mut self.a, &mut self.b),
            B => (&mut self.b, &mut self.a),
        }
    }

    /// What an end has sent.
    fn sent(&mut self, side: Side) -> Vec<CmMad> {
        let (end, other) = self.ends(side);
        let (from, to) = (end.address, other.address);
        std::iter::from_fn(|| end.cm.poll_transmit())
            .map(|transmit| {
                let path = transmit.way.path;
                assert_eq!((path.source, path.dest), (from, to));
                CmMad::parse(&transmit.mad[..]).expect("a message of CM")
            })
            .collect()
    }

    /// Gives an end a message of the other.
    fn give(&mut self, to: Side, mad: &CmMad) {
        let now = self.now;
        let (end, other) = self.ends(to);
        let way = end.way_to(other.address);
        end.cm.receive(now, &way, &mad.to_bytes());
        self.a.cm.table.check();
        self.b.cm.table.check();
    }

    /// Brings over what an end has sent; gives the names.
    fn bring(&mut self, from: Side) -> Vec<&'static str> {
        let to = if from == A { B } else { A };
        let mads = self.sent(from);
        for mad in &mads {
            self.give(to, mad);
        }
        mads.iter().map(|mad| mad.message.name()).collect()
    }

    /// Loses what an end has sent; gives the names.
    fn lose(&mut self, from: Side) -> Vec<&'static str> {
        self.sent(from).iter().map(|mad| mad.message.name()).collect()
    }

    /// Time goes by, to the next deadline of an end.
    fn wait(&mut self, side: Side) -> Duration {
        let now = self.now;
        let end = self.end(side);
        let deadline = end.cm.deadline().expect("a deadline");
        end.cm.timeout(deadline);
        end.cm.table.check();
        self.now = deadline;
        deadline.since(now)
    }

    fn request_parameters(&self) -> RequestParameters {
        RequestParameters {
            way: self.a.way_to(self.b.address),
            local_ca_guid: self.a.guid,
            service_id: 0x0106_1234,
            transport: Transport::Rc,
            qpn: 0x11,
            starting_psn: 0x111,
            responder_resources: 3,
            initiator_depth: 5,
            flow_control: true,
            retry_count: 7,
            rnr_retry_count: 6,
            srq: false,
            pkey: 0xffff,
            path_mtu: 3,
            packet_rate: 5,
            packet_life_time: 18,
            ack_delay: 15,
            remote_cm_response_timeout: 20,
            local_cm_response_timeout: 20,
            max_cm_retries: 15,
            ece: Ece {
                vendor_id: 0xabcdef,
                attribute_modifier: 0x1234_5678,
            },
            private_data: b"for b".to_vec(),
        }
    }

    fn reply_parameters(&self) -> ReplyParameters {
        ReplyParameters {
            local_ca_guid: self.b.guid,
            qpn: 0x22,
            starting_psn: 0x222,
            responder_resources: 4,
            initiator_depth: 2,
            ack_delay: 15,
            flow_control: true,
            rnr_retry_count: 5,
            srq: true,
            ece: Ece {
                vendor_id: 0x123456,
                attribute_modifier: 0x8765_4321,
            },
            private_data: b"for a".to_vec(),
        }
    }

    /// Sends REQ; gives both comm ids.
    fn request(&mut self) -> (CommId, CommId) {
        let parameters = self.request_parameters();
        let a = self.a.cm.request(self.now, &parameters).unwrap();
        assert_eq!(self.bring(A), ["REQ"]);
        let event = self.b.event();
        assert!(matches!(event.kind, EventKind::Request(_)), "{event:?}");
        (a, event.comm_id)
    }

    /// Sends REQ and REP.
    fn reply(&mut self) -> (CommId, CommId) {
        let (a, b) = self.request();
        let parameters = self.reply_parameters();
        self.b.cm.reply(self.now, b, &parameters).unwrap();
        assert_eq!(self.bring(B), ["REP"]);
        let event = self.a.event();
        assert_eq!(event.comm_id, a);
        assert!(matches!(event.kind, EventKind::Reply(_)), "{event:?}");
        (a, b)
    }

    /// Connects.
    fn connect(&mut self) -> (CommId, CommId) {
        let (a, b) = self.reply();
        self.a.cm.ready(self.now, a, &[]).unwrap();
        assert_eq!(self.bring(A), ["RTU"]);
        assert!(matches!(self.b.event().kind, EventKind::Ready { .. }));
        (a, b)
    }

    fn states(&self, a: CommId, b: CommId) -> (Option<State>, Option<State>) {
        (self.a.cm.state(a), self.b.cm.state(b))
    }

    /// Lets both go of everything, and time go by: nothing must be left.
    fn ends_empty(&mut self) {
        for side in [A, B] {
            let now = self.now;
            let cm = &mut self.end(side).cm;
            for status in cm.status() {
                cm.destroy(now, status.comm_id);
            }
            while let Some(deadline) = cm.deadline() {
                cm.timeout(deadline);
            }
            cm.table.check();
            assert_eq!(cm.status(), []);
            assert_eq!(cm.deadlines.len(), 0);
        }
    }
}

/// The only one of several.
fn only<T>(mut all: Vec<T>) -> T {
    assert_eq!(all.len(), 1);
    all.remove(0)
}

/// The message that this one must be.
macro_rules! message {
    ($mad:expr, $kind:ident) => {
        match $mad.message {
            CmMessage::$kind(message) => message,
            other => panic!("{other:?}"),
        }
    };
}
use message;

use crate::link::Path;
