//! Servers as the benchmark sees them: a prompt goes in, times come out.

use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use client::ClientError;
use serde::{Deserialize, Serialize};

use crate::dataset::Prompt;
use crate::target_grpc::GrpcTarget;
use crate::target_http::{HttpTarget, OpenAiTarget};

/// What a server speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Protocol {
    /// KServe over gRPC, as Triton speaks it
    Grpc,
    /// KServe over HTTP: `generate_stream`
    Http,
    /// OpenAI's `/v1/completions`, as vLLM and SGLang speak it
    Openai,
    /// OpenAI's `/v1/chat/completions`
    OpenaiChat,
}

impl Protocol {
    /// Its name on the command line.
    pub(crate) fn name(self) -> String {
        self.to_possible_value().expect("no protocol is hidden").get_name().to_owned()
    }
}

/// How tokens are chosen.
#[derive(Debug, Clone, Args)]
pub(crate) struct Sampling {
    /// Sample from this many likeliest tokens; 1 is greedy
    #[arg(long, default_value_t = 1)]
    pub top_k: u32,
    /// Sample from the likeliest tokens that have this probability together
    #[arg(long, default_value_t = 1.0)]
    pub top_p: f64,
    /// Sampling temperature
    #[arg(long, default_value_t = 1.0)]
    pub temperature: f64,
    /// Whether answers come in pieces, so that the first one can be timed
    #[arg(long, default_value = "true", value_parser = crate::boolean, action = clap::ArgAction::Set, num_args = 0..=1, default_missing_value = "true")]
    pub stream_output: bool,
    /// Whether answers go on behind the token that ends a sequence, so that the work does not depend on what is said
    #[arg(long, default_value = "true", value_parser = crate::boolean, action = clap::ArgAction::Set, num_args = 0..=1, default_missing_value = "true")]
    pub ignore_eos: bool,
}

/// How one request went.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub started: Instant,
    pub last: Instant,
    /// When it was sent, since the run began.
    pub at: Duration,
    pub time_to_first: Option<Duration>,
    /// Gaps between tokens; those of one piece share its gap.
    pub gaps: Vec<Duration>,
    /// Pieces that came.
    pub num_pieces: usize,
    /// Tokens that the server itself counted.
    pub num_tokens: Option<usize>,
    /// The count of the last piece.
    pub last_count: usize,
    pub text: String,
    pub prompt_tokens: usize,
    pub max_tokens: usize,
    pub latency: Duration,
    pub error: Option<String>,
}

impl Outcome {
    /// Of a request that is sent now.
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
            prompt_tokens: prompt.ids.len(),
            max_tokens: prompt.max_tokens,
            latency: Duration::ZERO,
            error: None,
        }
    }

    /// A piece came with the server's count of tokens: some servers count those of the piece, others all so far.
    pub(crate) fn add_counted_piece(&mut self, count: Option<usize>, text: &str) {
        let Some(count) = count else { return self.add_piece(None, text) };
        let new = if count > self.last_count { count - self.last_count } else { count };
        self.last_count = count;
        self.add_piece(Some(new), text);
    }

    /// A piece of the answer came, of `count` tokens where that is known.
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

    /// The request has ended.
    pub(crate) fn end(&mut self, result: Result<(), ClientError>) {
        self.latency = self.started.elapsed();
        self.error = result.err().map(|error| error.to_string());
    }
}

/// A server and one of its models.
#[derive(Clone)]
pub enum Target {
    /// Over gRPC.
    #[allow(private_interfaces)] // Made by `open` alone.
    Grpc(GrpcTarget),
    /// Over HTTP.
    #[allow(private_interfaces)]
    Http(HttpTarget),
    /// OpenAI's protocol.
    #[allow(private_interfaces)]
    OpenAi(OpenAiTarget),
}

impl Target {
    /// Connects to `address` and finds `model`, or the first one that answers text with text. Over gRPC the requests share
    /// so many connections, at least 1; over HTTP each has its own.
    ///
    /// # Errors
    /// When nothing answers, or it has no such model.
    pub(crate) async fn open(
        protocol: Protocol,
        address: &str,
        model: Option<&str>,
        num_connections: usize,
    ) -> Result<Self, ClientError> {
        Ok(match protocol {
            Protocol::Grpc => Target::Grpc(GrpcTarget::open(address, model, num_connections).await?),
            Protocol::Http => Target::Http(HttpTarget::open(address, model).await?),
            Protocol::Openai => Target::OpenAi(OpenAiTarget::open(address, model, false).await?),
            Protocol::OpenaiChat => Target::OpenAi(OpenAiTarget::open(address, model, true).await?),
        })
    }

    /// The model that is asked.
    pub fn model(&self) -> &str {
        match self {
            Target::Grpc(target) => target.model(),
            Target::Http(target) => &target.model,
            Target::OpenAi(target) => &target.model,
        }
    }

    /// Sends a prompt and follows its answer.
    pub(crate) async fn send(&self, prompt: &Prompt, sampling: &Sampling, outcome: &mut Outcome) {
        let result = match self {
            Target::Grpc(target) => target.send(prompt, sampling, outcome).await,
            Target::Http(target) => target.send(prompt, sampling, outcome).await,
            Target::OpenAi(target) => target.send(prompt, sampling, outcome).await,
        };
        outcome.end(result);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome() -> Outcome {
        Outcome::begin(&Prompt { text: String::new(), ids: vec![1], max_tokens: 4 }, Duration::ZERO)
    }

    #[test]
    fn counts_so_far_and_counts_of_each_piece_come_to_the_same() {
        let (mut all, mut each) = (outcome(), outcome());
        [1, 2, 4].into_iter().for_each(|count| all.add_counted_piece(Some(count), "x"));
        [1, 1, 1].into_iter().for_each(|count| each.add_counted_piece(Some(count), "x"));
        assert_eq!((all.num_tokens, all.gaps.len(), &all.text[..]), (Some(4), 3, "xxx"));
        assert_eq!((each.num_tokens, each.gaps.len()), (Some(3), 2));
    }
}
