//! Token events as the tensors TensorRT-LLM's clients read.

use std::time::{Instant, SystemTime, UNIX_EPOCH};

use engine::{BlockUsage, DraftUsage, SampledToken, TokenId};
use serving::{InferRequest, InferResponse, Tensor};
use worker::LogitsPiece;

use super::config::LlmConfig;
use super::inputs::LlmRequest;
use super::logits::{Logits, LogitsForm};

/// Fills the places behind shorter sequences where several share a response and the model has no end id.
const PADDING: TokenId = TokenId(0);

/// Builds the responses of one request.
pub(crate) struct Responses {
    id: String,
    model_name: String,
    model_version: String,
    /// Outputs that are declared and asked for, and that we have something for.
    wanted: Vec<String>,
    mode: Mode,
    /// Put before the output; empty when it is left out.
    prompt: Vec<TokenId>,
    num_input_tokens: usize,
    padding: TokenId,
    logits_form: LogitsForm,
    sequences: Vec<Output>,
    num_open: usize,
    arrived: (Instant, SystemTime),
}

/// When a response is due.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    /// With each event of a sequence.
    Streaming,
    /// At the end of each sequence.
    PerSequence,
    /// When all sequences, or beams, have ended.
    Once,
}

/// What one sequence has come to.
#[derive(Debug, Clone, Default)]
struct Output {
    /// Tokens that no response has carried yet.
    pending: Vec<SampledToken>,
    num_tokens: usize,
    cumulative_log_prob: f64,
    blocks: BlockUsage,
    drafts: DraftUsage,
    logits: Logits,
    first_token: Option<Instant>,
    last_token: Option<Instant>,
    ended: bool,
}

/// News of one sequence, as it is told.
pub(crate) struct News {
    /// Which of the request's sequences.
    pub(crate) index: usize,
    pub(crate) tokens: Vec<SampledToken>,
    /// When they came.
    pub(crate) at: Instant,
    /// Nothing follows for this sequence.
    pub(crate) ends: bool,
    pub(crate) blocks: BlockUsage,
    pub(crate) drafts: DraftUsage,
    /// Of a beam: counts a token that is not told, too.
    pub(crate) cum_log_prob: Option<f32>,
}

impl News {
    /// A sequence ends that never ran.
    pub(crate) fn end(index: usize) -> Self {
        let (blocks, drafts) = (BlockUsage::default(), DraftUsage::default());
        Self { index, tokens: Vec::new(), at: Instant::now(), ends: true, blocks, drafts, cum_log_prob: None }
    }
}

impl Responses {
    pub(crate) fn new(config: &LlmConfig, version: &str, request: &InferRequest, parsed: &LlmRequest) -> Self {
        let asked = |name: &&String| request.requested_outputs.is_empty() || request.requested_outputs.contains(name);
        let exclude_input = parsed.exclude_input || parsed.streaming;
        let mode = match (parsed.streaming, config.decoupled) {
            _ if parsed.request.beams.is_some() => Mode::Once,
            (true, _) => Mode::Streaming,
            (false, true) => Mode::PerSequence,
            (false, false) => Mode::Once,
        };
        Self {
            id: request.id.clone(),
            model_name: config.name.clone(),
            model_version: version.to_owned(),
            wanted: config.outputs.iter().filter(asked).filter(|name| parsed.wants(name)).cloned().collect(),
            mode,
            prompt: if exclude_input { Vec::new() } else { parsed.request.prompt.clone() },
            num_input_tokens: parsed.request.prompt.len(),
            padding: parsed.request.sampling.end_ids.first().copied().unwrap_or(PADDING),
            logits_form: LogitsForm { datatype: config.logits_type, vocab_size: config.vocab_size },
            sequences: vec![Output::default(); parsed.num_sequences],
            num_open: parsed.num_sequences,
            arrived: (Instant::now(), SystemTime::now()),
        }
    }

    /// Takes logits of sequence `index` in; they leave with the tokens chosen from them.
    pub(crate) fn keep_logits(&mut self, index: usize, piece: &LogitsPiece) {
        self.sequences[index].logits.keep(self.logits_form, piece);
    }

