//! Token events as the tensors TensorRT-LLM's clients read.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use engine::{BlockUsage, DraftUsage, TokenId};
use generation::{Delta, Logits as LogitsPart, Tokens};
use serving::{
    DataType, InferRequest, InferResponse, Name, OutputDelta, Parameter, Shape, Tensor, TextOutput, TextOutputs,
    Timestamp,
};
use smallvec::{SmallVec, smallvec};

use super::config::LlmConfig;
use super::inputs::TensorRequest;
use super::logits::{Logits, LogitsForm};
use super::texts::Texts;

/// Fills the places behind shorter sequences where several share a response and the model has no end id.
const PADDING: TokenId = TokenId(0);

/// Builds the responses of one request.
pub(crate) struct Responses {
    id: Name,
    model_name: Name,
    model_version: Name,
    /// Of each response.
    parameters: Arc<[(Name, Parameter)]>,
    /// The outputs of each response, in order.
    outputs: Vec<(Name, Value)>,
    /// Where some outputs are text.
    texts: Option<Texts>,
    mode: Mode,
    /// Put before the output; empty when it is left out.
    prompt: Vec<TokenId>,
    num_input_tokens: usize,
    padding: TokenId,
    logits_form: LogitsForm,
    sequences: SmallVec<[Output; 1]>,
    num_open: usize,
    arrived: (Timestamp, SystemTime),
    /// The indices of the outputs that change from one token of a sequence to the next; `None` where more than one token's
    /// values may change.
    changing: Option<Changing>,
    /// The sequence whose single token the last response carried, where a delta may follow.
    delta_base: Option<usize>,
}

/// Outputs by their indices, and what they hold.
type Changing = SmallVec<[(usize, Change); 2]>;

/// What an output holds that changes with each token.
#[derive(Debug, Clone, Copy)]
enum Change {
    Text,
    Generated(Kind),
}

/// Where the value of an output comes from.
#[derive(Debug, Clone)]
enum Value {
    Generated(Kind),
    Text,
    /// The same in each response.
    Given(Tensor),
}

/// What tokens have led to.
pub(crate) enum Answer {
    Response(Box<InferResponse>),
    /// The previous response with new values, made at that time.
    Delta(Timestamp),
}

/// The meaning of an output.
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
    /// By its name in `config.pbtxt`; `None` for an output that is not known.
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
    /// Whether its value is the same for each token of a sequence but the last.
    fn is_steady(self) -> bool {
        matches!(
            self,
            Kind::SequenceLength | Kind::BatchIndex | Kind::SequenceIndex | Kind::SequenceEnd | Kind::NumInputTokens
        )
    }
}

/// The value of an output that is one number.
#[derive(Debug, Clone, Copy)]
enum Number {
    I32(i32),
    I64(i64),
    F32(f32),
}

impl Number {
    /// Sets the elements of the output at `index`.
    fn set(self, index: usize, delta: &mut OutputDelta) {
        match self {
            Number::I32(value) => delta.set(index, value.to_le_bytes()),
            Number::I64(value) => delta.set(index, value.to_le_bytes()),
            Number::F32(value) => delta.set(index, value.to_le_bytes()),
        }
    }
}

/// The outputs that change from token to token, if all keep their types and shapes.
fn changing(outputs: &[(Name, Value)]) -> Option<Changing> {
    let mut changing = SmallVec::new();
    for (index, (_, value)) in outputs.iter().enumerate() {
        match value {
            Value::Generated(Kind::ContextLogits | Kind::GenerationLogits) => return None,
            Value::Generated(kind) if kind.is_steady() => {}
            Value::Given(_) => {}
            Value::Generated(kind) => changing.push((index, Change::Generated(*kind))),
            Value::Text => changing.push((index, Change::Text)),
        }
    }
    Some(changing)
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
    first_scheduled: Option<Timestamp>,
    first_token: Option<Timestamp>,
    last_token: Option<Timestamp>,
    ended: bool,
}

