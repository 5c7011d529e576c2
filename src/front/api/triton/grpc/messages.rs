//! The messages of a gRPC call, whole: what has come of one is kept as it comes, whatever length it was announced with.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::{Buf as _, Bytes};
use futures::Stream;
use hyper::body::{Body, Frame};
use tonic::{Code, Status};

use crate::api::status::grpc_status;
use crate::api::triton::grpc::paths;
use crate::api::triton::grpc::scan::{Kind, ScanError, scan};
use crate::state::State;
use crate::transport::budget::{Charge, Waiting};
use crate::transport::content_coding::{Coding, Unreadable};
use crate::transport::large_work::block_in_place_if_large;

/// Largest message of calls that take a few names and settings.
pub const SMALL_MESSAGE_BYTES: usize = 64 << 10;
/// The flag and the length before a message.
const PREFIX_BYTES: usize = 5;
/// What is reserved for a message of which little has come.
const FIRST_BYTES: usize = 64 << 10;
/// What a message may become beside its own bytes before that is charged: less than any request takes.
const UNCHARGED_BYTES: usize = 4 << 10;

/// What the call at `path` takes.
pub fn kind_of(path: &str) -> Kind {
    match path {
        paths::MODEL_INFER | paths::MODEL_STREAM_INFER => Kind::Infer,
        paths::MODEL_LOAD => Kind::Load,
        _ => Kind::Small,
    }
}

/// Whether the call at `path` may be open without a message on its way.
fn may_rest(path: &str) -> bool {
    path == paths::MODEL_STREAM_INFER || path.ends_with("/ServerReflectionInfo")
}

/// The messages of one call.
pub struct Messages<B> {
    state: Arc<State>,
    body: B,
    kind: Kind,
    limit: usize,
    /// How messages that say so are packed.
    coding: Option<Coding>,
    may_rest: bool,
    /// What came and was not looked at.
    came: Bytes,
    prefix: [u8; PREFIX_BYTES],
    prefix_len: usize,
    /// The message that arrives, once its prefix has.
    message: Option<Arriving>,
    /// Pays for what has come.
    charge: Charge,
    waiting: Waiting,
    is_over: bool,
}

/// What is said of bytes that are no message.
pub fn not_decoded(why: &str) -> Status {
    Status::internal(format!("Unable to parse request: {why}"))
}

/// A message that arrives.
struct Arriving {
    is_packed: bool,
    len: usize,
    bytes: Vec<u8>,
}

/// Takes what belongs to a message of `len` bytes, of which `bytes` are there, from what `came`. No more is reserved than twice
/// what came.
fn take(bytes: &mut Vec<u8>, len: usize, came: &mut Bytes) {
    let count = came.len().min(len - bytes.len());
    let needed = bytes.len() + count;
    if needed > bytes.capacity() {
        let capacity = (2 * needed).max(FIRST_BYTES).min(len);
        bytes.reserve_exact(capacity - bytes.len());
    }
    bytes.extend_from_slice(&came[..count]);
    came.advance(count);
}

/// A message as it was sent, unpacked, and what pays for it and for what it becomes.
pub struct Message {
    /// Without its prefix.
    pub bytes: Bytes,
    /// Held until the request is answered.
    pub charge: Charge,
}

impl<B: Body<Data = Bytes, Error = h2::Error> + Unpin> Messages<B> {
    /// The messages of the call at `path`, packed in `coding` where they say so.
    pub fn new(state: Arc<State>, path: &str, coding: Option<Coding>, body: B) -> Self {
        let kind = kind_of(path);
        let limit = match kind {
            Kind::Infer | Kind::Load => state.config.max_grpc_message_bytes,
            Kind::Small => SMALL_MESSAGE_BYTES,
        };
        Self {
            charge: state.budget.charge(),
            body,
            kind,
            limit,
            coding,
            may_rest: may_rest(path),
            came: Bytes::new(),
            prefix: [0; PREFIX_BYTES],
            prefix_len: 0,
            message: None,
            waiting: Waiting::Not,
            is_over: false,
            state,
        }
    }

    /// The next message, where all of it has come.
    fn next_whole(&mut self) -> Result<Option<Message>, Status> {
        if self.message.is_none() {
            let count = self.came.len().min(PREFIX_BYTES - self.prefix_len);
            self.prefix[self.prefix_len..][..count].copy_from_slice(&self.came[..count]);
            self.came.advance(count);
            self.prefix_len += count;
            if self.prefix_len < PREFIX_BYTES {
                return Ok(None);
            }
            self.message = Some(self.begin()?);
        }
        let Some(Arriving { is_packed, len, mut bytes }) = self.message.take() else { return Ok(None) };
        let bytes = if bytes.is_empty() && self.came.len() >= len {
            self.came.split_to(len) // Most messages arrive whole and are not copied.
        } else {
            take(&mut bytes, len, &mut self.came);
            if bytes.len() < len {
                self.message = Some(Arriving { is_packed, len, bytes });
                return Ok(None);
            }
            bytes.into()
        };
        self.prefix_len = 0;
        self.waiting = Waiting::Not;
        let charge = self.charge.split_off(PREFIX_BYTES + len);
        let bytes = block_in_place_if_large(len, || self.finish(is_packed, bytes, &charge))?;
        Ok(Some(Message { bytes, charge }))
    }

