//! Linux's captures of connections, replayed with a `Cm` of ours in the place of either side: given the same numbers, it
//! must send the same bytes.

use std::collections::VecDeque;
use std::fs::File;
use std::path::Path as FilePath;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ferroce_engine::cm::{
    Cm, CommId, Ece, EventKind, ReplyParameters, RequestParameters, SidrParameters, SidrReplyParameters,
    State, Transport, Way,
};
use ferroce_engine::link::Path;
use ferroce_engine::time::Time;
use ferroce_wire::cm::{CmMad, CmMessage, RejReason, Req, SidrStatus};
use ferroce_wire::frame::Frame;
use ferroce_wire::{Gid, mad::GSI_QPN};
use pcap_file::pcap::PcapReader;

/// A message of a capture.
struct Message {
    time: Duration,
    source: Gid,
    dest: Gid,
    /// The side that asks has sent it.
    by_client: bool,
    mad: CmMad,
}

fn captures() -> Vec<String> {
    let folder = FilePath::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden");
    let mut names: Vec<String> = folder
        .read_dir()
        .unwrap()
        .map(|entry| entry.unwrap().path().to_str().unwrap().to_string())
        .filter(|path| path.ends_with(".pcap") && path.contains("/cm-"))
        .collect();
    names.sort();
    names
}

fn read(path: &str) -> Vec<Message> {
    let mut reader = PcapReader::new(File::open(path).unwrap()).unwrap();
    let mut messages: Vec<Message> = Vec::new();
    while let Some(packet) = reader.next_packet() {
        let packet = packet.unwrap();
        let frame = Frame::parse(&packet.data).unwrap();
        let network = frame.datagram.network;
        let roce = frame.datagram.packet;
        if roce.bth().dest_qpn != GSI_QPN {
            continue;
        }
        let client = messages.first().map_or(network.src(), |first| first.source);
        messages.push(Message {
            time: packet.timestamp,
            source: network.src(),
            dest: network.dst(),
            by_client: network.src() == client,
            mad: CmMad::parse(roce.payload()).unwrap(),
        });
    }
    messages
}

/// One side of a capture, in our hands.
struct Side {
    cm: Cm,
    /// What is drawn next, instead of random numbers.
    numbers: Arc<Mutex<VecDeque<u64>>>,
    now: Time,
    comm_id: Option<CommId>,
}

impl Side {
    fn new() -> Side {
        let numbers = Arc::new(Mutex::new(VecDeque::new()));
        let drawn = numbers.clone();
        let draw = move || drawn.lock().unwrap().pop_front().expect("a number to draw");
        Side {
            cm: Cm::new(Box::new(draw)),
            numbers,
            now: Time::from_nanos(1_000_000_000),
            comm_id: None,
        }
    }

    fn draws(&self, numbers: &[u64]) {
        self.numbers.lock().unwrap().extend(numbers);
    }

    fn comm_id(&self) -> CommId {
        self.comm_id.expect("a connection")
    }

    /// Gives it a message of the peer's. `next` is what Linux said to it.
    fn receive(&mut self, message: &Message, next: Option<&CmMad>) {
        match (&message.mad.message, next.map(|mad| &mad.message)) {
            (CmMessage::Req(_), Some(CmMessage::Rep(rep))) => self.draws(&[rep.local_comm_id.into()]),
            // Who refuses has a number that nobody sees.
            (CmMessage::Req(_) | CmMessage::SidrReq(_), _) => self.draws(&[1]),
            _ => {}
        }
        let way = way(message.dest, message.source);
        self.cm.receive(self.now, &way, &message.mad.to_bytes());
        let event = self.cm.poll_event();
        self.comm_id = event.as_ref().map(|event| event.comm_id).or(self.comm_id);
        let kind = event.map(|event| event.kind);
        let is_right = match &message.mad.message {
            CmMessage::Req(_) => matches!(kind, Some(EventKind::Request(_))),
            CmMessage::Rep(_) => matches!(kind, Some(EventKind::Reply(_))),
            CmMessage::Rtu(_) => matches!(kind, Some(EventKind::Ready { .. })),
            CmMessage::Rej(_) => matches!(kind, Some(EventKind::Rejected(_))),
            CmMessage::Dreq(_) => matches!(kind, Some(EventKind::DisconnectRequested { .. })),
            CmMessage::Drep(_) => matches!(kind, Some(EventKind::Disconnected { .. })),
            CmMessage::SidrReq(_) => matches!(kind, Some(EventKind::SidrRequest(_))),
            CmMessage::SidrRep(_) => matches!(kind, Some(EventKind::SidrReply(_))),
            other => panic!("{} in a capture", other.name()),
        };
        assert!(is_right, "{kind:?} of a {}", message.mad.message.name());
        assert!(self.cm.poll_event().is_none());
    }

