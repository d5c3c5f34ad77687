//! The captures, what `gen` was told for each (tests/golden/capture), and where ours differs from Soft-RoCE.

use ferroce_engine::verbs::WcStatus;
use ferroce_wire::{Aeth, AtomicAckEth, Bth, Headers, Opcode, Psn, Syndrome};

use super::capture::Packet;
use super::script::{ATOMIC_VALUE, Op, parse};

/// Bytes of a full packet in the cases that say what is answered.
const MTU: usize = 1024;

/// A packet that our responder is to send.
#[derive(Clone, Debug)]
pub struct Answer {
    opcode: Opcode,
    psn: u32,
    syndrome: u8,
    msn: u32,
    payload: Vec<u8>,
}

impl Answer {
    /// To this QP.
    pub fn packet(&self, dest_qpn: u32) -> Packet {
        let bth = Bth {
            pad: (self.payload.len().next_multiple_of(4) - self.payload.len()) as u8,
            ..Bth::new(self.opcode, dest_qpn, Psn::new(self.psn))
        };
        let mut headers = Headers::from(bth);
        if self.opcode.has_aeth() {
            headers.aeth = Aeth {
                syndrome: Syndrome::from_u8(self.syndrome),
                msn: self.msn,
            };
        }
        if self.opcode.has_atomic_ack_eth() {
            headers.atomic_ack_eth = AtomicAckEth {
                original: ATOMIC_VALUE,
            };
        }
        // Headers that the opcode does not have are those of a packet that was read.
        Packet::parse(
            &Packet {
                headers,
                payload: self.payload.clone(),
            }
            .to_bytes(),
        )
    }
}

/// What our responder is to answer.
pub enum Answers {
    /// What Soft-RoCE answered.
    AsCaptured,
    /// Something else.
    Differ {
        why: &'static str,
        expected: Vec<Answer>,
    },
}

/// A capture, and what is known of it beyond its packets.
pub struct Case {
    pub capture: &'static str,
    /// What both sides were told.
    pub told: &'static str,
    /// What the server alone was told too.
    pub server: &'static str,
    /// Client packets that the bridge dropped before they came to the server, by index.
    pub dropped: &'static [usize],
    /// The client packet before which the receive is posted that is late.
    pub late: Option<usize>,
    /// Operations that do not arrive at our responder.
    pub undelivered: &'static [usize],
    /// The one of these that meets the receive of an earlier one, which is too short, although its own would not be.
    pub misplaced: Option<usize>,
    pub answers: Answers,
    /// How the client's last operation ends.
    pub status: WcStatus,
}

fn case(capture: &'static str, told: &'static str) -> Case {
    Case {
        capture,
        told,
        server: "",
        dropped: &[],
        late: None,
        undelivered: &[],
        misplaced: None,
        answers: Answers::AsCaptured,
        status: WcStatus::Success,
    }
}

impl Case {
    fn dropped(self, dropped: &'static [usize]) -> Case {
        Case { dropped, ..self }
    }

    fn differs(self, why: &'static str, expected: Vec<Answer>) -> Case {
        let answers = Answers::Differ { why, expected };
        Case { answers, ..self }
    }

    /// The first operation is refused, and the client's work fails.
    fn refused(self, status: WcStatus) -> Case {
        Case {
            undelivered: &[0],
            status,
            ..self
        }
    }
}

fn answer(opcode: Opcode, psn: u32, syndrome: u8, msn: u32) -> Answer {
    Answer {
        opcode,
        psn,
        syndrome,
        msn,
        payload: Vec::new(),
    }
}

/// An ACK without credit limit, as a QP gives it whose peer needs none.
fn ack(psn: u32, msn: u32) -> Answer {
    nak(0x1f, psn, msn)
}

fn nak(syndrome: u8, psn: u32, msn: u32) -> Answer {
    answer(Opcode::RcAcknowledge, psn, syndrome, msn)
}

fn atomic_ack(psn: u32, msn: u32) -> Answer {
    answer(Opcode::RcAtomicAcknowledge, psn, 0x1f, msn)
}

/// The responses of a READ of the bytes `offset..end` of this operation, from PSN `psn` on.
fn read_responses(op: &Op, psn: u32, offset: usize, end: usize) -> Vec<Answer> {
    let count = (end - offset).div_ceil(MTU);
    (0..count)
        .map(|i| {
            let opcode = match i {
                0 if count == 1 => Opcode::RcReadResponseOnly,
                0 => Opcode::RcReadResponseFirst,
                i if i + 1 == count => Opcode::RcReadResponseLast,
                _ => Opcode::RcReadResponseMiddle,
            };
            let start = offset + i * MTU;
            Answer {
                payload: op.pattern(start, end.min(start + MTU) - start),
                ..answer(opcode, psn + i as u32, 0x1f, 1)
            }
        })
        .collect()
}

