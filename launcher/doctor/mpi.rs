//! Checks of the server program and of the MPI launcher.

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Instant;

use super::finding::Finding;
use crate::command::Starter;
use crate::flags::WorldFlags;
use crate::mpi::{self, MpiKind, Mpirun};
use crate::plan::{Plan, Site};

/// Checks that the server program runs.
pub(super) fn program(flags: &WorldFlags, site: &Site) -> Finding {
    if let Some(image) = &flags.container_image {
        return Finding::ok("server program", format!("in the image {image}, not checked"));
    }
    let path = flags.trireme.as_ref().unwrap_or(&site.trireme);
    let advice = "build it beside `launch` with `cargo build --release`, or name it with --trireme";
    match output(Command::new(path).arg("--version")) {
        Some(version) => Finding::ok("server program", format!("{} ({})", path.display(), version.trim())),
        None => Finding::fail("server program", format!("{} does not run", path.display()), advice),
    }
}

/// Checks which MPI launcher starts ranks, and whether it starts processes.
pub(super) fn check(site: &Site, plan: &Plan) -> Vec<Finding> {
    if let Starter::Srun { job, .. } = plan.starter {
        return vec![Finding::ok("MPI", format!("Slurm job {job} starts the ranks"))];
    }
    if plan.starter == Starter::Local {
        return vec![Finding::ok("MPI", "not needed for one rank")];
    }
    let version = mpi::version(&site.mpirun.program).unwrap_or_default();
    // The first line of Hydra has no version number.
    let numbered = version.lines().find(|line| line.bytes().any(|byte| byte.is_ascii_digit())).unwrap_or("");
    let numbered = numbered.split_whitespace().collect::<Vec<_>>().join(" ");
    let found = format!("{} ({}: {numbered})", site.mpirun.program.display(), name_of(site.mpirun.kind));
    vec![Finding::ok("MPI", found), start(&site.mpirun)]
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
