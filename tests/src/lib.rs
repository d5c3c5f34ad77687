//! Programs for the tests and benches, in `src/bin`.
