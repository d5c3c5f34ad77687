//! The tools of Ferroce: what `ferroced` (the daemon) and `ferroce` (the command line) are made of.

#![deny(unsafe_code)]

pub mod daemon;
pub mod netlink;
