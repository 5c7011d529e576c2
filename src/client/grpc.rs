//! gRPC over HTTP/2, limited to what a client of this protocol needs.
//!
//! Own code over h2: tonic's client takes 7.7 instead of 4.4 µs of CPU a request, and 1.6 instead of 1.4 µs a streamed message,
//! and the load generator shares its cores with the server.

use std::time::Duration;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use h2::client::{ResponseFuture, SendRequest};
use h2::{Reason, RecvStream};
use http::{HeaderMap, HeaderValue, Request, Version, header};
use percent_encoding::percent_decode_str;
use prost::Message;
use tokio::net::TcpStream;

use crate::ClientError;

/// Flow-control window of a stream: what the server may send before the client reads it.
const WINDOW_BYTES: u32 = 8 << 20;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Largest message that is accepted.
const MAX_MESSAGE_BYTES: usize = 1 << 30;

/// A connection to a server; clones share it.
#[derive(Clone)]
pub struct Connection {
    url: String,
    sender: SendRequest<Bytes>,
    authorization: Option<HeaderValue>,
}

impl Connection {
    /// Connects to `HOST:PORT`.
    ///
    /// # Errors
    /// When nothing listens there, or the server does not speak HTTP/2.
    pub async fn open(url: &str) -> Result<Self, ClientError> {
        let url = url.trim_start_matches("grpc://").trim_start_matches("http://").trim_end_matches('/').to_owned();
        let connect = tokio::time::timeout(CONNECT_TIMEOUT, TcpStream::connect(&url));
        let stream = connect
            .await
            .unwrap_or_else(|_| Err(std::io::ErrorKind::TimedOut.into()))
            .map_err(|source| ClientError::Unreachable { url: url.clone(), source })?;
        let _ = stream.set_nodelay(true); // A failure only costs latency.
        let (sender, connection) = h2::client::Builder::new()
            .initial_window_size(WINDOW_BYTES)
            .initial_connection_window_size(4 * WINDOW_BYTES)
            .max_frame_size(1 << 20)
            .handshake(stream)
            .await
            .map_err(|source| ClientError::NotGrpc { url: url.clone(), source })?;
        tokio::spawn(connection);
        Ok(Self { url, sender, authorization: None })
    }

    /// The connection, whose calls carry this value of `authorization`.
    pub fn with_authorization(self, value: HeaderValue) -> Self {
        Self { authorization: Some(value), ..self }
    }

    /// `HOST:PORT` of the server.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Calls a method with one response.
    ///
    /// # Errors
    /// When the connection breaks, or the server returns an error.
    pub async fn unary<Reply: Message + Default>(
        &self,
        method: &str,
        request: &impl Message,
    ) -> Result<Reply, ClientError> {
        let mut replies = self.call(method, frame(request)).await?;
        let reply = replies.next_bytes().await?;
        while replies.next_bytes().await?.is_some() {}
        let reply = reply.ok_or_else(|| ClientError::Protocol(format!("`{method}` ended without an answer")))?;
        decode(reply)
    }

    /// Calls a method with one request, which is already framed.
    ///
    /// # Errors
    /// When the connection breaks.
    pub async fn call(&self, method: &str, request: Bytes) -> Result<Replies, ClientError> {
        let broken = |source| self.broken(source);
        let mut head = Request::post(format!("http://{}/inference.GRPCInferenceService/{method}", self.url))
            .version(Version::HTTP_2)
            .header("te", "trailers")
            .header("content-type", "application/grpc")
            .header("user-agent", concat!("trireme/", env!("CARGO_PKG_VERSION")))
            .body(())
            .map_err(|error| ClientError::Usage(format!("`{}` is no address: {error}", self.url)))?;
        if let Some(value) = &self.authorization {
            head.headers_mut().insert(header::AUTHORIZATION, value.clone());
        }
        let mut sender = self.sender.clone().ready().await.map_err(broken)?;
        let (response, mut stream) = sender.send_request(head, false).map_err(broken)?;
        stream.send_data(request, true).map_err(broken)?;
        Ok(Replies { url: self.url.clone(), state: State::Waiting(response), buffer: BytesMut::new() })
    }

    fn broken(&self, source: h2::Error) -> ClientError {
        broken(&self.url, source)
    }
}

fn broken(url: &str, source: h2::Error) -> ClientError {
    // The response of a server without HTTP/2 fails to parse as frames.
    if source.reason() == Some(Reason::FRAME_SIZE_ERROR) || source.reason() == Some(Reason::PROTOCOL_ERROR) {
        return ClientError::NotGrpc { url: url.to_owned(), source };
    }
    ClientError::Connection { url: url.to_owned(), source }
}

/// The responses of one call. Dropping it cancels the call.
pub struct Replies {
    url: String,
    state: State,
    buffer: BytesMut,
}

enum State {
    Waiting(ResponseFuture),
    Reading(RecvStream),
    Over,
}

