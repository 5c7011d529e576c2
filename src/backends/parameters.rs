//! Typed parameters of a `config.pbtxt`.

use std::str::FromStr;

use repository::ModelConfig;
use serving::InferError;

/// A string parameter. `None` when it is absent, empty, or an unfilled `${…}` of a template.
pub(crate) fn text<'a>(config: &'a ModelConfig, key: &str) -> Option<&'a str> {
    config.parameter(key).map(str::trim).filter(|value| !value.is_empty() && !value.starts_with("${"))
}

/// A boolean parameter: `true`, `1` or `yes`, `false`, `0` or `no`.
///
/// # Errors
/// When it has another value.
pub(crate) fn flag(config: &ModelConfig, key: &str) -> Result<Option<bool>, InferError> {
    let Some(value) = text(config, key) else { return Ok(None) };
    match value.to_ascii_lowercase().as_str() {
        "true" | "1" | "yes" => Ok(Some(true)),
        "false" | "0" | "no" => Ok(Some(false)),
        _ => Err(wrong(config, key, value, "`true` or `false`")),
    }
}

/// A number parameter.
///
/// # Errors
/// When it is not a number, or outside of the range of its type.
pub(crate) fn number<N: FromStr>(config: &ModelConfig, key: &str) -> Result<Option<N>, InferError> {
    let Some(value) = text(config, key) else { return Ok(None) };
    value.parse().map(Some).map_err(|_| wrong(config, key, value, "a number"))
}

fn wrong(config: &ModelConfig, key: &str, found: &str, expected: &str) -> InferError {
    InferError::invalid(format!("model `{}`: parameter `{key}` is `{found}`, expected {expected}", config.name))
}
