//! The server: the operations that all protocols use.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use futures::stream::{self, StreamExt as _};
use generation::Generator;
use repository::{Repository, RepositoryError};
use tokio::time::Instant;

use crate::cache::ResponseCache;
use crate::lifecycle::{Lifecycle, LoadError, LoadFailure};
use crate::model::{InFlight, ServedModel};
use crate::registry::{Registry, parse_version};
use crate::{
    BackendFactory, ControlMode, ErrorKind, EventStream, GenerateCall, InferError, InferRequest, Limit, Limits,
    LoadOverrides, Parameter, ResponseStream, ServerConfig,
};

mod adapters;
mod metadata;
mod prefix_cache;
mod sleep;
mod text;
mod weights;

/// The parameter of a request that names an adapter (LoRA), as in Triton's vLLM backend.
pub const ADAPTER_PARAMETER: &str = "lora_name";

/// The error of a request that arrives while the server stops. The relay of `launch --keep-connections` sends such a request to the next
/// server.
pub const STOPPING: &str = "the server is stopping and takes no new requests";

/// Serves the models of a repository.
pub struct Server {
    config: ServerConfig,
    lifecycle: Arc<Lifecycle>,
    is_loaded: AtomicBool,
    is_draining: AtomicBool,
    /// Requests between the check that the server does not drain and their entry into the count of their model.
    accepting: InFlight,
    /// Whether the parts of the process respond that every model needs.
    responds: OnceLock<Box<dyn Fn() -> bool + Send + Sync>>,
}

impl Server {
    /// A server for a repository, with no model loaded yet. `factories` are by the name of their `backend`.
    ///
    /// # Errors
    /// When the repository cannot be opened.
    pub fn new(
        config: ServerConfig,
        factories: HashMap<String, Arc<dyn BackendFactory>>,
    ) -> Result<Arc<Self>, RepositoryError> {
        let repository = Repository::open(&config.repositories)?;
        let cache =
            (config.response_cache_bytes > 0).then(|| Arc::new(ResponseCache::new(config.response_cache_bytes)));
        Ok(Arc::new(Self {
            lifecycle: Lifecycle::new(
                repository,
                factories,
                config.unload_timeout,
                cache,
                config.keeps_recent_durations,
                config.limits,
            ),
            config,
            is_loaded: AtomicBool::new(false),
            is_draining: AtomicBool::new(false),
            accepting: InFlight::default(),
            responds: OnceLock::new(),
        }))
    }

    /// Limits on the contents of one request.
    pub fn limits(&self) -> &Limits {
        &self.config.limits
    }

    fn registry(&self) -> &Registry {
        &self.lifecycle.registry
    }

    /// The model that clients request by `name`, which is the model's own or one of [`ServerConfig::served_names`].
    pub fn model_of<'a>(&'a self, name: &'a str) -> &'a str {
        self.config.served_names.get(name).map_or(name, String::as_str)
    }

    /// Further names of a model.
    pub fn names_of<'a>(&'a self, model: &'a str) -> impl Iterator<Item = &'a str> {
        self.config.served_names.iter().filter(move |(_, its)| *its == model).map(|(name, _)| name.as_str())
    }

    fn resolve_number(&self, name: &str, version: Option<i64>) -> Result<Arc<ServedModel>, InferError> {
        match self.registry().resolve_number(self.model_of(name), version) {
            // An adapter has a name of its own.
            Err(error) if error.kind == ErrorKind::NotFound => self.served_with(name).ok_or(error),
            found => found,
        }
        // The models of a server that stops are unloaded while clients still send requests.
        .map_err(|error| if self.is_draining.load(Ordering::SeqCst) { stopping() } else { error })
    }

    fn resolve(&self, name: &str, version: &str) -> Result<Arc<ServedModel>, InferError> {
        self.resolve_number(name, parse_version(version)?)
    }

