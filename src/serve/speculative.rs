//! The value of `--speculative-config`, in vLLM's form: `{"method": "mtp", "num_speculative_tokens": 3}`.

use std::path::PathBuf;
use std::str::FromStr;

use serde_json::Value;

/// Who guesses drafts, and how many in one step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SpeculativeConfig {
    /// The parameter of the model that has the number.
    pub(crate) parameter: &'static str,
    pub(crate) num_tokens: u64,
    /// The parameter that has the checkpoint of a draft model or of a head, and that directory.
    pub(crate) model: Option<(&'static str, PathBuf)>,
}

const EXPECTED: &str =
    r#"{"method": "mtp", "ngram", or "draft_model" or "eagle3" with "model": DIR, "num_speculative_tokens": N}"#;

impl SpeculativeConfig {
    /// The parameters of the model.
    pub(crate) fn parameters(&self) -> impl Iterator<Item = (&'static str, String)> {
        let model = self.model.as_ref().map(|(parameter, dir)| (*parameter, dir.display().to_string()));
        std::iter::once((self.parameter, self.num_tokens.to_string())).chain(model)
    }
}

impl FromStr for SpeculativeConfig {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let Ok(Value::Object(fields)) = serde_json::from_str(text) else {
            return Err(format!("expected an object: {EXPECTED}"));
        };
        let known = ["method", "model", "num_speculative_tokens"];
        if let Some(name) = fields.keys().find(|name| !known.contains(&name.as_str())) {
            return Err(format!("`{name}` is not supported; expected {EXPECTED}"));
        }
        let (parameter, path_parameter) = match fields.get("method").and_then(Value::as_str) {
            Some("mtp" | "deepseek_mtp" | "glm4_moe_mtp" | "qwen3_next_mtp" | "qwen3_5_mtp") => {
                ("mtp_num_tokens", None)
            }
            Some("ngram") => ("prompt_lookup_num_tokens", None),
            Some("draft_model") => ("draft_model_num_tokens", Some("draft_model_path")),
            Some("eagle3") => ("eagle3_num_tokens", Some("eagle3_path")),
            Some(other) => return Err(format!("the method `{other}` is not supported; expected {EXPECTED}")),
            None => return Err(format!("`method` is missing; expected {EXPECTED}")),
        };
        let model = match (path_parameter, fields.get("model")) {
            (None, None) => None,
            (None, Some(_)) => return Err("`model` is only for the methods `draft_model` and `eagle3`".to_owned()),
            (Some(parameter), model) => Some((parameter, checkpoint(model)?)),
        };
        match fields.get("num_speculative_tokens").and_then(Value::as_u64) {
            Some(num_tokens @ 1..=64) => Ok(Self { parameter, num_tokens, model }),
            _ => Err("`num_speculative_tokens` must be 1 to 64".to_owned()),
        }
    }
}

/// The directory of a checkpoint. It becomes absolute, because the path of a parameter is relative to the repository.
fn checkpoint(model: Option<&Value>) -> Result<PathBuf, String> {
    let Some(model) = model else { return Err(format!("`model` is missing; expected {EXPECTED}")) };
    let dir = model.as_str().ok_or("`model` must be the directory of a checkpoint")?;
    match std::path::absolute(dir) {
        Ok(found) if found.is_dir() => Ok(found),
        _ => Err(format!("`model` is `{dir}`, which is not a directory; `trireme pull` downloads a model of a hub")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn methods_of_vllm_are_parameters_and_others_are_refused_by_name() {
        let parse = str::parse::<SpeculativeConfig>;
        let mtp = SpeculativeConfig { parameter: "mtp_num_tokens", num_tokens: 3, model: None };
        assert_eq!(parse(r#"{"method": "mtp", "num_speculative_tokens": 3}"#), Ok(mtp.clone()));
        assert_eq!(parse(r#"{"method": "deepseek_mtp", "num_speculative_tokens": 3}"#), Ok(mtp));
        let found = parse(r#"{"method": "ngram", "num_speculative_tokens": 8}"#).unwrap();
        assert_eq!((found.parameter, found.num_tokens), ("prompt_lookup_num_tokens", 8));
        let draft = parse(r#"{"method": "draft_model", "model": "/", "num_speculative_tokens": 5}"#).unwrap();
        let parameters: Vec<_> = draft.parameters().collect();
        assert_eq!(parameters, [("draft_model_num_tokens", "5".to_owned()), ("draft_model_path", "/".to_owned())]);
        let head = parse(r#"{"method": "eagle3", "model": "/", "num_speculative_tokens": 5}"#).unwrap();
        assert_eq!(head.model, Some(("eagle3_path", PathBuf::from("/"))));
        for (text, expected) in [
            ("mtp", "expected an object"),
            (r#"{"num_speculative_tokens": 3}"#, "`method` is missing"),
            (r#"{"method": "eagle", "num_speculative_tokens": 3}"#, "the method `eagle`"),
            (r#"{"method": "eagle3", "num_speculative_tokens": 3}"#, "`model` is missing"),
            (r#"{"method": "mtp", "num_speculative_tokens": 0}"#, "must be 1 to 64"),
            (r#"{"method": "mtp", "model": "x", "num_speculative_tokens": 3}"#, "only for the methods `draft_model`"),
            (r#"{"method": "mtp", "rejection": 1, "num_speculative_tokens": 3}"#, "`rejection` is not supported"),
            (r#"{"method": "draft_model", "num_speculative_tokens": 3}"#, "`model` is missing"),
            (r#"{"method": "draft_model", "model": 1, "num_speculative_tokens": 3}"#, "must be the directory"),
            (
                r#"{"method": "draft_model", "model": "/no/dir", "num_speculative_tokens": 3}"#,
                "which is not a directory",
            ),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
    }
}
