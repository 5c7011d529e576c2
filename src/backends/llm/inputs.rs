//! Parses a request's tensors, which have TensorRT-LLM's names.

mod adapter;
mod bounds;
mod guide;
mod sampling;
mod token;
mod words;

use std::sync::atomic::Ordering;

use engine::{BeamParams, Refused, Request, TokenId};
use generation::{GenerateRequest, MAX_CACHE_SALT_CHARS, TextDecoder, TextOptions};
use serving::{InferError, InferRequest, Parameter};

use super::config::LlmConfig;
use super::refusal::error_of;
use super::text_stop;
use crate::tensor_values::{float, scalar, values};
pub(crate) use adapter::{TaskAdapter, TaskTensors, task};
pub(crate) use bounds::{RequestDefaults, ValueBounds};
use guide::guide;
use sampling::sampling;
use token::token;
pub(crate) use words::words;

/// A request as tensors, parsed.
#[derive(Debug, Clone)]
pub(crate) struct TensorRequest {
    /// What to generate.
    pub(crate) generate: GenerateRequest,
    /// Whether each event has a response of its own. Otherwise one response has all outputs.
    pub(crate) streaming: bool,
    pub(crate) exclude_input: bool,
    pub(crate) return_log_probs: bool,
    pub(crate) return_perf_metrics: bool,
    pub(crate) return_num_input_tokens: bool,
    pub(crate) return_num_output_tokens: bool,
}

impl TensorRequest {
    /// Whether the request's flags request an output.
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

    /// Lets the events of the request have text. Its stop words become stop texts as far as their texts can be searched for; those of
    /// a beam search are found by their tokens.
    pub(crate) fn decode(&mut self, decoder: &TextDecoder) {
        let includes_prompt = !self.excludes_input();
        let TextDecoder { tokenizer, skip_special_tokens } = decoder;
        let GenerateRequest { sequence, stop, text, .. } = &mut self.generate;
        *text = Some(TextOptions { skip_special_tokens: *skip_special_tokens });
        if let Some(&before) = sequence.prompt.last() {
            let stop_words = &mut sequence.stop_words;
            text_stop::keep_space(tokenizer, stop_words, before);
            if sequence.beams.is_none() {
                stop.texts = text_stop::take_stop_texts(tokenizer, *skip_special_tokens, stop_words, before);
            }
        }
        self.generate.includes_prompt = includes_prompt;
    }

    /// Whether the prompt is excluded from the output. A stream never includes its prompt, as in TensorRT-LLM.
    pub(crate) fn excludes_input(&self) -> bool {
        self.exclude_input || self.streaming
    }
}

/// A parsed request.
pub(crate) enum Command {
    Generate(Box<TensorRequest>),
    /// End the running request with the same id.
    Stop,
}

/// Parses a request.
///
/// # Errors
/// When a tensor is missing, has another type, or a value outside of the model's limits. The message names the tensor.
pub(crate) fn parse(config: &LlmConfig, request: &InferRequest) -> Result<Command, InferError> {
    let flag = |names: &[&str]| scalar::<bool>(request, names).map(|flag| flag.unwrap_or(false));
    if flag(&["stop"])? {
        return Ok(Command::Stop);
    }
    refuse_unsupported(request)?;
    let (bounds, streaming) = (ValueBounds::of(config), flag(&["streaming"])?);
    let prompt = prompt(config, request)?;
    let mut generate = generation(&bounds, request, &RequestDefaults::default())?;
    let sequence = &mut generate.sequence;
    sequence.prompt = prompt;
    sequence.stop_words = words(&bounds, request, "stop_words_list")?;
    sequence.sampling.context_logits = wants_logits(config, request, "context_logits")?;
    sequence.sampling.generation_logits = wants_logits(config, request, "generation_logits")?;
    check_streaming(config.decoupled, streaming, sequence.beams.as_ref())?;
    Ok(Command::Generate(Box::new(TensorRequest {
        return_log_probs: sequence.sampling.num_logprobs.is_some(),
        generate,
        streaming,
        exclude_input: scalar(request, &["exclude_input_in_output"])?.unwrap_or(config.exclude_input),
        return_perf_metrics: flag(&["return_perf_metrics", "return_kv_cache_reuse_stats"])?,
        return_num_input_tokens: flag(&["return_num_input_tokens"])?,
        return_num_output_tokens: flag(&["return_num_output_tokens"])?,
    })))
}

