//! `/sleep`, `/wake_up` and `/is_sleeping`, as in vLLM's sleep mode.

use http::StatusCode;
use percent_encoding::percent_decode_str;
use serde_json::json;
use serving::{Limit, Limits, SleepLevel};

use super::error::ApiError;
use super::fields::check;
use super::json_reply;
use crate::api::triton::http::reply::{Reply, TEXT, reply};
use crate::state::State;
use crate::transport::body::ReplyBody;

/// The parameters of a request.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Parameters {
    pub(super) model: Option<String>,
    level: Option<SleepLevel>,
}

impl Parameters {
    /// Reads those of `query` that `known` names, and refuses others.
    pub(super) fn read(query: Option<&str>, known: &[&str], limits: &Limits) -> Result<Self, ApiError> {
        let mut parameters = Self::default();
        for pair in query.unwrap_or_default().split('&').filter(|pair| !pair.is_empty()) {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            if name == "tags" {
                return Err(ApiError::of_field("tags", "`tags` is not served: a model wakes as a whole."));
            }
            match name {
                _ if !known.contains(&name) => {
                    check(limits, Limit::NameBytes, "query", name.len())?;
                    let message =
                        format!("`{name}` is not a parameter of this request; there are {}.", known.join(", "));
                    return Err(ApiError::of_field(name.to_owned(), message));
                }
                "level" => parameters.level = Some(level(value)?),
                "mode" if value != "wait" => {
                    let message = "`mode` is `wait`: requests that have begun end before the model sleeps.";
                    return Err(ApiError::of_field("mode", message));
                }
                "mode" => {}
                _ => {
                    check(limits, Limit::NameBytes, "model", value.len())?;
                    parameters.model = Some(percent_decode_str(value).decode_utf8_lossy().into_owned());
                }
            }
        }
        Ok(parameters)
    }
}

fn level(text: &str) -> Result<SleepLevel, ApiError> {
    match text {
        "1" => Ok(SleepLevel::Keep),
        "2" => Ok(SleepLevel::Drop),
        _ => Err(ApiError::of_field(
            "level",
            "`level` is 1, which keeps the weights in host memory, or 2, which reads them from the checkpoint again.",
        )),
    }
}

/// Sleeps. The reply comes when the memory is free.
pub(super) async fn sleep(state: &State, query: Option<&str>) -> Result<Reply, ApiError> {
    let parameters = Parameters::read(query, &["level", "mode", "model"], state.server.limits())?;
    state.server.sleep(parameters.model.as_deref(), parameters.level.unwrap_or(SleepLevel::Keep)).await?;
    Ok(done())
}

/// Wakes. The reply comes when requests are served.
pub(super) async fn wake(state: &State, query: Option<&str>) -> Result<Reply, ApiError> {
    let parameters = Parameters::read(query, &["model"], state.server.limits())?;
    state.server.wake(parameters.model.as_deref()).await?;
    Ok(done())
}

/// Whether the model, or any model, sleeps.
pub(super) fn is_sleeping(state: &State, query: Option<&str>) -> Result<Reply, ApiError> {
    let parameters = Parameters::read(query, &["model"], state.server.limits())?;
    let is_sleeping = state.server.is_sleeping(parameters.model.as_deref())?;
    Ok(json_reply(&json!({"is_sleeping": is_sleeping})))
}

fn done() -> Reply {
    reply(StatusCode::OK, TEXT, ReplyBody::empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_read_and_others_are_refused_by_name() {
        let read = |query| Parameters::read(Some(query), &["level", "mode", "model"], &Limits::default());
        let expected = Parameters { model: Some("a/b".into()), level: Some(SleepLevel::Drop) };
        assert_eq!(read("level=2&model=a%2Fb&mode=wait"), Ok(expected));
        assert_eq!(Parameters::read(None, &["model"], &Limits::default()), Ok(Parameters::default()));
        for (query, field) in
            [("level=3", "level"), ("level", "level"), ("mode=abort", "mode"), ("tags=weights", "tags"), ("x=1", "x")]
        {
            assert_eq!(read(query).unwrap_err().json()["error"]["param"], field);
        }
    }
}
