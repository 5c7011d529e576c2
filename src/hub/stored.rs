//! What the cache has, and how it is removed.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use crate::HubError;
use crate::cache::ModelCache;
use crate::name::ModelName;
use crate::needed;
use crate::settings::Settings;

/// A revision in the cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stored {
    /// `ORG/NAME`.
    pub id: String,
    /// The commit.
    pub commit: String,
    /// The branches and tags that point to it.
    pub refs: Vec<String>,
    /// Bytes of its files. Revisions share files that did not change.
    pub bytes: u64,
    /// When one of its files was last read, as far as the file system notes it.
    pub last_used: Option<SystemTime>,
    /// Whether it has a configuration and all weights.
    pub is_complete: bool,
}

/// The revisions in the cache, by name.
///
/// # Errors
/// When the cache cannot be read.
pub fn list(settings: &Settings) -> Result<Vec<Stored>, HubError> {
    let mut found = Vec::new();
    for (id, cache) in ModelCache::all(&settings.cache)? {
        let refs = cache.refs();
        for commit in cache.commits() {
            let dir = cache.snapshot(&commit);
            let files = files_of(&dir);
            found.push(Stored {
                id: id.clone(),
                refs: refs.iter().filter(|(_, its)| *its == commit).map(|(name, _)| name.clone()).collect(),
                bytes: files.values().map(fs::Metadata::len).sum(),
                last_used: files.values().filter_map(|file| file.accessed().ok()).max(),
                is_complete: needed::is_complete(&dir),
                commit,
            });
        }
    }
    Ok(found)
}

/// The contents of a snapshot, each once.
fn files_of(dir: &Path) -> BTreeMap<PathBuf, fs::Metadata> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let Ok(path) = entry.path().canonicalize() else { continue };
        match fs::metadata(&path) {
            Ok(data) if data.is_dir() => found.extend(files_of(&entry.path())),
            Ok(data) => drop(found.insert(path, data)),
            Err(_) => {}
        }
    }
    found
}

/// The bytes of a model with all its revisions, those of cut downloads too.
///
/// # Errors
/// When the cache does not have the model.
pub fn size(name: &ModelName, settings: &Settings) -> Result<u64, HubError> {
    let cache = find(name, settings)?;
    let blobs = fs::read_dir(cache.blobs()).into_iter().flatten().flatten();
    Ok(blobs.filter_map(|blob| Some(fs::metadata(blob.path()).ok()?.len())).sum())
}

/// Removes a model with all its revisions. `user` names who uses a file in the given directory, if anybody does.
///
/// # Errors
/// When the cache does not have the model, the model is in use or being downloaded, or a file cannot be removed.
pub fn remove(
    name: &ModelName,
    settings: &Settings,
    user: impl FnOnce(&Path) -> Option<String>,
) -> Result<(), HubError> {
    let cache = find(name, settings)?;
    let in_use = |user| Err(HubError::InUse { model: name.id().to_owned(), user });
    if cache.is_written() {
        return in_use("a process that downloads it; end that first".to_owned());
    }
    if let Some(user) = user(cache.root()) {
        return in_use(user);
    }
    for dir in [cache.root(), cache.locks()].into_iter().filter(|dir| dir.exists()) {
        fs::remove_dir_all(dir).map_err(HubError::io(format!("remove {}", dir.display())))?;
    }
    Ok(())
}

fn find(name: &ModelName, settings: &Settings) -> Result<ModelCache, HubError> {
    let cache = ModelCache::new(&settings.cache, name.id());
    let missing = || HubError::NotCached { model: name.id().to_owned(), cache: settings.cache.clone() };
    cache.exists().then_some(cache).ok_or_else(missing)
}
