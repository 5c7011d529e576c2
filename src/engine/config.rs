//! The engine's limits; all are set before the first request.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::{ForcedAcceptance, MAX_BEAM_CANDIDATES, MAX_LOGPROBS, Refused, Request, TokenId, beams};

/// The reason given when a queue bound is 0.
const QUEUED: &str = "a request is queued before it runs";

/// Default bound of the time between two tokens of a stream: 20 tokens a second, faster than people read.
pub const DEFAULT_INTER_TOKEN: Duration = Duration::from_millis(50);

/// Where decodes alone take long, as on CPUs, the default bound is their time times this number. Prompts then get most of
/// a step, and a step's fixed cost is spread over many of their tokens.
pub const DEFAULT_DECODE_FACTOR: u32 = 8;

/// Limits and policies of one engine. The workers' buffers are sized by the same values.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineConfig {
    /// Maximum number of sequences that run at once; rows are `0..max_rows`.
    pub max_rows: usize,
    /// Maximum number of tokens in a step, prefill and decode together; at least `max_rows`.
    pub max_step_tokens: usize,
    /// Longest time between two tokens of a running stream while prompts are computed. A step with decodes takes as many
    /// prompt tokens as fit into this time. Without it the bound is [`DEFAULT_INTER_TOKEN`], or
    /// [`DEFAULT_DECODE_FACTOR`] times the time of the decodes alone if that is longer.
    pub max_inter_token: Option<Duration>,
    /// Bounds for individual priorities, which replace [`max_inter_token`](Self::max_inter_token). The shortest bound of
    /// the streams that decode applies to a step.
    pub max_inter_token_of: BTreeMap<u32, Duration>,
    /// Number of prompt tokens that a step computes even if they take longer than the bound, so that prompts advance.
    pub min_prompt_tokens: usize,
    /// The device computes tokens in tiles of this size: a partial tile takes as long as a full one. 1 if there are no
    /// tiles. A chunk that does not complete its prompt ends with a full tile of the step. A step with at least one tile
    /// of decodes defers the last few prompt tokens to the next step instead of starting another partial tile.
    pub token_tile: usize,
    /// Chunks of a prompt end at multiples of this number of its positions, or where the prompt ends. 1 if it may be cut anywhere. Not
    /// where a device computes so many positions together and the cut must not change the results.
    pub prompt_tile: usize,
    /// Number of experts of a layer; 0 if the model has none. For the cost model of steps.
    pub num_experts: usize,
    /// Number of experts that a token chooses.
    pub num_active_experts: usize,
    /// Maximum length of a sequence, prompt and output together.
    pub max_sequence_len: usize,
    /// Positions in one KV block.
    pub block_size: usize,
    /// Number of KV blocks that workers hold.
    pub num_blocks: usize,
    /// The KV groups of the model's layers: for each, the number of last positions that its layers read, or `None` if
    /// they read all positions. Groups without a window come first. A sequence has a block table for each group, and
    /// any group may use any block.
    pub windows: Vec<Option<usize>>,
    /// Number of slots for recurrent states that workers hold; 0 if the model has none. A running sequence takes one,
    /// others hold its state before drafts, and snapshots for the prefix cache. Beam searches need a model without such
    /// states.
    pub num_states: usize,
    /// Snapshots of the recurrent state of a prompt are taken every this number of blocks.
    pub state_interval: usize,
    /// Tokens that end a message in a prompt. Snapshots of the recurrent state are taken there, too.
    pub message_ends: Vec<TokenId>,
    /// Number of slots in host memory that workers hold for KV blocks that are evicted from the device; 0 if there are none. Only
    /// the prefix cache uses them.
    pub num_host_blocks: usize,
    /// The same for snapshots of recurrent states.
    pub num_host_states: usize,
    /// Number of slots on disk for blocks that leave host memory; 0 if nothing is kept there.
    pub num_disk_blocks: usize,
    /// The same for snapshots of recurrent states.
    pub num_disk_states: usize,
    /// Maximum number of requests that wait for their first step.
    pub max_queue: usize,
    /// Maximum number of waiting requests of one priority, unless [`max_queue_of`](Self::max_queue_of) has another
    /// bound for it.
    pub max_queue_each: usize,
    /// Bounds for individual priorities, which replace [`max_queue_each`](Self::max_queue_each).
    pub max_queue_of: BTreeMap<u32, usize>,
    /// Maximum number of steps planned and not yet settled; 2 lets a step be planned while another runs.
    pub max_in_flight: usize,
    /// Maximum number of tokens of joining rows in one plan, counting the entries of their sampling lists. A single row
    /// that is longer joins alone. Together with `max_sequence_len` this bounds the bytes of a plan: see
    /// [`max_plan_bytes`](Self::max_plan_bytes).
    pub max_joined_tokens: usize,
    /// What a sequence is guaranteed once it is admitted.
    pub policy: Policy,
    /// Whether sequences with equal prefixes share KV blocks.
    pub prefix_cache: bool,
    /// Whether blocks that hold generated tokens are shared, too. Not where a device computes generated tokens in another
    /// way than prompts and the results of both must be the same. A step then has a row for each draft, and for each generated token
    /// that is computed again after a preemption or a worker's death, so that the device can compute it as it did before.
    pub shares_output: bool,
    /// Maximum number of draft tokens for a sequence in one step, whatever its request says; 0 turns drafts off.
    pub max_drafts: usize,
    /// Whether the devices guess the drafts, so that they come with the outputs of steps. Otherwise a
    /// [`Drafter`](crate::Drafter) guesses them on rank 0.
    pub guesses_on_device: bool,
    /// For benchmarks alone: drafts are accepted at this rate whatever the model says of them, so the output is wrong. Each step of a
    /// sequence then has as many drafts as it may have.
    pub forced_acceptance: Option<ForcedAcceptance>,
    /// Number of slots for the weights of adapters that workers have; 0 if the model takes no adapters.
    pub max_adapters: usize,
    /// Number of pipeline stages. With more than one, running sequences are divided into as many micro-batches, so that
    /// each stage has one to work on. Only the last stage knows the sampled tokens, so rank 0 sends each row its last
    /// token.
    pub num_stages: usize,
}

