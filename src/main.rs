//! Binary `trireme`.
fn main() {}
