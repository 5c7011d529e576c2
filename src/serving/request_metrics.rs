//! Completes and counts each response of a request, and records how the request ended.

use std::sync::Arc;
use std::time::{Duration, Instant};

use generation::GenerateEvent;

use crate::cache::CacheKey;
use crate::index_memo::IndexMemo;
use crate::model::ServedModel;
use crate::outcome::{CacheUse, Failure, OtherResponse, Outcome};
use crate::progress::{Generation, Progress, Scheduled};
use crate::response_counter::ResponseCounter;
use crate::stream::StreamObserver;
use crate::{
    DeltaInfo, ErrorKind, InferError, InferRequest, InferResponse, Name, ResponseStream, StreamEvent, StreamItem,
    Timestamp, Trace,
};

/// Metrics of one request. The request counts as in flight until this is dropped.
#[derive(Debug)]
pub(crate) struct RequestMetrics {
    model: Arc<ServedModel>,
    id: Name,
    requested_outputs: Vec<Name>,
    memo: IndexMemo,
    batch_size: u64,
    started: Instant,
    /// Time that checking the inputs took.
    check_time: Duration,
    responses: ResponseCounter,
    ended: bool,
    cache_lookup: CacheLookup,
    progress: Option<Arc<Progress>>,
    /// Whether the request is a step of an ensemble. Then only the ensemble's log line is written.
    is_step: bool,
    /// The end of the request, for its log line. The line is written when the stream is dropped, after its reader has counted the
    /// reasoning.
    end: Option<RequestEnd>,
    trace: Option<Trace>,
}

/// The outcome of a request and its durations.
#[derive(Debug, Clone, Copy)]
struct RequestEnd {
    outcome: &'static str,
    total: Duration,
    queued: Duration,
}

/// Result of looking for a request in the response cache, with the time that it took.
#[derive(Debug, Clone, Copy)]
pub(crate) enum CacheLookup {
    /// The model uses no cache.
    Disabled,
    /// The response comes from the cache.
    Hit(Duration),
    /// The response will be stored under this key.
    Miss(CacheKey, Duration),
}

type Item = Result<InferResponse, InferError>;

impl RequestMetrics {
    /// Metrics of a request that has passed its checks.
    pub fn new(
        model: Arc<ServedModel>,
        request: &InferRequest,
        batch_size: u64,
        started: Instant,
        cache_lookup: CacheLookup,
    ) -> Self {
        model.in_flight.enter();
        Self {
            id: request.id.clone(),
            requested_outputs: Vec::new(),
            memo: IndexMemo::default(),
            batch_size,
            started,
            check_time: started.elapsed(),
            responses: ResponseCounter::new(started, model.is_decoupled),
            ended: false,
            cache_lookup,
            progress: None,
            is_step: request.step.is_some(),
            end: None,
            trace: request.trace.clone(),
            model,
        }
    }

    /// Removes all other outputs from later responses; removes none if the list is empty.
    pub fn filter_outputs(&mut self, requested_outputs: Vec<Name>) {
        self.requested_outputs = requested_outputs;
    }

    /// Completes and counts every response of `stream` from now on.
    pub fn observe_stream(mut self, stream: ResponseStream) -> ResponseStream {
        self.progress = stream.progress().cloned();
        stream.with_observer(Box::new(self))
    }

    /// Like [`RequestMetrics::observe_stream`], for a request that may have been refused.
    pub fn observe_accepted(
        mut self,
        accepted: Result<ResponseStream, InferError>,
    ) -> Result<ResponseStream, InferError> {
        match accepted {
            Ok(stream) => Ok(self.observe_stream(stream)),
            Err(error) => {
                self.fail(refusal_of(&error));
                Err(error)
            }
        }
    }

    /// Counts an error, or the end of the stream. A stream that ends without a final response gets an error. Responses pass
    /// unchanged.
    fn observe_end<T>(&mut self, item: Option<Result<T, InferError>>) -> Option<Result<T, InferError>> {
        match item {
            Some(Ok(response)) => Some(Ok(response)),
            Some(Err(error)) => {
                // The queue refuses a request before it is scheduled and before any response.
                let is_refused = self.responses.count() == 0 && self.scheduled().is_none();
                self.responses.other(&self.model.statistics, OtherResponse::Fail, Timestamp::now());
                self.fail(if is_refused { refusal_of(&error) } else { failure_of(&error) });
                Some(Err(error))
            }
            None if self.ended => None,
            None => {
                self.fail(Failure::Backend);
                let model = &self.model.config.name;
                Some(Err(InferError::internal(format!("model '{model}' stopped answering before its final response"))))
            }
        }
    }

