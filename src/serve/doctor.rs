//! `trireme doctor MODEL`: checks what `trireme serve MODEL` needs, and starts and downloads nothing but small files.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use indicatif::HumanBytes;
use rank::Hardware;

use crate::args::ServeArgs;
use crate::checkpoint::{Checkpoint, Looked};
use crate::{line, run_files, size};

/// `trireme doctor MODEL`
#[derive(Debug, Clone, Args)]
pub struct DoctorArgs {
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// The model to serve, and how
    #[command(flatten)]
    serve: ServeArgs,
}

/// Prints a line for each check. The exit code is a failure if the model could not be served.
///
/// # Errors
/// When the run directory cannot be used.
pub fn doctor(args: &DoctorArgs, hardware: &Hardware) -> Result<ExitCode> {
    let (serve, mut earlier) = (&args.serve, Vec::new());
    let looked = Checkpoint::look(&serve.model, serve.revision.as_deref());
    earlier.push(("model", looked.as_ref().map(found).map_err(|error| format!("{error:#}"))));
    let mut checked = None;
    if let Ok(Looked::Complete(checkpoint)) = &looked {
        let result = choose(serve, checkpoint, hardware);
        earlier.push(("world size", result.as_ref().map(|(_, why, _)| why.clone()).map_err(brief)));
        checked = result.ok().map(|(repository, _, size)| (repository, size));
    }
    let mut flags = machine_flags(args)?;
    let (repository, world_size) = match checked {
        Some(checked) => checked,
        None => {
            // The machine alone is checked.
            flags.push("--model-control-mode=explicit".to_owned());
            (run_files::empty()?, serve.tp.unwrap_or(1) * serve.pp * serve.replicas)
        }
    };
    let world = [format!("--world-size={world_size}"), format!("--model-repo={}", repository.display())];
    let result = launcher::doctor(&[&world[..], &flags].concat(), &earlier);
    run_files::remove(&repository);
    Ok(ExitCode::from(result?))
}

/// An error without the table between its first line and what lacks.
fn brief(error: &anyhow::Error) -> String {
    let error = format!("{error:#}");
    let lines: Vec<&str> = error.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    let lacks = lines.iter().position(|line| line.starts_with(LACKS));
    match lacks {
        Some(at) => format!("{}: {}", lines[0], lines[at..].join("; ").trim_start_matches(LACKS)),
        None => lines.concat(),
    }
}

/// Start of the line after the table.
const LACKS: &str = "does not fit: ";

/// What was found, in words.
fn found(looked: &Looked) -> String {
    match looked {
        Looked::Complete(checkpoint) => format!("`{}` in {}", checkpoint.name, checkpoint.dir.display()),
        Looked::OnHub { name, missing_bytes } => {
            format!(
                "`{name}` can be downloaded: {}; its memory is planned once it is there",
                HumanBytes(*missing_bytes)
            )
        }
    }
}

/// The repository, why its world has its size, and the size.
fn choose(args: &ServeArgs, checkpoint: &Checkpoint, hardware: &Hardware) -> Result<(PathBuf, String, u32)> {
    let repository = run_files::write(args, checkpoint)?;
    let size = line::plan_flags(args, checkpoint, &repository).and_then(|flags| size::choose(args, &flags, hardware));
    match size {
        Ok(chosen) => Ok((repository, format!("{} rank(s), {}", chosen.world_size, chosen.why), chosen.world_size)),
        Err(error) => {
            run_files::remove(&repository);
            Err(error)
        }
    }
}

/// The arguments of `launch doctor` but for the world's size and repository.
fn machine_flags(args: &DoctorArgs) -> Result<Vec<String>> {
    let serve = &args.serve;
    let [http, grpc, metrics] = line::ports(serve)?;
    let mut flags =
        vec![format!("--http-port={http}"), format!("--grpc-port={grpc}"), format!("--metrics-port={metrics}")];
    flags.push(format!("--device={}", serve.device));
    flags.extend(args.json.then(|| "--json".to_owned()));
    flags.push("--".to_owned());
    flags.extend(serve.rank_flags.iter().cloned());
    Ok(flags)
}
