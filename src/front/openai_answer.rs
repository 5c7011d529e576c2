//! Answers in OpenAI's form: choices as they come, and how they are written.

use std::time::{SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use futures::stream::{BoxStream, SelectAll, StreamExt};
use serde_json::{Value, json};
use serving::{InferError, InferResponse, ResponseStream};
use text::StopText;

use crate::openai::ANSWER;
use crate::openai_request::Asked;

/// Pieces of all choices, as they come.
pub(crate) type Choices = SelectAll<BoxStream<'static, Result<Piece, InferError>>>;

/// A part of one choice.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Piece {
    pub index: usize,
    pub text: String,
    /// The text of each token or group of tokens, and its log probability.
    pub logprobs: Vec<(String, f64)>,
    /// `stop` or `length`, in the last piece.
    pub finish: Option<&'static str>,
    /// Of the whole choice, as far as it is known.
    pub prompt_tokens: u64,
    pub output_tokens: u64,
}

impl Piece {
    /// A choice of which nothing has come.
    pub fn empty(index: usize) -> Self {
        Self { index, ..Self::default() }
    }

    /// Adds what came later.
    pub fn join(&mut self, later: Piece) {
        self.count(&later);
        self.text.push_str(&later.text);
        self.logprobs.extend(later.logprobs);
        self.finish = later.finish.or(self.finish);
    }

    /// Takes over the counts alone.
    pub fn count(&mut self, later: &Piece) {
        self.prompt_tokens = self.prompt_tokens.max(later.prompt_tokens);
        self.output_tokens = self.output_tokens.max(later.output_tokens);
    }
}

/// A choice that is being generated.
struct Choice {
    index: usize,
    responses: ResponseStream,
    stop: StopText,
    max_tokens: u64,
    logprobs: bool,
    /// Responses with text, for models that do not count.
    num_responses: u64,
    /// Numbers of tokens of prompt and answer, as outputs gave them.
    counts: (u64, u64),
    /// Put before the text.
    echo: Bytes,
    is_over: bool,
}

/// The pieces of one choice; dropping them cancels it.
pub(crate) fn choice(
    index: usize,
    responses: ResponseStream,
    asked: &Asked,
    echo: Bytes,
) -> BoxStream<'static, Result<Piece, InferError>> {
    let choice = Choice {
        index,
        responses,
        stop: StopText::new(asked.stop.iter().cloned()),
        max_tokens: u64::from(asked.max_tokens),
        logprobs: asked.logprobs,
        num_responses: 0,
        counts: (0, 0),
        echo,
        is_over: false,
    };
    futures::stream::unfold(choice, |mut choice| async move { choice.next().await.map(|piece| (piece, choice)) })
        .boxed()
}

impl Choice {
    /// The next piece with text or an end.
    async fn next(&mut self) -> Option<Result<Piece, InferError>> {
        while !self.is_over {
            let piece = match self.responses.next_response().await {
                Some(Ok(response)) => self.piece(&response),
                Some(Err(error)) => {
                    self.is_over = true;
                    return Some(Err(error));
                }
                None => self.finished(String::new(), Vec::new()),
            };
            if piece.finish.is_some() || !piece.text.is_empty() {
                return Some(Ok(piece));
            }
        }
        None
    }

    fn piece(&mut self, response: &InferResponse) -> Piece {
        let (text, logprobs) = self.content(response);
        let count = |name: &str| {
            let output = response.outputs.iter().find(|output| output.name == name)?.to_i32()?;
            u64::try_from(output.into_iter().map(i64::from).sum::<i64>()).ok()
        };
        let (input, output) = (count("num_input_tokens"), count("num_output_tokens"));
        self.counts = (input.unwrap_or(self.counts.0), output.unwrap_or(0).max(self.counts.1));
        self.num_responses += u64::from(!text.is_empty());
        let mut shown = self.take_echo();
        if self.stop.push(&text, &mut shown).is_some() {
            self.is_over = true;
            return Piece { text: shown, logprobs, finish: Some("stop"), ..self.counted() };
        }
        match response.is_final {
            true => self.finished(shown, logprobs),
            false => Piece { text: shown, logprobs, ..self.counted() },
        }
    }

    fn take_echo(&mut self) -> String {
        String::from_utf8_lossy(&std::mem::take(&mut self.echo)).into_owned()
    }

    fn finished(&mut self, mut shown: String, logprobs: Vec<(String, f64)>) -> Piece {
        self.is_over = true;
        shown.insert_str(0, &self.take_echo());
        self.stop.finish(&mut shown);
        let counted = self.counted();
        let finish = if counted.output_tokens >= self.max_tokens { "length" } else { "stop" };
        Piece { text: shown, logprobs, finish: Some(finish), ..counted }
    }

    fn counted(&self) -> Piece {
        let generation = self.responses.generation();
        let (prompt, output) = generation.map_or(self.counts, |it| (it.prompt_tokens, it.output_tokens));
        let prompt_tokens = prompt.max(self.counts.0);
        let output_tokens = if output > 0 { output } else { self.num_responses };
        Piece { index: self.index, prompt_tokens, output_tokens, ..Piece::default() }
    }