    /// Loads the models that the control mode names. A model that fails to load does not stop the others.
    ///
    /// # Errors
    /// When models did not load: each of them with the reason.
    pub async fn load_all(&self) -> Result<(), Vec<LoadFailure>> {
        let names = self.start_names().map_err(|error| vec![LoadFailure::of_repository(&error)])?;
        for name in &names {
            self.registry().update(name, |entry| entry.is_required = true);
        }
        let failures = self.load_each(names).await;
        self.is_loaded.store(true, Ordering::SeqCst);
        if failures.is_empty() { Ok(()) } else { Err(failures) }
    }

    /// Loads these models, several at the same time. Returns those that did not load, sorted by name.
    async fn load_each(&self, names: Vec<String>) -> Vec<LoadFailure> {
        let parallelism = self.config.load_parallelism.max(1);
        let loads = stream::iter(names).map(|name| async move {
            let mut result = self.lifecycle.load(&name, LoadOverrides::default()).await;
            for _ in 0..self.config.load_retries {
                let Err(error) = &result else { break };
                tracing::warn!("failed to load '{name}', trying again: {}", error.error);
                result = self.lifecycle.load(&name, LoadOverrides::default()).await;
            }
            let LoadError { error, cause } = result.err()?;
            Some(LoadFailure { model: name, reason: error.message.trim_end().to_owned(), cause })
        });
        let mut failures: Vec<LoadFailure> =
            loads.buffer_unordered(parallelism).filter_map(std::future::ready).collect().await;
        failures.sort_by(|left, right| left.model.cmp(&right.model));
        failures
    }

    fn start_names(&self) -> Result<Vec<String>, RepositoryError> {
        match &self.config.control_mode {
            ControlMode::Explicit { load } if *load != ["*"] => Ok(load.clone()),
            _ => self.lifecycle.repository.model_names(),
        }
    }

    /// Checks the repository once: loads new and changed models, and unloads removed ones. In mode `poll` this runs regularly.
    /// A new model counts for the server's readiness after its first successful load.
    ///
    /// # Errors
    /// When models did not load: each of them with the reason.
    pub async fn poll_repository(&self) -> Result<(), Vec<LoadFailure>> {
        let names = self.lifecycle.repository.model_names();
        let names = names.map_err(|error| vec![LoadFailure::of_repository(&error)])?;
        for removed in self.registry().names().into_iter().filter(|name| !names.contains(name)) {
            self.registry().update(&removed, |entry| entry.is_required = false);
            if !self.registry().ready_versions(&removed).is_empty() {
                self.lifecycle.unload(&removed, false).await;
            }
        }
        let failures = self.load_each(names.clone()).await;
        for name in names.iter().filter(|&name| failures.iter().all(|failure| failure.model != *name)) {
            self.registry().update(name, |entry| entry.is_required = true);
        }
        if failures.is_empty() { Ok(()) } else { Err(failures) }
    }

    /// In mode `poll`, checks the repository regularly until the server drains. Returns at once in other modes.
    pub async fn keep_polling(&self) {
        let ControlMode::Poll { interval } = self.config.control_mode else { return };
        if interval.is_zero() {
            return;
        }
        while !self.is_draining.load(Ordering::SeqCst) {
            tokio::time::sleep(interval).await;
            for failure in self.poll_repository().await.err().unwrap_or_default() {
                tracing::error!(model = failure.model, "{}", failure.reason);
            }
        }
    }

    /// Accepts a request for the model it names.
    ///
    /// # Errors
    /// When the model does not serve, the request does not fit the model, or the server is stopping.
    pub fn infer(&self, mut request: InferRequest) -> Result<ResponseStream, InferError> {
        let _accepting = self.begin_accepting()?;
        self.config.limits.check_request(&request)?;
        let model = self.resolve(&request.model_name, &request.model_version)?;
        if self.is_adapter(&model, &request.model_name) {
            let name = Parameter::String(request.model_name.to_string());
            request.parameters.insert(ADAPTER_PARAMETER.to_owned(), name);
        }
        model.infer(request)
    }

