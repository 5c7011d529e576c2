//! One sequence: its tokens, its blocks, and how far plans and outputs have come.

use smallvec::SmallVec;

use crate::beams::{Beams, Rules};
use crate::blocks::ContentId;
use crate::stop::{StopWords, Tail};
use crate::{
    BlockId, BlockUsage, DraftUsage, FinishReason, Request, RowId, SampledToken, SamplingParams, SequenceId,
    TokenEvent, TokenId,
};

/// Where a sequence is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    /// In the queue: new, preempted, or back from lost workers. Holds no row and no block.
    Queued,
    /// In a row, with blocks; a beam search in several.
    Running(RowId),
    /// Its last token is planned and not yet settled. Holds no row and no block.
    Draining,
}

/// Steps touch every running sequence, thousands of them: what they need fills the first two or three cache lines, and the
/// rest comes after it or lies behind boxes.
#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct Sequence {
    // What making a plan reads:
    pub(crate) id: SequenceId,
    pub(crate) place: Place,
    /// Positions computed by the plans made so far.
    pub(crate) num_computed: usize,
    /// Tokens it joined with: prefill ends there.
    pub(crate) join_len: usize,
    /// Plans in flight that sample a token of it.
    pub(crate) num_in_flight: usize,
    /// Length of `tokens` at which the output is complete.
    pub(crate) max_len: usize,
    /// Most tokens to guess in a step; 0 when it is not to be done.
    pub(crate) max_drafts: usize,
    /// Whether each of its tokens is told to the workers before the next is planned.
    pub(crate) is_told: bool,
    /// Set for a beam search; `tokens` stays the prompt then.
    pub(crate) beams: Option<Box<Beams>>,
    /// While it runs. With a beam search, those of the prompt's part that all beams share.
    pub(crate) blocks: Vec<BlockId>,
    /// The prompt and the settled output.
    pub(crate) tokens: Vec<TokenId>,

    // What settling an output reads beside it:
    /// Set where there are stop words.
    stopping: Option<Box<Stopping>>,
    /// Set while guesses are in flight.
    pub(crate) drafting: Option<Box<Drafting>>,
    /// Those of `sampling`.
    end_ids: SmallVec<[TokenId; 4]>,
    pub(crate) usage: BlockUsage,
    pub(crate) draft_usage: DraftUsage,

    // The rest:
    pub(crate) sampling: Box<SamplingParams>,
    pub(crate) num_prompt_tokens: usize,
    pub(crate) priority: u32,
    /// Whether others of its priority are served before it.
    pub(crate) is_delayed: bool,
    /// Whether it was ever admitted.
    pub(crate) started: bool,
    /// While it runs: tokens that workers were told, not only their devices.
    pub(crate) num_told: usize,
    /// `blocks[..num_named]` are named in the pool; `last_content` is the last one's name.
    pub(crate) num_named: usize,
    /// `blocks[..num_ready]` are filled by the plans made so far.
    pub(crate) num_ready: usize,
    pub(crate) last_content: ContentId,
}

/// The search for stop words.
#[derive(Debug)]
struct Stopping {
    words: StopWords,
    /// Settled tokens that may still become a stop word.
    held: Vec<SampledToken>,
}

/// Guesses in flight, and what was settled of their step so far.
#[derive(Debug)]
pub(crate) struct Drafting {
    pub(crate) drafts: Vec<TokenId>,
    pub(crate) verified: Vec<SampledToken>,
}

impl Sequence {
    pub(crate) fn new(id: SequenceId, mut request: Request, max_len: usize, max_drafts: usize) -> Self {
        let stop_words = StopWords::new(request.stop_words);
        let plain = request.sampling.is_greedy() && request.sampling.leaves_logits_alone();
        let rules = request.beams.map(|params| Rules {
            params,
            end_ids: request.sampling.end_ids.clone(),
            stop_words: stop_words.clone(),
            max_tokens: max_len - request.prompt.len(),
        });
        let beams = rules.map(|rules| Box::new(Beams::new(rules)));
        if let Some(beams) = &beams {
            request.sampling.beam_candidates = beams.num_candidates() as u32;
        }
        Self {
            id,
            priority: request.priority,
            is_delayed: false,
            num_prompt_tokens: request.prompt.len(),
            tokens: request.prompt,
            max_len,
            end_ids: SmallVec::from_slice(&request.sampling.end_ids),
            sampling: Box::new(request.sampling),
            stopping: (!stop_words.is_empty()).then(|| Box::new(Stopping { words: stop_words, held: Vec::new() })),
            place: Place::Queued,
            started: false,
            num_in_flight: 0,
            usage: BlockUsage::default(),
            is_told: false,
            max_drafts: if plain && beams.is_none() { max_drafts.min(request.max_drafts as usize) } else { 0 },
            beams,
            drafting: None,
            draft_usage: DraftUsage::default(),
            blocks: Vec::new(),
            num_computed: 0,
            join_len: 0,
            num_told: 0,
            num_named: 0,
            num_ready: 0,
            last_content: ContentId::ROOT,
        }
    }

