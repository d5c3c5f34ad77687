//! ferroce
fn main() {}
