//! `ModelStreamInfer` through the relay: many requests over one stream. Each unfinished request is sent again, and the responses that its
//! client has are left out.
//!
//! While the launcher lets a world end in order, the stream moves: requests that come meanwhile are sent to the next world, once those
//! at the old one are finished.
//!
//! A request is finished by its final response. Every request asks for an empty final response, which is dropped where its client did
//! not ask for it.

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::{Buf, BufMut, Bytes, BytesMut};
use futures::stream;
use h2::{RecvStream, SendStream};
use http::{HeaderMap, Response, request};
use http_body_util::{BodyExt as _, StreamBody};
use hyper::body::Frame;
use prost::Message;
use serving::STOPPING;
use tokio::sync::mpsc;
use tonic::body::Body;
use tonic::{Code, Status};

use crate::relay::demand::OpenRequest;
use crate::relay::events::SentEvents;
use crate::relay::grpc_upstream::{Begun, GrpcUpstream, Parts, check_repeats, next_part, refusal, send_data};
use crate::relay::kept::KeptShare;
use crate::transport::http2::RequestBody;

/// Most unfinished requests of a stream that are kept.
const MAX_REQUESTS: usize = 1024;

/// Length of the prefix of a message: a flag of its compression, and its length.
const PREFIX: usize = 5;

/// The parameter by which a request asks for an empty final response.
const WANTS_EMPTY_FINAL: &str = "triton_enable_empty_final_response";
/// The parameter that marks the final response of a request.
const IS_FINAL: &str = "triton_final_response";

/// The parts of a `ModelInferRequest` that matter here.
#[derive(Clone, PartialEq, Message)]
struct RequestHead {
    #[prost(string, tag = "3")]
    id: String,
    #[prost(map = "string, message", tag = "4")]
    parameters: HashMap<String, Flag>,
}

/// An `InferParameter`, if it is a `bool_param`.
#[derive(Clone, PartialEq, Message)]
struct Flag {
    #[prost(bool, tag = "1")]
    value: bool,
}

/// The parts of a `ModelStreamInferResponse` that matter here.
#[derive(Clone, PartialEq, Message)]
struct ResponseHead {
    #[prost(string, tag = "1")]
    error_message: String,
    #[prost(message, optional, tag = "2")]
    response: Option<InferResponseHead>,
}

/// The parts of a `ModelInferResponse` that matter here.
#[derive(Clone, PartialEq, Message)]
struct InferResponseHead {
    #[prost(string, tag = "3")]
    id: String,
    #[prost(map = "string, message", tag = "4")]
    parameters: HashMap<String, Flag>,
    #[prost(message, repeated, tag = "5")]
    outputs: Vec<Skipped>,
}

/// A message whose content does not matter.
#[derive(Clone, PartialEq, Message)]
struct Skipped {}

/// A request that is not finished.
struct Unfinished {
    id: String,
    /// The message with its prefix.
    bytes: Bytes,
    wants_empty_final: bool,
    sent: SentEvents,
}

/// What is known of the requests of a stream.
struct Requests {
    unfinished: Vec<Unfinished>,
    share: KeptShare,
    /// Why the stream cannot go on at another rank 0.
    lost: Option<&'static str>,
    /// Whether the client has sent all requests.
    have_ended: bool,
    /// Whether no more requests are sent to this rank 0, because its world ends in order.
    is_moving: bool,
}

/// One stream.
pub(super) struct StreamInfer {
    upstream: Arc<GrpcUpstream>,
    head: request::Parts,
    requests: Mutex<Requests>,
    _open: OpenRequest,
}

impl StreamInfer {
    /// Answers a call. Its answer goes on in a task of its own.
    pub(super) fn begin(upstream: Arc<GrpcUpstream>, head: request::Parts, body: RequestBody) -> Response<Body> {
        let share = KeptShare::new(&upstream.forwarder.kept);
        let requests = Requests::new(share);
        let open = upstream.forwarder.demand.begin();
        let stream = Self { upstream, head, requests: Mutex::new(requests), _open: open };
        let (parts, received) = mpsc::channel(8);
        tokio::spawn(async move {
            let ended = tokio::select! {
                ended = stream.run(body, &parts) => ended,
                // The client has left.
                () = parts.closed() => return,
            };
            if let Err(message) = ended {
                let mut trailers = HeaderMap::new();
                if refusal(message).add_header(&mut trailers).is_ok() {
                    let _ = parts.send(Ok(Frame::trailers(trailers))).await;
                }
            }
        });
        let received = stream::unfold(received, |mut received| async { Some((received.recv().await?, received)) });
        let mut response = Response::new(Body::new(StreamBody::new(received)));
        response.headers_mut().insert(http::header::CONTENT_TYPE, http::HeaderValue::from_static("application/grpc"));
        response
    }

