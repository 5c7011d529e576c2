//! Checks of the server program and of the MPI launcher.

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Instant;

use super::finding::Finding;
use crate::flags::DoctorFlags;
use crate::mpi::{self, MpiKind, Mpirun};
use crate::srun;

/// Checks that the server program exists and runs.
pub(super) fn program(flags: &DoctorFlags) -> Finding {
    let beside = || std::env::current_exe().map(|launch| launch.with_file_name("trireme")).unwrap_or_default();
    let path = flags.trireme.clone().unwrap_or_else(beside);
    let advice = "build it beside `launch` with `cargo build --release`, or name it with --trireme";
    match output(Command::new(&path).arg("--version")) {
        Some(version) => Finding::ok("server program", format!("{} ({})", path.display(), version.trim())),
        None => Finding::fail("server program", format!("{} does not run", path.display()), advice),
    }
}

/// Checks which MPI launcher there is and whether it starts processes.
pub(super) fn check(flags: &DoctorFlags) -> Vec<Finding> {
    let mpirun = Mpirun::named(flags.mpirun.as_deref(), true);
    if let Some(job) = srun::Allocation::from_env() {
        return vec![slurm(&job, mpirun.kind)];
    }
    let named = flags.mpirun.clone().filter(|path| path.components().count() > 1);
    let Some(path) = named.or_else(|| find(&mpirun.program.to_string_lossy())) else {
        let advice = "install Open MPI (Debian, Ubuntu: `apt-get install openmpi-bin`) or MPICH (`mpich`)";
        let found = format!("`{}` is not in PATH", mpirun.program.display());
        return vec![match flags.world_size {
            1 => Finding::warn("MPI", format!("{found}; one rank needs none"), format!("for more ranks, {advice}")),
            _ => Finding::fail("MPI", found, advice),
        }];
    };
    let version = mpi::version(&path).unwrap_or_default();
    // The first line of Hydra has no version number.
    let numbered = version.lines().find(|line| line.bytes().any(|byte| byte.is_ascii_digit())).unwrap_or("");
    let numbered = numbered.split_whitespace().collect::<Vec<_>>().join(" ");
    let found = format!("{} ({}: {numbered})", path.display(), name_of(mpirun.kind));
    vec![Finding::ok("MPI", found), start(&mpirun)]
}

fn name_of(kind: MpiKind) -> &'static str {
    match kind {
        MpiKind::OpenMpi | MpiKind::OpenMpi5 => "Open MPI",
        MpiKind::Mpich => "MPICH",
    }
}

/// Starts two processes that do nothing.
fn start(mpirun: &Mpirun) -> Finding {
    let mut command = Command::new(&mpirun.program);
    let begun = Instant::now();
    if mpirun.kind != MpiKind::Mpich {
        command.args(["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]);
    }
    match command.args(["-n", "2", "true"]).stdin(Stdio::null()).output() {
        Ok(output) if output.status.success() => {
            Finding::ok("MPI start", format!("two processes in {:.2} s", begun.elapsed().as_secs_f64()))
        }
        Ok(output) => {
            let stderr = String::from_utf8_lossy(&output.stderr);
            let line =
                stderr.lines().find(|line| line.chars().any(char::is_alphanumeric)).unwrap_or("no error message");
            Finding::fail(
                "MPI start",
                line.trim(),
                "run `mpirun -n 2 true` and fix the error it reports; `hostname` must resolve",
            )
        }
        Err(error) => Finding::fail("MPI start", error.to_string(), "check that `mpirun` is executable"),
    }
}

fn slurm(job: &srun::Allocation, mpi: MpiKind) -> Finding {
    match job.mpi_type(mpi) {
        Ok(kind) => Finding::ok("MPI", format!("Slurm job {} starts ranks through {kind}", job.job)),
        Err(error) => {
            let advice = "ask the site for PMIx (`srun --mpi=list`); until then `launch` uses mpirun on one node";
            Finding::warn("MPI", format!("{error:#}"), advice)
        }
    }
}

/// The path of a program in PATH.
pub(super) fn find(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).map(|dir| dir.join(name)).find(|file| file.is_file())
}

/// The output of a program if it succeeds.
pub(super) fn output(command: &mut Command) -> Option<String> {
    let output = command.output().ok().filter(|output| output.status.success())?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    // Some programs print their version to standard error.
    Some(if text.trim().is_empty() { String::from_utf8_lossy(&output.stderr).into_owned() } else { text })
}
