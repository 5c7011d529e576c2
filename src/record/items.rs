//! The queue between a recorder and the thread that writes.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use bytes::Bytes;

use crate::End;

/// What the recorder and its writer share.
#[derive(Debug, Default)]
pub(crate) struct Shared {
    /// Arrival of the first request.
    pub(crate) began: OnceLock<Instant>,
    pub(crate) is_over: AtomicBool,
    pub(crate) held_bytes: AtomicU64,
    pub(crate) dropped_requests: AtomicU64,
    pub(crate) dropped_steps: AtomicU64,
}

impl Shared {
    /// Nothing more is taken.
    pub(crate) fn end(&self) {
        self.is_over.store(true, Relaxed);
    }

    /// The last line of a recording that ends for `reason`.
    pub(crate) fn end_line(&self, reason: &str) -> End {
        End {
            reason: reason.to_owned(),
            dropped_requests: self.dropped_requests.load(Relaxed),
            dropped_steps: self.dropped_steps.load(Relaxed),
        }
    }

    pub(crate) fn release(&self, bytes: u64) {
        self.held_bytes.fetch_sub(bytes, Relaxed);
    }
}

/// Number and time of a request's arrival.
#[derive(Debug, Clone, Copy)]
pub struct Arrival {
    pub(crate) id: u64,
    pub(crate) at: Instant,
}

/// Gives a body without its texts, or `None` if it cannot be kept.
pub type Redact = fn(&[u8]) -> Option<Vec<u8>>;

/// An answered request.
#[derive(Debug, Clone)]
#[allow(missing_docs)] // As in `Request`.
pub struct RequestItem {
    pub arrival: Arrival,
    pub path: String,
    pub request_id: Option<String>,
    pub content_type: Option<String>,
    pub json_bytes: Option<u64>,
    pub body: Bytes,
    /// For bodies that are no JSON.
    pub redact: Option<Redact>,
    pub status: u16,
    /// Time of the first part of the reply's body.
    pub first: Option<Instant>,
    /// Time of the end of the reply.
    pub last: Instant,
    /// The first parts of the reply's body.
    pub reply: Vec<Bytes>,
    /// Number of all parts.
    pub pieces: u64,
    /// Length of all parts; more than those of `reply` if the reply was too long to be kept.
    pub reply_bytes: u64,
    pub is_whole: bool,
    /// Bytes that [`crate::Recorder::hold`] has granted to it, for its reply.
    pub held_bytes: u64,
}

impl RequestItem {
    /// A request without a reply so far.
    pub fn new(arrival: Arrival) -> Self {
        Self {
            arrival,
            path: String::new(),
            request_id: None,
            content_type: None,
            json_bytes: None,
            body: Bytes::new(),
            redact: None,
            status: 0,
            first: None,
            last: arrival.at,
            reply: Vec::new(),
            pieces: 0,
            reply_bytes: 0,
            is_whole: false,
            held_bytes: 0,
        }
    }
}

/// A step that has been settled.
#[derive(Debug, Clone)]
#[allow(missing_docs)] // As in `Step`.
pub struct StepItem {
    pub model: Arc<str>,
    pub replica: u32,
    pub step: u64,
    /// When planning began and ended, the plan was sent, the output arrived, was settled, and was delivered.
    pub times: [Instant; 6],
    pub joined: Vec<[u32; 3]>,
    pub left: Vec<u32>,
    pub rows: Vec<[u32; 3]>,
}

/// What the recorder sends to its writer.
pub(crate) enum Item {
    Request(Box<RequestItem>),
    Step(Box<StepItem>),
    Finish,
}
