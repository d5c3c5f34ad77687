//! Tests of RDMA CM, in virtual time.

mod binding;
mod connections;
mod datagrams;
mod exchange;
mod keepsakes;
mod lobby;
mod programs;
mod resolution;
mod world;
