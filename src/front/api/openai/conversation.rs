//! Conversations, and the chat template that turns one into a prompt.

use serde_json::{Map, Value, json};
use serving::{InferError, Limit, Limits};

use super::error::ApiError;
use super::fields::{Fields, check};
use super::prompt::Prompt;
use crate::chat::Conversation;
use crate::state::State;

/// Longest chat template of a request in bytes.
const MAX_TEMPLATE_BYTES: usize = 256 << 10;
/// Values of `reasoning_effort`.
const EFFORTS: [&str; 7] = ["none", "minimal", "low", "medium", "high", "xhigh", "max"];

impl Conversation {
    /// Reads the fields of a conversation. Text alone counts as the user's message, as LMDeploy's clients send it.
    ///
    /// # Errors
    /// When a field has an invalid value.
    pub(super) fn read(fields: &mut Fields, limits: &Limits) -> Result<Self, ApiError> {
        let wrong = |words: String| ApiError::of_field("messages", words);
        let messages = match fields.take("messages") {
            Some(Value::String(text)) => vec![json!({"role": "user", "content": text})],
            Some(Value::Array(messages)) if !messages.is_empty() => messages,
            _ => return Err(wrong("`messages` must be a list of at least one message.".to_owned())),
        };
        check(limits, Limit::Messages, "messages", messages.len())?;
        check_messages("messages", &messages)?;
        let template = fields.text("chat_template")?;
        if template.as_ref().is_some_and(|template| template.len() > MAX_TEMPLATE_BYTES) {
            let words = format!("`chat_template` has more than {MAX_TEMPLATE_BYTES} bytes.");
            return Err(ApiError::of_field("chat_template", words));
        }
        let mut variables = fields.object("chat_template_kwargs")?.unwrap_or_default();
        if let Some(effort) = fields.text("reasoning_effort")? {
            set_effort(&mut variables, &effort, "reasoning_effort")?;
        }
        let continue_final_message = fields.flag("continue_final_message")?.unwrap_or(false);
        let add_generation_prompt = fields.flag("add_generation_prompt")?;
        if continue_final_message && add_generation_prompt == Some(true) {
            let words =
                "`continue_final_message` and `add_generation_prompt` exclude each other; set one of them to false.";
            return Err(ApiError::of_field("continue_final_message", words));
        }
        Ok(Self {
            messages,
            tools: Vec::new(),
            documents: fields.list("documents")?,
            variables,
            template,
            add_generation_prompt: add_generation_prompt.unwrap_or(!continue_final_message),
            continue_final_message,
        })
    }

    /// The prompt of the conversation.
    ///
    /// # Errors
    /// When the model has no chat template, or the template refuses the conversation.
    pub(super) async fn render(self, state: &State, model: &str) -> Result<Prompt, ApiError> {
        let no_template =
            || ApiError::of_field("messages", "This server has no chat templates; send the prompt to /v1/completions.");
        let chat = state.config.chat.0.clone().ok_or_else(no_template)?;
        let model = model.to_owned();
        let rendered = tokio::task::spawn_blocking(move || chat.prompt(&model, &self)).await;
        let text = rendered.map_err(|error| InferError::internal(error.to_string()))??;
        if text.is_empty() {
            let words = "The model's chat template writes nothing for these messages; check their roles.";
            return Err(ApiError::of_field("messages", words));
        }
        Ok(Prompt::Text(text))
    }
}

/// Sets the variables by which templates turn thinking on and off, unless the client has set them.
pub(super) fn set_thinking(variables: &mut Map<String, Value>, is_on: bool) {
    for name in ["enable_thinking", "thinking"] {
        variables.entry(name).or_insert(json!(is_on));
    }
}

/// Sets the variables for a reasoning effort, which the client gave in `field`.
///
/// # Errors
/// When the effort is not known.
pub(super) fn set_effort(
    variables: &mut Map<String, Value>,
    effort: &str,
    field: &'static str,
) -> Result<(), ApiError> {
    if !EFFORTS.contains(&effort) {
        let place = match field {
            "reasoning" => "reasoning.effort",
            "output_config" => "output_config.effort",
            field => field,
        };
        return Err(ApiError::of_field(field, format!("`{place}` must be one of {}.", EFFORTS.join(", "))));
    }
    if effort == "none" {
        set_thinking(variables, false);
    }
    variables.entry("reasoning_effort").or_insert(json!(effort));
    Ok(())
}

/// Checks messages, which the client gave in `field`.
///
/// # Errors
/// When one has no role, or content that is not text.
pub(super) fn check_messages(field: &'static str, messages: &[Value]) -> Result<(), ApiError> {
    messages.iter().enumerate().try_for_each(|(at, message)| check_message(field, at, message))
}

/// Checks the role and the content of a message. Parts that are not text are refused.
fn check_message(field: &'static str, at: usize, message: &Value) -> Result<(), ApiError> {
    let wrong = |words: String| Err(ApiError::of_field(field, words));
    if !message["role"].is_string() {
        return wrong(format!("`{field}[{at}].role` must be a string."));
    }
    match &message["content"] {
        Value::Null | Value::String(_) => Ok(()),
        Value::Array(parts) => {
            for part in parts {
                let kind = part["type"].as_str().unwrap_or("text");
                if !matches!(kind, "text" | "input_text" | "output_text" | "refusal")
                    || !(part["text"].is_string() || part["refusal"].is_string())
                {
                    let kind = crate::api::status::shown(kind);
                    return wrong(format!(
                        "`{field}[{at}].content` has a part of type `{kind}`; models read text only."
                    ));
                }
            }
            Ok(())
        }
        _ => wrong(format!("`{field}[{at}].content` must be text or a list of parts.")),
    }
}
