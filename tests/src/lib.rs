//! Placeholder of the room tests.
