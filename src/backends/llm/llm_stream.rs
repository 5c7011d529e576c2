//! The response stream of a request as tensors.

use std::task::{Context, Poll, ready};

use generation::GenerateEvent;
use serving::{DeltaInfo, InferError, OutputDelta, ProgressReporter, ResponseSource, StreamItem};

use super::generate_stream::GenerateStream;
use super::outputs::{OutputItem, Responses};

/// The responses to one request.
pub(crate) struct LlmStream {
    pub(crate) events: GenerateStream,
    pub(crate) responses: Responses,
    pub(crate) progress: ProgressReporter,
}

impl LlmStream {
    /// Reports the request's durations and token counts. It is not called for each delta.
    fn report(&self) {
        if let Some(generation) = self.events.generation() {
            self.progress.report(generation);
        }
    }
}

impl ResponseSource for LlmStream {
    fn poll_next(
        &mut self,
        accepts_deltas: bool,
        output: &mut OutputDelta,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<StreamItem, InferError>>> {
        loop {
            let event = match ready!(self.events.poll_event(context)) {
                Some(Ok(event)) => event,
                Some(Err(error)) => {
                    self.report();
                    return Poll::Ready(Some(Err(error)));
                }
                None => return Poll::Ready(None),
            };
            match event {
                GenerateEvent::Scheduled { index, at } => {
                    self.progress.mark_scheduled();
                    self.responses.scheduled(index, at);
                    self.report();
                }
                GenerateEvent::Logits(logits) => self.responses.keep_logits(logits),
                GenerateEvent::PromptLogprobs(_) => {} // Requests as tensors do not have them.
                GenerateEvent::Delta(mut delta) => {
                    let (at, is_drained) = (delta.at, delta.is_drained);
                    match self.responses.push(&mut delta, accepts_deltas, output) {
                        None => {}
                        Some(OutputItem::Delta(observed)) => {
                            let info = DeltaInfo { is_drained, computed: at, observed };
                            return Poll::Ready(Some(Ok(StreamItem::Delta(info))));
                        }
                        Some(OutputItem::Response(response)) => {
                            self.report();
                            self.progress.set_computed_at(at.into());
                            return Poll::Ready(Some(Ok(StreamItem::Response(response))));
                        }
                    }
                }
            }
        }
    }
}

impl Drop for LlmStream {
    fn drop(&mut self) {
        self.report();
    }
}
