//! Answers in OpenAI's form. What all chunks of a stream have in common is encoded once.

use std::sync::Arc;

use bytes::Bytes;
use engine::TokenId;
use generation::PromptLogprob;
use serde_json::{Map, Value, json};
use text::Tokenizer;

use super::choices::{Finish, Piece, Spelling, StoppedAt, TokenLogprob, Usage, token_text};
use super::error::ApiError;
use super::parameters::Parameters;
use super::respond::AnswerFormat;
use super::turn::{Message, delta_json};
use crate::api::request_key;

/// JSON has no infinity. Clients of vLLM know this value.
const LEAST_LOGPROB: f32 = -9999.0;

/// Identifies the program that answered.
pub(crate) const FINGERPRINT: &str = concat!("trireme-", env!("CARGO_PKG_VERSION"));

/// What all parts of an answer have in common.
pub(crate) struct Head {
    pub(super) is_chat: bool,
    id: String,
    /// The part of the id that is different for each answer.
    unique: String,
    model: String,
    created: u64,
    /// The start of every chunk, up to its choices.
    chunk: String,
    /// Number of likeliest tokens that are listed for each token; `None` without log-probabilities.
    logprobs: Option<u32>,
    /// The same for the prompt.
    prompt_logprobs: Option<u32>,
    return_token_ids: bool,
    include_usage: bool,
    continuous_usage: bool,
    /// Number of choices of each prompt.
    n: usize,
    /// Of each prompt: its tokens, where they are part of the answer.
    prompts: Vec<Arc<[u32]>>,
    tokenizer: Option<Arc<Tokenizer>>,
}

impl Head {
    pub fn new(
        parameters: &Parameters,
        model: &str,
        is_chat: bool,
        prompts: Vec<Arc<[u32]>>,
        tokenizer: Option<Arc<Tokenizer>>,
    ) -> Self {
        let created = request_key::created();
        let prefix = if is_chat { "chatcmpl" } else { "cmpl" };
        let unique = format!("{:08x}{:08x}", parameters.drawn_seed, created as u32);
        let id = format!("{prefix}-{unique}");
        let object = if is_chat { "chat.completion.chunk" } else { "text_completion" };
        let common =
            json!({"id": id, "object": object, "created": created, "model": model, "system_fingerprint": FINGERPRINT});
        let mut chunk = format!("data: {common}");
        chunk.pop(); // The object goes on with the choices.
        Self {
            is_chat,
            id,
            unique,
            model: model.to_owned(),
            created,
            chunk,
            logprobs: parameters.logprobs,
            prompt_logprobs: parameters.prompt_logprobs,
            return_token_ids: parameters.return_token_ids,
            include_usage: parameters.include_usage,
            continuous_usage: parameters.continuous_usage,
            n: parameters.n,
            prompts,
            tokenizer,
        }
    }

    fn choice(&self, piece: &Piece, name: &str, value: Value, offset: usize) -> Value {
        let mut choice = json!({"index": piece.index});
        let fields = choice.as_object_mut().expect("it is an object");
        fields.insert(name.to_owned(), value);
        fields.insert("logprobs".to_owned(), self.logprobs_of(piece, offset));
        self.end_of(piece, fields);
        choice
    }

    /// The reason of the end, and token ids.
    fn end_of(&self, piece: &Piece, fields: &mut Map<String, Value>) {
        let (reason, stop) = match &piece.finish {
            None => (None, None),
            Some(Finish::Length) => (Some("length"), None),
            Some(Finish::Stop(None)) => (Some("stop"), None),
            Some(Finish::Stop(Some(StoppedAt::Text(text)))) => (Some("stop"), Some(json!(text))),
            Some(Finish::Stop(Some(StoppedAt::Token(id)))) => (Some("stop"), Some(json!(id))),
            Some(Finish::ToolCalls) => (Some("tool_calls"), None),
        };
        fields.insert("finish_reason".to_owned(), json!(reason));
        if reason.is_some() {
            fields.insert("stop_reason".to_owned(), json!(stop));
        }
        if self.return_token_ids {
            let ids: Vec<u32> = piece.tokens[piece.num_echoed..].iter().map(|token| token.id).collect();
            fields.insert("token_ids".to_owned(), json!(ids));
        }
    }