    fn begin(&self) -> Result<Arriving, Status> {
        let [flag, len @ ..] = self.prefix;
        let is_packed = match flag {
            0 => false,
            1 if self.coding.is_some() => true,
            1 => {
                return Err(Status::internal(
                    "protocol error: received message with compressed-flag but no grpc-encoding was specified",
                ));
            }
            flag => {
                return Err(Status::internal(format!(
                    "protocol error: received message with invalid compression flag: {flag} (valid flags are 0 and 1), while \
                     sending request"
                )));
            }
        };
        let (len, limit) = (u32::from_be_bytes(len) as usize, self.limit);
        if len > limit {
            return Err(Status::out_of_range(format!(
                "Error, decoded message length too large: found {len} bytes, the limit is: {limit} bytes"
            )));
        }
        Ok(Arriving { is_packed, len, bytes: Vec::new() })
    }

    /// Unpacks a message, compares what it contains with the limits, and charges for what it becomes.
    fn finish(&self, is_packed: bool, bytes: Bytes, charge: &Charge) -> Result<Bytes, Status> {
        let coding = self.coding.filter(|_| is_packed);
        let bytes = match coding {
            // A few bytes can unpack to gigabytes, so what is packed has the smaller bound of HTTP.
            Some(coding) => {
                let limit = self.limit.min(self.state.config.max_http_body_bytes);
                coding.decode(&bytes, limit, charge).map_err(|why| match why {
                    Unreadable::NotPacked(_, error) => {
                        Status::internal(format!("Error decompressing: {error}, while sending request"))
                    }
                    Unreadable::TooLarge(limit) => Status::resource_exhausted(format!(
                        "Error decompressing: size limit, of {limit} bytes, exceeded while decompressing message"
                    )),
                    Unreadable::NoRoom(error) => grpc_status(error),
                })?
            }
            None => bytes,
        };
        let num_bytes = scan(self.kind, &bytes, self.state.server.limits()).map_err(|error| match error {
            ScanError::Refused(error) => grpc_status(error),
            ScanError::Malformed(why) => not_decoded(&format!("failed to decode Protobuf message: {why}")),
        })?;
        if num_bytes > UNCHARGED_BYTES {
            charge.add(num_bytes).map_err(grpc_status)?;
        }
        Ok(bytes)
    }

    /// Nothing has come: an error where something should have.
    fn poll_late(&mut self, context: &mut Context<'_>) -> Poll<Status> {
        if self.may_rest && self.prefix_len == 0 {
            return Poll::Pending;
        }
        if self.may_rest {
            self.waiting.watch(&self.charge); // A stream of requests is polled only when it has woken its call.
        }
        self.waiting.poll_late(&self.charge, context).map(grpc_status)
    }

    fn poll_message(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Message, Status>>> {
        loop {
            match self.next_whole() {
                Ok(None) => {}
                Ok(Some(message)) => return Poll::Ready(Some(Ok(message))),
                Err(status) => return Poll::Ready(Some(Err(status))),
            }
            let frame = match Pin::new(&mut self.body).poll_frame(context) {
                Poll::Ready(Some(Ok(frame))) => frame,
                Poll::Ready(Some(Err(error))) => {
                    let status = Status::from_error(Box::new(error));
                    // A client that takes its call back sends no more.
                    return Poll::Ready((status.code() != Code::Cancelled).then_some(Err(status)));
                }
                Poll::Ready(None) if self.prefix_len > 0 => {
                    return Poll::Ready(Some(Err(Status::internal("Unexpected EOF decoding stream."))));
                }
                Poll::Ready(None) => return Poll::Ready(None),
                Poll::Pending => return Poll::Ready(Some(Err(ready!(self.poll_late(context))))),
            };
            let Ok(data) = frame.into_data() else { continue };
            if let Err(error) = self.charge.add(data.len()) {
                return Poll::Ready(Some(Err(grpc_status(error))));
            }
            self.waiting.came(data.len());
            self.came = data;
        }
    }
}

impl<B: Body<Data = Bytes, Error = h2::Error> + Unpin> Stream for Messages<B> {
    type Item = Result<Message, Status>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.is_over {
            return Poll::Ready(None);
        }
        let message = ready!(self.poll_message(context));
        if !matches!(message, Some(Ok(_))) {
            self.is_over = true;
            self.came = Bytes::new();
            self.message = None;
            self.waiting = Waiting::Not;
            drop(self.charge.split());
        }
        Poll::Ready(message)
    }
}

/// The body of a call for `tonic`, which reserves what a prefix announces: it sees a prefix when its message is there.
pub struct Whole<B> {
    messages: Messages<B>,
    /// What follows the prefix that was given last.
    rest: Option<Bytes>,
    held: Arc<Charge>,
}

/// Messages up to this size are copied behind their prefix, which costs less than a piece of their own.
const JOINED_BYTES: usize = 4 << 10;

impl<B: Body<Data = Bytes, Error = h2::Error> + Unpin> Whole<B> {
    /// The body of `messages`, which `held` pays for.
    pub fn new(messages: Messages<B>, held: Arc<Charge>) -> Self {
        Self { messages, rest: None, held }
    }
}

impl<B: Body<Data = Bytes, Error = h2::Error> + Unpin> Body for Whole<B> {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = &mut *self;
        if let Some(rest) = this.rest.take() {
            return Poll::Ready(Some(Ok(Frame::data(rest))));
        }
        let Message { bytes, charge } = match ready!(Pin::new(&mut this.messages).poll_next(context)) {
            None => return Poll::Ready(None),
            Some(message) => message?,
        };
        this.held.join(charge);
        let len = u32::try_from(bytes.len()).expect("no message is longer than its limit");
        let is_joined = bytes.len() <= JOINED_BYTES;
        let mut part = Vec::with_capacity(PREFIX_BYTES + if is_joined { bytes.len() } else { 0 });
        part.push(0);
        part.extend_from_slice(&len.to_be_bytes());
        if is_joined {
            part.extend_from_slice(&bytes);
        } else {
            this.rest = Some(bytes);
        }
        Poll::Ready(Some(Ok(Frame::data(part.into()))))
    }
}
