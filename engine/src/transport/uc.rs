//! Unreliable connection: messages in order, or not at all.

use ferroce_wire::RocePacket;

use super::respond::{Position, Refusal};
use super::responder::Message;
use crate::qp::{Qp, Shared};
use crate::verbs::{Wc, WcStatus};

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
        if let Err(status) = self.execute_unreliable(shared, roce, position) {
            self.responder.message = None;
            if let Some(status) = status {
                self.fail_recv(shared, status);
                self.enter_error(shared);
            }
        }
    }

    /// Carries out a packet. On failure the message is dropped, and its receive serves the next one; with a status
    /// the receive itself has failed.
    fn execute_unreliable(
        &mut self,
        shared: &mut Shared<'_>,
        roce: &RocePacket<'_>,
        position: Position,
    ) -> Result<(), Option<WcStatus>> {
        let opcode = roce.opcode();
        let of_message = position.first || self.responder.message == Some(Message::Send);
        if !opcode.is_send() || !of_message || !position.allows(roce.payload().len(), self.mtu) {
            shared.counters.drop_sequence += 1;
            return Err(None);
        }
        self.place(shared, position.first, roce.payload())
            .map_err(|refusal| match refusal {
                Refusal::NoReceive | Refusal::TooLong => {
                    shared.counters.drop_no_receive += 1;
                    None
                }
                Refusal::Fault => Some(WcStatus::LocProtErr),
            })?;
        self.responder.message = (!position.last).then_some(Message::Send);
        if position.last {
            self.complete_recv(shared, roce, Wc::default());
        }
        Ok(())
    }
}