    /// The text of a response, and its log probability where that is requested.
    fn content(&self, response: &InferResponse) -> (String, Vec<(String, f64)>) {
        let output = |name: &str| response.outputs.iter().find(|output| output.name == name);
        let texts =
            ANSWER.iter().find_map(|name| output(name)).and_then(|output| output.to_byte_strings()).unwrap_or_default();
        let text: String = texts.iter().map(|text| String::from_utf8_lossy(text)).collect();
        let logprobs =
            output("output_log_probs").filter(|_| self.logprobs).and_then(|output| output.to_f32()).unwrap_or_default();
        if logprobs.is_empty() {
            return (text, Vec::new());
        }
        // Several tokens in one response share their text, and so their probability.
        let together = logprobs.iter().copied().map(f64::from).sum();
        (text.clone(), vec![(text, together)])
    }
}

/// What all parts of an answer have in common.
pub(crate) struct Head {
    id: String,
    model: String,
    created: u64,
    is_chat: bool,
    logprobs: bool,
    include_usage: bool,
    n: usize,
}

impl Head {
    pub fn new(asked: &Asked, is_chat: bool) -> Self {
        let created = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let prefix = if is_chat { "chatcmpl" } else { "cmpl" };
        let id = format!("{prefix}-{:08x}{:08x}", asked.drawn_seed, created as u32);
        let (model, logprobs, include_usage) = (asked.model.clone(), asked.logprobs, asked.include_usage);
        Self { id, model, created, is_chat, logprobs, include_usage, n: asked.n }
    }

    /// The whole answer.
    pub fn whole(&self, choices: &[Piece]) -> Value {
        let choice = |piece: &Piece| match self.is_chat {
            true => json!({
                "index": piece.index, "message": {"role": "assistant", "content": piece.text},
                "logprobs": self.logprobs_of(piece), "finish_reason": piece.finish,
            }),
            false => self.text_choice(piece),
        };
        let mut answer = self.around(choices.iter().map(choice).collect(), false);
        answer["usage"] = self.usage(choices);
        answer
    }

    /// The first chunk of a chat's choice, which says who speaks.
    pub fn opening(&self, index: usize) -> Option<Value> {
        let choice = json!({"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": null, "finish_reason": null});
        self.is_chat.then(|| self.around(vec![choice], true))
    }

    /// One piece of a stream.
    pub fn chunk(&self, piece: &Piece) -> Value {
        let choice = match self.is_chat {
            true => {
                let delta = if piece.text.is_empty() { json!({}) } else { json!({"content": piece.text}) };
                json!({"index": piece.index, "delta": delta, "logprobs": self.logprobs_of(piece), "finish_reason": piece.finish})
            }
            false => self.text_choice(piece),
        };
        self.around(vec![choice], true)
    }

    /// The chunk after the last choice, where it is requested.
    pub fn usage_chunk(&self, choices: &[Piece]) -> Option<Value> {
        self.include_usage.then(|| {
            let mut chunk = self.around(Vec::new(), true);
            chunk["usage"] = self.usage(choices);
            chunk
        })
    }

    fn text_choice(&self, piece: &Piece) -> Value {
        json!({"index": piece.index, "text": piece.text, "logprobs": self.logprobs_of(piece), "finish_reason": piece.finish})
    }

    fn around(&self, choices: Vec<Value>, is_chunk: bool) -> Value {
        let object = match (self.is_chat, is_chunk) {
            (true, true) => "chat.completion.chunk",
            (true, false) => "chat.completion",
            (false, _) => "text_completion",
        };
        json!({"id": self.id, "object": object, "created": self.created, "model": self.model, "choices": choices})
    }

    /// The prompt counts once for all of its choices.
    fn usage(&self, choices: &[Piece]) -> Value {
        let prompt: u64 = choices.iter().step_by(self.n.max(1)).map(|piece| piece.prompt_tokens).sum();
        let output: u64 = choices.iter().map(|piece| piece.output_tokens).sum();
        json!({"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output})
    }

    fn logprobs_of(&self, piece: &Piece) -> Value {
        if !self.logprobs {
            return Value::Null;
        }
        if self.is_chat {
            let token = |(token, logprob): &(String, f64)| json!({"token": token, "logprob": logprob, "bytes": token.as_bytes(), "top_logprobs": []});
            return json!({"content": piece.logprobs.iter().map(token).collect::<Vec<_>>()});
        }
        let mut offset = 0;
        let offsets: Vec<usize> = piece
            .logprobs
            .iter()
            .map(|(token, _)| {
                offset += token.chars().count();
                offset - token.chars().count()
            })
            .collect();
        let tokens: Vec<&str> = piece.logprobs.iter().map(|(token, _)| token.as_str()).collect();
        let values: Vec<f64> = piece.logprobs.iter().map(|(_, logprob)| *logprob).collect();
        json!({"tokens": tokens, "token_logprobs": values, "top_logprobs": null, "text_offset": offsets})
    }
}