    /// Has it send what Linux has sent.
    fn send(&mut self, message: &Message) {
        let mad = &message.mad;
        match &mad.message {
            CmMessage::Req(_) | CmMessage::SidrReq(_) if self.comm_id.is_some() => {
                // The first was lost.
                self.now = self.cm.deadline().expect("a deadline");
                self.cm.timeout(self.now);
            }
            CmMessage::Req(req) => {
                self.draws(&[req.local_comm_id.into(), mad.tid]);
                let parameters = request(message, req);
                self.comm_id = Some(self.cm.request(self.now, &parameters).unwrap());
            }
            CmMessage::Rep(rep) => {
                let parameters = ReplyParameters {
                    local_ca_guid: rep.local_ca_guid,
                    qpn: rep.local_qpn,
                    starting_psn: rep.starting_psn.value(),
                    responder_resources: rep.responder_resources,
                    initiator_depth: rep.initiator_depth,
                    ack_delay: rep.target_ack_delay,
                    flow_control: rep.end_to_end_flow_control,
                    rnr_retry_count: rep.rnr_retry_count,
                    srq: rep.srq,
                    ece: Ece {
                        vendor_id: rep.vendor_id,
                        attribute_modifier: mad.attribute_modifier,
                    },
                    private_data: rep.private_data.to_vec(),
                };
                self.cm.reply(self.now, self.comm_id(), &parameters).unwrap();
            }
            CmMessage::Rtu(rtu) => {
                let private_data = &rtu.private_data;
                self.cm.ready(self.now, self.comm_id(), private_data).unwrap();
            }
            CmMessage::Rej(rej) => {
                assert_eq!(rej.reason, RejReason::INVALID_SERVICE_ID);
                self.cm.refuse(self.now, self.comm_id(), rej.reason);
            }
            CmMessage::Dreq(dreq) => {
                // Who has asked for the connection repeats that number.
                if !message.by_client {
                    self.draws(&[mad.tid]);
                }
                let private_data = &dreq.private_data;
                self.cm
                    .disconnect(self.now, self.comm_id(), private_data)
                    .unwrap();
            }
            CmMessage::Drep(drep) => {
                let private_data = &drep.private_data;
                self.cm
                    .answer_disconnect(self.now, self.comm_id(), private_data)
                    .unwrap();
            }
            CmMessage::SidrReq(req) => {
                self.draws(&[req.request_id.into(), mad.tid]);
                let parameters = SidrParameters {
                    way: way(message.source, message.dest),
                    service_id: req.service_id,
                    pkey: req.pkey,
                    timeout_ms: 4096,
                    max_cm_retries: 15,
                    private_data: req.private_data.to_vec(),
                };
                self.comm_id = Some(self.cm.sidr_request(self.now, &parameters).unwrap());
            }
            CmMessage::SidrRep(rep) if rep.status == SidrStatus::UNSUPPORTED => {
                let reason = RejReason::INVALID_SERVICE_ID;
                self.cm.refuse(self.now, self.comm_id(), reason);
            }
            CmMessage::SidrRep(rep) => {
                let parameters = SidrReplyParameters {
                    status: rep.status,
                    qpn: rep.qpn,
                    qkey: rep.qkey,
                    ece: Ece {
                        vendor_id: rep.vendor_id,
                        attribute_modifier: mad.attribute_modifier,
                    },
                    info: rep.info[..rep.info_len.into()].to_vec(),
                    private_data: rep.private_data.to_vec(),
                };
                self.cm.sidr_reply(self.now, self.comm_id(), &parameters).unwrap();
            }
            other => panic!("{} in a capture", other.name()),
        }
        let sent = self.cm.poll_transmit().expect("a message");
        assert!(self.cm.poll_transmit().is_none());
        let sent_mad = CmMad::parse(&sent.mad[..]).unwrap();
        assert_eq!(sent_mad, *mad);
        assert_eq!(sent.mad[..], mad.to_bytes());
        assert_eq!(Gid::from_ip(sent.way.path.source), message.source);
        assert_eq!(Gid::from_ip(sent.way.path.dest), message.dest);
    }
}

