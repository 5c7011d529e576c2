//! Scans the directories of a model repository for models and for the versions to serve.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use crate::error::RepositoryError;
use crate::proto::ModelConfig;
use crate::proto::model_version_policy::PolicyChoice;
use crate::text_format::Parsed;
use crate::{defaults, detect, json, text_format, validate};

/// One or more directories with a folder for each model.
#[derive(Debug, Clone)]
pub struct Repository {
    roots: Vec<PathBuf>,
}

/// A model as found in the repository, ready to be loaded.
#[derive(Debug, Clone)]
pub struct ModelSource {
    /// The model's name, which is the name of its directory.
    pub name: String,
    /// `<repository>/<model>`.
    pub dir: PathBuf,
    /// The configuration, with defaults filled in.
    pub config: ModelConfig,
    /// Versions that the version policy serves, ascending; never empty.
    pub versions: Vec<i64>,
    /// Unfilled template variables of the configuration, in the order of the file.
    pub unfilled: Vec<String>,
    /// Set if another configuration was given: that of the repository, without parameters if the repository has none.
    pub replaced: Option<ModelConfig>,
}

impl ModelSource {
    /// A warning that names [`ModelSource::unfilled`]; `None` if it is empty.
    pub fn unfilled_words(&self) -> Option<String> {
        (!self.unfilled.is_empty()).then(|| format!("template variables taken as unset: {}", self.unfilled.join(", ")))
    }
}

impl Repository {
    /// Opens a repository of these directories. Duplicates are ignored.
    ///
    /// # Errors
    /// If one of them is not a directory, or the list is empty.
    pub fn open(roots: &[PathBuf]) -> Result<Self, RepositoryError> {
        if roots.is_empty() {
            return Err(RepositoryError::NoRepository);
        }
        if let Some(root) = roots.iter().find(|root| !root.is_dir()) {
            return Err(RepositoryError::NotADirectory { path: root.clone() });
        }
        let mut seen = BTreeSet::new();
        let is_new = |root: &&PathBuf| seen.insert(root.canonicalize().unwrap_or_else(|_| root.to_path_buf()));
        Ok(Self { roots: roots.iter().filter(is_new).cloned().collect() })
    }

    /// The directories of the repository.
    pub fn roots(&self) -> &[PathBuf] {
        &self.roots
    }

    /// The sorted names of all models, including those that cannot be loaded.
    ///
    /// # Errors
    /// If a directory cannot be read.
    pub fn model_names(&self) -> Result<Vec<String>, RepositoryError> {
        let mut names = Vec::new();
        for root in &self.roots {
            names.extend(directories(root)?.into_keys());
        }
        names.sort();
        names.dedup();
        Ok(names)
    }

    /// Reads a model's configuration, and finds the versions to serve.
    ///
    /// # Errors
    /// If the model is missing, its configuration is wrong, or it has no version to serve.
    pub fn model(&self, name: &str) -> Result<ModelSource, RepositoryError> {
        let dir = self.model_dir(name)?;
        let path = dir.join("config.pbtxt");
        let parsed = match fs::read(&path) {
            Ok(bytes) => read_config(&path, &bytes)?,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                let mut config = ModelConfig::default();
                detect::fill(&mut config, name, first_version(&dir)?.as_deref());
                if config.backend.is_empty() {
                    return Err(RepositoryError::NoConfig { name: name.to_owned(), dir });
                }
                Parsed { config, unfilled: Vec::new() }
            }
            Err(source) => return Err(RepositoryError::Read { path, source }),
        };
        let source = finish(name, dir, &path, parsed.config)?;
        let source = ModelSource { unfilled: parsed.unfilled, ..source };
        if let Some(words) = source.unfilled_words() {
            tracing::warn!(model = name, "{words}");
        }
        Ok(source)
    }

    /// Like [`Repository::model`], with a configuration given as JSON instead of its `config.pbtxt`.
    ///
    /// # Errors
    /// Those of [`Repository::model`], and if the JSON is wrong.
    pub fn model_with_config(&self, name: &str, config_json: &str) -> Result<ModelSource, RepositoryError> {
        let dir = self.model_dir(name)?;
        let path = dir.join("config.pbtxt");
        let replaced = self.model(name).map(|source| source.config).unwrap_or_default();
        let source = finish(name, dir, &path, json::from_json(name, config_json)?)?;
        Ok(ModelSource { replaced: Some(replaced), ..source })
    }

    /// The latest modification time of the files that determine how a model is loaded; `None` for an unknown model.
    pub fn modified(&self, name: &str) -> Option<std::time::SystemTime> {
        let dir = self.model_dir(name).ok()?;
        let mut paths = vec![dir.join("config.pbtxt"), dir.clone()];
        for version in directories(&dir).ok()?.into_values() {
            paths.extend(fs::read_dir(&version).ok()?.flatten().map(|entry| entry.path()));
            paths.push(version);
        }
        paths.iter().filter_map(|path| fs::metadata(path).ok()?.modified().ok()).max()
    }

    /// Checks that `name` can be the name of a model: a single path component that is not hidden. Call it before a path is built
    /// from a model's name.
    ///
    /// # Errors
    /// [`RepositoryError::UnknownModel`] if it cannot.
    pub fn check_name(name: &str) -> Result<(), RepositoryError> {
        let is_wrong =
            name.is_empty() || name.len() > MAX_NAME_BYTES || name.starts_with('.') || name.contains(['/', '\\', '\0']);
        if is_wrong { Err(RepositoryError::UnknownModel { name: name.to_owned() }) } else { Ok(()) }
    }

    fn model_dir(&self, name: &str) -> Result<PathBuf, RepositoryError> {
        Self::check_name(name)?;
        let unknown = || RepositoryError::UnknownModel { name: name.to_owned() };
        let mut found = self.roots.iter().map(|root| root.join(name)).filter(|dir| dir.is_dir());
        let first = found.next().ok_or_else(unknown)?;
        match found.next() {
            Some(second) => Err(RepositoryError::Ambiguous { name: name.to_owned(), first, second }),
            None => Ok(first),
        }
    }
}

