//! What must be there before a world can start: model repository, server program, starter of ranks. A start checks all of it and
//! ends at the first error; `launch doctor` shows each check.

use std::os::unix::net::SocketAddr;
use std::path::Path;

use anyhow::{Context, Result, anyhow, bail};
use ipc::Ring;
use nix::sys::statvfs::statvfs;

use crate::command::Starter;
use crate::flags::WorldFlags;
use crate::hosts;
use crate::plan::{Plan, Site};

/// Checks everything below in turn.
///
/// # Errors
/// The first error.
pub(crate) fn all(flags: &WorldFlags, site: &Site, plan: &Plan) -> Result<()> {
    repository(flags)?;
    program(flags, site)?;
    starter(flags, site, plan)?;
    run_directory(&site.run_dir)?;
    if plan.is_one_node && flags.container_image.is_none() { shared_memory(flags, site) } else { Ok(()) }
}

/// Bytes of `/dev/shm` without which MPI and ranks do not start, once and for each rank. Open MPI hangs when it gets less.
const MIN_SHM_BYTES: u64 = 4 << 20;

/// Checks that this user can create a ring in `/dev/shm`, and that ranks have room there.
///
/// # Errors
/// When something lacks, with what to do.
pub(crate) fn shared_memory(flags: &WorldFlags, site: &Site) -> Result<()> {
    let space = statvfs("/dev/shm").context("/dev/shm is not there; mount a tmpfs at /dev/shm")?;
    let free = space.blocks_available() * space.fragment_size();
    let needed = MIN_SHM_BYTES * (1 + u64::from(flags.world_size));
    if free < needed {
        bail!(
            "/dev/shm has {} MiB free, and {} rank(s) need {} MiB at least; give it more: `docker run --shm-size=8g`, or \
             `mount -o remount,size=8g /dev/shm`",
            free >> 20,
            flags.world_size,
            needed >> 20
        );
    }
    // A ring as ranks create them; its file is removed with it.
    let prefix = format!("{}check{}_", site.shm_prefix, std::process::id());
    match prefix.parse().and_then(|prefix| Ring::create(&prefix, "ring", 1 << 16)) {
        Ok(_) => Ok(()),
        Err(error) => {
            bail!("{:#}; let this user write to /dev/shm (`chmod 1777 /dev/shm`)", anyhow::Error::from(error))
        }
    }
}

/// Bytes that the run directory must have room for: the state of the world, and the first lines of its log.
const RUN_DIR_BYTES: usize = 32 << 10;

/// The longest name of a socket there: that of the relay's metrics, for the largest number of a process.
const LONGEST_SOCKET: &str = "world-4194304-99999.relay/metrics";

/// Checks that the run directory has room for the files of a world, which could be neither found nor ended without them, and that the
/// system takes the paths of its sockets.
///
/// # Errors
/// When something lacks, with what to do.
pub(crate) fn run_directory(dir: &Path) -> Result<()> {
    if SocketAddr::from_pathname(dir.join(LONGEST_SOCKET)).is_err() {
        bail!(
            "the path of the run directory {} is too long for sockets; set XDG_RUNTIME_DIR to a shorter one",
            dir.display()
        );
    }
    let file = dir.join(format!("check-{}", std::process::id()));
    let written = std::fs::write(&file, vec![0; RUN_DIR_BYTES]);
    // It does not matter if there is none.
    let _ = std::fs::remove_file(&file);
    let dir = dir.display();
    written.map_err(|error| {
        anyhow!("cannot write to the run directory {dir}: {error}; make room there, or set XDG_RUNTIME_DIR")
    })
}