    /// Completes and counts a response.
    fn observe_response(&mut self, response: &mut InferResponse) {
        let cache = self.store_in_cache(response);
        self.complete(response);
        self.count(response, cache);
    }

    fn scheduled(&self) -> Option<&Scheduled> {
        self.progress.as_ref()?.scheduled.get()
    }

    /// Stores the model's only response in the cache, before it is completed.
    fn store_in_cache(&self, response: &InferResponse) -> Option<CacheUse> {
        match (self.cache_lookup, &self.model.cache) {
            (CacheLookup::Hit(duration), _) => Some(CacheUse::Hit(duration)),
            (CacheLookup::Miss(key, duration), Some(cache)) => {
                let started = Instant::now();
                if self.responses.count() == 0 && response.is_final {
                    cache.insert(key, response);
                }
                Some(CacheUse::Miss(duration + started.elapsed()))
            }
            _ => None,
        }
    }

    fn complete(&mut self, response: &mut InferResponse) {
        if response.model_name.is_empty() {
            response.model_name = self.model.name.clone();
        }
        if response.model_version.is_empty() {
            response.model_version.clone_from(&self.model.version_text);
        }
        if response.id.is_empty() {
            response.id.clone_from(&self.id);
        }
        if !self.requested_outputs.is_empty() {
            let Self { requested_outputs, memo, .. } = self;
            let mut index = 0;
            response.outputs.retain(|output| {
                index += 1;
                memo.find(index - 1, requested_outputs, |name| *name == output.name).is_some()
            });
        }
        self.model.signature.restore_shapes(response);
    }

    fn count(&mut self, response: &InferResponse, cache: Option<CacheUse>) {
        let (now, is_empty) = (Instant::now(), response.outputs.is_empty());
        let computed = self.progress.as_ref().and_then(|progress| progress.take_computed());
        let output = computed.map_or(Duration::ZERO, |computed| now.saturating_duration_since(computed));
        if self.responses.count() == 0 && !is_empty {
            self.model.statistics.first_response(now - self.started);
        }
        match is_empty {
            true => self.responses.other(&self.model.statistics, OtherResponse::Empty, now.into()),
            false => self.responses.response(&self.model.statistics, now.into(), output.as_nanos() as u64),
        }
        if response.is_final && !self.ended {
            self.ended = true;
            self.responses.flush(&self.model.statistics);
            self.succeed(response, cache, now, output);
        }
    }

    /// Counts a response that was sent as a delta.
    fn count_delta(&mut self, info: &DeltaInfo) {
        self.responses.response(&self.model.statistics, info.observed, info.observed.ns_since(info.computed));
    }

    /// Counts an event of generated text as a response; the last one ends the request.
    fn count_event(&mut self, event: &StreamEvent) {
        if let GenerateEvent::Delta(delta) = &event.event {
            let now = Timestamp::now();
            if self.responses.count() == 0 {
                self.model.statistics.first_response(self.started.elapsed());
            }
            self.responses.response(&self.model.statistics, now, now.ns_since(delta.at));
        }
        if event.is_last && !self.ended {
            self.ended = true;
            self.responses.flush(&self.model.statistics);
            self.succeed(&InferResponse::default(), None, Instant::now(), Duration::ZERO);
        }
    }

    fn succeed(&mut self, response: &InferResponse, cache: Option<CacheUse>, now: Instant, output: Duration) {
        let progress = self.progress.clone();
        let scheduled = progress.as_ref().and_then(|progress| progress.scheduled.get());
        let checked_at = self.started + self.check_time;
        let queued = scheduled.map_or(Duration::ZERO, |queue| queue.at.saturating_duration_since(checked_at));
        let execution = scheduled.and_then(|queue| queue.execution.as_ref());
        let executed = execution.map_or(Some(self.batch_size), |execution| execution.count_once());
        let (total, batch_size) = (now - self.started, self.batch_size);
        let input = self.check_time + progress.as_ref().map_or(Duration::ZERO, |progress| progress.input());
        self.model.statistics.succeeded(Outcome { total, queued, input, output, batch_size, executed, cache });
        self.end_trace(scheduled.map(|queue| queue.at), response);
        self.end = Some(RequestEnd { outcome: "ok", total: self.started.elapsed(), queued });
    }

