//! Text ensembles: a tokenizer, a language model and a detokenizer that are served together.
//!
//! The detokenizer runs inside the language model's stream, once for each sequence, instead of one request for each token.

use std::fmt;
use std::sync::Arc;

use generation::TextDecoder;

use crate::{CallCounter, Name, Parameter, Tensor};

/// The role of a model in an ensemble that generates text.
#[derive(Debug, Clone)]
pub enum TextModel {
    /// Turns prompts into tokens, with TensorRT-LLM's tensor names: `QUERY` to `INPUT_ID`.
    Tokenizer {
        /// Whether it adds its special tokens to a prompt.
        adds_special_tokens: bool,
    },
    /// Generates tokens, with TensorRT-LLM's output names: `output_ids`, `sequence_length` and others.
    Generator,
    /// Turns tokens into text, with TensorRT-LLM's tensor names: `TOKENS_BATCH` and `SEQUENCE_LENGTH` to `OUTPUT`.
    Detokenizer(DetokenizerModel),
}

/// A model that turns tokens into text.
#[derive(Debug, Clone)]
pub struct DetokenizerModel {
    /// How it decodes.
    pub decoder: TextDecoder,
    /// Whether texts are in rows of beams, `[1, beams]`; otherwise they are in one list, `[rows]`.
    pub is_nested: bool,
    /// Inputs that are returned unchanged, each with the name of its output.
    pub passthrough: Arc<[(Name, Name)]>,
}

/// How a generator makes the responses of a text ensemble.
pub struct TextOutputs {
    /// Outputs with their names, in the order of a response.
    pub outputs: Vec<(Name, TextOutput)>,
    /// How tokens become text.
    pub decoder: TextDecoder,
    /// The shape of texts, see [`DetokenizerModel::is_nested`].
    pub is_nested: bool,
    /// Counts each response as a request to the detokenizer.
    pub calls: CallCounter,
    /// Parameters of each response.
    pub parameters: Arc<[(Name, Parameter)]>,
}

/// One output of a text ensemble.
#[derive(Debug, Clone)]
pub enum TextOutput {
    /// The text.
    Text,
    /// The generator's output of this name. Responses for which the generator has no such output omit it.
    Generated(Name),
    /// The same tensor in each response.
    Given(Tensor),
}

impl fmt::Debug for TextOutputs {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("TextOutputs").field("outputs", &self.outputs).finish_non_exhaustive()
    }
}
