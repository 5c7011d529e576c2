//! A request's tensors, by the names TensorRT-LLM gives them, as an engine request.

use std::sync::atomic::Ordering;

use engine::{BeamParams, Refused, Request, SamplingParams, TokenId};
use generation::{ConstraintSpec, GenerateRequest, Guide};
use serving::{DataType, InferError, InferRequest, Limit, Parameter, Tensor};

use super::config::LlmConfig;
use super::refusal::error_of;

/// Ways in which a tokenizer spells one word, each of them a word here.
const SPELLINGS: u64 = 3;

/// Temperatures below this are greedy: their inverse is beyond what logits can be scaled by.
const LEAST_TEMPERATURE: f32 = 1e-6;

/// A request that came as tensors.
#[derive(Debug, Clone)]
pub(crate) struct TensorRequest {
    /// What to generate.
    pub(crate) generate: GenerateRequest,
    /// Whether each event has its own response. Otherwise one response has all outputs.
    pub(crate) streaming: bool,
    pub(crate) exclude_input: bool,
    pub(crate) return_log_probs: bool,
    pub(crate) return_perf_metrics: bool,
    pub(crate) return_num_input_tokens: bool,
    pub(crate) return_num_output_tokens: bool,
}

impl TensorRequest {
    /// Whether the request's flags ask for an output.
    pub(crate) fn wants(&self, output: &str) -> bool {
        match output {
            "cum_log_probs" | "output_log_probs" => self.return_log_probs,
            "sequence_end" => self.generate.num_sequences > 1,
            "context_logits" => self.generate.sequence.sampling.context_logits,
            "generation_logits" => self.generate.sequence.sampling.generation_logits,
            "num_input_tokens" => self.return_num_input_tokens,
            "num_output_tokens" => self.return_num_output_tokens,
            "acceptance_rate" | "total_draft_tokens" | "total_accepted_draft_tokens" => self.return_perf_metrics,
            name if name.starts_with("kv_cache_") || name.ends_with("_time_ns") => self.return_perf_metrics,
            _ => true,
        }
    }
}

/// What a request's tensors mean.
pub(crate) enum Command {
    Generate(Box<TensorRequest>),
    /// End the running request with the same id.
    Stop,
}

pub(crate) fn parse(config: &LlmConfig, request: &InferRequest) -> Result<Command, InferError> {
    if scalar::<bool>(request, &["stop"])?.unwrap_or(false) {
        return Ok(Command::Stop);
    }
    refuse_unsupported(request)?;
    let prompt = prompt(config, request)?;
    let max_tokens = scalar::<i64>(request, &["request_output_len"])?.ok_or_else(|| {
        InferError::invalid("input `request_output_len` is missing: it says how many tokens to generate")
    })?;
    let max_tokens = u32::try_from(max_tokens).ok().filter(|&tokens| tokens > 0).ok_or_else(|| {
        InferError::invalid(format!("`request_output_len` is {max_tokens}, expected a number of tokens from 1"))
    })?;
    let streaming = scalar::<bool>(request, &["streaming"])?.unwrap_or(false);
    if streaming && !config.decoupled {
        let words = "`streaming` is true, but this model is not decoupled; set `model_transaction_policy { decoupled: true }` or leave `streaming` out";
        return Err(InferError::invalid(words));
    }
    let beams = beams(config, request)?;
    if streaming && beams.is_some() {
        let words = "`streaming` is true, but beams are known only when their search has ended; set `beam_width` to 1 or leave `streaming` out";
        return Err(InferError::invalid(words));
    }
    let flag = |names: &[&str]| scalar::<bool>(request, names).map(|flag| flag.unwrap_or(false));
    let return_log_probs = flag(&["return_log_probs"])?;
    let exclude_input = scalar::<bool>(request, &["exclude_input_in_output"])?.unwrap_or(config.exclude_input);
    let num_sequences = num_sequences(config, request, beams.as_ref())?;
    let mut sampling = sampling(config, request, return_log_probs)?;
    sampling.context_logits = wants_logits(config, request, "context_logits")?;
    sampling.generation_logits = wants_logits(config, request, "generation_logits")?;
    let engine_request = Request {
        prompt,
        max_tokens,
        sampling,
        stop_words: words(config, request, "stop_words_list")?,
        priority: 0,
        beams,
        cache_salt: None,
        constraint: None,
        max_drafts: max_drafts(config, request)?,
    };
    let generate = GenerateRequest {
        sequence: engine_request,
        num_sequences,
        guide: guide(request)?,
        priority: request.priority,
        timeout_us: request.timeout_us,
        ..GenerateRequest::default()
    };
    Ok(Command::Generate(Box::new(TensorRequest {
        generate,
        streaming,
        exclude_input,
        return_log_probs,
        return_perf_metrics: flag(&["return_perf_metrics", "return_kv_cache_reuse_stats"])?,
        return_num_input_tokens: flag(&["return_num_input_tokens"])?,
        return_num_output_tokens: flag(&["return_num_output_tokens"])?,
    })))
}

