//! Parses the sampling parameters.

use std::sync::atomic::Ordering;

use engine::{SamplingParams, TokenId};
use generation::SamplingDefaults;
use serving::{InferError, InferRequest};

use super::bounds::ValueBounds;
use super::token::token;
use super::words::words;
use crate::tensor_values::{at_least_zero, float, scalar, wrong_type};

/// Temperatures below this are greedy: logits cannot be scaled by their inverse.
const LEAST_TEMPERATURE: f32 = 1e-6;

/// The sampling parameters. Those that neither the request nor `given` has are off.
pub(super) fn sampling(
    bounds: &ValueBounds<'_>,
    request: &InferRequest,
    given: &SamplingDefaults,
) -> Result<SamplingParams, InferError> {
    let defaults = SamplingParams::default();
    let top_k = at_least_zero("runtime_top_k", scalar::<i64>(request, &["runtime_top_k", "top_k"])?)?;
    let top_p = float(request, &["runtime_top_p", "top_p"], 0.0..=1.0)?;
    let temperature = float(request, &["temperature"], 0.0..=f32::MAX)?.or(given.temperature);
    let (top_k, top_p) = (top_k.or(given.top_k).unwrap_or(0), top_p.or(given.top_p).unwrap_or(0.0));
    let log_probs = scalar::<bool>(request, &["return_log_probs"])?.unwrap_or(false);
    if temperature.is_some_and(|it| it != 1.0 && it >= LEAST_TEMPERATURE) && top_k == 0 && top_p == 0.0 {
        warn_of_greedy(bounds);
    }
    Ok(SamplingParams {
        temperature: effective_temperature(temperature, top_k, top_p),
        top_k,
        top_p: if top_p > 0.0 { top_p } else { defaults.top_p },
        top_p_decay: float(request, &["runtime_top_p_decay"], f32::MIN_POSITIVE..=1.0)?.unwrap_or(defaults.top_p_decay),
        top_p_min: float(request, &["runtime_top_p_min"], f32::MIN_POSITIVE..=1.0)?.unwrap_or(defaults.top_p_min),
        top_p_reset: top_p_reset(bounds, request)?,
        min_p: float(request, &["runtime_min_p", "min_p"], 0.0..=0.999_999)?.unwrap_or(defaults.min_p),
        repetition_penalty: float(request, &["repetition_penalty"], f32::MIN_POSITIVE..=f32::MAX)?
            .unwrap_or(defaults.repetition_penalty),
        presence_penalty: float(request, &["presence_penalty"], f32::MIN..=f32::MAX)?.unwrap_or(0.0),
        frequency_penalty: float(request, &["frequency_penalty"], f32::MIN..=f32::MAX)?.unwrap_or(0.0),
        seed: scalar::<u64>(request, &["seed", "random_seed"])?.unwrap_or(0),
        min_tokens: at_least_zero("min_tokens", scalar::<i64>(request, &["min_tokens", "min_length"])?)?.unwrap_or(0),
        end_ids: end_ids(bounds, request)?,
        logit_bias: logit_bias(bounds, request)?,
        bad_words: words(bounds, request, "bad_words_list")?,
        num_logprobs: log_probs.then_some(0),
        ..defaults
    })
}

/// The temperature by TensorRT-LLM's rule (`regularizeTopKTopP` in its `samplingTopKKernels.h`), 0 for greedy. Parameters that are
/// not sent are 0. A top-k of 0 with a top-p of 0 is greedy at any temperature. A top-p of 1 samples from all tokens.
pub(super) fn effective_temperature(temperature: Option<f32>, top_k: u32, top_p: f32) -> f32 {
    let is_greedy = top_k == 1 || (top_k == 0 && top_p == 0.0);
    let temperature = temperature.unwrap_or(1.0);
    if is_greedy || temperature < LEAST_TEMPERATURE { 0.0 } else { temperature }
}

/// Logs a warning, once per model, that a temperature had no effect.
fn warn_of_greedy(bounds: &ValueBounds<'_>) {
    if !bounds.has_warned_of_greedy.swap(true, Ordering::Relaxed) {
        tracing::warn!(
            model = %bounds.name,
            "a request has a `temperature`, but neither `runtime_top_k` nor `runtime_top_p`, and so is greedy as with \
             TensorRT-LLM; send a top-p of 1 to draw from all tokens; later requests like this are not logged"
        );
    }
}

/// The token that resets top-p; a negative id means none.
fn top_p_reset(bounds: &ValueBounds<'_>, request: &InferRequest) -> Result<Option<TokenId>, InferError> {
    let id = scalar::<i64>(request, &["runtime_top_p_reset_ids"])?.filter(|&id| id >= 0);
    id.map(|id| token(bounds, "runtime_top_p_reset_ids", id)).transpose()
}

/// `end_id` of the request, or else the checkpoint's. An id outside of the vocabulary means none: benchmarks of other servers send
/// 1048576 for outputs of a fixed length.
fn end_ids(bounds: &ValueBounds<'_>, request: &InferRequest) -> Result<Vec<TokenId>, InferError> {
    let requested = scalar::<i64>(request, &["end_id"])?;
    let of = |id: i64| token(bounds, "end_id", id).into_iter().collect();
    Ok(requested.map_or_else(|| bounds.end_ids.to_vec(), of))
}

fn logit_bias(bounds: &ValueBounds<'_>, request: &InferRequest) -> Result<Vec<(TokenId, f32)>, InferError> {
    let Some(tensor) = request.input("embedding_bias") else {
        return Ok(Vec::new());
    };
    let bias = tensor.to_f32().ok_or_else(|| wrong_type(tensor, "FP32"))?;
    if bias.len() > bounds.vocab_size {
        let message =
            format!("`embedding_bias` has {} values, but the vocabulary has {}", bias.len(), bounds.vocab_size);
        return Err(InferError::invalid(message));
    }
    Ok((0..).map(TokenId).zip(bias).filter(|&(_, bias)| bias != 0.0).collect())
}
