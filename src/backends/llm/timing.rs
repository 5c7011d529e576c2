//! Measures the durations of one request, for its stream and for metrics.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use engine::{BlockUsage, FinishReason};
use serving::{Generation, Tally, Timestamp};
use smallvec::{SmallVec, smallvec};

use super::metrics::PRIORITY_LEVELS;
use super::replica_state::ReplicaState;

/// Maximum number of inter-token times that are counted together, because all requests share the counters.
const MAX_GAPS: u32 = 16;

/// The durations of one request.
pub(crate) struct Timing {
    shared: Arc<ReplicaState>,
    arrived: Instant,
    /// Whether a replica has ever taken it.
    is_assigned: bool,
    /// Index of the request's priority level in [`PRIORITY_LEVELS`].
    level: usize,
    /// Time when its first sequence was scheduled.
    joined: Option<Timestamp>,
    first_token: Option<Timestamp>,
    /// Time of the last token of any sequence.
    last_token: Option<Timestamp>,
    block_size: u64,
    /// All durations and counts except the decode time, which follows from the first and the last token.
    generation: Generation,
    sequences: SmallVec<[SequenceTiming; 1]>,
    /// Inter-token times that are not counted yet.
    gaps: Tally,
}

#[derive(Debug, Clone, Copy, Default)]
struct SequenceTiming {
    /// The number of the workers' start in which it was last scheduled.
    joined_in: Option<u64>,
    last_token: Option<Timestamp>,
    is_counted: bool,
}

impl Timing {
    /// A request that arrives now. It is counted in the metrics of `shared` until it is assigned to a replica.
    pub(crate) fn new(
        shared: &Arc<ReplicaState>,
        block_size: usize,
        prompt_tokens: usize,
        num_sequences: usize,
    ) -> Self {
        Self {
            shared: Arc::clone(shared),
            arrived: Instant::now(),
            is_assigned: false,
            level: 0,
            joined: None,
            first_token: None,
            last_token: None,
            block_size: block_size as u64,
            generation: Generation { prompt_tokens: prompt_tokens as u64, ..Generation::default() },
            sequences: smallvec![SequenceTiming::default(); num_sequences],
            gaps: Tally::default(),
        }
    }

    /// The same request with a priority level, 0 for a model without levels.
    pub(crate) fn with_level(mut self, level: u64) -> Self {
        self.level = usize::try_from(level).unwrap_or(usize::MAX).min(PRIORITY_LEVELS.len() - 1);
        self
    }

    /// Counts the request in the metrics of its replica from now on. Its prompt is counted by the first one.
    pub(crate) fn assigned_to(&mut self, shared: &Arc<ReplicaState>) {
        self.shared.metrics.inter_token.flush(&mut self.gaps);
        self.shared = Arc::clone(shared);
        self.sequences.iter_mut().for_each(|sequence| sequence.joined_in = None);
        if !std::mem::replace(&mut self.is_assigned, true) {
            shared.metrics.input_tokens.observe(self.generation.prompt_tokens as f64);
        }
    }

    /// Records that sequence `index` was scheduled. The second time with the same workers counts as a preemption.
    pub(crate) fn joined(&mut self, index: usize, at: Timestamp, start: u64) {
        let Some(sequence) = self.sequences.get_mut(index) else { return };
        self.generation.preempted += u64::from(sequence.joined_in.replace(start) == Some(start));
        if self.joined.is_none() {
            self.joined = Some(at);
            self.generation.queue = duration(at, self.arrived.into());
            self.shared.metrics.queue.observe(self.generation.queue.as_secs_f64());
        }
    }

