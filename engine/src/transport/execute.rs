//! The responder of RC: carries out requests in PSN order, each once.

use std::sync::atomic::{Ordering, fence};

use ferroce_wire::{Kind, NakCode, RocePacket, Syndrome};

use super::MAX_MESSAGE;
use super::receive::{Position, Refusal};
use super::resources::{Answer, Resource};
use super::responder::Response;
use crate::device::SrqId;
use crate::memory::AtomicOp;
use crate::qp::{Qp, Shared};
use crate::verbs::{Access, AsyncEvent, Placement, QpState, Selectivity, WcStatus};

/// What a request that was carried out stands for.
struct Done {
    /// PSNs that it takes.
    packets: u32,
    /// It ends a message.
    completes: bool,
    /// It is answered by more than an acknowledgement.
    answered: bool,
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
            _ => self.repeat(shared, roce),
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

    /// Takes a request that was carried out before: SENDs and WRITEs are only acknowledged, READs are done again, the
    /// others give the result that they had.
    fn repeat(&mut self, shared: &mut Shared<'_>, roce: &RocePacket<'_>) {
        shared.counters.duplicates += 1;
        let psn = roce.bth().psn;
        match roce.opcode().kind() {
            kind @ (Kind::ReadRequest
            | Kind::CompareSwap
            | Kind::FetchAdd
            | Kind::AtomicWrite
            | Kind::Flush) => {
                let part = roce.reth().filter(|_| kind == Kind::ReadRequest);
                let known = self.responder.resources.find(psn);
                if !known.is_some_and(|resource| resource.again(psn, part, self.mtu)) {
                    shared.counters.drop_psn += 1;
                }
            }
            _ => self.responder.acknowledge(),
        }
    }

    /// Carries out the request that was expected.
    fn execute(&mut self, shared: &mut Shared<'_>, roce: &RocePacket<'_>) {
        match self.execute_request(shared, roce) {
            Ok(done) => {
                self.responder.accept(done.packets, done.completes, done.answered);
                if !done.answered && roce.bth().ack_request {
                    self.responder.acknowledge();
                }
            }
            Err(refusal) => self.refuse(shared, refusal),
        }
    }

    /// Carries out the request that was expected, if nothing speaks against it.
    fn execute_request(&mut self, shared: &mut Shared<'_>, roce: &RocePacket<'_>) -> Result<Done, Refusal> {
        if let Some(xrceth) = roce.xrceth() {
            self.choose_srq(shared, SrqId(xrceth.srqn))?;
        }
        match roce.opcode().kind() {
            Kind::ReadRequest => self.execute_read(shared, roce),
            Kind::CompareSwap | Kind::FetchAdd => self.execute_atomic(shared, roce),
            Kind::AtomicWrite => self.execute_atomic_write(shared, roce),
            Kind::Flush => self.execute_flush(shared, roce),
            _ => self.carry_out(shared, roce).map(|()| Done {
                packets: 1,
                completes: Position::of(roce.opcode()).last,
                answered: false,
            }),
        }
    }

    /// An XRC request names a shared receive queue: its receives are taken, and its domain's memory is reached. All
    /// packets of a message name the same.
    fn choose_srq(&mut self, shared: &Shared<'_>, id: SrqId) -> Result<(), Refusal> {
        let srq = shared.srqs.get(&id).ok_or(Refusal::Invalid)?;
        let domain = srq.xrc.as_ref().map(|xrc| xrc.domain);
        let responder = &mut self.responder;
        if domain != self.domain || responder.message.is_some() && responder.srq != Some(id) {
            return Err(Refusal::Invalid);
        }
        (responder.srq, responder.pd) = (Some(id), srq.pd);
        Ok(())
    }

