//! One sequence: its tokens, its KV blocks, and its progress through plans and outputs.

use std::ops::Range;
use std::sync::Arc;

use smallvec::SmallVec;

use crate::beams::{Beams, Rules};
use crate::constraint::RequestConstraint;
use crate::content::ContentId;
use crate::disk::Fetch;
use crate::draft::{Acceptance, InStep};
use crate::guided::Guided;
use crate::slot::{Sample, Slot};
use crate::snapshots::PromptSnapshots;
use crate::states::RecurrentSlots;
use crate::stop::{StopWords, Tail};
use crate::tables::{Table, Tables};
use crate::{
    Adapter, AdapterSlot, BlockUsage, DraftUsage, FinishReason, Request, RowId, SampledToken, SamplingParams,
    SequenceId, StateId, TokenEvent, TokenId,
};

/// What a sequence is waiting for or doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SequenceState {
    /// In the queue: new, preempted, or its workers were lost. Has no row and no block.
    Queued,
    /// Has a row (a beam search has several) and blocks.
    Running(RowId),
    /// Its last token is planned and not yet settled. Has no row and no block.
    Draining,
}

/// The state of a sequence. Each step reads every running sequence, possibly thousands, so the fields that it needs
/// fill the first two or three cache lines. The other fields come after them or are boxed.
#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct Sequence {
    // Read when a plan is made:
    pub(crate) id: SequenceId,
    pub(crate) state: SequenceState,
    /// Positions computed by the plans made so far.
    pub(crate) num_computed: usize,
    /// Number of tokens when it joined: prefill ends there.
    pub(crate) join_len: usize,
    /// Number of plans in flight that sample a token of this sequence.
    pub(crate) num_in_flight: usize,
    /// Length of `tokens` at which the output is complete.
    pub(crate) max_len: usize,
    /// Maximum number of draft tokens in a step; 0 if drafts are off.
    pub(crate) max_drafts: usize,
    /// Whether each token must be sent to the workers before the next one is planned (pipeline stages).
    pub(crate) needs_token_feedback: bool,
    /// Whether its row at the workers verifies drafts, or has since it got its tokens, so that they must be sent.
    pub(crate) has_verified: bool,
    /// Set for a beam search; `tokens` stays the prompt then.
    pub(crate) beams: Option<Box<Beams>>,
    /// The prompt and the settled output.
    pub(crate) tokens: Vec<TokenId>,
    /// The block tables while it runs. In a beam search, only the blocks of the prompt that all beams share.
    pub(crate) tables: Tables,

    // Also read when an output is settled:
    /// Set if there are stop words.
    stopping: Option<Box<Stopping>>,
    /// Set if tokens are chosen among those that it allows.
    pub(crate) guided: Option<Box<Guided>>,
    /// Set while draft tokens are in flight.
    pub(crate) drafting: Option<Box<InStep>>,
    /// A copy of `sampling.end_ids`.
    end_ids: SmallVec<[TokenId; 4]>,
    pub(crate) usage: BlockUsage,
    pub(crate) draft_usage: DraftUsage,

    // Other fields:
    pub(crate) sampling: Box<SamplingParams>,
    pub(crate) num_prompt_tokens: usize,
    pub(crate) priority: u32,
    /// Whether the others of its priority are served first.
    pub(crate) is_delayed: bool,
    /// Whether it was ever admitted.
    pub(crate) started: bool,
    /// While it runs: number of its tokens that rank 0 has sent to the workers. Devices may have sampled more.
    pub(crate) num_sent: usize,
    /// Number of blocks of the first KV group that have a content in the pool; `last_content` is that of the last one.
    pub(crate) num_registered: usize,
    /// Guesses at what follows its settled tokens. They become drafts or are compared with the next token.
    pub(crate) guesses: Vec<TokenId>,
    /// How often its drafts were right.
    pub(crate) acceptance: Acceptance,
    /// Its recurrent state, if the model has such states.
    pub(crate) recurrent: RecurrentSlots,
    /// Where snapshots of it are due in the prompt.
    pub(crate) prompt_snapshots: PromptSnapshots,
    /// Whether `contents` is needed: there are other KV groups, or recurrent states.
    pub(crate) keeps_contents: bool,
    /// `[num_registered]` contents, if they are needed.
    pub(crate) contents: Vec<ContentId>,
    /// Number of these blocks that are filled by the plans made so far.
    pub(crate) num_ready: usize,
    /// Maximum number of blocks that it holds in KV groups with a window, while it runs under [`crate::Policy::GuaranteedNoEvict`].
    pub(crate) num_claimed: usize,
    pub(crate) last_content: ContentId,
    /// Parent of its first block in the prefix cache.
    pub(crate) root: ContentId,
    pub(crate) adapter: Option<Arc<Adapter>>,
    /// The slot of its adapter while it runs.
    pub(crate) adapter_slot: Option<AdapterSlot>,
    pub(crate) fetch: Fetch,
}

