//! `ModelStreamInfer`: concurrent requests over one stream, with responses in the order in which they are ready.
//!
//! One future drives all requests, without a task, channel or copy per response. Dropping it, for example when the client
//! disconnects, cancels every request.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use futures::stream::{BoxStream, SelectAll};
use futures::{Stream, StreamExt};
use serving::{InferError, InferResponse, OutputDelta, ResponseStream, StreamItem};
use tokio::task::coop::poll_proceed;
use tonic::Status;

use crate::api::status::grpc_status;
use crate::api::triton::grpc::call_context::CallContext;
use crate::api::triton::grpc::proto::ModelInferRequest;
use crate::api::triton::grpc::request::{self, ParsedRequest};
use crate::api::triton::grpc::response::{InferReply, ReplyTemplate, StreamReply};
use crate::api::triton::header_parameters::forward;
use crate::api::triton::single_response::broken_contract;
use crate::state::State;
use crate::telemetry::recording::Recorded;
use crate::transport::budget::Charge;
use crate::transport::large_work::block_in_place_if_large;
use crate::transport::wake_flag::WakeFlag;

/// What the start of a request takes of a task's budget, which is 128 for each poll: other tasks run after 16 starts.
const START_COST: usize = 8;

/// The requests of a client.
pub type Requests = BoxStream<'static, Result<StreamRequest, Status>>;

/// A request of a client.
pub struct StreamRequest {
    /// The decoded message.
    pub message: ModelInferRequest,
    /// The charge of the message and its decoded form.
    pub charge: Charge,
    /// Its record, if requests are recorded.
    pub recorded: Option<Recorded>,
}

/// The replies of one call.
pub struct InferStream {
    state: Arc<State>,
    requests: Option<Requests>,
    /// Set when there may be another request.
    requests_flag: WakeFlag,
    active: Active,
    /// Headers and trace context of the call.
    call: Option<CallContext>,
    /// Whether the first error ends the RPC with its code (`triton_grpc_error: true`).
    ends_on_error: bool,
    has_ended: bool,
    /// The result of [`InferStream::is_drained`].
    is_drained: bool,
}

/// The requests in flight of a stream. Most streams have one at a time, which is polled without the queue of `SelectAll`.
#[derive(Default)]
struct Active {
    first: Option<ActiveRequest>,
    others: SelectAll<ActiveRequest>,
    /// Whether `others` are polled first next time.
    others_next: bool,
}

/// One accepted request: its responses, and the fields that they repeat.
struct ActiveRequest {
    state: Arc<State>,
    parsed: ParsedRequest,
    template: ReplyTemplate,
    is_decoupled: bool,
    /// Whether an error was sent.
    has_failed: bool,
    responses: Option<ResponseStream>,
    /// As [`InferStream::is_drained`], after the last event.
    is_drained: bool,
    /// The record of a request that is not answered yet.
    recorded: Option<Recorded>,
    /// The charge of the request until it is answered.
    _charge: Charge,
}

/// A reply, or the error that ends one request.
enum Event {
    Reply(StreamReply),
    Failure(Box<Failure>),
}

struct Failure {
    error: InferError,
    reply: StreamReply,
}

impl InferStream {
    /// Answers `requests`.
    pub fn new(state: Arc<State>, requests: Requests, ends_on_error: bool, call: Option<CallContext>) -> Self {
        let (active, requests_flag) = Default::default();
        Self {
            state,
            requests: Some(requests),
            requests_flag,
            active,
            call,
            ends_on_error,
            has_ended: false,
            is_drained: false,
        }
    }

    /// Whether polling again would be pending with the waker registered. False if that is not known.
    pub fn is_drained(&self) -> bool {
        self.is_drained
    }

