//! Properties of a model that generates text, for the adapters of protocols.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use engine::TokenId;
use text::Tokenizer;

/// A model that generates text, as the adapters of protocols see it.
#[derive(Clone)]
pub struct Generator {
    /// The tokenizer of its checkpoint.
    pub tokenizer: Arc<Tokenizer>,
    /// Directory of the checkpoint: its chat template is there.
    pub checkpoint: PathBuf,
    /// Maximum length of a sequence, prompt and output together, in tokens.
    pub max_sequence_len: usize,
    /// Capacity of the KV cache in positions, for all sequences together.
    pub num_kv_positions: usize,
    /// Maximum number of sequences that run at once.
    pub max_rows: usize,
    /// Positions of one KV block.
    pub block_size: usize,
    /// Number of token ids.
    pub vocab_size: usize,
    /// Longest prompt text in bytes.
    pub max_prompt_bytes: usize,
    /// Tokens that end a sequence.
    pub end_ids: Vec<TokenId>,
    /// Whether the tokenizer adds its special tokens to a text prompt.
    pub adds_special_tokens: bool,
    /// The checkpoint's default sampling settings.
    pub defaults: SamplingDefaults,
    /// Maximum number of draft tokens of a request.
    pub max_drafts: u32,
    /// Load time in seconds since 1970.
    pub created: u64,
}

/// Bounds and defaults of the values of a request to a model that generates tokens.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RequestBounds {
    /// Number of token ids.
    pub vocab_size: usize,
    /// Maximum number of sequences that run at once.
    pub max_rows: usize,
    /// Maximum number of draft tokens of a request.
    pub max_drafts: u32,
    /// Tokens that end a sequence.
    pub end_ids: Vec<TokenId>,
}

impl std::fmt::Debug for Generator {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Generator").field("checkpoint", &self.checkpoint).finish_non_exhaustive()
    }
}

impl Generator {
    /// Maximum number of tokens after a prompt of `prompt_len` tokens: the rest of the context, as far as it fits into the KV cache.
    pub fn max_output_len(&self, prompt_len: usize) -> usize {
        self.max_sequence_len.min(self.num_kv_positions).saturating_sub(prompt_len)
    }
}

/// Sampling settings of `generation_config.json`, which apply where a request has none.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct SamplingDefaults {
    /// `temperature`.
    pub temperature: Option<f32>,
    /// `top_p`.
    pub top_p: Option<f32>,
    /// `top_k`.
    pub top_k: Option<u32>,
    /// `min_p`.
    pub min_p: Option<f32>,
    /// `repetition_penalty`.
    pub repetition_penalty: Option<f32>,
}

impl SamplingDefaults {
    /// The settings in `generation_config.json` of a checkpoint directory; none where the file is missing or cannot be read.
    /// Values outside of their ranges are ignored.
    pub fn from_dir(dir: &Path) -> Self {
        let text = std::fs::read_to_string(dir.join("generation_config.json")).unwrap_or_default();
        serde_json::from_str(&text).map_or_else(|_| Self::default(), |config| Self::from_json(&config))
    }

    /// The settings as text: `temperature 0.6, top_k 20`; empty without any.
    pub fn listed(&self) -> String {
        let number = |name: &str, value: Option<f32>| value.map(|value| format!("{name} {value}"));
        let settings = [
            number("temperature", self.temperature),
            number("top_p", self.top_p),
            self.top_k.map(|top_k| format!("top_k {top_k}")),
            number("min_p", self.min_p),
            number("repetition_penalty", self.repetition_penalty),
        ];
        settings.into_iter().flatten().collect::<Vec<_>>().join(", ")
    }

    fn from_json(config: &serde_json::Value) -> Self {
        let number = |name: &str, range: std::ops::RangeInclusive<f64>| {
            config[name].as_f64().filter(|value| range.contains(value)).map(|value| value as f32)
        };
        Self {
            temperature: number("temperature", 0.0..=100.0),
            top_p: number("top_p", f64::MIN_POSITIVE..=1.0),
            top_k: config["top_k"].as_u64().and_then(|top_k| u32::try_from(top_k).ok()),
            min_p: number("min_p", 0.0..=0.999_999),
            repetition_penalty: number("repetition_penalty", f64::from(f32::MIN_POSITIVE)..=100.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recommended_settings_are_read_and_impossible_ones_ignored() {
        let config = serde_json::json!({"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.05});
        let found = SamplingDefaults::from_json(&config);
        let expected = SamplingDefaults {
            temperature: Some(0.6),
            top_p: Some(0.95),
            top_k: Some(20),
            min_p: None,
            repetition_penalty: Some(1.05),
        };
        assert_eq!(found, expected);
        assert_eq!(found.listed(), "temperature 0.6, top_p 0.95, top_k 20, repetition_penalty 1.05");
        assert_eq!(SamplingDefaults::default().listed(), "");
        let config =
            serde_json::json!({"temperature": -1, "top_p": 0, "top_k": -5, "min_p": 2, "repetition_penalty": "x"});
        assert_eq!(SamplingDefaults::from_json(&config), SamplingDefaults::default());
        assert_eq!(SamplingDefaults::from_dir(Path::new("/nowhere")), SamplingDefaults::default());
    }
}
