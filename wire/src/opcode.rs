//! BTH opcodes: transport, operation, and the headers that follow (reference section 4; IBTA 9.2).

/// The transport service that an opcode belongs to, its three high bits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum TransportClass {
    /// Reliable connection, 0x00.
    Rc,
    /// Unreliable connection, 0x20.
    Uc,
    /// Unreliable datagram, 0x60.
    Ud,
    /// Congestion notification, 0x80.
    Cnp,
    /// Extended reliable connection, 0xa0.
    Xrc,
}

/// The operation of an opcode, whatever the transport.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[allow(missing_docs)] // each is the standard's operation of that name
pub enum Kind {
    SendFirst,
    SendMiddle,
    SendLast,
    SendLastImm,
    SendOnly,
    SendOnlyImm,
    WriteFirst,
    WriteMiddle,
    WriteLast,
    WriteLastImm,
    WriteOnly,
    WriteOnlyImm,
    ReadRequest,
    ReadResponseFirst,
    ReadResponseMiddle,
    ReadResponseLast,
    ReadResponseOnly,
    Acknowledge,
    AtomicAcknowledge,
    CompareSwap,
    FetchAdd,
    SendLastInv,
    SendOnlyInv,
    Flush,
    AtomicWrite,
    Cnp,
}

macro_rules! opcodes {
    ($($variant:ident = $value:literal, $transport:ident, $kind:ident, $name:literal;)*) => {
        /// A known BTH opcode; its number is the byte on the wire.
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        #[repr(u8)]
        pub enum Opcode {
            $(
                #[doc = concat!("`", stringify!($value), "`: ", $name, ".")]
                $variant = $value,
            )*
        }

        impl Opcode {
            /// Every known opcode, ascending.
            pub const ALL: &'static [Opcode] = &[$(Opcode::$variant),*];

            /// The name in the standard's terms: "RC SEND_ONLY".
            pub const fn name(self) -> &'static str {
                match self { $(Opcode::$variant => $name,)* }
            }

            /// The transport service.
            pub const fn transport(self) -> TransportClass {
                match self { $(Opcode::$variant => TransportClass::$transport,)* }
            }

            /// The operation.
            pub const fn kind(self) -> Kind {
                match self { $(Opcode::$variant => Kind::$kind,)* }
            }

            /// The opcode of an operation on a transport, where that transport has it.
            pub const fn from_kind(transport: TransportClass, kind: Kind) -> Option<Opcode> {
                match (transport, kind) {
                    $((TransportClass::$transport, Kind::$kind) => Some(Opcode::$variant),)*
                    _ => None,
                }
            }
        }
    };
}

