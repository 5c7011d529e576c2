//! Limits on the contents of one request. They are checked before any work is done for the request.
//!
//! [`Limit`] lists every limit. Its table is the only place that holds a limit's name, default and description: the
//! command line, the metric `trireme_refused_requests_total` and the tests are all made from it.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::{CorrelationId, InferError, InferRequest};

/// A limit on the contents of one request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Limit {
    /// Input tensors of a request.
    Inputs,
    /// Outputs that a request names.
    Outputs,
    /// Parameters of a request, of one of its inputs or of one of its outputs.
    Parameters,
    /// Bytes of a request id.
    IdBytes,
    /// Bytes of a name: of a model, a version, a tensor, a parameter or a shared-memory region.
    NameBytes,
    /// Dimensions of one tensor.
    Dimensions,
    /// Sequences of one OpenAI request: its prompts times its choices.
    Sequences,
    /// Messages of one conversation.
    Messages,
    /// Stop words, bad words or biased words of one sequence, each list by itself.
    Words,
    /// Bytes of one stop word, bad word or biased word.
    WordBytes,
    /// Bytes of one prompt.
    PromptBytes,
    /// Bytes of logits that rank 0 keeps for all requests together.
    LogitsBytes,
}

/// One row of the table of limits.
struct Row {
    limit: Limit,
    /// Name of the flag and label of the metric.
    name: &'static str,
    default: u64,
    /// Help text of the flag.
    help: &'static str,
    /// What is counted; follows a number in error messages.
    unit: &'static str,
}

const ROWS: [Row; 12] = [
    row(Limit::Inputs, "max-request-inputs", 1024, "Most input tensors of a request", "inputs"),
    row(Limit::Outputs, "max-request-outputs", 1024, "Most outputs that a request may name", "outputs"),
    row(
        Limit::Parameters,
        "max-request-parameters",
        1024,
        "Most parameters of a request, or of one of its tensors",
        "parameters",
    ),
    row(Limit::IdBytes, "max-request-id-bytes", 64 << 10, "Most bytes of a request id", "bytes of request id"),
    row(
        Limit::NameBytes,
        "max-name-bytes",
        4096,
        "Most bytes of the name of a model, tensor, parameter or region",
        "bytes of name",
    ),
    row(Limit::Dimensions, "max-tensor-dimensions", 64, "Most dimensions of a tensor", "dimensions"),
    row(
        Limit::Sequences,
        "max-request-sequences",
        1024,
        "Most sequences of a request: its prompts times `n`",
        "sequences",
    ),
    row(Limit::Messages, "max-request-messages", 16 << 10, "Most messages of a conversation", "messages"),
    row(
        Limit::Words,
        "max-request-words",
        1024,
        "Most stop words of a sequence; as many bad words and biased words",
        "words",
    ),
    row(
        Limit::WordBytes,
        "max-word-bytes",
        4096,
        "Most bytes of a stop word, bad word or biased word",
        "bytes of one word",
    ),
    row(
        Limit::PromptBytes,
        "max-prompt-bytes",
        0,
        "Most bytes of a prompt; 0: as many as the model's longest sequence can hold",
        "bytes of prompt",
    ),
    row(
        Limit::LogitsBytes,
        "max-logits-bytes",
        4 << 30,
        "Most bytes of logits that rank 0 keeps for all requests together, in 32 bits each",
        "bytes of logits",
    ),
];

const fn row(limit: Limit, name: &'static str, default: u64, help: &'static str, unit: &'static str) -> Row {
    Row { limit, name, default, help, unit }
}

/// Requests refused since the start, by limit.
static REFUSED: [AtomicU64; ROWS.len()] = [const { AtomicU64::new(0) }; ROWS.len()];

impl Limit {
    /// Every limit, in the order of the table.
    pub fn all() -> impl Iterator<Item = Limit> {
        ROWS.iter().map(|row| row.limit)
    }

