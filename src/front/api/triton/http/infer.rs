//! Infer over HTTP: JSON and the binary-tensor extension.

mod input;
mod parameters;
mod raw;
mod request;
mod response;

pub use parameters::{model_parameter, set_parameter};
pub use raw::read_raw;
pub use request::{ParsedRequest, not_in_body, read};
pub use response::write;

#[cfg(test)]
mod tests;