    fn requests(&self) -> MutexGuard<'_, Requests> {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs until the stream has ended. An error is the message for the client.
    async fn run(&self, mut body: RequestBody, parts: &Parts) -> Result<(), String> {
        let (mut reader, mut repeats) = (MessageReader::default(), 0);
        loop {
            let Begun { response, request, world } = self.upstream.begin(&self.head, false).await?;
            let receive = async {
                let (head, mut answer) = response.await.map_err(|_| End::Broken)?.into_parts();
                if head.headers.contains_key("grpc-status") {
                    // It was refused, and has no body.
                    return Ok(Some(head.headers));
                }
                self.receive(&mut answer, parts, &world).await
            };
            let ended = tokio::select! {
                ended = receive => ended,
                ended = self.send(&mut body, &mut reader, request, &world) => Err(ended),
            };
            self.upstream.forget(&world).await;
            match ended {
                Ok(Some(trailers)) if self.requests().have_moved(&trailers) => {}
                Ok(trailers) => {
                    if let Some(trailers) = trailers {
                        let _ = parts.send(Ok(Frame::trailers(trailers))).await;
                    }
                    return Ok(());
                }
                Err(End::Message(message)) => return Err(message),
                Err(End::Refused) => self.requests().begin_again()?,
                Err(End::Broken) => {
                    repeats += 1;
                    check_repeats(repeats, &self.upstream.forwarder, &world).await?;
                    self.requests().begin_again()?;
                }
            }
        }
    }

    /// Sends the kept requests, then those that the client sends while `world` serves. Returns when that has failed.
    async fn send(
        &self,
        body: &mut RequestBody,
        reader: &mut MessageReader,
        mut request: SendStream<Bytes>,
        world: &Path,
    ) -> End {
        let mut left = std::pin::pin!(self.upstream.forwarder.upstream.left(world));
        let kept: Vec<Bytes> = self.requests().unfinished.iter().map(|kept| kept.bytes.clone()).collect();
        for bytes in kept {
            if send_data(&mut request, bytes).await.is_err() {
                return End::Broken;
            }
        }
        while !self.requests().have_ended {
            while let Some(message) = reader.next() {
                let message = self.requests().keep(message);
                if send_data(&mut request, message).await.is_err() {
                    return End::Broken;
                }
            }
            let frame = tokio::select! {
                frame = body.frame() => frame,
                () = &mut left => {
                    self.requests().is_moving = true;
                    break;
                }
            };
            match frame {
                Some(Ok(frame)) => reader.push(&frame.into_data().unwrap_or_default()),
                Some(Err(error)) => return End::Message(format!("the stream of requests broke off: {error}")),
                None => self.requests().have_ended = true,
            }
        }
        let ended = request.send_data(Bytes::new(), true);
        // The responses decide how the stream ends.
        match ended {
            Ok(()) => std::future::pending().await,
            Err(_) => End::Broken,
        }
    }

    /// Passes responses on until their end. Returns the trailers.
    async fn receive(&self, answer: &mut RecvStream, parts: &Parts, world: &Path) -> Result<Option<HeaderMap>, End> {
        let mut reader = MessageReader::default();
        while let Some(part) = next_part(answer).await.map_err(|_| End::Broken)? {
            match part.into_data() {
                Ok(data) => reader.push(&data),
                Err(trailers) => return Ok(trailers.into_trailers().ok()),
            }
            let (mut new, mut is_refused) = (BytesMut::new(), false);
            while let Some(message) = reader.next() {
                is_refused =
                    says_stopping(&message) && self.upstream.forwarder.upstream.goes_on_after_refusal(world).await;
                if is_refused {
                    break;
                }
                if self.requests().is_new(&message).map_err(End::Message)? {
                    new.extend_from_slice(&message);
                }
            }
            if !new.is_empty() {
                // A client that has left ends this task.
                let _ = parts.send(Ok(Frame::data(new.freeze()))).await;
            }
            if is_refused {
                return Err(End::Refused);
            }
        }
        Ok(None)
    }
}

/// Why a stream does not go on at a rank 0.
enum End {
    /// The connection broke.
    Broken,
    /// Rank 0 has refused a request because its world ends.
    Refused,
    /// The message for the client.
    Message(String),
}

