//! A request of completions or chats, whose fields have been checked.

use serde_json::Value;
use serving::{Limit, Limits};

use super::error::ApiError;
use super::fields::{FOR_THE_PROVIDER, Fields, check};
use super::parameter_fields::{num_logprobs, token_count};
use super::parameters::{COMPLETION_TOKENS, Parameters};
use super::prompt::{Prompt, read_prompts};
use super::tools::{ToolForm, Tools};
use crate::chat::{Conversation, UnknownFields};
use crate::state::State;
use crate::transport::budget::Charge;

/// Times that an echoed prompt is in an answer while that is written.
const ECHO_COPIES: usize = 3;
/// Memory of a log-probability of an echoed token while the answer is written, for each byte of the prompt.
const ECHOED_LOGPROB_BYTES: usize = 16;

/// A request for completions.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct CompletionRequest {
    pub(super) model: String,
    pub(super) input: Input,
    pub(super) parameters: Parameters,
    /// Whether a completion begins with its prompt.
    pub(super) echo: bool,
    /// Tools that a chat may call.
    pub(super) tools: Tools,
    /// Whether the answer of a chat has the model's reasoning.
    pub(super) includes_reasoning: bool,
    /// Whether a call that `tool_choice` names ends with the reason `stop`, as in OpenAI's chats.
    pub(super) ends_named_call_with_stop: bool,
    pub(super) is_chat: bool,
}

/// What is completed.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Input {
    Prompts(Vec<Prompt>),
    Conversation(Conversation),
}

impl CompletionRequest {
    /// Reads a body.
    ///
    /// # Errors
    /// When it is not a JSON object, a field has an invalid value or is not known, or one is larger than `limits` allow.
    pub(super) fn read(body: &[u8], is_chat: bool, limits: &Limits, unknown: UnknownFields) -> Result<Self, ApiError> {
        let mut fields = Fields::read(body)?;
        let model = fields.text("model")?.ok_or_else(|| ApiError::of_field("model", "`model` is missing."))?;
        check(limits, Limit::NameBytes, "model", model.len())?;
        let mut parameters = Parameters::read(&mut fields, limits)?;
        let max_tokens = token_count(&mut fields, "max_tokens")?;
        let (mut input, mut echo) = (read_input(&mut fields, is_chat, limits)?, false);
        let (mut tools, mut includes_reasoning) = (Tools::default(), true);
        if is_chat {
            parameters.max_tokens = token_count(&mut fields, "max_completion_tokens")?.or(max_tokens);
            parameters.logprobs = chat_logprobs(&mut fields)?;
            tools = Tools::read(&mut fields, ToolForm::Chat)?;
            includes_reasoning = fields.flag("include_reasoning")?.unwrap_or(true);
            let is_text =
                |modalities: &Value| modalities.as_array().is_some_and(|list| list.iter().all(|it| it == "text"));
            fields.refuse_unless("modalities", is_text, "models answer with text")?;
            if let Input::Conversation(conversation) = &mut input {
                conversation.tools = tools.take_for_template();
            }
        } else {
            parameters.max_tokens = Some(max_tokens.unwrap_or(COMPLETION_TOKENS));
            parameters.logprobs = num_logprobs(&mut fields, "logprobs")?;
            echo = fields.flag("echo")?.unwrap_or(false);
            parameters.echoed_logprobs = parameters.logprobs.filter(|_| echo);
            fields.refuse_unless("suffix", |suffix| suffix == "", "models continue a prompt, they do not fill gaps")?;
        }
        fields.ignore(&FOR_THE_PROVIDER);
        fields.finish(unknown)?;
        let ends_named_call_with_stop = true;
        Ok(Self { model, input, parameters, echo, tools, includes_reasoning, ends_named_call_with_stop, is_chat })
    }
}

fn read_input(fields: &mut Fields, is_chat: bool, limits: &Limits) -> Result<Input, ApiError> {
    match is_chat {
        true => Conversation::read(fields, limits).map(Input::Conversation),
        false => read_prompts(fields, limits).map(Input::Prompts),
    }
}

/// `logprobs` and `top_logprobs` of a chat.
fn chat_logprobs(fields: &mut Fields) -> Result<Option<u32>, ApiError> {
    let top = num_logprobs(fields, "top_logprobs")?;
    match (fields.flag("logprobs")?.unwrap_or(false), top) {
        (true, top) => Ok(Some(top.unwrap_or(0))),
        (false, None | Some(0)) => Ok(None),
        (false, Some(_)) => Err(ApiError::of_field("top_logprobs", "`top_logprobs` needs `logprobs: true`.")),
    }
}

/// Checks how much the request holds of memory, and charges it.
pub(super) fn charge_prompts(
    limits: &Limits,
    charge: &Charge,
    request: &CompletionRequest,
    prompts: &[Prompt],
) -> Result<(), ApiError> {
    let Parameters { n, stop, echoed_logprobs, .. } = &request.parameters;
    let count = prompts.len() * n;
    limits.check(Limit::Sequences, count).map_err(|error| ApiError::of_field("n", error.message))?;
    let num_bytes: usize = prompts.iter().map(Prompt::num_bytes).sum();
    // Each choice has its own copy of the prompt and the stop strings at some time; an echo is part of the answer.
    let copies = if request.echo { 1 + ECHO_COPIES } else { 1 };
    let logprobs = echoed_logprobs.map_or(0, |top| (1 + top as usize) * ECHOED_LOGPROB_BYTES);
    let stop_bytes: usize = stop.iter().map(String::len).sum();
    charge.add(n.saturating_mul(num_bytes).saturating_mul(copies + logprobs).saturating_add(count * stop_bytes))?;
    Ok(())
}

/// The prompts of a request, which are taken out of it.
pub(super) async fn take_prompts(state: &State, request: &mut CompletionRequest) -> Result<Vec<Prompt>, ApiError> {
    match std::mem::replace(&mut request.input, Input::Prompts(Vec::new())) {
        Input::Prompts(prompts) => Ok(prompts),
        Input::Conversation(conversation) => Ok(vec![conversation.render(state, &request.model).await?]),
    }
}

#[cfg(test)]
mod tests;
