//! The transports: what goes on the wire for each work request, and what each packet does.

pub(crate) mod requester;
pub(crate) mod responder;
pub(crate) mod ud;
pub(crate) mod window;

use ferroce_wire::RocePacket;

use crate::link::{RxPacket, Transmit};
use crate::qp::{Qp, Shared, Turn};

impl Qp {
    /// Takes a packet for this QP whose lengths, opcode and version are in order.
    pub fn receive(&mut self, shared: &mut Shared<'_>, _packet: &RxPacket<'_>, roce: &RocePacket<'_>) {
        if roce.opcode().transport() != self.class() {
            shared.counters.drop_opcode += 1;
        } else {
            shared.counters.drop_state += 1;
        }
    }

    /// Gives packets to the link, `quantum` at most.
    pub fn transmit(
        &mut self,
        _shared: &mut Shared<'_>,
        _link: &mut dyn Transmit,
        _quantum: &mut usize,
    ) -> Turn {
        Turn::Idle
    }

    /// The timer ran out.
    pub fn handle_timeout(&mut self, _shared: &mut Shared<'_>) {}
}
