//! What serving does with each response on its way out: complete it, count it, and know when the request has ended.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use crate::cache::CacheKey;
use crate::model::ServedModel;
use crate::request::Scheduled;
use crate::statistics::{CacheUse, Failure, Outcome, ResponseOutcome};
use crate::{ErrorKind, InferError, InferRequest, InferResponse};

/// One request in flight. The model counts it as such until this is dropped.
#[derive(Debug)]
pub(crate) struct Watch {
    model: Arc<ServedModel>,
    id: String,
    requested_outputs: Vec<String>,
    batch_size: u64,
    started: Instant,
    last: Instant,
    num_responses: usize,
    ended: bool,
    cached: Cached,
}

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
            requested_outputs: request.requested_outputs.clone(),
            batch_size,
            started,
            last: started,
            num_responses: 0,
            ended: false,
            cached,
            model,
        }
    }

    /// The model did not take the request.
    pub fn refused(mut self, error: &InferError) {
        self.fail(refusal_of(error));
    }

    /// Completes and counts one item of the stream. A stream that ends without a final response gets an error.
    pub fn see(&mut self, item: Option<Item>, scheduled: &OnceLock<Scheduled>) -> Option<Item> {
        match item {
            Some(Ok(mut response)) => {
                let cache = self.keep(&response);
                self.complete(&mut response);
                self.count(&response, scheduled, cache);
                Some(Ok(response))
            }
            Some(Err(error)) => {
                // Words of a queue come before anything was scheduled or answered.
                let is_refused = self.num_responses == 0 && scheduled.get().is_none();
                self.count_response(ResponseOutcome::Fail);
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

    /// Has the cache keep the model's only response as it is.
    fn keep(&self, response: &InferResponse) -> Option<CacheUse> {
        match (self.cached, &self.model.cache) {
            (Cached::Hit(took), _) => Some(CacheUse::Hit(took)),
            (Cached::Miss(key, took), Some(cache)) => {
                let started = Instant::now();
                if self.num_responses == 0 && response.is_final {
                    cache.put(key, response);
                }
                Some(CacheUse::Miss(took + started.elapsed()))
            }
            _ => None,
        }
    }

    fn complete(&self, response: &mut InferResponse) {
        if response.model_name.is_empty() {
            response.model_name.clone_from(&self.model.config.name);
        }
        if response.model_version.is_empty() {
            response.model_version.clone_from(&self.model.version_text);
        }
        if response.id.is_empty() {
            response.id.clone_from(&self.id);
        }
        if !self.requested_outputs.is_empty() {
            response.outputs.retain(|output| self.requested_outputs.contains(&output.name));
        }
        self.model.signature.restore_shapes(response);
    }

    fn count(&mut self, response: &InferResponse, scheduled: &OnceLock<Scheduled>, cache: Option<CacheUse>) {
        let is_empty = response.outputs.is_empty();
        if self.num_responses == 0 && !is_empty {
            self.model.statistics.first_response(self.started.elapsed());
        }
        self.count_response(if is_empty { ResponseOutcome::Empty } else { ResponseOutcome::Success });
        if response.is_final && !self.ended {
            self.ended = true;
            let scheduled = scheduled.get();
            let queued = scheduled.map_or(Duration::ZERO, |queue| queue.at.saturating_duration_since(self.started));
            let execution = scheduled.and_then(|queue| queue.execution.as_ref());
            let executed = execution.map_or(Some(self.batch_size), |execution| execution.count());
            let total = self.started.elapsed();
            self.model.statistics.succeeded(Outcome { total, queued, batch_size: self.batch_size, executed, cache });
        }
    }

    /// Responses are counted one by one where a request may have many of them.
    fn count_response(&mut self, outcome: ResponseOutcome) {
        if self.model.is_decoupled {
            let now = Instant::now();
            self.model.statistics.response(self.num_responses, outcome, now - self.last);
            self.last = now;
        }
        self.num_responses += 1;
    }

    fn fail(&mut self, failure: Failure) {
        if !self.ended {
            self.ended = true;
            self.model.statistics.failed(failure, self.started.elapsed());
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        if !self.ended {
            self.count_response(ResponseOutcome::Cancel);
            self.fail(Failure::Canceled);
        }
        self.model.in_flight.leave();
    }
}

/// The reason of a request that did not reach the model.
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
