//! The responses of a text ensemble.

use std::sync::Arc;
use std::task::{Context, Poll, ready};

use super::graph::Graph;
use crate::stream::StreamObserver;
use crate::{InferError, Name, OutputDelta, ResponseSource, ResponseStream, StreamItem};

/// Converts the responses of a generator to those of its ensemble.
pub(super) struct TextStream {
    source: Box<dyn ResponseSource>,
    /// The metrics of the generator's request.
    metrics: Box<dyn StreamObserver>,
    graph: Arc<Graph>,
}

impl TextStream {
    /// Wraps the responses of the generator of `graph`.
    pub(super) fn new(graph: Arc<Graph>, responses: ResponseStream) -> Self {
        let (source, metrics) = responses.into_parts();
        Self { source, metrics: metrics.expect("the stream of a served model has metrics"), graph }
    }
}

impl ResponseSource for TextStream {
    fn poll_next(
        &mut self,
        accepts_deltas: bool,
        delta: &mut OutputDelta,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<StreamItem, InferError>>> {
        let item = ready!(self.source.poll_next(accepts_deltas, delta, context));
        let mut item = self.metrics.observe_item(item);
        match &mut item {
            // The generator's statistics count the time until here.
            Some(Ok(StreamItem::Delta(info))) => info.computed = info.observed,
            Some(Ok(StreamItem::Response(response))) => {
                // Empty names are replaced by the ensemble's.
                (response.model_name, response.model_version) = (Name::default(), Name::default());
            }
            Some(Ok(StreamItem::Event(_))) | None => {}
            Some(Err(error)) => *error = self.graph.within(error.clone()),
        }
        Poll::Ready(item)
    }
}
