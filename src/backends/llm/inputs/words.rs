//! Lists of words as token ids.

use engine::TokenId;
use serving::{InferError, InferRequest, Limit};

use super::bounds::ValueBounds;
use super::token::token;
use crate::tensor_values;

/// Number of token spellings of one word. Each spelling is a word of the list.
const SPELLINGS: u64 = 3;

/// A list of words in TensorRT-LLM's layout `[2, n]`: the ids of all words, and the end of each word, padded with -1.
pub(crate) fn words(
    bounds: &ValueBounds<'_>,
    request: &InferRequest,
    name: &str,
) -> Result<Vec<Vec<TokenId>>, InferError> {
    let Some(tensor) = request.input(name) else {
        return Ok(Vec::new());
    };
    let values: Vec<i64> = tensor_values::values(tensor)?;
    let broken = |what: &str| {
        InferError::invalid(format!(
            "`{name}` {what}; expected shape [2, n]: token ids, then where each word ends, padded with -1"
        ))
    };
    if tensor.shape.len() < 2 || tensor.shape[tensor.shape.len() - 2] != 2 || !values.len().is_multiple_of(2) {
        return Err(broken(&format!("has shape {:?}", tensor.shape)));
    }
    let (ids, ends) = values.split_at(values.len() / 2);
    let (count, max) = (ends.iter().take_while(|&&end| end > 0).count(), SPELLINGS * bounds.limits.get(Limit::Words));
    if count as u64 > max {
        return Err(Limit::Words.refuse(count as u64, max));
    }
    let (mut words, mut start) = (Vec::new(), 0);
    for &end in ends.iter().take_while(|&&end| end > 0) {
        let end = usize::try_from(end).ok().filter(|&end| end > start && end <= ids.len());
        let end = end.ok_or_else(|| broken("names an end beyond its ids"))?;
        // A token has at least one byte. After a space, a word may have two more tokens.
        bounds.limits.check(Limit::WordBytes, (end - start).saturating_sub(2))?;
        words.push(ids[start..end].iter().map(|&id| token(bounds, name, id)).collect::<Result<Vec<_>, _>>()?);
        start = end;
    }
    Ok(words)
}
