//! Which requests are sent again, and errors in the form of their protocol.

use bytes::Bytes;
use http::header::RETRY_AFTER;
use http::{Method, StatusCode};
use serde_json::{Value, json};

use crate::api::openai::endpoint::Endpoint;
use crate::api::request_effect::Effect;
use crate::api::status::RETRY_AFTER_SECS;
use crate::api::triton::http::reply::{JSON, Reply, reply};
use crate::api::triton::http::route::Route;

/// What happens to a request when rank 0 dies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Handling {
    /// It asks for health or metrics, and is answered at once.
    Probe,
    /// It is sent again.
    Repeat,
    /// It may have changed the state of the server, so it is not sent again once rank 0 has it.
    Once,
}

/// The protocol of a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Protocol {
    OpenAi,
    Anthropic,
    Triton,
}

impl Handling {
    /// The handling of a request on the HTTP port.
    pub(crate) fn of(method: &Method, path: &str) -> Self {
        let effect = match (Endpoint::of(path), Route::of(path.trim_end_matches('/'))) {
            (Some(endpoint), _) => endpoint.effect(),
            (None, Some(route)) => route.effect(),
            (None, None) if path == "/metrics" => Effect::Probe,
            (None, None) => Effect::Changes,
        };
        match *method {
            Method::GET | Method::HEAD | Method::OPTIONS if effect == Effect::Probe => Self::Probe,
            Method::GET | Method::HEAD | Method::OPTIONS => Self::Repeat,
            Method::POST if matches!(effect, Effect::Generates | Effect::Reads) => Self::Repeat,
            _ => Self::Once,
        }
    }
}

impl Protocol {
    /// The protocol of a path of the HTTP port.
    pub(crate) fn of(path: &str) -> Self {
        match path {
            _ if path.starts_with("/v1/messages") => Self::Anthropic,
            _ if path.starts_with("/v1/") => Self::OpenAi,
            _ => Self::Triton,
        }
    }

    fn error(self, status: StatusCode, message: &str) -> Value {
        let (openai, anthropic) = match status.is_client_error() {
            true => ("invalid_request_error", "invalid_request_error"),
            false => ("server_error", "overloaded_error"),
        };
        match self {
            Self::OpenAi => {
                json!({"error": {"message": message, "type": openai, "param": null, "code": status.as_u16()}})
            }
            Self::Anthropic => json!({"type": "error", "error": {"type": anthropic, "message": message}}),
            Self::Triton => json!({"error": message}),
        }
    }

    /// The answer to a request that is refused.
    pub(crate) fn refused(self, status: StatusCode, message: &str) -> Reply {
        reply(status, JSON, self.error(status, message).to_string().into_bytes())
    }

    /// The answer to a request that rank 0 cannot answer.
    pub(crate) fn unavailable(self, message: &str) -> Reply {
        let mut refused = self.refused(StatusCode::SERVICE_UNAVAILABLE, message);
        refused.headers_mut().insert(RETRY_AFTER, RETRY_AFTER_SECS.into());
        refused
    }

    /// The last events of a stream that cannot go on.
    pub(crate) fn last_events(self, message: &str) -> Bytes {
        let error = self.error(StatusCode::SERVICE_UNAVAILABLE, message);
        match self {
            Self::OpenAi => format!("data: {error}\n\ndata: [DONE]\n\n").into(),
            Self::Anthropic => format!("event: error\ndata: {error}\n\n").into(),
            Self::Triton => format!("data: {error}\n\n").into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_that_change_the_server_are_not_sent_again() {
        let of = |path: &str| Handling::of(&Method::POST, path);
        for path in [
            "/v1/chat/completions",
            "/v1/messages/",
            "/tokenize",
            "/v2/models/m/versions/1/infer",
            "/v2/models/m/generate_stream",
            "/v2/repository/index",
        ] {
            assert_eq!(of(path), Handling::Repeat, "{path}");
        }
        for path in [
            "/v2/repository/models/m/load",
            "/v1/load_lora_adapter",
            "/v2/systemsharedmemory/region/r/register",
            "/v2/trace/setting",
            "/v2/models/m/trace/setting",
            "/reset_prefix_cache",
            "/v1/of_a_later_version",
        ] {
            assert_eq!(of(path), Handling::Once, "{path}");
        }
        for path in ["/health", "/v2/health/ready", "/v2/models/m/ready", "/v2/models/m/versions/1/ready", "/metrics"] {
            assert_eq!(Handling::of(&Method::GET, path), Handling::Probe, "{path}");
        }
        assert_eq!(Handling::of(&Method::GET, "/v1/models"), Handling::Repeat);
        assert_eq!(Handling::of(&Method::DELETE, "/v1/models"), Handling::Once);
    }
}