    /// A chunk. `prompt`: the tokens of the prompt, where the chunk has them.
    fn event(&self, choices: &[Value], usage: Option<Value>, prompt: Option<&[u32]>) -> Bytes {
        let choices = Value::from(choices);
        let prompt = prompt.map_or_else(String::new, |prompt| format!(",\"prompt_token_ids\":{}", json!(prompt)));
        match (usage, self.include_usage) {
            (Some(usage), _) => format!("{},\"choices\":{choices}{prompt},\"usage\":{usage}}}\n\n", self.chunk).into(),
            (None, true) => format!("{},\"choices\":{choices}{prompt},\"usage\":null}}\n\n", self.chunk).into(),
            (None, false) => format!("{},\"choices\":{choices}{prompt}}}\n\n", self.chunk).into(),
        }
    }

    /// The tokens of the prompt of a choice, where the client asked for token ids.
    fn prompt_token_ids(&self, choice: usize) -> Option<&[u32]> {
        self.prompts.get(choice / self.n.max(1)).filter(|_| self.return_token_ids).map(|prompt| &**prompt)
    }

    /// Token counts. The prompt counts once for all of its choices.
    fn usage(&self, choices: &[Piece]) -> Value {
        let of_prompts = || choices.iter().step_by(self.n.max(1)).map(|piece| piece.usage);
        let prompt: u64 = of_prompts().map(|usage| usage.prompt_tokens).sum();
        let cached: u64 = of_prompts().map(|usage| usage.cached_tokens).sum();
        let sum = |count: fn(&Usage) -> u64| -> u64 { choices.iter().map(|piece| count(&piece.usage)).sum() };
        let (output, reasoning) = (sum(|usage| usage.output_tokens), sum(|usage| usage.reasoning_tokens));
        json!({
            "prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": {"reasoning_tokens": reasoning},
        })
    }

    fn logprobs_of(&self, piece: &Piece, offset: usize) -> Value {
        match (self.logprobs.is_some(), self.is_chat) {
            (false, _) => Value::Null,
            (true, true) => json!({"content": piece.tokens.iter().map(chat_logprob).collect::<Vec<_>>()}),
            (true, false) => completion_logprobs(&piece.tokens, offset),
        }
    }

    /// vLLM's form: for each token of the prompt an object from token ids to log-probabilities; null for the first. `None`
    /// where the client did not ask for them.
    fn prompt_logprobs(&self, prompt: usize, found: Option<&[PromptLogprob]>) -> Option<Value> {
        let (count, found) = (self.prompt_logprobs? as usize, found?);
        let (tokens, tokenizer) = (self.prompts.get(prompt)?, self.tokenizer.as_ref()?);
        let entry = |id: u32, logprob: f32, rank: u32| {
            let text = token_text(tokenizer, TokenId(id));
            (id.to_string(), json!({"logprob": finite(logprob), "rank": rank, "decoded_token": text}))
        };
        let of_token = |(&id, found): (&u32, &PromptLogprob)| {
            let top = (1..).zip(&found.top).take(count).map(|(rank, &(token, logprob))| entry(token.0, logprob, rank));
            let own = entry(id, found.logprob, found.rank);
            Value::Object(std::iter::once(own).chain(top).collect())
        };
        let rest = tokens.iter().skip(1).zip(found).map(of_token);
        Some(std::iter::once(Value::Null).chain(rest).collect())
    }

    /// The tokens of a prompt with their log-probabilities, as the start of an echoed choice.
    pub fn echoed_tokens(&self, prompt: usize, found: Option<&[PromptLogprob]>) -> Vec<TokenLogprob> {
        let (Some(tokens), Some(tokenizer)) = (self.prompts.get(prompt), &self.tokenizer) else { return Vec::new() };
        let spelling = |id: u32| Spelling::of(tokenizer, TokenId(id));
        let count = self.logprobs.unwrap_or(0) as usize;
        let token = |(at, &id): (usize, &u32)| {
            let found = at.checked_sub(1).and_then(|at| found?.get(at));
            let top = found.map(|found| &*found.top).unwrap_or_default();
            let top = top.iter().take(count).map(|&(token, logprob)| (spelling(token.0), logprob)).collect();
            TokenLogprob { spelling: spelling(id), id, logprob: found.map(|found| found.logprob), top }
        };
        tokens.iter().enumerate().map(token).collect()
    }
}

