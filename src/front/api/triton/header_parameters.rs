//! Headers of a request that are passed to models as parameters.

use http::HeaderMap;
use regex::Regex;
use serving::{InferError, InferRequest, Parameter};

/// Parameter names with a special meaning.
const RESERVED: [&str; 7] =
    ["sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "headers", "binary_data_output"];

/// Maximum size of a compiled pattern.
const MAX_PATTERN_BYTES: usize = 1 << 20;

/// Selects the headers to forward: those whose names contain a match of a regular expression, ignoring case.
#[derive(Debug, Clone, Default)]
pub struct HeaderPattern(Option<Regex>);

impl HeaderPattern {
    /// Compiles a regular expression; the empty one selects nothing.
    ///
    /// # Errors
    /// When the expression is invalid or too large.
    pub fn new(pattern: &str) -> Result<Self, String> {
        if pattern.is_empty() {
            return Ok(Self(None));
        }
        let built = regex::RegexBuilder::new(pattern).case_insensitive(true).size_limit(MAX_PATTERN_BYTES).build();
        built.map(|regex| Self(Some(regex))).map_err(|error| format!("`{pattern}` is no pattern for headers: {error}"))
    }

    /// The names and values of the selected headers.
    ///
    /// # Errors
    /// When a selected header has a reserved name, or a value that is not UTF-8.
    pub(crate) fn select(&self, headers: &HeaderMap) -> Result<Vec<(String, String)>, InferError> {
        let Some(pattern) = &self.0 else { return Ok(Vec::new()) };
        let mut selected = Vec::new();
        for (name, value) in headers.iter().filter(|(name, _)| pattern.is_match(name.as_str())) {
            let name = name.as_str();
            if RESERVED.contains(&name) || name.starts_with("triton_") {
                let words = format!("Header '{name}' is reserved for Triton usage and cannot be forwarded.");
                return Err(InferError::invalid(words));
            }
            let value = std::str::from_utf8(value.as_bytes());
            let value = value.map_err(|_| InferError::invalid(format!("header '{name}' is not UTF-8")))?;
            selected.push((name.to_owned(), value.to_owned()));
        }
        Ok(selected)
    }
}

/// Adds selected headers to the parameters of a request.
pub(crate) fn forward(request: &mut InferRequest, selected: &[(String, String)]) {
    let parameters = selected.iter().map(|(name, value)| (name.clone(), Parameter::String(value.clone())));
    request.parameters.extend(parameters);
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::{HeaderName, HeaderValue};

    #[test]
    fn matching_headers_become_parameters() {
        let header = |name: &'static str, value| (HeaderName::from_static(name), HeaderValue::from_static(value));
        let headers = HeaderMap::from_iter([header("x-tenant", "blue"), header("host", "h")]);
        let selected = HeaderPattern::new("X-.*").unwrap().select(&headers).unwrap();
        let mut request = InferRequest::default();
        forward(&mut request, &selected);
        assert_eq!(request.parameters["x-tenant"], Parameter::String("blue".into()));
        assert_eq!(request.parameters.len(), 1);
        assert!(HeaderPattern::default().select(&headers).unwrap().is_empty());
        let headers = HeaderMap::from_iter([header("priority", "1")]);
        let error = HeaderPattern::new(".*").unwrap().select(&headers).unwrap_err();
        assert!(error.message.contains("'priority' is reserved"), "{error}");
        assert!(HeaderPattern::new("(").is_err());
    }
}