    /// The response that this news completes. It is final when no sequence is left.
    pub(crate) fn push(&mut self, news: News) -> Option<InferResponse> {
        let output = &mut self.sequences[news.index];
        output.take(news.tokens, news.at, news.blocks);
        output.drafts = news.drafts;
        output.cumulative_log_prob = news.cum_log_prob.map_or(output.cumulative_log_prob, f64::from);
        output.ended = news.ends;
        self.num_open -= usize::from(news.ends);
        let is_due = match self.mode {
            Mode::Streaming => news.ends || !output.pending.is_empty(),
            Mode::PerSequence => news.ends,
            Mode::Once => self.num_open == 0,
        };
        if !is_due {
            return None;
        }
        let indices = if self.mode == Mode::Once { 0..self.sequences.len() } else { news.index..news.index + 1 };
        let wanted = std::mem::take(&mut self.wanted);
        let output = |name: &String| match name.as_str() {
            "context_logits" => Some(self.sequences[indices.start].logits.take_context(name, self.logits_form)),
            "generation_logits" => Some(self.generation_logits(name, indices.clone())),
            _ => self.output(name, indices.clone()),
        };
        let outputs = wanted.iter().filter_map(output).collect();
        self.wanted = wanted;
        self.sequences[indices].iter_mut().for_each(|output| output.pending.clear());
        Some(InferResponse {
            model_name: self.model_name.clone(),
            model_version: self.model_version.clone(),
            id: self.id.clone(),
            outputs,
            is_final: self.num_open == 0,
            ..InferResponse::default()
        })
    }

    /// One output of some sequences by its name in `config.pbtxt`; `None` for one we have nothing for.
    /// In front is a batch of 1; sequences take the dimension of beams.
    fn output(&self, name: &str, indices: std::ops::Range<usize>) -> Option<Tensor> {
        let first = indices.start;
        let sequences = &self.sequences[indices];
        let each = |value: &dyn Fn(&Output) -> i32| {
            Tensor::from_i32(name, &[1, sequences.len() as i64], &sequences.iter().map(value).collect::<Vec<_>>())
        };
        let time = |at: Option<Instant>| Tensor::from_i64(name, &[1, 1], &[self.unix_ns(at)]);
        Some(match name {
            "output_ids" => self.output_ids(name, sequences),
            "sequence_length" => each(&|output| (self.prompt.len() + output.pending.len()) as i32),
            "cum_log_probs" => {
                let values: Vec<f32> = sequences.iter().map(|output| output.cumulative_log_prob as f32).collect();
                Tensor::from_f32(name, &[1, sequences.len() as i64], &values)
            }
            "output_log_probs" => output_log_probs(name, sequences),
            "batch_index" => Tensor::from_i32(name, &[1, 1], &[0]),
            "sequence_index" => Tensor::from_i32(name, &[1, 1], &[first as i32]),
            // Lets a detokenizer let go of what it holds back, before the stream has ended.
            "sequence_end" => Tensor::from_bool(name, &[1, 1], &[sequences.iter().all(|output| output.ended)]),
            "num_input_tokens" => Tensor::from_i32(name, &[1, 1], &[self.num_input_tokens as i32]),
            "num_output_tokens" => {
                let count: usize = sequences.iter().map(|output| output.num_tokens).sum();
                Tensor::from_i32(name, &[1, 1], &[count as i32])
            }
            "kv_cache_reused_blocks" => self.blocks(name, sequences, |blocks| blocks.num_reused),
            "kv_cache_alloc_new_blocks" => self.blocks(name, sequences, |blocks| blocks.num_allocated),
            "kv_cache_alloc_total_blocks" => {
                self.blocks(name, sequences, |blocks| blocks.num_reused + blocks.num_allocated)
            }
            "total_draft_tokens" => self.drafts(name, sequences, |drafts| drafts.num_drafted),
            "total_accepted_draft_tokens" => self.drafts(name, sequences, |drafts| drafts.num_accepted),
            "acceptance_rate" => {
                let sum =
                    |count: fn(&DraftUsage) -> u32| sequences.iter().map(|o| count(&o.drafts)).sum::<u32>() as f32;
                let rate = sum(|drafts| drafts.num_accepted) / sum(|drafts| drafts.num_drafted).max(1.0);
                Tensor::from_f32(name, &[1, 1], &[rate])
            }
            "arrival_time_ns" => time(Some(self.arrived.0)),
            "first_token_time_ns" => time(sequences.iter().filter_map(|output| output.first_token).min()),
            "last_token_time_ns" => time(sequences.iter().filter_map(|output| output.last_token).max()),
            _ => return None,
        })
    }

