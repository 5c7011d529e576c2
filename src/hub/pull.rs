//! Downloads what serving a model needs, or finds it in the cache.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use indicatif::HumanBytes;
use nix::sys::statvfs::statvfs;

use crate::HubError;
use crate::cache::ModelCache;
use crate::download::{download, is_there, missing_bytes};
use crate::http::Client;
use crate::listing::{Listed, Listing, RemoteFile};
use crate::name::ModelName;
use crate::needed;
use crate::progress::Progress;
use crate::settings::Settings;

/// Files that are downloaded at the same time.
const PARALLEL: usize = 8;

/// Room that a download leaves on the disk.
const SPARE_BYTES: u64 = 64 << 20;

/// Checks a directory with the configuration and the tokenizer before the weights are downloaded; an error says why the model cannot
/// be served.
pub type Check = fn(&Path) -> Result<(), String>;

/// A model in the cache.
#[derive(Debug)]
pub struct Pulled {
    /// A directory in the form of a Hugging Face checkpoint.
    pub dir: PathBuf,
    /// Why the hub was not used, and the model is as it was downloaded before.
    pub trouble: Option<HubError>,
}

/// Downloads a model if the cache does not have it as the hub has it now.
///
/// If the hub gives an error and the cache has the model, the one in the cache is returned with the error.
///
/// # Errors
/// When the model cannot be downloaded and the cache does not have it.
pub fn pull(name: &ModelName, settings: &Settings, check: Check) -> Result<Pulled, HubError> {
    let cache = ModelCache::new(&settings.cache, name.id());
    let cached = cache.complete(name);
    if let Some(dir) = cached.clone().filter(|_| settings.is_offline || name.is_commit()) {
        return Ok(Pulled { dir, trouble: None });
    }
    if settings.is_offline {
        return Err(HubError::Offline { model: name.to_string(), cache: settings.cache.clone() });
    }
    match (fetch(name, settings, &cache, check), cached) {
        (Ok(dir), _) => Ok(Pulled { dir, trouble: None }),
        (Err(error), Some(dir)) => Ok(Pulled { dir, trouble: Some(error) }),
        (Err(error), None) => Err(error),
    }
}

/// A model that can be served, of which nothing but the small files has been downloaded.
#[derive(Debug)]
pub struct Looked {
    /// The directory of its checkpoint, if the cache has all files.
    pub dir: Option<PathBuf>,
    /// Bytes that a download would fetch.
    pub missing_bytes: u64,
}

/// Finds out whether [`pull`] would succeed. Downloads configuration and tokenizer, and no weights.
///
/// # Errors
/// Those of [`pull`] that are known before the weights arrive.
pub fn look(name: &ModelName, settings: &Settings, check: Check) -> Result<Looked, HubError> {
    let cache = ModelCache::new(&settings.cache, name.id());
    if let Some(dir) = cache.complete(name) {
        return Ok(Looked { dir: Some(dir), missing_bytes: 0 });
    }
    if settings.is_offline {
        return Err(HubError::Offline { model: name.to_string(), cache: settings.cache.clone() });
    }
    let Begun { client, listing, weights, .. } = begin(name, settings, &cache, check)?;
    let files = weights.iter().map(|file| listing.locate(&client, name, file)).collect::<Result<Vec<_>, _>>()?;
    let missing = files.iter().filter(|file| !is_there(&cache.blob(&file.digest), file.size));
    let missing_bytes = missing.map(|file| missing_bytes(&cache, file)).sum();
    check_space(&cache, missing_bytes)?;
    Ok(Looked { dir: None, missing_bytes })
}

/// A model whose small files are there.
struct Begun {
    client: Client,
    listing: Listing,
    weights: Vec<Listed>,
    dir: PathBuf,
}