impl Responses {
    /// The responses to `request`: the model's own, or those of a text ensemble.
    pub(crate) fn new(
        config: &LlmConfig,
        version: &str,
        request: &InferRequest,
        parsed: &TensorRequest,
        text: Option<TextOutputs>,
    ) -> Self {
        let has_stand_ins = config.has_stand_ins && !parsed.streaming;
        let num_input_tokens = parsed.generate.sequence.prompt.len();
        let value = |name: &str| -> Option<Value> {
            if parsed.wants(name) {
                return Some(Value::Generated(Kind::of(name)?));
            }
            let stand_in = stand_in(name, config.logits_type, num_input_tokens).filter(|_| has_stand_ins);
            stand_in.map(Value::Given)
        };
        let (outputs, texts, parameters): (Vec<(Name, Value)>, _, _) = match text {
            None => {
                let requested = &request.requested_outputs;
                let is_requested = |name: &&String| requested.is_empty() || requested.iter().any(|it| it == *name);
                let (wanted, unwanted): (Vec<&String>, Vec<&String>) =
                    config.outputs.iter().filter(is_requested).partition(|name| parsed.wants(name));
                let outputs = wanted.into_iter().chain(unwanted);
                (outputs.filter_map(|name| Some((name.into(), value(name)?))).collect(), None, Arc::default())
            }
            Some(text) => {
                let is_declared = |name: &Name| config.outputs.iter().any(|output| *name == output.as_str());
                let of_ensemble = |(name, output): &(Name, TextOutput)| {
                    let value = match output {
                        TextOutput::Text => Value::Text,
                        TextOutput::Given(tensor) => Value::Given(tensor.clone()),
                        TextOutput::Generated(name) => value(Some(name).filter(|name| is_declared(name))?)?,
                    };
                    Some((name.clone(), value))
                };
                let outputs = text.outputs.iter().filter_map(of_ensemble).collect();
                let parameters = text.parameters.clone();
                (outputs, Some(Texts::new(text, parsed.generate.num_sequences)), parameters)
            }
        };
        let exclude_input = parsed.exclude_input || parsed.streaming;
        let mode = match (parsed.streaming, config.decoupled) {
            _ if parsed.generate.sequence.beams.is_some() => Mode::Once,
            (true, _) => Mode::Streaming,
            (false, true) => Mode::PerSequence,
            (false, false) => Mode::Once,
        };
        Self {
            changing: changing(&outputs).filter(|_| mode == Mode::Streaming),
            delta_base: None,
            id: request.id.clone(),
            model_name: Name::from(&config.name),
            model_version: version.into(),
            parameters,
            outputs,
            texts,
            mode,
            prompt: if exclude_input { Vec::new() } else { parsed.generate.sequence.prompt.clone() },
            num_input_tokens,
            padding: parsed.generate.sequence.sampling.end_ids.first().copied().unwrap_or(PADDING),
            logits_form: LogitsForm { datatype: config.logits_type, vocab_size: config.vocab_size },
            sequences: smallvec![Output::default(); parsed.generate.num_sequences],
            num_open: parsed.generate.num_sequences,
            arrived: (Timestamp::now(), SystemTime::now()),
        }
    }

    /// Sequences that are answered.
    #[cfg(test)]
    pub(crate) fn num_sequences(&self) -> usize {
        self.sequences.capacity()
    }

    /// A step had room for sequence `index` at `at`; the first time counts.
    pub(crate) fn scheduled(&mut self, index: usize, at: Timestamp) {
        self.sequences[index].first_scheduled.get_or_insert(at);
    }

    /// Keeps logits of a sequence until the response with the tokens chosen from them.
    pub(crate) fn keep_logits(&mut self, part: LogitsPart) {
        self.sequences[part.index].logits.keep(self.logits_form, &part);
    }

    /// Moves a delta's tokens to its sequence.
    fn take(&mut self, delta: &mut Delta) -> &mut Output {
        let output = &mut self.sequences[delta.index];
        output.take(&mut delta.tokens, delta.at, delta.blocks);
        output.drafts = delta.drafts;
        output.cumulative_log_prob = delta.cum_log_prob.map_or(output.cumulative_log_prob, f64::from);
        output.ended = delta.finished.is_some();
        self.num_open -= usize::from(output.ended);
        output
    }

    /// The response that a delta of a sequence completes: as what changed, where `accepts_deltas`. It is final when all
    /// sequences have ended.
    pub(crate) fn push(
        &mut self,
        delta: &mut Delta,
        accepts_deltas: bool,
        changes: &mut OutputDelta,
    ) -> Option<Answer> {
        let (index, ends) = (delta.index, delta.finished.is_some());
        let num_pending = self.take(delta).pending.len();
        let is_due = match self.mode {
            Mode::Streaming => ends || num_pending > 0,
            Mode::PerSequence => ends,
            Mode::Once => self.num_open == 0,
        };
        if !is_due {
            return None;
        }
        let is_one_of_more = num_pending == 1 && !ends;
        if accepts_deltas && is_one_of_more && self.delta_base == Some(index) {
            return Some(Answer::Delta(self.delta(index, changes)));
        }
        self.delta_base = (self.changing.is_some() && is_one_of_more).then_some(index);
        let indices = if self.mode == Mode::Once { 0..self.sequences.len() } else { index..index + 1 };
        Some(Answer::Response(Box::new(self.response(indices))))
    }

