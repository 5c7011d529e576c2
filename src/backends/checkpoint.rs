//! Finds the checkpoint of a model, and the tokenizer for a model.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use repository::{ModelConfig, ModelSource, Repository};
use serving::{InferError, LoadRequest};
use text::{Tokenizer, TokenizerType};

use crate::parameters;

/// Parameters that name a checkpoint, in order of precedence.
const CHECKPOINT_PARAMETERS: [&str; 3] = ["gpt_model_path", "engine_dir", "model_dir"];

/// Parameters that name a checkpoint or a model on a hub. Names on a hub are ignored.
const HUB_PARAMETERS: [&str; 2] = ["huggingface_model", "model_path"];

/// Contents of a directory, by its files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Holds {
    Checkpoint,
    TensorRtEngine,
    TensorRtWeights,
    TurboMindWeights,
    Nothing,
}

impl Holds {
    fn of(dir: &Path) -> Self {
        let names = || std::fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.file_name());
        let ends = |end: &str| names().any(|name| name.to_string_lossy().ends_with(end));
        let config = std::fs::read_to_string(dir.join("config.json")).unwrap_or_default();
        if ends(".engine") || config.contains("\"builder_config\"") || config.contains("\"build_config\"") {
            return Holds::TensorRtEngine;
        }
        if config.contains("\"mapping\"") && config.contains("\"architecture\"") {
            return Holds::TensorRtWeights;
        }
        if dir.join("config.json").is_file() {
            return Holds::Checkpoint;
        }
        let is_turbomind = dir.join("triton_models").is_dir() || ends(".weight") || dir.join("config.ini").is_file();
        if is_turbomind { Holds::TurboMindWeights } else { Holds::Nothing }
    }

    /// What is in the directory, and what to do if that is not a checkpoint.
    fn advice(self, dir: &Path) -> String {
        let dir = dir.display();
        match self {
            Holds::Checkpoint => format!("{dir} holds a checkpoint"),
            Holds::TensorRtEngine => format!(
                "{dir} holds a TensorRT engine, which only TensorRT-LLM can run; point `gpt_model_path` at the Hugging Face \
                 checkpoint that it was built from"
            ),
            Holds::TensorRtWeights => format!(
                "{dir} holds weights converted for TensorRT-LLM; point `gpt_model_path` at the Hugging Face checkpoint that \
                 they were converted from"
            ),
            Holds::TurboMindWeights => format!(
                "{dir} holds weights converted for TurboMind; put the Hugging Face checkpoint that they were converted from \
                 in their place, or name it in parameter `gpt_model_path`"
            ),
            Holds::Nothing => format!("{dir} has no config.json; point it at a Hugging Face checkpoint"),
        }
    }
}

/// Whether a parameter names the checkpoint.
pub(crate) fn is_named(config: &ModelConfig) -> bool {
    CHECKPOINT_PARAMETERS.iter().any(|key| parameters::text(config, key).is_some())
}

/// The directory of the checkpoint that a parameter names, relative to the model or to the version; `None` if it is not set.
///
/// # Errors
/// When there is no checkpoint. The error says what was found instead and what to do.
pub(crate) fn named(
    key: &str,
    config: &ModelConfig,
    model_dir: &Path,
    version_dir: &Path,
) -> Option<Result<PathBuf, String>> {
    let path = parameters::text(config, key)?;
    let dirs = [model_dir.join(path), version_dir.join(path)];
    let found = dirs.iter().find(|dir| Holds::of(dir) == Holds::Checkpoint);
    Some(found.cloned().ok_or_else(|| {
        let dir = if dirs[1].is_dir() && !dirs[0].is_dir() { &dirs[1] } else { &dirs[0] };
        format!("`{key}` is `{path}`, but {}", Holds::of(dir).advice(dir))
    }))
}

/// The directory of a model's checkpoint: the one that a parameter names, or else the version directory or `weights/` in it.
///
/// # Errors
/// When there is no checkpoint. The error says what was found instead and what to do.
pub(crate) fn find(config: &ModelConfig, model_dir: &Path, version_dir: &Path) -> Result<PathBuf, String> {
    if let Some(found) = CHECKPOINT_PARAMETERS.iter().find_map(|key| named(key, config, model_dir, version_dir)) {
        return found;
    }
    let hub = HUB_PARAMETERS.iter().filter_map(|key| parameters::text(config, key)).map(|path| model_dir.join(path));
    let own = [version_dir.to_owned(), version_dir.join("weights")];
    let mut candidates = hub.chain(own.clone());
    if let Some(dir) = candidates.find(|dir| Holds::of(dir) == Holds::Checkpoint) {
        return Ok(dir);
    }
    match own.iter().find(|dir| Holds::of(dir) != Holds::Nothing) {
        Some(dir) => Err(Holds::of(dir).advice(dir)),
        None => Err(format!(
            "no checkpoint: neither {} nor {} has a config.json; copy a Hugging Face checkpoint there or set parameter \
             `gpt_model_path`",
            own[0].display(),
            own[1].display()
        )),
    }
}

