//! Where the tokenizer of a tokenizing model lies.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use repository::{ModelSource, Repository};
use serving::{InferError, LoadRequest};
use text::Tokenizer;

/// Parameters of an LLM that may name its checkpoint.
const CHECKPOINT_PARAMETERS: [&str; 4] = ["tokenizer_dir", "gpt_model_path", "engine_dir", "model_dir"];

/// The tokenizer for a model: where parameter `tokenizer_dir` points, seen from the model's directory or from the
/// repository; else beside the model itself; else the one of the LLM in the same repository.
pub(crate) fn tokenizer(model: &LoadRequest) -> Result<Arc<Tokenizer>, InferError> {
    let dir = tokenizer_dir(model)?;
    let loaded = Tokenizer::from_dir(&dir);
    loaded.map(Arc::new).map_err(|error| InferError::invalid(format!("model `{}`: {error}", model.config.name)))
}

fn tokenizer_dir(model: &LoadRequest) -> Result<PathBuf, InferError> {
    let name = &model.config.name;
    if let Some(path) = model.config.parameter("tokenizer_dir") {
        let mut places = vec![model.model_dir.join(path)];
        places.extend(model.model_dir.parent().map(|repository| repository.join(path)));
        return places.iter().find(|dir| dir.is_dir()).cloned().ok_or_else(|| {
            let places: Vec<String> = places.iter().map(|dir| dir.display().to_string()).collect();
            let places = places.join(" nor ");
            InferError::invalid(format!("model `{name}`: `tokenizer_dir` is `{path}`, but neither {places} is there"))
        });
    }
    if has_tokenizer(&model.version_dir) {
        return Ok(model.version_dir.clone());
    }
    let mut found = beside(model);
    match (found.pop(), found.is_empty()) {
        (Some((_, dir)), true) => Ok(dir),
        (None, _) => Err(InferError::invalid(format!(
            "model `{name}`: no model of its repository has a `tokenizer.json`; set parameter `tokenizer_dir` to the \
             checkpoint's directory"
        ))),
        (Some(last), false) => {
            let models: Vec<String> = found.iter().chain([&last]).map(|(model, _)| format!("`{model}`")).collect();
            Err(InferError::invalid(format!(
                "model `{name}`: {} each have a tokenizer; set parameter `tokenizer_dir` to the one to use",
                models.join(" and ")
            )))
        }
    }
}

fn has_tokenizer(dir: &Path) -> bool {
    dir.join("tokenizer.json").is_file()
}

/// Other models of the repository that hold a tokenizer, by name. Where some of several share an ensemble
/// with this model, only those.
fn beside(model: &LoadRequest) -> Vec<(String, PathBuf)> {
    let Some(root) = model.model_dir.parent() else { return Vec::new() };
    let Ok(repository) = Repository::open(&[root.to_owned()]) else { return Vec::new() };
    let names = repository.model_names().unwrap_or_default();
    let others: Vec<ModelSource> = names.iter().filter_map(|name| repository.model(name).ok()).collect();
    let mut found: Vec<(String, PathBuf)> =
        others.iter().filter_map(|other| Some((other.name.clone(), checkpoint(other)?))).collect();
    if found.len() > 1 {
        let steps = |other: &ModelSource| other.config.ensemble().map(|ensemble| ensemble.step.clone());
        let ensembles: Vec<Vec<String>> = others
            .iter()
            .filter_map(steps)
            .map(|steps| steps.into_iter().map(|step| step.model_name).collect())
            .filter(|models: &Vec<String>| models.contains(&model.config.name))
            .collect();
        let shares = |name: &String| ensembles.iter().any(|models| models.contains(name));
        if found.iter().any(|(name, _)| shares(name)) {
            found.retain(|(name, _)| shares(name));
        }
    }
    found
}

/// The directory of a model's checkpoint that holds a tokenizer.
fn checkpoint(model: &ModelSource) -> Option<PathBuf> {
    let named = CHECKPOINT_PARAMETERS.iter().filter_map(|key| model.config.parameter(key));
    let version_dir = model.dir.join(model.versions.last()?.to_string());
    let places = named.map(|path| model.dir.join(path)).chain([version_dir.clone(), version_dir.join("weights")]);
    let mut places = places.filter(|dir| has_tokenizer(dir));
    places.next()
}
