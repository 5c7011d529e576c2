//! The state of each row that the device keeps between steps: its tokens and sampling settings.

use std::collections::HashMap;

use engine::{SamplingParams, TokenId};

/// A row of the row table.
#[derive(Debug, Clone, Default)]
pub(crate) struct Row {
    tokens: Vec<u32>,
    num_prompt_tokens: usize,
    top_p: f32,                  // decayed value
    counts: HashMap<u32, Count>, // only if a penalty needs them
    pub(crate) sampling: SamplingParams,
}

/// How often a token occurs in a row.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Count {
    pub(crate) generated: u32,
}

impl Row {
    /// A free row with room for `max_len` tokens.
    pub(crate) fn with_capacity(max_len: usize) -> Self {
        Self { tokens: Vec::with_capacity(max_len), ..Self::default() }
    }

    /// Replaces the row's state with that of a new sequence.
    pub(crate) fn join(&mut self, tokens: &[TokenId], num_prompt_tokens: u32, sampling: &SamplingParams) {
        self.sampling = sampling.clone();
        self.num_prompt_tokens = num_prompt_tokens as usize;
        self.restart(tokens.iter().map(|token| token.0));
    }

    /// Keeps the first `num_kept` tokens and appends others.
    pub(crate) fn revise(&mut self, num_kept: usize, tokens: &[TokenId]) {
        if num_kept < self.tokens.len() {
            let kept = self.tokens[..num_kept].to_vec();
            self.restart(kept.into_iter());
        }
        tokens.iter().for_each(|token| self.generate(token.0));
    }

    fn restart(&mut self, tokens: impl Iterator<Item = u32>) {
        self.tokens.clear();
        self.counts.clear();
        self.top_p = self.sampling.top_p;
        for (index, token) in tokens.enumerate() {
            self.push(token, index >= self.num_prompt_tokens);
        }
    }

    /// The top-p value for the next token.
    pub(crate) fn top_p(&self) -> f32 {
        self.top_p
    }

    /// Appends a chosen token.
    pub(crate) fn generate(&mut self, token: u32) {
        self.push(token, true);
    }

    fn push(&mut self, token: u32, generated: bool) {
        self.tokens.push(token);
        if generated {
            self.top_p = match self.sampling.top_p_reset {
                Some(reset) if reset.0 == token => self.sampling.top_p,
                _ => (self.top_p * self.sampling.top_p_decay).max(self.sampling.top_p_min.min(self.sampling.top_p)),
            };
        }
        if has_penalty(&self.sampling) {
            self.counts.entry(token).or_default().generated += u32::from(generated);
        }
    }

    /// The tokens so far, prompt first.
    pub(crate) fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Tokens that occur in the row, if a penalty needs them; in no order.
    pub(crate) fn counts(&self) -> impl Iterator<Item = (u32, Count)> {
        self.counts.iter().map(|(token, count)| (*token, *count))
    }
}

fn has_penalty(sampling: &SamplingParams) -> bool {
    sampling.repetition_penalty != 1.0 || sampling.presence_penalty != 0.0 || sampling.frequency_penalty != 0.0
}
