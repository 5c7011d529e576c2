//! The cache on disk, in the form of `huggingface_hub`, so that a model downloaded by either is found by the other.
//!
//! ```text
//! models--ORG--NAME/blobs/HASH               the content of a file; HASH.incomplete while it is downloaded
//!                   snapshots/COMMIT/FILE    a relative link to a blob
//!                   refs/REVISION            the commit of a branch or tag
//! .locks/models--ORG--NAME/HASH.lock         held while a blob is written
//! ```

use std::fs::{self, File, TryLockError};
use std::io::ErrorKind;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::HubError;
use crate::digest::Digest;
use crate::name::{ModelName, is_commit};
use crate::needed;

/// How the directory of a model begins.
const PREFIX: &str = "models--";

/// The part of the cache for one model.
#[derive(Debug, Clone)]
pub(crate) struct ModelCache {
    root: PathBuf,
    locks: PathBuf,
}

/// A lock on one blob. Dropping it releases the lock.
pub(crate) struct Lock(#[allow(dead_code)] File);

impl ModelCache {
    pub(crate) fn new(cache: &Path, id: &str) -> Self {
        let folder = format!("{PREFIX}{}", id.replace('/', "--"));
        Self { locks: cache.join(".locks").join(&folder), root: cache.join(folder) }
    }

    /// Every model of a cache with its name, sorted.
    ///
    /// # Errors
    /// When the cache cannot be read. A cache that does not exist is empty.
    pub(crate) fn all(cache: &Path) -> Result<Vec<(String, Self)>, HubError> {
        let failed = || HubError::io(format!("read {}", cache.display()));
        let entries = match fs::read_dir(cache) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.map_err(failed())?,
        };
        let mut found = Vec::new();
        for entry in entries {
            let name = entry.map_err(failed())?.file_name();
            if let Some(folder) = name.to_str().and_then(|name| name.strip_prefix(PREFIX)) {
                let id = folder.replacen("--", "/", 1);
                found.push((id.clone(), Self::new(cache, &id)));
            }
        }
        found.sort_by(|(one, _), (other, _)| one.cmp(other));
        Ok(found)
    }

    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    pub(crate) fn locks(&self) -> &Path {
        &self.locks
    }

    pub(crate) fn exists(&self) -> bool {
        self.root.is_dir()
    }

    pub(crate) fn blobs(&self) -> PathBuf {
        self.root.join("blobs")
    }

    pub(crate) fn blob(&self, digest: &Digest) -> PathBuf {
        self.blobs().join(digest.hex())
    }

    pub(crate) fn snapshot(&self, commit: &str) -> PathBuf {
        self.root.join("snapshots").join(commit)
    }

    /// Creates the directories for downloads.
    pub(crate) fn create(&self) -> Result<(), HubError> {
        for dir in [self.blobs(), self.locks.clone()] {
            fs::create_dir_all(&dir).map_err(HubError::io(format!("create {}", dir.display())))?;
        }
        Ok(())
    }

    /// The directory of a revision that can be served without the network.
    pub(crate) fn complete(&self, name: &ModelName) -> Option<PathBuf> {
        let commit = match name.is_commit() {
            true => name.revision().to_owned(),
            false => fs::read_to_string(self.root.join("refs").join(name.revision())).ok()?.trim().to_owned(),
        };
        let dir = is_commit(&commit).then(|| self.snapshot(&commit))?;
        needed::is_complete(&dir).then_some(dir)
    }

    /// The branches and tags with their commits.
    pub(crate) fn refs(&self) -> Vec<(String, String)> {
        let mut found = Vec::new();
        collect_refs(&self.root.join("refs"), "", &mut found);
        found.sort();
        found
    }

    /// The commits with a snapshot, sorted.
    pub(crate) fn commits(&self) -> Vec<String> {
        let entries = fs::read_dir(self.root.join("snapshots")).into_iter().flatten().flatten();
        let mut commits: Vec<String> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
        commits.sort();
        commits
    }

    /// Waits until no other process writes this blob. `waits` is called once if it must wait.
    pub(crate) fn lock(&self, digest: &Digest, waits: impl FnOnce()) -> Result<Lock, HubError> {
        let path = self.locks.join(format!("{}.lock", digest.hex()));
        let failed = || HubError::io(format!("lock {}", path.display()));
        let file = File::options().create(true).truncate(false).read(true).write(true).open(&path).map_err(failed())?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                waits();
                file.lock().map_err(failed())?;
            }
            Err(TryLockError::Error(error)) => return Err(failed()(error)),
        }
        Ok(Lock(file))
    }

    /// Whether a process writes one of the blobs.
    pub(crate) fn is_written(&self) -> bool {
        let entries = fs::read_dir(&self.locks).into_iter().flatten().flatten();
        let is_held =
            |path: PathBuf| File::open(path).is_ok_and(|file| matches!(file.try_lock(), Err(TryLockError::WouldBlock)));
        entries.map(|entry| entry.path()).any(is_held)
    }

    /// Makes a file of a snapshot a link to its blob.
    pub(crate) fn link(&self, commit: &str, name: &str, digest: &Digest) -> Result<(), HubError> {
        let path = self.snapshot(commit).join(name);
        let up = "../".repeat(2 + name.matches('/').count());
        let target = PathBuf::from(format!("{up}blobs/{}", digest.hex()));
        if fs::read_link(&path).is_ok_and(|found| found == target) {
            return Ok(());
        }
        let dir = path.parent().expect("a file of a snapshot is in a directory");
        fs::create_dir_all(dir).map_err(HubError::io(format!("create {}", dir.display())))?;
        replace(&path, |new| symlink(&target, new))
    }

    /// Writes the commit of a branch or tag.
    pub(crate) fn set_ref(&self, revision: &str, commit: &str) -> Result<(), HubError> {
        let path = self.root.join("refs").join(revision);
        if fs::read_to_string(&path).is_ok_and(|found| found == commit) {
            return Ok(());
        }
        let dir = path.parent().expect("a reference is in a directory");
        fs::create_dir_all(dir).map_err(HubError::io(format!("create {}", dir.display())))?;
        replace(&path, |new| fs::write(new, commit))
    }
}

static NEXT: AtomicU64 = AtomicU64::new(0);

/// Makes a file under another name, and renames it to `path`, so that nobody sees a part of it.
fn replace(path: &Path, make: impl FnOnce(&Path) -> std::io::Result<()>) -> Result<(), HubError> {
    let mut name = path.file_name().expect("it names a file").to_owned();
    // Other threads, processes and machines may replace it at the same time.
    let nanos = std::time::UNIX_EPOCH.elapsed().map_or(0, |time| time.as_nanos());
    name.push(format!(".{}.{}.{nanos}.tmp", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed)));
    let new = path.with_file_name(name);
    let result = make(&new).and_then(|()| fs::rename(&new, path));
    result.map_err(HubError::io(format!("write {}", path.display())))
}

fn collect_refs(dir: &Path, prefix: &str, found: &mut Vec<(String, String)>) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let Ok(name) = entry.file_name().into_string() else { continue };
        let (name, path) = (format!("{prefix}{name}"), entry.path());
        if path.is_dir() {
            collect_refs(&path, &format!("{name}/"), found);
        } else if let Ok(commit) = fs::read_to_string(&path) {
            found.push((name, commit.trim().to_owned()));
        }
    }
}
