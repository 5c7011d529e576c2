//! Typed parameters of a `config.pbtxt`.

use std::str::FromStr;

use repository::ModelConfig;
use serving::InferError;

/// A boolean parameter: `true`, `1` or `yes`, `false`, `0` or `no`.
pub(crate) fn flag(config: &ModelConfig, key: &str) -> Result<Option<bool>, InferError> {
    let Some(value) = config.parameter(key) else { return Ok(None) };
    match value.trim().to_ascii_lowercase().as_str() {
        "true" | "1" | "yes" => Ok(Some(true)),
        "false" | "0" | "no" => Ok(Some(false)),
        _ => Err(wrong(config, key, value, "`true` or `false`")),
    }
}

/// A number parameter.
pub(crate) fn number<N: FromStr>(config: &ModelConfig, key: &str) -> Result<Option<N>, InferError> {
    let Some(value) = config.parameter(key) else { return Ok(None) };
    value.trim().parse().map(Some).map_err(|_| wrong(config, key, value, "a number"))
}

fn wrong(config: &ModelConfig, key: &str, found: &str, expected: &str) -> InferError {
    InferError::invalid(format!("model `{}`: parameter `{key}` is `{found}`, expected {expected}", config.name))
}
