//! Token events as the tensors TensorRT-LLM's clients read.

use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use engine::{BlockUsage, DraftUsage, SampledToken, SequenceId, TokenId};
use serving::{Changes, DataType, InferRequest, InferResponse, Name, Shape, Tally, Tensor};
use smallvec::SmallVec;
use supervision::LogitsPiece;

use super::config::LlmConfig;
use super::inbox::OneToken;
use super::inputs::LlmRequest;
use super::logits::{Logits, LogitsForm};
use super::steady::Steady;
use super::step_thread::Shared;

/// Fills the places behind shorter sequences where several share a response and the model has no end id.
const PADDING: TokenId = TokenId(0);

/// Builds the responses of one request.
pub(crate) struct Responses {
    id: Name,
    model_name: Name,
    model_version: Name,
    /// Outputs that are declared and asked for, and that we have something for.
    wanted: Vec<(Name, Kind)>,
    /// In the place of outputs that are declared and not asked for by their flags.
    stand_ins: Vec<Tensor>,
    mode: Mode,
    /// Put before the output; empty when it is left out.
    prompt: Vec<TokenId>,
    num_input_tokens: usize,
    padding: TokenId,
    logits_form: LogitsForm,
    sequences: Vec<Output>,
    num_open: usize,
    arrived: (Instant, SystemTime),
    /// The places of the outputs that change while one sequence gets one token a response; `None` where more than that may
    /// change.
    changing: Option<SmallVec<[(usize, Kind); 2]>>,
    /// The last response told one token of this sequence, and that it goes on.
    repeatable: Option<usize>,
}

/// What an output tells.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Kind {
    OutputIds,
    SequenceLength,
    CumLogProbs,
    OutputLogProbs,
    ContextLogits,
    GenerationLogits,
    BatchIndex,
    SequenceIndex,
    SequenceEnd,
    NumInputTokens,
    NumOutputTokens,
    ReusedBlocks,
    NewBlocks,
    TotalBlocks,
    DraftTokens,
    AcceptedDraftTokens,
    AcceptanceRate,
    ArrivalTime,
    FirstScheduledTime,
    FirstTokenTime,
    LastTokenTime,
}

impl Kind {
    /// By its name in `config.pbtxt`; `None` for one we have nothing for.
    fn of(name: &str) -> Option<Self> {
        Some(match name {
            "output_ids" => Kind::OutputIds,
            "sequence_length" => Kind::SequenceLength,
            "cum_log_probs" => Kind::CumLogProbs,
            "output_log_probs" => Kind::OutputLogProbs,
            "context_logits" => Kind::ContextLogits,
            "generation_logits" => Kind::GenerationLogits,
            "batch_index" => Kind::BatchIndex,
            "sequence_index" => Kind::SequenceIndex,
            "sequence_end" => Kind::SequenceEnd,
            "num_input_tokens" => Kind::NumInputTokens,
            "num_output_tokens" => Kind::NumOutputTokens,
            "kv_cache_reused_blocks" => Kind::ReusedBlocks,
            "kv_cache_alloc_new_blocks" => Kind::NewBlocks,
            "kv_cache_alloc_total_blocks" => Kind::TotalBlocks,
            "total_draft_tokens" => Kind::DraftTokens,
            "total_accepted_draft_tokens" => Kind::AcceptedDraftTokens,
            "acceptance_rate" => Kind::AcceptanceRate,
            "arrival_time_ns" => Kind::ArrivalTime,
            "first_scheduled_time_ns" => Kind::FirstScheduledTime,
            "first_token_time_ns" => Kind::FirstTokenTime,
            "last_token_time_ns" => Kind::LastTokenTime,
            _ => return None,
        })
    }
}

impl Kind {
    /// Whether it says the same of each token that is told alone, but for the last.
    fn is_steady(self) -> bool {
        matches!(
            self,
            Kind::SequenceLength | Kind::BatchIndex | Kind::SequenceIndex | Kind::SequenceEnd | Kind::NumInputTokens
        )
    }
}

/// What an output tells where that is one number.
#[derive(Debug, Clone, Copy)]
enum Number {
    I32(i32),
    I64(i64),
    F32(f32),
}

