//! The choices of an answer, piece by piece.

use std::sync::Arc;

use chat_format::ChatDelta;
use engine::{FinishReason, SampledToken, TokenId};
use futures::stream::{BoxStream, SelectAll, StreamExt, unfold};
use generation::{Delta, GenerateEvent, PromptLogprob};
use serving::{EventStream, InferError};
use text::{Detokenizer, Tokenizer};

/// Pieces of all choices, in the order in which they are generated.
pub(crate) type Choices = SelectAll<BoxStream<'static, Result<Piece, InferError>>>;

/// About how many bytes a token has with its log-probability in an answer.
const LOGPROB_BYTES: usize = 64;

/// A part of one choice.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Piece {
    pub index: usize,
    pub text: String,
    /// What the text means in a chat.
    pub deltas: Vec<ChatDelta>,
    /// The tokens of the text. Models with tensors only have none.
    pub tokens: Vec<TokenLogprob>,
    /// How many of `tokens`, from the first on, are those of an echoed prompt.
    pub num_echoed: usize,
    /// Set in the last piece of the choice.
    pub finish: Option<Finish>,
    /// Token counts of the whole choice so far.
    pub usage: Usage,
    /// Of the prompt, in the first piece.
    pub prompt_logprobs: Option<Vec<PromptLogprob>>,
}

/// A token and its log-probabilities.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct TokenLogprob {
    pub spelling: Spelling,
    pub id: u32,
    /// `None` where the request has no log-probabilities.
    pub logprob: Option<f32>,
    /// The likeliest tokens, best first.
    pub top: Vec<(Spelling, f32)>,
}

/// How a token is spelled.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Spelling {
    /// The token's text; special tokens are spelled out.
    pub text: String,
    /// The token's bytes, where they are not those of the text: a token may be a part of a character.
    pub other_bytes: Option<Box<[u8]>>,
}

impl Spelling {
    /// The spelling of a token inside of a text.
    pub fn of(tokenizer: &Arc<Tokenizer>, token: TokenId) -> Self {
        let text = token_text(tokenizer, token);
        let bytes = tokenizer.token_bytes(token.0).filter(|_| text.contains(char::REPLACEMENT_CHARACTER));
        Self { text, other_bytes: bytes.map(|bytes| bytes.into()) }
    }

    /// The token's bytes.
    pub fn bytes(&self) -> &[u8] {
        self.other_bytes.as_deref().unwrap_or(self.text.as_bytes())
    }
}

impl From<String> for Spelling {
    fn from(text: String) -> Self {
        Self { text, other_bytes: None }
    }
}

/// Why a choice ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Finish {
    /// An end token of the model, or what the request stops at.
    Stop(Option<StoppedAt>),
    /// The number of tokens, or the end of the context.
    Length,
    /// Calls of tools, which the client has to answer.
    ToolCalls,
}

/// What a request said that its text ends at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum StoppedAt {
    /// One of its stop strings.
    Text(String),
    /// One of its `stop_token_ids`, unless the model ends its texts there anyway.
    Token(u32),
}

/// Token counts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Usage {
    pub prompt_tokens: u64,
    /// Tokens of the prompt found in the prefix cache.
    pub cached_tokens: u64,
    pub output_tokens: u64,
    /// Output tokens before the end of the reasoning.
    pub reasoning_tokens: u64,
}

impl Piece {
    /// A choice without text.
    pub fn empty(index: usize) -> Self {
        Self { index, ..Self::default() }
    }

    /// About how many bytes the piece has in an answer.
    pub fn num_bytes(&self) -> usize {
        let of_tokens: usize = self.tokens.iter().map(|token| 1 + token.top.len()).sum();
        let of_prompt: usize = self.prompt_logprobs.iter().flatten().map(|found| 1 + found.top.len()).sum();
        self.text.len() + (of_tokens + of_prompt) * LOGPROB_BYTES
    }

    /// Whether a client has to get the piece even if it has no text.
    pub fn says_more_than_text(&self) -> bool {
        self.finish.is_some() || !self.tokens.is_empty() || self.prompt_logprobs.is_some()
    }

    /// Adds a later piece.
    pub fn join(&mut self, later: Piece) {
        self.usage = later.usage;
        self.text.push_str(&later.text);
        self.deltas.extend(later.deltas);
        self.tokens.extend(later.tokens);
        self.finish = later.finish.or(self.finish.take());
        self.prompt_logprobs = self.prompt_logprobs.take().or(later.prompt_logprobs);
    }
}

/// What the pieces of a call contain.
pub(crate) struct CallOptions {
    /// Number of the call's first choice.
    pub first: usize,
    /// The prompt's tokens.
    pub prompt: Arc<[u32]>,
    pub stop: Arc<[String]>,
    /// Ids at which the request ends, and the model does not.
    pub stop_ids: Arc<[u32]>,
    /// Whether pieces list their tokens.
    pub lists_tokens: bool,
    /// Whether the output is dropped, because the request is for the prompt only.
    pub drops_output: bool,
    pub tokenizer: Arc<Tokenizer>,
}

