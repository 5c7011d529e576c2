//! Booleans of the command line.

/// A boolean as tritonserver accepts it: `true`, `True`, `1` and their opposites.
pub(crate) fn boolean(text: &str) -> Result<bool, String> {
    match text.to_ascii_lowercase().as_str() {
        "true" | "1" | "on" | "yes" => Ok(true),
        "false" | "0" | "off" | "no" => Ok(false),
        _ => Err(format!("`{text}` is not a boolean; use true or false")),
    }
}