    fn row(self) -> &'static Row {
        &ROWS[self as usize]
    }

    /// Name of the flag without the leading dashes, and label of the metric.
    pub fn name(self) -> &'static str {
        self.row().name
    }

    /// The value without a flag.
    pub fn default_value(self) -> u64 {
        self.row().default
    }

    /// Help text of the flag.
    pub fn help(self) -> &'static str {
        self.row().help
    }

    /// Number of requests refused because of this limit since the process started.
    pub fn num_refused(self) -> u64 {
        REFUSED[self as usize].load(Relaxed)
    }

    /// Counts a refusal and returns its error. The request has `found`, which is more than `allowed`.
    pub fn refuse(self, found: u64, allowed: u64) -> InferError {
        REFUSED[self as usize].fetch_add(1, Relaxed);
        let Row { name, unit, .. } = self.row();
        InferError::invalid(format!("request has {found} {unit}, at most {allowed} are allowed (--{name})"))
    }

    /// Counts a refusal by a limit on all requests together and returns its error. The request has `found`, and other requests
    /// have `taken`, of the `allowed` amount.
    pub fn refuse_for_now(self, found: u64, taken: u64, allowed: u64) -> InferError {
        REFUSED[self as usize].fetch_add(1, Relaxed);
        let Row { name, unit, .. } = self.row();
        InferError::unavailable(format!(
            "request has {found} {unit} and others have {taken}, at most {allowed} are allowed together (--{name}); try again later"
        ))
    }
}

/// The values of all limits. [`Limits::default`] has the default values of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits([u64; ROWS.len()]);

impl Default for Limits {
    fn default() -> Self {
        Self(std::array::from_fn(|index| ROWS[index].default))
    }
}

impl Limits {
    /// The value of `limit`.
    pub fn get(&self, limit: Limit) -> u64 {
        self.0[limit as usize]
    }

    /// Sets `limit` to `value`.
    pub fn set(&mut self, limit: Limit, value: u64) {
        self.0[limit as usize] = value;
    }

    /// Compares `found` with `limit`, in constant time and without allocation.
    ///
    /// # Errors
    /// `InvalidArgument`, with both numbers and the flag, when `found` is more than allowed. The refusal is counted.
    pub fn check(&self, limit: Limit, found: usize) -> Result<(), InferError> {
        let allowed = self.get(limit);
        if found as u64 > allowed { Err(limit.refuse(found as u64, allowed)) } else { Ok(()) }
    }
}

impl Limits {
    /// Checks every part of `request` that has a limit in all protocols. It is called before any other check, and its time is
    /// proportional to the number of parts.
    ///
    /// # Errors
    /// `InvalidArgument` for the first part above its limit.
    pub(crate) fn check_request(&self, request: &InferRequest) -> Result<(), InferError> {
        self.check(Limit::IdBytes, request.id.len())?;
        if let CorrelationId::Text(id) = &request.correlation_id {
            self.check(Limit::IdBytes, id.len())?;
        }
        self.check(Limit::NameBytes, request.model_name.len().max(request.model_version.len()))?;
        self.check(Limit::Inputs, request.inputs.len())?;
        self.check(Limit::Outputs, request.requested_outputs.len())?;
        self.check(Limit::Parameters, request.parameters.len())?;
        for tensor in &request.inputs {
            self.check(Limit::NameBytes, tensor.name.len())?;
            self.check(Limit::Dimensions, tensor.shape.len())?;
        }
        request.requested_outputs.iter().try_for_each(|name| self.check(Limit::NameBytes, name.len()))?;
        request.parameters.keys().try_for_each(|name| self.check(Limit::NameBytes, name.len()))
    }
}

/// A limit that all requests share. `front` sets and checks it; this module only counts the refusals.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SharedLimit {
    /// Memory that all requests in flight hold together.
    BytesInFlight,
    /// The rate at which a body must arrive.
    BodyProgress,
    /// gRPC calls that are open at the same time.
    GrpcStreams,
    /// Web pages that may use the HTTP port.
    Origins,
}