    #[inline]
    pub(crate) fn is_prefilling(&self) -> bool {
        self.num_computed < self.join_len
    }

    /// Whether every token of the output is settled or in flight.
    #[inline]
    pub(crate) fn is_fully_planned(&self) -> bool {
        !self.waits_for_settle() && self.tokens.len() + self.num_in_flight >= self.max_len
    }

    /// Whether its next step depends on what the last one brought: never two are in flight.
    #[inline]
    pub(crate) fn waits_for_settle(&self) -> bool {
        self.beams.is_some() || self.max_drafts > 0 || self.is_told
    }

    /// Rows that it takes while it runs.
    pub(crate) fn num_rows(&self) -> usize {
        self.beams.as_ref().map_or(1, |beams| beams.width())
    }

    /// Blocks that it uses; one that several of its beams share counts once.
    pub(crate) fn num_held(&self) -> usize {
        self.blocks.len() + self.beams.as_ref().map_or(0, |beams| beams.num_tail_blocks())
    }

    /// News of it.
    #[inline]
    pub(crate) fn event(&self, tokens: SmallVec<[SampledToken; 1]>, finished: Option<FinishReason>) -> TokenEvent {
        TokenEvent {
            sequence: self.id,
            tokens,
            finished,
            blocks: self.usage,
            drafts: self.draft_usage,
            beams: Vec::new(),
        }
    }

    /// Whether the next position lies beyond the block table.
    #[inline]
    pub(crate) fn needs_block(&self, block_size: usize) -> bool {
        self.num_computed == self.blocks.len() * block_size
    }

    /// Blocks that the whole sequence fills.
    pub(crate) fn num_blocks_in_all(&self, block_size: usize) -> usize {
        num_blocks_in_all(self.num_prompt_tokens, self.max_len, self.num_rows(), block_size)
    }

    /// Blocks whose tokens are known and whose positions are computed by the plans made so far.
    pub(crate) fn num_known_blocks(&self, block_size: usize) -> usize {
        self.num_computed.min(self.tokens.len()) / block_size
    }

    pub(crate) fn block_tokens(&self, index: usize, block_size: usize) -> &[TokenId] {
        &self.tokens[index * block_size..(index + 1) * block_size]
    }

    /// Whether the next token is told as it comes and ends nothing.
    #[inline]
    pub(crate) fn goes_on_with(&self, token: TokenId) -> bool {
        self.stopping.is_none() && self.tokens.len() + 1 < self.max_len && !self.end_ids.contains(&token)
    }

    /// Takes the next token of the output: appends what may be told to `released`, and says whether this ends it.
    #[inline]
    pub(crate) fn accept(
        &mut self,
        sampled: SampledToken,
        released: &mut SmallVec<[SampledToken; 1]>,
    ) -> Option<FinishReason> {
        let token = sampled.token;
        if self.end_ids.contains(&token) {
            released.extend(self.take_held());
            return Some(FinishReason::EndId);
        }
        self.tokens.push(token);
        match &mut self.stopping {
            None => released.push(sampled),
            Some(stopping) => {
                if stopping.push(sampled, released) {
                    return Some(FinishReason::StopWord);
                }
            }
        }
        if self.tokens.len() < self.max_len {
            return None;
        }
        released.extend(self.take_held());
        Some(FinishReason::Length)
    }

    /// Tokens that were held back because they might have become a stop word.
    pub(crate) fn take_held(&mut self) -> SmallVec<[SampledToken; 1]> {
        self.stopping.iter_mut().flat_map(|stopping| stopping.held.drain(..)).collect()
    }

    /// Forgets all that concerns a row; the blocks are released already or were lost.
    pub(crate) fn reset_row(&mut self) {
        self.blocks.clear();
        (self.num_computed, self.join_len, self.num_told) = (0, 0, 0);
        if let Some(beams) = &mut self.beams {
            beams.restart();
        }
        (self.num_named, self.num_ready, self.last_content) = (0, 0, ContentId::ROOT);
    }
}

impl Stopping {
    /// Takes the next token and releases what cannot become a stop word any more. True when one is complete; it is dropped.
    fn push(&mut self, sampled: SampledToken, released: &mut SmallVec<[SampledToken; 1]>) -> bool {
        let tail = self.words.push(sampled.token);
        self.held.push(sampled);
        let (Tail::Open(len) | Tail::Stop(len)) = tail;
        released.extend(self.held.drain(..self.held.len() - len));
        let is_complete = matches!(tail, Tail::Stop(_));
        if is_complete {
            self.held.clear();
        }
        is_complete
    }
}

/// Blocks that a sequence fills, or `num_beams` that share the full blocks of the prompt; the last token's position is
/// never computed.
pub(crate) fn num_blocks_in_all(prompt_len: usize, max_len: usize, num_beams: usize, block_size: usize) -> usize {
    let num_shared = prompt_len.min(max_len - 1) / block_size;
    num_shared + num_beams * ((max_len - 1).div_ceil(block_size) - num_shared)
}