/// Completions and chats in OpenAI's form.
pub(crate) struct OpenAiFormat {
    pub(super) head: Head,
    pub(super) echo: Echo,
    /// By choice: the last usage, whether a piece was sent, and the characters of the tokens that were sent.
    sent: Vec<(Piece, bool, usize)>,
}

/// Prompts that are echoed before their choices.
pub(crate) struct Echo {
    /// By prompt; empty where prompts are not echoed.
    pub(super) texts: Vec<String>,
    /// Whether the prompt's tokens are listed, too.
    pub(super) lists_tokens: bool,
}

impl OpenAiFormat {
    /// The form of an answer with `count` choices.
    pub(super) fn new(head: Head, echo: Echo, count: usize) -> Self {
        Self { head, echo, sent: (0..count).map(|index| (Piece::empty(index), false, 0)).collect() }
    }

    /// The tokens of a prompt that is echoed with its tokens; none otherwise. `found` are its log-probabilities.
    fn echoed_tokens(&self, prompt: usize, found: Option<&[PromptLogprob]>) -> Vec<TokenLogprob> {
        let is_listed = self.echo.lists_tokens && prompt < self.echo.texts.len();
        if is_listed { self.head.echoed_tokens(prompt, found) } else { Vec::new() }
    }

    /// Puts the prompt with its `tokens` before the first piece of a choice.
    fn add_echo(&self, piece: &mut Piece, tokens: &[TokenLogprob]) {
        if let Some(text) = self.echo.texts.get(piece.index / self.head.n.max(1)) {
            piece.text.insert_str(0, text);
            piece.num_echoed = tokens.len();
            piece.tokens.splice(..0, tokens.iter().cloned());
        }
    }

    /// A choice of a whole answer. `found` are the log-probabilities of its prompt.
    fn whole_choice(&self, piece: &mut Piece, found: Option<&[PromptLogprob]>) -> Value {
        let (head, n) = (&self.head, self.head.n.max(1));
        let (name, value) = match head.is_chat {
            true => ("message", Message::of(std::mem::take(&mut piece.deltas), &head.unique, piece.index).json()),
            false => ("text", json!(piece.text)),
        };
        let mut choice = head.choice(piece, name, value, 0);
        if head.is_chat {
            return choice;
        }
        if let Some(prompt) = head.prompt_token_ids(piece.index) {
            choice["prompt_token_ids"] = json!(prompt);
        }
        let found = found.filter(|_| piece.index.is_multiple_of(n));
        if let Some(found) = head.prompt_logprobs(piece.index / n, found) {
            choice["prompt_logprobs"] = found;
        }
        choice
    }
}

impl AnswerFormat for OpenAiFormat {
    /// The choices are written one by one: as values, those of an answer with log-probabilities are many times larger.
    fn whole(&mut self, mut choices: Vec<Piece>) -> Vec<u8> {
        let (head, n) = (&self.head, self.head.n.max(1));
        let object = if head.is_chat { "chat.completion" } else { "text_completion" };
        let common = json!({
            "id": head.id, "object": object, "created": head.created, "model": head.model,
            "system_fingerprint": FINGERPRINT,
        });
        let mut answer = common.to_string();
        answer.pop(); // The object goes on with the choices.
        let usage = head.usage(&choices);
        let mut of_chat = None;
        for of_prompt in choices.chunks_mut(n) {
            // They come with one choice of each prompt, and belong to all of them.
            let found = of_prompt.iter_mut().find_map(|piece| piece.prompt_logprobs.take());
            let prompt = of_prompt[0].index / n;
            let echoed = self.echoed_tokens(prompt, found.as_deref());
            for piece in of_prompt {
                self.add_echo(piece, &echoed);
                answer.push_str(if piece.index == 0 { ",\"choices\":[" } else { "," });
                answer.push_str(&self.whole_choice(piece, found.as_deref()).to_string());
                piece.tokens = Vec::new();
            }
            of_chat = of_chat.or(found.filter(|_| head.is_chat));
        }
        answer.push_str(&format!("],\"usage\":{usage}"));
        // A chat has one prompt, whose tokens are not those of a choice.
        if let Some(found) = head.prompt_logprobs(0, of_chat.as_deref()) {
            answer.push_str(&format!(",\"prompt_logprobs\":{found}"));
        }
        if let Some(prompt) = head.prompt_token_ids(0) {
            answer.push_str(&format!(",\"prompt_token_ids\":{}", json!(prompt)));
        }
        answer.push('}');
        answer.into_bytes()
    }

