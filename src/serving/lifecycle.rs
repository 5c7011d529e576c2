//! Loading and unloading of models.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use futures::future::{BoxFuture, FutureExt as _};
use repository::{ModelConfig, ModelSource, Repository};
use tempfile::TempDir;

use crate::cache::ResponseCache;
use crate::ensemble::{self, Ensemble};
use crate::found_model::{self, FoundModel, LoadOverrides};
use crate::model::ServedModel;
use crate::registry::{Registry, VersionState};
use crate::scheduler::{self, StateSpec};
use crate::{Backend, BackendFactory, InferError, Limits, LoadRequest, labels, warmup};

mod failures;

pub(crate) use failures::LoadError;
pub use failures::{LoadCause, LoadFailure};

/// Loads and unloads models, one operation at a time for each model.
pub(crate) struct Lifecycle {
    pub repository: Repository,
    pub registry: Arc<Registry>,
    pub factories: HashMap<String, Arc<dyn BackendFactory>>,
    /// How long an unload waits for requests in flight before it continues in the background.
    pub unload_timeout: Duration,
    pub cache: Option<Arc<ResponseCache>>,
    keeps_recent_durations: bool,
    limits: Limits,
    loaded: Mutex<BTreeMap<String, Loaded>>,
    /// One lock for each model that is being loaded or unloaded.
    load_locks: Mutex<BTreeMap<String, Arc<tokio::sync::Mutex<()>>>>,
}

/// The sources of a loaded model, to detect changes.
struct Loaded {
    config: ModelConfig,
    modified: Option<SystemTime>,
    /// Files of the load request. They exist as long as the model is loaded.
    _files: Option<TempDir>,
}

impl Lifecycle {
    pub fn new(
        repository: Repository,
        factories: HashMap<String, Arc<dyn BackendFactory>>,
        unload_timeout: Duration,
        cache: Option<Arc<ResponseCache>>,
        keeps_recent_durations: bool,
        limits: Limits,
    ) -> Arc<Self> {
        let (registry, loaded, load_locks) = Default::default();
        Arc::new(Self {
            repository,
            registry,
            factories,
            unload_timeout,
            cache,
            keeps_recent_durations,
            limits,
            loaded,
            load_locks,
        })
    }