opcodes! {
    RcSendFirst = 0x00, Rc, SendFirst, "RC SEND_FIRST";
    RcSendMiddle = 0x01, Rc, SendMiddle, "RC SEND_MIDDLE";
    RcSendLast = 0x02, Rc, SendLast, "RC SEND_LAST";
    RcSendLastImm = 0x03, Rc, SendLastImm, "RC SEND_LAST_WITH_IMM";
    RcSendOnly = 0x04, Rc, SendOnly, "RC SEND_ONLY";
    RcSendOnlyImm = 0x05, Rc, SendOnlyImm, "RC SEND_ONLY_WITH_IMM";
    RcWriteFirst = 0x06, Rc, WriteFirst, "RC RDMA_WRITE_FIRST";
    RcWriteMiddle = 0x07, Rc, WriteMiddle, "RC RDMA_WRITE_MIDDLE";
    RcWriteLast = 0x08, Rc, WriteLast, "RC RDMA_WRITE_LAST";
    RcWriteLastImm = 0x09, Rc, WriteLastImm, "RC RDMA_WRITE_LAST_WITH_IMM";
    RcWriteOnly = 0x0a, Rc, WriteOnly, "RC RDMA_WRITE_ONLY";
    RcWriteOnlyImm = 0x0b, Rc, WriteOnlyImm, "RC RDMA_WRITE_ONLY_WITH_IMM";
    RcReadRequest = 0x0c, Rc, ReadRequest, "RC RDMA_READ_REQUEST";
    RcReadResponseFirst = 0x0d, Rc, ReadResponseFirst, "RC RDMA_READ_RESPONSE_FIRST";
    RcReadResponseMiddle = 0x0e, Rc, ReadResponseMiddle, "RC RDMA_READ_RESPONSE_MIDDLE";
    RcReadResponseLast = 0x0f, Rc, ReadResponseLast, "RC RDMA_READ_RESPONSE_LAST";
    RcReadResponseOnly = 0x10, Rc, ReadResponseOnly, "RC RDMA_READ_RESPONSE_ONLY";
    RcAcknowledge = 0x11, Rc, Acknowledge, "RC ACKNOWLEDGE";
    RcAtomicAcknowledge = 0x12, Rc, AtomicAcknowledge, "RC ATOMIC_ACKNOWLEDGE";
    RcCompareSwap = 0x13, Rc, CompareSwap, "RC COMPARE_SWAP";
    RcFetchAdd = 0x14, Rc, FetchAdd, "RC FETCH_ADD";
    RcSendLastInv = 0x16, Rc, SendLastInv, "RC SEND_LAST_WITH_INVALIDATE";
    RcSendOnlyInv = 0x17, Rc, SendOnlyInv, "RC SEND_ONLY_WITH_INVALIDATE";
    RcFlush = 0x1c, Rc, Flush, "RC FLUSH";
    RcAtomicWrite = 0x1d, Rc, AtomicWrite, "RC ATOMIC_WRITE";
    UcSendFirst = 0x20, Uc, SendFirst, "UC SEND_FIRST";
    UcSendMiddle = 0x21, Uc, SendMiddle, "UC SEND_MIDDLE";
    UcSendLast = 0x22, Uc, SendLast, "UC SEND_LAST";
    UcSendLastImm = 0x23, Uc, SendLastImm, "UC SEND_LAST_WITH_IMM";
    UcSendOnly = 0x24, Uc, SendOnly, "UC SEND_ONLY";
    UcSendOnlyImm = 0x25, Uc, SendOnlyImm, "UC SEND_ONLY_WITH_IMM";
    UcWriteFirst = 0x26, Uc, WriteFirst, "UC RDMA_WRITE_FIRST";
    UcWriteMiddle = 0x27, Uc, WriteMiddle, "UC RDMA_WRITE_MIDDLE";
    UcWriteLast = 0x28, Uc, WriteLast, "UC RDMA_WRITE_LAST";
    UcWriteLastImm = 0x29, Uc, WriteLastImm, "UC RDMA_WRITE_LAST_WITH_IMM";
    UcWriteOnly = 0x2a, Uc, WriteOnly, "UC RDMA_WRITE_ONLY";
    UcWriteOnlyImm = 0x2b, Uc, WriteOnlyImm, "UC RDMA_WRITE_ONLY_WITH_IMM";
    UdSendOnly = 0x64, Ud, SendOnly, "UD SEND_ONLY";
    UdSendOnlyImm = 0x65, Ud, SendOnlyImm, "UD SEND_ONLY_WITH_IMM";
    Cnp = 0x81, Cnp, Cnp, "CNP";
    XrcSendFirst = 0xa0, Xrc, SendFirst, "XRC SEND_FIRST";
    XrcSendMiddle = 0xa1, Xrc, SendMiddle, "XRC SEND_MIDDLE";
    XrcSendLast = 0xa2, Xrc, SendLast, "XRC SEND_LAST";
    XrcSendLastImm = 0xa3, Xrc, SendLastImm, "XRC SEND_LAST_WITH_IMM";
    XrcSendOnly = 0xa4, Xrc, SendOnly, "XRC SEND_ONLY";
    XrcSendOnlyImm = 0xa5, Xrc, SendOnlyImm, "XRC SEND_ONLY_WITH_IMM";
    XrcWriteFirst = 0xa6, Xrc, WriteFirst, "XRC RDMA_WRITE_FIRST";
    XrcWriteMiddle = 0xa7, Xrc, WriteMiddle, "XRC RDMA_WRITE_MIDDLE";
    XrcWriteLast = 0xa8, Xrc, WriteLast, "XRC RDMA_WRITE_LAST";
    XrcWriteLastImm = 0xa9, Xrc, WriteLastImm, "XRC RDMA_WRITE_LAST_WITH_IMM";
    XrcWriteOnly = 0xaa, Xrc, WriteOnly, "XRC RDMA_WRITE_ONLY";
    XrcWriteOnlyImm = 0xab, Xrc, WriteOnlyImm, "XRC RDMA_WRITE_ONLY_WITH_IMM";
    XrcReadRequest = 0xac, Xrc, ReadRequest, "XRC RDMA_READ_REQUEST";
    XrcReadResponseFirst = 0xad, Xrc, ReadResponseFirst, "XRC RDMA_READ_RESPONSE_FIRST";
    XrcReadResponseMiddle = 0xae, Xrc, ReadResponseMiddle, "XRC RDMA_READ_RESPONSE_MIDDLE";
    XrcReadResponseLast = 0xaf, Xrc, ReadResponseLast, "XRC RDMA_READ_RESPONSE_LAST";
    XrcReadResponseOnly = 0xb0, Xrc, ReadResponseOnly, "XRC RDMA_READ_RESPONSE_ONLY";
    XrcAcknowledge = 0xb1, Xrc, Acknowledge, "XRC ACKNOWLEDGE";
    XrcAtomicAcknowledge = 0xb2, Xrc, AtomicAcknowledge, "XRC ATOMIC_ACKNOWLEDGE";
    XrcCompareSwap = 0xb3, Xrc, CompareSwap, "XRC COMPARE_SWAP";
    XrcFetchAdd = 0xb4, Xrc, FetchAdd, "XRC FETCH_ADD";
    XrcSendLastInv = 0xb6, Xrc, SendLastInv, "XRC SEND_LAST_WITH_INVALIDATE";
    XrcSendOnlyInv = 0xb7, Xrc, SendOnlyInv, "XRC SEND_ONLY_WITH_INVALIDATE";
    XrcFlush = 0xbc, Xrc, Flush, "XRC FLUSH";
    XrcAtomicWrite = 0xbd, Xrc, AtomicWrite, "XRC ATOMIC_WRITE";
}

