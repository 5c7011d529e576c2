//! Token ids of requests.

use engine::TokenId;
use serving::InferError;

use super::bounds::ValueBounds;

/// A token id.
///
/// # Errors
/// When it is outside of the vocabulary.
pub(super) fn token(bounds: &ValueBounds<'_>, name: &str, id: i64) -> Result<TokenId, InferError> {
    let known = u32::try_from(id).ok().filter(|&id| (id as usize) < bounds.vocab_size);
    known.map(TokenId).ok_or_else(|| {
        InferError::invalid(format!("`{name}` holds token {id}, but the vocabulary is 0..{}", bounds.vocab_size))
    })
}
