//! Stop and bad words in TensorRT-LLM's layout `[2, n]`: token ids in the first row, the ends of the words in the second.

use engine::TokenId;
use rustc_hash::FxHashSet;
use serving::{InferError, Limit, Limits};
use text::Tokenizer;

/// Padding of the ids.
const NO_ID: i32 = 0;
/// Padding of the ends.
const NO_END: i32 = -1;

/// The token spellings of one request's words.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct WordList {
    words: Vec<Vec<u32>>,
}

impl WordList {
    /// Every spelling of `words`. The tokens of a word can be different at the start of a text, after a line end and after a space,
    /// and a model may produce any of them.
    ///
    /// # Errors
    /// When there are more or longer words than `limits` allow, or a word cannot be encoded.
    pub fn encode(tokenizer: &Tokenizer, limits: &Limits, words: &[&str]) -> Result<Self, InferError> {
        check_words(limits, words)?;
        let encode = |text: &str| {
            tokenizer.encode(text, false).map_err(|error| InferError::invalid(format!("cannot encode a word: {error}")))
        };
        let line_end = encode("\n")?;
        let (mut spellings, mut seen) = (Vec::new(), FxHashSet::default());
        for word in words.iter().filter(|word| !word.is_empty()) {
            let inside = encode(&format!("\n{word}"))?;
            let inside = inside.strip_prefix(line_end.as_slice()).unwrap_or_default().to_vec();
            for spelling in [encode(word)?, inside, encode(&format!(" {word}"))?] {
                if !spelling.is_empty() && seen.insert(spelling.clone()) {
                    spellings.push(spelling);
                }
            }
        }
        Ok(Self { words: spellings })
    }

    /// The spellings as token ids.
    pub fn into_tokens(self) -> Vec<Vec<TokenId>> {
        self.words.into_iter().map(|word| word.into_iter().map(TokenId).collect()).collect()
    }

    /// Number of columns that the words need, at least one.
    pub fn width(&self) -> usize {
        self.words.iter().map(Vec::len).sum::<usize>().max(1)
    }

    /// Appends both rows, with `width` columns.
    pub fn write(&self, width: usize, values: &mut Vec<i32>) {
        let start = values.len();
        values.extend(self.words.iter().flatten().map(|&id| id.cast_signed()));
        values.resize(start + width, NO_ID);
        let ends = self.words.iter().scan(0i32, |end, word| {
            *end += i32::try_from(word.len()).ok()?;
            Some(*end)
        });
        values.extend(ends);
        values.resize(start + 2 * width, NO_END);
    }
}

/// Checks the number and the lengths of words.
///
/// # Errors
/// When there are more or longer words than `limits` allow.
pub(crate) fn check_words(limits: &Limits, words: &[&str]) -> Result<(), InferError> {
    limits.check(Limit::Words, words.len())?;
    words.iter().try_for_each(|word| limits.check(Limit::WordBytes, word.len()))
}
