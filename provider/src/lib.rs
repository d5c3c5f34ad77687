//! Placeholder of the room provider.
