//! Memory windows in programs: their owners bind them and tell the peers, who use them until they end in one way or
//! another, perhaps too long. What became of them is checked here too.

use ferroce_engine::link::random::Prng;

use crate::harness::Outcome;
use crate::program::{Kind, Message, Program, Slot, Step, Stream, Via, Window};

/// A step of a window: what the owner (`true`) or the user sends.
type Move = (bool, Message);

fn one_in(r: &mut Prng, n: u64) -> bool {
    r.below(n) == 0
}

/// Weaves the life of some windows into both streams of a connection. Each step follows those before it at both nodes,
/// so that nobody waits for ever.
pub fn weave(r: &mut Prng, streams: &mut [Stream; 2], mtu: u32) {
    let mut lives = Vec::new();
    for _ in 0..r.between(1, 3) {
        let owner = r.below(2) as usize;
        let counter = one_in(r, 3);
        let len = if counter {
            8
        } else {
            r.between(1, 3 * u64::from(mtu)) as u32
        };
        let stream = &mut streams[1 - owner];
        stream.slots.push(Slot { len, counter });
        let two = !one_in(r, 3);
        stream.windows.push(Window {
            slot: stream.slots.len() - 1,
            two,
            zero_based: two && one_in(r, 2),
        });
        let number = stream.windows.len() - 1;
        let mut moves = Life::new(stream.windows[number], number, len).live(r);
        for (n, (_, message)) in moves.iter_mut().enumerate() {
            message.step = Some(Step {
                owner,
                window: number,
                number: n,
            });
        }
        moves.reverse();
        lives.push((owner, moves));
    }
    let mut places = [0; 2];
    while !lives.is_empty() {
        let chosen = r.below(lives.len() as u64) as usize;
        let (owner, moves) = &mut lives[chosen];
        let Some((by_owner, message)) = moves.pop() else {
            lives.remove(chosen);
            continue;
        };
        let side = if by_owner { *owner } else { 1 - *owner };
        let messages = &mut streams[side].messages;
        let at = (places[side] + r.below(4) as usize).min(messages.len());
        messages.insert(at, message);
        places[side] = at + 1;
    }
}

/// A window while its life is made up.
struct Life {
    window: Window,
    number: usize,
    len: u32,
    tag: u8,
    moves: Vec<Move>,
}

impl Life {
    fn new(window: Window, number: usize, len: u32) -> Life {
        Life {
            window,
            number,
            len,
            tag: 0,
            moves: Vec::new(),
        }
    }

    fn add(&mut self, by_owner: bool, message: Message) {
        self.moves.push((by_owner, message));
    }

    /// A message without data that tells something, and waits for READs if need be.
    fn tell(&mut self, r: &mut Prng, by_owner: bool, fence: bool) {
        let len = r.below(100) as u32;
        let message = Message {
            fence,
            ..Message::new(Kind::Send, len)
        };
        self.add(by_owner, message);
    }

    fn bind(&mut self, r: &mut Prng) {
        self.tag = (self.tag + 1) & 0x3f;
        let bind = Kind::Bind {
            window: self.number,
            tag: self.tag,
            unbind: false,
        };
        let message = Message {
            signaled: one_in(r, 2),
            fence: one_in(r, 4),
            ..Message::new(bind, 0)
        };
        self.add(true, message);
    }

    /// An operation of the user by this tag; whether it is a READ.
    fn operation(&mut self, r: &mut Prng, tag: u8) -> (Message, bool) {
        let slot = self.window.slot;
        let (compare, swap) = (r.below(3), r.below(3));
        let kind = match r.below(3) {
            0 if self.window_counts() => Kind::FetchAdd { slot, add: swap },
            1 if self.window_counts() => Kind::CompareSwap { slot, compare, swap },
            0 | 1 => Kind::Write(slot),
            _ => Kind::Read(slot),
        };
        let len = if self.window_counts() {
            8
        } else {
            r.between(1, u64::from(self.len)) as u32
        };
        let message = Message {
            via: Some(Via {
                window: self.number,
                tag,
            }),
            ..Message::new(kind, len)
        };
        (message, matches!(kind, Kind::Read(_)))
    }

    fn window_counts(&self) -> bool {
        self.len == 8
    }

