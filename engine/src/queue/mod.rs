//! Queues of work requests (send, receive, shared receive) and of completions.

pub mod cq;
pub(crate) mod rq;
pub(crate) mod sq;
pub(crate) mod srq;

pub use cq::{Cq, CqNotify};
