//! `trireme lint` checks and explains a model repository; `trireme init` writes a new one.
//!
//! [`lint()`] loads a repository exactly as a server does, but with a loader that starts no worker
//! ([`backends::llm::CheckFactory`]), and reports the same errors. In addition it explains every file and key.
//! [`init()`] writes a repository of a published layout for a checkpoint.
//!
//! ```
//! let root = std::env::temp_dir().join(format!("lint-example-{}", std::process::id()));
//! std::fs::create_dir_all(root.join("echo/1"))?;
//! std::fs::write(root.join("echo/config.pbtxt"), "backend: \"identity\"\nmax_batch_sise: 4\n")?;
//!
//! let no_language_models = |_: &_, _: &_, _: &_| unreachable!("the repository has no language model");
//! let report = lint::check(&[root.clone()], 1, no_language_models)?;
//! let wrong = report.findings.iter().find(|finding| finding.verdict == lint::Verdict::Wrong).unwrap();
//! assert_eq!(wrong.line, Some(2));
//! assert!(wrong.why.contains("did you mean `max_batch_size`?"));
//! # std::fs::remove_dir_all(root)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]

mod dry_load;
mod error;
mod explain;
mod fields;
mod files;
mod fill;
mod finding;
mod init;
mod key_positions;
mod keys;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use models::EstimateMemory;

pub use error::LintError;
pub use finding::{Finding, Report, Verdict};
pub use init::{InitArgs, LintLayout, init, write_text_repository};

/// `trireme lint`
#[derive(Debug, Clone, Args)]
pub struct LintArgs {
    /// Directories of models
    #[arg(value_name = "REPOSITORY", required_unless_present = "keys")]
    repositories: Vec<PathBuf>,
    /// Ranks of the world that would serve it
    #[arg(long, alias = "world_size", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    world_size: u32,
    /// Print the findings as JSON
    #[arg(long)]
    json: bool,
    /// Print only what is wrong
    #[arg(short, long)]
    quiet: bool,
    /// Print the meaning of every key of every layout as Markdown; no repository is read
    #[arg(long)]
    keys: bool,
}

/// Prints a report on a repository. `estimate` checks the weights of language models. The exit code is a failure if the
/// report has findings with [`Verdict::Wrong`].
///
/// # Errors
/// When the repository cannot be read.
pub fn lint(args: &LintArgs, estimate: EstimateMemory) -> Result<ExitCode, LintError> {
    if args.keys {
        print!("{}", keys::markdown());
        return Ok(ExitCode::SUCCESS);
    }
    let report = check(&args.repositories, args.world_size, estimate)?;
    match args.json {
        true => println!("{}", serde_json::to_string_pretty(&report).expect("a report is plain data")),
        false => print!("{}", report.text(args.quiet)),
    }
    Ok(if report.wrong == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Checks a repository for a world of `world_size` ranks. `estimate` checks the weights of language models.
///
/// # Errors
/// When a directory cannot be read.
pub fn check(roots: &[PathBuf], world_size: u32, estimate: EstimateMemory) -> Result<Report, LintError> {
    let repository = repository::Repository::open(roots)?;
    let failures = dry_load::failures(roots, world_size, estimate)?;
    let mut findings = Vec::new();
    for root in roots {
        match root.join("config.json").is_file() {
            true => findings.push(files::checkpoint(root)),
            false => findings.extend(files::files_outside_models(root)?),
        }
    }
    for name in repository.model_names()? {
        let failure = failures.iter().find(|failure| failure.model == name).map(|failure| failure.reason.as_str());
        findings.extend(explain::model(&repository, &name, failure)?);
    }
    Ok(Report::of(findings))
}
