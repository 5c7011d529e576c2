//! State that all protocols share.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

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
use crate::transport::budget::{Budget, ProgressLimits};

/// The addresses of the services, with the ports that the system chose.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Addresses {
    /// KServe gRPC.
    pub grpc: Option<SocketAddr>,
    /// KServe HTTP.
    pub http: Option<SocketAddr>,
    /// Metrics.
    pub metrics: Option<SocketAddr>,
}

/// The models, and the state of the front.
pub struct State {
    /// Settings.
    pub config: Config,
    /// The models.
    pub server: Arc<Server>,
    /// Shared memory that clients registered.
    pub memory: SharedMemory,
    /// Log settings.
    pub log: LogSettings,
    /// Sources of further metrics.
    pub sources: Vec<Arc<dyn MetricsSource>>,
    /// The memory budget of requests.
    pub budget: Arc<Budget>,
    /// The addresses of the services, once all ports are open.
    pub addresses: OnceLock<Addresses>,
    /// One permit per gRPC call that may still be opened.
    pub grpc_calls: Arc<Semaphore>,
    trace: TraceSettings,
    is_draining: AtomicBool,
    is_leaving: AtomicBool,
}

impl State {
    /// Initial state for the models of `server`.
    ///
    /// # Errors
    /// When the trace settings are invalid.
    pub fn new(config: Config, server: Arc<Server>, sources: Vec<Arc<dyn MetricsSource>>) -> Result<Self, ConfigError> {
        let progress = ProgressLimits { timeout: config.http_body_timeout, min_rate: config.min_body_rate };
        let budget = Budget::new(config.max_bytes_in_flight, progress);
        let memory = SharedMemory::new(config.allow_client_shm, config.client_objects.clone())
            .with_limits(config.max_shm_regions, *server.limits(), &budget)
            .with_devices(config.client_devices.clone());
        let log = LogSettings::new(config.log.clone());
        let is_trusted = config.trace.allows_tensors || config.restricts_trace();
        let trace = TraceOptions { allows_tensors: is_trusted, ..config.trace.clone() };
        let trace = TraceSettings::new(&trace).map_err(|reason| ConfigError { field: "trace", reason })?;
        Ok(Self {
            budget,
            addresses: OnceLock::new(),
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

    /// Makes the readiness probes negative.
    pub fn begin_drain(&self) {
        self.is_draining.store(true, Ordering::Release);
    }

    /// Whether the server is shutting down.
    pub fn is_draining(&self) -> bool {
        self.is_draining.load(Ordering::Acquire)
    }

    /// Makes connections end after their next request, because another process accepts new connections.
    pub fn begin_leaving(&self) {
        self.is_leaving.store(true, Ordering::Release);
    }

    /// Whether another process accepts new connections.
    pub fn is_leaving(&self) -> bool {
        self.is_leaving.load(Ordering::Acquire)
    }

    /// Whether requests are accepted.
    pub fn is_ready(&self) -> bool {
        !self.is_draining() && self.server.is_ready()
    }

    /// The client's trace context of a request with these headers, if traces need it.
    pub fn span_context(&self, headers: &HeaderMap) -> Option<SpanContext> {
        let header = || SpanContext::parse(headers.get("traceparent")?.to_str().ok()?);
        self.trace.takes_context().then(header).flatten()
    }

    /// Starts a trace of a request to `model` if the request is sampled.
    pub fn sample_trace(&self, model: &str, context: Option<SpanContext>) -> Option<Trace> {
        self.trace.sample(model, context)
    }

    /// Changes trace settings of a model, or of the server if `model` is empty. Returns all settings.
    ///
    /// # Errors
    /// When the model does not exist or a value is invalid.
    pub fn update_trace(&self, model: &str, changes: TraceChanges) -> Result<TraceValues, InferError> {
        if !model.is_empty() && self.server.model_config(model, "").is_err() {
            return Err(InferError::invalid(format!("Request for unknown model : {model}")));
        }
        if changes.is_empty() { Ok(self.trace.get(model)) } else { self.trace.update(model, changes) }
    }

    /// Returns a function from a model, its version and an input to the declared type of the input.
    pub fn declared_datatype(&self) -> impl Fn(&str, &str, &str) -> Option<DataType> {
        |model, version, name| {
            let config = self.server.model_config(model, version).ok()?;
            let input = config.input.iter().find(|input| input.name == name)?;
            DataType::from_config(input.data_type())
        }
    }

    /// Converts the outputs to the requested forms: classes, or data in shared memory.
    ///
    /// # Errors
    /// When an output does not have the requested form.
    pub fn deliver(
        &self,
        requested: &[OutputRequest],
        mut response: InferResponse,
    ) -> Result<InferResponse, InferError> {
        for form in requested {
            let Some(output) = response.outputs.iter_mut().find(|output| output.name == form.name) else { continue };
            if form.num_classes > 0 {
                let config = self.server.model_config(&response.model_name, &response.model_version)?;
                let labels = self.server.output_labels(&response.model_name, &response.model_version, &form.name);
                *output = classify(output, form.num_classes, config.max_batch_size > 0, labels.as_deref())?;
            }
            // Without data, there is nothing to write or the model has written it.
            if let Some(region) = form.region.as_ref().filter(|_| !output.data.is_empty()) {
                self.memory.write(region, &output.name, &output.data)?;
                output.data.clear();
            }
        }
        Ok(response)
    }
}
