//! One HTTP request on its way to rank 0, and to the next one when that dies.

use std::path::Path;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use http::header::{CONNECTION, CONTENT_LENGTH, CONTENT_TYPE, EXPECT, HeaderMap, HeaderValue, TRANSFER_ENCODING};
use http::{Request, Response, StatusCode, Version, request};
use http_body_util::BodyExt as _;
use hyper::body::{Body as _, Incoming};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use serving::STOPPING;
use tokio::sync::mpsc;

use crate::api::request_key::{HEADER, RequestKey};
use crate::api::triton::http::reply::Reply;
use crate::relay::demand::OpenRequest;
use crate::relay::event_id::{self, EventId};
use crate::relay::events::{EventReader, SentEvents};
use crate::relay::forwarder::{Forwarder, MAX_REPEATS, PROBE_TIMEOUT};
use crate::relay::kept::{KeptBody, MAX_REQUEST_BYTES};
use crate::relay::request::{Handling, Protocol};
use crate::relay::upstream::{Link, RelayedPort};
use crate::transport::body::ReplyBody;

/// Largest answer that is received as a whole before its first byte is sent, so that its request can be sent again until then.
const MAX_WHOLE_BYTES: u64 = 1 << 20;

/// One request, and all that is needed to send it again.
pub(crate) struct Exchange {
    pub(crate) forwarder: Arc<Forwarder>,
    pub(crate) port: RelayedPort,
    pub(crate) handling: Handling,
    pub(crate) head: request::Parts,
    pub(crate) body: KeptBody<Incoming>,
    /// The numbers that the answer draws.
    pub(crate) key: RequestKey,
    /// Whether the events of a stream have ids.
    pub(crate) has_event_ids: bool,
    /// The last event that the client has from an earlier connection.
    pub(crate) last_event: Option<EventId>,
    /// How often it was sent again.
    pub(crate) repeats: u32,
    /// Counts this request as long as it lives.
    pub(crate) _open: Option<OpenRequest>,
}

/// An answer of rank 0, whose body may still be on its way.
struct Answer {
    response: Response<Incoming>,
    /// The world of that rank 0.
    world: Arc<Path>,
}

impl Exchange {
    /// Asks the rank 0 that serves now.
    ///
    /// # Errors
    /// The message for the client.
    pub(crate) async fn probe(&mut self) -> Result<Reply, String> {
        let link = self.forwarder.upstream.connect_now(self.port).await?;
        let answer = async { whole(self.send(link).await?.response).await };
        let silent = || "the server does not answer: it is stopped or hangs".to_owned();
        match tokio::time::timeout(PROBE_TIMEOUT, answer).await {
            Ok(Ok(reply)) => Ok(reply.map(Into::into)),
            Ok(Err(error)) => Err(format!("the server died: {error}")),
            Err(_) => Err(silent()),
        }
    }

    /// Answers the request, by the next rank 0 if one dies.
    ///
    /// # Errors
    /// The message for the client.
    pub(crate) async fn answer(mut self) -> Result<Reply, String> {
        loop {
            let Answer { response, world } = self.receive().await?;
            if self.handling == Handling::Repeat && is_event_stream(response.headers()) {
                return Ok(self.stream(response, world));
            }
            let is_small = response.body().size_hint().upper().is_some_and(|bytes| bytes <= MAX_WHOLE_BYTES);
            if !is_small {
                return Ok(passed_on(response));
            }
            match whole(response).await {
                Ok(reply) if self.is_for_next_world(&reply, &world).await => {}
                Ok(reply) => return Ok(reply.map(Into::into)),
                Err(_) => self.check_repeat(&world).await?,
            }
        }
    }

    /// Whether the rank 0 of `world` has refused the request because it ends, and the request can be sent to the next one.
    async fn is_for_next_world(&self, reply: &Response<Bytes>, world: &Path) -> bool {
        let is_refused = reply.status() == StatusCode::SERVICE_UNAVAILABLE
            && reply.body().windows(STOPPING.len()).any(|text| text == STOPPING.as_bytes());
        is_refused && self.body.is_kept() && self.forwarder.upstream.goes_on_after_refusal(world).await
    }

    /// Sends the request until a rank 0 answers.
    async fn receive(&mut self) -> Result<Answer, String> {
        loop {
            let link = self.forwarder.upstream.connect(self.port).await?;
            let world = Arc::clone(&link.world);
            match self.send(link).await {
                Ok(answer) => return Ok(answer),
                Err(_) => self.check_repeat(&world).await?,
            }
        }
    }

    /// Checks that the request may be sent again after its connection to the rank 0 of `world` broke.
    async fn check_repeat(&mut self, world: &Path) -> Result<(), String> {
        if self.handling != Handling::Repeat {
            let what =
                "the server died while it had this request, which is not sent again because it may change the server";
            return Err(format!("{what}; look whether it did, and send it again if not"));
        }
        if !self.body.is_kept() {
            let bound =
                format!("bodies of more than {MAX_REQUEST_BYTES} bytes, or of all requests too many, are not kept");
            return Err(format!("the server died while it had this request, and {bound}; send it again"));
        }
        if self.forwarder.upstream.is_alive(world).await {
            return Err("the server closed the connection of this request; send it again".to_owned());
        }
        self.repeats += 1;
        if self.repeats > MAX_REPEATS {
            return Err(format!(
                "the server died {} times while it had this request; do not send it again",
                self.repeats
            ));
        }
        Ok(())
    }