    fn fail(&mut self, failure: Failure) {
        self.responses.flush(&self.model.statistics);
        if !self.ended {
            self.ended = true;
            self.model.statistics.failed(failure, self.started.elapsed());
            self.end_trace(None, &InferResponse::default());
            let total = self.started.elapsed();
            self.end = Some(RequestEnd { outcome: failure.name(), total, queued: Duration::ZERO });
        }
    }

    /// Writes the request's log line, with the parts of its time.
    fn log_request(&self) {
        let Some(RequestEnd { outcome, total, queued }) = self.end.filter(|_| !self.is_step) else { return };
        let (model, version, id, responses) =
            (self.model.config.name.as_str(), self.model.version, self.id.as_str(), self.responses.count());
        let total_ms = milliseconds(total);
        let progress = self.progress.as_ref();
        let Some(generation) = progress.and_then(|progress| progress.generation()) else {
            let queue_ms = milliseconds(queued);
            tracing::debug!(target: "request", id, model, version, outcome, total_ms, queue_ms, responses, "request");
            return;
        };
        let Generation { queue, prefill, decode, prompt_tokens, cached_tokens, output_tokens, preempted } = generation;
        let stream_ms = milliseconds(total.saturating_sub(queue + prefill + decode));
        let (queue_ms, prefill_ms, decode_ms) = (milliseconds(queue), milliseconds(prefill), milliseconds(decode));
        let reasoning_tokens = progress.map_or(0, |progress| progress.reasoning_tokens());
        tracing::info!(
            target: "request", id, model, version, outcome, total_ms, queue_ms, prefill_ms, decode_ms, stream_ms,
            prompt_tokens, cached_tokens, output_tokens, reasoning_tokens, preempted, responses, "request"
        );
    }

    /// Writes the last timestamps and the outputs to the trace.
    fn end_trace(&mut self, scheduled: Option<Instant>, response: &InferResponse) {
        let Some(trace) = self.trace.take() else { return };
        let compute_start = scheduled.unwrap_or(self.started);
        trace.mark_at("COMPUTE_START", compute_start);
        trace.mark_at("COMPUTE_INPUT_END", compute_start);
        trace.mark("COMPUTE_OUTPUT_START");
        trace.mark("COMPUTE_END");
        trace.mark("INFER_RESPONSE_COMPLETE");
        trace.tensors("TENSOR_BACKEND_OUTPUT", &response.outputs);
        trace.mark("REQUEST_END");
    }
}

impl StreamObserver for RequestMetrics {
    fn observe(&mut self, item: Option<Item>) -> Option<Item> {
        let mut item = item;
        if let Some(Ok(response)) = &mut item {
            self.observe_response(response);
        }
        self.observe_end(item)
    }

    fn observe_item(
        &mut self,
        mut item: Option<Result<StreamItem, InferError>>,
    ) -> Option<Result<StreamItem, InferError>> {
        match &mut item {
            Some(Ok(StreamItem::Delta(info))) => self.count_delta(info),
            Some(Ok(StreamItem::Response(response))) => self.observe_response(response),
            Some(Ok(StreamItem::Event(event))) => self.count_event(event),
            _ => return self.observe_end(item),
        }
        item
    }

    fn removes_outputs(&self) -> bool {
        !self.requested_outputs.is_empty()
    }
}

fn milliseconds(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

impl Drop for RequestMetrics {
    fn drop(&mut self) {
        if !self.ended {
            self.responses.other(&self.model.statistics, OtherResponse::Cancel, Timestamp::now());
            self.fail(Failure::Canceled);
        }
        self.responses.flush(&self.model.statistics);
        self.log_request();
        self.model.in_flight.leave();
    }
}

/// The failure reason of a request that was refused before it ran.
fn refusal_of(error: &InferError) -> Failure {
    match error.kind {
        ErrorKind::Unavailable => Failure::Rejected,
        ErrorKind::InvalidArgument => Failure::Other,
        _ => failure_of(error),
    }
}

fn failure_of(error: &InferError) -> Failure {
    match error.kind {
        ErrorKind::Cancelled => Failure::Canceled,
        _ => Failure::Backend,
    }
}
