//! SEND and WRITE packets at the responder, whatever the transport: where their payload goes, and what completes.

use ferroce_wire::{Opcode, RocePacket};

use super::MAX_MESSAGE;
use super::payload::Domain;
use super::responder::{Message, Target};
use crate::device::PdId;
use crate::qp::{Qp, Shared};
use crate::verbs::{Access, AsyncEvent, VendorError, Wc, WcFlags, WcOpcode, WcStatus};

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
    fn allows(self, len: usize, mtu: u32) -> bool {
        let mtu = mtu as usize;
        match (self.first, self.last) {
            (_, false) => len == mtu,
            (true, true) => len <= mtu,
            (false, true) => 0 < len && len <= mtu,
        }
    }
}

/// Why a request was not carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// No receive is posted.
    NoReceive,
    /// The message is longer than the receive.
    TooLong,
    /// The memory of the receive can't be written.
    ReceiveFault,
    /// The request is malformed, out of sequence, or of a kind that is not taken.
    Invalid,
    /// The request is in order, but not what it asks for: its length, its alignment, or one more than is agreed.
    Excessive,
    /// The memory it names does not exist, or not with such rights.
    Access,
    /// The memory it names is registered, but not there.
    TargetFault,
    /// The key that it wants invalidated can't be.
    Invalidation,
}

impl Qp {
    /// Carries out a packet of a SEND or WRITE that is next in order. Nothing has changed if it is refused for want of
    /// a receive.
    pub(super) fn carry_out(
        &mut self,
        shared: &mut Shared<'_>,
        roce: &RocePacket<'_>,
    ) -> Result<(), Refusal> {
        let opcode = roce.opcode();
        let position = Position::of(opcode);
        let kind = if opcode.is_send() {
            Message::Send
        } else if opcode.is_write() {
            Message::Write
        } else {
            return Err(Refusal::Invalid);
        };
        let in_sequence = self.responder.message == (!position.first).then_some(kind);
        if !in_sequence || !position.allows(roce.payload().len(), self.mtu) {
            return Err(Refusal::Invalid);
        }
        match kind {
            Message::Send => {
                self.place(shared, position.first, roce.payload())?;
                if let Some(ieth) = roce.ieth() {
                    let invalidated = shared.keys.invalidate(self.scope(), ieth.rkey);
                    invalidated.map_err(|_| Refusal::Invalidation)?;
                }
            }
            Message::Write => self.write(shared, roce, position)?,
        }
        self.responder.message = (!position.last).then_some(kind);
        if position.last && (kind == Message::Send || opcode.has_immdt()) {
            let wc = match kind {
                Message::Send => Wc {
                    opcode: WcOpcode::Recv,
                    ..Wc::default()
                },
                Message::Write => Wc {
                    opcode: WcOpcode::RecvRdmaWithImm,
                    byte_len: self.responder.target.total,
                    ..Wc::default()
                },
            };
            self.complete_recv(shared, roce, wc);
        }
        Ok(())
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
            keys: &*shared.keys,
            memory: shared.memory,
        };
        let responder = &mut self.responder;
        domain
            .scatter(responder.active.sges(), &mut responder.cursor, data)
            .map_err(|_| Refusal::ReceiveFault)?;
        responder.received += data.len() as u32;
        Ok(())
    }

    /// Puts a packet's payload where the WRITE wants it. With immediate data the last one takes a receive.
    fn write(
        &mut self,
        shared: &mut Shared<'_>,
        roce: &RocePacket<'_>,
        position: Position,
    ) -> Result<(), Refusal> {
        let len = roce.payload().len() as u32;
        let mut target = self.responder.target;
        if let Some(reth) = roce.reth() {
            if !self.attr.access.contains(Access::REMOTE_WRITE) {
                return Err(Refusal::Invalid);
            }
            if reth.dma_len > MAX_MESSAGE {
                return Err(Refusal::Excessive);
            }
            target = Target {
                va: reth.va,
                rkey: reth.rkey,
                left: reth.dma_len,
                total: reth.dma_len,
            };
        }
        if if position.last {
            len != target.left
        } else {
            len >= target.left
        } {
            return Err(Refusal::Excessive);
        }
        // The whole of it at the first packet, and what is left at each: a region may end in the meantime.
        let addr = if target.left == 0 {
            0
        } else {
            let left = u64::from(target.left);
            shared
                .keys
                .remote(self.scope(), target.rkey, target.va, left, Access::REMOTE_WRITE)
                .map_err(|_| Refusal::Access)?
        };
        if position.last && roce.opcode().has_immdt() && !self.take_recv(shared) {
            return Err(Refusal::NoReceive);
        }
        if len > 0 {
            shared
                .memory
                .write(addr, roce.payload())
                .map_err(|_| Refusal::TargetFault)?;
        }
        target.va = target.va.wrapping_add(u64::from(len));
        target.left -= len;
        self.responder.target = target;
        Ok(())
    }

    /// The PD that the scatter lists of receives belong to: an SRQ has its own.
    fn recv_pd(&self, shared: &Shared<'_>) -> PdId {
        let srq = self.responder.srq.and_then(|id| shared.srqs.get(&id));
        srq.map_or(self.pd, |srq| srq.pd)
    }

    /// Takes the next receive WQE; false if there is none. One that a dropped message (UC, UD) had is used again.
    fn take_recv(&mut self, shared: &mut Shared<'_>) -> bool {
        if self.responder.receiving {
            self.responder.begin_active();
            return true;
        }
        let active = &mut self.responder.active;
        let taken = match self.responder.srq {
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
        let received = self.responder.received;
        let Some(wr_id) = self.release_active(shared) else {
            return;
        };
        let mut wc = Wc {
            wr_id,
            byte_len: wc.byte_len + received,
            ..wc
        };
        if let Some(immdt) = roce.immdt() {
            wc.imm = u32::from_ne_bytes(immdt.data);
            wc.flags |= WcFlags::WITH_IMM;
        }
        if let Some(ieth) = roce.ieth() {
            wc.imm = ieth.rkey;
            wc.flags |= WcFlags::WITH_INV;
        }
        self.push_recv(shared, wc, roce.bth().solicited);
    }

    /// Completes the receive in progress with an error: it is too short (`LocLenErr`), or its memory can't be written.
    pub(super) fn fail_recv(&mut self, shared: &mut Shared<'_>, status: WcStatus) {
        let reason = match status {
            WcStatus::LocLenErr => VendorError::ReceiveTooShort,
            _ => VendorError::LocalMemory,
        };
        if let Some(wr_id) = self.release_active(shared) {
            self.push_recv(
                shared,
                Wc {
                    wr_id,
                    status,
                    vendor_err: reason.number(),
                    opcode: WcOpcode::Recv,
                    ..Wc::default()
                },
                false,
            );
        }
    }
}
