//! Repositories made for other servers, served as they are.
//!
//! A model is known by its tensors: [`recognise`] says which published layout it follows. [`Layouts`] then loads it
//! natively, whatever backend its configuration names and whatever `model.py` lies beside it; the parameter `native` set
//! to `false` runs the `model.py` after all.

mod bls;
mod engine;
mod forward;
pub mod keys;
mod rows;
mod static_batch;
mod text_model;
mod text_names;
mod text_values;
mod turbomind;

use std::collections::{BTreeSet, HashMap};
use std::path::Path;
use std::sync::{Arc, Mutex};

use futures::future::BoxFuture;
use repository::ModelConfig;
use repository::proto::{DataType, ModelOutput};
use serving::{Backend, BackendFactory, InferError, LoadRequest, Server};

use crate::detokenize::DetokenizeFactory;
use crate::tokenize::TokenizeFactory;
use crate::{checkpoint, parameters, python};

use keys::{Key, Use};

/// Names under which configurations ask for the LLM engine.
pub const LLM_BACKENDS: [&str; 5] = ["trireme", "tensorrtllm", "turbomind", "lmdeploy", "sglang"];

/// A published layout of one model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layout {
    /// TensorRT-LLM's and LMDeploy's `preprocessing`: text to token ids.
    Preprocessing,
    /// TensorRT-LLM's and LMDeploy's `postprocessing`: token ids to text.
    Postprocessing,
    /// TensorRT-LLM's `tensorrt_llm`: token ids to token ids, batched in flight.
    Engine,
    /// The same in the Python `gpt` repository: one batch after another.
    FixedBatch,
    /// TensorRT-LLM's `tensorrt_llm_bls`: text to text through the other models.
    Bls,
    /// Text to text from a checkpoint: LMDeploy's and SGLang's Python models, and Hugging Face ones.
    Text,
    /// TurboMind's `interactive`: token ids to token ids in sessions.
    Sessions,
}

impl Layout {
    /// What becomes of its parameters.
    pub fn parameters(self) -> &'static [Key] {
        match self {
            Layout::Preprocessing | Layout::Postprocessing => keys::TEXT_PARAMETERS,
            Layout::Bls => keys::BLS_PARAMETERS,
            _ => keys::LLM_PARAMETERS,
        }
    }

    /// What becomes of an input; `None` for one that no published layout has.
    pub fn input(self, name: &str) -> Option<Use> {
        match self {
            Layout::Preprocessing | Layout::Postprocessing => keys::find(keys::TEXT_INPUTS, name),
            Layout::Bls => bls::input(name),
            Layout::Text => text_names::input(name),
            _ => keys::find(keys::LLM_INPUTS, name),
        }
    }

    /// What becomes of an output; `None` for one that no published layout has, and that nothing gives.
    pub fn output(self, output: &ModelOutput) -> Option<Use> {
        let name = output.name.as_str();
        match self {
            Layout::Preprocessing | Layout::Postprocessing => keys::find(keys::TEXT_OUTPUTS, name),
            Layout::Bls if name == "text_output" => Some(Use::Used("the text")),
            Layout::Text => text_names::output(output),
            _ => keys::find(keys::LLM_OUTPUTS, name),
        }
    }

    /// Whether it needs a checkpoint of its own.
    pub fn has_checkpoint(self) -> bool {
        matches!(self, Layout::Engine | Layout::FixedBatch | Layout::Text | Layout::Sessions)
    }
}

/// The layout that a model follows; `None` for one that its own backend serves.
pub fn recognise(config: &ModelConfig, model_dir: &Path, version_dir: &Path) -> Option<Layout> {
    let is_python = config.backend == "python";
    let is_llm = LLM_BACKENDS.contains(&config.backend.as_str());
    if !(is_python || is_llm) || parameters::flag(config, "native") == Ok(Some(false)) {
        return None;
    }
    let takes = |name: &str| config.input.iter().any(|input| input.name == name);
    let gives = |name: &str| config.output.iter().any(|output| output.name == name);
    let has = |name: &str| config.parameters.contains_key(name);
    if takes("QUERY") && gives("INPUT_ID") {
        return Some(Layout::Preprocessing);
    }
    if takes("TOKENS_BATCH") && gives("OUTPUT") {
        return Some(Layout::Postprocessing);
    }
    let has_code = is_python && version_dir.join(python::file_name(config)).is_file();
    if takes("input_ids") && gives("output_ids") {
        // A `model.py` with weights of its own, in a form that only it knows.
        if has_code && !checkpoint::is_named(config) && checkpoint::find(config, model_dir, version_dir).is_err() {
            return None;
        }
        let has_sessions = takes("CORRID") && takes("START");
        return Some(match (has_sessions, gives("log_probs")) {
            (true, _) => Layout::Sessions,
            (false, true) => Layout::FixedBatch,
            (false, false) => Layout::Engine,
        });
    }
    if is_llm && config.input.is_empty() && config.output.is_empty() {
        return Some(Layout::Text);
    }
    let is_text = takes_text(config) && gives_text(config);
    let asks_others = has("tensorrt_llm_model_name") || has("accumulate_tokens") || takes("embedding_bias_words");
    if is_text && takes("text_input") && (asks_others || config.name.ends_with("_bls")) {
        return Some(Layout::Bls);
    }
    let is_lmdeploy = is_lmdeploys(config);
    let is_known = is_text && config.input.iter().all(|input| text_names::input(&input.name).is_some());
    if is_known && (!has_code || is_lmdeploy || checkpoint::find(config, model_dir, version_dir).is_ok()) {
        return Some(Layout::Text);
    }
    is_llm.then_some(Layout::Engine)
}