/// Requests the listing, downloads the small files and checks them.
fn begin(name: &ModelName, settings: &Settings, cache: &ModelCache, check: Check) -> Result<Begun, HubError> {
    let client = Client::new(settings);
    let listing = Listing::of(&client, name)?;
    let dir = cache.snapshot(&listing.commit);
    let refused = |reason| HubError::NotServable { model: name.to_string(), reason };
    if !listing.files.iter().any(|file| file.name == "config.json") {
        // The reason for missing weights is more helpful, if there is one.
        let reason = needed::weights(&listing.files, &dir).err();
        return Err(refused(
            reason.unwrap_or_else(|| "it has no config.json, so it is no checkpoint of transformers".into()),
        ));
    }
    cache.create()?;
    download_all(&client, name, &listing, cache, &needed::small(&listing.files))?;
    check(&dir).map_err(refused)?;
    let weights = needed::weights(&listing.files, &dir).map_err(refused)?.into_iter().cloned().collect();
    Ok(Begun { client, listing, weights, dir })
}

/// Downloads all files. A branch or tag points to the new commit once all of it is there.
fn fetch(name: &ModelName, settings: &Settings, cache: &ModelCache, check: Check) -> Result<PathBuf, HubError> {
    let Begun { client, listing, weights, dir } = begin(name, settings, cache, check)?;
    download_all(&client, name, &listing, cache, &weights.iter().collect::<Vec<_>>())?;
    if !name.is_commit() {
        cache.set_ref(name.revision(), &listing.commit)?;
    }
    Ok(dir)
}

/// Downloads files, then links them into the snapshot.
fn download_all(
    client: &Client,
    name: &ModelName,
    listing: &Listing,
    cache: &ModelCache,
    files: &[&Listed],
) -> Result<(), HubError> {
    let files = files.iter().map(|file| listing.locate(client, name, file)).collect::<Result<Vec<_>, _>>()?;
    // Two files with the same content have one blob.
    let mut seen = HashSet::new();
    let is_missing =
        |file: &&RemoteFile| !is_there(&cache.blob(&file.digest), file.size) && seen.insert(file.digest.clone());
    let missing: Vec<&RemoteFile> = files.iter().filter(is_missing).collect();
    if !missing.is_empty() {
        check_space(cache, missing.iter().map(|file| missing_bytes(cache, file)).sum())?;
        in_parallel(client, cache, missing.into_iter())?;
    }
    files.iter().try_for_each(|file| cache.link(&listing.commit, &file.name, &file.digest))
}

fn check_space(cache: &ModelCache, needed: u64) -> Result<(), HubError> {
    let dir = cache.blobs();
    // A file system whose free space is unknown is tried.
    let Ok(found) = statvfs(&dir) else { return Ok(()) };
    let free = found.blocks_available().saturating_mul(found.fragment_size());
    if needed.saturating_add(SPARE_BYTES) <= free {
        return Ok(());
    }
    let words = |bytes| HumanBytes(bytes).to_string();
    Err(HubError::NoSpace { dir, needed: words(needed), free: words(free) })
}

/// Downloads files with some threads. After an error no further file is begun.
fn in_parallel<'a>(
    client: &Client,
    cache: &ModelCache,
    files: impl ExactSizeIterator<Item = &'a RemoteFile> + Send + Clone,
) -> Result<(), HubError> {
    let progress = Progress::new(files.clone().map(|file| file.size).sum());
    let num_threads = PARALLEL.min(files.len());
    let (queue, failure) = (Mutex::new(files), Mutex::new(None));
    std::thread::scope(|scope| {
        for _ in 0..num_threads {
            scope.spawn(|| {
                while !progress.is_stopped() {
                    let Some(file) = queue.lock().expect("no thread panics").next() else { break };
                    progress.say(&format!("downloading {} ({})", file.name, HumanBytes(file.size)));
                    if let Err(error) = download(client, cache, file, &progress) {
                        failure.lock().expect("no thread panics").get_or_insert(error);
                        progress.stop();
                    }
                }
            });
        }
    });
    progress.finish();
    failure.into_inner().expect("no thread panics").map_or(Ok(()), Err)
}
