//! Room `repository`.
#![forbid(unsafe_code)]

mod error;
mod json;
pub mod proto;
mod syntax;
mod text_format;

pub use error::RepositoryError;
pub use json::{from_json, to_json};
pub use proto::ModelConfig;
