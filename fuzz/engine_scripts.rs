//! Scripts to begin with for the target `engine`: its actions by name, as `engine/tests/script/mod.rs` reads them.

/// A script being written. QPs: 0-1 and 6-7 are RC pairs (6 and 7 on the SRQ), 2-3 UC (3 on the SRQ), 4-5 UD (5 too);
/// with XRC, 6 is an initiator and 7 its target.
#[derive(Clone)]
struct Script(Vec<u8>);

/// Kinds of `post_send`, the operation's own bytes included.
const SEND: &[u8] = &[9, 0x80, 0];
const SEND_IMM: &[u8] = &[7, 0x80, 0, 1, 2, 3, 4];
const SEND_TO_GROUP: &[u8] = &[0x69, 0, 0x80, 0];
const WRITE: &[u8] = &[1, 0x80, 0];
const WRITE_IMM: &[u8] = &[2, 0x80, 0, 1, 2, 3, 4];
const READ: &[u8] = &[3, 0x80, 0];
const COMPARE_SWAP: &[u8] = &[4, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 1];
/// By the key of window 2, which is of type 2.
const WINDOW_WRITE: &[u8] = &[0x41, 2, 0x20, 0];
const SEND_INV: &[u8] = &[0x40, 2, 0, 0];
const LOCAL_INV: &[u8] = &[0x46, 2, 0, 0];
/// Binds window 2 to 4096 bytes from 0x2000 on, under tag 5.
const BIND: &[u8] = &[14, 0, 0, 0x8a, 5, 0x20, 0, 0x20, 0];
const ATOMIC_WRITE: &[u8] = &[10, 0x80, 0];
/// Of 256 bytes.
const FLUSH: &[u8] = &[11, 0x80, 0, 1, 0];
const FETCH_ADD: &[u8] = &[5, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 1];

impl Script {
    /// Path MTU 256 << `mtu`, CQs with room.
    fn new(mtu: u8) -> Script {
        Script(vec![mtu])
    }

    /// The same, with XRC.
    fn xrc() -> Script {
        Script(vec![0x20])
    }

    fn act(mut self, qp: u8, action: u8, bytes: &[u8]) -> Script {
        self.0.push(qp << 5 | action);
        self.0.extend_from_slice(bytes);
        self
    }

    /// Posts a receive of one piece.
    fn receive(self, qp: u8, len: u16) -> Script {
        let [high, low] = len.to_be_bytes();
        self.act(qp, 6, &[0x25, 0x01, 0, high, low])
    }

    /// Posts a signaled send of one piece.
    fn send(self, qp: u8, kind: &[u8], len: u16) -> Script {
        let [high, low] = len.to_be_bytes();
        self.act(qp, 0, &[kind, &[2, 0x25, 0x40, 0, high, low]].concat())
    }

    /// Posts a signaled send that has no data, and does it.
    fn local(self, qp: u8, kind: &[u8]) -> Script {
        self.act(qp, 0, &[kind, &[2]].concat()).transmit().poll()
    }

    fn transmit(self) -> Script {
        self.act(0, 10, &[255])
    }

    fn deliver(self, count: usize) -> Script {
        (0..count).fold(self, |script, _| script.act(0, 14, &[0]))
    }

    /// Loses the packet that is next.
    fn lose(self) -> Script {
        self.act(0, 19, &[])
    }

    /// Goes to the next deadline.
    fn wait(self) -> Script {
        self.act(0, 24, &[])
    }

    fn poll(self) -> Script {
        self.act(0, 26, &[])
    }

    /// Sends, carries the packets, answers, carries the answers.
    fn exchange(self, packets: usize, answers: usize) -> Script {
        self.transmit()
            .deliver(packets)
            .transmit()
            .deliver(answers)
            .poll()
    }
}

