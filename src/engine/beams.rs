//! Beam search of one sequence: which beams continue, which are finished, and when the search ends.
//!
//! The rules are those of `generate(num_beams=…)` in transformers: the best `width` unfinished continuations become the
//! next beams. One that ends counts only if it is among the best `width` of all continuations. The score of a finished
//! beam is `log-probability / length ^ len_penalty`. The diversity rate is TensorRT-LLM's: for the ranking, `rate * i`
//! is added to the score of each continuation of beam `i`; log-probabilities are not changed.

use std::ops::Range;

use crate::stop::{StopWords, Tail};
use crate::tables::Tables;
use crate::{BeamOutput, BeamParams, BlockId, FinishReason, RowId, SampledToken, TokenId};

/// Settings of the search, taken from its request.
#[derive(Debug)]
pub(crate) struct Rules {
    pub(crate) params: BeamParams,
    pub(crate) end_ids: Vec<TokenId>,
    pub(crate) stop_words: StopWords,
    /// Maximum number of tokens to generate.
    pub(crate) max_tokens: usize,
}

/// State of the search, and of its rows at the workers.
#[derive(Debug)]
pub(crate) struct Beams {
    rules: Rules,
    /// `[width]` while it runs; the prompt's row is first.
    pub(crate) rows: Vec<RowId>,
    /// Best first. Until the prompt is computed, one beam without tokens.
    beams: Vec<Beam>,
    /// Block tables after the prompt's full blocks, for each beam that workers hold.
    pub(crate) tails: Vec<Tables>,
    /// Number of rows in use at the workers. Beams take rows in order.
    pub(crate) num_live_rows: usize,
    /// Likeliest continuations of each beam, as far as the step in flight is settled.
    candidates: Vec<Vec<(TokenId, f32)>>,
    /// How `beams` derive from the beams that workers hold; empty while a step is in flight.
    pub(crate) choices: Vec<Choice>,
    /// Best first, at most `width`.
    finished: Vec<Finished>,
}

/// A continuation that becomes a beam.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Choice {
    /// Index of the beam that it continues.
    pub(crate) parent: usize,
    pub(crate) token: TokenId,
}

#[derive(Debug, Clone)]
struct Beam {
    tokens: Vec<(TokenId, f32)>,
    log_prob: f32,
    stop_words: StopWords,
}

#[derive(Debug, Clone)]
struct Finished {
    output: BeamOutput,
    score: f32,
}

/// A beam extended by one token.
struct Continuation {
    parent: usize,
    token: TokenId,
    token_log_prob: f32,
    /// Of all its tokens.
    log_prob: f32,
    /// Score used for the ranking, with the diversity rate.
    ranked: f32,
}

impl Beams {
    pub(crate) fn new(rules: Rules) -> Self {
        let mut beams = Self {
            rules,
            rows: Vec::new(),
            beams: Vec::new(),
            tails: Vec::new(),
            num_live_rows: 0,
            candidates: Vec::new(),
            choices: Vec::new(),
            finished: Vec::new(),
        };
        beams.restart();
        beams
    }

    /// Restarts from the prompt. The same result will be found again, because each step depends only on the ones
    /// before.
    pub(crate) fn restart(&mut self) {
        let stop_words = self.rules.stop_words.clone();
        self.beams = vec![Beam { tokens: Vec::new(), log_prob: 0.0, stop_words }];
        self.rows.clear();
        self.tails.clear();
        self.num_live_rows = 0;
        self.candidates.clear();
        self.choices.clear();
        self.finished.clear();
    }

    pub(crate) fn width(&self) -> usize {
        self.rules.params.width as usize
    }

    /// Number of continuations of each beam that are needed: any of those that end the beam may be among the best.
    pub(crate) fn num_candidates(&self) -> usize {
        num_candidates(self.width(), self.rules.end_ids.len(), self.rules.stop_words.len())
    }

    /// Number of distinct blocks in `tails`, in some KV groups.
    pub(crate) fn num_tail_blocks(&self, groups: Range<usize>) -> usize {
        let tables = self.tails.iter().flat_map(|tail| &tail[groups.clone()]);
        let mut blocks: Vec<BlockId> = tables.flat_map(|table| table.held()).copied().collect();
        blocks.sort_unstable();
        blocks.dedup();
        blocks.len()
    }

