//! Binary `launch`.
fn main() {}