/// Whether the request wants this output of logits, and it can be had.
fn wants_logits(config: &LlmConfig, request: &InferRequest, output: &str) -> Result<bool, InferError> {
    let flag = format!("return_{output}");
    let outputs = &request.requested_outputs;
    let is_asked = outputs.is_empty() || outputs.iter().any(|name| name == output);
    if !scalar::<bool>(request, &[&flag])?.unwrap_or(false) || !is_asked {
        return Ok(false);
    }
    if !config.outputs.iter().any(|name| name == output) {
        let words = format!(
            "`{flag}` is true, but config.pbtxt declares no output `{output}`; declare it, or leave `{flag}` out"
        );
        return Err(InferError::invalid(words));
    }
    Ok(true)
}

fn num_sequences(config: &LlmConfig, request: &InferRequest, beams: Option<&BeamParams>) -> Result<usize, InferError> {
    let (default, max, bound) = match beams {
        Some(beams) => (i64::from(beams.width), beams.width as usize, "`beam_width`"),
        None => (1, config.engine.max_rows, "`max_batch_size`"),
    };
    let count = scalar::<i64>(request, &["num_return_sequences"])?.unwrap_or(default);
    usize::try_from(count)
        .ok()
        .filter(|count| (1..=max).contains(count))
        .ok_or_else(|| InferError::invalid(format!("`num_return_sequences` is {count}, expected 1 to {max} ({bound})")))
}

/// TensorRT-LLM's settings of a beam search, with its defaults.
fn beams(config: &LlmConfig, request: &InferRequest) -> Result<Option<BeamParams>, InferError> {
    let width = scalar::<i64>(request, &["beam_width"])?.unwrap_or(1);
    // The engine refuses it in the same words; by then the width would have sized the request's answer.
    let max = config.engine.max_rows;
    if let Some(width) = u32::try_from(width).ok().filter(|&width| width > 1 && width as usize > max) {
        return Err(error_of(&Refused::BeamWidth { width, max }));
    }
    let finite = f32::MIN..=f32::MAX;
    let params = BeamParams {
        width: u32::try_from(width)
            .ok()
            .filter(|&width| width > 0)
            .ok_or_else(|| InferError::invalid(format!("`beam_width` is {width}, expected at least 1")))?,
        len_penalty: float(request, &["len_penalty"], finite.clone())?.unwrap_or(0.0),
        early_stopping: scalar::<bool>(request, &["early_stopping"])?.unwrap_or(true),
        diversity_rate: float(request, &["beam_search_diversity_rate"], finite)?.unwrap_or(0.0),
    };
    Ok((width > 1).then_some(params))
}

/// The request's parameter `prompt_lookup_num_tokens`, else the model's.
fn max_drafts(config: &LlmConfig, request: &InferRequest) -> Result<u32, InferError> {
    let max = config.engine.max_drafts as u32;
    match request.parameters.get("prompt_lookup_num_tokens") {
        None => Ok(max),
        Some(&Parameter::Int(count)) if (0..=i64::from(max)).contains(&count) => Ok(count as u32),
        Some(other) => Err(InferError::invalid(format!(
            "parameter `prompt_lookup_num_tokens` is {other:?}, expected 0 to {max}, as many as the model's parameter allows"
        ))),
    }
}

