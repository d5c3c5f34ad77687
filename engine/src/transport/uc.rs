//! Unreliable connection: messages in order, or not at all.

use ferroce_wire::RocePacket;

use super::receive::{Position, Refusal};
use crate::qp::{Qp, Shared};
use crate::verbs::WcStatus;

/// Packets that lie so far behind the expected one, at most, are old ones that the network repeated or delayed.
/// What lies farther behind is new: the peer went on while we did not listen.
const OLD: i32 = 1 << 16;

impl Qp {
    /// Takes a request packet of UC.
    pub fn receive_unreliable(&mut self, shared: &mut Shared<'_>, roce: &RocePacket<'_>) {
        self.note_established(shared);
        let psn = roce.bth().psn;
        let distance = psn.distance(self.responder.epsn);
        if (-OLD..0).contains(&distance) {
            shared.counters.duplicates += 1;
            return;
        }
        let position = Position::of(roce.opcode());
        let follows = distance == 0 && self.responder.message.is_some();
        self.responder.epsn = psn.next();
        if !position.first && !follows {
            // The beginning of the message is lost, and so is the message.
            self.responder.message = None;
            shared.counters.drop_sequence += 1;
            return;
        }
        if position.first {
            self.responder.message = None;
        }
        let Err(refusal) = self.carry_out(shared, roce) else {
            return;
        };
        // The message is dropped, and its receive serves the next one, unless it has failed itself.
        self.responder.message = None;
        match refusal {
            Refusal::NoReceive => shared.counters.drop_no_receive += 1,
            Refusal::Invalid | Refusal::Excessive => shared.counters.drop_sequence += 1,
            Refusal::Access | Refusal::TargetFault | Refusal::Invalidation => {
                shared.counters.drop_access += 1
            }
            Refusal::TooLong => {
                self.fail_recv(shared, WcStatus::LocLenErr);
                self.enter_error(shared);
            }
            Refusal::ReceiveFault => {
                self.fail_recv(shared, WcStatus::LocProtErr);
                self.enter_error(shared);
            }
        }
    }
}
