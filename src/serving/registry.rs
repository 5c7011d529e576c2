//! Models by name and version, each with its state.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::InferError;
use crate::model::ServedModel;

/// The state of a model version, as the repository index names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ModelState {
    /// It was never loaded.
    Unknown,
    /// It serves.
    Ready,
    /// It does not serve, for the recorded reason.
    Unavailable,
    /// It is being loaded.
    Loading,
    /// It refuses new requests and finishes those in flight.
    Unloading,
}

impl ModelState {
    /// The name on the wire; empty for a model that was never loaded.
    pub fn name(self) -> &'static str {
        match self {
            ModelState::Unknown => "",
            ModelState::Ready => "READY",
            ModelState::Unavailable => "UNAVAILABLE",
            ModelState::Loading => "LOADING",
            ModelState::Unloading => "UNLOADING",
        }
    }
}

/// One line of the repository index.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelIndexEntry {
    /// Model name.
    pub name: String,
    /// Version, empty when the model was never loaded.
    pub version: String,
    /// The state of the version.
    pub state: ModelState,
    /// Why the version does not serve; may be empty.
    pub reason: String,
}

/// The state of a version, with the model where it serves.
#[derive(Debug, Clone)]
pub(crate) enum VersionState {
    Loading,
    Ready(Arc<ServedModel>),
    Unloading,
    Unavailable(String),
}

/// A model that was loaded, or whose load was attempted.
#[derive(Debug, Default)]
pub(crate) struct Entry {
    pub versions: BTreeMap<i64, VersionState>,
    /// Why no version could be attempted.
    pub failure: Option<String>,
    /// The configuration is valid, but no version exists that the version policy serves.
    pub lacks_versions: bool,
    /// It was requested by name and not only by an ensemble, so the server is not ready without it.
    pub is_required: bool,
}

impl Entry {
    fn ready(&self) -> impl DoubleEndedIterator<Item = &Arc<ServedModel>> {
        self.versions.values().filter_map(|version| match version {
            VersionState::Ready(model) => Some(model),
            _ => None,
        })
    }
}

/// All models of a server. Requests only read it; loads and unloads write it.
#[derive(Debug, Default)]
pub(crate) struct Registry {
    entries: RwLock<BTreeMap<String, Entry>>,
}

