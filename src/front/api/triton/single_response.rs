//! Reading the response of a model that answers each request exactly once.

use serving::{InferError, InferResponse, ResponseStream};

/// The one response of a model that is not decoupled.
///
/// # Errors
/// The model's own, or that it did not answer exactly once.
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

/// The model answered in a way that its kind cannot.
pub fn broken_contract(model: &str, what: &str) -> InferError {
    InferError::internal(format!("model '{model}' {what}"))
}