    /// Starts requests until none is ready or the stream is full. Returns the error of a request that was not accepted.
    fn poll_requests(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Event, Status>>> {
        loop {
            if self.is_full() {
                return Poll::Pending; // The end of a request wakes the task.
            }
            let Some(requests) = &mut self.requests else { return Poll::Ready(None) };
            // Starting a request takes up to some milliseconds: other tasks of this thread run in between.
            let budget = ready!(poll_proceed(context));
            match ready!(self.requests_flag.poll(context, |context| requests.poll_next_unpin(context))) {
                Some(Ok(StreamRequest { message, charge, recorded })) => {
                    budget.made_progress();
                    for _ in 1..START_COST {
                        let _ = poll_proceed(context).map(|budget| budget.made_progress());
                    }
                    let id = message.id.clone();
                    let (state, call) = (self.state.clone(), self.call.as_ref());
                    match block_in_place_if_large(charge.held(), || ActiveRequest::start(state, message, call, charge))
                    {
                        Ok(request) => self.active.push(ActiveRequest { recorded, ..request }),
                        Err(error) => return Poll::Ready(Some(Ok(Event::refused(id, error, recorded)))),
                    }
                }
                Some(Err(status)) => return Poll::Ready(Some(Err(status))),
                None => self.requests = None,
            }
        }
    }

    fn is_full(&self) -> bool {
        self.active.len() >= self.state.config.max_requests_per_stream
    }

    /// Converts an event to a reply; ends the stream on an error if it should.
    fn finish(&mut self, event: Result<Event, Status>) -> Result<StreamReply, Status> {
        match event {
            Ok(Event::Reply(reply)) => Ok(reply),
            Ok(Event::Failure(failure)) if self.ends_on_error => {
                self.end();
                Err(grpc_status(failure.error))
            }
            Ok(Event::Failure(failure)) => Ok(failure.reply),
            Err(status) => {
                self.end();
                Err(status)
            }
        }
    }

    /// Cancels the requests in flight.
    fn end(&mut self) {
        self.has_ended = true;
        self.requests = None;
        self.active = Active::default();
    }
}

impl Stream for InferStream {
    type Item = Result<StreamReply, Status>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.is_drained = false;
        if self.has_ended {
            return Poll::Ready(None);
        }
        loop {
            if let Poll::Ready(Some(event)) = self.poll_requests(context) {
                return Poll::Ready(Some(self.finish(event)));
            }
            let was_full = self.is_full();
            match self.active.poll_next(context) {
                Poll::Ready(Some(event)) => {
                    // The requests were polled above, so their waker is registered.
                    self.is_drained = self.active.is_drained();
                    return Poll::Ready(Some(self.finish(Ok(event))));
                }
                _ if was_full && !self.is_full() => {} // Further requests can start.
                Poll::Ready(None) if self.requests.is_none() => return Poll::Ready(None),
                _ => return Poll::Pending,
            }
        }
    }
}

impl Event {
    /// The error of a request that was not accepted, which repeats the id only.
    fn refused(id: String, error: InferError, recorded: Option<Recorded>) -> Self {
        let response = InferResponse { id: id.into(), ..InferResponse::default() };
        let event = Event::failed(error, InferReply { response, final_response: None });
        if let Some(mut recorded) = recorded {
            recorded.message([event.reply().bytes().clone()]);
            recorded.finish();
        }
        event
    }

    fn reply(&self) -> &StreamReply {
        match self {
            Event::Reply(reply) => reply,
            Event::Failure(failure) => &failure.reply,
        }
    }

    fn failed(error: InferError, reply: InferReply) -> Self {
        let reply = StreamReply::new(&error.message, &reply);
        Event::Failure(Box::new(Failure { error, reply }))
    }
}

impl ActiveRequest {
    fn start(
        state: Arc<State>,
        message: ModelInferRequest,
        call: Option<&CallContext>,
        charge: Charge,
    ) -> Result<Self, InferError> {
        let is_decoupled = state.server.is_decoupled(&message.model_name, &message.model_version)?;
        let mut parsed = request::read(message, &state.memory, &state.declared_datatype())?;
        let echo = serving::InferRequest {
            model_name: parsed.request.model_name.clone(),
            model_version: parsed.request.model_version.clone(),
            id: parsed.request.id.clone(),
            ..Default::default()
        };
        let mut request = std::mem::replace(&mut parsed.request, echo);
        if let Some(CallContext { headers, .. }) = call {
            forward(&mut request, headers);
        }
        request.trace = state.sample_trace(&request.model_name, call.and_then(|call| call.span));
        request.trace.iter().for_each(|trace| trace.mark("GRPC_WAITREAD_END"));
        let mut responses = state.server.infer(request)?;
        if parsed.outputs.iter().all(|output| output.num_classes == 0 && output.region.is_none()) {
            responses.accept_deltas();
        }
        let template = ReplyTemplate::default();
        Ok(Self {
            state,
            parsed,
            template,
            is_decoupled,
            has_failed: false,
            responses: Some(responses),
            is_drained: false,
            recorded: None,
            _charge: charge,
        })
    }

