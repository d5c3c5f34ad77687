//! The responder of RC at work: carries out requests in PSN order, and answers them.

use ferroce_wire::{Aeth, Bth, Kind, NakCode, Opcode, RocePacket, Syndrome};

use super::payload::Domain;
use super::responder::{Message, Parting, Response};
use crate::link::{Path, Transmit, TransmitError};
use crate::qp::{Qp, Shared, Turn};
use crate::verbs::{AsyncEvent, QpState, Wc, WcFlags, WcOpcode, WcStatus};

/// Where a packet stands in its message.
#[derive(Clone, Copy)]
pub(super) struct Position {
    pub first: bool,
    pub last: bool,
}

impl Position {
    /// Of a SEND or WRITE packet.
    pub fn of(opcode: Opcode) -> Position {
        Position {
            first: opcode.is_first() || opcode.is_only(),
            last: opcode.is_last() || opcode.is_only(),
        }
    }

    /// Whether the length is right: FIRST and MIDDLE are full, LAST has at least a byte.
    pub fn allows(self, len: usize, mtu: u32) -> bool {
        let mtu = mtu as usize;
        match (self.first, self.last) {
            (_, false) => len == mtu,
            (true, true) => len <= mtu,
            (false, true) => 0 < len && len <= mtu,
        }
    }
}

/// Why a receive did not take a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// No receive is posted.
    NoReceive,
    /// The message is longer than the receive.
    TooLong,
    /// The memory of the receive can't be written.
    Fault,
}

impl Qp {
    /// Takes a request packet of RC.
    pub fn receive_request(&mut self, shared: &mut Shared<'_>, roce: &RocePacket<'_>) {
        self.note_established(shared);
        let psn = roce.bth().psn;
        match psn.distance(self.responder.epsn) {
            0 => self.execute(shared, roce),
            1.. => {
                self.responder.note_ahead(psn);
                if self.responder.nak_sent {
                    shared.counters.drop_psn += 1;
                } else {
                    shared.counters.tx_nak_sequence += 1;
                    self.responder.refuse(Syndrome::Nak(NakCode::PsnSequence));
                }
            }
            _ => {
                shared.counters.duplicates += 1;
                self.responder.acknowledge();
            }
        }
    }

    /// Tells once that the peer was heard of before RTS.
    pub fn note_established(&mut self, shared: &mut Shared<'_>) {
        if !self.responder.established {
            self.responder.established = true;
            if self.state == QpState::Rtr {
                shared.events.push_back(AsyncEvent::CommEstablished(self.qpn));
            }
        }
    }

    /// Carries out the request that was expected.
    fn execute(&mut self, shared: &mut Shared<'_>, roce: &RocePacket<'_>) {
        let opcode = roce.opcode();
        if opcode.is_send() && !matches!(opcode.kind(), Kind::SendLastInv | Kind::SendOnlyInv) {
            self.execute_send(shared, roce);
        } else {
            self.refuse(shared, NakCode::InvalidRequest);
        }
    }

    /// A packet of a SEND, in order.
    fn execute_send(&mut self, shared: &mut Shared<'_>, roce: &RocePacket<'_>) {
        let position = Position::of(roce.opcode());
        let in_sequence = self.responder.message == (!position.first).then_some(Message::Send);
        if !in_sequence || !position.allows(roce.payload().len(), self.mtu) {
            self.refuse(shared, NakCode::InvalidRequest);
            return;
        }
        match self.place(shared, position.first, roce.payload()) {
            Ok(()) => {}
            Err(Refusal::NoReceive) => {
                shared.counters.tx_rnr_nak += 1;
                self.responder.refuse(Syndrome::RnrNak {
                    timer: self.attr.min_rnr_timer,
                });
                return;
            }
            Err(Refusal::TooLong) => {
                self.fail_recv(shared, WcStatus::LocLenErr);
                self.refuse(shared, NakCode::InvalidRequest);
                return;
            }
            Err(Refusal::Fault) => {
                self.fail_recv(shared, WcStatus::LocProtErr);
                self.refuse(shared, NakCode::RemoteOperational);
                return;
            }
        }
        self.responder.message = (!position.last).then_some(Message::Send);
        self.responder.accept(position.last);
        if roce.bth().ack_request {
            self.responder.acknowledge();
        }
        if position.last {
            self.complete_recv(shared, roce, Wc::default());
        }
    }

    /// Puts a packet's payload into the receive in progress; `first`: into a new one.
    pub(super) fn place(&mut self, shared: &mut Shared<'_>, first: bool, data: &[u8]) -> Result<(), Refusal> {
        if first && !self.take_recv(shared) {
            return Err(Refusal::NoReceive);
        }
        if !self.responder.fits(data.len()) {
            return Err(Refusal::TooLong);
        }
        let domain = Domain {
            pd: self.recv_pd(shared),
            keys: shared.keys,
            memory: shared.memory,
        };
        let responder = &mut self.responder;
        domain
            .scatter(responder.active.sges(), &mut responder.cursor, data)
            .map_err(|_| Refusal::Fault)?;
        responder.received += data.len() as u32;
        Ok(())
    }

