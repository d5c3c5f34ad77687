//! Interfaces in XDP mode: the program that steers their packets ([`steering`]), the port behind it, who has a seat, and
//! the next hops of frames ([`hops`]).

mod bpf;
pub mod hops;
pub mod steering;
#[cfg(test)]
mod testing;
