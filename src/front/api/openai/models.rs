//! The models of `/v1`, and small endpoints about the server.

use std::collections::BTreeSet;
use std::sync::Arc;

use generation::Generator;
use repository::ModelConfig;
use repository::proto::DataType as ConfigType;
use serde_json::{Value, json};
use serving::AdapterInfo;

use crate::state::State;

/// Names of the input with the prompt.
pub(super) const PROMPT: [&str; 5] = ["text_input", "prompt", "PROMPT", "INPUT_TEXT", "text"];
/// Names of the output with the text.
pub(super) const ANSWER: [&str; 3] = ["text_output", "response", "OUTPUT_TEXT"];

/// Every loaded model that answers text with text, by its further names if it has any.
pub(super) fn list(state: &State) -> Value {
    let models = loaded(state);
    let names = models.iter().flat_map(|model| names_of(state, model));
    let entries = names.filter_map(|name| entry(state, &name)).chain(adapters(state, &models));
    json!({"object": "list", "data": entries.collect::<Vec<_>>()})
}

/// The names of all models that are loaded, in order. One whose workers restart is among them.
fn loaded(state: &State) -> Vec<String> {
    let mut names: Vec<String> = state.server.repository_index(false).into_iter().map(|entry| entry.name).collect();
    names.dedup();
    names.retain(|name| state.server.model_is_loaded(name));
    names
}

/// The names by which clients request a model: its further names if it has any, otherwise its own.
fn names_of<'a>(state: &'a State, model: &'a str) -> impl Iterator<Item = String> + 'a {
    let mut names = state.server.names_of(model).peekable();
    let own = names.peek().is_none().then_some(model);
    names.chain(own).map(str::to_owned)
}

/// The adapters of these models, each once.
fn adapters<'a>(state: &'a State, models: &'a [String]) -> impl Iterator<Item = Value> + 'a {
    let names: BTreeSet<String> =
        models.iter().flat_map(|model| state.server.adapters(model)).map(|adapter| adapter.name).collect();
    names.into_iter().filter_map(|name| entry(state, &name))
}

/// One model, or an adapter of one; `None` if it answers no text.
pub(super) fn entry(state: &State, name: &str) -> Option<Value> {
    text_model(state, name)?;
    let generator = generator(state, name);
    let created = generator.as_ref().map_or(0, |generator| generator.created);
    let mut entry = json!({"id": name, "object": "model", "created": created, "owned_by": "trireme"});
    if let Some(generator) = generator {
        entry["root"] = json!(state.server.model_of(name));
        match adapter_of(state, name) {
            Some((parent, adapter)) => {
                entry["root"] = json!(adapter.path);
                entry["parent"] = json!(parent);
            }
            None => {
                if let Some(version) = state.server.weights_version(name) {
                    entry["weight_version"] = json!(version);
                }
            }
        }
        entry["max_model_len"] = json!(generator.max_sequence_len);
    }
    Some(entry)
}

/// The adapter of this name, with the first name of its model; `None` for the name of a model.
fn adapter_of(state: &State, name: &str) -> Option<(String, AdapterInfo)> {
    let is_model = state.server.model_of(name) != name || state.server.has_model(name);
    let model = state.server.model_of_adapter(name).filter(|_| !is_model)?;
    let adapter = state.server.adapters(&model).into_iter().find(|adapter| adapter.name == name)?;
    let parent = names_of(state, &model).next()?;
    Some((parent, adapter))
}

/// How to make requests of values for a model; `None` for a model that takes tensors only.
pub(super) fn generator(state: &State, name: &str) -> Option<Generator> {
    state.server.generator(name, "").ok().flatten()
}

/// The name of the only text model that has a generator; `None` if there are none or several.
pub(super) fn only_generator(state: &State) -> Option<String> {
    let is_text = |name: &String| text_model(state, name).is_some() && generator(state, name).is_some();
    let mut names = loaded(state).into_iter().filter(is_text);
    names.next().filter(|_| names.next().is_none())
}

/// Whether a model that answers text with text can do so now. Models that failed to load, and other models, do not matter. A
/// server without such models can answer when it is ready.
pub(super) fn can_answer(state: &State) -> bool {
    let mut names = loaded(state).into_iter().filter(|name| text_model(state, name).is_some()).peekable();
    match names.peek() {
        Some(_) => !state.is_draining() && names.any(|name| is_ready(state, &name)),
        None => state.is_ready(),
    }
}

fn is_ready(state: &State, name: &str) -> bool {
    state.server.model_is_ready(name, "").unwrap_or(false)
}

/// The configuration of a loaded model that answers text with text. Requests to one whose workers restart wait in its queue.
pub(super) fn text_model(state: &State, name: &str) -> Option<Arc<ModelConfig>> {
    let config = state.server.model_config(name, "").ok().filter(|_| state.server.model_is_loaded(name))?;
    let is_text = |data_type: ConfigType| data_type == ConfigType::TypeString;
    let takes = config.input.iter().any(|input| PROMPT.contains(&input.name.as_str()) && is_text(input.data_type()));
    let gives =
        config.output.iter().any(|output| ANSWER.contains(&output.name.as_str()) && is_text(output.data_type()));
    (takes && gives).then_some(config)
}