impl Number {
    /// Puts it into `told` as the elements of the output at `place`.
    fn put(self, place: usize, told: &mut Changes) {
        match self {
            Number::I32(value) => told.put(place, value.to_le_bytes()),
            Number::I64(value) => told.put(place, value.to_le_bytes()),
            Number::F32(value) => told.put(place, value.to_le_bytes()),
        }
    }
}

/// The outputs that change from token to token, if all keep their types and shapes.
fn changing(wanted: &[(Name, Kind)]) -> Option<SmallVec<[(usize, Kind); 2]>> {
    let is_of_logits = |(_, kind): &(Name, Kind)| matches!(kind, Kind::ContextLogits | Kind::GenerationLogits);
    let places = wanted.iter().enumerate().map(|(place, (_, kind))| (place, *kind));
    (!wanted.iter().any(is_of_logits)).then(|| places.filter(|(_, kind)| !kind.is_steady()).collect())
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
    pending: Tokens,
    num_tokens: usize,
    cumulative_log_prob: f64,
    blocks: BlockUsage,
    drafts: DraftUsage,
    logits: Logits,
    first_scheduled: Option<Instant>,
    first_token: Option<Instant>,
    last_token: Option<Instant>,
    ended: bool,
}

/// Tokens of one event, nearly always one.
pub(crate) type Tokens = SmallVec<[SampledToken; 1]>;

/// News of one sequence, as it is told.
pub(crate) struct News {
    /// Which of the request's sequences.
    pub(crate) index: usize,
    pub(crate) tokens: Tokens,
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
        Self { index, tokens: Tokens::new(), at: Instant::now(), ends: true, blocks, drafts, cum_log_prob: None }
    }
}

impl Responses {
    pub(crate) fn new(config: &LlmConfig, version: &str, request: &InferRequest, parsed: &LlmRequest) -> Self {
        let asked = &request.requested_outputs;
        let is_asked = |name: &&String| asked.is_empty() || asked.iter().any(|asked| asked == *name);
        let (wanted, unwanted): (Vec<&String>, Vec<&String>) =
            config.outputs.iter().filter(is_asked).partition(|name| parsed.wants(name));
        let has_stand_ins = config.has_stand_ins && !parsed.streaming;
        let num_input_tokens = parsed.request.prompt.len();
        let stand_in = |name: &String| stand_in(name, config.logits_type, num_input_tokens);
        let exclude_input = parsed.exclude_input || parsed.streaming;
        let mode = match (parsed.streaming, config.decoupled) {
            _ if parsed.request.beams.is_some() => Mode::Once,
            (true, _) => Mode::Streaming,
            (false, true) => Mode::PerSequence,
            (false, false) => Mode::Once,
        };
        let wanted: Vec<_> = wanted.into_iter().filter_map(|name| Some((Name::from(name), Kind::of(name)?))).collect();
        let is_told_by_token = mode == Mode::Streaming && !has_stand_ins;
        Self {
            changing: changing(&wanted).filter(|_| is_told_by_token),
            repeatable: None,
            id: request.id.clone(),
            model_name: Name::from(&config.name),
            model_version: version.into(),
            wanted,
            stand_ins: unwanted.into_iter().filter(|_| has_stand_ins).filter_map(stand_in).collect(),
            mode,
            prompt: if exclude_input { Vec::new() } else { parsed.request.prompt.clone() },
            num_input_tokens,
            padding: parsed.request.sampling.end_ids.first().copied().unwrap_or(PADDING),
            logits_form: LogitsForm { datatype: config.logits_type, vocab_size: config.vocab_size },
            sequences: vec![Output::default(); parsed.num_sequences],
            num_open: parsed.num_sequences,
            arrived: (Instant::now(), SystemTime::now()),
        }
    }

    /// Sequences that are answered.
    #[cfg(test)]
    pub(crate) fn num_sequences(&self) -> usize {
        self.sequences.capacity()
    }

    /// A step had room for sequence `index` at `at`; its first such moment is told.
    pub(crate) fn joined(&mut self, index: usize, at: Instant) {
        self.sequences[index].first_scheduled.get_or_insert(at);
    }

