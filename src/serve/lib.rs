//! `trireme serve`: serves a checkpoint or a model of a hub with one command.
//!
//! [`run`] finds or downloads the checkpoint, writes a model repository around it, chooses the number of ranks by the memory plan, and
//! becomes `launch`, which runs the world. [`pull`] and [`remove`] are `trireme pull` and `trireme rm`.
#![forbid(unsafe_code)]

mod args;
mod checkpoint;
mod doctor;
mod line;
mod run_files;
mod size;
mod speculative;

use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, ExitCode};

use anyhow::{Context as _, Result};
use rank::Hardware;

pub use args::{ServeArgs, advice};
pub use checkpoint::{pull, remove};
pub use doctor::{DoctorArgs, doctor};

use checkpoint::Checkpoint;

/// Serves a model until a signal, or in the background.
///
/// # Errors
/// When the model cannot be found, downloaded or served, or does not fit.
pub fn run(args: &ServeArgs, hardware: &Hardware) -> Result<ExitCode> {
    let checkpoint = Checkpoint::of(&args.model, args.revision.as_deref())?;
    let repository = run_files::write(args, &checkpoint)?;
    let result = become_launch(args, &checkpoint, &repository, hardware);
    run_files::remove(&repository);
    result
}

/// Replaces this process by `launch`, so that no thread, memory or device of the plan is left in the launcher.
fn become_launch(
    args: &ServeArgs,
    checkpoint: &Checkpoint,
    repository: &Path,
    hardware: &Hardware,
) -> Result<ExitCode> {
    let chosen = size::choose(args, &line::plan_flags(args, checkpoint, repository)?, hardware)?;
    eprintln!("{}: {} rank(s), {}", checkpoint.name, chosen.world_size, chosen.why);
    chosen.plan.brief().iter().for_each(|line| eprintln!("  {line}"));
    let line = line::launch(args, checkpoint, repository, chosen.world_size)?;
    let program = std::env::current_exe().context("cannot find this program")?;
    let error = Command::new(&program).arg(launcher::SUB_COMMAND).args(line).exec();
    Err(error).with_context(|| format!("cannot start {}", program.display()))
}
