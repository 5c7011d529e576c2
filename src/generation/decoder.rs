use std::fmt;
use std::sync::Arc;

use text::{Detokenizer, Tokenizer};

/// How the tokens of a sequence are decoded.
#[derive(Clone)]
pub struct TextDecoder {
    /// The tokenizer of the checkpoint.
    pub tokenizer: Arc<Tokenizer>,
    /// Whether special tokens, such as `</s>`, are excluded from the text.
    pub skip_special_tokens: bool,
}

impl TextDecoder {
    /// A detokenizer for one sequence.
    pub fn start(&self) -> Detokenizer {
        Detokenizer::new(self.tokenizer.clone(), self.skip_special_tokens)
    }
}

impl fmt::Debug for TextDecoder {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("TextDecoder")
            .field("skip_special_tokens", &self.skip_special_tokens)
            .finish_non_exhaustive()
    }
}