    /// Takes logits of sequence `index` in; they leave with the tokens chosen from them.
    pub(crate) fn keep_logits(&mut self, index: usize, piece: &LogitsPiece) {
        self.sequences[index].logits.keep(self.logits_form, piece);
    }

    /// The sequence that the last response told one token of, where the next one repeats it; `ids` are the sequences'.
    pub(crate) fn steady(&self, ids: &[SequenceId], shared: &Arc<Shared>) -> Option<Steady> {
        let (Some(changing), Some(index)) = (&self.changing, self.repeatable) else { return None };
        let output = &self.sequences[index];
        Some(Steady {
            sequence: *ids.get(index)?,
            index,
            changing: changing.iter().map(|&(place, kind)| (place as u32, kind)).collect(),
            num_tokens: output.num_tokens,
            num_new: 0,
            cumulative_log_prob: output.cumulative_log_prob,
            blocks: output.blocks,
            drafts: output.drafts,
            last: output.last_token?.into(),
            gaps: Tally::default(),
            shared: Arc::clone(shared),
        })
    }

    /// Takes over what has come of a sequence since.
    pub(crate) fn catch_up(&mut self, steady: &Steady) {
        let output = &mut self.sequences[steady.index];
        output.num_tokens = steady.num_tokens;
        output.cumulative_log_prob = steady.cumulative_log_prob;
        (output.blocks, output.drafts) = (steady.blocks, steady.drafts);
        output.last_token = Some(steady.last.into());
    }

    /// Puts what `token`, which `steady` has taken in, changes in the last response into `told`.
    pub(crate) fn repeat(&mut self, steady: &Steady, token: &OneToken, told: &mut Changes) {
        for &(place, kind) in &steady.changing {
            let number = match kind {
                Kind::OutputIds => Number::I32(token.token.0.cast_signed()),
                Kind::CumLogProbs => Number::F32(steady.cumulative_log_prob as f32),
                Kind::OutputLogProbs => Number::F32(token.logprob.unwrap_or(0.0)),
                Kind::NumOutputTokens => Number::I32(steady.num_tokens as i32),
                _ => {
                    self.catch_up(steady);
                    self.number(kind, steady.index..steady.index + 1)
                }
            };
            number.put(place as usize, told);
        }
    }

    /// Takes news in.
    fn take(&mut self, news: News) -> &mut Output {
        let output = &mut self.sequences[news.index];
        output.take(news.tokens, news.at, news.blocks);
        output.drafts = news.drafts;
        output.cumulative_log_prob = news.cum_log_prob.map_or(output.cumulative_log_prob, f64::from);
        output.ended = news.ends;
        self.num_open -= usize::from(news.ends);
        output
    }

    /// The response that this news completes. It is final when no sequence is left.
    pub(crate) fn push(&mut self, news: News) -> Option<InferResponse> {
        let (index, ends) = (news.index, news.ends);
        let num_pending = self.take(news).pending.len();
        let is_one_of_more = num_pending == 1 && !ends;
        let is_due = match self.mode {
            Mode::Streaming => ends || num_pending > 0,
            Mode::PerSequence => ends,
            Mode::Once => self.num_open == 0,
        };
        if !is_due {
            return None;
        }
        self.repeatable = (self.changing.is_some() && is_one_of_more).then_some(index);
        let indices = if self.mode == Mode::Once { 0..self.sequences.len() } else { index..index + 1 };
        let wanted = std::mem::take(&mut self.wanted);
        let output = |(name, kind): &(Name, Kind)| match kind {
            Kind::ContextLogits => self.sequences[indices.start].logits.take_context(name, self.logits_form),
            Kind::GenerationLogits => self.generation_logits(name, indices.clone()),
            _ => self.output(name, *kind, indices.clone()),
        };
        let mut outputs: Vec<Tensor> = wanted.iter().map(output).collect();
        outputs.extend(self.stand_ins.iter().cloned());
        self.wanted = wanted;
        self.sequences[indices].iter_mut().for_each(|output| output.pending.clear());
        Some(InferResponse {
            model_name: self.model_name.clone(),
            model_version: self.model_version.clone(),
            id: self.id.clone(),
            outputs,
            is_final: self.num_open == 0,
            may_be_repeated: self.repeatable.is_some(),
            ..InferResponse::default()
        })
    }