    /// Records `count` tokens of sequence `index`, with the KV blocks of the sequence.
    pub(crate) fn tokens(&mut self, index: usize, count: u64, blocks: BlockUsage, at: Timestamp) {
        if count > 0 {
            self.count(index, count, at);
        }
        let Some(sequence) = self.sequences.get_mut(index) else { return };
        if !sequence.is_counted {
            sequence.is_counted = true;
            let cached_tokens = u64::from(blocks.num_reused) * self.block_size;
            self.generation.cached_tokens += cached_tokens;
            self.shared.metrics.cached_tokens.fetch_add(cached_tokens, Relaxed);
            self.shared.metrics.prefix_lookups.fetch_add(1, Relaxed);
            self.shared.metrics.prefix_hits.fetch_add(u64::from(blocks.num_reused > 0), Relaxed);
        }
    }

    fn count(&mut self, index: usize, count: u64, now: Timestamp) {
        let metrics = &self.shared.metrics;
        self.last_token = Some(now);
        self.generation.output_tokens += count;
        if self.first_token.is_none() {
            self.first_token = Some(now);
            self.generation.prefill = self.joined.map_or(Duration::ZERO, |joined| duration(now, joined));
            let seconds = duration(now, self.arrived.into()).as_secs_f64();
            metrics.first_token.observe(seconds);
            metrics.first_token_of[self.level].observe(seconds);
        }
        let before = self.sequences.get_mut(index).and_then(|sequence| sequence.last_token.replace(now));
        if let Some(before) = before {
            let gap = now.ns_since(before) as f64 / 1e9 / count as f64;
            (0..count).for_each(|_| metrics.inter_token.tally(gap, &mut self.gaps));
            if self.gaps.count() >= MAX_GAPS {
                metrics.inter_token.flush(&mut self.gaps);
            }
        }
    }

    /// Counts the end of a sequence; `None` counts a failure.
    pub(crate) fn ended(&self, reason: Option<FinishReason>) {
        self.shared.metrics.ended(reason);
    }

    /// Durations and token counts so far.
    pub(crate) fn generation(&self) -> Generation {
        let decode =
            self.last_token.zip(self.first_token).map_or(Duration::ZERO, |(last, first)| duration(last, first));
        match self.joined {
            Some(_) => Generation { decode, ..self.generation },
            // A request that was never scheduled has been queued all the time.
            None => Generation { queue: self.arrived.elapsed(), decode, ..self.generation },
        }
    }
}

impl Drop for Timing {
    fn drop(&mut self) {
        let metrics = &self.shared.metrics;
        metrics.inter_token.flush(&mut self.gaps);
        metrics.request.observe(self.arrived.elapsed().as_secs_f64());
        metrics.output_tokens.observe(self.generation.output_tokens as f64);
    }
}

fn duration(later: Timestamp, earlier: Timestamp) -> Duration {
    Duration::from_nanos(later.ns_since(earlier))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_counts_its_tokens_its_cached_prompt_and_its_preemptions() {
        let shared = Arc::new(ReplicaState::default());
        let blocks = BlockUsage { num_reused: 2, num_allocated: 1 };
        let mut timing = Timing::new(&shared, 16, 40, 1).with_level(2);
        timing.joined(0, Timestamp::now(), 0);
        timing.tokens(0, 1, blocks, Timestamp::now());
        timing.joined(0, Timestamp::now(), 0);
        timing.tokens(0, 2, blocks, Timestamp::now());
        timing.joined(0, Timestamp::now(), 1);
        let generation = timing.generation();
        assert_eq!((generation.prompt_tokens, generation.cached_tokens, generation.output_tokens), (40, 32, 3));
        assert_eq!(generation.preempted, 1, "a restart of the workers is no preemption");
        timing.ended(Some(FinishReason::Length));
        drop(timing);
        let values = shared.metrics.read();
        assert_eq!((values.queue.count, values.first_token.count, values.inter_token.count), (1, 1, 2));
        assert_eq!((values.prefix_lookups, values.prefix_hits, values.ends), (1, 1, [0, 0, 1, 0, 0, 0]));
        assert_eq!(values.cached_tokens, 32);
        assert_eq!(values.first_token_of.map(|level| level.count), [0, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!((values.output_tokens.sum, values.request.count), (3.0, 1));
    }
}
