//! Ensembles: graphs of models that are served as one model.
//!
//! Each step is a request to a model of the same server. A step runs as soon as its inputs are available, in parallel with
//! others where the graph allows it. Steps after a decoupled step run once for each of its responses, in order. An error in
//! such a run replaces one response, and later responses follow. Parallel decoupled steps run in rounds, which combine the
//! first response of each step, then the second, and so on. Tensors are never copied.
//!
//! A language model and its detokenizer are served together, without a request for each token: see [`text_plan`].

use std::sync::{Arc, Weak};

use futures::future::{BoxFuture, FutureExt as _};
use generation::Generator;
use repository::ModelConfig;

use crate::model::ServedModel;
use crate::registry::Registry;
use crate::{Adapters, Backend, GenerateCall, InferError, InferRequest, ResponseStream, Sleeper, Weights};

mod graph;
mod link;
mod run;
mod step_response;
mod tensors;
mod text_plan;
mod text_stream;

use graph::{Graph, Step};
pub(crate) use link::link;
use run::Run;
use text_plan::TextPlan;

/// A loaded ensemble.
pub(crate) struct Ensemble {
    graph: Arc<Graph>,
    /// Set where the wires are those of a text ensemble.
    text: Option<TextPlan>,
    registry: Weak<Registry>,
}

impl Ensemble {
    /// The ensemble of a validated configuration.
    pub fn new(config: &ModelConfig, registry: &Arc<Registry>) -> Self {
        let graph = Arc::new(Graph::new(config));
        Self { text: TextPlan::of(&graph), graph, registry: Arc::downgrade(registry) }
    }

    /// The models of all steps as they are loaded now.
    fn models(&self) -> Result<Vec<Arc<ServedModel>>, InferError> {
        let registry = self.registry.upgrade().ok_or_else(|| InferError::unavailable("the server has stopped"))?;
        let resolve = |step: &Step| registry.resolve_number(&step.model, step.version);
        self.graph.steps.iter().map(resolve).collect::<Result<_, _>>().map_err(|error| self.graph.within(error))
    }
}

impl Backend for Ensemble {
    fn infer(&self, request: InferRequest) -> Result<ResponseStream, InferError> {
        let (graph, plan, models) = (self.graph.clone(), self.text, self.models()?);
        Ok(ResponseStream::from_future_then(|sender| Run::new(graph, plan, models, request, sender).finish()))
    }

    fn returns_only_requested_outputs(&self) -> bool {
        true
    }

    fn generator(&self) -> Option<Generator> {
        self.text?.generator_of(&self.graph, &self.models().ok()?)
    }

    fn generate(&self, call: GenerateCall) -> Result<ResponseStream, InferError> {
        let plan = self.text.ok_or_else(|| InferError::internal("the ensemble generates no text"))?;
        plan.generate(&self.graph, &self.models()?, call)
    }

    fn adapters(&self) -> Option<Arc<dyn Adapters>> {
        self.text?.adapters_of(&self.graph, &self.models().ok()?)
    }

    fn sleeper(&self) -> Option<Arc<dyn Sleeper>> {
        self.models().ok()?.iter().find_map(|model| model.sleeper())
    }

    fn weights(&self) -> Option<Arc<dyn Weights>> {
        self.models().ok()?.iter().find_map(|model| model.weights())
    }

    fn reset_prefix_cache(&self) -> BoxFuture<'_, bool> {
        let models = self.models();
        async move {
            let mut has_any = false;
            for model in models.iter().flatten() {
                has_any |= model.reset_prefix_cache().await;
            }
            has_any
        }
        .boxed()
    }

    fn is_ready(&self) -> bool {
        self.models().is_ok_and(|models| models.iter().all(|model| model.is_ready()))
    }

    fn is_complete(&self) -> bool {
        self.models().is_ok_and(|models| models.iter().all(|model| model.is_complete()))
    }

    fn drain(&self) -> BoxFuture<'_, ()> {
        // `ServedModel` waits for an ensemble's requests, as for those of any model.
        std::future::ready(()).boxed()
    }
}