/// The tokenizer for a model, and the directory that it was read from.
///
/// The first of these that exists is used: the directory that the parameter `tokenizer_dir` names, relative to the model or the
/// repository; the one that `tokenizer_path` names, relative to the version; the version directory; the checkpoint of the only
/// model with a tokenizer in the same repository. The parameter `tokenizer_type` names the format.
pub(crate) fn tokenizer(model: &LoadRequest) -> Result<(Arc<Tokenizer>, PathBuf), InferError> {
    let name = &model.config.name;
    let wrong = |message: String| InferError::invalid(format!("model `{name}`: {message}"));
    let dir = tokenizer_dir(&model.config, &model.model_dir, &model.version_dir).map_err(wrong)?;
    let named = model.config.parameter("tokenizer_type").map_or(Ok(TokenizerType::Auto), str::parse).map_err(wrong)?;
    let tokenizer = generation::open_tokenizer(&dir, named).map_err(|error| wrong(error.to_string()))?;
    Ok((tokenizer, if dir.is_file() { dir.parent().map(Path::to_owned).unwrap_or_default() } else { dir }))
}

/// The directory that [`tokenizer`] uses.
///
/// # Errors
/// When there is none, or more than one.
pub(crate) fn tokenizer_dir(config: &ModelConfig, model_dir: &Path, version_dir: &Path) -> Result<PathBuf, String> {
    if let Some(path) = config.parameter("tokenizer_dir") {
        let mut places = vec![model_dir.join(path)];
        places.extend(model_dir.parent().map(|repository| repository.join(path)));
        return places.iter().find(|dir| dir.exists()).cloned().ok_or_else(|| {
            let places: Vec<String> = places.iter().map(|dir| dir.display().to_string()).collect();
            format!("`tokenizer_dir` is `{path}`, but neither {} is there", places.join(" nor "))
        });
    }
    let beside_path =
        config.parameter("tokenizer_path").and_then(|path| Some(version_dir.join(path).parent()?.to_owned()));
    if let Some(dir) = beside_path.filter(|dir| has_tokenizer(dir)) {
        return Ok(dir);
    }
    if has_tokenizer(version_dir) {
        return Ok(version_dir.to_owned());
    }
    let mut found = beside(&config.name, model_dir);
    match (found.pop(), found.is_empty()) {
        (Some((_, dir)), true) => Ok(dir),
        (None, _) => Err("no model of its repository has a tokenizer; set parameter `tokenizer_dir` to the \
                          checkpoint's directory"
            .to_owned()),
        (Some(last), false) => {
            let models: Vec<String> = found.iter().chain([&last]).map(|(model, _)| format!("`{model}`")).collect();
            Err(format!(
                "{} each have a tokenizer; set parameter `tokenizer_dir` to the one to use",
                models.join(" and ")
            ))
        }
    }
}

/// Whether a directory has the files of a tokenizer.
pub(crate) fn has_tokenizer(dir: &Path) -> bool {
    let has = |file: &str| dir.join(file).is_file();
    has("tokenizer.json") || has("tokenizer.model") || has("spiece.model") || has("vocab.json") && has("merges.txt")
}

/// Other models of the repository with a tokenizer, and its directory. If some of them share an ensemble with this model, only
/// these.
fn beside(name: &str, model_dir: &Path) -> Vec<(String, PathBuf)> {
    let Some(root) = model_dir.parent() else { return Vec::new() };
    let Ok(repository) = Repository::open(&[root.to_owned()]) else { return Vec::new() };
    let names = repository.model_names().unwrap_or_default();
    let others: Vec<ModelSource> = names.iter().filter_map(|name| repository.model(name).ok()).collect();
    let mut found: Vec<(String, PathBuf)> =
        others.iter().filter_map(|other| Some((other.name.clone(), with_tokenizer(other)?))).collect();
    if found.len() > 1 {
        let steps = |other: &ModelSource| other.config.ensemble().map(|ensemble| ensemble.step.clone());
        let ensembles: Vec<Vec<String>> = others
            .iter()
            .filter_map(steps)
            .map(|steps| steps.into_iter().map(|step| step.model_name).collect())
            .filter(|models: &Vec<String>| models.iter().any(|model| model == name))
            .collect();
        let shares = |name: &String| ensembles.iter().any(|models| models.contains(name));
        if found.iter().any(|(name, _)| shares(name)) {
            found.retain(|(name, _)| shares(name));
        }
    }
    // Several models with the same directory count once.
    let mut seen = Vec::new();
    found.retain(|(_, dir)| {
        let dir = dir.canonicalize().unwrap_or_else(|_| dir.clone());
        let is_new = !seen.contains(&dir);
        seen.push(dir);
        is_new
    });
    found
}

/// The directory of a model's tokenizer, in its checkpoint.
fn with_tokenizer(model: &ModelSource) -> Option<PathBuf> {
    let named = ["tokenizer_dir"].iter().chain(&CHECKPOINT_PARAMETERS).filter_map(|key| model.config.parameter(key));
    let version_dir = model.dir.join(model.versions.last()?.to_string());
    let places = named.map(|path| model.dir.join(path)).chain([version_dir.clone(), version_dir.join("weights")]);
    let mut places = places.filter(|dir| has_tokenizer(dir));
    places.next()
}
