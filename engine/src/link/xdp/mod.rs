//! The link of an interface in XDP mode: Ethernet frames to and from AF_XDP sockets, which a privileged daemon made.
//!
//! All programs of a [`port`] share its memory: frames ([`layout`]), the rings that give the kernel frames and take them
//! back, and the table of next hops ([`hops`]). What belongs to one program alone is its [`seat`].

pub mod hops;
pub mod layout;
mod memory;
pub mod port;
mod ring;
pub mod seat;
mod socket;

pub use layout::Geometry;
pub use port::{Features, Zerocopy};
