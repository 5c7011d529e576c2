//! The checkpoint that MODEL means: a directory, or a model of a hub.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use hub::{HubError, ModelName, Pulled, Settings};
use repository::Repository;

/// A checkpoint to serve.
pub(crate) struct Checkpoint {
    pub(crate) dir: PathBuf,
    /// What clients call it: `ORG/NAME`, or the directory's name.
    pub(crate) name: String,
}

/// What [`Checkpoint::look`] finds.
pub(crate) enum Looked {
    /// All of it is here.
    Complete(Checkpoint),
    /// A model of the hub whose weights are not in the cache.
    OnHub { name: String, missing_bytes: u64 },
}

/// The name in the repository of a directory whose own name cannot be one.
const FALLBACK: &str = "model";

impl Checkpoint {
    /// Finds the directory, or downloads the model.
    ///
    /// # Errors
    /// When there is no such model, or it cannot be served.
    pub(crate) fn of(model: &str, revision: Option<&str>) -> Result<Self> {
        match directory(model, revision)? {
            Some(dir) => Self::of_dir(dir),
            None => Self::of_hub(&hub::named(model, revision)?).with_context(|| not_here(model)),
        }
    }

    /// Like [`Self::of`], but downloads no weights.
    ///
    /// # Errors
    /// When there is no such model, or it cannot be served.
    pub(crate) fn look(model: &str, revision: Option<&str>) -> Result<Looked> {
        if let Some(dir) = directory(model, revision)? {
            return Ok(Looked::Complete(Self::of_dir(dir)?));
        }
        let name = hub::named(model, revision)?;
        let looked = hub::look(&name, &Settings::from_env()?, can_serve).with_context(|| not_here(model))?;
        let id = name.id().to_owned();
        Ok(match looked.dir {
            Some(dir) => Looked::Complete(Self { dir, name: id }),
            None => Looked::OnHub { name: id, missing_bytes: looked.missing_bytes },
        })
    }

    fn of_dir(dir: &Path) -> Result<Self> {
        if !dir.join("config.json").is_file() {
            let is_repository = Repository::open(&[dir.to_owned()]).and_then(|found| found.model_names());
            let is_repository =
                is_repository.is_ok_and(|names| names.iter().any(|name| dir.join(name).join("1").is_dir()));
            let advice = match is_repository {
                true => format!("it is a model repository: `launch --model_repo={}` serves it", dir.display()),
                false => {
                    "name the directory of a Hugging Face checkpoint, or a model of the hub as ORG/NAME".to_owned()
                }
            };
            bail!("{} has no config.json; {advice}", dir.display());
        }
        let dir = dir.canonicalize().with_context(|| format!("cannot find {}", dir.display()))?;
        let name = dir.file_name().map_or(FALLBACK.to_owned(), |name| name.to_string_lossy().into_owned());
        Ok(Self { dir, name })
    }

    fn of_hub(name: &ModelName) -> Result<Self> {
        let Pulled { dir, trouble } = hub::pull(name, &Settings::from_env()?, can_serve)?;
        if let Some(trouble) = trouble {
            eprintln!("warning: {trouble}");
            eprintln!("warning: serves `{name}` as it was downloaded before");
        }
        Ok(Self { dir, name: name.id().to_owned() })
    }

    /// Its name in the repository, which becomes the name of a directory.
    pub(crate) fn model(&self) -> &str {
        let last = self.name.rsplit('/').next().unwrap_or(FALLBACK);
        // `--served-model-name` ends with the model's name after a `=`.
        if Repository::check_name(last).is_ok() && !last.contains('=') { last } else { FALLBACK }
    }
}

/// The directory that MODEL means; `None` for a model of the hub.
fn directory<'a>(model: &'a str, revision: Option<&str>) -> Result<Option<&'a Path>> {
    let path = Path::new(model);
    if path.is_dir() {
        if revision.is_some() {
            bail!("{model} is a directory, which has no revisions; leave --revision out");
        }
        return Ok(Some(path));
    }
    if path.exists() {
        bail!("{model} is a file; name the directory of a checkpoint, with config.json");
    }
    if [".", "/", "~"].iter().any(|start| model.starts_with(start)) {
        bail!("there is no directory {model}; name one with config.json, or a model of the hub as ORG/NAME");
    }
    Ok(None)
}

fn not_here(model: &str) -> String {
    format!("{model} is no directory here")
}

/// Whether the configuration of a downloaded model can be served, before its weights are downloaded.
///
/// # Errors
/// With the reason.
pub fn can_serve(dir: &Path) -> Result<(), String> {
    models::Config::from_dir(dir).map(drop).map_err(|error| error.to_string())
}

/// Who serves a file in `dir`, which is the directory of a model in the hub's cache.
pub fn user_of(dir: &Path) -> Option<String> {
    let dir = dir.canonicalize().ok()?;
    let worlds = launcher::served_repositories().unwrap_or_default();
    let uses = |repository: &Path| {
        let models = std::fs::read_dir(repository).into_iter().flatten().flatten();
        let weights = models.map(|model| model.path().join("1/weights"));
        weights.filter_map(|link| link.canonicalize().ok()).any(|found| found.starts_with(&dir))
    };
    let (_, port) = worlds.into_iter().find(|(repository, _)| uses(repository))?;
    Some(format!("the world on http port {port}; end it with `launch stop --http_port={port}`"))
}

/// `trireme pull`
///
/// # Errors
/// When the model cannot be downloaded or served.
pub fn pull(args: &hub::PullArgs) -> Result<(), HubError> {
    hub::run_pull(args, can_serve)
}

/// `trireme rm`
///
/// # Errors
/// When the model is not in the cache, or a world serves it.
pub fn remove(args: &hub::RmArgs) -> Result<(), HubError> {
    hub::run_rm(args, user_of)
}