const BRIDGE: &str = "responses that the bridge dropped are not in the capture";
const TOO_LONG: &str =
    "a message too long for its receive is an invalid request (0x61), as hardware says; rxe: 0x63";
const RNR_REST: &str = "after an RNR NAK the rest of the message is dropped in silence: a sequence NAK, as rxe sends, \
                        would ask for it before the wait is over";

/// Every capture.
pub fn all() -> Vec<Case> {
    let mut cases = clean();
    cases.extend(naks());
    cases.extend(drops());
    cases.extend(unreliable());
    cases
}

/// RC where nothing is lost or refused.
fn clean() -> Vec<Case> {
    const ALL: &str =
        "send:64 send:3000 sendimm:33 sendinv:64 write:64 write:3000 writeimm:2100 read:64 read:3500 cas faa";
    vec![
        case(
            "rc-send-v4-mtu1024",
            "send:64 send:0 send:1 send:2 send:3 sendse:5 send:1024 send:1025 send:3000",
        ),
        case(
            "rc-send-imm-v4-mtu1024",
            "sendimm:33 sendimm:0 sendimm:1500 sendimm:3000",
        ),
        case("rc-send-inv-v4-mtu1024", "sendinv:64 sendinv:1500 sendinv:3000"),
        case(
            "rc-write-v4-mtu1024",
            "write:64 write:0 write:1 write:1500 write:3000 writes:1500",
        ),
        case(
            "rc-write-imm-v4-mtu1024",
            "writeimm:31 writeimm:0 writeimm:1500 writeimm:3000",
        ),
        case(
            "rc-read-v4-mtu1024",
            "read:64 read:0 read:1 read:1500 read:3500 reads:1500",
        ),
        case("rc-atomic-v4-mtu1024", "cas casmiss faa"),
        case("rc-burst-v4-mtu1024", "burst:10 burst:100"),
        case(
            "rc-psn-wrap-v4-mtu1024",
            "-P 0xfffffe send:3000 read:3500 send:64",
        ),
        case(
            "rc-psn-wrap-read-v4-mtu1024",
            "-P 0xfffffe read:3500 write:3000 cas",
        ),
        case("rc-all-v6ll-mtu1024", ALL),
        case("rc-all-v6global-mtu1024", ALL),
        case(
            "rc-all-v4-mtu256",
            "-m 256 send:64 send:800 sendimm:33 sendinv:64 write:64 write:800 writeimm:2100 read:64 read:3500 cas faa",
        ),
        case(
            "rc-all-v4-mtu512",
            "-m 512 send:64 send:3000 sendimm:33 sendinv:64 write:64 write:3000 writeimm:2100 read:64 read:3500 cas faa",
        ),
        case(
            "rc-all-v4-mtu2048",
            "-m 2048 send:64 send:5000 write:5000 read:5000",
        ),
        case(
            "rc-all-v4-mtu4096",
            "-m 4096 send:64 send:10000 sendimm:5000 write:10000 writeimm:5000 read:10000",
        ),
        case("rc-all-v6ll-mtu4096", "-m 4096 send:10000 write:5000 read:10000"),
    ]
}

/// RC where the server refuses.
fn naks() -> Vec<Case> {
    use WcStatus::{RemAccessErr, RemInvReqErr, RemOpErr, RnrRetryExcErr};
    let late = |capture, told, packet| Case {
        late: Some(packet),
        ..case(capture, told)
    };
    let none_accepted = |capture, told| {
        Case {
            server: "-A 0",
            ..case(capture, told)
        }
        .refused(RemInvReqErr)
    };
    vec![
        late("rc-nak-rnr-v4", "rnr:64", 13),
        case("rc-nak-rnr-exceeded-v4", "-r 2 rnr:64").refused(RnrRetryExcErr),
        late("rc-nak-rnr-multi-v4", "rnr:3000", 39).differs(
            RNR_REST,
            [vec![nak(0x2c, 0x100, 0); 13], vec![ack(0x102, 1)]].concat(),
        ),
        case("rc-nak-operational-short-v4", "short:64")
            .refused(RemOpErr)
            .differs(TOO_LONG, vec![nak(0x61, 0x100, 0)]),
        case("rc-nak-operational-short-multi-v4", "short:3000")
            .refused(RemOpErr)
            .differs(TOO_LONG, vec![nak(0x61, 0x101, 0)]),
        case("rc-nak-access-write-v4", "badkey:64").refused(RemAccessErr),
        case("rc-nak-access-write-v6ll", "badkey:64").refused(RemAccessErr),
        case("rc-nak-access-write-multi-v4", "badkey:3000").refused(RemAccessErr),
        case("rc-nak-access-read-v4", "badread:64").refused(RemAccessErr),
        case("rc-nak-access-atomic-v4", "badatomic").refused(RemAccessErr),
        none_accepted("rc-nak-invalid-read-v4", "read:64"),
        none_accepted("rc-nak-invalid-atomic-v4", "cas"),
    ]
}

