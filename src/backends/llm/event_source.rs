//! The response stream of a [`GenerateRequest`](generation::GenerateRequest): its events.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::task::{Context, Poll, ready};

use generation::GenerateEvent;
use serving::{CallCounter, InferError, OutputDelta, ProgressReporter, ResponseSource, StreamEvent, StreamItem};

use super::generate_stream::GenerateStream;
use super::prompt_logprobs::PromptLogprobs;
use super::replica_state::ReplicaState;

/// Passes on the events of a request, with log-probabilities of the prompt in place of its logits.
pub(crate) struct EventSource {
    pub(crate) events: GenerateStream,
    pub(crate) progress: ProgressReporter,
    /// Set until the log-probabilities of the prompt are complete.
    pub(crate) prompt_logprobs: Option<PromptLogprobs>,
    /// The event after the log-probabilities of the prompt.
    pub(crate) next: Option<GenerateEvent>,
    /// Sequences that have not ended.
    pub(crate) num_open: usize,
    /// Counts each delta as a call of the model that would decode it.
    pub(crate) decode_calls: Option<CallCounter>,
    /// The replica whose metrics count the reasoning: the first one, because the reader does not know which one ran the request.
    pub(crate) counted_by: Arc<ReplicaState>,
}

impl EventSource {
    fn report(&self) {
        if let Some(generation) = self.events.generation() {
            self.progress.report(generation);
        }
    }

    fn item(&mut self, event: GenerateEvent) -> StreamItem {
        if let GenerateEvent::Delta(delta) = &event {
            self.num_open -= usize::from(delta.finished.is_some());
            if let (Some(calls), Some((_, decode_ns))) = (&mut self.decode_calls, delta.decoded) {
                calls.count(decode_ns);
                if self.num_open == 0 {
                    calls.flush(); // Before the client can read the statistics.
                }
            }
            self.progress.set_computed_at(delta.at.into());
            if delta.finished.is_some() {
                self.report();
            }
        }
        StreamItem::Event(Box::new(StreamEvent { event, is_last: self.num_open == 0 }))
    }
}

impl ResponseSource for EventSource {
    fn poll_next(
        &mut self,
        _accepts_deltas: bool,
        _delta: &mut OutputDelta,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<StreamItem, InferError>>> {
        loop {
            let event = match self.next.take() {
                Some(event) => event,
                None => match ready!(self.events.poll_event(context)) {
                    Some(Ok(event)) => event,
                    other => {
                        self.report();
                        return Poll::Ready(other.map(|failed| Err(failed.expect_err("events are taken above"))));
                    }
                },
            };
            match (&event, &mut self.prompt_logprobs) {
                (GenerateEvent::Logits(logits), found) => {
                    found.iter_mut().for_each(|found| found.push(logits));
                    continue;
                }
                (GenerateEvent::Delta(_), Some(found)) => {
                    let complete = found.complete();
                    self.prompt_logprobs = None;
                    self.next = Some(event);
                    let event = complete.map(GenerateEvent::PromptLogprobs).ok_or_else(|| {
                        InferError::internal("the workers did not return the logits of every prompt token")
                    });
                    return Poll::Ready(Some(event.map(|event| self.item(event))));
                }
                (GenerateEvent::Scheduled { .. }, _) => {
                    self.progress.mark_scheduled();
                    self.report();
                }
                _ => {}
            }
            return Poll::Ready(Some(Ok(self.item(event))));
        }
    }
}

impl Drop for EventSource {
    fn drop(&mut self) {
        self.report();
        self.counted_by.metrics.reasoning_tokens.fetch_add(self.progress.reasoning_tokens(), Relaxed);
    }
}
