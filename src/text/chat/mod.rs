//! Chat templates: the Jinja templates by which checkpoints turn conversations into prompts.

mod environment;
mod filters;
mod json;
mod limits;
mod methods;
mod operators;
mod python;
mod request;
mod source;
mod suffix;
mod words;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use minijinja::value::Serde;
use minijinja::{Environment, Value};
use serde_json::Map;

use crate::TextError;
use crate::files::Files;
use environment::JINJA;
use limits::Output;
pub use request::ChatRequest;
use request::Form;

/// Variables that a request has fields for.
const FIELDS: [&str; 6] =
    ["messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template"];

/// A checkpoint's chat templates: they render a conversation as a prompt.
///
/// Templates are Jinja as `apply_chat_template` of transformers runs it: trimmed blocks, loop controls, `tojson` with Python's
/// spacing, `raise_exception`, `strftime_now`, values printed as Python prints them, methods of Python's strings, lists and
/// dictionaries.
pub struct ChatTemplate {
    templates: BTreeMap<String, Template>,
    special: Vec<(&'static str, String)>,
    /// `response_template` of `tokenizer_config.json`: how the model writes its turn.
    response_template: Option<serde_json::Value>,
}

/// One template.
#[derive(Clone)]
struct Template {
    /// What errors say behind "the chat template".
    origin: String,
    source: String,
    /// Compiled under the name [`Template::NAME`]; the reason if that fails.
    environment: Result<Environment<'static>, String>,
    /// Content in parts reaches the template as a list.
    keeps_parts: bool,
    /// Instructions that it may execute for one conversation.
    fuel: u64,
}

impl ChatTemplate {
    /// Files and folders of a checkpoint directory that templates and their tokens are read from.
    pub const FILES: [&str; 4] = [source::FILE, source::DIR, "tokenizer_config.json", "special_tokens_map.json"];

    /// The templates of a checkpoint directory: `chat_template.jinja` (named `default`) and the files of
    /// `additional_chat_templates`, else `chat_template` of `tokenizer_config.json`, one or a list of named ones; `None` if there
    /// is neither.
    ///
    /// # Errors
    /// When a file cannot be read, a template is too long, or the template `default` is not valid Jinja.
    pub fn from_dir(dir: &Path) -> Result<Option<Self>, TextError> {
        let files = Files::of(dir)?;
        let template = |(name, (path, source)): (String, (PathBuf, String))| {
            (name, Template::new(source::origin(&path), source, limits::FUEL))
        };
        let templates: BTreeMap<String, Template> =
            source::of_dir(dir, &files.config)?.into_iter().map(template).collect();
        if let Some(template) = templates.get("default") {
            template.environment()?;
        }
        let special = files.named_tokens();
        let response_template = files.config.get("response_template").filter(|value| value.is_object()).cloned();
        Ok((!templates.is_empty()).then_some(Self { templates, special, response_template }))
    }

    /// The source of the template for conversations with or without tools; `None` if the checkpoint has only others.
    pub fn source(&self, has_tools: bool) -> Option<&str> {
        let tool_use = self.templates.get("tool_use").filter(|_| has_tools);
        tool_use.or_else(|| self.templates.get("default")).map(|template| template.source.as_str())
    }

    /// How the checkpoint says that its model writes reasoning and tool calls: `response_template`, an object.
    pub fn response_template(&self) -> Option<&serde_json::Value> {
        self.response_template.as_ref()
    }

    /// Whether there is a template of this name.
    pub fn has(&self, name: &str) -> bool {
        self.templates.contains_key(name)
    }

    /// The names of the templates.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.templates.keys().map(String::as_str)
    }

    /// The prompt of a conversation. It contains its special tokens, so encode it without adding more.
    ///
    /// # Errors
    /// When the template rejects the conversation, with the template's message, or exceeds the limits for steps or length; when
    /// the request's own template is not valid, or a variable has the name of a field.
    pub fn render(&self, request: &ChatRequest) -> Result<String, TextError> {
        let template = self.choose(request)?;
        let field = |name: &&str| request.variables.is_some_and(|variables| variables.contains_key(*name));
        if let Some(name) = FIELDS.iter().find(|name| field(name)) {
            return Err(template.refuses(format!("`chat_template_kwargs` has `{name}`; use the field of that name")));
        }
        let mut refusal = None;
        for form in request::forms(request.messages, template.keeps_parts) {
            match self.render_in(&template, request, form) {
                Ok(prompt) => return Ok(prompt),
                Err(error) => _ = refusal.get_or_insert(error),
            }
        }
        Err(refusal.expect("there is a usual form"))
    }

