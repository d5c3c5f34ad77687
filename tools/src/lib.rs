//! Placeholder of the room tools.
