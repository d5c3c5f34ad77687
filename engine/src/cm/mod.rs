//! The connection manager's protocol: messages, retries, time-wait (IBTA 12; reference section 13).
//!
//! Sans-I/O and deterministic. One [`Cm`] has the connections of a host. It knows comm ids, GUIDs, QPNs, PSNs and
//! private data; ports, IP addresses and what programs see are [`crate::rdma_cm`]'s.
#![deny(unsafe_code)]
