//! Headers of a request that models see as its parameters.

use http::HeaderMap;
use regex::Regex;
use serving::{InferError, InferRequest, Parameter};

/// Names that have a meaning of their own among parameters.
const RESERVED: [&str; 7] =
    ["sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "headers", "binary_data_output"];

/// Longest pattern, compiled.
const MAX_PATTERN_BYTES: usize = 1 << 20;

/// Which headers are forwarded: those whose name a pattern matches anywhere. Case does not count.
#[derive(Debug, Clone, Default)]
pub struct HeaderPattern(Option<Regex>);

impl HeaderPattern {
    /// Of a regular expression; the empty one forwards nothing.
    ///
    /// # Errors
    /// When it is none.
    pub fn new(pattern: &str) -> Result<Self, String> {
        if pattern.is_empty() {
            return Ok(Self(None));
        }
        let built = regex::RegexBuilder::new(pattern).case_insensitive(true).size_limit(MAX_PATTERN_BYTES).build();
        built.map(|regex| Self(Some(regex))).map_err(|error| format!("`{pattern}` is no pattern for headers: {error}"))
    }

    /// The headers that match, ready to be given to requests.
    ///
    /// # Errors
    /// When one of them has a reserved name, or a value that is no text.
    pub(crate) fn pick(&self, headers: &HeaderMap) -> Result<Vec<(String, String)>, InferError> {
        let Some(pattern) = &self.0 else { return Ok(Vec::new()) };
        let mut picked = Vec::new();
        for (name, value) in headers.iter().filter(|(name, _)| pattern.is_match(name.as_str())) {
            let name = name.as_str();
            if RESERVED.contains(&name) || name.starts_with("triton_") {
                let words = format!("Header '{name}' is reserved for Triton usage and cannot be forwarded.");
                return Err(InferError::invalid(words));
            }
            let value = std::str::from_utf8(value.as_bytes());
            let value = value.map_err(|_| InferError::invalid(format!("header '{name}' is not UTF-8")))?;
            picked.push((name.to_owned(), value.to_owned()));
        }
        Ok(picked)
    }
}

/// Gives a request the headers that were picked.
pub(crate) fn forward(request: &mut InferRequest, picked: &[(String, String)]) {
    let parameters = picked.iter().map(|(name, value)| (name.clone(), Parameter::String(value.clone())));
    request.parameters.extend(parameters);
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::{HeaderName, HeaderValue};

    #[test]
    fn headers_that_match_become_parameters() {
        let header = |name: &'static str, value| (HeaderName::from_static(name), HeaderValue::from_static(value));
        let headers = HeaderMap::from_iter([header("x-tenant", "blue"), header("host", "h")]);
        let picked = HeaderPattern::new("X-.*").unwrap().pick(&headers).unwrap();
        let mut request = InferRequest::default();
        forward(&mut request, &picked);
        assert_eq!(request.parameters["x-tenant"], Parameter::String("blue".into()));
        assert_eq!(request.parameters.len(), 1);
        assert!(HeaderPattern::default().pick(&headers).unwrap().is_empty());
        let headers = HeaderMap::from_iter([header("priority", "1")]);
        let error = HeaderPattern::new(".*").unwrap().pick(&headers).unwrap_err();
        assert!(error.message.contains("'priority' is reserved"), "{error}");
        assert!(HeaderPattern::new("(").is_err());
    }
}
