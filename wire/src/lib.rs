//! The bytes of RoCE: packets, their headers and CRC, and the messages of the connection manager.
//!
//! Headers are plain `Copy` structures with `parse` (from a slice), `to_bytes` and `emit`; packets
//! and messages are views of borrowed bytes. Nothing here does I/O or allocates. Parsing never
//! panics, whatever the bytes: lengths are checked first, and every doubt is a [`ParseError`].
//!
//! Sources are named by section of the project's wire reference and by the IBTA specification's
//! number. Multi-byte fields are big-endian, except the ICRC; bit 7 is a byte's most significant.
#![forbid(unsafe_code)]

mod header;

pub mod aeth;
pub mod atomic_ack_eth;
pub mod atomic_eth;
pub mod bth;
pub mod cm;
pub mod datagram;
pub mod deth;
pub mod error;
pub mod feth;
pub mod frame;
pub mod gid;
pub mod grh;
pub mod headers;
pub mod icrc;
pub mod ieth;
pub mod immdt;
pub mod mad;
pub mod mtu;
pub mod opcode;
pub mod packet;
pub mod psn;
pub mod reth;
pub mod udp_port;
pub mod xrceth;

pub use aeth::{Aeth, NakCode, Syndrome};
pub use atomic_ack_eth::AtomicAckEth;
pub use atomic_eth::AtomicEth;
pub use bth::Bth;
pub use datagram::{Datagram, Network};
pub use deth::Deth;
pub use error::{BuildError, ParseError};
pub use feth::Feth;
pub use frame::Frame;
pub use gid::Gid;
pub use grh::{Grh, GrhArea};
pub use headers::Headers;
pub use icrc::{Icrc, IdRecovery};
pub use ieth::Ieth;
pub use immdt::ImmDt;
pub use mtu::PathMtu;
pub use opcode::{Kind, Opcode, TransportClass};
pub use packet::RocePacket;
pub use psn::Psn;
pub use reth::Reth;
pub use xrceth::XrcEth;
