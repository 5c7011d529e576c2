//! `/tokenize`, `/detokenize` and `/v1/.../render`: prompts as tokens, without generation.

use std::sync::Arc;

use generation::Generator;
use http::{HeaderMap, StatusCode};
use hyper::body::Incoming;
use serde_json::{Value, json};
use serving::{Limit, Limits};

use super::choices::token_text;
use super::error::ApiError;
use super::fields::{Fields, check, tree_bytes};
use super::models;
use super::parameters::Parameters;
use super::prompt::{Prompt, encode_all};
use super::request::{CompletionRequest, take_prompts};
use super::tools::{ToolForm, Tools};
use crate::api::triton::http::reply::{JSON, Reply, reply};
use crate::api::triton::http::request_body::{ChargedBody, read_body};
use crate::chat::{Conversation, UnknownFields};
use crate::state::State;
use crate::transport::large_work::block_in_place_in_turn;

/// A request to encode a text or a conversation.
struct TokenizeRequest {
    model: Option<String>,
    input: TokenizeInput,
    parameters: Parameters,
    return_token_strs: bool,
}

enum TokenizeInput {
    Prompt(String),
    Conversation(Conversation),
}

impl TokenizeRequest {
    fn read(body: &[u8], limits: &Limits, unknown: UnknownFields) -> Result<Self, ApiError> {
        let mut fields = Fields::read(body)?;
        let model = model_name(&mut fields, limits)?;
        let return_token_strs = fields.flag("return_token_strs")?.unwrap_or(false);
        let mut parameters = Parameters::read(&mut Fields::read(b"{}")?, limits)?;
        parameters.add_special_tokens = fields.flag("add_special_tokens")?;
        let input = match fields.text("prompt")? {
            Some(prompt) => TokenizeInput::Prompt(prompt),
            None => {
                let mut conversation = Conversation::read(&mut fields, limits)?;
                let mut tools = Tools::read(&mut fields, ToolForm::Chat)?;
                conversation.tools = tools.take_for_template();
                TokenizeInput::Conversation(conversation)
            }
        };
        fields.finish(unknown)?;
        Ok(Self { model, input, parameters, return_token_strs })
    }
}

fn model_name(fields: &mut Fields, limits: &Limits) -> Result<Option<String>, ApiError> {
    let model = fields.text("model")?;
    model.iter().try_for_each(|model| check(limits, Limit::NameBytes, "model", model.len()))?;
    Ok(model)
}

/// The model of a request: by its name, or the server's only one.
pub(super) fn find(state: &State, model: Option<String>) -> Result<(String, Generator), ApiError> {
    let name = match model {
        Some(name) => name,
        None => models::only_generator(state).ok_or_else(|| {
            ApiError::of_field(
                "model",
                "`model` is missing, and the server has more than one model; `GET /v1/models` lists them.",
            )
        })?,
    };
    let generator = models::generator(state, &name).ok_or_else(|| ApiError::no_model(state, &name))?;
    Ok((name, generator))
}

/// `POST /tokenize`: the tokens of a text or a conversation.
pub(super) async fn tokenize(state: &State, headers: &HeaderMap, body: Incoming) -> Result<Reply, ApiError> {
    let ChargedBody { bytes: body, charge } = read_body(state, headers, body).await?;
    let read = || {
        charge.add(tree_bytes(&body)?)?;
        TokenizeRequest::read(&body, state.server.limits(), state.config.unknown_fields)
    };
    let request = block_in_place_in_turn(body.len(), read).await?;
    let (name, generator) = find(state, request.model)?;
    let (prompt, adds_special) = match request.input {
        TokenizeInput::Prompt(text) => (Prompt::Text(text), generator.adds_special_tokens),
        TokenizeInput::Conversation(conversation) => (conversation.render(state, &name).await?, false),
    };
    charge.add(prompt.num_bytes())?;
    let tokens = encode_all(vec![prompt], &generator, adds_special, &request.parameters).await?;
    let tokens = tokens.first().map(|tokens| &**tokens).unwrap_or_default();
    let mut answer = json!({"count": tokens.len(), "max_model_len": generator.max_sequence_len, "tokens": tokens});
    if request.return_token_strs {
        let texts = tokens.iter().map(|&token| token_text(&generator.tokenizer, engine::TokenId(token)));
        answer["token_strs"] = texts.collect();
    }
    Ok(json_reply(&answer))
}

/// `POST /detokenize`: the text of tokens.
pub(super) async fn detokenize(state: &State, headers: &HeaderMap, body: Incoming) -> Result<Reply, ApiError> {
    let ChargedBody { bytes: body, charge } = read_body(state, headers, body).await?;
    charge.add(tree_bytes(&body)?)?;
    let mut fields = Fields::read(&body)?;
    let (_, generator) = find(state, model_name(&mut fields, state.server.limits())?)?;
    let missing = || ApiError::of_field("tokens", "`tokens` is missing: it is a list of token ids.");
    let tokens = fields.token_ids("tokens", generator.max_sequence_len)?.ok_or_else(missing)?;
    fields.finish(state.config.unknown_fields)?;
    if let Some(token) = tokens.iter().find(|&&token| token as usize >= generator.vocab_size) {
        let words =
            format!("`tokens` has the id {token}, which is outside of the vocabulary 0..{}.", generator.vocab_size);
        return Err(ApiError::of_field("tokens", words));
    }
    let text =
        block_in_place_in_turn(tokens.len() * size_of::<u32>(), || generator.tokenizer.decode(&tokens, false)).await;
    Ok(json_reply(&json!({"prompt": text})))
}

/// `POST /v1/completions/render` and `/v1/chat/completions/render`: the prompts that a request would generate from.
pub(super) async fn render(
    state: &Arc<State>,
    headers: &HeaderMap,
    body: Incoming,
    is_chat: bool,
) -> Result<Reply, ApiError> {
    let ChargedBody { bytes: body, charge } = read_body(state, headers, body).await?;
    let read = || {
        charge.add(tree_bytes(&body)?)?;
        CompletionRequest::read(&body, is_chat, state.server.limits(), state.config.unknown_fields)
    };
    let mut request = block_in_place_in_turn(body.len(), read).await?;
    let (_, generator) = find(state, Some(request.model.clone()))?;
    let prompts = take_prompts(state, &mut request).await?;
    charge.add(2 * prompts.iter().map(Prompt::num_bytes).sum::<usize>())?;
    let texts: Vec<Option<String>> = prompts.iter().map(Prompt::text).collect();
    let adds_special = generator.adds_special_tokens && !is_chat;
    let tokens = encode_all(prompts, &generator, adds_special, &request.parameters).await?;
    let entry = |(text, tokens): (Option<String>, Arc<[u32]>)| json!({"prompt": text, "prompt_token_ids": *tokens});
    let prompts: Vec<Value> = texts.into_iter().zip(tokens).map(entry).collect();
    Ok(json_reply(&json!({"object": "list", "model": request.model, "data": prompts})))
}

fn json_reply(value: &Value) -> Reply {
    reply(StatusCode::OK, JSON, value.to_string().into_bytes())
}
