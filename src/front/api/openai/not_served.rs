//! Known endpoints that this server does not have. The error says what to do instead.

/// Endpoints outside `/v1` that other servers have.
pub(super) const ALONE: [&str; 5] = ["/score", "/rerank", "/v2/rerank", "/classify", "/pooling"];

const TENSORS: &str = "Serve such a model as a Python model, and send its tensors to `/v2/models/NAME/infer`";
const STORED: &str = "Nothing is stored here. Send each request with all that it needs when you need its answer";

/// The first part of a path behind `/v1`, and what to do instead.
const ENDPOINTS: [(&str, &str); 21] = [
    ("embeddings", TENSORS),
    ("score", TENSORS),
    ("rerank", TENSORS),
    ("classify", TENSORS),
    ("pooling", TENSORS),
    ("moderations", TENSORS),
    ("audio", TENSORS),
    ("images", TENSORS),
    ("videos", TENSORS),
    ("realtime", TENSORS),
    ("responses", STORED),
    ("conversations", STORED),
    ("files", STORED),
    ("uploads", STORED),
    ("batches", STORED),
    ("fine_tuning", STORED),
    ("assistants", STORED),
    ("threads", STORED),
    ("vector_stores", STORED),
    ("containers", STORED),
    ("evals", STORED),
];

/// The message for a known endpoint that is not served; `None` for other paths.
pub(super) fn message(path: &str) -> Option<String> {
    let name =
        if ALONE.contains(&path) { path.rsplit('/').next() } else { path.strip_prefix("/v1/")?.split('/').next() };
    let (_, advice) = ENDPOINTS.iter().find(|(endpoint, _)| Some(*endpoint) == name)?;
    Some(format!("{path} is not served: this server generates text. {advice}."))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_known_endpoint_is_refused_with_what_to_do_and_others_are_not_known() {
        for path in
            ["/v1/embeddings", "/v1/audio/speech", "/v1/responses/resp_1", "/rerank", "/v2/rerank", "/v1/batches"]
        {
            let words = message(path).unwrap();
            assert!(words.starts_with(&format!("{path} is not served: ")) && words.ends_with('.'), "{words}");
        }
        for path in ["/v1", "/v1/", "/v1/embedding", "/v2/models/x", "/embeddings"] {
            assert_eq!(message(path), None, "{path}");
        }
    }
}
