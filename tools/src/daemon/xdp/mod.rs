//! Interfaces in XDP mode: the program that steers their packets ([`steering`]), the port behind it, who has a seat
//! ([`device`]), and the next hops of frames ([`hops`]).

mod bpf;
pub mod device;
mod heirloom;
pub mod hops;
mod ledger;
pub mod plan;
pub mod steering;
#[cfg(test)]
mod testing;

pub use heirloom::is_own;
