//! The published layouts, with the effects of their parameters, inputs and outputs.

use repository::proto::ModelOutput;

use super::keys::{self, Key, Use};
use super::{bls, text_names};

/// A published layout of one model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layout {
    /// TensorRT-LLM's and LMDeploy's `preprocessing`: text to token ids.
    Preprocessing,
    /// TensorRT-LLM's and LMDeploy's `postprocessing`: token ids to text.
    Postprocessing,
    /// TensorRT-LLM's `tensorrt_llm`: token ids to token ids, batched in flight.
    Engine,
    /// The same in the Python `gpt` repository: one batch after another.
    FixedBatch,
    /// TensorRT-LLM's `tensorrt_llm_bls`: text to text through the other models.
    Bls,
    /// Text to text from a checkpoint: LMDeploy's and SGLang's Python models, and Hugging Face ones.
    Text,
    /// TurboMind's `interactive`: token ids to token ids in sessions.
    Sessions,
}

impl Layout {
    /// Its parameters.
    pub fn parameters(self) -> &'static [Key] {
        match self {
            Layout::Preprocessing | Layout::Postprocessing => keys::TEXT_PARAMETERS,
            Layout::Bls => keys::BLS_PARAMETERS,
            _ => keys::LLM_PARAMETERS,
        }
    }

    /// The effect of an input; `None` for an unknown one.
    pub fn input(self, name: &str) -> Option<Use> {
        match self {
            Layout::Preprocessing | Layout::Postprocessing => keys::find(keys::TEXT_INPUTS, name),
            Layout::Bls => bls::input(name),
            Layout::Text => text_names::input(name),
            _ => keys::find(keys::LLM_INPUTS, name),
        }
    }

    /// The effect of an output; `None` for an unknown one, which is never returned.
    pub fn output(self, output: &ModelOutput) -> Option<Use> {
        let name = output.name.as_str();
        match self {
            Layout::Preprocessing | Layout::Postprocessing => keys::find(keys::TEXT_OUTPUTS, name),
            Layout::Bls if name == "text_output" => Some(Use::Used("the text")),
            Layout::Text => text_names::output(output),
            _ => keys::find(keys::LLM_OUTPUTS, name),
        }
    }

    /// Whether it needs a checkpoint of its own.
    pub fn has_checkpoint(self) -> bool {
        matches!(self, Layout::Engine | Layout::FixedBatch | Layout::Text | Layout::Sessions)
    }
}
