//! The verbs: one file per object.

pub mod event_pipe;
