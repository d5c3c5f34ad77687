//! Placeholder of the room wire.
