//! The bounds of requests to the engine inside a layout.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use generation::RequestBounds;
use serving::{Backend, InferError, Limits, LoadRequest};

use crate::llm::inputs::ValueBounds;

/// What the values of a request to the engine depend on.
#[derive(Debug)]
pub(super) struct EngineBounds {
    name: String,
    limits: Limits,
    /// `None` for an engine that only checks its configuration.
    bounds: Option<RequestBounds>,
    has_warned_of_greedy: AtomicBool,
}

impl EngineBounds {
    /// The bounds of `engine`, which belongs to `model`.
    pub(super) fn new(model: &LoadRequest, engine: &dyn Backend) -> Arc<Self> {
        let (name, limits) = (model.config.name.clone(), model.limits);
        Arc::new(Self { name, limits, bounds: engine.request_bounds(), has_warned_of_greedy: AtomicBool::default() })
    }

    /// For the parser of inputs.
    ///
    /// # Errors
    /// When the engine generates nothing.
    pub(super) fn of_values(&self) -> Result<ValueBounds<'_>, InferError> {
        let Some(RequestBounds { vocab_size, max_rows, max_drafts, end_ids }) = &self.bounds else {
            return Err(InferError::internal(format!("the engine of model '{}' generates nothing", self.name)));
        };
        Ok(ValueBounds {
            name: &self.name,
            vocab_size: *vocab_size,
            max_rows: *max_rows,
            max_drafts: *max_drafts,
            end_ids,
            limits: &self.limits,
            has_warned_of_greedy: &self.has_warned_of_greedy,
        })
    }
}