    /// A READ: it is answered when responses are sent.
    fn execute_read(&mut self, shared: &mut Shared<'_>, roce: &RocePacket<'_>) -> Result<Done, Refusal> {
        let reth = roce.reth().ok_or(Refusal::Invalid)?;
        self.admit(roce, 0, Access::REMOTE_READ)?;
        fits(self.responder.resources.has_room())?;
        fits(reth.dma_len <= MAX_MESSAGE)?;
        if reth.dma_len > 0 {
            let len = u64::from(reth.dma_len);
            shared
                .keys
                .remote(self.scope(), reth.rkey, reth.va, len, Access::REMOTE_READ)
                .map_err(|_| Refusal::Access)?;
        }
        let packets = reth.dma_len.div_ceil(self.mtu).max(1);
        Ok(self.keep(packets, Answer::Memory(reth)))
    }

    /// An atomic: done at once; the old value is kept for the answer.
    fn execute_atomic(&mut self, shared: &mut Shared<'_>, roce: &RocePacket<'_>) -> Result<Done, Refusal> {
        let atomic = roce.atomic_eth().ok_or(Refusal::Invalid)?;
        self.admit(roce, 0, Access::REMOTE_ATOMIC)?;
        fits(self.responder.resources.has_room())?;
        let addr = self.word(shared, atomic.rkey, atomic.va, Access::REMOTE_ATOMIC)?;
        let op = if roce.opcode().kind() == Kind::CompareSwap {
            AtomicOp::CompareSwap {
                compare: atomic.compare,
                swap: atomic.swap_add,
            }
        } else {
            AtomicOp::FetchAdd { add: atomic.swap_add }
        };
        let original = shared.memory.atomic(addr, op).map_err(|_| Refusal::TargetFault)?;
        Ok(self.keep(1, Answer::Original(original)))
    }

    /// An ATOMIC WRITE: done at once, and once. It needs the right to WRITE, as Linux has it.
    fn execute_atomic_write(
        &mut self,
        shared: &mut Shared<'_>,
        roce: &RocePacket<'_>,
    ) -> Result<Done, Refusal> {
        let reth = roce.reth().ok_or(Refusal::Invalid)?;
        let bytes = *roce.payload().first_chunk().ok_or(Refusal::Invalid)?;
        self.admit(roce, size_of::<u64>(), Access::REMOTE_WRITE)?;
        fits(reth.dma_len == 8 && self.responder.resources.has_room())?;
        let addr = self.word(shared, reth.rkey, reth.va, Access::REMOTE_WRITE)?;
        let value = u64::from_ne_bytes(bytes);
        let stored = shared.memory.atomic(addr, AtomicOp::Store { value });
        stored.map_err(|_| Refusal::TargetFault)?;
        Ok(self.keep(1, Answer::Stored))
    }

    /// A FLUSH: the requests before it are carried out, by this CPU. That everybody sees it is for a fence to see to.
    fn execute_flush(&mut self, shared: &mut Shared<'_>, roce: &RocePacket<'_>) -> Result<Done, Refusal> {
        let (feth, reth) = roce.feth().zip(roce.reth()).ok_or(Refusal::Invalid)?;
        let placement = Placement::from_bits(feth.placement).ok_or(Refusal::Invalid)?;
        let selectivity = Selectivity::from_number(feth.selectivity.into()).ok_or(Refusal::Invalid)?;
        let rights = placement.rights();
        self.admit(roce, 0, rights)?;
        needs(!placement.is_empty())?;
        fits(self.responder.resources.has_room_to_flush())?;
        let (keys, scope) = (&*shared.keys, self.scope());
        let granted = match selectivity {
            Selectivity::Range => {
                let len = u64::from(reth.dma_len);
                keys.remote(scope, reth.rkey, reth.va, len, rights).map(drop)
            }
            Selectivity::Region => keys.remote_region(scope, reth.rkey, rights),
        };
        granted.map_err(|_| Refusal::Access)?;
        fence(Ordering::SeqCst);
        Ok(self.keep(1, Answer::Flushed))
    }

