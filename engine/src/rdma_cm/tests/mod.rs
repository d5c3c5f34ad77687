//! Tests of RDMA CM, in virtual time.

mod connections;
mod exchange;
mod world;
