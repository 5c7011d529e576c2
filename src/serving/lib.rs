//! Models by name: their life, their requests, their statistics.
//!
//! A [`Server`] loads the models of a repository through [`BackendFactory`] and hands them requests: it finds the version
//! meant, checks an [`InferRequest`] against the model's configuration, and completes and counts each [`InferResponse`].
//! Ensembles are built in: their steps are requests to models of the same server.
//!
//! Leaves wire formats to `front` and the work to `backends`.
#![forbid(unsafe_code)]

mod backend;
mod check;
mod ensemble;
mod error;
mod lifecycle;
mod model;
mod registry;
mod request;
mod server;
mod statistics;
mod step;
mod tensor;
mod watch;

pub use backend::{Backend, BackendFactory, LoadRequest};
pub use error::{ErrorKind, InferError};
pub use lifecycle::{LoadFailure, LoadOverrides};
pub use registry::{ModelIndexEntry, ModelState};
pub use request::{CorrelationId, InferRequest, InferResponse, Parameter, ResponseSender, ResponseStream};
pub use server::{ControlMode, ModelMetadata, Server, ServerConfig, ServerMetadata, TensorMetadata};
pub use statistics::{
    BatchStatistics, FIRST_RESPONSE_BUCKETS_MS, FailureCounts, FirstResponse, InferStatistics, ModelStatistics,
    ResponseStatistics, StatisticDuration,
};
pub use step::EnsembleStep;
pub use tensor::{DataType, Tensor};
