//! The requester: turns send WQEs into packets, and tracks which of them the peer has acknowledged.
//!
//! Packets are counted by sequence numbers of 64 bits that never wrap; the PSN on the wire is the first PSN plus the
//! sequence number, modulo 2^24. Received PSNs become sequence numbers by their distance from the oldest
//! unacknowledged packet.

use ferroce_wire::Psn;

use crate::time::Time;

/// State of the sending half of a QP.
#[derive(Default)]
pub(crate) struct Requester {
    /// PSN of sequence number 0.
    base: Psn,
    /// Sequence number that the next WQE begins with.
    tail: u64,
    /// Sequence number of the next packet to send, or to send again.
    send: u64,
    /// The sequence number after the highest that was ever sent.
    sent: u64,
    /// The oldest sequence number that is not acknowledged.
    una: u64,
    /// Messages posted.
    ssn: u64,
    /// When the timer runs out, if it runs.
    deadline: Option<Time>,
}

impl Requester {
    /// Begins with a PSN (RTR to RTS).
    pub fn start(&mut self, psn: Psn) {
        *self = Requester {
            base: psn,
            ..Requester::default()
        };
    }

    /// Stops sending and all timers.
    pub fn stop(&mut self) {
        self.send = self.tail;
        self.sent = self.tail;
        self.una = self.tail;
        self.deadline = None;
    }

    /// First sequence number, number of packets and send sequence number of the next WQE.
    pub fn numbers(&self, packets: u32) -> (u64, u32, u64) {
        (self.tail, packets, self.ssn + 1)
    }

    /// A WQE of so many packets was posted.
    pub fn posted(&mut self, packets: u32) {
        self.tail += u64::from(packets);
        self.ssn += 1;
    }

    /// The PSN on the wire of a sequence number.
    pub fn psn(&self, seq: u64) -> Psn {
        self.base.add(seq as u32)
    }

    /// The PSN of the next new packet.
    pub fn next_psn(&self) -> Psn {
        self.psn(self.send)
    }

    /// Whether there are packets that were never sent, or are to be sent again.
    pub fn has_work(&self) -> bool {
        self.send < self.tail
    }

    /// When a timer runs out.
    pub fn deadline(&self) -> Option<Time> {
        self.deadline
    }

    /// Whether packets are sent and not acknowledged.
    pub fn outstanding(&self) -> bool {
        self.una < self.sent
    }
}