    async fn send(&self, link: Link) -> hyper::Result<Answer> {
        let (mut sender, connection) = http1::handshake(TokioIo::new(link.stream)).await?;
        // Ends with the answer, or when that is dropped.
        tokio::spawn(connection);
        let mut request = Request::new(self.body.read());
        *request.method_mut() = self.head.method.clone();
        *request.uri_mut() = self.head.uri.clone();
        *request.version_mut() = Version::HTTP_11;
        *request.headers_mut() = self.head.headers.clone();
        let headers = request.headers_mut();
        headers.remove(EXPECT); // This process has answered it.
        headers.remove(TRANSFER_ENCODING);
        headers.insert(CONNECTION, HeaderValue::from_static("close"));
        headers.insert(HEADER, self.key.header());
        let response = sender.send_request(request).await?;
        Ok(Answer { response, world: link.world })
    }

    /// Passes on a stream of events, which goes on after a restart of the server.
    fn stream(self, response: Response<Incoming>, world: Arc<Path>) -> Reply {
        let (head, body) = end_to_end(response).into_parts();
        let (events, received) = mpsc::channel(1);
        let protocol = Protocol::of(self.head.uri.path());
        tokio::spawn(async move {
            let sent = self.last_event.as_ref().map_or_else(SentEvents::default, SentEvents::after);
            let mut stream = EventStream { exchange: self, events: events.clone(), sent };
            let ended = tokio::select! {
                ended = stream.run(body, world) => ended,
                // The client has left.
                () = events.closed() => return,
            };
            if let Err(message) = ended {
                let _ = events.send(protocol.last_events(&message)).await;
            }
        });
        let parts =
            futures::stream::unfold(received, |mut received| async { Some((received.recv().await?, received)) });
        Response::from_parts(head, ReplyBody::Events(Box::pin(parts)))
    }
}

/// A stream of events on its way to the client.
struct EventStream {
    exchange: Exchange,
    events: mpsc::Sender<Bytes>,
    sent: SentEvents,
}

impl EventStream {
    /// Runs until the stream has ended. An error is the message for the client.
    async fn run(&mut self, mut body: Incoming, mut world: Arc<Path>) -> Result<(), String> {
        let mut reader = EventReader::default();
        loop {
            match body.frame().await {
                Some(Ok(frame)) => {
                    reader.push(&frame.into_data().unwrap_or_default());
                    self.send_new(&mut reader).await?;
                }
                None => return self.sent.end().map_err(|error| error.to_string()),
                Some(Err(_)) => {
                    self.exchange.check_repeat(&world).await?;
                    self.sent.begin_again().map_err(|error| error.to_string())?;
                    reader.clear();
                    let answer = self.exchange.receive().await?;
                    if !is_event_stream(answer.response.headers()) {
                        let status = answer.response.status();
                        return Err(format!(
                            "the server was started again, and answers {status}; send the request again"
                        ));
                    }
                    (body, world) = (answer.response.into_body(), answer.world);
                }
            }
        }
    }

    /// A new event, with its id if the client asked for ids.
    fn with_id(&self, event: Bytes) -> Bytes {
        if !self.exchange.has_event_ids {
            return event;
        }
        match self.sent.id(self.exchange.key).text() {
            Some(id) => event_id::with_id(&event, &id).into(),
            // Without its own id, an event would count as that of the id before it.
            None => event_id::with_id(&event, "").into(),
        }
    }

    /// Sends the whole events that the client does not have, in one piece.
    async fn send_new(&mut self, reader: &mut EventReader) -> Result<(), String> {
        let mut new = BytesMut::new();
        let mut first: Option<Bytes> = None;
        while let Some(event) = reader.next() {
            if !self.sent.is_new(&event).map_err(|error| error.to_string())? {
                continue;
            }
            let event = self.with_id(event);
            match first {
                None => first = Some(event),
                Some(_) => new.extend_from_slice(&event),
            }
        }
        let Some(first) = first else { return Ok(()) };
        let new = if new.is_empty() { first } else { [&first[..], &new[..]].concat().into() };
        // A client that has left ends this task.
        let _ = self.events.send(new).await;
        Ok(())
    }
}

/// An answer that is received as a whole.
async fn whole(response: Response<Incoming>) -> hyper::Result<Response<Bytes>> {
    let (head, body) = end_to_end(response).into_parts();
    let body = body.collect().await?.to_bytes();
    Ok(Response::from_parts(head, body))
}

/// An answer that is passed on as it comes. If it breaks, its length does not fit its header, and the client's connection ends.
fn passed_on(response: Response<Incoming>) -> Reply {
    let (head, body) = end_to_end(response).into_parts();
    let parts = futures::stream::unfold(body, |mut body| async {
        let frame = body.frame().await?.ok()?;
        Some((frame.into_data().unwrap_or_default(), body))
    });
    Response::from_parts(head, ReplyBody::Events(Box::pin(parts)))
}

/// Removes the headers that concern the connection to rank 0.
fn end_to_end<T>(mut response: Response<T>) -> Response<T> {
    let headers = response.headers_mut();
    headers.remove(CONNECTION);
    if headers.remove(TRANSFER_ENCODING).is_some() {
        headers.remove(CONTENT_LENGTH);
    }
    *response.version_mut() = Version::HTTP_11;
    response
}

fn is_event_stream(headers: &HeaderMap) -> bool {
    headers.get(CONTENT_TYPE).is_some_and(|kind| kind.as_bytes().starts_with(b"text/event-stream"))
}