/// What a sequence is guaranteed once it is admitted; the names are TensorRT-LLM's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Policy {
    /// KV blocks for the whole output are reserved: once admitted, a sequence is never preempted.
    #[default]
    GuaranteedNoEvict,
    /// KV blocks are allocated as they are filled, so more sequences run. When blocks run out, the last sequence in the
    /// order of service is preempted and computed again later.
    MaxUtilization,
}

/// Which field of an [`EngineConfig`] is invalid, and why.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // Fields are named in the messages.
pub enum ConfigError {
    /// A bound below what the engine needs to make progress.
    #[error("`{field}` is {found}; it must be at least {min} ({because})")]
    TooSmall { field: &'static str, found: usize, min: usize, because: &'static str },
    /// A prefix that is found in the cache must end where a chunk may.
    #[error("`block_size` is {found}; it must be a multiple of `prompt_tile`, which is {tile}")]
    TileBorder { found: usize, tile: usize },
    /// A group without a window follows one with a window.
    #[error("`windows` has `None` after a window; list the groups without a window first")]
    WindowOrder,
    /// A bound above what the identifiers can count.
    #[error("`{field}` is {found}; it must be at most {max}")]
    TooLarge { field: &'static str, found: usize, max: usize },
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            max_rows: 64,
            max_step_tokens: 2048,
            max_inter_token: None,
            max_inter_token_of: BTreeMap::new(),
            min_prompt_tokens: 16,
            token_tile: 1,
            prompt_tile: 1,
            num_experts: 0,
            num_active_experts: 0,
            max_sequence_len: 4096,
            block_size: 16,
            num_blocks: 4096,
            windows: vec![None],
            num_states: 0,
            state_interval: 1,
            message_ends: Vec::new(),
            num_host_blocks: 0,
            num_host_states: 0,
            num_disk_blocks: 0,
            num_disk_states: 0,
            max_queue: 1024,
            max_queue_each: i32::MAX as usize,
            max_queue_of: BTreeMap::new(),
            max_in_flight: 2,
            max_joined_tokens: 16_384,
            policy: Policy::default(),
            prefix_cache: true,
            shares_output: true,
            max_drafts: 0,
            guesses_on_device: false,
            forced_acceptance: None,
            max_adapters: 0,
            num_stages: 1,
        }
    }
}

