//! Reassembles the messages of a gRPC call. Memory is allocated as bytes arrive, not for the announced length.

use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, ready};

use bytes::{Buf as _, Bytes};
use futures::Stream;
use hyper::body::{Body, Frame};
use tonic::{Code, Status};

use crate::api::status::grpc_status;
use crate::api::triton::grpc::paths;
use crate::api::triton::grpc::scan::{Kind, ScanError, scan};
use crate::state::State;
use crate::transport::budget::{ArrivalWatch, Charge};
use crate::transport::content_coding::{Coding, DecodeError};
use crate::transport::large_work::block_in_place_if_large;

/// Maximum message of calls that take a few names and settings.
pub const SMALL_MESSAGE_BYTES: usize = 64 << 10;
/// Compression flag and length before a message.
const PREFIX_BYTES: usize = 5;
/// The first allocation for a message.
const FIRST_BYTES: usize = 64 << 10;
/// Decoded messages that take no more than this in addition to their bytes are not charged for it.
const UNCHARGED_BYTES: usize = 4 << 10;

/// The kind of messages of the call at `path`.
pub fn kind_of(path: &str) -> Kind {
    match path {
        paths::MODEL_INFER | paths::MODEL_STREAM_INFER => Kind::Infer,
        paths::MODEL_LOAD => Kind::Load,
        _ => Kind::Small,
    }
}

/// Whether the call at `path` may stay open without a message in progress.
fn may_be_idle(path: &str) -> bool {
    path == paths::MODEL_STREAM_INFER || path.ends_with("/ServerReflectionInfo")
}

/// The messages of one call.
pub struct Messages<B> {
    state: Arc<State>,
    body: B,
    kind: Kind,
    limit: usize,
    /// The coding of messages with the compression flag.
    coding: Option<Coding>,
    may_be_idle: bool,
    /// Received bytes that were not processed.
    unread: Bytes,
    prefix: [u8; PREFIX_BYTES],
    prefix_len: usize,
    /// The incomplete message after its prefix.
    message: Option<PartialMessage>,
    /// The charge of the received bytes.
    charge: Charge,
    watch: ArrivalWatch,
    is_over: bool,
}

/// The status of a message that cannot be decoded.
pub fn not_decoded(why: &str) -> Status {
    Status::internal(format!("Unable to parse request: {why}"))
}

/// An incomplete message.
struct PartialMessage {
    is_compressed: bool,
    len: usize,
    bytes: Vec<u8>,
}

/// Moves bytes from `unread` to the incomplete message `bytes` of length `len`. The allocation is at most twice the received bytes,
/// or [`FIRST_BYTES`].
fn take(bytes: &mut Vec<u8>, len: usize, unread: &mut Bytes) {
    let count = unread.len().min(len - bytes.len());
    let needed = bytes.len() + count;
    if needed > bytes.capacity() {
        let capacity = (2 * needed).max(FIRST_BYTES).min(len);
        bytes.reserve_exact(capacity - bytes.len());
    }
    bytes.extend_from_slice(&unread[..count]);
    unread.advance(count);
}

/// A decompressed message and its charge.
pub struct Message {
    /// The message without its prefix.
    pub bytes: Bytes,
    /// The charge of the message and its decoded form, until the request is answered.
    pub charge: Charge,
}