/// The parameters of a request, without its prompt, its stop words and its outputs.
///
/// # Errors
/// As [`parse`].
pub(crate) fn generation(
    bounds: &ValueBounds<'_>,
    request: &InferRequest,
    defaults: &RequestDefaults,
) -> Result<GenerateRequest, InferError> {
    let max_tokens = max_tokens(request, defaults.max_tokens)?;
    let beams = beams(bounds, request)?;
    let sequence = Request {
        max_tokens,
        sampling: sampling(bounds, request, &defaults.sampling)?,
        beams,
        max_drafts: max_drafts(bounds, request)?,
        cache_salt: cache_salt(request)?,
        ..Request::default()
    };
    Ok(GenerateRequest {
        sequence,
        num_sequences: num_sequences(bounds, request, beams.as_ref())?,
        adapter: adapter::name(request)?,
        guide: guide(request)?,
        priority: request.priority,
        timeout_us: request.timeout_us,
        ..GenerateRequest::default()
    })
}

fn max_tokens(request: &InferRequest, default: Option<u32>) -> Result<u32, InferError> {
    let max_tokens = scalar::<i64>(request, &["request_output_len"])?.or(default.map(i64::from)).ok_or_else(|| {
        InferError::invalid("input `request_output_len` is missing: it says how many tokens to generate")
    })?;
    u32::try_from(max_tokens).ok().filter(|&tokens| tokens > 0).ok_or_else(|| {
        InferError::invalid(format!("`request_output_len` is {max_tokens}, expected a number of tokens from 1"))
    })
}

/// Checks that the responses to a request can be streamed.
pub(crate) fn check_streaming(
    is_decoupled: bool,
    streaming: bool,
    beams: Option<&BeamParams>,
) -> Result<(), InferError> {
    let (reason, advice) = match (streaming, is_decoupled, beams) {
        (false, ..) | (true, true, None) => return Ok(()),
        (true, false, _) => (
            "this model is not decoupled",
            "set `model_transaction_policy { decoupled: true }` or leave `streaming` out",
        ),
        (true, true, Some(_)) => {
            ("beams are known only when their search has ended", "set `beam_width` to 1 or leave `streaming` out")
        }
    };
    Err(InferError::invalid(format!("`streaming` is true, but {reason}; {advice}")))
}

/// Whether the request wants an output of logits.
///
/// # Errors
/// When it does, but the model does not declare the output.
fn wants_logits(config: &LlmConfig, request: &InferRequest, output: &str) -> Result<bool, InferError> {
    let flag = format!("return_{output}");
    if !scalar::<bool>(request, &[&flag])?.unwrap_or(false) || !request.wants_output(output) {
        return Ok(false);
    }
    if !config.outputs.iter().any(|name| name == output) {
        let message = format!(
            "`{flag}` is true, but config.pbtxt declares no output `{output}`; declare it, or leave `{flag}` out"
        );
        return Err(InferError::invalid(message));
    }
    Ok(true)
}

fn num_sequences(
    bounds: &ValueBounds<'_>,
    request: &InferRequest,
    beams: Option<&BeamParams>,
) -> Result<usize, InferError> {
    let (default, max, bound) = match beams {
        Some(beams) => (i64::from(beams.width), beams.width as usize, "`beam_width`"),
        None => (1, bounds.max_rows, "`max_batch_size`"),
    };
    let count = scalar::<i64>(request, &["num_return_sequences"])?.unwrap_or(default);
    usize::try_from(count)
        .ok()
        .filter(|count| (1..=max).contains(count))
        .ok_or_else(|| InferError::invalid(format!("`num_return_sequences` is {count}, expected 1 to {max} ({bound})")))
}

