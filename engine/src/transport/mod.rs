//! The transports: what goes on the wire for each work request, and what each packet does.

mod ack;
pub(crate) mod budget;
mod execute;
mod payload;
mod receive;
mod request;
pub(crate) mod requester;
mod resources;
mod respond;
pub(crate) mod responder;
mod send;
mod timer;
mod uc;
pub(crate) mod ud;
pub(crate) mod window;

#[cfg(test)]
pub(crate) mod tests;

use ferroce_wire::RocePacket;

use crate::link::{RxPacket, Transmit};
use crate::qp::{Qp, Shared, Turn};
use crate::verbs::{QpState, QpType};

/// Bytes of the longest message of a connected transport (IBTA 9.7.7).
pub(crate) const MAX_MESSAGE: u32 = 1 << 31;

/// The partition of all QPs, without the membership bit.
const PARTITION: u16 = 0x7fff;

impl Qp {
    /// Takes a packet for this QP whose lengths, opcode and version are in order.
    pub fn receive(&mut self, shared: &mut Shared<'_>, packet: &RxPacket<'_>, roce: &RocePacket<'_>) {
        if !self.admits(shared, packet, roce) {
            return;
        }
        if !packet.icrc.valid(packet) {
            shared.counters.drop_icrc += 1;
            return;
        }
        if roce.opcode().is_response() {
            self.receive_response(shared, roce);
        } else {
            match self.init.qp_type {
                QpType::Rc | QpType::XrcRecv => self.receive_request(shared, roce),
                QpType::Uc => self.receive_unreliable(shared, roce),
                QpType::Ud => self.receive_datagram(shared, packet, roce),
                QpType::XrcSend => shared.counters.drop_opcode += 1,
            }
        }
    }

    /// The cheap checks: does this QP take such a packet, in this state, from this sender?
    fn admits(&self, shared: &mut Shared<'_>, packet: &RxPacket<'_>, roce: &RocePacket<'_>) -> bool {
        let counters = &mut *shared.counters;
        let opcode = roce.opcode();
        // The halves of an XRC connection go one way each.
        let other_half = match self.init.qp_type {
            QpType::XrcSend => opcode.is_request(),
            QpType::XrcRecv => opcode.is_response(),
            _ => false,
        };
        let (ok, counter) = if opcode.transport() != self.class() || other_half {
            (false, &mut counters.drop_opcode)
        } else if !self.receives()
            || opcode.is_response() && !matches!(self.state, QpState::Rts | QpState::Sqd)
        {
            (false, &mut counters.drop_state)
        } else if roce.bth().pkey & 0x7fff != PARTITION {
            (false, &mut counters.drop_pkey)
        } else if self.init.qp_type == QpType::Ud {
            let ours = roce.deth().is_some_and(|deth| deth.qkey == self.attr.qkey);
            (ours, &mut counters.drop_qkey)
        } else if let Some(path) = self.attr.path {
            // By the GIDs, as on hardware: RoCE v1 and v2 of an address have the same one, and a packet may come by either.
            let ours = packet.source == path.dest && packet.dest == path.source;
            (ours, &mut counters.drop_source)
        } else {
            (false, &mut counters.drop_state)
        };
        *counter += u64::from(!ok);
        ok
    }

    /// Gives packets to the link, `quantum` at most: responses first.
    ///
    /// An acknowledgement that nothing else waits for goes last: behind requests it is the short end of one train.
    pub fn transmit(
        &mut self,
        shared: &mut Shared<'_>,
        link: &mut dyn Transmit,
        quantum: &mut usize,
    ) -> Turn {
        if self.responder.owes_only_ack() {
            let turn = self.transmit_requests(shared, link, quantum);
            if matches!(turn, Turn::Full | Turn::Busy) {
                return turn;
            }
            match self.transmit_responses(shared, link, &mut 1) {
                Turn::Idle => turn,
                busy => busy,
            }
        } else {
            match self.transmit_responses(shared, link, quantum) {
                Turn::Idle => self.transmit_requests(shared, link, quantum),
                busy => busy,
            }
        }
    }
}