    /// One output of some sequences, but for logits. In front is a batch of 1; sequences take the dimension of beams.
    fn output(&self, name: &Name, kind: Kind, indices: std::ops::Range<usize>) -> Tensor {
        let sequences = &self.sequences[indices.clone()];
        let name = name.clone();
        let row = [1, sequences.len() as i64];
        match kind {
            Kind::OutputIds => self.output_ids(name, sequences),
            Kind::SequenceLength => {
                let length = |output: &Output| (self.prompt.len() + output.pending.len()) as i32;
                Tensor::from_i32(name, &row, &sequences.iter().map(length).collect::<SmallVec<[i32; 4]>>())
            }
            Kind::CumLogProbs => {
                let sum = |output: &Output| output.cumulative_log_prob as f32;
                Tensor::from_f32(name, &row, &sequences.iter().map(sum).collect::<SmallVec<[f32; 4]>>())
            }
            Kind::OutputLogProbs => output_log_probs(name, sequences),
            // Lets a detokenizer let go of what it holds back, before the stream has ended.
            Kind::SequenceEnd => Tensor::from_bool(name, &[1, 1], &[sequences.iter().all(|output| output.ended)]),
            _ => match self.number(kind, indices) {
                Number::I32(value) => Tensor::from_i32(name, &[1, 1], &[value]),
                Number::I64(value) => Tensor::from_i64(name, &[1, 1], &[value]),
                Number::F32(value) => Tensor::from_f32(name, &[1, 1], &[value]),
            },
        }
    }

    /// What an output tells that is one number for all of some sequences.
    fn number(&self, kind: Kind, indices: std::ops::Range<usize>) -> Number {
        let first = indices.start;
        let sequences = &self.sequences[indices];
        let count = |value: usize| Number::I32(value as i32);
        let time = |at: Option<Instant>| Number::I64(self.unix_ns(at));
        let blocks = |count: fn(&BlockUsage) -> u32| sequences.iter().map(|of| count(&of.blocks)).sum::<u32>();
        let drafts = |count: fn(&DraftUsage) -> u32| sequences.iter().map(|of| count(&of.drafts)).sum::<u32>();
        match kind {
            Kind::BatchIndex => count(0),
            Kind::SequenceIndex => count(first),
            Kind::NumInputTokens => count(self.num_input_tokens),
            Kind::NumOutputTokens => count(sequences.iter().map(|output| output.num_tokens).sum()),
            Kind::ReusedBlocks => count(blocks(|blocks| blocks.num_reused) as usize),
            Kind::NewBlocks => count(blocks(|blocks| blocks.num_allocated) as usize),
            Kind::TotalBlocks => count(blocks(|blocks| blocks.num_reused + blocks.num_allocated) as usize),
            Kind::DraftTokens => count(drafts(|drafts| drafts.num_drafted) as usize),
            Kind::AcceptedDraftTokens => count(drafts(|drafts| drafts.num_accepted) as usize),
            Kind::AcceptanceRate => {
                let (num_accepted, num_drafted) =
                    (drafts(|drafts| drafts.num_accepted), drafts(|drafts| drafts.num_drafted));
                Number::F32(num_accepted as f32 / (num_drafted as f32).max(1.0))
            }
            Kind::ArrivalTime => time(Some(self.arrived.0)),
            Kind::FirstScheduledTime => time(sequences.iter().filter_map(|output| output.first_scheduled).min()),
            Kind::FirstTokenTime => time(sequences.iter().filter_map(|output| output.first_token).min()),
            Kind::LastTokenTime => time(sequences.iter().filter_map(|output| output.last_token).max()),
            Kind::OutputIds
            | Kind::SequenceLength
            | Kind::CumLogProbs
            | Kind::OutputLogProbs
            | Kind::SequenceEnd
            | Kind::ContextLogits
            | Kind::GenerationLogits => unreachable!("{kind:?} is not one number"),
        }
    }

