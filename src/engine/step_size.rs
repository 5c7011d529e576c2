//! The size of a step: how many prompt tokens it computes beside decodes, from their predicted time.

use std::cmp::Reverse;
use std::time::Duration;

use crate::EngineConfig;
use crate::config::{DEFAULT_DECODE_FACTOR, DEFAULT_INTER_TOKEN};
use crate::costs::StepLoad;
use crate::engine::Engine;
use crate::plan_builder::PlanBuilder;
use crate::sequence::Sequence;

/// The predicted time stays below the bound by this number of mean errors, so that about 99 of 100 steps keep the bound.
const MARGIN_ERRORS: f64 = 3.0;

/// Largest relative error for which the predicted time stays below the bound.
const MAX_ERROR: f64 = 0.25;

impl Engine {
    /// Sets how many prompt tokens the plan may add to its decodes, in tokens and in time. Without decodes, the step may
    /// have as many tokens as the workers' buffers hold.
    pub(crate) fn size_step(&self, builder: &mut PlanBuilder) {
        let num_decode_tokens = builder.num_decode_tokens();
        builder.load.decode_tokens = num_decode_tokens;
        builder.prefill_budget = self.config.max_step_tokens - num_decode_tokens;
        if num_decode_tokens == 0 {
            return;
        }
        let max_prompt_tokens = self.costs.max_prompt_tokens().max(self.config.min_prompt_tokens);
        builder.prefill_budget = builder.prefill_budget.min(max_prompt_tokens);
        let max_seconds = self.max_seconds(&builder.load);
        builder.max_seconds = Some(max_seconds);
        let fitting = self.fitting_tokens(&builder.load, 0, builder.prefill_budget, max_seconds);
        builder.prefill_budget = builder.prefill_budget.min(fitting.max(self.config.min_prompt_tokens));
        if num_decode_tokens >= self.config.token_tile && self.config.token_tile > 1 {
            builder.prefill_budget = self.whole_tiles(num_decode_tokens, builder.prefill_budget);
        }
    }

    /// Number of tokens of the next chunk, of `remaining` from position `start` on; at least 1.
    pub(crate) fn chunk_len(&self, start: usize, remaining: usize, builder: &PlanBuilder) -> usize {
        let most = remaining.min(builder.prefill_budget);
        let Some(max_seconds) = builder.max_seconds else { return most };
        let fitting = self.fitting_tokens(&builder.load, start, most, max_seconds);
        let owed = self.config.min_prompt_tokens.saturating_sub(builder.load.prompt_tokens);
        let len = fitting.max(owed).clamp(1, most);
        let part = (builder.load.decode_tokens + builder.load.prompt_tokens + len) % self.config.token_tile;
        if len < remaining && part < len { len - part } else { len }
    }

    /// Whether the step has time for another chunk.
    pub(crate) fn has_time(&self, builder: &PlanBuilder) -> bool {
        builder.load.prompt_tokens < self.config.min_prompt_tokens
            || builder.max_seconds.is_none_or(|max| self.fitting_tokens(&builder.load, 0, 1, max) > 0)
    }

    /// The time that a step with these decodes may take, by the cost model.
    fn max_seconds(&self, decodes: &StepLoad) -> f64 {
        let stages = self.config.num_stages as f64; // A stream has a token in each step of its micro-batch.
        let bound = match self.max_inter_token() {
            Some(bound) => bound.as_secs_f64(),
            None => {
                let decodes = stages * self.costs.predict(decodes);
                DEFAULT_INTER_TOKEN.as_secs_f64().max(f64::from(DEFAULT_DECODE_FACTOR) * decodes)
            }
        };
        bound / stages / (1.0 + MARGIN_ERRORS * self.costs.error().min(MAX_ERROR))
    }

    /// The shortest configured bound of the streams that decode.
    fn max_inter_token(&self) -> Option<Duration> {
        let EngineConfig { max_inter_token, max_inter_token_of, .. } = &self.config;
        if max_inter_token_of.is_empty() {
            return *max_inter_token;
        }
        let mut shortest: Option<Duration> = None;
        let mut index = 0;
        while let Some(&((Reverse(priority), ..), slot)) = self.running.get(index) {
            if self.sequences[slot].is_prefilling() {
                index += 1;
                continue;
            }
            let bound = max_inter_token_of.get(&priority).copied().or(*max_inter_token);
            shortest = bound.into_iter().chain(shortest).min();
            // One decode of each priority is enough, and the sequences are in the order of priorities.
            index = self.running.partition_point(|&((Reverse(other), ..), _)| other >= priority);
        }
        shortest
    }

    /// The largest number of prompt tokens from position `start` on, up to `most`, with which the step is predicted to
    /// take at most `seconds`.
    fn fitting_tokens(&self, load: &StepLoad, start: usize, most: usize, seconds: f64) -> usize {
        let fits = |len| self.costs.predict(&self.config.with_chunk(load, start, len)) <= seconds;
        if fits(most) {
            return most;
        }
        let (mut fitting, mut too_many) = (0, most);
        while too_many - fitting > 1 {
            let middle = fitting.midpoint(too_many);
            *(if fits(middle) { &mut fitting } else { &mut too_many }) = middle;
        }
        fitting
    }

    /// The largest prefill budget, at most `budget`, with which a step of `num_decode_tokens` has no partial tile, if
    /// there are enough prompt tokens to fill it.
    fn whole_tiles(&self, num_decode_tokens: usize, budget: usize) -> usize {
        let remaining = |sequence: &Sequence| sequence.tokens.len().saturating_sub(sequence.num_computed);
        let running = self.running.iter().map(|&(_, slot)| &self.sequences[slot]).filter(|s| s.is_prefilling());
        let queued = self.queue.slots().take(self.free_rows.len()).map(|slot| &self.sequences[slot]);
        let mut waiting = 0;
        for sequence in running.chain(queued) {
            waiting += remaining(sequence);
            if waiting >= budget {
                break;
            }
        }
        let prefill = waiting.min(budget);
        let part = (num_decode_tokens + prefill) % self.config.token_tile;
        if part < prefill { prefill - part } else { budget }
    }
}

impl EngineConfig {
    /// Number of positions that a token at `position` reads, itself included, as a mean over the KV groups.
    #[inline]
    pub(crate) fn positions_read(&self, position: usize) -> usize {
        let read = position + 1;
        match self.windows.as_slice() {
            [None] => read,
            windows => {
                windows.iter().map(|window| window.map_or(read, |size| size.min(read))).sum::<usize>() / windows.len()
            }
        }
    }

    /// `load` and the `len` tokens of a prompt from position `start` on.
    pub(crate) fn with_chunk(&self, load: &StepLoad, start: usize, len: usize) -> StepLoad {
        StepLoad {
            prompt_tokens: load.prompt_tokens + len,
            prompt_positions: load.prompt_positions + len * self.positions_read(start + len / 2),
            ..*load
        }
    }
}