    /// Adds the continuations of the next beam of the step in flight.
    pub(crate) fn push(&mut self, sampled: SampledToken) {
        self.candidates.push(sampled.top);
    }

    /// Whether the continuations of all beams of the step in flight have arrived.
    pub(crate) fn is_settled(&self) -> bool {
        self.candidates.len() == self.beams.len()
    }

    /// Chooses the next beams from the step's candidates. If the search ends, returns the outputs, best first, and the
    /// reason.
    pub(crate) fn advance(&mut self) -> Option<(Vec<BeamOutput>, FinishReason)> {
        let (width, len) = (self.width(), self.beams[0].tokens.len() + 1);
        let is_last = len == self.rules.max_tokens;
        let mut next: Vec<Beam> = Vec::with_capacity(width);
        for (rank, continuation) in self.continuations().iter().enumerate() {
            if rank >= width && next.len() == width {
                break;
            }
            let (beam, num_hidden) = self.extended(continuation);
            if is_last || num_hidden.is_some() {
                if rank < width {
                    self.finish(&beam, num_hidden.unwrap_or(0));
                }
            } else if next.len() < width {
                self.choices.push(Choice { parent: continuation.parent, token: continuation.token });
                next.push(beam);
            }
        }
        self.candidates.clear();
        if next.is_empty() || self.is_over(&next, len) {
            let outputs = self.finished.drain(..).map(|finished| finished.output).collect();
            return Some((outputs, if is_last { FinishReason::Length } else { FinishReason::EndId(None) }));
        }
        self.beams = next;
        None
    }

    /// All continuations, best first.
    fn continuations(&self) -> Vec<Continuation> {
        let mut all = Vec::new();
        for (parent, (beam, candidates)) in self.beams.iter().zip(&self.candidates).enumerate() {
            let gain = self.rules.params.diversity_rate * parent as f32;
            all.extend(candidates.iter().map(|&(token, token_log_prob)| {
                let log_prob = token_log_prob + beam.log_prob;
                Continuation { parent, token, token_log_prob, log_prob, ranked: log_prob + gain }
            }));
        }
        all.sort_by(|a, b| b.ranked.total_cmp(&a.ranked));
        all
    }

    /// The beam with one more token. If that ends it, also the number of its last tokens to leave out of the output.
    fn extended(&self, continuation: &Continuation) -> (Beam, Option<usize>) {
        let token = continuation.token;
        let mut beam = self.beams[continuation.parent].clone();
        beam.tokens.push((token, continuation.token_log_prob));
        beam.log_prob = continuation.log_prob;
        let num_hidden = match beam.stop_words.push(token) {
            _ if self.rules.end_ids.contains(&token) => Some(1),
            Tail::Stop(len) => Some(len),
            Tail::Open(_) => None,
        };
        (beam, num_hidden)
    }

    /// Keeps a finished beam, without its last `num_hidden` tokens, if it is among the best.
    fn finish(&mut self, beam: &Beam, num_hidden: usize) {
        let score = self.score(beam.log_prob, beam.tokens.len());
        let index = self.finished.partition_point(|other| other.score >= score);
        let tokens = beam.tokens[..beam.tokens.len() - num_hidden].to_vec();
        self.finished.insert(index, Finished { output: BeamOutput { tokens, cum_log_prob: beam.log_prob }, score });
        self.finished.truncate(self.width());
    }

    fn score(&self, log_prob: f32, len: usize) -> f32 {
        log_prob / (len as f32).powf(self.rules.params.len_penalty)
    }

    /// Whether there are enough outputs and none of the `next` beams is likely to score better.
    fn is_over(&self, next: &[Beam], len: usize) -> bool {
        let Some(worst) = self.finished.get(self.width() - 1) else { return false };
        let best = next.iter().map(|beam| beam.log_prob).fold(f32::NEG_INFINITY, f32::max);
        self.rules.params.early_stopping || self.score(best, len) <= worst.score
    }
}

/// Upper bound of candidates: `width` that continue, and all that may end.
pub(crate) fn num_candidates(width: usize, num_end_ids: usize, num_stop_words: usize) -> usize {
    width + num_end_ids + num_stop_words
}
