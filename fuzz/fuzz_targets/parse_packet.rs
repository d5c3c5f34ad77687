//! A UDP payload: taken apart, its headers come out and go in again.
#![no_main]

use ferroce_wire::{Headers, RocePacket};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Ok(packet) = RocePacket::parse(bytes) else {
        return;
    };
    let headers = packet.headers();
    let pad = usize::from(packet.bth().pad);
    assert_eq!(packet.header_bytes().len(), headers.header_len());
    assert_eq!(
        headers.header_len() + packet.payload().len() + pad + 4,
        bytes.len()
    );
    assert_eq!(packet.covered().len() + 4, bytes.len());
    assert_eq!(packet.icrc_bytes(), bytes[bytes.len() - 4..]);

    // Bits that are reserved in extension headers are dropped; nothing else is.
    let mut emitted = [0; Headers::MAX_LEN + 8];
    let len = headers.emit(&mut emitted);
    let again = Headers::parse(&emitted[..len + pad + 4]).expect("emitted headers are headers");
    assert_eq!(again, headers);
    assert_eq!(emitted[..12], bytes[..12]);
});