/// The scripts by name.
pub fn all() -> Vec<(&'static str, Vec<u8>)> {
    let new = || Script::new(0);
    let sent = || new().receive(1, 2000).send(0, SEND, 1000).transmit();
    let late = new()
        .send(0, SEND, 600)
        .exchange(3, 1)
        .receive(1, 600)
        .wait()
        .exchange(3, 1);
    vec![
        ("rc-send", new().receive(1, 100).send(0, SEND, 100).exchange(1, 1)),
        (
            "rc-send-imm-three-packets",
            new().receive(1, 600).send(0, SEND_IMM, 600).exchange(3, 1),
        ),
        ("rc-send-both-ways", {
            let posted = new()
                .receive(0, 64)
                .receive(1, 64)
                .send(0, SEND, 64)
                .send(1, SEND, 64);
            posted.exchange(2, 2)
        }),
        (
            "rc-first-lost",
            sent().lose().deliver(3).transmit().deliver(1).exchange(4, 1),
        ),
        ("rc-last-lost", sent().deliver(3).lose().wait().exchange(4, 4)),
        (
            "rc-ack-lost",
            sent().deliver(4).transmit().lose().wait().exchange(4, 4),
        ),
        (
            "rc-corrupt",
            sent().act(0, 14, &[0x60, 0, 20, 1]).deliver(3).exchange(1, 4),
        ),
        (
            "rc-bad-icrc",
            sent().act(0, 14, &[0x80]).deliver(3).exchange(1, 4),
        ),
        (
            "rc-duplicate",
            sent().act(0, 14, &[0x18]).deliver(4).exchange(2, 2),
        ),
        ("rc-reordered", sent().act(0, 14, &[2]).deliver(3).exchange(1, 4)),
        ("rc-rnr", late),
        ("rc-retry-exceeded", {
            (0..9)
                .fold(new().send(0, SEND, 10).transmit(), |s, _| {
                    s.lose().wait().transmit()
                })
                .poll()
        }),
        (
            "rc-too-long",
            new().receive(1, 10).send(0, SEND, 600).exchange(3, 1),
        ),
        (
            "rc-full-link",
            new()
                .receive(1, 600)
                .send(0, SEND, 600)
                .act(0, 10, &[1])
                .exchange(3, 1),
        ),
        ("rc-memory-fault", {
            let unmapped = new()
                .receive(1, 600)
                .send(0, SEND, 600)
                .act(0, 28, &[0x40, 0x10, 8]);
            unmapped.exchange(3, 1).act(0, 29, &[])
        }),
        ("rc-receive-fault", {
            let unmapped = new()
                .receive(1, 600)
                .send(0, SEND, 600)
                .act(0, 28, &[0x01, 0x10, 8]);
            unmapped.exchange(3, 1)
        }),
        (
            "rc-flush",
            new().receive(0, 9).send(0, SEND, 9).act(0, 30, &[0]).poll(),
        ),
        ("rc-reset", sent().deliver(2).act(0, 30, &[3]).exchange(4, 1)),
        (
            "rc-drain",
            sent()
                .act(0, 30, &[1])
                .deliver(4)
                .exchange(1, 1)
                .act(0, 30, &[2])
                .exchange(1, 1),
        ),
        (
            "rc-srq",
            new()
                .receive(6, 600)
                .receive(7, 600)
                .send(6, SEND, 600)
                .exchange(3, 1),
        ),
        ("rc-write", new().send(0, WRITE, 600).exchange(3, 1)),
        (
            "rc-write-imm",
            new().receive(1, 0).send(0, WRITE_IMM, 600).exchange(3, 1),
        ),
        ("rc-read", new().send(0, READ, 600).exchange(1, 3)),
        ("rc-read-response-lost", {
            let asked = new().send(0, READ, 600).transmit().deliver(1).transmit();
            asked.deliver(1).lose().deliver(1).wait().exchange(1, 3)
        }),
        (
            "rc-atomics",
            new()
                .send(0, COMPARE_SWAP, 8)
                .send(0, FETCH_ADD, 8)
                .exchange(2, 2),
        ),
        (
            "rc-flush-atomic-write",
            new()
                .send(0, WRITE, 600)
                .local(0, FLUSH)
                .send(0, ATOMIC_WRITE, 8)
                .exchange(5, 3),
        ),
        (
            "xrc-send",
            Script::xrc()
                .receive(7, 600)
                .send(6, SEND, 600)
                .exchange(3, 1),
        ),
        (
            "xrc-rnr",
            Script::xrc()
                .send(6, SEND_IMM, 600)
                .exchange(3, 1)
                .receive(7, 600)
                .wait()
                .exchange(3, 1),
        ),
        (
            "xrc-read-write",
            Script::xrc()
                .send(6, WRITE, 600)
                .send(6, READ, 600)
                .send(6, FETCH_ADD, 8)
                .exchange(5, 5),
        ),
        (
            "xrc-forged",
            Script::xrc().act(7, 20, &[&[0xaa, 0, 0, 0x80, 20][..], &[0; 22]].concat()),
        ),
        (
            "rc-window",
            new()
                .local(1, BIND)
                .send(0, WINDOW_WRITE, 100)
                .exchange(1, 1)
                .local(1, LOCAL_INV)
                .send(0, WINDOW_WRITE, 100)
                .exchange(1, 1),
        ),
        (
            "rc-send-inv",
            new()
                .local(1, BIND)
                .receive(1, 100)
                .send(0, SEND_INV, 100)
                .exchange(1, 1),
        ),
        (
            "uc-window",
            new()
                .local(2, BIND)
                .send(3, WINDOW_WRITE, 100)
                .exchange(1, 0)
                .local(2, BIND),
        ),
        (
            "rc-forged",
            new().act(0, 20, &[0x04, 0, 0, 0x80, 0, 0, 0]).exchange(0, 1),
        ),
        (
            "rc-forged-write",
            new().act(1, 20, &[&[0x0a, 0, 0, 0x80, 16][..], &[0; 18]].concat()),
        ),
        (
            "rc-forged-ack",
            sent().act(0, 20, &[0x11, 0, 3, 0, 4, 0x1f, 0, 0, 1, 0, 0]).poll(),
        ),
        ("uc-send", new().receive(2, 600).send(3, SEND, 600).exchange(3, 0)),
        ("uc-middle-lost", {
            let sent = new()
                .receive(2, 600)
                .send(3, SEND, 600)
                .send(3, SEND, 5)
                .transmit();
            sent.deliver(1).lose().deliver(2).poll()
        }),
        ("uc-write", new().send(2, WRITE, 600).exchange(3, 0)),
        ("ud-send", new().receive(4, 140).send(5, SEND, 100).exchange(1, 0)),
        (
            "ud-send-imm-srq",
            new().receive(5, 300).send(4, SEND_IMM, 100).exchange(1, 0),
        ),
        (
            "ud-multicast",
            new()
                .receive(4, 140)
                .receive(5, 140)
                .send(4, SEND_TO_GROUP, 100)
                .exchange(1, 0),
        ),
        ("ud-no-receive", new().send(4, SEND, 100).exchange(1, 0)),
        ("raw-packet", new().act(0, 21, &[&[16][..], &[0x11; 17]].concat())),
        ("cq-overrun", {
            let posts = Script::new(0x80);
            (0..7).fold(posts, |s, _| {
                s.receive(1, 8)
                    .send(0, SEND, 8)
                    .transmit()
                    .deliver(1)
                    .transmit()
                    .deliver(1)
            })
        }),
        ("query", new().act(0, 31, &[])),
    ]
    .into_iter()
    .map(|(name, script)| (name, script.0))
    .collect()
}
