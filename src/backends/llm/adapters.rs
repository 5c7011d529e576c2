//! The adapters of a model: loaded into host memory, found by name, dropped when nothing uses them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use engine::{Adapter, AdapterId};
use futures::FutureExt;
use futures::future::BoxFuture;
use models::{AdapterBounds, AdapterTensors};
use serving::{AdapterInfo, Adapters, InferError};
use tokio::sync::watch;

use super::adapter_settings::AdapterSettings;
use super::inputs::{TaskAdapter, TaskTensors};

/// The adapters of one loaded model.
#[derive(Debug)]
pub(crate) struct AdapterStore {
    /// Name of the model, for messages.
    model_name: String,
    model: models::Config,
    settings: AdapterSettings,
    loaded: Mutex<Loaded>,
}

#[derive(Debug, Default)]
struct Loaded {
    by_name: BTreeMap<String, Arc<LoadedAdapter>>,
    /// Adapters that came with requests, by their `lora_task_id`.
    by_task: BTreeMap<u64, TaskEntry>,
    last_id: u64,
    /// Number of times that an adapter of a task was taken.
    clock: u64,
}

/// An adapter of a task. The one that was taken longest ago gives way to others.
#[derive(Debug)]
struct TaskEntry {
    loaded: Arc<LoadedAdapter>,
    last_taken: u64,
}

/// An adapter in host memory.
#[derive(Debug)]
struct LoadedAdapter {
    path: PathBuf,
    adapter: Arc<Adapter>,
    /// Number of sequences of requests in flight.
    uses: watch::Sender<usize>,
}

/// The use of an adapter by the sequences of a request.
#[derive(Debug)]
pub(crate) struct AdapterUse {
    loaded: Arc<LoadedAdapter>,
    num_sequences: usize,
}

impl AdapterUse {
    fn new(loaded: &Arc<LoadedAdapter>, num_sequences: usize) -> Self {
        loaded.uses.send_modify(|uses| *uses += num_sequences);
        Self { loaded: Arc::clone(loaded), num_sequences }
    }

    pub(crate) fn adapter(&self) -> &Arc<Adapter> {
        &self.loaded.adapter
    }
}

impl Drop for AdapterUse {
    fn drop(&mut self) {
        self.loaded.uses.send_modify(|uses| *uses -= self.num_sequences);
    }
}

/// The adapters of requests in flight, for metrics.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AdapterStatus {
    /// Number of slots; 0 if the model takes no adapters.
    pub num_slots: usize,
    /// Names of those that running sequences use.
    pub running: Vec<String>,
    /// Names of those that waiting sequences will use.
    pub waiting: Vec<String>,
    /// Number of adapters in host memory.
    pub num_loaded: usize,
    /// Bytes of their weights.
    pub loaded_bytes: u64,
}

impl AdapterStore {
    /// Reads the adapters that the settings name.
    ///
    /// # Errors
    /// When one cannot be read, or does not fit the model.
    pub(crate) fn new(model_name: &str, model: models::Config, settings: &AdapterSettings) -> Result<Self, InferError> {
        let (model_name, settings) = (model_name.to_owned(), settings.clone());
        let adapters = Self { model_name, model, settings, loaded: Mutex::default() };
        for module in &adapters.settings.modules {
            adapters.read(&module.name, &module.path)?;
        }
        Ok(adapters)
    }

    fn invalid(&self, message: String) -> InferError {
        InferError::invalid(format!("model `{}`: {message}", self.model_name))
    }

