//! What the device keeps of each row between steps: its tokens and how the next is chosen.

use std::collections::HashMap;

use engine::{SamplingParams, TokenId};

/// A row of the row table.
#[derive(Debug, Default)]
pub(crate) struct Row {
    tokens: Vec<u32>,
    counts: HashMap<u32, Count>, // kept only where a penalty asks for it
    pub(crate) sampling: SamplingParams,
}

/// How often a token was seen in a row.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Count {
    pub(crate) generated: u32,
}

impl Row {
    /// A free row with room for `max_len` tokens.
    pub(crate) fn with_capacity(max_len: usize) -> Self {
        Self { tokens: Vec::with_capacity(max_len), ..Self::default() }
    }

    /// Starts over with a sequence.
    pub(crate) fn join(&mut self, tokens: &[TokenId], num_prompt_tokens: u32, sampling: &SamplingParams) {
        self.sampling = sampling.clone();
        self.tokens.clear();
        self.counts.clear();
        for (index, token) in tokens.iter().enumerate() {
            self.push(token.0, index >= num_prompt_tokens as usize);
        }
    }

    /// Appends a chosen token.
    pub(crate) fn generate(&mut self, token: u32) {
        self.push(token, true);
    }

    fn push(&mut self, token: u32, generated: bool) {
        self.tokens.push(token);
        if has_penalty(&self.sampling) {
            self.counts.entry(token).or_default().generated += u32::from(generated);
        }
    }

    /// The tokens so far, prompt first.
    pub(crate) fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Tokens seen so far, where a penalty asks for them; in no order.
    pub(crate) fn counts(&self) -> impl Iterator<Item = (u32, Count)> {
        self.counts.iter().map(|(token, count)| (*token, *count))
    }
}

fn has_penalty(sampling: &SamplingParams) -> bool {
    sampling.repetition_penalty != 1.0 || sampling.presence_penalty != 0.0 || sampling.frequency_penalty != 0.0
}
