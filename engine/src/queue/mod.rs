//! Queues of work requests (send, receive, shared receive) and of completions.

pub mod cq;
pub(crate) mod rq;
pub(crate) mod sq;
pub(crate) mod srq;

use crate::verbs::VerbsError;

pub use cq::{Cq, CqNotify, Moderation};

/// `count` times `value`. ENOMEM if that is more memory than there is.
fn filled<T: Clone>(count: usize, value: T) -> Result<Vec<T>, VerbsError> {
    let mut all = Vec::new();
    all.try_reserve_exact(count).map_err(|_| VerbsError::NoMemory)?;
    all.resize(count, value);
    Ok(all)
}
