//! The value of `--speculative-config`, in vLLM's form: `{"method": "mtp", "num_speculative_tokens": 3}`.

use std::str::FromStr;

use serde_json::Value;

/// Who guesses drafts, and how many in one step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SpeculativeConfig {
    /// The parameter of the model that has the number.
    pub(crate) parameter: &'static str,
    pub(crate) num_tokens: u64,
}

impl FromStr for SpeculativeConfig {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let expected = r#"{"method": "mtp" or "ngram", "num_speculative_tokens": N}"#;
        let Ok(Value::Object(fields)) = serde_json::from_str(text) else {
            return Err(format!("expected an object: {expected}"));
        };
        if let Some(name) = fields.keys().find(|name| !["method", "num_speculative_tokens"].contains(&name.as_str())) {
            return Err(format!("`{name}` is not supported; expected {expected}"));
        }
        let parameter = match fields.get("method").and_then(Value::as_str) {
            Some("mtp" | "deepseek_mtp" | "glm4_moe_mtp" | "qwen3_next_mtp" | "qwen3_5_mtp") => "mtp_num_tokens",
            Some("ngram") => "prompt_lookup_num_tokens",
            Some(other) => return Err(format!("the method `{other}` is not supported; expected {expected}")),
            None => return Err(format!("`method` is missing; expected {expected}")),
        };
        match fields.get("num_speculative_tokens").and_then(Value::as_u64) {
            Some(num_tokens @ 1..=64) => Ok(Self { parameter, num_tokens }),
            _ => Err("`num_speculative_tokens` must be 1 to 64".to_owned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn methods_of_vllm_are_parameters_and_others_are_refused_by_name() {
        let parse = str::parse::<SpeculativeConfig>;
        let mtp = SpeculativeConfig { parameter: "mtp_num_tokens", num_tokens: 3 };
        assert_eq!(parse(r#"{"method": "mtp", "num_speculative_tokens": 3}"#), Ok(mtp.clone()));
        assert_eq!(parse(r#"{"method": "deepseek_mtp", "num_speculative_tokens": 3}"#), Ok(mtp));
        let found = parse(r#"{"method": "ngram", "num_speculative_tokens": 8}"#).unwrap();
        assert_eq!((found.parameter, found.num_tokens), ("prompt_lookup_num_tokens", 8));
        for (text, expected) in [
            ("mtp", "expected an object"),
            (r#"{"num_speculative_tokens": 3}"#, "`method` is missing"),
            (r#"{"method": "eagle3", "num_speculative_tokens": 3}"#, "the method `eagle3`"),
            (r#"{"method": "mtp", "num_speculative_tokens": 0}"#, "must be 1 to 64"),
            (r#"{"method": "mtp", "model": "x", "num_speculative_tokens": 3}"#, "`model` is not supported"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
    }
}