/// RC where the bridge takes packets away.
fn drops() -> Vec<Case> {
    let read = &parse("read:4096").1[0];
    vec![
        case("rc-drop-send-middle-v4", "send:4096").dropped(&[1]),
        case("rc-drop-send-middle-v6ll", "send:4096").dropped(&[1]),
        case("rc-drop-send-last-v4", "send:4096").dropped(&[3]),
        case("rc-drop-ack-v4", "send:64 send:64")
            .differs(BRIDGE, vec![ack(0x100, 1), ack(0x100, 1), ack(0x101, 2)]),
        case("rc-drop-acks-cumulative-v4", "burst:10")
            .differs(BRIDGE, (0..10).map(|n| ack(0x100 + n, n + 1)).collect()),
        case("rc-drop-burst-v4", "burst:10").dropped(&[5]),
        case("rc-drop-write-first-v4", "write:4096").dropped(&[0]),
        case("rc-drop-read-request-v4", "read:3500").dropped(&[0]),
        case("rc-drop-read-response-middle-v4", "read:4096").differs(
            "responses that the bridge dropped are not in the capture; and a READ of the rest is answered as any READ, \
             from FIRST on, where rxe goes on with MIDDLE",
            [
                read_responses(read, 0x100, 0, 4096),
                read_responses(read, 0x101, MTU, 4096),
            ]
            .concat(),
        ),
        case("rc-drop-read-response-last-v4", "read:4096").differs(
            "responses that the bridge dropped are not in the capture; and a READ of one packet is answered by ONLY, \
             where rxe sends a LAST",
            [
                read_responses(read, 0x100, 0, 4096),
                read_responses(read, 0x103, 3 * MTU, 4096),
            ]
            .concat(),
        ),
        case("rc-drop-atomic-ack-v4", "faa faa").differs(
            BRIDGE,
            vec![atomic_ack(0x100, 1), atomic_ack(0x100, 1), atomic_ack(0x101, 2)],
        ),
        case("rc-retry-exceeded-v4", "-T 10 -R 2 send:64")
            .dropped(&[0, 1, 2])
            .refused(WcStatus::RetryExcErr),
    ]
}

/// UC and UD.
fn unreliable() -> Vec<Case> {
    vec![
        case(
            "uc-send-v4-mtu1024",
            "-t uc send:64 send:0 send:3 send:1500 send:3000 sendimm:33 sendimm:2500",
        ),
        case(
            "uc-write-v4-mtu1024",
            "-t uc write:64 write:0 write:1500 write:3000 writeimm:31 writeimm:2500",
        ),
        case(
            "uc-all-v6ll-mtu1024",
            "-t uc send:64 send:3000 sendimm:33 write:64 write:3000 writeimm:2500",
        ),
        case(
            "uc-send-v4-mtu4096",
            "-t uc -m 4096 send:64 send:10000 write:10000",
        ),
        // rxe drops the message behind that, too, which is whole: ours is delivered. Each takes the receive of the one
        // before, and that is too short for the last: it fails with the QP.
        Case {
            undelivered: &[0, 3],
            misplaced: Some(3),
            ..case(
                "uc-drop-send-middle-v4",
                "-t uc send:4096 send:64 send:64 send:1500",
            )
            .dropped(&[1])
        },
        case(
            "ud-send-v4",
            "-t ud send:64 send:0 send:1 send:1024 sendimm:33 sendse:5",
        ),
        case("ud-send-v6ll", "-t ud send:64 send:1 sendimm:33"),
        case("ud-send-v6global", "-t ud send:64 send:1 sendimm:33"),
        case("ud-send-v4-mtu4096", "-t ud -m 4096 send:4096 sendimm:4000"),
        case("ud-multicast-v6", "-t ud send:64 sendimm:33"),
    ]
}