    /// `[1, sequences, tokens, V]` of the tokens that this response tells.
    fn generation_logits(&mut self, name: &str, indices: std::ops::Range<usize>) -> Tensor {
        let form = self.logits_form;
        let sequences = &mut self.sequences[indices];
        let (width, mut data) = (longest(sequences), Vec::new());
        for output in sequences.iter_mut() {
            let count = output.pending.len();
            output.logits.take_generation(form, output.num_tokens - count, count, width, &mut data);
        }
        let shape = vec![1, sequences.len() as i64, width as i64, form.vocab_size as i64];
        Tensor { name: name.to_owned(), datatype: form.datatype, shape, data: data.into() }
    }

    fn output_ids(&self, name: &str, sequences: &[Output]) -> Tensor {
        let width = self.prompt.len() + longest(sequences);
        let mut ids = Vec::with_capacity(sequences.len() * width);
        for (row, output) in sequences.iter().enumerate() {
            ids.extend(self.prompt.iter().map(|id| id.0 as i32));
            ids.extend(output.pending.iter().map(|token| token.token.0 as i32));
            ids.resize((row + 1) * width, self.padding.0 as i32);
        }
        Tensor::from_i32(name, &[1, sequences.len() as i64, width as i64], &ids)
    }

    fn blocks(&self, name: &str, sequences: &[Output], count: impl Fn(&BlockUsage) -> u32) -> Tensor {
        let sum: u32 = sequences.iter().map(|output| count(&output.blocks)).sum();
        Tensor::from_i32(name, &[1, 1], &[sum as i32])
    }

    fn drafts(&self, name: &str, sequences: &[Output], count: impl Fn(&DraftUsage) -> u32) -> Tensor {
        let sum: u32 = sequences.iter().map(|output| count(&output.drafts)).sum();
        Tensor::from_i32(name, &[1, 1], &[sum as i32])
    }

    /// Nanoseconds since 1970; 0 for never.
    fn unix_ns(&self, at: Option<Instant>) -> i64 {
        let Some(at) = at else { return 0 };
        let since_1970 = self.arrived.1.duration_since(UNIX_EPOCH).unwrap_or_default();
        (since_1970 + at.saturating_duration_since(self.arrived.0)).as_nanos().try_into().unwrap_or(i64::MAX)
    }
}

impl Output {
    fn take(&mut self, tokens: Vec<SampledToken>, at: Instant, blocks: BlockUsage) {
        self.blocks = blocks;
        if tokens.is_empty() {
            return;
        }
        self.first_token.get_or_insert(at);
        self.last_token = Some(at);
        self.num_tokens += tokens.len();
        self.cumulative_log_prob += tokens.iter().filter_map(|token| token.logprob.map(f64::from)).sum::<f64>();
        if self.pending.is_empty() {
            self.pending = tokens;
        } else {
            self.pending.extend(tokens);
        }
    }
}

fn output_log_probs(name: &str, sequences: &[Output]) -> Tensor {
    let width = longest(sequences);
    let mut values = Vec::with_capacity(sequences.len() * width);
    for (row, output) in sequences.iter().enumerate() {
        values.extend(output.pending.iter().map(|token| token.logprob.unwrap_or(0.0)));
        values.resize((row + 1) * width, 0.0);
    }
    Tensor::from_f32(name, &[1, sequences.len() as i64, width as i64], &values)
}

