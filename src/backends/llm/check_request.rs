//! Checks a request against the model's limits, before its numbers size memory.

use engine::Request;
use generation::GenerateRequest;
use serving::InferError;

use super::config::LlmConfig;
use super::refusal::error_of;

/// Maximum size in bytes of the logits of a request: that of one gRPC message.
const MAX_LOGITS_BYTES: usize = i32::MAX as usize;

/// Checks a request against the limits of the model.
///
/// Returns how many bytes of logits rank 0 may have to buffer for it.
///
/// # Errors
/// When a value is outside of the model's limits. The message names it.
pub(crate) fn check(config: &LlmConfig, request: &GenerateRequest) -> Result<u64, InferError> {
    let is_valid = request.check(config.engine.max_rows, config.vocab_size);
    is_valid.map_err(|invalid| InferError::invalid(invalid.to_string()))?;
    config.engine.check(&request.sequence).map_err(|refused| error_of(&refused))?;
    logits_bytes(config, request)
}

/// Bytes of the logits of a request. A beam search cannot return logits, because its tokens are chosen from several rows.
fn logits_bytes(config: &LlmConfig, request: &GenerateRequest) -> Result<u64, InferError> {
    let GenerateRequest { sequence, num_sequences, .. } = request;
    let Request { prompt, max_tokens, sampling, beams, .. } = sequence;
    if beams.is_some() && sampling.generation_logits {
        let message = "`return_generation_logits` is true, but a beam search reports log-probabilities only; set `beam_width` to 1 or leave it out";
        return Err(InferError::invalid(message));
    }
    let context = if sampling.context_logits { prompt.len() } else { 0 };
    let most_tokens = (*max_tokens as usize).min(config.engine.max_sequence_len);
    let generation = if sampling.generation_logits { most_tokens } else { 0 };
    let bytes = (context + generation * num_sequences) * config.vocab_size * size_of::<f32>();
    if bytes > MAX_LOGITS_BYTES {
        let message = format!(
            "logits of {context} prompt tokens and {num_sequences} × {generation} output tokens take {bytes} bytes, at most {MAX_LOGITS_BYTES} are kept; lower `request_output_len` or shorten the prompt"
        );
        return Err(InferError::invalid(message));
    }
    Ok(bytes as u64)
}
