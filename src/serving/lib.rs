//! Loads models, serves requests to them, and keeps their statistics.
//!
//! A [`Server`] loads the models of a repository through [`BackendFactory`]. For each [`InferRequest`] it finds the model
//! version, checks the request against the model's configuration, passes it to the [`Backend`], and completes and counts each
//! [`InferResponse`]. Ensembles are built in: their steps are requests to models of the same server.
//!
//! Wire formats belong to `front`, and the models' work to `backends`.
//!
//! ```
//! use std::{collections::HashMap, sync::Arc};
//! use futures::future::{BoxFuture, FutureExt};
//! use serving::*;
//!
//! /// Returns its inputs under the name of the configured output.
//! struct Echo;
//!
//! impl Backend for Echo {
//!     fn infer(&self, request: InferRequest) -> Result<ResponseStream, InferError> {
//!         let outputs = request.inputs.into_iter().map(|tensor| Tensor { name: "OUTPUT0".into(), ..tensor }).collect();
//!         Ok(ResponseStream::ready(InferResponse { outputs, ..InferResponse::default() }))
//!     }
//!
//!     fn drain(&self) -> BoxFuture<'_, ()> {
//!         std::future::ready(()).boxed()
//!     }
//! }
//!
//! impl BackendFactory for Echo {
//!     fn load(&self, _: LoadRequest) -> BoxFuture<'static, Result<Arc<dyn Backend>, InferError>> {
//!         std::future::ready(Ok(Arc::new(Echo) as Arc<dyn Backend>)).boxed()
//!     }
//! }
//!
//! # tokio::runtime::Runtime::new()?.block_on(async {
//! # let root = tempfile::tempdir()?;
//! # let repository = root.path().to_owned();
//! std::fs::create_dir_all(repository.join("echo/1"))?;
//! std::fs::write(repository.join("echo/config.pbtxt"), r#"
//!     backend: "echo"
//!     input [ { name: "INPUT0" data_type: TYPE_INT32 dims: [ -1 ] } ]
//!     output [ { name: "OUTPUT0" data_type: TYPE_INT32 dims: [ -1 ] } ]
//! "#)?;
//! let factories = HashMap::from([("echo".to_owned(), Arc::new(Echo) as Arc<dyn BackendFactory>)]);
//! let server = Server::new(ServerConfig { repositories: vec![repository], ..ServerConfig::default() }, factories)?;
//! server.load_all().await.expect("one good model");
//!
//! let inputs = vec![Tensor::from_i32("INPUT0", &[2], &[1, 2])];
//! let mut stream = server.infer(InferRequest { model_name: "echo".into(), inputs, ..InferRequest::default() })?;
//! let response = stream.next_response().await.expect("one response")?;
//! assert_eq!((response.model_version.as_str(), &response.outputs[0].name[..]), ("1", "OUTPUT0"));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! # })?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]

mod adapters;
mod admission;
mod backend;
mod cache;
mod call_counter;
mod check;
mod client_memory;
mod counters;
mod delta;
mod ensemble;
mod ensemble_step;
mod error;
mod found_model;
mod generate_call;
mod histogram;
mod index_memo;
mod labels;
mod lifecycle;
mod limits;
mod metadata;
mod model;
mod outcome;
mod progress;
mod rate_limited_log;
mod recent;
mod registry;
mod request;
mod request_metrics;
mod response_counter;
mod response_order;
mod scheduler;
mod sender;
mod server;
mod server_config;
mod sleeper;
mod source;
mod statistics;
mod stream;
mod tensor;
mod text;
mod text_request;
mod trace;
mod warmup;
mod weights;

pub use adapters::{AdapterInfo, Adapters};
pub use backend::{Backend, BackendFactory, BatchedRequest, LoadRequest};
pub use cache::CacheStatistics;
pub use call_counter::CallCounter;
pub use client_memory::{ClientMemory, ClientSlice, CopyBudget, copy_within};
pub use delta::{DeltaInfo, Elements, OutputDelta, StreamEvent, StreamItem};
pub use ensemble_step::EnsembleStep;
pub use error::{ErrorKind, InferError};
pub use found_model::LoadOverrides;
pub use generate_call::{EventStream, GenerateCall};
pub use generation::Timestamp;
pub use histogram::{Histogram, HistogramValues, Tally};
pub use lifecycle::{LoadCause, LoadFailure};
pub use limits::{Limit, Limits, SharedLimit};
pub use metadata::{ModelMetadata, ServerMetadata, TensorMetadata};
pub use progress::{Generation, ProgressReporter};
pub use rate_limited_log::{RateLimitedLog, SuppressedCount};
pub use registry::{ModelIndexEntry, ModelState};
pub use request::{CorrelationId, InferRequest, InferResponse, Parameter};
pub use sender::ResponseSender;
pub use server::{ADAPTER_PARAMETER, STOPPING, Server};
pub use server_config::{ControlMode, ServerConfig};
pub use sleeper::{SleepLevel, Sleeper};
pub use source::ResponseSource;
pub use statistics::{
    BatchStatistics, FailureCounts, InferStatistics, MemoryUsage, ModelStatistics, RecentDurations, ResponseStatistics,
    StatisticDuration,
};
pub use stream::ResponseStream;
pub use tensor::{DataType, Name, Shape, Tensor, byte_strings};
pub use text::{DetokenizerModel, TextModel, TextOutput, TextOutputs};
pub use trace::{SpanContext, Trace, TraceRecord, TraceSink};
pub use weights::{NewWeights, Weights};
