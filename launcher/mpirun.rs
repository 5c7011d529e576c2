//! Worlds that Open MPI's `mpirun` starts.

use std::fs;
use std::path::PathBuf;

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
