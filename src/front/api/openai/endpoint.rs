//! The paths of OpenAI's and Anthropic's protocols: which method they take, and what a request of them does to the server.

use http::Method;

use crate::api::request_effect::Effect;
use crate::transport::restricted::Api;

/// An endpoint of these protocols.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Endpoint {
    Models,
    Completions,
    ChatCompletions,
    RenderCompletions,
    RenderChatCompletions,
    Responses,
    Messages,
    CountTokens,
    LoadAdapter,
    UnloadAdapter,
    Tokenize,
    Detokenize,
    TokenizerInfo,
    ResetPrefixCache,
    Sleep,
    WakeUp,
    IsSleeping,
    UpdateWeights,
    Health,
    Ping,
    Version,
}

use Endpoint::*;

/// All endpoints with their paths.
const PATHS: [(Endpoint, &str); 21] = [
    (Models, "/v1/models"),
    (Completions, "/v1/completions"),
    (ChatCompletions, "/v1/chat/completions"),
    (RenderCompletions, "/v1/completions/render"),
    (RenderChatCompletions, "/v1/chat/completions/render"),
    (Responses, "/v1/responses"),
    (Messages, "/v1/messages"),
    (CountTokens, "/v1/messages/count_tokens"),
    (LoadAdapter, "/v1/load_lora_adapter"),
    (UnloadAdapter, "/v1/unload_lora_adapter"),
    (Tokenize, "/tokenize"),
    (Detokenize, "/detokenize"),
    (TokenizerInfo, "/tokenizer_info"),
    (ResetPrefixCache, "/reset_prefix_cache"),
    (Sleep, "/sleep"),
    (WakeUp, "/wake_up"),
    (IsSleeping, "/is_sleeping"),
    (UpdateWeights, "/update_weights_from_disk"),
    (Health, "/health"),
    (Ping, "/ping"),
    (Version, "/version"),
];

impl Endpoint {
    /// The endpoint of a path without its query; `None` for other paths.
    pub(crate) fn of(path: &str) -> Option<Self> {
        let path = path.trim_end_matches('/');
        PATHS.iter().find(|(_, known)| *known == path).map(|(endpoint, _)| *endpoint)
    }

    /// The only method that it takes.
    pub(super) fn method(self) -> Method {
        match self {
            Models | TokenizerInfo | IsSleeping | Health | Ping | Version => Method::GET,
            _ => Method::POST,
        }
    }

    /// What its requests do.
    pub(crate) fn effect(self) -> Effect {
        match self {
            Health | Ping => Effect::Probe,
            Completions | ChatCompletions | Responses | Messages => Effect::Generates,
            Models
            | RenderCompletions
            | RenderChatCompletions
            | CountTokens
            | Tokenize
            | Detokenize
            | TokenizerInfo
            | IsSleeping
            | Version => Effect::Reads,
            LoadAdapter | UnloadAdapter | ResetPrefixCache | Sleep | WakeUp | UpdateWeights => Effect::Changes,
        }
    }

    /// The API of which it needs the key with any method; `None` where that depends on the method.
    pub(super) fn api(self) -> Option<Api> {
        match self {
            Health | Ping => Some(Api::Health),
            // As the load and unload of models.
            LoadAdapter | UnloadAdapter | ResetPrefixCache | Sleep | WakeUp | IsSleeping | UpdateWeights => {
                Some(Api::ModelRepository)
            }
            _ => None,
        }
    }

    /// All paths, for an error: `/a, /b and /c`.
    pub(super) fn all_paths() -> String {
        let (last, others) = PATHS.split_last().expect("there are endpoints");
        let others: Vec<&str> = others.iter().map(|(_, path)| *path).collect();
        format!("{} and {}", others.join(", "), last.1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_endpoint_has_one_path_and_what_changes_the_server_is_posted() {
        for (index, (endpoint, path)) in PATHS.iter().enumerate() {
            assert_eq!(Endpoint::of(&format!("{path}/")), Some(*endpoint));
            let same = PATHS.iter().filter(|(other, its)| other == endpoint || its == path);
            assert_eq!(same.count(), 1, "{path}");
            assert_eq!(*endpoint as usize, index, "{path}");
            if matches!(endpoint.effect(), Effect::Changes | Effect::Generates) {
                assert_eq!(endpoint.method(), Method::POST, "{path}");
            }
        }
        assert_eq!(Endpoint::of("/v1/models/m"), None);
        assert!(Endpoint::all_paths().ends_with("/health, /ping and /version"));
    }
}
