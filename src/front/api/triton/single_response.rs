//! Reading the response of a model that answers a request exactly once.

use generation::input_names::STREAM;
use serving::{InferError, InferRequest, InferResponse, ResponseStream, Server};

/// How often a model answers a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transactions {
    /// Exactly once.
    One,
    /// A decoupled model that generates text natively: once, unless the request asks for a stream. Triton refuses each request
    /// to a decoupled model, but clients of text models send them.
    OneUnlessStreamed,
    /// Any number of times.
    Decoupled,
}

impl Transactions {
    /// Those of a model.
    ///
    /// # Errors
    /// When the model does not serve.
    pub fn of(server: &Server, model: &str, version: &str) -> Result<Self, InferError> {
        Ok(match server.is_decoupled(model, version)? {
            false => Self::One,
            true if server.generator(model, version)?.is_some() => Self::OneUnlessStreamed,
            true => Self::Decoupled,
        })
    }

    /// Whether the model may answer this request more than once.
    pub fn may_answer_more_than_once(self, request: &InferRequest) -> bool {
        match self {
            Self::One => false,
            Self::OneUnlessStreamed => STREAM.iter().any(|name| is_set(request, name)),
            Self::Decoupled => true,
        }
    }
}

/// Whether a flag is present and not false. A flag in shared memory is not read here, so it counts as set.
fn is_set(request: &InferRequest, name: &str) -> bool {
    let is_false = |flag: &serving::Tensor| !flag.data.is_empty() && flag.data.iter().all(|byte| *byte == 0);
    request.input(name).is_some_and(|flag| request.client_memory.input(name).is_some() || !is_false(flag))
}

/// Reads the single response to a request.
///
/// # Errors
/// When the model returns an error, no response, or several responses.
pub async fn single_response(model: &str, mut responses: ResponseStream) -> Result<InferResponse, InferError> {
    let no_response = || broken_contract(model, "ended without a response");
    let response = responses.next_response().await.ok_or_else(no_response)??;
    let mut is_over = response.is_final;
    while !is_over {
        let Some(next) = responses.next_response().await else { break };
        let next = next?;
        if !next.outputs.is_empty() {
            return Err(broken_contract(model, "answered more than once, but the request is for one response"));
        }
        is_over = next.is_final;
    }
    Ok(response)
}

/// The error of a model that violates the contract of its transaction policy.
pub fn broken_contract(model: &str, what: &str) -> InferError {
    InferError::internal(format!("model '{model}' {what}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serving::Tensor;

    #[test]
    fn only_requests_without_a_stream_are_answered_once() {
        let with = |flags: &[(&str, bool)]| {
            let inputs = flags.iter().map(|&(name, flag)| Tensor::from_bool(name, &[1, 1], &[flag])).collect();
            Transactions::OneUnlessStreamed
                .may_answer_more_than_once(&InferRequest { inputs, ..InferRequest::default() })
        };
        assert!(!with(&[]) && !with(&[("stream", false)]) && !with(&[("other", true)]));
        assert!(with(&[("stream", true)]) && with(&[("streaming", true)]));
    }
}
