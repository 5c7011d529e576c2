//! Stop and bad words as TensorRT-LLM lays them out: `[2, n]`, token ids in one row, where each word ends in the other.

use serving::InferError;
use text::Tokenizer;

/// Ids are padded with this.
const NO_ID: i32 = 0;
/// Word ends are padded with this.
const NO_END: i32 = -1;

/// The token spellings of one request's words.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct WordList {
    words: Vec<Vec<u32>>,
}

impl WordList {
    /// Every spelling of `words`. A tokenizer spells a word in one way at the start of a text, in another behind a line
    /// end, in a third behind a blank, and a model may produce any of them.
    pub fn encode<'a>(tokenizer: &Tokenizer, words: impl IntoIterator<Item = &'a str>) -> Result<Self, InferError> {
        let encode = |text: &str| {
            tokenizer.encode(text, false).map_err(|error| InferError::invalid(format!("cannot encode a word: {error}")))
        };
        let line_end = encode("\n")?;
        let mut spellings: Vec<Vec<u32>> = Vec::new();
        for word in words.into_iter().filter(|word| !word.is_empty()) {
            let inside = encode(&format!("\n{word}"))?;
            let inside = inside.strip_prefix(line_end.as_slice()).unwrap_or_default().to_vec();
            for spelling in [encode(word)?, inside, encode(&format!(" {word}"))?] {
                if !spelling.is_empty() && !spellings.contains(&spelling) {
                    spellings.push(spelling);
                }
            }
        }
        Ok(Self { words: spellings })
    }

    /// Columns of the tensor: at least one.
    pub fn width(&self) -> usize {
        self.words.iter().map(Vec::len).sum::<usize>().max(1)
    }

    /// Appends both rows, each `width` wide.
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
