//! Reading the response of a model that answers each request exactly once.

use serving::{InferError, InferResponse, ResponseStream};

/// Reads the single response of a model that is not decoupled.
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
            return Err(broken_contract(model, "answered more than once and is not decoupled"));
        }
        is_over = next.is_final;
    }
    Ok(response)
}

/// The error of a model that violates the contract of its transaction policy.
pub fn broken_contract(model: &str, what: &str) -> InferError {
    InferError::internal(format!("model '{model}' {what}"))
}