    /// The reply of a response; `None` for an empty final response that the client did not request.
    fn reply(&mut self, response: InferResponse) -> Option<Event> {
        let is_final = response.is_final || !self.is_decoupled;
        if self.is_decoupled && response.is_final && response.outputs.is_empty() {
            return self.parsed.wants_empty_final.then(|| self.empty_final());
        }
        match self.state.deliver(&self.parsed.outputs, response) {
            Ok(response) => Some(Event::Reply(self.template.reply(response, Some(is_final)))),
            Err(error) => Some(self.failure(error, is_final)),
        }
    }

    fn empty_final(&self) -> Event {
        let reply = InferReply { response: self.echo(), final_response: Some(true) };
        Event::Reply(StreamReply::new("", &reply))
    }

    fn failure(&self, error: InferError, is_final: bool) -> Event {
        Event::failed(error, InferReply { response: self.echo(), final_response: Some(is_final) })
    }

    fn echo(&self) -> InferResponse {
        let request = &self.parsed.request;
        InferResponse { model_name: request.model_name.clone(), id: request.id.clone(), ..InferResponse::default() }
    }
}

impl Active {
    fn len(&self) -> usize {
        usize::from(self.first.is_some()) + self.others.len()
    }

    fn push(&mut self, request: ActiveRequest) {
        match &self.first {
            None => self.first = Some(request),
            Some(_) => self.others.push(request),
        }
    }

    /// As [`InferStream::is_drained`].
    fn is_drained(&self) -> bool {
        self.others.is_empty() && self.first.as_ref().is_some_and(|first| first.is_drained)
    }

    fn poll_first(&mut self, context: &mut Context<'_>) -> Poll<Option<Event>> {
        let Some(first) = &mut self.first else { return Poll::Ready(None) };
        let event = ready!(first.poll_next_unpin(context));
        if event.is_none() {
            self.first = None;
        }
        Poll::Ready(event)
    }

    /// The next event of any request; `None` when there is no request.
    fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<Event>> {
        if self.others.is_empty() {
            return self.poll_first(context);
        }
        self.others_next = !self.others_next;
        for others in [self.others_next, !self.others_next] {
            let event = if others { self.others.poll_next_unpin(context) } else { self.poll_first(context) };
            if let Poll::Ready(Some(event)) = event {
                return Poll::Ready(Some(event));
            }
        }
        if self.len() == 0 { Poll::Ready(None) } else { Poll::Pending }
    }
}

impl Stream for ActiveRequest {
    type Item = Event;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Event>> {
        let event = ready!(self.poll_event(context));
        if let Some(mut recorded) = self.recorded.take() {
            event.iter().for_each(|event| recorded.message([event.reply().bytes().clone()]));
            match self.responses {
                Some(_) => self.recorded = Some(recorded),
                None => recorded.finish(),
            }
        }
        Poll::Ready(event)
    }
}

impl ActiveRequest {
    /// The next event; `None` when the request is answered.
    fn poll_event(&mut self, context: &mut Context<'_>) -> Poll<Option<Event>> {
        self.is_drained = false;
        while let Some(responses) = &mut self.responses {
            let mut delta = OutputDelta::default();
            match ready!(responses.poll_item(&mut delta, context)) {
                Some(Ok(StreamItem::Delta(info))) => {
                    self.is_drained = info.is_drained;
                    return Poll::Ready(Some(Event::Reply(self.template.delta(&delta))));
                }
                Some(Ok(StreamItem::Response(response))) => {
                    if response.is_final {
                        self.responses = None;
                    }
                    if let Some(event) = self.reply(*response) {
                        return Poll::Ready(Some(event));
                    }
                }
                Some(Ok(StreamItem::Event(_))) => {} // Only typed requests have events.
                // A decoupled model may send further responses after an error.
                Some(Err(error)) if self.is_decoupled => {
                    self.has_failed = true;
                    return Poll::Ready(Some(self.failure(error, false)));
                }
                Some(Err(error)) => {
                    self.responses = None;
                    return Poll::Ready(Some(self.failure(error, true)));
                }
                None if self.has_failed => {
                    self.responses = None;
                    return Poll::Ready(self.parsed.wants_empty_final.then(|| self.empty_final()));
                }
                None => {
                    self.responses = None;
                    let model = &self.parsed.request.model_name;
                    let error = broken_contract(model, "ended without a final response");
                    return Poll::Ready(Some(self.failure(error, true)));
                }
            }
        }
        Poll::Ready(None)
    }
}

#[cfg(test)]
mod tests;
