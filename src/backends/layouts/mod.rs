//! Serves model repositories of other servers without changes.
//!
//! [`recognise`] finds the published layout of a model by its tensors. [`Layouts`] then loads the model natively, whatever its backend is,
//! and in place of its `model.py`. The parameter `native` set to `false` disables this.

mod adapter;
mod bls;
mod engine;
mod engine_bounds;
mod engine_config;
mod engine_request;
mod forward;
pub mod keys;
mod layout;
mod recognise;
mod rows;
mod static_batch;
mod text_model;
mod text_names;
mod turbomind;

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex};

use futures::future::BoxFuture;
use repository::ModelConfig;
use serving::{Backend, BackendFactory, InferError, LoadRequest, Server};

use crate::detokenize::DetokenizeFactory;
use crate::python;
use crate::tokenize::TokenizeFactory;
use keys::Use;
pub use layout::Layout;
pub use recognise::{LLM_BACKENDS, recognise};

/// Loads models of the published layouts natively, and other models by their own backends.
pub struct Layouts {
    python: Arc<dyn BackendFactory>,
    llm: Arc<dyn BackendFactory>,
    server: Arc<bls::ServerLink>,
    /// Models whose keys were logged.
    logged: Mutex<BTreeSet<String>>,
}

impl Layouts {
    /// A factory whose models run on `llm` or on `python`.
    pub fn new(llm: Arc<dyn BackendFactory>, python: Arc<dyn BackendFactory>) -> Arc<Self> {
        Arc::new(Self { python, llm, server: Arc::default(), logged: Mutex::default() })
    }

    /// Lets models send requests to other models of `server`.
    pub fn attach(&self, server: &Arc<Server>) {
        self.server.attach(server);
    }

    /// This factory, by every backend name of the published layouts.
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

    /// Logs the parameters and tensors of a model that have no effect, once for each model.
    fn log_ignored(&self, model: &LoadRequest, layout: Layout) {
        let name = &model.config.name;
        if !ipc::lock(&self.logged).insert(name.clone()) {
            return;
        }
        if model.config.backend == "python" && model.version_dir.join(python::file_name(&model.config)).is_file() {
            tracing::info!(
                "model `{name}` is served natively in place of its model.py; set parameter `native` to `false` to run its model.py"
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
            tracing::info!("model `{name}`: outputs that are never returned: {outputs}");
        }
    }
}

/// The reason for a key that is in no table.
const UNKNOWN: &str = "it is not known";

/// The tensors without effect, with the reasons.
fn without_effect<'a>(tensors: impl Iterator<Item = (&'a String, Option<Use>)>) -> Option<String> {
    let ignored = |(name, use_): (&String, Option<Use>)| match use_ {
        None => Some(format!("`{name}` ({UNKNOWN})")),
        Some(Use::Ignored(reason)) => Some(format!("`{name}` ({reason})")),
        Some(Use::Used(_) | Use::Refused(_)) => None,
    };
    let ignored: Vec<String> = tensors.filter_map(ignored).collect();
    (!ignored.is_empty()).then(|| ignored.join(", "))
}

/// The parameters without effect that a model sets, with the reasons.
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
                self.log_ignored(model, layout);
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
