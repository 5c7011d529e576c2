//! Prompts: texts or token ids.

use std::sync::Arc;

use generation::Generator;
use serde_json::Value;
use serving::{InferError, Limit, Limits};

use super::error::ApiError;
use super::fields::{Fields, check, token_ids};
use super::parameters::Parameters;
use crate::transport::large_work::block_in_place_in_turn;

/// Maximum number of prompts of a request.
const MAX_PROMPTS: usize = 1024;

/// A prompt as the client sends it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Prompt {
    Text(String),
    Tokens(Vec<u32>),
}

impl Prompt {
    /// Bytes of the text or of the tokens.
    pub(super) fn num_bytes(&self) -> usize {
        match self {
            Prompt::Text(text) => text.len(),
            Prompt::Tokens(tokens) => tokens.len() * size_of::<u32>(),
        }
    }

    /// The text of a prompt that is text.
    pub(super) fn text(&self) -> Option<String> {
        match self {
            Prompt::Text(text) => Some(text.clone()),
            Prompt::Tokens(_) => None,
        }
    }

    /// The prompt's tokens. Text is encoded; `adds_special` says whether the tokenizer adds its special tokens.
    ///
    /// # Errors
    /// When the text is longer than any prompt of the model, or cannot be encoded.
    pub(super) fn encode(
        self,
        generator: &Generator,
        adds_special: bool,
        parameters: &Parameters,
    ) -> Result<Arc<[u32]>, ApiError> {
        let mut tokens = match self {
            Prompt::Tokens(tokens) => tokens,
            Prompt::Text(text) => {
                if text.len() > generator.max_prompt_bytes {
                    return Err(Limit::PromptBytes.refuse(text.len() as u64, generator.max_prompt_bytes as u64).into());
                }
                let wrong = |error| InferError::invalid(format!("cannot encode the prompt: {error}"));
                generator
                    .tokenizer
                    .encode(&text, parameters.add_special_tokens.unwrap_or(adds_special))
                    .map_err(wrong)?
            }
        };
        if let Some(kept) = parameters.truncate_prompt_tokens {
            let room = generator.max_sequence_len.saturating_sub(parameters.max_tokens.unwrap_or(1).max(1) as usize);
            tokens.drain(..tokens.len().saturating_sub(kept.min(room)));
        }
        match tokens.is_empty() {
            true => Err(ApiError::of_field("prompt", "The prompt has no tokens; send at least one.")),
            false => Ok(tokens.into()),
        }
    }
}

/// Reads `prompt`: a text, a list of texts, a list of token ids, or a list of such lists.
///
/// # Errors
/// When it is missing, or something else.
pub(super) fn read_prompts(fields: &mut Fields, limits: &Limits) -> Result<Vec<Prompt>, ApiError> {
    let wrong = |words: &str| ApiError::of_field("prompt", format!("`prompt` {words}."));
    let prompts: Vec<Prompt> = match fields.take("prompt") {
        None => return Err(wrong("is missing")),
        Some(Value::String(text)) => vec![Prompt::Text(text)],
        Some(Value::Array(items)) if items.first().is_some_and(Value::is_number) => {
            vec![Prompt::Tokens(token_ids("prompt", &items)?)]
        }
        Some(Value::Array(items)) => {
            let prompt = |item| match item {
                Value::String(text) => Ok(Prompt::Text(text)),
                Value::Array(ids) => token_ids("prompt", &ids).map(Prompt::Tokens),
                _ => Err(wrong("must be text, a list of texts, a list of token ids or a list of such lists")),
            };
            items.into_iter().map(prompt).collect::<Result<_, _>>()?
        }
        Some(_) => return Err(wrong("must be text, a list of texts, a list of token ids or a list of such lists")),
    };
    if limits.get(Limit::PromptBytes) > 0 {
        prompts.iter().try_for_each(|prompt| check(limits, Limit::PromptBytes, "prompt", prompt.num_bytes()))?;
    }
    match prompts.len() {
        1..=MAX_PROMPTS => Ok(prompts),
        count => Err(wrong(&format!("holds {count} prompts, expected 1 to {MAX_PROMPTS}"))),
    }
}

/// Encodes prompts, away from other requests where they are long.
///
/// # Errors
/// As [`Prompt::encode`].
pub(super) async fn encode_all(
    prompts: Vec<Prompt>,
    generator: &Generator,
    adds_special: bool,
    parameters: &Parameters,
) -> Result<Vec<Arc<[u32]>>, ApiError> {
    let num_bytes = prompts.iter().map(Prompt::num_bytes).sum();
    let encode = || prompts.into_iter().map(|prompt| prompt.encode(generator, adds_special, parameters)).collect();
    block_in_place_in_turn(num_bytes, encode).await
}
