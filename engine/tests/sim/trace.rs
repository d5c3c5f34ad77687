//! Prints the packets of a failing program.

use std::sync::atomic::{AtomicBool, Ordering};

use ferroce_engine::link::sim::SimLink;
use ferroce_engine::link::{Path, Qpns, Transmit, TransmitError};
use ferroce_engine::memory::Fault;
use ferroce_engine::time::Time;
use ferroce_wire::Bth;

/// Whether every packet is printed.
pub static TRACE: AtomicBool = AtomicBool::new(false);

/// Prints a packet, BTH first, if wanted.
pub fn trace(side: usize, now: Time, way: &str, packet: &[u8]) {
    if !TRACE.load(Ordering::Relaxed) {
        return;
    }
    let micros = now.since(Time::ZERO).as_micros();
    match Bth::parse(packet) {
        Ok(bth) => {
            let header = packet.get(Bth::LEN..bth.opcode.header_len()).unwrap_or_default();
            let ack = if bth.ack_request { " A" } else { "" };
            println!(
                "{micros:>9} us, node {side} {way} {} to {:#x} psn {:#x}{ack} {header:02x?} {} bytes",
                bth.opcode.name(),
                bth.dest_qpn,
                bth.psn.value(),
                packet.len()
            );
        }
        Err(error) => println!("{micros:>9} us, node {side} {way} {error}"),
    }
}

/// A link that prints what goes into it.
pub struct Traced<'a> {
    /// The node.
    pub side: usize,
    /// The time.
    pub now: Time,
    /// The link that takes the packets.
    pub link: &'a mut SimLink,
}

impl Transmit for Traced<'_> {
    fn packet(
        &mut self,
        path: &Path,
        qpns: Qpns,
        len: usize,
        fill: &mut dyn FnMut(&mut [u8]) -> Result<(), Fault>,
    ) -> Result<(), TransmitError> {
        let (side, now) = (self.side, self.now);
        self.link.packet(path, qpns, len, &mut |out| {
            fill(out)?;
            trace(side, now, "sends", out);
            Ok(())
        })
    }
}
