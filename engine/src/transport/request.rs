//! One request packet of a send WQE: its opcode, headers and payload.

use ferroce_wire::{Bth, Deth, Ieth, ImmDt, Kind, Opcode, Psn, TransportClass};

use super::payload::Domain;
use crate::memory::Fault;
use crate::queue::sq::{SendQueue, SendWqe};
use crate::verbs::{Operation, SendFlags};

/// A request packet about to be written.
pub(crate) struct Request {
    pub opcode: Opcode,
    pub psn: Psn,
    pub dest_qpn: u32,
    pub ack_request: bool,
    solicited: bool,
    /// Where its payload begins in the message.
    offset: u32,
    /// Bytes of payload.
    pub payload: usize,
    operation: Operation,
    /// UD only.
    pub deth: Option<Deth>,
}

impl Request {
    /// The packet number `index` of the WQE, on a QP of this path MTU.
    pub fn new(class: TransportClass, wqe: &SendWqe, index: u32, mtu: u32) -> Option<Request> {
        let (first, last) = (index == 0, index + 1 == wqe.packets);
        let kind = match (wqe.operation, first, last) {
            (Operation::Send, true, true) => Kind::SendOnly,
            (Operation::SendImm(_), true, true) => Kind::SendOnlyImm,
            (Operation::Send | Operation::SendImm(_), true, false) => Kind::SendFirst,
            (Operation::Send | Operation::SendImm(_), false, false) => Kind::SendMiddle,
            (Operation::Send, false, true) => Kind::SendLast,
            (Operation::SendImm(_), false, true) => Kind::SendLastImm,
            _ => return None,
        };
        let offset = index * mtu;
        Some(Request {
            opcode: Opcode::from_kind(class, kind)?,
            psn: Psn::new(0),
            dest_qpn: 0,
            ack_request: false,
            solicited: last && wqe.flags.contains(SendFlags::SOLICITED),
            offset,
            payload: wqe.length.saturating_sub(offset).min(mtu) as usize,
            operation: wqe.operation,
            deth: None,
        })
    }

    /// Bytes from the BTH to the last byte of padding.
    pub fn len(&self) -> usize {
        self.opcode.header_len() + self.payload.next_multiple_of(4)
    }

    /// Writes all [`Request::len`] bytes.
    pub fn fill(
        &self,
        out: &mut [u8],
        domain: Domain<'_>,
        sq: &SendQueue,
        index: u64,
        wqe: &SendWqe,
    ) -> Result<(), Fault> {
        let fault = Fault { addr: 0 };
        let (header, body) = out.split_at_mut_checked(self.opcode.header_len()).ok_or(fault)?;
        let (payload, pad) = body.split_at_mut_checked(self.payload).ok_or(fault)?;
        let bth = Bth {
            solicited: self.solicited,
            pad: pad.len() as u8,
            ack_request: self.ack_request,
            ..Bth::new(self.opcode, self.dest_qpn, self.psn)
        };
        bth.emit(header);
        let mut rest = header.get_mut(Bth::LEN..).ok_or(fault)?;
        if let Some(deth) = self.deth {
            deth.emit(rest);
            rest = rest.get_mut(Deth::LEN..).ok_or(fault)?;
        }
        match self.operation {
            Operation::SendImm(imm) if self.opcode.has_immdt() => {
                ImmDt {
                    data: imm.to_ne_bytes(),
                }
                .emit(rest);
            }
            Operation::SendInv(rkey) if self.opcode.has_ieth() => Ieth { rkey }.emit(rest),
            _ => {}
        }
        pad.fill(0);
        if wqe.flags.contains(SendFlags::INLINE) {
            let from = self.offset as usize;
            let data = sq
                .inline(index, wqe)
                .get(from..from + self.payload)
                .ok_or(fault)?;
            payload.copy_from_slice(data);
            Ok(())
        } else {
            domain.gather(sq.sges(index, wqe), self.offset, payload)
        }
    }
}