    /// Reads an adapter into host memory. It blocks.
    ///
    /// # Errors
    /// When it cannot be read, does not fit the model or the memory, or its name is taken.
    fn read(&self, name: &str, path: &Path) -> Result<(), InferError> {
        if self.settings.num_slots == 0 {
            return Err(self.invalid("it takes no adapters; load it with the parameter `max_loras` above 0".to_owned()));
        }
        let is_taken = |loaded: &Loaded| match loaded.by_name.contains_key(name) {
            true => Err(self.invalid(format!("adapter `{name}` is loaded already; unload it first"))),
            false => Ok(loaded.named_bytes()),
        };
        let num_bytes = is_taken(&ipc::lock(&self.loaded))?;
        let AdapterSettings { max_rank, memory_bytes, .. } = self.settings;
        let bounds = AdapterBounds { max_rank, max_bytes: memory_bytes.saturating_sub(num_bytes) };
        let read = models::Adapter::read(path, &self.model, bounds);
        let weights = read.map_err(|error| self.invalid(format!("adapter `{name}`: {error}")))?.to_bytes();
        let mut loaded = ipc::lock(&self.loaded);
        // Another load may have ended meanwhile.
        is_taken(&loaded)?;
        if !loaded.make_room(weights.len() as u64, memory_bytes) {
            let message =
                format!("adapter `{name}` does not fit into `lora_memory_bytes` {memory_bytes} beside the others");
            return Err(self.invalid(message));
        }
        let entry = loaded.entry(path.into(), weights);
        loaded.by_name.insert(name.to_owned(), entry);
        Ok(())
    }

    /// The error for an adapter that is not loaded.
    fn unknown(&self, name: &str) -> InferError {
        let message =
            format!("model `{}` has no adapter `{name}`; load it by `POST /v1/load_lora_adapter`", self.model_name);
        InferError::not_found(message)
    }

    /// Counts the sequences of a request as users of an adapter.
    ///
    /// # Errors
    /// When there is none of this name.
    pub(crate) fn take(&self, name: &str, num_sequences: usize) -> Result<AdapterUse, InferError> {
        let loaded = ipc::lock(&self.loaded);
        let found = loaded.by_name.get(name).ok_or_else(|| self.unknown(name))?;
        Ok(AdapterUse::new(found, num_sequences))
    }

    /// Counts the sequences of a request as users of the adapter of a task. Its tensors are read if the adapter is not there yet.
    ///
    /// # Errors
    /// When the adapter is not there and the request has no tensors, or they do not fit the model or the memory.
    pub(crate) fn take_task(&self, task: &TaskAdapter, num_sequences: usize) -> Result<AdapterUse, InferError> {
        if self.settings.num_slots == 0 {
            return Err(self.invalid("it takes no adapters; load it with the parameter `max_loras` above 0".to_owned()));
        }
        if let Some(found) = ipc::lock(&self.loaded).task(task.id) {
            return Ok(AdapterUse::new(&found, num_sequences));
        }
        let id = task.id;
        let unknown = || {
            self.invalid(format!(
                "no adapter of `lora_task_id` {id} is cached; send `lora_weights` and `lora_config` with it"
            ))
        };
        let TaskTensors { config, weights, dtype, row_len } = task.tensors.as_ref().ok_or_else(unknown)?;
        let tensors = AdapterTensors { config, weights, dtype: *dtype, row_len: *row_len };
        let adapter = models::Adapter::from_tensors(&self.model, tensors, self.settings.max_rank);
        let weights = adapter.map_err(|error| self.invalid(error.to_string()))?.to_bytes();
        let mut loaded = ipc::lock(&self.loaded);
        let memory_bytes = self.settings.memory_bytes;
        if !loaded.make_room(weights.len() as u64, memory_bytes) {
            let message =
                format!("the adapter of `lora_task_id` {id} does not fit into `lora_memory_bytes` {memory_bytes}");
            return Err(self.invalid(message));
        }
        let entry = loaded.entry(PathBuf::new(), weights);
        loaded.by_task.insert(id, TaskEntry { loaded: entry, last_taken: 0 });
        let found = loaded.task(id).expect("it was inserted");
        Ok(AdapterUse::new(&found, num_sequences))
    }

