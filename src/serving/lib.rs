//! Models by name: their life, their requests, their statistics.
//!
//! Leaves wire formats to `front` and the work to `backends`.
#![forbid(unsafe_code)]

mod backend;
mod error;
mod request;
mod tensor;

pub use backend::{Backend, BackendFactory, LoadRequest};
pub use error::{ErrorKind, InferError};
pub use request::{CorrelationId, InferRequest, InferResponse, Parameter, ResponseSender, ResponseStream};
pub use tensor::{DataType, Tensor};
