//! The use of the top-level fields of a `config.pbtxt`.

use backends::layouts::Layout;
use backends::layouts::keys::Use::{self, Ignored, Used};
use repository::ModelConfig;

/// Kinds of models that use fields differently.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A graph of other models.
    Ensemble,
    /// A language model in the engine.
    Llm,
    /// A built-in model without a queue.
    Plain,
    /// The user's code in processes of its own.
    Python,
}

impl Kind {
    pub(crate) fn of(config: &ModelConfig, layout: Option<Layout>) -> Self {
        match layout {
            _ if config.is_ensemble() => Kind::Ensemble,
            Some(layout) if layout.has_checkpoint() => Kind::Llm,
            Some(_) => Kind::Plain,
            None if config.backend == "python" => Kind::Python,
            None => Kind::Plain,
        }
    }
}

/// Fields with the same meaning for every kind of model.
pub(crate) const EVERYWHERE: [(&str, Use); 15] = [
    ("name", Used("the model's name, which is its directory's")),
    ("platform", Used("`ensemble` for ensembles; else another word for `backend`")),
    ("backend", Used("what serves the model; models of published layouts are served natively")),
    ("version_policy", Used("which versions are served")),
    ("input", Used("what requests may hold")),
    ("output", Used("what responses may hold")),
    ("model_transaction_policy", Used("whether a request may have many responses")),
    ("ensemble_scheduling", Used("the steps")),
    ("model_warmup", Used("requests that are sent before the model is ready")),
    ("response_cache", Used("answers are kept where the server has a cache (`--cache-config`)")),
    ("metric_tags", Used("labels of the model's metrics")),
    ("parameters", Used("named settings")),
    ("model_repository_agents", Ignored("there are no repository agents")),
    ("model_operations", Ignored("there are no operation libraries to load")),
    ("runtime", Ignored("backends are built in")),
];

/// The use of a field by a kind of model.
pub(crate) fn use_of(field: &str, kind: Kind) -> Use {
    if let Some((_, use_)) = EVERYWHERE.iter().find(|(name, _)| *name == field) {
        return *use_;
    }
    match (field, kind) {
        ("max_batch_size", Kind::Llm) => Used("sequences that run at once"),
        ("max_batch_size", _) => Used("rows of a request, or of a batch"),
        ("dynamic_batching", Kind::Llm) => {
            Used("`default_queue_policy` bounds the queue; batches are formed anew in every step")
        }
        ("dynamic_batching" | "sequence_batching", Kind::Python) => Used("how requests are grouped and queued"),
        ("dynamic_batching" | "sequence_batching", _) => Ignored("this model answers each request at once"),
        ("instance_group", Kind::Python) => Used("processes that run side by side"),
        ("instance_group", Kind::Llm) => Used(
            "executions side by side for fixed batches and sessions; ranks that share a model are `--world_size` and `tp`",
        ),
        ("default_model_filename", Kind::Python) => Used("the file to run"),
        ("optimization", _) => Ignored("it tunes other backends"),
        _ => Ignored("this model has no use for it"),
    }
}