impl Requests {
    fn new(share: KeptShare) -> Self {
        Self { unfinished: Vec::new(), share, lost: None, have_ended: false, is_moving: false }
    }

    /// Keeps a message of the client. Returns what is sent in its place.
    fn keep(&mut self, message: Bytes) -> Bytes {
        let head = (message[0] == 0).then(|| RequestHead::decode(&message[PREFIX..]).ok()).flatten();
        let Some(head) = head else {
            self.lost = Some("a compressed request of this stream is not sent again");
            return message;
        };
        let wants_empty_final = head.parameters.get(WANTS_EMPTY_FINAL).is_some_and(|flag| flag.value);
        let bytes = if wants_empty_final { message } else { with_empty_final(&message) };
        if self.unfinished.len() >= MAX_REQUESTS || !self.share.take(bytes.len()) {
            self.lost = Some("the unfinished requests of this stream are too many or too large to be kept");
        }
        if self.lost.is_none() {
            let kept = Unfinished { id: head.id, bytes: bytes.clone(), wants_empty_final, sent: SentEvents::default() };
            self.unfinished.push(kept);
        }
        bytes
    }

    /// Whether a response is to be sent. Otherwise the client has it, or did not ask for it.
    fn is_new(&mut self, message: &[u8]) -> Result<bool, String> {
        let head = (message[0] == 0).then(|| ResponseHead::decode(&message[PREFIX..]).ok()).flatten();
        let Some(InferResponseHead { id, parameters, outputs }) = head.and_then(|head| head.response) else {
            return Ok(true);
        };
        let Some(at) = self.unfinished.iter().position(|kept| kept.id == id) else { return Ok(true) };
        let kept = &mut self.unfinished[at];
        let is_new = kept.sent.is_new(message).map_err(|error| error.to_string())?;
        let is_final = parameters.get(IS_FINAL).is_some_and(|flag| flag.value);
        let is_wanted = kept.wants_empty_final || !(is_final && outputs.is_empty());
        if is_final {
            let finished = self.unfinished.remove(at);
            self.share.give_back(finished.bytes.len());
        }
        Ok(is_new && is_wanted)
    }

    /// Whether the stream goes on at the next world, after the old one ended it with `trailers` and has thus answered its requests.
    fn have_moved(&mut self, trailers: &HeaderMap) -> bool {
        let have_moved = self.is_moving && Status::from_header_map(trailers).is_none_or(|it| it.code() == Code::Ok);
        if have_moved {
            self.unfinished.drain(..).for_each(|kept| self.share.give_back(kept.bytes.len()));
            (self.lost, self.is_moving) = (None, false);
        }
        have_moved
    }

    /// The requests are sent again.
    fn begin_again(&mut self) -> Result<(), String> {
        self.is_moving = false;
        if let Some(why) = self.lost {
            return Err(format!("the server died, and {why}; send the requests again"));
        }
        let mut ids: Vec<&str> = self.unfinished.iter().map(|kept| kept.id.as_str()).collect();
        ids.sort_unstable();
        if ids.windows(2).any(|two| two[0] == two[1]) {
            return Err("the server died, and requests of this stream have the same id; send them again".to_owned());
        }
        self.unfinished.iter_mut().try_for_each(|kept| kept.sent.begin_again()).map_err(|error| error.to_string())
    }
}

/// Whether a response refuses its request because rank 0 ends.
fn says_stopping(message: &[u8]) -> bool {
    // Rank 0 writes the fields in order, so only an error begins with the text of field 1.
    const TEXT_OF_FIELD_1: u8 = 0x0a;
    let is_error = message[0] == 0 && message.get(PREFIX) == Some(&TEXT_OF_FIELD_1);
    let head = is_error.then(|| ResponseHead::decode(&message[PREFIX..]).ok()).flatten();
    head.is_some_and(|head| head.error_message.contains(STOPPING))
}

/// A request that asks for an empty final response. Fields of an encoded message may be appended (protobuf, "Last One Wins").
fn with_empty_final(message: &[u8]) -> Bytes {
    let parameters = HashMap::from([(WANTS_EMPTY_FINAL.to_owned(), Flag { value: true })]);
    let further = RequestHead { id: String::new(), parameters }.encode_to_vec();
    let mut changed = BytesMut::with_capacity(message.len() + further.len());
    changed.put_u8(0);
    changed.put_u32((message.len() - PREFIX + further.len()) as u32);
    changed.put_slice(&message[PREFIX..]);
    changed.put_slice(&further);
    changed.freeze()
}

