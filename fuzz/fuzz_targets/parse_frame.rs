//! An Ethernet frame: what is taken can be built, and the built frame is taken and verifies.
#![no_main]

use ferroce_wire::{Frame, GrhArea, frame};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let _ = GrhArea::parse(bytes).map(|area| {
        assert_eq!(GrhArea::parse(&area.to_bytes()), Ok(area));
        area.gids()
    });
    let Ok(parsed) = Frame::parse(bytes) else { return };
    let (network, packet) = (parsed.datagram.network, parsed.datagram.packet);
    let sound = parsed.datagram.verify().is_ok();

    let mut built = vec![0; bytes.len() + 8];
    let headers = packet.headers();
    let Ok(len) = frame::build(&parsed.ethernet, &network, &headers, packet.payload(), &mut built) else {
        // Room for the right padding there was; so the packet is too long for IP with it.
        assert!(parsed.datagram.bytes().len() > 65_500);
        return;
    };
    let again = Frame::parse(&built[..len]).expect("a frame just built is a frame");
    assert_eq!(again.datagram.verify(), Ok(()));
    assert_eq!(again.ethernet, parsed.ethernet);
    assert_eq!(again.datagram.packet.payload(), packet.payload());
    assert_eq!(
        (again.datagram.network.src(), again.datagram.network.dst()),
        (network.src(), network.dst())
    );
    if sound && again.datagram.packet.bth().pad == packet.bth().pad {
        assert_eq!(again.datagram.bytes().len(), parsed.datagram.bytes().len());
    }
});