    /// Loads a model; for an ensemble, loads its composing models first. A model that is loaded and unchanged is not loaded
    /// again.
    pub fn load(self: &Arc<Self>, name: &str, overrides: LoadOverrides) -> BoxFuture<'static, Result<(), LoadError>> {
        let (lifecycle, name) = (self.clone(), name.to_owned());
        async move {
            let load_lock = lifecycle.load_lock(&name);
            let guard = load_lock.lock().await;
            let result = lifecycle.load_locked(&name, overrides).await;
            drop(guard);
            lifecycle.remove_unused_lock(&name, load_lock);
            result
        }
        .boxed()
    }

    fn load_lock(&self, name: &str) -> Arc<tokio::sync::Mutex<()>> {
        lock(&self.load_locks).entry(name.to_owned()).or_default().clone()
    }

    /// Removes a lock that no other task uses, so that invalid names from clients do not accumulate.
    fn remove_unused_lock(&self, name: &str, load_lock: Arc<tokio::sync::Mutex<()>>) {
        let mut load_locks = lock(&self.load_locks);
        // Two references: the map's and this one.
        if Arc::strong_count(&load_lock) == 2 {
            load_locks.remove(name);
        }
    }

    async fn load_locked(self: &Arc<Self>, name: &str, overrides: LoadOverrides) -> Result<(), LoadError> {
        let is_plain = overrides.config.is_none() && overrides.files.is_empty();
        let found = found_model::find(&self.repository, name, overrides)
            .inspect_err(|error| self.record_find_error(name, error))?;
        if is_plain && self.is_unchanged(&found) {
            return Ok(());
        }
        let mut config = found.source.config.clone();
        if let Some(ensemble) = config.ensemble() {
            let models: Vec<String> = ensemble.step.iter().map(|step| step.model_name.clone()).collect();
            // A cycle would make the load wait for itself.
            if !found_model::contains_cycle(&self.repository, name, &models) {
                self.load_composing_models(models).await;
            }
        }
        let completed = self.complete(&mut config, &found.source).await;
        completed
            .and_then(|()| Ok(self.check_cache(&config)?))
            .map_err(|cause| self.all_versions_failed(&found.source, cause))?;
        self.load_versions(found, Arc::new(config)).await
    }

    fn is_unchanged(&self, found: &FoundModel) -> bool {
        let serving: Vec<i64> =
            self.registry.ready_versions(&found.source.name).iter().map(|model| model.version).collect();
        let loaded = lock(&self.loaded);
        let same = |loaded: &Loaded| loaded.config == found.source.config && loaded.modified == found.modified;
        serving == found.source.versions && loaded.get(&found.source.name).is_some_and(same)
    }

    /// Loads the composing models of an ensemble as the repository configures them.
    async fn load_composing_models(self: &Arc<Self>, models: Vec<String>) {
        let models: BTreeSet<String> = models.into_iter().collect();
        let loads = models.iter().map(|model| self.load(model, LoadOverrides::default()));
        // Errors are ignored here: linking the ensemble reports models that are not loaded.
        futures::future::join_all(loads).await;
    }

    /// Completes a configuration by the backend, or by the composing models of an ensemble.
    async fn complete(&self, config: &mut ModelConfig, source: &ModelSource) -> Result<(), LoadCause> {
        if config.is_ensemble() {
            return ensemble::link(config, &self.registry);
        }
        let factory = self.factory(config, source)?;
        factory.complete(config);
        let request = LoadRequest::new(source, latest(source), &Arc::new(config.clone()), self.limits);
        if let Some(completed) = factory.auto_complete(request).await? {
            *config = repository::recheck(completed).map_err(InferError::invalid)?;
        }
        Ok(())
    }

    fn check_cache(&self, config: &ModelConfig) -> Result<(), InferError> {
        let is_cached = config.response_cache.is_some_and(|cache| cache.enable);
        if is_cached && (config.is_decoupled() || config.sequences().is_some()) {
            return Err(InferError::invalid(
                "`response_cache` works for models with one answer to a request: not for decoupled ones, nor with \
                 `sequence_batching`; remove it",
            ));
        }
        if is_cached && self.cache.is_none() {
            let name = &config.name;
            tracing::warn!(
                "'{name}' enables the response cache and the server has none; start with --cache-config=local,size=N"
            );
        }
        Ok(())
    }

    fn factory(&self, config: &ModelConfig, source: &ModelSource) -> Result<Arc<dyn BackendFactory>, InferError> {
        let named = self.factories.get(&config.backend).ok_or_else(|| {
            let mut known: Vec<&str> = self.factories.keys().map(String::as_str).collect();
            known.sort_unstable();
            InferError::invalid(format!(
                "unable to find backend library for backend '{}', try specifying runtime on the model configuration. Known \
                 backends: {}",
                config.backend,
                known.join(", ")
            ))
        })?;
        let request = LoadRequest::new(source, latest(source), &Arc::new(config.clone()), self.limits);
        Ok(named.replacement(&request).unwrap_or_else(|| named.clone()))
    }

    async fn load_versions(self: &Arc<Self>, found: FoundModel, config: Arc<ModelConfig>) -> Result<(), LoadError> {
        let FoundModel { source, modified, files } = found;
        let name = &source.name;
        let cannot_load = |reason: InferError| self.all_versions_failed(&source, reason.into());
        let labels = labels::read(&config, &source.dir).map_err(cannot_load)?;
        let states = scheduler::read_states(&config, &source.dir).map_err(cannot_load)?;
        if !config.is_ensemble() && self.factory(&config, &source)?.is_exclusive() {
            self.check_reload(&source, &config).await?;
            self.retire(name, |_| true).await;
        }
        let mut failed = Vec::new();
        for &version in &source.versions {
            self.mark_loading(name, version);
            let started = Instant::now();
            match self.load_version(&source, version, &config, &states).await {
                Ok(backend) => {
                    let model = ServedModel::new(config.clone(), version, backend, self.cache.clone(), states.clone())
                        .with_labels(labels.clone())
                        .with_load_time(started.elapsed(), self.keeps_recent_durations);
                    self.publish(name, model);
                }
                Err(error) => {
                    self.record_version_error(name, version, &error);
                    failed.push((version, error));
                }
            }
        }
        self.retire_in_background(name, &source.versions);
        let record = Loaded { config: source.config.clone(), modified, _files: files };
        lock(&self.loaded).insert(name.clone(), record);
        if failed.is_empty() {
            tracing::info!("successfully loaded '{name}'");
            return Ok(());
        }
        Err(Self::load_failed(name, &failed))
    }

    /// Checks that a version of a model can be loaded, as far as that shows while an old load serves.
    async fn check_reload(&self, source: &ModelSource, config: &Arc<ModelConfig>) -> Result<(), LoadError> {
        let name = &source.name;
        if self.registry.ready_versions(name).is_empty() {
            return Ok(());
        }
        let factory = self.factory(config, source)?;
        let mut failed = Vec::new();
        for &version in &source.versions {
            match factory.check(LoadRequest::new(source, version, config, self.limits)).await {
                Ok(()) => return Ok(()),
                Err(error) => failed.push((version, error)),
            }
        }
        Err(self.versions_failed(name, &failed))
    }

    async fn load_version(
        &self,
        source: &ModelSource,
        version: i64,
        config: &Arc<ModelConfig>,
        states: &[StateSpec],
    ) -> Result<Arc<dyn Backend>, InferError> {
        if config.is_ensemble() {
            return Ok(Arc::new(Ensemble::new(config, &self.registry)));
        }
        let request = LoadRequest::new(source, version, config, self.limits);
        let factory = self.factory(config, source)?;
        let load = AssertUnwindSafe(async move {
            let backend = factory.load(request).await?;
            warmup::run(config, states, &source.dir, &*backend).await?;
            Ok(backend)
        });
        load.catch_unwind().await.unwrap_or_else(|panic| {
            let message = panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied());
            Err(InferError::internal(format!("loading panicked: {}", message.unwrap_or("no message"))))
        })
    }

    /// Marks a version as loading. An old load of this version serves until the new one is ready.
    fn mark_loading(&self, name: &str, version: i64) {
        self.registry.update(name, |entry| {
            (entry.failure, entry.lacks_versions) = (None, false);
            let state = entry.versions.entry(version).or_insert(VersionState::Loading);
            if !matches!(state, VersionState::Ready(_)) {
                *state = VersionState::Loading;
            }
        });
    }

    /// Starts to serve a version, and drains the load that it replaces.
    fn publish(self: &Arc<Self>, name: &str, model: ServedModel) {
        let version = model.version;
        let old =
            self.registry.update(name, |entry| entry.versions.insert(version, VersionState::Ready(Arc::new(model))));
        if let Some(VersionState::Ready(old)) = old {
            tokio::spawn(async move { old.drain().await });
        }
    }

    /// Unloads a model. With `with_composing_models` it also unloads the composing models of an ensemble, except those that
    /// were requested by name. Waits for requests in flight, at most for the unload timeout.
    pub async fn unload(self: &Arc<Self>, name: &str, with_composing_models: bool) {
        let composing_models: Vec<String> = match self.registry.ready_versions(name).last() {
            Some(model) if with_composing_models => {
                let steps = model.config.ensemble().map(|ensemble| ensemble.step.as_slice()).unwrap_or_default();
                let names = steps.iter().map(|step| step.model_name.clone());
                names.filter(|name| !self.registry.is_required(name)).collect()
            }
            _ => Vec::new(),
        };
        if !self.registry.contains(name) {
            return;
        }
        let (lifecycle, model) = (self.clone(), name.to_owned());
        let unload = tokio::spawn(async move {
            let load_lock = lifecycle.load_lock(&model);
            let guard = load_lock.lock().await;
            lifecycle.registry.update(&model, |entry| (entry.is_required, entry.failure) = (false, None));
            lifecycle.retire(&model, |_| true).await;
            lock(&lifecycle.loaded).remove(&model);
            drop(guard);
            lifecycle.remove_unused_lock(&model, load_lock);
            tracing::info!("successfully unloaded '{model}'");
        });
        if tokio::time::timeout(self.unload_timeout, unload).await.is_err() {
            tracing::warn!("'{name}' still answers requests; it is unloaded when they end");
        }
        for model in composing_models {
            Box::pin(self.unload(&model, true)).await;
        }
    }

    /// Retires versions that the version policy no longer serves, without waiting for it.
    fn retire_in_background(self: &Arc<Self>, name: &str, kept: &[i64]) {
        let (lifecycle, name, kept) = (self.clone(), name.to_owned(), kept.to_vec());
        if self.registry.ready_versions(&name).iter().any(|model| !kept.contains(&model.version)) {
            tokio::spawn(async move { lifecycle.retire(&name, |version| !kept.contains(&version)).await });
        }
    }

    /// Stops to serve the versions that `is_selected`, and waits for their requests in flight.
    pub async fn retire(&self, name: &str, is_selected: impl Fn(i64) -> bool) {
        let retired: Vec<Arc<ServedModel>> = self.registry.update(name, |entry| {
            let versions = entry.versions.iter_mut().filter(|(version, _)| is_selected(**version));
            let take = |(_, state): (&i64, &mut VersionState)| match std::mem::replace(state, VersionState::Unloading) {
                VersionState::Ready(model) => Some(model),
                other => {
                    *state = other;
                    None
                }
            };
            versions.filter_map(take).collect()
        });
        for model in retired {
            model.drain().await;
            self.registry.update(name, |entry| {
                if let Some(state @ VersionState::Unloading) = entry.versions.get_mut(&model.version) {
                    *state = VersionState::Unavailable("unloaded".to_owned());
                }
            });
        }
    }
}

fn latest(source: &ModelSource) -> i64 {
    *source.versions.last().expect("a model has a version")
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn locks_of_invalid_names_do_not_accumulate() {
        let dir = tempfile::tempdir().unwrap();
        let repository = Repository::open(&[dir.path().to_owned()]).unwrap();
        let lifecycle =
            Lifecycle::new(repository, HashMap::new(), Duration::from_secs(1), None, false, Limits::default());
        let loads = (0..100).map(|index| lifecycle.load(&format!("model{}", index / 2), LoadOverrides::default()));
        assert!(futures::future::join_all(loads).await.iter().all(Result::is_err));
        assert!(lock(&lifecycle.load_locks).is_empty());
    }
}
