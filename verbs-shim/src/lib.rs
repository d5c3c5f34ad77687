//! Placeholder of the room verbs-shim.
