//! One request packet of a send WQE: its opcode, headers and payload.

use ferroce_wire::{
    AtomicEth, Bth, Deth, Feth, Ieth, ImmDt, Kind, Opcode, Psn, Reth, TransportClass, XrcEth,
};

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
    /// The length in the RETH: of the whole WRITE or FLUSH, or of the part that this READ asks for.
    pub dma_len: u32,
    operation: Operation,
    /// UD only.
    pub deth: Option<Deth>,
}

impl Request {
    /// The packet number `index` of the WQE, on a QP of this path MTU. `None` if the transport has no such packet.
    pub fn new(class: TransportClass, wqe: &SendWqe, index: u32, mtu: u32) -> Option<Request> {
        let (first, last) = (index == 0, index + 1 == wqe.packets);
        let of_message = |only, begin, middle, end| match (first, last) {
            (true, true) => only,
            (true, false) => begin,
            (false, false) => middle,
            (false, true) => end,
        };
        let kind = match wqe.operation {
            Operation::Send => of_message(Kind::SendOnly, Kind::SendFirst, Kind::SendMiddle, Kind::SendLast),
            Operation::SendImm(_) => of_message(
                Kind::SendOnlyImm,
                Kind::SendFirst,
                Kind::SendMiddle,
                Kind::SendLastImm,
            ),
            Operation::SendInv(_) => of_message(
                Kind::SendOnlyInv,
                Kind::SendFirst,
                Kind::SendMiddle,
                Kind::SendLastInv,
            ),
            Operation::Write { .. } => of_message(
                Kind::WriteOnly,
                Kind::WriteFirst,
                Kind::WriteMiddle,
                Kind::WriteLast,
            ),
            Operation::WriteImm { .. } => of_message(
                Kind::WriteOnlyImm,
                Kind::WriteFirst,
                Kind::WriteMiddle,
                Kind::WriteLastImm,
            ),
            Operation::Read { .. } => Kind::ReadRequest,
            Operation::CompareSwap { .. } => Kind::CompareSwap,
            Operation::FetchAdd { .. } => Kind::FetchAdd,
            Operation::AtomicWrite { .. } => Kind::AtomicWrite,
            Operation::Flush { .. } => Kind::Flush,
            Operation::LocalInvalidate(_) | Operation::BindMw(_) => return None,
        };
        let offset = index * mtu;
        let left = wqe.length.saturating_sub(offset);
        Some(Request {
            opcode: Opcode::from_kind(class, kind)?,
            psn: Psn::new(0),
            dest_qpn: 0,
            ack_request: false,
            solicited: last && wqe.takes_receive() && wqe.flags.contains(SendFlags::SOLICITED),
            offset,
            payload: if wqe.fetches() { 0 } else { left.min(mtu) as usize },
            dma_len: match wqe.operation {
                Operation::Read { .. } => left,
                Operation::Flush { length, .. } => length,
                _ => wqe.length,
            },
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
        if self.opcode.has_xrceth() {
            XrcEth { srqn: wqe.srqn }.emit(rest);
            rest = rest.get_mut(XrcEth::LEN..).ok_or(fault)?;
        }
        if let Some(deth) = self.deth {
            deth.emit(rest);
            rest = rest.get_mut(Deth::LEN..).ok_or(fault)?;
        }
        self.extend(rest, fault)?;
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

    /// Writes the extension headers of the operation.
    fn extend(&self, out: &mut [u8], fault: Fault) -> Result<(), Fault> {
        let mut out = out;
        if let Operation::Flush {
            placement,
            selectivity,
            ..
        } = self.operation
        {
            Feth {
                placement: placement.bits(),
                selectivity: selectivity as u8,
            }
            .emit(out);
            out = out.get_mut(Feth::LEN..).ok_or(fault)?;
        }
        let target = match self.operation {
            Operation::Write { addr, rkey }
            | Operation::WriteImm { addr, rkey, .. }
            | Operation::AtomicWrite { addr, rkey }
            | Operation::Flush { addr, rkey, .. } => Some((addr, rkey)),
            Operation::Read { addr, rkey } => Some((addr.wrapping_add(u64::from(self.offset)), rkey)),
            _ => None,
        };
        if let (Some((va, rkey)), true) = (target, self.opcode.has_reth()) {
            Reth {
                va,
                rkey,
                dma_len: self.dma_len,
            }
            .emit(out);
            out = out.get_mut(Reth::LEN..).ok_or(fault)?;
        }
        match self.operation {
            Operation::SendImm(imm) | Operation::WriteImm { imm, .. } if self.opcode.has_immdt() => {
                ImmDt {
                    data: imm.to_ne_bytes(),
                }
                .emit(out);
            }
            Operation::SendInv(rkey) if self.opcode.has_ieth() => Ieth { rkey }.emit(out),
            Operation::CompareSwap {
                addr,
                rkey,
                compare,
                swap,
            } => {
                AtomicEth {
                    va: addr,
                    rkey,
                    swap_add: swap,
                    compare,
                }
                .emit(out);
            }
            Operation::FetchAdd { addr, rkey, add } => {
                AtomicEth {
                    va: addr,
                    rkey,
                    swap_add: add,
                    compare: 0,
                }
                .emit(out);
            }
            _ => {}
        }
        Ok(())
    }
}