/// Divides a stream of bytes into its messages, each with its prefix.
#[derive(Default)]
struct MessageReader(BytesMut);

impl MessageReader {
    fn push(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
    }

    /// The next whole message.
    fn next(&mut self) -> Option<Bytes> {
        let mut prefix = self.0.get(..PREFIX)?;
        prefix.advance(1);
        let length = PREFIX + prefix.get_u32() as usize;
        (self.0.len() >= length).then(|| self.0.split_to(length).freeze())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::relay::kept::KeptBytes;

    fn framed(message: &impl Message) -> Bytes {
        let encoded = message.encode_to_vec();
        let mut bytes = BytesMut::new();
        bytes.put_u8(0);
        bytes.put_u32(encoded.len() as u32);
        bytes.put_slice(&encoded);
        bytes.freeze()
    }

    fn request(id: &str) -> Bytes {
        framed(&RequestHead { id: id.to_owned(), parameters: HashMap::new() })
    }

    /// A response, final and empty or neither.
    fn response(id: &str, is_final: bool) -> Bytes {
        let parameters = HashMap::from([(IS_FINAL.to_owned(), Flag { value: is_final })]);
        let outputs = if is_final { Vec::new() } else { vec![Skipped {}] };
        let response = Some(InferResponseHead { id: id.to_owned(), parameters, outputs });
        framed(&ResponseHead { error_message: String::new(), response })
    }

    fn requests() -> Requests {
        let share = KeptShare::new(&Arc::new(KeptBytes::default()));
        Requests::new(share)
    }

    #[test]
    fn a_request_asks_for_an_empty_final_response_that_its_client_does_not_get() {
        let mut all = requests();
        let sent = all.keep(request("a"));
        let head = RequestHead::decode(&sent[PREFIX..]).unwrap();
        assert_eq!((head.id.as_str(), head.parameters[WANTS_EMPTY_FINAL].value), ("a", true));
        assert_eq!(all.is_new(&response("a", false)), Ok(true));
        assert_eq!(all.is_new(&response("a", true)), Ok(false));
        assert!(all.unfinished.is_empty());

        let parameters = HashMap::from([(WANTS_EMPTY_FINAL.to_owned(), Flag { value: true })]);
        let asks = framed(&RequestHead { id: "b".to_owned(), parameters });
        assert_eq!(all.keep(asks.clone()), asks);
        assert_eq!(all.is_new(&response("b", true)), Ok(true));
    }

    #[test]
    fn responses_of_interleaved_requests_are_left_out_when_they_come_again() {
        let mut all = requests();
        all.keep(request("a"));
        all.keep(request("b"));
        assert_eq!(["a", "b", "b"].map(|id| all.is_new(&response(id, false))), [Ok(true), Ok(true), Ok(true)]);
        all.begin_again().unwrap();
        let again = ["b", "a", "b", "b", "a"].map(|id| all.is_new(&response(id, false)).unwrap());
        assert_eq!(again, [false, false, false, true, true]);
        all.keep(request("a"));
        assert!(all.begin_again().unwrap_err().contains("the same id"));
    }

    #[test]
    fn a_stream_moves_once_its_world_has_ended_it_in_order() {
        let (ok, refused) = (HeaderMap::new(), refusal("no".to_owned()));
        let mut all = requests();
        all.keep(request("a"));
        assert!(!all.have_moved(&ok));
        all.is_moving = true;
        let mut trailers = HeaderMap::new();
        refused.add_header(&mut trailers).unwrap();
        assert!(!all.have_moved(&trailers));
        assert!(all.have_moved(&ok) && all.unfinished.is_empty() && !all.is_moving);
    }

    #[test]
    fn a_refusal_of_a_rank_0_that_ends_is_recognised() {
        let error = |text: &str| framed(&ResponseHead { error_message: text.to_owned(), response: None });
        assert!(says_stopping(&error(STOPPING)) && !says_stopping(&error("another")));
        assert!(!says_stopping(&response(STOPPING, true)), "an id is no error");
    }

    #[test]
    fn a_stream_of_bytes_is_divided_wherever_it_was_cut() {
        let stream = [request("first"), request("second")].concat();
        for cut in 1..stream.len() {
            let mut reader = MessageReader::default();
            let mut found = Vec::new();
            for part in [&stream[..cut], &stream[cut..]] {
                reader.push(part);
                found.extend(std::iter::from_fn(|| reader.next()));
            }
            assert_eq!(found, [request("first"), request("second")], "cut at {cut}");
        }
    }
}