/// Which extension headers an opcode has; one bit each, in the order of the wire.
mod header {
    pub const XRCETH: u16 = 1 << 0;
    pub const DETH: u16 = 1 << 1;
    pub const FETH: u16 = 1 << 2;
    pub const RETH: u16 = 1 << 3;
    pub const ATOMICETH: u16 = 1 << 4;
    pub const AETH: u16 = 1 << 5;
    pub const ATOMICACKETH: u16 = 1 << 6;
    pub const IMMDT: u16 = 1 << 7;
    pub const IETH: u16 = 1 << 8;

    /// Length of each, in bytes, by bit number.
    pub const LEN: [u8; 9] = [4, 8, 4, 16, 28, 4, 8, 4, 4];
}

/// What the tables hold for one opcode byte.
#[derive(Clone, Copy)]
struct Info {
    opcode: Option<Opcode>,
    headers: u16,
    header_len: u8,
}

/// Everything about an opcode byte, by that byte.
static INFO: [Info; 256] = {
    let mut table = [Info {
        opcode: None,
        headers: 0,
        header_len: 0,
    }; 256];
    let mut i = 0;
    while i < Opcode::ALL.len() {
        let opcode = Opcode::ALL[i];
        let headers = opcode.compute_headers();
        let mut header_len = crate::bth::Bth::LEN as u8;
        let mut bit = 0;
        while bit < header::LEN.len() {
            if headers & (1 << bit) != 0 {
                header_len += header::LEN[bit];
            }
            bit += 1;
        }
        table[opcode as usize] = Info {
            opcode: Some(opcode),
            headers,
            header_len,
        };
        i += 1;
    }
    table
};

impl Opcode {
    /// The opcode of a byte from the wire, if it is a known one.
    #[inline]
    pub fn from_u8(value: u8) -> Option<Opcode> {
        INFO[usize::from(value)].opcode
    }

    /// The byte on the wire.
    #[inline]
    pub const fn value(self) -> u8 {
        self as u8
    }

    /// Bytes of the BTH and all extension headers.
    #[inline]
    pub fn header_len(self) -> usize {
        usize::from(INFO[self as usize].header_len)
    }

