//! The lines of a recording. `docs/replay.md` describes them.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// Version of the format. Another version cannot be read.
pub const VERSION: u32 = 1;

/// Start of the paths of requests over gRPC.
pub const GRPC_SERVICE: &str = "/inference.GRPCInferenceService/";

/// How much of requests and replies is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Contents {
    /// Bodies of requests and replies
    #[default]
    Bodies,
    /// Bodies of requests in which every letter of a text is an `x`; of replies the lengths
    Redacted,
    /// Ids, lengths and times
    Ids,
}

/// The first line.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Head {
    /// [`VERSION`].
    pub trireme_recording: u32,
    /// Version of the server.
    pub program: String,
    /// Time when the window began, in milliseconds since 1970.
    pub started_unix_ms: u64,
    /// How much is kept.
    pub contents: Contents,
}

/// One of the other lines.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Entry {
    /// A request that has been answered.
    Request(Request),
    /// A step of a language model.
    Step(Step),
    /// The last line.
    End(End),
}

/// A request and its reply.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Request {
    /// Number in the order of arrival, from 0.
    pub id: u64,
    /// Arrival, in microseconds since the window began.
    pub at_us: u64,
    /// Path with the query; over gRPC [`GRPC_SERVICE`] and the name of the call.
    pub path: String,
    /// The client's name of the request (`x-request-id`, over gRPC the message's `id`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request_id: Option<String>,
    /// `content-type`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub content_type: Option<String>,
    /// `inference-header-content-length`: bytes of JSON before binary data.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub json_bytes: Option<u64>,
    /// Length of the body, decompressed.
    pub body_bytes: u64,
    /// The body; over gRPC the message.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub body: Option<Body>,
    /// HTTP status; over gRPC its code, which is 0 for a request that was answered.
    pub status: u16,
    /// Time from the arrival to the first part of the reply's body, in microseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub first_us: Option<u64>,
    /// Time from the arrival to the end of the reply, in microseconds.
    pub last_us: u64,
    /// Parts of the reply's body: events or messages of a stream.
    pub pieces: u64,
    /// Length of the reply's body.
    pub reply_bytes: u64,
    /// The reply's body; over gRPC its messages, each after its prefix of five bytes, or the text of the error.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reply: Option<Body>,
    /// False if the client left before the end.
    pub is_whole: bool,
}

impl Request {
    /// Whether the request came over gRPC.
    pub fn is_grpc(&self) -> bool {
        self.path.starts_with(GRPC_SERVICE)
    }
}

/// Bytes as text, or in base64.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Body {
    /// UTF-8.
    Text(String),
    /// Other bytes.
    Base64(String),
}

impl Body {
    pub(crate) fn of(bytes: &[u8]) -> Self {
        match std::str::from_utf8(bytes) {
            Ok(text) => Self::Text(text.to_owned()),
            Err(_) => Self::Base64(STANDARD.encode(bytes)),
        }
    }

    /// The bytes; `None` if the base64 is broken.
    pub fn bytes(&self) -> Option<Bytes> {
        match self {
            Body::Text(text) => Some(Bytes::copy_from_slice(text.as_bytes())),
            Body::Base64(text) => STANDARD.decode(text).ok().map(Bytes::from),
        }
    }
}

/// A step of a language model. Times are in microseconds.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Step {
    /// The model.
    pub model: String,
    /// Its replica.
    pub replica: u32,
    /// Number of the step.
    pub step: u64,
    /// Time since the window began when planning began.
    pub at_us: u64,
    /// Duration of planning.
    pub plan_us: u64,
    /// Duration of sending the plan to the workers.
    pub send_us: u64,
    /// From then until the output arrived. A step that is sent while another runs waits for that one, too.
    pub wait_us: u64,
    /// Duration of settling the output.
    pub settle_us: u64,
    /// Duration of passing tokens to requests.
    pub deliver_us: u64,
    /// Sequences that joined: row, length of the prompt with tokens generated before, and positions taken from the prefix cache.
    pub joined: Vec<[u32; 3]>,
    /// Rows that left.
    pub left: Vec<u32>,
    /// The rows of the step: row, first position, number of tokens.
    pub rows: Vec<[u32; 3]>,
}

/// The last line. A recording without it was cut off.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct End {
    /// `window`, `bytes`, `stopped` (with the server) or `failed` (a file could not be written).
    pub reason: String,
    /// Requests that were not kept because the queue was full.
    pub dropped_requests: u64,
    /// Steps that were not kept because the queue was full.
    pub dropped_steps: u64,
}