fn prompt(config: &LlmConfig, request: &InferRequest) -> Result<Vec<TokenId>, InferError> {
    let missing = || InferError::invalid("input `input_ids` is missing: it holds the prompt's token ids");
    let tensor = request.input("input_ids").ok_or_else(missing)?;
    let ids = integers(tensor)?;
    if tensor.shape.len() == 2 && tensor.shape[0] != 1 {
        let words = format!(
            "`input_ids` has batch size {}; send one prompt per request, they are batched in flight",
            tensor.shape[0]
        );
        return Err(InferError::invalid(words));
    }
    // `input_lengths` may cut padding off.
    let length = match scalar::<i64>(request, &["input_lengths"])? {
        None => ids.len(),
        Some(length) => usize::try_from(length).ok().filter(|&length| length <= ids.len()).ok_or_else(|| {
            InferError::invalid(format!("`input_lengths` is {length}, but `input_ids` has {} tokens", ids.len()))
        })?,
    };
    let max = config.engine.max_sequence_len.saturating_sub(1);
    if length > max {
        return Err(error_of(&Refused::PromptTooLong { len: length, max }));
    }
    ids[..length].iter().map(|&id| prompt_token(config, id)).collect()
}

/// A token of the prompt. TensorRT-LLM computes something for ids beyond the vocabulary, too, and its benchmarks draw them at
/// random up to 2³¹: unless the model's configuration says otherwise, they stand for ids of the vocabulary, as different
/// from each other as they were.
fn prompt_token(config: &LlmConfig, id: i64) -> Result<TokenId, InferError> {
    let beyond = u64::try_from(id).ok().filter(|&id| id >= config.vocab_size as u64 && !config.check_input_ids);
    let Some(beyond) = beyond else { return token(config, "input_ids", id) };
    if !config.has_wrapped_ids.swap(true, Ordering::Relaxed) {
        tracing::warn!(
            model = %config.name,
            "`input_ids` holds token {id}, but the vocabulary is 0..{size}: such ids are taken modulo {size}, which is said \
             once; is the client's tokenizer another model's? parameter `check_input_ids` set to `true` refuses them",
            size = config.vocab_size
        );
    }
    Ok(TokenId((beyond % config.vocab_size as u64) as u32))
}

fn sampling(config: &LlmConfig, request: &InferRequest, log_probs: bool) -> Result<SamplingParams, InferError> {
    let defaults = SamplingParams::default();
    let top_k = at_least_zero("runtime_top_k", scalar::<i64>(request, &["runtime_top_k", "top_k"])?)?.unwrap_or(0);
    let top_p = float(request, &["runtime_top_p", "top_p"], 0.0..=1.0)?.unwrap_or(0.0);
    let temperature = float(request, &["temperature"], 0.0..=f32::MAX)?;
    if temperature.is_some_and(|it| it != 1.0 && it >= LEAST_TEMPERATURE) && top_k == 0 && top_p == 0.0 {
        warn_of_greedy(config);
    }
    Ok(SamplingParams {
        temperature: effective_temperature(temperature, top_k, top_p),
        top_k,
        top_p: if top_p > 0.0 { top_p } else { defaults.top_p },
        top_p_decay: float(request, &["runtime_top_p_decay"], f32::MIN_POSITIVE..=1.0)?.unwrap_or(defaults.top_p_decay),
        top_p_min: float(request, &["runtime_top_p_min"], f32::MIN_POSITIVE..=1.0)?.unwrap_or(defaults.top_p_min),
        top_p_reset: top_p_reset(config, request)?,
        min_p: float(request, &["runtime_min_p", "min_p"], 0.0..=0.999_999)?.unwrap_or(defaults.min_p),
        repetition_penalty: float(request, &["repetition_penalty"], f32::MIN_POSITIVE..=f32::MAX)?
            .unwrap_or(defaults.repetition_penalty),
        presence_penalty: float(request, &["presence_penalty"], f32::MIN..=f32::MAX)?.unwrap_or(0.0),
        frequency_penalty: float(request, &["frequency_penalty"], f32::MIN..=f32::MAX)?.unwrap_or(0.0),
        seed: scalar::<u64>(request, &["seed", "random_seed"])?.unwrap_or(0),
        min_tokens: at_least_zero("min_tokens", scalar::<i64>(request, &["min_tokens", "min_length"])?)?.unwrap_or(0),
        end_ids: end_ids(config, request)?,
        logit_bias: logit_bias(config, request)?,
        bad_words: words(config, request, "bad_words_list")?,
        num_logprobs: log_probs.then_some(0),
        ..defaults
    })
}

