//! Token events as the tensors TensorRT-LLM's clients read.

use engine::{SampledToken, TokenEvent, TokenId};
use serving::{InferResponse, Tensor};

use super::config::LlmConfig;
use super::inputs::LlmRequest;

/// Builds the responses of one request.
pub(crate) struct Responses {
    id: String,
    model_name: String,
    model_version: String,
    /// Outputs that are declared, and asked for if the request asks at all.
    wanted: Vec<String>,
    streaming: bool,
    return_log_probs: bool,
    /// Put before the output; empty when it is left out.
    prompt: Vec<TokenId>,
    /// Tokens that no response has carried yet.
    pending: Vec<SampledToken>,
    num_output_tokens: usize,
    cumulative_log_prob: f32,
}

impl Responses {
    pub(crate) fn new(config: &LlmConfig, version: &str, request: &serving::InferRequest, parsed: &LlmRequest) -> Self {
        let asked = |name: &&String| request.requested_outputs.is_empty() || request.requested_outputs.contains(name);
        let exclude_input = parsed.exclude_input || parsed.streaming;
        Self {
            id: request.id.clone(),
            model_name: config.name.clone(),
            model_version: version.to_owned(),
            wanted: config.outputs.iter().filter(asked).cloned().collect(),
            streaming: parsed.streaming,
            return_log_probs: parsed.return_log_probs,
            prompt: if exclude_input { Vec::new() } else { parsed.request.prompt.clone() },
            pending: Vec::new(),
            num_output_tokens: 0,
            cumulative_log_prob: 0.0,
        }
    }

    /// The response this event completes: each event when streaming, else the last.
    pub(crate) fn push(&mut self, event: TokenEvent, num_input_tokens: usize) -> Option<InferResponse> {
        self.num_output_tokens += event.tokens.len();
        self.cumulative_log_prob += event.tokens.iter().filter_map(|token| token.logprob).sum::<f32>();
        self.pending.extend(event.tokens);
        let is_final = event.finished.is_some();
        if !is_final && (!self.streaming || self.pending.is_empty()) {
            return None;
        }
        let tokens = std::mem::take(&mut self.pending);
        let outputs = self.wanted.iter().filter_map(|name| self.output(name, &tokens, num_input_tokens)).collect();
        Some(InferResponse {
            model_name: self.model_name.clone(),
            model_version: self.model_version.clone(),
            id: self.id.clone(),
            outputs,
            is_final,
            ..InferResponse::default()
        })
    }

    /// One output by its name in `config.pbtxt`, batch and beam dimensions of 1 in front; `None` for one we have nothing for.
    fn output(&self, name: &str, tokens: &[SampledToken], num_input_tokens: usize) -> Option<Tensor> {
        let ids = || self.prompt.iter().copied().chain(tokens.iter().map(|token| token.token)).map(|id| id.0 as i32);
        let length = self.prompt.len() + tokens.len();
        Some(match name {
            "output_ids" => Tensor::from_i32(name, &[1, 1, length as i64], &ids().collect::<Vec<_>>()),
            "sequence_length" => Tensor::from_i32(name, &[1, 1], &[length as i32]),
            "cum_log_probs" => Tensor::from_f32(name, &[1, 1], &[self.cumulative_log_prob]),
            "output_log_probs" => {
                let log_prob = |token: &SampledToken| token.logprob.filter(|_| self.return_log_probs).unwrap_or(0.0);
                Tensor::from_f32(name, &[1, 1, tokens.len() as i64], &tokens.iter().map(log_prob).collect::<Vec<_>>())
            }
            "batch_index" | "sequence_index" => Tensor::from_i32(name, &[1, 1], &[0]),
            "num_input_tokens" => Tensor::from_i32(name, &[1, 1], &[num_input_tokens as i32]),
            "num_output_tokens" => Tensor::from_i32(name, &[1, 1], &[self.num_output_tokens as i32]),
            _ => return None,
        })
    }
}
