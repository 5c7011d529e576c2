//! Prompts that end behind the text of the last message: a marker behind the text shows where the prompt is cut.

use serde_json::{Map, Value};

/// Ends with a space, because it shows whether the template trims the text.
const MARKER: &str = "CONTINUE_FINAL_MESSAGE_TAG ";

/// Appends the marker to the text of the last message, and returns the text.
///
/// # Errors
/// When the last message has no text.
pub(super) fn mark(messages: &mut [Map<String, Value>]) -> Result<String, String> {
    let content = messages.last_mut().and_then(|message| message.get_mut("content"));
    let text = match content {
        Some(Value::String(text)) => Some(text),
        Some(Value::Array(parts)) => parts.iter_mut().rev().find_map(|part| match part.get_mut("text") {
            Some(Value::String(text)) => Some(text),
            _ => None,
        }),
        _ => None,
    };
    let text = text.ok_or("`continue_final_message` needs text in `content` of the last message")?;
    let marked = format!("{text}{MARKER}");
    Ok(std::mem::replace(text, marked))
}

/// The prompt up to the marker behind `text`.
///
/// # Errors
/// When the template changed the text or left it out.
pub(super) fn cut(mut prompt: String, text: &str) -> Result<String, String> {
    let at = prompt.rfind(MARKER.trim_end()).filter(|_| prompt.contains(text.trim()));
    let at =
        at.ok_or("it changes or drops the text of the last message, so `continue_final_message` is not possible")?;
    let is_trimmed = !prompt[at..].starts_with(MARKER);
    prompt.truncate(at);
    if is_trimmed {
        prompt.truncate(prompt.trim_end().len());
    }
    Ok(prompt)
}