/// TensorRT-LLM's rule (`regularizeTopKTopP` in its `samplingTopKKernels.h`): what is not sent is 0, and a top-k of 0 with a
/// top-p of 0 is greedy, whatever the temperature; a top-p of 1 draws from all tokens. 0 is greedy here.
fn effective_temperature(temperature: Option<f32>, top_k: u32, top_p: f32) -> f32 {
    let is_greedy = top_k == 1 || (top_k == 0 && top_p == 0.0);
    let temperature = temperature.unwrap_or(1.0);
    if is_greedy || temperature < LEAST_TEMPERATURE { 0.0 } else { temperature }
}

/// Logs a warning, once per model, that a temperature had no effect.
fn warn_of_greedy(config: &LlmConfig) {
    if !config.has_warned_of_greedy.swap(true, Ordering::Relaxed) {
        tracing::warn!(
            model = %config.name,
            "a request has a `temperature`, but neither `runtime_top_k` nor `runtime_top_p`, and so is greedy as with \
             TensorRT-LLM, which is said once; send a top-p of 1 to draw from all tokens"
        );
    }
}

/// A negative id means none.
fn top_p_reset(config: &LlmConfig, request: &InferRequest) -> Result<Option<TokenId>, InferError> {
    let id = scalar::<i64>(request, &["runtime_top_p_reset_ids"])?.filter(|&id| id >= 0);
    id.map(|id| token(config, "runtime_top_p_reset_ids", id)).transpose()
}

/// `end_id` of the request, else the checkpoint's. One that no token has means none: benchmarks of other servers send 1048576
/// for answers of a fixed length.
fn end_ids(config: &LlmConfig, request: &InferRequest) -> Result<Vec<TokenId>, InferError> {
    let requested = scalar::<i64>(request, &["end_id"])?;
    let of = |id: i64| token(config, "end_id", id).into_iter().collect();
    Ok(requested.map_or_else(|| config.end_ids.clone(), of))
}

fn logit_bias(config: &LlmConfig, request: &InferRequest) -> Result<Vec<(TokenId, f32)>, InferError> {
    let Some(tensor) = request.input("embedding_bias") else {
        return Ok(Vec::new());
    };
    let bias = tensor.to_f32().ok_or_else(|| wrong_type(tensor, "FP32"))?;
    if bias.len() > config.vocab_size {
        let words = format!("`embedding_bias` has {} values, but the vocabulary has {}", bias.len(), config.vocab_size);
        return Err(InferError::invalid(words));
    }
    Ok((0..).map(TokenId).zip(bias).filter(|&(_, bias)| bias != 0.0).collect())
}

