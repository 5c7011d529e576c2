//! What serving does with each response on its way out: complete it, count it, and know when the request has ended.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::cache::CacheKey;
use crate::index_memo::Finder;
use crate::model::ServedModel;
use crate::progress::{Generation, Progress, Scheduled};
use crate::statistics::{CacheUse, Came, Failure, OtherResponse, Outcome};
use crate::{DeltaInfo, ErrorKind, InferError, InferRequest, InferResponse, Name, StreamItem, Timestamp, Trace};

/// Responses of a request that are counted together, at most: the place is shared by all requests to the model, and dear
/// to touch from several threads.
const MAX_UNCOUNTED: usize = 6;

/// One request in flight. The model counts it as such until this is dropped.
#[derive(Debug)]
pub(crate) struct Watch {
    model: Arc<ServedModel>,
    id: Name,
    requested_outputs: Vec<Name>,
    finder: Finder,
    batch_size: u64,
    started: Instant,
    /// What checking the inputs took.
    checked: Duration,
    responses: Responses,
    ended: bool,
    cached: Cached,
    progress: Option<Arc<Progress>>,
    /// One step of an ensemble, whose own line tells of it.
    is_step: bool,
    trace: Option<Trace>,
}

/// The responses of a request so far. Each token comes by here, so that all it asks for lies together, in one cache line.
#[derive(Debug)]
#[repr(align(64))]
struct Responses {
    /// When the last of them came.
    last: Timestamp,
    count: u32,
    num_uncounted: u8,
    /// Each is counted by itself.
    is_decoupled: bool,
    /// The last of them, where they have not been counted.
    uncounted: [Came<u32>; MAX_UNCOUNTED],
}

const _: () = assert!(size_of::<Responses>() == 64);

/// What the response cache has to do with a request.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Cached {
    /// The model has none.
    Never,
    /// The answer comes from it; looking took so long.
    Hit(Duration),
    /// The answer goes into it; looking took so long.
    Miss(CacheKey, Duration),
}

type Item = Result<InferResponse, InferError>;

impl Watch {
    /// Watches a request that has passed its checks.
    pub fn new(
        model: Arc<ServedModel>,
        request: &InferRequest,
        batch_size: u64,
        started: Instant,
        cached: Cached,
    ) -> Self {
        model.in_flight.enter();
        Self {
            id: request.id.clone(),
            requested_outputs: Vec::new(),
            finder: Finder::default(),
            batch_size,
            started,
            checked: started.elapsed(),
            responses: Responses {
                last: started.into(),
                count: 0,
                num_uncounted: 0,
                is_decoupled: model.is_decoupled,
                uncounted: Default::default(),
            },
            ended: false,
            cached,
            progress: None,
            is_step: request.step.is_some(),
            trace: request.trace.clone(),
            model,
        }
    }

    /// Responses keep only these outputs from here on; all of them if none is named.
    pub fn keep_only(&mut self, requested_outputs: Vec<Name>) {
        self.requested_outputs = requested_outputs;
    }

    /// The same, told by the model through `progress`.
    pub fn follow(mut self, progress: Option<Arc<Progress>>) -> Self {
        self.progress = progress;
        self
    }

    /// The model did not take the request.
    pub fn refused(mut self, error: &InferError) {
        self.fail(refusal_of(error));
    }

    /// Completes and counts one item of the stream.
    pub fn see(&mut self, item: Option<Item>) -> Option<Item> {
        let mut item = item;
        if let Some(Ok(response)) = &mut item {
            self.see_response(response);
        }
        self.see_end(item)
    }

    /// Completes and counts one item of a stream.
    pub fn see_item(
        &mut self,
        mut item: Option<Result<StreamItem, InferError>>,
    ) -> Option<Result<StreamItem, InferError>> {
        match &mut item {
            Some(Ok(StreamItem::Delta(info))) => self.count_delta(info),
            Some(Ok(StreamItem::Response(response))) => self.see_response(response),
            _ => return self.see_end(item),
        }
        item
    }