/// TensorRT-LLM's settings of a beam search, with its defaults.
fn beams(bounds: &ValueBounds<'_>, request: &InferRequest) -> Result<Option<BeamParams>, InferError> {
    let width = scalar::<i64>(request, &["beam_width"])?.unwrap_or(1);
    // The engine would refuse it with the same message, but only after the width has sized the request's buffers.
    let max = bounds.max_rows;
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

/// The request's parameter `prompt_lookup_num_tokens`, `mtp_num_tokens`, `draft_model_num_tokens` or `eagle3_num_tokens`, else the
/// model's. Each bounds drafts of any source.
fn max_drafts(bounds: &ValueBounds<'_>, request: &InferRequest) -> Result<u32, InferError> {
    let max = bounds.max_drafts;
    let named = |key| request.parameters.get(key).map(|value| (key, value));
    let keys = ["prompt_lookup_num_tokens", "mtp_num_tokens", "draft_model_num_tokens", "eagle3_num_tokens"];
    match keys.into_iter().find_map(named) {
        None => Ok(max),
        Some((_, &Parameter::Int(count))) if (0..=i64::from(max)).contains(&count) => Ok(count as u32),
        Some((key, other)) => Err(InferError::invalid(format!(
            "parameter `{key}` is {other:?}, expected 0 to {max}, as many as the model's parameter allows"
        ))),
    }
}

/// The request's parameter `cache_salt`.
fn cache_salt(request: &InferRequest) -> Result<Option<u64>, InferError> {
    let Some(parameter) = request.parameters.get("cache_salt") else { return Ok(None) };
    let salt = match parameter {
        Parameter::String(salt) => generation::cache_salt(salt),
        _ => None,
    };
    salt.map(Some).ok_or_else(|| {
        InferError::invalid(format!("parameter `cache_salt` must be text of 1 to {MAX_CACHE_SALT_CHARS} characters"))
    })
}

fn prompt(config: &LlmConfig, request: &InferRequest) -> Result<Vec<TokenId>, InferError> {
    let missing = || InferError::invalid("input `input_ids` is missing: it holds the prompt's token ids");
    let tensor = request.input("input_ids").ok_or_else(missing)?;
    let ids = values(tensor)?;
    if tensor.shape.len() == 2 && tensor.shape[0] != 1 {
        let message = format!(
            "`input_ids` has batch size {}; send one prompt per request, they are batched in flight",
            tensor.shape[0]
        );
        return Err(InferError::invalid(message));
    }
    // `input_lengths` excludes padding.
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

/// A token of the prompt. TensorRT-LLM accepts ids outside of the vocabulary, and its benchmarks draw ids at random up to 2³¹.
/// So they are taken modulo the size of the vocabulary, unless the model has `check_input_ids`.
fn prompt_token(config: &LlmConfig, id: i64) -> Result<TokenId, InferError> {
    let beyond = u64::try_from(id).ok().filter(|&id| id >= config.vocab_size as u64 && !config.check_input_ids);
    let Some(beyond) = beyond else { return token(&ValueBounds::of(config), "input_ids", id) };
    if !config.has_wrapped_ids.swap(true, Ordering::Relaxed) {
        tracing::warn!(
            model = %config.name,
            "`input_ids` holds token {id}, but the vocabulary is 0..{size}: such ids are taken modulo {size}; is the \
             client's tokenizer another model's? parameter `check_input_ids` set to `true` refuses them; later requests like this \
             are not logged",
            size = config.vocab_size
        );
    }
    Ok(TokenId((beyond % config.vocab_size as u64) as u32))
}

/// Refuses inputs that would change the output if they were ignored.
pub(crate) fn refuse_unsupported(request: &InferRequest) -> Result<(), InferError> {
    let unsupported = ["draft_input_ids", "prompt_embedding_table"];
    match unsupported.into_iter().find(|name| request.input(name).is_some()) {
        Some(name) => Err(InferError::invalid(format!("input `{name}` is not supported; leave it out"))),
        None => Ok(()),
    }
}

/// Refuses TensorRT-LLM's inputs of adapters, for models that have other protocols.
pub(crate) fn refuse_task_adapters(request: &InferRequest) -> Result<(), InferError> {
    match ["lora_task_id", "lora_weights", "lora_config"].into_iter().find(|name| request.input(name).is_some()) {
        Some(name) => Err(InferError::invalid(format!(
            "input `{name}` is not supported; load the adapter by `lora_modules` and name it by the parameter `lora_name`"
        ))),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests;
