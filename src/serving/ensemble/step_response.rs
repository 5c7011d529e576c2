//! Waits for the responses of an ensemble's steps.

use futures::future::join_all;
use smallvec::{SmallVec, smallvec};

use crate::{Generation, InferError, InferResponse, ResponseStream};

type Item = Result<InferResponse, InferError>;

/// A step, its response, and its report where it generated text.
pub(super) type StepResult = (usize, Item, Option<Generation>);

/// Waits until each stream has a response or has ended, and returns these.
pub(super) async fn next_of_each(streams: &mut [(usize, ResponseStream)]) -> SmallVec<[Option<Item>; 1]> {
    match streams {
        [(_, stream)] => smallvec![stream.next_response().await],
        several => join_all(several.iter_mut().map(|(_, stream)| stream.next_response())).await.into(),
    }
}

/// Waits for the response of a model that is not decoupled.
pub(super) async fn step_result(step: usize, mut stream: ResponseStream) -> StepResult {
    let response = only_response(&mut stream).await;
    (step, response, stream.generation())
}

async fn only_response(stream: &mut ResponseStream) -> Item {
    let mut first: Option<InferResponse> = None;
    while let Some(response) = stream.next_response().await {
        match response {
            Err(error) => return Err(error),
            Ok(response) if first.is_none() => first = Some(response),
            Ok(response) if response.outputs.is_empty() => {}
            Ok(response) => {
                let message = format!("model '{}' is not decoupled, but sent a second response", response.model_name);
                return Err(InferError::internal(message));
            }
        }
        if first.as_ref().is_some_and(|response| response.is_final) {
            break;
        }
    }
    first.ok_or_else(|| InferError::internal("a step ended without a response"))
}
