//! State of the responder: the message being received, and the answer that is due.

use ferroce_wire::aeth::NO_CREDIT_LIMIT;
use ferroce_wire::{Psn, Syndrome, TransportClass};

use super::MAX_MESSAGE;
use super::payload::Cursor;
use super::resources::{Answer, Resource, Resources};
use crate::device::{PdId, SrqId};
use crate::link::{Path, Qpns};
use crate::queue::rq::ActiveRecv;

/// An ACKNOWLEDGE packet to be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Response {
    pub psn: Psn,
    pub syndrome: Syndrome,
    pub msn: u32,
}

/// A response that is not of the state of its QP, which may be gone, with where it goes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Parting {
    pub class: TransportClass,
    pub path: Path,
    pub qpns: Qpns,
    pub response: Response,
}

/// Which operation the packets of a message that is under way belong to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Message {
    Send,
    Write,
}

/// Where the rest of a WRITE goes.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Target {
    pub va: u64,
    pub rkey: u32,
    /// Bytes to come.
    pub left: u32,
    /// Bytes of the message.
    pub total: u32,
}

/// State of the receiving half of a QP.
pub(crate) struct Responder {
    /// PSN expected next.
    pub epsn: Psn,
    /// The newest PSN that an ACK may name. That of a READ or atomic would tell a peer whose answer was lost that it has
    /// it: rxe completes the request then.
    ack_psn: Psn,
    /// Messages completed, modulo 2^24.
    pub msn: u32,
    /// A NAK of the expected PSN was sent, and what lies behind it is dropped in silence.
    pub nak_sent: bool,
    /// The last PSN seen behind a gap.
    ahead: Psn,
    /// The message under way.
    pub message: Option<Message>,
    /// Where the WRITE under way goes.
    pub target: Target,
    /// READs and atomics, with what of their answers is due: that precedes `response`.
    pub resources: Resources,
    /// The domain of the memory that requests name: the QP's, or that of the XRC SRQ that they name too.
    pub pd: PdId,
    /// Where receives come from, if not from the QP's own queue; on an XRC target, what the newest request names.
    pub srq: Option<SrqId>,
    /// The receive WQE that a message is going into.
    pub active: ActiveRecv,
    /// Whether `active` is in use.
    pub receiving: bool,
    /// Bytes that `active` has room for.
    room: u64,
    /// Bytes received into `active`.
    pub received: u32,
    /// Where the next byte goes.
    pub cursor: Cursor,
    /// The peer has been heard of since RTR.
    pub established: bool,
    /// What is to be answered to the newest request: it says it all.
    response: Option<Syndrome>,
}

impl Responder {
    /// With room for a receive WQE of `max_sge` scatter entries.
    pub fn new(max_sge: u32, pd: PdId, srq: Option<SrqId>) -> Responder {
        Responder {
            epsn: Psn::new(0),
            ack_psn: Psn::new(0),
            msn: 0,
            nak_sent: false,
            ahead: Psn::new(0),
            message: None,
            target: Target::default(),
            resources: Resources::default(),
            pd,
            srq,
            active: ActiveRecv::new(max_sge as usize),
            receiving: false,
            room: 0,
            received: 0,
            cursor: Cursor::default(),
            established: false,
            response: None,
        }
    }

    /// Begins with a PSN (INIT to RTR).
    pub fn start(&mut self, psn: Psn) {
        self.resources.clear();
        self.epsn = psn;
        self.ack_psn = psn.sub(1);
        self.msn = 0;
        self.nak_sent = false;
        self.message = None;
        self.receiving = false;
        self.established = false;
        self.response = None;
    }

    /// Forgets everything.
    pub fn reset(&mut self) {
        self.start(Psn::new(0));
    }

    /// The PSN expected next.
    pub fn expected_psn(&self) -> Psn {
        self.epsn
    }

    /// A receive WQE was taken into `active`.
    pub fn begin_active(&mut self) {
        self.receiving = true;
        self.received = 0;
        self.cursor = Cursor::default();
        self.room = self.active.sges().iter().map(|sge| u64::from(sge.length)).sum();
    }

