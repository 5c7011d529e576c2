//! How the values of fields are read that need more than a range.

use generation::MAX_CACHE_SALT_CHARS;
use serde_json::Value;
use serving::{Limit, Limits};

use super::error::ApiError;
use super::fields::Fields;

/// Largest number of likeliest tokens that a request may ask for.
const MAX_TOP_LOGPROBS: i64 = 20;
/// Largest token count of a request.
pub(super) const MAX_TOKENS: i64 = i32::MAX as i64;
/// Maximum number of entries of `allowed_token_ids`.
const MAX_ALLOWED_TOKENS: usize = 1 << 18;

/// A beam search: `n` beams.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Beams {
    pub(super) length_penalty: f32,
    pub(super) early_stopping: bool,
}

/// Number of likeliest tokens of each output token, from 0 to 20.
pub(super) fn num_logprobs(fields: &mut Fields, name: &'static str) -> Result<Option<u32>, ApiError> {
    Ok(fields.whole(name, 0, MAX_TOP_LOGPROBS)?.map(|count| count as u32))
}

/// A token count.
pub(super) fn token_count(fields: &mut Fields, name: &'static str) -> Result<Option<u32>, ApiError> {
    Ok(fields.whole(name, 0, MAX_TOKENS)?.map(|count| count as u32))
}

/// `stream_options`: whether the usage is sent at the end, and whether with each chunk.
pub(super) fn stream_options(fields: &mut Fields, stream: bool) -> Result<(bool, bool), ApiError> {
    let wrong = |words: String| ApiError::of_field("stream_options", words);
    let Some(options) = fields.object("stream_options")? else { return Ok((false, false)) };
    if !stream {
        return Err(wrong("`stream_options` is allowed only with `stream: true`.".to_owned()));
    }
    let mut found = (false, false);
    for (name, value) in options {
        let value = value.as_bool().ok_or_else(|| wrong(format!("`stream_options.{name}` must be true or false.")))?;
        match name.as_str() {
            "include_usage" => found.0 = value,
            "continuous_usage_stats" => found.1 = value,
            // Pads chunks against traffic analysis; the text is the same.
            "include_obfuscation" => {}
            _ => return Err(wrong(format!("`stream_options.{name}` is not known."))),
        }
    }
    Ok(found)
}

/// `logit_bias`: from token ids to values from -100 to 100.
pub(super) fn logit_bias(fields: &mut Fields, limits: &Limits) -> Result<Vec<(u32, f32)>, ApiError> {
    let wrong = |words: String| ApiError::of_field("logit_bias", words);
    let Some(entries) = fields.object("logit_bias")? else { return Ok(Vec::new()) };
    limits.check(Limit::Words, entries.len()).map_err(|error| wrong(error.message))?;
    let entry = |(id, bias): (String, Value)| {
        let token = id.parse().map_err(|_| wrong(format!("`logit_bias` has the key `{id}`, expected a token id.")))?;
        let value = bias.as_f64().filter(|bias| (-100.0..=100.0).contains(bias));
        let value =
            value.ok_or_else(|| wrong(format!("`logit_bias.{id}` is {bias}, expected a number from -100 to 100.")))?;
        Ok((token, value as f32))
    };
    let mut entries: Vec<(u32, f32)> = entries.into_iter().map(entry).collect::<Result<_, ApiError>>()?;
    entries.sort_by_key(|&(token, _)| token);
    Ok(entries)
}

/// `allowed_token_ids`: the only tokens that are generated.
pub(super) fn allowed_token_ids(fields: &mut Fields) -> Result<Vec<u32>, ApiError> {
    match fields.token_ids("allowed_token_ids", MAX_ALLOWED_TOKENS)? {
        Some(ids) if ids.is_empty() => {
            let words = "`allowed_token_ids` is empty; leave it out, or list at least one token.";
            Err(ApiError::of_field("allowed_token_ids", words))
        }
        ids => Ok(ids.unwrap_or_default()),
    }
}

/// `cache_salt`: text of 1 to 1024 characters.
pub(super) fn cache_salt(fields: &mut Fields) -> Result<Option<u64>, ApiError> {
    let Some(salt) = fields.text("cache_salt")? else { return Ok(None) };
    let wrong = || format!("`cache_salt` must have 1 to {MAX_CACHE_SALT_CHARS} characters.");
    generation::cache_salt(&salt).map(Some).ok_or_else(|| ApiError::of_field("cache_salt", wrong()))
}

pub(super) fn prompt_logprobs(fields: &mut Fields, stream: bool) -> Result<Option<u32>, ApiError> {
    match num_logprobs(fields, "prompt_logprobs")? {
        Some(_) if stream => {
            Err(ApiError::of_field("prompt_logprobs", "`prompt_logprobs` is not available with `stream: true`."))
        }
        found => Ok(found),
    }
}

/// `truncate_prompt_tokens`: how many of the prompt's last tokens to keep; -1 keeps as many as the model takes.
pub(super) fn truncation(fields: &mut Fields) -> Result<Option<usize>, ApiError> {
    let kept = fields.whole("truncate_prompt_tokens", -1, MAX_TOKENS)?;
    match kept {
        Some(0) => Err(ApiError::of_field(
            "truncate_prompt_tokens",
            "`truncate_prompt_tokens` is 0, expected -1 or at least 1.",
        )),
        kept => Ok(kept.map(|kept| usize::try_from(kept).unwrap_or(usize::MAX))),
    }
}

pub(super) fn beams(fields: &mut Fields, n: usize, stream: bool) -> Result<Option<Beams>, ApiError> {
    let is_on = fields.flag("use_beam_search")?.unwrap_or(false);
    let length_penalty = fields.number("length_penalty", -100.0, 100.0)?;
    let early_stopping = fields.flag("early_stopping")?;
    if !is_on {
        let given = [
            ("length_penalty", length_penalty.is_some_and(|it| it != 1.0)),
            ("early_stopping", early_stopping == Some(true)),
        ];
        return match given.into_iter().find(|(_, is_given)| *is_given) {
            Some((name, _)) => Err(ApiError::of_field(name, format!("`{name}` needs `use_beam_search: true`."))),
            None => Ok(None),
        };
    }
    let wrong = |words: &str| Err(ApiError::of_field("use_beam_search", words));
    if stream {
        return wrong("`use_beam_search` does not stream: beams are known only when their search has ended.");
    }
    if n < 2 {
        return wrong("`use_beam_search` needs `n` of at least 2, the number of beams.");
    }
    let length_penalty = length_penalty.unwrap_or(1.0) as f32;
    Ok(Some(Beams { length_penalty, early_stopping: early_stopping.unwrap_or(false) }))
}
