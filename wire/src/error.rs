//! What can be wrong with bytes that claim to be a packet or a message.

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
