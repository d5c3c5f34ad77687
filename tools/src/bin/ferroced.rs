//! ferroced
fn main() {}
