//! Forwards HTTP requests to rank 0, and sends them again to the next one when it dies.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::header::{
    CONNECTION, CONTENT_LENGTH, CONTENT_TYPE, EXPECT, HeaderMap, HeaderName, HeaderValue, TRANSFER_ENCODING,
};
use http::{Method, Request, Response, StatusCode, Version, request};
use http_body_util::BodyExt as _;
use hyper::body::{Body as _, Incoming};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::sync::mpsc;

use crate::api::request_key::{HEADER, RequestKey};
use crate::api::triton::http::reply::{Reply, TEXT, reply, without_body};
use crate::relay::demand::{Demand, OpenRequest};
use crate::relay::event_id::{self, EventId};
use crate::relay::events::{EventReader, SentEvents};
use crate::relay::idempotency::{self, Idempotency};
use crate::relay::kept::{KeptBody, KeptBytes, MAX_REQUEST_BYTES};
use crate::relay::request::{Handling, Protocol};
use crate::relay::upstream::{Link, RelayedPort, Upstream};
use crate::transport::body::ReplyBody;

/// How often a request is sent again at most: it may be what kills rank 0.
pub(crate) const MAX_REPEATS: u32 = 3;

/// Largest answer that is received as a whole before its first byte is sent, so that its request can be sent again until then.
const MAX_WHOLE_BYTES: u64 = 1 << 20;

/// The header of answers to probes while the server is asleep.
pub(super) const STATE: HeaderName = HeaderName::from_static("trireme-state");
pub(super) const ASLEEP: HeaderValue = HeaderValue::from_static("asleep");

/// How long a probe waits for an answer: a rank 0 that hangs is not healthy.
const PROBE_TIMEOUT: Duration = Duration::from_secs(5);

/// What forwarding needs.
pub(crate) struct Forwarder {
    pub(crate) upstream: Upstream,
    pub(crate) kept: Arc<KeptBytes>,
    pub(crate) idempotency: Idempotency,
    pub(crate) demand: Demand,
}

impl Forwarder {
    /// Answers a request on `port`. An error is an answer, too.
    pub(crate) async fn forward(self: Arc<Self>, port: RelayedPort, request: Request<Incoming>) -> Reply {
        let (head, body) = request.into_parts();
        let handling = match port {
            RelayedPort::Metrics => Handling::Probe,
            _ => Handling::of(&head.method, head.uri.path()),
        };
        if handling == Handling::Probe && self.upstream.is_asleep() {
            return asleep(port, &head.method);
        }
        let open = (handling != Handling::Probe).then(|| self.demand.begin());
        let protocol = Protocol::of(head.uri.path());
        let may_resume = head.method == Method::POST && handling == Handling::Repeat;
        let (idempotency_key, last_event) = match may_resume {
            true => match (idempotency::key_of(&head.headers), EventId::of(&head.headers)) {
                (Ok(key), Ok(last_event)) => (key, last_event),
                (Err(bad), _) => return protocol.refused(StatusCode::BAD_REQUEST, &bad.to_string()),
                (_, Err(bad)) => return protocol.refused(StatusCode::BAD_REQUEST, &bad.to_string()),
            },
            false => (None, None),
        };
        let body = KeptBody::new(body, &self.kept);
        let key = last_event.as_ref().map_or_else(RequestKey::new, |id| id.key);
        let has_event_ids = idempotency_key.is_some() || last_event.is_some();
        let is_first = last_event.is_none();
        let mut exchange = Exchange {
            forwarder: self,
            port,
            handling,
            head,
            body,
            key,
            has_event_ids,
            last_event,
            repeats: 0,
            _open: open,
        };
        let answered = match (handling, idempotency_key) {
            (Handling::Probe, _) => exchange.probe().await,
            (_, Some(key)) if is_first => return idempotency::answer(exchange, &key).await,
            _ => exchange.answer().await,
        };
        answered.unwrap_or_else(|message| protocol.unavailable(&message))
    }
}

/// One request, and all that is needed to send it again.
pub(crate) struct Exchange {
    pub(crate) forwarder: Arc<Forwarder>,
    port: RelayedPort,
    handling: Handling,
    pub(crate) head: request::Parts,
    pub(crate) body: KeptBody<Incoming>,
    /// The numbers that the answer draws.
    pub(crate) key: RequestKey,
    /// Whether the events of a stream have ids.
    has_event_ids: bool,
    /// The last event that the client has from an earlier connection.
    last_event: Option<EventId>,
    /// How often it was sent again.
    repeats: u32,
    _open: Option<OpenRequest>,
}

/// The answer to a probe while a world is started only for a request: it is ready, since a request is answered after a pause.
fn asleep(port: RelayedPort, method: &Method) -> Reply {
    const METRICS: &str = "# HELP trireme_server_asleep 1 while the next request starts the server\n\
                           # TYPE trireme_server_asleep gauge\ntrireme_server_asleep 1\n";
    let text = if port == RelayedPort::Metrics { METRICS } else { "asleep\n" };
    let mut answer = reply(StatusCode::OK, TEXT, text.as_bytes().to_vec());
    answer.headers_mut().insert(STATE, ASLEEP);
    if *method == Method::HEAD { without_body(answer) } else { answer }
}

/// An answer of rank 0, whose body may still be on its way.
struct Answer {
    response: Response<Incoming>,
    /// The world of that rank 0.
    world: Arc<Path>,
}

impl Exchange {
    async fn probe(&mut self) -> Result<Reply, String> {
        let link = self.forwarder.upstream.connect_now(self.port).await?;
        let answer = async { whole(self.send(link).await?.response).await };
        let silent = || "the server does not answer: it is stopped or hangs".to_owned();
        match tokio::time::timeout(PROBE_TIMEOUT, answer).await {
            Ok(Ok(reply)) => Ok(reply),
            Ok(Err(error)) => Err(format!("the server died: {error}")),
            Err(_) => Err(silent()),
        }
    }

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
                Ok(reply) => return Ok(reply),
                Err(_) => self.check_repeat(&world).await?,
            }
        }
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
async fn whole(response: Response<Incoming>) -> hyper::Result<Reply> {
    let (head, body) = end_to_end(response).into_parts();
    let body = body.collect().await?.to_bytes();
    Ok(Response::from_parts(head, body.into()))
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
