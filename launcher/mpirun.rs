//! Worlds that Open MPI's `mpirun` starts.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Result, bail};

use crate::plan::CommandLine;
use crate::processes;

/// One application context per rank.
pub(crate) fn command(ranks: &[CommandLine], oversubscribe: bool) -> CommandLine {
    // Unbound: a rank's workers inherit its cores, and by default each rank would get one.
    let mut args = ["--allow-run-as-root", "--bind-to", "none"].map(str::to_owned).to_vec();
    if oversubscribe {
        args.extend(["--oversubscribe", "--mca", "mpi_yield_when_idle", "1"].map(str::to_owned));
    }
    for (rank, command) in ranks.iter().enumerate() {
        if rank > 0 {
            args.push(":".to_owned());
        }
        args.extend(["-n".to_owned(), "1".to_owned(), command.program.display().to_string()]);
        args.extend(command.args.iter().cloned());
    }
    CommandLine { program: PathBuf::from("mpirun"), args }
}

/// Errs when `mpirun` is not on the machine.
pub(crate) fn check_installed() -> Result<()> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    if !std::env::split_paths(&path).any(|dir| dir.join("mpirun").is_file()) {
        bail!(
            "`mpirun` is not in PATH, and a world of more than one rank needs it; \
             install Open MPI (Debian, Ubuntu: `apt-get install openmpi-bin`), or use --world_size=1"
        );
    }
    Ok(())
}

/// The pid of rank 0 below `mpirun`; None when it is not there (yet), or on another node.
pub(crate) fn find_rank_0(mpirun: u32) -> Option<u32> {
    // Nearest first: a worker inherits its rank's environment, and stands below it.
    processes::descendants(mpirun).into_iter().find(|pid| {
        let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        environment.split(|byte| *byte == 0).any(|entry| entry == b"OMPI_COMM_WORLD_RANK=0" || entry == b"PMIX_RANK=0")
    })
}

/// Removes what an `mpirun` that was killed leaves on this node: its session directory, and the shared-memory
/// segments of Open MPI that no process maps any more.
pub(crate) fn remove_leftovers(mpirun: u32) {
    let uid = nix::unistd::getuid().as_raw();
    let host = nix::unistd::gethostname().unwrap_or_default().to_string_lossy().into_owned();
    // Gone already, as when mpirun ended in good order, is as good.
    let _ = fs::remove_dir_all(std::env::temp_dir().join(format!("ompi.{host}.{uid}/pid.{mpirun}")));

    let names = ["vader", "sm"].map(|transport| format!("{transport}_segment.{host}.{uid}."));
    let is_segment = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        names.iter().any(|start| name.starts_with(start)) && fs::metadata(path).is_ok_and(|meta| meta.uid() == uid)
    };
    let entries = fs::read_dir("/dev/shm").into_iter().flatten().flatten();
    let segments: Vec<_> = entries.map(|entry| entry.path()).filter(is_segment).collect();
    if segments.is_empty() {
        return;
    }
    let mapped = processes::mapped_files(Path::new("/dev/shm"));
    for segment in segments.iter().filter(|segment| !mapped.contains(*segment)) {
        let _ = fs::remove_file(segment);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_that_a_process_maps_stay_and_others_go() {
        let (uid, host) = (nix::unistd::getuid(), nix::unistd::gethostname().unwrap());
        let start = format!("{}.{uid}.test{}", host.to_string_lossy(), std::process::id());
        let (prefix, name) = ("vader_segment.".parse().unwrap(), format!("{start}.0"));
        let made = ipc::Region::create(&prefix, &name, 64).unwrap();
        // Its maker mapped it before it had a name, by which `/proc` goes.
        let _used = ipc::Region::open(&prefix, &name).unwrap();
        let unused = PathBuf::from(format!("/dev/shm/vader_segment.{start}.1"));
        fs::write(&unused, "").unwrap();

        remove_leftovers(0);
        assert!(made.path().exists() && !unused.exists());
    }
}
