//! Placeholder of the room engine.