    /// Completes and counts what ends a stream or stands for a response in it. A stream that ends without a final response
    /// gets an error.
    pub fn see_end<T>(&mut self, item: Option<Result<T, InferError>>) -> Option<Result<T, InferError>> {
        match item {
            Some(Ok(good)) => Some(Ok(good)),
            Some(Err(error)) => {
                // Errors of a queue come before anything was scheduled or answered.
                let is_refused = self.responses.count == 0 && self.scheduled().is_none();
                self.count_other(OtherResponse::Fail, Timestamp::now());
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

    /// Whether responses may leave with fewer outputs than they came with.
    pub fn removes_outputs(&self) -> bool {
        !self.requested_outputs.is_empty()
    }

    /// Completes and counts a response.
    pub fn see_response(&mut self, response: &mut InferResponse) {
        let cache = self.keep(response);
        self.complete(response);
        self.count(response, cache);
    }

    fn scheduled(&self) -> Option<&Scheduled> {
        self.progress.as_ref()?.scheduled.get()
    }

    /// Has the cache keep the model's only response as it is.
    fn keep(&self, response: &InferResponse) -> Option<CacheUse> {
        match (self.cached, &self.model.cache) {
            (Cached::Hit(took), _) => Some(CacheUse::Hit(took)),
            (Cached::Miss(key, took), Some(cache)) => {
                let started = Instant::now();
                if self.responses.count == 0 && response.is_final {
                    cache.put(key, response);
                }
                Some(CacheUse::Miss(took + started.elapsed()))
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
            let Self { requested_outputs, finder, .. } = self;
            let mut index = 0;
            response.outputs.retain(|output| {
                index += 1;
                finder.find(index - 1, requested_outputs, |name| *name == output.name).is_some()
            });
        }
        self.model.signature.restore_shapes(response);
    }

    fn count(&mut self, response: &InferResponse, cache: Option<CacheUse>) {
        let (now, is_empty) = (Instant::now(), response.outputs.is_empty());
        let computed = self.progress.as_ref().and_then(|progress| progress.take_computed());
        let output = computed.map_or(Duration::ZERO, |computed| now.saturating_duration_since(computed));
        if self.responses.count == 0 && !is_empty {
            self.model.statistics.first_response(now - self.started);
        }
        match is_empty {
            true => self.count_other(OtherResponse::Empty, now.into()),
            false => self.count_response(now.into(), output.as_nanos() as u64),
        }
        if response.is_final && !self.ended {
            self.ended = true;
            self.settle();
            self.succeed(response, cache, now, output);
        }
    }

    /// Counts a response that came as a delta.
    pub fn count_delta(&mut self, info: &DeltaInfo) {
        self.count_response(info.observed, info.observed.ns_since(info.computed));
    }

    fn succeed(&mut self, response: &InferResponse, cache: Option<CacheUse>, now: Instant, output: Duration) {
        let progress = self.progress.clone();
        let scheduled = progress.as_ref().and_then(|progress| progress.scheduled.get());
        let ready = self.started + self.checked;
        let queued = scheduled.map_or(Duration::ZERO, |queue| queue.at.saturating_duration_since(ready));
        let execution = scheduled.and_then(|queue| queue.execution.as_ref());
        let executed = execution.map_or(Some(self.batch_size), |execution| execution.count());
        let (total, batch_size) = (now - self.started, self.batch_size);
        let input = self.checked + progress.as_ref().map_or(Duration::ZERO, |progress| progress.input());
        self.model.statistics.succeeded(Outcome { total, queued, input, output, batch_size, executed, cache });
        self.trace_end(scheduled.map(|queue| queue.at), response);
        self.tell("ok", queued);
    }

    /// Responses are counted one by one where a request may have many of them.
    fn count_response(&mut self, now: Timestamp, output_ns: u64) {
        let responses = &mut self.responses;
        let number = responses.count;
        responses.count = number.saturating_add(1);
        if !responses.is_decoupled {
            return;
        }
        let came = Came { after_ns: now.ns_since(responses.last), output_ns };
        responses.last = now;
        let short = came.short();
        if short.is_none() || usize::from(responses.num_uncounted) == MAX_UNCOUNTED {
            self.settle_before(number);
        }
        let responses = &mut self.responses;
        match short {
            Some(came) => {
                responses.uncounted[usize::from(responses.num_uncounted)] = came;
                responses.num_uncounted += 1;
            }
            None => self.model.statistics.responses(number as usize, &[came]),
        }
    }

    /// The same, of one that brought nothing.
    fn count_other(&mut self, outcome: OtherResponse, now: Timestamp) {
        self.settle();
        let responses = &mut self.responses;
        if responses.is_decoupled {
            let after = Duration::from_nanos(now.ns_since(responses.last));
            self.model.statistics.other_response(responses.count as usize, outcome, after);
            responses.last = now;
        }
        responses.count = responses.count.saturating_add(1);
    }

    /// Counts the responses that have not been.
    fn settle(&mut self) {
        self.settle_before(self.responses.count);
    }

    /// The same of those before response `number`.
    fn settle_before(&mut self, number: u32) {
        let Responses { num_uncounted, uncounted, .. } = &mut self.responses;
        let uncounted = &uncounted[..usize::from(std::mem::take(num_uncounted))];
        if !uncounted.is_empty() {
            self.model.statistics.responses(number as usize - uncounted.len(), uncounted);
        }
    }

    fn fail(&mut self, failure: Failure) {
        self.settle();
        if !self.ended {
            self.ended = true;
            self.model.statistics.failed(failure, self.started.elapsed());
            self.trace_end(None, &InferResponse::default());
            self.tell(failure.name(), Duration::ZERO);
        }
    }

    /// Writes the request's line into the log: where its time went.
    fn tell(&self, outcome: &str, queued: Duration) {
        if self.is_step {
            return; // The ensemble's line tells it.
        }
        let (model, version, id, responses) =
            (self.model.config.name.as_str(), self.model.version, self.id.as_str(), self.responses.count);
        let total = self.started.elapsed();
        let total_ms = milliseconds(total);
        let Some(told) = self.progress.as_ref().and_then(|progress| progress.generation()) else {
            let queue_ms = milliseconds(queued);
            tracing::debug!(target: "request", id, model, version, outcome, total_ms, queue_ms, responses, "request");
            return;
        };
        let Generation { queue, prefill, decode, prompt_tokens, cached_tokens, output_tokens, preempted } = told;
        let stream_ms = milliseconds(total.saturating_sub(queue + prefill + decode));
        let (queue_ms, prefill_ms, decode_ms) = (milliseconds(queue), milliseconds(prefill), milliseconds(decode));
        tracing::info!(
            target: "request", id, model, version, outcome, total_ms, queue_ms, prefill_ms, decode_ms, stream_ms,
            prompt_tokens, cached_tokens, output_tokens, preempted, responses, "request"
        );
    }

    /// Writes the rest of the trace: what came of the request, and when.
    fn trace_end(&mut self, scheduled: Option<Instant>, response: &InferResponse) {
        let Some(trace) = self.trace.take() else { return };
        let computed_from = scheduled.unwrap_or(self.started);
        trace.mark_at("COMPUTE_START", computed_from);
        trace.mark_at("COMPUTE_INPUT_END", computed_from);
        trace.mark("COMPUTE_OUTPUT_START");
        trace.mark("COMPUTE_END");
        trace.mark("INFER_RESPONSE_COMPLETE");
        trace.tensors("TENSOR_BACKEND_OUTPUT", &response.outputs);
        trace.mark("REQUEST_END");
    }
}

fn milliseconds(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

impl Drop for Watch {
    fn drop(&mut self) {
        if !self.ended {
            self.count_other(OtherResponse::Cancel, Timestamp::now());
            self.fail(Failure::Canceled);
        }
        self.settle();
        self.model.in_flight.leave();
    }
}

/// The reason of a request that did not reach the model.
pub(crate) fn refusal_of(error: &InferError) -> Failure {
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