/// Maximum length of a file name.
const MAX_NAME_BYTES: usize = 255;

/// The folders in `dir` by name, except hidden ones.
fn directories(dir: &Path) -> Result<BTreeMap<String, PathBuf>, RepositoryError> {
    let failed = |source| RepositoryError::Read { path: dir.to_owned(), source };
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(dir).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        let name = path.file_name().and_then(|name| name.to_str()).filter(|name| !name.starts_with('.'));
        if let Some(name) = name.filter(|_| path.is_dir()) {
            found.insert(name.to_owned(), path);
        }
    }
    Ok(found)
}

fn read_config(path: &Path, bytes: &[u8]) -> Result<Parsed, RepositoryError> {
    let invalid = |message: String| RepositoryError::Invalid { path: path.to_owned(), message };
    let text = std::str::from_utf8(bytes)
        .map_err(|error| invalid(format!("byte {} is not UTF-8; save the file as UTF-8", error.valid_up_to())))?;
    text_format::parse(text).map_err(|error| RepositoryError::Syntax {
        path: path.to_owned(),
        line: error.line,
        column: error.column,
        message: error.message,
    })
}

fn finish(name: &str, dir: PathBuf, path: &Path, mut config: ModelConfig) -> Result<ModelSource, RepositoryError> {
    detect::fill(&mut config, name, first_version(&dir)?.as_deref());
    defaults::fill(&mut config, name);
    validate::validate(&config, name).map_err(|message| RepositoryError::Invalid { path: path.to_owned(), message })?;
    let mut found: Vec<i64> = versions(&dir)?.into_keys().collect();
    if found.is_empty() && config.is_ensemble() {
        // The version directory of an ensemble is empty, and tools such as git omit empty directories.
        found.push(1);
    }
    let versions = served(&config, &found);
    if versions.is_empty() {
        return Err(RepositoryError::NoVersion { name: name.to_owned() });
    }
    Ok(ModelSource { name: name.to_owned(), dir, config, versions, unfilled: Vec::new(), replaced: None })
}

/// Version directories by number: plain decimal names from 1 up.
fn versions(dir: &Path) -> Result<BTreeMap<i64, PathBuf>, RepositoryError> {
    let numbered = |(name, path): (String, PathBuf)| {
        let plain = !name.starts_with('0') && name.bytes().all(|byte| byte.is_ascii_digit());
        plain.then(|| name.parse().ok()).flatten().map(|number| (number, path))
    };
    Ok(directories(dir)?.into_iter().filter_map(numbered).collect())
}

/// The directory of the first version.
fn first_version(dir: &Path) -> Result<Option<PathBuf>, RepositoryError> {
    Ok(versions(dir)?.into_values().next())
}

/// The versions that the policy serves, out of the versions `found`, which are ascending.
fn served(config: &ModelConfig, found: &[i64]) -> Vec<i64> {
    match config.version_policy.as_ref().and_then(|policy| policy.policy_choice.as_ref()) {
        Some(PolicyChoice::All(_)) => found.to_vec(),
        Some(PolicyChoice::Specific(specific)) => {
            found.iter().copied().filter(|version| specific.versions.contains(version)).collect()
        }
        Some(PolicyChoice::Latest(latest)) => {
            let kept = usize::try_from(latest.num_versions).unwrap_or(usize::MAX);
            found[found.len().saturating_sub(kept)..].to_vec()
        }
        None => found.last().copied().into_iter().collect(),
    }
}
