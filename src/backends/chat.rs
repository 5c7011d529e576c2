//! Renders conversations to prompts by chat templates, and finds the chat format of a model.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};

use chat_format::ChatFormat;
use repository::{ModelSource, Repository};
use serving::InferError;
pub use text::ChatRequest;
use text::ChatTemplate;

use crate::checkpoint;

/// How long the location of a model's template is cached.
const CACHE_TIME: Duration = Duration::from_secs(1);

/// A template, and the last change of its files.
type Cached = (Option<SystemTime>, Option<Arc<ChatTemplate>>);

/// The locations of a model's template, and the time when they were found.
type Known = (Instant, Arc<Locations>);

/// Locations of a model's chat template, and its chat format.
#[derive(Default)]
struct Locations {
    /// Directories of the tokenizers of a model and of its composing models, the model's own first.
    dirs: Vec<PathBuf>,
    /// The parameter `chat_format` of the model or of its composing models.
    chat_format: Option<String>,
}

/// The choice of the format in which a model writes reasoning and tool calls.
#[derive(Debug, Clone, Default)]
pub enum FormatChoice {
    /// The checkpoint's: its `response_template`, or else that of the markers in its chat template.
    #[default]
    Checkpoint,
    /// No format: all text is content.
    None,
    /// One format for all models.
    Format(Arc<ChatFormat>),
}

impl FromStr for FormatChoice {
    type Err = String;

    /// Parses `auto`, `none`, or the name of a format.
    ///
    /// # Errors
    /// For another name; the message lists the known ones.
    fn from_str(name: &str) -> Result<Self, String> {
        match name {
            "auto" => Ok(Self::Checkpoint),
            "none" => Ok(Self::None),
            name => ChatFormat::named(name).map(Self::Format).ok_or_else(|| {
                let names = ChatFormat::names().collect::<Vec<_>>().join("`, `");
                format!("the chat format `{name}` is not known; expected `auto`, `none` or one of `{names}`")
            }),
        }
    }
}

/// The chat templates of a repository's models. They are read on first use, and again when they change.
pub struct ChatTemplates {
    roots: Vec<PathBuf>,
    /// Whether requests may contain templates.
    trusts_clients: bool,
    /// Locations of the templates of models in the repository.
    places: Mutex<HashMap<String, Known>>,
    cached: Mutex<HashMap<PathBuf, Cached>>,
    formats: FormatChoice,
}

impl ChatTemplates {
    /// Templates of the models in these repositories.
    pub fn new(roots: Vec<PathBuf>, formats: FormatChoice) -> Self {
        Self { roots, trusts_clients: false, places: Mutex::default(), cached: Mutex::default(), formats }
    }

    /// The format in which `model` writes reasoning and tool calls: that of its parameter `chat_format`, or else that of all models. `None`
    /// for an unknown format.
    ///
    /// # Errors
    /// When the parameter has no valid value, or the checkpoint's files cannot be read.
    pub fn format(&self, model: &str, has_tools: bool) -> Result<Option<Arc<ChatFormat>>, InferError> {
        let places = self.places(model)?;
        let named = places.chat_format.as_deref().map(|name| {
            let invalid = |error| InferError::invalid(format!("parameter `chat_format` of model `{model}`: {error}"));
            name.parse::<FormatChoice>().map_err(invalid)
        });
        match named.transpose()?.as_ref().unwrap_or(&self.formats) {
            FormatChoice::None => Ok(None),
            FormatChoice::Format(format) => Ok(Some(Arc::clone(format))),
            FormatChoice::Checkpoint => self.format_of_checkpoint(&places, has_tools),
        }
    }

    fn format_of_checkpoint(&self, places: &Locations, has_tools: bool) -> Result<Option<Arc<ChatFormat>>, InferError> {
        for dir in &places.dirs {
            if let Some(template) = self.template(dir)? {
                let declared = template.response_template().map(ChatFormat::of_response_template).transpose();
                return Ok(match declared {
                    Ok(Some(format)) => Some(Arc::new(format)),
                    Ok(None) => template.source(has_tools).and_then(ChatFormat::detect),
                    // Its conversations need no tools; those that do are refused, because the form is not known.
                    Err(error) => {
                        tracing::warn!(dir = %dir.display(), %error, "the form of tool calls is not known");
                        None
                    }
                });
            }
        }
        Ok(None)
    }

    /// Sets whether requests may bring templates of their own. Steps and text of a template are bounded, but a hostile one can
    /// still occupy a thread or end the process, so clients must be trusted.
    #[must_use]
    pub fn trust_clients(mut self, trusts_clients: bool) -> Self {
        self.trusts_clients = trusts_clients;
        self
    }

    /// The prompt that a conversation is for `model`; an ensemble has the template of the models it is made of.
    ///
    /// # Errors
    /// When there is no template, or it refuses the conversation.
    pub fn prompt(&self, model: &str, request: &ChatRequest) -> Result<String, InferError> {
        for dir in &self.places(model)?.dirs {
            if let Some(template) = self.template(dir)? {
                if let Some(name) = request.template.filter(|name| !self.trusts_clients && !template.has(name)) {
                    return Err(refuse_template(&template, name));
                }
                let prompt = template.render(request);
                return prompt.map_err(|error| InferError::invalid(format!("model `{model}`: {error}")));
            }
        }
        Err(InferError::invalid(format!(
            "model `{model}` has no chat template: put `chat_template.jinja` or a `tokenizer_config.json` with one beside its \
             tokenizer, or send the prompt to /v1/completions"
        )))
    }

    fn places(&self, model: &str) -> Result<Arc<Locations>, InferError> {
        let known = ipc::lock(&self.places).get(model).filter(|(since, _)| since.elapsed() < CACHE_TIME).cloned();
        if let Some((_, places)) = known {
            return Ok(places);
        }
        let repository = Repository::open(&self.roots).map_err(|error| InferError::internal(error.to_string()))?;
        let places = Arc::new(places(&repository, model));
        let mut all_places = ipc::lock(&self.places);
        match places.dirs.is_empty() {
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

/// Refuses a template that a request brings.
fn refuse_template(template: &ChatTemplate, source: &str) -> InferError {
    let names = template.names().collect::<Vec<_>>().join("`, `");
    let reason = if source.contains('{') { "is a template" } else { "names no template of the model" };
    InferError::invalid(format!(
        "`chat_template` {reason}; the server takes the names of the model's templates only (`{names}`), unless it is started with \
         `--trust-request-chat-template`"
    ))
}

fn places(repository: &Repository, model: &str) -> Locations {
    let Ok(source) = repository.model(model) else { return Locations::default() };
    let steps = source.config.ensemble().map(|ensemble| ensemble.step.clone()).unwrap_or_default();
    let models: Vec<ModelSource> =
        steps.iter().filter_map(|step| repository.model(&step.model_name).ok()).chain([source.clone()]).collect();
    let dirs = models.iter().flat_map(|source| {
        let version_dir = source.dir.join(source.versions.last().copied().unwrap_or(1).to_string());
        let checkpoint = checkpoint::find(&source.config, &source.dir, &version_dir);
        let tokenizer = checkpoint::tokenizer_dir(&source.config, &source.dir, &version_dir);
        checkpoint.into_iter().chain(tokenizer)
    });
    let chat_format = models.iter().rev().find_map(|source| source.config.parameter("chat_format"));
    Locations { dirs: dirs.collect(), chat_format: chat_format.map(str::to_owned) }
}
