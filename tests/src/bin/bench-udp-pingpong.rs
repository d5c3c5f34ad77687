//! The floor of round trips: two processes that spin on plain UDP sockets, without any protocol.
//!
//!     bench-udp-pingpong ADDRESS:PORT                    # answers, until it is ended
//!     bench-udp-pingpong ADDRESS:PORT PEER:PORT [COUNT]  # asks; prints the microseconds of a round trip (mean)

use std::env;
use std::error::Error;
use std::io::ErrorKind;
use std::net::{SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

/// Bytes of payload.
const SIZE: usize = 64;
const COUNT: u32 = 20_000;
/// How long all may take.
const PATIENCE: Duration = Duration::from_secs(60);

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = env::args().skip(1).collect();
    let own: SocketAddr = args
        .first()
        .ok_or("usage: bench-udp-pingpong OWN [PEER [COUNT]]")?
        .parse()?;
    let socket = UdpSocket::bind(own)?;
    socket.set_nonblocking(true)?;
    let Some(peer) = args.get(1) else {
        return answer(&socket);
    };
    let count = args.get(2).map_or(Ok(COUNT), |count| count.parse())?;
    let count: u32 = count;
    let start = Instant::now();
    ask(&socket, peer.parse()?, count)?;
    println!(
        "{:.2}",
        start.elapsed().as_secs_f64() * 1e6 / f64::from(count.max(1))
    );
    Ok(())
}

/// Sends back whatever comes.
fn answer(socket: &UdpSocket) -> Result<(), Box<dyn Error>> {
    let mut buffer = [0; SIZE];
    loop {
        let (len, peer) = spin(socket, &mut buffer, None)?;
        socket.send_to(&buffer[..len], peer)?;
    }
}

/// Makes `count` round trips.
fn ask(socket: &UdpSocket, peer: SocketAddr, count: u32) -> Result<(), Box<dyn Error>> {
    let mut buffer = [0; SIZE];
    let deadline = Instant::now() + PATIENCE;
    for turn in 0..u64::from(count) {
        buffer[..8].copy_from_slice(&turn.to_le_bytes());
        socket.send_to(&buffer, peer)?;
        spin(socket, &mut buffer, Some(deadline))?;
        if buffer[..8] != turn.to_le_bytes() {
            return Err("the answer is not to what was asked".into());
        }
    }
    Ok(())
}

/// Receives without ever sleeping.
fn spin(
    socket: &UdpSocket,
    buffer: &mut [u8],
    deadline: Option<Instant>,
) -> Result<(usize, SocketAddr), Box<dyn Error>> {
    loop {
        match socket.recv_from(buffer) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                if deadline.is_some_and(|deadline| Instant::now() > deadline) {
                    return Err("no answer".into());
                }
            }
            result => return Ok(result?),
        }
    }
}