    /// `[1, sequences, tokens, V]` of the tokens that this response tells.
    fn generation_logits(&mut self, name: &Name, indices: std::ops::Range<usize>) -> Tensor {
        let form = self.logits_form;
        let sequences = &mut self.sequences[indices];
        let (width, mut data) = (longest(sequences), Vec::new());
        for output in sequences.iter_mut() {
            let count = output.pending.len();
            output.logits.take_generation(form, output.num_tokens - count, count, width, &mut data);
        }
        let shape = Shape::from([1, sequences.len() as i64, width as i64, form.vocab_size as i64]);
        Tensor { name: name.clone(), datatype: form.datatype, shape, data: data.into() }
    }

    fn output_ids(&self, name: Name, sequences: &[Output]) -> Tensor {
        let width = self.prompt.len() + longest(sequences);
        let mut ids = SmallVec::<[i32; 8]>::with_capacity(sequences.len() * width);
        for (row, output) in sequences.iter().enumerate() {
            ids.extend(self.prompt.iter().map(|id| id.0 as i32));
            ids.extend(output.pending.iter().map(|token| token.token.0 as i32));
            ids.resize((row + 1) * width, self.padding.0 as i32);
        }
        Tensor::from_i32(name, &[1, sequences.len() as i64, width as i64], &ids)
    }

    /// Nanoseconds since 1970; 0 for never.
    fn unix_ns(&self, at: Option<Instant>) -> i64 {
        let Some(at) = at else { return 0 };
        let since_1970 = self.arrived.1.duration_since(UNIX_EPOCH).unwrap_or_default();
        (since_1970 + at.saturating_duration_since(self.arrived.0)).as_nanos().try_into().unwrap_or(i64::MAX)
    }
}