/// Words as TensorRT-LLM lays them out, `[2, n]`: all ids in one row; in the other where each word ends, padded with -1.
fn words(config: &LlmConfig, request: &InferRequest, name: &str) -> Result<Vec<Vec<TokenId>>, InferError> {
    let Some(tensor) = request.input(name) else {
        return Ok(Vec::new());
    };
    let values = integers(tensor)?;
    let broken = |what: &str| {
        InferError::invalid(format!(
            "`{name}` {what}; expected shape [2, n]: token ids, then where each word ends, padded with -1"
        ))
    };
    if tensor.shape.len() < 2 || tensor.shape[tensor.shape.len() - 2] != 2 || values.len() % 2 != 0 {
        return Err(broken(&format!("has shape {:?}", tensor.shape)));
    }
    let (ids, ends) = values.split_at(values.len() / 2);
    let (count, max) = (ends.iter().take_while(|&&end| end > 0).count(), SPELLINGS * config.limits.get(Limit::Words));
    if count as u64 > max {
        return Err(Limit::Words.refuse(count as u64, max));
    }
    let (mut words, mut start) = (Vec::new(), 0);
    for &end in ends.iter().take_while(|&&end| end > 0) {
        let end = usize::try_from(end).ok().filter(|&end| end > start && end <= ids.len());
        let end = end.ok_or_else(|| broken("names an end beyond its ids"))?;
        // No token is less than a byte; behind a blank a word may have two tokens more.
        config.limits.check(Limit::WordBytes, (end - start).saturating_sub(2))?;
        words.push(ids[start..end].iter().map(|&id| token(config, name, id)).collect::<Result<Vec<_>, _>>()?);
        start = end;
    }
    Ok(words)
}

/// Refuses what would change the answer if it were ignored.
/// What the text must be: `guided_decoding_guide_type` and `guided_decoding_guide`, as TensorRT-LLM names them.
fn guide(request: &InferRequest) -> Result<Guide, InferError> {
    const TYPE: &str = "guided_decoding_guide_type";
    const GUIDE: &str = "guided_decoding_guide";
    let (kind, guide) = (text(request, TYPE)?, text(request, GUIDE)?);
    let Some(kind) = kind.filter(|kind| !kind.is_empty()) else {
        return match guide.filter(|guide| !guide.is_empty()) {
            Some(_) => Err(InferError::invalid(format!(
                "`{GUIDE}` is set, but `{TYPE}` is missing: it says what the guide is"
            ))),
            None => Ok(Guide::default()),
        };
    };
    if kind == "json" {
        return Ok(Guide { spec: Some(ConstraintSpec::JsonSchema(true.into())), ..Guide::default() });
    }
    let guide = guide.filter(|guide| !guide.is_empty());
    let guide = guide.ok_or_else(|| InferError::invalid(format!("`{TYPE}` is `{kind}`, but `{GUIDE}` is missing")))?;
    let spec = match kind.as_str() {
        "json_schema" => ConstraintSpec::JsonSchema(guide.into()),
        "regex" => ConstraintSpec::Regex(guide),
        "ebnf_grammar" => ConstraintSpec::Grammar(guide),
        "structural_tag" => ConstraintSpec::StructuralTag(guide.into()),
        _ => {
            let kinds = "expected `json`, `json_schema`, `regex`, `ebnf_grammar` or `structural_tag`";
            return Err(InferError::invalid(format!("`{TYPE}` is `{kind}`, {kinds}")));
        }
    };
    Ok(Guide { spec: Some(spec), ..Guide::default() })
}

/// The string of an input; `None` without the input.
fn text(request: &InferRequest, name: &str) -> Result<Option<String>, InferError> {
    let Some(tensor) = request.input(name) else { return Ok(None) };
    let strings = tensor.to_byte_strings().ok_or_else(|| wrong_type(tensor, "BYTES"))?;
    match strings.as_slice() {
        [text] => match std::str::from_utf8(text) {
            Ok(text) => Ok(Some(text.to_owned())),
            Err(_) => Err(InferError::invalid(format!("`{name}` is not UTF-8"))),
        },
        found => Err(InferError::invalid(format!("`{name}` has {} values, expected 1", found.len()))),
    }
}

fn refuse_unsupported(request: &InferRequest) -> Result<(), InferError> {
    let unsupported = ["draft_input_ids", "prompt_embedding_table", "lora_weights", "lora_task_id"];
    match unsupported.into_iter().find(|name| request.input(name).is_some()) {
        Some(name) => Err(InferError::invalid(format!("input `{name}` is not supported; leave it out"))),
        None => Ok(()),
    }
}