fn way(source: Gid, dest: Gid) -> Way {
    Way {
        device: "fer0".to_string(),
        path: Path {
            ifindex: 2,
            sgid_index: 1,
            ..Path::between(source.to_ip(), dest.to_ip())
        },
    }
}

/// What Linux was asked to say.
fn request(message: &Message, req: &Req) -> RequestParameters {
    let mut way = way(message.source, message.dest);
    way.path.traffic_class = req.primary.traffic_class;
    way.path.flow_label = req.primary.flow_label;
    way.path.hop_limit = req.primary.hop_limit;
    way.path.service_level = req.primary.sl;
    RequestParameters {
        way,
        local_ca_guid: req.local_ca_guid,
        service_id: req.service_id,
        transport: Transport::Rc,
        qpn: req.local_qpn,
        starting_psn: req.starting_psn.value(),
        responder_resources: req.responder_resources,
        initiator_depth: req.initiator_depth,
        flow_control: req.end_to_end_flow_control,
        retry_count: req.retry_count,
        rnr_retry_count: req.rnr_retry_count,
        srq: req.srq,
        pkey: req.pkey,
        path_mtu: req.path_mtu,
        packet_rate: req.primary.packet_rate,
        packet_life_time: 18,
        ack_delay: 15,
        remote_cm_response_timeout: req.remote_cm_response_timeout,
        local_cm_response_timeout: req.local_cm_response_timeout,
        max_cm_retries: req.max_cm_retries,
        ece: Ece {
            vendor_id: req.vendor_id,
            attribute_modifier: message.mad.attribute_modifier,
        },
        private_data: req.private_data.to_vec(),
    }
}

/// Replays a capture with one side of ours.
fn replay(messages: &[Message], as_client: bool) {
    let mut side = Side::new();
    let dropped = |at: usize| {
        let next = messages.get(at + 1);
        next.is_some_and(|next| next.mad == messages[at].mad)
    };
    for (at, message) in messages.iter().enumerate() {
        if message.by_client == as_client {
            side.send(message);
        } else if !dropped(at) {
            side.receive(message, messages.get(at + 1).map(|next| &next.mad));
        }
    }
    let state = side.comm_id.and_then(|comm_id| side.cm.state(comm_id));
    assert!(
        matches!(state, None | Some(State::Idle | State::Timewait)),
        "{state:?}"
    );
    assert!(side.numbers.lock().unwrap().is_empty());
}

#[test]
fn ours_says_what_linux_says() {
    let captures = captures();
    assert_eq!(captures.len(), 16);
    for capture in captures {
        let messages = read(&capture);
        for as_client in [true, false] {
            println!("{capture}, client {as_client}");
            replay(&messages, as_client);
        }
    }
}

/// Linux waits in jiffies of 4 ms, and begins a little late.
#[test]
fn a_lost_request_is_repeated_when_linux_does_it() {
    let path = captures()
        .into_iter()
        .find(|it| it.contains("cm-drop-req"))
        .unwrap();
    let messages = read(&path);
    assert_eq!(messages[0].mad, messages[1].mad);
    let waited = messages[1].time - messages[0].time;
    let mut side = Side::new();
    side.send(&messages[0]);
    let ours = side.cm.deadline().unwrap().since(side.now);
    let difference = waited.abs_diff(ours);
    assert!(difference < Duration::from_millis(100), "{waited:?}, {ours:?}");
}
