use std::fs;
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::{FlockOperation, flock};

use crate::prefix::SHM_DIR;
use crate::region::{Header, Ownership};
use crate::{IpcError, Prefix};

/// Removes the regions of `prefix` whose owner has ended; returns their names.
///
/// Errs with the owner's pid when one is still owned by another running process, after removing what could be.
pub fn sweep_stale(prefix: &Prefix) -> Result<Vec<String>, IpcError> {
    let mut owned = None;
    let removed = sweep(prefix.as_str(), |error| {
        if matches!(&error, IpcError::Owned { pid, .. } if *pid != std::process::id()) {
            owned.get_or_insert(error);
        }
    })?;
    owned.map_or(Ok(removed), Err)
}

/// Removes every region of this program whose owner has ended, whatever its prefix; returns their names.
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

/// Removes the region file at `path` if its owner has ended; false when somebody else removed it meanwhile.
/// Errs with why it may not be removed.
pub(crate) fn remove_if_stale(path: &Path) -> Result<bool, IpcError> {
    let os = |action| move |source| IpcError::Os { action, path: path.to_owned(), source };
    let file = match fs::OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        Err(error) => return Err(os("open")(error)),
    };
    // The lock keeps a second sweeper from removing, by name, what a new owner has just put in the dead one's place.
    flock(&file, FlockOperation::LockExclusive).map_err(|errno| os("lock")(errno.into()))?;
    let opened = file.metadata().map_err(os("read"))?;
    if fs::metadata(path).map(|now| now.ino()).ok() != Some(opened.ino()) {
        return Ok(false);
    }
    let header = Header::read(&file).map_err(os("read"))?;
    match header.map_or(Ownership::NotOurs, |header| header.ownership()) {
        Ownership::Dead => fs::remove_file(path).map(|()| true).map_err(os("remove")),
        Ownership::Alive(owner) => Err(IpcError::Owned { path: path.to_owned(), pid: owner.pid }),
        Ownership::ForeignNamespace => Err(IpcError::ForeignNamespace { path: path.to_owned() }),
        Ownership::NotOurs => Err(IpcError::NotOurs { path: path.to_owned() }),
    }
}