    /// The PD that the scatter lists of receives belong to: an SRQ has its own.
    fn recv_pd(&self, shared: &Shared<'_>) -> crate::device::PdId {
        self.init
            .srq
            .and_then(|id| shared.srqs.get(&id))
            .map_or(self.init.pd, |srq| srq.pd)
    }

    /// Takes the next receive WQE; false if there is none. One that a dropped message (UC, UD) had is used again.
    fn take_recv(&mut self, shared: &mut Shared<'_>) -> bool {
        if self.responder.receiving {
            self.responder.begin_active();
            return true;
        }
        let active = &mut self.responder.active;
        let taken = match self.init.srq {
            None => self.rq.take(active),
            Some(id) => match shared.srqs.get_mut(&id).and_then(|srq| srq.take(active)) {
                None => false,
                Some(taken) => {
                    if taken.limit_reached {
                        shared.events.push_back(AsyncEvent::SrqLimit(id.0));
                    }
                    true
                }
            },
        };
        if taken {
            self.responder.begin_active();
        }
        taken
    }

    /// Completes the receive in progress with what its last packet says; `wc` holds what is special to it.
    pub(super) fn complete_recv(&mut self, shared: &mut Shared<'_>, roce: &RocePacket<'_>, wc: Wc) {
        let byte_len = self.responder.received;
        let Some(wr_id) = self.release_active(shared) else {
            return;
        };
        let mut wc = Wc {
            wr_id,
            opcode: WcOpcode::Recv,
            byte_len: wc.byte_len + byte_len,
            ..wc
        };
        if let Some(immdt) = roce.immdt() {
            wc.imm = u32::from_ne_bytes(immdt.data);
            wc.flags |= WcFlags::WITH_IMM;
        }
        self.push_recv(shared, wc, roce.bth().solicited);
    }

    /// Completes the receive in progress with an error.
    pub(super) fn fail_recv(&mut self, shared: &mut Shared<'_>, status: WcStatus) {
        if let Some(wr_id) = self.release_active(shared) {
            self.push_recv(
                shared,
                Wc {
                    wr_id,
                    status,
                    opcode: WcOpcode::Recv,
                    ..Wc::default()
                },
                false,
            );
        }
    }

    /// Refuses the request expected for good: NAK, and ERR.
    fn refuse(&mut self, shared: &mut Shared<'_>, code: NakCode) {
        shared.counters.tx_nak_error += 1;
        self.responder.refuse(Syndrome::Nak(code));
        self.enter_error(shared);
    }

    /// Leaves the answer that is due to the device: this QP ends. A peer that waits for it would else run into its
    /// timeouts for work that was done.
    pub fn part(&mut self, shared: &mut Shared<'_>) {
        if let (Some(response), Some(path)) = (self.responder.response(), self.attr.path) {
            shared.partings.push(self.parting_of(response, path));
            self.responder.clear_response();
        }
    }

    fn parting_of(&self, response: Response, path: Path) -> Parting {
        Parting {
            path,
            dest_qpn: self.attr.dest_qpn,
            response,
        }
    }

    /// Gives responses to the link, `quantum` at most.
    pub fn transmit_responses(
        &mut self,
        shared: &mut Shared<'_>,
        link: &mut dyn Transmit,
        quantum: &mut usize,
    ) -> Turn {
        let (Some(response), Some(path)) = (self.responder.response(), self.attr.path) else {
            return Turn::Idle;
        };
        if *quantum == 0 {
            return Turn::More;
        }
        match self.parting_of(response, path).transmit(link) {
            Err(TransmitError::Full) => return Turn::Full,
            Err(TransmitError::Fault(_)) | Ok(()) => {}
        }
        shared.counters.tx_packets += 1;
        *quantum -= 1;
        self.responder.clear_response();
        Turn::Idle
    }
}

impl Parting {
    /// Gives the packet to the link.
    pub fn transmit(&self, link: &mut dyn Transmit) -> Result<(), TransmitError> {
        let opcode = Opcode::RcAcknowledge;
        let Response { psn, syndrome, msn } = self.response;
        link.packet(&self.path, self.dest_qpn, opcode.header_len(), &mut |out| {
            Bth::new(opcode, self.dest_qpn, psn).emit(out);
            if let Some(rest) = out.get_mut(Bth::LEN..) {
                Aeth { syndrome, msn }.emit(rest);
            }
            Ok(())
        })
    }
}