impl EngineConfig {
    /// Checks every field.
    ///
    /// # Errors
    /// Returns the first field that is invalid, with its allowed range.
    pub fn validate(&self) -> Result<(), ConfigError> {
        // If there is a prompt to compute, one row does not decode.
        let most_decodes = self.max_rows.saturating_add(self.prompt_tile.saturating_sub(1));
        let bounds = [
            ("max_rows", self.max_rows, 1, "a sequence needs a row"),
            ("max_step_tokens", self.max_step_tokens, most_decodes, "`max_rows`: a decode takes a token of each"),
            ("prompt_tile", self.prompt_tile, 1, "a chunk has a token"),
            ("min_prompt_tokens", self.min_prompt_tokens, self.prompt_tile, "prompts must advance beside decodes"),
            ("token_tile", self.token_tile, 1, "a token is computed at a time"),
            ("max_sequence_len", self.max_sequence_len, 2, "a prompt token and an output token"),
            ("block_size", self.block_size, 1, "a block holds a position"),
            ("num_blocks", self.num_blocks, 1, "a sequence needs a block"),
            ("windows", self.windows.len(), 1, "layers belong to a KV group"),
            ("windows", self.windows.iter().flatten().copied().min().unwrap_or(1), 1, "a position sees itself"),
            ("windows", self.windows.iter().flatten().copied().max().unwrap_or(1), 1, "a position sees itself"),
            ("num_states", self.num_states, 0, "there may be none"),
            ("state_interval", self.state_interval, 1, "a snapshot is taken at the end of a block"),
            ("num_host_blocks", self.num_host_blocks, 0, "there may be none"),
            ("num_host_states", self.num_host_states, 0, "there may be none"),
            ("num_disk_blocks", self.num_disk_blocks, 0, "there may be none"),
            ("num_disk_states", self.num_disk_states, 0, "there may be none"),
            ("max_adapters", self.max_adapters, 0, "there may be none"),
            ("max_queue", self.max_queue, 1, QUEUED),
            ("max_queue_each", self.max_queue_each, 1, QUEUED),
            ("max_queue_of", self.max_queue_of.values().copied().min().unwrap_or(1), 1, QUEUED),
            ("max_in_flight", self.max_in_flight, 1, "a step must be in flight to be settled"),
            ("max_joined_tokens", self.max_joined_tokens, 1, "rows join with a token at least"),
        ];
        for (field, found, min, because) in bounds {
            if found < min {
                return Err(ConfigError::TooSmall { field, found, min, because });
            }
            let max = i32::MAX as usize;
            if found > max {
                return Err(ConfigError::TooLarge { field, found, max });
            }
        }
        if !self.block_size.is_multiple_of(self.prompt_tile) {
            return Err(ConfigError::TileBorder { found: self.block_size, tile: self.prompt_tile });
        }
        if !self.windows.iter().is_sorted_by_key(Option::is_some) {
            return Err(ConfigError::WindowOrder);
        }
        Ok(())
    }

    /// Checks a request against these limits alone, without regard to other requests or the number of KV blocks. Call
    /// it before anything is sized by the request. Returns the length at which its sequence is complete.
    ///
    /// # Errors
    /// Returns the first limit that the request exceeds.
    pub fn check(&self, request: &Request) -> Result<usize, Refused> {
        let (len, max) = (request.prompt.len(), self.max_sequence_len - 1);
        if len == 0 {
            return Err(Refused::EmptyPrompt);
        }
        if len > max {
            return Err(Refused::PromptTooLong { len, max });
        }
        if request.max_tokens == 0 {
            return Err(Refused::MaxTokensZero);
        }
        if let Some(index) = request.stop_words.iter().position(Vec::is_empty) {
            return Err(Refused::EmptyStopWord { index });
        }
        let (len_of_lists, max) = (request.sampling.list_len(), self.max_joined_tokens);
        if len_of_lists > max {
            return Err(Refused::ListsTooLong { len: len_of_lists, max });
        }
        if request.adapter.is_some() && self.max_adapters == 0 {
            return Err(Refused::NoAdapters);
        }
        if let Some(found) = request.sampling.num_logprobs.filter(|&n| n > MAX_LOGPROBS) {
            return Err(Refused::TooManyLogprobs { found, max: MAX_LOGPROBS });
        }
        self.check_beams(request)?;
        let (len_of_words, max) = (request.stop_words.iter().map(Vec::len).sum(), self.max_joined_tokens);
        if len_of_words > max {
            return Err(Refused::StopWordsTooLong { len: len_of_words, max });
        }
        Ok(len.saturating_add(request.max_tokens as usize).min(self.max_sequence_len))
    }

