//! Answers and chunks in OpenAI's form. What all chunks of a stream have in common is encoded once.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use engine::TokenId;
use generation::PromptLogprob;
use serde_json::{Map, Value, json};
use text::Tokenizer;

use super::choices::{Finish, Piece, TokenLogprob, Usage, token_text};
use super::parameters::Parameters;

/// JSON has no infinity. Clients of vLLM know this value.
const LEAST_LOGPROB: f32 = -9999.0;

/// Identifies the program that answered.
pub(crate) const FINGERPRINT: &str = concat!("trireme-", env!("CARGO_PKG_VERSION"));

/// What all parts of an answer have in common.
pub(crate) struct Head {
    pub(super) is_chat: bool,
    pub(super) id: String,
    model: String,
    created: u64,
    /// The start of every chunk, up to its choices.
    chunk: String,
    lists_logprobs: bool,
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
        let created = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let prefix = if is_chat { "chatcmpl" } else { "cmpl" };
        let id = format!("{prefix}-{:08x}{:08x}", parameters.drawn_seed, created as u32);
        let object = if is_chat { "chat.completion.chunk" } else { "text_completion" };
        let common =
            json!({"id": id, "object": object, "created": created, "model": model, "system_fingerprint": FINGERPRINT});
        let mut chunk = format!("data: {common}");
        chunk.pop(); // The object goes on with the choices.
        Self {
            is_chat,
            id,
            model: model.to_owned(),
            created,
            chunk,
            lists_logprobs: parameters.logprobs.is_some(),
            return_token_ids: parameters.return_token_ids,
            include_usage: parameters.include_usage,
            continuous_usage: parameters.continuous_usage,
            n: parameters.n,
            prompts,
            tokenizer,
        }
    }

    /// The whole answer; `messages` are those of a chat, by choice.
    pub fn whole(&self, choices: &[Piece], mut messages: Vec<Value>) -> Value {
        let choice = |piece: &Piece| {
            let mut choice = json!({"index": piece.index});
            let fields = choice.as_object_mut().expect("it is an object");
            match messages.get_mut(piece.index) {
                Some(message) => drop(fields.insert("message".to_owned(), message.take())),
                None => drop(fields.insert("text".to_owned(), json!(piece.text))),
            }
            fields.insert("logprobs".to_owned(), self.logprobs_of(piece, 0));
            self.end_of(piece, fields);
            if let Some(found) = &piece.prompt_logprobs {
                let prompt_logprobs = self.prompt_logprobs(piece.index / self.n.max(1), found);
                fields.insert("prompt_logprobs".to_owned(), prompt_logprobs);
            }
            choice
        };
        let choices_json: Vec<Value> = choices.iter().map(choice).collect();
        let object = if self.is_chat { "chat.completion" } else { "text_completion" };
        let mut answer = json!({
            "id": self.id, "object": object, "created": self.created, "model": self.model,
            "system_fingerprint": FINGERPRINT, "choices": choices_json, "usage": self.usage(choices),
        });
        if self.return_token_ids
            && let Some(prompt) = self.prompts.first()
        {
            answer["prompt_token_ids"] = json!(**prompt);
        }
        answer
    }

    /// The first chunk of a chat's choice, with the role.
    pub fn opening(&self, index: usize) -> Bytes {
        let choice = json!({"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": null, "finish_reason": null});
        self.event(&[choice], None)
    }

    /// A chunk of a stream. `delta` is the message's change in a chat; `offset` the number of characters before the piece.
    pub fn chunk(&self, piece: &Piece, delta: Option<Value>, offset: usize) -> Bytes {
        let mut choice = json!({"index": piece.index});
        let fields = choice.as_object_mut().expect("it is an object");
        match delta {
            Some(delta) => drop(fields.insert("delta".to_owned(), delta)),
            None => drop(fields.insert("text".to_owned(), json!(piece.text))),
        }
        fields.insert("logprobs".to_owned(), self.logprobs_of(piece, offset));
        self.end_of(piece, fields);
        let usage = self.continuous_usage.then(|| self.usage(std::slice::from_ref(piece)));
        self.event(&[choice], usage)
    }

    /// The last chunk, with the usage, where the request has it.
    pub fn usage_chunk(&self, choices: &[Piece]) -> Option<Bytes> {
        self.include_usage.then(|| self.event(&[], Some(self.usage(choices))))
    }

    /// The reason of the end, and token ids.
    fn end_of(&self, piece: &Piece, fields: &mut Map<String, Value>) {
        let (reason, stop) = match &piece.finish {
            None => (None, None),
            Some(Finish::Length) => (Some("length"), None),
            Some(Finish::Stop(text)) => (Some("stop"), text.as_ref()),
        };
        fields.insert("finish_reason".to_owned(), json!(reason));
        if reason.is_some() {
            fields.insert("stop_reason".to_owned(), json!(stop));
        }
        if self.return_token_ids {
            let ids: Vec<u32> = piece.tokens.iter().map(|token| token.id).collect();
            fields.insert("token_ids".to_owned(), json!(ids));
        }
    }

    fn event(&self, choices: &[Value], usage: Option<Value>) -> Bytes {
        let choices = Value::from(choices);
        match (usage, self.include_usage) {
            (Some(usage), _) => format!("{},\"choices\":{choices},\"usage\":{usage}}}\n\n", self.chunk).into(),
            (None, true) => format!("{},\"choices\":{choices},\"usage\":null}}\n\n", self.chunk).into(),
            (None, false) => format!("{},\"choices\":{choices}}}\n\n", self.chunk).into(),
        }
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
        match (self.lists_logprobs, self.is_chat) {
            (false, _) => Value::Null,
            (true, true) => json!({"content": piece.tokens.iter().map(chat_logprob).collect::<Vec<_>>()}),
            (true, false) => completion_logprobs(&piece.tokens, offset),
        }
    }

    /// vLLM's form: for each token of the prompt an object from token ids to log-probabilities; null for the first.
    fn prompt_logprobs(&self, prompt: usize, found: &[PromptLogprob]) -> Value {
        let (Some(tokens), Some(tokenizer)) = (self.prompts.get(prompt), &self.tokenizer) else { return Value::Null };
        let entry = |id: u32, logprob: f32, rank: u32| {
            let text = token_text(tokenizer, TokenId(id));
            (id.to_string(), json!({"logprob": finite(logprob), "rank": rank, "decoded_token": text}))
        };
        let of_token = |(&id, found): (&u32, &PromptLogprob)| {
            let top = (1..).zip(&found.top).map(|(rank, &(token, logprob))| entry(token.0, logprob, rank));
            let own = entry(id, found.logprob, found.rank);
            Value::Object(std::iter::once(own).chain(top).collect())
        };
        let rest = tokens.iter().skip(1).zip(found).map(of_token);
        std::iter::once(Value::Null).chain(rest).collect()
    }

    /// The tokens of a prompt with their log-probabilities, as the start of an echoed choice.
    pub fn echoed_tokens(&self, prompt: usize, found: Option<&[PromptLogprob]>) -> Vec<TokenLogprob> {
        let (Some(tokens), Some(tokenizer)) = (self.prompts.get(prompt), &self.tokenizer) else { return Vec::new() };
        let text = |id: u32| token_text(tokenizer, TokenId(id));
        let token = |(at, &id): (usize, &u32)| {
            let found = at.checked_sub(1).and_then(|at| found?.get(at));
            let top = found.map(|found| &*found.top).unwrap_or_default();
            let top = top.iter().map(|&(token, logprob)| (token.0, text(token.0), logprob)).collect();
            TokenLogprob { text: text(id), id, logprob: found.map(|found| found.logprob), top }
        };
        tokens.iter().enumerate().map(token).collect()
    }
}