impl<B: Body<Data = Bytes, Error = h2::Error> + Unpin> Messages<B> {
    /// The messages of the call at `path`; those with the compression flag are in `coding`.
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
            may_be_idle: may_be_idle(path),
            unread: Bytes::new(),
            prefix: [0; PREFIX_BYTES],
            prefix_len: 0,
            message: None,
            watch: ArrivalWatch::Idle,
            is_over: false,
            state,
        }
    }

    /// The next message if it is complete.
    fn next_complete(&mut self) -> Result<Option<Message>, Status> {
        if self.message.is_none() {
            let count = self.unread.len().min(PREFIX_BYTES - self.prefix_len);
            self.prefix[self.prefix_len..][..count].copy_from_slice(&self.unread[..count]);
            self.unread.advance(count);
            self.prefix_len += count;
            if self.prefix_len < PREFIX_BYTES {
                return Ok(None);
            }
            self.message = Some(self.begin()?);
        }
        let Some(PartialMessage { is_compressed, len, mut bytes }) = self.message.take() else { return Ok(None) };
        let bytes = if bytes.is_empty() && self.unread.len() >= len {
            self.unread.split_to(len) // Most messages arrive in one frame and are not copied.
        } else {
            take(&mut bytes, len, &mut self.unread);
            if bytes.len() < len {
                self.message = Some(PartialMessage { is_compressed, len, bytes });
                return Ok(None);
            }
            bytes.into()
        };
        self.prefix_len = 0;
        self.watch = ArrivalWatch::Idle;
        let charge = self.charge.split_off(PREFIX_BYTES + len);
        let bytes = block_in_place_if_large(len, || self.finish(is_compressed, bytes, &charge))?;
        Ok(Some(Message { bytes, charge }))
    }

    fn begin(&self) -> Result<PartialMessage, Status> {
        let [flag, len @ ..] = self.prefix;
        let is_compressed = match flag {
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
        Ok(PartialMessage { is_compressed, len, bytes: Vec::new() })
    }

    /// Decompresses a message, checks its content against the limits, and charges its decoded form.
    fn finish(&self, is_compressed: bool, bytes: Bytes, charge: &Charge) -> Result<Bytes, Status> {
        let coding = self.coding.filter(|_| is_compressed);
        let bytes = match coding {
            // A few bytes can decompress to gigabytes, therefore the smaller limit of HTTP applies.
            Some(coding) => {
                let limit = self.limit.min(self.state.config.max_http_body_bytes);
                coding.decode(&bytes, limit, charge).map_err(|why| match why {
                    DecodeError::Malformed(_, error) => {
                        Status::internal(format!("Error decompressing: {error}, while sending request"))
                    }
                    DecodeError::TooLarge(limit) => Status::resource_exhausted(format!(
                        "Error decompressing: size limit, of {limit} bytes, exceeded while decompressing message"
                    )),
                    DecodeError::OverBudget(error) => grpc_status(error),
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

    /// Without new data: ready with the error of a message that is overdue.
    fn poll_late(&mut self, context: &mut Context<'_>) -> Poll<Status> {
        if self.may_be_idle && self.prefix_len == 0 {
            return Poll::Pending;
        }
        if self.may_be_idle {
            self.watch.watch(&self.charge); // A stream is polled only after a wake-up.
        }
        self.watch.poll_late(&self.charge, context).map(grpc_status)
    }

    fn poll_message(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Message, Status>>> {
        loop {
            match self.next_complete() {
                Ok(None) => {}
                Ok(Some(message)) => return Poll::Ready(Some(Ok(message))),
                Err(status) => return Poll::Ready(Some(Err(status))),
            }
            let frame = match Pin::new(&mut self.body).poll_frame(context) {
                Poll::Ready(Some(Ok(frame))) => frame,
                Poll::Ready(Some(Err(error))) => {
                    let status = Status::from_error(Box::new(error));
                    // A cancelled call has no further messages.
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
            self.watch.received(data.len());
            self.unread = data;
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
            self.unread = Bytes::new();
            self.message = None;
            self.watch = ArrivalWatch::Idle;
            drop(self.charge.split());
        }
        Poll::Ready(message)
    }
}

/// The body of a call for `tonic`, which allocates the announced length. Therefore it contains complete messages only.
pub struct CompleteMessages<B> {
    messages: Messages<B>,
    /// The message after a prefix that was returned alone.
    rest: Option<Bytes>,
    charge: Arc<Charge>,
    kept: Option<KeptMessage>,
}

/// The first message of a call, which a recording keeps.
#[derive(Debug, Clone, Default)]
pub struct KeptMessage(Arc<OnceLock<Bytes>>);

impl KeptMessage {
    /// The message without its prefix, once it is complete.
    pub fn get(&self) -> Option<&Bytes> {
        self.0.get()
    }
}

/// Messages up to this size are copied behind their prefix, which is faster than a frame of their own.
const JOINED_BYTES: usize = 4 << 10;

impl<B: Body<Data = Bytes, Error = h2::Error> + Unpin> CompleteMessages<B> {
    /// The body of `messages`, whose charges are added to `charge`. The first message is put into `kept`, too.
    pub fn new(messages: Messages<B>, charge: Arc<Charge>, kept: Option<KeptMessage>) -> Self {
        Self { messages, rest: None, charge, kept }
    }
}

impl<B: Body<Data = Bytes, Error = h2::Error> + Unpin> Body for CompleteMessages<B> {
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
        this.charge.join(charge);
        if let Some(KeptMessage(kept)) = &this.kept {
            let _ = kept.set(bytes.clone()); // Set before in a call with several messages, which is an error.
        }
        let len = u32::try_from(bytes.len()).expect("messages are limited to 2 GiB");
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
