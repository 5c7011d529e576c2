//! A JSON parser for requests. It borrows from the body, converts arrays on demand, and limits nesting.
//!
//! Error messages and offsets are Triton's. `NaN` and `Infinity` are numbers. `serde_json` supports neither.

mod elements;
mod parser;
mod value;

pub use elements::{push_element, shape_mismatch, tensor_bytes};
pub use parser::parse;
pub use value::{Value, in_field};

#[cfg(test)]
mod tests;
