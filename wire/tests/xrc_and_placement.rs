//! Packets that no peer at hand sends, byte by byte from the tables: XRC, FLUSH and ATOMIC WRITE (reference sections 3
//! and 4).

use ferroce_wire::{Feth, Headers, ImmDt, Opcode, Psn, Reth, RocePacket, XrcEth};

/// The packet of so many hex digits; blanks are for people.
fn packet(hex: &str) -> Vec<u8> {
    let digits: Vec<u8> = hex.bytes().filter(u8::is_ascii_hexdigit).collect();
    let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap();
    digits.chunks(2).map(byte).collect()
}

/// Checks that the packet has these headers, and they these bytes.
fn check(hex: &str, headers: Headers, payload: &[u8]) {
    let bytes = packet(hex);
    let roce = RocePacket::parse(&bytes).unwrap();
    assert_eq!(roce.headers(), headers);
    assert_eq!(roce.payload(), payload);
    let mut out = [0; Headers::MAX_LEN];
    let len = headers.emit(&mut out);
    assert_eq!(out[..len], bytes[..len]);
    assert_eq!(bytes.len(), len + payload.len() + 4);
}

fn headers(opcode: Opcode) -> Headers {
    Headers::new(opcode, 0x02_0304, Psn::new(0x11_2233))
}

const RETH: Reth = Reth {
    va: 0x0102_0304_0506_0708,
    rkey: 0xa1a2_a3a4,
    dma_len: 0x100,
};

#[test]
fn flush_of_a_range() {
    let expected = Headers {
        feth: Feth {
            placement: Feth::GLOBAL_VISIBILITY,
            selectivity: Feth::RANGE,
        },
        reth: RETH,
        ..headers(Opcode::RcFlush)
    };
    check(
        "1c00ffff 00020304 00112233  00000001  0102030405060708 a1a2a3a4 00000100  99999999",
        expected,
        &[],
    );
}

#[test]
fn flush_of_a_region_over_xrc() {
    let expected = Headers {
        xrceth: XrcEth { srqn: 0x05_0607 },
        feth: Feth {
            placement: Feth::GLOBAL_VISIBILITY | Feth::PERSISTENCE,
            selectivity: Feth::MEMORY_REGION,
        },
        reth: RETH,
        ..headers(Opcode::XrcFlush)
    };
    check(
        "bc00ffff 00020304 00112233  00050607  00000013  0102030405060708 a1a2a3a4 00000100  99999999",
        expected,
        &[],
    );
}

#[test]
fn atomic_write() {
    let word = [1, 2, 3, 4, 5, 6, 7, 8];
    let reth = Reth { dma_len: 8, ..RETH };
    let expected = Headers {
        reth,
        ..headers(Opcode::RcAtomicWrite)
    };
    check(
        "1d00ffff 00020304 00112233  0102030405060708 a1a2a3a4 00000008  0102030405060708  99999999",
        expected,
        &word,
    );
    let expected = Headers {
        xrceth: XrcEth { srqn: 0x05_0607 },
        reth,
        ..headers(Opcode::XrcAtomicWrite)
    };
    check(
        "bd00ffff 00020304 00112233  00050607  0102030405060708 a1a2a3a4 00000008  0102030405060708  99999999",
        expected,
        &word,
    );
}

#[test]
fn xrc_requests_name_a_queue_and_answers_do_not() {
    let expected = Headers {
        xrceth: XrcEth { srqn: 0x05_0607 },
        immdt: ImmDt {
            data: [0xd1, 0xd2, 0xd3, 0xd4],
        },
        ..headers(Opcode::XrcSendOnlyImm)
    };
    check(
        "a500ffff 00020304 00112233  00050607  d1d2d3d4  01020304  99999999",
        expected,
        &[1, 2, 3, 4],
    );
    let middle = Headers {
        xrceth: XrcEth { srqn: 0x05_0607 },
        ..headers(Opcode::XrcWriteMiddle)
    };
    check("a700ffff 00020304 00112233  00050607  01  99999999", middle, &[1]);
    let bytes = packet("b100ffff 00020304 00112233  1f000005  99999999");
    let answer = RocePacket::parse(&bytes).unwrap();
    assert_eq!(answer.opcode(), Opcode::XrcAcknowledge);
    assert_eq!(answer.xrceth(), None);
    assert_eq!(answer.aeth().map(|aeth| aeth.msn), Some(5));
}

#[test]
fn too_short_for_their_headers() {
    for hex in [
        "1c00ffff 00020304 00112233  00000001  0102030405060708 a1a2a3a4 000001  99999999",
        "a400ffff 00020304 00112233  000506  99999999",
        "1d00ffff 00020304 00112233  0102030405060708  99999999",
    ] {
        assert!(RocePacket::parse(&packet(hex)).is_err(), "{hex}");
    }
}