fn token(config: &LlmConfig, name: &str, id: i64) -> Result<TokenId, InferError> {
    let known = u32::try_from(id).ok().filter(|&id| (id as usize) < config.vocab_size);
    known.map(TokenId).ok_or_else(|| {
        InferError::invalid(format!("`{name}` holds token {id}, but the vocabulary is 0..{}", config.vocab_size))
    })
}

fn at_least_zero(name: &str, value: Option<i64>) -> Result<Option<u32>, InferError> {
    let convert = |value: i64| {
        u32::try_from(value).map_err(|_| InferError::invalid(format!("`{name}` is {value}, expected at least 0")))
    };
    value.map(convert).transpose()
}

fn float(
    request: &InferRequest,
    names: &[&str],
    range: std::ops::RangeInclusive<f32>,
) -> Result<Option<f32>, InferError> {
    let value = scalar::<f32>(request, names)?;
    match value.filter(|value| !range.contains(value)) {
        Some(value) => {
            let words = format!("`{}` is {value}, expected {} to {}", names[0], range.start(), range.end());
            Err(InferError::invalid(words))
        }
        None => Ok(value),
    }
}

/// A tensor element as the parser wants it, from any type a client may use for it.
trait Element: Sized {
    const EXPECTED: &'static str;
    fn all(tensor: &Tensor) -> Option<Vec<Self>>;
}

impl Element for i64 {
    const EXPECTED: &'static str = "INT32 or another integer type";

    fn all(tensor: &Tensor) -> Option<Vec<Self>> {
        match tensor.datatype {
            DataType::Int32 => Some(tensor.to_i32()?.into_iter().map(i64::from).collect()),
            DataType::Uint32 => Some(tensor.to_u32()?.into_iter().map(i64::from).collect()),
            DataType::Int64 => tensor.to_i64(),
            DataType::Uint64 => {
                Some(tensor.to_u64()?.into_iter().map(|value| value.try_into().unwrap_or(i64::MAX)).collect())
            }
            _ => None,
        }
    }
}

impl Element for u64 {
    const EXPECTED: &'static str = "UINT64 or another integer type";

    fn all(tensor: &Tensor) -> Option<Vec<Self>> {
        match tensor.datatype {
            DataType::Uint64 => tensor.to_u64(),
            _ => Some(i64::all(tensor)?.into_iter().map(|value| value as u64).collect()),
        }
    }
}

impl Element for f32 {
    const EXPECTED: &'static str = "FP32 or FP64";

    fn all(tensor: &Tensor) -> Option<Vec<Self>> {
        match tensor.datatype {
            DataType::Fp32 => tensor.to_f32(),
            DataType::Fp64 => Some(tensor.to_f64()?.into_iter().map(|value| value as f32).collect()),
            _ => None,
        }
    }
}

impl Element for bool {
    const EXPECTED: &'static str = "BOOL";

    fn all(tensor: &Tensor) -> Option<Vec<Self>> {
        tensor.to_bool()
    }
}

/// The one value of the first of `names` that the request has.
fn scalar<T: Element>(request: &InferRequest, names: &[&str]) -> Result<Option<T>, InferError> {
    let Some(tensor) = names.iter().find_map(|name| request.input(name)) else {
        return Ok(None);
    };
    let mut values = T::all(tensor).ok_or_else(|| wrong_type(tensor, T::EXPECTED))?;
    match values.len() {
        1 => Ok(values.pop()),
        found => Err(InferError::invalid(format!("`{}` has {found} values, expected 1", tensor.name))),
    }
}

fn integers(tensor: &Tensor) -> Result<Vec<i64>, InferError> {
    i64::all(tensor).ok_or_else(|| wrong_type(tensor, i64::EXPECTED))
}

fn wrong_type(tensor: &Tensor, expected: &str) -> InferError {
    InferError::invalid(format!("`{}` is {}, expected {expected}", tensor.name, tensor.datatype.name()))
}

#[cfg(test)]
mod tests;
