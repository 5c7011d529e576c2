//! Lists of words as token ids.

use engine::TokenId;
use serving::{InferError, InferRequest, Limit};

use super::super::config::LlmConfig;
use super::values::{integers, token};

/// Ways in which a tokenizer spells one word, each of them a word here.
const SPELLINGS: u64 = 3;

/// Words as TensorRT-LLM lays them out, `[2, n]`: all ids in one row; in the other where each word ends, padded with -1.
pub(super) fn words(config: &LlmConfig, request: &InferRequest, name: &str) -> Result<Vec<Vec<TokenId>>, InferError> {
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