/// Whether it has the tensors of LMDeploy's Python model.
fn is_lmdeploys(config: &ModelConfig) -> bool {
    let takes = |name: &str| config.input.iter().any(|input| input.name == name);
    takes("prompt") && takes("ignore_eos") && config.output.iter().any(|output| output.name == "response")
}

fn takes_text(config: &ModelConfig) -> bool {
    let is_prompt = |name: &str| text_names::PROMPT.contains(&name);
    config.input.iter().any(|input| input.data_type() == DataType::TypeString && is_prompt(&input.name))
}

fn gives_text(config: &ModelConfig) -> bool {
    config.output.iter().any(|output| output.data_type() == DataType::TypeString)
}

/// Loads models of every published layout, and leaves others to the backend they name.
pub struct Layouts {
    python: Arc<dyn BackendFactory>,
    llm: Arc<dyn BackendFactory>,
    server: Arc<bls::ServerLink>,
    /// Models whose keys the log has named.
    told: Mutex<BTreeSet<String>>,
}

impl Layouts {
    /// Models run on `llm`, or else on `python`.
    pub fn new(llm: Arc<dyn BackendFactory>, python: Arc<dyn BackendFactory>) -> Arc<Self> {
        Arc::new(Self { python, llm, server: Arc::default(), told: Mutex::default() })
    }

    /// Lets models send requests to other models of `server`.
    pub fn attach(&self, server: &Arc<Server>) {
        self.server.attach(server);
    }

    /// This factory under every backend name that a published layout uses.
    pub fn factories(self: &Arc<Self>) -> HashMap<String, Arc<dyn BackendFactory>> {
        let names = LLM_BACKENDS.into_iter().chain(["python"]);
        names.map(|name| (name.to_owned(), Arc::clone(self) as Arc<dyn BackendFactory>)).collect()
    }

    fn native(&self, layout: Layout) -> Arc<dyn BackendFactory> {
        let llm = || self.llm.clone();
        match layout {
            Layout::Preprocessing => Arc::new(TokenizeFactory),
            Layout::Postprocessing => Arc::new(DetokenizeFactory),
            Layout::Engine | Layout::FixedBatch => Arc::new(engine::EngineFactory { llm: llm(), layout }),
            Layout::Bls => Arc::new(bls::BlsFactory { server: self.server.clone() }),
            Layout::Text => Arc::new(text_model::TextModelFactory { llm: llm() }),
            Layout::Sessions => Arc::new(turbomind::SessionsFactory { llm: llm() }),
        }
    }

    /// Names once in the log what a model says and what has no effect.
    fn tell(&self, model: &LoadRequest, layout: Layout) {
        let name = &model.config.name;
        if !ipc::lock(&self.told).insert(name.clone()) {
            return;
        }
        if model.config.backend == "python" && model.version_dir.join(python::file_name(&model.config)).is_file() {
            tracing::info!(
                "model `{name}` is served natively in the place of its model.py; parameter `native` set to `false` runs that"
            );
        }
        for (key, reason) in ignored_parameters(&model.config, layout) {
            tracing::info!("model `{name}`: parameter `{key}` has no effect: {reason}");
        }
        let inputs = model.config.input.iter().map(|input| (&input.name, layout.input(&input.name)));
        if let Some(inputs) = without_effect(inputs) {
            tracing::info!("model `{name}`: inputs without effect: {inputs}");
        }
        let outputs = model.config.output.iter().map(|output| (&output.name, layout.output(output)));
        if let Some(outputs) = without_effect(outputs) {
            tracing::info!("model `{name}`: outputs that are never given: {outputs}");
        }
    }
}

const UNKNOWN: &str = "it is not known";

/// Those of a model's tensors that have no effect, and why.
fn without_effect<'a>(tensors: impl Iterator<Item = (&'a String, Option<Use>)>) -> Option<String> {
    let ignored = |(name, use_): (&String, Option<Use>)| match use_ {
        None => Some(format!("`{name}` ({UNKNOWN})")),
        Some(Use::Ignored(reason)) => Some(format!("`{name}` ({reason})")),
        Some(Use::Used(_) | Use::Refused(_)) => None,
    };
    let ignored: Vec<String> = tensors.filter_map(ignored).collect();
    (!ignored.is_empty()).then(|| ignored.join(", "))
}

/// Parameters that are set and have no effect, and why.
fn ignored_parameters(config: &ModelConfig, layout: Layout) -> Vec<(&str, &'static str)> {
    let mut set: Vec<&String> = config.parameters.keys().filter(|key| config.parameter(key).is_some()).collect();
    set.sort();
    let ignored = |key: &String| match keys::find(layout.parameters(), key) {
        Some(Use::Ignored(reason) | Use::Refused(reason)) => Some(reason),
        Some(Use::Used(_)) => None,
        None => Some(UNKNOWN),
    };
    set.into_iter().filter_map(|key| Some((key.as_str(), ignored(key)?))).collect()
}

impl BackendFactory for Layouts {
    fn replacement(&self, model: &LoadRequest) -> Option<Arc<dyn BackendFactory>> {
        match recognise(&model.config, &model.model_dir, &model.version_dir) {
            Some(layout) => {
                self.tell(model, layout);
                Some(self.native(layout))
            }
            None if model.config.backend == "python" => Some(self.python.clone()),
            None => Some(self.llm.clone()),
        }
    }

    fn load(&self, model: LoadRequest) -> BoxFuture<'static, Result<Arc<dyn Backend>, InferError>> {
        self.replacement(&model).expect("every model has a factory").load(model)
    }
}
