//! `POST /reset_prefix_cache`, as in vLLM.

use http::StatusCode;

use super::error::ApiError;
use crate::api::triton::http::reply::{Reply, TEXT, reply};
use crate::state::State;

/// Empties the prefix cache of the model that `?model=` names, or those of all models.
pub(super) async fn reset(state: &State, query: Option<&str>) -> Result<Reply, ApiError> {
    let model = query.into_iter().flat_map(|query| query.split('&')).find_map(|pair| pair.strip_prefix("model="));
    state.server.reset_prefix_cache(model).await?;
    tracing::info!(model, "the prefix cache was reset");
    Ok(reply(StatusCode::OK, TEXT, Vec::new()))
}
