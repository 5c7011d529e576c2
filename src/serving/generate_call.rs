//! Requests to generate text that come as values instead of tensors, and the streams of their events.

use std::future::poll_fn;
use std::task::{Context, Poll};
use std::time::Duration;

use generation::{GenerateEvent, GenerateRequest};

use crate::{
    CallCounter, Generation, InferError, Name, OutputDelta, ProgressReporter, ResponseSource, ResponseStream,
    StreamItem,
};

/// A request to generate text, addressed to a model.
#[derive(Debug)]
pub struct GenerateCall {
    /// The model.
    pub model_name: Name,
    /// Its version; empty for the newest.
    pub model_version: Name,
    /// The client's request id; empty for none.
    pub id: Name,
    /// What to generate.
    pub request: GenerateRequest,
    /// Time that encoding the prompt took. It counts for the model that encodes prompts.
    pub encode_time: Duration,
    /// Counts each delta as a request to the model that decodes tokens.
    pub decode_calls: Option<CallCounter>,
}

impl GenerateCall {
    /// A call with `request` to the newest version of a model.
    pub fn new(model_name: impl Into<Name>, request: GenerateRequest) -> Self {
        Self {
            model_name: model_name.into(),
            model_version: Name::default(),
            id: Name::default(),
            request,
            encode_time: Duration::ZERO,
            decode_calls: None,
        }
    }
}

/// The events of one request. Dropping it cancels the request.
#[derive(Debug)]
pub struct EventStream(pub(crate) ResponseStream);

impl EventStream {
    /// The next event; `None` after the last.
    ///
    /// # Errors
    /// The error that ends the request.
    pub async fn next_event(&mut self) -> Option<Result<GenerateEvent, InferError>> {
        let mut unused = OutputDelta::default();
        loop {
            match poll_fn(|context| self.0.poll_item(&mut unused, context)).await? {
                Ok(StreamItem::Event(item)) => return Some(Ok(item.event)),
                Ok(_) => {} // A stream of events has no responses.
                Err(error) => return Some(Err(error)),
            }
        }
    }

    /// The events as the stream of another model, which counts them for itself, too.
    pub fn into_responses(self) -> ResponseStream {
        let progress = self.0.progress().cloned();
        ResponseStream::of_inner(Box::new(Inner(self.0)), progress)
    }

    /// Where the reader of the text reports what only it knows.
    pub fn progress(&self) -> Option<ProgressReporter> {
        self.0.progress().cloned().map(ProgressReporter)
    }

    /// Times and token counts of the request so far; `None` until it is scheduled.
    pub fn generation(&self) -> Option<Generation> {
        self.0.generation()
    }
}

/// The events of a backend's stream.
impl From<ResponseStream> for EventStream {
    fn from(stream: ResponseStream) -> Self {
        Self(stream)
    }
}

/// The items of another model's stream.
struct Inner(ResponseStream);

impl ResponseSource for Inner {
    fn poll_next(
        &mut self,
        _accepts_deltas: bool,
        delta: &mut OutputDelta,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<StreamItem, InferError>>> {
        self.0.poll_item(delta, context)
    }
}
