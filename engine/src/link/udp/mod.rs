//! The link of every host: UDP sockets, segmented and merged by the kernel, without privilege.
//!
//! One socket on port 4791, leased from the daemon, receives what is for this process; sockets of our own send.
//! All that travels here is RoCE v2, whatever a path says: a device in XDP mode has its packets to the host itself, and
//! those whose next hop it does not know yet, go this way.

mod cmsg;
mod flows;
mod identification;
mod membership;
mod neighbour;
mod receive;
mod socket;
mod transmit;
mod tunnel;

#[cfg(test)]
mod tests;

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

use super::{Link, Path, Qpns, RxPacket, Transmit, TransmitError};
use crate::memory::Fault;

pub(crate) use membership::most_groups;
pub use neighbour::Neighbours;
pub(super) use receive::coarse_now;
pub use socket::leave;

/// Bytes that the kernel counts for a received packet beyond its data: `struct sk_buff`.
const SKB: usize = 256;
/// Bytes in the data buffer beyond the UDP payload: network headers, and `struct skb_shared_info`.
const SKB_DATA: usize = 64 + 320;
/// Packets that even the smallest buffer takes.
const LEAST_WINDOW: usize = 2;

/// Bytes that the kernel counts for a packet that it did not merge.
fn counted(len: usize) -> usize {
    (len + SKB_DATA).next_power_of_two() + SKB
}

/// A link over UDP sockets.
pub struct UdpLink {
    receiver: receive::Receiver,
    transmitter: transmit::Transmitter,
    /// Bytes the receive socket holds, as the kernel counts.
    receive_buffer: usize,
    /// It is a half of another link, and its counters say so.
    half: bool,
}

/// A counter by its names: as the link, and as half of another.
macro_rules! counter {
    ($name:literal, $value:expr) => {
        ([$name, concat!("udp_", $name)], $value)
    };
}

impl UdpLink {
    /// Makes the link of the process that leased `slot`: `socket` is the slot's socket, bound to port 4791. `loopback`:
    /// its packets travel over the loopback interface. What goes to `neighbours` does not overrun them.
    pub fn new(socket: OwnedFd, slot: u8, loopback: bool, neighbours: Neighbours) -> io::Result<UdpLink> {
        let receiver = receive::Receiver::new(socket, slot, loopback)?;
        let [receive_buffer] = socket::get(receiver.socket(), libc::SOL_SOCKET, libc::SO_RCVBUF)?;
        Ok(UdpLink {
            transmitter: transmit::Transmitter::new(receiver.socket(), loopback, neighbours)?,
            receive_buffer: usize::try_from(receive_buffer).unwrap_or(0),
            receiver,
            half: false,
        })
    }

    /// The same as half of another link: its counters begin with `udp_`.
    pub fn half(self) -> UdpLink {
        UdpLink { half: true, ..self }
    }

    /// Datagrams that the kernel dropped for want of room in the receive socket.
    fn socket_drops(&self) -> u64 {
        let [.., drops] = socket::meminfo(self.receiver.socket());
        (drops as u32).into()
    }
}

impl Transmit for UdpLink {
    fn packet(
        &mut self,
        path: &Path,
        qpns: Qpns,
        len: usize,
        fill: &mut dyn FnMut(&mut [u8]) -> Result<(), Fault>,
    ) -> Result<(), TransmitError> {
        self.transmitter.packet(path, qpns.dest, len, fill)
    }
}

impl Link for UdpLink {
    fn receive(&mut self, sink: &mut dyn FnMut(&RxPacket<'_>)) -> io::Result<usize> {
        self.receiver.receive(sink)
    }

    fn flush(&mut self) -> io::Result<bool> {
        self.transmitter.flush()
    }

    fn receive_fds(&self, fds: &mut Vec<RawFd>) {
        fds.push(self.receiver.socket().as_raw_fd());
    }

    fn transmit_fd(&self) -> Option<RawFd> {
        self.transmitter.full_fd()
    }

    /// Half of what our own receive socket holds of packets that the kernel did not merge.
    fn window(&self, packet_len: usize) -> u32 {
        let packets = (self.receive_buffer / 2 / counted(packet_len)).max(LEAST_WINDOW);
        u32::try_from(packets * packet_len).unwrap_or(u32::MAX)
    }

    fn join(&mut self, group: IpAddr, ifindex: u32) -> io::Result<()> {
        self.receiver.join(group, ifindex)
    }

    fn leave(&mut self, group: IpAddr) -> io::Result<()> {
        self.receiver.leave(group)
    }

    fn counters(&self, out: &mut dyn FnMut(&'static str, u64)) {
        let (rx, tx) = (&self.receiver.counters, &self.transmitter.counters);
        let (recovered, refused) = self.receiver.identifications();
        for (names, value) in [
            counter!("rx_packets", rx.packets),
            counter!("rx_bytes", rx.bytes),
            counter!("rx_datagrams", rx.datagrams),
            counter!("rx_socket_full", self.socket_drops()),
            counter!("rx_misdirected", rx.misdirected),
            counter!("rx_no_address", rx.no_address),
            counter!("rx_other_group", rx.other_group),
            counter!("rx_id_recovered", recovered),
            counter!("rx_id_refused", refused),
            counter!("tx_packets", tx.packets),
            counter!("tx_bytes", tx.bytes),
            counter!("tx_sends", tx.sends),
            counter!("tx_blocked", tx.blocked),
            counter!("tx_waits", tx.waits),
            counter!("tx_lost_mtu", tx.lost_mtu),
            counter!("tx_lost_unreachable", tx.lost_unreachable),
            counter!("tx_lost_refused", tx.lost_refused),
            counter!("tx_lost_other", tx.lost_other),
        ] {
            out(names[usize::from(self.half)], value);
        }
    }
}
