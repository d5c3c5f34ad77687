//! What can be wrong with bytes that claim to be a packet or a message, and with a packet to build.

use thiserror::Error;

/// Why bytes were refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum ParseError {
    /// The bytes end before the header or message does.
    #[error("{what} cut short: {need} bytes needed, {have} there")]
    Truncated {
        /// The header or message.
        what: &'static str,
        /// Bytes it needs.
        need: usize,
        /// Bytes it got.
        have: usize,
    },
    /// A BTH opcode of no transport that RoCE carries.
    #[error("unknown BTH opcode {0:#04x}")]
    UnknownOpcode(u8),
    /// A field holds a value that the standard does not allow there.
    #[error("{what}: value {value:#x} not allowed")]
    Field {
        /// The field.
        what: &'static str,
        /// What it holds.
        value: u32,
    },
    /// The ICRC does not fit the bytes it covers.
    #[error("ICRC {received:#010x} does not match the packet, which has {computed:#010x}")]
    BadIcrc {
        /// The value over the bytes received.
        computed: u32,
        /// The value the packet carries.
        received: u32,
    },
    /// A frame or packet that is sound but not RoCE.
    #[error("not RoCE: {0}")]
    NotRoce(&'static str),
}

/// Why a packet could not be built.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum BuildError {
    /// The buffer is too short for the packet.
    #[error("the packet needs {need} bytes, its buffer has {have}")]
    NoRoom {
        /// Bytes of the packet.
        need: usize,
        /// Bytes of the buffer.
        have: usize,
    },
    /// The packet would be longer than an IP packet can be.
    #[error("the packet would be {0} bytes long, more than IP allows")]
    TooLong(usize),
}