    /// The template for a request: its own, the one that it names, `tool_use` for tools, else `default`.
    fn choose(&self, request: &ChatRequest) -> Result<Cow<'_, Template>, TextError> {
        let known = |name: &str| self.templates.get(name).map(Cow::Borrowed);
        let names = || format!("`{}`", self.names().collect::<Vec<_>>().join("`, `"));
        let refused = |reason| TextError::ChatTemplate { origin: "of the request".to_owned(), reason };
        match request.template {
            Some(text) => match known(text) {
                Some(template) => Ok(template),
                None if text.len() > source::MAX_SOURCE_BYTES => {
                    Err(refused(format!("it has more than {} bytes", source::MAX_SOURCE_BYTES)))
                }
                None if !text.contains("{{") && !text.contains("{%") => Err(refused(format!(
                    "it is neither Jinja nor the name of a template of the model, which has {}",
                    names()
                ))),
                None => {
                    Ok(Cow::Owned(Template::new("of the request".to_owned(), text.to_owned(), limits::CLIENT_FUEL)))
                }
            },
            None => {
                let for_tools = if request.tools.is_empty() { None } else { known("tool_use") };
                for_tools.or_else(|| known("default")).ok_or_else(|| {
                    refused(format!("the model has no template `default`; name one of {} in `chat_template`", names()))
                })
            }
        }
    }

    fn render_in(&self, template: &Template, request: &ChatRequest, form: Form) -> Result<String, TextError> {
        let mut messages = request::messages(request.messages, form).map_err(|reason| template.refuses(reason))?;
        if !request.continue_final_message {
            return template.render(self.context(request, &messages), messages.len());
        }
        let refuses = |reason| template.refuses(reason);
        if !template.source.contains("content") {
            return Err(refuses("it does not read `content`, so `continue_final_message` has no effect".to_owned()));
        }
        let text = suffix::mark(&mut messages).map_err(refuses)?;
        let prompt = template.render(self.context(request, &messages), messages.len())?;
        suffix::cut(prompt, &text).map_err(refuses)
    }

    /// The variables of a template.
    fn context(&self, request: &ChatRequest, messages: &[Map<String, serde_json::Value>]) -> Value {
        let special = self.special.iter().map(|(name, token)| (*name, Value::from(token.as_str())));
        let variables = request.variables.into_iter().flatten();
        let variables = variables.map(|(name, value)| (name.as_str(), Value::from(Serde(value))));
        let tools = (!request.tools.is_empty()).then_some(request.tools);
        let own = [
            ("messages", Value::from(Serde(messages))),
            ("tools", Value::from(Serde(tools))),
            ("documents", Value::from(Serde(request.documents))),
            ("add_generation_prompt", Value::from(request.add_generation_prompt)),
        ];
        Value::from_pairs(special.chain(variables).chain(own))
    }
}

impl Template {
    const NAME: &'static str = "chat";

    fn new(origin: String, source: String, fuel: u64) -> Self {
        let mut environment = JINJA.clone();
        let added = environment.add_template_owned(Self::NAME, source::compiled(&source));
        let environment = added.map(|()| environment).map_err(|error| limits::reason(&error));
        let keeps_parts = source::iterates_content(&source);
        Self { origin, source, environment, keeps_parts, fuel }
    }

    fn environment(&self) -> Result<&Environment<'static>, TextError> {
        self.environment.as_ref().map_err(|reason| self.refuses(reason.clone()))
    }

    fn render(&self, context: Value, num_messages: usize) -> Result<String, TextError> {
        let mut environment = self.environment()?.clone();
        environment.set_fuel(Some(self.fuel + limits::FUEL_PER_MESSAGE * num_messages as u64));
        let template = environment.get_template(Self::NAME).expect("the template was added");
        let mut prompt = Output::default();
        let rendered = template.render_captured_to(context, &mut prompt);
        rendered.map_err(|error| self.refuses(limits::reason(&error)))?;
        Ok(prompt.into_text())
    }

    fn refuses(&self, reason: String) -> TextError {
        TextError::ChatTemplate { origin: self.origin.clone(), reason }
    }
}

#[cfg(test)]
mod tests;