    /// The set of extension headers, from the operation and the transport.
    const fn compute_headers(self) -> u16 {
        let by_kind = match self.kind() {
            Kind::SendLastImm | Kind::SendOnlyImm | Kind::WriteLastImm => header::IMMDT,
            Kind::SendLastInv | Kind::SendOnlyInv => header::IETH,
            Kind::WriteFirst | Kind::WriteOnly | Kind::ReadRequest | Kind::AtomicWrite => header::RETH,
            Kind::WriteOnlyImm => header::RETH | header::IMMDT,
            Kind::Flush => header::FETH | header::RETH,
            Kind::CompareSwap | Kind::FetchAdd => header::ATOMICETH,
            Kind::ReadResponseFirst | Kind::ReadResponseLast | Kind::ReadResponseOnly | Kind::Acknowledge => {
                header::AETH
            }
            Kind::AtomicAcknowledge => header::AETH | header::ATOMICACKETH,
            Kind::SendFirst
            | Kind::SendMiddle
            | Kind::SendLast
            | Kind::SendOnly
            | Kind::WriteMiddle
            | Kind::WriteLast
            | Kind::ReadResponseMiddle
            | Kind::Cnp => 0,
        };
        let by_transport = match self.transport() {
            TransportClass::Ud => header::DETH,
            TransportClass::Xrc if self.is_request() => header::XRCETH,
            _ => 0,
        };
        by_kind | by_transport
    }

    #[inline]
    fn has(self, header: u16) -> bool {
        INFO[self as usize].headers & header != 0
    }

    /// Whether an XRCETH follows the BTH: XRC requests.
    #[inline]
    pub fn has_xrceth(self) -> bool {
        self.has(header::XRCETH)
    }

    /// Whether there is a DETH: UD.
    #[inline]
    pub fn has_deth(self) -> bool {
        self.has(header::DETH)
    }

    /// Whether there is a FETH: FLUSH.
    #[inline]
    pub fn has_feth(self) -> bool {
        self.has(header::FETH)
    }

    /// Whether there is a RETH.
    #[inline]
    pub fn has_reth(self) -> bool {
        self.has(header::RETH)
    }

    /// Whether there is an AtomicETH.
    #[inline]
    pub fn has_atomic_eth(self) -> bool {
        self.has(header::ATOMICETH)
    }

    /// Whether there is an AETH.
    #[inline]
    pub fn has_aeth(self) -> bool {
        self.has(header::AETH)
    }

    /// Whether there is an AtomicAckETH.
    #[inline]
    pub fn has_atomic_ack_eth(self) -> bool {
        self.has(header::ATOMICACKETH)
    }

    /// Whether there is immediate data.
    #[inline]
    pub fn has_immdt(self) -> bool {
        self.has(header::IMMDT)
    }

    /// Whether there is an IETH.
    #[inline]
    pub fn has_ieth(self) -> bool {
        self.has(header::IETH)
    }

    /// Whether it is the first of several packets of a message or READ response.
    pub const fn is_first(self) -> bool {
        matches!(
            self.kind(),
            Kind::SendFirst | Kind::WriteFirst | Kind::ReadResponseFirst
        )
    }

    /// Whether it is neither first nor last of several packets.
    pub const fn is_middle(self) -> bool {
        matches!(
            self.kind(),
            Kind::SendMiddle | Kind::WriteMiddle | Kind::ReadResponseMiddle
        )
    }

    /// Whether it is the last of several packets.
    pub const fn is_last(self) -> bool {
        matches!(
            self.kind(),
            Kind::SendLast
                | Kind::SendLastImm
                | Kind::SendLastInv
                | Kind::WriteLast
                | Kind::WriteLastImm
                | Kind::ReadResponseLast
        )
    }

    /// Whether it is a whole SEND, WRITE or READ response in one packet (the `_ONLY` opcodes).
    pub const fn is_only(self) -> bool {
        matches!(
            self.kind(),
            Kind::SendOnly
                | Kind::SendOnlyImm
                | Kind::SendOnlyInv
                | Kind::WriteOnly
                | Kind::WriteOnlyImm
                | Kind::ReadResponseOnly
        )
    }

    /// Whether it goes from requester to responder. A CNP is neither request nor response.
    pub const fn is_request(self) -> bool {
        !self.is_response() && !matches!(self.kind(), Kind::Cnp)
    }

    /// Whether it goes from responder to requester.
    pub const fn is_response(self) -> bool {
        matches!(
            self.kind(),
            Kind::ReadResponseFirst
                | Kind::ReadResponseMiddle
                | Kind::ReadResponseLast
                | Kind::ReadResponseOnly
                | Kind::Acknowledge
                | Kind::AtomicAcknowledge
        )
    }