const SHARED: [(SharedLimit, &str); 4] = [
    (SharedLimit::BytesInFlight, "max-bytes-in-flight"),
    (SharedLimit::BodyProgress, "body-progress"),
    (SharedLimit::GrpcStreams, "grpc-max-streams"),
    (SharedLimit::Origins, "http-allowed-origins"),
];

static SHARED_REFUSED: [AtomicU64; SHARED.len()] = [const { AtomicU64::new(0) }; SHARED.len()];

impl SharedLimit {
    /// Every shared limit, in the order of the table.
    pub fn all() -> impl Iterator<Item = SharedLimit> {
        SHARED.iter().map(|(shared, _)| *shared)
    }

    /// Label of the metric.
    pub fn name(self) -> &'static str {
        SHARED[self as usize].1
    }

    /// Number of requests refused because of this limit since the process started.
    pub fn num_refused(self) -> u64 {
        SHARED_REFUSED[self as usize].load(Relaxed)
    }

    /// Counts a refusal.
    pub fn count_refusal(self) {
        SHARED_REFUSED[self as usize].fetch_add(1, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_in_the_order_of_their_table() {
        assert!(Limit::all().enumerate().all(|(index, limit)| limit as usize == index));
        assert!(SharedLimit::all().enumerate().all(|(index, shared)| shared as usize == index));
    }

    #[test]
    fn one_more_than_allowed_is_refused_and_counted() {
        let mut limits = Limits::default();
        limits.set(Limit::Messages, 3);
        let before = Limit::Messages.num_refused();
        assert_eq!(limits.check(Limit::Messages, 3), Ok(()));
        let error = limits.check(Limit::Messages, 4).unwrap_err();
        assert_eq!(error.message, "request has 4 messages, at most 3 are allowed (--max-request-messages)");
        assert_eq!(Limit::Messages.num_refused(), before + 1);
    }

    #[test]
    fn every_part_of_a_request_is_checked() {
        let long = || crate::Name::from(&"a".repeat(5000));
        let request = InferRequest::default;
        let tensor = |name: crate::Name, dims: usize| crate::Tensor {
            shape: std::iter::repeat_n(1, dims).collect(),
            name,
            ..crate::Tensor::from_i32("", &[1], &[1])
        };
        let many = |count: usize| (0..count).map(|index| index.to_string());
        let cases = [
            ("--max-request-id-bytes", InferRequest { id: crate::Name::from(&"a".repeat(70_000)), ..request() }),
            (
                "--max-request-id-bytes",
                InferRequest { correlation_id: CorrelationId::Text("a".repeat(70_000)), ..request() },
            ),
            ("--max-name-bytes", InferRequest { model_name: long(), ..request() }),
            ("--max-name-bytes", InferRequest { model_version: long(), ..request() }),
            ("--max-name-bytes", InferRequest { inputs: vec![tensor(long(), 1)], ..request() }),
            ("--max-tensor-dimensions", InferRequest { inputs: vec![tensor("a".into(), 65)], ..request() }),
            ("--max-request-inputs", InferRequest { inputs: vec![tensor("a".into(), 1); 1025], ..request() }),
            ("--max-request-outputs", InferRequest { requested_outputs: vec!["a".into(); 1025], ..request() }),
            ("--max-name-bytes", InferRequest { requested_outputs: vec![long()], ..request() }),
            (
                "--max-request-parameters",
                InferRequest {
                    parameters: many(1025).map(|name| (name, crate::Parameter::Int(1))).collect(),
                    ..request()
                },
            ),
        ];
        for (flag, request) in cases {
            let error = Limits::default().check_request(&request).unwrap_err();
            assert!(error.message.contains(flag) && error.message.len() < 200, "{flag}: {}", error.message);
        }
        let full = InferRequest { inputs: vec![tensor("a".into(), 64); 1024], ..request() };
        assert_eq!(Limits::default().check_request(&full), Ok(()));
    }
}