impl Output {
    fn take(&mut self, tokens: Tokens, at: Instant, blocks: BlockUsage) {
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

fn output_log_probs(name: Name, sequences: &[Output]) -> Tensor {
    let width = longest(sequences);
    let mut values = Vec::with_capacity(sequences.len() * width);
    for (row, output) in sequences.iter().enumerate() {
        values.extend(output.pending.iter().map(|token| token.logprob.unwrap_or(0.0)));
        values.resize((row + 1) * width, 0.0);
    }
    Tensor::from_f32(name, &[1, sequences.len() as i64, width as i64], &values)
}

/// Zeros of the shape that an output has where nobody asked for it.
fn stand_in(name: &str, logits_type: DataType, num_input_tokens: usize) -> Option<Tensor> {
    let (datatype, shape): (DataType, &[i64]) = match name {
        "cum_log_probs" => (DataType::Fp32, &[1, 1]),
        "output_log_probs" => (DataType::Fp32, &[1, 1, num_input_tokens as i64]),
        "context_logits" => (logits_type, &[1, 1, 1]),
        "generation_logits" => (logits_type, &[1, 1, 1, 1]),
        _ => return None,
    };
    let num_bytes = datatype.size()? * shape.iter().product::<i64>() as usize;
    Some(Tensor { name: name.into(), datatype, shape: Shape::from_slice(shape), data: vec![0; num_bytes].into() })
}

fn longest(sequences: &[Output]) -> usize {
    sequences.iter().map(|output| output.pending.len()).max().unwrap_or(0)
}

#[cfg(test)]
pub(crate) mod tests {
    use engine::RowId;

    use super::super::inbox::RequestEvent;
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

    const MORE_OUTPUTS: [&str; 12] = [
        "batch_index",
        "num_input_tokens",
        "kv_cache_alloc_new_blocks",
        "kv_cache_alloc_total_blocks",
        "total_draft_tokens",
        "total_accepted_draft_tokens",
        "acceptance_rate",
        "arrival_time_ns",
        "first_scheduled_time_ns",
        "first_token_time_ns",
        "last_token_time_ns",
        "kv_cache_reused_blocks",
    ];

    /// News as they travel, where that is one token.
    fn one_token(news: News) -> Option<OneToken> {
        let News { index, tokens, at, ends, blocks, drafts, .. } = news;
        let finished = ends.then_some(engine::FinishReason::Length);
        let sequence = engine::SequenceId(index as u64);
        let event = engine::TokenEvent { sequence, tokens, finished, blocks, drafts, beams: Vec::new() };
        match RequestEvent::of(event, at.into()) {
            RequestEvent::Token(token) => Some(token),
            _ => None,
        }
    }

    /// Of one sequence, where a response may repeat the last one.
    pub(crate) fn repeatable() -> Responses {
        let responses = responses(Mode::Streaming, 1, &[]);
        Responses { changing: changing(&responses.wanted), ..responses }
    }

    fn responses(mode: Mode, num_sequences: usize, prompt: &[u32]) -> Responses {
        Responses {
            changing: None,
            repeatable: None,
            id: "a".into(),
            model_name: "llm".into(),
            model_version: "1".into(),
            wanted: OUTPUTS.iter().filter_map(|name| Some(((*name).into(), Kind::of(name)?))).collect(),
            stand_ins: Vec::new(),
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
        let (drafts, cum_log_prob) = (DraftUsage { num_drafted: 4, num_accepted: tokens.len() as u32 }, None);
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
        assert_eq!(output(&last, "output_ids").shape[..], [1, 1, 0]);
    }

    #[test]
    fn what_is_new_in_a_response_comes_to_the_response() {
        let arrived = (Instant::now(), SystemTime::now());
        let repeatable = || {
            let mut repeatable = responses(Mode::Streaming, 2, &[]);
            repeatable.wanted.extend(MORE_OUTPUTS.map(|name| (name.into(), Kind::of(name).unwrap())));
            repeatable.changing = changing(&repeatable.wanted);
            repeatable.arrived = arrived;
            repeatable
        };
        let (mut whole, mut told, mut last) = (repeatable(), repeatable(), InferResponse::default());
        let (mut steady, shared) = (None::<Steady>, Arc::default());
        let tokens = [(0, 1, false), (0, 1, false), (0, 1, false), (1, 1, false), (1, 1, false), (0, 2, false)];
        let (mut num_again, ends) = (0, [(0, 1, false), (0, 1, false), (0, 1, true), (1, 1, false), (1, 0, true)]);
        for (round, (index, count, ends)) in (10..).zip(tokens.into_iter().chain(ends)) {
            let at = Instant::from(serving::Moment::now()); // As they travel.
            let news = || News { at, ..news(index, &vec![(round, -0.5); count], ends) };
            let response = whole.push(news()).unwrap();
            let mut changes = Changes::default();
            let next = one_token(news());
            if let (Some(steady), Some(token)) = (steady.as_mut().filter(|steady| steady.index == index), next) {
                assert!(last.may_be_repeated && !response.is_final);
                steady.take(&token);
                told.repeat(steady, &token, &mut changes);
                changes.iter().for_each(|(place, elements)| last.outputs[place].data = elements.to_data());
                num_again += 1;
            } else {
                steady.take().iter().for_each(|steady| told.catch_up(steady));
                last = told.push(news()).unwrap();
                steady = told.steady(&[SequenceId(0), SequenceId(1)], &shared);
            }
            assert_eq!((&last.outputs, last.is_final), (&response.outputs, response.is_final), "{round}");
        }
        assert_eq!(num_again, 4);
        let logits = [("output_ids".into(), Kind::OutputIds), ("generation_logits".into(), Kind::GenerationLogits)];
        assert!(changing(&logits).is_none(), "they are taken, not made");
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
        assert_eq!(output(&all, "output_ids").shape[..], [1, 2, 3]);
        assert_eq!(ids(&all), [3, 6, 7, 3, 5, 9]);
        assert_eq!(output(&all, "sequence_length").to_i32().unwrap(), [3, 2]);
        assert_eq!(output(&all, "cum_log_probs").to_f32().unwrap(), [-0.75, -0.5]);
        assert_eq!(output(&all, "output_log_probs").to_f32().unwrap(), [-0.5, -0.25, -0.5, 0.0]);
    }
}