/// The events of one call, as pieces.
struct Call {
    events: EventStream,
    options: CallOptions,
    /// By sequence.
    output_tokens: Vec<u64>,
    num_open: usize,
    prompt_logprobs: Option<Vec<PromptLogprob>>,
}

/// The pieces of a call of `num_sequences` choices. Dropping the stream cancels the call.
pub(crate) fn pieces(
    events: EventStream,
    num_sequences: usize,
    options: CallOptions,
) -> BoxStream<'static, Result<Piece, InferError>> {
    let output_tokens = vec![0; num_sequences];
    let call = Call { events, options, output_tokens, num_open: num_sequences, prompt_logprobs: None };
    unfold(call, |mut call| async move { call.next().await.map(|piece| (piece, call)) }).boxed()
}

impl Call {
    async fn next(&mut self) -> Option<Result<Piece, InferError>> {
        while self.num_open > 0 {
            match self.events.next_event().await {
                Some(Ok(GenerateEvent::Delta(delta))) => {
                    let piece = self.piece(delta);
                    if !piece.text.is_empty() || piece.says_more_than_text() {
                        return Some(Ok(piece));
                    }
                }
                Some(Ok(GenerateEvent::PromptLogprobs(found))) => self.prompt_logprobs = Some(found),
                Some(Ok(_)) => {}
                Some(Err(error)) => {
                    self.num_open = 0;
                    return Some(Err(error));
                }
                None => {
                    self.num_open = 0;
                    return Some(Err(InferError::internal("the model stopped before the end of its answer")));
                }
            }
        }
        None
    }

    fn piece(&mut self, delta: Delta) -> Piece {
        let Delta { index, tokens, text, stop, finished, .. } = delta;
        self.output_tokens[index] += tokens.len() as u64;
        let options = &self.options;
        let finish = finished.map(|reason| match (reason, stop) {
            (_, Some(stop)) => Finish::Stop(options.stop.get(stop).cloned().map(StoppedAt::Text)),
            (FinishReason::EndId(Some(id)), None) if options.stop_ids.contains(&id.0) => {
                Finish::Stop(Some(StoppedAt::Token(id.0)))
            }
            (FinishReason::Length, None) => Finish::Length,
            _ => Finish::Stop(None),
        });
        let cached_tokens = self.events.generation().map_or(0, |generation| generation.cached_tokens);
        let prompt_tokens = options.prompt.len() as u64;
        let mut usage = Usage {
            prompt_tokens,
            cached_tokens: cached_tokens.min(prompt_tokens),
            output_tokens: self.output_tokens[index],
            reasoning_tokens: 0,
        };
        self.num_open -= usize::from(finish.is_some());
        let prompt_logprobs = self.prompt_logprobs.take();
        let index = options.first + index;
        if options.drops_output {
            usage.output_tokens = 0;
            let finish = finish.map(|_| Finish::Length);
            return Piece { index, finish, usage, prompt_logprobs, ..Piece::default() };
        }
        let tokens = match options.lists_tokens {
            true => tokens.iter().map(|token| spelled(&options.tokenizer, token)).collect(),
            false => Vec::new(),
        };
        Piece { index, text, tokens, finish, usage, prompt_logprobs, ..Piece::default() }
    }
}

fn spelled(tokenizer: &Arc<Tokenizer>, sampled: &SampledToken) -> TokenLogprob {
    let top = sampled.top.iter().map(|&(id, logprob)| (Spelling::of(tokenizer, id), logprob)).collect();
    let spelling = Spelling::of(tokenizer, sampled.token);
    TokenLogprob { spelling, id: sampled.token.0, logprob: sampled.logprob, top }
}

/// The text of a token inside of a text; a special token's name.
pub(crate) fn token_text(tokenizer: &Arc<Tokenizer>, token: TokenId) -> String {
    let (mut detokenizer, mut text) = (Detokenizer::new(Arc::clone(tokenizer), false), String::new());
    // At the start of a text some tokenizers drop a token's leading space, so the token comes second.
    detokenizer.push_into(token.0, &mut text);
    detokenizer.finish_into(&mut text);
    let (mut detokenizer, mut both) = (Detokenizer::new(Arc::clone(tokenizer), false), String::new());
    detokenizer.push_into(token.0, &mut both);
    detokenizer.push_into(token.0, &mut both);
    detokenizer.finish_into(&mut both);
    match both.strip_prefix(&text) {
        Some(second) if !second.contains(char::REPLACEMENT_CHARACTER) => second.to_owned(),
        _ => text,
    }
}
