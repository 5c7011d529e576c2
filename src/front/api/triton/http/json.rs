//! A JSON reader for requests: borrows from the body, builds arrays only on request, bounds nesting.
//!
//! Error words and offsets are those that Triton's clients know. `NaN` and `Infinity` are read as numbers.

mod elements;
mod parser;
mod value;

pub use elements::{push_element, shape_mismatch, tensor_bytes};
pub use parser::parse;
pub use value::{Value, in_field};

#[cfg(test)]
mod tests;
