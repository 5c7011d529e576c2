//! Reading a request's body: whole, unpacked, within the limits and charged to the budget.

use bytes::Bytes;
use http::header::{CONTENT_ENCODING, HeaderMap, HeaderName};
use hyper::body::Incoming;
use serving::InferError;

use crate::state::State;
use crate::transport::body::read_all;
use crate::transport::budget::Charge;
use crate::transport::content_coding::Coding;
use crate::transport::large_work::block_in_place_in_turn;

/// A request's body, and what it holds of the budget for as long as the request is not answered.
pub(crate) struct Held {
    pub(crate) bytes: Bytes,
    pub(crate) charge: Charge,
}

/// The body, unpacked.
pub(crate) async fn read_body(state: &State, headers: &HeaderMap, body: Incoming) -> Result<Held, InferError> {
    read_coded(state, content_coding(headers)?, body).await
}

pub(crate) fn content_coding(headers: &HeaderMap) -> Result<Option<Coding>, InferError> {
    header(headers, &CONTENT_ENCODING).map_or(Ok(None), Coding::of_content)
}

/// How many times its length a packed body may well have.
const UNPACKING: usize = 100;

pub(crate) async fn read_coded(state: &State, coding: Option<Coding>, body: Incoming) -> Result<Held, InferError> {
    let limit = state.config.max_http_body_bytes;
    let charge = state.budget.charge();
    let mut bytes = read_all(body, limit, &charge).await?;
    if let Some(coding) = coding {
        let unpacked_len = bytes.len().saturating_mul(UNPACKING).min(limit);
        bytes = block_in_place_in_turn(unpacked_len, || coding.decode(&bytes, limit, &charge))
            .await
            .map_err(InferError::from)?;
    }
    Ok(Held { bytes, charge })
}

pub(crate) fn header<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Option<&'a str> {
    headers.get(name).map(|value| value.to_str().unwrap_or("?"))
}