    /// Whether a request of one packet may come now, with so much payload, on a QP that gives such rights.
    fn admit(&self, roce: &RocePacket<'_>, payload: usize, rights: Access) -> Result<(), Refusal> {
        let between_messages = self.responder.message.is_none();
        needs(between_messages && roce.payload().len() == payload && self.attr.access.contains(rights))
    }

    /// The address of an aligned word that a peer names.
    fn word(&self, shared: &Shared<'_>, rkey: u32, va: u64, right: Access) -> Result<u64, Refusal> {
        fits(va.is_multiple_of(8))?;
        let addr = shared.keys.remote(self.scope(), rkey, va, 8, right);
        let addr = addr.map_err(|_| Refusal::Access)?;
        fits(addr.is_multiple_of(8))?;
        Ok(addr)
    }

    /// Keeps the answer of the request expected, which takes so many PSNs.
    fn keep(&mut self, packets: u32, answer: Answer) -> Done {
        self.responder.keep(packets, answer);
        Done {
            packets,
            completes: true,
            answered: true,
        }
    }

    /// The request expected is not carried out: RNR NAK, or NAK and ERR.
    pub(super) fn refuse(&mut self, shared: &mut Shared<'_>, refusal: Refusal) {
        let code = match refusal {
            Refusal::NoReceive => {
                shared.counters.tx_rnr_nak += 1;
                self.responder.refuse(Syndrome::RnrNak {
                    timer: self.attr.min_rnr_timer,
                });
                return;
            }
            Refusal::TooLong => {
                self.fail_recv(shared, WcStatus::LocLenErr);
                NakCode::InvalidRequest
            }
            Refusal::ReceiveFault => {
                self.fail_recv(shared, WcStatus::LocProtErr);
                NakCode::RemoteOperational
            }
            Refusal::Invalid => {
                shared.events.push_back(AsyncEvent::QpRequestError(self.qpn));
                NakCode::InvalidRequest
            }
            Refusal::Excessive => {
                shared.events.push_back(AsyncEvent::QpAccessError(self.qpn));
                NakCode::InvalidRequest
            }
            Refusal::Access => {
                shared.events.push_back(AsyncEvent::QpAccessError(self.qpn));
                NakCode::RemoteAccess
            }
            Refusal::Invalidation => {
                self.fail_recv(shared, WcStatus::RemInvReqErr);
                NakCode::RemoteAccess
            }
            Refusal::TargetFault => {
                self.fail(shared);
                NakCode::RemoteOperational
            }
        };
        shared.counters.tx_nak_error += 1;
        self.responder.refuse(Syndrome::Nak(code));
        self.enter_error(shared);
    }

    /// The answer to this READ can't be read: NAK of that packet, and ERR. If it was answered before, the peer may long
    /// have the answer, and this be a late copy of its request: the NAK will tell it, if it still waits.
    pub(super) fn refuse_resource(&mut self, shared: &mut Shared<'_>, resource: &Resource, refusal: Refusal) {
        if let (true, Some(path)) = (resource.was_answered(), self.attr.path) {
            let code = match refusal {
                Refusal::Access => NakCode::RemoteAccess,
                _ => NakCode::RemoteOperational,
            };
            let response = Response {
                psn: resource.psn.add(resource.next),
                syndrome: Syndrome::Nak(code),
                msn: resource.msn,
            };
            shared.partings.push(self.parting_of(response, path));
            shared.counters.tx_nak_error += 1;
            if let Some(resource) = self.responder.resources.due() {
                resource.stop();
            }
            return;
        }
        self.responder.epsn = resource.psn.add(resource.next);
        self.responder.resources.clear();
        self.refuse(shared, refusal);
    }
}

/// Without this a request asks for too much, or for it in the wrong place.
fn fits(condition: bool) -> Result<(), Refusal> {
    if condition {
        Ok(())
    } else {
        Err(Refusal::Excessive)
    }
}

/// Without this a request is invalid.
fn needs(condition: bool) -> Result<(), Refusal> {
    if condition { Ok(()) } else { Err(Refusal::Invalid) }
}
