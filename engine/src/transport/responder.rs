//! The responder: carries out the peer's requests in PSN order, and answers them.

use ferroce_wire::Psn;

use crate::queue::rq::ActiveRecv;

/// State of the receiving half of a QP.
pub(crate) struct Responder {
    /// PSN expected next.
    epsn: Psn,
    /// The receive WQE that a message is going into.
    active: ActiveRecv,
    /// Whether `active` is in use.
    receiving: bool,
}

impl Responder {
    /// With room for a receive WQE of `max_sge` scatter entries.
    pub fn new(max_sge: u32) -> Responder {
        Responder {
            epsn: Psn::new(0),
            active: ActiveRecv::new(max_sge as usize),
            receiving: false,
        }
    }

    /// Begins with a PSN (INIT to RTR).
    pub fn start(&mut self, psn: Psn) {
        self.epsn = psn;
        self.receiving = false;
    }

    /// Forgets everything.
    pub fn reset(&mut self) {
        self.start(Psn::new(0));
    }

    /// The PSN expected next.
    pub fn expected_psn(&self) -> Psn {
        self.epsn
    }

    /// Ends the use of the receive WQE in progress; gives its cookie, if there was one.
    pub fn end_active(&mut self) -> Option<u64> {
        std::mem::take(&mut self.receiving).then_some(self.active.wr_id)
    }
}
