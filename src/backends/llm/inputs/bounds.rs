//! Bounds and defaults of the values of a request.

use std::sync::atomic::AtomicBool;

use engine::TokenId;
use generation::SamplingDefaults;
use serving::Limits;

use crate::llm::config::LlmConfig;

/// The properties of a model that the values of a request depend on.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ValueBounds<'a> {
    /// Name of the model.
    pub(crate) name: &'a str,
    /// Number of token ids.
    pub(crate) vocab_size: usize,
    /// Maximum number of sequences that run at once.
    pub(crate) max_rows: usize,
    /// Maximum number of draft tokens.
    pub(crate) max_drafts: u32,
    /// Default of `end_id`.
    pub(crate) end_ids: &'a [TokenId],
    /// Limits of one request.
    pub(crate) limits: &'a Limits,
    /// Whether the warning about a temperature without effect was logged.
    pub(crate) has_warned_of_greedy: &'a AtomicBool,
}

impl<'a> ValueBounds<'a> {
    /// Those of a model.
    pub(crate) fn of(config: &'a LlmConfig) -> Self {
        Self {
            name: &config.name,
            vocab_size: config.vocab_size,
            max_rows: config.engine.max_rows,
            max_drafts: config.engine.max_drafts as u32,
            end_ids: &config.end_ids,
            limits: &config.limits,
            has_warned_of_greedy: &config.has_warned_of_greedy,
        }
    }
}

/// Values that apply where a request has none.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct RequestDefaults {
    /// `request_output_len`; `None` refuses a request without it.
    pub(crate) max_tokens: Option<u32>,
    /// Sampling settings.
    pub(crate) sampling: SamplingDefaults,
}
