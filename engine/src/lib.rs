//! The Ferroce engine: RoCEv2 transports, queues, memory keys and completions, and the links that carry their packets.
//!
//! The protocol half ([`device`], `transport`, `queue`, `qp`, [`memory`]) does no I/O and reads no clock: it takes
//! packets, work requests and a [`time::Time`], and gives packets, completions, events and the next deadline.
//! The other half drives it: [`link`]s move batches of packets, [`control`] talks to the daemon that owns the devices.

pub mod cm;
pub mod control;
pub mod device;
pub mod environment;
pub mod link;
pub mod memory;
mod qp;
pub mod queue;
pub mod rdma_cm;
pub mod runtime;
mod signals;
pub mod time;
mod transport;
pub mod verbs;
