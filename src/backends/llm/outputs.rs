//! Builds responses with TensorRT-LLM's output tensors from events.

mod kind;
mod sequence;
mod tensors;

use std::sync::Arc;
use std::time::SystemTime;

use engine::TokenId;
use generation::{Delta, Logits};
use serving::{
    CallCounter, Elements, InferRequest, InferResponse, Name, OutputDelta, Parameter, Tensor, TextOutput, TextOutputs,
    Timestamp,
};
use smallvec::{SmallVec, smallvec};

use super::config::LlmConfig;
use super::inputs::TensorRequest;
use super::logits::LogitsForm;
use kind::{Change, Changing, Number, OutputKind, Value, changing, placeholder};
use sequence::Output;

/// Pads shorter sequences of a response where the request has no `end_id`.
const PADDING: TokenId = TokenId(0);

/// Builds the responses of one request.
pub(crate) struct Responses {
    id: Name,
    model_name: Name,
    model_version: Name,
    /// Parameters of each response.
    parameters: Arc<[(Name, Parameter)]>,
    /// The outputs of each response, in order.
    outputs: Vec<(Name, Value)>,
    /// Set where some outputs are text.
    texts: Option<TextForm>,
    mode: ResponseMode,
    /// The prompt as part of the output; empty when it is excluded.
    prompt: Vec<TokenId>,
    num_input_tokens: usize,
    padding: TokenId,
    logits_form: LogitsForm,
    sequences: SmallVec<[Output; 1]>,
    num_open: usize,
    arrived: (Timestamp, SystemTime),
    /// The outputs that change with each token; `None` where deltas are not possible.
    changing: Option<Changing>,
    /// The sequence of the last response, if a delta may follow it.
    delta_base: Option<usize>,
}

/// The form of texts in the responses of a text ensemble, and the statistics of the model that would decode them.
struct TextForm {
    /// Whether texts have the shape `[1, sequences]`; otherwise they have the shape `[sequences]`.
    is_nested: bool,
    /// Counts each response as a call.
    calls: CallCounter,
    /// Time that decoding took since the last response.
    decode_ns: u64,
}

/// A response, or a delta to the previous one.
pub(crate) enum OutputItem {
    Response(Box<InferResponse>),
    /// New values of the previous response, with the time when they were set.
    Delta(Timestamp),
}

/// When responses are sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ResponseMode {
    /// With each delta of a sequence.
    Streaming,
    /// At the end of each sequence.
    PerSequence,
    /// When all sequences, or beams, have ended.
    Once,
}

impl Responses {
    /// The responses to `request`. `text` has the outputs of a text ensemble.
    pub(crate) fn new(
        config: &LlmConfig,
        version: &str,
        request: &InferRequest,
        parsed: &TensorRequest,
        text: Option<TextOutputs>,
    ) -> Self {
        let (outputs, parameters) = match &text {
            None => (model_outputs(config, request, parsed), Arc::default()),
            Some(text) => (ensemble_outputs(config, parsed, text), text.parameters.clone()),
        };
        let texts = text.map(|TextOutputs { is_nested, calls, .. }| TextForm { is_nested, calls, decode_ns: 0 });
        let mode = match (parsed.streaming, config.decoupled) {
            _ if parsed.generate.sequence.beams.is_some() => ResponseMode::Once,
            (true, _) => ResponseMode::Streaming,
            (false, true) => ResponseMode::PerSequence,
            (false, false) => ResponseMode::Once,
        };
        Self {
            changing: changing(&outputs).filter(|_| mode == ResponseMode::Streaming),
            delta_base: None,
            id: request.id.clone(),
            model_name: Name::from(&config.name),
            model_version: version.into(),
            parameters,
            outputs,
            texts,
            mode,
            prompt: if parsed.excludes_input() { Vec::new() } else { parsed.generate.sequence.prompt.clone() },
            num_input_tokens: parsed.generate.sequence.prompt.len(),
            padding: parsed.generate.sequence.sampling.end_ids.first().copied().unwrap_or(PADDING),
            logits_form: LogitsForm { datatype: config.logits_type, vocab_size: config.vocab_size },
            sequences: smallvec![Output::default(); parsed.generate.num_sequences],
            num_open: parsed.generate.num_sequences,
            arrived: (Timestamp::now(), SystemTime::now()),
        }
    }

    /// Number of sequences of the request.
    #[cfg(test)]
    pub(crate) fn num_sequences(&self) -> usize {
        self.sequences.capacity()
    }

    /// Records that sequence `index` was scheduled at `at`. Only the first call for a sequence has an effect.
    pub(crate) fn scheduled(&mut self, index: usize, at: Timestamp) {
        self.sequences[index].first_scheduled.get_or_insert(at);
    }

    /// Stores logits of a sequence until the response with the tokens that are chosen from them.
    pub(crate) fn keep_logits(&mut self, part: Logits) {
        self.sequences[part.index].logits.keep(self.logits_form, &part);
    }

    /// Moves a delta's tokens and text to its sequence.
    fn take(&mut self, delta: &mut Delta) -> &mut Output {
        let output = &mut self.sequences[delta.index];
        if let (Some(texts), Some((_, decode_ns))) = (&mut self.texts, delta.decoded) {
            texts.decode_ns += decode_ns;
            output.take_text(&mut delta.text);
        }
        output.take(&mut delta.tokens, delta.at, delta.blocks);
        output.drafts = delta.drafts;
        output.cumulative_log_prob = delta.cum_log_prob.map_or(output.cumulative_log_prob, f64::from);
        output.ended = delta.finished.is_some();
        self.num_open -= usize::from(output.ended);
        output
    }