/// Checks that `--model_repo` is a directory with models.
///
/// # Errors
/// When it is something else, with what to do.
pub(crate) fn repository(flags: &WorldFlags) -> Result<()> {
    let path = flags.model_repo.display();
    let is_checkpoint = flags.model_repo.join("config.json").is_file();
    if is_checkpoint || is_hub_name(&flags.model_repo) {
        let what = if is_checkpoint { "a checkpoint" } else { "no directory" };
        bail!(
            "{path} is {what}, and `launch` takes a model repository; serve a checkpoint or a model of a hub with `trireme serve {path}`"
        );
    }
    if !flags.model_repo.is_dir() {
        bail!("there is no model repository at {path}; say where it is with --model_repo=DIR");
    }
    if !flags.may_have_no_model() && !has_folder(&flags.model_repo)? {
        bail!(
            "{path} holds no model: it has no folders; to load models later, start with --model-control-mode=explicit or poll"
        );
    }
    Ok(())
}

/// Checks that the server program exists. That of an image cannot be checked from outside; ranks compare their builds at start-up.
///
/// # Errors
/// When it does not, with what to do.
pub(crate) fn program(flags: &WorldFlags, site: &Site) -> Result<()> {
    let trireme = flags.trireme.as_ref().unwrap_or(&site.trireme);
    if flags.container_image.is_none() && !trireme.is_file() {
        bail!(
            "there is no server program at {}; build it beside `launch`, or name it with --trireme",
            trireme.display()
        );
    }
    Ok(())
}

/// Checks that `mpirun` exists where it is needed, and that other hosts have the program and the repository.
///
/// # Errors
/// When something lacks, with what to do.
pub(crate) fn starter(flags: &WorldFlags, site: &Site, plan: &Plan) -> Result<()> {
    if !matches!(plan.starter, Starter::Mpirun(_)) {
        return Ok(());
    }
    site.mpirun.check_installed()?;
    if flags.container_image.is_none() {
        let trireme = flags.trireme.as_ref().unwrap_or(&site.trireme);
        hosts::check(&plan.placed, trireme, &flags.model_repo, !flags.elastic.is_empty())?;
    }
    Ok(())
}

/// Whether a path that leads to no directory has the form `ORG/NAME`.
fn is_hub_name(path: &Path) -> bool {
    let Some(text) = path.to_str().filter(|_| !path.exists()) else { return false };
    let parts: Vec<&str> = text.split('/').collect();
    parts.len() == 2 && parts.iter().all(|part| part.starts_with(|first: char| first.is_ascii_alphanumeric()))
}

/// Whether a directory has a folder that could be a model's.
///
/// # Errors
/// When the directory cannot be read.
pub(crate) fn has_folder(dir: &Path) -> Result<bool> {
    let entries = std::fs::read_dir(dir).with_context(|| format!("cannot read {}", dir.display()))?;
    let is_model =
        |entry: std::fs::DirEntry| entry.path().is_dir() && !entry.file_name().to_string_lossy().starts_with('.');
    Ok(entries.flatten().any(is_model))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_directory_without_room_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        run_directory(dir.path()).unwrap();
        // A link to /dev/full has no room.
        let file = dir.path().join(format!("check-{}", std::process::id()));
        std::os::unix::fs::symlink("/dev/full", file).unwrap();
        let error = format!("{:#}", run_directory(dir.path()).unwrap_err());
        assert!(error.contains(&dir.path().display().to_string()) && error.contains("No space left"), "{error}");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "nothing is left");
    }

    #[test]
    fn a_run_directory_whose_sockets_would_have_too_long_paths_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let of_length = |length: usize| {
            let part = "x".repeat(length - dir.path().as_os_str().len() - 1);
            let dir = dir.path().join(part);
            std::fs::create_dir(&dir).unwrap();
            run_directory(&dir)
        };
        // 108 bytes with the end of the text, and the `/` before the name.
        let longest = 106 - LONGEST_SOCKET.len();
        of_length(longest).unwrap();
        let error = of_length(longest + 1).unwrap_err().to_string();
        assert!(error.contains("set XDG_RUNTIME_DIR to a shorter one"), "{error}");
    }
}