    /// The adapters of requests in flight. `running` has those of running sequences, with the number of sequences.
    pub(crate) fn status(&self, running: &[(AdapterId, u32)]) -> AdapterStatus {
        let loaded = ipc::lock(&self.loaded);
        let num_running = |it: &LoadedAdapter| {
            let of_adapter = running.iter().filter(|(id, _)| *id == it.adapter.id);
            of_adapter.map(|&(_, count)| count as usize).sum::<usize>()
        };
        let names = |is_listed: &dyn Fn(&LoadedAdapter) -> bool| {
            let named = loaded.by_name.iter().filter(|(_, it)| is_listed(it)).map(|(name, _)| name.clone());
            let tasks = loaded.by_task.iter().filter(|(_, it)| is_listed(&it.loaded)).map(|(id, _)| id.to_string());
            named.chain(tasks).collect()
        };
        AdapterStatus {
            num_slots: self.settings.num_slots,
            running: names(&|it| num_running(it) > 0),
            waiting: names(&|it| *it.uses.borrow() > num_running(it)),
            num_loaded: loaded.by_name.len() + loaded.by_task.len(),
            loaded_bytes: loaded.num_bytes(),
        }
    }
}

impl Adapters for AdapterStore {
    fn contains(&self, name: &str) -> bool {
        ipc::lock(&self.loaded).by_name.contains_key(name)
    }

    fn list(&self) -> Vec<AdapterInfo> {
        let loaded = ipc::lock(&self.loaded);
        loaded.by_name.iter().map(|(name, it)| AdapterInfo { name: name.clone(), path: it.path.clone() }).collect()
    }

    fn load(self: Arc<Self>, name: &str, path: &Path) -> BoxFuture<'static, Result<(), InferError>> {
        let (name, path) = (name.to_owned(), path.to_owned());
        let read = tokio::task::spawn_blocking(move || self.read(&name, &path));
        read.map(|read| read.unwrap_or_else(|_| Err(InferError::internal("loading an adapter failed")))).boxed()
    }

    fn unload(self: Arc<Self>, name: &str) -> BoxFuture<'static, Result<(), InferError>> {
        let removed = ipc::lock(&self.loaded).by_name.remove(name).ok_or_else(|| self.unknown(name));
        async move {
            let _ = removed?.uses.subscribe().wait_for(|&uses| uses == 0).await;
            Ok(())
        }
        .boxed()
    }
}

impl Loaded {
    /// A new adapter.
    fn entry(&mut self, path: PathBuf, weights: Vec<u8>) -> Arc<LoadedAdapter> {
        self.last_id += 1;
        let adapter = Arc::new(Adapter { id: AdapterId(self.last_id), weights });
        Arc::new(LoadedAdapter { path, adapter, uses: watch::Sender::new(0) })
    }

    /// The adapter of a task, which is the last one taken from now on.
    fn task(&mut self, id: u64) -> Option<Arc<LoadedAdapter>> {
        self.clock += 1;
        let entry = self.by_task.get_mut(&id)?;
        entry.last_taken = self.clock;
        Some(Arc::clone(&entry.loaded))
    }

    /// Drops unused adapters of tasks until an adapter of `num_bytes` fits into `max_bytes`. Returns false if it does not fit beside the others.
    fn make_room(&mut self, num_bytes: u64, max_bytes: u64) -> bool {
        while self.num_bytes() + num_bytes > max_bytes {
            let unused = self.by_task.iter().filter(|(_, it)| *it.loaded.uses.borrow() == 0);
            let Some((&oldest, _)) = unused.min_by_key(|(_, it)| it.last_taken) else { return false };
            self.by_task.remove(&oldest);
        }
        true
    }

    fn named_bytes(&self) -> u64 {
        self.by_name.values().map(|it| it.adapter.weights.len() as u64).sum()
    }

    fn num_bytes(&self) -> u64 {
        let of_tasks = self.by_task.values().map(|it| it.loaded.adapter.weights.len() as u64);
        self.named_bytes() + of_tasks.sum::<u64>()
    }
}