    /// Adds a delta of a sequence. Returns the response that is due, as a delta where `accepts_deltas` allows it. The response is final
    /// when all sequences have ended.
    pub(crate) fn push(
        &mut self,
        delta: &mut Delta,
        accepts_deltas: bool,
        changes: &mut OutputDelta,
    ) -> Option<OutputItem> {
        let (index, ends) = (delta.index, delta.finished.is_some());
        let num_pending = self.take(delta).pending.len();
        let is_due = match self.mode {
            ResponseMode::Streaming => ends || num_pending > 0,
            ResponseMode::PerSequence => ends,
            ResponseMode::Once => self.num_open == 0,
        };
        if !is_due {
            return None;
        }
        let is_one_of_more = num_pending == 1 && !ends;
        if accepts_deltas && is_one_of_more && self.delta_base == Some(index) {
            let decoded_at = delta.decoded.map(|(at, _)| at);
            self.delta(index, changes);
            return Some(OutputItem::Delta(decoded_at.unwrap_or_else(Timestamp::now)));
        }
        self.delta_base = (self.changing.is_some() && is_one_of_more).then_some(index);
        let indices = if self.mode == ResponseMode::Once { 0..self.sequences.len() } else { index..index + 1 };
        Some(OutputItem::Response(Box::new(self.response(indices))))
    }

    /// Sets the values of the last response that one more token changes.
    fn delta(&mut self, index: usize, delta: &mut OutputDelta) {
        let Some(changing) = self.changing.take() else { return };
        let token = self.sequences[index].pending.first();
        let (token, logprob) = token.map_or((0, None), |token| (token.token.0, token.logprob));
        for &(output, change) in &changing {
            let kind = match change {
                Change::Generated(kind) => kind,
                Change::Text => {
                    delta.set(output, Elements::text(&self.sequences[index].text));
                    continue;
                }
            };
            let number = match kind {
                OutputKind::OutputIds => Number::I32(token.cast_signed()),
                OutputKind::CumLogProbs => Number::F32(self.sequences[index].cumulative_log_prob as f32),
                OutputKind::OutputLogProbs => Number::F32(logprob.unwrap_or(0.0)),
                _ => self.number(kind, index..index + 1),
            };
            number.set(output, delta);
        }
        self.changing = Some(changing);
        self.sequences[index].clear();
        self.count_texts();
    }

    /// Counts a response as a call of the model that would decode it.
    fn count_texts(&mut self) {
        if let Some(texts) = &mut self.texts {
            texts.calls.count(std::mem::take(&mut texts.decode_ns));
        }
    }

    /// The response with the new tokens of some sequences.
    fn response(&mut self, indices: std::ops::Range<usize>) -> InferResponse {
        let specified = std::mem::take(&mut self.outputs);
        let output = |(name, value): &(Name, Value)| match value {
            Value::Given(tensor) => Tensor { name: name.clone(), ..tensor.clone() },
            Value::Text => self.text(name, indices.clone()),
            Value::Generated(OutputKind::ContextLogits) => {
                self.sequences[indices.start].logits.take_context(name, self.logits_form)
            }
            Value::Generated(OutputKind::GenerationLogits) => self.generation_logits(name, indices.clone()),
            Value::Generated(kind) => self.output(name, *kind, indices.clone()),
        };
        let outputs = specified.iter().map(output).collect();
        self.outputs = specified;
        self.sequences[indices].iter_mut().for_each(Output::clear);
        let is_final = self.num_open == 0;
        self.count_texts();
        if let (true, Some(texts)) = (is_final, &mut self.texts) {
            texts.calls.flush(); // Before the client can read the statistics.
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
}

/// The requested outputs of the model. Placeholders are last.
fn model_outputs(config: &LlmConfig, request: &InferRequest, parsed: &TensorRequest) -> Vec<(Name, Value)> {
    let is_requested = |name: &&String| request.wants_output(name);
    let (wanted, unwanted): (Vec<&String>, Vec<&String>) =
        config.outputs.iter().filter(is_requested).partition(|name| parsed.wants(name));
    let outputs = wanted.into_iter().chain(unwanted);
    outputs.filter_map(|name| Some((name.into(), value(config, parsed, name)?))).collect()
}

/// The outputs of a text ensemble that the model makes.
fn ensemble_outputs(config: &LlmConfig, parsed: &TensorRequest, text: &TextOutputs) -> Vec<(Name, Value)> {
    let is_declared = |name: &Name| config.outputs.iter().any(|output| *name == output.as_str());
    let output = |(name, output): &(Name, TextOutput)| {
        let value = match output {
            TextOutput::Text => Value::Text,
            TextOutput::Given(tensor) => Value::Given(tensor.clone()),
            TextOutput::Generated(name) => value(config, parsed, Some(name).filter(|name| is_declared(name))?)?,
        };
        Some((name.clone(), value))
    };
    text.outputs.iter().filter_map(output).collect()
}

/// The value of an output of the model; `None` for an output that responses do not have.
fn value(config: &LlmConfig, parsed: &TensorRequest, name: &str) -> Option<Value> {
    if parsed.wants(name) {
        return Some(Value::Generated(OutputKind::of(name)?));
    }
    let has_placeholders = config.has_placeholders && !parsed.streaming;
    let num_input_tokens = parsed.generate.sequence.prompt.len();
    let placeholder = placeholder(name, config.logits_type, num_input_tokens).filter(|_| has_placeholders);
    placeholder.map(Value::Given)
}

#[cfg(test)]
pub(crate) mod tests;