impl Registry {
    fn read(&self) -> RwLockReadGuard<'_, BTreeMap<String, Entry>> {
        self.entries.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, BTreeMap<String, Entry>> {
        self.entries.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes a model's entry, which is created if it does not exist.
    pub fn update<R>(&self, name: &str, change: impl FnOnce(&mut Entry) -> R) -> R {
        change(self.write().entry(name.to_owned()).or_default())
    }

    /// The model version that a request names; an empty `version` means the latest.
    ///
    /// # Errors
    /// When `version` is no valid number, or the version does not serve.
    pub fn resolve(&self, name: &str, version: &str) -> Result<Arc<ServedModel>, InferError> {
        self.resolve_number(name, parse_version(version)?)
    }

    /// The model version with this number; `None` means the latest.
    ///
    /// # Errors
    /// When the version does not serve.
    pub fn resolve_number(&self, name: &str, version: Option<i64>) -> Result<Arc<ServedModel>, InferError> {
        let entries = self.read();
        let unknown = |what: &str| InferError::not_found(format!("Request for unknown model: '{name}' {what}"));
        let is_known = |entry: &&Entry| entry.lacks_versions || !entry.versions.is_empty();
        let entry = entries.get(name).filter(is_known).ok_or_else(|| unknown("is not found"))?;
        match version {
            None => entry.ready().next_back().cloned().ok_or_else(|| unknown("has no available versions")),
            Some(number) => match entry.versions.get(&number) {
                Some(VersionState::Ready(model)) => Ok(model.clone()),
                Some(_) => Err(InferError::unavailable(format!(
                    "Request for unknown model: '{name}' version {number} is not at ready state"
                ))),
                None => Err(unknown(&format!("version {number} is not found"))),
            },
        }
    }

    /// The versions of a model that serve, ascending.
    pub fn ready_versions(&self, name: &str) -> Vec<Arc<ServedModel>> {
        self.read().get(name).map(|entry| entry.ready().cloned().collect()).unwrap_or_default()
    }

    /// Every model version that serves.
    pub fn all_ready(&self) -> Vec<Arc<ServedModel>> {
        self.read().values().flat_map(Entry::ready).cloned().collect()
    }

    /// Names of all models with an entry.
    pub fn names(&self) -> Vec<String> {
        self.read().keys().cloned().collect()
    }

    /// Whether the model was requested by name, and not only by an ensemble.
    pub fn is_required(&self, name: &str) -> bool {
        self.read().get(name).is_some_and(|entry| entry.is_required)
    }

    /// Whether a version of the model serves, loads or unloads.
    pub fn is_active(&self, name: &str) -> bool {
        let is_active = |version: &VersionState| !matches!(version, VersionState::Unavailable(_));
        self.read().get(name).is_some_and(|entry| entry.versions.values().any(is_active))
    }

    /// Whether a load of the model was ever attempted.
    pub fn contains(&self, name: &str) -> bool {
        self.read().contains_key(name)
    }

    /// Names of required models that cannot serve a request now.
    pub fn unready_required(&self) -> Vec<String> {
        let required: Vec<(String, Option<Arc<ServedModel>>)> = {
            let entries = self.read();
            let required = entries.iter().filter(|(_, entry)| entry.is_required);
            required.map(|(name, entry)| (name.clone(), entry.ready().next_back().cloned())).collect()
        };
        let unready = required.into_iter().filter(|(_, model)| !model.as_ref().is_some_and(|model| model.is_ready()));
        unready.map(|(name, _)| name).collect()
    }

    /// The index entries of one model; for a model without versions, one entry with an empty version.
    pub fn index(&self, name: &str) -> Vec<ModelIndexEntry> {
        let versions: Vec<(String, VersionState)> = match self.read().get(name) {
            None => Vec::new(),
            Some(Entry { versions, failure: Some(failure), .. }) if versions.is_empty() => {
                vec![(String::new(), VersionState::Unavailable(failure.clone()))]
            }
            Some(entry) => {
                entry.versions.iter().map(|(number, version)| (number.to_string(), version.clone())).collect()
            }
        };
        let to_entry = |(version, state): (String, VersionState)| {
            let (state, reason) = state_of(&state);
            ModelIndexEntry { name: name.to_owned(), version, state, reason }
        };
        let never_loaded = || ModelIndexEntry {
            name: name.to_owned(),
            version: String::new(),
            state: ModelState::Unknown,
            reason: String::new(),
        };
        if versions.is_empty() { vec![never_loaded()] } else { versions.into_iter().map(to_entry).collect() }
    }
}

fn state_of(version: &VersionState) -> (ModelState, String) {
    match version {
        VersionState::Loading => (ModelState::Loading, String::new()),
        VersionState::Unloading => (ModelState::Unloading, String::new()),
        VersionState::Unavailable(reason) => (ModelState::Unavailable, reason.clone()),
        VersionState::Ready(model) if model.is_ready() => (ModelState::Ready, String::new()),
        VersionState::Ready(model) => match model.config.ensemble() {
            Some(_) => (ModelState::Unavailable, "a model that the ensemble depends on does not serve".to_owned()),
            None => (ModelState::Unavailable, "loaded, but not able to serve now".to_owned()),
        },
    }
}

/// The number in a version string; `None` for the latest.
pub(crate) fn parse_version(version: &str) -> Result<Option<i64>, InferError> {
    if version.is_empty() {
        return Ok(None);
    }
    match version.parse::<i64>() {
        Ok(number) if number < 0 => Err(InferError::invalid(format!(
            "invalid model version specified '{version}' , version should be an integral value > 0"
        ))),
        Ok(number) => Ok(Some(number)),
        Err(_) => Err(InferError::invalid(format!(
            "failed to get model version from specified version string '{version}' (details: stol), version should be an \
             integral value > 0"
        ))),
    }
}