    /// Sets what one more token of a sequence changes in the last response; the time after that.
    fn delta(&mut self, index: usize, delta: &mut OutputDelta) -> Timestamp {
        let Some(changing) = self.changing.take() else { return Timestamp::now() };
        let mut made = None;
        let token = self.sequences[index].pending.first();
        let (token, logprob) = token.map_or((0, None), |token| (token.token.0, token.logprob));
        for &(output, change) in &changing {
            let kind = match change {
                Change::Generated(kind) => kind,
                Change::Text => {
                    made = self.texts.as_mut().map(|texts| texts.push_one(index, token, output, delta));
                    continue;
                }
            };
            let number = match kind {
                Kind::OutputIds => Number::I32(token.cast_signed()),
                Kind::CumLogProbs => Number::F32(self.sequences[index].cumulative_log_prob as f32),
                Kind::OutputLogProbs => Number::F32(logprob.unwrap_or(0.0)),
                _ => self.number(kind, index..index + 1),
            };
            number.set(output, delta);
        }
        self.changing = Some(changing);
        self.sequences[index].pending.clear();
        made.unwrap_or_else(Timestamp::now)
    }

    /// The response about some sequences.
    fn response(&mut self, indices: std::ops::Range<usize>) -> InferResponse {
        let specified = std::mem::take(&mut self.outputs);
        let output = |(name, value): &(Name, Value)| match value {
            Value::Given(tensor) => Tensor { name: name.clone(), ..tensor.clone() },
            Value::Text => self.text(name, indices.clone()),
            Value::Generated(Kind::ContextLogits) => {
                self.sequences[indices.start].logits.take_context(name, self.logits_form)
            }
            Value::Generated(Kind::GenerationLogits) => self.generation_logits(name, indices.clone()),
            Value::Generated(kind) => self.output(name, *kind, indices.clone()),
        };
        let outputs = specified.iter().map(output).collect();
        self.outputs = specified;
        self.sequences[indices].iter_mut().for_each(|output| output.pending.clear());
        let is_final = self.num_open == 0;
        if let (true, Some(texts)) = (is_final, &mut self.texts) {
            texts.flush(); // Before the client can read the statistics.
        }
        InferResponse {
            model_name: self.model_name.clone(),
            model_version: self.model_version.clone(),
            id: self.id.clone(),
            parameters: self.parameters.clone(),
            outputs,
            is_final,
            allows_delta: self.delta_base.is_some(),
        }
    }

    /// The text of the tokens that some sequences have got since their last response.
    fn text(&mut self, name: &Name, indices: std::ops::Range<usize>) -> Tensor {
        let Self { texts: Some(texts), sequences, prompt, padding, .. } = self else {
            unreachable!("a text ensemble's responses have texts");
        };
        let sequences = &sequences[indices.clone()];
        let width = longest(sequences);
        let rows = indices.zip(sequences).map(|(index, output)| {
            let padding = std::iter::repeat_n(padding.0, width - output.pending.len());
            let tokens = prompt.iter().map(|id| id.0).chain(output.pending.iter().map(|token| token.token.0));
            (index, tokens, padding, output.ended)
        });
        texts.push_rows(name, rows)
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

    /// The value of an output that is one number for some sequences together.
    fn number(&self, kind: Kind, indices: std::ops::Range<usize>) -> Number {
        let first = indices.start;
        let sequences = &self.sequences[indices];
        let count = |value: usize| Number::I32(value as i32);
        let time = |at: Option<Timestamp>| Number::I64(self.unix_ns(at));
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

    /// `[1, sequences, tokens, V]` of the tokens in this response.
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
    fn unix_ns(&self, at: Option<Timestamp>) -> i64 {
        let Some(at) = at else { return 0 };
        let since_1970 = self.arrived.1.duration_since(UNIX_EPOCH).unwrap_or_default();
        (since_1970 + Duration::from_nanos(at.ns_since(self.arrived.0))).as_nanos().try_into().unwrap_or(i64::MAX)
    }
}

impl Output {
    fn take(&mut self, tokens: &mut Tokens, at: Timestamp, blocks: BlockUsage) {
        self.blocks = blocks;
        if tokens.is_empty() {
            return;
        }
        self.first_token.get_or_insert(at);
        self.last_token = Some(at);
        self.num_tokens += tokens.len();
        self.cumulative_log_prob += tokens.iter().filter_map(|token| token.logprob.map(f64::from)).sum::<f64>();
        if self.pending.is_empty() {
            self.pending = std::mem::take(tokens);
        } else {
            self.pending.append(tokens);
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

/// Zeros of the shape that an output has when it was not requested.
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
pub(crate) mod tests;