    /// Some operations; whether an invalidation must wait for a READ among them.
    fn uses(&mut self, r: &mut Prng, raced: bool) -> bool {
        let mut read = false;
        for _ in 0..r.below(if raced { 9 } else { 5 }) {
            let (message, reads) = self.operation(r, self.tag);
            let message = Message {
                raced,
                fence: read && !reads,
                ..message
            };
            read |= reads;
            self.add(false, message);
        }
        read
    }

    /// Times of being bound and used, and what comes last.
    fn live(mut self, r: &mut Prng) -> Vec<Move> {
        let times = r.between(1, 3);
        for time in 1..=times {
            self.bind(r);
            self.tell(r, true, false);
            let (last, old) = (time == times, self.tag);
            if last && one_in(r, 16) {
                self.die(r);
                break;
            }
            let read = self.uses(r, false);
            if last && one_in(r, 2) {
                break;
            }
            self.end(r, read);
            if last && one_in(r, 24) {
                // By a key that is stale, as the owner has told.
                self.tell(r, true, false);
                let (message, _) = self.operation(r, old);
                self.add(
                    false,
                    Message {
                        wrong_key: true,
                        ..message
                    },
                );
            }
        }
        self.moves
    }

    /// The binding ends in order.
    fn end(&mut self, r: &mut Prng, read: bool) {
        let (window, tag) = (self.number, self.tag);
        if self.window.two && one_in(r, 2) {
            let message = Message {
                fence: read,
                ..Message::new(Kind::SendInv { window, tag }, r.below(300) as u32)
            };
            return self.add(false, message);
        }
        self.tell(r, false, read);
        let kind = if self.window.two {
            Kind::LocalInv { window, tag }
        } else {
            self.tag = (self.tag + 1) & 0x3f;
            Kind::Bind {
                window,
                tag: self.tag,
                unbind: true,
            }
        };
        self.add(true, Message::new(kind, 0));
    }

    /// The binding ends while the user is at it, or what is asked of the window fails, and with it the connection.
    fn die(&mut self, r: &mut Prng) {
        let (window, tag) = (self.number, self.tag);
        let wrong = tag ^ 0x80;
        let kind = match r.below(10) {
            0 if self.window.two => Kind::LocalInv { window, tag: wrong },
            1 if self.window.two => Kind::Bind {
                window,
                tag: wrong,
                unbind: false,
            },
            2 => {
                let (message, _) = self.operation(r, wrong);
                return self.add(
                    false,
                    Message {
                        wrong_key: true,
                        ..message
                    },
                );
            }
            3 => {
                let message = Message {
                    wrong_key: true,
                    ..Message::new(Kind::SendInv { window, tag: wrong }, r.below(300) as u32)
                };
                return self.add(false, message);
            }
            _ => {
                let kind = if self.window.two {
                    Kind::LocalInv { window, tag }
                } else {
                    Kind::Bind {
                        window,
                        tag: tag + 1,
                        unbind: true,
                    }
                };
                let message = Message {
                    at: r.below(300),
                    ..Message::new(kind, 0)
                };
                self.add(true, message);
                self.uses(r, true);
                return;
            }
        };
        let message = Message {
            wrong_key: true,
            ..Message::new(kind, 0)
        };
        self.add(true, message);
    }
}

/// What a slot held when the binding of its window had ended.
pub struct Frozen {
    /// The step that ended it.
    pub step: Step,
    /// The slot.
    pub bytes: Vec<u8>,
}

/// Nothing was written through a window after its binding had ended, and before it was bound again; `side` uses it.
pub fn nothing_came_late(
    program: &Program,
    outcome: &Outcome,
    connection: usize,
    side: usize,
) -> Result<usize, String> {
    let owner = 1 - side;
    let log = &outcome.qps[connection][owner];
    let posted = &program.connections[connection].streams[owner].messages[..log.sends_posted];
    let mut ended = 0;
    for Frozen { step, bytes } in log.frozen.iter().filter(|frozen| frozen.step.owner == owner) {
        let later = |message: &Message| {
            matches!(message.kind, Kind::Bind { unbind: false, .. })
                && message.step.is_some_and(|s| {
                    (s.owner, s.window) == (step.owner, step.window) && s.number > step.number
                })
        };
        let slot = program.connections[connection].streams[side].windows[step.window].slot;
        if !posted.iter().any(later) && log.slots[slot] != *bytes {
            return Err(format!("slot {slot} changed after {step:?} ended its window"));
        }
        ended += 1;
    }
    Ok(ended)
}
