//! A RoCE packet from the BTH to the ICRC, as a UDP payload (or behind a RoCEv1 GRH) carries it.

use crate::{Aeth, AtomicAckEth, AtomicEth, Bth, Deth, Feth, Ieth, ImmDt, Opcode, ParseError, Reth, XrcEth};

/// Bytes of the ICRC at the end of each packet.
pub const ICRC_LEN: usize = 4;

/// Bytes after the BTH of a CNP: reserved, zeros (reference section 14).
pub const CNP_RESERVED_LEN: usize = 16;

/// A view of one packet whose lengths have been checked: opcode known, and all headers, the
/// padding and the ICRC there (reference section 12, checks 1 to 3).
///
/// Nothing else is checked: not the ICRC, not the header version, not whether such a payload
/// may follow such an opcode.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RocePacket<'a> {
    bth: Bth,
    bytes: &'a [u8],
}

impl<'a> RocePacket<'a> {
    /// Takes the whole UDP payload, BTH to ICRC.
    #[inline]
    pub fn parse(udp_payload: &'a [u8]) -> Result<Self, ParseError> {
        let bth = Bth::parse(udp_payload)?;
        let need = bth.opcode.header_len() + usize::from(bth.pad) + ICRC_LEN;
        if udp_payload.len() < need {
            return Err(ParseError::Truncated {
                what: bth.opcode.name(),
                need,
                have: udp_payload.len(),
            });
        }
        Ok(Self {
            bth,
            bytes: udp_payload,
        })
    }

    /// The base transport header.
    #[inline]
    pub fn bth(&self) -> &Bth {
        &self.bth
    }

    /// The opcode.
    #[inline]
    pub fn opcode(&self) -> Opcode {
        self.bth.opcode
    }

    /// BTH and extension headers.
    #[inline]
    pub fn header_bytes(&self) -> &'a [u8] {
        self.cut(0, self.opcode().header_len())
    }

    /// What follows the headers, without padding and ICRC.
    #[inline]
    pub fn payload(&self) -> &'a [u8] {
        let end = self.bytes.len() - ICRC_LEN - usize::from(self.bth.pad);
        self.cut(self.opcode().header_len(), end)
    }

    /// What the ICRC covers of this packet besides the headers outside it: BTH to padding.
    #[inline]
    pub fn covered(&self) -> &'a [u8] {
        self.cut(0, self.bytes.len() - ICRC_LEN)
    }

    /// The four bytes of the ICRC.
    #[inline]
    pub fn icrc_bytes(&self) -> [u8; 4] {
        self.bytes.last_chunk().copied().unwrap_or_default()
    }

    /// The ICRC as a number: its bytes are little-endian.
    #[inline]
    pub fn icrc(&self) -> u32 {
        u32::from_le_bytes(self.icrc_bytes())
    }

    /// The XRC extended transport header, if the opcode has one.
    #[inline]
    pub fn xrceth(&self) -> Option<XrcEth> {
        self.opcode()
            .has_xrceth()
            .then(|| XrcEth::parse(self.from(Bth::LEN)).ok())?
    }

    /// The datagram extended transport header, if the opcode has one.
    #[inline]
    pub fn deth(&self) -> Option<Deth> {
        self.opcode()
            .has_deth()
            .then(|| Deth::parse(self.from(Bth::LEN)).ok())?
    }

    /// The FLUSH extended transport header, if the opcode has one.
    #[inline]
    pub fn feth(&self) -> Option<Feth> {
        self.opcode()
            .has_feth()
            .then(|| Feth::parse(self.from(self.after_xrceth())).ok())?
    }

    /// The RDMA extended transport header, if the opcode has one.
    #[inline]
    pub fn reth(&self) -> Option<Reth> {
        let feth = if self.opcode().has_feth() { Feth::LEN } else { 0 };
        self.opcode()
            .has_reth()
            .then(|| Reth::parse(self.from(self.after_xrceth() + feth)).ok())?
    }

    /// The atomic extended transport header, if the opcode has one.
    #[inline]
    pub fn atomic_eth(&self) -> Option<AtomicEth> {
        let at = self.after_xrceth();
        self.opcode()
            .has_atomic_eth()
            .then(|| AtomicEth::parse(self.from(at)).ok())?
    }

    /// The acknowledge extended transport header, if the opcode has one.
    #[inline]
    pub fn aeth(&self) -> Option<Aeth> {
        self.opcode()
            .has_aeth()
            .then(|| Aeth::parse(self.from(Bth::LEN)).ok())?
    }

    /// The atomic acknowledge extended transport header, if the opcode has one.
    #[inline]
    pub fn atomic_ack_eth(&self) -> Option<AtomicAckEth> {
        let at = Bth::LEN + Aeth::LEN;
        self.opcode()
            .has_atomic_ack_eth()
            .then(|| AtomicAckEth::parse(self.from(at)).ok())?
    }

    /// The immediate data, if the opcode has it; always the last header.
    #[inline]
    pub fn immdt(&self) -> Option<ImmDt> {
        let at = self.opcode().header_len() - ImmDt::LEN;
        self.opcode()
            .has_immdt()
            .then(|| ImmDt::parse(self.from(at)).ok())?
    }

    /// The invalidate extended transport header, if the opcode has one; always the last header.
    #[inline]
    pub fn ieth(&self) -> Option<Ieth> {
        let at = self.opcode().header_len() - Ieth::LEN;
        self.opcode()
            .has_ieth()
            .then(|| Ieth::parse(self.from(at)).ok())?
    }

    /// Offset of the header that follows a possible XRCETH.
    fn after_xrceth(&self) -> usize {
        Bth::LEN
            + if self.opcode().has_xrceth() {
                XrcEth::LEN
            } else {
                0
            }
    }

    fn from(&self, start: usize) -> &'a [u8] {
        self.cut(start, self.bytes.len())
    }

    /// A range that `parse` has made sure of.
    fn cut(&self, start: usize, end: usize) -> &'a [u8] {
        self.bytes.get(start..end).unwrap_or_default()
    }
}
