//! Requests and responses, in the form that all protocols and backends share.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::ensemble_step::EnsembleStep;
use crate::{ClientMemory, InferError, Name, Tensor, Trace};

/// A free-form request or response parameter.
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs)] // The protocol's own choices.
pub enum Parameter {
    Bool(bool),
    Int(i64),
    Double(f64),
    String(String),
}

/// The correlation id of a stateful sequence of requests.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum CorrelationId {
    /// A number; 0 means none.
    Number(u64),
    /// A string; empty means none.
    Text(String),
}

impl Default for CorrelationId {
    fn default() -> Self {
        CorrelationId::Number(0)
    }
}

/// A client's request to one model.
#[derive(Debug, Clone, Default)]
pub struct InferRequest {
    /// Model name.
    pub model_name: Name,
    /// Version, empty for the latest that the version policy serves.
    pub model_version: Name,
    /// The client's id, echoed in every response; may be empty.
    pub id: Name,
    /// Parameters that are not reserved by the protocol.
    pub parameters: BTreeMap<String, Parameter>,
    /// Input tensors.
    pub inputs: Vec<Tensor>,
    /// Names of the requested outputs; empty requests all.
    pub requested_outputs: Vec<Name>,
    /// Priority level, 0 for the model's default.
    pub priority: u64,
    /// How long the request may wait in a queue, in microseconds; 0 for the model's default.
    pub timeout_us: u64,
    /// The stateful sequence that this request belongs to.
    pub correlation_id: CorrelationId,
    /// Whether this is the first request of its sequence.
    pub sequence_start: bool,
    /// Whether this is the last request of its sequence.
    pub sequence_end: bool,
    /// Tensors that are in the client's shared memory.
    pub client_memory: ClientMemory,
    /// For a step of an ensemble: the state that the step keeps as long as the ensemble's request runs.
    pub step: Option<EnsembleStep>,
    /// The request's trace, where it is traced.
    pub trace: Option<Trace>,
}

impl InferRequest {
    /// The input called `name`.
    pub fn input(&self, name: &str) -> Option<&Tensor> {
        self.inputs.iter().find(|tensor| tensor.name == name)
    }

    /// Whether the client wants the output called `name`. A request without requested outputs wants all.
    pub fn wants_output(&self, name: &str) -> bool {
        self.requested_outputs.is_empty() || self.requested_outputs.iter().any(|requested| *requested == name)
    }

    /// Copies all inputs from the client's memory, for a backend that does not read it.
    ///
    /// # Errors
    /// When the memory has shrunk, or the budget has no room.
    pub fn fetch_client_memory(&mut self) -> Result<(), InferError> {
        self.client_memory.fetch_all(&mut self.inputs)
    }

    /// Copies those inputs that overlap outputs, because a model may read an input after it has written an output.
    ///
    /// # Errors
    /// When the memory has shrunk, or the budget has no room.
    pub fn fetch_overwritten_inputs(&mut self) -> Result<(), InferError> {
        self.client_memory.fetch_overwritten(&mut self.inputs)
    }
}

/// One response of a model.
#[derive(Debug, Clone, Default)]
pub struct InferResponse {
    /// Model name.
    pub model_name: Name,
    /// The model version of the response.
    pub model_version: Name,
    /// The request's id.
    pub id: Name,
    /// Parameters, in the order in which they are sent.
    pub parameters: Arc<[(Name, Parameter)]>,
    /// Output tensors; none in an empty final response.
    pub outputs: Vec<Tensor>,
    /// Whether this is the last response of its request.
    pub is_final: bool,
    /// Whether a [`crate::StreamItem::Delta`] may follow.
    pub allows_delta: bool,
}