    fn check_beams(&self, request: &Request) -> Result<(), Refused> {
        let Some(params) = &request.beams else { return Ok(()) };
        if self.num_states > 0 {
            return Err(Refused::RecurrentBeams);
        }
        if request.constraint.is_some() {
            return Err(Refused::ConstrainedBeams);
        }
        let (width, max) = (params.width as usize, self.max_rows);
        if width < 2 || width > max {
            return Err(Refused::BeamWidth { width: params.width, max });
        }
        let found = beams::num_candidates(width, request.sampling.end_ids.len(), request.stop_words.len());
        match found > MAX_BEAM_CANDIDATES {
            true => Err(Refused::TooManyCandidates { found, max: MAX_BEAM_CANDIDATES }),
            false => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_is_valid() {
        assert_eq!(EngineConfig::default().validate(), Ok(()));
    }

    #[test]
    fn extreme_requests_are_refused_by_the_bounds_alone() {
        use crate::{BeamParams, SamplingParams, TokenId};
        let config = EngineConfig::default();
        let request = || Request { prompt: vec![TokenId(1)], max_tokens: u32::MAX, ..Request::default() };
        let beams = |width| BeamParams { width, len_penalty: 0.0, early_stopping: true, diversity_rate: 0.0 };
        let sampling = SamplingParams { logit_bias: vec![(TokenId(1), 1.0); 16_384], ..SamplingParams::default() };
        for (request, words) in [
            (Request { beams: Some(beams(u32::MAX)), ..request() }, "beam width is 4294967295; it must be 2 to 64"),
            (
                Request { prompt: vec![TokenId(1); 4096], ..request() },
                "prompt has 4096 tokens; this model takes at most 4095",
            ),
            (
                Request { stop_words: vec![vec![TokenId(1); 9000]; 2], ..request() },
                "stop words have 18000 tokens; at most 16384 are taken",
            ),
            (
                Request { sampling, ..request() },
                "end ids, bad words and logit bias have 32768 entries (2 for a biased token); at most 16384 are taken",
            ),
        ] {
            assert_eq!(config.check(&request).unwrap_err().to_string(), words);
        }
        assert_eq!(config.check(&request()), Ok(4096));
    }

    #[test]
    fn a_wrong_field_is_named_with_what_it_must_be() {
        let error = EngineConfig { max_step_tokens: 63, ..EngineConfig::default() }.validate().unwrap_err();
        assert_eq!(
            error.to_string(),
            "`max_step_tokens` is 63; it must be at least 64 (`max_rows`: a decode takes a token of each)"
        );
        let error = EngineConfig { prompt_tile: 64, min_prompt_tokens: 64, ..EngineConfig::default() }.validate();
        assert_eq!(error, Err(ConfigError::TileBorder { found: 16, tile: 64 }));
        let tiles = EngineConfig { prompt_tile: 16, max_step_tokens: 79, ..EngineConfig::default() };
        assert_eq!(tiles.validate(), Ok(()));
        let error = EngineConfig { max_step_tokens: 78, ..tiles }.validate().unwrap_err();
        assert!(error.to_string().starts_with("`max_step_tokens` is 78; it must be at least 79"));
        let windows = |windows| EngineConfig { windows, ..EngineConfig::default() }.validate();
        assert_eq!(windows(vec![None, Some(8), Some(4)]), Ok(()));
        assert_eq!(windows(vec![Some(8), None]), Err(ConfigError::WindowOrder));
        for wrong in [vec![], vec![None, Some(0)], vec![None, Some(usize::MAX)]] {
            assert!(windows(wrong).unwrap_err().to_string().starts_with("`windows` is "));
        }
        let error = EngineConfig { num_blocks: usize::MAX, ..EngineConfig::default() }.validate().unwrap_err();
        assert!(error.to_string().starts_with("`num_blocks` is 18446744073709551615; it must be at most"));
    }
}
