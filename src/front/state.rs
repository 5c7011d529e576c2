//! What every protocol shares.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use http::HeaderMap;
use serving::{DataType, InferError, InferResponse, Server, SpanContext, Trace};
use tokio::sync::Semaphore;

use crate::api::triton::classification::classify;
use crate::api::triton::output_request::OutputRequest;
use crate::api::triton::shared_memory::SharedMemory;
use crate::config::{Config, ConfigError};
use crate::telemetry::log_settings::LogSettings;
use crate::telemetry::metrics_settings::MetricsSource;
use crate::telemetry::trace_settings::{TraceChanges, TraceOptions, TraceSettings, TraceValues};
use crate::transport::budget::{Budget, Pace};

/// The models and the front's own state.
pub struct State {
    /// Settings.
    pub config: Config,
    /// The models.
    pub server: Arc<Server>,
    /// Regions that clients registered.
    pub memory: SharedMemory,
    /// What is logged.
    pub log: LogSettings,
    /// Metrics beside the models' own.
    pub sources: Vec<Arc<dyn MetricsSource>>,
    /// What requests hold of memory.
    pub budget: Arc<Budget>,
    /// One for each gRPC call that may still be opened.
    pub grpc_calls: Arc<Semaphore>,
    trace: TraceSettings,
    is_draining: AtomicBool,
    is_leaving: AtomicBool,
}

impl State {
    /// Fresh state over `server`.
    ///
    /// # Errors
    /// When the trace settings cannot be.
    pub fn new(config: Config, server: Arc<Server>, sources: Vec<Arc<dyn MetricsSource>>) -> Result<Self, ConfigError> {
        let pace = Pace { patience: config.http_body_timeout, min_rate: config.min_body_rate };
        let budget = Budget::new(config.max_bytes_in_flight, pace);
        let memory = SharedMemory::new(config.allow_client_shm, config.client_objects.clone())
            .within(config.max_shm_regions, *server.limits(), &budget)
            .with_devices(config.client_devices.clone());
        let log = LogSettings::new(config.log.clone());
        let is_trusted = config.trace.allows_tensors || config.restricts_trace();
        let trace = TraceOptions { allows_tensors: is_trusted, ..config.trace.clone() };
        let trace = TraceSettings::new(&trace).map_err(|reason| ConfigError { field: "trace", reason })?;
        Ok(Self {
            budget,
            grpc_calls: Arc::new(Semaphore::new(config.max_grpc_streams)),
            config,
            server,
            memory,
            log,
            sources,
            trace,
            is_draining: AtomicBool::new(false),
            is_leaving: AtomicBool::new(false),
        })
    }

    /// Answers "not ready" from now on.
    pub fn begin_drain(&self) {
        self.is_draining.store(true, Ordering::Release);
    }

    /// Whether the server is about to end.
    pub fn is_draining(&self) -> bool {
        self.is_draining.load(Ordering::Acquire)
    }

    /// Connections end with their next request from now on, for another world takes new ones.
    pub fn begin_leaving(&self) {
        self.is_leaving.store(true, Ordering::Release);
    }

    /// Whether another world takes new connections.
    pub fn is_leaving(&self) -> bool {
        self.is_leaving.load(Ordering::Acquire)
    }

    /// Whether requests are welcome.
    pub fn is_ready(&self) -> bool {
        !self.is_draining() && self.server.is_ready()
    }

    /// The span of the client's that a request with these headers belongs to, where anybody wants to know.
    pub fn span_context(&self, headers: &HeaderMap) -> Option<SpanContext> {
        let header = || SpanContext::parse(headers.get("traceparent")?.to_str().ok()?);
        self.trace.takes_context().then(header).flatten()
    }

    /// A trace for a request to `model`, when it is one of those to be traced.
    pub fn sample_trace(&self, model: &str, context: Option<SpanContext>) -> Option<Trace> {
        self.trace.sample(model, context)
    }

    /// Changes trace settings of a model, or the server's when `model` is empty; returns all of them.
    ///
    /// # Errors
    /// When there is no such model, or a value cannot be.
    pub fn update_trace(&self, model: &str, changes: TraceChanges) -> Result<TraceValues, InferError> {
        if !model.is_empty() && self.server.model_config(model, "").is_err() {
            return Err(InferError::invalid(format!("Request for unknown model : {model}")));
        }
        if changes.is_empty() { Ok(self.trace.get(model)) } else { self.trace.update(model, changes) }
    }

    /// Looks up the type that a model of a name and version declares for an input.
    pub fn declared_datatype(&self) -> impl Fn(&str, &str, &str) -> Option<DataType> {
        |model, version, name| {
            let config = self.server.model_config(model, version).ok()?;
            let input = config.input.iter().find(|input| input.name == name)?;
            DataType::from_config(input.data_type())
        }
    }

    /// Brings the outputs into the form that the client requested.
    ///
    /// # Errors
    /// When an output cannot take that form.
    pub fn deliver(&self, asks: &[OutputRequest], mut response: InferResponse) -> Result<InferResponse, InferError> {
        for ask in asks {
            let Some(output) = response.outputs.iter_mut().find(|output| output.name == ask.name) else { continue };
            if ask.num_classes > 0 {
                let config = self.server.model_config(&response.model_name, &response.model_version)?;
                let labels = self.server.output_labels(&response.model_name, &response.model_version, &ask.name);
                *output = classify(output, ask.num_classes, config.max_batch_size > 0, labels.as_deref())?;
            }
            // Without data there is nothing to write, or the model has written it.
            if let Some(region) = ask.region.as_ref().filter(|_| !output.data.is_empty()) {
                self.memory.write(region, &output.name, &output.data)?;
                output.data.clear();
            }
        }
        Ok(response)
    }
}
