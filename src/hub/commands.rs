//! `trireme pull`, `trireme list` and `trireme rm`.

use std::io::{BufRead as _, IsTerminal as _, Write as _};
use std::path::Path;
use std::time::SystemTime;

use clap::Args;
use indicatif::HumanBytes;
use jiff::Timestamp;
use jiff::tz::TimeZone;

use crate::name::ModelName;
use crate::pull::{Check, pull};
use crate::settings::Settings;
use crate::stored::{Stored, list, remove, size};
use crate::{HubError, pull::Pulled};

/// Digits of a commit that are shown.
const COMMIT_DIGITS: usize = 8;

/// `trireme pull`
#[derive(Debug, Clone, Args)]
pub struct PullArgs {
    /// Name of a model on the hub, perhaps with a revision: ORG/NAME, ORG/NAME@REVISION
    #[arg(value_name = "MODEL")]
    model: String,
    /// Branch, tag or commit
    #[arg(long, value_name = "REVISION")]
    revision: Option<String>,
}

/// `trireme rm`
#[derive(Debug, Clone, Args)]
pub struct RmArgs {
    /// Name of a model in the cache; all its revisions are removed
    #[arg(value_name = "MODEL")]
    model: String,
    /// Do not ask
    #[arg(short, long)]
    yes: bool,
}

/// The model that a name and perhaps `--revision` mean.
///
/// # Errors
/// When one of them has a form that the hub does not use, or both have a revision.
pub fn named(model: &str, revision: Option<&str>) -> Result<ModelName, HubError> {
    let name: ModelName = model.parse()?;
    match revision {
        Some(_) if model.contains('@') => {
            let reason = "`--revision` is given too".to_owned();
            Err(HubError::Name { text: model.to_owned(), reason })
        }
        Some(revision) => name.at(revision),
        None => Ok(name),
    }
}

/// Downloads a model and prints its directory.
///
/// # Errors
/// When it cannot be downloaded, even if the cache has an earlier download.
pub fn run_pull(args: &PullArgs, check: Check) -> Result<(), HubError> {
    let Pulled { dir, trouble } = pull(&named(&args.model, args.revision.as_deref())?, &Settings::from_env()?, check)?;
    match trouble {
        Some(error) => Err(error),
        None => {
            println!("{}", dir.display());
            Ok(())
        }
    }
}

/// Prints the models in the cache.
///
/// # Errors
/// When the cache cannot be read.
pub fn run_list() -> Result<(), HubError> {
    let settings = Settings::from_env()?;
    let found = list(&settings)?;
    if found.is_empty() {
        println!("no models in {}; download one with `trireme pull ORG/NAME`", settings.cache.display());
        return Ok(());
    }
    let mut rows = vec![["MODEL", "REVISION", "SIZE", "LAST USED", ""].map(str::to_owned)];
    rows.extend(found.iter().map(row));
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: [usize; 5] = std::array::from_fn(width);
    for row in &rows {
        let cells: Vec<String> = row.iter().zip(widths).map(|(cell, width)| format!("{cell:width$}")).collect();
        println!("{}", cells.join("  ").trim_end());
    }
    Ok(())
}

fn row(stored: &Stored) -> [String; 5] {
    let commit = stored.commit.get(..COMMIT_DIGITS).unwrap_or(&stored.commit);
    let revision = match stored.refs.is_empty() {
        true => commit.to_owned(),
        false => format!("{} ({commit})", stored.refs.join(", ")),
    };
    let state = if stored.is_complete { "" } else { "incomplete" };
    [
        stored.id.clone(),
        revision,
        HumanBytes(stored.bytes).to_string(),
        stored.last_used.map_or("?".into(), day),
        state.into(),
    ]
}

/// Date and time on this machine.
fn day(time: SystemTime) -> String {
    let Ok(time) = Timestamp::try_from(time) else { return "?".to_owned() };
    time.to_zoned_datetime(TimeZone::system()).strftime("%Y-%m-%d %H:%M").to_string()
}

/// Removes a model after a question. `user` names who uses a file in the given directory, if anybody does.
///
/// # Errors
/// When the model is not in the cache, is in use, or cannot be removed.
pub fn run_rm(args: &RmArgs, user: impl FnOnce(&Path) -> Option<String>) -> Result<(), HubError> {
    let (name, settings) = (named(&args.model, None)?, Settings::from_env()?);
    if args.model.contains('@') {
        let reason = "`rm` removes all revisions; name the model alone".to_owned();
        return Err(HubError::Name { text: args.model.clone(), reason });
    }
    let bytes = HumanBytes(size(&name, &settings)?);
    if !args.yes && !is_confirmed(&format!("remove {} ({bytes}) from {}?", name.id(), settings.cache.display()))? {
        println!("kept {}", name.id());
        return Ok(());
    }
    remove(&name, &settings, user)?;
    println!("removed {} ({bytes})", name.id());
    Ok(())
}

/// Asks in the terminal.
fn is_confirmed(question: &str) -> Result<bool, HubError> {
    let stdin = std::io::stdin();
    if !stdin.is_terminal() {
        let source = std::io::Error::other("standard input is no terminal; say --yes");
        return Err(HubError::Io { what: format!("ask \"{question}\""), source });
    }
    print!("{question} [y/N] ");
    let mut answer = String::new();
    let read = std::io::stdout().flush().and_then(|()| stdin.lock().read_line(&mut answer));
    read.map_err(HubError::io("ask"))?;
    Ok(["y", "yes"].contains(&answer.trim().to_ascii_lowercase().as_str()))
}
