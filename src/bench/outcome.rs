//! Sampling parameters of requests, and the times and tokens of their responses.

use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::Args;
use client::ClientError;
use serde_json::{Map, Value};

use crate::dataset::Prompt;

/// Sampling parameters of all requests.
#[derive(Debug, Clone, Args)]
pub(crate) struct Sampling {
    /// Sample from this many most likely tokens; 1 is greedy
    #[arg(long, default_value_t = 1)]
    pub top_k: u32,
    /// Sample from the most likely tokens with this cumulative probability
    #[arg(long, default_value_t = 1.0)]
    pub top_p: f64,
    /// Sampling temperature
    #[arg(long, default_value_t = 1.0)]
    pub temperature: f64,
    /// Stream the responses, so that the first token can be timed
    #[arg(long, default_value = "true", value_parser = boolean, action = clap::ArgAction::Set, num_args = 0..=1, default_missing_value = "true")]
    pub stream_output: bool,
    /// Generate beyond the token that ends a sequence, so that the work does not depend on the text
    #[arg(long, default_value = "true", value_parser = boolean, action = clap::ArgAction::Set, num_args = 0..=1, default_missing_value = "true")]
    pub ignore_eos: bool,
    /// A JSON object whose fields are added to the body of every request, for example a `response_format`; not over gRPC
    #[arg(long, value_name = "JSON", value_parser = json_object, default_value = "{}")]
    pub extra_body: Arc<Map<String, Value>>,
}

impl Sampling {
    /// Adds the fields of `--extra-body` to a request's body.
    pub(crate) fn extend(&self, body: &mut Map<String, Value>) {
        body.extend(self.extra_body.iter().map(|(name, value)| (name.clone(), value.clone())));
    }
}

fn json_object(text: &str) -> Result<Arc<Map<String, Value>>, String> {
    serde_json::from_str(text).map(Arc::new).map_err(|error| format!("not a JSON object: {error}"))
}

/// The times and tokens of one request.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub started: Instant,
    pub last: Instant,
    /// When it was sent, from the start of the run.
    pub at: Duration,
    pub time_to_first: Option<Duration>,
    /// Time before each token after the first piece; the tokens of a piece share its gap equally.
    pub gaps: Vec<Duration>,
    /// Number of pieces received.
    pub num_pieces: usize,
    /// Number of tokens as counted by the server.
    pub num_tokens: Option<usize>,
    /// Token count that came with the last piece.
    pub last_count: usize,
    pub text: String,
    /// The tokens of the response, if the server names them.
    pub ids: Vec<u32>,
    pub prompt_tokens: usize,
    /// Prompt tokens that the server's prefix cache had, if it says so.
    pub cached_tokens: Option<usize>,
    pub max_tokens: usize,
    pub priority: Option<i64>,
    pub latency: Duration,
    pub error: Option<String>,
}

impl Outcome {
    /// Starts the clock of a request.
    pub(crate) fn begin(prompt: &Prompt, at: Duration) -> Self {
        let started = Instant::now();
        Self {
            started,
            last: started,
            at,
            time_to_first: None,
            gaps: Vec::new(),
            num_pieces: 0,
            num_tokens: None,
            last_count: 0,
            text: String::new(),
            ids: Vec::new(),
            prompt_tokens: prompt.ids.len(),
            cached_tokens: None,
            max_tokens: prompt.max_tokens,
            priority: prompt.priority,
            latency: Duration::ZERO,
            error: None,
        }
    }

    /// Records a piece with the server's token count. Some servers count the tokens of the piece, others all tokens so far.
    pub(crate) fn add_counted_piece(&mut self, count: Option<usize>, text: &str) {
        let Some(count) = count else { return self.add_piece(None, text) };
        let new = if count > self.last_count { count - self.last_count } else { count };
        self.last_count = count;
        self.add_piece(Some(new), text);
    }

    /// Records a piece of the response, with its number of tokens if that is known.
    pub(crate) fn add_piece(&mut self, count: Option<usize>, text: &str) {
        let (now, tokens) = (Instant::now(), count.unwrap_or(1).max(1));
        match self.time_to_first {
            None => self.time_to_first = Some(now - self.started),
            Some(_) => self.gaps.extend(std::iter::repeat_n((now - self.last) / tokens as u32, tokens)),
        }
        self.last = now;
        self.num_pieces += 1;
        self.text.push_str(text);
        if let Some(count) = count {
            *self.num_tokens.get_or_insert(0) += count;
        }
    }

    /// Records the end of the request.
    pub(crate) fn end(&mut self, result: Result<(), ClientError>) {
        self.latency = self.started.elapsed();
        self.error = result.err().map(|error| error.to_string());
    }
}

/// Parses a boolean in any form that other tools accept.
pub(crate) fn boolean(text: &str) -> Result<bool, String> {
    match text.to_ascii_lowercase().as_str() {
        "true" | "1" | "yes" => Ok(true),
        "false" | "0" | "no" => Ok(false),
        _ => Err(format!("`{text}` is neither true nor false")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome() -> Outcome {
        Outcome::begin(&Prompt { ids: vec![1], max_tokens: 4, ..Prompt::default() }, Duration::ZERO)
    }

    #[test]
    fn cumulative_and_separate_token_counts_have_the_same_sum() {
        let (mut all, mut each) = (outcome(), outcome());
        [1, 2, 4].into_iter().for_each(|count| all.add_counted_piece(Some(count), "x"));
        [1, 1, 1].into_iter().for_each(|count| each.add_counted_piece(Some(count), "x"));
        assert_eq!((all.num_tokens, all.gaps.len(), &all.text[..]), (Some(4), 3, "xxx"));
        assert_eq!((each.num_tokens, each.gaps.len()), (Some(3), 2));
    }
}
