//! Beam search of one sequence: which continuations live on, which are finished, and when to stop.
//!
//! The rules are those of `generate(num_beams=…)` in transformers: the best `width` unfinished continuations live on;
//! one that ends counts only if it is among the best `width` of all; scores of finished ones are
//! `log-probability / length ^ len_penalty`. The diversity rate is TensorRT-LLM's: where continuations are ranked, those
//! of beam `i` gain `rate * i`; their log-probabilities stay what they are.

use crate::stop::{StopWords, Tail};
use crate::{BeamOutput, BeamParams, BlockId, FinishReason, RowId, SampledToken, TokenId};

/// What the search needs to know of its request.
#[derive(Debug)]
pub(crate) struct Rules {
    pub(crate) params: BeamParams,
    pub(crate) end_ids: Vec<TokenId>,
    pub(crate) stop_words: StopWords,
    /// Most tokens to generate.
    pub(crate) max_tokens: usize,
}

/// The search, and what its beams hold at the workers.
#[derive(Debug)]
pub(crate) struct Beams {
    rules: Rules,
    /// `[width]` while it runs, the prompt's row first.
    pub(crate) rows: Vec<RowId>,
    /// Best first; one without tokens until the prompt is computed.
    beams: Vec<Beam>,
    /// Block tables behind the prompt's full blocks, one for each beam that workers hold.
    pub(crate) tails: Vec<Vec<BlockId>>,
    /// Rows of which workers hold something: beams take them one after another.
    pub(crate) num_live_rows: usize,
    /// Likeliest continuations of each beam, as far as the step in flight is settled.
    candidates: Vec<Vec<(TokenId, f32)>>,
    /// How `beams` came from those that workers hold; empty while a step is in flight.
    pub(crate) choices: Vec<Choice>,
    /// Best first, at most `width`.
    finished: Vec<Finished>,
}

/// A continuation that lives on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Choice {
    /// Index of the beam it continues.
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

/// One more token for a beam.
struct Continuation {
    parent: usize,
    token: TokenId,
    token_log_prob: f32,
    /// Of all its tokens.
    log_prob: f32,
    /// By which it is ranked.
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

    /// Back to the prompt: what was found is found again, as every step depends on nothing else.
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

    /// Continuations of each beam that can matter: any that end may be among the best.
    pub(crate) fn num_candidates(&self) -> usize {
        num_candidates(self.width(), self.rules.end_ids.len(), self.rules.stop_words.len())
    }

    /// Blocks in `tails`, each once.
    pub(crate) fn num_tail_blocks(&self) -> usize {
        let mut blocks: Vec<BlockId> = self.tails.iter().flatten().copied().collect();
        blocks.sort_unstable();
        blocks.dedup();
        blocks.len()
    }

    /// Takes the continuations of the next beam of the step in flight.
    pub(crate) fn push(&mut self, sampled: SampledToken) {
        self.candidates.push(sampled.top);
    }

    /// Whether every beam's continuations of the step in flight are there.
    pub(crate) fn is_settled(&self) -> bool {
        self.candidates.len() == self.beams.len()
    }

    /// Decides by the step's candidates. The outputs, best first, and why, when the search has ended.
    pub(crate) fn advance(&mut self) -> Option<(Vec<BeamOutput>, FinishReason)> {
        let (width, len) = (self.width(), self.beams[0].tokens.len() + 1);
        let is_last = len == self.rules.max_tokens;
        let mut next: Vec<Beam> = Vec::with_capacity(width);
        for (rank, continuation) in self.continuations().iter().enumerate() {
            if rank >= width && next.len() == width {
                break;
            }
            let (beam, untold) = self.extended(continuation);
            if is_last || untold.is_some() {
                if rank < width {
                    self.finish(&beam, untold.unwrap_or(0));
                }
            } else if next.len() < width {
                self.choices.push(Choice { parent: continuation.parent, token: continuation.token });
                next.push(beam);
            }
        }
        self.candidates.clear();
        if next.is_empty() || self.is_over(&next, len) {
            let outputs = self.finished.drain(..).map(|finished| finished.output).collect();
            return Some((outputs, if is_last { FinishReason::Length } else { FinishReason::EndId }));
        }
        self.beams = next;
        None
    }

    /// Best first.
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

    /// The beam with one token more; and, when that ends it, how many of its last tokens are not told.
    fn extended(&self, continuation: &Continuation) -> (Beam, Option<usize>) {
        let token = continuation.token;
        let mut beam = self.beams[continuation.parent].clone();
        beam.tokens.push((token, continuation.token_log_prob));
        beam.log_prob = continuation.log_prob;
        let untold = match beam.stop_words.push(token) {
            _ if self.rules.end_ids.contains(&token) => Some(1),
            Tail::Stop(len) => Some(len),
            Tail::Open(_) => None,
        };
        (beam, untold)
    }

    /// Keeps an ended beam, without its last `untold` tokens, if it is among the best.
    fn finish(&mut self, beam: &Beam, untold: usize) {
        let score = self.score(beam.log_prob, beam.tokens.len());
        let index = self.finished.partition_point(|other| other.score >= score);
        let tokens = beam.tokens[..beam.tokens.len() - untold].to_vec();
        self.finished.insert(index, Finished { output: BeamOutput { tokens, cum_log_prob: beam.log_prob }, score });
        self.finished.truncate(self.width());
    }

    fn score(&self, log_prob: f32, len: usize) -> f32 {
        log_prob / (len as f32).powf(self.rules.params.len_penalty)
    }

    /// Whether there are enough outputs, and none of the `next` beams is likely to better them.
    fn is_over(&self, next: &[Beam], len: usize) -> bool {
        let Some(worst) = self.finished.get(self.width() - 1) else { return false };
        let best = next.iter().map(|beam| beam.log_prob).fold(f32::NEG_INFINITY, f32::max);
        self.rules.params.early_stopping || self.score(best, len) <= worst.score
    }
}

/// `width` that go on, and those that end.
pub(crate) fn num_candidates(width: usize, num_end_ids: usize, num_stop_words: usize) -> usize {
    width + num_end_ids + num_stop_words
}