fn finite(logprob: f32) -> f32 {
    logprob.max(LEAST_LOGPROB)
}

fn chat_logprob(token: &TokenLogprob) -> Value {
    let entry = |text: &str, logprob: f32| json!({"token": text, "logprob": finite(logprob), "bytes": text.as_bytes()});
    let mut value = entry(&token.text, token.logprob.unwrap_or(LEAST_LOGPROB));
    value["top_logprobs"] = token.top.iter().map(|(_, text, logprob)| entry(text, *logprob)).collect();
    value
}

/// One entry for each token. The log-probabilities of an echoed prompt's first token are null.
fn completion_logprobs(tokens: &[TokenLogprob], offset: usize) -> Value {
    let mut end = offset;
    let mut begin_of = |token: &TokenLogprob| {
        end += token.text.chars().count();
        end - token.text.chars().count()
    };
    let offsets: Vec<usize> = tokens.iter().map(&mut begin_of).collect();
    let texts: Vec<&str> = tokens.iter().map(|token| token.text.as_str()).collect();
    let values: Vec<Option<f32>> = tokens.iter().map(|token| token.logprob.map(finite)).collect();
    let top = |token: &TokenLogprob| match token.logprob {
        None => Value::Null,
        Some(logprob) => {
            let entry = |text: &str, logprob: f32| (text.to_owned(), json!(finite(logprob)));
            let likeliest = token.top.iter().map(|(_, text, logprob)| entry(text, *logprob));
            Value::Object(likeliest.chain([entry(&token.text, logprob)]).collect())
        }
    };
    let top: Vec<Value> = tokens.iter().map(top).collect();
    json!({"tokens": texts, "token_logprobs": values, "top_logprobs": top, "text_offset": offsets})
}
