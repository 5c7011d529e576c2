//! Accepts requests to a model: checks them, looks for them in the cache, passes them to the backend, and counts responses.

use std::sync::Arc;
use std::time::Instant;

use crate::model::ServedModel;
use crate::request_metrics::{CacheLookup, RequestMetrics};
use crate::{GenerateCall, InferError, InferRequest, InferResponse, ResponseStream, TextOutputs};

impl ServedModel {
    /// Checks the request, passes it to the backend, and counts its responses.
    pub fn infer(self: &Arc<Self>, mut request: InferRequest) -> Result<ResponseStream, InferError> {
        let started = Instant::now();
        let batch_size = self.admit(&mut request, started)?;
        let (lookup, cached_response) = self.look_up(&request);
        let mut metrics = RequestMetrics::new(self.clone(), &request, batch_size, started, lookup);
        // An ensemble ignores outputs that it does not use. A trace shows only requested outputs.
        let filters_outputs = request.step.is_none() || request.trace.is_some();
        if filters_outputs && !self.backend.returns_only_requested_outputs() {
            metrics.filter_outputs(request.requested_outputs.clone());
        }
        if let Some(response) = cached_response {
            return Ok(metrics.observe_stream(ResponseStream::ready(response)));
        }
        let accepted = match &self.scheduler {
            Some(scheduler) => scheduler.infer(request, batch_size),
            None => self.backend.infer(request),
        };
        metrics.observe_accepted(accepted)
    }

    /// Serves a request like [`ServedModel::infer`], with the outputs of a text ensemble instead of the model's own.
    pub fn infer_text(
        self: &Arc<Self>,
        mut request: InferRequest,
        outputs: TextOutputs,
    ) -> Result<ResponseStream, InferError> {
        let started = Instant::now();
        let batch_size = self.admit(&mut request, started)?;
        let metrics = RequestMetrics::new(self.clone(), &request, batch_size, started, CacheLookup::Disabled);
        metrics.observe_accepted(self.backend.infer_text(request, outputs))
    }

    /// Passes a request to generate text to the backend, and counts its events.
    pub fn generate(self: &Arc<Self>, call: GenerateCall) -> Result<ResponseStream, InferError> {
        let request = InferRequest { id: call.id.clone(), ..InferRequest::default() };
        let metrics = RequestMetrics::new(self.clone(), &request, 1, Instant::now(), CacheLookup::Disabled);
        metrics.observe_accepted(self.backend.generate(call))
    }

    /// Checks a request and begins its trace. Returns its batch size.
    fn admit(&self, request: &mut InferRequest, started: Instant) -> Result<u64, InferError> {
        let in_place = self.backend.reads_client_memory() && self.cache.is_none() && request.trace.is_none();
        if !in_place {
            request.fetch_client_memory()?;
        }
        // A request that does not fit the model is not counted, as in Triton.
        let batch_size = match self.signature.check(request) {
            Err(error) if self.generator().is_none() || !self.signature.adapt_text_request(request) => {
                return Err(error);
            }
            Err(_) => self.signature.check(request)?,
            Ok(batch_size) => batch_size,
        };
        if let Some(trace) = &request.trace {
            trace.name(&self.config.name, self.version, &request.id);
            trace.mark_at("REQUEST_START", started);
            trace.mark("QUEUE_START");
            trace.tensors("TENSOR_QUEUE_INPUT", &request.inputs);
        }
        Ok(batch_size)
    }

    fn look_up(&self, request: &InferRequest) -> (CacheLookup, Option<InferResponse>) {
        let Some(cache) = &self.cache else { return (CacheLookup::Disabled, None) };
        let started = Instant::now();
        let key = cache.key(self.load_id(), request);
        match cache.get(key) {
            Some(response) => (CacheLookup::Hit(started.elapsed()), Some(response)),
            None => (CacheLookup::Miss(key, started.elapsed()), None),
        }
    }
}
