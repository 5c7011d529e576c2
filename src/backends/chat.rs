//! Prompts of conversations, by the chat template beside a model's tokenizer.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};

use repository::{ModelSource, Repository};
use serving::InferError;
pub use text::ChatRequest;
use text::ChatTemplate;

use crate::checkpoint;

/// For how long the repository is not asked again where a model's template is.
const KNOWN_FOR: Duration = Duration::from_secs(1);

/// A template, and when the files it was read from last changed.
type Cached = (Option<SystemTime>, Option<Arc<ChatTemplate>>);

/// Since when it is known where a template may be, and where.
type Known = (Instant, Arc<[PathBuf]>);

/// The chat templates of a repository's models, read when first asked for and again when they change.
pub struct ChatTemplates {
    roots: Vec<PathBuf>,
    /// Of models that are in the repository, where it may be, and since when that is known.
    places: Mutex<HashMap<String, Known>>,
    cached: Mutex<HashMap<PathBuf, Cached>>,
}

impl ChatTemplates {
    /// Of the models in these directories.
    pub fn new(roots: Vec<PathBuf>) -> Self {
        Self { roots, places: Mutex::default(), cached: Mutex::default() }
    }

    /// The prompt that a conversation is for `model`; an ensemble has the template of the models it is made of.
    ///
    /// # Errors
    /// When there is no template, or it refuses the conversation.
    pub fn prompt(&self, model: &str, request: &ChatRequest) -> Result<String, InferError> {
        for dir in self.places(model)?.iter() {
            if let Some(template) = self.template(dir)? {
                let prompt = template.render(request);
                return prompt.map_err(|error| InferError::invalid(format!("model `{model}`: {error}")));
            }
        }
        Err(InferError::invalid(format!(
            "model `{model}` has no chat template: put `chat_template.jinja` or a `tokenizer_config.json` with one beside its \
             tokenizer, or send the prompt to /v1/completions"
        )))
    }

    fn places(&self, model: &str) -> Result<Arc<[PathBuf]>, InferError> {
        let known = ipc::lock(&self.places).get(model).filter(|(since, _)| since.elapsed() < KNOWN_FOR).cloned();
        if let Some((_, places)) = known {
            return Ok(places);
        }
        let repository = Repository::open(&self.roots).map_err(|error| InferError::internal(error.to_string()))?;
        let places: Arc<[PathBuf]> = places(&repository, model).into();
        let mut all_places = ipc::lock(&self.places);
        match places.is_empty() {
            true => drop(all_places.remove(model)),
            false => drop(all_places.insert(model.to_owned(), (Instant::now(), Arc::clone(&places)))),
        }
        Ok(places)
    }

    fn template(&self, dir: &Path) -> Result<Option<Arc<ChatTemplate>>, InferError> {
        let changed = |file: &&str| std::fs::metadata(dir.join(file)).and_then(|file| file.modified()).ok();
        let modified = ChatTemplate::FILES.iter().filter_map(changed).max();
        let cached = ipc::lock(&self.cached).get(dir).filter(|(at, _)| *at == modified).cloned();
        if let Some((_, template)) = cached {
            return Ok(template);
        }
        let template =
            ChatTemplate::from_dir(dir).map_err(|error| InferError::invalid(error.to_string()))?.map(Arc::new);
        ipc::lock(&self.cached).insert(dir.to_owned(), (modified, template.clone()));
        Ok(template)
    }
}

/// Directories of tokenizers that a model's prompts may pass, the model's own first.
fn places(repository: &Repository, model: &str) -> Vec<PathBuf> {
    let Ok(source) = repository.model(model) else { return Vec::new() };
    let steps = source.config.ensemble().map(|ensemble| ensemble.step.clone()).unwrap_or_default();
    let models = steps.iter().filter_map(|step| repository.model(&step.model_name).ok()).chain([source.clone()]);
    let dirs = models.flat_map(|source: ModelSource| {
        let version_dir = source.dir.join(source.versions.last().copied().unwrap_or(1).to_string());
        let checkpoint = checkpoint::find(&source.config, &source.dir, &version_dir);
        let tokenizer = checkpoint::tokenizer_dir(&source.config, &source.dir, &version_dir);
        checkpoint.into_iter().chain(tokenizer)
    });
    dirs.collect()
}