fn longest(sequences: &[Output]) -> usize {
    sequences.iter().map(|output| output.pending.len()).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use engine::RowId;

    use super::*;

    const OUTPUTS: [&str; 9] = [
        "output_ids",
        "sequence_length",
        "cum_log_probs",
        "output_log_probs",
        "sequence_index",
        "sequence_end",
        "num_output_tokens",
        "kv_cache_reused_blocks",
        "context_phase_params",
    ];

    fn responses(mode: Mode, num_sequences: usize, prompt: &[u32]) -> Responses {
        Responses {
            id: "a".to_owned(),
            model_name: "llm".to_owned(),
            model_version: "1".to_owned(),
            wanted: OUTPUTS.map(str::to_owned).to_vec(),
            mode,
            prompt: prompt.iter().map(|&id| TokenId(id)).collect(),
            num_input_tokens: 2,
            padding: TokenId(9),
            logits_form: LogitsForm { datatype: serving::DataType::Fp32, vocab_size: 1 },
            sequences: vec![Output::default(); num_sequences],
            num_open: num_sequences,
            arrived: (Instant::now(), SystemTime::now()),
        }
    }

    fn news(index: usize, tokens: &[(u32, f32)], ends: bool) -> News {
        let token = |&(id, logprob): &(u32, f32)| SampledToken {
            row: RowId(0),
            token: TokenId(id),
            logprob: Some(logprob),
            top: Vec::new(),
        };
        let blocks = BlockUsage { num_reused: 2, num_allocated: 1 };
        let (drafts, cum_log_prob) = (DraftUsage::default(), None);
        let (tokens, at) = (tokens.iter().map(token).collect(), Instant::now());
        News { index, tokens, at, ends, blocks, drafts, cum_log_prob }
    }

    fn output<'a>(response: &'a InferResponse, name: &str) -> &'a Tensor {
        response.outputs.iter().find(|tensor| tensor.name == name).unwrap()
    }

    fn ids(response: &InferResponse) -> Vec<i32> {
        output(response, "output_ids").to_i32().unwrap()
    }

    #[test]
    fn a_stream_gets_each_token_once_and_is_final_when_all_sequences_have_ended() {
        let mut responses = responses(Mode::Streaming, 2, &[]);
        let first = responses.push(news(1, &[(5, -0.5)], false)).unwrap();
        assert_eq!((ids(&first), first.is_final), (vec![5], false));
        assert_eq!(output(&first, "sequence_index").to_i32().unwrap(), [1]);
        assert_eq!(output(&first, "sequence_end").to_bool().unwrap(), [false]);
        assert!(responses.push(news(1, &[], false)).is_none());
        let second = responses.push(news(1, &[(6, -0.25), (7, -1.0)], true)).unwrap();
        assert_eq!((ids(&second), second.is_final), (vec![6, 7], false));
        assert_eq!(output(&second, "sequence_end").to_bool().unwrap(), [true]);
        assert_eq!(output(&second, "cum_log_probs").to_f32().unwrap(), [-1.75]);
        assert_eq!(output(&second, "output_log_probs").to_f32().unwrap(), [-0.25, -1.0]);
        let last = responses.push(news(0, &[], true)).unwrap();
        assert_eq!((ids(&last), last.is_final), (vec![], true));
        assert_eq!(output(&last, "output_ids").shape, [1, 1, 0]);
    }

    #[test]
    fn without_streaming_each_sequence_gets_one_response_at_its_end() {
        let mut responses = responses(Mode::PerSequence, 2, &[3, 4]);
        assert!(responses.push(news(0, &[(5, -0.5)], false)).is_none());
        let first = responses.push(news(1, &[(8, -0.5)], true)).unwrap();
        assert_eq!((ids(&first), first.is_final), (vec![3, 4, 8], false));
        let second = responses.push(news(0, &[(6, -0.5)], true)).unwrap();
        assert_eq!((ids(&second), second.is_final), (vec![3, 4, 5, 6], true));
        assert_eq!(output(&second, "sequence_length").to_i32().unwrap(), [4]);
        assert_eq!(output(&second, "num_output_tokens").to_i32().unwrap(), [2]);
        assert_eq!(output(&second, "kv_cache_reused_blocks").to_i32().unwrap(), [2]);
        assert!(second.outputs.iter().all(|tensor| tensor.name != "context_phase_params"));
    }

    #[test]
    fn a_model_that_is_not_decoupled_answers_once_with_shorter_sequences_padded() {
        let mut responses = responses(Mode::Once, 2, &[3]);
        assert!(responses.push(news(1, &[(5, -0.5)], true)).is_none());
        let all = responses.push(news(0, &[(6, -0.5), (7, -0.25)], true)).unwrap();
        assert!(all.is_final);
        assert_eq!(output(&all, "output_ids").shape, [1, 2, 3]);
        assert_eq!(ids(&all), [3, 6, 7, 3, 5, 9]);
        assert_eq!(output(&all, "sequence_length").to_i32().unwrap(), [3, 2]);
        assert_eq!(output(&all, "cum_log_probs").to_f32().unwrap(), [-0.75, -0.5]);
        assert_eq!(output(&all, "output_log_probs").to_f32().unwrap(), [-0.5, -0.25, -0.5, 0.0]);
    }
}
