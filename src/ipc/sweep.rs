use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use crate::error::IpcError;
use crate::header::{Header, Ownership, open_own_file};
use crate::prefix::{Prefix, SHM_DIR};

/// Removes the regions of `prefix` whose owner has ended; returns their names.
///
/// Errs with the owner's pid when another running process owns one of them, after all others were removed.
pub fn sweep_stale(prefix: &Prefix) -> Result<Vec<String>, IpcError> {
    let mut owned = None;
    let removed = sweep(prefix.as_str(), |error| {
        if matches!(&error, IpcError::Owned { pid, .. } if *pid != std::process::id()) {
            owned.get_or_insert(error);
        }
    })?;
    owned.map_or(Ok(removed), Err)
}

/// Removes every region of this program and this user whose owner has ended, whatever its prefix; returns their names.
///
/// It never waits for another process: files of other users and locked files are skipped.
pub fn sweep_all_stale() -> Result<Vec<String>, IpcError> {
    sweep("", |_| {})
}

fn sweep(prefix: &str, mut kept: impl FnMut(IpcError)) -> Result<Vec<String>, IpcError> {
    let os = |source| IpcError::Os { action: "list", path: SHM_DIR.into(), source };
    let mut removed = Vec::new();
    for entry in fs::read_dir(SHM_DIR).map_err(os)? {
        let entry = entry.map_err(os)?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let is_file = entry.file_type().is_ok_and(|kind| kind.is_file());
        if !is_file || !name.starts_with(prefix) {
            continue;
        }
        match remove_if_stale(&entry.path()) {
            Ok(true) => removed.push(name),
            Ok(false) => {}
            Err(error) => kept(error),
        }
    }
    Ok(removed)
}

/// Removes the region file at `path` if its owner has ended; false when another process has removed it or is removing it.
/// Errs with the reason why it must not be removed. Never waits.
pub(crate) fn remove_if_stale(path: &Path) -> Result<bool, IpcError> {
    let os = |action| move |source| IpcError::Os { action, path: path.to_owned(), source };
    let file = match open_own_file(path, false) {
        Ok(file) => file,
        Err(IpcError::Missing { .. }) => return Ok(false),
        Err(error) => return Err(error),
    };
    // The header is complete before its file has a name, and never changes.
    let header = Header::read(&file).map_err(os("read"))?;
    match header.map_or(Ownership::NotOurs, |header| header.ownership()) {
        Ownership::Dead => {}
        Ownership::Alive(owner) => return Err(IpcError::Owned { path: path.to_owned(), pid: owner.pid }),
        Ownership::ForeignNamespace => return Err(IpcError::ForeignNamespace { path: path.to_owned() }),
        Ownership::NotOurs => return Err(IpcError::NotOurs { path: path.to_owned() }),
    }
    // Without the lock, a second sweep could remove, by name, a new owner's file that has just replaced the stale one.
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => {}
        Err(Errno::WOULDBLOCK) => return Ok(false),
        Err(errno) => return Err(os("lock")(errno.into())),
    }
    let opened = file.metadata().map_err(os("read"))?;
    let is_same = |now: fs::Metadata| (now.dev(), now.ino()) == (opened.dev(), opened.ino());
    if !fs::symlink_metadata(path).is_ok_and(is_same) {
        return Ok(false);
    }
    fs::remove_file(path).map(|()| true).map_err(os("remove"))
}
