//! The binary interface of libibverbs, in one place.
//!
//! [`verbs`] holds the public structures, [`private`] those between libibverbs and its providers, [`version`] what
//! differs between releases of rdma-core, and [`library`] the libibverbs that is loaded in this process.

pub mod library;
pub mod private;
pub mod verbs;
pub mod version;