impl Replies {
    /// The next response; `None` at the end of a successful call.
    ///
    /// # Errors
    /// When the connection breaks, or the server ends the call with an error.
    pub async fn next<Reply: Message + Default>(&mut self) -> Result<Option<Reply>, ClientError> {
        self.next_bytes().await?.map(decode).transpose()
    }

    /// The next response, not decoded.
    ///
    /// # Errors
    /// See [`Replies::next`].
    pub async fn next_bytes(&mut self) -> Result<Option<Bytes>, ClientError> {
        loop {
            if let Some(message) = self.take_message()? {
                return Ok(Some(message));
            }
            match &mut self.state {
                State::Waiting(response) => {
                    let response = response.await.map_err(|source| broken(&self.url, source))?;
                    let (head, body) = response.into_parts();
                    if head.status != http::StatusCode::OK {
                        return Err(ClientError::Protocol(format!("HTTP status {}", head.status)));
                    }
                    check_status(&head.headers)?; // A response without a body has its status here.
                    self.state = State::Reading(body);
                }
                State::Reading(body) => match body.data().await {
                    Some(data) => {
                        let data = data.map_err(|source| broken(&self.url, source))?;
                        let _ = body.flow_control().release_capacity(data.len()); // Fails only after the end of the call.
                        self.buffer.extend_from_slice(&data);
                    }
                    None => {
                        let trailers = body.trailers().await.map_err(|source| broken(&self.url, source))?;
                        self.state = State::Over;
                        check_status(&trailers.unwrap_or_default())?;
                    }
                },
                State::Over => return Ok(None),
            }
        }
    }

    fn take_message(&mut self) -> Result<Option<Bytes>, ClientError> {
        let Some(&[compressed, a, b, c, d]) = self.buffer.first_chunk::<5>() else { return Ok(None) };
        let length = u32::from_be_bytes([a, b, c, d]) as usize;
        if compressed != 0 || length > MAX_MESSAGE_BYTES {
            return Err(ClientError::Protocol(format!("a message of {length} bytes with flag {compressed}")));
        }
        if self.buffer.len() < 5 + length {
            return Ok(None);
        }
        self.buffer.advance(5);
        Ok(Some(self.buffer.split_to(length).freeze()))
    }
}

/// A message with the prefix that gRPC sends before it: compression flag and length.
pub fn frame(message: &impl Message) -> Bytes {
    let length = message.encoded_len();
    let mut framed = prefix(length);
    message.encode(&mut framed).expect("the buffer grows");
    framed.freeze()
}

/// An encoded message with its prefix.
pub fn frame_bytes(message: &[u8]) -> Bytes {
    let mut framed = prefix(message.len());
    framed.put_slice(message);
    framed.freeze()
}

fn prefix(length: usize) -> BytesMut {
    let mut framed = BytesMut::with_capacity(5 + length);
    framed.put_u8(0);
    framed.put_u32(u32::try_from(length).expect("a message is under 4 GiB"));
    framed
}

/// The number of a status whose name a [`ClientError::Refused`] has; `None` for an error of a model's stream.
pub fn code_number(name: &str) -> Option<u16> {
    CODES.iter().position(|code| *code == name).map(|number| number as u16)
}

/// A decoded message.
///
/// # Errors
/// When the bytes are none.
pub fn decode<Reply: Message + Default>(bytes: Bytes) -> Result<Reply, ClientError> {
    Reply::decode(bytes).map_err(|error| ClientError::Protocol(error.to_string()))
}

fn check_status(headers: &HeaderMap) -> Result<(), ClientError> {
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    match text("grpc-status").map(str::parse::<usize>) {
        None | Some(Ok(0)) => Ok(()),
        Some(code) => Err(ClientError::Refused {
            code: code.ok().and_then(|code| CODES.get(code)).unwrap_or(&"UNKNOWN"),
            message: message(text("grpc-message").unwrap_or("the server gave no reason")),
        }),
    }
}

/// The text of `grpc-message`, which is percent-encoded.
fn message(encoded: &str) -> String {
    percent_decode_str(encoded).decode_utf8_lossy().into_owned()
}

const CODES: [&str; 17] = [
    "OK",
    "CANCELLED",
    "UNKNOWN",
    "INVALID_ARGUMENT",
    "DEADLINE_EXCEEDED",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "ABORTED",
    "OUT_OF_RANGE",
    "UNIMPLEMENTED",
    "INTERNAL",
    "UNAVAILABLE",
    "DATA_LOSS",
    "UNAUTHENTICATED",
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_of_errors_are_unescaped() {
        assert_eq!(message("caf%C3%A9 100%"), "café 100%");
    }

    #[test]
    fn a_status_that_is_not_ok_is_an_error() {
        let mut headers = HeaderMap::new();
        assert!(check_status(&headers).is_ok());
        headers.insert("grpc-status", "5".parse().unwrap());
        headers.insert("grpc-message", "no%20model".parse().unwrap());
        assert_eq!(check_status(&headers).unwrap_err().to_string(), "no model (NOT_FOUND)");
    }
}
