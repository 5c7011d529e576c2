//! Parses a request's tensors, which have TensorRT-LLM's names.

mod guide;
mod sampling;
mod token;
mod words;

use std::sync::atomic::Ordering;

use engine::{BeamParams, Refused, Request, SamplingParams, TokenId};
use generation::GenerateRequest;
use serving::{InferError, InferRequest, Parameter};

use super::config::LlmConfig;
use super::refusal::error_of;
use crate::tensor_values::{float, scalar, values};
use guide::guide;
use sampling::sampling;
use token::token;
use words::words;

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
    let (prompt, max_tokens) = (prompt(config, request)?, max_tokens(request)?);
    let streaming = flag(&["streaming"])?;
    let beams = beams(config, request)?;
    check_streaming(config, streaming, beams.as_ref())?;
    let return_log_probs = flag(&["return_log_probs"])?;
    let num_sequences = num_sequences(config, request, beams.as_ref())?;
    let sequence = Request {
        prompt,
        max_tokens,
        sampling: SamplingParams {
            context_logits: wants_logits(config, request, "context_logits")?,
            generation_logits: wants_logits(config, request, "generation_logits")?,
            ..sampling(config, request, return_log_probs)?
        },
        stop_words: words(config, request, "stop_words_list")?,
        beams,
        max_drafts: max_drafts(config, request)?,
        ..Request::default()
    };
    let generate = GenerateRequest {
        sequence,
        num_sequences,
        guide: guide(request)?,
        priority: request.priority,
        timeout_us: request.timeout_us,
        ..GenerateRequest::default()
    };
    Ok(Command::Generate(Box::new(TensorRequest {
        generate,
        streaming,
        exclude_input: scalar(request, &["exclude_input_in_output"])?.unwrap_or(config.exclude_input),
        return_log_probs,
        return_perf_metrics: flag(&["return_perf_metrics", "return_kv_cache_reuse_stats"])?,
        return_num_input_tokens: flag(&["return_num_input_tokens"])?,
        return_num_output_tokens: flag(&["return_num_output_tokens"])?,
    })))
}

fn max_tokens(request: &InferRequest) -> Result<u32, InferError> {
    let max_tokens = scalar::<i64>(request, &["request_output_len"])?.ok_or_else(|| {
        InferError::invalid("input `request_output_len` is missing: it says how many tokens to generate")
    })?;
    u32::try_from(max_tokens).ok().filter(|&tokens| tokens > 0).ok_or_else(|| {
        InferError::invalid(format!("`request_output_len` is {max_tokens}, expected a number of tokens from 1"))
    })
}

/// Checks that the responses to a request can be streamed.
fn check_streaming(config: &LlmConfig, streaming: bool, beams: Option<&BeamParams>) -> Result<(), InferError> {
    let (reason, advice) = match (streaming, config.decoupled, beams) {
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
    // The engine would refuse it with the same message, but only after the width has sized the request's buffers.
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

/// Refuses inputs that would change the output if they were ignored.
fn refuse_unsupported(request: &InferRequest) -> Result<(), InferError> {
    let unsupported = ["draft_input_ids", "prompt_embedding_table", "lora_weights", "lora_task_id"];
    match unsupported.into_iter().find(|name| request.input(name).is_some()) {
        Some(name) => Err(InferError::invalid(format!("input `{name}` is not supported; leave it out"))),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests;
