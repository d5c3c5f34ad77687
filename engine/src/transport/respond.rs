//! What the responder of RC sends: answers of READs and atomics in their order, then the acknowledgement or NAK.

use ferroce_wire::aeth::NO_CREDIT_LIMIT;
use ferroce_wire::{Aeth, AtomicAckEth, Bth, Kind, Opcode, Reth, Syndrome, TransportClass};

use super::receive::Refusal;
use super::resources::{Answer, Resource};
use super::responder::{Parting, Response};
use crate::link::{Path, Qpns, Transmit, TransmitError};
use crate::memory::Fault;
use crate::qp::{Qp, Shared, Turn};
use crate::verbs::Access;

impl Qp {
    /// Gives responses to the link, `quantum` at most.
    pub fn transmit_responses(
        &mut self,
        shared: &mut Shared<'_>,
        link: &mut dyn Transmit,
        quantum: &mut usize,
    ) -> Turn {
        let Some(path) = self.attr.path else {
            return Turn::Idle;
        };
        while self.responder.has_response() {
            if *quantum == 0 {
                return Turn::More;
            }
            let taken = if let Some(resource) = self.responder.resources.due().copied() {
                let taken = match self.answer_addr(shared, &resource) {
                    Ok(addr) => self.transmit_answer(shared, link, &path, &resource, addr),
                    Err(refusal) => {
                        self.refuse_resource(shared, &resource, refusal);
                        continue;
                    }
                };
                if let Err(TransmitError::Fault(_)) = taken {
                    self.refuse_resource(shared, &resource, Refusal::TargetFault);
                    continue;
                }
                if let (Ok(()), Some(resource)) = (taken, self.responder.resources.due()) {
                    resource.advance();
                }
                taken
            } else if let Some(response) = self.responder.response() {
                let taken = self.parting_of(response, path).transmit(link);
                if taken.is_ok() {
                    self.responder.clear_response();
                }
                taken
            } else {
                return Turn::Idle;
            };
            match taken {
                Ok(()) => {}
                Err(TransmitError::Busy) => return Turn::Busy,
                Err(_) => return Turn::Full,
            }
            shared.counters.transport_tx += 1;
            *quantum -= 1;
        }
        Turn::Idle
    }

    /// Offset and bytes of the next packet of a READ response.
    fn answer_part(&self, resource: &Resource, reth: &Reth) -> (u32, u32) {
        let offset = resource.next * self.mtu;
        (offset, reth.dma_len.saturating_sub(offset).min(self.mtu))
    }

    /// Where the next packet of a READ response is read from: its region may have ended since it was asked for.
    fn answer_addr(&self, shared: &Shared<'_>, resource: &Resource) -> Result<u64, Refusal> {
        let Answer::Memory(reth) = resource.answer else {
            return Ok(0);
        };
        let (offset, len) = self.answer_part(resource, &reth);
        if len == 0 {
            return Ok(0);
        }
        let va = reth.va.wrapping_add(u64::from(offset));
        shared
            .keys
            .remote(
                self.scope_of(resource.pd),
                reth.rkey,
                va,
                u64::from(len),
                Access::REMOTE_READ,
            )
            .map_err(|_| Refusal::Access)
    }

    /// Gives the next packet of a READ response, or an atomic's, to the link.
    fn transmit_answer(
        &self,
        shared: &Shared<'_>,
        link: &mut dyn Transmit,
        path: &Path,
        resource: &Resource,
        addr: u64,
    ) -> Result<(), TransmitError> {
        let dest_qpn = self.attr.dest_qpn;
        let qpns = self.qpns();
        let psn = resource.psn.add(resource.next);
        let aeth = Aeth {
            syndrome: Syndrome::Ack {
                credit: NO_CREDIT_LIMIT,
            },
            msn: resource.msn,
        };
        let reth = match resource.answer {
            Answer::Memory(reth) => reth,
            Answer::Stored | Answer::Flushed => Reth::default(),
            Answer::Original(original) => {
                let opcode = self.opcode(Kind::AtomicAcknowledge);
                return link.packet(path, qpns, opcode.header_len(), &mut |out| {
                    Bth::new(opcode, dest_qpn, psn).emit(out);
                    aeth.emit(rest(out, Bth::LEN)?);
                    AtomicAckEth { original }.emit(rest(out, Bth::LEN + Aeth::LEN)?);
                    Ok(())
                });
            }
        };
        let opcode = self.opcode(match (resource.begins(), resource.ends()) {
            (true, true) => Kind::ReadResponseOnly,
            (true, false) => Kind::ReadResponseFirst,
            (false, false) => Kind::ReadResponseMiddle,
            (false, true) => Kind::ReadResponseLast,
        });
        let (_, len) = self.answer_part(resource, &reth);
        let padded = len.next_multiple_of(4);
        let bth = Bth {
            pad: (padded - len) as u8,
            ..Bth::new(opcode, dest_qpn, psn)
        };
        link.packet(path, qpns, opcode.header_len() + padded as usize, &mut |out| {
            bth.emit(out);
            if opcode.has_aeth() {
                aeth.emit(rest(out, Bth::LEN)?);
            }
            let body = rest(out, opcode.header_len())?;
            let (payload, pad) = body.split_at_mut_checked(len as usize).ok_or(TOO_SHORT)?;
            pad.fill(0);
            if payload.is_empty() {
                Ok(())
            } else {
                shared.memory.read(addr, payload)
            }
        })
    }

    /// Leaves the answer that is due to the device: this QP ends. A peer that waits for it would else run into its
    /// timeouts for work that was done.
    pub fn part(&mut self, shared: &mut Shared<'_>) {
        if let (Some(response), Some(path), false) = (
            self.responder.response(),
            self.attr.path,
            self.responder.resources.any_due(),
        ) {
            shared.partings.push(self.parting_of(response, path));
            self.responder.clear_response();
        }
    }

    fn opcode(&self, kind: Kind) -> Opcode {
        response_opcode(self.class(), kind)
    }

    /// This QP and its peer.
    fn qpns(&self) -> Qpns {
        Qpns {
            local: self.qpn,
            dest: self.attr.dest_qpn,
        }
    }

    /// A response that does not wait for this QP's turn.
    pub(super) fn parting_of(&self, response: Response, path: Path) -> Parting {
        Parting {
            class: self.class(),
            path,
            qpns: self.qpns(),
            response,
        }
    }
}

/// The opcode of a response: XRC has all those of RC, and no other transport has any.
fn response_opcode(class: TransportClass, kind: Kind) -> Opcode {
    Opcode::from_kind(class, kind).unwrap_or(Opcode::RcAcknowledge)
}

/// The link gave less room than was asked for.
const TOO_SHORT: Fault = Fault { addr: 0 };

/// The bytes from `at` on, of a packet that is long enough.
fn rest(out: &mut [u8], at: usize) -> Result<&mut [u8], Fault> {
    out.get_mut(at..).ok_or(TOO_SHORT)
}

impl Parting {
    /// Gives the packet to the link.
    pub fn transmit(&self, link: &mut dyn Transmit) -> Result<(), TransmitError> {
        let opcode = response_opcode(self.class, Kind::Acknowledge);
        let Response { psn, syndrome, msn } = self.response;
        link.packet(&self.path, self.qpns, opcode.header_len(), &mut |out| {
            Bth::new(opcode, self.qpns.dest, psn).emit(out);
            Aeth { syndrome, msn }.emit(rest(out, Bth::LEN)?);
            Ok(())
        })
    }
}