    /// The first chunk of each choice of a chat has the role; the first one of all has the tokens of the prompt.
    fn begin(&mut self) -> Bytes {
        let mut events = Vec::new();
        for index in (0..self.sent.len()).filter(|_| self.head.is_chat) {
            let delta = json!({"role": "assistant", "content": ""});
            let choice = json!({"index": index, "delta": delta, "logprobs": null, "finish_reason": null});
            let prompt = self.head.prompt_token_ids(0).filter(|_| index == 0);
            events.extend_from_slice(&self.head.event(&[choice], None, prompt));
        }
        events.into()
    }

    fn piece(&mut self, mut piece: Piece) -> Bytes {
        let is_first = !self.sent[piece.index].1;
        if is_first {
            let found = piece.prompt_logprobs.take();
            let echoed = self.echoed_tokens(piece.index / self.head.n.max(1), found.as_deref());
            self.add_echo(&mut piece, &echoed);
        }
        let (last, has_begun, offset) = &mut self.sent[piece.index];
        *has_begun = true;
        last.usage = piece.usage;
        let begin = *offset;
        *offset += piece.tokens.iter().map(|token| token.spelling.text.chars().count()).sum::<usize>();
        let (name, value) = match self.head.is_chat {
            true => ("delta", delta_json(std::mem::take(&mut piece.deltas), &self.head.unique, piece.index)),
            false => ("text", json!(piece.text)),
        };
        let mut choice = self.head.choice(&piece, name, value, begin);
        if let Some(prompt) = self.head.prompt_token_ids(piece.index).filter(|_| is_first && !self.head.is_chat) {
            choice["prompt_token_ids"] = json!(prompt);
        }
        let usage = self.head.continuous_usage.then(|| self.head.usage(std::slice::from_ref(&piece)));
        self.head.event(&[choice], usage, None)
    }

    fn end(&mut self, has_failed: bool) -> Bytes {
        let mut events = Vec::new();
        if self.head.include_usage && !has_failed {
            let totals: Vec<Piece> = self.sent.iter().map(|(piece, ..)| piece.clone()).collect();
            events.extend_from_slice(&self.head.event(&[], Some(self.head.usage(&totals)), None));
        }
        events.extend_from_slice(b"data: [DONE]\n\n");
        events.into()
    }

    fn error(&mut self, error: &ApiError) -> Bytes {
        format!("data: {}\n\n", error.json()).into()
    }
}

fn finite(logprob: f32) -> f32 {
    logprob.max(LEAST_LOGPROB)
}

pub(super) fn chat_logprob(token: &TokenLogprob) -> Value {
    let entry = |spelling: &Spelling, logprob: f32| json!({"token": spelling.text, "logprob": finite(logprob), "bytes": spelling.bytes()});
    let mut value = entry(&token.spelling, token.logprob.unwrap_or(LEAST_LOGPROB));
    value["top_logprobs"] = token.top.iter().map(|(spelling, logprob)| entry(spelling, *logprob)).collect();
    value
}

/// One entry for each token. The log-probabilities of an echoed prompt's first token are null.
fn completion_logprobs(tokens: &[TokenLogprob], offset: usize) -> Value {
    let mut end = offset;
    let mut begin_of = |token: &TokenLogprob| {
        end += token.spelling.text.chars().count();
        end - token.spelling.text.chars().count()
    };
    let offsets: Vec<usize> = tokens.iter().map(&mut begin_of).collect();
    let texts: Vec<&str> = tokens.iter().map(|token| token.spelling.text.as_str()).collect();
    let values: Vec<Option<f32>> = tokens.iter().map(|token| token.logprob.map(finite)).collect();
    let top = |token: &TokenLogprob| match token.logprob {
        None => Value::Null,
        Some(logprob) => {
            let entry = |text: &str, logprob: f32| (text.to_owned(), json!(finite(logprob)));
            let likeliest = token.top.iter().map(|(spelling, logprob)| entry(&spelling.text, *logprob));
            Value::Object(likeliest.chain([entry(&token.spelling.text, logprob)]).collect())
        }
    };
    let top: Vec<Value> = tokens.iter().map(top).collect();
    json!({"tokens": texts, "token_logprobs": values, "top_logprobs": top, "text_offset": offsets})
}