/// State of the search for stop words.
#[derive(Debug)]
struct Stopping {
    words: StopWords,
    /// Settled tokens that may still become part of a stop word.
    held: Vec<SampledToken>,
}

impl Sequence {
    pub(crate) fn new(
        id: SequenceId,
        mut request: Request,
        max_len: usize,
        max_drafts: usize,
        num_groups: usize,
    ) -> Self {
        let stop_words = StopWords::new(request.stop_words);
        let is_drafted = request.beams.is_none() && !request.sampling.depends_on_output();
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
        request.sampling.is_constrained = request.constraint.is_some();
        let root = ContentId::root_of(request.cache_salt, request.adapter.as_ref().map(|adapter| adapter.id));
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
            state: SequenceState::Queued,
            started: false,
            num_in_flight: 0,
            usage: BlockUsage::default(),
            needs_token_feedback: false,
            max_drafts: if is_drafted { max_drafts.min(request.max_drafts as usize) } else { 0 },
            beams,
            guided: request.constraint.map(|constraint| Box::new(Guided::new(constraint))),
            drafting: None,
            draft_usage: DraftUsage::default(),
            tables: (0..num_groups).map(|_| Table::default()).collect(),
            num_computed: 0,
            join_len: 0,
            num_sent: 0,
            num_registered: 0,
            guesses: Vec::new(),
            has_verified: false,
            acceptance: Acceptance::default(),
            recurrent: RecurrentSlots::default(),
            prompt_snapshots: PromptSnapshots::default(),
            keeps_contents: num_groups > 1,
            contents: Vec::new(),
            num_ready: 0,
            num_claimed: 0,
            last_content: root,
            fetch: Fetch::default(),
            root,
            adapter: request.adapter,
            adapter_slot: None,
        }
    }

    #[inline]
    pub(crate) fn is_prefilling(&self) -> bool {
        self.num_computed < self.join_len
    }

    /// Whether every token of the output is settled or in flight, so that it needs its row no longer. A constrained sequence
    /// keeps its row, because a token in flight may be discarded.
    #[inline]
    pub(crate) fn is_fully_planned(&self) -> bool {
        !self.waits_for_settle() && self.guided.is_none() && self.num_planned() >= self.max_len
    }

    /// Whether its constraint keeps it out of the next plan.
    #[inline]
    pub(crate) fn waits_for_mask(&self) -> bool {
        self.guided.as_ref().is_some_and(|guided| match guided.caution {
            0 => self.num_planned() >= self.max_len,
            _ => self.num_in_flight > 0 || guided.masks.is_none(),
        })
    }

    /// Number of positions before the next one that may be computed again.
    pub(crate) fn num_unsettled(&self) -> usize {
        if self.guided.is_some() { self.num_in_flight.min(self.num_computed) } else { 0 }
    }

    /// Whether its next step depends on the output of the one in flight.
    #[inline]
    pub(crate) fn waits_for_settle(&self) -> bool {
        self.beams.is_some() || self.drafting.is_some() || self.needs_token_feedback
    }

    /// Number of tokens that its next decode computes before any drafts. More than one where a recurrent state was restored; then its
    /// last step is settled.
    pub(crate) fn num_known(&self) -> usize {
        if self.num_in_flight > 0 { 1 } else { self.tokens.len().saturating_sub(self.num_computed) }
    }

    /// Takes the slot of the state before its drafts, unless one of them may still be rejected.
    pub(crate) fn take_unneeded_state(&mut self) -> Option<StateId> {
        let is_needed = self.drafting.is_some() || self.recurrent.must_restore;
        self.recurrent.before_drafts.take_if(|_| !is_needed)
    }

    /// The next token that a plan samples for this sequence.
    #[inline]
    pub(crate) fn sample(&self, slot: Slot, row: RowId) -> Sample {
        Sample { slot, sequence: self.id, row, is_constrained: self.guided.is_some(), is_void: false }
    }

    /// Removes the draft tokens from the first on that the constraint does not allow.
    pub(crate) fn keep_valid(&mut self, drafts: &mut Vec<TokenId>) {
        let Some(guided) = &mut self.guided else { return };
        let Some(RequestConstraint(constraint)) = &mut guided.constraint else { return drafts.clear() };
        let num_valid = constraint.accept_valid(drafts);
        match constraint.rollback(num_valid) {
            Ok(()) => drafts.truncate(num_valid),
            Err(_) => drafts.clear(), // The next mask fails for the same reason, and the sequence ends with it.
        }
    }

    /// Number of rows that it takes while it runs.
    pub(crate) fn num_rows(&self) -> usize {
        self.beams.as_ref().map_or(1, |beams| beams.width())
    }

    /// Number of blocks that it uses in some KV groups; a block shared by several of its beams counts once.
    pub(crate) fn num_held(&self, groups: Range<usize>) -> usize {
        let tails = self.beams.as_ref().map_or(0, |beams| beams.num_tail_blocks(groups.clone()));
        self.tables[groups].iter().map(|table| table.held().len()).sum::<usize>() + tails
    }

    /// Creates an event with the usage so far.
    #[inline]
    pub(crate) fn event(&self, tokens: SmallVec<[SampledToken; 1]>, finished: Option<FinishReason>) -> TokenEvent {
        TokenEvent {
            sequence: self.id,
            tokens,
            finished,
            blocks: self.usage,
            drafts: self.draft_usage,
            beams: Vec::new(),
            error: None,
        }
    }

    /// Whether the next position lies beyond the block tables.
    #[inline]
    pub(crate) fn needs_block(&self, block_size: usize) -> bool {
        self.num_computed == self.tables[0].len() * block_size
    }

    /// Number of blocks at its maximum length, in a KV group without a window.
    pub(crate) fn max_num_blocks(&self, block_size: usize) -> usize {
        max_num_blocks(self.num_prompt_tokens, self.max_len, self.num_rows(), block_size)
    }

    /// Number of blocks whose tokens are known and whose positions are computed by the plans made so far.
    pub(crate) fn num_known_blocks(&self, block_size: usize) -> usize {
        self.num_computed.min(self.tokens.len()) / block_size
    }

    pub(crate) fn block_tokens(&self, index: usize, block_size: usize) -> &[TokenId] {
        &self.tokens[index * block_size..(index + 1) * block_size]
    }

    /// Whether the next token can be released at once and does not end the sequence.
    #[inline]
    pub(crate) fn continues_after(&self, token: TokenId) -> bool {
        self.stopping.is_none()
            && self.guided.is_none()
            && self.tokens.len() + 1 < self.max_len
            && !self.end_ids.contains(&token)
    }

    /// Adds the next token of the output. A sequence with drafts adds it to its constraint, too; otherwise the next mask
    /// job does. Appends the tokens that may be released to `released`, and returns the reason
    /// if the sequence ends.
    ///
    /// # Errors
    /// Why the constraint does not allow the token.
    #[inline]
    pub(crate) fn accept(
        &mut self,
        sampled: SampledToken,
        released: &mut SmallVec<[SampledToken; 1]>,
    ) -> Result<Option<FinishReason>, String> {
        let is_eager = self.max_drafts > 0;
        match &mut self.guided {
            None => Ok(self.push(sampled, released)),
            Some(guided) => {
                let is_complete = match is_eager {
                    true => guided.accept(sampled.token)?,
                    false => guided.push(sampled.token).map(|()| false)?,
                };
                let finished = self.push(sampled, released);
                if is_complete && finished.is_none() {
                    released.extend(self.take_held());
                    return Ok(Some(FinishReason::Complete));
                }
                Ok(finished)
            }
        }
    }

    #[inline]
    fn push(&mut self, sampled: SampledToken, released: &mut SmallVec<[SampledToken; 1]>) -> Option<FinishReason> {
        let token = sampled.token;
        if self.end_ids.contains(&token) {
            released.extend(self.take_held());
            return Some(FinishReason::EndId(Some(token)));
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

    /// Takes the tokens that were held back because they might have become part of a stop word.
    pub(crate) fn take_held(&mut self) -> SmallVec<[SampledToken; 1]> {
        self.stopping.iter_mut().flat_map(|stopping| stopping.held.drain(..)).collect()
    }

    /// Resets the state of a row. The caller has released the blocks, or they were lost.
    pub(crate) fn reset_row(&mut self) {
        self.tables.iter_mut().for_each(Table::clear);
        self.contents.clear();
        self.guesses.clear();
        self.has_verified = false;
        self.prompt_snapshots.due.clear();
        (self.recurrent, self.adapter_slot) = (RecurrentSlots::default(), None);
        (self.num_computed, self.join_len, self.num_sent) = (0, 0, 0);
        self.guided.iter_mut().for_each(|guided| guided.needs_revision = false);
        if let Some(beams) = &mut self.beams {
            beams.restart();
        }
        (self.num_registered, self.num_ready, self.num_claimed, self.last_content) = (0, 0, 0, self.root);
        self.fetch = Fetch::NotBegun;
    }
}

impl Stopping {
    /// Adds the next token and releases those that can no longer be part of a stop word. Returns true if a stop word is
    /// complete; its tokens are dropped.
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

/// Number of blocks of a sequence at its maximum length, or of `num_beams` beams that share the full blocks of the
/// prompt. The position of the last token is never computed.
pub(crate) fn max_num_blocks(prompt_len: usize, max_len: usize, num_beams: usize, block_size: usize) -> usize {
    let num_shared = prompt_len.min(max_len - 1) / block_size;
    num_shared + num_beams * ((max_len - 1).div_ceil(block_size) - num_shared)
}