    /// Refuses a request if the server drains. Otherwise a drain begins with the requests in flight only after the request is among
    /// them, when the returned value is dropped.
    fn begin_accepting(&self) -> Result<Accepting<'_>, InferError> {
        self.accepting.enter();
        let accepting = Accepting(&self.accepting);
        if self.is_draining.load(Ordering::SeqCst) { Err(stopping()) } else { Ok(accepting) }
    }

    /// Whether a request for `model` names one of its adapters.
    fn is_adapter(&self, model: &ServedModel, requested: &str) -> bool {
        self.model_of(requested) != model.config.name && model.adapters().is_some_and(|it| it.contains(requested))
    }

    /// Properties of a model that generates text; `None` for a model without text generation.
    ///
    /// # Errors
    /// When the model does not serve.
    pub fn generator(&self, model: &str, version: &str) -> Result<Option<Generator>, InferError> {
        Ok(self.resolve(model, version)?.generator())
    }

    /// Accepts a request to generate text.
    ///
    /// # Errors
    /// When the server stops, the model does not serve or generates no text, or the request does not fit it.
    pub fn generate(&self, mut call: GenerateCall) -> Result<EventStream, InferError> {
        let _accepting = self.begin_accepting()?;
        let model = self.resolve(&call.model_name, &call.model_version)?;
        if self.is_adapter(&model, &call.model_name) {
            call.request.adapter = Some(call.model_name.to_string());
        }
        model.generate(call).map(EventStream)
    }

    /// Accepts a request that a model sends to serve its own request. It is accepted while the server drains too, because it
    /// belongs to a request in flight.
    ///
    /// # Errors
    /// When the model does not serve, or the request does not fit the model.
    pub fn infer_for_model(&self, request: InferRequest) -> Result<ResponseStream, InferError> {
        self.resolve(&request.model_name, &request.model_version)?.infer(request)
    }

    /// Whether the server runs.
    pub fn is_live(&self) -> bool {
        true
    }

    /// Makes readiness of the server and of all models depend on `responds`: whether the parts of the process respond that every
    /// model needs. Only the first call has an effect.
    pub fn set_responds(&self, responds: impl Fn() -> bool + Send + Sync + 'static) {
        let _ = self.responds.set(Box::new(responds));
    }

    fn responds(&self) -> bool {
        self.responds.get().is_none_or(|responds| responds())
    }

    /// Whether the server is ready: loading is over, it is not draining, its process responds, and, with strict readiness, every
    /// required model can serve a request now.
    pub fn is_ready(&self) -> bool {
        let is_up =
            self.is_loaded.load(Ordering::SeqCst) && !self.is_draining.load(Ordering::SeqCst) && self.responds();
        is_up && (!self.config.strict_readiness || self.registry().unready_required().is_empty())
    }

    /// The required models that are not ready, which make [`Server::is_ready`] false.
    pub fn missing_models(&self) -> Vec<String> {
        self.registry().unready_required()
    }

    /// Whether this model can serve a request now; false for an unknown model.
    ///
    /// # Errors
    /// When `version` is not a number.
    pub fn model_is_ready(&self, name: &str, version: &str) -> Result<bool, InferError> {
        let version = parse_version(version)?;
        let is_up = !self.is_draining.load(Ordering::SeqCst) && self.responds();
        Ok(is_up && self.resolve_number(name, version).is_ok_and(|model| model.is_ready()))
    }

    /// Whether this model is loaded with all models that it needs, even if it cannot serve now because its workers restart or sleep;
    /// false for an unknown model.
    pub fn model_is_loaded(&self, name: &str) -> bool {
        self.resolve_number(name, None).is_ok_and(|model| model.is_complete())
    }

    /// Like [`Server::model_is_ready`], with the model's own check where it has one, which may take seconds.
    ///
    /// # Errors
    /// When `version` is not a number.
    pub async fn probe_model(&self, name: &str, version: &str) -> Result<bool, InferError> {
        if !self.model_is_ready(name, version)? {
            return Ok(false);
        }
        match self.resolve(name, version) {
            Ok(model) => Ok(model.probe().await),
            Err(_) => Ok(false),
        }
    }

    /// Whether the model is decoupled: a request may have any number of responses.
    ///
    /// # Errors
    /// When the model does not serve.
    pub fn is_decoupled(&self, name: &str, version: &str) -> Result<bool, InferError> {
        Ok(self.resolve(name, version)?.is_decoupled)
    }

    /// Loads a model, or loads it again if its files changed.
    ///
    /// # Errors
    /// When the control mode does not allow it, or the model does not load. An old load of the model then continues to serve.
    pub async fn load_model(&self, name: &str, overrides: LoadOverrides) -> Result<(), InferError> {
        self.check_control()?;
        let limits = &self.config.limits;
        limits.check(Limit::NameBytes, name.len())?;
        limits.check(Limit::Parameters, overrides.files.len())?;
        overrides.files.keys().try_for_each(|path| limits.check(Limit::NameBytes, path.len()))?;
        let (lifecycle, model) = (self.lifecycle.clone(), name.to_owned());
        // On a task of its own, so that the load completes even if the client leaves.
        let load = tokio::spawn(async move { lifecycle.load(&model, overrides).await.map_err(|failed| failed.error) });
        load.await.map_err(|error| InferError::internal(format!("loading '{name}' panicked: {error}")))??;
        self.registry().update(name, |entry| entry.is_required = true);
        Ok(())
    }

    /// Unloads a model after its requests in flight. With `unload_dependents` it also unloads the composing models of an
    /// ensemble, except those that were requested by name. A model that is not loaded is no error.
    ///
    /// # Errors
    /// When the control mode does not allow it.
    pub async fn unload_model(&self, name: &str, unload_dependents: bool) -> Result<(), InferError> {
        self.check_control()?;
        self.lifecycle.unload(name, unload_dependents).await;
        Ok(())
    }

    fn check_control(&self) -> Result<(), InferError> {
        if self.is_draining.load(Ordering::SeqCst) {
            return Err(stopping());
        }
        match self.config.control_mode {
            ControlMode::Explicit { .. } => Ok(()),
            _ => Err(InferError::new(
                ErrorKind::Unavailable,
                "explicit model load / unload is not allowed if polling is enabled; start with \
                 `--model-control-mode=explicit`",
            )),
        }
    }

    /// Refuses new requests from now on.
    pub fn begin_drain(&self) {
        self.is_draining.store(true, Ordering::SeqCst);
    }

    /// Number of requests in flight.
    pub fn num_in_flight(&self) -> u64 {
        self.registry().all_ready().iter().map(|model| model.in_flight.count()).sum()
    }

    /// Refuses new requests, waits at most `timeout` for those in flight, and unloads every model.
    /// Returns the number of requests that were still in flight.
    pub async fn drain(&self, timeout: Duration) -> u64 {
        self.begin_drain();
        let deadline = Instant::now() + timeout;
        let _ = tokio::time::timeout_at(deadline, self.accepting.idle()).await;
        for model in self.registry().all_ready() {
            let _ = tokio::time::timeout_at(deadline, model.in_flight.idle()).await;
        }
        let num_unfinished = self.num_in_flight();
        let names = self.registry().names();
        let retire_all = futures::future::join_all(names.iter().map(|name| self.lifecycle.retire(name, |_| true)));
        let _ = tokio::time::timeout_at(deadline, retire_all).await;
        num_unfinished
    }
}

/// A request that is being accepted.
struct Accepting<'a>(&'a InFlight);

impl Drop for Accepting<'_> {
    fn drop(&mut self) {
        self.0.leave();
    }
}

/// The refusal of a server that stops.
fn stopping() -> InferError {
    InferError::unavailable(STOPPING)
}