    /// Whether so many more bytes fit into the receive WQE, and into a message.
    pub fn fits(&self, len: usize) -> bool {
        u64::from(self.received) + len as u64 <= self.room.min(MAX_MESSAGE.into())
    }

    /// Ends the use of the receive WQE in progress; gives its cookie, if there was one.
    pub fn end_active(&mut self) -> Option<u64> {
        std::mem::take(&mut self.receiving).then_some(self.active.wr_id)
    }

    /// The request expected has been carried out, and took so many PSNs; `completes` a message; `answered`: by more than
    /// an ACK, and that acknowledges all before it too.
    pub fn accept(&mut self, packets: u32, completes: bool, answered: bool) {
        self.epsn = self.epsn.add(packets);
        if !answered {
            self.ack_psn = self.epsn.sub(1);
        }
        self.nak_sent = false;
        if completes {
            self.msn = (self.msn + 1) & 0xff_ffff;
        }
        // A NAK that has not left is out of date: the gap is smaller now, or closed.
        match self.response {
            Some(Syndrome::Nak(_)) if !self.ahead.is_before(self.epsn) => self.nak_sent = true,
            Some(Syndrome::Nak(_) | Syndrome::RnrNak { .. }) => {
                self.response = None;
                self.acknowledge();
            }
            _ => {}
        }
        if answered && matches!(self.response, Some(Syndrome::Ack { .. })) {
            self.response = None;
        }
    }

    /// The newest request is to be acknowledged, and all before it with that. A NAK that is due says the same.
    pub fn acknowledge(&mut self) {
        self.response.get_or_insert(Syndrome::Ack {
            credit: NO_CREDIT_LIMIT,
        });
    }

    /// Keeps the answer of the request expected; its message is the next to complete.
    pub fn keep(&mut self, packets: u32, answer: Answer) {
        let msn = (self.msn + 1) & 0xff_ffff;
        self.resources
            .push(Resource::new(self.epsn, packets, msn, self.pd, answer));
    }

    /// The expected request is refused; that acknowledges all before it too.
    pub fn refuse(&mut self, syndrome: Syndrome) {
        self.nak_sent = true;
        self.response = Some(syndrome);
    }

    /// A request behind a gap, whether or not it was NAKed.
    pub fn note_ahead(&mut self, psn: Psn) {
        if !self.nak_sent || psn.is_after(self.ahead) {
            self.ahead = psn;
        }
    }

    /// Whether an answer is due.
    pub fn has_response(&self) -> bool {
        self.response.is_some() || self.resources.any_due()
    }

    /// Whether all that is due is an acknowledgement: a little later will do as well.
    pub fn owes_only_ack(&self) -> bool {
        matches!(self.response, Some(Syndrome::Ack { .. })) && !self.resources.any_due()
    }

    /// The answer that is due.
    pub fn response(&self) -> Option<Response> {
        let syndrome = self.response?;
        let psn = match syndrome {
            Syndrome::Ack { .. } => self.ack_psn,
            _ => self.epsn,
        };
        Some(Response {
            psn,
            syndrome,
            msn: self.msn,
        })
    }

    /// READs that are not wholly answered will not be: then an acknowledgement of what follows them would be wrong.
    pub fn forsake(&mut self) {
        if self.resources.any_due() {
            self.response = None;
        }
        self.resources.clear();
    }

    /// The answer has been sent, or is not wanted any more.
    pub fn clear_response(&mut self) {
        self.response = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_ends_where_the_receive_or_the_standard_ends_it() {
        let mut responder = Responder::new(1, PdId::NONE, None);
        responder.room = 100;
        responder.received = 90;
        assert!(responder.fits(10) && !responder.fits(11));
        responder.room = u64::MAX;
        responder.received = MAX_MESSAGE - 10;
        assert!(responder.fits(10) && !responder.fits(11));
    }
}
