//! Reading and decompressing a request's body within the limits and the memory budget.

use bytes::Bytes;
use http::header::{CONTENT_ENCODING, HeaderMap, HeaderName};
use hyper::body::Incoming;
use serving::InferError;

use crate::state::State;
use crate::telemetry::recording::note_body;
use crate::transport::body::read_all;
use crate::transport::budget::Charge;
use crate::transport::content_coding::Coding;
use crate::transport::large_work::block_in_place_in_turn;

/// A request's body and its charge, which is to be kept until the request is answered.
pub(crate) struct ChargedBody {
    pub(crate) bytes: Bytes,
    pub(crate) charge: Charge,
}

/// Reads a body and decompresses it.
pub(crate) async fn read_body(state: &State, headers: &HeaderMap, body: Incoming) -> Result<ChargedBody, InferError> {
    read_coded(state, content_coding(headers)?, body).await
}

/// The coding of a request's body.
pub(crate) fn content_coding(headers: &HeaderMap) -> Result<Option<Coding>, InferError> {
    header(headers, &CONTENT_ENCODING).map_or(Ok(None), Coding::of_content)
}

/// Expected ratio of decompressed to compressed length, for the estimate of the work.
const EXPECTED_RATIO: usize = 100;

/// Reads a body in `coding` and decompresses it.
pub(crate) async fn read_coded(
    state: &State,
    coding: Option<Coding>,
    body: Incoming,
) -> Result<ChargedBody, InferError> {
    let limit = state.config.max_http_body_bytes;
    let charge = state.budget.charge();
    let mut bytes = read_all(body, limit, &charge).await?;
    if let Some(coding) = coding {
        let expected_len = bytes.len().saturating_mul(EXPECTED_RATIO).min(limit);
        bytes = block_in_place_in_turn(expected_len, || coding.decode(&bytes, limit, &charge))
            .await
            .map_err(InferError::from)?;
    }
    note_body(&bytes);
    Ok(ChargedBody { bytes, charge })
}

/// The value of a header; `?` if it is not text.
pub(crate) fn header<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Option<&'a str> {
    headers.get(name).map(|value| value.to_str().unwrap_or("?"))
}
