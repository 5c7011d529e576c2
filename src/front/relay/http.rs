//! Forwards HTTP requests to rank 0.

use std::sync::Arc;

use http::{Method, Request, StatusCode};
use hyper::body::Incoming;

use crate::api::request_key::RequestKey;
use crate::api::triton::http::reply::{Reply, TEXT, reply, without_body};
use crate::relay::event_id::EventId;
use crate::relay::exchange::Exchange;
use crate::relay::forwarder::{ASLEEP, Forwarder, STATE};
use crate::relay::idempotency::{self, Idempotency};
use crate::relay::kept::KeptBody;
use crate::relay::request::{Handling, Protocol};
use crate::relay::upstream::RelayedPort;

/// Forwards the requests of the HTTP ports.
pub(crate) struct HttpForwarder {
    forwarder: Arc<Forwarder>,
    idempotency: Idempotency,
}

impl HttpForwarder {
    pub(crate) fn new(forwarder: Arc<Forwarder>, idempotency: Idempotency) -> Arc<Self> {
        Arc::new(Self { forwarder, idempotency })
    }

    /// Answers a request on `port`. An error is an answer, too.
    pub(crate) async fn forward(self: Arc<Self>, port: RelayedPort, request: Request<Incoming>) -> Reply {
        let (head, body) = request.into_parts();
        let handling = match port {
            RelayedPort::Metrics => Handling::Probe,
            _ => Handling::of(&head.method, head.uri.path()),
        };
        if handling == Handling::Probe && self.forwarder.upstream.is_asleep() {
            return asleep(port, &head.method);
        }
        let open = (handling != Handling::Probe).then(|| self.forwarder.demand.begin());
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
        let body = KeptBody::new(body, &self.forwarder.kept);
        let key = last_event.as_ref().map_or_else(RequestKey::new, |id| id.key);
        let has_event_ids = idempotency_key.is_some() || last_event.is_some();
        let is_first = last_event.is_none();
        let mut exchange = Exchange {
            forwarder: Arc::clone(&self.forwarder),
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
            (_, Some(key)) if is_first => return self.idempotency.answer(exchange, &key).await,
            _ => exchange.answer().await,
        };
        answered.unwrap_or_else(|message| protocol.unavailable(&message))
    }
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