    /// Whether it is a packet of a SEND.
    pub const fn is_send(self) -> bool {
        matches!(
            self.kind(),
            Kind::SendFirst
                | Kind::SendMiddle
                | Kind::SendLast
                | Kind::SendLastImm
                | Kind::SendLastInv
                | Kind::SendOnly
                | Kind::SendOnlyImm
                | Kind::SendOnlyInv
        )
    }

    /// Whether it is a packet of an RDMA WRITE (ATOMIC_WRITE is not one).
    pub const fn is_write(self) -> bool {
        matches!(
            self.kind(),
            Kind::WriteFirst
                | Kind::WriteMiddle
                | Kind::WriteLast
                | Kind::WriteLastImm
                | Kind::WriteOnly
                | Kind::WriteOnlyImm
        )
    }

    /// Whether bytes may follow the headers: all SENDs, WRITEs, READ responses, ATOMIC_WRITE
    /// (8 bytes), and CNP ([`crate::packet::CNP_RESERVED_LEN`]).
    pub const fn has_payload(self) -> bool {
        !matches!(
            self.kind(),
            Kind::ReadRequest
                | Kind::Acknowledge
                | Kind::AtomicAcknowledge
                | Kind::CompareSwap
                | Kind::FetchAdd
                | Kind::Flush
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Total header lengths as reference section 4 prints them.
    #[test]
    fn header_lengths() {
        let expect: &[(Kind, usize)] = &[
            (Kind::SendFirst, 12),
            (Kind::SendMiddle, 12),
            (Kind::SendLast, 12),
            (Kind::SendLastImm, 16),
            (Kind::SendOnly, 12),
            (Kind::SendOnlyImm, 16),
            (Kind::WriteFirst, 28),
            (Kind::WriteMiddle, 12),
            (Kind::WriteLast, 12),
            (Kind::WriteLastImm, 16),
            (Kind::WriteOnly, 28),
            (Kind::WriteOnlyImm, 32),
            (Kind::ReadRequest, 28),
            (Kind::ReadResponseFirst, 16),
            (Kind::ReadResponseMiddle, 12),
            (Kind::ReadResponseLast, 16),
            (Kind::ReadResponseOnly, 16),
            (Kind::Acknowledge, 16),
            (Kind::AtomicAcknowledge, 24),
            (Kind::CompareSwap, 40),
            (Kind::FetchAdd, 40),
            (Kind::SendLastInv, 16),
            (Kind::SendOnlyInv, 16),
            (Kind::Flush, 32),
            (Kind::AtomicWrite, 28),
        ];
        for &(kind, len) in expect {
            let rc = Opcode::from_kind(TransportClass::Rc, kind).unwrap();
            assert_eq!(rc.header_len(), len, "{}", rc.name());
            let xrc = Opcode::from_kind(TransportClass::Xrc, kind).unwrap();
            let extra = if xrc.is_request() { 4 } else { 0 };
            assert_eq!(xrc.header_len(), len + extra, "{}", xrc.name());
            if let Some(uc) = Opcode::from_kind(TransportClass::Uc, kind) {
                assert_eq!(uc.header_len(), len, "{}", uc.name());
            }
        }
        assert_eq!(Opcode::UdSendOnly.header_len(), 20);
        assert_eq!(Opcode::UdSendOnlyImm.header_len(), 24);
        assert_eq!(Opcode::Cnp.header_len(), 12);
    }

    #[test]
    fn bytes_and_parts_agree() {
        let mut known = 0;
        for byte in 0..=255u8 {
            let Some(opcode) = Opcode::from_u8(byte) else {
                continue;
            };
            known += 1;
            assert_eq!(opcode.value(), byte);
            assert_eq!(Opcode::from_kind(opcode.transport(), opcode.kind()), Some(opcode));
            let class = match byte >> 5 {
                0 => TransportClass::Rc,
                1 => TransportClass::Uc,
                3 => TransportClass::Ud,
                4 => TransportClass::Cnp,
                5 => TransportClass::Xrc,
                other => panic!("{byte:#04x} is of transport {other}"),
            };
            assert_eq!(opcode.transport(), class);
            assert!(opcode.name().starts_with(match class {
                TransportClass::Rc => "RC ",
                TransportClass::Uc => "UC ",
                TransportClass::Ud => "UD ",
                TransportClass::Cnp => "CNP",
                TransportClass::Xrc => "XRC ",
            }));
        }
        assert_eq!(known, 25 + 12 + 2 + 1 + 25);
        assert_eq!(known, Opcode::ALL.len());
    }
}
