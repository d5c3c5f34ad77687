//! All headers of a packet, decoded: the way to build a packet, or to change a received one.

use crate::{
    Aeth, AtomicAckEth, AtomicEth, Bth, Deth, Feth, Ieth, ImmDt, Opcode, ParseError, Psn, Reth, RocePacket,
    XrcEth,
};

/// The BTH and every extension header there is.
///
/// The opcode decides which are on the wire; the others are not looked at.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(missing_docs)] // each is the header its type names
pub struct Headers {
    pub bth: Bth,
    pub xrceth: XrcEth,
    pub deth: Deth,
    pub feth: Feth,
    pub reth: Reth,
    pub atomic_eth: AtomicEth,
    pub aeth: Aeth,
    pub atomic_ack_eth: AtomicAckEth,
    pub immdt: ImmDt,
    pub ieth: Ieth,
}

impl Headers {
    /// Bytes of the longest headers: BTH, XRCETH and AtomicETH.
    pub const MAX_LEN: usize = Bth::LEN + XrcEth::LEN + AtomicEth::LEN;

    /// A plain BTH, and extension headers of zeros.
    pub fn new(opcode: Opcode, dest_qpn: u32, psn: Psn) -> Self {
        Self::from(Bth::new(opcode, dest_qpn, psn))
    }

    /// The headers at the start of a packet.
    pub fn parse(packet: &[u8]) -> Result<Self, ParseError> {
        RocePacket::parse(packet).map(|packet| packet.headers())
    }

    /// Bytes on the wire.
    pub fn header_len(&self) -> usize {
        self.bth.opcode.header_len()
    }

    /// Writes the headers that the opcode has to the start of `out`, and says how many bytes.
    ///
    /// # Panics
    /// If `out` is shorter than [`Headers::header_len`]; [`Headers::MAX_LEN`] always suffices.
    pub fn emit(&self, out: &mut [u8]) -> usize {
        let opcode = self.bth.opcode;
        let mut at = Bth::LEN;
        self.bth.emit(out);
        let mut put = |present: bool, bytes: &[u8]| {
            if present {
                out[at..][..bytes.len()].copy_from_slice(bytes);
                at += bytes.len();
            }
        };
        put(opcode.has_xrceth(), &self.xrceth.to_bytes());
        put(opcode.has_deth(), &self.deth.to_bytes());
        put(opcode.has_feth(), &self.feth.to_bytes());
        put(opcode.has_reth(), &self.reth.to_bytes());
        put(opcode.has_atomic_eth(), &self.atomic_eth.to_bytes());
        put(opcode.has_aeth(), &self.aeth.to_bytes());
        put(opcode.has_atomic_ack_eth(), &self.atomic_ack_eth.to_bytes());
        put(opcode.has_immdt(), &self.immdt.to_bytes());
        put(opcode.has_ieth(), &self.ieth.to_bytes());
        at
    }
}

impl From<Bth> for Headers {
    fn from(bth: Bth) -> Self {
        Self {
            bth,
            xrceth: XrcEth::default(),
            deth: Deth::default(),
            feth: Feth::default(),
            reth: Reth::default(),
            atomic_eth: AtomicEth::default(),
            aeth: Aeth::default(),
            atomic_ack_eth: AtomicAckEth::default(),
            immdt: ImmDt::default(),
            ieth: Ieth::default(),
        }
    }
}

impl RocePacket<'_> {
    /// All headers, decoded; those that the opcode does not have are zeros.
    pub fn headers(&self) -> Headers {
        Headers {
            bth: *self.bth(),
            xrceth: self.xrceth().unwrap_or_default(),
            deth: self.deth().unwrap_or_default(),
            feth: self.feth().unwrap_or_default(),
            reth: self.reth().unwrap_or_default(),
            atomic_eth: self.atomic_eth().unwrap_or_default(),
            aeth: self.aeth().unwrap_or_default(),
            atomic_ack_eth: self.atomic_ack_eth().unwrap_or_default(),
            immdt: self.immdt().unwrap_or_default(),
            ieth: self.ieth().unwrap_or_default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Headers in which every field differs.
    fn distinct(opcode: Opcode) -> Headers {
        Headers {
            xrceth: XrcEth { srqn: 0x01_0203 },
            deth: Deth {
                qkey: 0x1111_2222,
                src_qpn: 0x04_0506,
            },
            feth: Feth {
                placement: 2,
                selectivity: 1,
            },
            reth: Reth {
                va: 0x0102_0304_0506_0708,
                rkey: 0x090a_0b0c,
                dma_len: 0x0d0e_0f10,
            },
            atomic_eth: AtomicEth {
                va: 0x11 << 56,
                rkey: 0x12,
                swap_add: 0x13,
                compare: 0x14,
            },
            aeth: Aeth {
                syndrome: crate::Syndrome::RnrNak { timer: 3 },
                msn: 0x15_1617,
            },
            atomic_ack_eth: AtomicAckEth {
                original: 0x1819_1a1b,
            },
            immdt: ImmDt {
                data: [0x1c, 0x1d, 0x1e, 0x1f],
            },
            ieth: Ieth { rkey: 0x2021_2223 },
            ..Headers::new(opcode, 0x24_2526, Psn::new(0x27_2829))
        }
    }

    /// Every opcode: what is emitted is as long as its table says, and each header that is
    /// there is read back where it was put.
    #[test]
    fn every_opcode_survives() {
        for &opcode in Opcode::ALL {
            let headers = distinct(opcode);
            let mut bytes = [0; Headers::MAX_LEN + 4];
            let len = headers.emit(&mut bytes);
            assert_eq!(len, opcode.header_len(), "{}", opcode.name());
            assert_eq!(len, headers.header_len());
            let bytes = &bytes[..len + 4];
            let packet = RocePacket::parse(bytes).unwrap();
            assert_eq!(packet.header_bytes(), &bytes[..len]);
            assert_eq!(packet.payload(), []);
            let has = |present: bool, got: bool, what: &str| {
                assert_eq!(present, got, "{what} of {}", opcode.name());
            };
            has(
                opcode.has_xrceth(),
                packet.xrceth() == Some(headers.xrceth),
                "XRCETH",
            );
            has(opcode.has_deth(), packet.deth() == Some(headers.deth), "DETH");
            has(opcode.has_feth(), packet.feth() == Some(headers.feth), "FETH");
            has(opcode.has_reth(), packet.reth() == Some(headers.reth), "RETH");
            has(
                opcode.has_atomic_eth(),
                packet.atomic_eth() == Some(headers.atomic_eth),
                "AtomicETH",
            );
            has(opcode.has_aeth(), packet.aeth() == Some(headers.aeth), "AETH");
            has(
                opcode.has_atomic_ack_eth(),
                packet.atomic_ack_eth() == Some(headers.atomic_ack_eth),
                "AtomicAckETH",
            );
            has(opcode.has_immdt(), packet.immdt() == Some(headers.immdt), "ImmDt");
            has(opcode.has_ieth(), packet.ieth() == Some(headers.ieth), "IETH");
            // One byte less is refused.
            assert!(Headers::parse(&bytes[..len + 3]).is_err());
        }
    }

    #[test]
    fn the_longest_is_known() {
        let longest = Opcode::ALL.iter().map(|opcode| opcode.header_len()).max();
        assert_eq!(longest, Some(Headers::MAX_LEN));
    }
}
